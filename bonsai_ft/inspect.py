"""What is in a `.bonsai` file? Its kind, size, layers and quantisation, checked on the way."""

from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bonsai_ft.format import open_bonsai


def describe(path: Path) -> dict[str, Any]:
    """Everything `bonsai-ft inspect --json` prints; every checksum is verified.

    Raises BonsaiFormatError for a file that does not check out.
    """
    with open_bonsai(path) as file:
        result: dict[str, Any] = {
            "path": str(path),
            "kind": file.kind,
            "format_version": file.format_version,
            "fingerprint": file.fingerprint,
            "file_bytes": path.stat().st_size,
            "tensors": len(file.names()),
        }
        if file.kind == "adapter":
            result |= {
                "bits_per_weight": None,
                "layers": [],
                "adapter": file.config.get("adapter", {}),
                "base": file.config.get("base", {}),
                "provenance": file.config.get("provenance", {}),
                "parameters": sum(_count(file.shape(name)) for name in file.names()),
            }
            return result
        calibrated = {
            layer["name"]: layer for layer in file.config.get("calibration", {}).get("layers", [])
        }
        layers, weights, bits = [], 0, 0.0
        for layer in file.config["layers"]:
            weight = file.weight(layer["name"])
            count = weight.out_features * weight.in_features
            weights += count
            bits += weight.bits_per_weight * count
            known = calibrated.get(layer["name"], {})
            layers.append(
                {
                    "name": layer["name"],
                    "shape": [weight.out_features, weight.in_features],
                    "bits_per_weight": weight.bits_per_weight,
                    "relative_mse": known.get("relative_mse"),
                    "output_error": known.get("output_error"),
                    "packing": weight.packing,
                    "scale_group": weight.scale_group,
                    "residual": None
                    if weight.residual is None
                    else {"dim": weight.residual.dim, "k": weight.residual.k},
                }
            )
        return result | {
            "model_type": file.config["model"].get("model_type"),
            "dtype": file.config.get("dtype"),
            "quantised_weights": weights,
            "bits_per_weight": bits / weights if weights else None,
            "layers": layers,
            "quantization": file.config.get("quantization", {}),
            "provenance": file.config.get("provenance", {}),
            "files": file.files(),
        }


def describe_text(result: dict[str, Any]) -> str:
    """The same for people."""
    lines = [
        (
            f"{result['path']}: {result['kind']}, format {result['format_version']}, "
            f"{result['file_bytes'] / 1e6:.1f} MB, {result['tensors']} tensors, checksums verified"
        ),
        f"fingerprint {result['fingerprint']}",
    ]
    if result["kind"] == "adapter":
        adapter = result["adapter"]
        lines += [
            (
                f"LoRA rank {adapter.get('r')}, alpha {adapter.get('lora_alpha')}, codebooks "
                f"{'yes' if adapter.get('codebooks') else 'no'}, "
                f"{result['parameters']:,} parameters"
            ),
            f"base: {result['base'].get('source', 'unknown')}",
        ]
        return "\n".join(lines)
    lines += [
        (
            f"{result['model_type']} from {result['provenance'].get('source', 'unknown')}: "
            f"{result['quantised_weights']:,} quantised weights at "
            f"{result['bits_per_weight']:.3f} bits, the rest in {result['dtype']}"
        ),
        layer_table(result["layers"]),
    ]
    return "\n".join(lines)


def layer_table(layers: list[dict[str, Any]]) -> str:
    """One line per layer: shape, bits per weight, error of weights and of outputs."""
    table = Table(box=None, pad_edge=False)
    table.add_column("layer")
    for heading in ("shape", "bits/weight", "relative mse", "output error"):
        table.add_column(heading, justify="right")
    for layer in layers:
        table.add_row(
            layer["name"],
            " x ".join(map(str, layer["shape"])),
            f"{layer['bits_per_weight']:.3f}",
            _number(layer["relative_mse"]),
            _number(layer["output_error"]),
        )
    text = StringIO()
    Console(file=text, width=120, color_system=None).print(table)
    return text.getvalue().rstrip()


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count

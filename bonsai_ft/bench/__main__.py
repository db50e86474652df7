"""What runs in a process of its own: one request as JSON in, one answer as JSON out."""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch


def main() -> None:
    from bonsai_ft.bench.load import load_once
    from bonsai_ft.bench.step import step_memory

    request = json.loads(sys.argv[1])
    torch.set_num_threads(request.pop("threads"))
    functions: dict[str, Callable[..., Any]] = {"step": step_memory, "load": load_once}
    answer = functions[request.pop("what")](**request)
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()

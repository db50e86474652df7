"""Tokens per second of generation and of reading prompts, against transformers and llama.cpp.

    python benchmarks/decoding.py                             # SmolLM2-135M
    python benchmarks/decoding.py --source random:1b --json benchmarks/results/decode_1b.json

llama.cpp runs on random weights of the same shape (`llama_peer.py`; it needs llama-cpp-python).
"""

import dataclasses

from common import SMOLLM2, base_of, finish, parser, setup_of

from bonsai_ft.bench import measure_decode, shape_of


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--source", default=SMOLLM2, help="random:1b, a .bonsai file, or float")
    flags.add_argument("--prompt", type=int, default=16)
    flags.add_argument("--new-tokens", type=int, default=64)
    flags.add_argument("--long-prompt", type=int, default=256)
    args = flags.parse_args()
    setup = setup_of(args)
    name, base = base_of(args.source)
    others, notes = {}, []
    if setup.with_peers and args.device == "cpu":
        try:
            from llama_peer import llama_sides

            others = llama_sides(shape_of(base), name, args.threads)
        except ImportError as error:
            notes.append(f"without llama.cpp: {error}")
    report = measure_decode(
        setup,
        base,
        prompt=args.prompt,
        new_tokens=args.new_tokens,
        long_prompt=args.long_prompt,
        others=others,
    )
    finish(dataclasses.replace(report, notes=[*report.notes, *notes]), args.json)


if __name__ == "__main__":
    main()

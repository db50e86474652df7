"""Time and memory of loading a base, in fresh processes, against transformers on bfloat16 files.

python benchmarks/loading.py --json benchmarks/results/load_1b.json
"""

from common import base_of, finish, parser, setup_of

from bonsai_ft.bench import measure_load


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--source", default="random:1b", help="random:1b, a .bonsai file, or float")
    args = flags.parse_args()
    setup = setup_of(args)
    _, base = base_of(args.source)
    finish(measure_load(setup, base), args.json)


if __name__ == "__main__":
    main()

"""Where does the time of one training step go? Shares by operation, from torch's profiler.

python benchmarks/step_profile.py                         # SmolLM2-135M, 4 x 256 tokens
python benchmarks/step_profile.py --source random:1b --json benchmarks/results/profile_1b.json
"""

from common import SMOLLM2, base_of, finish, parser, setup_of

from bonsai_ft.bench.profile import measure_profile


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--source", default=SMOLLM2, help="random:1b, a .bonsai file, or float")
    flags.add_argument("--rows", type=int, default=4)
    flags.add_argument("--length", type=int, default=256)
    args = flags.parse_args()
    setup = setup_of(args)
    _, base = base_of(args.source)
    finish(measure_profile(setup, base, rows=args.rows, length=args.length), args.json)


if __name__ == "__main__":
    main()

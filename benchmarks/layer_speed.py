"""One packed layer against torch's and bitsandbytes': forward, and all gradients.

python benchmarks/layer_speed.py --json benchmarks/results/operator.json
python benchmarks/layer_speed.py --layers 4096x11008 --tokens 512,2048 --repeats 15
"""

from common import finish, parser, setup_of

from bonsai_ft.bench import measure_operator
from bonsai_ft.bench.layers import LAYERS, TOKENS


def main() -> None:
    flags = parser(__doc__, repeats=9)
    flags.add_argument("--layers", default=",".join(f"{i}x{o}" for i, o in LAYERS))
    flags.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    args = flags.parse_args()
    layers = tuple(tuple(map(int, layer.split("x"))) for layer in args.layers.split(","))
    tokens = tuple(map(int, args.tokens.split(",")))
    finish(measure_operator(setup_of(args), layers, tokens), args.json)


if __name__ == "__main__":
    main()

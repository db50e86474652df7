"""Time and memory of one training step: packed weights against PEFT LoRA and NF4 QLoRA.

All sides train LoRA of the same rank on the same layers of the same model, on the same tokens, with
gradient checkpointing, in one process, taking turns; bonsai_ft trains its codebooks besides. PEFT
computes transformers' full-vocabulary loss, as its users run it; `--same-loss` gives it bonsai_ft's
sliced loss too, so that only the layers differ. Peaks of memory are those of fresh processes.

    python benchmarks/training_step.py                        # SmolLM2-135M, 4 x 256 tokens
    python benchmarks/training_step.py --source random:1b --json benchmarks/results/step_1b.json
"""

from common import SMOLLM2, base_of, finish, parser, setup_of

from bonsai_ft.bench import measure_step


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--source", default=SMOLLM2, help="random:1b, a .bonsai file, or float")
    flags.add_argument("--rows", type=int, default=4)
    flags.add_argument("--length", type=int, default=256)
    flags.add_argument("--same-loss", action="store_true", help="PEFT with our loss as well")
    flags.add_argument("--no-memory", action="store_true")
    flags.add_argument("--no-checkpointing", action="store_true")
    args = flags.parse_args()
    setup = setup_of(args)
    _, base = base_of(args.source)
    report = measure_step(
        setup,
        base,
        rows=args.rows,
        length=args.length,
        same_loss=args.same_loss,
        with_memory=not args.no_memory,
        with_checkpointing=not args.no_checkpointing,
    )
    finish(report, args.json)


if __name__ == "__main__":
    main()

"""What can be typed? The verbs of `bonsai-ft`, their messages and exit codes.

Exit codes: 0 success, 2 a user's mistake (one message, no traceback), 130 stopped by Ctrl-C. What
goes to stdout is the result; progress and notes go to stderr. Heavy libraries are imported inside
the verbs, so that --help answers at once.
"""

import difflib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, cast

import typer

from bonsai_ft import __version__
from bonsai_ft.config import TrainConfig
from bonsai_ft.resources import resource

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

app = typer.Typer(
    name="bonsai-ft",
    help="Fine-tune ternary language models: quantise, train, evaluate, talk.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

USER_ERROR = 2
STOPPED = 130

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
ModelFile = Annotated[str, typer.Argument(metavar="MODEL", help="A .bonsai model.")]
AdapterFile = Annotated[
    str | None, typer.Option("--adapter", metavar="FILE", help="A .bonsai adapter for this model.")
]
Template = Annotated[
    str | None,
    typer.Option(
        "--template", help='Chat template instead of the model\'s: "chatml" or Jinja text.'
    ),
]


class Method(str, Enum):
    optimal = "optimal"
    paper = "paper"


class ScaleGroup(str, Enum):
    group = "128"
    channel = "channel"


# ---------------------------------------------------------------- errors


def fail(message: str) -> NoReturn:
    """Prints one message and ends with the exit code of a user's mistake."""
    sys.stderr.write(f"error: {message}\n")
    raise SystemExit(USER_ERROR)


@contextmanager
def clear_errors() -> Iterator[None]:
    """Turns what users can cause into one message without a traceback."""
    try:
        yield
    except (ValueError, OSError) as error:
        fail(_one_message(error))
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        raise SystemExit(STOPPED) from None


def _one_message(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error).strip() or type(error).__name__


def quiet_libraries() -> None:
    """Keeps other libraries' start-up chatter off the screen; their errors still show."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TQDM_DISABLE", "1")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    import datasets

    datasets.disable_progress_bars()


def show(result: Any, as_json: bool, as_text: Callable[[], str]) -> None:
    """The result on stdout, as one JSON object or as text."""
    if is_dataclass(result) and not isinstance(result, type):
        result = asdict(result)
    text = json.dumps(result, ensure_ascii=False, indent=2) if as_json else as_text()
    sys.stdout.write(text + "\n")


# ---------------------------------------------------------------- train


def train() -> None:
    """The Hydra application behind `python train.py` and `bonsai-ft train`."""
    import hydra
    from hydra.core.config_store import ConfigStore
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    ConfigStore.instance().store(name="schema", node=schema())
    # Hydra then raises instead of printing and exiting, so that messages and codes are ours
    os.environ["HYDRA_FULL_ERROR"] = "1"
    outcome: dict[str, Any] = {}

    @hydra.main(version_base="1.3", config_path=str(resource("configs")), config_name="train")
    def run(composed: DictConfig) -> None:
        from bonsai_ft.finetune import finetune

        typed = list(HydraConfig.get().overrides.task)
        config = OmegaConf.to_object(composed)
        assert isinstance(config, TrainConfig), "train.yaml does not start with the schema"
        if config.resume is not None:
            config = _resumed(config.resume, typed)
        quiet_libraries()
        is_explicit = config.resume is not None or any(
            key_of(override) == "train.total_steps" for override in typed
        )
        outcome.update(finetune(config, is_length_explicit=is_explicit))

    with clear_errors():
        _check_keys(sys.argv[1:])
        try:
            run()
        except (HydraException, OmegaConfBaseException) as error:
            fail(_hydra_message(error))
    if outcome.get("is_stopped"):
        raise SystemExit(STOPPED)


def schema() -> Any:
    """TrainConfig as OmegaConf's typed node, writable so that YAML and overrides can be merged.

    OmegaConf makes a node of a frozen dataclass read-only; `to_object` gives frozen ones back.
    """
    from omegaconf import DictConfig, OmegaConf

    node = OmegaConf.structured(TrainConfig)

    def unlock(part: DictConfig) -> None:
        OmegaConf.set_readonly(part, None)
        for name in part:
            if isinstance(child := part[name], DictConfig):
                unlock(child)

    unlock(node)
    return node


def key_of(override: str) -> str:
    """`+train.seed=1` -> `train.seed`."""
    return override.lstrip("+~").split("=", 1)[0].split("@", 1)[0]


def setting_keys(kind: type = TrainConfig, prefix: str = "") -> list[str]:
    """Every key of the training application, dotted."""
    keys = []
    for field in fields(kind):
        name = f"{prefix}{field.name}"
        keys.append(name)
        if isinstance(field.type, type) and is_dataclass(field.type):
            keys += setting_keys(field.type, f"{name}.")
    return keys


def _check_keys(arguments: list[str]) -> None:
    """Refuses a mistyped key before Hydra does, and names the nearest ones."""
    known = setting_keys()
    for argument in arguments:
        if argument.startswith("-") or "=" not in argument:
            continue
        key = key_of(argument)
        if key in known or key.split(".")[0] == "hydra" or key.startswith("data.columns."):
            continue
        near = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
        leaf = key.rsplit(".", 1)[-1]
        near += [k for k in known if k.rsplit(".", 1)[-1] == leaf and k not in near]
        hint = f"did you mean {' or '.join(near[:3])}?" if near else f"known: {', '.join(known)}"
        raise ValueError(f"{argument}: there is no setting {key}; {hint}")


def _hydra_message(error: Exception) -> str:
    """The innermost reason, with the key if it is known."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause: BaseException | None = error.__cause__
    while cause is not None:
        lines += [line.strip() for line in str(cause).splitlines() if line.strip()]
        cause = cause.__cause__
    key = next((line.removeprefix("full_key: ") for line in lines if "full_key: " in line), None)
    kept = [
        line
        for line in dict.fromkeys(lines)
        if not line.startswith(("full_key", "object_type", "reference_type", "To append"))
    ]
    text = "\n  ".join(kept)
    return f"{key}: {text}" if key and key not in kept[0] else text


def _resumed(folder: str, typed: list[str]) -> TrainConfig:
    """The config a run folder was started with; nothing else may be typed beside resume=."""
    import dataclasses

    from omegaconf import OmegaConf

    others = [o for o in typed if key_of(o) not in ("resume", "recipe")]
    if others:
        raise ValueError(
            f"resume={folder} continues the run as it was started; leave out {', '.join(others)}"
        )
    file = Path(folder) / "config.yaml"
    if not file.is_file():
        raise ValueError(f"resume={folder}: there is no {file}; give a run folder")
    try:
        merged = OmegaConf.merge(schema(), OmegaConf.load(file))
    except Exception as error:
        raise ValueError(f"{file}: {_hydra_message(error)}") from error
    config = OmegaConf.to_object(merged)
    assert isinstance(config, TrainConfig), "the schema is not TrainConfig"
    return dataclasses.replace(config, resume=folder)


@app.command(
    "train",
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    },
)
def train_verb(context: typer.Context) -> None:
    """Fine-tune: bonsai-ft train recipe=alpaca_cn train.learning_rate=1e-4 (KEY=VALUE; --help)"""
    sys.argv = ["bonsai-ft train", *context.args]
    train()


# ---------------------------------------------------------------- quantize, inspect


@app.command()
def quantize(
    source: Annotated[
        str,
        typer.Argument(
            help="Folder with config.json and safetensors, hub id, .gguf, package:NAME/FILE."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="The .bonsai file to write.")],
    method: Annotated[
        Method, typer.Option(help="How signs and scales are chosen.")
    ] = Method.optimal,
    steps: Annotated[
        str, typer.Option(help="ptq1_0, pq2_0 or both, in the order to run.")
    ] = "ptq1_0,pq2_0",
    threshold: Annotated[
        str, typer.Option(help='Method paper: a number in weight units, or "calibrated".')
    ] = "0.008",
    calibration: Annotated[
        str, typer.Option(help='Text or JSONL file, "bundled" (Chinese), or "none".')
    ] = "bundled",
    sequences: Annotated[int, typer.Option(help="Calibration sequences.")] = 128,
    length: Annotated[
        int | None, typer.Option(help="Tokens per sequence; by default what the text gives.")
    ] = None,
    residual_dim: Annotated[int, typer.Option(help="Codeword length; divides 128.")] = 128,
    residual_k: Annotated[int, typer.Option(help="Codewords per group, 2 to 256.")] = 4,
    scale_group: Annotated[
        ScaleGroup | None, typer.Option(help="One scale per 128 inputs, or per output row.")
    ] = None,
    dense: Annotated[bool, typer.Option("--dense", help="Pack 5 signs per byte, not 4.")] = False,
    skip: Annotated[
        list[str] | None, typer.Option(help="Regular expression of layers to leave alone.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of k-means.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Turn a float model into a packed ternary one.

    Example: bonsai-ft quantize HuggingFaceTB/SmolLM2-135M-Instruct smollm2.bonsai
    """
    with clear_errors():
        quiet_libraries()
        from bonsai_ft import quantize as run_quantize
        from bonsai_ft.quantize import QuantizeSettings

        if scale_group is None:
            scale_group = ScaleGroup.channel if method == Method.paper else ScaleGroup.group
        chosen = {"bundled": "", "none": None}.get(calibration, calibration)
        settings = QuantizeSettings(
            method=method.value,
            steps=tuple(step.strip() for step in steps.split(",")),
            threshold=_threshold(threshold),
            calibration=chosen,
            sequences=sequences,
            length=length,
            residual_dim=residual_dim,
            residual_k=residual_k,
            scale_group=scale_group.value,
            packing="base3" if dense else "2bit",
            skip=tuple(skip or ()),
            seed=seed,
        )
        if out.suffix != ".bonsai":
            raise ValueError(f"{out}: the file to write must end in .bonsai")
        with _bar("quantising") as progress:
            report = run_quantize(source, out, settings, progress=progress)
        result = {**asdict(report), "kind": "model", "format_version": "1"}
        show(result, as_json, lambda: _quantize_text(result))


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="A .bonsai model or adapter.")],
    as_json: AsJson = False,
) -> None:
    """Check a .bonsai file and say what is in it.

    Example: bonsai-ft inspect smollm2.bonsai
    """
    with clear_errors():
        from bonsai_ft.inspect import describe, describe_text

        result = describe(file)
        show(result, as_json, lambda: describe_text(result))


# ---------------------------------------------------------------- evaluate, generate, chat


@app.command()
def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            help="A .bonsai model, or a float source to compare with (folder, hub id, .gguf)."
        ),
    ],
    text: Annotated[
        str,
        typer.Option(
            "--text", metavar="FILE", help="Plain text, or rows (JSONL, JSON, CSV, Parquet)."
        ),
    ],
    adapter: AdapterFile = None,
    sequence_length: Annotated[int, typer.Option(help="Tokens per sequence or row.")] = 512,
    batch_size: Annotated[int, typer.Option(help="Sequences at a time.")] = 8,
    template: Template = None,
    dtype: Annotated[
        str, typer.Option(help="auto (as training chooses), float32 or bfloat16.")
    ] = "auto",
    as_json: AsJson = False,
) -> None:
    """Loss in nats per token and perplexity on a text or on the answers of a file of rows.

    Example: bonsai-ft evaluate base.bonsai --adapter run/adapter.bonsai --text run/heldout.jsonl
    """
    with clear_errors():
        if sequence_length < 2:
            raise ValueError(f"--sequence-length {sequence_length}: it must be 2 or more")
        loaded, tokenizer = _open(model, adapter, dtype)
        from bonsai_ft.evaluate import evaluate_text

        result = evaluate_text(
            loaded,
            tokenizer,
            text,
            sequence_length=sequence_length,
            batch_size=batch_size,
            template=template,
        )
        show(
            result,
            as_json,
            lambda: (
                f"loss {result.loss:.4f} nats per token, perplexity {result.perplexity:.2f} "
                f"({result.tokens} tokens in {result.rows} rows of {text})"
            ),
        )


@app.command()
def generate(
    model: ModelFile,
    adapter: AdapterFile = None,
    prompt: Annotated[str | None, typer.Option(help="What to ask.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="One prompt a line, or rows (JSONL).")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 256,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token each time.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="Sample among the likeliest, up to this mass.")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(help="For the same samples again.")] = None,
    template: Template = None,
    as_json: AsJson = False,
) -> None:
    """Answer one prompt, streaming, or a file of prompts.

    Example: bonsai-ft generate base.bonsai --adapter run/adapter.bonsai --prompt "..."
    """
    with clear_errors():
        if (prompt is None) == (prompts is None):
            raise ValueError("give either --prompt TEXT or --prompts FILE")
        conversations = _conversations(prompt, prompts, system)
        loaded, tokenizer = _open(model, adapter)
        from bonsai_ft.generate import answer

        def write(piece: str) -> None:
            sys.stdout.write(piece)
            sys.stdout.flush()

        answers = []
        for number, conversation in enumerate(conversations):
            streams = prompt is not None and not as_json
            if not streams and not as_json:
                write(f"> {conversation[-1]['content']}\n")
            [one] = answer(
                loaded,
                tokenizer,
                [conversation],
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_p=top_p,
                seed=None if seed is None else seed + number,
                template=template,
                show=write if not as_json else None,
            )
            answers.append(one)
            if not as_json:
                write("\n")
        results = [
            {"text": a.text, "tokens": a.tokens, "tokens_per_second": round(a.tokens_per_second, 2)}
            for a in answers
        ]
        if not as_json:
            seconds = sum(a.seconds for a in answers)
            tokens = sum(a.tokens for a in answers)
            sys.stderr.write(f"{tokens} tokens, {tokens / seconds:.1f} per second\n")
            return
        if prompt is not None:
            show(results[0], True, str)
            return
        seconds = sum(a.seconds for a in answers)
        tokens = sum(a.tokens for a in answers)
        total = {
            "text": "\n".join(a.text for a in answers),
            "tokens": tokens,
            "tokens_per_second": round(tokens / seconds, 2) if seconds else 0.0,
            "results": results,
        }
        show(total, True, str)


@app.command()
def chat(
    model: ModelFile,
    adapter: AdapterFile = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 512,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token each time.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="Sample among the likeliest, up to this mass.")
    ] = 1.0,
    template: Template = None,
) -> None:
    """Talk to a model; an empty line or Ctrl-D ends.

    Example: bonsai-ft chat base.bonsai --adapter run/adapter.bonsai
    """
    with clear_errors():
        loaded, tokenizer = _open(model, adapter)
        from bonsai_ft.chat import talk

        talk(
            loaded,
            tokenizer,
            system=system,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            template=template,
        )


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        sys.stdout.write(f"bonsai-ft {__version__}\n")
        raise SystemExit(0)


def main() -> None:
    """The console script."""
    app()


# ---------------------------------------------------------------- helpers


def _threshold(text: str) -> float | None:
    if text == "calibrated":
        return None
    try:
        return float(text)
    except ValueError:
        raise ValueError(f'--threshold {text}: give a number or "calibrated"') from None


def _open(
    model: str, adapter: str | None, dtype: str = "auto"
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Model and tokenizer on the device and in the dtype that training would choose."""
    quiet_libraries()
    from bonsai_ft import load_adapter, load_model, load_tokenizer
    from bonsai_ft.config import Dtype, HardwareConfig
    from bonsai_ft.finetune import choose_device, choose_dtype

    if dtype not in [d.value for d in Dtype]:
        raise ValueError(f"--dtype {dtype}: choose one of {', '.join(d.value for d in Dtype)}")
    hardware = HardwareConfig(dtype=Dtype(dtype))
    device = choose_device(hardware)
    chosen = choose_dtype(hardware, device)
    if not model.endswith(".bonsai"):
        if adapter is not None:
            raise ValueError(
                f"--adapter {adapter}: {model} is no .bonsai model; an adapter needs its base"
            )
        return _open_float(model, chosen, device)
    loaded = load_model(model, dtype=chosen, device_map=device)
    if adapter is not None:
        load_adapter(loaded, adapter)
    return loaded, load_tokenizer(model)


def _open_float(
    source: str, dtype: Any, device: str
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    from bonsai_ft.quantize.source import load_float

    model, tokenizer = load_float(source, dtype)
    return cast(Any, model).to(device), tokenizer


def _conversations(prompt: str | None, prompts: Path | None, system: str | None) -> list[list[Any]]:
    from bonsai_ft.data.sources import read_rows

    head = [{"role": "system", "content": system}] if system else []
    if prompt is not None:
        if not prompt.strip():
            raise ValueError("--prompt is empty")
        return [[*head, {"role": "user", "content": prompt}]]
    assert prompts is not None, "one of the two was checked to be there"
    if not prompts.is_file():
        raise ValueError(f"--prompts {prompts}: there is no such file")
    if prompts.suffix in (".jsonl", ".json", ".csv", ".tsv", ".parquet"):
        rows, _ = read_rows(str(prompts), for_training=False)
        asked = []
        for row in rows:
            messages = list(row.messages)
            while messages and messages[-1]["role"] == "assistant":
                messages.pop()
            asked.append([*head, *messages])
        return asked
    lines = [line.strip() for line in prompts.read_text(encoding="utf-8-sig").splitlines()]
    asked = [[*head, {"role": "user", "content": line}] for line in lines if line]
    if not asked:
        raise ValueError(f"--prompts {prompts}: the file has no prompt")
    return asked


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(what),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} {task.description}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading ...", total=None)

        def advance(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, description=name)

        yield advance


def _quantize_text(result: dict[str, Any]) -> str:
    from bonsai_ft.inspect import layer_table

    return "\n".join(
        [
            layer_table(result["layers"]),
            "",
            f"{result['path']}: {result['file_bytes'] / 1e6:.1f} MB, "
            f"{result['bits_per_weight']:.3f} bits per quantised weight, "
            f"{result['seconds']:.0f} s",
            f"calibrated on {result['calibration_sequences']} sequences "
            f"({result['calibration_tokens']} tokens), output error measured on "
            f"{result['held_out_tokens']} other tokens",
            *(f"note: {note}" for note in result["notes"]),
            f"fingerprint {result['fingerprint']}",
        ]
    )


if __name__ == "__main__":
    main()

"""What can be typed? The verbs of `bonsai-ft`, their messages and exit codes.

Exit codes: 0 success, 2 a user's mistake (one message, no traceback), 130 stopped by Ctrl-C. What
goes to stdout is the result; progress and notes go to stderr. Heavy libraries are imported inside
the verbs, so that --help answers at once.
"""

import io
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, cast

import typer

from bonsai_ft import __version__
from bonsai_ft.compose import explain, key_of, prepare, schema, typed_config
from bonsai_ft.resources import resource

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from bonsai_ft.data.sources import Message

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

# One setting, as the floors below name it and as it is typed here.
TO_FLAGS = {
    "data.template=": "--template ",
    "data.sequence_length=": "--sequence-length ",
    "hardware.dtype=": "--dtype ",
    "kernel=": "--kernel ",
    "model.source=": "",
}
TO_KEYS = {
    "--method ": "model.method=",
    "--residual-dim ": "model.residual_dim=",
    "--residual-k ": "model.residual_k=",
    "--scale-group ": "model.scale_group=",
}

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
ModelFile = Annotated[str, typer.Argument(metavar="MODEL", help="A .bonsai model.")]
AdapterFile = Annotated[
    str | None, typer.Option("--adapter", metavar="FILE", help="A .bonsai adapter for this model.")
]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token each time.")]
TopP = Annotated[float, typer.Option(help="Sample among the likeliest, up to this mass.")]
Template = Annotated[
    str | None,
    typer.Option(
        "--template", help='Chat template instead of the model\'s: "chatml" or Jinja text.'
    ),
]

Kernel = Annotated[
    str, typer.Option(help="Who computes packed layers: auto, reference, cpu or cuda.")
]


class Method(str, Enum):
    auto = "auto"
    feedback = "feedback"
    optimal = "optimal"
    paper = "paper"


class Bench(str, Enum):
    operator = "operator"
    step = "step"
    decode = "decode"
    load = "load"


class ScaleGroup(str, Enum):
    group = "128"
    channel = "channel"


# ---------------------------------------------------------------- errors


def fail(message: str) -> NoReturn:
    """Prints one message and ends with the exit code of a user's mistake."""
    sys.stderr.write(f"error: {message}\n")
    raise SystemExit(USER_ERROR)


@contextmanager
def clear_errors(words: Mapping[str, str]) -> Iterator[None]:
    """Turns what users can cause into one message without a traceback.

    `words` are replaced in it: the floors below do not know whether a setting was typed as a flag.
    """
    try:
        yield
    except BrokenPipeError:
        # whoever read our output has seen enough; Python would complain again when it closes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except (ValueError, OSError) as error:
        message = _one_message(error)
        for word, replacement in words.items():
            message = message.replace(word, replacement)
        fail(message)
    except SyntaxError as error:
        # of a user's own recipe
        fail(f"{error.filename}:{error.lineno}: {error.msg}")
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        raise SystemExit(STOPPED) from None


def _one_message(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error).strip() or type(error).__name__


def use_utf8() -> None:
    """Makes pipes speak UTF-8 whatever the locale; what a terminal cannot show is no error."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            is_own = stream.isatty() and "ascii" not in (stream.encoding or "ascii").lower()
            stream.reconfigure(encoding=None if is_own else "utf-8", errors="replace")


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
    text = json.dumps(_finite(result), ensure_ascii=False, indent=2) if as_json else as_text()
    sys.stdout.write(text + "\n")
    # a closed pipe is then noticed here and not while Python ends
    sys.stdout.flush()


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN; null stands for both."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---------------------------------------------------------------- train


def train() -> None:
    """The Hydra application behind `python train.py` and `bonsai-ft train`."""
    import hydra
    from hydra.core.config_store import ConfigStore
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf import DictConfig
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    use_utf8()
    ConfigStore.instance().store(name="schema", node=schema())
    # Hydra then raises instead of printing and exiting, so that messages and codes are ours
    os.environ["HYDRA_FULL_ERROR"] = "1"

    @hydra.main(version_base="1.3", config_path=str(resource("configs")), config_name="train")
    def run(composed: DictConfig) -> None:
        # here and not only around it: Hydra writes a line of its own about errors it sees
        with clear_errors(TO_KEYS):
            typed = list(HydraConfig.get().overrides.task)
            config = typed_config(composed, typed)
            quiet_libraries()
            from bonsai_ft.finetune import finetune

            is_explicit = config.resume is not None or any(
                key_of(override) == "train.total_steps" for override in typed
            )
            outcome = finetune(config, is_length_explicit=is_explicit)
            if outcome.get("is_stopped"):
                raise SystemExit(STOPPED)

    with clear_errors(TO_KEYS):
        sys.argv[1:] = prepare(sys.argv[1:])
        try:
            run()
            sys.stdout.flush()
        except (HydraException, OmegaConfBaseException, YAMLError) as error:
            fail(explain(error))


@app.command(
    "train",
    short_help="Fine-tune a model on your rows; settings are KEY=VALUE.",
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
            metavar="SOURCE",
            help="Folder with config.json and safetensors, hub id, .gguf, package:NAME/FILE.",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The .bonsai file to write.")],
    method: Annotated[
        Method,
        typer.Option(help="How signs and scales are chosen; auto is feedback where calibrated."),
    ] = Method.auto,
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
    with clear_errors(TO_FLAGS):
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
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .bonsai model or adapter.")],
    as_json: AsJson = False,
) -> None:
    """Check a .bonsai file and say what is in it.

    Example: bonsai-ft inspect smollm2.bonsai
    """
    with clear_errors(TO_FLAGS):
        from bonsai_ft.inspect import describe, describe_text

        result = describe(file)
        show(result, as_json, lambda: describe_text(result))


# ---------------------------------------------------------------- evaluate, generate, chat


@app.command()
def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A .bonsai model, or a float source to compare with (folder, hub id, .gguf).",
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
    kernel: Kernel = "auto",
    as_json: AsJson = False,
) -> None:
    """Loss in nats per token and perplexity on a text or on the answers of a file of rows.

    Example: bonsai-ft evaluate base.bonsai --adapter run/adapter.bonsai --text run/heldout.jsonl
    """
    with clear_errors(TO_FLAGS):
        if sequence_length < 2:
            raise ValueError(f"--sequence-length {sequence_length}: it must be 2 or more")
        if batch_size < 1:
            raise ValueError(f"--batch-size {batch_size}: it must be 1 or more")
        if not Path(text).is_file():
            raise ValueError(f"--text {text}: there is no such file")
        loaded, tokenizer = _open(model, adapter, dtype, kernel)
        from bonsai_ft.evaluate import evaluate_text

        result = evaluate_text(
            loaded,
            tokenizer,
            text,
            sequence_length=sequence_length,
            batch_size=batch_size,
            template=template,
        )
        for note in result.notes:
            sys.stderr.write(f"{note}\n")
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
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Annotated[int | None, typer.Option(help="For the same samples again.")] = None,
    template: Template = None,
    kernel: Kernel = "auto",
    as_json: AsJson = False,
) -> None:
    """Answer one prompt, streaming, or a file of prompts.

    Example: bonsai-ft generate base.bonsai --adapter run/adapter.bonsai --prompt "..."
    """
    with clear_errors(TO_FLAGS):
        if (prompt is None) == (prompts is None):
            raise ValueError("give either --prompt TEXT or --prompts FILE")
        from bonsai_ft.generate import answer, check_sampling

        check_sampling(max_new_tokens, temperature, top_p, seed)
        conversations = _conversations(prompt, prompts, system)
        loaded, tokenizer = _open(model, adapter, kernel=kernel)

        def write(piece: str) -> None:
            sys.stdout.write(piece)
            sys.stdout.flush()

        answers = []
        for number, conversation in enumerate(conversations):
            if prompts is not None and not as_json:
                write(f"> {conversation[-1]['content']}\n")
            [one] = answer(
                loaded,
                tokenizer,
                [conversation],
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_p=top_p,
                seed=None if seed is None else (seed + number) % 2**63,
                template=template,
                show=None if as_json else write,
            )
            answers.append(one)
            if not as_json:
                write("\n")
        tokens = sum(a.tokens for a in answers)
        seconds = sum(a.seconds for a in answers)
        speed = round(tokens / seconds, 2)
        if not as_json:
            sys.stderr.write(f"{tokens} tokens, {speed} per second\n")
            return
        results = [
            {"text": a.text, "tokens": a.tokens, "tokens_per_second": round(a.tokens_per_second, 2)}
            for a in answers
        ]
        if prompt is not None:
            show(results[0], True, str)
            return
        text = "\n".join(a.text for a in answers)
        total = {"text": text, "tokens": tokens, "tokens_per_second": speed, "results": results}
        show(total, True, str)


@app.command()
def chat(
    model: ModelFile,
    adapter: AdapterFile = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    template: Template = None,
    kernel: Kernel = "auto",
) -> None:
    """Talk to a model; an empty line or Ctrl-D ends.

    Example: bonsai-ft chat base.bonsai --adapter run/adapter.bonsai
    """
    with clear_errors(TO_FLAGS):
        from bonsai_ft.chat import talk
        from bonsai_ft.generate import check_sampling

        check_sampling(max_new_tokens, temperature, top_p)
        loaded, tokenizer = _open(model, adapter, kernel=kernel)

        talk(
            loaded,
            tokenizer,
            system=_text(system) if system else None,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            template=template,
        )


# ---------------------------------------------------------------- kernels, bench


@app.command()
def kernels(as_json: AsJson = False) -> None:
    """Say which kernels work on this machine, compiling them if they were not before.

    Example: bonsai-ft kernels
    """
    with clear_errors(TO_FLAGS):
        from bonsai_ft.bench.kernels import kernel_summary

        summary = kernel_summary()
        show(summary, as_json, summary.text)


@app.command()
def bench(
    name: Annotated[Bench, typer.Argument(metavar="NAME", help="operator, step, decode or load.")],
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A .bonsai model or random:1b; not for operator."),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Turns; medians are shown.")] = 5,
    peers: Annotated[bool, typer.Option(help="Measure what else could be used as well.")] = True,
    layers: Annotated[
        str | None, typer.Option(help="operator: layers as INxOUT,INxOUT; default 4096x11008.")
    ] = None,
    tokens: Annotated[str, typer.Option(help="operator: tokens.")] = "1,8,64,512,2048",
    rows: Annotated[int, typer.Option(help="step: rows of the batch.")] = 4,
    length: Annotated[int, typer.Option(help="step: tokens per row.")] = 256,
    prompt: Annotated[int, typer.Option(help="decode: tokens of the short prompt.")] = 16,
    new_tokens: Annotated[int, typer.Option(help="decode: tokens of the answer.")] = 64,
    long_prompt: Annotated[int, typer.Option(help="decode: tokens of the long prompt.")] = 256,
    threads: Annotated[int | None, typer.Option(help="CPU threads; default torch's.")] = None,
    dtype: Annotated[
        str, typer.Option(help="auto (as training chooses), float32 or bfloat16.")
    ] = "auto",
    kernel: Kernel = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure packed layers here, beside what else could be used and what the machine can do.

    Example: bonsai-ft bench step smollm2.bonsai
    """
    with clear_errors(TO_FLAGS):
        quiet_libraries()
        from bonsai_ft import bench as measuring

        if (model is None) != (name == Bench.operator):
            needs = "takes no MODEL" if model else "needs a MODEL: a .bonsai file or random:1b"
            raise ValueError(f"bench {name.value} {needs}")
        device, chosen = _place(dtype, kernel)
        if threads is not None:
            _set_threads(threads)
        setup = measuring.Setup(
            kernel=kernel,
            dtype=chosen,
            device=device,
            repeats=repeats,
            with_peers=peers,
        )
        if model is None:
            report = measuring.measure_operator(
                setup, _layers(layers or "4096x11008"), _numbers("--tokens", tokens)
            )
        else:
            base = measuring.find_model(model)
            if name == Bench.step:
                report = measuring.measure_step(setup, base, rows=rows, length=length)
            elif name == Bench.decode:
                report = measuring.measure_decode(
                    setup, base, prompt=prompt, new_tokens=new_tokens, long_prompt=long_prompt
                )
            else:
                report = measuring.measure_load(setup, base)
        result = measuring.as_json(report)
        show(result, as_json, lambda: measuring.markdown(result))


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        sys.stdout.write(f"bonsai-ft {__version__}\n")
        raise SystemExit(0)


def main() -> None:
    """The console script."""
    use_utf8()
    # Typer's usage errors have no public name; a bad value is one of them
    usage_error: Any = typer.BadParameter.__bases__[0]
    try:
        code = app(sys.argv[1:] or ["--help"], prog_name="bonsai-ft", standalone_mode=False)
    except typer.Abort:
        raise SystemExit(STOPPED) from None
    except usage_error as error:
        where = error.ctx.command_path if error.ctx else "bonsai-ft"
        fail(f"{error.format_message()} See {where} --help")
    if isinstance(code, int) and code:
        raise SystemExit(code)


# ---------------------------------------------------------------- helpers


def _threshold(text: str) -> float | None:
    if text == "calibrated":
        return None
    try:
        return float(text)
    except ValueError:
        raise ValueError(f'--threshold {text}: give a number or "calibrated"') from None


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"{flag} {text}: give whole numbers from 1, with commas between them")
    return tuple(int(part) for part in parts)


def _layers(text: str) -> tuple[tuple[int, int], ...]:
    pairs = [layer.strip().split("x") for layer in text.split(",")]
    if not all(len(pair) == 2 and all(p.isdecimal() and int(p) for p in pair) for pair in pairs):
        raise ValueError(f"--layers {text}: give INxOUT, such as 4096x11008, with commas between")
    return tuple((int(inputs), int(outputs)) for inputs, outputs in pairs)


def _set_threads(threads: int) -> None:
    import torch

    if threads < 1:
        raise ValueError(f"--threads {threads}: it must be 1 or more")
    torch.set_num_threads(threads)


def _place(dtype: str, kernel: str) -> tuple[str, Any]:
    """Device and dtype that training would choose. ValueError for flags that are not known."""
    from bonsai_ft.config import Dtype, HardwareConfig
    from bonsai_ft.finetune import choose_device, choose_dtype
    from bonsai_ft.ops import check_kernel

    if dtype not in [d.value for d in Dtype]:
        raise ValueError(f"--dtype {dtype}: choose one of {', '.join(d.value for d in Dtype)}")
    check_kernel(kernel)
    hardware = HardwareConfig(dtype=Dtype(dtype))
    device = choose_device(hardware)
    return device, choose_dtype(hardware, device)


def _open(
    model: str, adapter: str | None, dtype: str = "auto", kernel: str = "auto"
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Model and tokenizer on the device and in the dtype that training would choose."""
    quiet_libraries()
    from bonsai_ft import load_adapter, load_model, load_tokenizer

    device, chosen = _place(dtype, kernel)
    if adapter is not None and not Path(adapter).is_file():
        raise ValueError(f"--adapter {adapter}: there is no such file")
    if not model.endswith(".bonsai"):
        if adapter is not None:
            raise ValueError(
                f"--adapter {adapter}: {model} is no .bonsai model; an adapter needs its base"
            )
        return _open_float(model, chosen, device)
    loaded = load_model(model, dtype=chosen, device_map=device, kernel=kernel)
    if adapter is not None:
        load_adapter(loaded, adapter)
    return loaded, load_tokenizer(model)


def _open_float(
    source: str, dtype: Any, device: str
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    from bonsai_ft.quantize.source import load_float

    model, tokenizer = load_float(source, dtype)
    return cast(Any, model).to(device), tokenizer


def _conversations(
    prompt: str | None, prompts: Path | None, system: str | None
) -> "list[list[Message]]":
    from bonsai_ft.data.sources import read_rows

    head: list[Message] = [{"role": "system", "content": _text(system)}] if system else []
    if prompt is not None:
        if not prompt.strip():
            raise ValueError("--prompt is empty")
        return [[*head, {"role": "user", "content": _text(prompt)}]]
    assert prompts is not None, "one of the two was checked to be there"
    if not prompts.is_file():
        raise ValueError(f"--prompts {prompts}: there is no such file")
    if prompts.suffix.lower() in (".jsonl", ".json", ".csv", ".tsv", ".parquet"):
        rows, report = read_rows(str(prompts), for_training=False)
        for line in report.lines()[1:]:
            sys.stderr.write(f"{prompts}: {line}\n")
        return [_asked(row.messages, head) for row in rows]
    try:
        lines = prompts.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompts {prompts}: not UTF-8 (byte {error.start})") from error
    asked = [
        _asked([{"role": "user", "content": line.strip()}], head) for line in lines if line.strip()
    ]
    if not asked:
        raise ValueError(f"--prompts {prompts}: the file has no prompt")
    return asked


def _text(argument: str) -> str:
    """Under a locale without letters, Python smuggles bytes of an argument as lone surrogates."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return os.fsencode(argument).decode("utf-8", errors="replace")
    return argument


def _asked(messages: "list[Message]", head: "list[Message]") -> "list[Message]":
    """A row up to its last question; a system message of its own beats the one given."""
    end = len(messages)
    while messages[end - 1]["role"] == "assistant":
        end -= 1
    return messages[:end] if messages[0]["role"] == "system" else [*head, *messages[:end]]


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int, str], None]]:
    """Progress on stderr: a bar on a terminal, else a line for each tenth."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    if not sys.stderr.isatty():
        tenths = -1

        def say(done: int, total: int, name: str) -> None:
            nonlocal tenths
            if (now := 10 * done // max(total, 1)) > tenths:
                tenths = now
                sys.stderr.write(f"{what}: {done} of {total} ({name})\n")

        yield say
        return
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
            (
                f"{result['path']}: {result['file_bytes'] / 1e6:.1f} MB, "
                f"{result['bits_per_weight']:.3f} bits per quantised weight, "
                f"{result['seconds']:.0f} s"
            ),
            (
                f"calibrated on {result['calibration_sequences']} sequences "
                f"({result['calibration_tokens']} tokens), output error measured on "
                f"{result['held_out_tokens']} other tokens"
            ),
            *(f"note: {note}" for note in result["notes"]),
            f"fingerprint {result['fingerprint']}",
        ]
    )


if __name__ == "__main__":
    main()

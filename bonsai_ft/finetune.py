"""How does one typed config become a run folder with an adapter in it?

The order of a run: base, rows, model with adapter, probes, training loop, probes, files, what next.
"""

import dataclasses
import os
import shlex
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bonsai_ft.adapter import (
    TernaryLoraConfig,
    attach,
    linear_names,
    save_adapter,
    save_peft,
    trainable_groups,
)
from bonsai_ft.base_cache import find_base
from bonsai_ft.config import (
    Device,
    Dtype,
    HardwareConfig,
    Logger,
    TrainConfig,
    TrainSection,
)
from bonsai_ft.data.batches import StepPlan
from bonsai_ft.data.chat import Example, encode_rows, marked_sample
from bonsai_ft.data.sources import Row, read_rows, split_rows, write_rows
from bonsai_ft.evaluate import safe_exp
from bonsai_ft.generate import answer, pad_token_id
from bonsai_ft.model import load_model, load_tokenizer
from bonsai_ft.ops import choose_kernel
from bonsai_ft.resources import load_recipe, resource
from bonsai_ft.train.loop import Progress, train
from bonsai_ft.train.loss import check_head
from bonsai_ft.train.memory import (
    peak_memory_bytes,
    plan_memory,
    resident_bytes,
    return_large_blocks,
)
from bonsai_ft.train.optimizer import build_optimizer
from bonsai_ft.train.report import (
    Console,
    RunFolder,
    check_tracker,
    check_unused,
    environment,
    format_bytes,
    format_seconds,
    open_tracker,
)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Training and held-out rows, encoded, and what was said about them."""

    train: list[Example]
    held_out: list[Example]
    held_out_rows: list[Row]
    lines: list[str]


def finetune(config: TrainConfig, *, is_length_explicit: bool) -> dict[str, Any]:
    """Runs `config` and returns what summary.json holds.

    `is_length_explicit` says that train.total_steps was typed, so that a CPU run keeps it.
    Raises ValueError for everything a user can set wrong, before anything is written.
    """
    device = choose_device(config.hardware)
    if config.hardware.threads is not None:
        torch.set_num_threads(config.hardware.threads)
    dtype = choose_dtype(config.hardware, device)
    choose_kernel(config.kernel, device)
    check_tracker(config.logger)
    if config.run_dir and not config.resume:
        check_unused(Path(config.run_dir))
    accelerator = Accelerator(cpu=device == "cpu")
    _check_shares(config.train, accelerator)
    is_main = accelerator.is_main_process
    runtime_bytes = resident_bytes()
    with Console(enabled=is_main) as console:
        # what is quick to find wrong is looked at before the base, which may take minutes to make
        recipe = load_recipe(config.recipe.name) if config.recipe.name else None
        read = read_data(config, recipe)
        if not config.model.source.endswith(".bonsai"):
            console.print(f"base: {config.model.source}, quantised once into the cache")
        with accelerator.main_process_first():
            base, made = find_base(config.model, config.cache_dir, _base_progress(console))
        if made is not None:
            console.print(
                f"quantised {config.model.source} to {base} in {format_seconds(made.seconds)}: "
                f"{made.bits_per_weight:.2f} bits per weight, {format_bytes(made.file_bytes)}"
            )
        tokenizer = load_tokenizer(base)
        rows = encode_data(config, read, tokenizer)
        total_steps = run_length(config, device, is_length_explicit)
        _say_rows(console, rows, tokenizer)
        if total_steps != config.train.total_steps:
            console.print(
                f"on a CPU this recipe runs {total_steps} of its {config.train.total_steps} steps; "
                f"train.total_steps={config.train.total_steps} runs all of them"
            )
        # config.yaml tells the length this run has, so that a repeated or resumed one has it too
        section = dataclasses.replace(config.train, total_steps=total_steps, cpu_steps=None)
        config = dataclasses.replace(config, train=section)

        if device == "cpu":
            return_large_blocks()
        model = load_model(
            base,
            dtype=dtype,
            device_map=str(accelerator.device),
            verify=False,
            kernel=config.kernel,
        )
        check_head(model, rows.train[0].input_ids[:16])
        torch.manual_seed(config.train.seed)
        attach(model, adapter_config(config, model))
        if config.train.gradient_checkpointing:
            # older versions of transformers know only the second name, newer ones warn about it
            enable = getattr(model, "activation_checkpointing_enable", None)
            (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
        if not config.adapter.lora:
            for parameter in trainable_groups(model)["lora"]:
                parameter.requires_grad = False
        groups = trainable_groups(model)
        parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        optimizer = build_optimizer(groups, config.train, config.hardware.optimizer, device)
        longest = max(len(example.input_ids) for example in rows.train)
        plan = plan_memory(model, groups, config.train, longest, runtime_bytes=runtime_bytes)
        count = sum(p.numel() for p in parameters.values())
        console.print(
            f"training {count:,} parameters "
            f"({', '.join(f'{k} {sum(p.numel() for p in v):,}' for k, v in groups.items() if v)}) "
            f"on {device} in {str(dtype).removeprefix('torch.')}, "
            f"kernel {choose_kernel(config.kernel, device)}; "
            f"memory planned {format_bytes(plan.total_bytes)}"
        )
        folder = _open_folder(config, accelerator)
        if is_main and not config.resume:
            write_rows(folder.held_out, rows.held_out_rows)
        settings = plain(config)
        logger = config.logger if is_main else Logger.none
        tracker = open_tracker(logger, folder, settings, folder.path.name)
        probes = list(getattr(recipe, "PROBES", []))
        before = _probe(model, tokenizer, probes, config, console) if is_main else []
        accelerator.wait_for_everyone()
        try:
            progress = train(
                model=model,
                parameters=parameters,
                optimizer=optimizer,
                examples=rows.train,
                held_out=rows.held_out,
                settings=config.train,
                total_steps=total_steps,
                accelerator=accelerator,
                folder=folder,
                console=console,
                tracker=tracker,
                is_resumed=config.resume is not None,
                pad_token_id=pad_token_id(tokenizer),
            )
        finally:
            tracker.close()
        if not is_main:
            accelerator.wait_for_everyone()
            return {"is_stopped": progress.is_stopped}

        save_adapter(
            model,
            folder.adapter,
            provenance={"recipe": config.recipe.name, "steps": progress.step},
        )
        # with codebooks alone there is nothing that other tools could read
        missing = save_peft(model, folder.peft) if config.adapter.lora else []
        after = _probe(model, tokenizer, probes, config, console)
        summary = {
            **_summary(progress, config, device, plan.total_bytes, count),
            "base": str(base),
            "adapter": str(folder.adapter),
            "held_out": str(folder.held_out),
            "report": str(folder.report),
            "environment": environment(),
        }
        lacks = [f"{folder.peft} is without {text}" for text in missing]
        if not config.adapter.lora:
            lacks.append("no peft folder was written: LoRA did not train")
        notes = [*rows.lines, *lacks]
        if config.model.expected_memory:
            notes.append(f"memory expected for {config.model.name}: {config.model.expected_memory}")
        commands = next_commands(base, folder, config)
        if progress.is_stopped:
            commands.insert(0, f"python train.py resume={shlex.quote(str(folder.path))}")
        folder.write_summary(summary)
        folder.write_report(
            title=f"{config.recipe.name or 'own data'} on {config.model.name}",
            settings=settings | {"environment": summary["environment"]},
            summary=summary,
            samples=list(zip(probes, before, after, strict=True)),
            notes=notes,
            commands=commands,
        )
        _say_result(console, progress, summary, list(zip(probes, before, after, strict=True)))
        for text in lacks:
            console.print(f"note: {text}")
        console.print("next:\n" + "\n".join(f"  {command}" for command in commands))
        accelerator.wait_for_everyone()
        return {**summary, "is_stopped": progress.is_stopped}


def choose_device(hardware: HardwareConfig) -> str:
    """Raises ValueError if a GPU is asked for and there is none."""
    if hardware.device == Device.cuda and not torch.cuda.is_available():
        raise ValueError(
            "hardware.device=cuda: torch sees no GPU; use hardware=cpu or hardware=auto"
        )
    if hardware.device == Device.auto:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return hardware.device.value


def choose_dtype(hardware: HardwareConfig, device: str) -> torch.dtype:
    """Raises ValueError for float16 on a CPU."""
    if hardware.dtype != Dtype.auto:
        if hardware.dtype == Dtype.float16 and device == "cpu":
            raise ValueError("hardware.dtype=float16 is for GPUs; use bfloat16 or float32 on a CPU")
        return getattr(torch, hardware.dtype.value)
    if device == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    is_fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if is_fast else torch.float32


def _check_shares(settings: TrainSection, accelerator: Accelerator) -> None:
    """Raises ValueError if a step's micro-batches cannot be dealt to the processes evenly."""
    plan = StepPlan([1], settings.batch_size, settings.accumulation, settings.seed)
    plan.step(0, accelerator.process_index, accelerator.num_processes)


def run_length(config: TrainConfig, device: str, is_explicit: bool) -> int:
    settings = config.train
    if device == "cpu" and settings.cpu_steps is not None and not is_explicit:
        return min(settings.cpu_steps, settings.total_steps)
    return settings.total_steps


def adapter_config(config: TrainConfig, model: PreTrainedModel) -> TernaryLoraConfig:
    adapter = config.adapter
    return TernaryLoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,  # type: ignore[arg-type]  # PEFT divides it, so it may be 0.5
        lora_dropout=adapter.dropout,
        use_rslora=adapter.rslora,
        target_modules=adapter.target_modules or linear_names(model),
        modules_to_save=adapter.modules_to_save,
        codebooks=adapter.codebooks,
    )


def read_data(config: TrainConfig, recipe: Any) -> tuple[list[Row], list[Row], list[str]]:
    """Training rows, held-out rows, and what is to be said about them.

    Raises ValueError if there is no data or a row cannot be used, naming file and line.
    """
    data = config.data
    path = data.path
    if path is None:
        if recipe is None or not hasattr(recipe, "DATASET"):
            raise ValueError(
                "data.path is empty and no recipe brings its own data; set one of them"
            )
        own = resource("recipes") / recipe.DATASET
        path = str(own) if own.is_file() else recipe.DATASET
    # columns may be renamed and other shapes detected only when the recipe does not decide itself
    uses_recipe = data.path is None and recipe is not None
    conversation = getattr(recipe, "conversation", None) if uses_recipe else None
    rows, report = read_rows(
        path, columns=data.columns, split=data.split, conversation=conversation
    )
    if data.held_out_path is not None:
        training = rows
        held_out, _ = read_rows(data.held_out_path, columns=data.columns)
    else:
        training, held_out = split_rows(rows, data.held_out_fraction, config.train.seed)
    for label, part in (("training", training), ("held-out", held_out)):
        if not part:
            raise ValueError(f"data.path={path}: no {label} rows are left; give more rows")
    return training, held_out, [f"data: {path}", *report.lines()]


def encode_data(
    config: TrainConfig,
    read: tuple[list[Row], list[Row], list[str]],
    tokenizer: PreTrainedTokenizerBase,
) -> Rows:
    """Token ids and masks of what `read_data` gave.

    Raises ValueError if no row fits, or the chat template does not fit the rows.
    """
    data = config.data
    training, held_out, lines = read
    encoded = []
    for label, part in (("training", training), ("held-out", held_out)):
        examples, report = encode_rows(
            part, tokenizer, sequence_length=data.sequence_length, chat_template=data.template
        )
        if not examples:
            raise ValueError(
                f"no {label} row fits data.sequence_length={data.sequence_length}; raise it"
            )
        lines = lines + [f"{label}: {line}" for line in report.lines()]
        encoded.append(examples)
    return Rows(train=encoded[0], held_out=encoded[1], held_out_rows=held_out, lines=lines)


def next_commands(base: Path, folder: RunFolder, config: TrainConfig) -> list[str]:
    files = shlex.quote(str(base)), shlex.quote(str(folder.adapter))
    chosen = f"{files[0]} --adapter {files[1]}"
    if config.data.template is not None:
        chosen += f" --template {shlex.quote(config.data.template)}"
    program = _program()
    dtype = config.hardware.dtype
    as_trained = "" if dtype == Dtype.auto else f" --dtype {dtype.value}"
    text = f"--text {shlex.quote(str(folder.held_out))}"
    length = f"--sequence-length {config.data.sequence_length}"
    return [
        f"{program} chat {chosen}",
        f'{program} generate {chosen} --prompt "你是谁？"',
        f"{program} evaluate {chosen} {text} {length}{as_trained}",
    ]


def _program() -> str:
    # `make train` runs inside .venv without activating it
    local = Path(".venv/bin/bonsai-ft")
    is_inside = os.environ.get("VIRTUAL_ENV") is None and local.is_file()
    return str(local) if is_inside else "bonsai-ft"


def plain(value: Any) -> Any:
    """Dataclasses and enums as what YAML and JSON know."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def _open_folder(config: TrainConfig, accelerator: Accelerator) -> RunFolder:
    """One folder per launch: the main process makes it, the others are told."""
    box: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            if config.resume is not None:
                box[0] = str(RunFolder.open(Path(config.resume)).path)
            else:
                text = yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True)
                run_dir = Path(config.run_dir) if config.run_dir else None
                name = Path(config.recipe.name).stem if config.recipe.name else "custom"
                box[0] = str(RunFolder.create(run_dir, name, text).path)
        except ValueError as error:
            box[1] = str(error)
    box = broadcast_object_list(box)
    if box[1] is not None:
        raise ValueError(box[1])
    return RunFolder(Path(box[0]))


def _base_progress(console: Console) -> Any:
    printed = {"next": 0.0}

    def show(done: int, total: int, what: str) -> None:
        if done / total >= printed["next"]:
            console.print(f"quantising: layer {done} of {total} ({what})")
            printed["next"] = done / total + 0.1

    return show


def _probe(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    probes: list[str],
    config: TrainConfig,
    console: Console,
) -> list[str]:
    if not probes:
        return []
    console.status("asking the recipe's questions ...")
    answers = answer(
        model,
        tokenizer,
        [[{"role": "user", "content": probe}] for probe in probes],
        max_new_tokens=config.train.probe_tokens,
        template=config.data.template,
    )
    return [a.text for a in answers]


def _summary(
    progress: Progress, config: TrainConfig, device: str, planned: int, count: int
) -> dict[str, Any]:
    return {
        "recipe": config.recipe.name,
        "model": config.model.name,
        "base_eval_loss": progress.base_eval_loss,
        "final_eval_loss": progress.final_eval_loss,
        "base_perplexity": safe_exp(progress.base_eval_loss),
        "final_perplexity": safe_exp(progress.final_eval_loss),
        "first_train_loss": progress.first_train_loss,
        "last_train_loss": progress.last_train_loss,
        "steps": progress.step,
        "tokens": progress.tokens,
        "input_tokens": progress.input_tokens,
        "seconds": round(progress.seconds, 3),
        "planned_memory_bytes": planned,
        "peak_memory_bytes": peak_memory_bytes(device),
        "trainable_parameters": count,
    }


def _say_rows(console: Console, rows: Rows, tokenizer: PreTrainedTokenizerBase) -> None:
    console.print("\n".join(rows.lines))
    console.print("one row as the model sees it; what is trained stands between \u27e6 and \u27e7:")
    sample = marked_sample(rows.train[0], tokenizer)
    console.print("\n".join(f"  | {line}" for line in sample.splitlines()))


def _say_result(
    console: Console,
    progress: Progress,
    summary: dict[str, Any],
    samples: list[tuple[str, str, str]],
) -> None:
    for question, before, after in samples:
        console.print(f"> {question}\n  before: {_short(before)}\n  after:  {_short(after)}")
    verb = "stopped" if progress.is_stopped else "finished"
    console.print(
        f"{verb} after {progress.step} steps and {format_seconds(progress.seconds)}: held-out loss "
        f"{summary['base_eval_loss']:.3f} -> {summary['final_eval_loss']:.3f} nats per token, "
        f"peak memory {format_bytes(summary['peak_memory_bytes'])} "
        f"(planned {format_bytes(summary['planned_memory_bytes'])})\n"
        f"adapter: {summary['adapter']}\nreport:  {summary['report']}"
    )


def _short(text: str, most: int = 120) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."

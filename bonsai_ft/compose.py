"""How do KEY=VALUE arguments become one typed config, and what is said when they cannot?

Hydra composes. Here stand what it is given (the schema, arguments it can read) and what becomes of
its errors: one message that names the key as it was typed and says what is allowed.
"""

import dataclasses
import difflib
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args

import yaml

from bonsai_ft.config import TrainConfig

# What OmegaConf calls its types.
_WORDS = {"Integer": "a whole number", "Float": "a number"}


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
    # the keys of this one are the user's
    OmegaConf.set_struct(node.data.columns, False)
    return node


def setting_keys(kind: type = TrainConfig, prefix: str = "") -> dict[str, Any]:
    """Every key of the training application, dotted, with its type."""
    keys: dict[str, Any] = {}
    for field in fields(kind):
        name = f"{prefix}{field.name}"
        keys[name] = field.type
        if isinstance(field.type, type) and is_dataclass(field.type):
            keys |= setting_keys(field.type, f"{name}.")
    return keys


def key_of(override: str) -> str:
    """`+train.seed=1` -> `train.seed`."""
    return override.lstrip("+~").split("=", 1)[0].split("@", 1)[0]


def prepare(arguments: list[str]) -> list[str]:
    """The same arguments as Hydra can read them: settings first, and values quoted if need be.

    Raises ValueError for options and keys that do not exist.
    """
    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise ValueError(f"{message}; --help shows what can be typed")

    parser.error = refuse  # type: ignore[method-assign]
    # Hydra itself takes no settings after an option
    overrides: list[str] = parser.parse_intermixed_args(arguments).overrides
    options = [argument for argument in arguments if argument not in overrides]
    known = setting_keys()
    for override in overrides:
        _check_key(override, known)
    return [*(_quoted_if_needed(override, known) for override in overrides), *options]


def typed_config(composed: Any, typed: list[str]) -> TrainConfig:
    """What Hydra composed, or with resume= what the run was started with, as one frozen config.

    `typed` are the overrides of the command line. Raises ValueError for values out of range.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ValueError(explain(error)) from error
    assert isinstance(config, TrainConfig), "train.yaml does not start with the schema"
    if config.resume is not None:
        config = _resumed(str(Path(config.resume).expanduser()), typed)
    keys = {key_of(override) for override in typed}
    if config.resume is None and "model.source" in keys and "model.name" not in keys:
        # the chosen model's name and memory speak of its own source
        name = Path(config.model.source.rstrip("/")).stem or "custom"
        model = dataclasses.replace(config.model, name=name, expected_memory="")
        config = dataclasses.replace(config, model=model)
    if config.run_dir is not None:
        config = dataclasses.replace(config, run_dir=str(Path(config.run_dir).expanduser()))
    return config


def explain(error: Exception) -> str:
    """An error of Hydra, OmegaConf or YAML in one message."""
    from hydra.errors import MissingConfigException, OverrideParseException

    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{mark.name}:{mark.line + 1}: not valid YAML: {error.problem}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return (
            f"{group}={name}: there is no such {group}; choose one of {', '.join(error.options)}, "
            "or bring your own with --config-dir FOLDER"
        )
    if isinstance(error, OverrideParseException):
        key = key_of(error.override)
        return (
            f"{error.override}: this value cannot be read; quote it, for the shell too: "
            f"'{key}=\"VALUE\"'"
        )
    chain: list[str] = [] if str(error) else [type(error).__name__]
    cause: BaseException | None = error
    while cause is not None:
        chain += [line.strip() for line in str(cause).splitlines() if line.strip()]
        cause = cause.__cause__
    return _reworded(list(dict.fromkeys(chain)))


def _reworded(lines: list[str]) -> str:
    """Hydra's first line says where, OmegaConf's last says why; the rest is about their insides."""
    key = next((line.removeprefix("full_key: ") for line in lines if "full_key: " in line), "")
    kept = [
        line
        for line in lines
        if not line.startswith(
            (
                "full_key",
                "object_type",
                "reference_type",
                "To append",
                "Config search path",
                "provider=",
            )
        )
    ]
    if match := re.match(r"Error merging override (.*)", kept[0]):
        where = match[1]
        key = key or key_of(where)
    elif match := re.match(r"In '(.*)': \w+ raised while composing config:", kept[0]):
        where = f"{match[1]}.yaml: {key}"
    elif kept[0].startswith("Could not override"):
        where = key
    else:
        return "\n  ".join(kept)
    return f"{where}: {_plain_reason(' '.join(kept[1:]), key)}"


def _plain_reason(reason: str, key: str) -> str:
    if match := re.search(r"Value '(.*)' of type '\w+' could not be converted to (\w+)", reason):
        return f"give {_WORDS.get(match[2], match[2])}, not {match[1] or 'nothing'}"
    if match := re.search(r"Value '(.*)' is not a valid bool", reason):
        return f"give true or false, not {match[1] or 'nothing'}"
    if match := re.search(r"Invalid value '.*', expected one of \[(.*)\]", reason):
        return f"choose one of {match[1]}"
    if "is not Optional" in reason:
        return "it cannot be null"
    if re.search(r"Key '.*' not in '.*'", reason):
        # everything in such a file is then read as part of recipe
        is_misplaced = key.startswith("recipe.")
        hint = 'does the file start with "# @package _global_"?' if is_misplaced else near(key)
        return f"there is no setting {key}; {hint}"
    return reason


def near(key: str) -> str:
    """The settings that a mistyped key may stand for."""
    known = setting_keys()
    found = difflib.get_close_matches(key, known, n=3, cutoff=0.7)
    leaf = key.rsplit(".", 1)[-1]
    found += [k for k in known if k.rsplit(".", 1)[-1] == leaf and k not in found]
    if found:
        return f"did you mean {' or '.join(found[:3])}?"
    return "--cfg job shows all there are"


def _check_key(override: str, known: dict[str, Any]) -> None:
    """Refuses a mistyped key before Hydra does."""
    key = key_of(override)
    if "=" not in override and not override.startswith("~"):
        raise ValueError(f"{override}: settings are typed as KEY=VALUE, such as recipe=alpaca_cn")
    if key in known or re.match(r"(hydra[./]|data\.columns\.)", key):
        return
    raise ValueError(f"{override}: there is no setting {key}; {near(key)}")


def _quoted_if_needed(override: str, known: dict[str, Any]) -> str:
    """Hydra's grammar has no letters beyond ASCII, and some signs in paths mean other things."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        OverridesParser.create().parse_override(override)
        return override
    except HydraException:
        key, _, text = override.partition("=")
    kind = known.get(key_of(override), str)
    if kind is str or str in get_args(kind):
        return f"{key}={_quoted(text)}"
    try:
        # {a:b} is a pair for Hydra, and for YAML only with a space
        value = yaml.safe_load(text.replace(":", ": "))
    except yaml.YAMLError:
        return override
    return f"{key}={_quoted(value)}" if isinstance(value, dict | list) else override


def _quoted(value: Any) -> str:
    from hydra.core.override_parser.types import Quote, QuotedString

    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_quoted(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_quoted, value)) + "]"
    return QuotedString(str(value), Quote.single).with_quotes()


def _resumed(folder: str, typed: list[str]) -> TrainConfig:
    """The config a run folder was started with; nothing else may be typed beside resume=."""
    from omegaconf import OmegaConf

    others = [override for override in typed if key_of(override) not in ("resume", "recipe")]
    if others:
        raise ValueError(
            f"resume={folder} continues the run as it was started; leave out {', '.join(others)}"
        )
    file = Path(folder) / "config.yaml"
    if not file.is_file():
        raise ValueError(f"resume={folder}: there is no {file}; give a run folder")
    try:
        config = OmegaConf.to_object(OmegaConf.merge(schema(), OmegaConf.load(file)))
    except Exception as error:
        # whatever somebody wrote into the file, or a disk made of it
        raise ValueError(f"{file}: {explain(error)}") from error
    assert isinstance(config, TrainConfig), "the schema is not TrainConfig"
    return dataclasses.replace(config, resume=folder)

"""What can be set, with which type and default? Every setting of a training run.

YAML files in configs/ hold numbers and are merged onto these classes by Hydra; below the command
line only these frozen dataclasses travel. Checks that need one section alone are made here.
"""

import math
from dataclasses import dataclass, field
from enum import Enum

# What an adapter file may hold at most.
MOST_RANK = 1024


class Device(str, Enum):
    """Where to train; `auto` takes a GPU if there is one."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(str, Enum):
    """Dtype of activations; `auto` is bfloat16 where the device is fast at it, else float32."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Optimizer(str, Enum):
    """`auto` is bitsandbytes' 8-bit AdamW on CUDA and torch's AdamW elsewhere."""

    auto = "auto"
    adamw = "adamw"
    adamw_8bit = "adamw_8bit"


class Schedule(str, Enum):
    """How the learning rate moves after warm-up."""

    cosine = "cosine"
    linear = "linear"
    constant = "constant"


class Logger(str, Enum):
    """Where metrics go besides metrics.jsonl; wandb runs offline unless WANDB_MODE says online."""

    none = "none"
    wandb = "wandb"
    tensorboard = "tensorboard"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The base. `source` is float weights to quantise into a cache, or a `.bonsai` file."""

    name: str = "custom"
    source: str = ""
    # quantisation of a float source; not used when `source` is a .bonsai file
    method: str = "auto"
    residual_dim: int = 128
    residual_k: int = 4
    scale_group: str = "128"
    dense: bool = False
    calibration: str | None = None
    expected_memory: str = ""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training rows. `path` is a file, a folder or a hub id; null takes the recipe's own."""

    path: str | None = None
    split: str = "train"
    # ours to the file's; not null, or no key could be set on the command line
    columns: dict[str, str] | None = field(default_factory=dict)
    sequence_length: int = 512
    held_out_fraction: float = 0.1
    held_out_path: str | None = None
    template: str | None = None

    def __post_init__(self) -> None:
        _at_least("data.sequence_length", self.sequence_length, 16)
        if not 0 < self.held_out_fraction < 1:
            raise ValueError(
                f"data.held_out_fraction={self.held_out_fraction}: give a fraction between 0 and 1"
            )


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """LoRA and codebooks. `target_modules` null means every ternary layer."""

    lora: bool = True
    codebooks: bool = True
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.05
    rslora: bool = False
    target_modules: list[str] | None = None
    modules_to_save: list[str] | None = None

    def __post_init__(self) -> None:
        _at_least("adapter.rank", self.rank, 1)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"adapter.dropout={self.dropout}: give a number from 0 to below 1")
        if self.rank > MOST_RANK:
            raise ValueError(f"adapter.rank={self.rank}: it must be {MOST_RANK} or less")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"adapter.alpha={self.alpha}: it must be above 0, and finite")
        if not self.lora and not self.codebooks:
            raise ValueError(
                "adapter.lora and adapter.codebooks are both false: nothing would train"
            )


@dataclass(frozen=True, kw_only=True)
class TrainSection:
    """The run. A step is one optimiser update on batch_size * accumulation rows."""

    total_steps: int = 500
    # the run's length on a CPU unless train.total_steps is given on the command line; null = same
    cpu_steps: int | None = None
    batch_size: int = 2
    accumulation: int = 8
    learning_rate: float = 2e-4
    codebook_learning_rate: float = 5e-3
    warmup_ratio: float = 0.03
    schedule: Schedule = Schedule.cosine
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float = 1.0
    seed: int = 0
    log_every: int = 1
    # null: a tenth of the run
    eval_every: int | None = None
    eval_batch_size: int = 8
    save_every: int | None = None
    keep_checkpoints: int = 2
    probe_tokens: int = 64
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        for name in (
            "total_steps",
            "batch_size",
            "accumulation",
            "log_every",
            "eval_batch_size",
            "keep_checkpoints",
            "probe_tokens",
        ):
            _at_least(f"train.{name}", getattr(self, name), 1)
        for name in ("cpu_steps", "eval_every", "save_every"):
            if (value := getattr(self, name)) is not None:
                _at_least(f"train.{name}", value, 1)
        for name in ("learning_rate", "codebook_learning_rate", "max_grad_norm"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise ValueError(f"train.{name}={value}: it must be above 0, and finite")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(
                f"train.weight_decay={self.weight_decay}: it must be 0 or more, and finite"
            )
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"train.seed={self.seed}: give a whole number from 0, below 2**32")
        if not 0 <= self.warmup_ratio < 1:
            raise ValueError(f"train.warmup_ratio={self.warmup_ratio}: give 0 to below 1")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"train.{name}={getattr(self, name)}: give 0 to below 1")


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """Device, dtype and optimiser."""

    device: Device = Device.auto
    dtype: Dtype = Dtype.auto
    optimizer: Optimizer = Optimizer.auto
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.threads is not None:
            _at_least("hardware.threads", self.threads, 1)
            if self.threads > 1024:
                raise ValueError(f"hardware.threads={self.threads}: it must be 1024 or less")


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """The Python half: a name in recipes/, or the path of your own .py file."""

    name: str = ""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything a run needs; config.yaml in the run folder is this, resolved."""

    recipe: RecipeConfig = field(default_factory=RecipeConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    train: TrainSection = field(default_factory=TrainSection)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    kernel: str = "auto"
    run_dir: str | None = None
    resume: str | None = None
    logger: Logger = Logger.none
    cache_dir: str | None = None


def _at_least(key: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{key}={value}: it must be {least} or more")

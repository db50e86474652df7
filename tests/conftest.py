"""What do all tests share? Seeds, tolerances, poisoned memory, and small bases of our own."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import logging

import pytest
import torch
from torch import Tensor

# RMS of the difference over RMS of the reference.
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3_5")

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# 256 bytes, three special tokens, and rows to spare as published models have them
VOCABULARY = 272

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "max_position_embeddings": 256,
    "initializer_range": 0.08,
    "bos_token_id": None,
    "eos_token_id": 257,
    "pad_token_id": 258,
}


def rms_ratio(actual: Tensor, expected: Tensor) -> float:
    """RMS of the difference over RMS of the reference; infinite where `actual` is not finite."""
    actual, expected = actual.detach().double(), expected.detach().double()
    if not bool(actual.isfinite().all()):
        return float("inf")
    size = expected.square().mean().sqrt().item() if expected.numel() else 0.0
    error = (actual - expected).square().mean().sqrt().item() if expected.numel() else 0.0
    return error / size if size else error


def assert_close(
    actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None, what: str = "tensor"
) -> None:
    """Within the bound of `dtype` (that of `actual` by default)."""
    assert actual.shape == expected.shape, f"{what}: {actual.shape} instead of {expected.shape}"
    bound = BOUNDS[dtype or actual.dtype]
    ratio = rms_ratio(actual, expected)
    if not ratio <= bound:
        worst = (actual.double() - expected.double()).abs().nan_to_num(torch.inf).argmax()
        place = tuple(int(i) for i in torch.unravel_index(worst, actual.shape))
        raise AssertionError(
            f"{what} {list(actual.shape)}: RMS ratio {ratio:.3g} exceeds {bound:g}; worst at "
            f"{place}: {actual[place]} instead of {expected[place]}"
        )


@pytest.fixture(autouse=True)
def _loggers() -> None:
    """A Hydra application run in this process has disabled every logger there was."""
    for name, logger in logging.Logger.manager.loggerDict.items():
        if name.startswith("bonsai_ft") and isinstance(logger, logging.Logger):
            logger.disabled = False


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills what `torch.empty` and its kin return with NaN: whoever forgets to write is caught."""

    def poison(function):
        def poisoned(*args, **kwargs):
            tensor = function(*args, **kwargs)
            if tensor.is_floating_point() and tensor.device.type != "meta":
                tensor.detach().fill_(torch.nan)
            return tensor

        return poisoned

    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (Tensor, "new_empty"),
    ):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))


def tiny_config(architecture: str, **changes):
    """A transformers config small enough for tests; 192 and 320 inputs leave ragged groups."""
    from transformers import LlamaConfig, Qwen2Config, Qwen3_5TextConfig, Qwen3Config

    if architecture == "llama":
        return LlamaConfig(**(_SHAPE | {"tie_word_embeddings": False} | changes))
    if architecture == "qwen2":
        shape = {key: value for key, value in _SHAPE.items() if key != "head_dim"}
        return Qwen2Config(**(shape | {"tie_word_embeddings": True} | changes))
    if architecture == "qwen3":
        return Qwen3Config(**(_SHAPE | {"tie_word_embeddings": True} | changes))
    hybrid = {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "tie_word_embeddings": False,
    }
    return Qwen3_5TextConfig(**(_SHAPE | hybrid | changes))


def byte_tokenizer():
    """A byte-level tokenizer without merges, with ChatML's special tokens and template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save_float_model(folder, architecture: str, *, dtype=torch.float32, **changes):
    """A random float model with tokenizer, as transformers saves it; returns the model."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(tiny_config(architecture, **changes), dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # transformers starts biases at 0 and norms at 1, which would hide a lost one
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            assert parameter.isfinite().all(), name
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory):
    """`tiny_base(architecture, **settings)`: the path of a small random base; made once, read only.

    `dtype` and `config` (a dict of changes) describe the float model, all else QuantizeSettings.
    """
    from bonsai_ft.quantize import quantize

    made = {}

    def make(architecture: str, *, dtype=torch.float32, config=None, **settings):
        key = repr((architecture, dtype, config, sorted(settings.items())))
        if key not in made:
            folder = tmp_path_factory.mktemp(architecture)
            save_float_model(folder / "float", architecture, dtype=dtype, **(config or {}))
            path = folder / "base.bonsai"
            settings = {"calibration": None} | settings
            quantize(str(folder / "float"), path, **settings)
            made[key] = path
        return made[key]

    return make


@pytest.fixture
def tokens() -> Tensor:
    """Two short sequences for a tiny base."""
    return torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(5))

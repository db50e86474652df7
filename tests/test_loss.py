"""Is the loss that of the full logits, without the full logits, however rows are batched?"""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import ARCHITECTURES, tiny_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    HyperCLOVAXConfig,
)

import bonsai_ft
from bonsai_ft.data.batches import Batch, collate
from bonsai_ft.data.chat import Example
from bonsai_ft.train import loss as loss_module
from bonsai_ft.train.loss import check_head, mean_loss, sliced_cross_entropy, sum_loss

# its head changes the logits, each in another way
HEADS = {
    "gemma2": (Gemma2Config, {"final_logit_softcapping": 2.0}),
    "cohere": (CohereConfig, {"logit_scale": 0.25}),
    "granite": (GraniteConfig, {"logits_scaling": 4.0}),
}


def float_model(config, dtype=torch.float64):
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


def with_head(kind, changes):
    shape = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "initializer_range": 0.5,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return float_model(kind(**(shape | changes)))


def make_examples(lengths, first_target=3, vocabulary=96):
    generator = torch.Generator().manual_seed(11)
    return [
        Example(
            torch.randint(3, vocabulary, (length,), generator=generator).tolist(),
            [index >= first_target for index in range(length)],
            line,
            "rows.jsonl",
        )
        for line, length in enumerate(lengths, 1)
    ]


def full_loss(model, batch):
    """What transformers' own forward pass and plain cross entropy say."""
    logits = model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
    targets = batch.target_mask[:, 1:]
    return F.cross_entropy(
        logits[:, :-1][targets], batch.input_ids[:, 1:][targets], reduction="sum"
    )


class Logits(TorchDispatchMode):
    """Notes how many rows of vocabulary size any operator makes at once."""

    def __init__(self, vocabulary, hidden):
        super().__init__()
        self.vocabulary, self.hidden = vocabulary, hidden
        self.rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
                continue
            # the head's weight, transposed, is as wide and not meant
            if leaf.shape[-1] == self.vocabulary and leaf.shape != (self.hidden, self.vocabulary):
                self.rows = max(self.rows, leaf.numel() // self.vocabulary)
        return result


def set_slices(monkeypatch, model, tokens):
    monkeypatch.setattr(loss_module, "SLICE_BYTES", 4 * model.config.vocab_size * tokens)


@pytest.mark.parametrize("is_trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("size", [1, 7, 23, 512], ids=lambda size: f"slices_of_{size}")
def test_sliced_cross_entropy_equals_that_of_full_logits_with_gradients(
    monkeypatch, size, is_trained
):
    model = float_model(tiny_config("llama"))
    set_slices(monkeypatch, model, size)
    head = model.lm_head.weight.requires_grad_(is_trained)
    states = torch.randn(23, model.config.hidden_size, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, model.config.vocab_size, (23,))

    expected = F.cross_entropy(states @ head.T, labels, reduction="sum")
    inputs = (states, head) if is_trained else (states,)
    expected_gradients = torch.autograd.grad(expected, inputs)
    actual = sliced_cross_entropy(model, states, labels)
    gradients = torch.autograd.grad(actual, inputs)

    assert actual.dtype == torch.float64
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=0)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-14)


def test_sums_of_16_bit_logits_are_float32():
    model = float_model(tiny_config("llama"), torch.bfloat16)
    states = torch.randn(9, model.config.hidden_size, dtype=torch.bfloat16)
    labels = torch.randint(0, model.config.vocab_size, (9,))
    assert sliced_cross_entropy(model, states, labels).dtype == torch.float32


def frozen(model):
    return model.requires_grad_(False)


def test_the_loss_of_a_frozen_head_passes_gradcheck_and_scales_exactly(monkeypatch):
    model = frozen(float_model(tiny_config("llama")))
    set_slices(monkeypatch, model, 2)
    states = torch.randn(3, model.config.hidden_size, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, model.config.vocab_size, (3,))
    assert torch.autograd.gradcheck(
        lambda x: 0.3 * sliced_cross_entropy(model, x, labels), (states,), fast_mode=True
    )
    total = sliced_cross_entropy(model, states, labels)
    (twice,) = torch.autograd.grad(total / 3 + total * 2, states, retain_graph=True)
    (once,) = torch.autograd.grad(total, states)
    torch.testing.assert_close(twice, once * (1 / 3 + 2))


def test_a_frozen_head_in_16_bit_stays_within_rounding():
    model = frozen(float_model(tiny_config("llama")))
    exact = torch.randn(19, model.config.hidden_size, dtype=torch.float64)
    labels = torch.randint(0, model.config.vocab_size, (19,))
    half = float_model(tiny_config("llama")).to(torch.bfloat16).requires_grad_(False)
    results = []
    for one in (model, half):
        states = exact.to(one.dtype).requires_grad_()
        total = sliced_cross_entropy(one, states, labels)
        results.append((total.double(), torch.autograd.grad(total, states)[0].double()))
    (loss, gradient), (loss16, gradient16) = results
    assert abs(loss16 / loss - 1) < 1e-3
    assert (gradient16 - gradient).norm() < 2e-2 * gradient.norm()


def test_evaluation_makes_no_gradient(monkeypatch):
    model = frozen(float_model(tiny_config("llama"), torch.float32))
    monkeypatch.setattr(torch, "mm", None)
    states = torch.randn(5, model.config.hidden_size)
    labels = torch.randint(0, model.config.vocab_size, (5,))
    with torch.inference_mode():
        assert sliced_cross_entropy(model, states, labels) > 0


def test_a_frozen_heads_logits_are_made_once_and_a_trained_ones_twice(monkeypatch):
    model = float_model(tiny_config("llama"), torch.float32)
    calls = []
    made = model.lm_head.forward
    states = torch.randn(5, model.config.hidden_size, requires_grad=True)
    labels = torch.randint(0, model.config.vocab_size, (5,))
    size = (model.config.vocab_size, model.config.hidden_size)
    for is_trained, kept in ((False, 0), (True, 2)):
        calls.clear()
        model.lm_head.weight.requires_grad_(is_trained)
        if is_trained:
            model.lm_head.forward = lambda x: calls.append(1) or made(x)
        with Logits(*size):
            sliced_cross_entropy(model, states, labels).backward()
        assert len(calls) == kept


MEMORY = """
import gc, sys, torch
from types import SimpleNamespace
from bonsai_ft.train.loss import sliced_cross_entropy
words, tokens, hidden = 248_320, 1_024, 512
head = torch.nn.Linear(hidden, words, bias=False, device="meta", dtype=torch.bfloat16)
head = head.to_empty(device="cpu").requires_grad_(False)
head.weight.normal_(std=0.02)
config = SimpleNamespace(vocab_size=words)
config.get_text_config = lambda: config
model = SimpleNamespace(get_output_embeddings=lambda: head, config=config)
states = torch.randn(tokens, hidden).bfloat16().requires_grad_()
labels = torch.randint(0, words, (tokens,))
(states[:1] @ head.weight.T).sum().backward()

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

open("/proc/self/clear_refs", "w").write("5")
before = peak()
sliced_cross_entropy(model, states, labels).backward()
print((peak() - before) / 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_a_vocabulary_of_248320_adds_less_than_300_mb():
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True
    )
    assert 50 < float(done.stdout) < 300


@pytest.mark.parametrize("is_trained", [True, False], ids=["trained", "frozen"])
def test_logits_of_all_tokens_are_never_held_in_forward_or_backward(monkeypatch, is_trained):
    model = float_model(tiny_config("llama"), torch.float32)
    model.lm_head.requires_grad_(is_trained)
    set_slices(monkeypatch, model, 8)
    batch = collate(make_examples([30, 21]))
    size = (model.config.vocab_size, model.config.hidden_size)
    with Logits(*size) as spy:
        sum_loss(model, batch).backward()
    assert 0 < spy.rows <= 8
    # the spy sees what it should: the usual way holds them all
    with Logits(*size) as spy:
        full_loss(model, batch)
    assert spy.rows >= batch.num_targets


def test_logits_are_made_again_in_backward_and_not_kept_for_it():
    model = float_model(tiny_config("llama"), torch.float32)
    batch = collate(make_examples([30, 21]))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        sum_loss(model, batch)
    assert kept
    assert not [shape for shape in kept if shape and shape[-1] == model.config.vocab_size]


def test_positions_that_are_no_targets_never_reach_the_head():
    model = float_model(tiny_config("llama"), torch.float32)
    batch = collate(make_examples([30], first_target=28))
    with Logits(model.config.vocab_size, model.config.hidden_size) as spy:
        sum_loss(model, batch)
    assert spy.rows == batch.num_targets == 2


def test_batch_without_targets_costs_nothing_and_can_still_go_backward():
    model = float_model(tiny_config("llama"), torch.float32)
    batch = collate(make_examples([10], first_target=10))
    loss = sum_loss(model, batch)
    loss.backward()
    assert loss.item() == 0
    assert not model.model.layers[0].mlp.up_proj.weight.grad.any()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_padding_on_the_right_without_a_mask_changes_no_row(tiny_base, architecture):
    model = bonsai_ft.load_model(tiny_base(architecture), dtype=torch.float32)
    examples = make_examples([9, 40, 17], vocabulary=256)
    together = sum_loss(model, collate(examples, 258)).item()
    alone = sum(sum_loss(model, unpadded(example)).item() for example in examples)
    masked = full_loss(model, collate(examples, 258)).item()
    assert together == pytest.approx(alone, rel=1e-5)
    assert together == pytest.approx(masked, rel=1e-5)


def unpadded(example):
    ids = torch.tensor([example.input_ids])
    return Batch(ids, torch.ones_like(ids), torch.tensor([example.labels_mask]), [example.line])


def test_token_that_pads_does_not_matter():
    model = float_model(tiny_config("llama"))
    examples = make_examples([9, 26])
    losses = [sum_loss(model, collate(examples, pad)).item() for pad in (0, 258)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


@pytest.mark.parametrize("name", HEADS)
def test_heads_with_caps_and_scales_give_the_models_own_loss(name):
    model = with_head(*HEADS[name])
    batch = collate(make_examples([12, 20]))
    assert sum_loss(model, batch).item() == pytest.approx(full_loss(model, batch).item(), rel=1e-10)


@pytest.mark.parametrize("name", HEADS)
def test_heads_with_caps_and_scales_pass_the_check(name):
    check_head(with_head(*HEADS[name]), [3, 4, 5, 6])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_ordinary_heads_pass_the_check(tiny_base, architecture, dtype):
    check_head(bonsai_ft.load_model(tiny_base(architecture), dtype=dtype), [3, 4, 5, 6])


def test_head_that_is_not_understood_is_refused():
    # multiplies where Granite, with a setting of the same name, divides
    model = with_head(HyperCLOVAXConfig, {"logits_scaling": 0.25})
    with pytest.raises(ValueError, match=r"HyperCLOVAX.*does not know"):
        check_head(model, [3, 4, 5, 6])


def test_mean_loss_does_not_depend_on_the_batch_size_and_counts_targets():
    model = float_model(tiny_config("llama"))
    examples = make_examples([9, 26, 14, 30, 5])
    whole, tokens = mean_loss(model, [collate(examples)])
    single, same = mean_loss(model, [collate([example]) for example in examples])
    assert tokens == same == sum(sum(example.labels_mask[1:]) for example in examples)
    assert whole == pytest.approx(single, rel=1e-12)


def test_mean_loss_leaves_no_graph_and_the_mode_as_it_was():
    model = float_model(tiny_config("llama", attention_dropout=0.5))
    batches = [collate(make_examples([9, 26]))]
    in_evaluation, _ = mean_loss(model.eval(), batches)
    assert not model.training
    in_training, _ = mean_loss(model.train(), batches)
    assert model.training
    assert in_training == in_evaluation
    assert all(p.grad is None for p in model.parameters())


def test_mean_loss_of_nothing_is_not_a_number():
    loss, tokens = mean_loss(float_model(tiny_config("llama")), [])
    assert math.isnan(loss)
    assert tokens == 0

"""Nothing of a packed base exists as floats while it trains, and the plan names what does exist."""

import gc
import platform
import subprocess
import sys

import pytest
import torch

from bonsai_ft.adapter import TernaryLoraConfig, attach, linear_names, trainable_groups
from bonsai_ft.api import load_model
from bonsai_ft.config import TrainSection
from bonsai_ft.data.batches import Batch
from bonsai_ft.model import TernaryLinear, decode_weight
from bonsai_ft.train.loss import sum_loss
from bonsai_ft.train.memory import plan_memory


def training_model(path):
    model = load_model(path, device_map="cpu")
    attach(model, TernaryLoraConfig(r=4, target_modules=linear_names(model)))
    return model.train()


def float_tensors_of_weight_shape(model):
    """Living float tensors as large as a packed layer, both ways round, by identity."""
    shapes = set()
    for module in model.modules():
        if isinstance(module, TernaryLinear):
            shapes |= {
                (module.out_features, module.in_features),
                (module.in_features, module.out_features),
            }
    gc.collect()
    return {
        id(x): tuple(x.shape)
        for x in gc.get_objects()
        if isinstance(x, torch.Tensor) and x.is_floating_point() and tuple(x.shape) in shapes
    }


def test_no_float_copy_of_a_layer_lives_between_forward_and_backward_or_after(tiny_base):
    # 7 tokens and 5 rows: no activation can have the shape of a weight
    path = tiny_base("llama")
    model = training_model(path)
    for module in (m for m in model.modules() if isinstance(m, TernaryLinear)):
        dense = module.in_features * module.out_features
        assert all(p.numel() < dense for p in module.parameters() if p.is_floating_point())
    # other tests of the session may have left some
    before = float_tensors_of_weight_shape(model)
    ids = torch.randint(0, 200, (5, 7))
    batch = Batch(ids, torch.ones_like(ids), torch.ones_like(ids, dtype=torch.bool), [])
    loss = sum_loss(model, batch)
    assert float_tensors_of_weight_shape(model).items() <= before.items()
    loss.backward()
    assert float_tensors_of_weight_shape(model).items() <= before.items()
    # the search does find such a tensor
    decoded = decode_weight(next(m for m in model.modules() if isinstance(m, TernaryLinear)))
    assert id(decoded) in float_tensors_of_weight_shape(model)


def test_the_base_is_counted_packed(tiny_base):
    model = training_model(tiny_base("llama"))
    plan = plan_memory(model, trainable_groups(model), TrainSection(), longest=64)
    packed = sum(m.ternary.nbytes for m in model.modules() if isinstance(m, TernaryLinear))
    dense = sum(
        4 * m.in_features * m.out_features for m in model.modules() if isinstance(m, TernaryLinear)
    )
    plain = model.get_input_embeddings().weight.nbytes
    assert packed < plan.base_bytes < plain * 2 + dense / 4


def test_checkpointing_lowers_the_planned_activations(tiny_base):
    model = training_model(tiny_base("llama"))
    groups = trainable_groups(model)
    plain = plan_memory(model, groups, TrainSection(), longest=64)
    less = plan_memory(model, groups, TrainSection(gradient_checkpointing=True), longest=64)
    assert less.activation_bytes < plain.activation_bytes
    assert less.total_bytes < plain.total_bytes


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps freed blocks")
def test_a_large_block_goes_back_to_the_system_when_it_is_freed():
    script = """
import torch
from bonsai_ft.train.memory import RETURNED_BYTES, resident_bytes, return_large_blocks
assert return_large_blocks()
torch.ones(RETURNED_BYTES // 4)  # would move glibc's own limit above the blocks that follow
before = resident_bytes()
kept = []
for _ in range(8):
    block = torch.ones(RETURNED_BYTES // 4)
    kept.append(torch.ones(1 << 18))  # 1 MiB above it: the heap could not shrink past this one
    del block
print(resident_bytes() - before)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 16 << 20

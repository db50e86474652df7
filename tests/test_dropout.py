"""Is dropout from a seed dropout, the same in C++ and in torch, and never stored?"""

import pytest
import torch

from bonsai_ft.adapter.lora import _AddLowRank
from bonsai_ft.ops import dropout as module
from bonsai_ft.ops.dropout import dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("count", [0, 1, 3, 255, 256, 257, 4096, 4097, 9001])
def test_compiled_and_plain_masks_are_one(count, dtype):
    x = torch.randn(count).to(dtype)
    for seed in (0, 5, 2**62 + 12345, 2**63 - 2):
        for p in (0.05, 0.5, 0.999):
            compiled, plain = dropout(x, p, seed), module._reference(x, p, seed)
            assert compiled.dtype == plain.dtype == dtype
            assert torch.equal(compiled == 0, plain == 0)
            assert torch.allclose(compiled.float(), plain.float(), rtol=1e-2)


def test_the_share_and_the_scale_are_right():
    x = torch.ones(4_000_000)
    y = dropout(x, 0.1, 17)
    assert abs((y == 0).float().mean().item() - 0.1) < 1e-3
    assert abs(y.mean().item() - 1) < 1e-3
    assert set(y.unique().tolist()) == {0.0, y.max().item()}


def test_neighbours_and_seeds_are_independent():
    kept = torch.stack([dropout(torch.ones(400_000), 0.5, seed) != 0 for seed in (1, 2)]).double()
    for lag in (1, 2, 3, 4, 5, 16):
        assert abs(torch.corrcoef(torch.stack((kept[0, lag:], kept[0, :-lag])))[0, 1]) < 0.01
    assert abs(torch.corrcoef(kept)[0, 1]) < 0.01


def test_threads_do_not_change_the_mask():
    x = torch.randn(100_003)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(dropout(x, 0.3, 9))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_the_gradient_has_the_same_mask():
    x = torch.randn(6, 50, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: dropout(x, 0.4, 3), (x,))
    y = dropout(x, 0.4, 3)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient == 0, y == 0)


def test_opcheck_passes():
    x = torch.randn(3, 7, requires_grad=True)
    torch.library.opcheck(dropout, (x, 0.2, 5))


def test_strides_do_not_matter():
    x = torch.randn(20, 30)
    assert torch.equal(dropout(x.T.contiguous().T, 0.3, 1), dropout(x, 0.3, 1))


@pytest.mark.parametrize("leading", [(2, 3), (), (0,)], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_the_low_rank_term_has_exact_gradients(p, leading):
    torch.manual_seed(0)
    y, x, a, b = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((*leading, 6), (*leading, 5), (4, 5), (6, 4))
    )
    # a function may not change a leaf in place
    assert torch.autograd.gradcheck(
        lambda y, x, a, b: _AddLowRank.apply(y * 1.0, x, a, b, 0.7, p, 11), (y, x, a, b)
    )
    out = _AddLowRank.apply(y * 1.0, x, a, b, 0.7, p, 11)
    expected = y + 0.7 * dropout(x, p, 11) @ a.T @ b.T if p else y + 0.7 * x @ a.T @ b.T
    assert torch.allclose(out, expected)


def test_the_low_rank_term_keeps_no_copy_of_its_input():
    y, x = torch.randn(64, 96), torch.randn(64, 80, requires_grad=True)
    a, b = torch.randn(4, 80, requires_grad=True), torch.randn(96, 4, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        _AddLowRank.apply(y, x, a, b, 1.0, 0.5, 3)
    new = [t for t in saved if t.data_ptr() not in {u.data_ptr() for u in (x, a, b)}]
    assert [tuple(t.shape) for t in new] == [(64, 4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_dropping_everything_leaves_zeros(dtype):
    assert not dropout(torch.ones(9, dtype=dtype), 1.0, 5).any()


@pytest.mark.parametrize("p", [-0.5, 1.5, float("nan")])
def test_what_is_no_probability_is_refused(p):
    with pytest.raises(ValueError, match="not a probability"):
        dropout(torch.ones(4), p, 0)

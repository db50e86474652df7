"""What is y = x W^T for a packed ternary W, in plain torch? The definition every kernel is held to.

    W = S * T + R,   R[o, s] = codewords[group(s), code[o, s]]   for sub-vector s of row o

With P = [x_s C_s^T] (tokens x S K) and Z = one_hot(codes) (out x S K), exactly:

    y    = x (S*T)^T + P Z^T              R itself is never written out
    D    = dy Z                           segment sums of dy by code
    dx_s = (dy (S*T))_s + D_s C_s
    dC_g = sum over s in g of D_s^T x_s   no [out x in] weight gradient

The one-hot products cost about K/d of a dense product (1/32 for PQ2_0). For codebooks with many
short codewords (K/d above 1/8) they would cost more than they save; there R is added to the decoded
weight, and the codebook gradient goes through one [out x 128] block at a time.

Shapes: M tokens, O output rows, I inputs, G groups of 128, S sub-vectors of length d, K codewords.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from bonsai_ft.format.packing import GROUP, unpack_codes, unpack_signs

# Above this K/d the dense form is cheaper than one-hot products.
ONE_HOT_LIMIT = 1 / 8


def scaled_signs(
    ternary: Tensor, scale: Tensor, in_features: int, packing: str, dtype: torch.dtype
) -> Tensor:
    """S * T as a dense [O, I] tensor of `dtype`."""
    weight = unpack_signs(ternary, in_features, packing, dtype=dtype)
    scale = scale.to(dtype)
    if scale.shape[1] == 1:
        return weight.mul_(scale)
    whole = in_features // GROUP
    rows = weight.shape[0]
    if whole:
        # a view of the whole groups; the row stride stays I
        groups = weight.as_strided((rows, whole, GROUP), (in_features, GROUP, 1))
        groups.mul_(scale[:, :whole, None])
    if in_features % GROUP:
        weight[:, whole * GROUP :].mul_(scale[:, whole:])
    return weight


def num_subvectors(in_features: int, dim: int) -> int:
    return -(-in_features // dim)


def subvector_codewords(codewords: Tensor, in_features: int) -> Tensor:
    """[G, K, d] -> [S, K, d]: every sub-vector sees its group's codebook."""
    dim = codewords.shape[2]
    per_group = GROUP // dim
    if per_group == 1:
        return codewords
    return codewords.repeat_interleave(per_group, dim=0)[: num_subvectors(in_features, dim)]


def one_hot(codes: Tensor, count: int, k: int, dtype: torch.dtype) -> Tensor:
    """Packed codes -> Z of shape [O, S K]."""
    indices = unpack_codes(codes, count, k)
    return (indices[..., None] == torch.arange(k, device=codes.device)).to(dtype).flatten(1)


def residual(codes: Tensor, codewords: Tensor, in_features: int) -> Tensor:
    """R as a dense [O, I] tensor in the codewords' dtype."""
    k, dim = codewords.shape[1:]
    count = num_subvectors(in_features, dim)
    indices = unpack_codes(codes, count, k)
    table = subvector_codewords(codewords, in_features)
    rows = table[torch.arange(count, device=codes.device), indices]  # [O, S, d]
    return rows.flatten(1)[:, :in_features]


def subvectors(x: Tensor, dim: int) -> Tensor:
    """[M, I] -> [S, M, d]; a short last sub-vector is padded with zeros."""
    short = -x.shape[1] % dim
    if short:
        x = F.pad(x, (0, short))
    return x.unflatten(1, (-1, dim)).transpose(0, 1)


def is_one_hot_cheaper(codewords: Tensor) -> bool:
    k, dim = codewords.shape[1:]
    return k / dim <= ONE_HOT_LIMIT


def forward(
    x: Tensor,
    ternary: Tensor,
    scale: Tensor,
    codes: Tensor | None,
    codewords: Tensor | None,
    in_features: int,
    packing: str,
) -> Tensor:
    """x [..., I] -> y [..., O] in the dtype of x."""
    x2 = x.reshape(-1, in_features)
    weight = scaled_signs(ternary, scale, in_features, packing, x.dtype)
    if codes is None or codewords is None:
        y = x2 @ weight.T
    elif is_one_hot_cheaper(codewords):
        k, dim = codewords.shape[1:]
        table = subvector_codewords(codewords.to(x.dtype), in_features)
        products = torch.bmm(subvectors(x2, dim), table.transpose(1, 2))  # [S, M, K]
        z = one_hot(codes, table.shape[0], k, x.dtype)
        # R's small term is rounded first and by itself: added to a y already rounded to bf16, most
        # of it would fall below half a step
        y = torch.addmm(products.transpose(0, 1).flatten(1) @ z.T, x2, weight.T)
    else:
        y = x2 @ _dense(weight, codes, codewords, in_features).T
    return y.view(*x.shape[:-1], ternary.shape[0])


def backward(
    dy: Tensor,
    x: Tensor,
    ternary: Tensor,
    scale: Tensor,
    codes: Tensor | None,
    codewords: Tensor | None,
    in_features: int,
    packing: str,
    need_dx: bool,
    need_dcodewords: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients for x and for the codewords; what is not needed comes back empty."""
    dy2 = dy.reshape(-1, ternary.shape[0])
    dx, dcodewords = dy.new_empty(0), dy.new_empty(0)
    if codes is None or codewords is None:
        if need_dx:
            dx = dy2 @ scaled_signs(ternary, scale, in_features, packing, dy.dtype)
        return shaped(dx, x, need_dx), dcodewords

    groups, k, dim = codewords.shape
    x2 = x.reshape(-1, in_features)
    if not is_one_hot_cheaper(codewords):
        if need_dx:
            weight = scaled_signs(ternary, scale, in_features, packing, dy.dtype)
            dx = dy2 @ _dense(weight, codes, codewords, in_features)
        if need_dcodewords:
            dcodewords = codeword_gradient_by_blocks(dy2, x2, codes, codewords, in_features)
        return shaped(dx, x, need_dx), dcodewords

    table = subvector_codewords(codewords.to(dy.dtype), in_features)
    z = one_hot(codes, table.shape[0], k, dy.dtype)
    sums = (dy2 @ z).unflatten(1, (-1, k)).transpose(0, 1)  # D, [S, M, K]
    if need_dx:
        of_residual = torch.bmm(sums, table).transpose(0, 1).flatten(1)[:, :in_features]
        weight = scaled_signs(ternary, scale, in_features, packing, dy.dtype)
        dx = torch.addmm(of_residual, dy2, weight)
    if need_dcodewords:
        per_subvector = torch.bmm(sums.transpose(1, 2), subvectors(x2, dim))  # [S, K, d]
        dcodewords = sum_by_group(per_subvector.to(codewords.dtype), groups)
    return shaped(dx, x, need_dx), dcodewords


def shaped(dx: Tensor, x: Tensor, is_needed: bool) -> Tensor:
    return dx.view(x.shape) if is_needed else dx


def _dense(weight: Tensor, codes: Tensor, codewords: Tensor, in_features: int) -> Tensor:
    # summed before the rounding to bf16: rounding S*T + R in place would lose part of a small R
    return (weight.to(codewords.dtype) + residual(codes, codewords, in_features)).to(weight.dtype)


def sum_by_group(per_subvector: Tensor, groups: int) -> Tensor:
    """[S, K, d] -> [G, K, d]."""
    count, k, dim = per_subvector.shape
    per_group = GROUP // dim
    if per_group == 1:
        return per_subvector
    short = groups * per_group - count
    if short:
        per_subvector = F.pad(per_subvector, (0, 0, 0, 0, 0, short))
    return per_subvector.view(groups, per_group, k, dim).sum(1)


def codeword_gradient_by_blocks(
    dy: Tensor, x: Tensor, codes: Tensor, codewords: Tensor, in_features: int
) -> Tensor:
    groups, k, dim = codewords.shape
    indices = unpack_codes(codes, num_subvectors(in_features, dim), k)
    gradient = torch.zeros_like(codewords)
    per_group = GROUP // dim
    for g in range(groups):
        block = dy.T @ x[:, g * GROUP : (g + 1) * GROUP]  # [O, at most 128]
        parts = subvectors(block, dim).to(codewords.dtype)  # [S of this group, O, d]
        for s, part in enumerate(parts):
            gradient[g].index_add_(0, indices[:, g * per_group + s], part)
    return gradient

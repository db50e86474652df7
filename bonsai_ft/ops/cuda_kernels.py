"""How is y = x W^T computed by the CUDA kernels?

Few tokens: a fused pass over the packed bytes (`kernels/cuda/linear_small.cu`) on the tensor
cores; no weight is written. Many tokens: blocks of W are dequantised into a workspace that stays
in the GPU's L2 cache, and cuBLAS takes them from there. Forward takes blocks of rows, dx blocks of
columns, so that no sum is carried from block to block in 16 bits. The residual's one-hot columns
stand beside S*T in the same block, so that y is rounded once (formulas in reference.py):

    y = [x | P] [S*T | Z]^T          dx = D C + dy (S*T)          dC = D^T x

Everything is plain torch but for the launches, so that tests run the same lines on the host shim of
`tests/cuda_shim`. Results do not depend on chance: no atomics, sums in fixed order.

Workspaces are ordinary torch allocations, made per call: the caching allocator hands the same
memory to the next layer on this stream without asking the driver, and while a CUDA graph is
captured it takes them from that graph's own pool. A buffer kept here would do neither.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from bonsai_ft.format.packing import GROUP, code_bits
from bonsai_ft.ops import reference
from bonsai_ft.ops.launch import Argument, Launcher
from bonsai_ft.ops.sources import PACKINGS, KernelUnavailable

# Up to here the fused pass: a block's way through memory in 16 bits takes as long as about 190
# tokens on the tensor cores, and cuBLAS itself is bound by memory for as many. Beyond 64 the fused
# pass would decode every weight more than four times. By arithmetic, not yet measured on a GPU.
FEW_TOKENS = 64
# With many short codewords P has K/d entries per input and token, which are made and gathered.
FEW_TOKENS_SHORT_CODEWORDS = 16
# One block of W. The L2 caches of the cards in use hold 24 MiB (RTX 4060) to 126 MiB (B200);
# 16 MiB leave room for x and y, and are enough work for one product to fill a GPU.
WORKSPACE_BYTES = 16 << 20

NAMES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
# bf16 terms that carry the whole of one input
TERMS = {torch.bfloat16: 1, torch.float16: 1, torch.float32: 3}

# bfloat16 on the tensor cores came with it.
OLDEST_MAJOR = 8
# Fixed by the kernels; each file's first lines say so.
COLUMNS_PER_CHUNK = 8
TOKENS_PER_TILE = 8
ROWS_PER_TILE = 16
DEQUANTIZE_THREADS, DEQUANTIZE_ROWS, DEQUANTIZE_COLUMNS = 256, 32, 256
PREPARE_THREADS, LINEAR_THREADS, SUM_THREADS = 128, 256, 32
# K * parts of one group's column stay below this: 8 KiB of partial sums per column
SUMS_PER_COLUMN = 2048
ROWS_PER_SUM = 128


@lru_cache(maxsize=1)
def launcher() -> Launcher:
    """What runs the kernels. Raises ImportError where the extra `cuda` is not installed."""
    from bonsai_ft.ops.nvrtc import NvrtcLauncher

    return NvrtcLauncher()


def describe() -> str:
    """The GPUs in use. Raises KernelUnavailable where the kernels cannot run."""
    if not torch.cuda.is_available():
        raise KernelUnavailable("torch finds no CUDA device")
    try:
        launcher()
    except ImportError as error:
        raise KernelUnavailable(str(error)) from error
    devices = range(torch.cuda.device_count())
    for index in devices:
        major, minor = torch.cuda.get_device_capability(index)
        if major < OLDEST_MAJOR:
            raise KernelUnavailable(
                f"{torch.cuda.get_device_name(index)} is of compute capability {major}.{minor}, "
                f"and the kernels need {OLDEST_MAJOR}.0"
            )
    return ", ".join(sorted({torch.cuda.get_device_name(index) for index in devices}))


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A packed weight as the kernels take it: contiguous, codewords in float32."""

    ternary: Tensor
    scale: Tensor
    codes: Tensor | None
    codewords: Tensor | None
    in_features: int
    packing: str

    @property
    def out_features(self) -> int:
        return self.ternary.shape[0]

    @property
    def groups(self) -> int:
        return -(-self.in_features // GROUP)

    @property
    def k(self) -> int:
        return 1 if self.codewords is None else self.codewords.shape[1]

    @property
    def dim(self) -> int:
        return GROUP if self.codewords is None else self.codewords.shape[2]

    @property
    def code_bits(self) -> int:
        return 1 if self.codewords is None else code_bits(self.k)

    @property
    def code_bytes(self) -> int:
        return 0 if self.codes is None else self.codes.shape[1]

    @property
    def subvectors(self) -> int:
        return 0 if self.codes is None else reference.num_subvectors(self.in_features, self.dim)

    @property
    def uses_one_hot(self) -> bool:
        return self.codewords is not None and reference.is_one_hot_cheaper(self.codewords)


def _layer(
    ternary: Tensor,
    scale: Tensor,
    codes: Tensor | None,
    codewords: Tensor | None,
    in_features: int,
    packing: str,
) -> Layer:
    has_residual = codes is not None and codewords is not None
    return Layer(
        ternary=ternary.contiguous(),
        scale=scale.contiguous(),
        codes=codes.contiguous() if codes is not None and has_residual else None,
        codewords=codewords.float().contiguous()
        if codewords is not None and has_residual
        else None,
        in_features=in_features,
        packing=packing,
    )


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
    y = x.new_empty(x2.shape[0], ternary.shape[0])
    if y.numel():
        layer = _layer(ternary, scale, codes, codewords, in_features, packing)
        is_short = layer.codewords is not None and not layer.uses_one_hot
        if x2.shape[0] <= (FEW_TOKENS_SHORT_CODEWORDS if is_short else FEW_TOKENS):
            _few(layer, x2, y)
        else:
            _many(layer, x2, y)
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
    dx, dcodewords = dy.new_empty(0), dy.new_empty(0)
    dy2 = dy.reshape(-1, ternary.shape[0])
    x2 = x.reshape(-1, in_features)
    need_dcodewords = need_dcodewords and codes is not None
    if need_dx:
        dx = dy.new_empty(x2.shape)
    if need_dcodewords and codewords is not None and not x2.shape[0]:
        dcodewords = torch.zeros_like(codewords)
    if x2.shape[0] and (need_dx or need_dcodewords):
        layer = _layer(ternary, scale, codes, codewords, in_features, packing)
        sums = _segment_sums(layer, dy2) if layer.uses_one_hot else None
        if need_dx:
            _input_gradient(layer, dy2, sums, dx)
        if need_dcodewords and codewords is not None:
            if sums is None:
                dcodewords = _codeword_gradient_by_blocks(layer, dy2, x2)
            else:
                dcodewords = _codeword_gradient(layer, sums, x2)
            dcodewords = dcodewords.to(codewords.dtype)
    return reference.shaped(dx, x, need_dx), dcodewords


def _few(layer: Layer, x: Tensor, y: Tensor) -> None:
    """y in two launches, whatever the number of tokens up to FEW_TOKENS."""
    if x.stride(1) != 1:
        x = x.contiguous()
    tokens, name = x.shape[0], NAMES[x.dtype]
    tiles = -(-tokens // TOKENS_PER_TILE)
    words = TERMS[x.dtype] * GROUP * TOKENS_PER_TILE // 2
    fragments = x.new_empty(layer.groups * tiles * words, dtype=torch.int32)
    products: Tensor | int = 0
    if layer.codewords is not None:
        rows = layer.subvectors * layer.k
        products = x.new_empty(rows, tiles * TOKENS_PER_TILE, dtype=torch.float32)
    run = launcher().launch
    run(
        "linear_small.cu",
        f"prepare_{name}",
        (layer.groups, tiles, 1),
        PREPARE_THREADS,
        (
            x,
            _or_none(layer.codewords),
            fragments,
            products,
            tokens,
            layer.in_features,
            x.stride(0),
            layer.k,
            layer.dim,
        ),
        x.device,
    )
    at_once = 1 if tiles == 1 else 2
    run(
        "linear_small.cu",
        f"linear{at_once * TOKENS_PER_TILE}_{layer.packing}_{name}",
        (-(-layer.out_features // (at_once * ROWS_PER_TILE)), -(-tiles // at_once), 1),
        LINEAR_THREADS,
        (
            fragments,
            products,
            layer.ternary,
            layer.scale,
            _or_none(layer.codes),
            y,
            tokens,
            tiles,
            layer.out_features,
            layer.groups,
            layer.ternary.shape[1],
            layer.scale.shape[1],
            layer.code_bytes,
            layer.subvectors,
            layer.k,
            layer.code_bits,
        ),
        x.device,
    )


def _or_none(tensor: Tensor | None) -> Argument:
    return 0 if tensor is None else tensor


def _many(layer: Layer, x: Tensor, y: Tensor) -> None:
    """y = [x | P] [S*T | Z]^T, a block of rows of W at a time."""
    count = layer.subvectors if layer.uses_one_hot else 0
    x = _with_products(layer, x, count)
    for begin, end in _blocks(layer.out_features, x.shape[1] * x.itemsize):
        weight = _dequantize(
            layer, x, rows=(begin, end), columns=(0, layer.in_features), subvectors=(0, count)
        )
        torch.mm(x, weight.T, out=y[:, begin:end])
        # before the next block is made, so that it gets this one's memory
        del weight


def _with_products(layer: Layer, x: Tensor, count: int) -> Tensor:
    """[x | 0 | P | 0] as wide as a dequantised block; x itself where that is the same."""
    width, added = _padded(layer.in_features), _padded(count * layer.k)
    if width + added == layer.in_features:
        return x
    result = x.new_empty(x.shape[0], width + added)
    result[:, : layer.in_features] = x
    result[:, layer.in_features : width] = 0
    if count:
        end = width + count * layer.k
        _multiply(x, _table(layer, x.dtype).transpose(1, 2), result[:, width:end])
        result[:, end:] = 0
    return result


def _padded(columns: int) -> int:
    return -(-columns // COLUMNS_PER_CHUNK) * COLUMNS_PER_CHUNK


def _blocks(total: int, bytes_each: int, multiple: int = GROUP) -> Iterator[tuple[int, int]]:
    """Ranges of rows, columns or sub-vectors that fit the workspace, of `multiple` at least."""
    size = max(multiple, WORKSPACE_BYTES // bytes_each // multiple * multiple)
    for begin in range(0, total, size):
        yield begin, min(begin + size, total)


def _dequantize(
    layer: Layer,
    like: Tensor,
    *,
    rows: tuple[int, int],
    columns: tuple[int, int] = (0, 0),
    subvectors: tuple[int, int] = (0, 0),
) -> Tensor:
    """[S*T | Z] of these rows, columns and sub-vectors; R is added where one-hot does not pay."""
    num_rows, num_columns = rows[1] - rows[0], columns[1] - columns[0]
    count = subvectors[1] - subvectors[0]
    width = _padded(num_columns) + _padded(count * layer.k)
    out = like.new_empty(num_rows, width)
    launcher().launch(
        "dequantize.cu",
        f"dequantize_{NAMES[like.dtype]}",
        (-(-width // DEQUANTIZE_COLUMNS), -(-num_rows // DEQUANTIZE_ROWS), 1),
        DEQUANTIZE_THREADS,
        (
            layer.ternary,
            layer.scale,
            _or_none(layer.codes),
            0 if layer.uses_one_hot else _or_none(layer.codewords),
            out,
            rows[0],
            num_rows,
            columns[0],
            num_columns,
            layer.ternary.shape[1],
            layer.scale.shape[1],
            layer.code_bytes,
            layer.k,
            layer.dim,
            layer.code_bits,
            subvectors[0],
            count,
            PACKINGS[layer.packing],
        ),
        like.device,
    )
    return out


def _segment_sums(layer: Layer, dy: Tensor) -> Tensor:
    """D = dy Z, [M, S K], some sub-vectors at a time."""
    k = layer.k
    sums = dy.new_empty(dy.shape[0], layer.subvectors * k)
    bytes_each = layer.out_features * k * dy.itemsize
    for begin, end in _blocks(layer.subvectors, bytes_each, COLUMNS_PER_CHUNK):
        z = _dequantize(layer, dy, rows=(0, layer.out_features), subvectors=(begin, end))
        torch.mm(dy, z[:, : (end - begin) * k], out=sums[:, begin * k : end * k])
        del z
    return sums


def _input_gradient(layer: Layer, dy: Tensor, sums: Tensor | None, dx: Tensor) -> None:
    """dx = D C + dy (S*T), a block of columns of W at a time."""
    if sums is not None:
        # R's small term is rounded by itself; the products below add to it in float32
        _multiply(sums, _table(layer, dy.dtype), dx)
    for begin, end in _blocks(layer.in_features, layer.out_features * dy.itemsize):
        weight = _dequantize(layer, dy, rows=(0, layer.out_features), columns=(begin, end))
        part, weight = dx[:, begin:end], weight[:, : end - begin]
        if sums is None:
            torch.mm(dy, weight, out=part)
        else:
            part.addmm_(dy, weight)
        del weight


def _codeword_gradient(layer: Layer, sums: Tensor, x: Tensor) -> Tensor:
    """dC_g = sum over the group's sub-vectors of D_s^T x_s, [G, K, d] in float32."""
    k, dim = layer.k, layer.dim
    whole = layer.in_features // dim
    gradient = x.new_empty(layer.subvectors, k, dim)
    if whole:
        torch.bmm(
            _subvectors(sums, k, whole).transpose(1, 2),
            _subvectors(x, dim, whole),
            out=gradient[:whole],
        )
    if whole < layer.subvectors:
        last = x[:, whole * dim :]
        gradient[whole] = 0
        gradient[whole, :, : last.shape[1]] = sums[:, whole * k :].T @ last
    return reference.sum_by_group(gradient.float(), layer.groups)


def _table(layer: Layer, dtype: torch.dtype) -> Tensor:
    """C by sub-vector, [S, K, d]."""
    assert layer.codewords is not None, "only a layer with a residual has codewords"
    per_group = GROUP // layer.dim
    by_group = layer.codewords.to(dtype)[:, None].expand(-1, per_group, -1, -1)
    return by_group.flatten(0, 1)[: layer.subvectors]


def _subvectors(tensor: Tensor, size: int, count: int) -> Tensor:
    """[M, at least count * size] -> a view [count, M, size]."""
    return tensor[:, : count * size].unflatten(1, (count, size)).transpose(0, 1)


def _multiply(a: Tensor, matrices: Tensor, out: Tensor) -> None:
    """out_s = a_s matrices_s for a [M, S p], matrices [S, p, q], out [M, S q].

    The last sub-vector of `a` or of `out` may be short, as the last one of x is.
    """
    count, p, q = matrices.shape
    whole = min(a.shape[1] // p, out.shape[1] // q)
    if whole:
        torch.bmm(_subvectors(a, p, whole), matrices[:whole], out=_subvectors(out, q, whole))
    if whole < count:
        last, last_out = a[:, whole * p :], out[:, whole * q :]
        torch.mm(last, matrices[whole, : last.shape[1], : last_out.shape[1]], out=last_out)


def _codeword_gradient_by_blocks(layer: Layer, dy: Tensor, x: Tensor) -> Tensor:
    """[G, K, d] in float32 from blocks of dy^T x, whose rows are summed by their codes."""
    assert layer.codes is not None, "only a layer with a residual has codes"
    rows, k, dim = layer.out_features, layer.k, layer.dim
    gradient = x.new_empty(layer.groups, k, dim, dtype=torch.float32)
    parts = max(1, min(SUMS_PER_COLUMN // k, rows // ROWS_PER_SUM))
    for begin, end in _blocks(layer.in_features, rows * x.itemsize):
        block = x.new_empty(rows, end - begin)
        torch.mm(dy.T, x[:, begin:end], out=block)
        first, last = begin // GROUP, -(-end // GROUP)
        sums = x.new_empty(parts, k, (last - first) * GROUP, dtype=torch.float32)
        launcher().launch(
            "codebook_gradient.cu",
            f"sum_by_code_{NAMES[x.dtype]}",
            (sums.shape[2] // SUM_THREADS, parts, 1),
            SUM_THREADS,
            (
                block,
                layer.codes,
                sums,
                rows,
                end - begin,
                begin,
                layer.code_bytes,
                k,
                dim,
                layer.code_bits,
                -(-rows // parts),
            ),
            x.device,
            4 * k * SUM_THREADS,
        )
        del block
        by_group = sums.sum(0).view(k, last - first, GROUP // dim, dim).sum(2)  # [K, g, d]
        gradient[first:last] = by_group.transpose(0, 1)
    return gradient

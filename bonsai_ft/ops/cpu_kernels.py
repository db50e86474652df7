"""How is y = x W^T computed by the compiled CPU kernels?

Few tokens: one fused pass over the packed bytes (`kernels/cpu/linear.cpp`); no weight is written.
Many tokens: blocks of W are decoded into a workspace that stays in the processor's caches, and a
library product (oneDNN, MKL) takes them from there. Forward takes blocks of rows, dx blocks of
columns, so that no sum is carried from block to block in 16 bits. The residual's one-hot columns
stand beside S*T in the same block, so that y is rounded once:

    y = [x | P] [S*T | Z]^T          dx = D C + dy (S*T)          (formulas in reference.py)

float16 products are slow on CPUs; their blocks are decoded and multiplied in float32.
"""

import ctypes
import os
import threading
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bonsai_ft.format.packing import GROUP, code_bits
from bonsai_ft.ops import reference
from bonsai_ft.ops.cpu_build import load_library
from bonsai_ft.ops.sources import PACKINGS, KernelUnavailable

# Tokens up to which the fused pass is faster than decoding a block and multiplying by it: beside
# bfloat16 products, and beside those of other dtypes. Measured on layers of 576 to 4096, 1 thread;
# neon's are avx2's.
FEW_TOKENS = {"avx512": (20, 64), "avx2": (8, 14), "neon": (8, 14), "scalar": (4, 4)}
# Rows (forward) or columns (dx) of W in one block: 512 rows of 4096 bfloat16 are 4 MiB.
BLOCK = 512
# One layer's worth of float32 at most, for layers with short rows.
BLOCK_BYTES = 4 << 20

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Layer(ctypes.Structure):
    """`struct Layer` of kernels/cpu/ternary.h, field by field."""

    _fields_ = (
        ("ternary", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("codewords", ctypes.c_void_p),
        ("out_features", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("ternary_stride", ctypes.c_int64),
        ("scale_stride", ctypes.c_int64),
        ("codes_stride", ctypes.c_int64),
        ("packing", ctypes.c_int32),
        ("code_bits", ctypes.c_int32),
        ("codewords_k", ctypes.c_int32),
        ("codewords_dim", ctypes.c_int32),
    )


class Library(NamedTuple):
    functions: Any
    instructions: str
    has_threads: bool


@lru_cache(maxsize=1)
def library() -> Library:
    """The compiled kernels. Raises KernelUnavailable where they cannot be had."""
    functions = load_library()
    i64, i32, address = ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p
    layer = ctypes.POINTER(Layer)
    functions.bonsai_choose_isa.restype = ctypes.c_char_p
    functions.bonsai_choose_isa.argtypes = [ctypes.c_char_p]
    functions.bonsai_unpack.argtypes = [layer, i64, i64, i64, i64, i32, i32, address, i64, i32]
    functions.bonsai_unpack.restype = None
    functions.bonsai_one_hot.argtypes = [layer, i64, i64, i64, i64, i32, address, i64, i32]
    functions.bonsai_one_hot.restype = None
    functions.bonsai_few_workspace.argtypes = [layer, i64, i32, i32]
    functions.bonsai_few_workspace.restype = i64
    functions.bonsai_linear_few.argtypes = [
        layer, i32, address, i64, address, i64, i64, address, i32,
    ]  # fmt: skip
    functions.bonsai_linear_few.restype = None
    functions.bonsai_codeword_products.argtypes = [layer, i32, address, i64, i64, address, i64, i32]
    functions.bonsai_codeword_products.restype = None
    functions.bonsai_codeword_gradient.argtypes = [
        layer, i32, address, i64, address, i64, i64, address, i32,
    ]  # fmt: skip
    functions.bonsai_codeword_gradient.restype = None
    functions.bonsai_dropout.argtypes = [
        address, i64, i32, ctypes.c_uint64, ctypes.c_float, address, i32,
    ]  # fmt: skip
    functions.bonsai_dropout.restype = None
    wanted = os.environ.get("BONSAI_CPU_ISA", "auto")
    chosen = functions.bonsai_choose_isa(wanted.encode())
    if chosen is None:
        raise KernelUnavailable(f"BONSAI_CPU_ISA={wanted} is not available on this processor")
    return Library(functions, chosen.decode(), bool(functions.bonsai_has_threads()))


def few_tokens(dtype: torch.dtype) -> int:
    """Tokens that the fused pass takes at most."""
    return FEW_TOKENS[library().instructions][dtype != torch.bfloat16]


def describe() -> str:
    """The instruction set and the threads in use. Raises KernelUnavailable."""
    loaded = library()
    threads = "" if loaded.has_threads else ", one thread: the compiler has no OpenMP"
    return f"{loaded.instructions}{threads}"


def layer_of(
    ternary: Tensor,
    scale: Tensor,
    codes: Tensor | None,
    codewords: Tensor | None,
    in_features: int,
    packing: str,
) -> tuple[Layer, tuple[Tensor, ...]]:
    """The C view of a packed weight, and the tensors that must outlive it."""
    ternary, scale = ternary.contiguous(), scale.contiguous()
    kept = [ternary, scale]
    layer = Layer(
        ternary=ternary.data_ptr(),
        scale=scale.data_ptr(),
        out_features=ternary.shape[0],
        in_features=in_features,
        ternary_stride=ternary.stride(0),
        scale_stride=scale.shape[1],
        packing=PACKINGS[packing],
    )
    if codes is not None and codewords is not None:
        codes, codewords = codes.contiguous(), codewords.to(torch.float32).contiguous()
        kept += [codes, codewords]
        layer.codes, layer.codewords = codes.data_ptr(), codewords.data_ptr()
        layer.codes_stride = codes.stride(0)
        layer.codewords_k, layer.codewords_dim = codewords.shape[1:]
        layer.code_bits = code_bits(codewords.shape[1])
    return layer, tuple(kept)


_local = threading.local()


def workspace(count: int, dtype: torch.dtype) -> Tensor:
    """`count` numbers of uninitialised memory that this thread uses for one call at a time."""
    size = count * dtype.itemsize
    buffer = getattr(_local, "buffer", None)
    if buffer is None or buffer.numel() < size:
        # made outside inference mode, or a later training step could not write to it
        with torch.inference_mode(False):
            buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        _local.buffer = buffer
    return buffer[:size].view(dtype)


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
    # not a view of it: only then may the caller add to it in place under autograd
    result = x.new_empty(*x.shape[:-1], ternary.shape[0])
    y = result.view(-1, ternary.shape[0])
    if y.numel():
        layer, kept = layer_of(ternary, scale, codes, codewords, in_features, packing)
        if x2.shape[0] <= few_tokens(x.dtype):
            _few(layer, x2, y)
        else:
            _many(layer, x2, y, None if codes is None else codewords)
        del kept
    return result


def _few(layer: Layer, x: Tensor, y: Tensor) -> None:
    if x.stride(1) != 1:
        x = x.contiguous()
    lib = library().functions
    threads = torch.get_num_threads()
    dtype = DTYPES[x.dtype]
    tokens = x.shape[0]
    memory = workspace(lib.bonsai_few_workspace(layer, tokens, dtype, threads), torch.uint8)
    lib.bonsai_linear_few(
        layer,
        dtype,
        x.data_ptr(),
        x.stride(0),
        y.data_ptr(),
        y.stride(0),
        tokens,
        memory.data_ptr(),
        threads,
    )


def _product_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.float16 else dtype


def _block_size(total: int, width: int, itemsize: int) -> int:
    """Rows or columns per block, a multiple of the group."""
    by_bytes = BLOCK_BYTES // (width * itemsize) // GROUP * GROUP
    return min(max(BLOCK, by_bytes), -(-total // GROUP) * GROUP)


def _many(layer: Layer, x: Tensor, y: Tensor, codewords: Tensor | None) -> None:
    dtype = _product_dtype(x.dtype)
    x = x.to(dtype)
    appended = 0
    if codewords is not None and reference.is_one_hot_cheaper(codewords):
        x, appended = _with_codeword_products(layer, x)
    width = x.shape[1]
    block = _block_size(layer.out_features, width, dtype.itemsize)
    weight = workspace(block * width, dtype).view(block, width)
    result = y if y.dtype == dtype else torch.empty_like(y, dtype=dtype)
    for begin in range(0, layer.out_features, block):
        end = min(begin + block, layer.out_features)
        columns = (0, layer.in_features)
        _unpack(layer, weight, (begin, end), columns, codewords is not None and not appended)
        if appended:
            _one_hot(layer, weight[:, layer.in_features :], (begin, end))
        torch.mm(x, weight[: end - begin].T, out=result[:, begin:end])
    if result is not y:
        y.copy_(result)


def _with_codeword_products(layer: Layer, x: Tensor) -> tuple[Tensor, int]:
    """[x | P] with P = [x_s C_s^T], and the width of P, which is S K."""
    tokens, width = x.shape
    count = reference.num_subvectors(width, layer.codewords_dim) * layer.codewords_k
    both = x.new_empty(tokens, width + count)
    both[:, :width] = x
    products = both[:, width:]
    library().functions.bonsai_codeword_products(
        layer,
        DTYPES[x.dtype],
        both.data_ptr(),
        both.stride(0),
        tokens,
        products.data_ptr(),
        products.stride(0),
        torch.get_num_threads(),
    )
    return both, count


def _unpack(
    layer: Layer,
    weight: Tensor,
    rows: tuple[int, int],
    columns: tuple[int, int],
    with_residual: bool,
) -> None:
    library().functions.bonsai_unpack(
        layer,
        *rows,
        *columns,
        with_residual,
        DTYPES[weight.dtype],
        weight.data_ptr(),
        weight.stride(0),
        torch.get_num_threads(),
    )


def _one_hot(layer: Layer, z: Tensor, rows: tuple[int, int]) -> None:
    """Z of these rows, all sub-vectors."""
    library().functions.bonsai_one_hot(
        layer,
        *rows,
        0,
        reference.num_subvectors(layer.in_features, layer.codewords_dim),
        DTYPES[z.dtype],
        z.data_ptr(),
        z.stride(0),
        torch.get_num_threads(),
    )


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
    if codes is None:
        codewords = None
    if need_dx:
        dx = dy.new_empty(x2.shape)
    if not x2.shape[0]:
        if need_dcodewords and codewords is not None:
            dcodewords = torch.zeros_like(codewords)
        return reference.shaped(dx, x, need_dx), dcodewords
    layer, kept = layer_of(ternary, scale, codes, codewords, in_features, packing)
    dtype = _product_dtype(dy.dtype)
    dy2 = dy2.to(dtype)
    sums = None
    table = None
    if codewords is not None and reference.is_one_hot_cheaper(codewords):
        table = codewords.to(dtype)
        if need_dx or need_dcodewords:
            sums = _segment_sums(layer, dy2)  # D, [M, S K]
    if need_dx:
        result = dx if dx.dtype == dtype else torch.empty_like(dx, dtype=dtype)
        is_added = codewords is not None and table is None
        _input_gradient(layer, dy2, result, sums, table, is_added)
        if result is not dx:
            dx.copy_(result)
    if need_dcodewords and codewords is not None and codes is not None:
        if sums is None:
            dcodewords = reference.codeword_gradient_by_blocks(
                dy2, x2.to(dtype), codes, codewords, in_features
            )
        else:
            dcodewords = _codeword_gradient(layer, sums, x2.to(dtype), codewords)
    del kept
    return reference.shaped(dx, x, need_dx), dcodewords


def _segment_sums(layer: Layer, dy: Tensor) -> Tensor:
    """D = dy Z, [M, S K]."""
    count = reference.num_subvectors(layer.in_features, layer.codewords_dim)
    width = count * layer.codewords_k
    z = workspace(layer.out_features * width, dy.dtype).view(layer.out_features, width)
    _one_hot(layer, z, (0, layer.out_features))
    return dy @ z


def _input_gradient(
    layer: Layer,
    dy: Tensor,
    dx: Tensor,
    sums: Tensor | None,
    table: Tensor | None,
    with_residual: bool,
) -> None:
    """dx = D C + dy (S*T), a block of columns at a time."""
    rows = layer.out_features
    block = _block_size(layer.in_features, rows, dy.dtype.itemsize)
    weight = workspace(rows * block, dy.dtype)
    for begin in range(0, layer.in_features, block):
        end = min(begin + block, layer.in_features)
        part = weight[: rows * (end - begin)].view(rows, end - begin)
        _unpack(layer, part, (0, rows), (begin, end), with_residual)
        out = dx[:, begin:end]
        if sums is None or table is None:
            torch.mm(dy, part, out=out)
        else:
            of_block, diagonal = _diagonal(sums, table, begin, end)
            torch.mm(of_block, diagonal, out=out)
            out.addmm_(dy, part)


def _diagonal(sums: Tensor, table: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
    """D and C of the sub-vectors in columns begin..end, C as a block-diagonal matrix."""
    _, k, dim = table.shape
    first, last = begin // dim, -(-end // dim)
    groups = torch.arange(first, last, device="cpu") // (GROUP // dim)
    words = table[groups]  # [s, K, d]
    count = last - first
    diagonal = table.new_zeros(count, k, count, dim)
    each = torch.arange(count, device="cpu")
    diagonal[each, :, each] = words
    return sums[:, first * k : last * k], diagonal.view(count * k, -1)[:, : end - begin]


def _codeword_gradient(layer: Layer, sums: Tensor, x: Tensor, codewords: Tensor) -> Tensor:
    """dC_g = sum over the group's sub-vectors of D_s^T x_s."""
    gradient = codewords.new_empty(codewords.shape, dtype=torch.float32)
    if x.stride(1) != 1:
        x = x.contiguous()
    library().functions.bonsai_codeword_gradient(
        layer,
        DTYPES[x.dtype],
        sums.data_ptr(),
        sums.stride(0),
        x.data_ptr(),
        x.stride(0),
        x.shape[0],
        gradient.data_ptr(),
        torch.get_num_threads(),
    )
    return gradient.to(codewords.dtype)

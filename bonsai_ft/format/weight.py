"""What is one ternary weight matrix, and which numbers do its bytes stand for?

    W[o, i] = scale[o, group(i)] * sign[o, i] + R[o, i]

    signs T       {-1, 0, +1}, packed ("2bit" or "base3", see packing.py); never trained
    scales S      f16, one per output row and group, or one per output row; never trained
    group         128 consecutive inputs; the last group of a row may be shorter
    residual R    what S * T misses, and what learns; optional
    sub-vector    d consecutive inputs of one row; d divides 128, so it lies inside one group
    codes         per row and sub-vector, which codeword of its group stands there
    codebook      per group, K codewords of d values, in z-scored units
    mu, sigma     per group, what undoes the z-scoring: R = mu + sigma * codebook[code]

Shapes, with G = ceil(in / 128) groups and S = ceil(in / d) sub-vectors: ternary u8 [out, bytes],
scale f16 [out, G] or [out, 1], codes u8 [out, bytes], codebook f16 or bf16 [G, K, d], mu and sigma
f16 [G]. Files and validation are strict about this; the arithmetic is not, so that a float32 or
float64 codebook can be trained or checked.
"""

import math
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from bonsai_ft.format.packing import (
    GROUP,
    check_codes,
    check_signs,
    code_bits,
    codes_width,
    packed_width,
    per_byte,
    unpack_codes,
    unpack_signs,
)

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]

RESIDUAL_SUFFIXES = ("codes", "residual_codebook", "residual_mu", "residual_sigma")
SUFFIXES = ("ternary", "scale", *RESIDUAL_SUFFIXES)
"""Names of a weight's tensors in a file, each after the module's name and a dot."""


def num_groups(in_features: int) -> int:
    """Groups of 128 inputs per row, the short last one included."""
    return -(-in_features // GROUP)


def weight_layout(
    *,
    out_features: int,
    in_features: int,
    packing: str,
    scale_group: str = "128",
    residual_dim: int | None = None,
    residual_k: int = 4,
    codebook_dtype: torch.dtype = torch.float16,
) -> Layout:
    """dtype and shape of each tensor of a weight by suffix; without `residual_dim`, no residual."""
    if out_features < 1 or in_features < 1:
        raise ValueError(f"a weight of {out_features} x {in_features} is empty")
    if scale_group not in ("128", "channel"):
        raise ValueError(f"scale_group is {scale_group!r}; it must be '128' or 'channel'")
    groups = num_groups(in_features)
    scales = groups if scale_group == "128" else 1
    layout: Layout = {
        "ternary": (torch.uint8, (out_features, packed_width(in_features, packing))),
        "scale": (torch.float16, (out_features, scales)),
    }
    if residual_dim is None:
        return layout
    if residual_dim < 1 or GROUP % residual_dim:
        raise ValueError(f"residual_dim is {residual_dim}; it must divide {GROUP}")
    if codebook_dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"a codebook is stored as float16 or bfloat16, not {_name(codebook_dtype)}"
        )
    count = -(-in_features // residual_dim)
    layout["codes"] = (torch.uint8, (out_features, codes_width(count, residual_k)))
    layout["residual_codebook"] = (codebook_dtype, (groups, residual_k, residual_dim))
    layout["residual_mu"] = layout["residual_sigma"] = (torch.float16, (groups,))
    return layout


@dataclass(frozen=True, kw_only=True, eq=False)
class Residual:
    """Codebooks and the packed codes that choose from them."""

    codes: Tensor
    codebook: Tensor
    mu: Tensor
    sigma: Tensor

    @property
    def k(self) -> int:
        """Codewords per group."""
        return self.codebook.shape[1]

    @property
    def dim(self) -> int:
        """Inputs that one codeword covers."""
        return self.codebook.shape[2]

    @property
    def bits(self) -> int:
        """Bits per code."""
        return code_bits(self.k)

    def effective_codebook(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[G, K, d]: mu + sigma * codebook, the values that the codewords stand for."""
        mu, sigma = self.mu.to(dtype)[:, None, None], self.sigma.to(dtype)[:, None, None]
        return mu + sigma * self.codebook.to(dtype)

    def indices(self, in_features: int) -> Tensor:
        """int64 [out, S]: the unpacked codes."""
        return unpack_codes(self.codes, -(-in_features // self.dim), self.k)

    def dequantize(self, in_features: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """[out, in]: R alone."""
        codes = self.indices(in_features)
        group = torch.arange(codes.shape[1], device=codes.device) // (GROUP // self.dim)
        codewords = self.effective_codebook(dtype).flatten(0, 1)
        chosen = codewords.index_select(0, (codes + group * self.k).flatten())
        return chosen.view(codes.shape[0], -1)[:, :in_features]


@dataclass(frozen=True, kw_only=True, eq=False)
class TernaryWeight:
    """One packed weight matrix [out, in]."""

    out_features: int
    in_features: int
    packing: str
    ternary: Tensor
    scale: Tensor
    residual: Residual | None = None

    @property
    def scale_group(self) -> str:
        """Which weights share a scale: "128" consecutive inputs, or a whole "channel" (row)."""
        return _scale_group(self.scale.shape[-1], self.in_features)

    def signs(self, dtype: torch.dtype = torch.int8) -> Tensor:
        """[out, in]: T, unpacked."""
        return unpack_signs(self.ternary, self.in_features, self.packing, dtype)

    def expanded_scale(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[out, in]: S, the scale of every single weight."""
        scale = self.scale.to(dtype)
        if scale.shape[1] > 1:
            scale = scale.repeat_interleave(GROUP, dim=1)
        return scale.expand(-1, max(self.in_features, scale.shape[1]))[:, : self.in_features]

    def dequantize(self, dtype: torch.dtype = torch.float32, residual: bool = True) -> Tensor:
        """[out, in]: S * T, plus R unless `residual` is false; computed in float32 or better."""
        computing = torch.promote_types(dtype, torch.float32)
        weight = self.signs(computing)
        scale = self.scale.to(computing)
        if scale.shape[1] == 1:
            weight.mul_(scale)
        else:
            full = self.in_features // GROUP
            weight[:, : full * GROUP].unflatten(1, (full, GROUP)).mul_(scale[:, :full, None])
            weight[:, full * GROUP :].mul_(scale[:, full:])
        if residual and self.residual is not None:
            weight = weight.add_(self.residual.dequantize(self.in_features, computing))
        return weight.to(dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @property
    def bits_per_weight(self) -> float:
        """All bytes, scales and residual included, shared out over the weights."""
        return 8 * self.nbytes / (self.out_features * self.in_features)

    def tensors(self) -> dict[str, Tensor]:
        """Tensors by the suffix they have in a file; inverse of `from_tensors`."""
        tensors = {"ternary": self.ternary, "scale": self.scale}
        if (residual := self.residual) is not None:
            tensors["codes"] = residual.codes
            tensors["residual_codebook"] = residual.codebook
            tensors["residual_mu"] = residual.mu
            tensors["residual_sigma"] = residual.sigma
        return tensors

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, Tensor],
        *,
        out_features: int,
        in_features: int,
        packing: str,
    ) -> "TernaryWeight":
        """A weight of tensors by suffix; ValueError where one is missing or too many."""
        has_residual = _check_suffixes(tensors.keys())
        residual = None
        if has_residual:
            codes, codebook, mu, sigma = (tensors[suffix] for suffix in RESIDUAL_SUFFIXES)
            residual = Residual(codes=codes, codebook=codebook, mu=mu, sigma=sigma)
        return cls(
            out_features=out_features,
            in_features=in_features,
            packing=packing,
            ternary=tensors["ternary"],
            scale=tensors["scale"],
            residual=residual,
        )

    def validate(self) -> None:
        """ValueError naming tensor and reason, unless shapes, dtypes and all values are legal."""
        check_layout(
            {suffix: (t.dtype, tuple(t.shape)) for suffix, t in self.tensors().items()},
            out_features=self.out_features,
            in_features=self.in_features,
            packing=self.packing,
        )
        with _about("ternary"):
            check_signs(self.ternary, self.in_features, self.packing)
        _check_range("scale", self.scale, at_least=0)
        if (residual := self.residual) is None:
            return
        count = -(-self.in_features // residual.dim)
        with _about("codes"):
            check_codes(residual.codes, count, residual.k)
        _check_range("residual_codebook", residual.codebook)
        _check_range("residual_mu", residual.mu)
        _check_range("residual_sigma", residual.sigma, at_least=0)
        last = self.in_features - (num_groups(self.in_features) - 1) * GROUP
        if last < residual.dim and bool(residual.codebook[-1, :, last:].any()):
            raise ValueError(
                f"residual_codebook: the last group has {last} inputs, but a codeword holds "
                f"a value other than 0 beyond them"
            )


def check_layout(layout: Layout, *, out_features: int, in_features: int, packing: str) -> None:
    """ValueError naming tensor and reason, unless these dtypes and shapes make a weight.

    Needs no tensor, so that a reader can refuse a file before it maps or allocates anything.
    """
    has_residual = _check_suffixes(layout.keys())
    with _about("ternary"):
        per_byte(packing)
    scale_shape = layout["scale"][1]
    codebook_dtype, codebook_shape = layout.get("residual_codebook", (torch.float16, (0, 4, 0)))
    if len(scale_shape) != 2:
        raise ValueError(f"scale: shape is {list(scale_shape)}; it must be [out, groups or 1]")
    if len(codebook_shape) != 3:
        raise ValueError(
            f"residual_codebook: shape is {list(codebook_shape)}; it must be [groups, K, d]"
        )
    with _about("residual_codebook" if has_residual else "ternary"):
        expected = weight_layout(
            out_features=out_features,
            in_features=in_features,
            packing=packing,
            scale_group=_scale_group(scale_shape[1], in_features),
            residual_dim=codebook_shape[2] if has_residual else None,
            residual_k=codebook_shape[1],
            codebook_dtype=codebook_dtype,
        )
    for suffix, (dtype, shape) in layout.items():
        if dtype != expected[suffix][0]:
            raise ValueError(
                f"{suffix}: dtype is {_name(dtype)}; it must be {_name(expected[suffix][0])}"
            )
        if shape != expected[suffix][1]:
            raise ValueError(
                f"{suffix}: shape is {list(shape)}; a weight of {out_features} x {in_features} "
                f"needs {list(expected[suffix][1])}"
            )


def _check_suffixes(suffixes: Set[str]) -> bool:
    """Whether there is a residual; ValueError where a tensor is missing or too many."""
    if unknown := sorted(suffixes - set(SUFFIXES)):
        raise ValueError(f"{unknown[0]}: a ternary weight has no such tensor")
    has_residual = not suffixes.isdisjoint(RESIDUAL_SUFFIXES)
    for suffix in SUFFIXES if has_residual else SUFFIXES[:2]:
        if suffix not in suffixes:
            raise ValueError(f"{suffix}: the tensor is missing")
    return has_residual


def _scale_group(scales_per_row: int, in_features: int) -> str:
    # A row of at most one group fits both words; the finer one is the default everywhere.
    return "channel" if scales_per_row == 1 and num_groups(in_features) > 1 else "128"


@contextmanager
def _about(suffix: str) -> Iterator[None]:
    """Puts the tensor's name before the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{suffix}: {error}") from error


def _check_range(suffix: str, tensor: Tensor, at_least: float = -math.inf) -> None:
    """ValueError where a value is not finite or too small; reductions, so no copy is made."""
    # NaN wins both reductions and fails both comparisons.
    low, high = (float(value) for value in tensor.aminmax())
    if not (-math.inf < low and high < math.inf):
        raise ValueError(f"{suffix}: a value is NaN or infinite")
    if low < at_least:
        raise ValueError(f"{suffix}: a value is {low:g}; the least allowed is {at_least:g}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

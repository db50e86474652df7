"""How do signs and codes become bytes?

Two packings of the signs T in {-1, 0, +1}, both row by row and least significant position first:

    "2bit"    4 signs per byte, two bits each that hold sign + 1; the pattern 3 is invalid
    "base3"   5 signs per byte, the base-3 digits sign + 1; bytes above 242 are invalid

and one of the residual's codes: 1, 2, 4 or 8 bits each. Positions past the end of a row hold sign 0
(codes: 0), so that a kernel may decode whole bytes without looking at the row's length.
"""

from functools import cache

import torch
from torch import Tensor

GROUP = 128
"""Consecutive inputs that share a scale per output row, and the residual's mean and deviation."""

PER_BYTE = {"2bit": 4, "base3": 5}
INVALID_SIGN = 2
"""What the decoding table holds where a byte's pattern has no meaning (2-bit code 3)."""

_WIDE = {4: torch.int32, 8: torch.int64, 16: torch.complex128}
_ELEMENTS_AT_ONCE = 1 << 22


def per_byte(packing: str) -> int:
    """Signs per byte of a packing."""
    try:
        return PER_BYTE[packing]
    except (KeyError, TypeError):
        raise ValueError(
            f"packing is {packing!r}; it must be one of {', '.join(PER_BYTE)}"
        ) from None


def packed_width(in_features: int, packing: str) -> int:
    """Bytes that one row of `in_features` signs takes."""
    return -(-in_features // per_byte(packing))


@cache
def sign_table(packing: str) -> Tensor:
    """int8 [256, signs per byte]: the signs of every byte; INVALID_SIGN where there are none."""
    byte = torch.arange(256, device="cpu").unsqueeze(1)
    position = torch.arange(per_byte(packing), device="cpu").unsqueeze(0)
    if packing == "2bit":
        return (((byte >> 2 * position) & 3) - 1).to(torch.int8)
    table = (byte // 3**position) % 3 - 1
    table[243:] = INVALID_SIGN
    return table.to(torch.int8)


def pack_signs(signs: Tensor, packing: str) -> Tensor:
    """Signs [..., in] to bytes [..., packed_width(in)]."""
    n = per_byte(packing)
    if signs.dtype == torch.bool or signs.is_complex():
        raise ValueError(f"signs have dtype {signs.dtype}; they must be int8")
    if signs.ndim == 0:
        raise ValueError("signs must have at least one dimension, the inputs of a row")
    if not bool(((signs == 0) | (signs.abs() == 1)).all()):
        raise ValueError("signs must be -1, 0 or 1; other values were found")
    base = 4 if packing == "2bit" else 3
    digits = torch.nn.functional.pad(signs.to(torch.int8) + 1, (0, -signs.shape[-1] % n), value=1)
    digits = digits.view(torch.uint8).unflatten(-1, (digits.shape[-1] // n, n))
    packed = digits[..., n - 1].clone()
    for i in range(n - 2, -1, -1):
        packed.mul_(base).add_(digits[..., i])
    return packed


def unpack_signs(
    packed: Tensor, in_features: int, packing: str, dtype: torch.dtype = torch.int8
) -> Tensor:
    """Bytes [..., packed_width(in)] back to signs [..., in] in `dtype`."""
    if packed.dtype != torch.uint8 or packed.ndim == 0:
        raise ValueError(f"packed signs are {_describe(packed)}; they must be uint8 [..., bytes]")
    if packed.shape[-1] != packed_width(in_features, packing):
        raise ValueError(
            f"a packed row has {packed.shape[-1]} bytes; {in_features} signs packed as "
            f"{packing} take {packed_width(in_features, packing)}"
        )
    table = sign_table(packing).to(device=packed.device, dtype=dtype)
    row = table.shape[1]
    # One wide element per byte is looked up several times faster than a row of narrow ones.
    if wide := _WIDE.get(row * table.element_size()):
        table = table.view(wide).flatten()
    signs = table.index_select(0, packed.reshape(-1).int()).view(dtype)
    width = packed.shape[-1] * row
    return signs.view(*packed.shape[:-1], width)[..., :in_features].contiguous()


def code_bits(k: int) -> int:
    """Bits per code for `k` codewords: the smallest of 1, 2, 4, 8 that can count to k."""
    if not 2 <= k <= 256:
        raise ValueError(f"a codebook has {k} codewords; it must have 2 to 256")
    return next(bits for bits in (1, 2, 4, 8) if 1 << bits >= k)


def codes_width(count: int, k: int) -> int:
    """Bytes that one row of `count` codes takes."""
    return -(-count * code_bits(k) // 8)


def pack_codes(codes: Tensor, k: int) -> Tensor:
    """Codes [..., count] in 0 .. k-1 to bytes [..., codes_width(count)]."""
    bits = code_bits(k)
    n = 8 // bits
    if codes.dtype == torch.bool or codes.is_floating_point() or codes.is_complex():
        raise ValueError(f"codes have dtype {codes.dtype}; they must be integers")
    if codes.ndim == 0:
        raise ValueError("codes must have at least one dimension, the sub-vectors of a row")
    if codes.numel() and (int(codes.min()) < 0 or int(codes.max()) >= k):
        raise ValueError(f"codes must be 0 to {k - 1} for {k} codewords; other values were found")
    padded = torch.nn.functional.pad(codes.to(torch.uint8), (0, -codes.shape[-1] % n))
    padded = padded.unflatten(-1, (padded.shape[-1] // n, n))
    packed = padded[..., 0].clone()
    for i in range(1, n):
        packed |= padded[..., i] << bits * i
    return packed


def unpack_codes(packed: Tensor, count: int, k: int) -> Tensor:
    """Bytes [..., codes_width(count)] back to int64 codes [..., count]."""
    bits = code_bits(k)
    if packed.dtype != torch.uint8 or packed.ndim == 0:
        raise ValueError(f"packed codes are {_describe(packed)}; they must be uint8 [..., bytes]")
    if packed.shape[-1] != codes_width(count, k):
        raise ValueError(
            f"a packed row has {packed.shape[-1]} bytes; {count} codes of {bits} bits take "
            f"{codes_width(count, k)}"
        )
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    codes = (packed.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return codes.flatten(-2)[..., :count].to(torch.int64)


def check_signs(packed: Tensor, in_features: int, packing: str) -> None:
    """ValueError where bytes are no packing of `in_features` signs, unused positions included."""
    n = per_byte(packing)
    unused = -in_features % n
    for rows in _row_chunks(packed):
        if packing == "2bit":
            # A two-bit field is 3 exactly where a byte shares a bit with itself shifted by one.
            if bool((rows & (rows >> 1) & 0b01010101).any()):
                raise ValueError(
                    "the sign code 3 occurs; only 0, 1 and 2 (sign + 1) have a meaning"
                )
        elif bool((rows > 242).any()):
            raise ValueError("a byte above 242 occurs; five base-3 digits reach no further")
        if unused and rows.shape[-1]:
            last = sign_table(packing).to(rows.device)[rows[..., -1].int()]
            if bool(last[..., n - unused :].any()):
                raise ValueError("an unused position at the end of a row does not hold sign 0")


def check_codes(packed: Tensor, count: int, k: int) -> None:
    """ValueError where bytes are no packing of `count` codes below `k`, unused bits included."""
    bits = code_bits(k)
    used_in_last = (count * bits - 1) % 8 + 1
    for rows in _row_chunks(packed):
        if k != 1 << bits:
            for shift in range(0, 8, bits):
                if bool((((rows >> shift) & ((1 << bits) - 1)) >= k).any()):
                    raise ValueError(f"a code of {k} or more occurs; there are {k} codewords")
        if used_in_last < 8 and rows.shape[-1] and bool((rows[..., -1] >> used_in_last).any()):
            raise ValueError("an unused bit at the end of a row is not 0")


def _row_chunks(packed: Tensor) -> tuple[Tensor, ...]:
    """Views of a few rows each, so that a check of a big tensor needs little memory."""
    if packed.numel() == 0:
        return ()
    rows = packed.reshape(-1, packed.shape[-1])
    return rows.split(max(1, _ELEMENTS_AT_ONCE // rows.shape[-1]))


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"

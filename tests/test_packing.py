"""Do bytes and signs, bytes and codes say the same thing?"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bonsai_ft.format.packing import (
    check_codes,
    check_signs,
    code_bits,
    codes_width,
    pack_codes,
    pack_signs,
    packed_width,
    sign_table,
    unpack_codes,
    unpack_signs,
)

PACKINGS = ("2bit", "base3")
WIDTHS = (*range(1, 12), 575, 576, 577)


def test_two_bit_bytes_are_these():
    signs = torch.tensor([[-1, 0, 1, 1], [1, -1, -1, 0], [-1, -1, -1, -1], [1, 1, 1, 1]])
    packed = pack_signs(signs, "2bit")
    assert packed.dtype == torch.uint8
    assert packed.tolist() == [[0b10_10_01_00], [0b01_00_00_10], [0b00000000], [0b10101010]]


def test_two_bit_bytes_end_with_code_one():
    assert pack_signs(torch.tensor([1]), "2bit").tolist() == [0b01_01_01_10]
    assert pack_signs(torch.tensor([-1, 1, 0, 0, -1]), "2bit").tolist() == [
        0b01_01_10_00,
        0b01_01_01_00,
    ]


def test_base3_bytes_are_these():
    signs = torch.tensor([[-1, 0, 1, 1, 0], [1, 1, 1, 1, 1], [-1, -1, -1, -1, -1]])
    packed = pack_signs(signs, "base3")
    assert packed.dtype == torch.uint8
    assert packed.tolist() == [[0 + 1 * 3 + 2 * 9 + 2 * 27 + 1 * 81], [242], [0]]


def test_base3_bytes_end_with_digit_one():
    assert pack_signs(torch.tensor([1]), "base3").tolist() == [2 + 3 + 9 + 27 + 81]
    assert pack_signs(torch.tensor([0, 0, 0, 0, 0, -1]), "base3").tolist() == [121, 120]


def test_code_bytes_are_these():
    assert pack_codes(torch.tensor([1, 0, 1, 1, 0, 0, 0, 0, 1]), 2).tolist() == [0b00001101, 1]
    assert pack_codes(torch.tensor([0, 1, 2, 3, 3]), 4).tolist() == [0b11_10_01_00, 0b11]
    assert pack_codes(torch.tensor([5, 15, 9]), 16).tolist() == [0xF5, 0x09]
    assert pack_codes(torch.tensor([200, 7]), 256).tolist() == [200, 7]


def test_code_bits_are_the_smallest_of_1_2_4_8():
    expected = {2: 1, 3: 2, 4: 2, 5: 4, 16: 4, 17: 8, 256: 8}
    assert {k: code_bits(k) for k in expected} == expected
    for k in (-1, 0, 1, 257):
        with pytest.raises(ValueError, match="2 to 256"):
            code_bits(k)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("width", WIDTHS)
def test_signs_survive_packing_at_any_width(packing, width):
    torch.manual_seed(width)
    signs = torch.randint(-1, 2, (3, 2, width), dtype=torch.int8)
    packed = pack_signs(signs, packing)
    assert packed.shape == (3, 2, packed_width(width, packing))
    check_signs(packed, width, packing)
    for dtype in (torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        unpacked = unpack_signs(packed, width, packing, dtype)
        assert unpacked.dtype == dtype
        assert unpacked.is_contiguous()
        assert torch.equal(unpacked, signs.to(dtype))


@settings(deadline=None, max_examples=200)
@given(data=st.data(), packing=st.sampled_from(PACKINGS))
def test_packing_signs_is_inverted(data, packing):
    rows, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 40))
    values = st.lists(st.sampled_from([-1, 0, 1]), min_size=rows * width, max_size=rows * width)
    signs = torch.tensor(data.draw(values), dtype=torch.int8).view(rows, width)
    packed = pack_signs(signs, packing)
    check_signs(packed, width, packing)
    assert torch.equal(unpack_signs(packed, width, packing), signs)


@settings(deadline=None, max_examples=200)
@given(data=st.data(), k=st.integers(2, 256))
def test_packing_codes_is_inverted(data, k):
    rows, count = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 40))
    values = st.lists(st.integers(0, k - 1), min_size=rows * count, max_size=rows * count)
    codes = torch.tensor(data.draw(values)).view(rows, count)
    packed = pack_codes(codes, k)
    assert packed.shape == (rows, codes_width(count, k))
    check_codes(packed, count, k)
    unpacked = unpack_codes(packed, count, k)
    assert unpacked.dtype == torch.int64
    assert torch.equal(unpacked, codes)


@pytest.mark.parametrize("packing", PACKINGS)
def test_every_byte_is_a_packing_or_refused(packing):
    n = {"2bit": 4, "base3": 5}[packing]
    valid = 0
    for byte in range(256):
        packed = torch.tensor([[byte]], dtype=torch.uint8)
        try:
            check_signs(packed, n, packing)
        except ValueError:
            assert (sign_table(packing)[byte] == 2).any()
        else:
            assert torch.equal(pack_signs(unpack_signs(packed, n, packing), packing), packed)
            valid += 1
    assert valid == 3**n


@pytest.mark.parametrize("k", [3, 4, 5, 17])
def test_every_byte_of_codes_is_a_packing_or_refused(k):
    n = 8 // code_bits(k)
    for count in range(1, n + 1):
        valid = 0
        for byte in range(256):
            packed = torch.tensor([[byte]], dtype=torch.uint8)
            try:
                check_codes(packed, count, k)
            except ValueError:
                continue
            assert torch.equal(pack_codes(unpack_codes(packed, count, k), k), packed)
            valid += 1
        assert valid == k**count


def test_unused_positions_must_hold_sign_zero():
    packed = pack_signs(torch.ones(2, 6, dtype=torch.int8), "2bit")
    packed[1, 1] ^= 0b11_00_00_00
    with pytest.raises(ValueError, match="unused position"):
        check_signs(packed, 6, "2bit")
    packed = pack_signs(torch.ones(2, 6, dtype=torch.int8), "base3")
    packed[0, 1] -= 3
    with pytest.raises(ValueError, match="unused position"):
        check_signs(packed, 6, "base3")


def test_invalid_values_in_the_last_row_of_a_big_tensor_are_found():
    packed = torch.full((3000, 2048), 0b01010101, dtype=torch.uint8)
    check_signs(packed, 8192, "2bit")
    packed[-1, -1] = 0b11010101
    with pytest.raises(ValueError, match="code 3"):
        check_signs(packed, 8192, "2bit")


@pytest.mark.parametrize(
    "signs", [torch.tensor([2]), torch.tensor([-2]), torch.tensor([0.5]), torch.tensor([-128])]
)
@pytest.mark.parametrize("packing", PACKINGS)
def test_values_that_are_no_signs_are_refused(signs, packing):
    with pytest.raises(ValueError, match="-1, 0 or 1"):
        pack_signs(signs, packing)
    with pytest.raises(ValueError, match="-1, 0 or 1"):
        pack_signs(torch.tensor([-128], dtype=torch.int8), packing)


def test_values_that_are_no_codes_are_refused():
    for codes in (torch.tensor([4]), torch.tensor([-1]), torch.tensor([1.0]), torch.tensor(1)):
        with pytest.raises(ValueError, match="codes"):
            pack_codes(codes, 4)


def test_unknown_packing_and_wrong_widths_are_refused():
    for packing in ("3bit", None, []):
        with pytest.raises(ValueError, match="2bit, base3"):
            packed_width(4, packing)
    with pytest.raises(ValueError, match="2bit take 2"):
        unpack_signs(torch.zeros(1, 1, dtype=torch.uint8), 5, "2bit")
    with pytest.raises(ValueError, match="must be uint8"):
        unpack_signs(torch.zeros(1, 1), 4, "2bit")
    with pytest.raises(ValueError, match="take 2"):
        unpack_codes(torch.zeros(1, 1, dtype=torch.uint8), 5, 4)


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_view_packs_like_a_copy(packing):
    signs = torch.randint(-1, 2, (12, 7), dtype=torch.int8).t()
    assert torch.equal(pack_signs(signs, packing), pack_signs(signs.contiguous(), packing))
    packed = pack_signs(signs, packing)
    strided = packed.repeat(1, 2)[:, : packed.shape[1]]
    assert torch.equal(unpack_signs(strided, 12, packing), signs)

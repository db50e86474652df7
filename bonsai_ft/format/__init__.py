"""Which bytes hold a ternary model? Packing of signs and codes, one weight, one file."""

from bonsai_ft.format.packing import (
    GROUP,
    code_bits,
    codes_width,
    pack_codes,
    pack_signs,
    packed_width,
    unpack_codes,
    unpack_signs,
)
from bonsai_ft.format.storage import (
    BonsaiFile,
    BonsaiFormatError,
    BonsaiWriter,
    fingerprint_of,
    open_bonsai,
    write_bonsai,
)
from bonsai_ft.format.weight import Residual, TernaryWeight, num_groups, weight_layout

__all__ = [
    "GROUP",
    "BonsaiFile",
    "BonsaiFormatError",
    "BonsaiWriter",
    "Residual",
    "TernaryWeight",
    "code_bits",
    "codes_width",
    "fingerprint_of",
    "num_groups",
    "open_bonsai",
    "pack_codes",
    "pack_signs",
    "packed_width",
    "unpack_codes",
    "unpack_signs",
    "weight_layout",
    "write_bonsai",
]

"""How do float weights become a TernaryWeight, and a float model a `.bonsai` file?"""

from bonsai_ft.quantize.pipeline import (
    LayerReport,
    QuantizeReport,
    QuantizeSettings,
    quantize,
)
from bonsai_ft.quantize.source import locate, open_source

__all__ = [
    "LayerReport",
    "QuantizeReport",
    "QuantizeSettings",
    "locate",
    "open_source",
    "quantize",
]

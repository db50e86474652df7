"""How do float weights become a TernaryWeight, and a float model a `.bonsai` file?

`bonsai_ft.quantize` is at once this package and the function that users call. Python binds the name
to the package as soon as anything in it is imported, so the package can be called, too.
"""

import sys
from types import ModuleType
from typing import Any

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


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> QuantizeReport:
        return quantize(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable

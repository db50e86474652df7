"""How fast are the packed layers here, beside what else could be used, and how far from the limit?

Four measurements (`operator`, `step`, `decode`, `load`), each a `Report`. Peers that come with this
package are measured with it: torch's bfloat16 layers, PEFT's LoRA, bitsandbytes' NF4, transformers.
Those that need more (llama.cpp) are added by `benchmarks/`.
"""

from bonsai_ft.bench.decode import DecodeSide, measure_decode
from bonsai_ft.bench.kernels import KernelSummary, kernel_summary
from bonsai_ft.bench.layers import measure_operator
from bonsai_ft.bench.load import measure_load
from bonsai_ft.bench.models import SHAPES, ModelShape, find_model, random_base, shape_of
from bonsai_ft.bench.step import measure_step
from bonsai_ft.bench.table import as_json, markdown
from bonsai_ft.bench.timing import Report, Setup

__all__ = [
    "SHAPES",
    "DecodeSide",
    "KernelSummary",
    "ModelShape",
    "Report",
    "Setup",
    "as_json",
    "find_model",
    "kernel_summary",
    "markdown",
    "measure_decode",
    "measure_load",
    "measure_operator",
    "measure_step",
    "random_base",
    "shape_of",
]

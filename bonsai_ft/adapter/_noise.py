"""Keeps one warning off the screen that says nothing about our users' work.

bitsandbytes, which PEFT imports where it is installed, warns on every CPU without an optional
library of kernels. Its 4-bit layers are never used here.
"""

import logging


def _is_news(record: logging.LogRecord) -> bool:
    return "gemm_4bit" not in record.getMessage()


logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(_is_news)

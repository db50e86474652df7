"""What do the two kinds of compiled kernels share? How their sources are told apart, and why not.

`cpu_build.py` and `nvrtc.py` compile; both keep the result under `source_key`.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

# The numbers by which kernels/cpu and kernels/cuda know a packing.
PACKINGS = {"2bit": 0, "base3": 1}


class KernelUnavailable(RuntimeError):
    """The compiled kernels cannot be had here; the message says why."""


def source_key(folder: Path, suffixes: tuple[str, ...], parts: Iterable[object]) -> str:
    """Changes with every file of these suffixes in `folder`, and with every part."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.suffix in suffixes):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for part in parts:
        digest.update(repr(part).encode() + b"\0")
    return digest.hexdigest()[:16]

"""How are CUDA kernels executed without a GPU? Compiled as C++, in several orders, under guard.

`HostLauncher` is the `Launcher` of `bonsai_ft/ops/launch.py` for CPU tensors. `shim.h` plays the
device. Every launch runs three times on copies of its tensors and must give the same bits:

    order of threads, blocks   each tensor's place                   outputs hold before
    forwards                   aligned as the original, page after   NaN bytes
    backwards                  exactly before a forbidden page       other bytes
    shuffled                   exactly behind a forbidden page       NaN bytes

Memory around a tensor, gaps between its rows included, is filled with NaN bytes and must stay so.
What an address may be used for is read off the kernel's own signature: `const T*` is an input,
`T*` an output, of which every element must be written and none may be read.
"""

import ctypes
import hashlib
import mmap
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from bonsai_ft.ops.launch import Argument
from bonsai_ft.resources import resource

HERE = Path(__file__).parent
KERNELS = resource("kernels") / "cuda"
PAGE = mmap.PAGESIZE
COMPILER = "g++"
FLAGS = [
    *("-std=c++17", "-O2", "-w", "-fPIC", "-DBONSAI_HOST_SHIM", "-fvisibility=hidden"),
    # kernels read words of what others write as 16-bit floats, as CUDA allows
    *("-fno-strict-aliasing", "-ffp-contract=off"),
    # indices and shifts out of range trap
    *("-fsanitize=bounds,shift", "-fsanitize-undefined-trap-on-error"),
    # fibers jump from stack to stack, which a fortified longjmp takes for an attack
    *("-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=0"),
]
# unset locals are not zero; g++ knows this from version 12 on
OPTIONAL_FLAGS = ["-ftrivial-auto-var-init=pattern"]
# CUDA's limits that a launch of ours must keep
MAX_THREADS = 1024
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_SHARED_BYTES = 48 << 10

POISON = 0xFF


class KernelFault(AssertionError):
    """A kernel did what would be wrong on a GPU; the message says what and where."""


@dataclass(frozen=True)
class Schedule:
    """One way to run a launch."""

    order: int
    placement: str
    fill: int


SCHEDULES = (
    Schedule(order=0, placement="aligned", fill=POISON),
    Schedule(order=1, placement="end", fill=0x3A),
    Schedule(order=2, placement="begin", fill=POISON),
)


class HostLauncher:
    """Runs the kernels of `folder` (default: our own) on CPU tensors."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or KERNELS
        self.launched: list[str] = []

    def launch(
        self,
        source: str,
        kernel: str,
        grid: tuple[int, int, int],
        block: int,
        arguments: Sequence[Argument],
        device: torch.device,
        shared_bytes: int = 0,
    ) -> None:
        """As `Launcher.launch`. Raises KernelFault."""
        library = compile_kernels(self.folder, source)
        signature = _signature(library, kernel)
        _check_launch(library, kernel, signature, grid, block, arguments, device, shared_bytes)
        self.launched.append(kernel)
        results = [
            _run(library, kernel, signature, grid, block, arguments, shared_bytes, schedule)
            for schedule in SCHEDULES
        ]
        _compare(kernel, results)
        for index, result in results[0].items():
            tensor = arguments[index]
            assert isinstance(tensor, Tensor)
            tensor.copy_(result)


@lru_cache(maxsize=32)
def compile_kernels(folder: Path, source: str) -> ctypes.CDLL:
    """The kernels of one file as a library; compiled once per content."""
    key = hashlib.sha256()
    for path in sorted([*folder.glob("*.cu*"), *KERNELS.glob("*.cuh"), HERE / "shim.h"]):
        key.update(path.name.encode() + path.read_bytes())
    key.update(" ".join([*_compiler(), source]).encode())
    out = Path(tempfile.gettempdir()) / f"bonsai-cuda-shim-{key.hexdigest()[:20]}"
    out.mkdir(exist_ok=True)
    path = out / f"{Path(source).stem}.so"
    with FileLock(out / "lock", timeout=600):
        if not path.is_file():
            _compile(folder / source, path)
    library = ctypes.CDLL(str(path))
    library.shim_message.restype = ctypes.c_char_p
    library.shim_fault_address.restype = ctypes.c_size_t
    library.shim_allocate.argtypes = [ctypes.c_size_t]
    library.shim_allocate.restype = ctypes.c_void_p
    library.shim_release.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library


def _compile(source: Path, path: Path) -> None:
    wrapper = path.with_suffix(".cpp")
    include = f'#include "{HERE / "shim.h"}"\n#include "{source}"\n'
    wrapper.write_text(include, encoding="utf-8")
    compiler = [*_compiler(), "-I", str(KERNELS)]
    text = _call([*compiler, "-DSHIM_LIST_KERNELS", "-E", "-P", str(wrapper)])
    found = re.findall(r"shim_kernel\s+void\s+(?:shim_bounds\((.+?)\)\s+)?(\w+)\s*\(", text)
    assert found, f"{source} has no kernel"
    exports = "".join(f"SHIM_KERNEL({name}, ({bounds or MAX_THREADS}))\n" for bounds, name in found)
    wrapper.write_text(include + exports, encoding="utf-8")
    beside = path.with_suffix(".tmp")
    _call([*compiler, "-shared", "-o", str(beside), str(wrapper)])
    beside.rename(path)


@lru_cache(maxsize=1)
def _compiler() -> tuple[str, ...]:
    probe = [COMPILER, "-x", "c++", "-E", "/dev/null"]
    known = [
        flag
        for flag in OPTIONAL_FLAGS
        if subprocess.run([*probe, flag], capture_output=True, check=False).returncode == 0
    ]
    return (COMPILER, *FLAGS, *known)


def _call(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
    return done.stdout


def _signature(library: ctypes.CDLL, kernel: str) -> str:
    function = getattr(library, f"shim_signature_{kernel}", None)
    if function is None:
        raise KernelFault(f"there is no kernel {kernel}")
    function.restype = ctypes.c_char_p
    return function().decode()


def _check_launch(
    library: ctypes.CDLL,
    kernel: str,
    signature: str,
    grid: tuple[int, int, int],
    block: int,
    arguments: Sequence[Argument],
    device: torch.device,
    shared_bytes: int,
) -> None:
    """KernelFault for what a driver would refuse, or would pass on in silence."""
    most = min(MAX_THREADS, getattr(library, f"shim_bounds_{kernel}")())
    if not 0 < block <= most or block % 32:
        raise KernelFault(f"{kernel}: {block} threads; it allows multiples of 32 up to {most}")
    if not all(0 < size <= limit for size, limit in zip(grid, MAX_GRID, strict=True)):
        raise KernelFault(f"{kernel}: the grid {grid} is empty or exceeds {MAX_GRID}")
    if shared_bytes > MAX_SHARED_BYTES:
        raise KernelFault(f"{kernel}: {shared_bytes} bytes of shared memory")
    if len(arguments) != len(signature):
        raise KernelFault(f"{kernel} has {len(signature)} parameters, not {len(arguments)}")
    for index, (kind, argument) in enumerate(zip(signature, arguments, strict=True)):
        if isinstance(argument, Tensor):
            fits = kind in "rw" and argument.device == device
        elif isinstance(argument, float):
            fits = kind == "f"
        else:
            fits = kind == "i" or (kind in "rw" and argument == 0)
        if not fits:
            raise KernelFault(f"{kernel}: argument {index} is {argument!r}, but it takes '{kind}'")


class _Copy:
    """A tensor's copy between forbidden pages; the rest of its pages is poison."""

    def __init__(self, library: ctypes.CDLL, tensor: Tensor, schedule: Schedule, is_output: bool):
        size = tensor.element_size()
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        elements = 1 + sum((n - 1) * stride for n, stride in steps) if tensor.numel() else 0
        span = elements * size
        self.library = library
        self.bytes = -(-(span + 256) // PAGE) * PAGE
        self.begin = library.shim_allocate(self.bytes)
        assert self.begin, "out of memory"
        if schedule.placement == "begin":
            offset = 0
        else:
            offset = self.bytes - span
            if schedule.placement == "aligned":
                offset -= (self.begin + offset - tensor.data_ptr()) % 256
        self.address = self.begin + offset
        self.span = span
        self.slab = torch.frombuffer(
            (ctypes.c_uint8 * self.bytes).from_address(self.begin), dtype=torch.uint8
        )
        self.slab.fill_(POISON)
        inner = self.slab[offset : offset + span].view(tensor.dtype) if span else None
        self.view = tensor.new_empty(tensor.shape)
        if inner is not None:
            self.view = inner.as_strided(tensor.shape, tensor.stride())
            if is_output:
                fill = torch.full((size,), schedule.fill, dtype=torch.uint8).view(tensor.dtype)
                self.view.copy_(fill.expand(tensor.shape))
            else:
                self.view.copy_(tensor)
        self.before = self.slab.clone()
        if is_output and inner is not None:
            # outside its elements the slab must stay as it is
            inside = torch.zeros_like(self.slab)
            ones = torch.full((size,), 1, dtype=torch.uint8).view(tensor.dtype)
            inside[offset : offset + span].view(tensor.dtype).as_strided(
                tensor.shape, tensor.stride()
            ).copy_(ones.expand(tensor.shape))
            self.fixed = inside == 0
        else:
            self.fixed = torch.ones(self.bytes, dtype=torch.bool)

    def changed_outside(self) -> list[int]:
        """Offsets, from the tensor's first byte, of what had to stay and did not."""
        places = ((self.slab != self.before) & self.fixed).nonzero().flatten()
        return (places - (self.address - self.begin)).tolist()

    def release(self) -> None:
        self.slab = self.view = self.before
        self.library.shim_release(self.begin, self.bytes)


def _run(
    library: ctypes.CDLL,
    kernel: str,
    signature: str,
    grid: tuple[int, int, int],
    block: int,
    arguments: Sequence[Argument],
    shared_bytes: int,
    schedule: Schedule,
) -> dict[int, Tensor]:
    """One run on copies: what each output holds afterwards, by argument."""
    copies = {
        index: _Copy(library, argument, schedule, signature[index] == "w")
        for index, argument in enumerate(arguments)
        if isinstance(argument, Tensor)
    }
    # dynamic shared memory ends before a forbidden page, at CUDA's alignment
    shared_pages = -(-shared_bytes // PAGE) * PAGE
    shared = library.shim_allocate(shared_pages)
    shared_begin = shared + (shared_pages - shared_bytes) // 16 * 16
    values: list[Any] = []
    for index, argument in enumerate(arguments):
        if index in copies:
            values.append(ctypes.c_void_p(copies[index].address))
        elif isinstance(argument, float):
            values.append(ctypes.c_float(argument))
        else:
            values.append(ctypes.c_int64(argument))
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    try:
        ran = getattr(library, f"shim_launch_{kernel}")(
            (ctypes.c_uint * 3)(*grid),
            ctypes.c_uint(block),
            pointers,
            ctypes.c_size_t(shared_bytes),
            ctypes.c_void_p(shared_begin),
            ctypes.c_int(schedule.order),
            ctypes.c_uint64(0x9E3779B97F4A7C15),
        )
        if not ran:
            raise KernelFault(f"{kernel}: {_fault(library, copies)}")
        for index, copy in copies.items():
            if places := copy.changed_outside():
                raise KernelFault(
                    f"{kernel}: argument {index}: {len(places)} bytes that are not its to write "
                    f"were changed, the first at {places[0]} of {copy.span}"
                )
        return {i: copy.view.clone() for i, copy in copies.items() if signature[i] == "w"}
    finally:
        for copy in copies.values():
            copy.release()
        library.shim_release(shared, shared_pages)


def _fault(library: ctypes.CDLL, copies: dict[int, _Copy]) -> str:
    message = library.shim_message().decode()
    address = library.shim_fault_address()
    for index, copy in copies.items():
        if address and copy.begin - PAGE <= address < copy.begin + copy.bytes + PAGE:
            return f"{message}: byte {address - copy.address} of argument {index}'s {copy.span}"
    return message


def _compare(kernel: str, results: list[dict[int, Tensor]]) -> None:
    for index, first in results[0].items():
        size = first.element_size()
        rows = [r[index].contiguous().flatten().view(torch.uint8).view(-1, size) for r in results]
        if all(torch.equal(rows[0], other) for other in rows[1:]):
            continue
        unwritten = torch.ones(len(rows[0]), dtype=torch.bool)
        for row, schedule in zip(rows, SCHEDULES, strict=True):
            unwritten &= (row == schedule.fill).all(1)
        if bool(unwritten.any()):
            raise KernelFault(
                f"{kernel}: argument {index}: {int(unwritten.sum())} elements were not written, "
                f"the first is number {int(unwritten.nonzero()[0])} of {list(first.shape)}"
            )
        differs = torch.zeros(len(rows[0]), dtype=torch.bool)
        for row in rows[1:]:
            differs |= (row != rows[0]).any(1)
        raise KernelFault(
            f"{kernel}: argument {index}: {int(differs.sum())} elements depend on the order of "
            f"threads or blocks, the first is number {int(differs.nonzero()[0])} of "
            f"{list(first.shape)}"
        )

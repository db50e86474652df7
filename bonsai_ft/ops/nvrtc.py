"""How do the CUDA kernels become machine code and run? NVRTC on first use, launches by cuda-core.

No toolkit is needed and no architecture is written down: the device says what it is. Machine code
is kept in `$BONSAI_FT_CACHE` (default `~/.cache/bonsai_ft`) under a hash of everything it depends
on; one process compiles while others wait.
"""

import ctypes
import hashlib
import io
import logging
import os
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from bonsai_ft.ops.launch import Argument
from bonsai_ft.ops.sources import source_key
from bonsai_ft.resources import cache_folder, resource

LOCK_SECONDS = 300
OPTIONS = {"std": "c++17", "ptxas_options": ["-v"]}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """Machine code of one file for one architecture; `log` lists each kernel's resources."""

    cubin: bytes
    log: str


def kernel_folder() -> Path:
    return resource("kernels") / "cuda"


def compile_source(source: str, architecture: str, folder: Path | None = None) -> Compiled:
    """Compiles `kernels/cuda/<source>` for an architecture such as "sm_90"; needs no GPU.

    Raises ImportError without the extra `cuda`, ValueError with NVRTC's log if it does not compile.
    """
    core = _core()
    folder = folder or kernel_folder()
    text = (folder / source).read_text(encoding="utf-8")
    options = core.ProgramOptions(
        name=source, arch=architecture, include_path=str(folder), **OPTIONS
    )
    log = io.StringIO()
    try:
        program = core.Program(text, "c++", options)
        code = program.compile("cubin", logs=log).code
    except Exception as error:
        # the class that cuda-core raises with NVRTC's log in it has no public name
        if type(error).__name__ != "NVRTCError":
            raise
        raise ValueError(f"{source} does not compile for {architecture}: {error}") from error
    return Compiled(cubin=bytes(code), log=log.getvalue())


def cache_key(architecture: str, folder: Path | None = None) -> str:
    """Changes with every file of kernels/cuda, the options, the architecture and NVRTC."""
    parts = (OPTIONS, architecture, _nvrtc_version())
    return source_key(folder or kernel_folder(), (".cu", ".cuh"), parts)


def load_cubin(source: str, architecture: str, folder: Path | None = None) -> bytes:
    """Machine code from the cache, or compiled now and kept.

    Without a folder to write to, or if another process holds it too long, it is compiled for this
    process alone, and a warning says so once.
    """
    key = cache_key(architecture, folder)
    path = cache_folder() / "kernels" / f"cuda-{architecture}-{key}" / f"{source}bin"
    cubin = None
    try:
        cubin = _read(path)
        if cubin is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            # the system's own lock: it does not outlive the process that holds it
            with FileLock(path.with_suffix(".lock"), timeout=LOCK_SECONDS):
                # another process may have made it while this one waited
                cubin = _read(path)
                if cubin is None:
                    cubin = compile_source(source, architecture, folder).cubin
                    _write(path, cubin)
        return cubin
    except Timeout:
        reason = f"another process has held it for {LOCK_SECONDS} s"
    except (OSError, NotImplementedError) as error:
        # the second is what filelock raises on a file system that has no locks
        reason = getattr(error, "strerror", None) or str(error)
    _say_once(f"compiling CUDA kernels without keeping them in {path.parent}: {reason}")
    return cubin or compile_source(source, architecture, folder).cubin


@lru_cache(maxsize=64)
def _say_once(message: str) -> None:
    _log.warning(message)


def _read(path: Path) -> bytes | None:
    """None where there is nothing whole."""
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    check, cubin = content[:32], content[32:]
    return cubin if hashlib.sha256(cubin).digest() == check else None


def _write(path: Path, cubin: bytes) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(hashlib.sha256(cubin).digest() + cubin)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


class NvrtcLauncher:
    """The `Launcher` of a machine with a GPU. Raises ImportError without the extra `cuda`.

    A kernel is compiled and loaded when it is first launched; from then on a launch only enqueues,
    and may be captured in a CUDA graph.
    """

    def __init__(self) -> None:
        self._core = _core()
        self._kernels: dict[tuple[int, str, str], Any] = {}
        self._codes: dict[tuple[int, str], Any] = {}
        self._streams: dict[int, Any] = {0: self._core.LEGACY_DEFAULT_STREAM}
        self._thread = threading.local()

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
        """As `Launcher.launch` says."""
        index = torch.cuda.current_device() if device.index is None else device.index
        with torch.cuda.device(index):
            if not hasattr(self._thread, "has_context"):
                self._enter_thread(index)
            function = self._kernels.get((index, source, kernel))
            if function is None:
                function = self._load(index, source, kernel)
            config = self._core.LaunchConfig(grid=grid, block=block, shmem_size=shared_bytes)
            self._core.launch(
                self._stream(torch.cuda.current_stream(index).cuda_stream),
                config,
                function,
                *[_packed(argument) for argument in arguments],
            )

    def _enter_thread(self, index: int) -> None:
        """Makes the device's context current in a thread that launches for the first time.

        torch does not where the device is the one that the runtime would take anyway, such as
        device 0 in a thread of autograd's, and the driver would refuse the launch.
        """
        self._core.Device(index).set_current()
        self._thread.has_context = True

    def _load(self, index: int, source: str, kernel: str) -> Any:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{source} would have to be compiled while a CUDA graph is captured; "
                "run the model once before capturing"
            )
        if (index, source) not in self._codes:
            major, minor = torch.cuda.get_device_capability(index)
            cubin = load_cubin(source, f"sm_{major}{minor}")
            self._codes[index, source] = self._core.ObjectCode.from_cubin(cubin, name=source)
        try:
            function = self._codes[index, source].get_kernel(kernel)
        except Exception as error:
            raise RuntimeError(
                f"{source} has no kernel {kernel} that {torch.cuda.get_device_name(index)} can "
                f"load: {error}; NVRTC {_nvrtc_version()} needs a driver of the same major version"
            ) from error
        self._kernels[index, source, kernel] = function
        return function

    def _stream(self, handle: int) -> Any:
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._core.Stream.from_handle(handle)
            self._streams[handle] = stream
        return stream


def _packed(argument: Argument) -> Any:
    # cuda-core passes a Python int as 64 bits, several times faster than a ctypes object
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    return ctypes.c_float(argument) if isinstance(argument, float) else int(argument)


def _nvrtc_version() -> str:
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}"


@lru_cache(maxsize=1)
def _core() -> Any:
    try:
        import cuda.core as core
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            f"the CUDA kernels need cuda-core and NVRTC ({error}); pip install 'bonsai-ft[cuda]'"
        ) from error
    return core

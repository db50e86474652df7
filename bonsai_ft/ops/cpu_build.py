"""How do the C++ kernels become a library? Compiled once per machine, on first use.

The sources are those of `kernels/cpu`; torch's extension builder finds the compiler and calls it.
The library has a C interface, so that neither Python's nor torch's version matters to it. It lies
in `$BONSAI_FT_CACHE` (default `~/.cache/bonsai_ft`) under a hash of all that it depends on.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from bonsai_ft.ops.sources import KernelUnavailable, source_key
from bonsai_ft.resources import cache_folder, resource

LOCK_SECONDS = 600
# Without -ffast-math: a NaN must stay one, and sums keep their order whatever the thread count.
FLAGS = ("-O3", "-std=c++17", "-fno-math-errno")
THREAD_FLAGS = ("-fopenmp",)


def sources() -> list[Path]:
    return sorted(resource("kernels").joinpath("cpu").glob("*.cpp"))


def library_key() -> str:
    """Changes with the sources, the flags, the processor's family and the system."""
    parts = (*FLAGS, *THREAD_FLAGS, platform.machine(), sys.platform)
    return source_key(resource("kernels") / "cpu", (".cpp", ".h"), parts)


def library_path() -> Path:
    key = library_key()
    return cache_folder() / "kernels" / f"cpu-{key}" / f"bonsai_cpu_{key}.so"


def load_library() -> ctypes.CDLL:
    """The compiled kernels, from the cache or compiled now.

    Raises KernelUnavailable, with the reason, where they cannot be built or loaded.
    """
    path = library_path()
    with suppress(OSError):
        return _open(path)
    # not there, damaged, or made for another system
    return _build(path)


def _open(path: Path) -> ctypes.CDLL:
    """Raises OSError unless the library is there, whole, and made for this system."""
    # the loader dies of a library that is cut short
    if _digest_path(path).read_bytes() != _digest(path):
        raise OSError(f"{path} is damaged")
    return ctypes.CDLL(str(path))


def _digest_path(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _digest(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).hexdigest().encode()


def _build(path: Path) -> ctypes.CDLL:
    from filelock import FileLock, Timeout

    folder = path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KernelUnavailable(f"{folder} cannot be written to ({error.strerror})") from error
    try:
        with FileLock(folder.with_suffix(".lock"), timeout=LOCK_SECONDS):
            # another process may have made it while this one waited
            with suppress(OSError):
                return _open(path)
            _compile(path)
            return _open(path)
    except Timeout as error:
        raise KernelUnavailable(
            f"another process has been compiling into {folder} for {LOCK_SECONDS} s"
        ) from error
    except (OSError, NotImplementedError) as error:
        # the second is what filelock raises on a file system that has no locks
        raise KernelUnavailable(f"{path} cannot be made or loaded ({error})") from error


def _compile(path: Path) -> None:
    """Makes the library; it appears under its name only when it is whole. The lock is held."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise KernelUnavailable(
            f"there is no C++ compiler: {compiler} is not a program; install g++ or clang, or set "
            f"CXX to one, without options"
        )
    # imported here: it asks the system about compilers and toolkits
    from torch.utils import cpp_extension

    for left_by_a_killed_process in path.parent.glob("build-*"):
        shutil.rmtree(left_by_a_killed_process, ignore_errors=True)
    reason = ""
    for threads in (THREAD_FLAGS, ()):
        # a folder of its own, where no lock of torch's builder can have been left behind
        with TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
            try:
                with _builder_environment():
                    cpp_extension.load(
                        name=path.stem,
                        sources=[str(source) for source in sources()],
                        extra_cflags=[*FLAGS, *threads],
                        extra_ldflags=list(threads),  # which the builder appends to
                        build_directory=folder,
                        is_python_module=False,
                        verbose=False,
                    )
            except (RuntimeError, OSError, subprocess.SubprocessError) as error:
                reason = str(error).strip()
                # some compilers (Apple's) have no OpenMP: one thread is then better than none
                if threads and not _is_about_openmp(reason):
                    break
                continue
            # torch's builder numbers the names of what one process builds more than once
            (library,) = Path(folder).glob("*.so")
            _digest_path(path).write_bytes(_digest(library))
            library.replace(path)
            return
    raise KernelUnavailable(f"the C++ kernels do not compile here: {_complaints(reason)}")


@contextmanager
def _builder_environment() -> Iterator[None]:
    """`ninja`, which the builder calls, lies beside Python if pip installed it.

    The builder's check that the compiler is the one that made torch is for C++ interfaces.
    """
    changes = {
        "PATH": os.pathsep.join([os.environ.get("PATH", ""), sysconfig.get_path("scripts")]),
        "TORCH_DONT_CHECK_COMPILER_ABI": "1",
    }
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _is_about_openmp(text: str) -> bool:
    """Whether a line that is not a command complains of the flag, header or library."""
    words = ("error", "cannot find", "not found", "unsupported", "unrecognized")
    lines = [
        line for line in text.lower().splitlines() if " -c " not in line and " -shared" not in line
    ]
    # -fopenmp, omp.h, libgomp, libomp
    return any(
        ("openmp" in line or "omp" in line) and any(word in line for word in words)
        for line in lines
    )


def _complaints(text: str, count: int = 3) -> str:
    """The compiler's first complaints, as one line."""
    lines = [line.strip() for line in text.splitlines()]
    complaints = list(dict.fromkeys(line for line in lines if "error:" in line.lower()))
    return " | ".join(line[:200] for line in (complaints or lines)[:count])

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
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bonsai_ft.resources import cache_folder, resource

LOCK_SECONDS = 600
# Without -ffast-math: a NaN must stay one, and sums keep their order whatever the thread count.
FLAGS = ["-O3", "-std=c++17", "-fno-math-errno"]
THREAD_FLAGS = ["-fopenmp"]


class KernelUnavailable(RuntimeError):
    """The compiled kernels cannot be had here; the message says why."""


def sources() -> list[Path]:
    return sorted(resource("kernels").joinpath("cpu").glob("*.cpp"))


def library_key() -> str:
    """Changes with the sources, the flags, the processor's family and the system."""
    digest = hashlib.sha256()
    folder = resource("kernels") / "cpu"
    for path in sorted([*folder.glob("*.cpp"), *folder.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for part in (*FLAGS, *THREAD_FLAGS, platform.machine(), sys.platform):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:16]


def library_path() -> Path:
    key = library_key()
    return cache_folder(None) / "kernels" / f"cpu-{key}" / f"bonsai_cpu_{key}.so"


def load_library() -> ctypes.CDLL:
    """The compiled kernels, from the cache or compiled now.

    Raises KernelUnavailable, with the reason, where they cannot be built or loaded.
    """
    path = library_path()
    if path.is_file():
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            # cut short or made for another system: made anew below
            pass
    return _build(path)


def _build(path: Path) -> ctypes.CDLL:
    from filelock import FileLock, Timeout

    folder = path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KernelUnavailable(f"{folder} cannot be written to ({error.strerror})") from error
    try:
        with FileLock(folder.with_suffix(".lock"), timeout=LOCK_SECONDS):
            if path.is_file():
                try:
                    return ctypes.CDLL(str(path))
                except OSError:
                    path.unlink()
            _compile(path)
            return ctypes.CDLL(str(path))
    except Timeout as error:
        raise KernelUnavailable(
            f"another process has been compiling into {folder} for {LOCK_SECONDS} s"
        ) from error
    except OSError as error:
        raise KernelUnavailable(f"{path} cannot be made or loaded ({error})") from error


def _compile(path: Path) -> None:
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise KernelUnavailable(f"there is no C++ compiler ({compiler}); install g++ or clang")
    # imported here: it asks the system about compilers and toolkits
    from torch.utils import cpp_extension

    # torch's own lock is a file that a killed process leaves behind; ours, held here, is the
    # system's, so a file found now has no owner
    (path.parent / "lock").unlink(missing_ok=True)
    reasons = []
    for threads in (THREAD_FLAGS, []):
        try:
            with _ninja_on_path():
                cpp_extension.load(
                    name=path.stem,
                    sources=[str(source) for source in sources()],
                    extra_cflags=[*FLAGS, *threads],
                    extra_ldflags=threads,
                    build_directory=str(path.parent),
                    is_python_module=False,
                    verbose=False,
                )
            return
        except (RuntimeError, OSError) as error:
            # some compilers (Apple's) have no OpenMP: one thread is then better than none
            reasons.append(str(error).strip())
    raise KernelUnavailable(f"the C++ kernels do not compile here: {_last_lines(reasons[-1])}")


@contextmanager
def _ninja_on_path() -> Iterator[None]:
    """The builder calls `ninja`, which lies beside Python if pip installed it."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([before, sysconfig.get_path("scripts")])
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _last_lines(text: str, count: int = 3) -> str:
    lines = [line.strip() for line in text.splitlines() if "error" in line.lower()]
    return " | ".join((lines or text.splitlines())[:count])

"""Are the C++ kernels compiled once, whole or not at all, with a reason when it cannot be done?"""

import logging
import os
import shutil
import stat
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from test_ops import arguments, codewords_of, random_weight

from bonsai_ft.ops import available_kernels, choose_kernel, cpu_build, ternary_linear
from bonsai_ft.ops.cpu_build import KernelUnavailable, library_key, library_path, load_library
from bonsai_ft.ops.cpu_kernels import library

COMPILER = shutil.which(os.environ.get("CXX", "c++"))

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler here")


def _forget():
    library.cache_clear()
    choose_kernel.cache_clear()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and a process that has not chosen a kernel yet."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("BONSAI_FT_CACHE", str(folder))
    monkeypatch.delenv("BONSAI_CPU_ISA", raising=False)
    _forget()
    key = library_key()
    yield folder
    _forget()
    assert library_key() == key, "building changed what the key is made from"


@pytest.fixture(scope="module")
def made():
    """The library that the other tests use."""
    load_library()
    return library_path()


@pytest.fixture
def wrapper(tmp_path):
    """`wrapper(line)`: a compiler that notes each start, runs a line of shell, then compiles."""

    def make(line=""):
        script = tmp_path / "compiler"
        script.write_text(
            f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n{line}\nexec {COMPILER} "$@"\n'
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        return str(script)

    return make


def run(code, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def works():
    """The library in use computes."""
    weight = random_weight(24, 200, packing="base3")
    x = torch.randn(3, 200)
    args = arguments(weight, x, codewords_of(weight))
    y = ternary_linear(*args, "cpu")
    return torch.allclose(y, ternary_linear(*args, "reference"), rtol=1e-4, atol=1e-4)


def test_importing_the_package_compiles_nothing_and_asks_nothing(tmp_path):
    code = """
        import sys
        started = []
        def note(event, args):
            if event in ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.fork"):
                started.append((event, args[:2]))
            if event == "ctypes.dlopen" and "bonsai" in str(args[0]):
                started.append((event, args))
        import torch
        sys.addaudithook(note)
        import bonsai_ft, bonsai_ft.ops, bonsai_ft.ops.cpu_build, bonsai_ft.ops.cpu_kernels
        assert not started, started
        assert "torch.utils.cpp_extension" not in sys.modules
        assert not torch.cuda.is_initialized()
    """
    child = run(code, BONSAI_FT_CACHE=str(tmp_path / "cache"), HOME=str(tmp_path))
    assert child.wait() == 0, child.stderr.read()[-2000:]
    assert not list(tmp_path.iterdir())


def test_without_a_compiler_auto_takes_the_reference_and_says_so_once(cache, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    with pytest.raises(KernelUnavailable, match=r"no C\+\+ compiler: /nonexistent/c\+\+ is not"):
        load_library()
    with caplog.at_level(logging.INFO, logger="bonsai_ft"):
        for _ in range(3):
            assert choose_kernel("auto", "cpu") == "reference"
    (record,) = caplog.records
    line = record.getMessage()
    assert record.levelno == logging.WARNING
    assert "reference" in line
    assert "no C++ compiler" in line
    assert "\n" not in line
    weight = random_weight(24, 200)
    args = arguments(weight, torch.randn(3, 200), codewords_of(weight))
    assert torch.equal(ternary_linear(*args, "auto"), ternary_linear(*args, "reference"))
    with pytest.raises(ValueError, match=r"kernel=cpu cannot be used: there is no C\+\+ compiler"):
        ternary_linear(*args, "cpu")
    report = {kernel.name: kernel for kernel in available_kernels()}["cpu"]
    assert not report.is_available
    assert "no C++ compiler" in report.reason


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("c++ -m64", "c\\+\\+ -m64 is not a program"),
        ("/bin/false", "do not compile here"),
        ("says_why", "do not compile here: a.cpp:1:2: error: this machine is on strike$"),
    ],
)
def test_a_compiler_that_fails_is_a_reason_of_one_line(
    cache, monkeypatch, tmp_path, compiler, reason
):
    if compiler == "says_why":
        script = tmp_path / compiler
        script.write_text("#!/bin/sh\necho a.cpp:1:2: error: this machine is on strike\nexit 1\n")
        script.chmod(0o755)
        compiler = str(script)
    monkeypatch.setenv("CXX", compiler)
    before = dict(os.environ)
    with pytest.raises(KernelUnavailable, match=reason) as caught:
        load_library()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700
    assert os.environ == before
    assert not list(library_path().parent.iterdir())


def test_an_instruction_set_that_is_not_there_is_a_reason(cache, monkeypatch):
    monkeypatch.delenv("BONSAI_FT_CACHE")
    monkeypatch.setenv("BONSAI_CPU_ISA", "mmx")
    with pytest.raises(KernelUnavailable, match="BONSAI_CPU_ISA=mmx is not available"):
        library()


@needs_compiler
def test_two_processes_at_once_compile_once(cache, wrapper, tmp_path):
    compiler = wrapper()
    code = """
        from bonsai_ft.ops.cpu_kernels import describe
        print(describe())
    """
    children = [run(code, CXX=compiler, BONSAI_FT_CACHE=str(cache)) for _ in range(2)]
    for child in children:
        out, error = child.communicate()
        assert child.returncode == 0, error[-2000:]
        assert out.strip()
    calls = (tmp_path / "calls").read_text().splitlines()
    compiled = [call for call in calls if " -c " in call]
    assert len(compiled) == len(cpu_build.sources())
    assert sorted(p.suffix for p in library_path().parent.iterdir()) == [".sha256", ".so"]
    # a later one starts no compiler at all
    later = run(code, CXX="/nonexistent", BONSAI_FT_CACHE=str(cache))
    assert later.wait() == 0, later.stderr.read()[-2000:]


@needs_compiler
@pytest.mark.parametrize("damage", [b"", b"not a library"], ids=["empty", "garbage"])
def test_a_damaged_library_is_not_opened(cache, made, damage):
    path = _copy(made)
    path.write_bytes(damage)
    with pytest.raises(OSError, match="damaged"):
        cpu_build._open(path)


@needs_compiler
def test_a_damaged_library_and_what_a_killed_process_left_are_replaced(cache, made):
    path = _copy(made)
    # cut short after its header, which the system's loader would die of
    path.write_bytes(made.read_bytes()[:8192])
    left = path.parent / "build-left"
    left.mkdir()
    for place in (path.parent / "lock", left / "lock", path.parent.with_suffix(".lock")):
        place.touch()
    assert works()
    assert path.stat().st_size == made.stat().st_size
    assert not left.exists()


def _copy(made):
    path = library_path()
    path.parent.mkdir(parents=True)
    for suffix in (".so", ".sha256"):
        shutil.copy(made.with_suffix(suffix), path.with_suffix(suffix))
    return path


@needs_compiler
def test_a_compiler_without_openmp_makes_a_library_for_one_thread(cache, monkeypatch, wrapper):
    refuse = 'case "$*" in *-fopenmp*) echo "error: unsupported option -fopenmp"; exit 1;; esac'
    monkeypatch.setenv("CXX", wrapper(refuse))
    assert not library().has_threads
    assert choose_kernel("auto", "cpu") == "cpu"
    report = {kernel.name: kernel for kernel in available_kernels()}["cpu"]
    assert report.detail.endswith("one thread: the compiler has no OpenMP")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert works()
    finally:
        torch.set_num_threads(before)


def test_waiting_for_another_process_has_a_limit(cache, monkeypatch):
    from filelock import FileLock

    monkeypatch.setattr(cpu_build, "LOCK_SECONDS", 0.1)
    folder = library_path().parent
    folder.parent.mkdir(parents=True)
    start = time.monotonic()
    with (
        FileLock(folder.with_suffix(".lock")),
        pytest.raises(KernelUnavailable, match="another process has been compiling"),
    ):
        load_library()
    assert time.monotonic() - start < 5


def test_a_cache_folder_that_cannot_be_written_is_a_reason(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("BONSAI_FT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(KernelUnavailable, match=r"cannot be written to \(.+\)$"):
        load_library()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_cache_folder_is_a_reason(cache):
    library_path().parent.mkdir(parents=True)
    library_path().parent.parent.chmod(0o500)
    with pytest.raises(KernelUnavailable, match="Permission denied"):
        load_library()


@needs_compiler
def test_a_library_in_a_read_only_cache_folder_is_used(cache, made, monkeypatch):
    path = _copy(made)
    for folder in (path.parent, path.parent.parent, cache):
        folder.chmod(0o500)
    monkeypatch.setenv("CXX", "/nonexistent")
    try:
        assert works()
        assert not path.parent.with_suffix(".lock").exists()
    finally:
        for folder in (cache, path.parent.parent, path.parent):
            folder.chmod(0o700)


def test_the_key_changes_with_every_source_and_flag(tmp_path, monkeypatch):
    folder = tmp_path / "kernels" / "cpu"
    shutil.copytree(cpu_build.resource("kernels") / "cpu", folder)
    before = library_key()
    monkeypatch.setattr(cpu_build, "resource", lambda name: tmp_path / name)
    assert library_key() == before
    seen = {before}
    for name in ("ternary.h", "linear.cpp"):
        with (folder / name).open("a") as file:
            file.write("// changed\n")
        seen.add(library_key())
    (folder / "more.cpp").touch()
    seen.add(library_key())
    monkeypatch.setattr(cpu_build, "FLAGS", [*cpu_build.FLAGS, "-g"])
    seen.add(library_key())
    assert len(seen) == 5


def test_the_builder_finds_ninja_beside_python_and_leaves_the_environment_alone(monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.delenv("TORCH_DONT_CHECK_COMPILER_ABI", raising=False)
    before = dict(os.environ)
    with pytest.raises(KeyError), cpu_build._builder_environment():  # noqa: PT012 - one fault
        found = shutil.which("ninja")
        raise KeyError
    assert found is not None
    assert dict(os.environ) == before


@needs_compiler
def test_a_compiler_that_was_killed_is_not_taken_for_one_without_openmp(
    cache, monkeypatch, wrapper
):
    killed = (
        'case "$*" in *-fopenmp*" -c "*) echo "Killed signal terminated cc1plus"; exit 1;; esac'
    )
    monkeypatch.setenv("CXX", wrapper(killed))
    with pytest.raises(KernelUnavailable, match="do not compile here"):
        library()
    assert not library_path().exists()
    monkeypatch.setenv("CXX", wrapper())
    assert library().has_threads

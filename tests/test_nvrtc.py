"""Do the CUDA sources compile for every architecture without spills, once, and from the cache?"""

import logging
import multiprocessing
import re

import pytest
import torch

from bonsai_ft.ops import nvrtc
from bonsai_ft.ops.nvrtc import cache_key, compile_source, kernel_folder, load_cubin

ARCHITECTURES = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]
SOURCES = sorted(path.name for path in kernel_folder().glob("*.cu"))
# Every kernel is launched with at most 256 threads, and a multiprocessor has 65,536 registers.
MOST_REGISTERS = 255
MOST_SHARED_BYTES = 48 << 10

SMALL = """
#include "part.cuh"
extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= FACTOR; }
"""
# 400 live values cannot stay in 255 registers
SPILLING = """
extern "C" __global__ void spills(float* x) {
  float v[400];
  #pragma unroll
  for (int i = 0; i < 400; ++i) v[i] = x[i * 7 + threadIdx.x];
  __syncthreads();
  #pragma unroll
  for (int r = 0; r < 3; ++r) {
    #pragma unroll
    for (int i = 0; i < 400; ++i) v[i] = v[i] * v[(i * 37 + 11) % 400] + x[i];
  }
  #pragma unroll
  for (int i = 0; i < 400; ++i) x[i * 5 + threadIdx.x] = v[i];
}
"""


def resources(log: str) -> dict[str, dict[str, int]]:
    """What ptxas says of each kernel."""
    found = {}
    for part in log.split("Compiling entry function '")[1:]:
        name, _, text = part.partition("'")
        stack, stores, loads = map(
            int,
            re.search(
                r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text
            ).groups(),
        )
        shared = re.search(r"(\d+) bytes smem", text)
        found[name] = {
            "registers": int(re.search(r"Used (\d+) registers", text).group(1)),
            "stack": stack,
            "spills": stores + loads,
            "shared": int(shared.group(1)) if shared else 0,
        }
    return found


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of small sources, and an empty cache."""
    monkeypatch.setenv("BONSAI_FT_CACHE", str(tmp_path / "cache"))
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "small.cu").write_text(SMALL)
    (sources / "part.cuh").write_text("#define FACTOR 2.0f\n")
    return sources


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_compiles_without_spills(architecture, source):
    check_resources(source, architecture)


@pytest.mark.parametrize("source", SOURCES)
def test_every_kernel_compiles_for_the_oldest_architecture(source):
    check_resources(source, ARCHITECTURES[0])


def check_resources(source, architecture):
    compiled = compile_source(source, architecture)
    assert compiled.cubin[:4] == b"\x7fELF"
    kernels = re.findall(r"(?:^|[(, ])(\w+_(?:bf16|f16|f32))\b", compiled.log)
    found = resources(compiled.log)
    assert found, compiled.log
    assert set(kernels) <= set(found)
    for name, used in found.items():
        assert used["spills"] == 0, (name, used)
        assert used["stack"] == 0, (name, used)
        assert used["registers"] <= MOST_REGISTERS, (name, used)
        assert used["shared"] <= MOST_SHARED_BYTES, (name, used)


def test_a_kernel_that_spills_is_noticed(folder):
    (folder / "spilling.cu").write_text(SPILLING)
    used = resources(compile_source("spilling.cu", "sm_80", folder).log)["spills"]
    assert used["spills"] > 0
    assert used["stack"] > 0


def test_an_error_shows_file_architecture_and_reason(folder):
    (folder / "wrong.cu").write_text('extern "C" __global__ void f() { nothing(); }')
    with pytest.raises(ValueError, match=r"(?s)wrong\.cu does not compile for sm_80.*nothing"):
        compile_source("wrong.cu", "sm_80", folder)


def test_the_second_time_nothing_is_compiled(folder, monkeypatch):
    first = load_cubin("small.cu", "sm_80", folder)

    def never(*args):
        raise AssertionError("compiled again")

    monkeypatch.setattr(nvrtc, "compile_source", never)
    assert load_cubin("small.cu", "sm_80", folder) == first


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b"", lambda b: b[:40] + b"\xff\xff" + b[42:]]
)
def test_a_damaged_file_is_made_again(folder, tmp_path, damage):
    first = load_cubin("small.cu", "sm_80", folder)
    [path] = (tmp_path / "cache").rglob("small.cubin")
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert load_cubin("small.cu", "sm_80", folder) == first
    assert path.read_bytes() == whole


def test_the_key_changes_with_source_header_option_and_architecture(folder, monkeypatch):
    keys = {cache_key("sm_80", folder), cache_key("sm_90", folder)}
    (folder / "small.cu").write_text(SMALL + "\n")
    keys.add(cache_key("sm_80", folder))
    (folder / "part.cuh").write_text("#define FACTOR 3.0f\n")
    keys.add(cache_key("sm_80", folder))
    monkeypatch.setitem(nvrtc.OPTIONS, "std", "c++20")
    keys.add(cache_key("sm_80", folder))
    assert len(keys) == 5


def test_a_cache_that_cannot_be_written_to_is_said_and_not_needed(
    folder, tmp_path, monkeypatch, caplog
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BONSAI_FT_CACHE", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, logger="bonsai_ft.ops.nvrtc"):
        assert load_cubin("small.cu", "sm_80", folder)[:4] == b"\x7fELF"
    assert "without keeping it" in caplog.text


def _compile_and_count(folder, cache, barrier, results):
    import os

    os.environ["BONSAI_FT_CACHE"] = str(cache)
    real, calls = nvrtc.compile_source, []
    nvrtc.compile_source = lambda *args: calls.append(1) or real(*args)
    barrier.wait()
    load_cubin("small.cu", "sm_80", folder)
    results.put(len(calls))


def test_two_processes_compile_once(folder, tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    arguments = (folder, tmp_path / "cache", barrier, results)
    workers = [context.Process(target=_compile_and_count, args=arguments) for _ in range(2)]
    for worker in workers:
        worker.start()
    counts = [results.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join()
    assert sum(counts) == 1


def test_a_lock_held_too_long_is_not_waited_for(folder, tmp_path, monkeypatch, caplog):
    load_cubin("small.cu", "sm_80", folder)
    [path] = (tmp_path / "cache").rglob("small.cubin")
    path.unlink()
    monkeypatch.setattr(nvrtc, "LOCK_SECONDS", 0.05)
    heard = caplog.at_level(logging.WARNING, logger="bonsai_ft.ops.nvrtc")
    with heard, nvrtc.FileLock(path.with_suffix(".lock")):
        assert load_cubin("small.cu", "sm_80", folder)
    assert "another process" in caplog.text


def test_without_a_gpu_the_kernels_say_why():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    from bonsai_ft.ops import available_kernels, choose_kernel

    [report] = [kernel for kernel in available_kernels() if kernel.name == "cuda"]
    assert not report.is_available
    assert "no CUDA device" in report.reason
    with pytest.raises(ValueError, match="kernel=cuda cannot be used: torch finds no CUDA device"):
        choose_kernel("cuda", "cuda")


def test_the_missing_extra_is_named(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "cuda.core", None)
    nvrtc._core.cache_clear()
    try:
        with pytest.raises(ImportError, match=r"pip install 'bonsai-ft\[cuda\]'"):
            nvrtc.NvrtcLauncher()
    finally:
        nvrtc._core.cache_clear()


def test_the_sources_are_complete():
    assert (kernel_folder() / "device.cuh").is_file()
    assert len(SOURCES) >= 3

"""Do the CUDA sources compile for every architecture without spills, once, and from the cache?"""

import ctypes
import logging
import multiprocessing
import os
import re
import signal
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from bonsai_ft.ops import cuda_kernels, nvrtc
from bonsai_ft.ops.nvrtc import cache_key, compile_source, kernel_folder, load_cubin

ARCHITECTURES = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]
SOURCES = sorted(path.name for path in kernel_folder().glob("*.cu"))
TYPES = ("bf16", "f16", "f32")
# The kernels of each file, without their types, and the threads that each is launched with.
KERNELS = {
    "codebook_gradient.cu": {"sum_by_code": cuda_kernels.SUM_THREADS},
    "dequantize.cu": {"dequantize": cuda_kernels.DEQUANTIZE_THREADS},
    "linear_small.cu": {
        "prepare": cuda_kernels.PREPARE_THREADS,
        **{
            f"linear{tokens}_{packing}": cuda_kernels.LINEAR_THREADS
            for tokens in (8, 16)
            for packing in cuda_kernels.PACKINGS
        },
    },
}
# What one block can have.
MOST_REGISTERS = 65_536
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
    threads = {f"{name}_{t}": n for name, n in KERNELS[source].items() for t in TYPES}
    found = resources(compiled.log)
    assert set(found) == set(threads), compiled.log
    for name, used in found.items():
        # the log is about what is in the machine code
        assert f".text.{name}\0".encode() in compiled.cubin
        assert used["spills"] == 0, (name, used)
        assert used["stack"] == 0, (name, used)
        assert 0 < used["registers"] * threads[name] <= MOST_REGISTERS, (name, used)
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
        assert load_cubin("small.cu", "sm_80", folder)[:4] == b"\x7fELF"
    assert caplog.text.count("without keeping them") == 1


@pytest.mark.parametrize("error", [PermissionError(13, "no"), NotImplementedError("no locks")])
def test_a_file_system_without_locks_will_do(folder, monkeypatch, error):
    def refuse(*args, **settings):
        raise error

    monkeypatch.setattr(nvrtc, "FileLock", refuse)
    assert load_cubin("small.cu", "sm_80", folder)[:4] == b"\x7fELF"


def test_an_entry_that_cannot_be_opened_is_compiled_anew(folder, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(nvrtc, "_read", refuse)
    assert load_cubin("small.cu", "sm_80", folder)[:4] == b"\x7fELF"


def _compile_and_count(folder, cache, barrier, results):
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


def _hold(path, started):
    with nvrtc.FileLock(path):
        started.set()
        threading.Event().wait()


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs a signal that cannot be caught")
def test_a_lock_does_not_outlive_its_holder(folder, tmp_path, monkeypatch):
    load_cubin("small.cu", "sm_80", folder)
    [path] = (tmp_path / "cache").rglob("small.cubin")
    path.unlink()
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    holder = context.Process(target=_hold, args=(path.with_suffix(".lock"), started))
    holder.start()
    assert started.wait(120)
    holder.kill()
    holder.join()
    monkeypatch.setattr(nvrtc, "LOCK_SECONDS", 60)
    load_cubin("small.cu", "sm_80", folder)
    # kept: the lock was taken, not given up
    assert path.is_file()


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
    assert sorted(KERNELS) == SOURCES


# Launches, on a GPU that only writes down what it is asked for


class PretendedGpu:
    """Stands for cuda-core and for torch.cuda; `asked` is what they were asked to do."""

    LEGACY_DEFAULT_STREAM = "default stream"

    def __init__(self):
        self.asked = []
        self.stream = 0
        self.is_capturing = False
        self.ObjectCode = SimpleNamespace(from_cubin=self.from_cubin)
        self.Stream = SimpleNamespace(from_handle=lambda handle: f"stream {handle}")

    def Device(self, index):
        return SimpleNamespace(set_current=lambda: self.asked.append(("context", index)))

    def LaunchConfig(self, **config):
        return config

    def from_cubin(self, cubin, name):
        self.asked.append(("load", name, cubin))
        return self

    def get_kernel(self, name):
        if name == "unknown":
            raise KeyError("CUDA_ERROR_NOT_FOUND")
        return f"kernel {name}"

    def launch(self, *what):
        self.asked.append(("launch", *what))

    def count(self, what):
        return sum(one[0] == what for one in self.asked)


@pytest.fixture
def gpu(monkeypatch):
    pretended = PretendedGpu()

    def stream(index):
        return SimpleNamespace(cuda_stream=pretended.stream + index)

    for name, value in {
        "device": lambda index: nullcontext(),
        "current_device": lambda: 0,
        "current_stream": stream,
        "is_current_stream_capturing": lambda: pretended.is_capturing,
        "get_device_capability": lambda index: (9, index),
        "get_device_name": lambda index: "a card",
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(nvrtc, "_core", lambda: pretended)
    monkeypatch.setattr(nvrtc, "load_cubin", lambda source, architecture: architecture)
    return pretended


def launch(launcher, kernel="twice", arguments=(), index=0):
    device = torch.device("cuda", index)
    launcher.launch("small.cu", kernel, (2, 3, 1), 64, arguments, device, 128)


def test_a_launch_goes_to_the_current_stream_of_its_device(gpu):
    launcher = nvrtc.NvrtcLauncher()
    launch(launcher)
    gpu.stream = 40
    launch(launcher, index=1)
    config = {"grid": (2, 3, 1), "block": 64, "shmem_size": 128}
    launches = [one for one in gpu.asked if one[0] == "launch"]
    assert launches == [
        ("launch", "default stream", config, "kernel twice"),
        ("launch", "stream 41", config, "kernel twice"),
    ]


def test_every_device_gets_machine_code_of_its_own_once(gpu):
    launcher = nvrtc.NvrtcLauncher()
    for index in (0, 1, 0, 1):
        launch(launcher, index=index)
        launch(launcher, "thrice", index=index)
    assert [one for one in gpu.asked if one[0] == "load"] == [
        ("load", "small.cu", "sm_90"),
        ("load", "small.cu", "sm_91"),
    ]
    assert gpu.count("launch") == 8


def test_arguments_are_addresses_and_numbers(gpu):
    x = torch.zeros(4)
    launch(nvrtc.NvrtcLauncher(), arguments=(x[1:], 5, True, 0.5))
    address, number, truth, real = gpu.asked[-1][-4:]
    assert address == x.data_ptr() + 4
    # cuda-core would pass a bool as one byte
    assert (type(number), type(truth)) == (int, int)
    assert isinstance(real, ctypes.c_float)
    assert real.value == 0.5


def test_cuda_core_passes_an_int_as_64_bits():
    from cuda.core._kernel_arg_handler import ParamHolder

    values = (5, -3, 1 << 62)
    held = ParamHolder(values)
    addresses = ctypes.cast(held.ptr, ctypes.POINTER(ctypes.c_void_p))
    for i, value in enumerate(values):
        assert ctypes.c_int64.from_address(addresses[i]).value == value


def test_every_thread_gets_a_context_before_its_first_launch(gpu):
    launcher = nvrtc.NvrtcLauncher()
    launch(launcher)
    launch(launcher)
    assert gpu.asked[0] == ("context", 0)
    assert gpu.count("context") == 1
    thread = threading.Thread(target=launch, args=(launcher,))
    thread.start()
    thread.join()
    assert gpu.count("context") == 2
    assert gpu.count("launch") == 3


def test_nothing_is_compiled_while_a_graph_is_captured(gpu):
    launcher = nvrtc.NvrtcLauncher()
    gpu.is_capturing = True
    with pytest.raises(RuntimeError, match=r"small\.cu would have to be compiled .* run the model"):
        launch(launcher)
    assert gpu.count("load") == 0
    gpu.is_capturing = False
    launch(launcher)
    gpu.is_capturing = True
    launch(launcher)
    assert gpu.count("launch") == 2


def test_a_kernel_that_is_not_there_is_named_with_its_file(gpu):
    launcher = nvrtc.NvrtcLauncher()
    with pytest.raises(RuntimeError, match=r"small\.cu has no kernel unknown .*a card.*NOT_FOUND"):
        launch(launcher, "unknown")


# Launches on a GPU

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU")


@pytest.fixture
def doubling(folder, monkeypatch):
    """`doubling(x)` enqueues the doubling of up to 1024 elements."""
    monkeypatch.setattr(nvrtc, "kernel_folder", lambda: folder)
    launcher = nvrtc.NvrtcLauncher()

    def double(x):
        launcher.launch("small.cu", "twice", (1, 1, 1), x.numel(), (x,), x.device)

    return double


@pytest.mark.cuda
@on_gpu
def test_every_device_of_this_machine_runs_a_kernel(doubling):
    for index in range(torch.cuda.device_count()):
        x = torch.ones(100, device=f"cuda:{index}")
        doubling(x)
        assert x.eq(2).all()


@pytest.mark.cuda
@on_gpu
def test_a_kernel_waits_for_its_own_stream_alone(doubling):
    x = torch.ones(100, device="cuda")
    doubling(x)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.fill_(3)
        doubling(x)
    stream.synchronize()
    assert x.eq(6).all()


@pytest.mark.cuda
@on_gpu
def test_a_captured_kernel_runs_at_every_replay(doubling):
    x = torch.ones(100, device="cuda")
    doubling(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubling(x)
    assert x.eq(2).all()
    for _ in range(3):
        graph.replay()
    assert x.eq(16).all()


@pytest.mark.cuda
@on_gpu
def test_a_fresh_thread_can_launch(doubling):
    x = torch.ones(100, device="cuda")
    failures = []

    def run():
        try:
            doubling(x)
        except Exception as error:
            failures.append(error)
            raise

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failures
    torch.cuda.synchronize()
    assert x.eq(2).all()


def test_a_card_too_old_for_the_kernels_is_left_to_the_reference(monkeypatch):
    from bonsai_ft.ops import choose_kernel, cuda_kernels

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Old Card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    monkeypatch.setattr(cuda_kernels, "launcher", lambda: None)
    choose_kernel.cache_clear()
    try:
        assert choose_kernel("auto", "cuda") == "reference"
        with pytest.raises(ValueError, match=r"Old Card is of compute capability 7\.5.* need 8\.0"):
            choose_kernel("cuda", "cuda")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
        choose_kernel.cache_clear()
        assert choose_kernel("cuda", "cuda") == "cuda"
    finally:
        choose_kernel.cache_clear()

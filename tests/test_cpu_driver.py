"""Do the C++ kernels hold by themselves: under sanitizers, and on processors other than this one?

tests/cpu_driver.cpp compares them with double precision; here it is built and run. On a Debian
machine `apt-get install g++-aarch64-linux-gnu qemu-user` brings what the ARM part needs.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from bonsai_ft.ops.cpu_build import FLAGS, THREAD_FLAGS
from bonsai_ft.resources import resource

DRIVER = Path(__file__).with_name("cpu_driver.cpp")
COMPILER = os.environ.get("CXX", "c++")
CROSS_COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"
PROCESSORS = {"cortex-a57": False, "neoverse-n1": True}  # has it the instruction sdot?
SANITIZERS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")

needs_compiler = pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"needs {COMPILER}")
needs_arm = pytest.mark.skipif(
    shutil.which(CROSS_COMPILER) is None or shutil.which(EMULATOR) is None,
    reason=f"needs {CROSS_COMPILER} and {EMULATOR}",
)


def _has_sanitizers(folder):
    source = folder / "empty.cpp"
    source.write_text("int main() {}\n")
    args = [COMPILER, *SANITIZERS, str(source), "-o", str(folder / "empty")]
    return subprocess.run(args, capture_output=True).returncode == 0


def build(folder, compiler, *flags, edit=None):
    """The driver with all kernels; `edit` = (file, old, new) changes the kernels first."""
    kernels = folder / "cpu"
    shutil.copytree(resource("kernels") / "cpu", kernels)
    if edit is not None:
        name, old, new = edit
        text = (kernels / name).read_text()
        assert text.count(old) == 1, (name, old)
        (kernels / name).write_text(text.replace(old, new))
    program = folder / "driver"
    args = [compiler, *FLAGS, *flags, f"-I{kernels}", DRIVER, *sorted(kernels.glob("*.cpp"))]
    done = subprocess.run([*args, "-o", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return program


def run(program, *names, before=()):
    # more threads than processors: waiting must not take one
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    return subprocess.run(
        [*before, program, *names], capture_output=True, text=True, env=environment
    )


@needs_compiler
def test_every_instruction_set_here_is_right(tmp_path):
    program = build(tmp_path, COMPILER, *THREAD_FLAGS)
    done = run(program)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "scalar: right" in done.stdout
    done = run(program, "altivec")
    assert done.returncode == 1
    assert "there is no altivec here" in done.stdout


@pytest.mark.slow
@needs_compiler
def test_sanitizers_find_nothing(tmp_path):
    if not _has_sanitizers(tmp_path):
        pytest.skip(f"{COMPILER} has no sanitizers")
    done = run(build(tmp_path, COMPILER, *THREAD_FLAGS, *SANITIZERS))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "scalar: right" in done.stdout


@pytest.mark.slow
@needs_arm
def test_neon_is_right(tmp_path):
    program = build(tmp_path, CROSS_COMPILER, "-static", *THREAD_FLAGS)
    for processor in PROCESSORS:
        done = run(program, "neon", before=(EMULATOR, "-cpu", processor))
        assert done.returncode == 0, processor + done.stdout + done.stderr[-3000:]
        assert "neon: right" in done.stdout


@pytest.mark.slow
@needs_arm
def test_sanitizers_find_nothing_in_neon(tmp_path):
    program = build(tmp_path, CROSS_COMPILER, *THREAD_FLAGS, *SANITIZERS)
    for processor in PROCESSORS:
        emulator = (EMULATOR, "-L", "/usr/aarch64-linux-gnu", "-cpu", processor)
        # threads of an emulated process cannot be stopped to look for leaks
        done = run(program, "neon", before=("env", "ASAN_OPTIONS=detect_leaks=0", *emulator))
        assert done.returncode == 0, processor + done.stdout + done.stderr[-3000:]
        assert "neon: right" in done.stdout


MISTAKES = {
    "sign": ("scalar.h", "round(-s), round(0.0f), round(s)", "round(s), round(0.0f), round(-s)"),
    "tail": ("avx2.cpp", "for (; j < end; ++j) out[j]", "for (; j + 1 < end; ++j) out[j]"),
    "digit": ("avx512.cpp", "_mm512_sub_epi32(q[v], digit)", "q[v]"),
    "base3": ("linear.cpp", "int filled = int(10 - 2 * (begin % 5));", "int filled = 10;"),
    "table": ("linear.cpp", "products[s * k + code_of", "products[s * k + (k - 1) - code_of"),
    "gradient": ("math_loops.h", "as_float(x[2 * x_stride + j])", "as_float(x[x_stride + j])"),
}


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_driver_notices_a_mistake(tmp_path, mistake):
    done = run(build(tmp_path, COMPILER, "-O1", *THREAD_FLAGS, edit=MISTAKES[mistake]))
    assert done.returncode == 1, done.stdout + done.stderr[-3000:]
    assert "wrong" in done.stdout


@pytest.mark.slow
@needs_arm
def test_either_neon_product_runs_where_it_should(tmp_path):
    # a mistake in sdot's path alone is seen on the processor that has it
    edit = ("neon.cpp", "return vaddq_s32(sum, part.sum);", "return part.sum;")
    program = build(tmp_path, CROSS_COMPILER, "-static", *THREAD_FLAGS, edit=edit)
    for processor, has_sdot in PROCESSORS.items():
        done = run(program, "neon", before=(EMULATOR, "-cpu", processor))
        assert done.returncode == int(has_sdot), processor + done.stdout


@pytest.mark.slow
@needs_compiler
def test_without_openmp_the_kernels_are_right(tmp_path):
    done = run(build(tmp_path, COMPILER))
    assert done.returncode == 0, done.stdout

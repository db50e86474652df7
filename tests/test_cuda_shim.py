"""Does the host shim play a GPU truly, and does it catch what would go wrong on one?"""

import shutil

import pytest
import torch
from cuda_shim import COMPILER, HERE, HostLauncher, KernelFault

pytestmark = pytest.mark.skipif(
    shutil.which(COMPILER) is None, reason=f"the host shim needs {COMPILER}"
)

CPU = torch.device("cpu")
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
SHIM = HostLauncher(HERE)


def launch(kernel, *arguments, blocks=1, threads=64, shared_bytes=0):
    SHIM.launch("specimens.cu", kernel, (blocks, 1, 1), threads, arguments, CPU, shared_bytes)


def run(kernel, x=None, y=None, n=64, **settings):
    x = torch.randn(64) if x is None else x
    y = torch.empty(64) if y is None else y
    launch(kernel, x, y, n, **settings)
    return x, y


@pytest.mark.parametrize("shift", range(3))
def test_a_sound_kernel_passes_at_any_address(shift):
    x, y = torch.randn(64 + shift)[shift:], torch.empty(64 + shift)[shift:]
    run("reverse", x, y)
    assert torch.equal(y, x.flip(0))


def test_shared_memory_of_a_size_chosen_at_launch_is_there():
    x, y = run("dynamic_shared_memory", shared_bytes=256)
    assert torch.equal(y, x.flip(0))


@pytest.mark.parametrize("shared_bytes", [0, 240])
def test_too_little_shared_memory_is_noticed(shared_bytes):
    with pytest.raises(KernelFault, match="memory that is not the kernel's"):
        run("dynamic_shared_memory", shared_bytes=shared_bytes)


@pytest.mark.parametrize(
    "kernel", ["without_barrier", "without_second_barrier", "without_warp_barrier"]
)
def test_a_missing_barrier_is_noticed(kernel):
    with pytest.raises(KernelFault, match=r"elements depend on the order of threads or blocks"):
        run(kernel)


def test_a_warp_barrier_is_one():
    x, y = run("with_warp_barrier")
    assert torch.equal(y.view(32, 2), x.view(32, 2).flip(1))


@pytest.mark.parametrize("kernel", ["barrier_for_some", "shuffle_for_some"])
def test_a_barrier_that_some_threads_never_reach_is_noticed(kernel):
    with pytest.raises(KernelFault, match="some threads never reach"):
        run(kernel)


@pytest.mark.parametrize(
    ("kernel", "place"),
    [
        ("reads_past_the_end", "byte 256 of argument 0's 256"),
        ("reads_before_the_start", "byte -4 of argument 0's 256"),
        ("writes_past_the_end", r"bytes that are not its to write|byte 256 of argument 1's 256"),
        ("reads_far_away", "memory that is not the kernel's"),
    ],
)
def test_an_access_outside_a_tensor_is_noticed(kernel, place):
    with pytest.raises(KernelFault, match=place):
        run(kernel)


def test_the_shim_works_again_after_a_fault():
    for _ in range(3):
        with pytest.raises(KernelFault):
            run("reads_past_the_end")
        x, y = run("reverse")
        assert torch.equal(y, x.flip(0))


def test_gaps_between_rows_are_poisoned_and_guarded():
    x, y = torch.randn(5, 65)[:, :64], torch.zeros(5, 65)
    run("copies_by_65", x, y[:, :64], 5)
    assert torch.equal(y[:, :64], x)
    assert not bool(y[:, 64].any())
    with pytest.raises(KernelFault, match=r"argument 1: .* bytes that are not its to write"):
        run("writes_between_rows", x, y[:, :64], 5)
    run("reads_between_rows", x, y[:, :64], 5)
    assert bool(y[:4, 63].isnan().all())


def test_an_element_that_is_not_written_is_noticed():
    with pytest.raises(KernelFault, match=r"1 elements were not written, the first is number 5"):
        run("leaves_one_out")


def test_an_output_that_is_read_is_noticed():
    with pytest.raises(KernelFault, match="depend on the order"):
        run("adds_to_its_output", y=torch.zeros(64))


def test_blocks_that_write_one_element_differently_are_noticed():
    x = torch.randn(128)
    _, y = run("blocks_that_agree", x, torch.empty(128), blocks=2)
    assert torch.equal(y, x)
    with pytest.raises(KernelFault, match=r"1 elements depend on the order .* number 0"):
        run("blocks_that_disagree", x, torch.empty(128), blocks=2)


def test_shared_memory_that_is_not_set_is_nan():
    _, y = run("unset_shared_memory")
    assert bool(y.isnan().all())


def test_an_index_outside_an_array_is_noticed():
    run("past_an_array", n=63)
    with pytest.raises(KernelFault, match="an index outside an array"):
        run("past_an_array", n=64)


def test_a_wide_load_from_an_odd_address_is_noticed():
    with pytest.raises(KernelFault, match="not a multiple of the access's size"):
        run("loads_four_at_any_address")


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        (("x", "y"), {}, "has 3 parameters, not 2"),
        (("x", "y", 1.0), {}, "argument 2 is 1.0"),
        ((1, "y", 64), {}, "argument 0 is 1"),
        (("x", "y", 64), {"threads": 48}, "48 threads"),
        (("x", "y", 64), {"threads": 2048}, "2048 threads"),
        (("x", "y", 64), {"blocks": 0}, "is empty"),
        (("x", "y", 64), {"shared_bytes": 1 << 20}, "shared memory"),
    ],
    ids=str,
)
def test_a_launch_that_cuda_would_refuse_is_refused(arguments, settings, message):
    tensors = {"x": torch.randn(64), "y": torch.empty(64)}
    with pytest.raises(KernelFault, match=message):
        launch("reverse", *(tensors.get(a, a) for a in arguments), **settings)


def test_a_kernel_that_is_not_there_is_named():
    with pytest.raises(KernelFault, match="there is no kernel forward"):
        run("forward")


def floats_of_all_kinds():
    every_half = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    step = torch.arange(1 << 16, dtype=torch.int64)
    # every exponent, with mantissas around the ties of both formats
    every_exponent = torch.cat(
        [(step << 16) + low for low in (0, 1, 0x1000, 0x7FFF, 0x8000, 0x8001)]
    )
    half_ties = (
        every_half.view(torch.int32)[:, None] + torch.tensor([0xFFF, 0x1000, 0x1001])
    ).flatten()
    return torch.cat(
        [
            every_half,
            every_exponent.to(torch.int32).view(torch.float32),
            half_ties.view(torch.float32),
        ]
    )


@pytest.mark.parametrize("name", DTYPES)
def test_16_bit_floats_are_rounded_as_torch_does(name):
    x = floats_of_all_kinds()
    y, back = torch.empty(len(x), dtype=DTYPES[name]), torch.empty(len(x))
    launch(f"convert_{name}", x, y, back, len(x), blocks=4)
    expected = x.to(DTYPES[name])
    is_number = ~x.isnan()
    assert torch.equal(y[is_number].view(torch.int16), expected[is_number].view(torch.int16))
    assert bool(y[~is_number].isnan().all())
    assert torch.equal(back[is_number], expected[is_number].float())


@pytest.mark.parametrize("name", DTYPES)
def test_the_tensor_core_multiplies_matrices(name):
    # integers, so that no order of summation and no truncation matters
    a, b = (torch.randint(-4, 5, (n, 16)).to(DTYPES[name]) for n in (16, 8))
    d = torch.empty(16, 8)
    launch(f"product_{name}", a, b, d, threads=32)
    assert torch.equal(d, a.float() @ b.float().T)


def test_the_tensor_core_cuts_sums_off():
    # 1 + 15 * 2^-26: exactly rounded, more than one; cut off below 2^-25, one
    a, b = torch.full((16, 16), 2**-13).bfloat16(), torch.full((8, 16), 2**-13).bfloat16()
    a[:, 0], b[:, 0] = 1, 1
    d = torch.empty(16, 8)
    launch("product_bf16", a, b, d, threads=32)
    assert torch.equal(d, torch.ones(16, 8))


@pytest.mark.parametrize("name", DTYPES)
def test_pairs_are_multiplied_and_added_at_once(name):
    values = torch.randint(-8, 9, (3, 64)).to(DTYPES[name])
    a, b, c = (value.view(torch.int32) for value in values)
    y = torch.empty(32, dtype=torch.int32)
    launch(f"combine_{name}", a, b, c, y, 32)
    expected = values[0].float() * values[1].float() + values[2].float()
    assert torch.equal(y.view(DTYPES[name]).float(), expected)


@pytest.mark.parametrize("lanes", [1, 2, 16, 32])
def test_neighbouring_lanes_sum(lanes):
    x = torch.randint(-9, 10, (64,)).float()
    y = torch.empty(64)
    launch("sums", x, y, lanes)
    assert torch.equal(y, x.view(-1, lanes).sum(1).repeat_interleave(lanes))

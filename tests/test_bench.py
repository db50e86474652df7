"""Do the benchmarks compare the same work, and do their tables say what was measured?"""

import itertools
import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import assert_close, rms_ratio

from bonsai_ft import bench, cli
from bonsai_ft.api import load_model
from bonsai_ft.bench import decode, layers, load, models, step, timing
from bonsai_ft.bench.profile import measure_profile
from bonsai_ft.bench.timing import OURS, Limits, alternate, ratio
from bonsai_ft.format import open_bonsai
from bonsai_ft.model import TernaryLinear

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
SMALL = bench.ModelShape(
    hidden=192, intermediate=320, blocks=2, heads=4, kv_heads=2, vocabulary=64, is_tied=True
)
on_linux = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc"
)


def setup_for(**changes) -> bench.Setup:
    small = {"repeats": 2, "product": (32, 32, 32), "copy_bytes": 1 << 16, "kernel": "reference"}
    return bench.Setup(**(small | changes))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A random base of the shape "tiny"."""
    path = tmp_path_factory.mktemp("bench") / "tiny.bonsai"
    bench.random_base(bench.SHAPES["tiny"], path)
    return path


@pytest.fixture
def scripts(monkeypatch):
    """Lets tests import what lies in benchmarks/."""
    monkeypatch.syspath_prepend(BENCHMARKS)


def texts(rows) -> list[str]:
    return [row.side for row in rows]


# Turns, ratios and limits


def test_sides_take_turns_in_changing_order_after_a_call_each_to_warm_up():
    calls = []
    sides = {name: lambda name=name: calls.append(name) for name in "ab"}
    seconds = alternate(sides, repeats=3)
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab"
    assert [len(seconds[name]) for name in "ab"] == [3, 3]


def test_a_short_call_is_repeated_until_a_turn_is_long_enough(monkeypatch):
    clock = itertools.count()
    # every look at the clock is one second later than the one before
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    calls = []
    seconds = alternate({"a": lambda: calls.append(1)}, repeats=1, at_least=4)
    assert len(calls) == 1 + 1 + 4
    assert seconds == {"a": [0.25]}


def test_a_ratio_is_the_median_of_the_turns_ratios():
    # the ratio of the medians would be 3
    assert ratio([1.0, 3.0, 20.0], [1.0, 1.0, 10.0]) == 2.0


def test_the_limit_is_the_longer_of_products_and_reading():
    limits = Limits(gemm_gflop_per_second=100.0, copy_gb_per_second=10.0)
    assert limits.seconds(200e9, 1e9) == 2.0
    assert limits.seconds(1e9, 40e9) == 4.0


@on_linux
def test_a_forgotten_peak_starts_from_what_is_held():
    taken = torch.ones(64 << 20)
    high = timing.memory_of("cpu")["peak"]
    del taken
    assert timing.forget_peak("cpu")
    assert timing.memory_of("cpu")["peak"] < high - (200 << 20)


# Models


@pytest.mark.parametrize(
    ("outputs", "inputs", "packing"), [(8, 1, "2bit"), (5, 130, "base3"), (7, 300, "2bit")]
)
def test_a_random_weight_is_valid_whatever_its_size(outputs, inputs, packing):
    weight = models.random_weight(outputs, inputs, torch.Generator().manual_seed(0), packing)
    weight.validate()
    assert weight.dequantize().shape == (outputs, inputs)


def test_a_random_base_is_a_model_of_its_shape(tmp_path):
    path = tmp_path / "small.bonsai"
    bench.random_base(SMALL, path)
    with open_bonsai(path) as file:
        for name in file.weight_names():
            file.weight(name).validate()
    model = load_model(path, device_map="cpu")
    logits = model(input_ids=torch.zeros(1, 3, dtype=torch.int64)).logits
    assert logits.shape == (1, 3, SMALL.vocabulary)
    assert logits.isfinite().all()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert bench.shape_of(path) == SMALL


def test_a_float_copy_computes_what_the_base_does_and_holds_nothing_packed(base, tokens):
    packed = load_model(base, dtype=torch.float32, device_map="cpu", kernel="reference")
    copy = models.float_copy(base, torch.float32)
    assert_close(copy(tokens).logits, packed(tokens).logits)
    assert not any(isinstance(module, TernaryLinear) for module in copy.modules())
    assert not any(parameter.requires_grad for parameter in copy.parameters())


def test_the_nf4_copy_is_quantised_in_every_layer_but_the_head(base, tokens):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    copy = models.float_copy(base, torch.bfloat16, make=models.nf4_linear)
    quantised = [m for m in copy.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    assert len(quantised) == len(open_bonsai(base).weight_names())
    assert all(layer.weight.dtype == torch.uint8 for layer in quantised)
    assert copy(tokens).logits.isfinite().all()
    dense = models.float_copy(base, torch.float32).model.layers[0].mlp.up_proj.weight
    packed = copy.model.layers[0].mlp.up_proj.weight
    decoded = bitsandbytes.functional.dequantize_4bit(packed.data, packed.quant_state)
    # what 16 levels lose of any weight
    assert 0.01 < rms_ratio(decoded.float(), dense) < 0.15


def test_sizes_are_those_of_the_file(base):
    sizes = models.sizes_of(base)
    shape = bench.SHAPES["tiny"]
    attention = 2 * shape.hidden**2 + 2 * shape.hidden * shape.hidden // 2
    per_block = attention + 3 * shape.hidden * shape.intermediate
    assert sizes.body_weights == shape.blocks * per_block
    assert 2.1 < 8 * sizes.body_bytes / sizes.body_weights < 2.6
    assert sizes.head_weights == shape.vocabulary * shape.hidden


@pytest.mark.parametrize("model", ["missing.bonsai", "random:7b", "README.md"])
def test_a_model_that_is_not_there_is_named(model):
    with pytest.raises(ValueError, match=f"MODEL {model}"):
        bench.find_model(model)


# Measurements


def test_the_operator_is_measured_forward_and_with_gradients_beside_every_peer():
    report = bench.measure_operator(setup_for(), ((128, 64), (130, 40)), (1, 3), 1e-4, 0)
    wanted = itertools.product(("128x64", "130x40"), (1, 3), ("forward", "forward + backward"))
    assert [(row.layer, row.tokens, row.work) for row in report.rows] == list(wanted)
    for row in report.rows:
        has_nf4 = row.layer == "128x64"
        peers = {layers.LINEAR, layers.NF4} if has_nf4 else {layers.LINEAR}
        assert set(row.ratios) == peers
        assert set(row.milliseconds) == {OURS, *peers}
        assert all(value > 0 for value in (*row.milliseconds.values(), row.limit_milliseconds))
        assert (row.codebook_share is None) == (row.work == "forward")
    assert any("130x40" in note for note in report.notes)
    assert set(report.settings["call_microseconds"]) == {"operator", "layer", layers.LINEAR}


def test_forward_goes_round_more_copies_than_a_cache_holds():
    weight = models.random_weight(64, 128, torch.Generator().manual_seed(0))
    sides, _, _ = layers._sides(weight, setup_for(), 10 * weight.nbytes)
    ours, dense = sides[OURS].plain, sides[layers.LINEAR].plain
    for copies in (ours, dense):
        assert sum(p.nbytes for m in copies for p in m.parameters()) >= 10 * weight.nbytes
    assert len({layer.ternary.data_ptr() for layer in ours}) == len(ours) > 5
    assert len({layer.weight.data_ptr() for layer in dense}) == len(dense) > 1


def test_our_side_of_the_operator_trains_codebooks_and_lora():
    weight = models.random_weight(64, 128, torch.Generator().manual_seed(0))
    sides, codebooks, _ = layers._sides(weight, setup_for(), 0)
    sizes = sorted(p.numel() for p in sides[OURS].trainable)
    assert sizes == sorted([4 * 128, layers.RANK * 128, layers.RANK * 64])
    assert [p.numel() for p in codebooks] == [4 * 128]


def test_all_sides_of_a_step_start_from_the_same_loss(base):
    report = bench.measure_step(
        setup_for(kernel="auto"), base, rows=2, length=16, same_loss=True, with_memory=False
    )
    assert texts(report.rows) == [OURS, step.LORA, step.QLORA, step.SAME_LOSS]
    losses = [row.first_loss for row in report.rows]
    assert losses == pytest.approx([losses[0]] * 4, rel=0.02)
    assert [row.time_ratio is None for row in report.rows] == [True, False, False, False]
    assert all(row.limit_seconds > 0 for row in report.rows)


def test_checkpointing_counts_a_second_forward_pass_in_the_limit(base):
    limits = Limits(gemm_gflop_per_second=1.0, copy_gb_per_second=1.0)
    sizes = models.sizes_of(base)
    extra = step.limit_seconds(base, 10, limits, True) - step.limit_seconds(base, 10, limits, False)
    assert extra == pytest.approx(2 * 10 * sizes.body_weights / 1e9)


def test_every_side_trains_in_a_process_of_its_own(base, monkeypatch):
    monkeypatch.setattr(step, "forget_peak", lambda device: True)
    for side in (OURS, step.LORA, step.QLORA):
        found = step.step_memory(
            side=side,
            base=str(base),
            rows=1,
            length=8,
            kernel="reference",
            dtype="bfloat16",
            device="cpu",
            with_checkpointing=True,
        )
        assert set(found) in ({"imports", "resident", "peak"}, set())


@pytest.mark.slow
@on_linux
def test_memory_of_a_step_is_measured_in_fresh_processes(base):
    report = bench.measure_step(setup_for(), base, rows=1, length=8)
    for row in report.rows:
        assert row.peak_bytes >= row.resident_bytes > 0
    assert report.rows[1].memory_ratio == pytest.approx(
        report.rows[0].peak_bytes / report.rows[1].peak_bytes, rel=1e-3
    )


@pytest.mark.slow
def test_a_process_that_fails_says_why():
    with pytest.raises(RuntimeError, match="no_such_file"):
        timing.run_child(
            "load", side=OURS, path="no_such_file", dtype="float32", device="cpu", kernel="auto"
        )


def test_every_side_decodes_the_same_tokens_to_full_length(tiny_base):
    path = tiny_base("llama")
    ids = torch.randint(0, 256, (1, 5), generator=torch.Generator().manual_seed(3))
    ours = decode._ours(load_model(path, dtype=torch.float32, device_map="cpu").eval())
    answers = [ours(ids, 12)]
    sides = decode._transformers(setup_for(dtype=torch.float32), path, 1)
    answers += [side.generate(ids, 12) for side in sides.values()]
    for answer in answers:
        assert answer.shape == (1, 17)
        assert torch.equal(answer, answers[0])


def test_decoding_is_measured_beside_transformers_and_others(base):
    report = bench.measure_decode(
        setup_for(),
        base,
        prompt=3,
        new_tokens=4,
        long_prompt=6,
        others={"mine": bench.DecodeSide(generate=lambda ids, count: None, weight_bytes=1)},
    )
    assert texts(report.rows) == [OURS, decode.DYNAMIC, decode.STATIC, "mine"]
    assert [row.ratio is None for row in report.rows] == [True, False, False, False]
    ours, peer = report.rows[:2]
    assert ours.limit_tokens_per_second > 3 * peer.limit_tokens_per_second
    assert ours.prefill_limit_tokens_per_second == peer.prefill_limit_tokens_per_second


@pytest.mark.parametrize("side", [OURS, load.UNVERIFIED])
def test_loading_is_measured_with_its_limits(side, base):
    found = load.load_once(
        side=side, path=str(base), dtype="bfloat16", device="cpu", kernel="reference"
    )
    assert found["first_token_seconds"] > found["seconds"] > 0
    assert found["hash_seconds"] > 0
    assert found["read_seconds"] > 0


@pytest.mark.slow
def test_loads_of_all_sides_happen_in_fresh_processes(base):
    report = bench.measure_load(setup_for(repeats=1), base)
    assert texts(report.rows) == [OURS, load.UNVERIFIED, load.PEER]
    assert report.rows[0].file_bytes == base.stat().st_size
    assert report.rows[2].file_bytes > report.rows[0].file_bytes


def test_a_profile_has_shares_that_add_up(base):
    report = measure_profile(setup_for(), base, rows=1, length=8)
    assert sum(row.share for row in report.rows) == pytest.approx(1, abs=0.01)
    assert any("bonsai::ternary_linear" in row.operation for row in report.rows)


# Tables


def test_every_report_becomes_a_table_through_json(base):
    small = setup_for(repeats=1)
    reports = [
        bench.measure_operator(small, ((64, 32),), (1,), 1e-4, 0),
        bench.measure_step(small, base, rows=1, length=8, with_memory=False),
        bench.measure_decode(small, base, prompt=2, new_tokens=2, long_prompt=2),
        measure_profile(small, base, rows=1, length=8),
    ]
    for report in reports:
        as_read = json.loads(json.dumps(bench.as_json(report), allow_nan=False))
        text = bench.markdown(as_read)
        rows = [line for line in text.splitlines() if line.startswith("|")]
        assert len(rows) == 2 + len(report.rows)
        assert len({row.count("|") for row in rows}) == 1
        assert f"kernel {as_read['machine']['kernel']}" in text
        assert "copy " in text


def test_the_page_gets_its_tables_from_the_results(base, tmp_path, scripts):
    import tables

    report = bench.measure_step(setup_for(), base, rows=1, length=8, with_memory=False)
    (tmp_path / "a.json").write_text(json.dumps(bench.as_json(report)), encoding="utf-8")
    page = "Words.\n<!-- table: a.json -->\nold\n<!-- end -->\n<!-- table: b.json --><!-- end -->"
    page = page.replace("b.json --><", "b.json -->\n<")
    filled = tables.filled(page, tmp_path)
    assert bench.markdown(bench.as_json(report)) in filled
    assert "old" not in filled
    assert filled.count("Not measured yet.") == 1
    assert tables.filled(filled, tmp_path) == filled


def test_no_figure_of_the_page_is_typed_by_hand(scripts):
    import tables

    page = tables.PAGE.read_text(encoding="utf-8")
    assert tables.filled(page, tables.RESULTS) == page, "run python benchmarks/tables.py"


# llama.cpp's weights


@pytest.mark.parametrize(("kind", "columns"), [("TQ2_0", 512), ("Q4_0", 96), ("Q6_K", 256)])
def test_random_blocks_of_llama_cpp_are_finite_and_of_the_right_size(kind, columns, scripts):
    llama_peer = pytest.importorskip("llama_peer")
    import gguf
    import numpy as np

    chosen = gguf.GGMLQuantizationType[kind]
    blocks = llama_peer.random_blocks(64, columns, chosen, np.random.default_rng(0))
    values = gguf.quants.dequantize(blocks, chosen)
    assert values.shape == (64, columns)
    assert np.isfinite(values).all()
    # a row keeps the size of what it multiplies
    assert 0.1 < np.linalg.norm(values, axis=1).mean() < 3
    if kind == "TQ2_0":
        assert len(np.unique(values)) == 3


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_llama_cpp_runs_the_random_model(name, tmp_path, scripts, monkeypatch):
    pytest.importorskip("llama_cpp")
    import llama_peer

    monkeypatch.setenv("BONSAI_FT_CACHE", str(tmp_path))
    shape = bench.SHAPES["tiny"] if name == "tiny" else SMALL
    sides = llama_peer.llama_sides(shape, name, 1)
    assert len(sides) == 2
    sizes = [side.weight_bytes for side in sides.values()]
    assert sizes[0] > sizes[1]
    for side in sides.values():
        answers = [side.generate(torch.tensor([[5, 6, 7]]), 6) for _ in range(2)]
        assert len(answers[0]) == 6
        assert answers[0] == answers[1]


# What is typed


def typed(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["bonsai-ft", *arguments])
    code = 0
    try:
        cli.main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    return code, capsys.readouterr()


@pytest.mark.parametrize("verb", ["bench", "kernels"])
def test_help_of_the_verbs_has_an_example(verb, monkeypatch, capsys):
    code, said = typed(monkeypatch, capsys, verb, "--help")
    assert code == 0
    assert f"Example: bonsai-ft {verb}" in said.out


def test_bench_prints_a_table_or_one_json_object(base, monkeypatch, capsys):
    quick = ("--repeats", "1", "--no-peers")
    small = partial(bench.Setup, product=(8, 8, 8), copy_bytes=1 << 12)
    monkeypatch.setattr(bench, "Setup", small)
    for arguments in (
        ("bench", "operator", "--layers", "64x32", "--tokens", "1,2"),
        ("bench", "decode", str(base), "--prompt", "2", "--new-tokens", "2", "--long-prompt", "3"),
    ):
        code, said = typed(monkeypatch, capsys, *arguments, *quick, "--json")
        assert code == 0, said.err
        assert json.loads(said.out)["bench"] == arguments[1]
        code, said = typed(monkeypatch, capsys, *arguments, *quick)
        assert code == 0, said.err
        assert said.out.startswith("| ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("step",), "needs a MODEL"),
        (("operator", "base.bonsai"), "takes no MODEL"),
        (("load", "missing.bonsai"), "there is no such .bonsai file"),
        (("operator", "--layers", "64"), "--layers 64"),
        (("operator", "--layers", "64x0"), "--layers 64x0"),
        (("operator", "--tokens", "1,a"), "--tokens 1,a"),
        (("operator", "--repeats", "0"), "--repeats 0"),
        (("operator", "--threads", "0"), "--threads 0"),
        (("operator", "--dtype", "int8"), "--dtype int8"),
        (("operator", "--kernel", "fast"), "fast"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(arguments, words, monkeypatch, capsys):
    code, said = typed(monkeypatch, capsys, "bench", *arguments)
    assert code == 2
    assert said.out == ""
    assert words in said.err
    assert "Traceback" not in said.err


def test_kernels_lists_all_three_and_says_which_auto_takes(monkeypatch, capsys):
    code, said = typed(monkeypatch, capsys, "kernels", "--json")
    summary = json.loads(said.out)
    assert code == 0
    assert [line["name"] for line in summary["kernels"]] == ["reference", "cpu", "cuda"]
    [auto] = [line for line in summary["kernels"] if line["is_auto"]]
    assert auto["name"] == summary["auto"]
    assert auto["is_available"]
    assert all(line["detail"] for line in summary["kernels"])
    _, said = typed(monkeypatch, capsys, "kernels")
    assert f"kernel=auto takes {summary['auto']}" in said.out
    assert len([line for line in said.out.splitlines() if "available" in line]) == 3

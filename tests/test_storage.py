"""Does a `.bonsai` file give back what was written, and is every other file refused?"""

import contextlib
import errno
import gc
import hashlib
import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
import safetensors
import torch

from bonsai_ft.format import (
    BonsaiFile,
    BonsaiFormatError,
    BonsaiWriter,
    TernaryWeight,
    fingerprint_of,
    open_bonsai,
    pack_codes,
    pack_signs,
    storage,
    write_bonsai,
)

MIB = 1 << 20
BASE = "ab" * 32
NAN, INF = float("nan"), float("inf")


def model_parts(seed=0, residual=True):
    """Config and tensors of a model with one ternary weight of 5 x 40."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(-1, 2, (5, 40), generator=generator, dtype=torch.int8)
    tensors = {
        "block.proj.ternary": pack_signs(signs, "2bit"),
        "block.proj.scale": torch.rand(5, 1, generator=generator).half(),
        "norm.weight": torch.rand(3, generator=generator).bfloat16(),
    }
    if residual:
        codes = torch.randint(0, 3, (5, 5), generator=generator)
        tensors |= {
            "block.proj.codes": pack_codes(codes, 3),
            "block.proj.residual_codebook": torch.randn(1, 3, 8, generator=generator).half(),
            "block.proj.residual_mu": torch.randn(1, generator=generator).half(),
            "block.proj.residual_sigma": torch.rand(1, generator=generator).half(),
            "files/tokenizer.json": torch.tensor(list(b'{"a": 1}'), dtype=torch.uint8),
        }
    layer = {"name": "block.proj", "out_features": 5, "in_features": 40, "packing": "2bit"}
    config = {"model": {"hidden_size": 40}, "quantization": {"seed": seed}, "layers": [layer]}
    return config, tensors


def adapter_parts(seed=0):
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "block.proj.lora_A": torch.randn(2, 7, generator=generator),
        "block.proj.lora_B": torch.randn(5, 2, generator=generator).bfloat16(),
        "block.proj.residual_codebook": torch.randn(1, 3, 8, generator=generator).half(),
        "steps": torch.tensor(seed),
    }
    return {"adapter": {"rank": 2}}, tensors


def write_small(path, kind, seed=0):
    """A valid file of some kB, and its tensors."""
    if kind == "model":
        config, tensors = model_parts(seed)
        write_bonsai(path, "model", config, tensors)
    else:
        config, tensors = adapter_parts(seed)
        write_bonsai(path, "adapter", config, tensors, fingerprint=BASE)
    return tensors


def raw_file(header, data=b""):
    """A file around any header, which may be bytes that are no JSON."""
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(body).to_bytes(8, "little") + body + data


def header_of(fields, *, drop=(), **metadata):
    """A header that is right but for its checksum, unless the arguments make it wrong."""
    checksums = dict.fromkeys((*fields, "__header__"), "0" * 64)
    full = {
        "format": "bonsai",
        "format_version": "1",
        "kind": "adapter",
        "fingerprint": BASE,
        "config": "{}",
        "checksums": json.dumps(checksums),
        **metadata,
    }
    return {"__metadata__": {k: v for k, v in full.items() if k not in drop}, **fields}


def field(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def sealed(tensors, config, kind="adapter", fingerprint=BASE):
    """A file with every checksum right, built without the writer and its own checks."""
    fields, data, checksums = {}, b"", {}
    names = {torch.uint8: "U8", torch.float16: "F16", torch.float32: "F32", torch.int64: "I64"}
    names[torch.bfloat16] = "BF16"
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        content = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
        begin, data = len(data), data + content
        fields[name] = field(names[tensor.dtype], list(tensor.shape), begin, len(data))
        checksums[name] = hashlib.sha256(content).hexdigest()
    fingerprint = fingerprint or fingerprint_of(checksums, config)
    place = "0123456789abcdef" * 4
    metadata = {
        "kind": kind,
        "fingerprint": fingerprint,
        "config": json.dumps(config),
        "checksums": json.dumps({**checksums, "__header__": place}, separators=(",", ":")),
    }
    body = json.dumps(header_of(fields, **metadata)).encode()
    body = body.ljust(-(-len(body) // 8) * 8)
    raw = len(body).to_bytes(8, "little") + body
    digest = hashlib.sha256(raw.replace(place.encode(), b"0" * 64)).hexdigest()
    return raw.replace(place.encode(), digest.encode()) + data


def refuse(path, content, reason, **kwargs):
    path.write_bytes(content)
    with pytest.raises(BonsaiFormatError, match=reason) as caught:
        open_bonsai(path, **kwargs)
    assert str(path) in str(caught.value)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "small.bonsai"


# What is written is what is read.


@pytest.mark.parametrize("verify", [True, False])
def test_a_model_comes_back_as_it_was_written(path, verify):
    config, tensors = model_parts()
    write_bonsai(path, "model", config, tensors)
    with open_bonsai(path, verify=verify) as file:
        assert (file.kind, file.format_version, file.config) == ("model", "1", config)
        assert sorted(file.names()) == sorted(tensors)
        for name, tensor in tensors.items():
            assert file.shape(name) == tensor.shape
            assert file.dtype(name) == tensor.dtype
            assert file.nbytes(name) == tensor.nbytes
            assert torch.equal(file.tensor(name), tensor)
        assert file.files() == ["tokenizer.json"]
        assert file.file("tokenizer.json") == b'{"a": 1}'
        assert file.fingerprint == fingerprint_of(file.checksums, config)


def test_an_adapter_comes_back_as_it_was_written(path):
    config, tensors = adapter_parts()
    write_bonsai(path, "adapter", config, tensors, fingerprint=BASE)
    with open_bonsai(path) as file:
        assert (file.kind, file.config, file.fingerprint) == ("adapter", config, BASE)
        for name, tensor in tensors.items():
            assert torch.equal(file.tensor(name), tensor)


def test_safetensors_reads_the_same_tensors_and_metadata(path):
    config, tensors = model_parts()
    write_bonsai(path, "model", config, tensors)
    with safetensors.safe_open(path, "pt") as theirs, open_bonsai(path) as ours:
        assert sorted(theirs.keys()) == sorted(ours.names())
        for name in ours.names():
            assert torch.equal(theirs.get_tensor(name), ours.tensor(name))
        metadata = theirs.metadata()
        assert metadata["format"] == "bonsai"
        assert metadata["format_version"] == ours.format_version
        assert metadata["kind"] == ours.kind
        assert metadata["fingerprint"] == ours.fingerprint
        assert json.loads(metadata["config"]) == ours.config
        assert json.loads(metadata["checksums"]) == ours.checksums


VERSION_1 = (
    r'{"__metadata__":{"format":"bonsai","format_version":"1","kind":"adapter","fingerprint":"'
    r'abababababababababababababababababababababababababababababababab",'
    r'"config":"{\"adapter\":{\"rank\":2}}","checksums":"{\"a\":\"'
    r"0c82e2008d4b1c37a2604f1dee0db584daf39b6ab140aaa834d3eac1df0b9458\",\"b\":\""
    r"ca358758f6d27e6cf45272937977a748fd88391db679ceda7dc7bf1f005ee879\",\"__header__\":\""
    r'26d247dcc5bb82f5a935daf84edd7c3948b57d94be99ea5e0006b8ba09d97dbf\"}"},'
    r'"a":{"dtype":"F16","shape":[2],"data_offsets":[0,4]},'
    r'"b":{"dtype":"U8","shape":[1],"data_offsets":[4,5]}}'
)


def test_a_file_of_version_1_opens_and_is_still_written_so(path):
    raw = raw_file(VERSION_1.encode().ljust(568), b"\x00\x3c\x00\xc0\x07")
    path.write_bytes(raw)
    with open_bonsai(path) as file:
        assert file.tensor("a").tolist() == [1.0, -2.0]
        assert file.tensor("b").tolist() == [7]
        tensors = {name: file.tensor(name).clone() for name in file.names()}
        write_bonsai(path, "adapter", file.config, tensors, fingerprint=file.fingerprint)
    assert path.read_bytes() == raw


def test_two_writes_of_the_same_give_the_same_bytes(tmp_path):
    config, tensors = model_parts()
    write_bonsai(tmp_path / "a", "model", config, tensors)
    write_bonsai(tmp_path / "b", "model", config, dict(reversed(tensors.items())))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_tensors_start_at_multiples_of_the_power_of_two_in_their_size(path):
    tensors = {
        "odd": torch.zeros(3, dtype=torch.uint8),
        "wide": torch.zeros(3, dtype=torch.float64),
        "big": torch.zeros(128, dtype=torch.uint8),
        "half": torch.zeros(5, dtype=torch.float16),
        "none": torch.zeros(0, 4),
        "scalar": torch.tensor(1.5),
    }
    write_bonsai(path, "adapter", {}, tensors, fingerprint=BASE)
    with open_bonsai(path) as file:
        base = file.tensor("big").data_ptr()
        for name, tensor in tensors.items():
            assert torch.equal(file.tensor(name), tensor)
            if tensor.numel():
                power = math.gcd(tensor.nbytes, 64)
                assert (file.tensor(name).data_ptr() - base) % power == 0
        assert base % 64 == 0


def test_parameters_views_and_every_dtype_are_written(path):
    tensors = {str(dtype): torch.arange(6).to(dtype) for dtype in storage.DTYPES.values()}
    tensors["view"] = torch.arange(6.0).view(2, 3).t()
    tensors["parameter"] = torch.nn.Parameter(torch.ones(2))
    write_bonsai(path, "adapter", {}, tensors, fingerprint=BASE)
    with open_bonsai(path) as file:
        for name, tensor in tensors.items():
            assert torch.equal(file.tensor(name), tensor)


def test_text_of_any_language_survives_in_the_config(path):
    config = {"text": '\u6625\u7720 "quoted" \\ \U0001f600 \n', "f": [1e-7, -0.0, 2**63, None]}
    write_bonsai(path, "adapter", config, {}, fingerprint=BASE)
    with open_bonsai(path) as file:
        assert file.config == config
        assert file.names() == []


# Mapped, not read.


def test_tensors_outlive_the_file_and_its_replacement(path):
    old = write_small(path, "adapter", seed=0)
    file = open_bonsai(path)
    held = {name: file.tensor(name) for name in file.names()}
    write_small(path, "adapter", seed=1)
    file.close()
    file.close()
    del file
    gc.collect()
    path.unlink()
    for name, tensor in old.items():
        assert torch.equal(held[name], tensor)


def test_a_closed_file_says_so(path):
    write_small(path, "adapter")
    file = open_bonsai(path)
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.tensor("steps")
    with pytest.raises(BonsaiFormatError, match="closed"):
        file.verify()


def test_writing_to_a_tensor_leaves_the_file_alone(path):
    write_small(path, "adapter")
    before = path.read_bytes()
    with open_bonsai(path) as file:
        file.tensor("block.proj.lora_A").fill_(7)
    assert path.read_bytes() == before


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_opening_and_verifying_a_big_file_takes_no_memory(path):
    write_bonsai(path, "model", {}, {"big": torch.zeros(64 * MIB, dtype=torch.uint8)})
    before = resident_bytes()
    with open_bonsai(path) as file:
        tensor = file.tensor("big")
        assert resident_bytes() - before < 8 * MIB
        assert tensor[-1] == 0


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux's /proc")
def test_a_thousand_openings_leave_no_file_open(path):
    write_small(path, "model")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for i in range(1000):
        file = open_bonsai(path)
        if i % 2:
            file.close()
        del file
        with contextlib.suppress(BonsaiFormatError):
            open_bonsai(path.parent)
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# Ternary weights.


def test_a_weight_is_built_and_validated(path):
    config, tensors = model_parts()
    write_bonsai(path, "model", config, tensors)
    with open_bonsai(path) as file:
        assert file.weight_names() == ["block.proj"]
        weight = file.weight("block.proj")
        assert (weight.out_features, weight.in_features, weight.packing) == (5, 40, "2bit")
        assert weight.residual is not None
        for suffix, tensor in weight.tensors().items():
            assert torch.equal(tensor, tensors[f"block.proj.{suffix}"])
        assert weight.dequantize().shape == (5, 40)


def test_the_residual_may_be_absent(path):
    config, tensors = model_parts(residual=False)
    write_bonsai(path, "model", config, tensors)
    with open_bonsai(path) as file:
        assert file.weight("block.proj").residual is None


@pytest.mark.parametrize(
    ("suffix", "index", "value", "reason"),
    [
        ("ternary", (0, 0), 0b11, "code 3"),
        ("scale", (4, 0), NAN, "NaN"),
        ("scale", (4, 0), INF, "infinite"),
        ("scale", (4, 0), -1.0, "-1"),
        ("codes", (2, 0), 0b11, "3 or more"),
        ("codes", (2, 1), 0b100, "unused bit"),
        ("residual_codebook", (0, 1, 1), NAN, "NaN"),
        ("residual_mu", (0,), INF, "infinite"),
        ("residual_sigma", (0,), -1.0, "-1"),
    ],
)
def test_a_weight_with_impossible_values_is_refused(path, suffix, index, value, reason):
    config, tensors = model_parts()
    tensors[f"block.proj.{suffix}"][index] = value
    write_bonsai(path, "model", config, tensors)
    with (
        open_bonsai(path) as file,
        pytest.raises(BonsaiFormatError, match=f"tensor block.proj.{suffix}: .*{reason}") as caught,
    ):
        file.weight("block.proj")
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("suffix", ["ternary", "scale", "codes", "residual_mu"])
def test_a_weight_without_one_of_its_tensors_is_refused(path, suffix):
    config, tensors = model_parts()
    del tensors[f"block.proj.{suffix}"]
    refuse(path, sealed(tensors, config, "model", None), f"block.proj.{suffix}: .* missing")


def test_shapes_must_fit_the_config(path):
    config, tensors = model_parts()
    for key, value in [("out_features", 6), ("in_features", 41), ("packing", "base3")]:
        wrong = {**config, "layers": [{**config["layers"][0], key: value}]}
        refuse(path, sealed(tensors, wrong, "model", None), r"tensor block.proj\.\w+: shape")


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([], "no layer 'block.proj'"),
        (None, "must be a list"),
        ([7], "needs a name"),
        ([{"name": "block.proj"}], "out_features"),
        ([{"name": "block.proj", "out_features": True, "in_features": 40}], "out_features"),
        ([{"name": "block.proj", "out_features": 5, "in_features": -40}], "out_features"),
        ([{"name": "block.proj", "out_features": 5, "in_features": 40}], "packing"),
        (
            [{"name": "block.proj", "out_features": 5, "in_features": 40, "packing": "2bit"}] * 2,
            "name of its own",
        ),
        (
            [{"name": "elsewhere", "out_features": 5, "in_features": 40, "packing": "2bit"}],
            "elsewhere.ternary: the tensor is missing",
        ),
        (
            [{"name": "block.proj", "out_features": 5, "in_features": 10**19, "packing": "2bit"}],
            "shape",
        ),
        (
            [{"name": "block.proj", "out_features": 0, "in_features": 40, "packing": "2bit"}],
            "empty",
        ),
        (
            [{"name": "block.proj", "out_features": 5, "in_features": 40, "packing": ["2bit"]}],
            "packing",
        ),
    ],
)
def test_layers_of_the_config_must_describe_the_tensors(path, layers, reason):
    config, tensors = model_parts(residual=False)
    refuse(path, sealed(tensors, {**config, "layers": layers}, "model", None), reason)


def test_unknown_names_are_errors_of_the_format(path):
    write_small(path, "model")
    with open_bonsai(path) as file:
        assert "norm.weight" in file
        assert "norm.bias" not in file
        for ask in (file.tensor, file.shape, file.dtype, file.nbytes, file.weight, file.file):
            with pytest.raises(BonsaiFormatError, match="there is no"):
                ask("norm.bias")


# The fingerprint.


def test_the_fingerprint_is_of_the_ternary_body_only(tmp_path):
    def fingerprint(change=None):
        config, tensors = model_parts()
        if change is not None:
            change(config, tensors)
        write_bonsai(tmp_path / "m.bonsai", "model", config, tensors)
        return open_bonsai(tmp_path / "m.bonsai").fingerprint

    def add(name):
        return lambda _, tensors: tensors[name].add_(1)

    base = fingerprint()
    assert fingerprint(lambda config, _: config.update(provenance="elsewhere")) == base
    assert fingerprint(add("block.proj.residual_codebook")) == base
    assert fingerprint(add("norm.weight")) == base
    assert fingerprint(lambda config, _: config.update(model={"hidden_size": 41})) != base
    assert fingerprint(lambda config, _: config.update(quantization={"seed": 1})) != base
    for suffix in ("scale", "residual_mu", "residual_sigma"):
        assert fingerprint(add(f"block.proj.{suffix}")) != base


def test_keys_that_json_turns_into_text_do_not_change_the_fingerprint(path):
    config = {"model": {10: 1, 9: 2}, "quantization": {}}
    write_bonsai(path, "model", config, {})
    with open_bonsai(path) as file:
        assert file.fingerprint == fingerprint_of({}, config) == fingerprint_of({}, file.config)


def test_a_model_with_a_foreign_fingerprint_is_neither_written_nor_read(path):
    config, tensors = model_parts()
    with pytest.raises(ValueError, match="fingerprint"):
        write_bonsai(path, "model", config, tensors, fingerprint=BASE)
    assert list(path.parent.iterdir()) == []
    refuse(path, sealed(tensors, config, "model", BASE), "fingerprint", verify=False)


def test_an_adapter_needs_a_fingerprint(path):
    config, tensors = adapter_parts()
    for fingerprint in (None, "xyz", BASE.upper()):
        with pytest.raises(ValueError, match="fingerprint"):
            write_bonsai(path, "adapter", config, tensors, fingerprint=fingerprint)
    assert list(path.parent.iterdir()) == []


# Damage.


@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_a_file_cut_at_any_length_is_refused(path, kind):
    write_small(path, kind)
    whole = path.read_bytes()
    for length in reversed(range(len(whole))):
        os.truncate(path, length)
        for verify in (True, False):
            with pytest.raises(BonsaiFormatError):
                open_bonsai(path, verify=verify)
    path.write_bytes(whole + b"\0")
    with pytest.raises(BonsaiFormatError):
        open_bonsai(path)


@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_every_single_flipped_bit_is_detected(path, kind):
    write_small(path, kind)
    whole = path.read_bytes()
    assert len(whole) < 4096
    undetected = []
    with path.open("r+b", buffering=0) as file:
        for position, byte in enumerate(whole):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), position)
                try:
                    open_bonsai(path).close()
                except BonsaiFormatError:
                    continue
                undetected.append((position, bit))
            os.pwrite(file.fileno(), bytes([byte]), position)
    assert undetected == []
    open_bonsai(path).close()


def test_without_verify_the_header_is_still_protected(path):
    write_small(path, "model")
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    file = open_bonsai(path, verify=False)
    with pytest.raises(BonsaiFormatError, match=r"tensor .*checksum"):
        file.verify()
    whole[-1] ^= 1
    padding = whole.index(b'"}}  ') + 4 if b'"}}  ' in whole else whole.index(b"  ")
    whole[padding] = ord("\t")
    refuse(path, bytes(whole), "does not match its checksum", verify=False)


def test_an_adapter_with_values_that_are_not_finite_is_refused(path):
    for value in (NAN, INF, -INF):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            tensor = torch.zeros(3, 5, dtype=dtype)
            tensor[1, 2] = value
            with pytest.raises(BonsaiFormatError, match="tensor x: a value is NaN or infinite"):
                write_bonsai(path, "adapter", {}, {"x": tensor}, fingerprint=BASE)
            assert list(path.parent.iterdir()) == []
            refuse(path, sealed({"x": tensor}, {}), "tensor x: a value is NaN or infinite")
            path.unlink()


# Hostile headers.

U8 = field("U8", [1], 0, 1)
HOSTILE = {
    "empty file": (b"", "0 bytes"),
    "seven bytes": (b"\x02" + bytes(6), "7 bytes"),
    "length of 2**63": ((1 << 63).to_bytes(8, "little") + b"{}", "claims 9223372036854775808"),
    "length beyond the file": ((3).to_bytes(8, "little") + b"{}", "claims 3 bytes, but 2 follow"),
    "length of zero": (bytes(8) + b"{}", "not a JSON object"),
    "pickle": (b"\x80\x04\x95" + bytes(100), "claims"),
    "zip": (b"PK\x03\x04" + bytes(100), "claims"),
    "space first": (raw_file(b" {}"), "not a JSON object"),
    "list": (raw_file(b"[]"), "not a JSON object"),
    "no json": (raw_file(b"{nope}"), "header: "),
    "not utf-8": (raw_file(b'{"\xff":1}'), "not ASCII"),
    "utf-16": (raw_file('{"a":1}'.encode("utf-16-le")), "header: "),
    "not ascii": (raw_file('{"\u00e9":1}'.encode()), "not ASCII"),
    "text after the object": (raw_file(b"{} {}"), "header: "),
    "nul after the object": (raw_file(b"{}\0"), "header: "),
    "no metadata": (raw_file({"a": U8}, b"x"), "no __metadata__"),
    "metadata is a list": (raw_file({"__metadata__": []}), "no __metadata__"),
    "metadata is a tensor": (raw_file({"__metadata__": U8}, b"x"), "no __metadata__"),
    "metadata of other types": (raw_file(header_of({}, note=1)), "'note' is not a string"),
    "long metadata": (raw_file(header_of({}, note="x" * (MIB + 1))), "'note' exceeds"),
    "half a surrogate pair": (raw_file(header_of({}, note="\ud800")), "surrogates"),
    "half a pair in the config": (raw_file(header_of({}, config='{"a":"\\ud800"}')), "surrogate"),
    "other format": (raw_file(header_of({}, format="pt")), "must be 'bonsai'"),
    "newer version": (raw_file(header_of({}, format_version="2")), "Upgrade bonsai-ft"),
    "odd version": (raw_file(header_of({}, format_version="01")), "format_version"),
    "other kind": (raw_file(header_of({}, kind="optimizer")), "kind"),
    "short fingerprint": (raw_file(header_of({}, fingerprint="ab")), "64 hexadecimal"),
    "config is a list": (raw_file(header_of({}, config="[]")), "config: .*not a JSON object"),
    "config has NaN": (raw_file(header_of({}, config='{"a": NaN}')), "config: .*NaN"),
    "config has 1e999": (raw_file(header_of({}, config='{"a": 1e999}')), "config: .*too large"),
    "config has a key twice": (raw_file(header_of({}, config='{"a":1,"a":2}')), "config: .*twice"),
    "config is deep": (raw_file(header_of({}, config='{"a":' + "[" * 16)), "config: .*deeper"),
    "config is not ascii": (raw_file(header_of({}, config='{"\u00e9":1}')), "config: "),
    "no checksums": (raw_file(header_of({"a": U8}, checksums="{}"), b"x"), "missing"),
    "checksum of nothing": (
        raw_file(header_of({}, checksums=json.dumps({"b": "0" * 64}))),
        "no tensor 'b'",
    ),
    "checksum is a number": (raw_file(header_of({}, checksums='{"__header__": 1}')), "64 hexa"),
    "header checksum is wrong": (raw_file(header_of({"a": U8}), b"x"), "checksum"),
    "duplicate tensor": (raw_file(b'{"a":{"dtype":"U8"},"a":{}}'), "'a' occurs twice"),
    "duplicate field": (
        raw_file(b'{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', b"x"),
        "'dtype' occurs twice",
    ),
    "deep lists": (raw_file(b'{"a":' + b"[" * 100_000), "deeper than 16"),
    "deep objects": (raw_file(b'{"a":' * 100_000), "deeper than 16"),
    "deep behind a fake quote": (raw_file(b'{"a\\\\":' + b"[" * 100_000), "deeper than 16"),
    "a million tensors": (
        lambda: raw_file(
            b"{" + b",".join(b'"%d":{"dtype":"U8"}' % i for i in range(700_000)) + b"}"
        ),
        "more than",
    ),
    "a million entries": (lambda: raw_file(b'{"a":[' + b"0," * 1_000_000 + b"0]}"), "more values"),
    "a million keys": (
        lambda: raw_file(b"{" + b",".join(b'"%d":0' % i for i in range(700_000)) + b"}"),
        "more than",
    ),
    "long number": (lambda: raw_file(b'{"a":' + b"9" * 1_000_000 + b"}"), "too long"),
    "float": (raw_file(b'{"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}}'), "integers"),
    "infinity": (raw_file(b'{"a":Infinity}'), "Infinity"),
    "99 MB of spaces": (lambda: raw_file(b"{" + b" " * 99_000_000), "claims 99000001"),
    "no name": (raw_file(header_of({"": U8}), b"x"), "tensor ''"),
    "long name": (raw_file(header_of({"n" * 257: U8}), b"x"), "256 bytes"),
    "long name in bytes": (raw_file(header_of({"\u6625" * 86: U8}), b"x"), "256 bytes"),
    "control character": (raw_file(header_of({"a\nb": U8}), b"x"), "printable"),
    "name of the checksum": (raw_file(header_of({"__header__": U8}), b"x"), "taken"),
    "field is a number": (raw_file(header_of({"a": 1})), "needs dtype"),
    "field too many": (raw_file(header_of({"a": {**U8, "x": 1}}), b"x"), "nothing else"),
    "field missing": (raw_file(header_of({"a": {"dtype": "U8", "shape": []}}), b"x"), "needs"),
    "shape is a text": (raw_file(header_of({"a": {**U8, "shape": "1"}}), b"x"), "lists"),
    "dtype unknown": (raw_file(header_of({"a": field("F8_E4M3", [1], 0, 1)}), b"x"), "dtype"),
    "dtype is a list": (raw_file(header_of({"a": field([], [1], 0, 1)}), b"x"), "dtype"),
    "rank 5": (raw_file(header_of({"a": field("U8", [1] * 5, 0, 1)}), b"x"), "at most 4"),
    "negative dimension": (raw_file(header_of({"a": field("U8", [-1, -1], 0, 1)}), b"x"), "from 0"),
    "true as dimension": (raw_file(header_of({"a": field("U8", [True], 0, 1)}), b"x"), "from 0"),
    "null as dimension": (raw_file(header_of({"a": field("U8", [None], 0, 1)}), b"x"), "from 0"),
    "zero hides 2**63": (raw_file(header_of({"a": field("U8", [0, 2**63], 0, 0)})), "exceeds"),
    "product of 2**64": (raw_file(header_of({"a": field("U8", [2**32] * 2, 0, 0)})), "takes"),
    "dimension of 2**63": (raw_file(header_of({"a": field("U8", [2**63], 0, 1)}), b"x"), "takes"),
    "size of another dtype": (
        raw_file(header_of({"a": field("F32", [1], 0, 2)}), b"xy"),
        "takes 4",
    ),
    "three offsets": (raw_file(header_of({"a": {**U8, "data_offsets": [0, 1, 1]}}), b"x"), "two"),
    "negative offset": (raw_file(header_of({"a": field("U8", [1], -1, 0)}), b"x"), "two integers"),
    "offsets reversed": (raw_file(header_of({"a": field("U8", [1], 1, 0)}), b"x"), "not -1"),
    "offset of 2**63": (raw_file(header_of({"a": field("U8", [1], 2**63, 2**63 + 1)})), "hole"),
    "overlap": (
        raw_file(header_of({"a": field("U8", [2], 0, 2), "b": field("U8", [2], 1, 3)}), b"xyz"),
        "tensor b: it overlaps",
    ),
    "same bytes twice": (raw_file(header_of({"a": U8, "b": U8}), b"x"), "tensor b: it overlaps"),
    "hole": (
        raw_file(header_of({"a": U8, "b": field("U8", [1], 2, 3)}), b"xyz"),
        "tensor b: it follows a hole",
    ),
    "hole at the start": (raw_file(header_of({"a": field("U8", [1], 1, 2)}), b"xy"), "hole"),
    "bytes behind the last": (raw_file(header_of({"a": U8}), b"xy"), "end after 1 bytes, but 2"),
    "too few bytes": (raw_file(header_of({"a": field("U8", [9], 0, 9)}), b"xy"), "end after 9"),
    "crooked start": (
        raw_file(header_of({"a": U8, "b": field("I64", [1], 1, 9)}), bytes(9)),
        "tensor b: it does not start",
    ),
    **{
        f"file named {name!r}": (
            raw_file(header_of({f"files/{name}": U8}), b"x"),
            "a file is named",
        )
        for name in ("", "..", ".", "../x", "/etc/passwd", "a/b", "a\\b", "C:x", ".hidden", "a b")
    },
    "file of floats": (raw_file(header_of({"files/a": field("F32", [1], 0, 4)}), bytes(4)), "U8"),
    "file of rank 2": (raw_file(header_of({"files/a": field("U8", [1, 1], 0, 1)}), b"x"), "U8"),
    **{
        f"metadata without {key}": (raw_file(header_of({}, drop=[key])), f"has no {key}")
        for key in ("format", "format_version", "kind", "fingerprint", "config", "checksums")
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused(path, name):
    content, reason = HOSTILE[name]
    refuse(path, content() if callable(content) else content, reason, verify=False)


def test_the_checksum_must_stand_where_it_is_looked_for(path):
    whole = sealed({"x": torch.zeros(2)}, {})
    path.write_bytes(whole)
    open_bonsai(path).close()
    # The same JSON in other bytes: neither place nor value of the checksum may be ambiguous.
    refuse(path, whole.replace(b'\\"__header__', b'\\"\\u005f_header__'), "header")


def test_the_header_parser_takes_little_memory(path):
    """The worst mixture found: full header, as many tensors and config values as allowed."""
    count = 65_000
    names = [f"m{i:05d}" for i in range(count)]
    fields = {name: field("U8", [1, 1, 1, 1], i, i + 1) for i, name in enumerate(names)}
    config = '{"a":{' + ",".join(f'"{i:07x}":1.5' for i in range(131_000)) + "}}"
    checksums = json.dumps(dict.fromkeys((*names, "__header__"), "0" * 64))
    header = header_of(fields, config=config, checksums=checksums)
    body = json.dumps(header, separators=(",", ":")).encode().ljust(16 * MIB)
    path.write_bytes(raw_file(body, bytes(count)))
    del header, body, fields, config, checksums
    for content in (None, b"{" + b" " * (16 * MIB - 1), b'{"' + b"\\" * (16 * MIB - 2)):
        if content is not None:
            path.write_bytes(raw_file(content))
        tracemalloc.start()
        with pytest.raises(BonsaiFormatError):
            open_bonsai(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak - path.stat().st_size < 64 * MIB


def test_what_is_no_file_is_refused(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path, reason in [
        (tmp_path, "a folder"),
        (tmp_path / "missing.bonsai", "no such file"),
        (fifo, "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
        (tmp_path / "missing" / "a", "no such file"),
        (tmp_path / ("n" * 300), "too long"),
        ("a\0b", "null"),
    ]:
        with pytest.raises(BonsaiFormatError, match=reason):
            open_bonsai(path)


def test_checks_do_not_depend_on_assert(path, tmp_path):
    """The same with `python -O`: one damaged file of each sort."""
    write_small(path, "model")
    whole = path.read_bytes()
    config, tensors = model_parts()
    tensors["block.proj.ternary"][0, 0] = 3
    contents = [whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), raw_file(header_of({"a": 1}))]
    contents += [sealed({"x": torch.tensor([NAN])}, {}), sealed(tensors, config, "model", None)]
    for i, content in enumerate(contents):
        (tmp_path / f"bad{i}").write_bytes(content)
    code = (
        "import sys; from bonsai_ft.format import *\n"
        "for path in sys.argv[1:]:\n"
        "    try: [f.weight(n) for f in [open_bonsai(path)] for n in f.weight_names()]\n"
        "    except BonsaiFormatError: continue\n"
        "    sys.exit(path)"
    )
    paths = [str(tmp_path / f"bad{i}") for i in range(len(contents))]
    subprocess.run(
        [sys.executable, "-O", "-c", code, *paths], check=True, cwd=Path(__file__).parents[1]
    )


# The writer.


def streamed(path, tensors, config, **kwargs):
    layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return BonsaiWriter(path, kind="model", config=config, tensors=layout, **kwargs)


@pytest.mark.parametrize("reserve_bytes", [None, 0, 1000])
@pytest.mark.parametrize("growth", [0, 10, 5000, 300_000])
def test_the_config_may_grow_until_the_end(path, reserve_bytes, growth):
    config, tensors = model_parts()
    with streamed(path, tensors, config, reserve_bytes=reserve_bytes) as writer:
        for name in reversed(tensors):
            writer.write(name, tensors[name])
        writer.config["report"] = "x" * growth
    with open_bonsai(path) as file:
        assert file.config == {**config, "report": "x" * growth}
        for name, tensor in tensors.items():
            assert torch.equal(file.tensor(name), tensor)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    with safetensors.safe_open(path, "pt") as theirs:
        assert sorted(theirs.keys()) == sorted(tensors)


def test_data_larger_than_a_chunk_moves_when_the_config_outgrows_its_room(path):
    tensors = {"x": torch.randint(0, 256, (3 * MIB + 17,), dtype=torch.uint8)}
    with streamed(path, tensors, {}, reserve_bytes=0) as writer:
        writer.write("x", tensors["x"])
        writer.config["report"] = "x" * (MIB + 100)
    with open_bonsai(path) as file:
        assert torch.equal(file.tensor("x"), tensors["x"])


def test_each_announced_tensor_is_written_exactly_once(path):
    config, tensors = model_parts()
    name = "norm.weight"

    def attempt(action):
        with streamed(path, tensors, config) as writer:
            action(writer)

    for reason, action in {
        "not announced": lambda writer: writer.write("other", tensors[name]),
        "twice": lambda writer: [writer.write(name, tensors[name]) for _ in range(2)],
        r"bfloat16 \[2\], but": lambda writer: writer.write(name, tensors[name][:2]),
        r"float32 \[3\], but": lambda writer: writer.write(name, tensors[name].float()),
        "was not written": lambda writer: writer.write(name, tensors[name]),
    }.items():
        with pytest.raises(ValueError, match=reason):
            attempt(action)
        assert list(path.parent.iterdir()) == []


def test_what_the_reader_would_refuse_is_refused_before_anything_is_written(path):
    def attempt(kind="model", config=None, tensors=None, target=path):
        layout = dict.fromkeys(tensors or (), (torch.uint8, (1,)))
        BonsaiWriter(target, kind=kind, config=config or {}, tensors=layout)

    deep = []
    for _ in range(20):
        deep = [deep]
    endless = {}
    endless["a"] = endless
    for reason, arguments in {
        "kind": {"kind": "optimizer"},
        "not JSON": {"config": {"a": torch.float16}},
        "config: .*not JSON": {"config": {"a": NAN}},
        "Circular|not JSON": {"config": endless},
        "deeper": {"config": {"a": deep}},
        "printable": {"tensors": ["a\n"]},
        "1 to 256": {"tensors": [""]},
        "taken": {"tensors": ["__metadata__"]},
        "a file is named": {"tensors": ["files/../x"]},
        "no layer": {"tensors": ["x.ternary"]},
        "missing": {"config": {"layers": [{"name": "x", "out_features": 1, "in_features": 1}]}},
        "a folder": {"target": path.parent},
        "does not exist": {"target": path.parent / "missing" / "x.bonsai"},
    }.items():
        with pytest.raises(ValueError, match=reason):
            attempt(**arguments)
    with pytest.raises(ValueError, match="cannot be stored"):
        BonsaiWriter(path, kind="model", config={}, tensors={"x": (torch.complex64, (1,))})
    assert list(path.parent.iterdir()) == []


def test_any_exception_leaves_the_old_file_and_no_other(path):
    old = write_small(path, "model", seed=0)
    config, tensors = model_parts(seed=1)

    def fail(error):
        with streamed(path, tensors, config) as writer:
            writer.write("norm.weight", tensors["norm.weight"])
            raise error

    for error in (RuntimeError, KeyboardInterrupt, SystemExit):
        with pytest.raises(error):
            fail(error)
        assert [p.name for p in path.parent.iterdir()] == [path.name]
    streamed(path, tensors, config)
    gc.collect()
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    with open_bonsai(path) as file:
        assert torch.equal(file.tensor("norm.weight"), old["norm.weight"])


class FullDisk:
    """A file that refuses after some calls that reach the disk."""

    def __init__(self, file, calls):
        self.file, self.calls = file, calls

    def __getattr__(self, name):
        return getattr(self.file, name)

    def spend(self):
        self.calls -= 1
        if self.calls < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, data):
        self.spend()
        return self.file.write(data)

    def flush(self):
        self.spend()
        return self.file.flush()


def test_a_full_disk_at_any_write_leaves_the_old_file_and_no_other(path, monkeypatch):
    write_small(path, "model", seed=0)
    before = path.read_bytes()
    fdopen = os.fdopen
    # Each tensor, the header, and what is left in the buffer.
    needed = len(model_parts()[1]) + 2
    for calls in range(needed + 1):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdopen", lambda fd, mode, n=calls: FullDisk(fdopen(fd, mode), n))
            if calls == needed:
                write_small(path, "model", seed=1)
                break
            with pytest.raises(OSError, match="an old one is untouched") as caught:
                write_small(path, "model", seed=1)
        assert caught.value.errno == errno.ENOSPC
        assert str(path) in str(caught.value)
        assert path.read_bytes() == before
        assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() != before


def test_a_disk_that_is_full_when_data_must_move_is_reported(path, monkeypatch):
    def attempt():
        with streamed(path, {"x": torch.zeros(9)}, {}, reserve_bytes=0) as writer:
            writer.write("x", torch.zeros(9))
            writer.config["report"] = "x" * 1000

    fdopen = os.fdopen
    monkeypatch.setattr(os, "fdopen", lambda fd, mode: FullDisk(fdopen(fd, mode), 1))
    with pytest.raises(OSError, match="an old one is untouched"):
        attempt()
    assert list(path.parent.iterdir()) == []


def test_a_forked_child_leaves_its_parents_file_alone(path):
    config, tensors = model_parts()
    with streamed(path, tensors, config) as writer:
        child = os.fork()
        if child == 0:
            writer.abort()
            os._exit(0)
        os.waitpid(child, 0)
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    open_bonsai(path).close()


@pytest.mark.parametrize("function", ["fsync", "disk_usage", "replace"])
def test_a_disk_that_refuses_otherwise_leaves_the_old_file_and_no_other(
    path, monkeypatch, function
):
    write_small(path, "model", seed=0)
    before = path.read_bytes()

    def refuse(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    owner = {"fsync": os, "disk_usage": storage.shutil, "replace": Path}[function]
    with monkeypatch.context() as patch:
        patch.setattr(owner, function, refuse)
        with pytest.raises(OSError, match="an old one is untouched"):
            write_small(path, "model", seed=1)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_limit_on_file_sizes_leaves_the_old_file_and_no_other(path):
    write_small(path, "model", seed=0)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (0, 1, 100, len(before) - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            with pytest.raises(OSError, match="an old one is untouched"):
                write_small(path, "model", seed=1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert path.read_bytes() == before
        assert [p.name for p in path.parent.iterdir()] == [path.name]


def kill_writers(path, times, seed=0):
    """Kills a process that keeps writing, at random moments; yields after each."""
    chance = random.Random(seed)
    for _ in range(times):
        child = os.fork()
        if child == 0:
            try:
                for number in range(10**6):
                    write_small(path, "model", seed=number % 2)
            finally:
                os._exit(1)
        time.sleep(chance.uniform(0.0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        yield


def test_a_killed_writer_leaves_the_old_file_or_a_new_one(path):
    allowed = []
    for number in range(2):
        write_small(path, "model", seed=number)
        allowed.append(path.read_bytes())
    for _ in kill_writers(path, times=20):
        assert path.read_bytes() in allowed
        open_bonsai(path).close()


def test_a_killed_writer_leaves_no_file_where_none_was(path):
    write_small(path, "model", seed=0)
    first = path.read_bytes()
    path.unlink()
    for _ in kill_writers(path, times=5):
        if path.exists():
            open_bonsai(path).close()
            assert len(path.read_bytes()) == len(first)
            path.unlink()


def test_the_file_has_the_permissions_of_any_new_file(path):
    plain = path.with_name("plain")
    plain.touch()
    write_small(path, "model")
    assert path.stat().st_mode == plain.stat().st_mode


def test_a_link_keeps_pointing_and_its_target_is_replaced(path):
    target = path.with_name("target.bonsai")
    write_small(target, "model", seed=0)
    path.symlink_to(target)
    write_small(path, "model", seed=1)
    assert path.is_symlink()
    assert target.read_bytes() == path.read_bytes()


def test_types_of_the_public_interface(path):
    write_small(path, "model")
    file = open_bonsai(str(path))
    assert isinstance(file, BonsaiFile)
    assert isinstance(file.weight("block.proj"), TernaryWeight)
    assert issubclass(BonsaiFormatError, ValueError)

"""Can any damage to a file cause anything but a BonsaiFormatError?

The number of mutations may be raised for a long run: BONSAI_FUZZ_MUTATIONS=1000000.
"""

import os
import random
import re
import time

import pytest
from test_storage import (
    MIB,
    adapter_parts,
    field,
    header_of,
    kill_writers,
    model_parts,
    raw_file,
    sealed,
    write_small,
)

from bonsai_ft.format import BonsaiFormatError, open_bonsai

pytestmark = pytest.mark.slow

MUTATIONS = int(os.environ.get("BONSAI_FUZZ_MUTATIONS", "20000"))

TOKENS = [
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b'"',
        b"\\",
        b"\\u0000",
        b"\\ud800",
        b" ",
        b"\0",
        b"\xff",
    ),
    *(b"0", b"-1", b"1", b"255", b"4294967296", b"9223372036854775807", b"18446744073709551616"),
    *(b"1e999", b"NaN", b"-Infinity", b"true", b"null", b'"U8"', b'"F64"', b'"I64"', b'"BOOL"'),
    *(b"[]", b"{}", b"[0]", b"[[[[[[[[[[[[[[[[[[", b"__metadata__", b"__header__", b"files/../a"),
    *(b"model", b"adapter", b"block.proj.ternary", b"layers", b"config", b"checksums", b"shape"),
]
NUMBERS = re.compile(rb"-?[0-9]+")


def damage_bytes(chance, content):
    """Bytes changed, removed, repeated or replaced anywhere."""
    content = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 8))):
        start = chance.randrange(len(content) + 1)
        end = min(len(content), start + chance.choice((0, 1, 1, 4, 8, 64, 512)))
        match chance.randrange(6):
            case 0:
                content[start:end] = chance.randbytes(end - start)
            case 1:
                del content[start:end]
            case 2:
                content[start:start] = content[start:end]
            case 3:
                content[start:end] = bytes(end - start)
            case 4:
                content[start:end] = chance.choice(TOKENS)
            case 5:
                other = chance.randrange(len(content) + 1)
                content[start:end] = content[other : other + end - start]
    return bytes(content)


def damage_header(chance, content):
    """The header changed as text, its length put right: such files get past the first checks."""
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    for _ in range(chance.choice((1, 1, 2, 4))):
        numbers = list(NUMBERS.finditer(header))
        if numbers and chance.random() < 0.5:
            start, end = chance.choice(numbers).span()
        else:
            start = chance.randrange(len(header) + 1)
            end = min(len(header), start + chance.choice((0, 1, 2, 8, 40)))
        token = chance.choice((*TOKENS, header[start:end] * 2, b""))
        header = header[:start] + token + header[end:]
    if chance.random() < 0.1:
        data += bytes(chance.randrange(1, 64))
    return raw_file(header, data)


def damage_values(chance, _):
    """A file with every checksum right and wrong values inside: only the last checks see it."""
    kind = chance.choice(("model", "adapter"))
    config, tensors = model_parts() if kind == "model" else adapter_parts()
    name = chance.choice(list(tensors))
    match chance.randrange(5):
        case 0:
            flat = tensors[name].view(-1)
            flat[chance.randrange(len(flat))] = chance.choice((-1, 0, 2, 3, 100, 255))
        case 1:
            tensors[name] = tensors[name].reshape(-1)[: chance.randrange(4)]
        case 2:
            del tensors[name]
        case 3:
            tensors[name] = tensors[name].float() * float("nan")
        case 4:
            key = chance.choice(("out_features", "in_features", "packing", "name"))
            value = chance.choice((0, -1, 1, 40, 10**18, True, None, "base3", [], {}))
            layers = [{**layer, key: value} for layer in config.get("layers", [{}])]
            config = {**config, "layers": layers}
    fingerprint = None if kind == "model" else "ab" * 32
    return sealed(tensors, config, kind, fingerprint)


@pytest.mark.parametrize("damage", [damage_bytes, damage_header, damage_values])
def test_only_our_error_comes_out_of_damaged_files(tmp_path, damage):
    path = tmp_path / "fuzz.bonsai"
    originals = []
    for kind in ("model", "adapter"):
        write_small(path, kind)
        originals.append(path.read_bytes())
    refused, accepted, share = (
        0,
        0,
        {damage_bytes: 0.45, damage_header: 0.45, damage_values: 0.1}[damage],
    )
    total = round(MUTATIONS * share)
    for seed in range(total):
        chance = random.Random(seed)
        original = chance.choice(originals)
        content = damage(chance, original)
        path.write_bytes(content)
        try:
            # Only a failure shows the seed; everything is reproducible from it.
            with open_bonsai(path, verify=chance.random() < 0.8) as file:
                for name in file.names():
                    file.tensor(name).flatten()[:1].tolist()
                for name in file.weight_names():
                    file.weight(name).dequantize()
                for name in file.files():
                    file.file(name)
        except BonsaiFormatError as error:
            refused += str(path) in str(error)
        except BaseException as error:
            raise AssertionError(f"{damage.__name__} with seed {seed}: {error!r}") from error
        else:
            # Damage to data alone is accepted without `verify`, damage to the header never.
            length = 8 + int.from_bytes(original[:8], "little")
            assert damage is damage_values or content[:length] == original[:length]
            accepted += 1
    assert refused + accepted == total, "a message does not name the file"
    assert refused > total // 4


@pytest.mark.parametrize("seed", range(4))
def test_a_writer_killed_at_many_moments_leaves_the_old_file_or_a_new_one(tmp_path, seed):
    path = tmp_path / "killed.bonsai"
    allowed = []
    for number in range(2):
        write_small(path, "model", seed=number)
        allowed.append(path.read_bytes())
    for _ in kill_writers(path, times=50, seed=seed):
        assert path.read_bytes() in allowed
        open_bonsai(path).close()


def test_no_header_takes_the_parser_long(tmp_path):
    """A second of processor time for as much as the limits allow, and for what breaks them."""
    path = tmp_path / "long.bonsai"
    size = 16 * MIB
    many = {f"m{i:05d}": field("U8", [1, 1, 1, 1], i, i + 1) for i in range(65_536)}
    bodies = [
        b"{" + b" " * (size - 1),
        b'{"a":' + b"[" * (size - 5),
        b'{"a":[' + b"[]," * 240_000 + b"0]}",
        b'{"a":[' + b'{"a":0},' * 190_000 + b"0]}",
        b"{" + b'"' * (size - 1),
        b'{"' + b"\\" * (size - 2),
        b'{"a":' + b"9" * (size - 6) + b"}",
        b'{"a":[' + b"," * (size - 8) + b"]}",
        raw_file(header_of(many))[8:],
        raw_file(header_of({}, config='{"a":[' + "1.5," * 260_000 + "0]}"))[8:],
    ]
    for body in bodies:
        path.write_bytes(raw_file(body, bytes(len(many))))
        start = time.process_time()
        with pytest.raises(BonsaiFormatError):
            open_bonsai(path)
        assert time.process_time() - start < 1, body[:40]

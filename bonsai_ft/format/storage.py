"""How is a model or an adapter kept in one file that can be trusted?

A `.bonsai` file is a safetensors file: an 8-byte little-endian length, a JSON header, and the bytes
of the tensors without a hole. `__metadata__` holds

    format          "bonsai"
    format_version  "1"
    kind            "model" or "adapter"
    config          a JSON object; for a model, `layers` lists name, out_features, in_features and
                    packing of each ternary weight
    fingerprint     identifies the ternary body; an adapter carries its base's
    checksums       a JSON object: SHA-256 of each tensor's bytes, and under "__header__" that of
                    the length and the whole header, with this one value replaced by zeros

so that every single byte is protected. The header's own checksum is found by its spelling, which is
JSON inside a JSON string without spaces. Beyond what safetensors asks, the header is ASCII (JSON
escapes say the rest), and tensors start at multiples of their element size. Tensors are mapped,
not read: opening a file costs no memory, and writing to a tensor never changes the file.
"""

import gc
import hashlib
import json
import math
import mmap
import os
import re
import secrets
import shutil
import stat
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import ENOSPC
from io import BufferedRandom, BufferedReader
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from bonsai_ft.format.weight import SUFFIXES, TernaryWeight, check_layout

FORMAT_VERSION = 1
KINDS = ("model", "adapter")
MAX_HEADER_BYTES = 16 << 20
MAX_TENSORS = 65_536
MAX_NAME_BYTES = 256
MAX_RANK = 4
MAX_METADATA_BYTES = 1 << 20
MAX_JSON_METADATA_BYTES = 8 << 20
MAX_JSON_DEPTH = 16

DTYPES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# What a JSON text may hold, since each costs a Python object and this bounds the memory: values
# (objects, lists, and what commas part; a tensor in the header has at most 10) and keys below
# the outermost object (a tensor has 3). That one has a key per tensor at most.
_HEADER_LIMITS = (11 * MAX_TENSORS, 3 * MAX_TENSORS + 64)
_CONFIG_LIMITS = (4 * MAX_TENSORS, 2 * MAX_TENSORS)
_CHECKSUMS_LIMITS = (MAX_TENSORS + 64, 0)

_HEADER_KEY = "__header__"
_METADATA_KEY = "__metadata__"
_JSON_METADATA = ("config", "checksums")
_REQUIRED_METADATA = ("format", "format_version", "kind", "fingerprint", *_JSON_METADATA)
_FINGERPRINTED = (".ternary", ".scale", ".codes", ".residual_mu", ".residual_sigma")
# Tensors that only a ternary weight has; `.scale` may also belong to something else.
_OF_A_WEIGHT = tuple(f".{suffix}" for suffix in SUFFIXES if suffix != "scale")
_FIELD_NAMES = {"dtype", "shape", "data_offsets"}
_HASH = re.compile(r"[0-9a-f]{64}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_ALIGNMENT = 64
_CHUNK_BYTES = 1 << 20
_SPARE_BYTES = 64 << 10


class BonsaiFormatError(ValueError):
    """A file is not what it must be; the message names file, tensor (if any) and reason."""


class _Entry(NamedTuple):
    """One tensor of the header; begin and end count from the first byte after the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class _Header:
    entries: dict[str, _Entry]  # in the order of their bytes
    kind: str
    format_version: str
    config: dict[str, Any]
    fingerprint: str
    checksums: dict[str, str]
    layers: dict[str, dict[str, Any]]


def fingerprint_of(checksums: Mapping[str, str], config: Mapping[str, Any]) -> str:
    """What identifies a ternary body: its signs, scales, codes, mu, sigma, and how they are read.

    Codebooks are left out, because they are what training changes; so is provenance.
    """
    identity = {
        "tensors": {n: c for n, c in checksums.items() if n.endswith(_FINGERPRINTED)},
        "model": config.get("model"),
        "quantization": config.get("quantization"),
    }
    # Through JSON once before sorting, since keys of other types than str become str there.
    text = json.dumps(json.loads(_dump(identity)), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def open_bonsai(path: str | os.PathLike[str], verify: bool = True) -> "BonsaiFile":
    """Opens a file; `verify` reads all of it once and compares every checksum."""
    file = BonsaiFile(path)
    if verify:
        try:
            file.verify()
        except BaseException:
            file.close()
            raise
    return file


class BonsaiFile:
    """An open `.bonsai` file whose header was checked; tensors are views of the mapped file.

    Tensors stay valid after `close`, and also when the file is replaced by a new one.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with _errors_of(path):
            file = _open_regular(path)
            self._finalizer = weakref.finalize(self, file.close)
            self._file = file
            try:
                raw, file_bytes = _read_header(file)
                self._header = header = _parse_header(raw, file_bytes)
                _check_header_hash(raw, header)
                _check_fingerprint(header)
                self._data_start = len(raw)
                self._mapping: mmap.mmap | None = mmap.mmap(
                    file.fileno(), file_bytes, access=mmap.ACCESS_COPY
                )
            except BaseException:
                self.close()
                raise

    @property
    def kind(self) -> str:
        """ "model" or "adapter"."""
        return self._header.kind

    @property
    def format_version(self) -> str:
        """Version of the file format."""
        return self._header.format_version

    @property
    def config(self) -> dict[str, Any]:
        """Model config, quantisation settings, provenance."""
        return self._header.config

    @property
    def fingerprint(self) -> str:
        """Of this model's ternary body, or of the base that this adapter was trained on."""
        return self._header.fingerprint

    @property
    def checksums(self) -> dict[str, str]:
        """SHA-256 by tensor, and of the header under "__header__"."""
        return self._header.checksums

    def names(self) -> list[str]:
        """Names of all tensors, in the order of their bytes."""
        return list(self._header.entries)

    def __contains__(self, name: object) -> bool:
        return name in self._header.entries

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """dtype of a tensor."""
        return self._entry(name).dtype

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor."""
        entry = self._entry(name)
        return entry.end - entry.begin

    def tensor(self, name: str) -> Tensor:
        """A tensor, mapped from the file without a copy."""
        entry = self._entry(name)
        if self._mapping is None:
            raise ValueError(f"{self.path}: the file is closed; take tensors before closing it")
        if entry.begin == entry.end:
            return torch.empty(entry.shape, dtype=entry.dtype)
        # a storage of its own: pickling one tensor must not carry the whole file along
        start, count = self._data_start + entry.begin, math.prod(entry.shape)
        return torch.frombuffer(self._mapping, dtype=entry.dtype, count=count, offset=start).view(
            entry.shape
        )

    def weight_names(self) -> list[str]:
        """Modules that `weight` knows."""
        return list(self._header.layers)

    def weight(self, module_name: str) -> TernaryWeight:
        """The ternary weight of a module, all values checked."""
        layer = self._header.layers.get(module_name)
        if layer is None:
            raise BonsaiFormatError(f"{self.path}: there is no ternary weight {module_name!r}")
        weight = TernaryWeight.from_tensors(
            {
                suffix: self.tensor(f"{module_name}.{suffix}")
                for suffix in SUFFIXES
                if f"{module_name}.{suffix}" in self
            },
            out_features=layer["out_features"],
            in_features=layer["in_features"],
            packing=layer["packing"],
        )
        with _errors_of(self.path, f"tensor {module_name}."):
            weight.validate()
        return weight

    def files(self) -> list[str]:
        """Names of the files that travel inside."""
        return [n.removeprefix("files/") for n in self._header.entries if n.startswith("files/")]

    def file(self, name: str) -> bytes:
        """Content of a file that travels inside."""
        return self.tensor(f"files/{name}").numpy().tobytes()

    def verify(self) -> None:
        """Compares every checksum; an adapter's values must be finite, too."""
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        for name, entry in self._header.entries.items():
            with _errors_of(self.path, f"tensor {name}: "):
                if self._digest(entry, buffer) != self._header.checksums[name]:
                    raise ValueError("its checksum does not match its bytes; the file is damaged")
                if self.kind == "adapter":
                    _check_finite(self.tensor(name))

    def close(self) -> None:
        """Closes the file; tensors already taken stay valid."""
        self._finalizer()
        # The mapping lives as long as a tensor refers to it.
        self._mapping = None

    def __enter__(self) -> "BonsaiFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _entry(self, name: str) -> _Entry:
        entry = self._header.entries.get(name)
        if entry is None:
            raise BonsaiFormatError(f"{self.path}: there is no tensor {name!r}")
        return entry

    def _digest(self, entry: _Entry, buffer: memoryview) -> str:
        # Read instead of mapped: an unreadable disk block is then an error and not a crash, and
        # checking a big file does not count as this process's memory.
        digest = hashlib.sha256()
        self._file.seek(self._data_start + entry.begin)
        left = entry.end - entry.begin
        while left:
            read = self._file.readinto(buffer[: min(left, len(buffer))])
            if not read:
                raise ValueError("the file became shorter while it was read")
            digest.update(buffer[:read])
            left -= read
        return digest.hexdigest()


def write_bonsai(
    path: str | os.PathLike[str],
    kind: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    fingerprint: str | None = None,
) -> None:
    """Writes a file whose tensors are all in memory."""
    layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with BonsaiWriter(
        path, kind=kind, config=config, tensors=layout, fingerprint=fingerprint, reserve_bytes=0
    ) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)


class BonsaiWriter:
    """Writes a file tensor by tensor, so that it need not fit into memory.

    Everything goes to a temporary file beside the target, which takes the target's place when it is
    complete and on the disk: whatever happens, the target holds the old content or the new. The
    header comes last, into room kept at the front: what `config` has then is what is written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        kind: str,
        config: Mapping[str, Any],
        tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]],
        fingerprint: str | None = None,
        reserve_bytes: int | None = None,
    ) -> None:
        """Opens the temporary file.

        `tensors` has dtype and shape by name. `config` must list its layers from the start; the
        rest may change until the end, and `reserve_bytes` is the room it has to grow. Growing
        beyond it is allowed, but moves all data written so far.
        """
        self._target = Path(path).resolve()
        if self._target.is_dir() or not self._target.parent.is_dir():
            raise ValueError(f"{path}: this is a folder, or lies in a folder that does not exist")
        if kind == "adapter" and fingerprint is None:
            raise ValueError(f"{path}: an adapter needs its base's fingerprint")
        self._kind = kind
        self._fingerprint = fingerprint
        self._checksums: dict[str, str] = {}
        with _errors_of(path):
            config_text = _dump(config)
            self.config: dict[str, Any] = json.loads(config_text)
            self._entries = _arrange(tensors)
            self._data_bytes = max((entry.end for entry in self._entries.values()), default=0)
            header = self._render()
            self._data_start = len(header)
            # What the reader would refuse is refused now, before hours of quantising.
            _parse_header(header, self._data_start + self._data_bytes)
        if reserve_bytes is None:
            reserve_bytes = _SPARE_BYTES + len(config_text)
        room = min(_aligned(self._data_start + reserve_bytes), MAX_HEADER_BYTES)
        self._data_start = max(self._data_start, room)
        self._open_temporary()

    def write(self, name: str, tensor: Tensor) -> None:
        """Writes one tensor; any order, each exactly once."""
        entry = self._entries.get(name)
        if entry is None:
            raise ValueError(f"{self._target}: tensor {name!r} was not announced")
        if name in self._checksums:
            raise ValueError(f"{self._target}: tensor {name!r} is written twice")
        if tensor.dtype != entry.dtype or tuple(tensor.shape) != entry.shape:
            raise ValueError(
                f"{self._target}: tensor {name!r} is {tensor.dtype} {list(tensor.shape)}, but "
                f"{entry.dtype} {list(entry.shape)} was announced"
            )
        tensor = tensor.detach().cpu().contiguous()
        if self._kind == "adapter":
            with _errors_of(self._target, f"tensor {name}: "):
                _check_finite(tensor)
        data = tensor.reshape(-1).view(torch.uint8).numpy().data
        with self._writing():
            self._file.seek(self._data_start + entry.begin)
            self._file.write(data)
        self._checksums[name] = hashlib.sha256(data).hexdigest()

    def close(self) -> None:
        """Completes the file and puts it in the target's place."""
        if not self._finalizer.alive:
            return
        try:
            if missing := self._entries.keys() - self._checksums.keys():
                raise ValueError(f"{self._target}: tensor {min(missing)!r} was not written")
            with _errors_of(self._target):
                header_bytes = len(self._render())
            if header_bytes > self._data_start:
                self._make_room(header_bytes)
            with _errors_of(self._target):
                header = self._render(self._data_start)
                parsed = _parse_header(header, self._data_start + self._data_bytes)
                _check_header_hash(header, parsed)
                _check_fingerprint(parsed)
            with self._writing():
                self._file.seek(0)
                self._file.write(header)
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
                self._temporary.replace(self._target)
            _sync_folder(self._target.parent)
        finally:
            self.abort()

    def abort(self) -> None:
        """Gives up: removes the temporary file and leaves the target as it is."""
        self._finalizer()

    def __enter__(self) -> "BonsaiWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _open_temporary(self) -> None:
        self._temporary = self._target.with_name(f".{self._target.name}.tmp-{secrets.token_hex(6)}")
        total = self._data_start + self._data_bytes
        with self._writing():
            if shutil.disk_usage(self._target.parent).free < total:
                raise OSError(ENOSPC, f"the file needs {total} bytes, more than the disk has left")
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
            self._file = os.fdopen(os.open(self._temporary, flags, 0o666), "w+b")
        self._finalizer = weakref.finalize(self, _discard, self._file, self._temporary, os.getpid())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Removes the temporary file and names the target where the disk refuses."""
        try:
            yield
        except OSError as error:
            if hasattr(self, "_finalizer"):
                self.abort()
            reason = f"the file could not be written ({error.strerror}); an old one is untouched"
            raise OSError(error.errno, reason, str(self._target)) from error

    def _render(self, total_bytes: int | None = None) -> bytes:
        """The header with all that is known so far, filled up with spaces."""
        zeros = "0" * 64
        checksums = {name: self._checksums.get(name, zeros) for name in self._entries}
        fingerprint = self._fingerprint
        if fingerprint is None:
            fingerprint = fingerprint_of(checksums, self.config)
        # Where the header's own hash goes is found by a word that cannot occur anywhere else.
        place = secrets.token_hex(32)
        metadata = {
            "format": "bonsai",
            "format_version": str(FORMAT_VERSION),
            "kind": self._kind,
            "fingerprint": fingerprint,
            "config": _dump(self.config),
            "checksums": _dump({**checksums, _HEADER_KEY: place}),
        }
        header: dict[str, Any] = {_METADATA_KEY: metadata}
        for name, entry in self._entries.items():
            header[name] = {
                "dtype": _DTYPE_NAMES[entry.dtype],
                "shape": entry.shape,
                "data_offsets": (entry.begin, entry.end),
            }
        text = _dump(header).encode()
        total = _aligned(8 + len(text)) if total_bytes is None else total_bytes
        if total - 8 > MAX_HEADER_BYTES:
            raise ValueError(
                f"the header takes {total - 8} bytes and the limit is {MAX_HEADER_BYTES}; "
                f"make the config smaller"
            )
        raw = (total - 8).to_bytes(8, "little") + text.ljust(total - 8)
        digest = hashlib.sha256(raw.replace(place.encode(), zeros.encode())).hexdigest()
        return raw.replace(place.encode(), digest.encode())

    def _make_room(self, data_start: int) -> None:
        """Moves the data towards the end, last bytes first, when `config` outgrew its room."""
        with self._writing():
            position = self._data_start + self._data_bytes
            while position > self._data_start:
                size = min(_CHUNK_BYTES, position - self._data_start)
                position -= size
                self._file.seek(position)
                chunk = self._file.read(size)
                self._file.seek(position - self._data_start + data_start)
                self._file.write(chunk)
        self._data_start = data_start


def _arrange(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> dict[str, _Entry]:
    """Offsets of all tensors, without a hole.

    Sorted by the largest power of two that divides their size, each tensor starts at a multiple of
    its own: never less than its element size, and of 64 wherever its size is.
    """
    sized = []
    for name, (dtype, shape) in tensors.items():
        _check_name(name)
        if dtype not in _DTYPE_NAMES:
            raise ValueError(f"tensor {name}: {dtype} cannot be stored")
        num_bytes = math.prod(shape) * dtype.itemsize
        power = math.gcd(num_bytes, _ALIGNMENT)
        sized.append((-power, name, num_bytes, dtype, tuple(int(dim) for dim in shape)))
    entries, begin = {}, 0
    for _, name, num_bytes, dtype, shape in sorted(sized, key=lambda item: item[:2]):
        entries[name] = _Entry(dtype, shape, begin, begin + num_bytes)
        begin += num_bytes
    return entries


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _dump(value: object) -> str:
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"config: this is not JSON: {error}") from error


def _discard(file: BufferedRandom, path: Path, owner: int) -> None:
    # A forked child inherits the writer, but the file belongs to its parent.
    if os.getpid() != owner:
        return
    try:
        file.close()
    except OSError:
        # Bytes that could not be flushed belong to a file that is about to be removed.
        pass
    finally:
        path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Makes a rename durable, where the system can: the new file itself is complete already."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _errors_of(path: str | os.PathLike[str], where: str = "") -> Iterator[None]:
    """Turns whatever a bad file can cause into a BonsaiFormatError that names it."""
    try:
        yield
    except BonsaiFormatError:
        raise
    except OSError as error:
        raise BonsaiFormatError(f"{path}: {where}{error.strerror or error}") from error
    except (ValueError, RuntimeError, MemoryError, OverflowError) as error:
        reason = str(error) or f"the file exhausts this machine ({type(error).__name__})"
        raise BonsaiFormatError(f"{path}: {where}{reason}") from error


def _open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    # Without O_NONBLOCK, opening a named pipe would wait for a writer for ever.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError as error:
        raise ValueError("there is no such file") from error
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            what = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
            raise ValueError(f"this is {what}; a .bonsai file is one regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _read_header(file: BufferedReader) -> tuple[bytes, int]:
    """Length and header as they stand in the file, and the size of the file."""
    file_bytes = os.fstat(file.fileno()).st_size
    if file_bytes < 10:
        raise ValueError(f"the file has {file_bytes} bytes, too few for a header")
    prefix = file.read(8)
    header_bytes = int.from_bytes(prefix, "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise ValueError(
            f"the header claims {header_bytes} bytes; the limit is {MAX_HEADER_BYTES}. "
            f"Is this a .bonsai file?"
        )
    if header_bytes > file_bytes - 8:
        raise ValueError(
            f"the header claims {header_bytes} bytes, but {file_bytes - 8} follow; "
            f"the file is truncated or not a .bonsai file"
        )
    raw = prefix + file.read(header_bytes)
    if len(raw) != 8 + header_bytes:
        raise ValueError("the file became shorter while it was read")
    return raw, file_bytes


@contextmanager
def _without_collector() -> Iterator[None]:
    """Spares the search for garbage among many new objects that all stay: half the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_collector()
def _parse_header(raw: bytes, file_bytes: int) -> _Header:
    """All that a header says, checked without a look at any tensor's bytes."""
    if raw[8:9] != b"{":
        raise ValueError("the header is not a JSON object; this is not a .bonsai file")
    try:
        text = str(memoryview(raw)[8:], "ascii")
    except UnicodeDecodeError as error:
        raise ValueError("the header holds a byte that is not ASCII") from error
    fields = _load_object(text, "header", _HEADER_LIMITS, _fields_of, _no_float)
    metadata = fields.pop(_METADATA_KEY, None)
    _check_metadata(metadata)
    entries = _parse_entries(fields, file_bytes - len(raw), len(raw))
    del fields, text
    texts = cast(dict[str, str], metadata)
    config = _load_object(texts.pop("config"), "config", _CONFIG_LIMITS, _members_of, _finite_float)
    checksums = _load_object(
        texts.pop("checksums"), "checksums", _CHECKSUMS_LIMITS, _members_of, _no_float
    )
    _check_checksums(checksums, entries)
    try:
        json.dumps(config, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("config: half a surrogate pair, which cannot be printed") from error
    layers = _parse_layers(config, entries) if texts["kind"] == "model" else {}
    return _Header(
        entries=entries,
        kind=texts["kind"],
        format_version=texts["format_version"],
        config=config,
        fingerprint=texts["fingerprint"],
        checksums=checksums,
        layers=layers,
    )


def _load_object(
    text: str,
    what: str,
    limits: tuple[int, int],
    object_of: Callable[[list[tuple[str, Any]]], object],
    parse_float: Callable[[str], float],
) -> dict[str, Any]:
    """A JSON object, with every freedom that JSON leaves to a parser taken away."""
    try:
        _check_nesting(text, *limits)
        value = json.loads(
            text,
            object_pairs_hook=object_of,
            parse_int=_short_int,
            parse_float=parse_float,
            parse_constant=_no_constant,
        )
        if not isinstance(value, dict):
            raise ValueError("it is not a JSON object")
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
    return value


def _members_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {_quoted(twice)} occurs twice")
    return members


def _fields_of(pairs: list[tuple[str, Any]]) -> dict[str, Any] | tuple[Any, ...]:
    """An object; a tensor's fields as tuples, which take less memory and garbage collection."""
    members = _members_of(pairs)
    if members.keys() == _FIELD_NAMES:
        shape, offsets = members["shape"], members["data_offsets"]
        if isinstance(shape, list) and isinstance(offsets, list):
            return members["dtype"], tuple(shape), tuple(offsets)
    return members


def _check_nesting(text: str, max_values: int, max_deep_keys: int) -> None:
    """ValueError where JSON is too deep or holds too much; no Python object is made of it."""
    inside, depth, num_values, num_keys, num_deep_keys = 0, 0, 1, 0, 0
    for piece in _without_escapes(text):
        chunk = np.frombuffer(piece, np.uint8)
        is_string = np.cumsum(chunk == ord('"'), dtype=np.int32) + inside & 1
        structure = chunk[is_string == 0]
        inside = int(is_string[-1]) if chunk.size else inside
        if not structure.size:
            continue
        opens = (structure == ord("{")) | (structure == ord("["))
        closes = (structure == ord("}")) | (structure == ord("]"))
        depths = np.cumsum(opens.astype(np.int32) - closes) + depth
        if int(depths.max()) > MAX_JSON_DEPTH:
            raise ValueError(f"JSON is nested deeper than {MAX_JSON_DEPTH} levels")
        depth = int(depths[-1])
        keys = structure == ord(":")
        num_values += int(opens.sum()) + int((structure == ord(",")).sum())
        num_deep_keys += int((keys & (depths > 1)).sum())
        num_keys += int((keys & (depths <= 1)).sum())
        if num_values > max_values or num_deep_keys > max_deep_keys:
            raise ValueError("it holds more values than any file needs")
        # One key is the metadata's.
        if num_keys > MAX_TENSORS + 1:
            raise ValueError(f"it has more than {MAX_TENSORS + 1} keys")


def _without_escapes(text: str) -> Iterator[bytes]:
    """ASCII text in pieces, less the escapes that matter: all quotes left are ends of strings."""
    position = 0
    while position < len(text):
        piece = text[position : position + _CHUNK_BYTES]
        position += _CHUNK_BYTES
        if (len(piece) - len(piece.rstrip("\\"))) % 2:
            # An escape must not be cut in two.
            piece += text[position : position + 1]
            position += 1
        yield piece.replace("\\\\", "").replace('\\"', "").encode("ascii")


def _no_constant(text: str) -> float:
    raise ValueError(f"the number {text} is not JSON")


def _no_float(text: str) -> float:
    raise ValueError(f"{_quoted(text)} stands where only integers may")


def _finite_float(text: str) -> float:
    if len(text) > 64 or not math.isfinite(value := float(text)):
        raise ValueError(f"the number {_quoted(text)} is too long or too large")
    return value


def _short_int(text: str) -> int:
    # int() of a very long text is slow, and without a limit before Python 3.10.7.
    if len(text) > 20:
        raise ValueError(f"the number {_quoted(text)} is too long")
    return int(text)


def _quoted(text: str) -> str:
    return ascii(text if len(text) <= 80 else text[:80] + "...")


def _check_metadata(metadata: object) -> None:
    if not isinstance(metadata, dict):
        raise ValueError("the header has no __metadata__; this is not a .bonsai file")
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise ValueError(f"__metadata__: the value of {_quoted(key)} is not a string")
        limit = MAX_JSON_METADATA_BYTES if key in _JSON_METADATA else MAX_METADATA_BYTES
        if len(value.encode()) > limit:
            raise ValueError(f"__metadata__: the value of {_quoted(key)} exceeds {limit} bytes")
    for key in _REQUIRED_METADATA:
        if key not in metadata:
            raise ValueError(f"__metadata__ has no {key}; this is not a .bonsai file")
    if metadata["format"] != "bonsai":
        raise ValueError(f"format is {_quoted(metadata['format'])}; it must be 'bonsai'")
    version = metadata["format_version"]
    if version != str(FORMAT_VERSION):
        if re.fullmatch(r"[1-9][0-9]{0,8}", version):
            raise ValueError(
                f"format_version is {version}; this program reads {FORMAT_VERSION}. "
                f"Upgrade bonsai-ft to read the file"
            )
        raise ValueError(f"format_version is {_quoted(version)}; it must be '{FORMAT_VERSION}'")
    if metadata["kind"] not in KINDS:
        raise ValueError(f"kind is {_quoted(metadata['kind'])}; it must be 'model' or 'adapter'")
    if not _HASH.fullmatch(metadata["fingerprint"]):
        raise ValueError("the fingerprint is not 64 hexadecimal digits")


def _parse_entries(fields: dict[str, Any], data_bytes: int, data_start: int) -> dict[str, _Entry]:
    """Tensors in the order of their bytes, which they cover from the first to the last."""
    if len(fields) > MAX_TENSORS:
        raise ValueError(f"there are {len(fields)} tensors; the limit is {MAX_TENSORS}")
    parsed = []
    for name, field in fields.items():
        _check_name(name)
        parsed.append((name, _parse_entry(name, field, data_bytes, data_start)))
    parsed.sort(key=lambda item: (item[1].begin, item[1].end))
    position = 0
    for name, entry in parsed:
        if entry.begin != position:
            what = "overlaps the one before" if entry.begin < position else "follows a hole"
            raise ValueError(f"tensor {name}: it {what} (offset {entry.begin}, not {position})")
        position = entry.end
    if position != data_bytes:
        raise ValueError(
            f"the tensors end after {position} bytes, but {data_bytes} follow the header"
        )
    return dict(parsed)


def _check_name(name: str) -> None:
    if not name or not name.isprintable() or len(name.encode()) > MAX_NAME_BYTES:
        raise ValueError(
            f"tensor {_quoted(name)}: a name has 1 to {MAX_NAME_BYTES} bytes of printable text"
        )
    if name in (_HEADER_KEY, _METADATA_KEY):
        raise ValueError(f"tensor {name}: this name is taken by the header itself")
    if name.startswith("files/") and not _FILE_NAME.fullmatch(name.removeprefix("files/")):
        raise ValueError(
            f"tensor {_quoted(name)}: a file is named by letters, digits, '.', '_' and '-' only"
        )


def _parse_entry(name: str, field: object, data_bytes: int, data_start: int) -> _Entry:
    if not isinstance(field, tuple):
        raise ValueError(
            f"tensor {name}: it needs dtype, the lists shape and data_offsets, and nothing else"
        )
    dtype_name, shape, offsets = field
    dtype = DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise ValueError(f"tensor {name}: the dtype must be one of {', '.join(DTYPES)}")
    if len(shape) > MAX_RANK or not _are_counts(shape):
        raise ValueError(f"tensor {name}: the shape must be at most {MAX_RANK} integers from 0")
    if len(offsets) != 2 or not _are_counts(offsets):
        raise ValueError(f"tensor {name}: data_offsets must be two integers from 0")
    begin, end = offsets
    itemsize = dtype.itemsize
    num_bytes = math.prod(shape) * itemsize
    # A dimension of 0 must not hide another one that no machine can count to.
    if num_bytes == 0 and max(shape) > data_bytes:
        raise ValueError(f"tensor {name}: shape {list(shape)} exceeds the file")
    if end - begin != num_bytes:
        raise ValueError(
            f"tensor {name}: {dtype_name} {list(shape)} takes {num_bytes} bytes, not {end - begin}"
        )
    if (data_start + begin) % itemsize:
        raise ValueError(f"tensor {name}: it does not start at a multiple of {itemsize} bytes")
    if name.startswith("files/") and (dtype is not torch.uint8 or len(shape) != 1):
        raise ValueError(f"tensor {name}: a file is stored as U8 of one dimension")
    return _Entry(dtype, shape, begin, end)


def _are_counts(values: Sequence[Any]) -> bool:
    # type() and not isinstance(): True is an int, but no count.
    return set(map(type, values)) <= {int} and min(values, default=0) >= 0


def _check_checksums(checksums: dict[str, Any], entries: dict[str, _Entry]) -> None:
    for name, checksum in checksums.items():
        if name != _HEADER_KEY and name not in entries:
            raise ValueError(f"checksums: there is no tensor {_quoted(name)}")
        if not isinstance(checksum, str) or not _HASH.fullmatch(checksum):
            raise ValueError(f"checksums: the one of {name} is not 64 hexadecimal digits")
    for name in (_HEADER_KEY, *entries):
        if name not in checksums:
            raise ValueError(f"checksums: the one of {name} is missing")


def _parse_layers(config: dict[str, Any], entries: dict[str, _Entry]) -> dict[str, dict[str, Any]]:
    """Ternary weights by module, their tensors' dtypes and shapes checked."""
    listed = config.get("layers", [])
    if not isinstance(listed, list):
        raise ValueError("config.layers: this must be a list")
    layers: dict[str, dict[str, Any]] = {}
    for layer in listed:
        name = layer.get("name") if isinstance(layer, dict) else None
        if not isinstance(name, str) or name in layers:
            raise ValueError("config.layers: each layer needs a name of its own")
        if not _are_counts([layer.get("out_features"), layer.get("in_features")]):
            raise ValueError(
                f"config.layers: {_quoted(name)} needs out_features and in_features, integers"
            )
        layout = {
            suffix: (entry.dtype, entry.shape)
            for suffix in SUFFIXES
            if (entry := entries.get(f"{name}.{suffix}")) is not None
        }
        try:
            check_layout(
                layout,
                out_features=layer["out_features"],
                in_features=layer["in_features"],
                packing=layer.get("packing"),
            )
        except ValueError as error:
            raise ValueError(f"tensor {name}.{error}") from error
        layers[name] = layer
    for name in entries:
        module, _, _ = name.rpartition(".")
        if name.endswith(_OF_A_WEIGHT) and module not in layers:
            raise ValueError(f"tensor {name}: config.layers has no layer {_quoted(module)}")
    return layers


def _check_header_hash(raw: bytes, header: _Header) -> None:
    checksum = header.checksums[_HEADER_KEY]
    # As it stands in the file: JSON inside a JSON string.
    field = f'\\"{_HEADER_KEY}\\":\\"'.encode()
    if raw.count(field + checksum.encode()) != 1:
        raise ValueError("the header does not show its own checksum exactly once")
    place = raw.index(field + checksum.encode()) + len(field)
    digest = hashlib.sha256(memoryview(raw)[:place])
    digest.update(b"0" * 64)
    digest.update(memoryview(raw)[place + 64 :])
    if digest.hexdigest() != checksum:
        raise ValueError("the header does not match its checksum; the file is damaged")


def _check_fingerprint(header: _Header) -> None:
    if header.kind == "model" and header.fingerprint != fingerprint_of(
        header.checksums, header.config
    ):
        raise ValueError("the fingerprint does not match signs, scales and config")


def _check_finite(tensor: Tensor) -> None:
    """ValueError where a value is NaN or infinite; a reduction, so no copy is made."""
    if tensor.is_floating_point() and tensor.numel():
        low, high = (float(value) for value in tensor.aminmax())
        # NaN wins both reductions and fails both comparisons.
        if not (-math.inf < low and high < math.inf):
            raise ValueError("a value is NaN or infinite")

"""How does a token pass through a decoder on the CPU without Python in between?

The C side is `kernels/cpu/decode.cpp`; here are its structures, and the tensors that they point to.
Nothing here knows a model: `bonsai_ft.decode` fills these in.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bonsai_ft.ops.cpu_kernels import DTYPES, Layer, layer_of, library

ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}


@dataclass(frozen=True, kw_only=True)
class PackedLinear:
    """One layer: packed tensors as `ternary_linear` takes them, float32 bias and LoRA."""

    ternary: Tensor
    scale: Tensor
    codes: Tensor | None
    codewords: Tensor | None
    in_features: int
    packing: str
    bias: Tensor | None = None
    lora_a: Tensor | None = None
    lora_b: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class DecoderBlock:
    """A block of the Llama family; norms are float32 [width]."""

    query: PackedLinear
    key: PackedLinear
    value: PackedLinear
    output: PackedLinear
    gate: PackedLinear
    up: PackedLinear
    down: PackedLinear
    input_norm: Tensor
    post_norm: Tensor
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """Sizes; `positions` is the room for each of `sequences`."""

    heads: int
    kv_heads: int
    head_dim: int
    positions: int
    sequences: int
    eps: float
    attention_scale: float
    activation: str


class _Linear(ctypes.Structure):
    _fields_ = (
        ("layer", Layer),
        ("bias", ctypes.c_void_p),
        ("lora_a", ctypes.c_void_p),
        ("lora_b", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
    )


_LINEARS = ("query", "key", "value", "output", "gate", "up", "down")
_NORMS = ("input_norm", "post_norm", "query_norm", "key_norm")


class _Block(ctypes.Structure):
    _fields_ = (
        *((name, _Linear) for name in _LINEARS),
        *((name, ctypes.c_void_p) for name in _NORMS),
    )


class _Decoder(ctypes.Structure):
    _fields_ = (
        ("blocks", ctypes.POINTER(_Block)),
        *(
            (name, ctypes.c_int64)
            for name in (
                "num_blocks",
                "hidden",
                "heads",
                "kv_heads",
                "head_dim",
                "intermediate",
                "vocabulary",
            )
        ),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "embedding",
                "head",
                "head_bias",
                "final_norm",
                "cosines",
                "sines",
                "cache",
            )
        ),
        ("positions", ctypes.c_int64),
        ("sequences", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("attention_scale", ctypes.c_float),
        ("dtype", ctypes.c_int32),
        ("activation", ctypes.c_int32),
    )


class CpuDecoder:
    """One token of each sequence per `step`; keys and values of earlier tokens lie in `cache`.

    cache [blocks, 2, sequences, kv_heads, positions, head_dim] in the embedding's dtype;
    embedding and head [vocabulary, hidden]; cosines, sines float32 [positions, head_dim].
    """

    def __init__(
        self,
        blocks: Sequence[DecoderBlock],
        *,
        shape: DecoderShape,
        embedding: Tensor,
        head: Tensor,
        head_bias: Tensor | None,
        final_norm: Tensor,
        cosines: Tensor,
        sines: Tensor,
    ) -> None:
        self._functions = _declared(library().functions)
        self._kept: list[object] = []
        self.sequences = shape.sequences
        self.cache = embedding.new_zeros(
            len(blocks), 2, shape.sequences, shape.kv_heads, shape.positions, shape.head_dim
        )
        filled = (_Block * len(blocks))(*(self._block(block) for block in blocks))
        self._kept.append(filled)
        self._decoder = _Decoder(
            blocks=filled,
            num_blocks=len(blocks),
            hidden=embedding.shape[1],
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            intermediate=blocks[0].up.ternary.shape[0],
            vocabulary=head.shape[0],
            embedding=self._address(embedding),
            head=self._address(head),
            head_bias=self._address(head_bias),
            final_norm=self._address(final_norm),
            sequences=shape.sequences,
            eps=shape.eps,
            attention_scale=shape.attention_scale,
            dtype=DTYPES[embedding.dtype],
            activation=ACTIVATIONS[shape.activation],
        )
        self._place(cosines, sines, self.cache)
        self.logits = head.new_empty(shape.sequences, head.shape[0], dtype=torch.float32)
        self._num_embeddings = embedding.shape[0]
        self._workspace = head.new_empty(0, dtype=torch.uint8)
        self._threads = 0

    @property
    def positions(self) -> int:
        """Tokens of a sequence that there is room for."""
        return self._decoder.positions

    def extend(self, cosines: Tensor, sines: Tensor) -> None:
        """Room for as many positions as these have; what is in the cache stays there."""
        longer = self.cache.new_zeros(*self.cache.shape[:4], len(cosines), self.cache.shape[5])
        longer[:, :, :, :, : self.positions] = self.cache
        self._place(cosines, sines, longer)

    def _place(self, cosines: Tensor, sines: Tensor, cache: Tensor) -> None:
        # held here, because the next longer ones replace them
        self._rotary = (cosines.contiguous(), sines.contiguous())
        self.cache = cache
        self._decoder.cosines, self._decoder.sines = (t.data_ptr() for t in self._rotary)
        self._decoder.cache, self._decoder.positions = cache.data_ptr(), len(cosines)

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens, positions int64 [sequences] -> logits float32 [sequences, vocabulary].

        The result is overwritten by the next step.
        """
        for name, values, limit in (
            ("token", tokens, self._num_embeddings),
            ("position", positions, self.positions),
        ):
            if values.shape != (self.sequences,) or values.dtype != torch.int64:
                raise ValueError(f"one int64 {name} per sequence is needed ({self.sequences})")
            least, most = values.aminmax()
            if least < 0 or most >= limit:
                raise ValueError(f"a {name} is outside 0..{limit - 1}")
        # named, so that they outlive the call
        tokens, positions = tokens.contiguous(), positions.contiguous()
        threads = torch.get_num_threads()
        if threads != self._threads:
            size = self._functions.bonsai_decode_workspace(self._decoder, threads)
            self._workspace = self.logits.new_empty(size, dtype=torch.uint8)
            self._threads = threads
        self._functions.bonsai_decode_step(
            self._decoder,
            tokens.data_ptr(),
            positions.data_ptr(),
            self.logits.data_ptr(),
            self._workspace.data_ptr(),
            threads,
        )
        return self.logits

    def _block(self, block: DecoderBlock) -> _Block:
        values = {name: self._linear(getattr(block, name)) for name in _LINEARS}
        norms = {name: self._address(getattr(block, name)) for name in _NORMS}
        return _Block(**values, **norms)

    def _linear(self, linear: PackedLinear) -> _Linear:
        layer, kept = layer_of(
            linear.ternary,
            linear.scale,
            linear.codes,
            linear.codewords,
            linear.in_features,
            linear.packing,
        )
        self._kept.append(kept)
        return _Linear(
            layer=layer,
            bias=self._address(linear.bias),
            lora_a=self._address(linear.lora_a),
            lora_b=self._address(linear.lora_b),
            rank=0 if linear.lora_a is None else linear.lora_a.shape[0],
        )

    def _address(self, tensor: Tensor | None) -> int | None:
        """The tensor must live as long as this object."""
        if tensor is None:
            return None
        tensor = tensor.detach().contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()


def _declared(functions):
    functions.bonsai_decode_workspace.argtypes = [ctypes.POINTER(_Decoder), ctypes.c_int32]
    functions.bonsai_decode_workspace.restype = ctypes.c_int64
    functions.bonsai_decode_step.argtypes = [
        ctypes.POINTER(_Decoder),
        *[ctypes.c_void_p] * 4,
        ctypes.c_int32,
    ]
    functions.bonsai_decode_step.restype = None
    return functions

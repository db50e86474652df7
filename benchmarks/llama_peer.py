"""How fast is llama.cpp on ternary weights of the same shape? A side for `decoding.py`.

The GGUF holds random weights: TQ2_0 where a row is a multiple of 256, else Q4_0, which is what
llama.cpp's own quantiser falls back on. It is written twice: with the head in F16, as many bytes as
ours, and as that quantiser writes it (Q6_K, or Q8_0 where a row is no multiple of 256).
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from bonsai_ft.bench import DecodeSide, ModelShape
from bonsai_ft.resources import cache_folder

CONTEXT = 1024
GROUP = 256
# Where the half-precision scale of a block lies, and how many bytes the block has.
SCALES = {Type.TQ2_0: slice(64, 66), Type.Q4_0: slice(0, 2), Type.Q8_0: slice(0, 2)}
SCALES[Type.Q6_K] = slice(208, 210)


def llama_sides(shape: ModelShape, name: str, threads: int) -> dict[str, DecodeSide]:
    """Both heads; ImportError without llama-cpp-python."""
    import llama_cpp

    sides = {}
    for label, head in (("F16 head", Type.F16), ("its own head", quantised(shape.hidden))):
        path = cache_folder() / f"llama-{name}-{head.name}-v1.gguf"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_random(shape, path, head)
        model = llama_cpp.Llama(
            str(path), n_ctx=CONTEXT, n_threads=threads, n_threads_batch=threads, verbose=False
        )
        sides[f"llama.cpp TQ2_0, {label}"] = DecodeSide(
            generate=lambda ids, count, model=model: generate(model, ids, count),
            weight_bytes=weight_bytes(path, shape.is_tied),
        )
    return sides


def generate(model: Any, ids: Tensor, count: int) -> list[int]:
    """Greedy tokens after ids [1, T], by the library's lowest level that runs a batch."""
    import llama_cpp

    model.reset()
    tokens: list[int] = []
    batch = ids[0].tolist()
    for _ in range(count):
        model.eval(batch)
        logits = llama_cpp.llama_get_logits_ith(model.ctx, -1)
        values = np.ctypeslib.as_array(logits, shape=(model.n_vocab(),))
        batch = [int(values.argmax())]
        tokens += batch
    return tokens


def quantised(columns: int) -> Type:
    """What llama.cpp's quantiser makes of a head under TQ2_0."""
    return Type.Q8_0 if columns % GROUP else Type.Q6_K


def weight_bytes(path: Path, is_tied: bool) -> int:
    """What one token reads; of an embedding that is not the head too, one row only."""
    tensors = gguf.GGUFReader(path).tensors
    unread = () if is_tied else ("token_embd.weight",)
    return sum(int(tensor.n_bytes) for tensor in tensors if tensor.name not in unread)


def write_random(shape: ModelShape, path: Path, head: Type) -> None:
    """A Llama of that shape with random weights, written beside and then renamed."""
    part = path.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.blocks)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(shape.hidden // shape.heads)
    _add_vocabulary(writer, shape.vocabulary)
    random = np.random.default_rng(0)

    def add(name: str, rows: int, columns: int, kind: Type) -> None:
        if kind == Type.F16:
            values = random.standard_normal((rows, columns), dtype=np.float32) * 0.02
            writer.add_tensor(name, values.astype(np.float16))
        else:
            blocks = random_blocks(rows, columns, kind, random)
            writer.add_tensor(name, blocks, raw_dtype=kind)

    def norm(name: str) -> None:
        writer.add_tensor(name, np.ones(shape.hidden, dtype=np.float32))

    def body(name: str, rows: int, columns: int) -> None:
        add(name, rows, columns, Type.Q4_0 if columns % GROUP else Type.TQ2_0)

    narrow = shape.hidden // shape.heads * shape.kv_heads
    embedding = head if shape.is_tied else Type.F16
    add("token_embd.weight", shape.vocabulary, shape.hidden, embedding)
    if not shape.is_tied:
        add("output.weight", shape.vocabulary, shape.hidden, head)
    norm("output_norm.weight")
    for index in range(shape.blocks):
        block = f"blk.{index}"
        norm(f"{block}.attn_norm.weight")
        norm(f"{block}.ffn_norm.weight")
        body(f"{block}.attn_q.weight", shape.hidden, shape.hidden)
        body(f"{block}.attn_k.weight", narrow, shape.hidden)
        body(f"{block}.attn_v.weight", narrow, shape.hidden)
        body(f"{block}.attn_output.weight", shape.hidden, shape.hidden)
        body(f"{block}.ffn_gate.weight", shape.intermediate, shape.hidden)
        body(f"{block}.ffn_up.weight", shape.intermediate, shape.hidden)
        body(f"{block}.ffn_down.weight", shape.hidden, shape.intermediate)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(path)


def random_blocks(rows: int, columns: int, kind: Type, random: np.random.Generator) -> np.ndarray:
    """uint8 [rows, bytes]: random bits that are valid, scales that keep activations as they are."""
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    shape = (rows, columns // weights, size)
    blocks = random.integers(0, 256, shape, dtype=np.uint8)
    # sizes of the integers that a scale multiplies: 1, 8, 127, 32 * 64
    integers = {Type.TQ2_0: 1, Type.Q4_0: 8, Type.Q8_0: 127, Type.Q6_K: 2048}[kind]
    scale = np.float16(1 / (integers * columns**0.5))
    if kind == Type.TQ2_0:
        # two bits at a time: 3 becomes 1, the rest are 0, 1 and 2
        signs = blocks[..., :64]
        signs ^= ((signs >> 1) & signs & 0x55) << 1
    blocks[..., SCALES[kind]] = np.frombuffer(scale.tobytes(), np.uint8)
    return blocks.reshape(rows, -1)


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Words without meaning: nothing is ever turned into text."""
    normal, unknown, control = 1, 2, 3
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(size - 3))])
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([unknown, control, control, *([normal] * (size - 3))])

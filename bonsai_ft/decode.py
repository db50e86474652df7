"""Can this model's tokens be computed by the compiled decoder, and how is it set up?

The decoder knows blocks of the Llama family (`ops/cpu_decode.py`). Whether a model is one is
decided here from its class and config, name by name; everything else is left to transformers. The
prompt always goes through the model itself. Its last token then goes through the decoder too, and
the two must agree: a model that was changed in a way not foreseen here is noticed before a word is
said.
"""

import logging
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from bonsai_ft.adapter import effective_linear, effective_module, packed_layer
from bonsai_ft.ops import choose_kernel
from bonsai_ft.ops.cpu_decode import (
    ACTIVATIONS,
    CpuDecoder,
    DecoderBlock,
    DecoderShape,
    PackedLinear,
)

FAMILY = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# Kinds of rotary embedding whose angles do not depend on the length of the sequence.
FIXED_ROTARY = ("default", "linear", "llama3", "yarn")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Relative distance of the logits that transformers' 16-bit roundings may cause (here everything is
# float32): on text they are about 0.01 in bfloat16, on senseless tokens up to 0.3.
AGREEMENT = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}

# Room for this many tokens of an answer at first; it doubles when they are used up.
FIRST_TOKENS = 512

_log = logging.getLogger(__name__)


class Decoding:
    """Sequences under way: `logits` of the last token, and `step` for the next."""

    def __init__(
        self, decoder: CpuDecoder, rotary_emb: nn.Module, logits: Tensor, lengths: Tensor
    ) -> None:
        self._decoder = decoder
        self._rotary_emb = rotary_emb
        self.logits = logits
        self._positions = lengths

    def step(self, tokens: Tensor) -> Tensor:
        """One more token of each sequence, int64 [B] -> logits float32 [B, vocabulary]."""
        if int(self._positions.max()) >= self._decoder.positions:
            self._decoder.extend(*_angles(self._rotary_emb, 2 * self._decoder.positions))
        self.logits = self._decoder.step(tokens, self._positions)
        self._positions = self._positions + 1
        return self.logits


@torch.inference_mode()
def start_decoding(
    model: PreTrainedModel, ids: Tensor, mask: Tensor, max_new_tokens: int
) -> Decoding | None:
    """The prompt ids [B, T] (padded on the left, mask 0 there) taken in; None if not possible.

    The model is in evaluation mode and its adapters are chosen.
    """
    reason = _reason_against(model) or _reason_against_prompt(ids, mask)
    if reason is not None:
        _log.info("tokens are computed by transformers: %s", reason)
        return None
    lengths = mask.sum(1)
    # an answer may be allowed to be far longer than it becomes
    positions = int(lengths.max()) + min(max_new_tokens, FIRST_TOKENS)
    decoder = _build(model, len(ids), positions)
    output: Any = model.get_decoder()(
        input_ids=ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        use_cache=True,
    )
    # contiguous: for a slice of [B, T, hidden] torch copies the whole head before it multiplies
    last = output.last_hidden_state[:, -1].contiguous()
    logits = model.get_output_embeddings()(last).float()
    # the name that newer versions of transformers warn about is the only one in older ones
    cache = getattr(output, "cache", None) or output.past_key_values
    for index, layer in enumerate(cache.layers):
        for row, length in enumerate(lengths.tolist()):
            decoder.cache[index, 0, row, :, :length] = layer.keys[row, :, -length:]
            decoder.cache[index, 1, row, :, :length] = layer.values[row, :, -length:]
    ours = decoder.step(ids[:, -1].contiguous(), lengths - 1)
    distance = (ours - logits).square().mean().sqrt() / logits.square().mean().sqrt()
    if not distance <= AGREEMENT[model.dtype]:
        _log.warning(
            "tokens are computed by transformers, slower: on this prompt the compiled decoder and "
            "the model differ by %.3g of the logits",
            float(distance),
        )
        return None
    return Decoding(decoder, cast(Any, model.get_decoder()).rotary_emb, logits, lengths)


def _reason_against(model: PreTrainedModel) -> str | None:
    """Why the decoder cannot stand in for this model; None if it can."""
    config = model.config
    name = type(model).__name__
    if name not in FAMILY or not type(model).__module__.startswith("transformers.models."):
        return f"{name} is not of the Llama family"
    if model.device.type != "cpu" or model.dtype not in DTYPES:
        return f"the model is on {model.device} in {model.dtype}"
    if any(_has_hooks(module) for module in model.modules()):
        return "a module has hooks"
    if config.hidden_act not in ACTIVATIONS:
        return f"the activation {config.hidden_act} is not known"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        return "its attention is not full"
    if name == "MistralForCausalLM" and config.sliding_window is not None:
        return "its attention has a window"
    decoder: Any = model.get_decoder()
    if decoder.rotary_emb.rope_type not in FIXED_ROTARY:
        return f"the rotary embedding {decoder.rotary_emb.rope_type} is not fixed"
    if 2 * decoder.rotary_emb.inv_freq.numel() != decoder.layers[0].self_attn.head_dim:
        return "the rotary embedding turns a part of each head"
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        inner = effective_module(module)
        if not isinstance(inner, nn.Linear | nn.Embedding) or inner.weight.dtype != model.dtype:
            return "embedding or head are not plain matrices of the model's dtype"
    for block in decoder.layers:
        for linear in _linears(block).values():
            layer = packed_layer(linear)
            if layer is None:
                return "a layer is not packed, or has adapters of another kind"
            if choose_kernel(layer.kernel, "cpu") != "cpu":
                return "the compiled kernels are not in use"
    return None


def _reason_against_prompt(ids: Tensor, mask: Tensor) -> str | None:
    if ids.dtype != torch.int64 or not ids.numel() or not bool(mask.any(1).all()):
        return "a prompt is empty, or not of 64-bit numbers"
    return None


def _angles(rotary_emb: nn.Module, positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [positions, head_dim]."""
    cosines, sines = rotary_emb(
        torch.empty(0, dtype=torch.float32, device="cpu"),
        torch.arange(positions, device="cpu")[None],
    )
    return cosines[0].float(), sines[0].float()


def _has_hooks(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    return any(hooks) or hasattr(module, "_hf_hook") or "forward" in module.__dict__


def _linears(block: Any) -> dict[str, nn.Module]:
    attention, mlp = block.self_attn, block.mlp
    return {
        "query": attention.q_proj,
        "key": attention.k_proj,
        "value": attention.v_proj,
        "output": attention.o_proj,
        "gate": mlp.gate_proj,
        "up": mlp.up_proj,
        "down": mlp.down_proj,
    }


def _build(model: PreTrainedModel, sequences: int, positions: int) -> CpuDecoder:
    decoder: Any = model.get_decoder()
    attention = decoder.layers[0].self_attn
    embedding: Any = effective_module(model.get_input_embeddings())
    head: Any = effective_module(model.get_output_embeddings())
    cosines, sines = _angles(decoder.rotary_emb, positions)
    key: Any = packed_layer(attention.k_proj)
    query: Any = packed_layer(attention.q_proj)
    shape = DecoderShape(
        heads=query.out_features // attention.head_dim,
        kv_heads=key.out_features // attention.head_dim,
        head_dim=attention.head_dim,
        positions=positions,
        sequences=sequences,
        eps=decoder.norm.variance_epsilon,
        attention_scale=attention.scaling,
        activation=model.config.hidden_act,
    )
    return CpuDecoder(
        [_block(block) for block in decoder.layers],
        shape=shape,
        embedding=embedding.weight,
        head=head.weight,
        head_bias=None if head.bias is None else head.bias.float(),
        final_norm=decoder.norm.weight.float(),
        cosines=cosines,
        sines=sines,
    )


def _block(block: Any) -> DecoderBlock:
    linears = {name: _packed(linear) for name, linear in _linears(block).items()}
    norms = [getattr(block.self_attn, name, None) for name in ("q_norm", "k_norm")]
    query_norm, key_norm = (None if norm is None else norm.weight.float() for norm in norms)
    return DecoderBlock(
        **linears,
        input_norm=block.input_layernorm.weight.float(),
        post_norm=block.post_attention_layernorm.weight.float(),
        query_norm=query_norm,
        key_norm=key_norm,
    )


def _packed(module: Any) -> PackedLinear:
    effective = effective_linear(module)
    layer = effective.layer
    return PackedLinear(
        ternary=layer.ternary,
        scale=layer.scale,
        codes=layer.codes,
        codewords=effective.codewords,
        in_features=layer.in_features,
        packing=layer.packing,
        bias=None if layer.bias is None else layer.bias.float(),
        lora_a=effective.lora_a,
        lora_b=effective.lora_b,
    )

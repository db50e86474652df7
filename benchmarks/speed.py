"""Kernels against named peers on this machine: operator, training step, decoding and memory.

    python benchmarks/speed.py operator            # one 4096 x 11008 layer, bfloat16
    python benchmarks/speed.py step                # a random 1B shape, 4 x 256 tokens
    python benchmarks/speed.py memory              # peak memory of a step, fresh processes
    python benchmarks/speed.py decode              # tokens per second of the 1B shape
    ... --json benchmarks/results/NAME.json

Peers: torch bfloat16 `nn.Linear` with LoRA and without weight gradient, PEFT LoRA on bfloat16,
bitsandbytes NF4 with PEFT (QLoRA), transformers in bfloat16, and llama.cpp TQ2_0 where
llama-cpp-python is installed. Both sides of a ratio run in one process and take turns; medians are
compared. Beside the figures stand the limits measured in the same run: bandwidth of a copy (bytes
copied, and twice that for bytes read and written) and the rate of a bfloat16 product.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

RANK = 8
# hidden, intermediate, blocks, heads, key/value heads, vocabulary
SHAPES = {
    "1b": (2048, 8192, 16, 32, 8, 32_000),
    "tiny": (256, 512, 2, 4, 2, 512),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=[*MEASUREMENTS, "peak"])
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--layer", default="4096x11008", help="in x out of the operator's layer")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--side", help="of `peak`: what `memory` runs in a process of its own")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    report = {**machine(args.threads), **{**MEASUREMENTS, "peak": peak}[args.what](args)}
    print(json.dumps(report, indent=2))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def machine(threads: int) -> dict[str, Any]:
    from bonsai_ft.ops import cpu_kernels

    model = "unknown"
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((li.split(":")[1].strip() for li in lines if li.startswith("model name")), "")
    return {
        "processor": model,
        "threads": threads,
        "kernel": cpu_kernels.describe(),
        "torch": torch.__version__,
        "load_average": round(os.getloadavg()[0], 2),
    }


def alternating(sides: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median milliseconds per side; the first turn warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats + 1):
        for name, run in sides.items():
            started = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - started)
    return {name: round(statistics.median(v) * 1e3, 4) for name, v in seconds.items()}


def limits() -> dict[str, float]:
    source = torch.randn(50_000_000)
    target = torch.empty_like(source)
    a, b = torch.randn(2048, 4096).bfloat16(), torch.randn(4096, 4096).bfloat16()
    times = alternating({"copy": lambda: target.copy_(source), "product": lambda: a @ b}, 7)
    return {
        "copy_gb_per_second": round(source.nbytes / times["copy"] / 1e6, 1),
        "product_gflop_per_second": round(2 * 2048 * 4096 * 4096 / times["product"] / 1e6),
    }


# ---------------------------------------------------------------- random bases


def random_weight(out_features: int, in_features: int, generator: torch.Generator) -> Any:
    """A packed layer of random signs, without a float one behind it."""
    from bonsai_ft.format import Residual, TernaryWeight, num_groups

    groups = num_groups(in_features)
    packed = torch.randint(
        0, 256, (out_features, in_features // 4), generator=generator, dtype=torch.uint8
    )
    # the invalid code 3 becomes 1
    packed ^= ((packed >> 1) & packed & 0x55) << 1
    codes = torch.randint(
        0, 256, (out_features, -(-groups // 4)), generator=generator, dtype=torch.uint8
    )
    if groups % 4:
        codes[:, -1] &= (1 << (2 * (groups % 4))) - 1
    return TernaryWeight(
        out_features=out_features,
        in_features=in_features,
        packing="2bit",
        ternary=packed,
        scale=(0.02 + 0.01 * torch.rand(out_features, groups, generator=generator)).half(),
        residual=Residual(
            codes=codes,
            codebook=torch.randn(groups, 4, 128, generator=generator).half(),
            mu=torch.zeros(groups).half(),
            sigma=torch.full((groups,), 0.002).half(),
        ),
    )


def llama_config(shape: str) -> LlamaConfig:
    hidden, intermediate, blocks, heads, kv_heads, vocabulary = SHAPES[shape]
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )


def random_base(shape: str) -> Path:
    """A random `.bonsai` model of that shape; written once."""
    from bonsai_ft.format import write_bonsai
    from bonsai_ft.quantize.architecture import build_empty

    path = Path(tempfile.gettempdir()) / f"bonsai_ft_random_{shape}.bonsai"
    if path.exists():
        return path
    config = llama_config(shape)
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    layers = []
    model = build_empty(config, torch.bfloat16)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            weight = random_weight(module.out_features, module.in_features, generator)
            tensors |= {f"{name}.{suffix}": t for suffix, t in weight.tensors().items()}
            sizes = {"out_features": module.out_features, "in_features": module.in_features}
            layers.append({"name": name, **sizes, "packing": "2bit"})
    packed = tuple(layer["name"] + "." for layer in layers)
    for name, parameter in model.named_parameters():
        if not name.startswith(packed):
            values = torch.randn(parameter.shape, generator=generator) * 0.02
            tensors[name] = (values if parameter.dim() == 2 else values + 1).bfloat16()
    settings = {"model": config.to_dict(), "dtype": "bfloat16", "layers": layers}
    write_bonsai(path, kind="model", config=settings, tensors=tensors)
    return path


def random_float(shape: str) -> LlamaForCausalLM:
    config = llama_config(shape)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02) if parameter.dim() == 2 else parameter.fill_(1.0)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.requires_grad_(False)


# ---------------------------------------------------------------- operator


def operator(args: argparse.Namespace) -> dict[str, Any]:
    from bonsai_ft.adapter import TernaryLoraConfig
    from bonsai_ft.adapter.lora import TernaryLora
    from bonsai_ft.model import TernaryLinear

    in_features, out_features = map(int, args.layer.split("x"))
    weight = random_weight(out_features, in_features, torch.Generator().manual_seed(0))
    config = TernaryLoraConfig(r=RANK, lora_alpha=16)
    ours = TernaryLora(TernaryLinear(weight), "default", config, r=RANK, lora_alpha=16)
    plain = TernaryLinear(weight)
    plain.residual_codebook.requires_grad_(False)
    dense = torch.randn(out_features, in_features).bfloat16()
    a = torch.randn(RANK, in_features, requires_grad=True)
    b = torch.randn(out_features, RANK, requires_grad=True)

    def peer(x):
        return F.linear(x, dense) + 2.0 * (x @ a.to(x.dtype).T @ b.to(x.dtype).T)

    rows = []
    for tokens in (1, 8, 64, 512, 2048):
        x = torch.randn(tokens, in_features).bfloat16()
        dy = torch.randn(tokens, out_features).bfloat16()
        wanted = x.clone().requires_grad_()

        def step(function, x=wanted, dy=dy):
            function(x).backward(dy)

        def frozen_step(x=wanted, dy=dy):
            codebook = ours.lora_residual_codebook["default"]
            codebook.requires_grad_(False)
            ours(x).backward(dy)
            codebook.requires_grad_(True)

        repeats = args.repeats * (8 if tokens < 64 else 1)
        with torch.no_grad():
            forward = alternating(
                {"ours": lambda x=x: plain(x), "linear": lambda x=x: F.linear(x, dense)}, repeats
            )
        both = alternating(
            {
                "ours": lambda: step(ours),
                "frozen": frozen_step,
                "linear": lambda: step(peer),
            },
            args.repeats,
        )
        rows.append(
            {
                "tokens": tokens,
                "forward_ms": forward["ours"],
                "linear_forward_ms": forward["linear"],
                "forward_ratio": round(forward["ours"] / forward["linear"], 3),
                "forward_gb_per_second": round(weight.nbytes / forward["ours"] / 1e6, 1),
                "step_ms": both["ours"],
                "linear_step_ms": both["linear"],
                "step_ratio": round(both["ours"] / both["linear"], 3),
                "codebook_share": round(1 - both["frozen"] / both["ours"], 3),
            }
        )
    small = TernaryLinear(random_weight(128, 128, torch.Generator().manual_seed(1)))
    one, words = torch.randn(1, 128).bfloat16(), small.codewords().detach()
    dense_small = torch.randn(128, 128).bfloat16()
    with torch.no_grad():
        overhead = alternating(
            {
                "operator": lambda: torch.ops.bonsai.ternary_linear(
                    one, small.ternary, small.scale, small.codes, words, 128, "2bit", "auto"
                ),
                "layer": lambda: small(one),
                "linear": lambda: F.linear(one, dense_small),
            },
            200,
        )
    micro = {name: round(value * 1e3, 1) for name, value in overhead.items()}
    return {"layer": args.layer, "limits": limits(), "rows": rows, "call_microseconds": micro}


# ---------------------------------------------------------------- training step


def sides(shape: str, names: list[str]) -> dict[str, tuple[Any, Callable[..., Any]]]:
    """Models under PEFT LoRA, all with checkpointing; and the loss of each."""
    import peft

    from bonsai_ft import load_model
    from bonsai_ft.adapter import TernaryLoraConfig, attach, linear_names
    from bonsai_ft.train.loss import sum_loss

    made: dict[str, tuple[Any, Callable[..., Any]]] = {}
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = {"r": RANK, "lora_alpha": 16, "lora_dropout": 0.05}
    for name in names:
        if name == "bonsai_ft":
            model = load_model(random_base(shape), dtype=torch.bfloat16, verify=False)
            attach(model, TernaryLoraConfig(target_modules=linear_names(model), **lora))
            inner = model

            def loss(batch, model=model):
                return sum_loss(model, batch) / batch.num_targets
        else:
            inner = random_float(shape)
            if name == "nf4":
                to_nf4(inner)
            model = peft.get_peft_model(inner, peft.LoraConfig(target_modules=targets, **lora))

            def loss(batch, model=model):
                return model(input_ids=batch.input_ids, labels=batch.input_ids).loss

        model.train()
        enable = getattr(inner, "activation_checkpointing_enable", None)
        (enable or inner.gradient_checkpointing_enable)({"use_reentrant": False})
        if name != "bonsai_ft":
            inner.enable_input_require_grads()
        made[name] = (model, loss)
    return made


def to_nf4(model: Any) -> None:
    """Every linear layer but the head as bitsandbytes' 4-bit NF4."""
    import bitsandbytes as bnb

    for name, module in list(model.named_modules()):
        if type(module) is torch.nn.Linear and name != "lm_head":
            packed = bnb.nn.Linear4bit(
                module.in_features,
                module.out_features,
                bias=False,
                compute_dtype=torch.bfloat16,
                quant_type="nf4",
            )
            packed.weight = bnb.nn.Params4bit(
                module.weight.data, requires_grad=False, quant_type="nf4"
            )
            model.set_submodule(name, packed.to("cpu"))
    gc.collect()


def batch_of(args: argparse.Namespace) -> Any:
    from bonsai_ft.data.batches import Batch

    ids = torch.randint(0, SHAPES[args.shape][-1], (args.rows, args.length))
    return Batch(ids, torch.ones_like(ids), torch.ones_like(ids, dtype=torch.bool), [])


def stepper(model: Any, loss: Callable[..., Any], batch: Any) -> Callable[[], None]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)

    def run() -> None:
        loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def step(args: argparse.Namespace) -> dict[str, Any]:
    batch = batch_of(args)
    made = sides(args.shape, ["bonsai_ft", "bf16", "nf4"])
    times = alternating(
        {name: stepper(model, loss, batch) for name, (model, loss) in made.items()}, args.repeats
    )
    return {
        "shape": args.shape,
        "tokens": args.rows * args.length,
        "seconds": {name: round(value / 1e3, 3) for name, value in times.items()},
        "ratio_to_bf16": round(times["bonsai_ft"] / times["bf16"], 3),
        "ratio_to_nf4": round(times["bonsai_ft"] / times["nf4"], 3),
        "limits": limits(),
    }


def peak(args: argparse.Namespace) -> dict[str, Any]:
    """Two steps of one side; peak resident bytes from after the float model was made ready."""
    [(model, loss)] = sides(args.shape, [args.side]).values()
    gc.collect()
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        # what making the model took is not what training takes
        clear.write_text("5")
    run = stepper(model, loss, batch_of(args))
    run()
    run()
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    return {"side": args.side, "peak_bytes": kib * 1024}


def memory(args: argparse.Namespace) -> dict[str, Any]:
    peaks = {}
    for side in ("bonsai_ft", "bf16", "nf4"):
        command = [sys.executable, __file__, "peak", "--side", side, "--shape", args.shape]
        command += ["--threads", str(args.threads), "--rows", str(args.rows)]
        command += ["--length", str(args.length)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks[side] = json.loads(done.stdout[done.stdout.index("{") :])["peak_bytes"]
    return {
        "shape": args.shape,
        "tokens": args.rows * args.length,
        "peak_bytes": peaks,
        "ratio_to_bf16": round(peaks["bonsai_ft"] / peaks["bf16"], 3),
        "ratio_to_nf4": round(peaks["bonsai_ft"] / peaks["nf4"], 3),
    }


# ---------------------------------------------------------------- decoding


def decode(args: argparse.Namespace) -> dict[str, Any]:
    from bonsai_ft import load_model
    from bonsai_ft.decode import start_decoding

    ours = load_model(random_base(args.shape), dtype=torch.bfloat16, verify=False).eval()
    vocabulary = SHAPES[args.shape][-1]
    prompt = torch.randint(0, vocabulary, (1, 16))
    long = torch.randint(0, vocabulary, (1, 256))
    new = 64
    result: dict[str, dict[str, float]] = {}

    def note(name: str, decode_seconds: float, prefill_seconds: float) -> None:
        result[name] = {
            "tokens_per_second": round(new / decode_seconds, 1),
            "prefill_tokens_per_second": round(256 / prefill_seconds, 1),
        }

    def ours_run() -> float:
        decoding = start_decoding(ours, prompt, torch.ones_like(prompt), new + 1)
        assert decoding is not None, "the compiled decoder stepped aside"
        started = time.perf_counter()
        for _ in range(new):
            decoding.step(decoding.logits.argmax(-1))
        return time.perf_counter() - started

    def ours_prefill() -> float:
        started = time.perf_counter()
        start_decoding(ours, long, torch.ones_like(long), 1)
        return time.perf_counter() - started

    with torch.inference_mode():
        note("bonsai_ft", median(ours_run, args.repeats), median(ours_prefill, args.repeats))
    dense = random_float(args.shape).eval()

    def theirs_run() -> float:
        with torch.inference_mode():
            cache = dense(input_ids=prompt, use_cache=True)
            past, token = cache.past_key_values, cache.logits[:, -1:].argmax(-1)
            started = time.perf_counter()
            for _ in range(new):
                out = dense(input_ids=token, past_key_values=past, use_cache=True)
                token = out.logits[:, -1:].argmax(-1)
            return time.perf_counter() - started

    def theirs_prefill() -> float:
        with torch.inference_mode():
            started = time.perf_counter()
            dense(input_ids=long, use_cache=True)
            return time.perf_counter() - started

    note("transformers bf16", median(theirs_run, 2), median(theirs_prefill, 2))
    try:
        import llama_cpp  # noqa: F401
    except ImportError:
        pass
    else:
        note("llama.cpp TQ2_0", *llama_cpp_seconds(args, new))
    head = {name: value["tokens_per_second"] for name, value in result.items()}
    ratios = {
        f"ratio_to_{name}": round(head["bonsai_ft"] / value, 2)
        for name, value in head.items()
        if name != "bonsai_ft"
    }
    return {"shape": args.shape, "sides": result, **ratios, "limits": limits()}


def median(run: Callable[[], float], repeats: int) -> float:
    run()
    return statistics.median(run() for _ in range(repeats))


def llama_cpp_seconds(args: argparse.Namespace, new: int) -> tuple[float, float]:
    """Seconds of `new` tokens and of a prompt of 256, of random TQ2_0 weights of the shape."""
    from llama_cpp import Llama

    path = random_tq2_0(args.shape)
    model = Llama(
        str(path), n_ctx=512, n_threads=args.threads, n_threads_batch=args.threads, verbose=False
    )
    prompt = torch.randint(3, 500, (16,)).tolist()
    long = torch.randint(3, 500, (256,)).tolist()

    def run() -> float:
        model.reset()
        model.eval(prompt)
        started = time.perf_counter()
        for token in range(new):
            model.eval([3 + token])
        return time.perf_counter() - started

    def prefill() -> float:
        model.reset()
        started = time.perf_counter()
        model.eval(long)
        return time.perf_counter() - started

    return median(run, args.repeats), median(prefill, args.repeats)


def random_tq2_0(shape: str) -> Path:
    """A random GGUF of that shape: TQ2_0 body, F16 embedding, TQ2_0-free head."""
    import gguf
    import numpy as np

    path = Path(tempfile.gettempdir()) / f"bonsai_ft_random_{shape}.gguf"
    if path.exists():
        return path
    hidden, intermediate, blocks, heads, kv_heads, vocabulary = SHAPES[shape]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(hidden)
    writer.add_block_count(blocks)
    writer.add_feed_forward_length(intermediate)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("llama")
    specials = ["<unk>", "<s>", "</s>"]
    writer.add_token_list(specials + [f"w{i}" for i in range(vocabulary - 3)])
    writer.add_token_scores([0.0] * vocabulary)
    writer.add_token_types([2, 3, 3] + [1] * (vocabulary - 3))
    random = np.random.default_rng(0)
    tq2 = gguf.GGMLQuantizationType.TQ2_0

    def body(name: str, rows: int, columns: int) -> None:
        # 64 bytes of codes and a half-precision scale for 256 weights
        packed = random.integers(0, 256, (rows, columns // 256, 66), dtype=np.uint8)
        packed[..., :64] ^= ((packed[..., :64] >> 1) & packed[..., :64] & 0x55) << 1
        packed[..., 64:] = np.frombuffer(np.float16(0.02).tobytes(), np.uint8)
        writer.add_tensor(name, packed.reshape(rows, -1), raw_dtype=tq2)

    def plain(name: str, *dims: int) -> None:
        values = random.standard_normal(dims, dtype=np.float32) * 0.02
        writer.add_tensor(name, values.astype(np.float16) if len(dims) == 2 else values + 1)

    plain("token_embd.weight", vocabulary, hidden)
    plain("output.weight", vocabulary, hidden)
    plain("output_norm.weight", hidden)
    narrow = hidden // heads * kv_heads
    for i in range(blocks):
        plain(f"blk.{i}.attn_norm.weight", hidden)
        plain(f"blk.{i}.ffn_norm.weight", hidden)
        body(f"blk.{i}.attn_q.weight", hidden, hidden)
        body(f"blk.{i}.attn_k.weight", narrow, hidden)
        body(f"blk.{i}.attn_v.weight", narrow, hidden)
        body(f"blk.{i}.attn_output.weight", hidden, hidden)
        body(f"blk.{i}.ffn_gate.weight", intermediate, hidden)
        body(f"blk.{i}.ffn_up.weight", intermediate, hidden)
        body(f"blk.{i}.ffn_down.weight", hidden, intermediate)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


MEASUREMENTS = {"operator": operator, "step": step, "memory": memory, "decode": decode}


if __name__ == "__main__":
    main()

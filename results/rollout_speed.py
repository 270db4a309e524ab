"""Tokens per second of the rollout engine, beside Hugging Face's generate and what the memory allows.

    python results/rollout_speed.py [--shapes 8b 1.7b 26m] [--batch 64 --prompt 1024 --new 256]     on a GPU
    python results/rollout_speed.py --device cpu                                                    checkpoints/tiny

Random weights of the true shapes, nothing is downloaded. Prints one JSON object for each shape.
"""

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the modules that are measured

import torch
import transformers
import triton
from transformers import AutoModelForCausalLM, Qwen3Config

from backbone import Backbone, Sampling
from policy import policy_messages
from tasks import builtin_tasks

BANDWIDTH = 4.2e12  # bytes a second that an H200 reads: measured for this project before its first line
SHAPES = {  # layers, width, query heads, key/value heads, head dimension, feed-forward, vocabulary, tied embeddings
    "14b": (40, 5120, 40, 8, 128, 17408, 151936, False),
    "8b": (36, 4096, 32, 8, 128, 12288, 151936, False),
    "4b": (36, 2560, 32, 8, 128, 9728, 151936, True),
    "1.7b": (28, 2048, 16, 8, 128, 6144, 151936, True),
    "0.6b": (28, 1024, 16, 8, 128, 3072, 151936, True),
    "26m": (8, 512, 8, 4, 64, 1536, 1900, True),
    "tiny": (6, 256, 4, 2, 64, 896, 2048, True),  # checkpoints/tiny
}


def qwen3_shape(name) -> dict:
    """One of SHAPES as arguments of Qwen3Config."""
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
             "intermediate_size", "vocab_size", "tie_word_embeddings")
    return dict(zip(names, SHAPES[name]))


def random_model(shape, device="cuda", dtype=torch.bfloat16, attention="causal"):
    """A Qwen3 of one of SHAPES with random weights, made on the device."""
    config = Qwen3Config(**qwen3_shape(shape), max_position_embeddings=40960, eos_token_id=None, pad_token_id=0,
                         bos_token_id=None)  # no token ends a reply: every one has its full length
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).eval()


def seconds(function) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def bytes_of_a_step(model, batch, context) -> float:
    """What a step must read: the cache and every weight (of an embedding that is not the head only a few rows)."""
    config = model.config
    weights = sum(p.nbytes for p in model.parameters())
    if not config.tie_word_embeddings:
        weights -= model.get_input_embeddings().weight.nbytes
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    return weights + batch * context * cache


def hugging_face(model, prompts, new) -> float:
    ids = torch.tensor(prompts, device=model.device)
    limits = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": True, "top_k": 0, "eos_token_id": None}
    return seconds(lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **limits))


def agreement(model, prompts, new) -> dict:
    """How far the sampler's log-probabilities are from the trainer's: each reply's geometric mean ratio, less 1."""
    replies = model.sample(prompts, Sampling(new), torch.Generator(model.device).manual_seed(2))
    ratios = []
    with torch.no_grad():
        for start in range(0, len(replies), 8):
            part = replies[start:start + 8]
            for reply, new_logprobs in zip(part, model.logprobs([(r.prompt_ids, r.token_ids) for r in part])):
                ratios.append((new_logprobs.cpu() - torch.tensor(reply.logprobs)).mean().exp().item())
    off = sorted(abs(ratio - 1) for ratio in ratios)
    return {"replies": len(off), "tokens": sum(len(reply.token_ids) for reply in replies),
            "within_0.001": sum(x <= 1e-3 for x in off) / len(off), "median": off[len(off) // 2], "largest": off[-1]}


def trained_weights() -> dict:
    """The same of checkpoints/tiny on real prompts, in the dtype it is used in and in bfloat16."""
    record = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = Backbone.load("checkpoints/tiny", "cuda", dtype)
        prompts = [model.chat_ids(policy_messages(task, ())) for task in builtin_tasks() for _ in range(8)]
        record[str(dtype)] = agreement(model, prompts, 600)
    return {"shape": "checkpoints/tiny", "sampler_against_trainer": record}


def measure(shape, args) -> dict:
    model, batch = random_model(shape, attention="sdpa"), args.batch * (4 if shape in ("26m", "tiny") else 1)
    chance = torch.Generator().manual_seed(1)
    prompts = torch.randint(10, model.config.vocab_size, (batch, args.prompt), generator=chance).tolist()
    shared = [prompt for prompt in prompts[:batch // 4] for _ in range(4)]
    record = {"shape": shape, "batch": batch, "prompt": args.prompt, "new": args.new}
    if not args.no_generate:
        hugging_face(model, prompts[:2], 2)
        record["generate_tokens_per_s"] = batch * args.new / hugging_face(model, prompts, args.new)
    torch.cuda.reset_peak_memory_stats()  # the engine's, not generate's
    model.set_attn_implementation("causal")
    model = Backbone(model, SimpleNamespace(eos_token_id=None, decode=lambda *args, **kwargs: ""))
    generator = torch.Generator("cuda").manual_seed(0)

    def call(prompts, new):
        return seconds(lambda: model.sample(prompts, Sampling(new), generator))

    record["first_call_s"] = call(prompts, args.new)
    for name, chosen in (("", prompts), ("shared_", shared)):
        prefill = min(call(chosen, 1) for _ in range(2))
        total = min(call(chosen, args.new) for _ in range(2))
        record |= {name + "prefill_s": prefill, name + "total_s": total,
                   name + "tokens_per_s": batch * args.new / total,
                   name + "decode_tokens_per_s": batch * (args.new - 1) / (total - prefill)}
    roof = batch * BANDWIDTH / bytes_of_a_step(model.model, batch, args.prompt + args.new / 2)
    record |= {"roofline_tokens_per_s": roof, "decode_share_of_roofline": record["decode_tokens_per_s"] / roof,
               "step_ms": 1000 * batch / record["decode_tokens_per_s"]}
    record["sampler_against_trainer"] = {n: agreement(model, prompts[:64], n) for n in {args.new, args.long}}
    record["peak_GB"] = torch.cuda.max_memory_allocated() / 1e9
    return record


def on_cpu(args) -> dict:
    """checkpoints/tiny on real prompts, four rollouts of each: the engine against generate on the same batch."""
    model = Backbone.load("checkpoints/tiny")
    tasks = builtin_tasks()[:args.batch // 4]
    prompts = [model.chat_ids(policy_messages(task, ())) for task in tasks for _ in range(4)]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    plain = AutoModelForCausalLM.from_pretrained("checkpoints/tiny", dtype=model.model.dtype).eval()
    limits = {"max_new_tokens": args.new, "do_sample": True, "top_k": 0, "pad_token_id": 0}
    torch.manual_seed(0)

    def generate():
        out = plain.generate(ids, attention_mask=mask, **limits)[:, width:].tolist()
        ends = [row.index(i) + 1 for row in out for i in model.stop_ids[:1] if i in row]
        counts["generate"] = sum(ends) + (len(out) - len(ends)) * args.new

    def engine():
        replies = model.sample(prompts, Sampling(args.new), torch.Generator().manual_seed(0))
        counts["engine"] = sum(len(reply.token_ids) for reply in replies)

    counts, record = {}, {"shape": "checkpoints/tiny", "batch": len(prompts), "new": args.new}
    for name, function in (("engine", engine), ("generate", generate)):
        taken = min(seconds(function) for _ in range(3))
        record |= {f"{name}_s": taken, f"{name}_tokens_per_s": counts[name] / taken}
    return record


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", nargs="*", choices=[*SHAPES, "checkpoints/tiny"],
                        default=["8b", "1.7b", "26m", "checkpoints/tiny"])
    parser.add_argument("--batch", type=int, default=64, help="B: sequences; four times as many of the small shapes")
    parser.add_argument("--prompt", type=int, default=1024, help="P: tokens of each prompt")
    parser.add_argument("--new", type=int, default=256, help="N: tokens of each reply")
    parser.add_argument("--long", type=int, default=2048, help="tokens of long replies, for the log-probabilities only")
    parser.add_argument("--no-generate", action="store_true", help="the engine only")
    args = parser.parse_args()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "triton": triton.__version__}
    if args.device == "cpu":
        print(json.dumps(on_cpu(args) | versions, indent=1))
        return
    for shape in args.shapes:
        record = measure(shape, args) if shape in SHAPES else trained_weights()
        record |= versions | {"device": torch.cuda.get_device_name()}
        print(json.dumps(record, indent=1), flush=True)
        gc.collect()  # the model and its engine know each other
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

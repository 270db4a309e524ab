"""How fast is the update, and where do its seconds and its memory go? Random weights, no download; meant for one GPU.

    python results/update_speed.py --shape 8b --tokens 8192 16384 32768
    python results/update_speed.py --shape 1.7b --tokens 8192 16384 --recompute no yes
    python results/update_speed.py --shape 1.7b --tokens 16384 32768 --sequences 16
    python results/update_speed.py --shape 8b --tokens 8192 --offload --cap 80
    torchrun --nproc_per_node=2 results/update_speed.py --shape 8b --tokens 8192 --micro-batches 2
    python results/update_speed.py --shape 8b --sft --offload --cap 80 --tokens 32768 --sequences 1 --micro-batches 8
    python results/update_speed.py --shape 8b --sft --offload --cap 80 --tokens 32768 --sequences 8 --micro-batches 8
    torchrun --nproc_per_node=8 results/update_speed.py --shape 14b --tokens 32768 --cap 80
    python results/update_speed.py --shape tiny --tokens 2048 --steps 2                     does it run at all?

A setting is a number of tokens, split over --sequences (one tenth a prompt, the rest a reply), and whether the backward
pass computes the layers again (the default: from RECOMPUTED parameters on). Each runs reinforce.update on
--micro-batches of them for each rank: logprobs, clipped loss, backward, clipping, AdamW; or with --sft a step of the
cold start (fast/train_step.py) on the same sequences. With several ranks, `clip` holds the sum of their gradients and
`optimizer` the collection of the weights. One step warms up, --steps are measured, medians are told. A setting that
does not fit is recorded as out of memory.

Useful FLOPs of a step: 6 for each weight that multiplies a token (the head's: a reply's token; an embedding that is
only looked up: none), and 12 layers heads head_dim L^2 / 2 for causal attention in a sequence of L tokens. What is
recomputed does not count. Their rate is compared with that of an 8192^3 matrix product, measured here.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

import reinforce  # noqa: E402
from advantages import Row  # noqa: E402
import sft  # noqa: E402
from backbone import Backbone, Completion  # noqa: E402
from fast import ranks  # noqa: E402
from fast.optimizer import make_adamw  # noqa: E402
from fast.rescore import RECOMPUTED  # noqa: E402
from fast.train_step import TrainStep  # noqa: E402
from command.options import complete  # noqa: E402
from rollout_speed import SHAPES, random_model  # noqa: E402


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def matmul_rate(device, dtype) -> float:
    """FLOP/s of a square matrix product in `dtype`: the best of 20 of size 8192; on a CPU of size 1024."""
    size, best = (8192 if device == "cuda" else 1024), float("inf")
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    for _ in range(20):
        synchronize(device)
        began = time.perf_counter()
        a @ b
        synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def useful_flops(model, lengths, reply_tokens) -> float:
    """Of one update on sequences of these lengths, of whose tokens `reply_tokens` are scored."""
    config = model.model.config
    body = sum(p.numel() for p in model.model.base_model.parameters()) - config.vocab_size * config.hidden_size
    attention = sum(12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * length**2 / 2
                    for length in lengths)
    return 6 * body * sum(lengths) + 6 * config.vocab_size * config.hidden_size * reply_tokens + attention


def replies(model, tokens, count) -> list[list[Row]]:
    """`count` sequences with `tokens` in all, random; log-probabilities are the model's, advantages +1 and -1."""
    generator = torch.Generator().manual_seed(0)
    length, rows = tokens // count, []
    for n in range(count):
        ids = torch.randint(1, model.model.config.vocab_size, (length,), generator=generator).tolist()
        prompt, reply = ids[:max(1, length // 10)], ids[max(1, length // 10):]
        with torch.no_grad():
            [logprobs] = model.logprobs([(prompt, reply)])
        completion = Completion(prompt, reply, logprobs.tolist(), "", True)
        rows.append([Row("policy", completion, 1.0 if n % 2 == 0 else -1.0)])
    return rows


def sft_step(train, sequences, size):
    """A function that does a step of supervised training on these sequences, `size` in each part; as reinforce.update.
    """
    whole = [rows[0].completion.prompt_ids + rows[0].completion.token_ids for rows in sequences]
    data = [(np.array(ids), np.arange(len(ids)) >= len(rows[0].completion.prompt_ids))
            for ids, rows in zip(whole, sequences)]
    parts = [sft.collate(data[i:i + size], 0) for i in range(0, len(data), size)]

    def update(model, optimizer, sequences, args):
        model.model.train()
        return {"loss": float(train(parts, 2e-5)), "grad_norm": float("nan")}

    return update


class Stopwatch:
    """Wraps functions, and adds up the seconds that they take until the device is done."""

    def __init__(self, device):
        self.device, self.seconds = device, defaultdict(float)

    def wrap(self, name, function):
        def timed(*args, **kwargs):
            synchronize(self.device)
            began = time.perf_counter()
            result = function(*args, **kwargs)
            synchronize(self.device)
            self.seconds[name] += time.perf_counter() - began
            return result
        return timed


def measure(model, optimizer, tokens, recompute, rate, options, train=None) -> dict:
    """One setting. train: a TrainStep, with --sft. Raises torch.OutOfMemoryError."""
    device, steps = model.device.type, options.steps
    model.recompute = model.model.num_parameters() >= RECOMPUTED if recompute == "auto" else recompute == "yes"
    parts = options.micro_batches * ranks.count()
    sequences = replies(model, tokens * parts, options.sequences * parts)
    lengths = [len(rows[0].completion.prompt_ids) + len(rows[0].completion.token_ids) for rows in sequences]
    reply_tokens = sum(len(rows[0].completion.token_ids) for rows in sequences)
    args = complete(reinforce.Options, {"device": device, "update_tokens": tokens, "mrs": False}, size=2)
    watch, parts = Stopwatch(device), defaultdict(list)
    clip, step = ranks.clip_gradients, optimizer.step
    ranks.clip_gradients = watch.wrap("clip", clip)
    optimizer.step = watch.wrap("optimizer", step)
    update = sft_step(train, sequences, options.sequences) if train else reinforce.update
    update = watch.wrap("step", update)
    try:
        for n in range(steps + 1):
            watch.seconds.clear()
            if device == "cuda" and n == 1:
                torch.cuda.reset_peak_memory_stats()
            stats = update(model, optimizer, sequences, args)
            found = watch.seconds | {"forward_backward": 2 * watch.seconds["step"] - sum(watch.seconds.values())}
            print(f"  step {n}: {found['step']:.3f} s, loss {stats['loss']:.4f}, gradient {stats['grad_norm']:.3g}, "
                  f"recomputed: {model.recompute}", flush=True)
            for name, value in found.items() if n else ():  # step 0 warms up
                parts[name].append(value)
    finally:
        ranks.clip_gradients, optimizer.step = clip, step
    seconds = {name: statistics.median(values) for name, values in parts.items()}
    flops = useful_flops(model, lengths, reply_tokens)
    record = {"seconds": seconds, "tokens_per_second": sum(lengths) / seconds["step"],
              "tflop_per_second": flops / seconds["step"] / 1e12,
              "share_of_matmul": flops / seconds["step"] / rate / ranks.count(),
              "share_of_matmul_forward_backward": flops / seconds["forward_backward"] / rate / ranks.count(),
              "recomputed": model.recompute}
    if device == "cuda":
        record["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return record


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192], help="tokens of the micro-batch")
    parser.add_argument("--sequences", type=int, default=1, help="that share the tokens")
    parser.add_argument("--micro-batches", type=int, default=1, help="of so many tokens, for each rank")
    parser.add_argument("--sharded", action="store_true", help="the way of several ranks, also for one (torchrun)")
    parser.add_argument("--sft", action="store_true", help="a step of the cold start instead of RL's update")
    parser.add_argument("--offload", action="store_true", help="optimiser's state in the host's memory")
    parser.add_argument("--cap", type=float, help="GB that this process may take of the GPU")
    parser.add_argument("--recompute", nargs="+", choices=["auto", "no", "yes"], default=["auto"],
                        help="does the backward pass compute the layers again?")
    parser.add_argument("--steps", type=int, default=3, help="measured steps")
    parser.add_argument("--out", help="file for the records")
    args, device = parser.parse_args(), "cuda" if torch.cuda.is_available() else "cpu"
    if args.cap:
        torch.cuda.set_per_process_memory_fraction(args.cap * 1e9 / torch.cuda.get_device_properties(0).total_memory)
    dtype = torch.float32 if args.shape == "tiny" else torch.bfloat16
    torch.manual_seed(0)
    model = Backbone(random_model(args.shape, device, dtype), SimpleNamespace(eos_token_id=0))
    if args.sharded and ranks.count() == 1:
        ranks.join()
    sharded = ranks.ShardedOptimizer if args.sharded else ranks.sharded
    train = TrainStep(model.model, pretrained=True, host=args.offload) if args.sft else None
    optimizer = train.optimizers[0] if train else sharded(make_adamw, model.model.parameters(), lr=1e-6,
                                                          host=args.offload)
    rate = matmul_rate(device, dtype)
    common = {"shape": args.shape, "parameters": sum(p.numel() for p in model.model.parameters()),
              "dtype": str(dtype).removeprefix("torch."), "optimizer": type(optimizer).__name__,
              "ranks": ranks.count(), "sft": args.sft, "offload": args.offload, "cap_gb": args.cap,
              "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
              "torch": torch.__version__, "transformers": transformers.__version__,
              "matmul_tflop_per_second": rate / 1e12}
    print(json.dumps(common), flush=True)
    records = []
    for tokens in args.tokens:
        for recompute in args.recompute:
            setting = {"tokens": tokens, "sequences": args.sequences, "micro_batches": args.micro_batches,
                       "recompute": recompute}
            try:
                found = measure(model, optimizer, tokens, recompute, rate, args, train)
            except torch.OutOfMemoryError as error:
                found = {"error": "out of memory: " + str(error).split("\n")[0][:200]}
            # Only here: the error has held the tensors until now.
            optimizer.zero_grad(set_to_none=True)
            gc.collect()
            torch.cuda.empty_cache()
            records.append(common | setting | found)
            print(json.dumps(setting | found), flush=True)
            if args.out and ranks.rank() == 0:
                Path(args.out).write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    ranks.joined(main)()

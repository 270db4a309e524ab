"""Cold start: how does a base model learn the three reply formats from a diverse set of verified examples?

    python sft.py --out checkpoints/tiny                    the built-in cold start: a tiny backbone from random weights
    python sft.py --model Qwen/Qwen3-8B-Base --out DIR      the same examples, on a pretrained model
    python sft.py --model M --data FILE --out DIR           rows with `messages` and `tools` (JSON lines or parquet)

The examples of the built-in cold start are written by synthetic/examples.py; the paper's four steps here are encoding
(loss on assistant tokens only), batching by length, AdamW with a cosine schedule, and measuring what was learnt on
held-out problems (--evaluate).
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch: waiting threads spin for microseconds, then sleep

import argparse
import json
import math
import multiprocessing
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from backbone import Backbone, Chat, Completion, ModelError
from fast.optimizer import make_adamw
from sandbox import Sandbox
from skills import SkillLibrary
from synthetic.examples import SEED_LIBRARY, Example, Writer, diversity_filter, write_examples
from synthetic.tiny import evaluate, tiny_model, train_tokenizer, wrap_tokenizer

# ----------------------------------------------------------------------------------------------------------------------
# Tokens and batches.


def encode(chat, example) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (L,) and a mask (L,) that is True on what the model is to learn to write.

    Assembled with the functions that sampling uses, so that the cold start sees exactly the prompts of the rollouts.
    The sandbox's feedback sits in the context, but the model did not write it: it carries no loss.
    """
    stop = chat.tokenizer.eos_token_id
    messages, spans, ids, completion, turn = example.messages, [], [], None, 0
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        ids = chat.chat_ids(messages[:i], example.tool) if completion is None else \
            chat.next_ids(completion, messages[:i], example.tool)
        reply = chat.encode(message["content"]) + [stop]
        completion = Completion(ids, reply, [], message["content"], True)
        if turn >= example.unlearnt:
            spans.append((len(ids), len(ids) + len(reply)))
        ids, turn = ids + reply, turn + 1
    mask = np.zeros(len(ids), dtype=bool)
    for start, end in spans:
        mask[start:end] = True
    return np.array(ids, dtype=np.int32), mask


def save_cache(path, tokenizer, data):
    """Encoded examples in one file, two bytes a token where possible: writing examples takes longer than training."""
    ids = np.concatenate([ids for ids, _ in data])
    arrays = {"ids": ids.astype(np.uint16) if ids.max() < 65536 else ids,
              "lengths": np.array([len(ids) for ids, _ in data]),
              "mask": np.packbits(np.concatenate([mask for _, mask in data]))}
    with open(path, "wb") as file:
        np.savez(file, tokenizer=np.array([tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template]), **arrays)


def load_cache(path):
    """(tokenizer, data) as `save_cache` was given them."""
    arrays = np.load(path)
    ends = np.cumsum(arrays["lengths"])[:-1]
    ids = np.split(arrays["ids"], ends)
    masks = np.split(np.unpackbits(arrays["mask"], count=len(arrays["ids"])).astype(bool), ends)
    return wrap_tokenizer(*map(str, arrays["tokenizer"])), list(zip(ids, masks))


# ----------------------------------------------------------------------------------------------------------------------
# Training.

WIDTHS = [384, 512, 640, 768, 1024, 1280, 1536, 2048, 3072, 4096, 8192, 16384, 32768]  # padded lengths of a batch


def make_batches(lengths, tokens, rng) -> list[list[int]]:
    """Indices of examples, grouped by padded width so that a batch holds about `tokens` tokens; in random order."""
    groups = {}
    for i, length in enumerate(lengths):
        width = next((w for w in WIDTHS if length <= w), None)
        if width:  # an example longer than the longest width is dropped
            groups.setdefault(width, []).append(i)
    batches = []
    for width, members in groups.items():
        rng.shuffle(members)
        size = max(1, tokens // width)
        batches += [members[i:i + size] for i in range(0, len(members), size)]
    rng.shuffle(batches)
    return batches


class TrainStep:
    """Forward, backward and AdamW on a batch of one shape; on a GPU captured once per shape as a CUDA graph.

    A small model is bound by kernel launches. Replaying a graph removes them: about four times the throughput of eager
    training on a host with slow launches.
    """

    def __init__(self, model, learning_rate, graphs):
        self.model, self.graphs, self.captured, self.pool = model, graphs, {}, None
        self.device = model.device
        self.rate = torch.tensor(learning_rate, device=self.device)
        gpu = self.device.type == "cuda"
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        vectors = [p for p in model.parameters() if p.dim() < 2]
        self.optimizer = make_adamw(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            lr=self.rate,
            betas=(0.9, 0.95),
            fused=True,
            capturable=gpu,
        )

    def compute(self, ids, targets):
        """ids (B, L); targets (B, L), the next token where it is learnt and -100 elsewhere. Returns the mean loss."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda", cache_enabled=False):
            logits = self.model(input_ids=ids, use_cache=False).logits  # (B, L, V)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def __call__(self, ids, targets):
        if not self.graphs:
            return self.compute(ids.to(self.device), targets.to(self.device))
        shape = tuple(ids.shape)
        if shape not in self.captured:
            static = ids.to(self.device), targets.to(self.device)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                loss = self.compute(*static)  # the warm-up is this batch's real step
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                result = self.compute(*static)
            self.pool = self.pool or graph.pool()
            self.captured[shape] = (graph, *static, result)
            return loss
        graph, static_ids, static_targets, result = self.captured[shape]
        static_ids.copy_(ids, non_blocking=True)
        static_targets.copy_(targets, non_blocking=True)
        graph.replay()
        return result


def train(model, data, pad, args):
    """data: [(ids, mask), ...]. Cosine schedule with warm-up; every example once an epoch."""
    rng = random.Random(args.seed)
    epochs = [
        make_batches([len(ids) for ids, _ in data], args.batch_tokens, rng) for _ in range(math.ceil(args.epochs))
    ]
    epochs[-1] = epochs[-1][:round(len(epochs[-1]) * (args.epochs - len(epochs) + 1))]
    batches = [batch for epoch in epochs for batch in epoch]
    step = TrainStep(model, args.lr, graphs=model.device.type == "cuda" and model.num_parameters() < 3e8)
    model.train()
    if model.num_parameters() > 1e9:
        model.gradient_checkpointing_enable()
    start, seen, history = time.time(), 0, []
    for n, batch in enumerate(batches):
        width = next(w for w in WIDTHS if max(len(data[i][0]) for i in batch) <= w)
        rows = max(1, args.batch_tokens // width)  # always full, so that a shape is captured once
        ids = torch.full((rows, width), pad)
        targets = torch.full((rows, width), -100)
        for row, i in enumerate(batch):
            tokens, mask = data[i]
            tokens = torch.from_numpy(tokens.astype(np.int64))
            ids[row, :len(tokens)] = tokens
            # Position p predicts token p + 1: a target where that token is the model's own.
            targets[row, :len(tokens) - 1] = torch.where(torch.from_numpy(mask[1:]), tokens[1:], -100)
        progress = n / len(batches)
        warm = min(1.0, (n + 1) / max(1, round(0.02 * len(batches))))
        step.rate.fill_(args.lr * warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))))
        loss = step(ids, targets)
        seen += sum(len(data[i][0]) for i in batch)
        if n % 100 == 0 or n + 1 == len(batches):
            history.append(
                {"step": n + 1, "loss": round(loss.item(), 4), "tokens": seen, "seconds": round(time.time() - start, 1)}
            )
            print(
                f"step {n + 1}/{len(batches)}  loss {history[-1]['loss']:.4f}  "
                f"{seen / (time.time() - start) / 1e3:.0f} k tokens/s  {time.time() - start:.0f} s",
                flush=True,
            )
    model.eval()
    return history


# ----------------------------------------------------------------------------------------------------------------------
# Command line.


def fail(message):
    """End with one line for the user."""
    print(f"sft.py: error: {message}", file=sys.stderr)
    raise SystemExit(2)


def read_rows(path, chat) -> list[tuple[np.ndarray, np.ndarray]]:
    """Encode the paper's data layout: rows with `messages` and `tools`, lists or JSON text; JSON lines or parquet."""
    path = Path(path)
    if not path.is_file():
        fail(f"{path}: no such file")
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet
        except ImportError:
            fail("reading parquet needs a reader: pip install pyarrow")
        rows = pyarrow.parquet.read_table(path).to_pylist()
    else:
        rows = []
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                rows.append(json.loads(line))
            except ValueError:
                print(f"sft.py: {path}:{number}: not JSON, skipped", file=sys.stderr)
    data = []
    for number, row in enumerate(rows, 1):
        try:
            messages, tools = row["messages"], row.get("tools")
            messages = json.loads(messages) if isinstance(messages, str) else messages
            tools = json.loads(tools) if isinstance(tools, str) else tools
            data.append(encode(chat, Example("data", messages, tools[0] if tools else None)))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            print(f"sft.py: {path}:{number}: not a row of messages ({type(error).__name__}), skipped", file=sys.stderr)
    if not data:
        fail(f"{path}: no usable row")
    return data


def built_in_examples(args) -> list[Example]:
    processes = args.processes
    single = write_examples(0, args.problems, False, processes, "single turns and selections")
    executed = write_examples(500_000_000, args.executed, True, processes, "executed trajectories and summaries")
    rng = random.Random(args.seed)
    examples = diversity_filter(single + executed, rng)
    rare = [e for e in examples if len(e.messages) > 3 or "summary" in e.kind]
    return examples + rare * (args.repeat_executed - 1)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", help="folder for the model, its tokenizer and its seed skill library")
    parser.add_argument(
        "--model", help="pretrained model to start from; without it a tiny one is made from random weights"
    )
    parser.add_argument("--data", help="train on this file of rows (messages, tools) instead of the built-in examples")
    parser.add_argument(
        "--problems", type=int, default=100_000, help="synthesised problems for single turns and selections"
    )
    parser.add_argument("--executed", type=int, default=5_000, help="problems for executed multi-turn trajectories")
    parser.add_argument("--repeat-executed", type=int, default=3, help="how often those count in an epoch")
    parser.add_argument("--vocabulary", type=int, default=2048, help="tokens of the tiny backbone's tokenizer")
    parser.add_argument("--epochs", type=float, default=2.2, help="passes over the examples (paper: 4)")
    parser.add_argument(
        "--batch-tokens", type=int, default=32_768,
        help="tokens in a batch (paper: 64 sequences); their logits are held at once: with Qwen3-8B, 2.4 MB each",
    )
    parser.add_argument(
        "--lr", type=float, help="peak learning rate (default 1e-3 from random weights, 2e-5 otherwise, as the paper)"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="processes that write examples")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", help="file for the encoded built-in examples: read if it is there, written if not")
    parser.add_argument(
        "--evaluate", metavar="MODEL", help="only measure a model on held-out problems and print the figures"
    )
    parser.add_argument("--held-out", type=int, default=200, help="held-out problems for --evaluate")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        fail("--device cuda: no GPU is available")
    try:
        if args.evaluate:
            model = Backbone.load(args.evaluate, args.device)
            with Sandbox(device="cpu", seed=args.seed) as sandbox:
                return print(json.dumps(evaluate(model, sandbox, args.held_out), indent=1))
        if not args.out and not args.cache:
            fail("--out or --cache is required")
        if args.epochs <= 0:
            fail(f"--epochs {args.epochs:g}: choose a number above 0")
        chat = Backbone.load(args.model, args.device) if args.model else None
        if args.out:
            Path(args.out).mkdir(parents=True, exist_ok=True)
    except ModelError as error:
        fail(str(error))
    except OSError as error:
        fail(f"--out {args.out}: cannot be written ({error.strerror})")
    torch.manual_seed(args.seed)
    if args.cache and Path(args.cache).is_file():
        tokenizer, data = load_cache(args.cache)
        chat = chat or Chat(tokenizer)
    else:
        examples = built_in_examples(args) if not args.data else []
        if chat is None:
            texts = [m["content"] for e in examples[:: max(1, len(examples) // 6000)] for m in e.messages]
            chat = Chat(train_tokenizer(texts, args.vocabulary))
        data = read_rows(args.data, chat) if args.data else encode_all(chat, examples, args.processes)
        if args.cache:
            save_cache(args.cache, chat.tokenizer, data)
    print(f"{len(data)} examples, {sum(len(ids) for ids, _ in data) / 1e6:.1f} M tokens, "
          f"{sum(mask.sum() for _, mask in data) / 1e6:.1f} M learnt", flush=True)
    if not args.out:
        return None
    model = chat.model if args.model else tiny_model(chat.tokenizer).to(args.device)  # bfloat16 above 1e9 parameters
    args.lr = args.lr or (2e-5 if args.model else 1e-3)
    history = train(model, data, chat.tokenizer.pad_token_id or 0, args)
    model.to(torch.bfloat16)
    Backbone(model, chat.tokenizer).save(args.out)
    if not args.data:
        writer, rng = Writer(None), random.Random(args.seed)
        SkillLibrary([writer.skill(name, rng) for name in SEED_LIBRARY]).save(Path(args.out) / "skill_library.jsonl")
    (Path(args.out) / "sft.json").write_text(
        json.dumps({"arguments": vars(args), "examples": len(data), "history": history}, indent=1)
    )
    return None


_chat = None  # one per worker process


def _start_encoder(tokenizer):
    global _chat
    _chat = Chat(tokenizer)


def _encode_many(examples):
    return [encode(_chat, example) for example in examples]


def encode_all(chat, examples, processes):
    chunks = [examples[i:i + 500] for i in range(0, len(examples), 500)]
    with ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn"), _start_encoder, (chat.tokenizer,)
    ) as pool:
        return [pair for part in pool.map(_encode_many, chunks) for pair in part]


if __name__ == "__main__":
    main()

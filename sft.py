"""Cold start: how does a base model learn the three reply formats from a diverse set of verified examples?

    python sft.py --out checkpoints/tiny                    the built-in cold start: a tiny model from random weights
    python sft.py --model Qwen/Qwen3-8B-Base --out DIR      the same examples, on a pretrained model
    python sft.py --model M --data FILE --out DIR           rows with `messages` and `tools` (JSON lines or parquet)
    torchrun --nproc_per_node=8 -- sft.py --model M ...     the same on several GPUs (fast/ranks.py)
    python sft.py --evaluate MODEL                          what a cold start taught, on held-out problems

Four steps (paper: cold start):

    examples    chats whose assistant messages are right answers, in five kinds: policy turns without and with skills,
                selection calls, summary calls with and without skills; diversity filter (synthetic/examples.py)
    tokens      each chat as token ids with a mask: loss on what the assistant writes, on nothing that it reads
    batches     examples of about the same length together, padded to one of a few widths
    training    AdamW, or Muon from random weights; cosine schedule with warm-up, mean loss over a batch's learnt tokens

How this differs from the paper: the examples are a program's, which knows thirteen techniques, not a large model's,
so the cold start runs offline; and a batch is a number of tokens, not of sequences. With --data the paper's own
released rows can be used instead. The tiny model (tokenizer, weights, evaluation) is made in synthetic/tiny.py.

It leaves in --out: the model and its tokenizer, a seed library of five skills (the others are left to be found; after
--data and --from-rollouts the library that --model had), and sft.json with the options and the history of the loss.
"""

# Before torch, see there.
from tasks import UserError, check_device, check_numbers, found, resumable, run_command, told, uninterrupted

import argparse
import json
import math
import os
import random
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from backbone import Backbone, Chat
from chat.rows import chat_row, encode, read_file, read_rows, rollout_files, rollout_row
from fast import ranks
from fast.train_step import TrainStep
from report import claim
from sandbox import Sandbox
from skills import MODEL_FILE, SkillLibrary
from synthetic.examples import Example, Writer, diversity_filter, in_processes, write_examples
from synthetic.tiny import SHAPES, evaluate, tiny_model, train_tokenizer, wrap_tokenizer

# ----------------------------------------------------------------------------------------------------------------------
# Tokens. An encoded example is a pair of arrays, see chat/rows.py: token ids (L,) and a mask (L,).


_chat = None  # one for each process that encodes


def _start_encoder(tokenizer):
    global _chat
    _chat = Chat(tokenizer)


def _encode_many(examples):
    return [encode(_chat, e.messages, e.tool, e.unlearnt) for e in examples]


def save_cache(path, tokenizer, data):
    """Encoded examples in one file, end to end, with their lengths.

    Writing the built-in examples takes half an hour on two cores, training on them minutes on a GPU: with a cache the
    two can be done on two machines.
    """
    ids, masks = (torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*data))
    torch.save({"tokenizer": [tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template], "ids": ids,
                "masks": masks, "lengths": [len(ids) for ids, _ in data]}, f"{path}.new")
    os.replace(f"{path}.new", path)


def load_cache(path):
    """(tokenizer, encoded examples) as `save_cache` was given them. Raises UserError for another file."""
    with told(f"--cache {path}: not a file of encoded examples"):
        saved = torch.load(path, weights_only=True)
        ids, masks = (saved[name].split(saved["lengths"]) for name in ("ids", "masks"))
    return wrap_tokenizer(*saved["tokenizer"]), [(i.numpy(), mask.numpy()) for i, mask in zip(ids, masks)]


# ----------------------------------------------------------------------------------------------------------------------
# Batches and training.

WIDTHS = [384, 512, 640, 768, 896, 1024, 1152, 1280, 1536, 1792, 2048, 2560, 3072, 4096, 6144, 8192, 16384,
          32768]  # padded lengths of a batch


def width_for(length) -> int:
    """The width of the batch that an example of this length, at most WIDTHS[-1], goes into."""
    return next(width for width in WIDTHS if length <= width)


def make_batches(lengths, tokens, rng, order) -> list[list[int]]:
    """Indices of examples, grouped by padded width so that a batch holds about `tokens` tokens; in random order.

    A batch of examples of one width wastes little on padding, and a few widths mean few shapes to capture. order: the
    indices to group.
    """
    groups, batches = {}, []
    for i in order:
        groups.setdefault(width_for(lengths[i]), []).append(i)
    for width, members in groups.items():
        rng.shuffle(members)
        size = max(1, tokens // width)
        batches += [members[i:i + size] for i in range(0, len(members), size)]
    rng.shuffle(batches)
    return batches


def plan_batches(lengths, args) -> list[list[list[int]]]:
    """The batches of a whole training, each a list of parts that are computed one after the other: lists of indices.

    A batch is as many examples of one width as --batch-tokens allow, or --batch-sequences of any widths (the paper:
    64), in several parts. epochs may be a fraction: then the last pass sees only a part of its batches.
    """
    rng, batches, order, size = random.Random(args.seed), [], range(len(lengths)), args.batch_sequences
    for epoch in range(math.ceil(args.epochs)):
        if size:
            order = rng.sample(range(len(lengths)), len(lengths))
            shuffled = [make_batches(lengths, args.batch_tokens, rng, order[i:i + size])
                        for i in range(0, len(order), size)]
        else:
            shuffled = [[part] for part in make_batches(lengths, args.batch_tokens, rng, order)]
        batches += shuffled[:max(1, round(len(shuffled) * min(1, args.epochs - epoch)))]
    return batches


def collate(members, tokens, pad) -> tuple[torch.Tensor, torch.Tensor]:
    """Encoded examples as (ids, targets), both (B, L).

    L is one of WIDTHS. B is at least as many rows as `tokens` allow, also when fewer are used: where steps are captured
    there is one shape, and one graph, for each width. Empty rows have no targets.
    """
    width = width_for(max(len(ids) for ids, _ in members))
    rows = max(len(members), tokens // width)
    batch, targets = torch.full((rows, width), pad), torch.full((rows, width), -100)
    for row, (ids, mask) in enumerate(members):
        ids = torch.from_numpy(ids.astype(np.int64))
        batch[row, :len(ids)] = ids
        # Position p predicts token p + 1: a target where that token is the model's own.
        targets[row, :len(ids) - 1] = torch.where(torch.from_numpy(mask[1:]), ids[1:], -100)
    return batch, targets


def train(model, data, pad, args) -> list[dict]:
    """Train on encoded examples, each once an epoch. Returns the history of the loss, an entry every 100 steps.

    The learning rate warms up over the first 2 % of the steps and falls along a cosine to a twentieth of its peak.
    Every --save-minutes it writes down all that --resume needs to go on as if nothing had happened (on a CPU bit for
    bit).
    """
    lengths = [len(ids) for ids, _ in data]
    batches = plan_batches(lengths, args)
    graphs = model.device.type == "cuda" and model.num_parameters() < 3e8
    graphs = graphs and not args.batch_sequences and ranks.count() == 1
    step = TrainStep(model, args.lr, graphs, args.optimizer == "muon")
    model.train()
    if model.num_parameters() > 1e9:  # activations of a large model do not fit beside its optimiser
        model.gradient_checkpointing_enable()
    state = {"step": 0, "seen": 0, "seconds": 0.0, "history": [], "made of": fingerprint(args, data)}
    state |= restore(args, state["made of"], model, step)
    start, saved = time.time() - state["seconds"], time.time()
    bar = tqdm(total=len(batches), initial=state["step"], desc="training", unit="step",
               disable=ranks.rank() > 0 or None)

    def save_at_once():
        if ranks.count() == 1:  # several are not interrupted at the same step
            save(args, model, step, state)

    with bar, resumable(f"--out {args.out} --resume continues", save_at_once):
        for n in range(state["step"], len(batches)):
            warm = min(1.0, (n + 1) / max(1, round(0.02 * len(batches))))
            cosine = 0.5 * (1 + math.cos(math.pi * n / len(batches)))
            step.rate.fill_(args.lr * warm * (0.05 + 0.95 * cosine))
            parts = [collate([data[i] for i in part], args.batch_tokens if graphs else 0, pad) for part in batches[n]]
            with uninterrupted():  # an interruption finds weights and state of the same step
                loss = step(parts)
                state["step"], state["seconds"] = n + 1, time.time() - start
                state["seen"] += sum(lengths[i] for part in batches[n] for i in part)
                if n % 100 == 0 or n + 1 == len(batches):
                    state["history"].append(progress(loss, state, len(batches)))
            if ranks.first(time.time() - saved > 60 * args.save_minutes):  # its clock decides
                save(args, model, step, state)
                saved = time.time()
            bar.update()
    model.eval()
    return state["history"]


def progress(loss, state, steps) -> dict:
    """An entry of the history, which is printed, too. loss: this rank's share."""
    entry = {"step": state["step"], "loss": round(sum(ranks.each(float(loss))), 4), "tokens": state["seen"],
             "seconds": round(state["seconds"], 1)}
    tqdm.write(f"step {entry['step']}/{steps}  loss {entry['loss']:.4f}  "
               f"{entry['tokens'] / state['seconds'] / 1e3:.0f} k tokens/s  {state['seconds']:.0f} s", file=sys.stdout)
    return entry


CHECKPOINT = "training.pt"  # in --out, until the training is complete
CHANGEABLE = {"resume", "save_minutes", "processes", "cache", "out"}  # options that may differ when it is continued


def fingerprint(args, data) -> dict:
    """What must be the same when a training is continued: options and examples."""
    examples = 0
    for ids, mask in data:
        examples = zlib.crc32(mask.tobytes(), zlib.crc32(ids.tobytes(), examples))
    return {name: value for name, value in vars(args).items() if name not in CHANGEABLE} | {"the examples": examples}


def save(args, model, step, state):
    """Replace the checkpoint in one instant."""
    rng = torch.cuda.get_rng_state() if model.device.type == "cuda" else torch.get_rng_state()  # of dropout
    path, optimizer = Path(args.out) / CHECKPOINT, step.optimizer.state_dict()
    if ranks.rank() > 0:
        return
    torch.save(state | {"model": model.state_dict(), "rng": rng, "optimizer": optimizer}, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def restore(args, made_of, model, step) -> dict:
    """With --resume, put weights and optimiser back; the state of the training, or {} where none was saved yet.

    made_of: the fingerprint of this training. Raises UserError for a checkpoint that cannot be read, or that other
    options or examples have made.
    """
    path = Path(args.out or ".") / CHECKPOINT
    if not args.resume or not path.is_file():
        return {}
    with told(f"--resume: {path} is broken"):
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=ranks.count() > 1)
        changed = [name for name in made_of if state["made of"].get(name) != made_of[name]]
        if changed:
            raise UserError(f"--resume: {path} was made with other options or examples ({', '.join(changed)})")
        model.load_state_dict(state.pop("model"))
        step.optimizer.load_state_dict(state.pop("optimizer"))
    for group in step.optimizer.param_groups:
        group["lr"] = step.rate  # the tensor by which a step is told its rate
    (torch.cuda.set_rng_state if model.device.type == "cuda" else torch.set_rng_state)(state.pop("rng"))
    return state


# ----------------------------------------------------------------------------------------------------------------------
# Command line.


def built_in_examples(args) -> list[Example]:
    """The examples of the built-in cold start, after the diversity filter unless --no-diversity-filter.

    Single turns and selections are only written; trajectories of several turns are executed as well, in the sandbox
    without a GPU, as they hold its feedback. Those take far longer to make, so there are fewer, and each counts
    several times.
    """
    single = write_examples(0, args.problems, False, args.processes, "single turns and selections", args.wide)
    executed = write_examples(500_000_000, args.executed, True, args.processes, "executed trajectories and summaries",
                              args.wide)
    examples = single + executed
    if not args.no_diversity_filter:
        examples = diversity_filter(examples, random.Random(args.seed))
    rare = set(map(id, executed))
    return examples + [e for e in examples if id(e) in rare] * (args.repeat_executed - 1)


def load_data(args, chat, rows):
    """(tokenizer, encoded examples) from the user's rows, the cache or the built-in examples.

    chat: the pretrained model, or None, when a tokenizer is made from the examples. rows: of read_file, by path.
    """
    if rows:
        convert = rollout_row(chat, args.min_reward, args.from_rollouts) if args.from_rollouts else chat_row(chat)
        return chat.tokenizer, [example for path in rows for example in read_rows(path, rows[path], convert)]
    if args.cache and Path(args.cache).is_file():
        tokenizer, data = load_cache(args.cache)
        if chat and tokenizer.backend_tokenizer.to_str() != chat.tokenizer.backend_tokenizer.to_str():
            raise UserError(f"--cache {args.cache}: its tokens are those of another model's tokenizer")
        return tokenizer, data
    if not args.problems + args.executed:
        raise UserError("no examples: choose larger --problems or --executed")
    examples = built_in_examples(args)
    if chat is None:
        some = examples[::max(1, len(examples) // 6000)]
        chat = Chat(train_tokenizer([m["content"] for e in some for m in e.messages], vocabulary=2048))
    data = in_processes(_encode_many, examples, 500, args.processes, _start_encoder, (chat.tokenizer,), "tokens")
    if args.cache:
        save_cache(args.cache, chat.tokenizer, data)
    return chat.tokenizer, data


def parse(argv):
    """The options; raises UserError for those that cannot be."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], usage=argparse.SUPPRESS,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--out", help="folder for the model, its tokenizer and its seed skill library")
    add("--model", help="pretrained model to start from; without it a tiny one is made from random weights")
    add("--data", help="train on this file of rows (messages, tools) instead of the built-in examples")
    add("--from-rollouts", metavar="RUN", help="train on the good replies of this run of reinforce.py")
    add("--min-reward", type=float, default=1.5, help="what a reply of that run must have earned")
    add("--size", choices=sorted(SHAPES), default="tiny", help="without --model: tiny 6, small 26, base 84 million")
    add("--wide", action="store_true", help="examples also of mixtures, lone operators, networks of several classes")
    add("--problems", type=int, default=80_000, help="synthesised problems for single turns and selections")
    add("--executed", type=int, default=3_000, help="problems for executed multi-turn trajectories")
    add("--repeat-executed", type=int, default=3, help="how often those count in an epoch")
    add("--no-diversity-filter", action="store_true", help="ablation: keep what is over-represented")
    add("--epochs", type=float, help="passes over the examples; None: 3, over a billion parameters 4 as the paper")
    add("--batch-tokens", type=int, default=32_768,
        help="tokens computed at once; their logits are held together: with Qwen3-8B, 2.4 MB each")
    add("--batch-sequences", type=int,
        help="sequences in a batch; None: as --batch-tokens allow, over a billion parameters 64 as the paper")
    add("--optimizer", choices=["adamw", "muon"], help="of matrices; None: muon from random weights, else adamw")
    add("--lr", type=float, help="peak learning rate; None: 3e-3 with muon, else 1e-3; with --model 2e-5 as the paper")
    add("--processes", type=int, default=os.cpu_count(), help="processes that write examples")
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu", help="that trains")
    add("--seed", type=int, default=0, help="of weights, batches and filter")
    add("--cache", help="file for the encoded built-in examples: read if it is there, written if not")
    add("--resume", action="store_true", help="go on with the training in --out (same options; same --cache)")
    add("--save-minutes", type=float, default=5.0, help="between checkpoints in --out, for --resume")
    add("--evaluate", metavar="MODEL", help="only measure a model on held-out problems and print the figures")
    add("--held-out", type=int, default=200, help="held-out problems for --evaluate")
    args = parser.parse_args(argv)
    check_device(args.device)
    if not args.evaluate and not args.out and not args.cache:
        raise UserError("--out or --cache is required")
    if args.cache and not Path(args.cache).parent.is_dir():
        raise UserError(f"--cache {args.cache}: there is no folder for it")
    check_numbers({name: value for name, value in vars(args).items() if name != "min_reward"}, above_0=(
        "epochs", "batch_tokens", "batch_sequences", "lr", "held_out", "processes", "repeat_executed"))
    if (args.from_rollouts or args.data) and not args.model:
        raise UserError("--data, --from-rollouts: say with --model which model is to be trained on them")
    can_be_muon = not args.model and ranks.count() == 1  # matrices are not shared out; a large model is in bfloat16
    if args.optimizer == "muon" and not can_be_muon:
        raise UserError("--optimizer muon: is for weights that begin at random, on one GPU only")
    args.optimizer = args.optimizer or ("muon" if can_be_muon else "adamw")
    args.lr = args.lr or (2e-5 if args.model else 3e-3 if args.optimizer == "muon" else 1e-3)
    return args


def main(argv=None) -> int:
    args = parse(argv)
    if args.evaluate:
        model = Backbone.load(found(args.evaluate), args.device)
        with Sandbox(device="cpu", seed=args.seed) as sandbox:
            print(json.dumps(evaluate(model, sandbox, args.held_out), indent=1))
        return 0
    files = rollout_files(args.from_rollouts) if args.from_rollouts else [args.data] if args.data else []
    rows = {path: read_file(path) for path in files}  # before the model: a file that cannot be read is told at once
    out = Path(args.out or ".")
    if args.out and ranks.rank() == 0:
        claim(out)  # now, as the examples take long
    if args.resume and (out / "sft.json").is_file() and not (out / CHECKPOINT).is_file():
        raise UserError(f"--resume: the training in {out} is complete")
    if not args.resume and (out / CHECKPOINT).is_file():
        raise UserError(f"{out} holds an unfinished training: continue it with --resume, or choose another --out")
    chat = Backbone.load(found(args.model), args.device) if args.model else None
    large = chat is not None and chat.large
    args.epochs = args.epochs or (4.0 if large else 3.0)
    args.batch_sequences = args.batch_sequences or (64 if large else None)
    torch.manual_seed(args.seed)
    tokenizer, data = ranks.first(load_data(args, chat, rows) if ranks.rank() == 0 else None)
    chat = chat or Chat(tokenizer)
    print(f"{len(data)} examples, {sum(len(ids) for ids, _ in data) / 1e6:.1f} M tokens, "
          f"{sum(mask.sum() for _, mask in data) / 1e6:.1f} M learnt", flush=True)
    if not args.out:
        return 0  # only the cache was wanted
    # A pretrained model is in bfloat16 above 1e9 parameters.
    model = chat.model if args.model else tiny_model(chat.tokenizer, args.size).to(args.device)
    longest = min(WIDTHS[-1], getattr(model.config, "max_position_embeddings", WIDTHS[-1]))
    if long := sum(len(ids) > longest for ids, _ in data):
        print(f"sft.py: {long} examples are left out, they are longer than {longest} tokens", file=sys.stderr)
        data = [(ids, mask) for ids, mask in data if len(ids) <= longest]
    if not data:
        raise UserError("there is nothing to train on")
    history = train(model, data, chat.tokenizer.pad_token_id or 0, args)
    if ranks.rank() > 0:
        return 0
    Backbone(model.to(torch.bfloat16), chat.tokenizer).save(out)
    library = SkillLibrary.of_model(found(args.model)) if rows else Writer(None).seed_library(random.Random(args.seed))
    library.save(out / MODEL_FILE)
    record = {"arguments": vars(args), "examples": len(data), "history": history}
    (out / "sft.json").write_text(json.dumps(record, indent=1))
    (out / CHECKPOINT).unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    run_command(ranks.joined(main))

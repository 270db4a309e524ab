"""Cold start: how does a base model learn the three reply formats from a diverse set of examples?

    python sft.py --out checkpoints/tiny                    the built-in cold start: a tiny model from random weights
    python sft.py --model Qwen/Qwen3-8B-Base --out DIR      the same examples, on a pretrained model
    python sft.py --model M --data FILE --out DIR           rows with `messages` and `tools` (JSON lines or parquet)
    python sft.py --out DIR ... --resume                    continue after a kill, with the same options
    torchrun --nproc_per_node=8 -- sft.py --model M ...     the same on several GPUs (fast/ranks.py)
    python bench.py --level 1 --model DIR                   what a cold start taught, on the built-in problems

Four steps (paper: cold start):

    examples    chats of five kinds: policy turns without and with skills, selection calls, summary calls with and
                without skills (synthetic/examples.py), through the diversity filter; and lessons, which obey any skill,
                even a false one (synthetic/lessons.py). Short lessons are learnt first, once
    tokens      each chat as token ids with a mask: only the assistant's tokens have a loss
    batches     examples of about the same length together, padded to one of a few widths
    training    AdamW, or from random weights Muon; cosine schedule with warm-up (fast/train_step.py)

The loss of a batch of R sequences is a weighted cross-entropy. M_i is the set of positions p of sequence i whose next
token t_{p+1} is learnt. (These symbols are this file's own.)

    L = -sum over i, and over p in M_i, of w_i log pi(t_{p+1} | t_1 ... t_p)

With --model, loss, batch and schedule are the release's (verl_patch/trainer/code/fsdp_sft_trainer.py). There every
sequence weighs the same, so a short tool call counts as much as a long kernel. From random weights every token weighs
the same: these values are ours, and teach a tiny model faster.

                        with --model                        from random weights
    w_i                 1 / (R |M_i|)                       1 / sum over j of |M_j|
    batch               64 sequences                        65,536 tokens
    learning rate       2e-5: 10 % warm-up, then to 0       3e-3: 2 % warm-up, then to 5 %
    weight decay        0.01, of every parameter            0.1, of matrices
    too long            cut at the right                    left out

The released checkpoints were trained with their own chat template. To train with it, save it as a file and pass it as
--chat-template. results/faithful.md says where it is, and how the release's gradient differs.

This differs from the paper: a program that knows twelve techniques writes the examples. --data uses the paper's rows,
which a large model wrote. synthetic/tiny.py makes the tiny model's tokenizer and random weights.

In --out it leaves the model with its tokenizer, a skill library, and sft.json. The latter has the options, the numbers
of examples and tokens, the seconds of training since --resume, and the losses. With the built-in examples the library
holds five seed skills, so RL has to find the other techniques; all_techniques.jsonl holds those, too. With --data or
--from-rollouts (a run's good replies) it is --model's. Every five minutes training.pt is saved, for --resume.
"""

if __name__ == "__main__":
    from command.process import begin
    begin()  # before torch is loaded: it sets how OpenMP's threads wait

import functools
import itertools
import json
import math
import os
import random
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar

from command.options import check_together, complete, flag, option, parse, parse_early

# Defaults with --model: the release's (kernel/scripts/sft/14b-skill-combined.sh). The table above has its other values.
PAPER = {"epochs": 4.0, "batch_sequences": 64, "lr": 2e-5}


@dataclass
class Options:
    """The command line. Defaults are for the built-in cold start; see PAPER for those of a pretrained model."""

    # The first option of each group in --help, and the group's heading
    GROUPS: ClassVar = {"out": "the run", "model": "what is trained, and on what", "epochs": "training"}

    out: str = option("", "folder for the model, its tokenizer and its seed skill library")
    resume: bool = option(False, "continue the training in --out, with the same options")
    device: str = option("", "of the training; default: cuda if there is a GPU", choices=("cpu", "cuda"))
    seed: int = option(0, "seed of weights, batches and filter")
    processes: int = option(os.cpu_count(), "processes that write examples", above_0=True)
    model: str = option("", "pretrained model to start from: loss, schedule, weight decay and truncation are then the "
                        "release's (see the head of sft.py); without it a tiny one is made from random weights")
    chat_template: str = option("", "with --model: replace its chat template by this file's (Jinja); it stays with the "
                                "tokenizer", metavar="FILE")
    data: str = option("", "train on this file of rows (messages, tools) instead of the built-in examples")
    from_rollouts: str = option("", "train on the good replies of this run of reinforce.py", metavar="RUN")
    min_reward: float = option(1.5, "a reply of that run is good if its reward is at least this")
    problems: int = option(80_000, "synthesised problems for single turns and selections", above_0=True)
    executed: int = option(1_500, "problems, and lessons (see --redundant), solved over several turns in the sandbox")
    redundant: int = option(80_000, "lessons: examples about redundant operators (synthetic/lessons.py)")
    lessons: int = option(400_000, "short lessons, without kernels, which are learnt first, once")
    diversity_filter: bool = option(True, "down-sample what is over-represented; --no-diversity-filter: ablation")
    epochs: float = option(3.0, "passes over the examples; with --model 4", above_0=True)
    batch_tokens: int = option(65_536, "tokens of one forward pass, with padding", above_0=True)
    batch_sequences: int = option(0, "sequences in a batch; 0: as many as --batch-tokens allow; with --model 64")
    lr: float = option(3e-3, "peak learning rate eta; with --model 2e-5")
    offload: bool = option(False, "with --model: keep the optimiser's state in the host's memory (Qwen3-8B on 80 GB)")


if __name__ == "__main__":
    parse_early(Options, __doc__.split("\n")[0])  # --help and misspelt flags need no torch, whose import takes seconds

import numpy as np
import torch
from tqdm import tqdm

from backbone import Backbone, Chat, check_device
from chat.rows import encode, read_chats, read_rollouts
from fast import ranks
from fast.slots import packed
from fast.train_step import TrainStep
from command.files import find_path, user_error
from command.process import UserError, run_command
from skills import MODEL_FILE, SkillLibrary
from synthetic.examples import Example, Writer, in_processes, write_examples
from synthetic.lessons import sample_lessons, write_lessons
from synthetic.tiny import tiny_model, train_tokenizer

CONTRADICTIONS = [("--data", "--from-rollouts")]


def read_options(argv) -> Options:
    """The options of a command line. Raises UserError for options that cannot be, or that do not go together."""
    given = {"device": "cuda" if torch.cuda.is_available() else "cpu"} | parse(Options, argv, __doc__.split("\n")[0])
    check_together(given, CONTRADICTIONS)
    options = complete(Options, PAPER | given if given.get("model") else given)
    check_device(options.device)
    if not options.out:
        raise UserError("--out is required")
    if not options.model and (options.data or options.from_rollouts or options.chat_template or ranks.count() > 1):
        raise UserError("--data, --from-rollouts, --chat-template and several GPUs need --model, the model to train")
    return options


# ----------------------------------------------------------------------------------------------------------------------
# Examples, and the diversity filter

REPEAT_EXECUTED = 3  # an executed trajectory is learnt so often in an epoch


def built_in_examples(options) -> list[Example]:
    """The examples of the built-in cold start, after the diversity filter.

    Single turns and selections are written without running anything. Trajectories of several turns hold the sandbox's
    feedback, so their kernels are run in it, without a GPU. That takes far longer, so there are fewer of them, and each
    counts several times. The first number of each call is its first seed: the ranges do not overlap.
    """
    written = write_examples(0, options.problems, execute=False, processes=options.processes,
                             title="single turns and selections")
    executed = write_examples(500_000_000, options.executed, execute=True, processes=options.processes,
                              title="trajectories")
    examples = written + executed
    if options.diversity_filter:
        examples = diversity_filter(examples, random.Random(options.seed))
    ids = set(map(id, executed))  # the filter keeps the objects, so this finds the executed ones among them
    return examples + [e for e in examples if id(e) in ids] * (REPEAT_EXECUTED - 1)


def diversity_filter(examples, rng, per_kernel=40, per_share=2.0) -> list[Example]:
    """Down-sample what is over-represented (paper: diversity filter). Without it Selection chooses few skills only.

    The paper names what is down-sampled, not how. Here examples come in random order, and one is kept unless it would
    exceed one of three caps:

        examples with the same normalised kernel (near-duplicates)    per_kernel
        of one kind, with the same skills as their answer             per_share * max(N / A, 50)
        of one kind, of the same operator family                      per_share * N / F

    N is the number of examples of that kind, A of distinct answers among them, F of operator families in all examples.
    """
    order = list(examples)
    rng.shuffle(order)
    kinds = Counter(e.kind for e in examples)
    families = len({e.family for e in examples})
    pairs = {(e.kind, e.skills) for e in examples}
    answers = Counter(kind for kind, _ in pairs)
    counts, kept = Counter(), []  # counts: class -> examples of it that are kept so far
    for e in order:
        caps = {}  # class that this example belongs to -> most examples of that class
        if e.kernel:
            caps[e.kernel] = per_kernel
        if e.skills:
            caps[e.kind, e.skills] = per_share * max(kinds[e.kind] / answers[e.kind], 50)
        if e.family:
            caps[e.kind, e.family] = per_share * kinds[e.kind] / families
        if all(counts[what] < cap for what, cap in caps.items()):
            counts.update(caps.keys())
            kept.append(e)
    print(f"diversity filter: {len(kept)} of {len(examples)} examples kept")
    return kept


# ----------------------------------------------------------------------------------------------------------------------
# Tokens. Each reply is learnt in its whole conversation, as the rollouts of RL will show it to the model. An encoded
# example (chat/rows.py) is a pair of arrays of length L: int32 token ids, and a mask that is True on what is learnt.


def encoder(tokenizer):
    """A function of an example of the built-in cold start: a list of its token ids and mask, (L,) each.

    The first replies of an example may be wrong on purpose. They are context for the next reply and have no loss
    (`unlearnt`).
    """
    chat = Chat(tokenizer)
    return lambda example: [encode(chat, example.messages, example.tool, example.unlearnt)]


def load_data(options, chat) -> tuple:
    """(tokenizer, short lessons, which come first, other encoded examples): the user's rows or the built-in examples.

    --data learns the paper's released rows, --from-rollouts the replies of a run that earned --min-reward (CUDA Agent:
    rejection fine-tuning). A tokenizer for a model from random weights is trained on about 6,000 of its examples.
    chat: the pretrained model; None for one from random weights.
    """
    if options.data:
        return chat.tokenizer, [], read_chats(options.data, chat)
    if options.from_rollouts:
        return chat.tokenizer, [], read_rollouts(options.from_rollouts, chat, options.min_reward)
    examples = built_in_examples(options)
    shown = examples[::max(1, len(examples) // 4000)] + sample_lessons(2000)
    messages = itertools.chain.from_iterable(e.messages for e in shown)
    texts = [message["content"] for message in messages]
    tokenizer = chat.tokenizer if chat else train_tokenizer(texts, vocabulary=2304)
    data = in_processes(functools.partial(encoder, tokenizer), examples, 100, options.processes, "tokens")
    # Lessons of three sorts: short ones, full ones, and executed ones. The numbers are their first seeds.
    lessons = write_lessons(tokenizer, 0, options.lessons, options.processes, brief=True)
    data += write_lessons(tokenizer, 100_000_000, options.redundant, options.processes)
    data += REPEAT_EXECUTED * write_lessons(tokenizer, 200_000_000, options.executed, options.processes, execute=True)
    return tokenizer, lessons, data


# ----------------------------------------------------------------------------------------------------------------------
# Batches and training.

# Padded lengths of a batch, in tokens
WIDTHS = [256, 320, 384, 512, 640, 768, 896, 1024, 1152, 1280, 1536, 1792, 2048, 2560, 3072, *range(4096, 32769, 1024)]


def width_for(length) -> int:
    """The smallest of WIDTHS that an example of this length fits into. No example is longer than WIDTHS[-1]: see `fit`.

    >>> [width_for(length) for length in (1, 256, 257)]
    [256, 256, 320]
    """
    return next(width for width in WIDTHS if length <= width)


def fit(data, longest, cut) -> list:
    """Encoded examples of at most `longest` tokens. Longer ones are left out or, with `cut`, cut at the right.

    An example of which nothing is learnt after the cut is left out, too: it would only dilute the batch's mean.

    >>> fit([("abc", "xyz"), ("a", "x")], 2, True), fit([("abc", "xyz"), ("a", "x")], 2, False)
    2 examples, 1 longer than 2 tokens: 1 cut, 0 left out
    2 examples, 1 longer than 2 tokens: 0 cut, 1 left out
    ([('ab', 'xy'), ('a', 'x')], [('a', 'x')])
    """
    fitting, longer, left_out = [], 0, 0
    for ids, mask in data:
        longer += len(ids) > longest
        if len(ids) <= longest or cut and any(mask[:longest]):
            fitting.append((ids[:longest], mask[:longest]))
        else:
            left_out += 1
    print(f"{len(data)} examples, {longer} longer than {longest} tokens: {longer - left_out} cut, {left_out} left out",
          flush=True)
    return fitting


def plan_batches(lengths, options, first=0) -> list[list[list[int]]]:
    """The batches of a whole training. Each is a list of parts, and a part is a list of indices of examples.

    A part is one forward and backward pass. Gradients of a batch's parts add up. A part holds examples of about one
    width, as many as --batch-tokens allow, so that little is padding. Without --batch-sequences a batch is one part.
    With it (paper: 64) a batch has that many examples of any widths, in at least as many parts as there are ranks. If
    --epochs is a fraction, the last pass stops early. first: the index of the first example.
    """
    rng = random.Random(options.seed)
    size, batches = options.batch_sequences, []

    def parts(indices, ranks_to_fill):
        items = [(width_for(lengths[i]), 1, first + i) for i in indices]  # (width, number of sequences, what it is)
        items.sort(key=lambda item: -item[0])
        return [*packed(items, min(options.batch_tokens, sum(width for width, _, _ in items) // ranks_to_fill))]

    for epoch in range(math.ceil(options.epochs)):
        order = rng.sample(range(len(lengths)), len(lengths))
        if size:
            shuffled = [parts(order[i:i + size], ranks.count()) for i in range(0, len(order), size)]
        else:
            shuffled = [[part] for part in parts(order, 1)]
            rng.shuffle(shuffled)
        batches += shuffled[:max(1, round(len(shuffled) * min(1, options.epochs - epoch)))]
    return batches


def collate(members, pad) -> tuple[torch.Tensor, torch.Tensor]:
    """Encoded examples as a padded batch: (ids, targets), both (B, L), where L is one of WIDTHS.

    A target is the next token where it is learnt, and -100 elsewhere.

    >>> ids, mask = np.array([5, 6, 7]), np.array([False, True, True])  # 5 was read, 6 and 7 are learnt
    >>> collate([(ids, mask)], pad=0)[1][0, :4].tolist()
    [6, 7, -100, -100]
    """
    width = width_for(max(len(ids) for ids, _ in members))
    batch = np.full((len(members), width), pad)
    targets = np.full((len(members), width), -100)
    for row, (ids, mask) in enumerate(members):
        batch[row, :len(ids)] = ids
        # Position p predicts token p + 1: a target where that token is the model's own.
        targets[row, :len(ids) - 1] = np.where(mask[1:], ids[1:], -100)
    return torch.from_numpy(batch), torch.from_numpy(targets)


def learning_rate(n, steps, options) -> float:
    """eta_n of step n of N = steps.

    With --model (release: transformers' get_cosine_schedule_with_warmup), w = 10 % of N:
        eta n / w where n < w, so the first step changes nothing; then eta (1 + cos(pi (n - w) / (N - w))) / 2
    From random weights, w = 2 % of N:
        eta min(1, (n + 1) / w) (0.05 + 0.95 (1 + cos(pi n / N)) / 2)
    """
    if options.model:
        warm_up = int(0.1 * steps)
        if n < warm_up:
            return options.lr * n / warm_up
        return options.lr * 0.5 * (1 + math.cos(math.pi * (n - warm_up) / (steps - warm_up)))
    warm_up = min(1.0, (n + 1) / max(1, round(0.02 * steps)))
    return options.lr * warm_up * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * n / steps)))


def train(model, lessons, data, pad, options) -> list[dict]:
    """Train on lessons, once, then on encoded examples, each once an epoch. Returns the history: step and loss L, every
    100 steps.

    pad: the padding token's id. With several ranks each trains on its share of a batch; losses are summed over ranks.

    Every SAVE_EVERY seconds it saves all that --resume needs to go on as if nothing had happened: on a CPU the weights
    are then equal bit for bit. What was trained after the last save is trained again.
    """
    batches = plan_batches([len(ids) for ids, _ in lessons], replace(options, epochs=1.0)) if lessons else []
    batches += plan_batches([len(ids) for ids, _ in data], options, first=len(lessons))
    data = lessons + data
    step = TrainStep(model, pretrained=bool(options.model), host=options.offload)
    model.train()
    done, history = restore(step, options)
    saved = time.time()
    for n in tqdm(range(done, len(batches)), "training", unit="step", disable=ranks.rank() > 0 or None):
        parts = [collate(list(map(data.__getitem__, part)), pad) for part in batches[n]]
        loss = step(parts, learning_rate(n, len(batches), options))  # this rank's share of L
        if n % 100 == 0 or n + 1 == len(batches):
            history.append({"step": n + 1, "loss": round(sum(ranks.each(float(loss))), 4)})
            tqdm.write(f"step {n + 1} of {len(batches)}: loss {history[-1]['loss']:.4f}")
        if ranks.first(time.time() - saved > SAVE_EVERY):  # rank 0's clock decides
            step.save(Path(options.out, CHECKPOINT), {"step": n + 1, "history": history, "options": asdict(options)})
            saved = time.time()
    model.eval()
    return history


# ----------------------------------------------------------------------------------------------------------------------
# What --resume continues from, until the training is complete

CHECKPOINT = "training.pt"  # in --out
SAVE_EVERY = 300  # seconds between checkpoints
# Options that may differ when a training is continued. The examples do not depend on the number of processes.
CHANGEABLE = {"resume", "processes", "out", "offload"}


def check_folder(options):
    """Raise UserError if --out holds a training. With --resume, raise it if there is none to continue."""
    begun = Path(options.out, CHECKPOINT).is_file()
    if options.resume and not begun:
        raise UserError(f"--resume: {options.out} holds no {CHECKPOINT} to continue from")
    if not options.resume and (begun or Path(options.out, "sft.json").is_file()):
        raise UserError(f"{options.out} holds a training: continue it with --resume, or choose another --out")


def restore(step, options) -> tuple[int, list]:
    """(steps done, history of the loss). With --resume, weights and optimiser become those of the checkpoint.

    Raises UserError for a checkpoint that cannot be read, or that was made with other options: these would give other
    examples and batches. The number of ranks may differ, because the file holds the whole state.
    """
    if not options.resume:
        return 0, []
    path = Path(options.out, CHECKPOINT)
    with user_error(f"--resume: {path} is broken"):
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    for name, value in asdict(options).items():
        if name not in CHANGEABLE and state["options"].get(name) != value:
            raise UserError(f"--resume: {path} was made with another {flag(name)} ({state['options'].get(name)})")
    step.load(state)
    return state["step"], state["history"]


# ----------------------------------------------------------------------------------------------------------------------
# Command line


def main(argv=None) -> int:
    """The four steps, from the options to the folder. Returns the exit status.

    With several ranks, rank 0 makes the examples and writes the files, and every rank trains on its share of a batch.
    """
    options = read_options(argv)
    check_folder(options)
    template = ""
    if options.chat_template:
        with user_error(f"--chat-template {options.chat_template}: cannot be read"):
            template = find_path(options.chat_template).read_text()
    chat = Backbone.load(find_path(options.model), options.device, template=template) if options.model else None
    Path(options.out).mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    tokenizer, lessons, data = ranks.first(load_data(options, chat) if ranks.rank() == 0 else None)
    # While it is trained, a pretrained model has bfloat16 weights above 1e9 parameters, else float32.
    model = chat.model if chat else tiny_model(tokenizer).to(options.device)
    longest = min(WIDTHS[-1], getattr(model.config, "max_position_embeddings", WIDTHS[-1]))
    fitting = fit(data, longest, cut=bool(options.model))
    if not fitting:
        raise UserError("there is nothing to train on")
    began = time.monotonic()
    history = train(model, lessons, fitting, tokenizer.pad_token_id or 0, options)
    record = {"examples": len(fitting), "lessons": len(lessons), "tokens": sum(len(ids) for ids, _ in fitting),
              "training_seconds": round(time.monotonic() - began, 1), "history": history}
    if ranks.rank() == 0:
        finish(model, tokenizer, options, record)
    return 0


def finish(model, tokenizer, options, record):
    """Write the trained model in bfloat16, its skill library and sft.json, and then remove the checkpoint.

    In this order: killed before the last line, --resume goes on from the checkpoint and writes the same files again.
    """
    out = Path(options.out)
    Backbone(model.to(torch.bfloat16), tokenizer).save(out)
    if options.data or options.from_rollouts:
        SkillLibrary.of_model(find_path(options.model)).save(out / MODEL_FILE)
    else:
        seeds, others = Writer(None).libraries(options.seed)
        SkillLibrary(seeds).save(out / MODEL_FILE)
        SkillLibrary(seeds + others).save(out / "all_techniques.jsonl")  # shows what a full library is worth
    (out / "sft.json").write_text(json.dumps({"options": asdict(options)} | record, indent=1))
    (out / CHECKPOINT).unlink(missing_ok=True)


if __name__ == "__main__":
    run_command(ranks.joined(main))

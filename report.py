"""What a run leaves behind and how it is shown. Options, starting, resuming and bookkeeping of reinforce.py.

The folder of a run, --out:

    config.json                            every option of the run, written when it begins
    metrics.jsonl                          one object a step; README.md says what each number means
    rollouts/step_N.jsonl                  every prompt, reply, verdict, selection, proposal, and why it was rejected
    rollouts/eval_N.jsonl                  the same for the evaluation after step N
    skill_library/global_step_N.jsonl      the library after step N
    checkpoint/                            a model folder with its skill library (bench.py loads it), and trainer.pt:
                                           all that --resume needs
    curves.png, report.html                all of it to look at; `python report.py DIR` makes the page at any time
    lock                                   empty; held by the process that writes there

A step is complete once its line is in metrics.jsonl and, every --save-every steps, its checkpoint is written. A killed
run goes on from its last checkpoint: start_run removes what later steps have left, and they are done again. On a CPU
the continued run equals an uninterrupted one bit for bit, because weights, optimiser, library, the generator's state
and the position in the stream of tasks are all that one step hands to the next.

`episodes` is a list of reinforce.Episode.
"""

import argparse
import contextlib
import fcntl
import functools
import importlib.util
import json
import os
import random
import shutil
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from backbone import Backbone
from chat.prompts import read_prompts
from fast import plan, ranks
from fast.optimizer import make_adamw
from page import charts, records
from page.metrics import progress
from page.writer import render
from sandbox import Sandbox, feedback
from skills import MODEL_FILE, SkillLibrary, write_atomically
from summarizer import REASONS
from synthetic.generator import NARROW, WIDE, training_tasks
from tasks import (UserError, builtin_tasks, check_device, check_numbers, flag, folder_tasks, found, resumable,
                   run_command, told, uninterrupted)


@dataclass
class Run:
    """The state of a run: what reinforce.py's phases read, and what one step hands to the next."""

    args: argparse.Namespace
    out: Path
    model: Backbone
    optimizer: torch.optim.Optimizer
    library: SkillLibrary
    seeds: set  # names of the skills before the first step
    generator: torch.Generator  # of all sampling in training
    step: int = 0  # complete steps
    settled: torch.Tensor | None = None  # the generator's state after the last of them; None while weights change
    sandbox: Sandbox | None = None
    compiled: Sandbox | None = None  # judges against torch.compile; only CUDA Agent's reward asks
    seconds: Counter = field(default_factory=Counter)  # of the current step, by phase
    retired: list = field(default_factory=list)  # skills that the current step has taken out
    bar: tqdm = field(default_factory=lambda: tqdm(disable=True))  # counts steps, and names the phase
    tensorboard: object = None  # a SummaryWriter, with --log tensorboard

    @property
    def clock(self) -> str:
        """Which clock the verdicts are from: figures of the two are never compared."""
        return "modelled" if self.args.device == "cpu" else "measured"

    @contextlib.contextmanager
    def phase(self, name):
        """Time a phase and show its name. What it waits for the sandbox is counted under `sandbox` instead."""
        self.bar.set_description(f"step {self.step + 1}: {name}")
        start, before = time.monotonic(), self.sandbox.waited
        yield
        waited = self.sandbox.waited - before
        self.seconds["sandbox"] += waited
        self.seconds[name] += time.monotonic() - start - waited


# ----------------------------------------------------------------------------------------------------------------------
# Options. Those given on the command line come before those of a run that is continued, and these before defaults.


def command_line(argv, description, tables, choices) -> dict:
    """The options that were given, without defaults.

    tables: OPTIONS, SIZES and RECIPES of reinforce.py, from which each option gets its flag, its type and its help.
    choices: the values that an option may have, {name: values}, where not everything of its type will do.
    """
    parser = argparse.ArgumentParser(description=description.split("\n")[0], usage=argparse.SUPPRESS,
                                     argument_default=argparse.SUPPRESS, allow_abbrev=False)
    options, sizes, recipes = tables
    parser.add_argument("--out", metavar="DIR", help="folder of the run (default: runs/<date and time>)")
    parser.add_argument("--plan", action="store_true", help="tell which models fit on which GPUs, and stop")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out from its last checkpoint")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if there is a GPU")
    parser.add_argument("--recipe", choices=list(recipes), help="reward, and what goes with it (default: davinci)")
    for name, (default, meaning) in options.items():
        others = [f", {recipe}: {changed[name]}" for recipe, changed in recipes.items() if name in changed]
        kind = {"choices": list(choices[name])} if name in choices else {"type": type(default), "metavar": "X"}
        if type(default) is bool:
            kind = {"action": argparse.BooleanOptionalAction if default else "store_true"}
        parser.add_argument(flag(name), help=f"{meaning} (default: {default}{''.join(others)})", **kind)
    for name, (cpu, gpu, paper, meaning) in sizes.items():
        parser.add_argument(flag(name), type=type(cpu), metavar="X", help=f"{meaning} (default: {cpu} on a CPU, {gpu} "
                            f"on a GPU, {paper} for a model over a billion parameters)")
    return vars(parser.parse_args(argv))


def configure(given, parameters, options, sizes, recipes) -> argparse.Namespace:
    """All options: those given, and the defaults for this device, recipe and number of model parameters.

    What comes later in this order wins: sizes, options, what the recipe changes, what was given. Raises UserError for
    a number out of range.
    """
    column = 2 if parameters >= 1e9 else int(given["device"] == "cuda")
    config = {"recipe": "davinci"} | {name: row[column] for name, row in sizes.items()}
    config |= {name: default for name, (default, _) in options.items()}
    config |= recipes[given.get("recipe", "davinci")] | given
    check_numbers(config, above_0=[*(set(sizes) - {"k", "s", "lr"}), "grad_clip"], at_most={"gamma": 1, "clip_low": 1})
    return argparse.Namespace(**config)


# ----------------------------------------------------------------------------------------------------------------------
# Starting and resuming


def open_run(given, tables, changeable) -> Run:
    """A new run, or with --resume the run of the folder as it was at its last checkpoint. Its sandbox is not open yet.

    given: of command_line. changeable: options that may differ from those of the run that is continued.
    Raises UserError; a run that is refused leaves nothing behind.
    """
    if given.pop("plan", False):
        print(what_fits(given, tables))
        sys.exit(0)
    out, saved = open_folder(given, changeable)
    if given.get("log") == "tensorboard" and not importlib.util.find_spec("tensorboard"):
        raise UserError("--log tensorboard: first pip install tensorboard")
    if given.get("tasks", "synth") not in (*SYNTHESISED, "builtin"):
        folder_tasks(given["tasks"])  # a bad folder is told before the model is loaded
    if given.get("prompts"):
        read_prompts(given["prompts"])
    source = out / "checkpoint" if saved else found(given.get("model", tables[0]["model"][0]))
    if saved and not (source / MODEL_FILE).is_file():
        raise UserError(f"--resume: {source / MODEL_FILE} is missing; put a copy of "
                        f"{out}/skill_library/global_step_N.jsonl there, with the largest N up to {saved['step']}")
    if given["device"] == "cuda":
        check_memory(source, given, tables)
    model = Backbone.load(source, given["device"])
    for parameter in model.model.parameters():
        parameter.data = parameter.data.clone()  # a mapped file's alignment would change the last bit of a product
    args = configure(given, sum(p.numel() for p in model.model.parameters()), *tables)
    if not saved:
        model.check_lengths(args.prompt_tokens, max(args.policy_tokens, args.selection_tokens, args.summary_tokens))
    model.thinking = args.thinking
    library, generator = SkillLibrary.of_model(source), torch.Generator(model.device).manual_seed(args.seed)
    optimizer = ranks.sharded(make_adamw, model.model.parameters(), lr=args.lr, host=args.offload)
    run = Run(args, out, model, optimizer, library, {skill.name for skill in library.skills}, generator)
    if saved:
        if saved["shapes"] != shapes(model):
            raise UserError(f"--resume: the model in {source} is not the one that this run has trained")
        run.optimizer.load_state_dict(saved["optimizer"])
        generator.set_state(saved["generator"])
        with told(f"--resume: {source} is a checkpoint of another version"):
            run.step, run.seeds, library.gains = saved["step"], set(saved["seeds"]), saved["gains"]
    run.settled = generator.get_state()
    if ranks.rank() == 0:
        clear_later_steps(run)
        if args.log == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter  # the package is optional
            run.tensorboard = SummaryWriter(out / "tensorboard", purge_step=run.step + 1)
    ranks.each(None)  # all see the folder as rank 0 has left it
    return run


def what_fits(given, tables) -> str:
    """The answer to --plan: Qwen3's sizes, and --model where it is given. Raises UserError for one that is not there.
    """
    shapes = dict(plan.SHAPES)
    if "model" in given:
        with told(f"--model {given['model']}: no config to plan with"):
            shapes[given["model"]] = plan.shape_of(found(given["model"]))
    return plan.table(shapes, plan.longest(configure({"device": "cuda"} | given, 8e9, *tables)))


def check_memory(source, given, tables):
    """Raise UserError, before anything is loaded, where a step of a model over a billion parameters cannot fit."""
    try:
        shape = plan.shape_of(source)
    except (OSError, ValueError, KeyError):
        return  # a folder without a model, which loading it will tell
    args, memory = configure(given, shape.parameters, *tables), torch.cuda.get_device_properties(0).total_memory
    why_not = plan.refusal(source, shape, ranks.count(), memory, plan.longest(args), args.offload)
    if why_not and shape.parameters >= 1e9:
        raise UserError(why_not)


def clear_later_steps(run):
    """Write the options, and remove what a killed step has left.

    It will be written again, and with a GPU it may turn out otherwise: nothing of it may stay then.
    """
    out = run.out
    claim(out)
    write_atomically(out / "config.json", json.dumps(vars(run.args), indent=1))
    # Without a checkpoint it begins again, with step 0.
    lines = [line for line in read_metrics(out) if line["step"] <= run.step] if (out / "checkpoint").exists() else []
    write_atomically(out / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    for pattern in ("rollouts/*_*.jsonl", "skill_library/global_step_*.jsonl"):
        for step, path in records.numbered(out, pattern):
            if step > run.step:
                path.unlink()
    if run.step == 0 or not (out / "skill_library").is_dir():
        run.library.save_snapshot(out / "skill_library", run.step)


def open_folder(given, changeable) -> tuple[Path, dict | None]:
    """(folder of the run, trainer.pt of its last checkpoint or None where the run begins).

    Completes the options `given` by those of the run that is continued, and by the device. Refuses a folder that holds
    another run, and options that would make the continued run another one.
    """
    resume, named, saved = given.pop("resume", False), given.pop("out", None), None
    if resume and named is None:
        raise UserError("--resume: say which run with --out")
    out = Path(named or ranks.first(time.strftime("runs/%Y%m%d-%H%M%S")))
    if resume:
        folder, new, old = (out / name for name in ("checkpoint", "checkpoint.new", "checkpoint.old"))
        if (out / "config.json").is_file() and ranks.rank() == 0:
            claim(out)
            if old.exists() and not folder.exists():
                (new if new.exists() else old).rename(folder)  # killed between the two renames of save_checkpoint
        ranks.each(None)
        path = folder / "trainer.pt" if folder.exists() else out / "config.json"
        if not path.is_file():
            raise UserError(f"--resume: {path} is missing" if folder.exists() else
                            f"--resume: nothing to resume in {out}")
        with told(f"--resume: {path} is broken"):
            if folder.exists():  # several ranks map one copy, of which each reads its part
                saved = torch.load(path, map_location="cpu", weights_only=True, mmap=ranks.count() > 1)
            config = saved["config"] if saved else json.loads(path.read_text())
        # Killed before its first checkpoint a run begins again; else its steps would be lost.
        if not saved and any(line["step"] for line in read_metrics(out)):
            raise UserError(f"--resume: {folder} is missing, though steps are finished; put it back, or begin another "
                            "run")
        for name, value in given.items():
            if value != config.get(name) and name not in changeable:
                raise UserError(f"--resume: {out} has {flag(name)} {config.get(name)}, not {value}")
        given |= config | given
        if saved and given["steps"] < saved["step"]:
            raise UserError(f"--resume --steps {given['steps']}: {saved['step']} steps are done already")
    elif (out / "checkpoint").exists() or (out / "metrics.jsonl").is_file() and (out / "metrics.jsonl").stat().st_size:
        raise UserError(f"{out} already holds a run: continue it with --resume, or choose another --out")
    given.setdefault("device", "cuda" if torch.cuda.is_available() else "cpu")
    check_device(given["device"])
    ranks.each(None)  # nobody writes into the folder before all have looked
    return out, saved


_locks = []  # open files: a lock lasts as long as its file is open, at most as long as this process


def claim(out):
    """Make this process the only one that writes to a folder. Raises UserError if another does, or if none can."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        _locks.append(open(out / "lock", "w"))
        fcntl.lockf(_locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"--out {out}: another process is writing there") from None
    except OSError as error:
        raise UserError(f"--out {out}: cannot write there ({error.strerror})") from None


SYNTHESISED = {"synth": NARROW, "wide": WIDE}  # --tasks: distributions of problems


def task_stream(args):
    """Training tasks without end, the same for the same options. Raises TaskError when there are none.

    A run that is continued skips those of its complete steps. On a GPU synthesised and built-in problems get a larger
    batch (tasks.scale_batch), so that kernels take long enough to be measured.
    """
    if args.tasks in SYNTHESISED:
        yield from training_tasks(args.seed, SYNTHESISED[args.tasks], args.device)
    listed = builtin_tasks(device=args.device) if args.tasks == "builtin" else folder_tasks(args.tasks)
    rng = random.Random(args.seed)
    while True:
        yield from rng.sample(listed, len(listed))  # every task once, then again in another order


def shapes(model) -> list[list[int]]:
    """The shape of every weight, by which a checkpoint's optimiser state is known to fit."""
    return [list(parameter.shape) for parameter in model.model.parameters()]


# ----------------------------------------------------------------------------------------------------------------------
# The end of a step


def finish_step(run, line):
    """Commit a step: its metrics first, then the checkpoint. Killed before that, all since the old one is repeated.

    line: what metrics.jsonl gets; the seconds of each phase are added to it. Step 0 is the evaluation before training.
    """
    line["seconds"] = {name: round(value, 3) for name, value in run.seconds.items()}
    ranks.each(None)  # the step is complete on all of them
    if ranks.rank() == 0:
        with open(run.out / "metrics.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
    run.settled = run.generator.get_state()
    if run.step % run.args.save_every == 0 or run.step == run.args.steps:
        with uninterrupted():
            save_checkpoint(run)
    if run.tensorboard:
        for name, value in records.numbers(line).items():
            run.tensorboard.add_scalar(name, value, run.step)
        run.tensorboard.flush()
    if ranks.rank() == 0 and (run.step or "eval_fast_1" in line):
        tqdm.write(progress(line, run.args, read_metrics(run.out)[0], run.library), file=sys.stdout)
    if "eval_fast_1" in line and 0 < run.step < run.args.steps and ranks.rank() == 0:
        draw_curves(run)


@contextlib.contextmanager
def saved_on_interrupt(run):
    """Say what a run does, and let Ctrl-C or SIGTERM write a checkpoint of the last complete step, if it has none."""
    args = run.args
    drawn = args.batch * args.oversample  # tasks of a step
    print(f"{run.out}: {args.model} on {args.device}, steps {run.step} to {args.steps}. A step: {drawn} tasks x "
          f"({args.k} + 1) schemes x {args.n} rollouts x {args.turns} turns = "
          f"{drawn * (args.k + 1) * args.n * args.turns} kernels.", flush=True)

    def save():
        if run.settled is not None and run.step % args.save_every and ranks.count() == 1:
            save_checkpoint(run)

    with resumable(f"--out {run.out} --resume continues", save):
        yield


def save_checkpoint(run):
    """A model folder, its skill library, and trainer.pt, of the last complete step.

    A complete checkpoint is there at any instant: the new one is written beside the old one (checkpoint.new), the old
    one steps aside (checkpoint.old), the new one takes its place. A kill between the two renames leaves no folder
    `checkpoint`; open_folder then takes checkpoint.new, which is complete.
    """
    optimizer = run.optimizer.state_dict()
    if ranks.rank() > 0:
        return
    folder, new, old = (run.out / name for name in ("checkpoint", "checkpoint.new", "checkpoint.old"))
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    run.model.save(new)
    run.library.save(new / MODEL_FILE)
    torch.save({"step": run.step, "config": vars(run.args), "seeds": [*run.seeds], "optimizer": optimizer,
                "gains": run.library.gains, "generator": run.settled, "shapes": shapes(run.model)}, new / "trainer.pt")
    for path in new.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def read_metrics(out) -> list[dict]:
    """The lines of a run's metrics.jsonl, each with its step. Raises UserError as read_lines."""
    return read_lines(out / "metrics.jsonl", lambda line: line | {"step": int(line["step"])})


def read_lines(path, record) -> list:
    """`record` of each line of a .jsonl file, but for a last one that a kill has cut off; empty without a file.

    Raises UserError for any other line that cannot be read, or of which no record can be made.
    """
    text, records = path.read_bytes() if path.is_file() else b"", []
    for number, line in enumerate(text[:text.rfind(b"\n") + 1].splitlines(), start=1):
        with told(f"{path}, line {number}: cannot be read; mend or remove it"):
            records.append(record(json.loads(line)))
    return records


# ----------------------------------------------------------------------------------------------------------------------
# Transcripts and curves


def record_rollouts(run, path, episodes):
    """One line for each selection, rollout and summary: every prompt, reply, verdict and rejected proposal.

    A later turn's prompt is what came before it and the `feedback` there, so only the first is written out. Rewards and
    advantages are there, too: what the update was made from can be computed again from these lines alone.
    """
    if ranks.rank() > 0:
        return
    # Many replies answer the same prompt, which is decoded once.
    text = functools.cache(lambda ids: run.model.tokenizer.decode(ids, skip_special_tokens=False))

    def opening(role, completion):
        return {"role": role, "episode": number, "task": e.task.name, "prompt": text(tuple(completion.prompt_ids))}

    def said(completion):
        return {"reply": completion.text, "finished": completion.finished}

    def attempt(turn):
        return said(turn.completion) | {"verdict": turn.verdict, "feedback": feedback(turn.verdict),
                "reward": turn.reward, "advantage": turn.advantage, "masked": turn.masked}

    lines = []
    for number, e in enumerate(episodes):
        lines += [opening("selection", s.completion) | said(s.completion) | {
            "skills": [skill.name for skill in s.skills], "dropped": s.dropped,
            "reward": s.reward, "advantage": s.advantage} for s in e.selections if s.completion]
        lines += [opening("policy", t.turns[0].completion) | {
            "skills": [skill.name for skill in t.skills], "turns": list(map(attempt, t.turns))} for t in e.trajectories]
        lines += [opening("summary", s.completion) | {
            "rollout": next(i for i, t in enumerate(e.trajectories) if t is s.winner),  # of the episode's, from 0
            **said(s.completion), "reward": s.reward, "advantage": s.advantage, "proposals": [
                {"written": p.written, "rejected": p.rejected, "detail": p.detail, "known": p.known,
                 "attempt": p.attempt and attempt(p.attempt), "staged": bool(p.skill) and p.skill is e.staged}
                for p in s.proposals]} for s in e.summaries]
    write_atomically(path, "".join(json.dumps(line, default=vars) + "\n" for line in lines))


def draw_curves(run):
    """curves.png: all curves over the steps, by role, and the seconds of a step."""
    metrics = list(map(records.metrics_record, read_metrics(run.out)))  # not the transcripts, which are large
    drawn = charts.run_charts(records.Source(run.out, metrics=metrics))
    charts.save_png(drawn, run.out / "curves.png", f"{run.out.name}, {run.clock} clock")


# ----------------------------------------------------------------------------------------------------------------------
# The page


def write_page(folders, path) -> list:
    """One HTML file that shows a run or a benchmark, or two of them side by side. Raises UserError.

    Returns what it shows, a page.records.Source for each folder.
    """
    try:
        sources = [records.read_folder(folder) for folder in folders]
        write_atomically(path, render(sources, REASONS))
    except OSError as error:
        raise UserError(str(error)) from None
    return sources


def finish_run(run):
    """Draw the curves, write the page, and say in words what was learnt."""
    if ranks.rank() > 0:
        return
    draw_curves(run)
    [source] = write_page([run.out], run.out / "report.html")
    print("\n".join(records.lessons(source)))
    print(f"done: {run.out}/report.html, {run.out}/curves.png, {run.out}/metrics.jsonl, {run.out}/checkpoint/")


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description="A run or a benchmark as one HTML page, or two side by side.",
                                     usage=argparse.SUPPRESS)
    parser.add_argument("folder", metavar="DIR", help="--out of reinforce.py or of bench.py")
    parser.add_argument("beside", metavar="DIR", nargs="?", help="a second one, to be shown beside it")
    parser.add_argument("--out", metavar="FILE", help="default: DIR/report.html, for two comparison.html in the first")
    options = parser.parse_args(argv)
    path = Path(options.out or Path(options.folder, "comparison.html" if options.beside else "report.html"))
    write_page([options.folder, options.beside] if options.beside else [options.folder], path)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    run_command(main)

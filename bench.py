"""How good is a checkpoint with its library?  Fast_p over a level of KernelBench, or of the built-in problems.

    python bench.py --level 1 [--model checkpoints/tiny] [--kernelbench DIR] [--no-skills] [--out DIR]

As the paper evaluates: one greedy selection for each task, its skills injected, T = 3 turns, 8 samples a task. A sample
is judged by its best turn. Everything is a share of *all* problems asked for; one that cannot be used counts as failed,
with the reason.

    correct         share of samples with a correct turn
    Fast_p          share of samples with a correct turn whose speedup is above p
    geometric mean  of the speedups of the correct samples' best turns

Each at two tolerances (1e-4, which KernelBench uses today, and 1e-2, which papers up to early 2026 used), as the mean
over samples and for the best of a task's samples, after one turn and after all of them, and under two rules:

    strict     a win needs own kernels that do work (coverage above 0) and the *lower end* of the speedup's 95 %
               interval above p; an unchanged torch call at 1.00 +/- 0.01 is no win
    customary  the speedup's estimate above p, as usually counted

The reference is eager PyTorch; `--baseline compile` reports against torch.compile as well (GPU only). Speedups are
measured on a GPU and modelled without one; a report says which, and results of the two never meet in one folder.

What it leaves in --out: results.jsonl, one line a sample with every reply and verdict, from which a rerun of the same
command goes on; summary.json, all figures with command, seed, hardware and versions; fast_p.png.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch: waiting threads spin for microseconds, then sleep

import argparse
import hashlib
import json
import math
import platform
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from backbone import Backbone, ModelError
from policy import rollout, score_pairs
from sandbox import KernelTime, Sandbox, Verdict
from selector import select
from skills import SkillLibrary, write_atomically
from tasks import TaskError, builtin_tasks, kernelbench_tasks

THRESHOLDS = (1.0, 1.2, 1.5, 2.0)  # the p of Fast_p
TOLERANCES = (1e-4, 1e-2)
RULES = ("strict", "customary")
# What became of a sample, best first; `kind` has the definitions.
KINDS = ("faster", "correct", "rejected", "wrong", "broken", "no code", "unusable")


class BenchError(ValueError):
    """A run that cannot start or go on. The message is one line, fit to be shown to the user."""


# ----------------------------------------------------------------------------------------------------------------------
# Records: what a line of results.jsonl holds


@dataclass
class Attempt:
    """One turn of a sample."""

    reply: str  # everything that the policy wrote
    has_code: bool
    verdict: Verdict  # against eager PyTorch
    against_compile: Verdict | None = None  # with --baseline compile, for correct turns


@dataclass
class Sample:
    """One rollout on one problem."""

    task: str
    index: int  # 0 .. samples - 1
    skills: list[str]  # names of the skills in the prompt
    turns: list[Attempt]


def sample_from_json(line) -> Sample:
    """A line of results.jsonl. Raises ValueError, KeyError or TypeError when it is none."""

    def verdict(entry):
        return entry and Verdict(**{**entry, "profile": [KernelTime(**kernel) for kernel in entry["profile"]]})

    record = json.loads(line)
    turns = [Attempt(turn["reply"], turn["has_code"], verdict(turn["verdict"]), verdict(turn["against_compile"]))
             for turn in record["turns"]]
    return Sample(record["task"], record["index"], record["skills"], turns)


def read_results(path) -> dict:
    """{(task, index): Sample} of a results.jsonl; empty when there is none.

    A run that was killed while it wrote leaves a last line without its end: that line is cut off. Raises BenchError for
    any other line that cannot be read.
    """
    if not path.is_file():
        return {}
    text = path.read_bytes()
    whole = text[:text.rfind(b"\n") + 1]
    if whole != text:
        with open(path, "r+b") as file:
            file.truncate(len(whole))
    results = {}
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            sample = sample_from_json(line)
        except (ValueError, KeyError, TypeError) as error:
            raise BenchError(f"{path}, line {number}: not a result ({type(error).__name__}: {error})") from None
        results[sample.task, sample.index] = sample
    return results


# ----------------------------------------------------------------------------------------------------------------------
# Figures


def speed(attempt, baseline="eager", tolerance=1e-4, rule="customary") -> float:
    """The speedup that a turn is credited with; 0.0 when it is not correct (or, by the strict rule, no certain gain).

    A turn that is right to 1e-2 only has no speedup of its own in the verdict, but its times are there. Their ratio has
    no interval, so on the measured clock the strict rule gives it nothing.
    """
    verdict = attempt.verdict
    if verdict.rejected or not (verdict.correct if tolerance < 1e-3 else verdict.correct_loose):
        return 0.0
    if rule == "strict" and not verdict.coverage:
        return 0.0
    timed = verdict if baseline == "eager" else attempt.against_compile
    if timed is None:
        return 0.0
    estimate, low = timed.speedup, timed.speedup_low
    if estimate is None and timed.reference_ms and timed.candidate_ms:
        estimate = timed.reference_ms / timed.candidate_ms
        low = estimate if timed.clock == "modelled" else 0.0
    return (low if rule == "strict" else estimate) or 0.0


def is_correct(attempt, tolerance=1e-4) -> bool:
    verdict = attempt.verdict
    return not verdict.rejected and (verdict.correct if tolerance < 1e-3 else verdict.correct_loose)


def kind(sample) -> str:
    """What became of a sample, by the best of its turns at 1e-4: one of KINDS.

    faster: a strict win at 1; correct: correct without that; rejected: a detected cheat; wrong: compiles, but fails or
    gives other values; broken: does not compile; no code: no reply held a ModelNew; unusable: the problem's fault.
    """
    kinds = []
    for attempt in sample.turns:
        verdict = attempt.verdict
        if is_correct(attempt):
            kinds.append("faster" if speed(attempt, rule="strict") > 1 else "correct")
        elif verdict.rejected:
            kinds.append("rejected")
        elif not attempt.has_code:
            kinds.append("no code")
        elif (verdict.error or "").startswith("unusable task"):
            kinds.append("unusable")
        else:
            kinds.append("wrong" if verdict.compiled else "broken")
    return min(kinds, key=KINDS.index)


def figures(samples, turns, baseline, tolerance, rule, best_of=False) -> dict:
    """correct, Fast_p and geometric mean after `turns` turns. `samples`: {task: [Sample, ...]}, the same number each.

    best_of: a task counts once, with the best of its samples; otherwise every sample counts.
    """
    right, credited, speedups = [], [], []  # one entry for each sample, or for each task
    for rows in samples.values():
        tries = [sample.turns[:turns] for sample in rows]
        tries = [[attempt for taken in tries for attempt in taken]] if best_of else tries
        for taken in tries:
            right.append(any(is_correct(attempt, tolerance) for attempt in taken))
            credited.append(max(speed(attempt, baseline, tolerance, rule) for attempt in taken))
            speedups.append(max(speed(attempt, baseline, tolerance) for attempt in taken))
    timed = [math.log(value) for value in speedups if value > 0]
    row = {"baseline": baseline, "tolerance": tolerance, "rule": rule, "turns": turns,
           "of": "best sample" if best_of else "mean of samples", "correct": sum(right) / len(right)}
    row.update({f"fast_{p:g}": sum(value > p for value in credited) / len(credited) for p in THRESHOLDS})
    row["geometric_mean"] = math.exp(sum(timed) / len(timed)) if timed else None
    return row


def summarise(samples, turns, baselines) -> dict:
    """All figures of a level, and what became of each problem. Raises BenchError when the clocks are mixed."""
    clocks = {attempt.verdict.clock for rows in samples.values() for sample in rows for attempt in sample.turns}
    if len(clocks) != 1:
        raise BenchError("measured and modelled results are mixed in results.jsonl; they are not comparable")
    rows = [figures(samples, t, baseline, tolerance, rule, best_of)
            for baseline in baselines for best_of in (False, True) for t in range(turns, 0, -1)
            for tolerance in TOLERANCES for rule in RULES]
    problems = {}
    for task, group in samples.items():
        best = max((attempt for sample in group for attempt in sample.turns), key=speed)
        errors = Counter(attempt.verdict.rejected or attempt.verdict.error for sample in group
                         for attempt in sample.turns if not attempt.verdict.correct)
        problems[task] = {"kinds": dict(Counter(map(kind, group))), "skills": group[0].skills,
                          "best_speedup": speed(best) or None, "coverage": best.verdict.coverage,
                          "most_common_error": errors.most_common(1)[0][0] if errors else None}
    kinds = Counter(kind(sample) for group in samples.values() for sample in group)
    return {"clock": clocks.pop(), "figures": rows, "kinds": dict(kinds), "problems": problems}


# ----------------------------------------------------------------------------------------------------------------------
# The run


def evaluate(model, library, sandbox, compiled, tasks, options, done, path):
    """Roll out every sample that is not in `done`, appending to `path` batch by batch; returns all of them.

    library None injects no skills; `compiled` is a sandbox with torch.compile as its reference, or None. The random
    numbers of a batch depend on the seed and its tasks alone, so an interrupted run ends with what it would have given
    (without a GPU, where nothing depends on when verdicts come).
    """
    samples = {task.name: [] for task in tasks}
    size = max(1, options.batch // options.samples)  # tasks in a batch
    started, finished = time.time(), 0
    show_progress(0, len(tasks), "starting")
    for first in range(0, len(tasks), size):
        batch = tasks[first:first + size]
        finished += len(batch)
        if any((task.name, i) not in done for task in batch for i in range(options.samples)):
            fresh = evaluate_batch(model, library, sandbox, compiled, batch, options)
            fresh = [sample for sample in fresh if (sample.task, sample.index) not in done]
            with open(path, "a") as file:  # a batch at a time, so that a killed run loses one at most
                file.write("".join(json.dumps(asdict(sample)) + "\n" for sample in fresh))
                file.flush()
                os.fsync(file.fileno())
            done.update({(sample.task, sample.index): sample for sample in fresh})
        for task in batch:
            samples[task.name] = [done[task.name, i] for i in range(options.samples)]
        so_far = [kind(sample) for group in samples.values() for sample in group]
        correct = so_far.count("faster") + so_far.count("correct")
        show_progress(finished, len(tasks),
                      f"{correct} of {len(so_far)} samples correct, {time.time() - started:.0f} s")
    return samples


def evaluate_batch(model, library, sandbox, compiled, tasks, options) -> list[Sample]:
    """All samples of some tasks: select once, roll out, and time what is correct against torch.compile if asked to."""
    chosen = [()] * len(tasks)
    if library is not None:
        selections = select(model, library, tasks, k=1, temperature=0, max_new_tokens=min(1024, options.max_new_tokens),
                            max_prompt_tokens=options.max_prompt_tokens)
        chosen = [selection.skills for (selection,) in selections]
    names = "\n".join([str(options.seed)] + [task.name for task in tasks])
    generator = torch.Generator(options.device).manual_seed(int(hashlib.sha256(names.encode()).hexdigest()[:15], 16))
    jobs = [(task, skills) for task, skills in zip(tasks, chosen) for _ in range(options.samples)]
    trajectories = rollout(model, sandbox, jobs, options.turns, options.max_new_tokens, options.max_prompt_tokens,
                           temperature=0.0 if options.samples == 1 else options.temperature, generator=generator)
    samples = []
    for i, trajectory in enumerate(trajectories):
        attempts = [Attempt(turn.completion.text, turn.code is not None, turn.verdict) for turn in trajectory.turns]
        samples.append(Sample(trajectory.task.name, i % options.samples, [s.name for s in trajectory.skills], attempts))
    if compiled is not None:
        again = [(attempt, trajectory.task, turn.code) for sample, trajectory in zip(samples, trajectories)
                 for attempt, turn in zip(sample.turns, trajectory.turns) if is_correct(attempt, max(TOLERANCES))]
        verdicts = score_pairs(compiled, [(task, code) for _, task, code in again])
        for (attempt, _, _), verdict in zip(again, verdicts):
            attempt.against_compile = verdict
    return samples


def show_progress(done, total, text):
    """One line that is rewritten on a terminal; a line each elsewhere."""
    bar = "#" * (24 * done // total)
    line = f"[{bar:<24}] {done}/{total} problems, {text}"
    if sys.stderr.isatty():
        print(f"\r{line}", end="\n" if done == total else "", file=sys.stderr, flush=True)
    else:
        print(line, file=sys.stderr, flush=True)


# ----------------------------------------------------------------------------------------------------------------------
# Reports


def table(summary) -> str:
    """summary.json as text: what was run, the figures in percent, and a line for each problem."""
    config, clock = summary["config"], summary["clock"]
    lines = [f"{config['source']}, level {config['level']}: {len(config['problems'])} of {config['problems_in_level']} "
             f"problems, {config['samples']} samples of at most {config['turns']} turns each, {summary['skills']}",
             f"{config['model']} on {summary['hardware']}; speedups are {clock}"]
    for baseline in config["baselines"]:
        reference = "torch.compile" if baseline == "compile" else "eager PyTorch"
        lines += ["", f"{f'% of all problems, {clock} against {reference}':<52}{'correct':>8}"
                  + "".join(f"{f'Fast_{p:g}':>10}" for p in THRESHOLDS) + f"{'geo. mean':>11}"]
        for row in summary["figures"]:
            if row["baseline"] != baseline or row["turns"] not in (1, config["turns"]):
                continue  # the turns between are in summary.json and in the plot
            if row["of"] == "best sample" and (config["samples"] == 1 or row["turns"] < config["turns"]):
                continue
            turns = "first turn" if row["turns"] == 1 else f"{row['turns']} turns"
            tolerance = "1e-4" if row["tolerance"] == 1e-4 else "1e-2"
            mean = "-" if row["geometric_mean"] is None else f"{row['geometric_mean']:.2f}x"
            lines.append(f"  {row['of']:<17}{turns:<12}{tolerance:<6}{row['rule']:<15}{100 * row['correct']:>8.1f}"
                         + "".join(f"{100 * row[f'fast_{p:g}']:>10.1f}" for p in THRESHOLDS) + f"{mean:>11}")
    lines += ["", f"{'problem':<52}{'best':>8}  what became of its samples"]
    for task, problem in summary["problems"].items():
        best = f"{problem['best_speedup']:.2f}x" if problem["best_speedup"] else "-"
        kinds = ", ".join(f"{problem['kinds'][k]} {k}" for k in KINDS if k in problem["kinds"])
        error = "" if problem["best_speedup"] else f": {problem['most_common_error']}"
        lines.append(f"  {task[:49]:<50}{best:>8}  {kinds}{error}"[:160])
    return "\n".join(lines)


def plot(summary, samples, path):
    """Two panels: Fast_p against p under both rules, and the gain from turn to turn."""
    import matplotlib  # only here: it takes a second to import
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    config = summary["config"]
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    grid = np.linspace(0.5, 4, 141)
    for baseline, style in zip(config["baselines"], ("-", "--")):
        for rule, colour, width in zip(RULES, ("tab:blue", "tab:orange"), (2.5, 1.2)):  # both stay visible if equal
            credited = [max(speed(attempt, baseline, 1e-4, rule) for attempt in sample.turns)
                        for rows in samples.values() for sample in rows]
            share = [100 * sum(value > p for value in credited) / len(credited) for p in grid]
            left.plot(grid, share, style, color=colour, linewidth=width, label=f"{rule}, against {baseline}")
    left.set(xlabel="p", ylabel="Fast_p, % of samples", ylim=(0, 100),
             title=f"speedup {summary['clock']}, tolerance 1e-4")
    rows = [row for row in summary["figures"] if row["baseline"] == "eager" and row["of"] == "mean of samples"
            and row["tolerance"] == 1e-4 and row["rule"] == "strict"]
    for key in ["correct"] + [f"fast_{p:g}" for p in THRESHOLDS]:
        right.plot([row["turns"] for row in rows], [100 * row[key] for row in rows], "o-",
                   label=key.replace("fast", "Fast"))
    right.set(xlabel="turns", ylabel="% of samples", ylim=(0, 100), title="by turns, strict, against eager",
              xticks=range(1, config["turns"] + 1))
    for axis in (left, right):
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    fig.suptitle(f"{config['source']}, level {config['level']}: {config['model']}, {summary['skills']}", fontsize=10)
    fig.savefig(path, dpi=120)
    plt.close(fig)


def hardware(device) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    name, info = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.is_file() else []:
        if line.startswith("model name"):
            name = line.split(":")[1].strip()
    return f"{name}, {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores"


def versions() -> dict:
    import transformers
    import triton
    return {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__,
            "transformers": transformers.__version__}


# ----------------------------------------------------------------------------------------------------------------------
# Command line


def choose(tasks, ids) -> list:
    """The tasks that --ids names: "5,10,15", "1-20", "every5" (ids divisible by 5) or a mixture; all when it is None.

    A task's id is the number that its file name begins with. Raises BenchError for anything else, or an id that is not
    there.
    """
    if ids is None:
        return tasks
    numbers = {int(task.name.split("/")[-1].split("_")[0]): task for task in tasks}
    wanted = set()
    for part in ids.replace(" ", "").split(","):
        first, dash, last = part.partition("-")
        if part.startswith("every") and part[5:].isdecimal() and int(part[5:]):
            wanted |= {number for number in numbers if number % int(part[5:]) == 0}
        elif first.isdecimal() and (last.isdecimal() if dash else True):
            span = range(int(first), int(last if dash else first) + 1)
            missing = [number for number in span if number not in numbers]
            if missing:
                raise BenchError(f"--ids {ids}: there is no problem {missing[0]} in this level")
            wanted |= set(span)
        else:
            raise BenchError(f"--ids {ids}: cannot read '{part}' (write 5,10,15 or 1-20 or every5)")
    if not wanted:
        raise BenchError(f"--ids {ids}: no problem of this level is meant by that")
    return [numbers[number] for number in sorted(wanted)]


def digest_of_model(model) -> str:
    """Tells two states of a model folder apart: sizes, first and last megabyte of each weight file, and the library."""
    digest = hashlib.sha256()
    for path in sorted(Path(model).glob("*")) if Path(model).is_dir() else []:
        if path.suffix in (".safetensors", ".bin", ".jsonl"):
            with open(path, "rb") as file:
                size = path.stat().st_size
                digest.update(f"{path.name} {size}".encode() + file.read(1 << 20))
                file.seek(max(0, size - (1 << 20)))
                digest.update(file.read())
    return digest.hexdigest()[:16]


def claim(out, config):
    """Make `out` the folder of this configuration. Raises BenchError when it cannot be, or belongs to another one."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not (out / "config.json").is_file():
            if (out / "results.jsonl").exists():
                raise BenchError(f"{out}: holds results without their config.json; choose another --out")
            write_atomically(out / "config.json", json.dumps(config, indent=1) + "\n")
            return
        before = json.loads((out / "config.json").read_text())
    except OSError as error:
        raise BenchError(f"{out}: cannot be used as --out ({error.strerror or error})") from None
    except ValueError:
        raise BenchError(f"{out}/config.json: not valid JSON") from None
    changed = [key for key in config if not isinstance(before, dict) or before.get(key) != config[key]]
    if changed:
        raise BenchError(f"{out}: holds results of another configuration ({', '.join(changed)} changed); "
                         "choose another --out")


def parse(arguments=None):
    parser = argparse.ArgumentParser(description="Fast_p of a checkpoint with its skill library.")
    problems = parser.add_argument_group("problems")
    problems.add_argument("--level", type=int, choices=[1, 2, 3], required=True, help="KernelBench's level")
    problems.add_argument("--kernelbench", metavar="DIR", help="KernelBench checkout (default: built-in problems)")
    problems.add_argument("--ids", help="only these: 5,10,15 or 1-20 or every5 (default: the whole level)")
    policy = parser.add_argument_group("model and rollouts")
    policy.add_argument("--model", default="checkpoints/tiny", help="model folder or hub id (default: %(default)s)")
    policy.add_argument("--no-skills", action="store_true", help="ablation: inject no skills")
    policy.add_argument("--samples", type=int, default=8, help="samples a task; 1 is greedy (default: %(default)s)")
    policy.add_argument("--turns", type=int, default=3,
                        help="T: attempts in a sample, each seeing the last one's verdict (default: %(default)s)")
    policy.add_argument("--temperature", type=float, default=1.0,
                        help="of the policy, with more than one sample (default: %(default)s)")
    policy.add_argument("--max-new-tokens", type=int,
                        help="longest reply (paper: 8192; default: a quarter of the model's context, at most 8192)")
    policy.add_argument("--max-prompt-tokens", type=int,
                        help="longest prompt (paper: 24576; default: the rest of the model's context)")
    scoring = parser.add_argument_group("scoring")
    scoring.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu",
                         help="cuda measures, cpu models the time (default: cuda where there is a GPU)")
    scoring.add_argument("--baseline", choices=["eager", "compile"], default="eager",
                         help="compile: report against torch.compile as well (default: %(default)s)")
    scoring.add_argument("--timeout", type=float, default=60.0, help="seconds for a candidate (default: %(default)s)")
    run = parser.add_argument_group("run")
    run.add_argument("--out", metavar="DIR",
                     help="results folder, where a rerun goes on (default: runs/bench_level<L>, with _no_skills)")
    run.add_argument("--seed", type=int, default=0,
                     help="of sampling and of the problems' inputs (default: %(default)s)")
    run.add_argument("--batch", type=int, help="rollouts at a time (default: 32 on a CPU, 256 on a GPU)")
    return parser.parse_args(arguments)


def start(options):
    """Check the options, load what they name. Returns (tasks, all tasks of the level, model, library, config)."""
    for name in ("samples", "turns", "batch", "timeout", "max_new_tokens", "max_prompt_tokens", "temperature"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise BenchError(f"--{name.replace('_', '-')} {value}: must be above 0")
    options.batch = options.batch or (256 if options.device == "cuda" else 32)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise BenchError("--device cuda: no GPU is available here")
    if options.baseline == "compile" and options.device == "cpu":
        raise BenchError("--baseline compile: needs a GPU; torch.compile has no modelled clock")
    level = (kernelbench_tasks(options.kernelbench, options.level) if options.kernelbench
             else builtin_tasks(options.level, options.device))
    tasks = choose(level, options.ids)
    model = Backbone.load(options.model, options.device)
    library = None if options.no_skills else SkillLibrary.of_model(options.model)
    context = getattr(model.model.config.get_text_config(), "max_position_embeddings", None) or 32768
    options.max_new_tokens = options.max_new_tokens or min(8192, context // 4)
    options.max_prompt_tokens = options.max_prompt_tokens or context - options.max_new_tokens
    if options.max_prompt_tokens + options.max_new_tokens > context:
        raise BenchError(f"--max-prompt-tokens {options.max_prompt_tokens} and --max-new-tokens "
                         f"{options.max_new_tokens}: together more than the model's context of {context} tokens")
    # Everything that changes a result; --batch and --timeout too, which shape the random numbers and the verdicts.
    names = ("level", "ids", "model", "no_skills", "samples", "turns", "temperature", "max_new_tokens",
             "max_prompt_tokens", "device", "baseline", "timeout", "seed", "batch")
    config = {name: getattr(options, name) for name in names}
    config.update(
        source="KernelBench" if options.kernelbench else "built-in problems", weights=digest_of_model(options.model),
        baselines=["eager", "compile"] if options.baseline == "compile" else ["eager"], problems_in_level=len(level),
        problems={task.name: hashlib.sha256(task.source.encode()).hexdigest()[:16] for task in tasks})
    return tasks, model, library, config


def main(arguments=None):
    options = parse(arguments)
    try:
        tasks, model, library, config = start(options)
        out = Path(options.out or f"runs/bench_level{options.level}{'_no_skills' if options.no_skills else ''}")
        claim(out, config)
        done = read_results(out / "results.jsonl")
        if done:
            print(f"{out}: {len(done)} of {len(tasks) * options.samples} samples are there already", file=sys.stderr)
        if options.kernelbench and options.device == "cpu":
            print("KernelBench's sizes are meant for a GPU: here many problems will time out", file=sys.stderr)
        settings = {"timeout": options.timeout, "seed": options.seed, "tasks": 1 if options.kernelbench else 4}
        started = time.time()
        with Sandbox(options.device, **settings) as sandbox:
            if options.baseline == "compile":
                with Sandbox(options.device, baseline="compile", **settings) as compiled:
                    samples = evaluate(model, library, sandbox, compiled, tasks, options, done, out / "results.jsonl")
            else:
                samples = evaluate(model, library, sandbox, None, tasks, options, done, out / "results.jsonl")
        summary = {"command": " ".join(["python", "bench.py"] + (sys.argv[1:] if arguments is None else arguments)),
                   "config": config, "seed": options.seed, "hardware": hardware(options.device), "versions": versions(),
                   "skills": "no skills" if library is None else f"skills out of {len(library)}",
                   "seconds_of_last_run": round(time.time() - started, 1),
                   **summarise(samples, options.turns, config["baselines"])}
        write_atomically(out / "summary.json", json.dumps(summary, indent=1) + "\n")
        plot(summary, samples, out / "fast_p.png")
    except (BenchError, TaskError, ModelError) as error:
        print(f"bench.py: error: {error}", file=sys.stderr)
        return 2
    print(table(summary))
    print(f"\nresults.jsonl, summary.json and fast_p.png are in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

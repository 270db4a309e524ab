"""How good is a checkpoint with its library?  Fast_p over a level of KernelBench, or of the built-in problems.

    python bench.py --level 1 [--model checkpoints/tiny] [--kernelbench DIR] [--no-skills] [--out DIR]

As the paper evaluates: one greedy selection for each task, its skills injected, T = 3 turns, 8 samples a task. A sample
is judged by its best turn. Everything is a share of *all* problems asked for; one that cannot be used counts as failed,
with the reason. (A share of the solved problems alone would rise when a model fails on the hard ones.)

    correct         share of samples with a correct turn
    Fast_p          share of samples with a correct turn whose speedup is above p (KernelBench; the release counts p
                    itself too): is a kernel worth using at all, and does it halve the time?
    geometric mean  of the speedups of the correct samples' best turns; failed samples are not in it, so it says how
                    good the kernels are, and only together with `correct` how good the model is

    mean of samples, best sample    what one try gives, and what the best of a task's tries gives (pass@1, pass@8)
    last turn                       the T-th turn alone (Dr. Kernel), beside the best of T
    least likely, most likely       one of a task's correct attempts, chosen by its log-probability and no clock
    first turn, T turns             without feedback and with it; the difference is what the verdicts were worth
    tolerance 1e-4, 1e-2            what KernelBench uses today, and what papers up to early 2026 used: at 1e-2 a kernel
                                    that computes in half precision can pass as correct

Two rules, since the standard one lets a model win by doing nothing:

    standard   KernelBench's: the speedup's estimate is above p. An unchanged torch call, timed twice, is as fast as the
               reference give or take a percent, so about half of such answers count for Fast_1.
    strict     a win needs own kernels that do work (coverage above 0) and the *lower end* of the speedup's 95 %
               interval above p; an unchanged torch call at 1.00 +/- 0.01 is no win

The reference is eager PyTorch; `--baseline compile` reports against torch.compile as well (GPU only). Speedups are
measured on a GPU and modelled without one; a report says which, and results of the two never meet in one folder.

`--strategy` says what an attempt sees of those before it; `--compare-strategies` runs all at equal budgets.

What it leaves in --out: results.jsonl, one line a sample with every reply and verdict, from which a rerun of the same
command goes on; summary.json, all figures with command, seed, hardware and versions; fast_p.png; report.html.
"""

from tasks import (UserError, builtin_tasks, check_device, check_numbers, chosen_tasks, found, kernelbench_tasks,
                   resumable, run_command, without_a_gpu)  # before torch, see there

import argparse
import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tqdm import tqdm

from backbone import Backbone
from chat.prompts import read_prompts
from fast import ranks
from page import charts, strategies
from page.levels import machine, table, title
from policy import Strategy, best_window, latest, not_judged, nothing, ranked_parent, rollout, score_pairs
from report import claim, read_lines, write_page
from sandbox import PRECISE, Sandbox, Verdict, verdict_from_json
from selector import select
from skills import SkillLibrary, write_atomically

THRESHOLDS = (1.0, 1.2, 1.5, 2.0)  # the p of Fast_p
TOLERANCES = (1e-4, 1e-2)  # how far a value may be off, relative to its size
RULES = ("strict", "standard")  # for what counts as a win; see above
OF = ("mean of samples", "last turn", "best sample", "least likely", "most likely")  # what counts once; see `counted`
# What became of a sample, best first; `kind` has the definitions.
KINDS = ("faster", "correct", "rejected", "wrong", "broken", "no code", "unusable")
STRATEGIES = {  # what a sample's attempts see of those before them; policy.py has the parts
    "parallel": Strategy(show=nothing),  # independent attempts
    "serial": Strategy(show=best_window),  # the paper's: feedback on earlier attempts, sequential scaling with 14 turns
    "judge": Strategy(show=latest, judge="rule"),  # CudaForge: somebody names one bottleneck of the last attempt
    "evolve": Strategy(show=ranked_parent, only_new=True),  # EvoEngineer: an archive of correct kernels, and parents
}


@dataclass
class Attempt:
    """One turn of a sample, in a line of results.jsonl."""

    reply: str  # everything that the policy wrote
    has_code: bool  # whether a ModelNew could be read out of it
    verdict: Verdict  # against eager PyTorch
    against_compile: Verdict | None = None  # with --baseline compile, for correct turns
    tokens: int = 0  # sampled for it, those of a judge included
    logprob: float = 0.0  # of the reply, mean over its tokens
    advice: str = ""  # what a judge said after it
    repeats: bool = False  # an earlier attempt had the same kernel; this one was not scored


@dataclass
class Sample:
    """One rollout on one problem."""

    task: str  # name of the problem
    index: int  # 0 .. samples - 1
    skills: list[str]  # names of the skills in the prompt
    turns: list[Attempt]  # what each has seen of those before it is the strategy's

    @property
    def scored(self) -> list[Attempt]:
        """The attempts that count: not those that only repeat an earlier one."""
        return [attempt for attempt in self.turns if not attempt.repeats]


def read_results(path, mend=False) -> dict:
    """{(task, index): Sample} of a results.jsonl; empty when there is none.

    A run that was killed while it wrote leaves a last line without its end, which does not count; mend: cut it off.
    Raises UserError for any other line that cannot be read.
    """
    samples = read_lines(path, sample_record)
    if mend and path.is_file():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    return {(sample.task, sample.index): sample for sample in samples}


def sample_record(line) -> Sample:
    """The Sample that a line of results.jsonl was written from."""
    turns = [turn | {"verdict": verdict_from_json(turn["verdict"])} for turn in line["turns"]]
    for turn in turns:
        turn["against_compile"] = turn["against_compile"] and verdict_from_json(turn["against_compile"])
    return Sample(**line | {"turns": [Attempt(**turn) for turn in turns]})


# ----------------------------------------------------------------------------------------------------------------------
# Figures

def is_correct(attempt, tolerance=1e-4) -> bool:
    """Whether a turn counts as correct. A detected cheat never does."""
    verdict = attempt.verdict
    return not verdict.rejected and (verdict.correct if tolerance < 1e-3 else verdict.correct_loose)


def speed(attempt, baseline="eager", tolerance=1e-4, rule="standard") -> float:
    """The speedup that a turn is credited with; 0.0 when it is not correct (or, by the strict rule, no certain gain).

    A turn that is right to 1e-2 only has no speedup of its own in the verdict, but its times are there. Their ratio has
    no interval, so on the measured clock the strict rule gives it nothing.
    """
    timed = attempt.verdict if baseline == "eager" else attempt.against_compile
    if timed is None or not is_correct(attempt, tolerance) or rule == "strict" and not attempt.verdict.coverage:
        return 0.0
    estimate, low = timed.speedup, timed.speedup_low  # low: the lower end of its 95 % interval
    if estimate is None and timed.reference_ms and timed.candidate_ms:
        estimate = timed.reference_ms / timed.candidate_ms
        low = estimate if timed.clock == "modelled" else 0.0  # a modelled time has no spread
    return (low if rule == "strict" else estimate) or 0.0


def kind(sample) -> str:
    """What became of a sample, by the best of its turns at 1e-4: one of KINDS.

    faster: a strict win at 1; correct: correct without that; rejected: a detected cheat; wrong: compiles, but fails or
    gives other values; broken: does not compile; no code: no reply held a ModelNew; unusable: the problem's fault.
    """
    kinds = []
    for attempt in sample.scored:
        verdict = attempt.verdict
        if is_correct(attempt):
            kinds.append("faster" if speed(attempt, rule="strict") > 1 else "correct")
        elif verdict.rejected:
            kinds.append("rejected")
        elif (verdict.error or "").startswith("unusable task"):
            kinds.append("unusable")
        elif not attempt.has_code:
            kinds.append("no code")
        else:
            kinds.append("wrong" if verdict.compiled else "broken")
    return min(kinds, key=KINDS.index)


def counted(tries, of, tolerance) -> list[list[Attempt]]:
    """What counts as one answer to a task: lists of attempts, of which the best one counts. `of`: one of OF.

    tries: the attempts of each of the task's samples. The last two choose among its correct attempts without a clock,
    by the mean log-probability that the model gave their tokens.
    """
    if of == "mean of samples":
        return tries
    if of == "last turn":
        return [attempts[-1:] for attempts in tries]
    together = sum(tries, [])
    if of == "best sample":
        return [together]
    correct = [attempt for attempt in together if is_correct(attempt, tolerance)]
    choose = min if of == "least likely" else max
    return [[choose(correct, key=lambda attempt: attempt.logprob)] if correct else []]


def figures(samples, turns, baseline, tolerance, rule, of="mean of samples") -> dict:
    """correct, Fast_p and geometric mean after `turns` turns. samples: {task: [Sample, ...]}, the same number each."""
    groups = []
    for rows in samples.values():
        groups += counted([sample.scored[:turns] for sample in rows], of, tolerance)
    right = [any(is_correct(attempt, tolerance) for attempt in group) for group in groups]
    credited = [max((speed(attempt, baseline, tolerance, rule) for attempt in group), default=0.0) for group in groups]
    estimates = [max((speed(attempt, baseline, tolerance) for attempt in group), default=0.0) for group in groups]
    speeds = [value for value in estimates if value > 0]  # of the correct ones, whatever the rule
    return {"baseline": baseline, "tolerance": tolerance, "rule": rule, "turns": turns, "of": of,
            "correct": sum(right) / len(groups),
            **{f"fast_{p:g}": sum(value > p for value in credited) / len(groups) for p in THRESHOLDS},
            "geometric_mean": statistics.geometric_mean(speeds) if speeds else None}


def all_figures(samples, turns, baselines) -> dict:
    """All figures of a level, and what became of each problem. Raises UserError when the clocks are mixed."""
    choices = itertools.product(baselines, OF, range(turns, 0, -1), TOLERANCES, RULES)
    rows = [figures(samples, t, baseline, tolerance, rule, of) for baseline, of, t, tolerance, rule in choices]
    problems, kinds, clocks = {}, Counter(), set()
    for task, group in samples.items():
        attempts = [attempt for sample in group for attempt in sample.scored]
        best = max(attempts, key=speed)  # by the standard rule, against eager PyTorch
        errors = Counter(a.verdict.rejected or a.verdict.error for a in attempts if not a.verdict.correct)
        became = Counter(sorted(map(kind, group), key=KINDS.index))
        problems[task] = {"kinds": dict(became), "skills": group[0].skills, "best_speedup": speed(best) or None,
                          "coverage": best.verdict.coverage,
                          "most_common_error": errors.most_common(1)[0][0] if errors else None}
        kinds += became
        clocks |= {attempt.verdict.clock for attempt in attempts}
    if len(clocks) != 1:
        raise UserError("measured and modelled results are mixed in results.jsonl; they are not comparable")
    return {"clock": clocks.pop(), "figures": rows, "kinds": dict(kinds), "problems": problems}


# ----------------------------------------------------------------------------------------------------------------------
# The run

def evaluate(model, library, sandbox, compiled, tasks, options, done, path) -> dict:
    """Roll out every sample that is not in `done`, appending to `path` task by task. Returns {task: [Sample, ...]}.

    library: None injects no skills. compiled: a sandbox with torch.compile as its reference, or None. done: what
    read_results found; new samples are added to it. The random numbers of a batch depend on the seed and its tasks
    alone, so an interrupted run ends with what it would have given, but for rounding: on a GPU tasks that are done are
    not rolled out again with the others of their batch; and with other numbers of ranks batches may be others.
    """
    def save(samples):
        fresh = [sample for sample in samples if (sample.task, sample.index) not in done]
        with open(path, "a") as file:
            file.write("".join(json.dumps(asdict(sample)) + "\n" for sample in fresh))
        done.update({(sample.task, sample.index): sample for sample in fresh})

    if done:
        print(f"{path}: {len(done)} of {len(tasks) * options.samples} samples are there already", file=sys.stderr)
    # Tasks in a batch; no rank may be left without one.
    size = max(1, min(options.batch // options.samples, math.ceil(len(tasks) / ranks.count())))
    bar = tqdm(ranks.share(range(0, len(tasks), size)), unit="batch", disable=ranks.rank() > 0 or None)
    for first in bar:
        batch = tasks[first:first + size]
        open_ones = [task for task in batch if any((task.name, i) not in done for i in range(options.samples))]
        if open_ones:
            # A generator of its own for a batch, so that it gives the same whatever ran before it.
            names = "\n".join([str(options.seed)] + [task.name for task in batch])
            seed = int(hashlib.sha256(names.encode()).hexdigest()[:15], 16)
            generator = torch.Generator(options.device).manual_seed(seed)
            left = batch if sandbox.device == "cpu" else open_ones
            evaluate_batch(model, library, sandbox, compiled, left, options, generator, save)
        right = sum(kind(sample) in ("faster", "correct") for sample in done.values())
        bar.set_postfix_str(f"{right} of {len(done)} samples correct")
    for others in ranks.each(done):
        done |= others
    return {task.name: [done[task.name, i] for i in range(options.samples)] for task in tasks}


def evaluate_batch(model, library, sandbox, compiled, tasks, options, generator, save):
    """All samples of some tasks: select once, roll out, time what is correct against torch.compile.

    save is called with a task's samples as soon as all of them have ended; with `compiled`, since nothing else may be
    timed meanwhile, with those of all tasks at the end.
    """
    chosen = [()] * len(tasks)
    if library is not None:
        selections = select(model, library, tasks, k=1, temperature=0, max_new_tokens=min(1024, options.max_new_tokens),
                            bm25_only=options.bm25_only, max_prompt_tokens=options.max_prompt_tokens)
        chosen = [selection.skills for (selection,) in selections]
    jobs = [(task, skills) for task, skills in zip(tasks, chosen) for _ in range(options.samples)]
    greedy = options.samples == 1 and options.strategy in ("serial", "judge")  # the others need attempts that differ
    finished = {}  # {number of a rollout: Sample}

    def ended(number, trajectory):
        attempts = [Attempt(turn.completion.text, turn.code is not None, turn.verdict, None,
                            len(turn.completion.token_ids) + turn.advice_tokens,
                            statistics.fmean(turn.completion.logprobs or [0.0]), turn.advice, turn.repeats)
                    for turn in trajectory.turns]
        index, skills = number % options.samples, [s.name for s in trajectory.skills]
        finished[number] = Sample(trajectory.task.name, index, skills, attempts)
        group = range(number - index, number - index + options.samples)
        if compiled is None and all(i in finished for i in group):
            save([finished[i] for i in group])

    trajectories = rollout(model, sandbox, jobs, options.turns, options.max_new_tokens, options.max_prompt_tokens,
                           temperature=0.0 if greedy else options.temperature, generator=generator,
                           top_p=options.top_p, strategy=strategy(options), budget=options.tokens, ended=ended)
    if compiled is not None:
        again = [(attempt, (trajectory.task, turn.code)) for number, trajectory in enumerate(trajectories)
                 for attempt, turn in zip(finished[number].turns, trajectory.turns)
                 if is_correct(attempt, max(TOLERANCES))]
        for (attempt, _), verdict in zip(again, score_pairs(compiled, [pair for _, pair in again])):
            attempt.against_compile = verdict
        save([finished[number] for number in range(len(jobs))])


def strategy(options) -> Strategy:
    """The strategy that the options describe."""
    chosen = STRATEGIES[options.strategy]
    if options.strategy == "serial":
        return replace(chosen, show=functools.partial(best_window, keep=options.keep))
    return replace(chosen, judge=options.judge if chosen.judge else None)


def steps(sample) -> list[dict]:
    """What each attempt of a sample has cost and given, by the strict rule: all that page/strategies.py needs."""
    return [{"tokens": attempt.tokens, "kernels": int(attempt.has_code and not attempt.repeats),
             "correct": is_correct(attempt), "speedup": speed(attempt, rule="strict")} for attempt in sample.turns]


# ----------------------------------------------------------------------------------------------------------------------
# Command line

def digest_of_model(model) -> str:
    """Tells two states of a model folder (a Path) apart: size and beginning of each weight file, and the library."""
    digest = hashlib.sha256()
    for path in sorted(path for path in model.glob("*") if path.suffix in (".safetensors", ".bin", ".jsonl")):
        with open(path, "rb") as file:
            digest.update(f"{path.name} {path.stat().st_size}".encode() + file.read(1 << 24))
    return digest.hexdigest()[:16]


def same_configuration(out, config):
    """Make `out` the folder of this configuration. Raises UserError when it cannot be, or belongs to another one."""
    path = out / "config.json"
    try:
        if not path.is_file() and not (out / "results.jsonl").exists():
            write_atomically(path, json.dumps(config, indent=1) + "\n")
        before = dict(json.loads(path.read_text()))
    except (OSError, TypeError, ValueError) as error:
        raise UserError(f"{out}: cannot be used as --out ({error})") from None
    changed = [key for key in config if before.get(key) != config[key]]
    if changed:
        raise UserError(f"{out}: holds results of another configuration ({', '.join(changed)} changed); "
                        "choose another --out")


def parse(argv):
    """The command line. None as a default means: see the help; `start` fills it in."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], usage=argparse.SUPPRESS,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--level", type=int, choices=[1, 2, 3], required=True, help="KernelBench's level")
    add("--kernelbench", metavar="DIR", help="KernelBench checkout; without it, the built-in problems")
    add("--shrink", action="store_true", help="KernelBench without a GPU: smaller sizes, where a problem is too large")
    add("--ids", help="only these: 5,10,15 or 1-20 or every5; without it, the whole level")
    add("--model", default="checkpoints/tiny", help="model folder or hub id")
    add("--no-skills", action="store_true", help="ablation: inject no skills")
    add("--bm25-only", action="store_true", help="ablation: inject BM25's first 3 skills, ask no Selection role")
    add("--samples", type=int, default=8, help="samples a task; 1 is greedy")
    add("--turns", type=int, default=3, help="T: attempts in a sample")
    add("--strategy", choices=list(STRATEGIES), default="serial", help="what attempts see of those before: nothing; "
        "their verdicts; the last one's, judged; or one of the best")
    add("--compare-strategies", action="store_true", help="all of them with the same budgets, in folders of --out")
    add("--tokens", type=int,
        help="budget: a sample ends with the attempt that reaches so many tokens; None: --turns of the longest replies")
    add("--iterations", type=int, default=1, help="serial: one turn more for each but the first (paper: 10, T 5)")
    add("--keep", type=int, default=4, help="serial: most earlier attempts that are shown, the best consecutive ones")
    add("--judge", choices=["rule", "model"], default="rule", help="judge: who names the bottleneck; model: itself")
    add("--temperature", type=float, default=1.0, help="of the policy, with more than one sample")
    add("--top-p", type=float, default=0.95, help="of the policy: the likeliest tokens that make up this share")
    add("--prompts", metavar="FILE", help="file or folder of prompts: see reinforce.py --help")
    add("--thinking", action="store_true", help="let replies begin with thoughts, if the template can forbid them")
    add("--max-new-tokens", type=int, help="longest reply (paper: 8192); None: a quarter of the context, at most 8192")
    add("--max-prompt-tokens", type=int, help="longest prompt (paper: 24576); None: the rest of the model's context")
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu",
        help="cuda measures the time, cpu models it")
    add("--baseline", choices=["eager", "compile"], default="eager", help="compile: against torch.compile as well")
    add("--timeout", type=float, default=60.0, help="seconds for a candidate")
    add("--out", metavar="DIR", help="results, where a rerun goes on; None: runs/bench_level<L>")
    add("--seed", type=int, default=0, help="of sampling and of the problems' inputs")
    add("--batch", type=int, help="rollouts at a time; None: 32 on a CPU, 256 on a GPU")
    return parser.parse_args(argv)


def start(options):
    """Check the options, load what they name, fill in what depends on it. Raises UserError for what cannot be.

    Returns (tasks, too_large, model, library, config). too_large: {name: why} of those that cannot be used here.
    config: what shapes a result, to be compared when a run goes on.
    """
    check_numbers(vars(options), above_0=set(vars(options)) - {"seed"}, at_most={"top_p": 1, "timeout": 86_400})
    options.batch = options.batch or (256 if options.device == "cuda" else 32)  # fills a GPU; spares a CPU's memory
    check_device(options.device)
    if options.baseline == "compile" and options.device == "cpu":
        raise UserError("--baseline compile: needs a GPU; torch.compile has no modelled clock")
    if options.shrink and not (options.kernelbench and options.device == "cpu"):
        raise UserError("--shrink: is for --kernelbench without a GPU")
    if options.bm25_only and options.no_skills:
        raise UserError("--bm25-only and --no-skills: one ablation at a time")
    if options.compare_strategies and options.samples < 2:
        raise UserError("--compare-strategies: needs --samples of at least 2, whose spread says what chance does")
    level = (kernelbench_tasks(options.kernelbench, options.level) if options.kernelbench
             else builtin_tasks(options.level, options.device))
    tasks, too_large = chosen_tasks(level, options.ids), {}
    if options.kernelbench and options.device == "cpu":
        tasks, too_large = without_a_gpu(tasks, options.timeout, options.shrink)
    if options.prompts:
        options.prompts += f" ({read_prompts(options.prompts)})"  # an edited file is another configuration
    folder = found(options.model)
    model = Backbone.load(folder, options.device)
    model.thinking = options.thinking
    library = None if options.no_skills else SkillLibrary.of_model(folder)
    options.max_new_tokens = options.max_new_tokens or min(8192, model.context // 4)
    options.max_prompt_tokens = options.max_prompt_tokens or model.context - options.max_new_tokens
    model.check_lengths(options.max_prompt_tokens, options.max_new_tokens)
    options.turns += options.iterations - 1
    options.tokens = options.tokens or options.turns * options.max_new_tokens
    # Everything that changes a result; --batch and --timeout too, which shape the random numbers and the verdicts.
    ignored = "out", "kernelbench", "compare_strategies", "shrink"
    config = {name: value for name, value in vars(options).items() if name not in ignored}
    config["source"] = "KernelBench" + ", shrunk" * options.shrink if options.kernelbench else "built-in problems"
    config["weights"] = digest_of_model(folder)  # a model trained on is another model
    config["baselines"] = ["eager", "compile"] if options.baseline == "compile" else ["eager"]
    config["problems_in_level"] = len(level)  # so that the report of a part says that it is one
    config["problems"] = {task.name: hashlib.sha256(task.source.encode()).hexdigest()[:16] for task in tasks}
    return tasks, too_large, model, library, config


def main(argv=None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    options = parse(argv)
    tasks, too_large, model, library, config = start(options)
    usable = [task for task in tasks if task.name not in too_large]
    out = Path(options.out or f"runs/bench_level{options.level}")
    folders = {name: out / name for name in STRATEGIES} if options.compare_strategies else {options.strategy: out}
    if ranks.rank() == 0:
        claim(out)
        for name, folder in folders.items():
            same_configuration(folder, config | {"strategy": name})
    ranks.each(None)
    done = {name: read_results(folder / "results.jsonl", mend=True) for name, folder in folders.items()}
    ranks.each(None)  # nobody writes before all have read; what ranks then append are whole lines
    facts = {"command": " ".join(["python", "bench.py", *argv]), "seed": options.seed, **machine(options.device),
             "skills": "no skills" if library is None else f"skills out of {len(library)}"}
    runs = {}
    settings = {"timeout": options.timeout, "seed": options.seed, "tasks": 8, "measure": PRECISE}
    with (resumable("the same command goes on"), Sandbox(options.device, **settings) as sandbox,
          # A second sandbox, whose reference is torch.compile's.
          Sandbox(options.device, baseline="compile", **settings) if options.baseline == "compile"
          else contextlib.nullcontext() as compiled):
        for options.strategy, folder in folders.items():
            started = time.time()
            samples = evaluate(model, library, sandbox, compiled, usable, options, done[options.strategy],
                               folder / "results.jsonl")
            for name, why in too_large.items():
                refused = Attempt("", False, not_judged(sandbox, f"unusable task: {why}"))
                samples[name] = [Sample(name, i, [], [refused]) for i in range(options.samples)]
            if ranks.rank() > 0:
                continue
            summary = facts | {"config": config | {"strategy": options.strategy},
                               "seconds_of_last_run": round(time.time() - started, 1)}
            summary |= all_figures(samples, options.turns, config["baselines"])
            write_atomically(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
            charts.save_png([charts.fast_p(summary["figures"], options.turns)], folder / "fast_p.png",
                            f"{title(config)}: {options.model}, {facts['skills']}, {summary['clock']}")
            write_page([folder], folder / "report.html")
            runs[options.strategy] = {task: list(map(steps, group)) for task, group in samples.items()}
    if ranks.rank() > 0:
        return 0
    if options.compare_strategies:
        compared = facts | {"config": config, "clock": summary["clock"]} | strategies.compare(runs, options.turns)
        write_atomically(out / "strategies.json", json.dumps(compared, indent=1) + "\n")
        charts.save_png(strategies.budget_charts(compared), out / "strategies.png", f"{title(config)}: {options.model}"
                        f"; pale: each of {options.samples} searches ({summary['clock']})")
        print(f"{strategies.table(compared)}\n\n{out}/strategies.png, {out}/strategies.json, {out}/*/report.html")
    else:
        print(f"{table(summary)}\n\n{out}/report.html, {out}/fast_p.png, {out}/summary.json, {out}/results.jsonl")
    return 0


if __name__ == "__main__":
    run_command(ranks.joined(main))

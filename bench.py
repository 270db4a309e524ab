"""How good is a checkpoint with its skill library?  Fast_p over a level of KernelBench, or of the built-in problems.

    python bench.py --level 1 [--model checkpoints/tiny] [--kernelbench DIR] [--no-skills] [--out DIR]
    python bench.py --level 1 --server http://localhost:8000 --served-model NAME [--library skills.jsonl]
    python run.py DIR OTHER     two benchmarks side by side, such as with --no-skills and without (the paper's two)

The paper's evaluation: one greedy selection for each task, its skills injected into the prompt, T = 3 turns, 8 samples
a task. `correct` and Fast_p are shares of *all* samples, N in number, of all problems. The samples of a problem that
cannot be used count as failed. (A share of solved problems alone would rise when a model fails on the hard ones.)

    correct         share of samples with a correct turn: every output within --tolerance (relative to its size) of the
                    reference's. 1e-4 is KernelBench's; papers before 2026 used 1e-2, at which a kernel that computes in
                    half precision can pass as correct
    Fast_p          (1/N) sum_i 1[correct_i and speedup_i > p]. Fast_1: faster than PyTorch; Fast_2: over twice as fast
    geometric mean  of the correct samples' speedups, always by the standard rule. It leaves failed samples out, so read
                    it together with `correct`

There are four rows of figures: two ways of counting, each by two rules for a win.

    best turn  a sample counts by its best turn
    last turn  a sample counts by its last turn: the T-th, unless the sample ended earlier (Dr. Kernel)
    standard   KernelBench's: the estimated speedup is above p. An unchanged torch call, timed twice, is about 1 %
               faster or slower than the reference, so about half of such answers count for Fast_1.
    strict     the candidate's own kernels do work (coverage above 0), and the *lower end* of the speedup's 95 %
               interval is above p. An unchanged torch call never wins.

A kernel is compared with eager PyTorch, or with `--baseline compile` torch.compile (GPU only). Speedups are measured on
a GPU and modelled without one, and one folder never holds both.

`--strategy` sets which earlier attempts an attempt sees. The paper's sequential scaling, 5 turns and 9 more, is
`--turns 14`. To compare strategies at equal cost, give each run the same --tokens, the budget of a sample.

Files in --out:

    config.json       every option that changes a result. The folder takes no results of another configuration
    results.jsonl     one line a sample: {"task", "index", "skills", "turns": [{"reply", "verdict", "tokens", ...}]}
    unfinished.jsonl  replies and verdicts of problems of which not all samples have ended; gone at the end
    summary.json      all figures, in all and for each problem; command, hardware and versions
    report.html       all of it in a browser, every reply included

After a kill the same command continues where it was: no reply is sampled again, no kernel judged again. What an
interrupted batch still has to sample gets new random numbers, so the results differ from an uninterrupted run's.
"""

if __name__ == "__main__":
    from command.process import begin
    begin()  # before torch is loaded: it sets how OpenMP's threads wait

import functools
import json
import math
import random
import statistics
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar

from command.options import check_name, check_together, complete, option, parse, parse_early


@dataclass
class Options:
    """The command line. `start` chooses most values that are None."""

    # The first option of each group in --help, and the group's heading
    GROUPS: ClassVar = {"level": "which problems, and what the prompts hold", "samples": "how much the model may try",
                        "tolerance": "what counts as correct, and as fast",
                        "temperature": "sampling (paper: replies of at most 8,192 tokens, prompts of at most 24,576)",
                        "out": "the run"}

    level: int = option(1, "KernelBench's level; 0: our problems with redundant operators", choices=[0, 1, 2, 3])
    kernelbench: str = option(None, "KernelBench checkout (default: the built-in problems)", metavar="DIR")
    ids: str = option(None, "only these problems: 5,10,15 or 1-20 or every5", metavar="IDS")
    model: str = option("checkpoints/tiny", "model folder or hub id")
    server: str = option(None, "ask a model behind this server (vLLM, SGLang, transformers serve)", metavar="URL")
    served_model: str = option(None, "the model there (default: the first that it lists)", metavar="NAME")
    library: str = option(None, "skills of this snapshot (default: the model's; with --server none)", metavar="FILE")
    no_skills: bool = option(False, "ablation: inject no skills")
    bm25_only: bool = option(False, "ablation: inject BM25's first 3 skills, without the Selection role")
    prompts: str = option(None, "file or folder of prompts", metavar="FILE")
    thinking: bool = option(False, "let replies begin with thoughts, where the chat template can forbid them")
    samples: int = option(8, "samples of a task; if 1, it is greedy", above_0=True)
    turns: int = option(3, "T: attempts in a sample", above_0=True)
    strategy: str = option("serial", "which earlier attempts an attempt sees: serial, parallel, judge, evolve or "
                           "another name in policy.STRATEGIES")
    tokens: int = option(None, "most tokens of a sample's replies (default: turns x longest reply)", above_0=True)
    tolerance: float = option(1e-4, "relative, of outputs; papers before 2026: 1e-2", above_0=True, most=1)
    device: str = option(None, "cuda measures, cpu models times (default: cuda if there)", choices=["cpu", "cuda"])
    baseline: str = option("eager", "what to be faster than; compile: torch.compile", choices=["eager", "compile"])
    timeout: float = option(60.0, "seconds for a candidate", above_0=True, most=86_400)
    temperature: float = option(1.0, "of the Policy, with more than one sample", above_0=True)
    top_p: float = option(0.95, "of the Policy: sample from the likeliest tokens of this share", above_0=True, most=1)
    max_new_tokens: int = option(None, "longest reply (default: a quarter of the context, at most 8192)", above_0=True)
    max_prompt_tokens: int = option(None, "longest prompt (default: the rest of the context)", above_0=True)
    out: str = option(None, "folder of results (default: runs/bench_level<L>)", metavar="DIR")
    seed: int = option(0, "seed of sampling")
    batch: int = option((32, 256, 256), "samples at a time", above_0=True)


if __name__ == "__main__":
    parse_early(Options, __doc__.split("\n")[0])  # --help and misspelt flags need no torch, whose import takes seconds

import torch

import recipes  # noqa: F401 (it enters further strategies)
from backbone import Backbone, Sampling, check_device
from chat.prompts import read_prompts
from chat.server import Server
from fast import ranks
from page import levels
from policy import STRATEGIES, Limits, begin_rollouts, continued, play_in_waves
from command.files import find_path, hold, read_lines, user_error, write_atomically
from command.process import UserError, run_command
from command.progress import Progress
from run import page_if_interrupted, write_page
from sandbox import PRECISE_SECONDS, Sandbox, Verdict, verdict_from_json
from selector import select
from skills import SkillLibrary
from tasks import builtin_tasks, chosen_tasks, kernelbench_tasks, redundant_tasks

THRESHOLDS = (1.0, 1.2, 1.5, 2.0, 3.0)  # the p of Fast_p
COUNTED = ("best turn", "last turn")  # ways of counting, see above
RULES = ("standard", "strict")
UNFINISHED = "unfinished.jsonl"  # replies and verdicts of samples that have not ended, see policy.continued
CONTRADICTIONS = [("--no-skills", "--bm25-only"), ("--no-skills", "--library"), ("--server", "--thinking")]


@dataclass
class Attempt:
    """One turn of a sample, in a line of results.jsonl."""

    reply: str  # everything that the Policy wrote
    verdict: Verdict
    tokens: int = 0  # number of sampled tokens, those of the strategy's advice included
    advice: str = ""  # the strategy's, after this attempt


@dataclass
class Sample:
    """One rollout on one problem: a line of results.jsonl."""

    task: str  # name of the problem
    index: int  # 0 .. samples - 1
    skills: list[str]  # names of the skills in the prompt
    turns: list[Attempt]


def sample_record(line) -> Sample:
    """The Sample that a line of results.jsonl was written from. Raises any error for a line that is not one."""
    turns = [Attempt(**turn | {"verdict": verdict_from_json(turn["verdict"])}) for turn in line["turns"]]
    return Sample(**line | {"turns": turns})


def read_results(path) -> dict:
    """{(task, index): Sample} of a results.jsonl; empty without a file. Raises UserError."""
    return {(sample.task, sample.index): sample for sample in read_lines(path, sample_record)}


# ----------------------------------------------------------------------------------------------------------------------
# Figures

def is_correct(attempt) -> bool:
    """Does a turn count as correct? A detected cheat never does."""
    return attempt.verdict.correct and not attempt.verdict.rejected


def speed(attempt, rule="standard") -> float:
    """The speedup that a turn is credited with; 0.0 when it is not correct.

    standard: the estimate. strict: the lower end of its 95 % interval, or 0.0 if no kernel of the candidate's own did
    work. (A modelled time has no spread, so there the lower end is the estimate.)

    >>> turn = Attempt("", Verdict(correct=True, speedup=1.3, speedup_low=1.1, coverage=0.0))
    >>> speed(turn), speed(turn, "strict")
    (1.3, 0.0)
    """
    if not is_correct(attempt):
        return 0.0
    if rule == "standard":
        return attempt.verdict.speedup
    return attempt.verdict.speedup_low if attempt.verdict.coverage else 0.0


def figures(samples, counted, rule) -> dict:
    """One row of figures: correct, Fast_p and the geometric mean. samples: {task: [Sample, ...]}, equally many each.

    s_i is the largest `speed` of the turns of sample i that count; 0 if none is correct. N samples (paper: Fast_p):

        correct = (1/N) sum_i 1[some turn of i is correct]
        Fast_p = (1/N) sum_i 1[s_i > p]
        geometric mean = exp(mean of log s_i over the correct samples), by the standard rule; None without any
    """
    correct, credited, estimates = [], [], []  # one entry for each sample; estimates: by the standard rule
    for sample in sum(samples.values(), []):
        attempts = sample.turns if counted == "best turn" else sample.turns[-1:]  # those that count
        correct.append(any(map(is_correct, attempts)))
        credited.append(max(speed(attempt, rule) for attempt in attempts))
        estimates.append(max(map(speed, attempts)))
    row = {"counted": counted, "rule": rule, "correct": statistics.fmean(correct)}
    for p in THRESHOLDS:
        row[f"fast_{p:g}"] = statistics.fmean(speedup > p for speedup in credited)
    row["geometric_mean"] = statistics.geometric_mean(filter(None, estimates)) if any(estimates) else None
    return row


def all_figures(samples) -> dict:
    """Four rows of figures, and what became of each problem. samples: {task: [Sample, ...]}"""
    rows = []
    for counted in COUNTED:
        rows += [figures(samples, counted, rule) for rule in RULES]
    return {"figures": rows, "problems": {task: problem_figures(group) for task, group in samples.items()}}


def problem_figures(samples) -> dict:
    """Of one problem: number of correct samples, best speedup (standard rule, or 0.0), roofline, commonest error or "".

    roofline: the best attempt's share of the GPU's peak memory bandwidth or of its peak arithmetic, the larger one.
    """
    attempts = sum((sample.turns for sample in samples), [])
    errors = Counter(attempt.verdict.rejected or attempt.verdict.error or "" for attempt in attempts)
    del errors[""]  # attempts without an error
    best = max(attempts, key=speed)
    roofline = max(best.verdict.bandwidth or 0.0, best.verdict.arithmetic or 0.0) if speed(best) else 0.0
    return {"correct": sum(any(map(is_correct, sample.turns)) for sample in samples), "best_speedup": speed(best),
            "roofline": roofline, "error": max(errors, key=errors.get, default="")}


# ----------------------------------------------------------------------------------------------------------------------
# The run

def start(options) -> tuple:
    """Check the options, load what they name, and fill in what depends on it.

    Returns (tasks, model, library, config). library: None injects no skills. config: every option that changes a
    result, batch and timeout among them. Raises UserError for a model, a checkout or a problem that is not there.
    """
    # First check what needs no loading, so that a mistake costs no minutes.
    check_device(options.device)
    check_name(Options, "strategy", options.strategy, STRATEGIES)
    least = STRATEGIES[options.strategy].least_turns
    if options.turns < least:
        raise UserError(f"--strategy {options.strategy}: below --turns {least} no attempt sees an earlier one")
    source = "built-in problems"
    level = builtin_tasks(options.level, options.device) if options.level else redundant_tasks(options.device)
    if options.kernelbench:
        source, level = "KernelBench", kernelbench_tasks(options.kernelbench, options.level)
    tasks = chosen_tasks(level, options.ids)
    if options.prompts:
        read_prompts(options.prompts)
    model, library, checkpoint = load(options)
    options.max_new_tokens = options.max_new_tokens or min(8192, model.context // 4)
    options.max_prompt_tokens = options.max_prompt_tokens or model.context - options.max_new_tokens
    model.check_lengths(options.max_prompt_tokens, options.max_new_tokens)
    options.tokens = options.tokens or options.turns * options.max_new_tokens
    config = asdict(options)
    for name in ("out", "kernelbench", "server"):  # paths do not change a result
        del config[name]
    config["source"] = f"{source}, level {options.level}"
    config["checkpoint"] = checkpoint
    config["problems_in_level"] = len(level)  # so that a report of a part of the level says so
    config["problems"] = [task.name for task in tasks]
    return tasks, model, library, config


def load(options) -> tuple:
    """(model, library, name of the checkpoint). Only this function knows where they come from.

    We call a model's `chat_ids`, `next_ids`, `sampler` and `sample`. library: None injects no skills. With --server
    it sets options.model to the server's name of it.
    """
    folder = find_path(options.model)
    if options.server:
        model, library = Server(options.server, options.served_model), SkillLibrary()
        options.model = checkpoint = model.name
    else:
        model, library = Backbone.load(folder, options.device), None
        model.thinking = options.thinking
        checkpoint = folder.resolve().name  # a run's checkpoint/ is a link, to a new folder after each save
    if options.library:
        library = SkillLibrary.load(find_path(options.library))
    elif library is None:
        library = SkillLibrary.of_model(folder)
    return model, None if options.no_skills else library, checkpoint


def open_folder(folder, config) -> dict:
    """Create the folder, or check its configuration. Returns the complete problems in it: {task: [Sample, ...]}.

    Raises UserError when it holds another configuration's results.
    """
    hold(folder)
    path = folder / "config.json"
    with user_error(f"--out {folder}: cannot write there"):
        if not path.exists():
            write_atomically(path, json.dumps(config, indent=1) + "\n")
        before = json.loads(path.read_text())
    changed = [name for name in config if before.get(name) != config[name]]
    if changed:
        raise UserError(f"--out {folder}: holds results of another configuration ({', '.join(changed)} changed); "
                        "choose another --out")
    groups = {}
    for (task, _), sample in read_results(folder / "results.jsonl").items():
        groups.setdefault(task, []).append(sample)
    done = {task: group for task, group in groups.items() if len(group) == config["samples"]}
    write_atomically(folder / "results.jsonl", lines(done))  # without what a kill has cut off
    answers = [json.dumps(line) + "\n" for line in read_lines(folder / UNFINISHED) if line["sample"][0] not in done]
    write_atomically(folder / UNFINISHED, "".join(answers))
    return done


def lines(samples) -> str:
    """The lines of results.jsonl. samples: {task: [Sample, ...]}"""
    return "".join(json.dumps(asdict(sample)) + "\n" for sample in sum(samples.values(), []))


def evaluate(model, library, sandbox, tasks, options, done, path) -> dict:
    """Roll out every task that is not in `done`, and append its samples to `path`. Returns {task: [Sample, ...]}.

    done: the problems that are complete; this function adds those that it rolls out, and prints a line for each. The
    batches are dealt out to the ranks in turn; each rank appends whole lines to the same files.
    """
    tasks_left = [task for task in tasks if task.name not in done]  # they are incomplete
    size = max(1, min(options.batch // options.samples, math.ceil(len(tasks_left) / ranks.count())))  # no rank is idle
    batches = [tasks_left[first:first + size] for first in range(0, len(tasks_left), size)]
    own = ranks.share(batches)
    unfinished = path.with_name(UNFINISHED)
    with Progress(sum(map(len, own)) * options.samples, "sample", hidden=ranks.rank() > 0) as progress:
        progress.begin(path.parent.name)
        for batch in own:
            for name, samples in sample_batch(model, library, sandbox, batch, options, unfinished):
                with open(path, "a") as file:
                    file.write(lines({name: samples}))
                done[name] = samples
                progress.update(len(samples))
                progress.say(levels.problem_line(name, problem_figures(samples), options.samples))
    for part in ranks.each(done):  # what each rank has rolled out
        done |= part
    unfinished.unlink(missing_ok=True)
    return {task.name: done[task.name] for task in tasks}


def sample_batch(model, library, sandbox, tasks, options, unfinished):
    """Yields (name, all its samples) of each of some tasks, as soon as it is complete.

    It makes one greedy selection for each task. Then it samples all rollouts of all tasks together, at
    options.temperature. A single sample is greedy, unless the strategy shows attempts the same prompt: greedy attempts
    would then be equal. unfinished: the path of UNFINISHED.
    """
    sandbox.prepare(tasks)  # with a GPU: load references in the background, while the model answers
    chosen = [()] * len(tasks)  # the skills of each task
    if library is not None:
        greedy = Sampling(min(1024, options.max_new_tokens), 0.0, max_prompt_tokens=options.max_prompt_tokens)
        chosen = [s.skills for (s,) in select(model, library, tasks, 1, greedy, bm25_only=options.bm25_only)]
    answers = read_answers(unfinished)
    jobs, samples, known, keep = [], [], [], []  # of each sample
    for task, skills in zip(tasks, chosen):
        names = [skill.name for skill in skills]
        for index in range(options.samples):
            jobs.append((task, skills))
            samples.append(Sample(task.name, index, names, []))
            known.append(answers[task.name, index, *names])
            keep.append(functools.partial(write_answer, unfinished, [task.name, index, *names]))
    # Each batch has its own random generator, so its samples do not depend on earlier batches. One that goes on after
    # a kill needs other random numbers: with the first ones it would repeat samples that are known.
    seed = random.Random(f"{options.seed} {tasks[0].name} {sum(map(len, known))}").getrandbits(60)
    generator = torch.Generator(options.device).manual_seed(seed)
    sampling = Sampling(options.max_new_tokens, options.temperature, options.top_p, options.max_prompt_tokens)
    strategy = STRATEGIES[options.strategy]
    if options.samples == 1 and not strategy.same_prompts:
        sampling = replace(sampling, temperature=0.0)
    limits = Limits(options.turns, options.max_prompt_tokens, options.tokens)
    trajectories, plays = begin_rollouts(model, sandbox, jobs, limits, generator, strategy)
    plays = list(map(continued, plays, known, keep))
    with model.sampler(sampling, generator) as sampler:
        for number in play_in_waves(sampler, sandbox, plays):
            samples[number].turns = list(map(attempt_of, trajectories[number].turns))
            group = [sample for sample in samples if sample.task == samples[number].task]
            if all(sample.turns for sample in group):
                yield group[0].task, group


def attempt_of(turn) -> Attempt:
    """What results.jsonl keeps of a policy.Turn."""
    tokens = len(turn.completion.token_ids) + turn.advice_tokens
    return Attempt(turn.completion.text, turn.verdict, tokens, turn.advice)


def write_answer(path, sample, answer):
    """Append an answer that the play of a sample was given to UNFINISHED. sample: [task, index, *names of skills]."""
    with open(path, "a") as file:
        file.write(json.dumps({"sample": sample, "answer": answer}) + "\n")


def read_answers(path) -> dict:
    """{(task, index, *names of skills): answers that this play was given, in their order}; empty without a file."""
    answers = defaultdict(list)
    for line in read_lines(path):
        answers[tuple(line["sample"])].append(line["answer"])
    return answers


def report(folder, summary):
    """Print the figures of a finished benchmark, and leave summary and page in its folder.

    summary: what summary.json will hold, that is the config, the facts of `main` and all_figures.
    """
    write_atomically(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
    write_page([folder], folder / "report.html")
    print(f"{levels.table(summary)}\n\n{folder}/report.html, {folder}/summary.json, {folder}/results.jsonl")


def main(argv=None) -> int:
    """Check everything, then evaluate, then report. With several ranks, rank 0 alone opens the folder and reports."""
    given = parse(Options, argv, __doc__.split("\n")[0])
    check_together(given, CONTRADICTIONS)
    given.setdefault("device", "cuda" if torch.cuda.is_available() else "cpu")
    options = complete(Options, given, size=int(given["device"] == "cuda"))
    tasks, model, library, config = start(options)
    folder = Path(options.out or f"runs/bench_level{options.level}")
    with Sandbox(options.device, timeout=options.timeout, tasks=8, measure=PRECISE_SECONDS,
                 tolerance=options.tolerance, baseline=options.baseline) as sandbox:
        done = ranks.first(open_folder(folder, config) if ranks.rank() == 0 else None)
        facts = {"clock": "modelled" if options.device == "cpu" else "measured", "config": config,
                 "skills": "no skills" if library is None else f"skills out of {len(library)}"}
        facts |= levels.provenance(options.device)
        found = sum(map(len, done.values()))  # samples of an earlier, interrupted command
        print(f"{folder}: {levels.heading(facts)}\n{found} samples found, and {len(read_lines(folder / UNFINISHED))} "
              "replies and verdicts of others. Interrupted, the same command continues.", flush=True)
        with page_if_interrupted(folder, facts["command"]):
            samples = evaluate(model, library, sandbox, tasks, options, done, folder / "results.jsonl")
    if options.server:
        facts["server"] = model.statistics()
        print(f"{options.server}: {json.dumps(facts['server'])}")
    if ranks.rank() == 0:
        report(folder, facts | all_figures(samples))
    return 0


if __name__ == "__main__":
    run_command(ranks.joined(main))

"""What benchmarks say of a model before and after training, with 95 % intervals.

    python results/headline.py runs/headline/before_level1                       one benchmark
    python results/headline.py --before A B C --after D E F                      several seeds, in pairs
    python results/headline.py --read FILE runs/headline/before_level1           some rollouts in full, as Markdown

For each folder of bench.py: its figures over all problems, over those whose id is divisible by 5 (the only ones whose
solutions are looked at during development), and over the others; what the failures were; how many first turns are
correct; how many replies saw skills. A benchmark that was interrupted counts with the problems that are done.

Then, over problems, after minus before: strict Fast_1 and Fast_1.2, correct, and the logarithm of the speedup that a
user gets (1 where no kernel is correct and faster). The intervals are from 10,000 draws of problems; a problem's value
is the mean over its samples and over the seeds.
"""

import argparse
import json
import math
import random
import statistics
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import RULES, Attempt, Sample, figures, is_correct, read_results, speed  # noqa: E402
from page.charts import save_png  # noqa: E402
from command.files import user_error  # noqa: E402
from command.process import UserError, run_command  # noqa: E402
from sandbox import Verdict, feedback  # noqa: E402
from tasks import problem_id  # noqa: E402

SHARES = ("correct", "fast_1", "fast_1.2", "fast_1.5", "fast_2", "fast_3")
GAINS = {"strict Fast_1": lambda tries: best(tries) > 1, "strict Fast_1.2": lambda tries: best(tries) > 1.2,
         "correct": lambda tries: any(map(is_correct, tries)),
         "log speedup": lambda tries: math.log(max(1.0, best(tries)))}


def best(tries) -> float:
    """The strict speedup of a sample's best turn; 0 without one."""
    return max(speed(attempt, "strict") for attempt in tries)


def samples_of(folder) -> dict:
    """{problem: its Samples} of a benchmark. Raises UserError if there is nothing.

    A problem of summary.json without samples was too large to be run: it gets a failed one.
    """
    samples = {}
    for sample in read_results(folder / "results.jsonl").values():
        samples.setdefault(sample.task, []).append(sample)
    if not samples:
        raise UserError(f"{folder}: no results of a benchmark")
    if (folder / "summary.json").is_file():
        with user_error(f"{folder}/summary.json: cannot be read"):
            for name in json.loads((folder / "summary.json").read_text())["problems"]:
                failed = Attempt("", Verdict(error="unusable problem"))
                samples.setdefault(name, [Sample(name, 0, [], [failed])])
    return samples


def every(samples) -> list[Sample]:
    """The samples of all problems in one list."""
    return sum(samples.values(), [])


def reasons(attempts) -> str:
    """What was wrong with attempts, most frequent first."""
    counts = Counter()
    for attempt in attempts:
        verdict = attempt.verdict
        counts["rejected" if verdict.rejected else (verdict.error or "wrong").split(":")[0]] += 1
    return ", ".join(f"{count} {what}" for what, count in counts.most_common()) or "none"


def show(folder, samples):
    """Print a benchmark's figures and failures."""
    print(f"\n## {folder}: {len(samples)} problems, {len(every(samples))} samples\n")
    print(f"| problems | counted | rule | {' | '.join(map(str.capitalize, SHARES))} | geometric mean |")
    print("|---" * (len(SHARES) + 4) + "|")
    fifth = {task: group for task, group in samples.items() if problem_id(task) % 5 == 0}
    others = {task: group for task, group in samples.items() if task not in fifth}
    for name, part in (("all", samples), ("ids / 5", fifth), ("others", others)):
        for counted in ("best turn", "last turn") if part else ():
            for rule in RULES:
                row = figures(part, counted, rule)
                cells = " | ".join(f"{100 * row[share]:.1f}" for share in SHARES)
                print(f"| {len(part)} {name} | {counted} | {rule} | {cells} | {row['geometric_mean'] or 0:.2f} |")
    failed = [sample.turns[-1] for sample in every(samples) if not any(map(is_correct, sample.turns))]
    first = [sample.turns[0] for sample in every(samples)]
    wrong = [attempt for attempt in first if not is_correct(attempt)]
    chosen = sum(bool(sample.skills) for sample in every(samples))
    print(f"\nfailures by the last turn: {reasons(failed)}\nfirst turns: {len(first) - len(wrong)} of {len(first)} "
          f"correct; {reasons(wrong)}\nskills: chosen for {chosen} of {len(first)} samples")


def gains(pairs, seed=0):
    """Print what changed, problem by problem. pairs: (samples before, samples after) of each seed."""
    problems = sorted(set.intersection(*(set(side) for pair in pairs for side in pair)))
    if not problems:
        raise UserError("these benchmarks have no problem in common")
    for name, value in GAINS.items():
        changes = []
        for problem in problems:
            means = []  # before, after, before, after, ...
            for side in sum(pairs, ()):
                means.append(statistics.fmean(value(sample.turns) for sample in side[problem]))
            changes.append(statistics.fmean(means[1::2]) - statistics.fmean(means[::2]))
        rng = random.Random(seed)
        draws = sorted(statistics.fmean(rng.choices(changes, k=len(changes))) for _ in range(10_000))
        print(f"{name:16} {statistics.fmean(changes):+.3f} [{draws[250]:+.3f}, {draws[-251]:+.3f}] over "
              f"{len(problems)} problems, {len(pairs)} seeds")


def fast_p(found) -> dict:
    """Strict Fast_p of each benchmark's best turns, {folder: (p, shares)}. found: {folder: its samples}."""
    curves, ps = {}, [p / 20 for p in range(16, 61)]
    for folder, samples in found.items():
        speeds = [best(sample.turns) for sample in every(samples)]
        curves[folder.name] = ps, [statistics.fmean(one > p for one in speeds) for p in ps]
    return curves


def transcript(samples) -> str:
    """The first rollout of every problem whose id is divisible by 20, as Markdown."""
    parts = []
    for task, (sample, *_) in sorted(samples.items(), key=lambda entry: problem_id(entry[0])):
        if problem_id(task) % 20 == 0:
            parts.append(f"## {task}\n\nSkills: {', '.join(sample.skills) or 'none'}.\n")
            for turn in sample.turns:
                parts.append(f"{turn.reply}\n\n> {' '.join(feedback(turn.verdict).split())}\n")
    return "\n".join(parts)


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("folders", nargs="*", type=Path, help="one benchmark, or one before and one after")
    add("--before", nargs="+", type=Path, default=[])
    add("--after", nargs="+", type=Path, default=[])
    add("--read", metavar="FILE", help="where some rollouts are written for reading")
    add("--plot", metavar="FILE", help="a picture of Fast_p by p, a line for each folder")
    args = parser.parse_args(argv)
    before, after = args.before or args.folders[:1], args.after or args.folders[1:]
    if not before or after and len(before) != len(after):
        parser.error("give one benchmark, or as many before as after")
    found = {folder: samples_of(folder) for folder in before + after}
    if args.read:
        Path(args.read).write_text("\n".join(map(transcript, found.values())))
        return 0
    for folder, samples in found.items():
        show(folder, samples)
    if args.plot:
        label = "p: share of samples that are correct and more than p times as fast"
        save_png([(label, fast_p(found), True)], args.plot, "strict, best turn")
    if after:
        print("\nafter minus before")
        gains([(found[a], found[b]) for a, b in zip(before, after)])
    return 0


if __name__ == "__main__":
    run_command(main)

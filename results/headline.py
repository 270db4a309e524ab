"""What benchmarks say of two states of a model, and of what lies between them: python results/headline.py

    python results/headline.py runs/headline/before_level1 runs/headline/after_level1
    python results/headline.py --before A B C --after D E F          the same of several seeds, in pairs

For each folder of bench.py: shares of all problems, of those whose id is divisible by 5 (which may be looked at) and of
the others, by both rules, tolerances, best and last turn; what the failures were; how many first turns are right; how
many replies saw skills. An interrupted benchmark counts with the problems that are done. Then, over problems, after
minus before: strict Fast_1 and Fast_1.2, correct, and the logarithm of the speedup that a user gets (1 where no kernel
is correct and faster), with 95 % intervals from 10,000 draws of problems, each averaged over samples and seeds. In its
place, with --read FILE, the first rollouts of problems whose id is divisible by 20 in full, failures among them: five a
level.
"""

import argparse
import contextlib
import itertools
import json
import math
import random
import statistics
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import Sample, figures, is_correct, read_results, speed  # noqa: E402
from page.charts import Chart, Curve, save_png  # noqa: E402
from sandbox import Verdict, feedback  # noqa: E402
from tasks import UserError, problem_id, run_command, told  # noqa: E402

GAINS = {"strict Fast_1": lambda tries: best(tries) > 1, "strict Fast_1.2": lambda tries: best(tries) > 1.2,
         "correct": lambda tries: any(map(is_correct, tries)),
         "log speedup": lambda tries: math.log(max(1.0, best(tries)))}


def best(tries) -> float:
    """The strict speedup of a sample's best turn; 0 without one."""
    return max((speed(attempt, rule="strict") for attempt in tries), default=0.0)


def samples_of(folder) -> dict:
    """{problem: its Samples} of a benchmark, one without attempts for an unusable problem; of one that was interrupted
    (no summary.json) those that are done. Raises UserError if there is nothing.
    """
    found, done = {}, read_results(Path(folder) / "results.jsonl").values()
    if not done:
        raise UserError(f"{folder}: no results of a benchmark")
    with told(f"{folder}/summary.json: cannot be read"), contextlib.suppress(FileNotFoundError):
        found = {name: [] for name in json.loads((Path(folder) / "summary.json").read_text())["problems"]}
    for sample in done:
        found.setdefault(sample.task, []).append(sample)
    return {name: samples or [Sample(name, 0, [], [])] for name, samples in found.items()}


def failures(samples) -> str:
    """What was wrong with the last turn of samples without a correct one, most frequent first."""
    counts = Counter()
    for sample in (sample for group in samples.values() for sample in group if not any(map(is_correct, sample.turns))):
        counts[reason(sample.turns[-1].verdict if sample.turns else Verdict(error="unusable problem"))] += 1
    return listed(counts)


def reason(verdict) -> str:
    return "rejected" if verdict.rejected else (verdict.error or "wrong").split(":")[0]


def listed(counts) -> str:
    """Most frequent first."""
    return ", ".join(f"{count} {what}" for what, count in counts.most_common()) or "none"


def first_turns(samples) -> str:
    """How many first turns are right, what was wrong with the others, and how many of those were written again."""
    every = [sample.turns for group in samples.values() for sample in group if sample.turns]
    wrong = [turns for turns in every if not is_correct(turns[0])]
    again = sum(turns[0].reply == turns[1].reply for turns in wrong if turns[1:])
    reasons = Counter(reason(turns[0].verdict) for turns in wrong)
    return (f"{len(every) - len(wrong)} of {len(every)} right, {again} of {len(wrong)} wrong ones come again word for "
            f"word; {listed(reasons)}")


def with_skills(samples) -> str:
    """For how many samples Selection chose skills, and for how many of those that are faster by 1.2."""
    every = list(itertools.chain(*samples.values()))
    fast = [sample for sample in every if best(sample.scored) > 1.2]
    chosen = [sum(bool(sample.skills) for sample in part) for part in (every, fast)]
    return f"chosen for {chosen[0]} of {len(every)}, for {chosen[1]} of the {len(fast)} that are faster by 1.2"


def compiled(samples) -> str:
    """How fast torch.compile is against eager PyTorch, by the two references of the first right turn of a problem."""
    timed = [[(turn.verdict.speedup, turn.against_compile.speedup) for sample in group for turn in sample.turns
              if turn.verdict.speedup and turn.against_compile and turn.against_compile.speedup]
             for group in samples.values()]
    ratios = [found[0][0] / found[0][1] for found in timed if found]
    return "no right turn to compare with" if not ratios else (
            f"torch.compile itself, on {len(ratios)} problems with a right turn: faster than eager "
            f"{sum(ratio > 1 for ratio in ratios)}, by 1.2 {sum(ratio > 1.2 for ratio in ratios)}, geometric mean "
            f"{statistics.geometric_mean(ratios):.2f}")


def shares(samples):
    """Print a benchmark's figures; against torch.compile, too, where it was timed."""
    parts = {"all": samples, "ids / 5": {t: s for t, s in samples.items() if problem_id(t) % 5 == 0},
             "others": {t: s for t, s in samples.items() if problem_id(t) % 5}}
    turns = max(len(sample.turns) for group in samples.values() for sample in group)
    several = max(map(len, samples.values())) > 1  # samples of a problem
    print(f"| problems | counted | tolerance | rule | correct | Fast_1 | Fast_1.2 | Fast_1.5 | Fast_2 | geo mean |\n"
          f"|{'---|' * 10}")
    for name, part in parts.items():
        for of, tolerance, rule in [("mean of samples", 1e-4, "strict"), ("mean of samples", 1e-4, "standard"),
                                    ("mean of samples", 1e-2, "standard"), ("last turn", 1e-4, "strict"),
                                    *[("best sample", 1e-4, "strict")] * several]:
            if part:
                row = figures(part, turns, "eager", tolerance, rule, of)
                cells = [f"{100 * row[key]:.1f}" for key in ("correct", "fast_1", "fast_1.2", "fast_1.5", "fast_2")]
                print(f"| {len(part)} {name} | {of} | {tolerance} | {rule} | {' | '.join(cells)} | "
                      f"{row['geometric_mean'] or 0:.2f} |")
    if any(turn.against_compile for group in samples.values() for sample in group for turn in sample.turns):
        row = figures(samples, turns, "compile", 1e-4, "strict")
        cells = [f"{100 * row[key]:.1f}" for key in ("fast_1", "fast_1.2", "fast_1.5", "fast_2")]
        print(f"\nagainst torch.compile, strict: Fast_1, 1.2, 1.5, 2: {', '.join(cells)}; {compiled(samples)}")


def gains(pairs, seed=0):
    """Print what changed, problem by problem. pairs: (samples before, samples after) of each seed."""
    problems = sorted(set.intersection(*(set(side) for pair in pairs for side in pair)))
    if not problems:
        raise UserError("these benchmarks have no problem in common")
    for name, value in GAINS.items():
        def mean(samples, problem):
            return statistics.fmean(value(sample.scored) for sample in samples[problem])

        changes = [statistics.fmean(mean(after, p) - mean(before, p) for before, after in pairs) for p in problems]
        draws, rng = [], random.Random(seed)
        for _ in range(10_000):
            draws.append(statistics.fmean(rng.choices(changes, k=len(changes))))
        draws.sort()
        print(f"{name:16} {statistics.fmean(changes):+.3f} [{draws[250]:+.3f}, {draws[-251]:+.3f}] over "
              f"{len(problems)} problems, {len(pairs)} seed{'s' * (len(pairs) > 1)}")


def fast_p(found) -> Chart:
    """Fast_p of each benchmark, a line for its strict best turns. found: {folder: its samples}."""
    curves, ps = [], [p / 20 for p in range(16, 51)]
    for folder, samples in found.items():
        speeds = [best(sample.scored) for sample in itertools.chain(*samples.values())]
        curves.append(Curve(Path(folder).name, ps, [sum(one > p for one in speeds) / len(speeds) for p in ps]))
    return Chart("Share of samples correct and over p times as fast", "", curves, "p", "shares")


def transcript(folder) -> str:
    """The first rollout of every problem whose id is divisible by 20, as Markdown."""
    parts = []
    for task, (sample, *_) in sorted(samples_of(folder).items(), key=lambda entry: problem_id(entry[0])):
        if problem_id(task) % 20 == 0:
            parts.append(f"## {task}\n\nSkills: {', '.join(sample.skills) or 'none'}.\n")
            parts += [f"{turn.reply}\n\n> {' '.join(feedback(turn.verdict).split())}\n" for turn in sample.turns]
    return "\n".join(parts)


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="*", help="one benchmark, or one before and one after")
    parser.add_argument("--before", nargs="+", default=[])
    parser.add_argument("--after", nargs="+", default=[])
    parser.add_argument("--read", metavar="FILE", help="where rollouts are written for reading")
    parser.add_argument("--plot", metavar="FILE", help="a picture of Fast_p by p, a line for each folder")
    args = parser.parse_args(argv)
    before, after = args.before or args.folders[:1], args.after or args.folders[1:]
    if not before or after and len(before) != len(after):
        raise UserError("give one folder of bench.py, or as many after as before")
    found = {folder: samples_of(folder) for folder in before + after}
    for folder, samples in found.items():
        print(f"\n{folder}\n")
        shares(samples)
        print(f"\nwithout a correct turn: {failures(samples)}\nfirst turns: {first_turns(samples)}\n"
              f"skills: {with_skills(samples)}")
    if args.plot:
        save_png([fast_p(found)], args.plot, "strict, against eager PyTorch")
    if args.read:
        Path(args.read).write_text("\n".join(map(transcript, before + after)))
    if after and not args.read:
        print("\nafter minus before")
        gains([(found[a], found[b]) for a, b in zip(before, after)])
    return 0


if __name__ == "__main__":
    run_command(main)

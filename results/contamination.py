"""How near is the training data to the evaluation problems, by the project's own measure of decontamination?

    python results/contamination.py --kernelbench DIR [--wide] [--problems 80000] [--out contamination.json]
    python results/contamination.py --kernelbench DIR --fingerprints      (writes problems/kernelbench_fingerprints.txt)

Two problems are near when their models apply the same operators the same number of times (tasks.operators); such a
training problem is refused (tasks.unfit). Here each evaluation problem is compared with all that are left of so many
seeds of the cold start: the share of operators that two problems have in common, of all that either has, each counted
as often as it is applied (1 would be a refused problem). Printed are counts; what the nearest problems are is told for
ids divisible by 5 only: the others are not looked at.
"""

import argparse
import json
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from synthetic.generator import NARROW, WIDE, synthesize  # noqa: E402
from tasks import (PROBLEMS, builtin_tasks, evaluation_fingerprints, fingerprint, kernelbench_tasks,  # noqa: E402
                   operators, problem_id, run_command)

BOUNDS = (0.5, 0.6, 0.7, 0.8, 0.9)


def training_operators(seeds, wide):
    """{operators of a training problem: a seed that has them}, and how many seeds were refused."""
    evaluation, found, refused = evaluation_fingerprints(), {}, 0
    for seed in seeds:
        source = synthesize(seed, clutter=seed % 3 > 0, distribution=WIDE if wide else NARROW).source
        if fingerprint(source) in evaluation:
            refused += 1
        else:
            found.setdefault(tuple(operators(source)), seed)
    return found, refused


def common(a, b) -> float:
    """The share of operators that two Counters have in common.

    >>> common(Counter(["add", "mul"]), Counter(["add", "mul", "mul"]))
    0.6666666666666666
    """
    return (a & b).total() / max(1, (a | b).total())


def nearest(name, found, training):
    """(name, share, the nearest training problem's seed and operators) of an evaluation problem."""
    share, key = max((common(found, counts), key) for key, counts in training.items())
    return name, share, key


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kernelbench", required=True, metavar="DIR")
    parser.add_argument("--wide", action="store_true", help="the wide distribution of sft.py")
    parser.add_argument("--problems", type=int, default=80_000, help="seeds of the cold start")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", help="file for the shares of all problems")
    parser.add_argument("--fingerprints", action="store_true", help="only hash the operators of KernelBench's problems")
    args = parser.parse_args()
    if args.fingerprints:
        found = {fingerprint(task.source) for level in (1, 2, 3) for task in kernelbench_tasks(args.kernelbench, level)}
        (PROBLEMS / "kernelbench_fingerprints.txt").write_text("\n".join(sorted(found)) + "\n")
        return
    chunks = [range(start, min(start + 2000, args.problems)) for start in range(0, args.problems, 2000)]
    groups = {"built-in": builtin_tasks()}
    groups |= {f"level {level}": kernelbench_tasks(args.kernelbench, level) for level in (1, 2, 3)}
    report = {}
    with ProcessPoolExecutor(args.processes) as pool:
        parts = list(pool.map(partial(training_operators, wide=args.wide), chunks))
        seeds = {key: seed for found, _ in parts for key, seed in found.items()}
        training = {key: Counter(key) for key in seeds}
        refused = sum(count for _, count in parts)
        print(f"{args.problems} seeds, {refused} refused as near an evaluation problem; {len(seeds)} different sets of "
              "operators are left")
        row = "{:<10}" + "{:>9}" * (len(BOUNDS) + 3)
        print(row.format("", "problems", *(f">= {bound}" for bound in BOUNDS), "equal", "median"))
        for group, tasks in groups.items():
            found = list(pool.map(partial(nearest, training=training), [task.name for task in tasks],
                                  [Counter(operators(task.source)) for task in tasks], chunksize=10))
            shares = sorted(share for _, share, _ in found)
            print(row.format(group, len(tasks), *(sum(share >= bound for share in shares) for bound in BOUNDS),
                             sum(share == 1 for share in shares), f"{shares[len(shares) // 2]:.2f}"))
            report[group] = {name: round(share, 3) for name, share, _ in found}
            for name, share, key in found:
                if group != "built-in" and problem_id(name) % 5 == 0:
                    print(f"    {name[:44]:<45} {share:.2f}  synth/{seeds[key]}: {' '.join(key)}"[:120])
    if args.out:
        Path(args.out).write_text(json.dumps({"problems": args.problems, "wide": args.wide, "refused": refused,
                                              "nearest": report}, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)

"""How near is the training data to the evaluation problems, by the project's own measure of decontamination?

    python results/contamination.py --kernelbench DIR [--problems 80000] [--out contamination.json]
    python results/contamination.py --kernelbench DIR --fingerprints      (writes problems/kernelbench_fingerprints.txt)

The measure is the list of operators that a problem's model applies (training.operators). Training rejects a problem
whose list is exactly that of an evaluation problem (training.unfit). Here we generate as many training problems as the
cold start does and compare the rest with each evaluation problem: the share of operators that two problems have in
common, of all that either has, each counted as often as it is applied. Printed are counts. The nearest training problem
is shown only for ids divisible by 5, because those alone may be read while working on this project.
"""

import argparse
import json
import statistics
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from command.process import run_command  # noqa: E402
from synthetic.families import synthesize  # noqa: E402
from synthetic.training import evaluation_fingerprints, fingerprint, operators  # noqa: E402
from tasks import PROBLEMS, builtin_tasks, kernelbench_tasks, problem_id  # noqa: E402

BOUNDS = (0.5, 0.6, 0.7, 0.8, 0.9)
LEVELS = (1, 2, 3)


def training_operators(seeds):
    """{operators of a training problem: a seed that has them}, and how many seeds were rejected."""
    evaluation = evaluation_fingerprints()
    found = {}
    rejected = 0
    for seed in seeds:
        source = synthesize(seed, clutter=seed % 3 > 0).source
        if fingerprint(source) in evaluation:
            rejected += 1
        else:
            found.setdefault(tuple(operators(source)), seed)
    return found, rejected


def common(a, b) -> float:
    """The share of operators that two Counters have in common.

    >>> common(Counter(["add", "mul"]), Counter(["add", "mul", "mul"]))
    0.6666666666666666
    """
    return (a & b).total() / max(1, (a | b).total())


def nearest(task, training):
    """(share, operators) of the training problem nearest to an evaluation problem. training: {operators: Counter}."""
    counts = Counter(operators(task.source))
    return max((common(counts, others), names) for names, others in training.items())


def write_fingerprints(folder):
    """Replace the file of KernelBench's fingerprints: a hash of each problem's operators."""
    found = set()
    for level in LEVELS:
        found.update(fingerprint(task.source) for task in kernelbench_tasks(folder, level))
    (PROBLEMS / "kernelbench_fingerprints.txt").write_text("\n".join(sorted(found)) + "\n")


def print_group(group, tasks, shares):
    """One row of the table: how many problems of a group have a share of at least each bound."""
    cells = [sum(share >= bound for share in shares) for bound in BOUNDS]
    equal = sum(share == 1 for share in shares)
    print(f"{group:<10}{len(tasks):>9}", *(f"{cell:>8}" for cell in cells), f"{equal:>8}",
          f"{statistics.median_high(shares):>8.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kernelbench", required=True, metavar="DIR")
    parser.add_argument("--problems", type=int, default=80_000, help="training problems of the cold start")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", help="file for the shares of all problems")
    parser.add_argument("--fingerprints", action="store_true", help="only hash the operators of KernelBench's problems")
    args = parser.parse_args()
    if args.fingerprints:
        write_fingerprints(args.kernelbench)
        return
    groups = {"built-in": builtin_tasks()}
    for level in LEVELS:
        groups[f"level {level}"] = kernelbench_tasks(args.kernelbench, level)
    chunks = [range(start, min(start + 2000, args.problems)) for start in range(0, args.problems, 2000)]
    seeds = {}  # operators -> a seed of the training problem that has them
    rejected = 0
    report = {}
    with ProcessPoolExecutor(args.processes) as pool:
        for found, count in pool.map(training_operators, chunks):
            seeds.update(found)
            rejected += count
        training = {names: Counter(names) for names in seeds}
        print(f"{args.problems} training problems, {rejected} rejected; {len(seeds)} different lists of operators left")
        print(f"{'':<10} problems", *(f"{f'>= {bound}':>8}" for bound in BOUNDS), f"{'equal':>8}", f"{'median':>8}")
        for group, tasks in groups.items():
            found = list(pool.map(partial(nearest, training=training), tasks, chunksize=10))
            print_group(group, tasks, [share for share, _ in found])
            report[group] = {task.name: round(share, 3) for task, (share, _) in zip(tasks, found)}
            for task, (share, names) in zip(tasks, found):
                if group != "built-in" and problem_id(task.name) % 5 == 0:
                    print(f"    {task.name[:44]:<45} {share:.2f}  synth/{seeds[names]}: {' '.join(names)}"[:120])
    if args.out:
        facts = {"problems": args.problems, "rejected": rejected, "nearest": report}
        Path(args.out).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)

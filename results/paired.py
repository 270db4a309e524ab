"""Did a run learn? The evaluation after training minus before, over runs with different seeds.

    python results/paired.py runs/seed0 runs/seed1 runs/seed2                 by problem, from rollouts/
    python results/paired.py A0.jsonl A1.jsonl                                by metric, from metrics.jsonl
    python results/paired.py A0.jsonl A1.jsonl --minus B0.jsonl B1.jsonl      what A gains more than B, seed by seed

Of folders it reads rollouts/eval_0.jsonl and the last rollouts/eval_N.jsonl, and prints for the best turn's reward on
the built-in problems: means, the paired difference and its 95 % interval (Student's t), once with seeds as the unit and
once with problems (averaged over seeds), and the means of each level.
"""

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from command.files import read_lines  # noqa: E402
from command.process import UserError, run_command  # noqa: E402

T975 = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}  # Student's t


def rewards(path) -> dict[str, float]:
    """{task: mean over its rollouts of the best turn's reward}"""
    found = {}
    for line in read_lines(path):
        if line["role"] == "policy":
            found.setdefault(line["task"], []).append(max(turn["reward"] for turn in line["turns"]))
    return {task: statistics.mean(values) for task, values in found.items()}


def interval(differences) -> str:
    """Their mean, and its 95 % interval by Student's t."""
    n, mean = len(differences), statistics.mean(differences)
    if n == 1:
        return f"{mean:+.3f}, n = 1"
    half = T975.get(n - 1, 1.96 + 2.4 / (n - 1)) * statistics.stdev(differences) / n ** 0.5
    return f"{mean:+.3f}, 95 % interval [{mean - half:+.3f}, {mean + half:+.3f}], n = {n}"


def evaluations(path) -> list[dict]:
    """The lines of a metrics.jsonl with an evaluation."""
    found = [line for line in read_lines(Path(path)) if "eval_correct" in line]
    if len(found) < 2:
        raise UserError(f"{path}: no evaluation before and after")
    return found


def compare(paths, minus):
    """Print what runs gain from the first evaluation to the last. minus: other runs, whose gains are subtracted."""
    runs = [evaluations(path) for path in paths]
    others = [evaluations(path) for path in minus]
    if minus and len(minus) != len(paths):
        raise UserError("--minus needs as many runs")
    for name in runs[0][0]:
        # A metric is None where it is a mean of nothing.
        if not name.startswith("eval_") or any(line.get(name) is None for run in runs + others for line in run):
            continue
        gains = [run[-1][name] - run[0][name] for run in runs]
        for number, other in enumerate(others):
            gains[number] -= other[-1][name] - other[0][name]
        print(f"{name:20}", interval(gains))
        if not minus:
            for lines in zip(*runs):
                print(f"    step {lines[0]['step']}: {statistics.mean(line[name] for line in lines):.3f}")


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", help="folders of runs that differ in their seeds")
    parser.add_argument("--minus", nargs="+", metavar="FILE", help="metrics.jsonl of other runs with the same seeds")
    args = parser.parse_args(argv)
    if args.minus or Path(args.runs[0]).is_file():
        compare(args.runs, args.minus or [])
        return 0
    pairs = []
    for folder in map(Path, args.runs):
        files = sorted(folder.glob("rollouts/eval_*.jsonl"), key=lambda path: int(path.stem.split("_")[1]))
        if len(files) < 2:
            raise UserError(f"{folder}: no evaluation before and after")
        before, after = rewards(files[0]), rewards(files[-1])
        pairs.append((before, after))
        print(f"{folder.name}: {statistics.mean(before.values()):.3f} -> {statistics.mean(after.values()):.3f} "
              f"on {len(before)} problems, {files[-1].stem.split('_')[1]} steps")
    tasks = sorted(set.intersection(*(set(side) for pair in pairs for side in pair)))
    if not tasks:
        raise UserError("these runs have no problem in common")
    if len(pairs) > 1:
        print("over seeds:   ", interval([statistics.mean(b[t] - a[t] for t in tasks) for a, b in pairs]))
    print("over problems:", interval([statistics.mean(b[t] - a[t] for a, b in pairs) for t in tasks]))
    for level in sorted({task.split("/")[0] for task in tasks}):
        mine = [task for task in tasks if task.startswith(level)]
        means = [statistics.mean(pair[which][t] for pair in pairs for t in mine) for which in (0, 1)]
        print(f"{level}: {means[0]:.3f} -> {means[1]:.3f} on {len(mine)} problems")
    return 0


if __name__ == "__main__":
    run_command(main)

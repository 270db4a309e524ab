"""What happened in training runs: parts of a run side by side, proposals, seconds, repaired kernels, selected skills.

    python results/summary.py [--parts 4] runs/seed0 runs/seed1 ...

Reads metrics.jsonl of each run and, where they are, its rollouts/. paired.py compares the evaluation before and after.
"""

import argparse
import math
import statistics
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from command.files import read_lines  # noqa: E402
from policy import mean  # noqa: E402
from command.process import UserError, run_command  # noqa: E402

MEANS = ("correct", "correct_first", "fast_1", "fast_1.2", "coverage", "reward_best")


def repaired(rollouts) -> tuple[int, int]:
    """(rollouts whose second turn is correct, of those whose first turn is not)"""
    fixed, wrong = 0, 0
    for line in rollouts:
        if line["role"] == "policy" and len(line["turns"]) > 1 and not line["turns"][0]["verdict"]["correct"]:
            wrong += 1
            fixed += line["turns"][1]["verdict"]["correct"]
    return fixed, wrong


def selected(rollouts) -> str:
    """How Selection's choices are spread over the skills: how many it made, which most often, the entropy in bits."""
    counts = Counter(skill for line in rollouts if line["role"] == "selection" for skill in line["skills"])
    total, [(most, times)] = counts.total(), counts.most_common(1) or [("none", 0)]
    entropy = sum(-n / total * math.log2(n / total) for n in counts.values())
    return f"{total} choices of {len(counts)} skills, {times / max(total, 1):.1%} {most}, entropy {entropy:.2f} bits"


def show(run, parts):
    """Print what happened in a run. Raises UserError where it has too few steps."""
    steps = [line for line in read_lines(run / "metrics.jsonl") if line["step"] > 0]
    if len(steps) < parts:
        raise UserError(f"{run}: {len(steps)} steps are done, fewer than --parts {parts}")
    print(f"{run}: {len(steps)} steps")
    cuts = [round(i * len(steps) / parts) for i in range(parts + 1)]
    for name in MEANS:
        cells = []
        for first, last in zip(cuts, cuts[1:]):
            value = mean(line[name] for line in steps[first:last] if line[name] is not None)
            cells.append("       -" if value is None else f"{value:8.3f}")
        print(f"  {name:15}" + "".join(cells))
    totals = {}
    for name in ("proposals", "passed", "selected_learnt"):
        totals[name] = sum(line[name] for line in steps)
    for name in ("rejected", "rows", "masked"):
        totals[name] = dict(sum((Counter(line[name]) for line in steps), Counter()))
    norms = [line["grad_norm"] for line in steps]
    print(f"  proposals {totals['proposals']}, passed {totals['passed']}, rejected {totals['rejected']}; library "
          f"{steps[-1]['library']}, skills that were learnt selected {totals['selected_learnt']} times")
    print(f"  replies in the loss {totals['rows']}, masked {totals['masked']}; gradient norm {min(norms):.2f} to "
          f"{max(norms):.2f}, median {statistics.median(norms):.2f}")
    print("  Summary's mean return by step", *[f"{line['reward_summary'] or 0:.2f}" for line in steps])
    phases = {name: statistics.mean(line["seconds"].get(name, 0) for line in steps) for name in steps[0]["seconds"]}
    print(f"  seconds of a step {sum(phases.values()):.1f}: "
          + ", ".join(f"{name} {value:.2f}" for name, value in phases.items()))
    groups = {"steps": sorted(run.glob("rollouts/step_*.jsonl"))}
    for path in sorted(run.glob("rollouts/eval_*.jsonl")):
        groups[path.stem] = [path]
    for name, paths in groups.items():
        rollouts = sum((read_lines(path) for path in paths), [])
        fixed, wrong = repaired(rollouts)
        print(f"  {name}: {fixed} of {wrong} wrong first turns are followed by a correct one; {selected(rollouts)}")


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--parts", type=int, default=1, help="equal parts of a run to be shown side by side")
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    args = parser.parse_args(argv)
    for run in args.runs:
        show(run, args.parts)
    return 0


if __name__ == "__main__":
    run_command(main)

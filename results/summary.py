"""What happened in training runs: parts of a run side by side, proposals, seconds, repaired kernels, selected skills.

    python results/summary.py [--parts 4] runs/seed0 runs/seed1 ...

Reads metrics.jsonl of each run and, where they are, its rollouts/. Evaluation before against after: paired.py.
"""

import argparse
import math
import statistics
import sys
from collections import Counter, defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from page.records import mean  # noqa: E402
from report import read_lines, read_metrics  # noqa: E402
from tasks import UserError, run_command  # noqa: E402

COUNTS = ("grad_clipped", "zero_gradient", "proposals", "passed", "known", "policy_live", "policy_rows",
          "selection_live", "selection_rows", "summary_live", "summary_rows")
SHARES = ("correct", "correct_first", "fast_1", "fast_1.2", "coverage", "reward_best")


def repaired(rollouts) -> tuple[int, int]:
    """(rollouts whose second turn is correct, of those whose first turn is not)"""
    pairs = [[turn["verdict"]["correct"] for turn in line["turns"][:2]] for line in rollouts
             if line["role"] == "policy" and len(line["turns"]) > 1]
    return sum(second for first, second in pairs if not first), sum(not first for first, _ in pairs)


def selected(rollouts) -> str:
    """How Selection's choices are spread over the skills: how many it made, which most often, the entropy in bits."""
    counts = Counter(skill for line in rollouts if line["role"] == "selection" for skill in line["skills"])
    total, [(most, times)] = counts.total(), counts.most_common(1) or [("none", 0)]
    entropy = sum(-n / total * math.log2(n / total) for n in counts.values())
    return f"{total} choices of {len(counts)} skills, {times / max(total, 1):.1%} {most}, entropy {entropy:.2f} bits"


def show(run, parts) -> list[dict]:
    """Print what happened in a run; its steps' lines of metrics.jsonl. Raises UserError where they are too few."""
    steps = [line for line in read_metrics(run) if line["step"] > 0]
    if len(steps) < parts:
        raise UserError(f"{run}: {len(steps)} steps are done, fewer than --parts {parts}")
    print(f"{run}: {len(steps)} steps")
    cuts = [round(i * len(steps) / parts) for i in range(parts + 1)]
    for name in SHARES:
        means = [mean(line[name] for line in steps[a:b] if line[name] is not None) for a, b in zip(cuts, cuts[1:])]
        print(f"  {name:15}" + "".join(" " * 7 + "-" if value is None else f"{value:8.3f}" for value in means))
    total = defaultdict(lambda: "?")  # sums over the steps; runs of older versions did not record all of them
    for name, value in steps[0].items():
        if isinstance(value, (int, float)):
            total[name] = sum(line[name] or 0 for line in steps)
    rejected = sum((Counter(line["rejected"]) for line in steps), Counter())
    print(f"  proposals {total['proposals']}, passed {total['passed']} ({total['known']} known), "
          f"rejected {dict(rejected.most_common())}; library {steps[-1]['library']}, skills that were learnt selected "
          f"{total['selected_learnt']} times")
    print("  replies that teach: " + ", ".join(f"{role} {total[f'{role}_live']} of {total[f'{role}_rows']}"
                                               for role in ("policy", "selection", "summary")))
    norms = [line["grad_norm"] for line in steps]
    print(f"  turns masked { {why: total[f'{why}_masked'] for why in ('prs', 'void', 'group', 'mrs')} }; gradient norm "
          f"{min(norms):.2f} to {max(norms):.2f}, clipped in {total['grad_clipped']} steps, none in "
          f"{total['zero_gradient']}; Summary's return "
          + ", ".join("-" if line["reward_summary"] is None else f"{line['reward_summary']:.2f}" for line in steps))
    phases = {name: statistics.mean(line["seconds"].get(name, 0) for line in steps) for name in steps[0]["seconds"]}
    print(f"  seconds of a step {sum(phases.values()):.1f}: "
          + ", ".join(f"{name} {value:.2f}" for name, value in phases.items()))
    evaluations = {path.stem: [path] for path in sorted(run.glob("rollouts/eval_*.jsonl"))}
    for name, paths in {"steps": list(run.glob("rollouts/step_*.jsonl")), **evaluations}.items():
        rollouts = [line for path in paths for line in read_lines(path, dict)]
        right, broken = repaired(rollouts)
        print(f"  {name}: {right} of {broken} broken first turns are followed by a correct one; {selected(rollouts)}")
    return steps


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--parts", type=int, default=1, help="equal parts of a run to be shown side by side")
    parser.add_argument("runs", nargs="+", help="folders of runs")
    args = parser.parse_args(argv)
    steps = [line for run in args.runs for line in show(Path(run), args.parts)]
    if len(args.runs) > 1:
        norm = statistics.median(line["grad_norm"] for line in steps)
        print(f"all: {len(steps)} steps, gradient norm {norm:.2f} in the median, "
              + ", ".join(f"{name} {sum(line[name] for line in steps)}" for name in COUNTS))
    return 0


if __name__ == "__main__":
    run_command(main)

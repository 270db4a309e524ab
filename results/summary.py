"""What happened in training runs: parts of a run side by side, proposals, seconds, repaired kernels.

    python results/summary.py [--parts 4] runs/seed0 runs/seed1 ...

Reads metrics.jsonl of each run and, where they are, its rollouts/. Evaluation before against after: paired.py.
"""

import argparse
import json
import statistics
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from backbone import extract_code  # noqa: E402
from tasks import run_command  # noqa: E402

SHARES = ("correct", "correct_first", "fast_1", "fast_1.2", "coverage", "reward_best")


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def repaired(paths) -> tuple[int, int]:
    """(rollouts whose second turn is correct, of those whose first turn is not)"""
    pairs = [[turn["verdict"]["correct"] for turn in line["turns"][:2]] for path in paths for line in lines(path)
             if line["role"] == "policy" and len(line["turns"]) > 1]
    return sum(second for first, second in pairs if not first), sum(not first for first, _ in pairs)


def codes(paths) -> set:
    """The distinct kernels that the policy wrote."""
    replies = (turn["reply"] for path in paths for line in lines(path) if line["role"] == "policy"
               for turn in line["turns"])
    return {code for code in map(extract_code, replies) if code}


def slowest_references(path) -> str:
    """Milliseconds, measured or modelled, that the slowest three of a step's problems take in PyTorch."""
    times = {line["task"]: turn["verdict"]["reference_ms"] for line in lines(path) if line["role"] == "policy"
             for turn in line["turns"] if turn["verdict"]["reference_ms"]}
    return ", ".join(f"{ms:.2f}" for ms in sorted(times.values(), reverse=True)[:3])


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--parts", type=int, default=1, help="equal parts of a run to be shown side by side")
    parser.add_argument("runs", nargs="+", help="folders of runs")
    args = parser.parse_args(argv)
    written = set()
    for run in map(Path, args.runs):
        written |= codes(run.glob("rollouts/*.jsonl"))
        steps = [line for line in lines(run / "metrics.jsonl") if line["step"] > 0]
        print(f"{run}: {len(steps)} steps")
        cuts = [round(i * len(steps) / args.parts) for i in range(args.parts + 1)]
        for name in SHARES:
            means = [statistics.mean(line[name] for line in steps[a:b] if line[name] is not None)  # None: none correct
                     for a, b in zip(cuts, cuts[1:])]
            print(f"  {name:15}" + "".join(f"{mean:8.3f}" for mean in means))
        rejected = sum((Counter(line["rejected"]) for line in steps), Counter())
        proposals, passed = (sum(line[name] for line in steps) for name in ("proposals", "passed"))
        print(f"  proposals {proposals}, passed {passed}, "
              f"rejected {dict(rejected.most_common())}; library {steps[-1]['library']}, skills that were learnt "
              f"selected {sum(line['selected_learnt'] for line in steps)} times")
        live = {role: (sum(line[f"{role}_live"] for line in steps), sum(line[f"{role}_rows"] for line in steps))
                for role in ("policy", "selection", "summary") if f"{role}_live" in steps[0]}  # not in older runs
        print("  replies that teach: " + ", ".join(f"{role} {a} of {b}" for role, (a, b) in live.items()))
        masked = {why: sum(line.get(f"{why}_masked", 0) for line in steps) for why in ("prs", "void", "group", "mrs")}
        norms = [line["grad_norm"] for line in steps]
        clipped = sum(line.get("grad_clipped", line["grad_norm"] > 1.0) for line in steps)
        print(f"  turns masked {masked}; gradient norm {min(norms):.2f} to {max(norms):.2f}, mean "
              f"{statistics.mean(norms):.2f}, clipped in {clipped} steps, "
              f"none in {sum(line['tokens_live'] == 0 for line in steps)}; Summary's return "
              + ", ".join("-" if line["reward_summary"] is None else f"{line['reward_summary']:.2f}" for line in steps))
        phases = {name: statistics.mean(line["seconds"].get(name, 0) for line in steps) for name in steps[0]["seconds"]}
        print(f"  seconds of a step {sum(phases.values()):.1f}: "
              + ", ".join(f"{name} {value:.2f}" for name, value in phases.items()))
        groups = {"training": sorted(run.glob("rollouts/step_*.jsonl")),
                  **{path.stem: [path] for path in sorted(run.glob("rollouts/eval_*.jsonl"))}}
        for name, paths in groups.items():
            if paths:
                right, broken = repaired(paths)
                print(f"  {name}: {right} of {broken} broken first turns are followed by a correct one")
        for path in sorted(run.glob("rollouts/step_*.jsonl"), key=lambda path: int(path.stem[5:])):
            print(f"  {path.stem}: slowest references {slowest_references(path)} ms")
    print(f"{len(written)} distinct kernels")
    return 0


if __name__ == "__main__":
    run_command(main)

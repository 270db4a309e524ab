"""Do a run's recorded verdicts still hold? Scores its correct kernels again: for after a change of the modelled prices.

    python results/rescore.py runs/seed1 runs/seed2 ...

Reads rollouts/*.jsonl of runs on the modelled clock whose tasks are synthesised or built in. Prints how many kernels
each run has, and those whose speedup is another one than recorded (by more than 1e-9), or that are no longer correct.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from backbone import extract_code  # noqa: E402
from sandbox import Sandbox  # noqa: E402
from synthetic.generator import synthesize  # noqa: E402
from tasks import builtin_tasks, run_command  # noqa: E402


def recorded(folder):
    """{(task name, code): speedup} of a run's correct kernels."""
    lines = (json.loads(line) for path in sorted(folder.glob("rollouts/*.jsonl")) for line in path.open())
    turns = ((line["task"], turn) for line in lines if line["role"] == "policy" for turn in line["turns"])
    return {(task, extract_code(turn["reply"])): turn["verdict"]["speedup"] for task, turn in turns
            if turn["verdict"]["correct"]}


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", help="folders of runs")
    builtin = {task.name: task for task in builtin_tasks()}
    with Sandbox("cpu", trials=3) as box:  # as the default run
        for folder in map(Path, parser.parse_args(argv).runs):
            found = recorded(folder)
            pairs = [(builtin.get(name) or synthesize(int(name.split("/")[1]), clutter=True), code)
                     for name, code in found]
            changed = [(task.name, before, verdict.speedup, verdict.error or verdict.rejected)
                       for (task, _), before, verdict in zip(pairs, found.values(), box.score_pairs(pairs))
                       if verdict.speedup is None or abs(verdict.speedup / before - 1) > 1e-9]
            print(f"{folder}: {len(found)} kernels, {len(changed)} of them scored differently", *changed, sep="\n  ")
    return 0


if __name__ == "__main__":
    run_command(main)

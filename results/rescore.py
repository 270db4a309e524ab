"""Do a run's recorded verdicts still hold? Scores its kernels again: for after a change of the judge.

    python results/rescore.py runs/seed1 runs/seed2 ...                  (by this version)
    python results/rescore.py --by CHECKOUT runs/seed1 runs/seed2 ...    (by the version in another folder)

Reads rollouts/*.jsonl of runs on the modelled clock whose tasks are synthesised or built in. Prints a line for every
kernel whose verdict is another one: right or not, or its speedup by more than a hundredth; and at the end how many.
"""

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backbone import extract_code  # noqa: E402
from synthetic.generator import synthesize  # noqa: E402
from tasks import builtin_tasks, run_command  # noqa: E402

SCORE = """
import json, sys
from sandbox import Sandbox
from tasks import Task
with Sandbox("cpu", trials=3) as box:  # as the default run
    verdicts = box.score_pairs([(Task(name, 0, source), code) for name, source, code in json.load(sys.stdin)])
json.dump([[v.correct, v.speedup, v.rejected or v.error] for v in verdicts], sys.stdout)
"""


def recorded(folder):
    """{(task name, code): verdict} of a run's kernels."""
    lines = (json.loads(line) for path in sorted(folder.glob("rollouts/*.jsonl")) for line in path.open())
    turns = ((line["task"], turn) for line in lines if line["role"] == "policy" for turn in line["turns"])
    return {(task, extract_code(turn["reply"])): turn["verdict"] for task, turn in turns if extract_code(turn["reply"])}


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", help="folders of runs")
    parser.add_argument("--by", default=str(Path(__file__).parent.parent), help="folder whose sandbox.py scores")
    args = parser.parse_args(argv)
    builtin, kinds = {task.name: task for task in builtin_tasks()}, Counter()
    for folder in map(Path, args.runs):
        found = recorded(folder)
        tasks = {name: builtin.get(name) or synthesize(int(name.split("/")[1]), clutter=True) for name, _ in found}
        pairs = json.dumps([(name, tasks[name].source, code) for name, code in found])
        answer = subprocess.run([sys.executable, "-c", SCORE], input=pairs, cwd=args.by, text=True, check=True,
                                stdout=subprocess.PIPE)
        for ((name, _), old), (correct, speedup, why) in zip(found.items(), json.loads(answer.stdout), strict=True):
            kind = "same"
            if old["correct"] != correct:
                kind = "now right" if correct else "no longer right"
            elif correct and abs(speedup / old["speedup"] - 1) > 0.01:
                kind = "other speedup"
            kinds[kind] += 1
            if kind != "same":
                print(f"{folder} {name}: {kind}, {old['speedup']} -> {speedup} {why or old['error'] or ''}", flush=True)
    print(f"{kinds.total()} kernels: {dict(kinds)}")
    return 0


if __name__ == "__main__":
    run_command(main)

"""Do the verdicts of a run still hold? Scores its kernels again, after a change of the judge.

    python results/rescore.py runs/seed1 runs/seed2 ...                  (by this version)
    python results/rescore.py --by CHECKOUT runs/seed1 runs/seed2 ...    (by the version in another folder)

Reads rollouts/*.jsonl of runs on the modelled clock whose tasks are synthesised or built in. Prints a line for every
kernel whose verdict has changed: correct or not, or its speedup by more than a hundredth; and at the end how many.
"""

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from chat.calls import extract_code  # noqa: E402
from command.files import read_lines  # noqa: E402
from command.process import run_command  # noqa: E402
from synthetic import redundant  # noqa: E402
from synthetic.families import draw, task_of  # noqa: E402
from tasks import builtin_tasks, redundant_tasks  # noqa: E402

# Runs in the folder of either version: both must have what it uses.
SCORE = """
import json, sys
from sandbox import Sandbox
from tasks import Task
with Sandbox("cpu", trials=3) as box:  # as the default run
    pairs = [(Task(name, 0, source), code) for name, source, code in json.load(sys.stdin)]
    verdicts = [future.result() for future in box.submit(pairs)]
json.dump([[v.correct, v.speedup, v.rejected or v.error] for v in verdicts], sys.stdout)
"""


def kernels(folder) -> dict:
    """{(task name, code): verdict} of a run's kernels."""
    verdicts = {}
    for path in sorted(folder.glob("rollouts/*.jsonl")):
        for line in read_lines(path):
            for turn in line["turns"] if line["role"] == "policy" else ():
                code = extract_code(turn["reply"])
                if code:
                    verdicts[line["task"], code] = turn["verdict"]
    return verdicts


def change(before, correct, speedup) -> str:
    """What has become of a verdict."""
    if before["correct"] != correct:
        return "now correct" if correct else "no longer correct"
    if correct and abs(speedup / before["speedup"] - 1) > 0.01:
        return "another speedup"
    return "same"


def drawn_task(kind, seed):
    """The training problem with this name, "synth/<seed>" or "redundant/<seed>"."""
    if kind == "redundant":
        return redundant.task(int(seed))
    return task_of(draw(int(seed), clutter=True, plain=True))


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--by", default=Path(__file__).parent.parent, help="folder whose sandbox.py scores")
    args = parser.parse_args(argv)
    builtin = {task.name: task for task in builtin_tasks() + redundant_tasks()}
    kinds = Counter()
    for folder in args.runs:
        before, triples = kernels(folder), []
        for name, code in before:
            task = builtin.get(name) or drawn_task(*name.split("/"))
            triples.append((name, task.source, code))
        answer = subprocess.run([sys.executable, "-c", SCORE], input=json.dumps(triples), cwd=args.by, text=True,
                                check=True, stdout=subprocess.PIPE)
        for ((name, _), old), (correct, speedup, why) in zip(before.items(), json.loads(answer.stdout), strict=True):
            kind = change(old, correct, speedup)
            kinds[kind] += 1
            if kind != "same":
                print(f"{folder} {name}: {kind}, {old['speedup']} -> {speedup} {why or old['error'] or ''}")
    print(f"{kinds.total()} kernels: {dict(kinds)}")
    return 0


if __name__ == "__main__":
    run_command(main)

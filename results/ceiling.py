"""The most that imitation can give: the programmatic expert, whose kernels the cold start imitates, as a policy.

    python results/ceiling.py --kernelbench DIR [--levels 1 2 3] [--ids every5] [--device cuda] [--out ceiling.json]

For every problem of a level: can the expert's reader follow the forward, does the expert have a kernel for it, is the
kernel correct, and how fast is it? Prints and writes counts for whole levels, and failures by reasons that say nothing
of single problems, since these are evaluation problems. Without a GPU most problems are too large to be judged.
"""

import argparse
import json
import sys
from collections import Counter
from multiprocessing import Pool
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from policy import score_pairs  # noqa: E402
from command.process import run_command  # noqa: E402
from sandbox import PRECISE, Sandbox  # noqa: E402
from synthetic import expert  # noqa: E402
from tasks import chosen_tasks, kernelbench_tasks, too_large  # noqa: E402

TIMEOUT = 60.0  # seconds for a candidate


def answer(task) -> tuple:
    """(code or None, why there is none)"""
    try:
        solution = expert.render(expert.follow(task), expert.ALL)
    except expert.Unsupported as error:
        return None, f"not followed: {error}"
    return (solution.code, "") if solution else (None, "no kernel")


def count(tasks, answers, sandbox) -> dict:
    """The counts of a level."""
    pairs, failures = [], Counter()
    for task, (code, why) in zip(tasks, answers):
        if code and sandbox.device == "cpu" and too_large(task, TIMEOUT):
            why = "too large to be judged without a GPU"
        if why:
            failures[why] += 1
        else:
            pairs.append((task, code))
    speedups, strict = [], []
    for verdict in score_pairs(sandbox, pairs):
        if verdict.correct:
            speedups.append(verdict.speedup)
            strict.append(verdict.speedup_low if verdict.coverage else 0.0)
        else:
            failures["wrong: " + (verdict.rejected or verdict.error).split(":")[0][:40]] += 1
    counts = {"problems": len(tasks), "with a kernel": sum(bool(code) for code, _ in answers), "judged": len(pairs),
              "correct": len(speedups)}
    for p in (1, 1.2, 1.5, 2, 3):
        counts[f"more than {p}x"] = sum(speedup > p for speedup in speedups)
        counts[f"strictly more than {p}x"] = sum(speedup > p for speedup in strict)
    return counts | {"failures": dict(failures.most_common())}


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kernelbench", required=True, metavar="DIR")
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--ids", help="which problems, such as 1-20 or every5 (default: all)")
    parser.add_argument("--device", default="cpu", help="cpu models the time, cuda measures it")
    parser.add_argument("--out", help="file for the counts")
    args = parser.parse_args(argv)
    levels, answers, report = {}, {}, {}
    with Pool() as pool:  # before a sandbox starts CUDA
        for level in args.levels:
            levels[level] = chosen_tasks(kernelbench_tasks(args.kernelbench, level), args.ids)
            answers[level] = pool.map(answer, levels[level], chunksize=1)
    with Sandbox(args.device, trials=2, timeout=TIMEOUT, tasks=8, measure=PRECISE) as sandbox:
        for level, tasks in levels.items():
            report[f"level {level}"] = count(tasks, answers[level], sandbox)
            print(f"level {level}:", *[f"{name} {number}," for name, number in report[f"level {level}"].items()])
    if args.out:
        Path(args.out).write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    run_command(main)

"""What imitation can give at most: the programmatic expert answers KernelBench as if it were a policy.

    python results/ceiling.py --kernelbench DIR [--levels 1 2 3] [--ids every5] [--no-execution] [--out ceiling.json]

For every problem of a level: can the reader follow the forward, does the writer find work for a kernel, is the kernel
correct, and is it faster? Kernels are written for the problem as it stands and executed by the sandbox without a GPU on
a shrunken copy (its integers capped until all tensors together hold few enough elements), so "faster" is the modelled
clock's word at that size, an estimate. With --device cuda they are measured on the problem as it stands.
Printed are counts for whole levels (or --ids), failures by reasons that say nothing of the problem, and single problems
only where the id is divisible by 5: the others are not looked at.
"""

import argparse
import json
import sys
import time
from collections import Counter
from multiprocessing import Pool
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sandbox import PRECISE, Sandbox  # noqa: E402
from synthetic import expert  # noqa: E402
from tasks import SHRUNKEN, TaskError, chosen_tasks, kernelbench_tasks, problem_id, run_command, shrunken  # noqa: E402


def answer(task):
    """(code or None, why there is none)."""
    try:
        parsed = expert.follow(task)
    except expert.Unsupported as error:
        return None, f"not followed: {error}"
    solution = expert.render(parsed, expert.ALL)
    return (solution.code, "") if solution else (None, f"no kernel: {what_is_left(parsed)}")


def what_is_left(parsed) -> str:
    """Why a problem that was followed has no kernel: the kinds of its steps, in a word."""
    steps = [step for body in parsed.bodies for step in body.steps]
    kinds = {step.kind if step.layer is None else type(step.layer).__name__ for step in steps}
    return next((name.lower() for name in ("Conv", "Pool", "statement") if name in " ".join(kinds)), "another call")


def reason(verdict):
    """Why a kernel failed, without the problem's words."""
    text = verdict.rejected or verdict.error or ""
    return "wrong: " + text.split(":")[0][:40]


def judged(tasks, codes, args, failures) -> dict:
    """{name: Verdict} of the kernels that are judged within --minutes; of the others, why not is counted."""
    verdicts, end = {}, time.monotonic() + 60 * args.minutes
    with Sandbox(args.device, trials=2, seed=0, tasks=8, measure=PRECISE) as box:
        for name, future in zip(tasks, box.submit([(task, codes[name]) for name, task in tasks.items()])):
            try:
                verdicts[name] = future.result(max(0, end - time.monotonic()))
            except TaskError as error:
                failures[f"unusable: {str(error).split(':')[-1][:40]}"] += 1
            except TimeoutError:
                failures["not judged: no time was left"] += 1
    return verdicts


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kernelbench", required=True, metavar="DIR")
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--ids", help="which problems, such as 1-20 or every5 (default: all)")
    parser.add_argument("--device", default="cpu", help="cuda: the problems as they stand, measured")
    parser.add_argument("--minutes", type=float, default=60.0, help="for judging a level; what is left over is counted")
    parser.add_argument("--no-execution", action="store_true", help="only count what can be read and written")
    parser.add_argument("--out", help="file for the whole-level counts")
    parser.add_argument("--show", help="folder for the code that was written for ids divisible by 5")
    args = parser.parse_args()
    report, levels = {}, {n: chosen_tasks(kernelbench_tasks(args.kernelbench, n), args.ids) for n in args.levels}
    with Pool() as pool:  # before a sandbox starts CUDA
        answers = {level: pool.map(answer, tasks, chunksize=1) for level, tasks in levels.items()}
    for level, tasks in levels.items():
        codes, small, failures = {}, {}, Counter()
        details = {task.name: "" for task in tasks if problem_id(task.name) % 5 == 0}
        for task, (code, why) in zip(tasks, answers[level]):
            if code is None:
                failures[why] += 1
                details.update({task.name: why} if task.name in details else {})
                continue
            codes[task.name] = code
            version, count = shrunken(task) if args.device == "cpu" else (task, 1)
            small[task.name] = version if 0 < count < 20 * SHRUNKEN else None
            if args.show and task.name in details:
                Path(args.show).mkdir(exist_ok=True)
                (Path(args.show) / f"{task.name.replace('/', '_')}.py").write_text(code)
        print(f"level {level}: {len(codes)} of {len(tasks)} have a kernel; {dict(failures.most_common())}", flush=True)
        counts = {"problems": len(tasks), "followed": len(tasks) - sum(n for why, n in failures.items()
                                                                        if why.startswith("not followed")),
                  "with a kernel": len(codes)}
        if not args.no_execution:
            run = {name: task for name, task in small.items() if task}
            failures["too large to be checked here"] += len(small) - len(run)
            verdicts = judged(run, codes, args, failures)
            for name, verdict in verdicts.items():
                if not verdict.correct:
                    failures[reason(verdict)] += 1
                if name in details:
                    details[name] = verdict.error or verdict.rejected or f"{verdict.speedup:.2f}x"
            speedups = [v.speedup for v in verdicts.values() if v.correct]
            counts["checked"], counts["correct"] = len(verdicts), len(speedups)
            counts["correct to 1e-2"] = sum(bool(v.correct_loose) for v in verdicts.values())
            for bar in (1, 1.2, 1.5, 2):
                counts[f"faster than {bar}x ({'modelled' if args.device == 'cpu' else 'measured'})"] = sum(
                    speedup > bar for speedup in speedups)
            counts["strictly faster than 1x, 1.2x"] = [sum(
                v.correct and v.coverage and v.speedup_low > bar for v in verdicts.values()) for bar in (1, 1.2)]
        report[f"level {level}"] = {**counts, "failures": dict(failures.most_common())}
        print(f"level {level}: " + ", ".join(f"{name} {n}" for name, n in counts.items()))
        for why, n in failures.most_common():
            print(f"  {n:4} {why}")
        for name, what in details.items():
            print(f"       {name[:60]:60} {what[:150]}")
    if args.out:
        Path(args.out).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    run_command(main)

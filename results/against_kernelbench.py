"""The same candidates through sandbox.py, then through KernelBench's own evaluator. Needs a GPU.

    python results/against_kernelbench.py --kernelbench DIR [--out against_kernelbench.json]

The candidate of each problem is its reference under the name ModelNew, with the rule that asks for an own kernel
switched off. Both do 5 correctness trials; KernelBench then times 100 runs (and as many of the reference, for its check
of excessive speedups). DIR is a KernelBench checkout, whose requirements must be installed.
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

from measured_clock import as_candidate  # noqa: E402
from sandbox import Sandbox  # noqa: E402
from tasks import kernelbench_tasks, problem_id  # noqa: E402

PROBLEMS = {1: (1, 19, 23, 36, 40, 88, 95), 2: (1, 12, 29, 40), 3: (1, 9)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kernelbench", required=True, metavar="DIR")
    parser.add_argument("--out", default="against_kernelbench.json")
    parser.add_argument("--skip", nargs="*", default=[], metavar="LEVEL/ID",
                        help="not these through KernelBench's evaluator (the inputs of 1/23 and 1/36 take it minutes)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU here")
    sys.path.insert(0, str(Path(args.kernelbench) / "src"))
    from kernelbench.eval import eval_kernel_against_ref
    tasks = []
    for level, numbers in PROBLEMS.items():
        named = {problem_id(task.name): task for task in kernelbench_tasks(args.kernelbench, level)}
        tasks += [named[number] for number in numbers]
    codes = [as_candidate(task) for task in tasks]
    rows = [{"task": task.name} for task in tasks]

    began = time.monotonic()
    with Sandbox("cuda", trials=5, require_kernel=False, tasks=1) as box:
        for task, code, row in zip(tasks, codes, rows):
            start = time.monotonic()
            verdict = box.score(task, [code])[0]
            row["ours"] = {"seconds": time.monotonic() - start, "correct": verdict.correct, "speedup": verdict.speedup,
                           "candidate_ms": verdict.candidate_ms, "disturbed": verdict.disturbed,
                           "failure": verdict.error or verdict.rejected}
            print(f"{task.name[:50]:50} ours {row['ours']['seconds']:6.1f} s  correct {verdict.correct}  speedup "
                  f"{verdict.speedup or 0:.3f}  {row['ours']['failure'] or ''}", flush=True)
    around = time.monotonic() - began - sum(row["ours"]["seconds"] for row in rows)

    for task, code, row in zip(tasks, codes, rows):
        if task.name.split("_")[0].removeprefix("level") in args.skip:
            continue
        start = time.monotonic()
        try:
            result = eval_kernel_against_ref(task.source, code, num_correct_trials=5, num_perf_trials=100,
                                             measure_performance=True, device=torch.device("cuda:0"))
            found = {"correct": result.correctness, "candidate_ms": result.runtime}
        except Exception as error:  # it casts integer inputs to float, for one
            found = {"correct": None, "failure": f"{type(error).__name__}: {error}"[:200]}
        row["kernelbench"] = {"seconds": time.monotonic() - start, **found}
        print(f"{task.name[:50]:50} KernelBench {row['kernelbench']['seconds']:6.1f} s  {found}", flush=True)
    both = [row for row in rows if "kernelbench" in row]
    ours, theirs = (sum(row[name]["seconds"] for row in both) for name in ("ours", "kernelbench"))
    Path(args.out).write_text(json.dumps({
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "sandbox_start_and_end_seconds": around,
        "ours_seconds": ours, "kernelbench_seconds": theirs, "rows": rows}, indent=1))
    print(f"{len(both)} problems: ours {ours:.1f} s (and {around:.1f} s for the sandbox's start and end), "
          f"KernelBench {theirs:.1f} s: {theirs / ours:.1f} times as long")


if __name__ == "__main__":
    main()

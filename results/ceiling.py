"""What imitation can give at most: the programmatic expert answers KernelBench as if it were a policy.

    python results/ceiling.py --kernelbench DIR [--levels 1 2 3] [--no-execution] [--out ceiling.json]

For every problem of a level: can the reader follow the forward, does the writer find work for a kernel, is the kernel
correct, and is it faster? Kernels are written for the problem as it stands and executed by the sandbox without a GPU on
a shrunken copy (its integers capped until all tensors together hold few enough elements), so "faster" is the modelled
clock's word at that size, an estimate. With --device cuda they are measured on the problem as it stands.
Printed are counts for whole levels, failures by reasons that say nothing of the problem, and single problems only where
the id is divisible by 5: the others are not looked at.
"""

import argparse
import ast
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch  # noqa: E402

from sandbox import Sandbox  # noqa: E402
from synthetic import expert  # noqa: E402
from tasks import kernelbench_tasks  # noqa: E402


class _Cap(ast.NodeTransformer):
    """Replaces integers above `cap`: multiples of it become it, others keep what is left over. The first `count`."""

    def __init__(self, cap, count):
        self.cap, self.count = cap, count

    def visit_Constant(self, node):
        if type(node.value) is int and node.value > self.cap and self.count:
            self.count -= 1
            return ast.Constant(self.cap + node.value % self.cap)
        return node


def elements(source):
    """How many elements the inputs, the parameters and the output have together; None if the problem does not run."""
    space = {}
    try:
        with torch.device("meta"), torch.no_grad():
            exec(compile(source, "problem", "exec"), space)
            model, inputs = space["Model"](*space["get_init_inputs"]()), space["get_inputs"]()
            output = model(*inputs)
    except Exception:
        return None
    outputs = output if isinstance(output, (tuple, list)) else [output]
    tensors = [t for t in [*inputs, *model.parameters(), *outputs] if isinstance(t, torch.Tensor)]
    return sum(t.numel() for t in tensors)


def shrunken(task, most):
    """The problem with its sizes (module level, get_inputs, get_init_inputs) capped, as large as `most` allows."""
    if (elements(task.source) or most + 1) <= most:
        return task
    smallest = None
    for count in (1000, 1):  # all sizes; where that does not run, as with literals in the constructor, the batch alone
        for cap in (1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1):
            tree, capped = ast.parse(task.source), _Cap(cap, count)
            tree.body = [node if isinstance(node, ast.ClassDef) else capped.visit(node) for node in tree.body]
            source = ast.unparse(ast.fix_missing_locations(tree))
            n = elements(source)
            if n and n <= most:
                return replace(task, source=source)
            if n and (smallest is None or n < smallest[0]):
                smallest = n, source
    return replace(task, source=smallest[1]) if smallest and smallest[0] < 20 * most else None


def answer(task):
    """(code or None, why there is none)."""
    try:
        parsed = expert.follow(task)
    except expert.Unsupported as error:
        return None, f"not followed: {error}"
    solution = expert.render(parsed, expert.ALL)
    return (solution.code, "") if solution else (None, f"no kernel: {expert.what_is_left(parsed)}")


def reason(verdict):
    """Why a kernel failed, without the problem's words."""
    text = verdict.rejected or verdict.error or ""
    return "wrong: " + text.split(":")[0][:40]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kernelbench", required=True, metavar="DIR")
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--device", default="cpu", help="cuda: the problems as they stand, measured")
    parser.add_argument("--no-execution", action="store_true", help="only count what can be read and written")
    parser.add_argument("--elements", type=int, default=400_000, help="of all tensors of a shrunken problem")
    parser.add_argument("--out", help="file for the whole-level counts")
    parser.add_argument("--show", help="folder for the code that was written for ids divisible by 5")
    args = parser.parse_args()
    report = {}
    for level in args.levels:
        tasks, codes, small, failures = kernelbench_tasks(args.kernelbench, level), {}, {}, Counter()
        details = {task.name: "" for task in tasks if int(task.name.split("/")[1].split("_")[0]) % 5 == 0}
        for task in tasks:
            code, why = answer(task)
            if code is None:
                failures[why] += 1
                details.update({task.name: why} if task.name in details else {})
                continue
            codes[task.name] = code
            small[task.name] = task if args.device != "cpu" else shrunken(task, args.elements)
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
            with Sandbox(args.device, trials=2, seed=0) as box:
                verdicts = dict(zip(run, box.score_pairs([(task, codes[name]) for name, task in run.items()])))
            for name, verdict in verdicts.items():
                if not verdict.correct:
                    failures[reason(verdict)] += 1
                if name in details:
                    details[name] = verdict.error or verdict.rejected or f"{verdict.speedup:.2f}x"
            speedups = [v.speedup for v in verdicts.values() if v.correct]
            counts["checked"], counts["correct"] = len(run), len(speedups)
            for bar in (1, 1.2, 1.5, 2):
                counts[f"faster than {bar}x ({'modelled' if args.device == 'cpu' else 'measured'})"] = sum(
                    speedup > bar for speedup in speedups)
        report[f"level {level}"] = {**counts, "failures": dict(failures.most_common())}
        print(f"level {level}: " + ", ".join(f"{name} {n}" for name, n in counts.items()))
        for why, n in failures.most_common():
            print(f"  {n:4} {why}")
        for name, what in details.items():
            print(f"       {name[:60]:60} {what[:150]}")
    if args.out:
        Path(args.out).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

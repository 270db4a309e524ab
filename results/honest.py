"""Honest kernels, stored as files: for tests, for the comparison of the clocks, and to see how long a batch takes.

    python results/honest.py [--device cpu|cuda]          scores all of them in one batch

results/honest/index.json lists them; each has a folder with candidate.py, its kernel, and, unless the problem is a
built-in one, task.py. Our own expert wrote the kernels (for 38 built-in problems and for 59 synthesised ones), with
every technique that it knew.
results/measured_clock/agreement.json has the speedup of each on an H200. Both clocks found each of them correct.
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from policy import score_pairs  # noqa: E402
from sandbox import Sandbox  # noqa: E402
from tasks import GPU_BATCH_FACTOR, Task, builtin_tasks, scale_batch  # noqa: E402

FOLDER = Path(__file__).with_name("honest")


def honest_pairs(device="cpu") -> list[tuple[Task, str]]:
    """(task, code of a correct kernel) for each stored kernel; on "cuda" the tasks have the batch usual on a GPU."""
    builtin = {task.name: task for task in builtin_tasks(device=device)}
    pairs = []
    for row in json.loads((FOLDER / "index.json").read_text()):
        folder, task = FOLDER / row["folder"], builtin.get(row["task"])
        if task is None:
            task = Task(row["task"], 0, (folder / "task.py").read_text(), row["family"])
            if device == "cuda":
                task = scale_batch(task, GPU_BATCH_FACTOR)
        pairs.append((task, (folder / "candidate.py").read_text()))
    return pairs


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    device = parser.parse_args().device
    pairs = honest_pairs(device)
    with Sandbox(device) as sandbox:
        began = time.monotonic()
        verdicts = score_pairs(sandbox, pairs)
        seconds = time.monotonic() - began
    for (task, _), verdict in zip(pairs, verdicts):
        if not verdict.correct:
            print(f"{task.name}: {verdict.error or verdict.rejected}")
    print(f"{len(verdicts)} candidates in {seconds:.1f} s, {sum(v.correct for v in verdicts)} correct, 5 trials each, "
          f"{verdicts[0].clock} clock, {sandbox.settings.workers} workers")


if __name__ == "__main__":
    main()

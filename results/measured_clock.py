"""What the measured clock is worth: speed, and agreement with the modelled clock. Needs a GPU; 2 minutes.

    python results/measured_clock.py [--parts batch agreement] [--out measured_clock.json]
    python results/measured_clock.py --remodel measured_clock.json          (after a change of the prices; needs no GPU)

batch       48 kernels of one task, as one step of training scores them: seconds each, after a first one that waits
            for the sandbox to start and to load the task (start_seconds)
agreement   the honest kernels (results/honest.py), scored with both clocks: Spearman's rank correlation of the
            speedups, by family, and the geometric means of measured / modelled time. The measured clock sees the batch
            sizes usual on a GPU.
"""

import argparse
import bisect
import functools
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

from honest import honest_pairs  # noqa: E402
from policy import score_pairs  # noqa: E402
from sandbox import Sandbox  # noqa: E402
from tasks import builtin_tasks  # noqa: E402


def ranks(values):
    """Ranks from 0; equal values share the mean of theirs."""
    order = sorted(values)
    return [(bisect.bisect_left(order, value) + bisect.bisect_right(order, value) - 1) / 2 for value in values]


def spearman(pairs):
    """Rank correlation; None for fewer than 5 pairs."""
    return statistics.correlation(*map(ranks, zip(*pairs))) if len(pairs) >= 5 else None


def mean_ratio(rows, family, side):
    """Geometric mean of measured / modelled time of the reference or the candidate, over a family's problems."""
    return statistics.geometric_mean(row[side] / row["modelled_" + side] for row in rows
                                     if row["family"] == family and row["measured"] and row["modelled"])


def batch(box):
    task = next(task for task in builtin_tasks(device="cuda") if "1_AffineSoftplus" in task.name)
    code = next(code for other, code in honest_pairs() if other.name == task.name)
    start = time.monotonic()
    box.score(task, [code])
    began = time.monotonic()
    verdicts = box.score(task, [f"{code}# {i}\n" for i in range(48)])
    seconds = time.monotonic() - began
    return {"task": task.name, "correct": sum(v.correct for v in verdicts), "seconds_each": seconds / 48,
            "start_seconds": began - start,
            "reference_ms": verdicts[0].reference_ms, "candidate_ms": verdicts[0].candidate_ms,
            "speedups": [min(v.speedup or 0 for v in verdicts), max(v.speedup or 0 for v in verdicts)],
            "disturbed": sum(v.disturbed for v in verdicts)}


def on_gpu(box, pairs):
    """The measured side of `agreement`: one dict for each (task, code), at the batch sizes usual on a GPU."""
    large = dict((task.name, task) for task, _ in honest_pairs("cuda"))
    verdicts = score_pairs(box, [(large[task.name], code) for task, code in pairs])
    return [{"measured": v.speedup, "reference_ms": v.reference_ms, "candidate_ms": v.candidate_ms,
             "disturbed": v.disturbed, "failure": v.error or v.rejected} for v in verdicts]


def agreement(pairs, measure):
    """pairs: [(task, code)]. measure: a function like `on_gpu` of them."""
    with Sandbox("cpu", trials=1) as model:
        modelled = score_pairs(model, pairs)
    rows, families = [], {}
    for (task, _), verdict, row in zip(pairs, modelled, measure(pairs), strict=True):
        family = task.family or task.name.split("/")[0]
        rows.append({"task": task.name, "family": family, "modelled": verdict.speedup, **row,
                     "modelled_reference_ms": verdict.reference_ms, "modelled_candidate_ms": verdict.candidate_ms,
                     "failure": verdict.error or verdict.rejected or row["failure"]})
        if verdict.speedup and row["measured"]:
            families.setdefault(family, []).append((verdict.speedup, row["measured"]))
    builtin, new = [], []
    for name, found in families.items():
        if name.startswith("level"):
            builtin += found
        else:
            new += found
    correlation = {name: [len(found), spearman(found)] for name, found in sorted(families.items())}
    times = {name: [mean_ratio(rows, name, side) for side in ("reference_ms", "candidate_ms")] for name in correlation}
    return {"all": [len(builtin + new), spearman(builtin + new)], "built-in": [len(builtin), spearman(builtin)],
            "synthesised": [len(new), spearman(new)], "families": correlation,
            "measured_over_modelled_ms": times, "rows": rows}


def remodel(path):
    """Work out the modelled side of a file's agreement again, for those of its kernels that are stored."""
    found = json.loads(Path(path).read_text())
    kept = {row["task"]: {name: row[name] for name in ("measured", "reference_ms", "candidate_ms", "disturbed",
                                                       "failure")} for row in found["agreement"]["rows"]}
    pairs = [(task, code) for task, code in honest_pairs() if task.name in kept]
    found["agreement"] = agreement(pairs, lambda pairs: [kept[task.name] for task, _ in pairs])
    Path(path).write_text(json.dumps(found, indent=1))
    return found["agreement"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=["batch", "agreement"], default=["batch", "agreement"])
    parser.add_argument("--out", default="measured_clock.json")
    parser.add_argument("--remodel", metavar="FILE", help="only work out the modelled side of FILE's agreement again")
    args = parser.parse_args()

    def show(name, value):
        print(name, json.dumps({k: v for k, v in value.items() if k != "rows"}), flush=True)

    if args.remodel:
        return show("agreement", remodel(args.remodel))
    if not torch.cuda.is_available():
        sys.exit("no GPU here")
    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    parts = {"batch": batch, "agreement": lambda box: agreement(honest_pairs(), functools.partial(on_gpu, box))}
    with Sandbox("cuda", trials=3, tasks=4) as box:
        for name in args.parts:
            found[name] = parts[name](box)
            show(name, found[name])
            Path(args.out).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

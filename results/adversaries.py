"""Programs that were written to cheat the modelled clock, and honest ones that a strict sandbox might refuse.

    python results/adversaries.py [--only 5.7] [--kind exploit|honest] [--json FILE]        (no GPU; about five minutes)
    python results/adversaries.py --kernelbench DIR   (KernelBench's checker on them, from a clone of it)

adversaries/cases.jsonl holds one object a line: task, code, and for an exploit its `proof` that it works:

    correct    the verdict says correct (the default)       faster     correct, and a speedup above `limit`
    covered    correct, and coverage above `limit`          gain       correct, `limit` times the honest `baseline`'s
    marker     a file outside of the jail was written       says       the reason contains `limit`
    memory     a process outside of the jail grew beyond `limit` MiB (a sandbox of its own for each such case)

`open` marks what works: it is allowed, or not mended. `@MARKER@` in a code is that file; `before` are candidates that
are scored first. Items: 1 code in the replayer, 2 the jail, 3 operators out of bounds, 4 memory, 5 races, 6
perturbation, 7 state, 8 what hardware refuses, 9 and 10 prices. Second pass: 11 uninitialised memory, 12 tolerance, 13
hints, 14 Python's meaning in kernels, 15 orders that nothing promises, 16 changed parameters, 17 memory within a
launch, 18 texts, 19 outputs' memory, 20 coverage, 21 a price. Third pass: 22 order within a program, 23 values on the
host, 24 autotuning, 25 launches, 26 Python's meaning in kernels, 27 prices, 28 coverage.
"""

import argparse
import importlib.util
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if "--kernelbench" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton looks at it when it is imported

from sandbox import Sandbox  # noqa: E402
from tasks import Task  # noqa: E402

CASES = Path(__file__).parent / "adversaries" / "cases.jsonl"


class Peak(threading.Thread):
    """The most memory that a process below `root` ever held, in MiB, of those in our own process namespace."""

    def __init__(self, root):
        super().__init__(daemon=True)
        self.root, self.mib, self.over = root, 0, threading.Event()
        self.start()

    def run(self):
        while not self.over.wait(0.02):
            waiting = [self.root]
            while waiting:
                process = waiting.pop()
                try:
                    for children in Path(f"/proc/{process}/task").glob("*/children"):
                        waiting += children.read_text().split()
                    lines = Path(f"/proc/{process}/status").read_text().splitlines()
                    status = dict(line.split(":", 1) for line in lines)
                except OSError:
                    continue  # it has ended
                if len(status.get("NSpid", "1").split()) == 1 and "VmHWM" in status:
                    self.mib = max(self.mib, int(status["VmHWM"].split()[0]) >> 10)


def run(case, box, marker):
    """Score a case. Returns its row, in which `works` says whether the proof of an exploit holds."""
    def score(code):
        verdict = box.score(Task("victim", 0, case["task"]), [code.replace("@MARKER@", str(marker))])[0]
        return verdict.correct, verdict.speedup, verdict.coverage, verdict.rejected or verdict.error or ""

    marker.unlink(missing_ok=True)
    peak = Peak(box.pool.process.pid) if case.get("proof") == "memory" else None
    began = time.monotonic()
    for code in case.get("before", []):
        score(code)
    correct, speedup, coverage, says = score(case["code"])
    row = {"correct": correct, "speedup": speedup, "coverage": coverage, "says": says,
           "seconds": round(time.monotonic() - began, 2)}
    if peak is not None:
        peak.over.set()
        row["mib"] = peak.mib
    proof, limit = case.get("proof", "correct"), case.get("limit")
    if proof == "marker":
        row["works"] = marker.exists()
    elif proof == "memory":
        row["works"] = row["mib"] > limit
    elif proof == "says":
        row["works"] = limit in says
    elif proof == "slow":
        row["works"] = row["seconds"] > limit
    elif not correct or proof == "correct":
        row["works"] = correct
    elif proof == "gain":
        row["works"] = speedup > limit * score(case["baseline"])[1]
    else:
        row["works"] = (speedup if proof == "faster" else coverage) > limit
    return row


def called_correct(case):
    """Does a candidate pass KernelBench's correctness check? As its run_and_check_correctness has it: everything in one
    process, five draws from seeds that are known, the same shape, allclose at 1e-4. By Triton's own interpreter.
    """
    import torch

    torch.set_num_threads(1)
    os.chdir(tempfile.mkdtemp())
    space = {"__name__": "task"}
    exec(compile(case["task"], "task.py", "exec"), space)
    Path("candidate.py").write_text(case["code"])
    exec(compile(case["code"], "candidate.py", "exec"), space)
    models = []
    for name in ("Model", "ModelNew"):
        torch.manual_seed(42)
        models.append(space[name](*space["get_init_inputs"]()))
    with torch.no_grad():
        for seed in range(5):
            torch.manual_seed(seed)
            inputs = space["get_inputs"]()
            expected, got = (model(*inputs) for model in models)
            if expected.shape != got.shape or not torch.allclose(expected, got, atol=1e-4, rtol=1e-4):
                return False
    return True


def kernelbench(cases, folder):
    """Print what KernelBench's static checker says of each exploit, and of items 5 to 10 what its comparison says."""
    path = Path(folder) / "src" / "kernelbench" / "kernel_static_checker.py"
    spec = importlib.util.spec_from_file_location("kernel_static_checker", path)
    checker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(checker)
    counts = Counter()
    for case in cases:
        item = int(case["item"].split(".")[0]) if case["kind"] == "exploit" else 0
        valid, errors, warnings = checker.validate_kernel_static(case["code"], backend="triton", precision="fp32")
        counts[item, "cases"] += 1
        counts[item, "static checker: error"] += not valid
        counts[item, "static checker: warning"] += valid and bool(warnings)
        says = "not run"
        if item > 4:  # the others attack the process or the machine
            child = os.fork()
            if child == 0:
                signal.alarm(60)
                try:
                    os._exit(0 if called_correct(case) else 1)
                finally:
                    os._exit(2)
            says = {0: "correct", 1: "wrong values"}.get(os.waitpid(child, 0)[1] >> 8, "fails")
            counts[item, f"comparison: {says}"] += 1
            counts[item, "passes both"] += valid and says == "correct"
        static = "passes" if valid and not warnings else "warning" if valid else "error"
        print(f"{static:8} {says:13} {case['item']} {case['name'][:90]}", flush=True)
    for (item, what), count in sorted(counts.items()):
        print(f"{item or 'honest':8} {what:26} {count}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="an item (5.7 or 5), or a part of a name")
    parser.add_argument("--kind", choices=["exploit", "honest"], help="default: both")
    parser.add_argument("--json", help="write all rows to this file")
    parser.add_argument("--kernelbench", metavar="DIR", help="ask KernelBench's checker instead")
    options = parser.parse_args()
    cases = [json.loads(line) for line in CASES.read_text().splitlines()]
    rows, counts, box = [], Counter(), None
    if options.kernelbench:
        return kernelbench(cases, options.kernelbench)
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            title = f"{case['item']} {case['name']}"
            if options.kind not in (None, case["kind"]) or options.only not in title or (
                    options.only[:1].isdigit() and not f"{case['item']}.".startswith(f"{options.only}.")):
                continue
            if box is None or case.get("proof") == "memory":
                if box is not None:
                    box.close()
                box = Sandbox("cpu", trials=3, timeout=20)
            row = run(case, box, Path(folder) / "marker")
            if case["kind"] == "honest":
                state = "accepted" if row["correct"] else "refused"
            else:
                state = "works" if row["works"] else "stopped"
            item = case["item"].split(".")[0]
            counts[case["kind"], item, state] += 1
            rows.append({"kind": case["kind"], "item": case["item"], "name": case["name"], "state": state, **row})
            print(f"{state:8} {title[:90]:90} {row['seconds']:5.1f} s  {row['says'][:120]}", flush=True)
        if box is not None:
            box.close()
    for (kind, item, state), count in sorted(counts.items()):
        print(f"{kind:8} {item:8} {count:4} {state}")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

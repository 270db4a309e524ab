"""Programs that were written to cheat the modelled clock, and honest ones that a strict sandbox might refuse.

    python results/adversaries.py [--only 5.7] [--kind exploit|honest] [--json FILE]        (no GPU; about five minutes)

adversaries/cases.jsonl holds one object a line: task, code, and for an exploit its `proof` that it works:

    correct    the verdict says correct (the default)       faster     correct, and a speedup above `limit`
    covered    correct, and coverage above `limit`          gain       correct, `limit` times the honest `baseline`'s
    marker     a file outside of the jail was written       says       the reason contains `limit`
    memory     a process outside of the jail grew beyond `limit` MiB (a sandbox of its own for each such case)

`@MARKER@` in a code is that file; `before` are candidates that are scored first. Items: 1 code in the replayer, 2 the
jail, 3 operators out of bounds, 4 memory, 5 races, 6 perturbation, 7 state, 8 what hardware refuses, 9 and 10 prices.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

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
    peak = Peak(box.process.pid) if case.get("proof") == "memory" else None
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="an item (5.7 or 5), or a part of a name")
    parser.add_argument("--kind", choices=["exploit", "honest"], help="default: both")
    parser.add_argument("--json", help="write all rows to this file")
    options = parser.parse_args()
    cases = [json.loads(line) for line in CASES.read_text().splitlines()]
    rows, counts, box = [], Counter(), None
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            title = f"{case['item']} {case['name']}"
            if options.kind not in (None, case["kind"]) or options.only not in title or (
                    options.only[:1].isdigit() and not f"{case['item']}.".startswith(f"{options.only}.")):
                continue
            if box is None or case.get("proof") == "memory":
                if box is not None:
                    box.close()
                box = Sandbox("cpu", trials=3, seed=0, timeout=20)
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

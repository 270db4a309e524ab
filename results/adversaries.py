"""Programs that were written to cheat the modelled clock, one of each kind: which of them work?

    python results/adversaries.py [--only TEXT]         (no GPU; two minutes; prints the table of adversaries/README.md)

adversaries/cases.jsonl holds one object a line: kind, name, task, code, and the `proof` that a program works:

    correct    the verdict says correct (the default)       faster     correct, and a speedup above `limit`
    covered    correct, and coverage above `limit`          gain       correct, `limit` times the honest `baseline`'s
    marker     a file outside of the jail was written       says       the reason contains `limit`

`@MARKER@` in a code is that file; `before` are candidates that are scored first; `open` marks what works. Programs for
the measured clock are in adversaries/measured.jsonl; tests/test_sandbox_gpu.py runs them.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sandbox import Sandbox  # noqa: E402
from tasks import Task  # noqa: E402

CASES = Path(__file__).parent / "adversaries" / "cases.jsonl"


def works(case, box, marker):
    """(does the proof hold? what the verdict says) of a case."""
    def score(code):
        return box.score(Task("victim", 0, case["task"]), [code.replace("@MARKER@", str(marker))])[0]

    marker.unlink(missing_ok=True)
    for code in case.get("before", []):
        score(code)
    verdict, limit = score(case["code"]), case.get("limit")
    reason = verdict.rejected or verdict.error or f"{verdict.speedup:.2f}x, coverage {verdict.coverage:.2f}"
    proofs = {"marker": lambda: marker.exists(), "says": lambda: limit in reason, "correct": lambda: verdict.correct,
              "faster": lambda: verdict.correct and verdict.speedup > limit,
              "covered": lambda: verdict.correct and verdict.coverage > limit,
              "gain": lambda: verdict.correct and verdict.speedup > limit * score(case["baseline"]).speedup}
    return proofs[case.get("proof", "correct")](), reason


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose kind or name contains this")
    only = parser.parse_args().only
    cases = [json.loads(line) for line in CASES.read_text().splitlines()]
    with tempfile.TemporaryDirectory() as folder, Sandbox("cpu", timeout=20) as box:
        for case in cases:
            if only in f"{case['kind']} {case['name']}":
                found, reason = works(case, box, Path(folder) / "marker")
                print(f"| {case['kind']} | {case['name']} | {'**works**' if found else 'stopped'} | {reason[:110]} |")


if __name__ == "__main__":
    main()

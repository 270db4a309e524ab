"""One-line mutants of the method's modules: does a test fail for each? Slow, so not part of the test suite.

    python tests/mutants.py [--quick] [--only TEXT] [--first N]

Each line of mutants.txt is a file, a piece of one of its lines, and what takes its place. A copy of the repository is
made, the mutant put in, the test files of its group run until one fails. What survives is printed at the end. All 195
have been run, in parts: 17 survived the tests that they were tried on, each got a test, and none does now. Rows whose
text does not stand in its file exactly once are told first, and nothing is run.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import torch  # noqa: F401  once, for all mutants
import transformers  # noqa: F401

ROOT = Path(__file__).parent.parent
TESTS = {  # file -> the test files that should notice, quick ones first
    "reinforce.py": ["test_paper.py", "test_credit.py", "test_recipes.py", "test_reinforce.py"],
    "policy.py": ["test_paper.py", "test_recipes.py", "test_credit.py", "test_roles.py", "test_bench.py",
                  "test_reinforce.py"],
    "selector.py": ["test_paper.py", "test_roles.py", "test_bench.py", "test_reinforce.py"],
    "summarizer.py": ["test_paper.py", "test_roles.py", "test_credit.py", "test_reinforce.py"],
    "skills.py": ["test_paper.py", "test_skills.py"],
    "chat/prompts.py": ["test_chat.py", "test_roles.py"],
    "backbone.py": ["test_credit.py"],
    "fast/slots.py": ["test_credit.py"],
    "fast/train_step.py": ["test_update.py", "test_sft.py"],
    "sft.py": ["test_sft.py"],
    "synthetic/tiny.py": ["test_sft.py"],
    "bench.py": ["test_bench.py"]}
MUTANTS = [line.split(" => ") for line in Path(__file__).with_name("mutants.txt").read_text().splitlines()]


def survives(copy, tests, file, old, new) -> bool:
    """Whether all of `tests` pass with `new` in place of `old`. Whoever hangs for ten minutes has noticed."""
    source = (ROOT / file).read_text()
    (copy / file).write_text(source.replace(old, new, 1))
    child = os.fork()  # torch is imported already, the repository's own modules are not
    if not child:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        signal.alarm(600)
        os.chdir(copy)
        sys.path[0] = str(copy)
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-k", "not killed and not kill_nine and not survives",
                            *(f"tests/{name}" for name in tests)])
        os._exit(int(code))
    _, status = os.waitpid(child, 0)
    (copy / file).write_text(source)
    return status == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="mutants whose line has this text")
    parser.add_argument("--quick", action="store_true", help="without tests/test_reinforce.py")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    args = parser.parse_args()
    stale = [" => ".join(row) for row in MUTANTS if (ROOT / row[0]).read_text().count(row[1]) != 1]
    if stale:
        raise SystemExit("\n".join(["these rows no longer match the code:", *stale]))
    rows = [row for row in MUTANTS[args.first:] if args.only in " => ".join(row)]
    alive = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", "__pycache__", "runs"))
        for file, tests in TESTS.items():
            if args.quick and "test_reinforce.py" in tests:
                tests.remove("test_reinforce.py")
            if any(row[0] == file for row in rows) and not survives(copy, tests, file, "", ""):
                raise SystemExit(f"{file}: its tests fail without any mutant")
        for number, row in enumerate(rows, start=1):
            alive += [" => ".join(row)] if (survived := survives(copy, TESTS[row[0]], *row)) else []
            print(f"{number} of {len(rows)}: {'SURVIVES' if survived else 'noticed'} {row}", flush=True)
    print(f"{len(rows) - len(alive)} of {len(rows)} noticed", *alive, sep="\n")


if __name__ == "__main__":
    main()

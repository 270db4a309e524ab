"""Interruptions of running programs at random moments: what goes on ends as the uninterrupted run does.

    python tests/kill_and_resume.py [--programs reinforce sft bench] [--faults 7] [--seed 0]

Runs each command twice on the CPU: once undisturbed; once with SIGINT, SIGTERM, SIGKILL or a full disk (from some
moment on every write fails) until all faults are spent. Compares weights, optimiser state, library, metrics and results
bit for bit, all but wall times. After each fault: status, at most one line on stderr, and no process or file left.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from test_reinforce import same

FAULTS = {"SIGINT": 130, "SIGTERM": 130, "SIGKILL": -9, "full disk": 2}  # and the status with which a program ends
OPTIONS = {"reinforce": "--steps 3 --batch 1 --k 1 --n 1 --turns 1 --policy-tokens 60 --selection-tokens 60 --no-eval "
                        "--save-every 2",
           "sft": "--model checkpoints/tiny --data ROWS --epochs 2 --batch-tokens 768 --save-minutes 0.05",
           "bench": "--level 1 --ids 1-3 --samples 1 --turns 1 --batch 1 --no-skills --max-new-tokens 60"}


def equal(program, a, b) -> bool:
    """Do two folders hold the same, but for wall times?"""
    if program == "reinforce":
        return same(a, b, without=["files"])  # the transcripts' verdicts hold wall times
    if program == "sft":
        histories = [json.loads((out / "sft.json").read_text())["history"] for out in (a, b)]
        return (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes() and all(
            x | {"seconds": 0} == y | {"seconds": 0} for x, y in zip(*histories, strict=True))
    found = [json.loads((out / "summary.json").read_text()) for out in (a, b)]
    lines = [(out / "results.jsonl").read_text().count("\n") for out in (a, b)]
    return lines[0] == lines[1] and all(found[0][key] == found[1][key] for key in ("figures", "problems", "kinds"))


def run(program, out, scratch, options, fault=None, moment=None):
    """Start or go on; with a fault after `moment` seconds. Returns (status, the last line on stderr)."""
    begun = {"reinforce": "config.json", "sft": "training.pt", "bench": "nothing"}[program]
    rest = (options.split() if program != "reinforce" or not (out / begun).exists() else [])
    rest += ["--resume"] if (out / begun).exists() else []
    process = subprocess.Popen([sys.executable, ROOT / f"{program}.py", "--device", "cpu", "--out", out, *rest],
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                               env=os.environ | {"TMPDIR": str(scratch)})
    try:
        err = process.communicate(timeout=moment)[1]
    except subprocess.TimeoutExpired:
        if fault == "full disk":
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, 0))
        else:
            process.send_signal(getattr(signal, fault))
        err = process.communicate()[1]
    lines = [line for line in err.splitlines() if "error: " in line or "interrupted" in line or "Traceback" in line]
    assert "Traceback" not in err and len(lines) <= 1, err
    for _ in range(300):  # the sandbox's processes notice within seconds
        left = [*scratch.iterdir(), *(path for path in Path("/proc").glob("[0-9]*/cmdline") if named(path, scratch))]
        if not left:
            break
        time.sleep(0.2)
    assert not left, f"{fault} leaves {left}"
    return process.returncode, "".join(lines)


def named(path, scratch) -> bool:
    try:
        return str(scratch).encode() in path.read_bytes()
    except OSError:  # it has ended
        return False


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--programs", nargs="+", choices=list(OPTIONS), default=list(OPTIONS))
    parser.add_argument("--faults", type=int, default=7, help="how often each is interrupted")
    parser.add_argument("--seed", type=int, default=0, help="of the faults and their moments")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in a script's background it is ignored, and inherited so
    for program in options.programs:
        rng = random.Random(f"{options.seed} {program}")
        with tempfile.TemporaryDirectory(prefix="kills-") as folder:
            whole, pieces, scratch, rows = (Path(folder) / name for name in ("whole", "pieces", "scratch", "rows"))
            scratch.mkdir()
            talk = [[{"role": "user", "content": f"Say {i}."}, {"role": "assistant", "content": f"Here: {i}."}]
                    for i in range(16)]
            rows = rows.with_suffix(".jsonl")
            rows.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in talk))
            flags, began = OPTIONS[program].replace("ROWS", str(rows)), time.monotonic()
            assert run(program, whole, scratch, flags) == (0, "")
            length = time.monotonic() - began
            print(f"{program}: uninterrupted {length:.0f} s", flush=True)
            for _ in range(options.faults):
                fault, moment = rng.choice(list(FAULTS)), rng.uniform(0.2, 0.9) * length
                status, line = run(program, pieces, scratch, flags, fault, moment)
                print(f"  {fault:<10} after {moment:5.1f} s: status {status}  {line[:150]}", flush=True)
                if status == 0:
                    shutil.rmtree(pieces)  # it was done before the fault, or wrote nothing after it: from the start
                early = -getattr(signal, fault, 0)  # before torch was loaded: nothing is open then
                assert status in (0, early, FAULTS[fault]), (fault, status)
            assert run(program, pieces, scratch, flags)[0] == 0 and equal(program, whole, pieces), program
            print(f"  {options.faults} faults: the end is the same", flush=True)


if __name__ == "__main__":
    main()

"""kill -9 at random moments: a run that is resumed each time ends as the uninterrupted one does.

    python tests/kill_and_resume.py [--kills 20] [--seed 0]

Runs `reinforce.py` with the shipped model and the real sandbox on the CPU, with tiny settings: once undisturbed, and
once killed --kills times, each time after a random part of the time that the undisturbed run took, and resumed. A run
that ends before it is killed begins anew. Then weights, optimiser, generator, library, metrics and snapshots must be
equal bit for bit, all but wall times, and no process or file of the killed runs may be left.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from test_run import same

OPTIONS = ("--steps 3 --batch 1 --k 1 --n 1 --turns 1 --s 1 --policy-tokens 40 --no-eval --device cpu "
           "--set selection_tokens=40 save_every=2").split()


def run(out, scratch, moment=None) -> bool:
    """Start the run, or resume it if it has begun; kill it after `moment` seconds. Did it end by itself?"""
    arguments = ["--resume"] if (out / "config.json").exists() else OPTIONS
    process = subprocess.Popen([sys.executable, ROOT / "reinforce.py", "--out", out, *arguments], text=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                               env=os.environ | {"TMPDIR": str(scratch)})
    try:
        err = process.communicate(timeout=moment)[1]
        assert process.returncode == 0, err
        return True
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return False


def leftovers(scratch) -> list:
    """Files and processes of a sandbox."""
    left = list(scratch.iterdir())
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(scratch).encode() in path.read_bytes():
                left.append(path)
        except OSError:  # it has ended meanwhile
            pass
    return left


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=20, help="how often the run is killed (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: 0)")
    options = parser.parse_args()
    rng, kills = random.Random(options.seed), 0
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        whole, pieces, scratch = (Path(folder) / name for name in ("whole", "pieces", "scratch"))
        scratch.mkdir()
        began = time.monotonic()
        run(whole, scratch)
        length = time.monotonic() - began
        print(f"uninterrupted: {length:.1f} s", flush=True)
        while kills < options.kills:
            moment = rng.uniform(0.3, 1.0) * length
            if run(pieces, scratch, moment):
                shutil.rmtree(pieces)
                continue
            kills += 1
            checkpoint = os.readlink(pieces / "checkpoint") if (pieces / "checkpoint").exists() else "no checkpoint yet"
            print(f"  kill {kills} after {moment:5.1f} s: {checkpoint}", flush=True)
        run(pieces, scratch)
        assert same(whole, pieces, without=["files"])  # the transcripts' verdicts hold wall times
        snapshots = [{path.name: path.read_text() for path in (out / "skill_library").iterdir()}
                     for out in (whole, pieces)]
        assert snapshots[0] == snapshots[1]
        deadline = time.monotonic() + 60  # the sandbox's processes notice within seconds
        while leftovers(scratch) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not leftovers(scratch), leftovers(scratch)
    print(f"killed {kills} times: metrics, weights, optimiser, generator and library equal the uninterrupted run's")


if __name__ == "__main__":
    main()

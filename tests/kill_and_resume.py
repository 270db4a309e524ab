"""kill -9 of a running `reinforce.py` at random moments: the resumed run ends as the uninterrupted one does.

    python tests/kill_and_resume.py [--kills 10] [--seed 0] [-- flags of reinforce.py]

Runs the same command twice on the CPU: once undisturbed, once killed and resumed until all kills are spent. Compares
weights, optimiser state and library bit for bit, and every metric but wall times. Exit code 1 if any differs.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from test_reinforce import run_with_kills, same


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="how often the run is killed")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("flags", nargs="*", default="--steps 4 --batch 1 --k 2 --n 1 --no-eval".split(),
                        help="of reinforce.py, after --")
    options = parser.parse_args()
    command, rng = [sys.executable, str(ROOT / "reinforce.py"), "--device", "cpu"], random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        whole, pieces = Path(folder) / "whole", Path(folder) / "pieces"
        began = time.monotonic()
        run_with_kills(command, whole, options.flags, [])
        length = time.monotonic() - began
        moments = [rng.uniform(2.0, 2.0 + length / 3) for _ in range(options.kills)]
        print(f"uninterrupted: {length:.0f} s; kills after {', '.join(f'{m:.1f}' for m in moments)} s", flush=True)
        run_with_kills(command, pieces, options.flags, moments)
        same(whole, pieces, without=["files"])  # the transcripts' verdicts hold wall times
    print(f"{options.kills} kills: weights, optimiser, library and metrics are the same")


if __name__ == "__main__":
    main()

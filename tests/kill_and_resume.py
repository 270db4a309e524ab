"""kill -9 of a running `reinforce.py` at random moments: the resumed run ends as the uninterrupted one does.

    python tests/kill_and_resume.py [--kills 10] [--seed 0] [-- flags of reinforce.py]

Runs the same command twice on the CPU: once undisturbed, once killed and resumed until all kills are spent. Compares
weights and optimiser state bit for bit, the library, and every metric but wall times. Exit code 1 if anything differs.
"""

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parent.parent
SMALL = ["--steps", "4", "--batch", "1", "--k", "2", "--n", "1", "--no-eval"]


def outcome(out):
    """What a finished run has come to: (weights, trainer's state, library, metrics without wall times)."""
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for line in metrics:
        line.pop("seconds")
    checkpoint = out / "checkpoint"
    state = torch.load(checkpoint / "trainer.pt", weights_only=True)
    return load_file(checkpoint / "model.safetensors"), state, (checkpoint / "skill_library.jsonl").read_text(), metrics


def same(a, b):
    """Equality that looks into containers and compares tensors bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="how often the run is killed")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("flags", nargs="*", default=SMALL, help="of reinforce.py, after --")
    options = parser.parse_args(argv)
    command = [sys.executable, str(ROOT / "reinforce.py"), "--device", "cpu", *options.flags, "--out"]
    folder, rng = Path(tempfile.mkdtemp(prefix="kills-")), random.Random(options.seed)
    try:
        whole, pieces = folder / "whole", folder / "pieces"
        began = time.monotonic()
        subprocess.run([*command, str(whole)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        length = time.monotonic() - began
        print(f"uninterrupted: {length:.0f} s")
        moments = []
        while True:
            resume = ["--resume"] if (pieces / "config.json").exists() else []
            run = subprocess.Popen([*command, str(pieces), *resume], stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL)
            try:
                moment = rng.uniform(2.0, 2.0 + length / 3) if len(moments) < options.kills else None
                code = run.wait(moment)
                if code != 0:
                    sys.exit(f"exit code {code} after {len(moments)} kills")
                if len(moments) == options.kills:
                    break
                shutil.rmtree(pieces)  # it was done before all kills were spent: once more from the start
            except subprocess.TimeoutExpired:
                run.send_signal(signal.SIGKILL)
                run.wait()
                moments.append(round(moment, 1))
                print(f"killed after {moments[-1]} s", flush=True)
        found = [name for name, a, b in zip(("weights", "trainer", "library", "metrics"), outcome(whole),
                                            outcome(pieces)) if not same(a, b)]
        print(f"{len(moments)} kills: " + (f"different: {', '.join(found)}" if found else
                                           "weights, optimiser, library and metrics are the same"))
        return int(bool(found))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())

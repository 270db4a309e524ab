"""Hundreds of candidates, half of them hostile, in random order at full concurrency: nothing is lost, nothing is left.

    python tests/soak.py [--count 512] [--device cpu|cuda] [--seed 0]

Every candidate must get the verdict that its kind deserves. Afterwards no process, no file in the scratch folder, /tmp
or /dev/shm and (with a GPU) no GPU memory may be left over. The table shows the candidates and wrong verdicts of each
kind, and the rate at which honest ones alone are scored before and after. Exit code 1 if anything is amiss.
"""

import argparse
import collections
import glob
import os
import random
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch  # noqa: E402

import candidates  # noqa: E402
from candidates import TASK, replaced  # noqa: E402
from sandbox import Sandbox  # noqa: E402

HONEST = "import os, time\n" + candidates.HONEST

# kind: what stands in place of some text of HONEST
END = "return out"
HOSTILE = {
    "wrong": ("* factor, mask", "* 2.0, mask"),
    "does not compile": ("tl.sigmoid", "tl.sigmoyd"),
    "hang": (END, "while True: pass"),
    "hang in a kernel": ("    tl.store", "    while n > 0:\n        x += 1\n    tl.store"),
    "exit": (END, "os._exit(0)"),
    "memory": (END, "hoard = [bytearray(1 << 28) for _ in range(1000)]"),
    "forks": (END, "for _ in range(8): attempt(os.fork)\n        time.sleep(60)"),  # 256, and no more
    "daemon": (END, "attempt(daemon)\n        return out + 1"),
    "files": (END, "for folder in ('.', '/tmp', '/dev/shm'): attempt(litter, folder)\n        return out + 1"),
    "kill parent": (END, "attempt(os.kill, os.getppid(), 9)\n        return out + 1"),
    "torch only": (END, "return torch.nn.functional.silu(x) * self.factor"),
}
HELPERS = """
def attempt(call, *arguments):
    try:
        call(*arguments)
    except OSError:
        pass

def daemon():
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)

def litter(folder):
    for i in range(10):
        open(f"{folder}/soak_left_{os.getpid()}_{i}", "wb").write(b"x" * 100000)
"""


def left_over(scratch):
    """(processes of this sandbox, files of candidates) that are there."""
    found = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True).stdout.splitlines()
    places = ("/dev/shm/soak_left*", "/tmp/soak_left*")
    return [line for line in found if scratch in line], [name for place in places for name in glob.glob(place)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=512, help="candidates in all (default: 512)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds for a candidate (default: 5)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    kinds = ["honest"] * (options.count // 2)
    kinds += [chance.choice(list(HOSTILE)) for _ in range(options.count - len(kinds))]
    chance.shuffle(kinds)
    codes = [(HONEST if kind == "honest" else replaced(HONEST, HOSTILE[kind]) + HELPERS) + f"\n# {i}\n"
             for i, kind in enumerate(kinds)]
    wrong, counts = collections.Counter(), collections.Counter(kinds)
    memory = torch.cuda.mem_get_info()[0] if options.device != "cpu" else 0

    limit = 2 << 30 if options.device == "cpu" else 8 << 30
    with Sandbox(options.device, trials=2, timeout=options.timeout, memory=limit) as box:
        def rate(tag):
            began = time.monotonic()
            verdicts = box.score(TASK, [HONEST + f"\n# {tag} {i}\n" for i in range(40)])
            assert all(verdict.correct for verdict in verdicts), [v for v in verdicts if not v.correct][:1]
            return 40 / (time.monotonic() - began)

        rate("warm")
        before, began = rate("before"), time.monotonic()
        for start in range(0, len(codes), 500):
            for kind, verdict in zip(kinds[start:start + 500], box.score(TASK, codes[start:start + 500])):
                if verdict.correct != (kind == "honest") or not (verdict.correct or verdict.error or verdict.rejected):
                    wrong[kind] += 1
                    print(f"{kind}: {verdict}", flush=True)
            print(f"{min(start + 500, len(codes))} of {len(codes)}, {time.monotonic() - began:.0f} s", flush=True)
        seconds, after, scratch = time.monotonic() - began, rate("after"), box.pool.settings["scratch"]
    processes, files = left_over(scratch)
    print("\n".join((processes + files)[:20]))
    gone = not os.path.exists(scratch)
    lost = memory - torch.cuda.mem_get_info()[0] if options.device != "cpu" else 0

    print(f"\n{'kind':20s} candidates  wrong verdicts")
    for kind, count in sorted(counts.items()):
        print(f"{kind:20s} {count:10d} {wrong[kind]:15d}")
    print(f"{len(codes)} candidates in {seconds:.0f} s; honest alone: {before:.2f}/s before, {after:.2f}/s after; "
          f"left over: {len(processes)} processes, {len(files)} files, {max(lost, 0) >> 20} MiB of GPU "
          f"memory; gone after close: {gone}")
    sys.exit(bool(wrong or processes or files or not gone or lost > 64 << 20 or after < 0.7 * before))


if __name__ == "__main__":
    main()

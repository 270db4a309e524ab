"""How long do honest candidates take? 100 of the expert's kernels for the built-in problems, scored in one batch.

    python results/honest.py [--device cpu|cuda]
"""

import argparse
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from policy import score_pairs  # noqa: E402
from sandbox import Sandbox  # noqa: E402
from synthetic import expert  # noqa: E402
from tasks import builtin_tasks  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    device, rng, pairs = parser.parse_args().device, random.Random(0), {}
    tasks = builtin_tasks(device=device)
    models = [expert.read(task) for task in tasks]
    while len(pairs) < 100:  # different techniques give different kernels
        i = rng.randrange(len(tasks))
        chosen = {name for name in sorted(expert.applicable(models[i])) if rng.random() < 0.7}
        code = expert.render(models[i], chosen).code
        pairs[code] = (tasks[i], code)
    with Sandbox(device) as sandbox:
        began = time.monotonic()
        verdicts = score_pairs(sandbox, list(pairs.values()))
        seconds = time.monotonic() - began
    print(f"{len(verdicts)} candidates in {seconds:.1f} s, {sum(v.correct for v in verdicts)} correct, 5 trials each, "
          f"{verdicts[0].clock} clock, {sandbox.settings.workers} workers")


if __name__ == "__main__":
    main()

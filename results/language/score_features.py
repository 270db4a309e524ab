"""Which features of Triton's language does the judge accept, and are their results right?

    python results/language/score_features.py [--device cpu|cuda] [--only NAME ...]

Each feature of features.yaml is a task (what torch gives) and a candidate (one kernel). Prints those that are not
correct, with the judge's words, and how many are. A feature whose expected result is "refused" counts if its verdict
says that it is not available.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

import yaml

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent.parent))

from command.process import run_command  # noqa: E402
from policy import score_pairs  # noqa: E402
from sandbox import Sandbox  # noqa: E402
from tasks import Task  # noqa: E402

TASK = """
from itertools import accumulate

import torch


class Model(torch.nn.Module):
    def forward(self, x, y, q, i, j):
        A, B = x.view(16, 16), y.view(16, 16)
        return {expected}


def get_inputs():
    integers = torch.randint(-1000, 1000, (256,), dtype=torch.int32)
    return [torch.randn(256), torch.randn(256), torch.rand(256) + 0.5, integers,
            torch.randint(1, 10, (256,), dtype=torch.int32)]


def get_init_inputs():
    return []
"""
CANDIDATE = """
{helpers}

@triton.jit
def kernel(x, y, q, i, j, out, s, n, NUMEL: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    v, w, p = tl.load(x + o), tl.load(y + o), tl.load(q + o)
    k, m = tl.load(i + o), tl.load(j + o)
    a, b = tl.reshape(v, (16, 16)), tl.reshape(w, (16, 16))
    g = v > 0
{body}
    tl.store(out + tl.arange(0, NUMEL), tl.reshape(r, (NUMEL,)) if NUMEL > 1 else r)


class ModelNew(torch.nn.Module):
    def forward(self, x, y, q, i, j):
        A, B = x.view(16, 16), y.view(16, 16)
        out = torch.zeros({size}, dtype={dtype}, device=x.device)
        kernel[(1,)](x, y, q, i, j, out, 2.5, 7, {numel}, BLOCK=256)
        return out.flatten()[:{numel}].view({shape})
"""


def pair_of(name, row):
    """(task, code) of a feature."""
    import torch
    body, expected = row if isinstance(row, list) else (f"r = {name}", row)
    namespace = {"torch": torch}
    exec(TASK.format(expected="x * 1" if expected == "refused" else expected), namespace)
    result = namespace["Model"]()(*namespace["get_inputs"]())
    code = CANDIDATE.format(
        helpers=(FOLDER / "helpers.py").read_text(), body="\n".join("    " + line for line in body.split("\n")),
        size=max(256, result.numel()), dtype=result.dtype, numel=result.numel(), shape=list(result.shape))
    return Task(f"language/{name}", 0, TASK.format(expected="x * 1" if expected == "refused" else expected)), code


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="+", help="names of features")
    args = parser.parse_args(argv)
    rows = {}
    for group in yaml.safe_load((FOLDER / "features.yaml").read_text()).values():
        rows |= {name: row for name, row in group.items() if not args.only or name in args.only}
    with Sandbox(args.device, trials=1) as box:
        verdicts = score_pairs(box, [pair_of(name, row) for name, row in rows.items()])
    kinds = Counter()
    for (name, row), verdict in zip(rows.items(), verdicts, strict=True):
        why = verdict.rejected or verdict.error
        kind = "correct" if verdict.correct else "not correct"
        if row[-1] == "refused" and why and "not available" in why:
            kind = "refused, as it says"
        kinds[kind] += 1
        if not verdict.correct:
            print(f"{name}: {why}")
    print(f"{kinds.total()} features: {dict(kinds)}")
    return 0


if __name__ == "__main__":
    run_command(main)

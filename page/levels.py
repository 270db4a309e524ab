"""What bench.py shows of a level: its figures as text, and the machine that they hold for.

A table is made of what summary.json holds, so old results can be shown again.
"""

import os
import platform
import re
from importlib.metadata import version
from pathlib import Path

import torch


def machine(device) -> dict:
    """What the times depend on: the GPU, or the CPU with the number of cores that we may use, and the versions."""
    if device == "cuda":
        hardware = torch.cuda.get_device_name()
    else:
        model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        hardware = f"{model[1] if model else platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    versions = {name: version(name) for name in ("torch", "triton", "transformers")}
    return {"hardware": hardware, "versions": {"python": platform.python_version(), **versions}}


def title(config) -> str:
    """The problems of a benchmark."""
    return f"{config['source']}, level {config['level']}"


def aligned(rows) -> list[str]:
    """Lists of texts as the lines of a table."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def table(summary) -> str:
    """summary.json as text: what was run, the figures in percent, and a line for each problem."""
    config, shares = summary["config"], ["correct", *(key for key in summary["figures"][0] if key.startswith("fast_"))]
    figures = [["counted", "turns", "tolerance", "rule", "against", *map(str.capitalize, shares), "geometric mean"]]
    for row in summary["figures"]:  # the others are in summary.json
        if config["samples"] == 1 and row["of"] not in ("mean of samples", "last turn"):
            continue  # of one sample these are alike
        if row["turns"] == config["turns"] or row["turns"] == 1 and row["of"] == "mean of samples":
            mean = f"{row['geometric_mean']:.2f}x" if row["geometric_mean"] else "-"
            figures.append([row["of"], str(row["turns"]), f"{row['tolerance']:g}", row["rule"], row["baseline"],
                            *(f"{100 * row[key]:.1f}" for key in shares), mean])
    problems = [["problem", "best", "what became of its samples"]]
    for task, problem in summary["problems"].items():
        kinds = ", ".join(f"{count} {kind}" for kind, count in problem["kinds"].items())
        best, why = problem["best_speedup"], f": {problem['most_common_error']}"
        problems.append([task[:49], f"{best:.2f}x" if best else "-", (kinds if best else kinds + why)[:100]])
    return "\n".join([
        f"{title(config)}: {len(config['problems'])} of {config['problems_in_level']} problems, {config['samples']} "
        f"samples of at most {config['turns']} turns each ({config['strategy']}), {summary['skills']}",
        f"{config['model']} on {summary['hardware']}; speedups are {summary['clock']}; percent of all problems", "",
        *aligned(figures), "", *aligned(problems)])

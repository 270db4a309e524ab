"""A benchmark's summary.json as a text table, and the machine that its figures hold for."""

import os
import platform
from importlib.metadata import version

import torch

BASELINES = {"eager": "eager PyTorch", "compile": "torch.compile"}


def machine(device) -> dict:
    """What the times depend on: the GPU, or the number of CPU cores that we may use, and the versions."""
    hardware = f"{platform.machine()} CPU, {len(os.sched_getaffinity(0))} cores"
    if device == "cuda":
        hardware = torch.cuda.get_device_name()
    versions = {name: version(name) for name in ("torch", "triton", "transformers")}
    return {"hardware": hardware, "versions": {"python": platform.python_version()} | versions}


def aligned(rows) -> str:
    """Rows of cells (texts) as a table."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def table(summary) -> str:
    """summary.json as text: what was run, the figures in percent, and a line for each problem."""
    config = summary["config"]
    shares = [name for name in summary["figures"][0] if name == "correct" or name.startswith("fast_")]
    figures = [["counted", "rule", *map(str.capitalize, shares), "geometric mean"]]
    for row in summary["figures"]:
        percents = [f"{100 * row[name]:.1f}" for name in shares]
        figures.append([row["counted"], row["rule"], *percents, f"{row['geometric_mean'] or 0:.2f}x"])
    problems = [["problem", "best", "correct", "most common error"]]
    for task, problem in summary["problems"].items():
        correct = f"{problem['correct']} of {config['samples']}"
        problems.append([task[:49], f"{problem['best_speedup']:.2f}x", correct, problem["error"][:80]])
    return (f"{config['source']}: {len(config['problems'])} of {config['problems_in_level']} problems, "
            f"{config['samples']} samples of at most {config['turns']} turns each ({config['strategy']}), "
            f"{summary['skills']}\n{config['model']} on {summary['hardware']}; speedups are {summary['clock']}, over "
            f"{BASELINES[config['baseline']]}; tolerance {config['tolerance']:g}; percent of all problems\n\n"
            f"{aligned(figures)}\n\n{aligned(problems)}")

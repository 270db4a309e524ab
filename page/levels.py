"""A benchmark's summary.json as a text table, and the machine that its figures hold for."""

import os
import platform
from importlib.metadata import version

import torch


def machine(device) -> dict:
    """What the times depend on: the GPU, or the number of CPU cores that we may use, and the versions."""
    hardware = f"{platform.machine()} CPU, {len(os.sched_getaffinity(0))} cores"
    if device == "cuda":
        hardware = torch.cuda.get_device_name()
    versions = {name: version(name) for name in ("torch", "triton", "transformers")}
    return {"hardware": hardware, "versions": versions | {"python": platform.python_version()}}


def table(summary) -> str:
    """summary.json as text: what was run, the figures in percent, and a line for each problem."""
    config = summary["config"]
    shares = [name for name in summary["figures"][0] if name == "correct" or name.startswith("fast_")]
    lines = [f"{config['source']}: {len(config['problems'])} of {config['problems_in_level']} problems, "
             f"{config['samples']} samples of at most {config['turns']} turns each ({config['strategy']}), "
             f"{summary['skills']}",
             f"{config['model']} on {summary['hardware']}; speedups are {summary['clock']}, baseline "
             f"{config['baseline']}; tolerance {config['tolerance']:g}; percent of all problems", "",
             "counted      rule     " + "".join(f"{name.capitalize():>10}" for name in shares) + "  geometric mean"]
    for row in summary["figures"]:
        percents = "".join(f"{100 * row[name]:10.1f}" for name in shares)
        lines.append(f"{row['counted']:12} {row['rule']:9}{percents}{row['geometric_mean'] or 0:15.2f}x")
    lines += ["", f"{'problem':50}    best  roofline  correct  most common error"]
    for task, problem in summary["problems"].items():
        lines.append(f"{task[:49]:50}{problem['best_speedup']:7.2f}x{problem.get('roofline', 0):9.0%}   "
                     f"{problem['correct']} of {config['samples']}   {problem['error'][:80]}".rstrip())
    return "\n".join(lines)

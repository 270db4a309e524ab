"""A benchmark's summary.json as a text table, and where the figures of a run or a benchmark come from."""

import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import torch

from command.files import ROOT


def provenance(device) -> dict:
    """How to get the same figures again: the command line, the commit, the hardware and the versions.

    The commit ends in -dirty where files were changed since, and is None without git. hardware: the GPU, or the number
    of CPU cores that we may use.
    """
    command = shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]])
    git = subprocess.run(f"git -C {shlex.quote(str(ROOT))} describe --always --dirty --exclude '*'", shell=True,
                         capture_output=True, text=True)  # by a shell: git may not be installed
    hardware = f"{platform.machine()} CPU, {len(os.sched_getaffinity(0))} cores"
    if device == "cuda":
        hardware = torch.cuda.get_device_name()
    versions = {name: version(name) for name in ("torch", "triton", "transformers")}
    return {"command": command, "commit": git.stdout.strip() or None, "hardware": hardware,
            "versions": versions | {"python": platform.python_version()}}


def table(summary) -> str:
    """summary.json as text: what was run, the figures in percent, and a line for each problem."""
    config = summary["config"]
    shares = [name for name in summary["figures"][0] if name == "correct" or name.startswith("fast_")]
    lines = [heading(summary), "", "percent of all problems",
             "counted      rule     " + "".join(f"{name.capitalize():>10}" for name in shares) + "  geometric mean"]
    for row in summary["figures"]:
        percents = "".join(f"{100 * row[name]:10.1f}" for name in shares)
        lines.append(f"{row['counted']:12} {row['rule']:9}{percents}{row['geometric_mean'] or 0:15.2f}x")
    lines += ["", f"{'problem':50}    best  roofline  correct  most common error"]
    lines += [problem_line(task, problem, config["samples"]) for task, problem in summary["problems"].items()]
    return "\n".join(lines)


def heading(summary) -> str:
    """What is evaluated, and how: two lines."""
    config = summary["config"]
    return (f"{config['source']}: {len(config['problems'])} of {config['problems_in_level']} problems, "
            f"{config['samples']} samples of at most {config['turns']} turns each ({config['strategy']}), "
            f"{summary['skills']}\n{config['model']} on {summary['hardware']}; speedups are {summary['clock']}, "
            f"baseline {config['baseline']}; tolerance {config['tolerance']:g}")


def problem_line(task, problem, samples) -> str:
    """What became of one problem. problem: of bench.problem_figures; samples: how many it has."""
    return (f"{task[:49]:50}{problem['best_speedup']:7.2f}x{problem.get('roofline', 0):9.0%}   "
            f"{problem['correct']} of {samples}   {problem['error'][:80]}".rstrip())

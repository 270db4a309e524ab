"""What bench.py shows of a level: its figures as text and as a picture, and the machine that they hold for.

Tables and pictures are made of what summary.json holds, so old results can be shown again.
"""

import os
import platform
import re
from pathlib import Path

import torch


def machine(device) -> dict:
    """What the times depend on: the GPU, or the CPU with the number of cores that we may use, and the versions."""
    import transformers
    import triton
    if device == "cuda":
        hardware = torch.cuda.get_device_name()
    else:
        info = Path("/proc/cpuinfo")
        model = re.search(r"model name\s*: (.*)", info.read_text()) if info.is_file() else None
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        hardware = f"{model[1] if model else platform.machine()}, {cores} cores"
    versions = {module.__name__: module.__version__ for module in (torch, triton, transformers)}
    return {"hardware": hardware, "versions": {"python": platform.python_version(), **versions}}


def thresholds(row) -> list[str]:
    """The keys fast_1, fast_1.2, ... of a row of figures."""
    return [key for key in row if key.startswith("fast_")]


def table(summary) -> str:
    """summary.json as text: what was run, the figures in percent, and a line for each problem."""
    config, clock = summary["config"], summary["clock"]
    lines = [f"{config['source']}, level {config['level']}: {len(config['problems'])} of {config['problems_in_level']} "
             f"problems, {config['samples']} samples of at most {config['turns']} turns each ({config['strategy']}), "
             f"{summary['skills']}", f"{config['model']} on {summary['hardware']}; speedups are {clock}"]
    for baseline in config["baselines"]:
        title = f"% of all problems, {clock} against {'torch.compile' if baseline == 'compile' else 'eager PyTorch'}"
        heads = "".join(f"{key.capitalize():>10}" for key in thresholds(summary["figures"][0]))
        lines += ["", f"{title:<52}{'correct':>8}{heads}{'geo. mean':>11}"]
        for row in summary["figures"]:
            if row["baseline"] != baseline or not worth_a_line(row, config):
                continue
            turns = "first turn" if row["turns"] == 1 else f"{row['turns']} turns"
            tolerance = f"{row['tolerance']:.0e}".replace("e-0", "e-")
            shares = "".join(f"{100 * row[key]:>10.1f}" for key in thresholds(row))
            mean = "-" if row["geometric_mean"] is None else f"{row['geometric_mean']:.2f}x"
            lines.append(f"  {row['of']:<17}{turns:<12}{tolerance:<6}{row['rule']:<15}{100 * row['correct']:>8.1f}"
                         f"{shares}{mean:>11}")
    lines += ["", f"{'problem':<52}{'best':>8}  what became of its samples"]
    for task, problem in summary["problems"].items():
        solved = problem["best_speedup"]
        kinds = ", ".join(f"{count} {kind}" for kind, count in problem["kinds"].items())
        best, error = (f"{solved:.2f}x", "") if solved else ("-", f": {problem['most_common_error']}")
        lines.append(f"  {task[:49]:<50}{best:>8}  {kinds}{error}"[:160])
    return "\n".join(lines)


def worth_a_line(row, config) -> bool:
    """Whether a row of figures is printed: the others are in summary.json and, by turns, in the picture."""
    if row["of"] in ("mean of samples", "best sample"):
        return row["turns"] in (1, config["turns"]) and (row["of"] == "mean of samples" or config["samples"] > 1)
    alone = config["turns"] == 1 and (row["of"] == "last turn" or config["samples"] == 1)
    return row["turns"] == config["turns"] and row["tolerance"] == 1e-4 and not alone


def draw(summary, path):
    """Two panels: Fast_p against p under both rules, and the gain from turn to turn."""
    from matplotlib.figure import Figure  # only here: it takes a second to import
    config, curves = summary["config"], summary["fast_p"]
    fig = Figure(figsize=(11, 4), layout="constrained")
    left, right = fig.subplots(1, 2, subplot_kw={"ylim": (0, 100)})
    for label, shares in curves.items():
        if label != "p":  # both rules stay visible where they are equal
            left.plot(curves["p"], shares, linewidth=2.5 if label.startswith("strict") else 1.2, label=label)
    left.set(xlabel="p", ylabel="Fast_p, % of samples", title=f"speedup {summary['clock']}, tolerance 1e-4")
    shown = {"baseline": "eager", "of": "mean of samples", "tolerance": 1e-4, "rule": "strict"}.items()
    rows = [row for row in summary["figures"] if shown <= row.items()]
    for key in ["correct", *thresholds(rows[0])]:
        right.plot([row["turns"] for row in rows], [100 * row[key] for row in rows], "o-", label=key.capitalize())
    right.set(xlabel="turns", ylabel="% of samples", title="by turns, strict, against eager",
              xticks=range(1, config["turns"] + 1))
    for axis in (left, right):
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    fig.suptitle(f"{config['source']}, level {config['level']}: {config['model']}, {summary['skills']}", fontsize=10)
    fig.savefig(path, dpi=120)

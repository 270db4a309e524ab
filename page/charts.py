"""Charts of a run and of a benchmark: the pictures curves.png and fast_p.png, which the page shows, too.

PANELS lists the charts of a run; `draw` alone knows how one looks.
"""

import math

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
         "legend.frameon": False, "text.parse_math": False}  # a folder's name may hold a $
# (title, caption, {metric: label})
PANELS = [
    ("Evaluation: redundant operators, first turn", "Mean reward of the first turn, the same problems each time, greedy.",
     {"with_reward_first": "with the library", "without_reward_first": "without"}),
    ("Policy: reward", "Mean over rollouts, by the best turn. Each step has other tasks, each evaluation the same.",
     {"reward_best": "best turn", "eval_reward_best": "evaluation, best turn"}),
    ("Policy: correct and fast", "Share of rollouts by their best turn; Fast_p: correct and more than p times as fast.",
     {"correct": "correct", "fast_1": "Fast_1", "fast_1.2": "Fast_1.2", "eval_correct": "evaluation, correct",
      "eval_fast_1": "evaluation, Fast_1"}),
    ("Selection and Summary: reward", "Mean best reward of the rollouts that got the selected skills; speedup of an "
     "answer's best verified skill, or 0.", {"reward_selection": "Selection", "reward_summary": "Summary"}),
    ("Skill library", "Skills in the library. In a step: proposals, those passed, selections of skills found before.",
     {"library": "skills", "proposals": "proposals", "passed": "passed", "selected_learnt": "found skills selected"}),
    ("Seconds of a step", "Wall time by phase. Waiting for the sandbox is counted as sandbox.",
     {"sandbox": "sandbox", "select": "select", "roll out": "roll out", "summarise": "summarise", "verify": "verify",
      "update": "update", "evaluate": "evaluate"}),
]


@rc_context(STYLE)
def save_curves(run, path):
    """curves.png: PANELS by step. run: a records.Source."""
    lines = [line | line["seconds"] for line in run.metrics]  # seconds: {phase: its seconds}
    panels = []
    for title, _, labels in PANELS:
        curves = {label: learning_curve(lines, metric) for metric, label in labels.items()}
        panels.append((f"{title}, by step", curves, "correct" in labels))
    save_png(panels, path, f"{run.folder}, {run.clock} clock")


def learning_curve(lines, metric) -> tuple[list, list]:
    """A metric by step, (steps, values), without the steps that do not have it."""
    lines = [line for line in lines if line.get(metric) is not None]
    return [line["step"] for line in lines], [line[metric] for line in lines]


@rc_context(STYLE)
def save_fast_p(figures, path, title):
    """fast_p.png: Fast_p by p, of the best turns of all samples. figures: the rows of a benchmark's summary."""
    save_png([("p", fast_p_curves(figures), True)], path, title)


def fast_p_curves(figures) -> dict:
    """{rule: (p, shares)}"""
    curves = {}
    for row in figures:
        if row["counted"] == "best turn":
            shares = {float(name.removeprefix("fast_")): row[name] for name in row if name.startswith("fast_")}
            curves[f"{row['rule']} rule"] = list(shares), list(shares.values())
    return curves


def save_png(panels, path, title):
    """Charts in one picture, at most three in a row. panels: (label of the x axis, {label: (x, y)}, is y a share?)"""
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(5 * columns, 3.3 * rows), layout="constrained")
    for number, (label, curves, shares) in enumerate(panels, start=1):
        axis = figure.add_subplot(rows, columns, number)
        draw(axis, curves)
        axis.set_xlabel(label)
        axis.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=label.endswith("step")))
        if shares:
            axis.set_ylim(0, 1.02)
    figure.suptitle(title)
    figure.savefig(path, dpi=100)


def draw(axis, curves):
    """Draw curves. The legend is above, where it hides nothing. Later curves are thinner, so none hides another."""
    for number, (label, (x, y)) in enumerate(curves.items()):
        line = "--D" if label.startswith("evaluation") else ".-"
        axis.plot(x, y, line, label=label, markersize=4, linewidth=max(1.2, 3.6 - 0.8 * number))
    axis.legend(loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=3, handlelength=1.8, columnspacing=1.2)

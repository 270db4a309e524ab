"""Charts of a run and of a benchmark, as SVG for the page and as pictures beside the other files.

A chart is data (`Chart`); `draw` is the only function that knows how one looks. PANELS lists those of a run.
"""

import io
import math
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
         "legend.frameon": False, "svg.fonttype": "none", "text.parse_math": False}  # a folder's name may hold a $
# (title, caption, {metric: label})
PANELS = [
    ("Policy: reward", "Mean over rollouts, by the best turn. Each step has other tasks, the evaluation has not.",
     {"reward_best": "best turn", "eval_reward_best": "evaluation, best turn"}),
    ("Policy: correct and fast", "Share of rollouts by their best turn; Fast_p: correct and more than p times as fast.",
     {"correct": "correct", "fast_1": "Fast_1", "fast_1.2": "Fast_1.2", "eval_correct": "evaluation, correct",
      "eval_fast_1": "evaluation, Fast_1"}),
    ("Selection and Summary: reward", "Mean best reward of the rollouts that got the selected skills; speedup of an "
     "answer's best verified skill, or 0.", {"reward_selection": "Selection", "reward_summary": "Summary"}),
    ("Skill library", "A skill joins after its step; how often skills that the run has found were selected since.",
     {"library": "skills", "proposals": "proposals", "passed": "passed", "selected_learnt": "found skills selected"}),
    ("Update", "Norm of the gradient before it is clipped.", {"grad_norm": "gradient norm"}),
    ("Seconds of a step", "Wall time by phase. What a phase waits for the sandbox is counted there.",
     {"sandbox": "sandbox", "select": "select", "roll out": "roll out", "summarise": "summarise", "verify": "verify",
      "update": "update", "evaluate": "evaluate"}),
]


class Curve(NamedTuple):
    """One line of a chart."""

    label: str
    x: list
    y: list


class Chart(NamedTuple):
    """Curves over one x. kind: "lines", or "shares": from 0 to 1."""

    title: str
    caption: str
    curves: list
    x: str = "step"
    kind: str = "lines"


def run_charts(run) -> list[Chart]:
    """Those of PANELS. run: a records.Source."""
    lines = [line | line["seconds"] for line in run.metrics]  # seconds: {phase: its seconds}
    charts = []
    for title, caption, labels in PANELS:
        curves = [learning_curve(lines, metric, label) for metric, label in labels.items()]
        charts.append(Chart(title, caption, curves, kind="shares" if "correct" in labels else "lines"))
    return charts


def learning_curve(metrics, metric, label) -> Curve:
    """A metric by step, without the steps that do not have it."""
    lines = [line for line in metrics if line.get(metric) is not None]
    return Curve(label, [line["step"] for line in lines], [line[metric] for line in lines])


def fast_p(figures) -> Chart:
    """Fast_p by p, of the best turns of all samples. figures: the rows of a benchmark's summary."""
    curves = []
    for row in figures:
        if row["counted"] == "best turn":
            shares = {float(name.removeprefix("fast_")): row[name] for name in row if name.startswith("fast_")}
            curves.append(Curve(f"{row['rule']} rule", list(shares), list(shares.values())))
    return Chart("Fast_p", "Share of samples that are correct and more than p times as fast.", curves, "p", "shares")


def draw(axis, chart):
    """Draw a chart. The legend is above, where it hides nothing. Later curves are thinner, so none hides another."""
    for number, (label, x, y) in enumerate(chart.curves):
        line = "--D" if label.startswith("evaluation") else ".-"
        axis.plot(x, y, line, label=label, markersize=4, linewidth=max(1.2, 3.6 - 0.8 * number))
    if chart.kind == "shares":
        axis.set_ylim(0, 1.02)
    axis.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=chart.x != "p"))
    axis.legend(loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=3, handlelength=1.8, columnspacing=1.2)


def picture(charts, labels, columns, one_scale) -> Figure:
    """Charts in a grid, each with a label under it."""
    rows = math.ceil(len(charts) / columns)
    figure = Figure(figsize=(5 * columns, 3.3 * rows), layout="constrained")
    axis = None
    for number, (chart, label) in enumerate(zip(charts, labels), start=1):
        axis = figure.add_subplot(rows, columns, number, sharey=axis if one_scale else None)
        draw(axis, chart)
        axis.set_xlabel(label)
    return figure


@rc_context(STYLE)
def svg(charts, names) -> str:
    """One chart of each of `names` (folders), side by side with one scale. Black becomes the page's text colour."""
    labels = [f"{chart.x}, {name}" for chart, name in zip(charts, names)]
    file = io.StringIO()
    picture(charts, labels, len(charts), one_scale=True).savefig(file, format="svg", transparent=True)
    markup = file.getvalue().partition("<!DOCTYPE")[2].partition(">")[2]  # without the head of an XML file
    return markup.replace("#000000", "currentColor")


@rc_context(STYLE)
def save_png(charts, path, title):
    """All charts in one picture, at most three in a row."""
    labels = [f"{chart.title}, by {chart.x}" for chart in charts]
    figure = picture(charts, labels, min(3, len(charts)), one_scale=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=100)

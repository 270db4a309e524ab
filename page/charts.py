"""Charts of a run and of a benchmark, as SVG for the page and as pictures beside the other files.

A chart is data (`Chart`); `draw` is the only function that knows how one looks. PANELS lists those of a run.
"""

import io
import math
from typing import NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

INK = "#5b616b"  # of words and axes; on the page it becomes the colour of its text, light or dark
EVALUATED = "evaluation, "  # before the label of a curve of the evaluation: dashed, in the colour of training's
STYLE = {"svg.fonttype": "none", "font.size": 9, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK,
         "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False,
         "axes.axisbelow": True, "legend.frameon": False, "legend.fontsize": 8,
         "text.parse_math": False,  # a folder's name may hold a $
         "svg.hashsalt": "page"}  # the same file each time
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
]


class Curve(NamedTuple):
    """One line, or one level of stacked bars."""

    label: str
    x: list
    y: list


class Chart(NamedTuple):
    """Curves over one x. kind: lines; shares, lines from 0 to 100 %; or stacked, bars on each other."""

    title: str
    caption: str
    curves: list
    x: str = "step"
    kind: str = "lines"


def run_charts(run) -> list[Chart]:
    """Those of PANELS, then replies by role, and last the seconds of a step by phase. run: a records.Source."""
    charts = []
    for title, caption, metrics in PANELS:
        curves = [learning_curve(run.metrics, metric, label) for metric, label in metrics.items()]
        charts.append(Chart(title, caption, curves, kind="shares" if "correct" in metrics else "lines"))
    rows = Chart("Replies in the loss", "Replies of each role that have an advantage.", by_key(run.steps, "rows"))
    seconds = Chart("Seconds of a step", "Wall time by phase. What a phase waits for the sandbox is counted there.",
                    by_key(run.metrics, "seconds"), kind="stacked")
    return [*charts, rows, seconds]


def learning_curve(metrics, metric, label) -> Curve:
    """A metric by step, without the steps that do not have it."""
    lines = [line for line in metrics if line.get(metric) is not None]
    return Curve(label, [line["step"] for line in lines], [line[metric] for line in lines])


def by_key(metrics, metric) -> list[Curve]:
    """A curve for each key of a metric that is a dict, such as the seconds of each phase."""
    keys = {}
    for line in metrics:
        keys |= line[metric]
    steps = [line["step"] for line in metrics]
    curves = []
    for key in keys:
        curves.append(Curve(key, steps, [line[metric].get(key, 0) for line in metrics]))
    return curves


def fast_p(figures) -> Chart:
    """Fast_p by p, of the best turns of all samples. figures: the rows of a benchmark's summary."""
    curves = []
    for row in figures:
        if row["counted"] == "best turn":
            names = [name for name in row if name.startswith("fast_")]
            ps = [float(name.removeprefix("fast_")) for name in names]
            curves.append(Curve(f"{row['rule']} rule", ps, [row[name] for name in names]))
    return Chart("Fast_p", "Share of samples that are correct and more than p times as fast.", curves, "p", "shares")


def draw(axis, chart):
    """Draw a chart. The legend is above, where it hides nothing."""
    labels = [curve.label for curve in chart.curves]
    bottom = 0.0
    for label, x, y in chart.curves:
        colour = f"C{labels.index(label.removeprefix(EVALUATED))}"
        if chart.kind == "stacked":
            axis.bar(x, y, bottom=bottom, color=colour, label=label)
            bottom = np.add(bottom, y)
        else:
            style = "--D" if label.startswith(EVALUATED) else ".-"
            axis.plot(x, y, style, color=colour, label=label, markersize=4)
    if chart.kind == "shares":
        axis.set_ylim(0, 1.02)
        axis.yaxis.set_major_formatter(PercentFormatter(1))
    axis.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=chart.x != "p"))
    axis.grid(alpha=0.25)
    if chart.curves:
        axis.legend(loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=3, handlelength=1.8, columnspacing=1.2)


@rc_context(STYLE)
def svg(charts, names) -> str:
    """One chart of each of `names` (folders), side by side with one scale, in the ink of the page."""
    figure = Figure(figsize=(5 * len(charts), 2.9), layout="constrained")
    axes = figure.subplots(1, len(charts), sharey=True, squeeze=False)[0]
    for axis, chart, name in zip(axes, charts, names):
        draw(axis, chart)
        axis.set_xlabel(f"{chart.x}, {name}")
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue().replace(INK, "currentColor")
    return text[text.index("<svg "):].replace("<svg ", f'<svg role="img" aria-label="{charts[0].title}" ', 1)


@rc_context(STYLE)
def save_png(charts, path, title):
    """All charts in one picture, at most three in a row."""
    columns, rows = min(3, len(charts)), math.ceil(len(charts) / 3)
    figure = Figure(figsize=(5.3 * columns, 3.7 * rows), layout="constrained")
    for number, chart in enumerate(charts, start=1):
        axis = figure.add_subplot(rows, columns, number)
        draw(axis, chart)
        axis.set_xlabel(f"{chart.title}, by {chart.x}")
    figure.suptitle(title)
    figure.savefig(path, dpi=100)

"""Charts: what is drawn of a run and of a benchmark, as SVG for the page and as pictures beside the other files.

A chart is data (`Chart`); `draw` is the only function that knows how one looks. PANELS lists those of a run.
"""

import io
import math
from collections import Counter
from typing import NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from page.records import mean, numbers

INK = "#5b616b"  # of words and axes; on the page it becomes the colour of its text, light or dark
EVALUATED = "evaluation, "  # before the label of a curve of the evaluation: dashed, in the colour of training's
STYLE = {"svg.fonttype": "none", "font.size": 9, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK,
         "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False,
         "axes.axisbelow": True, "legend.frameon": False, "legend.fontsize": 8,
         "text.parse_math": False,  # a folder's name may hold a $
         "svg.hashsalt": "page"}  # the same page each time
# (title, what there is to see, {metric: label})
PANELS = [
    ("Policy: reward", "Mean over rollouts. Each step has other tasks; the evaluation's never change.",
     {"reward_best": "best turn", "reward_turn": "all turns", "eval_reward_best": "evaluation, best turn"}),
    ("Policy: correct and fast", "Share of rollouts by their best turn; Fast_p is correct and over p times as fast.",
     {"correct": "correct", "fast_1": "Fast_1", "fast_1.2": "Fast_1.2", "eval_correct": "evaluation, correct",
      "eval_fast_1": "evaluation, Fast_1"}),
    ("Selection: reward", "Mean of the best rewards of the rollouts that got the selected skills.",
     {"reward_selection": "reward", "selected": "skills in a selection"}),
    ("Summary: reward", "Speedup of the best verified skill of an answer; 0 where none has passed.",
     {"reward_summary": "reward"}),
    ("Skill library", "A skill joins after its step; how often skills that the run has found were selected since.",
     {"library": "skills", "proposals": "proposals", "passed": "passed", "selected_learnt": "found skills selected"}),
    ("Replies that teach", "Replies in a group. Live: those with an advantage other than 0.",
     {"policy_rows": "Policy", "selection_rows": "Selection", "summary_rows": "Summary", "policy_live": "live, Policy",
      "selection_live": "live, Selection", "summary_live": "live, Summary"}),
    ("Update", "Norm of the gradient before it is clipped; 1 where it was clipped, or where there was none.",
     {"grad_norm": "gradient norm", "grad_clipped": "clipped", "zero_gradient": "without gradient"}),
]


class Curve(NamedTuple):
    """One line, with a pale one for each of `behind`: what y is the mean of."""

    label: str
    x: list
    y: list
    behind: list = []


class Chart(NamedTuple):
    """Curves over one x. kind: lines; shares, from 0 to 100 %; or stacked bars, whose sum is seen."""

    title: str
    caption: str
    curves: list
    x: str = "step"
    kind: str = "lines"


def run_charts(run) -> list[Chart]:
    """Those of PANELS, and last the seconds of each step."""
    charts = [Chart(title, caption, [learning_curve(run, metric, label) for metric, label in metrics.items()],
                    kind="shares" if "correct" in metrics else "lines") for title, caption, metrics in PANELS]
    steps = [line["step"] for line in run.metrics]
    seconds = [Curve(phase, steps, [line["seconds"].get(phase, 0.0) for line in run.metrics]) for phase in phases(run)]
    return [*charts, Chart("Seconds of a step", "Wall time by phase. What a phase waits for the sandbox is counted "
                           "there.", seconds, kind="stacked")]


def learning_curve(run, metric, label) -> Curve:
    """A metric by step. From 20 steps on each value is pale, and the mean of the steps around it strong.

    A step's tasks are few, so its values scatter. The evaluation's problems are always the same: its values stay.
    """
    lines = [line for line in run.metrics if metric in line]
    steps, values = [line["step"] for line in lines], [line[metric] for line in lines]
    if len(steps) < 20 or metric == "library" or label.startswith(EVALUATED):
        return Curve(label, steps, values)
    around = len(steps) // 10
    means = [mean(values[max(0, i - around):i + around + 1]) for i in range(len(values))]
    return Curve(label, steps, means, [values])


def phases(run) -> dict[str, float]:
    """{phase: seconds over all steps}, the longest first."""
    total = sum((Counter(line["seconds"]) for line in run.metrics), Counter())
    return {phase: seconds for phase, seconds in total.most_common() if seconds >= 0.05}


def fast_p(figures, turns) -> Chart:
    """Fast_p by p, out of a benchmark's figures, of all its turns."""
    shown, curves = {"of": "mean of samples", "tolerance": 1e-4, "turns": turns}.items(), []
    for row in figures:
        if shown <= row.items():
            shares = {float(key[5:]): share for key, share in numbers(row).items() if key.startswith("fast_")}
            curves.append(Curve(f"{row.get('rule')}, against {row.get('baseline')}", list(shares), [*shares.values()]))
    return Chart("Fast_p", "Share of samples that are correct and over p times as fast.", curves, "p", "shares")


def draw(axis, chart):
    """The legend is above, where it hides nothing."""
    labels, below = [curve.label for curve in chart.curves], 0.0
    for label, x, y, behind in chart.curves:
        colour = f"C{labels.index(label.removeprefix(EVALUATED))}"
        shown = label.encode(errors="replace").decode()  # half a surrogate pair has no glyph
        for values in behind:
            axis.plot(x, values, color=colour, alpha=0.25, linewidth=1)
        if chart.kind == "stacked":
            axis.bar(x, y, bottom=below, color=colour, label=shown)
            below = np.add(below, y)
        else:
            style = "--D" if label.startswith(EVALUATED) else "-" if behind else ".-"
            axis.plot(x, y, style, color=colour, label=shown, markersize=4)
    if chart.kind == "shares":
        axis.set_ylim(0, 1.02)
        axis.yaxis.set_major_formatter(PercentFormatter(1))
    axis.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=chart.x != "p"))
    axis.grid(alpha=0.25)
    if axis.has_data():
        axis.legend(loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=3, handlelength=1.8, columnspacing=1.2)


@rc_context(STYLE)
def svg(charts, names) -> str:
    """One chart of each of `names` (folders), side by side with one scale, in the ink of the page."""
    figure, file = Figure(figsize=(5 * len(charts), 2.9), layout="constrained"), io.StringIO()
    for axis, chart, name in zip(figure.subplots(1, len(charts), sharey=True, squeeze=False)[0], charts, names):
        draw(axis, chart)
        axis.set_xlabel(f"{chart.x}, {name}" if len(charts) > 1 else chart.x)
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue().replace(INK, "currentColor")
    return text[text.index("<svg "):].replace("<svg ", f'<svg role="img" aria-label="{charts[0].title}" ', 1)


@rc_context(STYLE)
def save_png(charts, path, title):
    """All charts in one picture, at most three in a row."""
    columns, rows = min(3, len(charts)), math.ceil(len(charts) / 3)
    figure = Figure(figsize=(5.3 * columns, 3.7 * rows), layout="constrained")
    for i, chart in enumerate(charts, start=1):
        axis = figure.add_subplot(rows, columns, i)
        draw(axis, chart)
        axis.set_xlabel(f"{chart.title}, by {chart.x}")
    figure.suptitle(title)
    figure.savefig(path, dpi=100)

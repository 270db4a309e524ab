"""Curves of one or two runs: as SVG for the page, where two runs stand side by side with one scale, and as PNG.

PANELS lists the curves of a run.
"""

import io
import itertools
from collections import Counter

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from page.records import mean

INK = "#5b616b"  # of words and axes; on the page it becomes the colour of its text, light or dark
SECONDS = "Seconds of a step"  # title of the chart that has a section of its own
COLOURS = ("#3b82c4", "#d9772b", "#2f9e62", "#9467bd", "#d0524f", "#1f9aa0", "#8a8f98", "#d4679b", "#a1714f", "#b5a42a")
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "page", "font.size": 9, "text.color": INK, "axes.labelcolor": INK,
         "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False,
         "axes.spines.right": False, "axes.axisbelow": True, "legend.frameon": False, "legend.fontsize": 8,
         "lines.linewidth": 1.8, "text.parse_math": False}  # a folder's name may hold a $
# (title, what there is to see, {metric: label}); metrics of the evaluation are dashed, in the colour of training's
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
    ("Replies that teach", "Rows: replies in the loss. Live: those with an advantage other than 0.",
     {"policy_rows": "Policy", "selection_rows": "Selection", "summary_rows": "Summary", "policy_live": "live, Policy",
      "selection_live": "live, Selection", "summary_live": "live, Summary"}),
    ("Update", "Norm of the gradient before it is clipped; 1 where it was clipped, or where there was none.",
     {"grad_norm": "gradient norm", "grad_clipped": "clipped", "zero_gradient": "without gradient"}),
    (SECONDS, "Wall time by phase. What a phase waits for the sandbox is counted there.", {}),
]


def draw(axis, run, title, curves, xlabel):
    """One panel of a run. The legend is above it, where it hides nothing."""
    if title == SECONDS:
        draw_seconds(axis, run)
    else:
        draw_curves(axis, run, curves)
    axis.set_xlabel(xlabel)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.25, linewidth=0.6)
    if axis.has_data():
        axis.legend(loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=3, handlelength=1.8, columnspacing=1.2)


def draw_curves(axis, run, curves):
    """The curves of one panel. From 20 steps on a step's value is pale, and the mean of the steps around it strong.

    A step's tasks are few, so its values scatter. The evaluation's problems are always the same: its values stay.
    """
    for key, label in curves.items():
        steps = [line["step"] for line in run.metrics if key in line]
        values = [line[key] for line in run.metrics if key in line]
        colour = COLOURS[list(curves).index(key.removeprefix("eval_"))]
        style = "--D" if key.startswith("eval_") else ".-"
        if len(steps) >= 20 and key != "library" and not key.startswith("eval_"):
            axis.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
            around, style = len(steps) // 10, "-"
            values = [mean(values[max(0, i - around):i + around + 1]) for i in range(len(values))]
        axis.plot(steps, values, style, color=colour, label=label, markersize=4)
    if "correct" in curves:
        axis.set_ylim(0, 1.02)
        axis.yaxis.set_major_formatter(PercentFormatter(1))


def draw_seconds(axis, run):
    """Stacked seconds of each step by phase."""
    steps, below = [line["step"] for line in run.metrics], [0.0] * len(run.metrics)
    for phase, colour in zip(phases(run), itertools.cycle(COLOURS)):
        values = [line["seconds"].get(phase, 0.0) for line in run.metrics]
        axis.bar(steps, values, bottom=below, color=colour, label=phase)
        below = [start + value for start, value in zip(below, values)]


def phases(run) -> dict[str, float]:
    """{phase: seconds over all steps}, the longest first."""
    total = sum((Counter(line["seconds"]) for line in run.metrics), Counter())
    return {phase: seconds for phase, seconds in total.most_common() if seconds >= 0.05}


def charts(runs) -> dict[str, tuple[str, str]]:
    """{title: (caption, SVG)}: of two runs side by side, with one scale, and with the ink of the page."""
    made = {}
    for title, caption, curves in PANELS if runs else ():
        with rc_context(STYLE):
            figure, file = Figure(figsize=(5 * len(runs), 2.9), layout="constrained"), io.StringIO()
            for axis, run in zip(figure.subplots(1, len(runs), sharey=True, squeeze=False)[0], runs):
                draw(axis, run, title, curves, f"step, {run.folder.name}" if len(runs) > 1 else "step")
            figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        text = file.getvalue()
        text = text[text.index("<svg "):].replace(INK, "currentColor")
        made[title] = caption, text.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)
    return made


def save_png(run, path):
    """curves.png: the same charts of one run."""
    with rc_context(STYLE):
        figure = Figure(figsize=(16, 11), layout="constrained")
        for i, (title, _, curves) in enumerate(PANELS, start=1):
            draw(figure.add_subplot(3, 3, i), run, title, curves, f"{title}, by step")
        figure.suptitle(f"{run.folder.name}, {run.clock} clock")
        figure.savefig(path, dpi=100)

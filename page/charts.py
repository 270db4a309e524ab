"""Curves of one or two folders: as SVG for the page, where two folders stand side by side with one scale, and as PNG.

PANELS lists the curves of a run; metrics that a run does not have are left out, and so is a panel without any.
"""

import functools
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
]


def draw_panel(axis, source, curves):
    """The curves of one panel. From 20 steps on a step's value is pale, and the mean of the steps around it strong.

    A step's tasks are few, so its values scatter. The evaluation's problems are always the same: its values stay.
    """
    for key, label in curves.items():
        points = [(line["step"], line[key]) for line in source.metrics if key in line]
        steps, values = [step for step, _ in points], [value for _, value in points]
        colour = COLOURS[list(curves).index(key.removeprefix("eval_"))]
        if len(points) >= 20 and key != "library" and not key.startswith("eval_"):
            axis.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
            around = len(points) // 10
            values = [mean(values[max(0, i - around):i + around + 1]) for i in range(len(values))]
            axis.plot(steps, values, color=colour, label=label)
        elif points:
            style = "--D" if key.startswith("eval_") else ".-"
            axis.plot(steps, values, style, color=colour, label=label, markersize=4)
    if "correct" in curves:
        axis.set_ylim(0, 1.02)
        axis.yaxis.set_major_formatter(PercentFormatter(1))


def draw_seconds(axis, source):
    """Stacked seconds of each step by phase."""
    steps, below = [line["step"] for line in source.metrics], [0.0] * len(source.metrics)
    for phase, colour in zip(phases(source), itertools.cycle(COLOURS)):
        values = [line["seconds"].get(phase, 0.0) for line in source.metrics]
        axis.bar(steps, values, bottom=below, color=colour, label=phase)
        below = [start + value for start, value in zip(below, values)]


def phases(source) -> dict[str, float]:
    """{phase: seconds over all steps}, the longest first."""
    total = sum((Counter(line["seconds"]) for line in source.metrics), Counter())
    return {phase: seconds for phase, seconds in total.most_common() if seconds >= 0.05}


def draw_problems(axis, source):
    """The speedup of each problem's best sample, fastest problem first; 0 for those that are not solved."""
    best = {}
    for rollout in source.rollouts:
        best[rollout["task"]] = max(best.get(rollout["task"], 0.0), rollout["speedup"] or 0.0)
    axis.bar(range(1, len(best) + 1), sorted(best.values(), reverse=True), color=COLOURS[0], label="best sample")
    axis.axhline(1.0, color=INK, linestyle="--", linewidth=1, label="as fast as PyTorch")


# ----------------------------------------------------------------------------------------------------------------------
# SVG for the page, PNG for the folder


def drawings(sources) -> list[tuple]:
    """(title, caption, label of the x axis, sources that have what it shows, function that draws one) of each chart."""
    runs = [source for source in sources if source.metrics]
    made = []
    for title, caption, curves in PANELS:
        having = [run for run in runs if any(key in line for line in run.metrics for key in curves)]
        made.append((title, caption, "step", having, functools.partial(draw_panel, curves=curves)))
    benchmarks = [source for source in sources if source.rollouts and not source.metrics]
    made.append(("Speedup by problem", "The best sample of each problem, fastest first. 0: not solved.", "problems",
                 benchmarks, draw_problems))
    made.append((SECONDS, "Wall time by phase. What a phase waits for the sandbox is counted there.", "step",
                 [run for run in runs if phases(run)], draw_seconds))
    return [drawing for drawing in made if drawing[3]]


def charts(sources) -> dict[str, tuple[str, str]]:
    """{title: (caption, SVG)}: of two folders side by side, with one scale, and with the ink of the page."""
    made = {}
    for title, caption, xlabel, shown, draw in drawings(sources):
        with rc_context(STYLE):
            figure, file = Figure(figsize=(5 * len(shown), 2.9), layout="constrained"), io.StringIO()
            for axis, source in zip(figure.subplots(1, len(shown), sharey=True, squeeze=False)[0], shown):
                draw(axis, source)
                finish_axis(axis, f"{xlabel}, {source.folder.name}" if len(sources) > 1 else xlabel)
            figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        text = file.getvalue()
        text = text[text.index("<svg "):].replace(INK, "currentColor")
        made[title] = caption, text.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)
    return made


def save_png(source, path):
    """curves.png: the same charts of one run."""
    with rc_context(STYLE):
        figure = Figure(figsize=(16, 11), layout="constrained")
        for i, (title, _, xlabel, _, draw) in enumerate(drawings([source]), start=1):
            axis = figure.add_subplot(3, 3, i)
            draw(axis, source)
            finish_axis(axis, f"{title}, by {xlabel}")
        figure.suptitle(f"{source.folder.name}, {source.clock} clock")
        figure.savefig(path, dpi=100)


def finish_axis(axis, xlabel):
    """What all axes have in common. The legend is above them, where it hides nothing."""
    axis.set_xlabel(xlabel)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.legend(loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=3, handlelength=1.8, columnspacing=1.2)

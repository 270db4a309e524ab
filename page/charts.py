"""Curves of one or two folders: as SVG for the page, where two folders stand side by side with one scale, and as PNG.

A chart is (title, caption, SVG). PANELS lists the curves of a run; metrics that a run does not have are left out, and
so is a panel without any.
"""

import io

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from page.records import mean

INK = "#5b616b"  # of words, axes and the evaluation; on the page it becomes the colour of its text, light or dark
COLOURS = ("#3b82c4", "#d9772b", "#2f9e62", "#9467bd", "#d0524f", "#1f9aa0", "#8a8f98", "#d4679b", "#a1714f", "#b5a42a")
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "page", "font.size": 9, "text.color": INK, "axes.labelcolor": INK,
         "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False,
         "axes.spines.right": False, "axes.axisbelow": True, "legend.frameon": False, "legend.fontsize": 8,
         "lines.linewidth": 1.8, "text.parse_math": False}  # a folder's name may hold a $
# (title, what there is to see, {metric: label}, {metric of the evaluation: label})
PANELS = [
    ("Policy: reward", "Mean over rollouts. Each step has other tasks; the evaluation's never change.",
     {"reward_best": "best turn", "reward_turn": "all turns"}, {"eval_reward_best": "evaluation, best turn"}),
    ("Policy: correct and fast", "Share of rollouts by their best turn; Fast_p is correct and over p times as fast.",
     {"correct": "correct", "fast_1": "Fast_1", "fast_1.2": "Fast_1.2"},
     {"eval_fast_1": "evaluation, Fast_1", "eval_correct": "evaluation, correct"}),
    ("Selection: reward", "Mean of the best rewards of the rollouts that got the selected skills.",
     {"reward_selection": "reward", "selected": "skills in a selection"}, {}),
    ("Summary: reward", "Speedup of the best verified skill of an answer; 0 where none has passed.",
     {"reward_summary": "reward"}, {}),
    ("Skill library", "A skill joins after its step; how often skills that the run has found were selected since.",
     {"library": "skills", "proposals": "proposals", "passed": "passed", "selected_learnt": "found skills selected"},
     {}),
    ("Replies that teach", "Rows: replies in the loss. Live: those with an advantage other than 0.",
     {"policy_rows": "Policy", "selection_rows": "Selection", "summary_rows": "Summary", "policy_live": "live, Policy",
      "selection_live": "live, Selection", "summary_live": "live, Summary"}, {}),
    ("Update", "Norm of the gradient before it is clipped; 1 where it was clipped, or where there was none.",
     {"grad_norm": "gradient norm", "grad_clipped": "clipped", "zero_gradient": "without gradient"}, {}),
]


def draw_panel(axis, source, panel):
    """The curves of one panel: from 20 steps on the step's value is pale, and the mean of the steps around it strong.

    A step's tasks are few, so its values scatter. The evaluation's problems are always the same: its values stay.
    """
    _, _, training, evaluation = panel
    for colour, (key, label) in zip(COLOURS, training.items()):
        points = [(line["step"], line[key]) for line in source.metrics if key in line]
        if not points:
            continue
        steps, values = zip(*points)
        if len(points) >= 20 and key != "library":  # the library does not scatter
            axis.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
            around = len(points) // 10
            values = [mean(values[max(0, i - around):i + around + 1]) for i in range(len(values))]
        axis.plot(steps, values, color=colour, label=label, marker="." if len(points) < 20 else None)
    for style, (key, label) in zip(("--", ":"), evaluation.items()):
        points = [(line["step"], line[key]) for line in source.metrics if key in line]
        if points:
            axis.plot(*zip(*points), style, color=INK, marker="D", markersize=4, label=label)
    if "correct" in training:
        axis.set_ylim(0, 1.02)
        axis.yaxis.set_major_formatter(PercentFormatter(1))


def draw_seconds(axis, source):
    """Stacked seconds of each step by phase."""
    steps, below = [line["step"] for line in source.metrics], [0.0] * len(source.metrics)
    for i, phase in enumerate(phases(source)):
        values = [line["seconds"].get(phase, 0.0) for line in source.metrics]
        if len(steps) > 30:
            axis.fill_between(steps, below, [b + v for b, v in zip(below, values)], color=COLOURS[i % len(COLOURS)],
                              label=phase, linewidth=0)
        else:
            axis.bar(steps, values, bottom=below, color=COLOURS[i % len(COLOURS)], label=phase)
        below = [b + v for b, v in zip(below, values)]


def phases(source) -> dict[str, float]:
    """{phase: seconds over all steps}, the longest first."""
    total = {}
    for line in source.metrics:
        for phase, seconds in line["seconds"].items():
            total[phase] = total.get(phase, 0.0) + seconds
    return dict(sorted(((p, s) for p, s in total.items() if s >= 0.05), key=lambda item: -item[1]))


def draw_problems(axis, source):
    """The speedup of each problem's best sample, fastest problem first; 0 for those that are not solved."""
    best = {}
    for rollout in source.rollouts:
        best[rollout["task"]] = max(best.get(rollout["task"], 0.0), rollout["speedup"] or 0.0)
    axis.bar(range(1, len(best) + 1), sorted(best.values(), reverse=True), color=COLOURS[0], label="best sample")
    axis.axhline(1.0, color=INK, linestyle="--", linewidth=1, label="as fast as PyTorch")


# ----------------------------------------------------------------------------------------------------------------------
# SVG for the page, PNG for the folder


def charts(sources) -> list[tuple[str, str, str]]:
    """The page's charts of all sources: curves by role, then problems of benchmarks."""
    runs = [source for source in sources if source.metrics]
    made = []
    for panel in PANELS:
        having = [run for run in runs if any(key in line for line in run.metrics for key in {**panel[2], **panel[3]})]
        if having:
            made.append((*panel[:2], svg(panel[0], "step", having, lambda axis, run: draw_panel(axis, run, panel))))
    benchmarks = [source for source in sources if not source.metrics and source.rollouts]
    if benchmarks:
        made.append(("Speedup by problem", "The best sample of each problem, fastest problem first. 0: not solved.",
                     svg("Speedup by problem", "problems", benchmarks, draw_problems)))
    return made


def seconds_chart(sources) -> str:
    """Where the seconds of a step went, as SVG; empty where nobody has counted them."""
    timed = [source for source in sources if phases(source)]
    return svg("Seconds of a step by phase", "step", timed, draw_seconds) if timed else ""


def svg(title, xlabel, sources, draw) -> str:
    """A figure with an axis for each source, as an SVG element that takes its ink from the page."""
    with rc_context(STYLE):
        figure = Figure(figsize=(5 * len(sources), 2.9), layout="constrained")
        for axis, source in zip(figure.subplots(1, len(sources), sharey=True, squeeze=False)[0], sources):
            draw(axis, source)
            finish_axis(axis, f"{xlabel}, {source.folder.name}" if len(sources) > 1 else xlabel)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg"):].replace(INK, "currentColor")
    return text.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)


def finish_axis(axis, xlabel):
    """What all axes have in common. The legend is above them, where it hides nothing."""
    axis.set_xlabel(xlabel)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.legend(loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=3, handlelength=1.4, columnspacing=1.2)


def save_png(source, path):
    """curves.png: every panel and the seconds of a step."""
    with rc_context(STYLE):
        figure = Figure(figsize=(16, 11), layout="constrained")
        *axes, last = figure.subplots(3, 3).flat
        for axis, panel in zip(axes, PANELS, strict=True):
            draw_panel(axis, source, panel)
            finish_axis(axis, f"{panel[0]}, by step")
        draw_seconds(last, source)
        finish_axis(last, "seconds, by step")
        figure.suptitle(f"{source.folder.name}, {source.clock} clock")
        figure.savefig(path, dpi=100)

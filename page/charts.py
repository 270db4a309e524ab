"""Charts of a run: the picture curves.png, which the page shows, too. PANELS lists them."""

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
         "legend.frameon": False, "text.parse_math": False}  # a folder's name may hold a $
# (title, caption, {metric: label})
PANELS = [
    ("Evaluation: redundant operators, first turn", "Mean reward of the first turn, always the same problems, greedy.",
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
    """curves.png: PANELS by step, legends above them, where they hide nothing. run: a records.Source."""
    lines = [line | line["seconds"] for line in run.metrics]  # seconds: {phase: its seconds}
    figure = Figure(figsize=(15, 6.6), layout="constrained")
    for axis, (title, _, labels) in zip(figure.subplots(2, 3).flat, PANELS):
        for number, (metric, label) in enumerate(labels.items()):  # later ones are thinner, so none hides another
            style = "--D" if label.startswith("evaluation") else ".-"
            axis.plot(*learning_curve(lines, metric), style, label=label, markersize=4,
                      linewidth=max(1.2, 3.6 - 0.8 * number))
        axis.legend(loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=3, handlelength=1.8, columnspacing=1.2)
        axis.set_xlabel(f"{title}, by step")
        axis.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
        if "correct" in labels:  # its values are shares
            axis.set_ylim(0, 1.02)
    figure.suptitle(f"{run.folder}, {run.clock} clock")
    figure.savefig(path, dpi=100)


def learning_curve(lines, metric) -> tuple[list, list]:
    """A metric by step, (steps, values), without the steps that do not have it."""
    lines = [line for line in lines if line.get(metric) is not None]
    return [line["step"] for line in lines], [line[metric] for line in lines]

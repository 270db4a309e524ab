"""Test-time strategies beside each other, at equal budgets: kernels that were scored, and tokens that were sampled.

One *search* is one sample of each problem: the first samples of all problems are one search through the level, the
second ones another, and so on. Each draws random numbers of its own, so their spread says what chance does.

`runs` is {strategy: {problem: [search, ...]}}, where a search at a problem is the list of its steps (bench.steps).
"""

from itertools import accumulate
from statistics import fmean, geometric_mean

from page.charts import Chart, Curve
from page.levels import aligned

COLUMNS = ("correct", "fast_1", "fast_1.2", "at_most_kernels", "at_most_tokens", "kernels", "tokens")  # of the table


def compare(runs, most_kernels) -> dict:
    """Budgets, and what each search of each strategy has found within them: strategies.json.

    The largest budget is `most_kernels` for a problem; in tokens it is what the strategy that sampled the fewest has
    used for a problem, so that all have spent it.
    """
    searches = {name: list(zip(*problems.values())) for name, problems in runs.items()}
    least = min(fmean(spent(search, "tokens") for search in found) for found in searches.values())
    budgets = {"kernels": list(range(1, most_kernels + 1)), "tokens": [least * i / 20 for i in range(1, 21)]}
    return {"budgets": budgets, "strategies": {name: [outcome(search, budgets) for search in found]
                                               for name, found in searches.items()}}


def outcome(search, budgets) -> dict:
    """Shares of problems that a search has solved, the best within each budget, and what it has used for a problem.

    search: a list of steps for each problem.
    """
    best = [max((step["speedup"] for step in steps), default=0.0) for steps in search]
    curves = {unit: [best_so_far(search, unit, budget) for budget in grid] for unit, grid in budgets.items()}
    return {"correct": fmean(any(step["correct"] for step in steps) for steps in search),
            "fast_1": fmean(speedup > 1.0 for speedup in best), "fast_1.2": fmean(speedup > 1.2 for speedup in best),
            "at_most_kernels": curves["kernels"][-1], "at_most_tokens": curves["tokens"][-1],
            "kernels": spent(search, "kernels"), "tokens": spent(search, "tokens"), "curves": curves}


def spent(search, unit) -> float:
    """Kernels or tokens that a search has used for a problem, in the mean."""
    return fmean(sum(step[unit] for step in steps) for steps in search)


def best_so_far(search, unit, budget) -> float:
    """Geometric mean over problems of the best speedup within a budget of "kernels" or "tokens" for a problem.

    A problem counts as 1 where no kernel is faster: PyTorch is still there.

    >>> steps = [{"kernels": 1, "speedup": 0.0}, {"kernels": 0, "speedup": 0.0}, {"kernels": 1, "speedup": 4.0}]
    >>> best_so_far([steps, []], "kernels", 1), best_so_far([steps, []], "kernels", 2)
    (1.0, 2.0)
    """
    best = []
    for steps in search:
        spent_then = accumulate(step[unit] for step in steps)
        best.append(max([1.0, *(step["speedup"] for step, used in zip(steps, spent_then) if used <= budget)]))
    return geometric_mean(best)


def table(found) -> str:
    """strategies.json as text: a line for each strategy."""
    lines = [["strategy", *COLUMNS]]
    for name, rows in found["strategies"].items():
        lines.append([name, *(cell(rows, column) for column in COLUMNS)])
    return "\n".join(aligned(lines))


def cell(rows, column) -> str:
    """Mean and range over the searches of a strategy."""
    values = [row[column] for row in rows]
    return f"{fmean(values):.4g} ({min(values):.4g}-{max(values):.4g})"


def budget_charts(found) -> list[Chart]:
    """Best so far against the budget in kernels and in tokens: the mean over searches, and each of them pale."""
    charts = []
    for unit, grid in found["budgets"].items():
        searches = {name: [row["curves"][unit] for row in rows] for name, rows in found["strategies"].items()}
        curves = [Curve(name, grid, list(map(fmean, zip(*each))), each) for name, each in searches.items()]
        charts.append(Chart("Best speedup so far", "", curves, f"{unit} for a problem"))
    return charts

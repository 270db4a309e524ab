"""Test-time strategies beside each other, at equal budgets: kernels that were scored, and tokens that were sampled.

One *search* is one sample of each problem: the first samples of all problems are one search through the level, the
second ones another, and so on. Each draws random numbers of its own, so their spread says what chance does.

`runs` is {strategy: {problem: [search, ...]}}, where a search at a problem is the list of its steps (bench.steps).
"""

import statistics


def compare(runs, most_kernels) -> dict:
    """Budgets, and what each search of each strategy has found within them: strategies.json.

    The largest budget is `most_kernels` for a problem; in tokens it is what the strategy that sampled the fewest has
    used for a problem, so that all have spent it.
    """
    searches = {name: list(zip(*problems.values())) for name, problems in runs.items()}
    rows = {name: [outcome(search) for search in found] for name, found in searches.items()}
    least = min(statistics.fmean(row["tokens"] for row in found) for found in rows.values())
    budgets = {"kernels": list(range(1, most_kernels + 1)), "tokens": [least * i / 20 for i in range(1, 21)]}
    for name, found in searches.items():
        for row, search in zip(rows[name], found):
            row["curves"] = {unit: [best_so_far(search, unit, budget) for budget in grid]
                             for unit, grid in budgets.items()}
    return {"budgets": budgets, "strategies": rows}


def outcome(search) -> dict:
    """Shares of problems that a search has solved, and what it has used for one. search: a list of steps a problem."""
    best = [max((step["speedup"] for step in steps), default=0.0) for steps in search]
    return {"correct": statistics.fmean(any(step["correct"] for step in steps) for steps in search),
            "fast_1": statistics.fmean(speedup > 1.0 for speedup in best),
            "fast_1.2": statistics.fmean(speedup > 1.2 for speedup in best),
            "kernels": statistics.fmean(sum(step["kernels"] for step in steps) for steps in search),
            "tokens": statistics.fmean(sum(step["tokens"] for step in steps) for steps in search),
            "attempts": statistics.fmean(map(len, search))}


def best_so_far(search, unit, budget) -> float:
    """Geometric mean over problems of the best speedup within a budget of "kernels" or "tokens" for a problem.

    A problem counts as 1 where no kernel is faster: PyTorch is still there.

    >>> steps = [{"kernels": 1, "speedup": 0.0}, {"kernels": 0, "speedup": 0.0}, {"kernels": 1, "speedup": 4.0}]
    >>> best_so_far([steps, []], "kernels", 1), best_so_far([steps, []], "kernels", 2)
    (1.0, 2.0)
    """
    speedups = []
    for steps in search:
        best, spent = 1.0, 0
        for step in steps:
            spent += step[unit]
            if spent <= budget:
                best = max(best, step["speedup"])
        speedups.append(best)
    return statistics.geometric_mean(speedups)


def table(found) -> str:
    """strategies.json as text: a line for each strategy."""
    config, budgets = found["config"], found["budgets"]
    most = {unit: grid[-1] for unit, grid in budgets.items()}
    heads = ["strategy", "correct %", "Fast_1 %", "Fast_1.2 %", *(f"at {most[unit]:.0f} {unit}" for unit in most)]
    lines = [f"{config['source']}, level {config['level']}: {len(config['problems'])} problems, {config['samples']} "
             f"searches of each strategy, {config['turns']} kernels or {config['tokens']} tokens at most for a problem",
             f"mean (range) over searches; best speedups so far, geometric means over problems, {found['clock']}", "",
             "".join(f"{head:<20}" for head in heads) + f"{'kernels':>8}{'tokens':>8}{'attempts':>9}"]
    for name, rows in found["strategies"].items():
        cells = [name] + [cell([100 * row[key] for row in rows], 0) for key in ("correct", "fast_1", "fast_1.2")]
        cells += [cell([row["curves"][unit][-1] for row in rows], 2) for unit in most]
        used = [statistics.fmean(row[key] for row in rows) for key in ("kernels", "tokens", "attempts")]
        lines.append("".join(f"{text:<20}" for text in cells) + f"{used[0]:>8.1f}{used[1]:>8.0f}{used[2]:>9.1f}")
    return "\n".join(lines)


def cell(values, digits) -> str:
    """Mean and range."""
    return f"{statistics.fmean(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def draw(found, path):
    """Best so far against the budget in kernels and in tokens: the mean over searches, and their range as a band."""
    from matplotlib.figure import Figure  # only here: it takes a second to import
    config, fig = found["config"], Figure(figsize=(11, 4), layout="constrained")
    for axis, (unit, grid) in zip(fig.subplots(1, 2, sharey=True), found["budgets"].items()):
        for name, rows in found["strategies"].items():
            columns = list(zip(*(row["curves"][unit] for row in rows)))  # for each budget, one value of each search
            line, = axis.plot(grid, list(map(statistics.fmean, columns)), label=name)
            low, high = list(map(min, columns)), list(map(max, columns))
            axis.fill_between(grid, low, high, alpha=0.15, color=line.get_color())
        axis.set(xlabel=f"{unit} {'scored' if unit == 'kernels' else 'sampled'} for a problem")
        axis.grid(alpha=0.3)
    fig.axes[0].set(ylabel=f"best speedup so far ({found['clock']})")
    fig.axes[0].legend(fontsize=8)
    fig.suptitle(f"{config['source']}, level {config['level']}: {config['model']}; mean and range of "
                 f"{config['samples']} searches", fontsize=10)
    fig.savefig(path, dpi=120)

"""Numbers that programs report."""


def mean(values) -> float | None:
    """The mean of an iterable of numbers, or None of nothing.

    >>> mean([1, 2]), mean([])
    (1.5, None)
    """
    values = list(values)
    return sum(values) / len(values) if values else None

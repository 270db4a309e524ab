"""Synthesised training problems: distributions of them, and endless streams of those that are fit to train on.

    synthesize(seed)        one problem, a pure function of its seed
    training_tasks(seed)    an endless stream of those that are fit to train on: they run, are deterministic, finite and
                            not constant, and are nowhere near an evaluation problem
"""

import itertools

from synthetic.heads import FAMILIES
from synthetic.networks import AnyProblem
from synthetic.wording import write_problem
from tasks import GPU_BATCH_FACTOR, SYNTHESISED, Task, elements, evaluation_fingerprints, scale_batch, unfit

MOST_ON_GPU = 1 << 30  # elements of all tensors of a training problem

# Distributions of problems, as FAMILIES. The narrow one, on which checkpoints/tiny was trained: a few operators each.
NARROW = FAMILIES | {"product": (16, AnyProblem.product), "any dimension": (18, AnyProblem.any_dimension),
                     "formula": (10, AnyProblem.formulas), "library loss": (8, AnyProblem.library_loss)}
# The wide one: mixtures of everything, networks of several classes, and lone operators of the library as well.
WIDE = NARROW | {"mixture": (60, AnyProblem.mixture), "sequence": (10, AnyProblem.sequence),
                 "classes": (16, AnyProblem.several_classes), "lone": (60, AnyProblem.lone)}


def synthesize(seed, clutter=False, distribution=NARROW) -> Task:
    """One synthesised problem, a pure function of its arguments. Its fitness (`unfit`) is the caller's to check.

    clutter: long and odd signatures, unused layers, keyword arguments, docstrings of random words, as real problems
    have them: a small model must learn to copy whatever it meets, and which techniques it can carry off on what.
    """
    problem = AnyProblem(seed, clutter)
    family = problem.r.choices(list(distribution), [weight for weight, _ in distribution.values()])[0]
    distribution[family][1](problem)
    problem.finish()
    return Task(f"synth/{seed}", 0, write_problem(problem), family)


def training_tasks(seed, distribution=NARROW, device="cpu"):
    """Endless stream of synthesised problems that are fit to train on, deterministic in `seed`.

    On a GPU they get a larger batch, and those are left out of which some layer then has gigabytes of weights.
    """
    evaluation = evaluation_fingerprints()
    for n in itertools.count():
        task = synthesize(seed * 1_000_003 + n, clutter=True, distribution=distribution)
        if unfit(task, evaluation) is not None:
            continue
        if device != "cpu":
            task = scale_batch(task, GPU_BATCH_FACTOR)
            if elements(task.source, MOST_ON_GPU) > MOST_ON_GPU:
                continue
        yield task


SYNTHESISED["synth"] = lambda seed, device: training_tasks(seed, NARROW, device)
SYNTHESISED["wide"] = lambda seed, device: training_tasks(seed, WIDE, device)

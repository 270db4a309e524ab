"""Families of problems, and endless streams of those that are fit to train on.

    draw(seed)              a program, a pure function of its seed
    training_tasks(seed)    problems that run, are deterministic, finite and not constant, and are near no evaluation
                            problem

What varies: the operators, how each is spelled, shapes, names, and in wording.py how the problem is written down. To
add a family: a function of a draft here, and its row of FAMILIES.
"""

import itertools

from synthetic.operators import LOSSES, PRODUCTS, WRITTEN_LOSSES
from synthetic.program import Draft, Program
from synthetic.steps import (activation, convolution, formula, linear, maybe, normalization, plain_input, pooling,
                             reduction, row_operator, scale, steps)
from synthetic.wording import dress, problem_text
from synthetic.training import SYNTHESISED, evaluation_fingerprints, unfit
from tasks import GPU_BATCH_FACTOR, Task, elements, scale_batch

MOST_ON_GPU = 1 << 30  # elements of all tensors of a training problem

# ---- Families: a head and what follows it


def pointwise(d):
    plain_input(d, 2, 2, 3, 4)
    if d.chance(0.2):
        formula(d, d.another_input())
    elif d.chance(0.2):
        d.saved = d.another_input()
    steps(d, d.r.randint(1, 5))


def linear_chain(d):
    linear(d)
    steps(d, d.r.randint(1, 4), saves=0.25)
    if d.chance(0.35):
        d.pick(row_operator, reduction)(d)
        steps(d, d.r.randint(0, 1))


def convolution_chain(d):
    convolution(d)
    if d.chance(0.3):
        normalization(d)
    steps(d, d.r.randint(1, 4), saves=0.15)
    if d.chance(0.2) and len(d.shape) > 2 and min(d.shape[2:]) > 1:
        pooling(d)
        maybe(d)
    elif d.chance(0.15):
        reduction(d)
        maybe(d)


def row(d):
    plain_input(d, 2, 2, 2, 3)
    before = d.r.randint(0, 2)
    steps(d, before)
    row_operator(d)
    steps(d, d.r.randint(0 if before else 1, 2))


def reduced(d):
    plain_input(d, 2, 2, 3, 4)
    steps(d, d.r.randint(1, 3))
    reduction(d)
    maybe(d, 2)


def any_dimension(d):
    """Reductions, arg-reductions, softmax, norms and scans along any dimension: x = torch.cumprod(x, dim=1)"""
    plain_input(d, 2, 3, 3, 4)
    maybe(d, 2)
    dim = d.pick("-1", *map(str, range(len(d.shape))))
    d.pick(row_operator, reduction)(d, dim)
    if not d.program.steps[-1].name.startswith("arg"):
        maybe(d)


def reordered(d):
    """Rows that PyTorch puts into another order, and what is computed of them: x = torch.sort(x, dim=-1)[0]"""
    plain_input(d, 2, 2, 3)
    maybe(d)
    d.apply(d.pick("sort", "flip", "roll", "cummax", "cummin", "cat"), d="-1")
    d.pick(row_operator, reduction)(d)
    maybe(d)


def loss(d):
    """A mean or sum over everything, in one expression or step by step."""
    plain_input(d, 2, 2, 3)
    maybe(d, 2)
    target = d.input(d.dims, f"torch.rand({', '.join(d.dims)})")
    fields = {"y": target, "c": d.scalar("margin width", d.pick("1.0", "1.5", "0.5"))}
    at_once = d.chance(0.5)
    if at_once:
        d.x = d.add("formula", d.pick(*WRITTEN_LOSSES), fields, "t", inline=True)
    else:
        d.variable = d.name("error err cost difference")
        d.x = d.add("formula", d.pick(*WRITTEN_LOSSES), fields, d.variable)
        maybe(d)
    d.apply(d.pick("mean_all", "mean_all", "sum_all"))
    if d.chance(0.15):
        scale(d)


def library_loss(d):
    """A loss of torch.nn.functional, of predictions and targets, often between other steps."""
    plain_input(d, 2)
    before = d.chance(0.5)
    name = d.pick(*LOSSES)
    if before:
        d.pick(scale, activation, formula)(d)
    rows, width = d.dims
    maker = {"cross_entropy": f"torch.randint(0, {width}, ({rows},))",
             "kl_div": f"torch.rand({rows}, {width}).softmax(dim=-1)"}.get(name, f"torch.rand({rows}, {width})")
    if name == "kl_div":
        d.apply("log_softmax", "F.log_softmax({x}, dim={d})", d="-1")
    d.apply(name, y=d.input(d.dims, maker))
    if not before or d.chance(0.3):
        scale(d)


def diagonal(d):
    """A product with a diagonal matrix, which a kernel can write as a scaling of the rows."""
    plain_input(d, 2)
    rows = d.dims[0]
    if d.chance(0.3):
        weights = d.meta.value(d.attribute("gain weights diagonal", f"nn.Parameter(torch.randn({d.inside(rows)}))"))
    else:
        weights = d.input([rows], f"torch.randn({rows})")
        d.program.inputs.reverse()
    d.apply("diagonal", y=weights)
    steps(d, d.r.randint(1, 3))


def skip_connections(d):
    """Linear layers with a connection around them: skip = x ... x = self.narrow(x), x = x + skip"""
    linear(d)
    width = d.size(-1)
    hidden = d.arg("hidden hidden_dim inner_dim expanded", d.near(64, 128, 256))
    for _ in range(d.pick(1, 1, 2)):
        d.saved = d.add("alias", "{x}", {}, d.name("identity residual skip shortcut"))
        d.layer("linear", "widen up expand fc1 lin1", f"Linear({width}, {hidden})")
        activation(d)
        d.layer("linear", "narrow down project fc2 lin2", f"Linear({hidden}, {width})")
        d.apply("formula", "{x} + {y}", y=d.saved)
    maybe(d)
    if d.chance(0.4):
        row_operator(d)


def classifier(d):
    """A small network for images: a convolution or two, each with pooling behind it, and a linear layer."""
    convolution(d)
    steps(d, 1)
    if min(d.shape[2:]) > 3:
        pooling(d)
    d.x = d.add("call", d.pick("torch.flatten({x}, 1)", "{x}.flatten(1)"), {}, d.variable)
    classes = d.arg("num_classes classes n_classes", d.pick(10, 16, 20))
    d.layer("linear", "fc head classifier out linear", f"Linear({d.shape[1]}, {classes})")
    maybe(d)
    if d.chance(0.6):
        d.apply(d.pick("softmax", "log_softmax"), d="1")


def network(d):
    """A few layers."""
    linear(d)
    for _ in range(d.pick(1, 1, 2)):
        steps(d, d.r.randint(1, 2))
        n = d.near(64, 128, 256)
        given = f"{d.size(-1)}, {d.arg('hidden2 out_dim classes width2 d_model', n)}"
        d.layer("linear", "fc1 fc2 fc3 linear1 linear2 out head proj1 proj2 down up", f"Linear({given})")
        d.sizes[n] = given.split(", ")[1]
    maybe(d)
    if d.chance(0.4):
        row_operator(d)


def product(d):
    """A product of matrices, or of stacks of them, in any arrangement of the factors."""
    first, second, a, b, spellings = d.pick(*PRODUCTS)
    choices = {"b": ("batch_size B N", (4, 8)), "m": ("M rows queries", (32, 64, 128)),
               "k": ("K inner_dim depth", (32, 64, 128)), "n": ("N cols keys L", (64, 128, 256))}
    names = {}
    for letter in dict.fromkeys(first + second):
        options, sizes = choices[letter]
        names[letter] = d.const(options, d.pick(*sizes) if letter == "b" else d.near(*sizes))
    d.input([names[letter] for letter in first])
    other = d.input([names[letter] for letter in second])
    d.apply("product", *spellings, y=other, factors=(a, b))
    if d.chance(0.25):
        d.apply(d.pick("transpose", "flip", "roll", "tril", "sort"), d=d.pick("0", "-1"))
    d.pick(formula, activation, scale)(d)
    maybe(d, 2)


# Family (of a Task) -> how often it is drawn, and its function.
FAMILIES = {"pointwise": (24, pointwise), "linear": (20, linear_chain), "convolution": (28, convolution_chain),
            "row": (18, row), "reduction": (8, reduced), "loss": (7, loss), "diagonal": (5, diagonal),
            "network": (5, network), "skip": (6, skip_connections), "classifier": (4, classifier),
            "product": (16, product), "any dimension": (18, any_dimension), "library loss": (8, library_loss),
            "reordered": (6, reordered)}


def draw(seed, clutter=False, families=None, plain=False) -> Program:
    """One program, a pure function of its arguments.

    clutter: long and odd signatures, unused layers, keyword arguments, docstrings of random words, as real problems
    have them: a small model must learn to copy whatever it meets. plain: ordinary names only.
    """
    families = families or FAMILIES
    d = Draft(seed, clutter, plain)
    family = d.r.choices(list(families), [weight for weight, _ in families.values()])[0]
    families[family][1](d)
    if not d.program.steps:  # the only step that was drawn does not fit the shape, see opaque_step
        activation(d)
    dress(d)
    return d.finish(family)


def task_of(program) -> Task:
    return Task(f"synth/{program.seed}", 0, problem_text(program), program.family)


def synthesize(seed, clutter=False, families=None) -> Task:
    """One synthesised problem. Its fitness (`unfit`) is the caller's to check."""
    return task_of(draw(seed, clutter, families))


def training_tasks(seed, device="cpu", families=None):
    """Endless stream of synthesised problems that are fit to train on, deterministic in `seed`.

    Their names are ordinary ones, since skills quote them. On a GPU they get a larger batch, and those are left out of
    which some layer then has gigabytes of weights.
    """
    evaluation = evaluation_fingerprints()
    for n in itertools.count():
        task = task_of(draw(seed * 1_000_003 + n, True, families, plain=True))
        if unfit(task, evaluation) is not None:
            continue
        if device != "cpu":
            task = scale_batch(task, GPU_BATCH_FACTOR)
            if elements(task.source, MOST_ON_GPU) > MOST_ON_GPU:
                continue
        yield task


SYNTHESISED["plain"] = training_tasks  # --tasks plain: without redundant operators

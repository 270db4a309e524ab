"""Families of problems, and endless streams of those that are fit to train on.

    draw(seed)              a program, a pure function of its seed
    training_tasks(seed)    problems that run, are deterministic, finite and not constant, and are near no evaluation
                            problem

What varies: the operators, how each is spelled, shapes, names, and in wording.py how the problem is written down. To
add a family: a function of a draft here, and its row of FAMILIES.
"""

import itertools

from synthetic.operators import LOSSES, OPERATORS, PRODUCTS, WRITTEN_LOSSES
from synthetic.program import Draft, Program
from synthetic.steps import (activation, convolution, dense, features, formula, linear, maybe, normalization,
                             parameter, plain_input, pooling, reduction, row_operator, scale, steps)
from synthetic.wording import dress, problem_text
from synthetic.training import evaluation_fingerprints, unfit
from tasks import GPU_BATCH_FACTOR, Task, elements, scale_batch

MOST_ON_GPU = 1 << 30  # elements of all tensors of a training problem

# ---- Families: a head and what follows it


def pointwise(d):
    plain_input(d, 2, 2, 3, 4)
    kind = d.pick("one", "one", "one", "formula", "residual", "both")
    if kind == "formula":
        formula(d, d.another_input())
    elif kind == "residual":
        d.saved = d.another_input()
    elif kind == "both":  # steps of either input, and then both of them
        other = d.another_input()
        activation(d)
        first = d.x
        d.turn_to(other)
        steps(d, 1)
        d.apply("formula", "{y} * {x}", "{y} * {x}", "{x} + {y}", "{y} - {x}", y=first)
    steps(d, d.r.randint(kind != "both", 4))


def linear_chain(d):
    linear(d)
    if d.chance(0.25) and len(d.shape) == 2:
        normalization(d)
    steps(d, d.r.randint(1, 4), saves=0.25)
    if d.chance(0.2):
        for _ in range(d.pick(1, 1, 2)):
            dense(d, "fc1 fc2 fc3 linear1 linear2 out head proj1 proj2 down up", d.near(64, 128, 256))
            steps(d, d.r.randint(0, 2))
    if d.chance(0.35):
        d.pick(row_operator, reduction)(d)
        maybe(d)


def convolution_chain(d):
    convolution(d)
    if d.chance(0.4):
        normalization(d)
    steps(d, d.r.randint(1, 4), saves=0.15)
    if d.chance(0.2) and len(d.shape) > 2 and min(d.shape[2:]) > 1:
        pooling(d)
        maybe(d)
    elif d.chance(0.15):
        reduction(d)
        maybe(d)


def rows(d):
    """Operators over rows, or reductions of them, among other steps; some rows are put into another order first."""
    plain_input(d, 2, 2, 2, 3, 3, 4)
    steps(d, d.r.randint(0, 2))
    if d.chance(0.15):
        d.apply(d.pick("sort", "flip", "roll", "cummax", "cummin", "cat", "diff"), d="-1")
    if len(d.shape) < 4 and d.chance(0.65):
        row_operator(d)
        steps(d, d.r.randint(0, 2))
    else:
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


def loss(d):
    """A mean or sum over everything: of torch.nn.functional, written in one expression, or step by step."""
    plain_input(d, 2, 2, 3)
    maybe(d, 2)
    target = d.input(d.dims, f"torch.rand({', '.join(d.dims)})")
    if d.chance(0.5):
        d.variable = d.new_variable("loss error err cost difference")
    kind = d.pick("library", "at once", "step by step")
    if kind == "library":
        d.apply(d.pick(*LOSSES), y=target)
    else:
        fields = {"y": target, "c": d.scalar("margin width", d.pick("1.0", "1.5", "0.5"))}
        inline = kind == "at once"
        d.x = d.add("formula", d.pick(*WRITTEN_LOSSES), fields, "t" if inline else d.variable, inline)
        maybe(d, 0 if inline else 2)
        d.apply(d.pick("mean_all", "mean_all", "sum_all"))
    if d.chance(0.3):
        scale(d)


def diagonal(d):
    """A product with a diagonal matrix, which a kernel can write as a scaling of the rows."""
    plain_input(d, 2)
    rows = d.dims[0]
    if d.chance(0.4):
        weights = d.meta.value(d.attribute("gain weights diagonal", f"nn.Parameter(torch.randn({d.inside(rows)}))"))
    else:
        weights = d.input([rows], f"torch.randn({rows})")
        d.program.inputs.reverse()
    d.apply("diagonal", y=weights)
    steps(d, d.r.randint(1, 3))


def blocks(d):
    """A connection around some layers: skip = x ... x = self.conv(x), x = self.norm(x), x = x + skip"""
    if d.chance(0.5):
        convolution(d, same=True)
        if d.chance(0.6):
            normalization(d)
        activation(d)
        d.apply("formula", "{x} + {y}", y=d.saved)
    else:
        features(d)
        width, hidden = d.shape[-1], d.near(64, 128, 256)
        for _ in range(d.pick(1, 1, 2)):
            d.save()
            if d.chance(0.7):
                dense(d, "widen up expand fc1 lin1", hidden)
                activation(d)
            dense(d, "narrow down project fc2 lin2", width)
            maybe(d)
            d.apply("formula", "{x} + {y}", y=d.saved)
    maybe(d)
    if d.chance(0.4) and len(d.shape) < 4:
        row_operator(d)


def classifier(d):
    """A small network for images: one convolution or two, each with pooling behind it, and a linear layer."""
    convolution(d)
    rank = len(d.shape) - 2
    name = d.pick("relu", "gelu", "mish", "silu", "tanh")
    act = d.layer(name, f"{name} act activation nonlin", OPERATORS[name].layer)
    pooled = pooling(d) if min(d.shape[2:]) > 3 else None
    if d.chance(0.4):
        channels = d.sized("mid_channels channels2 planes", d.pick(8, 16))
        d.layer("convolution", "conv2 second conv_b", f"Conv{rank}d({d.size(1)}, {channels}, 3, padding=1)")
        d.apply_layer(name, act)
        if pooled and min(d.shape[2:]) > 3:
            d.apply_layer("pooling", pooled)
    width = " * ".join(map(str, d.shape[1:]))
    d.x = d.add("call", d.pick("torch.flatten({x}, 1)", "{x}.flatten(1)"), {}, d.variable)
    classes = d.arg("num_classes classes n_classes", d.pick(10, 16, 20))
    d.layer("linear", "fc head classifier out linear", f"Linear({d.pick(width, width, d.shape[1])}, {classes})")
    maybe(d)
    if d.chance(0.6):
        d.apply(d.pick("softmax", "log_softmax"), d="1")


def gated(d):
    """Two branches that are multiplied: gate = torch.sigmoid(self.gate(x)), x = self.up(x) * gate"""
    features(d)
    width, wide = d.shape[-1], d.near(64, 128, 256)
    saved = d.save() if d.chance(0.4) else None
    if d.chance(0.4):
        row_operator(d)
        d.pick(parameter, maybe)(d)
    first = d.x
    d.variable = d.new_variable("gate gates weights scores")
    dense(d, "gate to_gate gate_proj w1", wide)
    activation(d, d.pick("sigmoid", "silu", "tanh", "gelu", "sigmoid"))
    gate = d.x
    if d.chance(0.3):
        d.turn_to(d.input([*d.dims[:-1], d.sizes[wide]]))
    else:
        d.turn_to(first)
        dense(d, "up value values up_proj w3", wide)
    d.apply("formula", "{x} * {y}", "{x} * {y}", "{y} * {x}", y=gate)
    if saved or d.chance(0.3):
        dense(d, "down out proj w2", width)
    if saved:
        d.apply("formula", "{x} + {y}", y=saved)
    elif d.chance(0.5):
        row_operator(d)


def weighted(d):
    """A tensor scaled by weights that are computed from it: a gate for each channel, or attention over the rows."""
    plain_input(d, 3, 4)
    whole, hidden = d.x, d.near(8, 16, 32)
    d.variable = d.new_variable("weights scores gate attention")
    if len(d.shape) == 4:
        d.apply("mean", d="(2, 3)", keep="")
        dense(d, "squeeze reduce fc1", hidden)
        activation(d)
        dense(d, "excite expand fc2", whole.shape[1])
        d.apply("sigmoid")
        d.x = d.add("call", "{x}[:, :, None, None]", {}, "t", inline=True)
    else:
        if d.chance(0.7):
            dense(d, "score1 hidden_layer proj fc1", hidden)
            activation(d)
        d.layer("linear", "score score2 query attn", f"Linear({d.size(-1)}, 1{d.pick('', ', bias=False')})")
        d.apply("softmax", d="1")
    pooled = len(whole.shape) == 3 and d.pick(True, False)
    weights = d.x
    d.turn_to(whole)
    d.apply("formula", "{x} * {y}", "{y} * {x}", y=weights)
    if pooled:
        d.apply("sum", d="1", keep="")


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
        d.apply(d.pick("transpose", "flip", "roll", "tril", "triu", "sort"), d=d.pick("0", "-1"))
    d.pick(formula, activation, scale)(d)
    maybe(d, 2)


# Family (of a Task) -> how often it is drawn, and its function.
FAMILIES = {"pointwise": (24, pointwise), "linear": (24, linear_chain), "convolution": (26, convolution_chain),
            "rows": (30, rows), "any dimension": (14, any_dimension), "loss": (14, loss), "diagonal": (5, diagonal),
            "blocks": (10, blocks), "classifier": (5, classifier), "gated": (7, gated), "weighted": (5, weighted),
            "product": (14, product)}


def draw(seed, clutter=False, families=None, plain=False) -> Program:
    """One program, a pure function of its arguments.

    clutter: long and odd signatures, unused layers, keyword arguments, docstrings of random words, as real problems
    have them: a small model must learn to copy whatever it meets. plain: ordinary names only.
    """
    try:
        return drawn(Draft(seed, clutter, plain), families or FAMILIES)
    except RuntimeError:  # a window is larger than what is left of an image: 1 program of 6,000
        return draw(seed + 1_000_000_007, clutter, families, plain)


def drawn(d, families) -> Program:
    """The program of a draft in which nothing is drawn yet."""
    family = d.r.choices(list(families), [weight for weight, _ in families.values()])[0]
    families[family][1](d)
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

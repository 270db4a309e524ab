"""Families of problems: the kinds of steps that they are made of, and draw(seed), a program.

What varies: the operators, how each is spelled, shapes, names, and in program.py how the problem is written down. To
add a family: a function of a draft here, and its row of FAMILIES.
"""

from synthetic.draft import Draft
from synthetic.heads import convolution, features, linear, plain_input, pooled_features, pooling
from synthetic.program import EXPRESSIONS, OPERATORS, WORDS, Program, problem_text
from tasks import Task

_ACTIVATIONS = [name for name, row in OPERATORS.items()
                if row.kind == "pointwise" and row.spellings and not row.technique]
_COMMON = [name for name in _ACTIVATIONS if OPERATORS[name].common]
_OF_ONE = [text for text in EXPRESSIONS["formulas"] if "{y}" not in text]
_OF_TWO = [text for text in EXPRESSIONS["formulas"] if "{y}" in text]
_LOSSES = [name for name, row in OPERATORS.items() if row.kind == "all" and "{y}" in row.spellings[0]]

# ---- Pointwise steps


def steps(d, count, saves=0.0):
    """`count` pointwise steps; with clutter some may be PyTorch's, or change the shape.

    saves: how often the current tensor is kept under another name, for a residual step later: identity = x
    """
    if d.chance(saves):
        d.save()
    for _ in range(count):
        kinds = [activation] * 7 + [scale] * 3 + [parameter] * 3 + [formula] * 2 + [buffer] * d.clutter
        if d.saved and d.saved.shape == d.shape:
            kinds += [residual] * 2
        kinds += [opaque_step] * d.clutter
        d.pick(*kinds)(d)


def activation(d, name=""):
    """x = F.softplus(x)      or      self.act = nn.Sigmoid()  ...  x = self.act(x)"""
    d.apply(name or d.pick(*(_COMMON if d.chance(0.55) else _ACTIVATIONS)))


def formula(d, other=None):
    """A formula written out: x = torch.where(x > 0, x, 0.1 * x). other: a second tensor for it."""
    d.apply("formula", d.pick(*(_OF_TWO if other else _OF_ONE)), y=other)


def scale(d):
    """Arithmetic with a number: x = 0.5 * x"""
    sign = d.pick("*", "*", "/", "+", "-")
    operand = d.scalar(WORDS["scalars"][sign], d.number())
    d.apply("formula", *["{x} " + sign + " {c}"] * 6, "{c} " + sign.replace("/", "*") + " {x}", c=operand)


def parameter(d):
    """A broadcast parameter over dimension 1 (the last one for 3-D rows): x = x + self.bias"""
    sign = d.pick("+", "+", "*", "-")
    rank = len(d.shape)
    dim = 1 + (rank == 3 and d.rows_last)
    if rank <= dim or d.shape[dim] == 1:
        return scale(d)
    shape = f"({d.size(dim)}{', 1' * (rank - 1 - dim) or ','})"
    if rank == 4 and d.chance(0.3):
        shape = f"(1, {shape[1:]}"
    names = WORDS["parameters"][sign]
    if d.chance(0.65):
        shape = d.arg(names.replace(" ", "_shape ") + "_shape param_shape", shape, "tuple")
    make = d.pick("randn", "randn", "rand", "ones", "rand" if sign == "*" else "zeros")
    spread = d.pick("", "", "", " * 0.1", " * 0.3", " + 0.5", f" * {d.number()}")
    made = d.attribute(names, f"nn.Parameter(torch.{make}({shape}){spread})")
    d.apply("formula", "{x} " + sign + " {y}", y=d.value(made))


def buffer(d):
    """A tensor that is not a parameter: self.register_buffer("steps", torch.ones(width))  ...  x = x * self.steps"""
    name = d.name("counts positions steps weights table")
    width = d.size(-1)
    made = d.pick("arange(1, {w} + 1).float()", "linspace(0.5, 1.5, {w})", "full(({w},), 2.0)").format(w=width)
    d.program.init.append(f"self.register_buffer('{name}', torch.{made})")
    setattr(d.space["self"], name, d.evaluate(f"torch.{made}"))
    d.apply("formula", d.pick("{x} * {y}", "{x} + {y}", "{x} / {y}"), y=d.value(f"self.{name}"))


def residual(d):
    """x = x + identity, now and then again and again"""
    for _ in range(d.pick(1, 1, 1, 2, 3) if d.clutter else 1):
        d.apply("formula", "{x} + {y}", "{x} + {y}", "{x} * {y}", y=d.saved)


def opaque_step(d):
    """An operator that stays PyTorch's, or whose rows are not the last dimension."""
    kind = d.pick("dropout", "clone", "centre", "softmax", "flip", "amax", "mean")
    if len(d.shape) < 2 or len(d.shape) == 2 and kind in ("amax", "mean"):
        kind = "clone"
    d.apply(kind, d=d.pick("1", "-1", "0") if kind == "centre" else "1", keep=", keepdim=True")


# ---- Rows, reductions, normalisations


def eps(d) -> str:
    """A norm's further argument, or none."""
    return f", eps={d.arg('eps epsilon norm_eps', '1e-5', 'float')}" if d.chance(0.15) else ""


def row_operator(d, dim=""):
    """Softmax, scans, norms and the like over a dimension, by default the last: x = torch.log_softmax(x, dim=-1)"""
    kinds = ["softmax", "softmax", "log_softmax", "rms", "rms", "l2", "normalize", "cumsum", "share"]
    kinds += ["cumprod", "cumsum", "centre", "mean_abs", "softmin"] if dim else ["layer_norm"] * 2
    kind = d.pick(*kinds)
    if kind == "layer_norm":
        rank = len(d.shape)
        first = d.pick(*[rank - 1] * 3, *range(1, rank - 1))  # of the dimensions that make a row
        shape = d.shape[-1] if first == rank - 1 else tuple(d.shape[first:])
        annotation = "int" if first == rank - 1 else "tuple"
        if annotation == "tuple" or d.chance(0.4):
            width = d.arg("normalized_shape norm_shape width", shape, annotation)
        else:
            width = d.size(-1)
        made = f"LayerNorm({d.layer_arguments(normalized_shape=width)}{eps(d)})"
        d.layer("layer_norm", "norm ln layer_norm", made, d=str(tuple(range(first, rank))))
        return
    dim = d.dimension(dim or "-1", dim or str(len(d.shape) - 1))
    if kind == "rms":
        return d.apply("rms", d=dim, c=d.scalar("eps epsilon", d.pick("1e-5", "1e-6")))
    if kind == "share":
        activation(d, d.pick("sigmoid", "softplus", "exp", "square"))
    d.apply(kind, d=dim)


def reduction(d, dim=""):
    """Over a dimension, by default the last or all spatial ones; now and then two of the same tensor: high - low"""
    rank = len(d.shape)
    keep = d.pick("", ", keepdim=True")
    name = d.pick("sum", "mean", "amax", "amin", "logsumexp")
    if dim:
        name = d.pick(name, name, "norm", "var", "std", "sum_squares", "argmax", "argmin")
        return d.apply(name, d=d.dimension(dim), keep=keep)
    if rank > 3:
        dims = ", ".join(map(str, range(d.pick(1, 2, 2, 2), rank)))
        return d.apply(name, *OPERATORS[name].spellings[:2], d=d.pick("[{}]", "({})").format(dims), keep=keep)
    dim = d.dimension("-1", "-1", str(rank - 1))
    if d.chance(0.9):
        return d.apply(name, d=dim, keep=keep)
    fields = {"d": dim, "keep": keep}
    one = d.pick("amax", "sum")
    high = d.add(one, OPERATORS[one].spellings[0], fields, d.new_variable("high top upper total"))
    two = d.pick("amin", "mean")
    low = d.add(two, OPERATORS[two].spellings[0], fields, d.new_variable("low bottom lower average"))
    d.apply("formula", "{y} - {z}", "{y} - {z}", "{y} + {z}", "{y} * {z}", y=high, z=low)


def normalization(d):
    """Group, instance or batch norm over the channels: self.bn = nn.BatchNorm2d(out_channels)"""
    rank = len(d.shape) - 2
    channels = d.size(1)
    kind = d.pick("group", "group", "instance", "batch", "batch") if rank else "batch"
    made = f"BatchNorm{max(1, rank)}d({d.layer_arguments(num_features=channels)})"
    if kind == "group":
        groups = d.pick(*(count for count in (1, 2, 4, 8) if d.shape[1] % count == 0))
        sizes = d.layer_arguments(num_groups=d.arg("num_groups groups n_groups", groups), num_channels=channels)
        made = f"GroupNorm({sizes}{eps(d)})"
    elif kind == "instance":
        made = f"InstanceNorm{rank}d({channels}{d.pick('', '', ', affine=True')})"
    d.layer(f"{kind}_norm", f"norm {kind}_norm {kind[0]}n", made)


def dense(d, options, n):
    """A linear layer to n features, kept on self under one of `options`."""
    width = d.size(-1)
    if n not in d.sizes:
        d.sizes[n] = d.sized("hidden hidden_dim inner_dim expanded d_model", n)
    sizes = d.layer_arguments(in_features=width, out_features=d.sizes[n])
    d.layer("linear", options, f"Linear({sizes}{d.pick('', '', '', ', bias=False')})")


def maybe(d, most=1):
    """Nothing, or up to `most` steps that fit any shape."""
    for _ in range(d.r.randint(0, most)):
        d.pick(activation, scale, formula)(d)


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
    if d.chance(0.08) and len(d.shape) == 2:
        pooled_features(d)
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
    elif d.chance(0.1) and len(d.shape) > 3:
        d.apply("centre", d=str(tuple(range(2, len(d.shape)))))


def rows(d):
    """Operators over rows, or reductions of them, among other steps; some rows are put into another order first."""
    plain_input(d, 2, 2, 2, 3, 3, 4)
    steps(d, d.r.randint(0, 2))
    if d.chance(0.15):
        d.apply(d.pick("sort", "flip", "roll", "cummax", "cummin", "cat", "diff"), d="-1")
    images = len(d.shape) == 4
    if d.chance(0.5 if images else 0.65):
        d.pick(row_operator, *[normalization] * 2 * images)(d)
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
    kind = d.pick("library", "at once", "step by step")
    dims = d.dims if kind == "library" or d.chance(0.8) else d.dims[-1:]  # the target may be broadcast
    target = d.input(dims, f"torch.rand({', '.join(dims)})")
    if d.chance(0.5):
        d.variable = d.new_variable("loss error err cost difference")
    if kind == "library":
        d.apply(d.pick(*_LOSSES), y=target)
    else:
        fields = {"y": target, "c": d.scalar("margin width", d.pick("1.0", "1.5", "0.5"))}
        inline = kind == "at once"
        d.x = d.add("formula", d.pick(*EXPRESSIONS["losses"]), fields, "t" if inline else d.variable, inline)
        maybe(d, 0 if inline else 2)
        d.apply(d.pick("mean_all", "mean_all", "sum_all"))
    if d.chance(0.3):
        scale(d)


def diagonal(d):
    """A product with a diagonal matrix, which a kernel can write as a scaling of the rows."""
    plain_input(d, 2)
    rows = d.dims[0]
    if d.chance(0.4):
        weights = d.value(d.attribute("gain weights diagonal", f"nn.Parameter(torch.randn({d.inside(rows)}))"))
    else:
        weights = d.input([rows], f"torch.randn({rows})")
        d.program.inputs.reverse()
    d.apply("diagonal", y=weights)
    steps(d, d.r.randint(1, 3))


def alone(d):
    """One operator that KernelBench does not have alone: a model that never sees one invents a second."""
    plain_input(d, 2, 3, 3, 4)
    kind = d.pick("rows", "rows", "rows", "loss", "formula", "activation")
    if kind == "rows":
        dim = d.dimension(d.pick("-1", *map(str, range(len(d.shape)))))
        d.apply(d.pick("logsumexp", "norm", "var", "std"), d=dim, keep=d.pick("", ", keepdim=True"))
    elif kind == "loss":
        name = d.pick("l1_loss", "binary_cross_entropy_with_logits") + d.pick("", "", "_sum")
        d.apply(name, y=d.input(d.dims, f"torch.rand({', '.join(d.dims)})"))
    elif kind == "formula":
        formula(d)
    else:
        activation(d, d.pick("logsigmoid", "hardswish", "exp", "sin", "abs", "mish"))


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
    """A product of matrices, or of stacks of them: an arrangement of expressions.toml."""
    first, second, a, b, spellings = d.pick(*EXPRESSIONS["products"])
    choices = {"b": ("batch_size B N", (4, 8)), "m": ("M rows queries", (32, 64, 128)),
               "k": ("K inner_dim depth", (32, 64, 128)), "n": ("N cols keys L", (64, 128, 256))}
    names = {}
    for letter in dict.fromkeys(first + second):
        options, sizes = choices[letter]
        names[letter] = d.const(options, d.pick(*sizes) if letter == "b" else d.near(*sizes))
    d.input([names[letter] for letter in first])
    other = d.input([names[letter] for letter in second])
    d.apply("product", *spellings, y=other, factors=(a, b))
    if d.chance(0.4):
        d.apply(d.pick("transpose", "flip", "roll", "tril", "triu", "sort"), d=d.pick("0", "-1"))
        if d.chance(0.6):  # the product is all that its kernel computes
            return
    d.pick(formula, activation, scale)(d)
    maybe(d, 2)


# Family (of a Task) -> how often it is drawn, and its function.
FAMILIES = {"pointwise": (24, pointwise), "linear": (24, linear_chain), "convolution": (26, convolution_chain),
            "rows": (30, rows), "any dimension": (14, any_dimension), "loss": (14, loss), "diagonal": (5, diagonal),
            "blocks": (10, blocks), "classifier": (5, classifier), "gated": (7, gated), "weighted": (5, weighted),
            "product": (14, product), "alone": (14, alone)}


def draw(seed, clutter=False, families=FAMILIES, plain=False) -> Program:
    """One program, a pure function of its arguments.

    clutter: long and odd signatures, unused layers, keyword arguments, docstrings of random words, as real problems
    have them: a small model must learn to copy whatever it meets. plain: ordinary names only.
    """
    d = Draft(seed, clutter, plain)
    family = d.r.choices(list(families), [weight for weight, _ in families.values()])[0]
    try:
        families[family][1](d)
    except RuntimeError:  # a window is larger than what is left of an image: 1 program of 6,000
        return draw(seed + 1_000_000_007, clutter, families, plain)
    return d.finish(family)


def task_of(program) -> Task:
    return Task(f"synth/{program.seed}", 0, problem_text(program), program.family)

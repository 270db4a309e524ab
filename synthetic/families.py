"""Families of problems, and endless streams of those that are fit to train on.

    draw(seed)              a program, a pure function of its seed
    training_tasks(seed)    problems that run, are deterministic, finite and not constant, and are near no evaluation
                            problem

What varies: the operators, how each is spelled, shapes, names, and in wording.py how the problem is written down. To
add a family: a function of a draft here, and its row of FAMILIES.
"""

import itertools

from synthetic.operators import COMPOSED, LOSSES, OPERATORS, POINTWISE, PRODUCTS, WRITTEN_LOSSES
from synthetic.program import Draft, Program, Value
from synthetic.wording import dress, problem_text
from tasks import GPU_BATCH_FACTOR, SYNTHESISED, Task, elements, evaluation_fingerprints, scale_batch, unfit

MOST_ON_GPU = 1 << 30  # elements of all tensors of a training problem
# What the operand of x * s, x / s, ... is called: a number; a parameter that is broadcast.
_SCALARS = {"*": "scale scaling_factor multiplier factor gain", "/": "divisor temperature scale",
            "+": "offset shift add_value constant", "-": "subtract_value offset margin"}
_PARAMETERS = {"*": "weight multiplier gain scale", "+": "bias extra_bias add_bias shift",
               "-": "subtract sub_bias centre"}
_CHOSEN = [name for name, operator in POINTWISE.items() if operator.spellings and name != "formula"]
_COMMON = [name for name in _CHOSEN if POINTWISE[name].common]
_OF_ONE = [text for text in POINTWISE["formula"].spellings if "{y}" not in text]
_OF_TWO = [text for text in POINTWISE["formula"].spellings if "{y}" in text]

# ---- Pointwise steps


def steps(d, count, saves=0.0):
    """`count` pointwise steps; with clutter some may be PyTorch's, or change the shape.

    saves: how often the current tensor is kept under another name, for a residual step later: identity = x
    """
    if d.chance(saves):
        d.saved = d.add("alias", d.pick(*OPERATORS["alias"].spellings), {}, d.name("identity residual skip shortcut"))
    for _ in range(count):
        kinds = [activation] * 7 + [scale] * 3 + [parameter] * 3 + [formula] * 2 + [buffer] * d.clutter
        if d.saved and d.saved.shape == d.shape:
            kinds += [residual] * 2
        kinds += [opaque_step] * d.clutter
        d.pick(*kinds)(d)


def activation(d, name=""):
    """x = F.softplus(x)      or      self.act = nn.Sigmoid()  ...  x = self.act(x)"""
    d.apply(name or d.pick(*(_COMMON if d.chance(0.55) else _CHOSEN)))


def formula(d, other=None):
    """A formula written out: x = torch.where(x > 0, x, 0.1 * x). other: a second tensor for it."""
    d.apply("formula", d.pick(*(_OF_TWO if other else _OF_ONE)), y=other)


def scale(d):
    """Arithmetic with a number: a literal, an attribute, an input of forward or a parameter: x = 0.5 * x"""
    sign, value = d.pick("*", "*", "/", "+", "-"), d.number()
    operand = d.scalar(_SCALARS[sign], value)
    if d.clutter and d.chance(0.12):
        operand = Value(d.name(_SCALARS[sign]))
        d.meta.space[operand.text] = abs(float(value))
        d.program.inputs.append((operand, str(abs(float(value)))))
    elif d.clutter and d.chance(0.2):
        made = d.pick("torch.tensor({})", "torch.tensor([{}])").format(float(value))
        operand = d.meta.value(d.attribute(_SCALARS[sign], f"nn.Parameter({made})"))
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
    if d.chance(0.65):
        shape = d.arg(_PARAMETERS[sign].replace(" ", "_shape ") + "_shape param_shape", shape, "tuple")
    make = d.pick("randn", "randn", "rand", "ones", "rand" if sign == "*" else "zeros")
    spread = d.pick("", "", "", " * 0.1", " * 0.3", " + 0.5", f" * {d.number()}")
    made = d.attribute(_PARAMETERS[sign], f"nn.Parameter(torch.{make}({shape}){spread})")
    d.apply("formula", "{x} " + sign + " {y}", y=d.meta.value(made))


def buffer(d):
    """A tensor that is not a parameter: self.register_buffer("steps", torch.ones(width))  ...  x = x * self.steps"""
    name, width = d.name("counts positions steps weights table"), d.size(-1)
    made = d.pick("arange(1, {w} + 1).float()", "linspace(0.5, 1.5, {w})", "full(({w},), 2.0)").format(w=width)
    d.program.init.append(f"self.register_buffer('{name}', torch.{made})")
    setattr(d.meta.space["self"], name, d.meta.evaluate(f"torch.{made}"))
    d.apply("formula", d.pick("{x} * {y}", "{x} + {y}", "{x} / {y}"), y=d.meta.value(f"self.{name}"))


def residual(d):
    """x = x + identity, now and then again and again"""
    for _ in range(d.pick(1, 1, 1, 2, 3) if d.clutter else 1):
        d.apply("formula", "{x} + {y}", "{x} + {y}", "{x} * {y}", y=d.saved)


def opaque_step(d):
    """An operator that stays PyTorch's, or whose rows are not the last dimension."""
    kind = d.pick("dropout", "clone", "centre", "softmax", "flip", "amax", "mean")
    if kind in ("dropout", "clone") or len(d.shape) < 2:
        d.apply(d.pick("dropout", "clone"))
    elif kind == "centre":
        d.compose("centre", d=d.pick("1", "-1", "0"))
    elif len(d.shape) > 2 or kind in ("softmax", "flip"):
        d.apply(kind, d="1", keep=", keepdim=True")


# ---- Rows, reductions, normalisations


def row_operator(d, dim=""):
    """Softmax, scans and norms over a dimension, by default the last: x = torch.log_softmax(x, dim=-1)"""
    kinds = ["softmax", "softmax", "log_softmax", "rms", "rms", "l2", "normalize", "cumsum", "share"]
    kinds += ["cumprod", "cumsum", "centre", "mean_abs", "softmin"] if dim else ["layer_norm"] * 2
    kind = d.pick(*kinds)
    if kind == "layer_norm":
        width = d.arg("normalized_shape norm_shape width", d.shape[-1]) if d.chance(0.4) else d.size(-1)
        eps = f", eps={d.arg('eps epsilon norm_eps', '1e-5', 'float')}" if d.chance(0.15) else ""
        return d.layer("layer_norm", "norm ln layer_norm", f"LayerNorm({width}{eps})")
    dim = d.dimension(dim or "-1", dim or str(len(d.shape) - 1))
    if kind == "rms":
        return d.compose("rms", d=dim, c=d.scalar("eps epsilon", d.pick("1e-5", "1e-6")))
    if kind == "share":
        activation(d, d.pick("sigmoid", "softplus", "exp", "square"))
    (d.compose if kind in COMPOSED else d.apply)(kind, d=dim)


def reduction(d, dim=""):
    """Over a dimension, by default the last or all spatial ones; now and then two of the same tensor: high - low"""
    rank = len(d.shape)
    keep = d.pick("", ", keepdim=True")
    name = d.pick("sum", "mean", "amax", "amin", "logsumexp")
    if dim:
        name = d.pick(name, name, "norm", "var", "std", "sum_squares", "argmax", "argmin")
        return (d.compose if name in COMPOSED else d.apply)(name, d=d.dimension(dim), keep=keep)
    if rank > 3:
        dims = ", ".join(map(str, range(d.pick(1, 2, 2, 2), rank)))
        return d.apply(name, *OPERATORS[name].spellings[:2], d=d.pick("[{}]", "({})").format(dims), keep=keep)
    dim = d.dimension("-1", "-1", str(rank - 1))
    if d.chance(0.9):
        return d.apply(name, d=dim, keep=keep)
    fields = {"d": dim, "keep": keep}
    one = d.pick("amax", "sum")
    high = d.add(one, OPERATORS[one].spellings[0], fields, d.name("high top upper total"))
    two = d.pick("amin", "mean")
    low = d.add(two, OPERATORS[two].spellings[0], fields, d.name("low bottom lower average"))
    d.apply("formula", "{y} - {z}", "{y} - {z}", "{y} + {z}", "{y} * {z}", y=high, z=low)


def normalization(d):
    """Group, instance or batch norm over the channels: self.bn = nn.BatchNorm2d(out_channels)"""
    rank = len(d.shape) - 2
    channels = d.size(1)
    kind = d.pick("group", "group", "instance", "batch") if rank else "batch"
    made = f"BatchNorm{max(1, rank)}d({channels})"
    if kind == "group":
        groups = d.pick(*(count for count in (1, 2, 4, 8) if d.shape[1] % count == 0))
        made = f"GroupNorm({d.arg('num_groups groups n_groups', groups)}, {channels})"
    elif kind == "instance":
        made = f"InstanceNorm{rank}d({channels}{d.pick('', '', ', affine=True')})"
    d.layer(f"{kind}_norm", f"norm {kind}_norm {kind[0]}n", made)


def pooling(d):
    """Halves the spatial dimensions: self.pool = nn.MaxPool2d(kernel_size=2)  ...  x = self.pool(x)"""
    k, kind = d.arg("pool_size pool_kernel", 2) if d.chance(0.5) else "2", d.pick("Max", "Avg")
    k = d.pick(k, k, f"kernel_size={k}", f"{k}, stride={k}")
    d.layer("pooling", f"pool {kind.lower()}pool", f"{kind}Pool{len(d.shape) - 2}d({k})")


def maybe(d, most=1):
    """Nothing, or up to `most` steps that fit any shape."""
    for _ in range(d.r.randint(0, most)):
        d.pick(activation, scale, formula)(d)


# ---- Heads: what a problem begins with

_PLAIN = {2: [("batch_size rows N M", (64, 128, 32, 256)), ("features dim cols width", (1024, 512, 2048, 256))],
          3: [("batch_size B N", (8, 16, 4)), ("seq_len length T", (64, 32, 128)),
              ("dim hidden features D", (128, 128, 128))],
          4: [("batch_size N B", (8, 4, 16)), ("channels features C", (16, 32, 8)), ("height H h", (16, 16, 16)),
              ("width W w", (32, 32, 16))]}


def plain_input(d, *ranks):
    """An input of 2 to 4 dimensions with about 64 K elements."""
    rank = d.pick(*ranks)
    which = d.r.randrange(len(_PLAIN[rank][0][1]))
    for i, (options, sizes) in enumerate(_PLAIN[rank]):
        n = d.near(sizes[which]) if i else sizes[which]
        d.dims.append(d.const(options, n))
        if i:
            d.sizes.setdefault(n, d.dims[-1])
    d.input(d.dims)


def linear(d):
    """A matrix product: a layer, a parameter, or a second input."""
    n_in = d.pick(32, 64, 128)
    n_out = d.near(128, 256, 512)
    batch = d.const("batch_size N B rows", d.pick(64, 128, 256))
    i = d.arg("in_features input_size in_dim d_in", n_in)
    o = d.arg("out_features output_size hidden_size d_out", n_out)
    middle = [d.const("tokens seq_len length T", d.pick(8, 16))] if d.chance(0.15) else []
    d.input([batch, *middle, i])
    d.sizes, d.dims = {n_out: o}, [batch, *middle, o]
    kind = d.pick("layer", "layer", "layer", "layer", "parameter", "input")
    if kind == "layer":
        bias = ", bias=False" if d.chance(0.15) else ""
        return d.layer("linear", "linear fc gemm proj lin dense", f"Linear({i}, {o}{bias})")
    if kind == "parameter":
        factor = d.meta.value(d.attribute("weight W proj", f"nn.Parameter(torch.randn({i}, {o}) * 0.1)"))
    else:  # the second factor is an input, as in a plain matrix product: get_inputs alone uses the sizes
        d.program.args.clear()
        factor = d.input([i, o])
    d.apply("product", "torch.matmul({x}, {y})", "{x} @ {y}", y=factor, factors=("{x}", "{y}"))


def convolution(d):
    """A convolution of 1 to 3 dimensions, or a transposed one."""
    rank = d.pick(2, 2, 2, 2, 3, 1)
    transposed = d.chance(0.3)
    kernel = d.pick(3, 3, 3, 1, 2, 5)
    n_out = d.pick(8, 16, 32)
    batch = d.const("batch_size batch_size N B", d.pick(2, 4, 8))
    o = i = d.arg("out_channels out_channels out_ch c_out", n_out)
    if d.chance(0.93):
        i = d.arg("in_channels in_channels in_ch c_in", d.pick(3, 4, 8, 16))
        d.program.args[-2:] = d.program.args[:-3:-1]  # in before out
    k = str(kernel) if d.chance(0.05) else d.arg("kernel_size kernel_size k ks", kernel)
    options, stride = "", d.pick(1, 1, 2)
    for name, value, p in (("stride", stride, 0.3), ("padding", kernel // 2, 0.35), ("groups", 1, 0.08),
                           ("dilation", 2, 0.06 * (kernel == 3)), ("bias", d.pick("False", "True"), 0.12)):
        if d.chance(p):
            value = d.arg(name, value, "bool" if name == "bias" else "int") if d.chance(0.4) else value
            options += f", {name}={value}"
    extent = {1: d.pick(128, 256), 2: d.pick(16, 24, 32), 3: d.pick(8, 10)}[rank]
    sizes = [d.const(options_, extent) for options_ in ("length depth height", "height width H", "width W w")[:rank]]
    d.sizes, d.rows_last = {n_out: o}, False
    d.input([batch, i, *sizes])
    name, options_ = "convolution", f"conv conv1 convolution conv{rank}d"
    if transposed:
        name, options_ = "conv_transpose", "conv_transpose deconv up conv_t"
    d.layer(name, options_, f"Conv{'Transpose' * transposed}{rank}d({i}, {o}, {k}{options})")


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
            "network": (5, network), "skip": (6, skip_connections), "classifier": (4, classifier), "product": (16, product),
            "any dimension": (18, any_dimension), "library loss": (8, library_loss), "reordered": (6, reordered)}


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

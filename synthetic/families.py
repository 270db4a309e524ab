"""Families of problems, and endless streams of those that are fit to train on.

    draw(seed)              a program, a pure function of its seed
    training_tasks(seed)    problems that run, are deterministic, finite and not constant, and are not near an evaluation
                            problem

What varies: the operators, how each is spelled, shapes, names, and in wording.py how the problem is written down. To
add a family: a function of a draft here, and its row of FAMILIES.
"""

import itertools

from synthetic.operators import FORMULAS, LOSSES, PAIRS, POINTWISE, PRODUCTS, ROWS, TERMS
from synthetic.program import Draft, Program, Value
from synthetic.wording import dress, problem_text
from tasks import GPU_BATCH_FACTOR, Task, elements, evaluation_fingerprints, scale_batch, unfit

MOST_ON_GPU = 1 << 30  # elements of all tensors of a training problem
# What the operand of x * s, x / s, ... is called: a number; a parameter that is broadcast.
_SCALAR_NAMES = {"*": "scale scaling_factor multiplier factor gain", "/": "divisor temperature scale",
                 "+": "offset shift add_value constant", "-": "subtract_value offset margin"}
_PARAMETER_NAMES = {"*": "weight multiplier gain scale", "+": "bias extra_bias add_bias shift",
                    "-": "subtract sub_bias centre"}
_CHOSEN = [name for name, operator in POINTWISE.items() if operator.spellings]  # what an activation may be
_COMMON = [name for name in _CHOSEN if POINTWISE[name].common]

# ----------------------------------------------------------------------------------------------------------------------
# Pointwise steps


def steps(d, count, opaque=True):
    """`count` pointwise steps. opaque: some may be PyTorch's, or change the shape."""
    for _ in range(count):
        kinds = [activation] * 5 + [leaky, clamp] + [scale] * 3 + [parameter] * 3
        if d.saved and d.saved.shape == d.shape:
            kinds += [residual] * 2
        if d.clutter and opaque:
            kinds.append(opaque_step)
        if d.clutter and d.chance(0.5):
            kinds.append(d.pick(buffer, soft_cap))
        d.pick(*kinds)(d)


def activation(d, name=""):
    """x = F.softplus(x)      or      self.act = nn.Sigmoid()  ...  x = self.act(x)"""
    d.apply(name or d.pick(*(_COMMON if d.chance(0.7) else _CHOSEN)))


def leaky(d):
    """Leaky ReLU or ELU: x = F.leaky_relu(x, self.slope)   or   self.lrelu = nn.LeakyReLU(negative_slope=slope)"""
    slope, name = d.pick("0.01", "0.1", "0.2", "0.05"), d.pick("leaky_relu", "elu")
    keyword = "alpha" if name == "elu" else "negative_slope"
    if d.chance(0.4):
        made = {"leaky_relu": "LeakyReLU({})", "elu": "ELU({})"}[name]
        given = d.arg("negative_slope slope alpha", slope, "float")
        return d.layer(name, "leaky_relu act lrelu elu", made.format(d.pick(given, f"{keyword}={given}")))
    spelling = d.pick("F.{f}({x}, {c})", "F.{f}({x}, {k}={c})", "F.{f}({x})").replace("{f}", name)
    spelling = spelling.replace("{k}", keyword)
    d.apply("formula", spelling, c=d.scalar("negative_slope alpha", slope) if "{c}" in spelling else "")


def clamp(d):
    """A lower bound, two bounds, or one for both signs: x = torch.clamp(x, min=-1.0, max=self.upper)"""
    low, high = d.pick(("-1.0", "1.0"), ("0.0", "1.0"), ("-2.0", "2.0"), ("-0.5", "0.5"), ("0.0", "6.0"))
    if d.chance(0.06):
        bounds = d.pick("{}, {}", "min_val={}, max_val={}").format(low, high)
        return d.layer("clamp", "hardtanh clip clamp", f"Hardtanh({bounds})")
    if d.chance(0.08):
        return d.apply("formula", "torch.clamp({x}, min=-{c}, max={c})", "torch.clamp({x}, -{c}, {c})",
                       c=d.scalar("limit bound max_abs", high))
    low = d.scalar("min_value lower min_val clamp_min", low)
    if d.chance(0.3):
        return d.apply("formula", "torch.clamp({x}, min={c})", c=low)
    d.apply("formula", "torch.clamp({x}, {c}, {h})", "torch.clamp({x}, min={c}, max={h})", "{x}.clamp({c}, {h})",
            "F.hardtanh({x}, {c}, {h})", c=low, h=d.scalar("max_value upper max_val clamp_max", high))


def scale(d):
    """Arithmetic with a number: a literal, an attribute, an input of forward or a parameter.

        x = x * self.scaling_factor      or      x = 0.5 * x
    """
    operator, value = d.pick("*", "*", "/", "+", "-"), d.number()
    operand = d.scalar(_SCALAR_NAMES[operator], value)
    if d.clutter and d.chance(0.12):
        name = d.name(_SCALAR_NAMES[operator])
        operand = Value(name)
        d.meta.space[name] = abs(float(value))
        d.program.inputs.append((operand, str(abs(float(value)))))
    elif d.clutter and d.chance(0.2):
        made = d.pick("torch.tensor({})", "torch.tensor({})", "torch.tensor([{}])").format(float(value))
        operand = d.meta.value(d.attribute(_SCALAR_NAMES[operator], f"nn.Parameter({made})"))
    spelling = "{x} " + operator + " {c}"
    if operator != "/" and d.chance(0.12):
        spelling = "{c} " + operator + " {x}"
    elif operator == "*" and operand.text.startswith("self") and d.chance(0.05):
        spelling = "{x} * -{c}"
    d.apply("formula", spelling, c=operand)


def parameter(d):
    """A broadcast parameter over the channel dimension (dim 1; the last one for 3-D rows).

        self.bias = nn.Parameter(torch.randn(bias_shape) * 0.3)  ...  x = x + self.bias
    """
    operator, rank = d.pick("+", "+", "*", "-"), len(d.shape)
    if rank < 2:
        return scale(d)
    dim = rank - 1 if rank == 3 and d.rows_last else 1
    shape = f"({d.size(dim)}{', 1' * (rank - 1 - dim) or ','})"
    if dim == 1 and rank == 4 and d.chance(0.3):
        shape = f"(1, {shape[1:]}"
    names = _PARAMETER_NAMES[operator]
    if d.chance(0.65):
        shape = d.arg(f"{names.replace(' ', '_shape ')}_shape param_shape", shape, "tuple")
    make = d.pick("randn", "randn", "rand", "ones", "rand" if operator == "*" else "zeros")
    spread = ""
    if d.chance(0.3):
        spread = d.pick(" * 0.1", " * 0.3", " + 0.5", " - 0.5", f" * {d.number()}", f" + {d.number()}", " / 4 ** 0.5")
    made = d.attribute(names, f"nn.Parameter(torch.{make}({shape}){spread})")
    d.apply("formula", "{x} " + operator + " {y}", y=d.meta.value(made))


def buffer(d):
    """A tensor of the model that is not a parameter, over the last dimension: x = x * self.positions

        self.register_buffer("positions", torch.linspace(0.5, 1.5, width))
    """
    if d.shape[-1] == 1:
        return parameter(d)
    name, width = d.name("counts positions steps weights table"), d.size(-1)
    made = d.pick("arange(1, {w} + 1).float()", "arange({w}) * 0.01", "linspace(0.5, 1.5, {w})", "ones({w})",
                  "full(({w},), 0.5)", "full(({w},), 2.0)").format(w=width)
    d.program.init.append(f"self.register_buffer('{name}', torch.{made})")
    setattr(d.meta.space["self"], name, d.meta.evaluate(f"torch.{made}"))
    operator = d.pick("*", "+", "/" if "arange(1" in made else "-")
    d.apply("formula", "{x} " + operator + " {y}", y=d.meta.value(f"self.{name}"))


def soft_cap(d):
    """cap * tanh(x / cap)"""
    cap = d.scalar("cap limit bound", d.pick("2.0", "5.0", "3.0", "30.0"))
    d.apply("formula", "{x} / {c}", c=cap)
    activation(d, "tanh")
    d.apply("formula", "{x} * {c}", "{c} * {x}", c=cap)


def formula(d, other=None):
    """A formula written out: x = torch.where(x > 0, x, 0.1 * x). other: a second tensor for it."""
    c = d.scalar("alpha scale c0", d.pick("0.5", "0.25", "1.5", "2.0"))
    d.apply("formula", d.pick(*(PAIRS if other else FORMULAS)), y=other, c=c)


def save(d):
    """Keep the current tensor under another name, for a residual step later: identity = x"""
    d.saved = d.add("alias", d.pick("{x}", "{x}", "{x}.clone()"), {}, d.name("identity residual skip shortcut"))


def residual(d):
    """x = x + identity, now and then again and again"""
    for _ in range(d.pick(1, 1, 1, 2, 3) if d.clutter else 1):
        d.apply("formula", "{x} + {y}", "{x} + {y}", "{x} * {y}", y=d.saved)


def residual_input(d):
    """Another input, for residual steps; now and then it passes through a function of its own first."""
    d.saved = d.another_input()
    if d.clutter and d.chance(0.4):
        spelling = d.pick("torch.sigmoid({x})", "torch.tanh({x})", "F.silu({x})", "F.relu({x})", "F.gelu({x})")
        d.saved = d.add("formula", spelling, {"x": d.saved}, d.saved.text)
        activation(d)
        d.apply("formula", "{x} + {y}", y=d.saved)


def opaque_step(d):
    """An operator that stays PyTorch's, or whose rows are not the last dimension."""
    kind = d.pick("dropout", "clone", "centre", "softmax", "flip", "reduced")
    if kind in ("dropout", "clone") or len(d.shape) < 2:
        return d.apply(d.pick("dropout", "clone"))
    if kind == "centre":
        return d.compose("centre", d=d.pick("1", "-1", "0"))
    if kind == "reduced" and len(d.shape) > 2 and d.shape[1] > 1 and d.saved is None:
        return d.apply(d.pick("amax", "amin", "logsumexp", "mean", "sum"), d="1", keep=", keepdim=True")
    d.apply("softmax" if kind == "softmax" else "flip", d="1")


# ----------------------------------------------------------------------------------------------------------------------
# Rows, reductions, normalisations


def row_operator(d):
    """Softmax, scans and norms over the last dimension: x = torch.log_softmax(x, dim=-1)"""
    kind = d.pick("softmax", "softmax", "log_softmax", "layer_norm", "layer_norm", "rms", "rms", "l2", "normalize",
                  "cumsum", "share")
    if kind == "layer_norm":
        width = d.size(-1)
        if d.chance(0.4):
            width = d.arg("normalized_shape norm_shape width", d.shape[-1])
        eps = f", eps={d.arg('eps epsilon norm_eps', '1e-5', 'float')}" if d.chance(0.15) else ""
        return d.layer("layer_norm", "norm ln layer_norm", f"LayerNorm({width}{eps})")
    dim = d.dimension("-1", str(len(d.shape) - 1))
    if kind == "rms":
        return d.compose("rms", d=dim, c=d.scalar("eps epsilon", d.pick("1e-5", "1e-6")))
    if kind == "share":
        activation(d, d.pick("sigmoid", "softplus", "exp", "square"))
    (d.compose if kind in ("l2", "share") else d.apply)(kind, d=dim)


def reduction(d):
    """Over the last dimension, or over all spatial ones; now and then two from the same tensor.

        high = torch.amax(x, dim=1), low = torch.amin(x, dim=1), x = high - low      a line each
    """
    rank, keep = len(d.shape), d.pick("", ", keepdim=True")
    d.saved = None
    if rank > 3:
        dims = ", ".join(map(str, range(2 if d.chance(0.75) else 1, rank)))
        dims = d.pick("[{}]", "({})", "({})").format(dims)
        name = d.pick("mean", "mean", "sum", "amax")
        return d.apply(name, *ROWS[name].spellings[:2], d=dims, keep=keep)
    dim = d.dimension("-1", "-1", str(rank - 1))
    if not d.chance(0.1):
        return d.apply(d.pick("sum", "mean", "amax", "amin", "logsumexp", "logsumexp"), d=dim, keep=keep)
    one, two = d.pick(("amax", "amin"), ("sum", "amax"), ("mean", "amin"), ("amax", "mean"))
    one = d.add(one, f"torch.{one}({{x}}, dim={{d}}{{keep}})", {"d": dim, "keep": keep}, d.name("high top upper total"))
    two = d.add(two, f"torch.{two}({{x}}, dim={{d}}{{keep}})", {"d": dim, "keep": keep}, d.name("low bottom lower average"))
    d.apply("formula", d.pick("{y} - {z}", "{y} - {z}", "{y} + {z}", "{y} * {z}"), y=one, z=two)


def normalization(d):
    """Group, instance or batch norm over the channels: self.bn = nn.BatchNorm2d(out_channels)"""
    rank, n, channels = len(d.shape) - 2, d.shape[1], d.size(1)
    kind = d.pick("group", "group", "instance", "batch") if rank else "batch"
    if kind == "group":
        groups = d.pick(*(count for count in (1, 2, 4, 8) if n % count == 0))
        made = f"GroupNorm({d.arg('num_groups groups n_groups', groups)}, {channels})"
    elif kind == "instance":
        made = f"InstanceNorm{rank}d({channels}{d.pick('', '', ', affine=True')})"
    else:
        made = f"BatchNorm{max(1, rank)}d({channels})"
    d.layer(f"{kind}_norm", f"norm {kind}_norm {kind[0]}n", made)


def pooling(d):
    """Halves the spatial dimensions: self.pool = nn.MaxPool2d(kernel_size=2)  ...  x = self.pool(x)"""
    k = d.arg("pool_size pool_kernel pool_kernel_size", 2) if d.chance(0.5) else "2"
    k = d.pick(k, k, f"kernel_size={k}", f"kernel_size={k}, stride={k}", f"{k}, stride={k}")
    kind = d.pick("Max", "Avg")
    d.layer("pooling", f"pool {kind.lower()}pool", f"{kind}Pool{len(d.shape) - 2}d({k})")


def after_reduction(d):
    """Nothing, or up to two steps."""
    for _ in range(d.pick(0, 0, 1, 2)):
        d.pick(activation, scale, clamp)(d)


# ----------------------------------------------------------------------------------------------------------------------
# Heads: what a problem begins with


def plain_input(d, rank):
    """An input of 2 to 4 dimensions with about 64 K elements."""
    sizes = {2: [(64, 1024), (128, 512), (32, 2048), (256, 256)], 3: [(8, 64, 128), (16, 32, 128), (4, 128, 128)],
             4: [(8, 16, 16, 32), (4, 32, 16, 32), (16, 8, 16, 16)]}[rank]
    names = {2: ["batch_size rows N M", "features dim cols width"],
             3: ["batch_size B N", "seq_len length T", "dim hidden features D"],
             4: ["batch_size N B", "channels features C", "height H h", "width W w"]}[rank]
    for i, (options, n) in enumerate(zip(names, d.pick(*sizes))):
        n = d.near(n) if i else n
        d.dims.append(d.const(options, n))
        if i:
            d.sizes.setdefault(n, d.dims[-1])
    d.input(d.dims)


def linear(d):
    """A matrix product: a layer, a parameter, or a second input."""
    batch = d.const("batch_size N B rows", d.pick(64, 128, 256))
    n_in, n_out = d.pick(32, 64, 128), d.near(128, 256, 512)
    i = d.arg("in_features input_size in_dim d_in", n_in)
    o = d.arg("out_features output_size hidden_size d_out", n_out)
    middle = [d.const("tokens seq_len length T", d.pick(8, 16))] if d.chance(0.15) else []
    d.input([batch, *middle, i])
    d.sizes, d.dims = {n_out: o, n_in: i}, [batch, *middle, o]
    kind = d.r.random()
    if kind > 0.35:
        bias = ", bias=False" if d.chance(0.15) else ""
        return d.layer("linear", "linear fc gemm proj lin dense", f"Linear({i}, {o}{bias})")
    if kind < 0.2:
        spread = d.pick("", " * 0.1")
        factor = d.meta.value(d.attribute("weight W proj", f"nn.Parameter(torch.randn({i}, {o}){spread})"))
    else:  # the second factor is an input, as in a plain matrix product
        d.program.args.clear()  # get_inputs alone uses the sizes
        factor = d.input([i, o])
    d.apply("product", "torch.matmul({x}, {y})", "{x} @ {y}", y=factor, factors=("{x}", "{y}"))


def another_linear(d):
    """One more layer."""
    n = d.near(64, 128, 256)
    i, o = d.size(-1), d.arg("hidden2 out_dim classes width2 d_model", n)
    bias = ", bias=False" if d.chance(0.15) else ""
    d.layer("linear", "fc1 fc2 fc3 linear1 linear2 out head proj1 proj2 down up", f"Linear({i}, {o}{bias})")
    d.sizes[n] = o


def convolution(d):
    """A convolution of 1 to 3 dimensions, or a transposed one."""
    rank, transposed = d.pick(2, 2, 2, 2, 3, 1), d.chance(0.3)
    batch = d.const("batch_size batch_size N B", d.pick(2, 4, 8))
    n_in, n_out = d.pick(3, 4, 8, 16), d.pick(8, 16, 32)
    kernel = d.pick(3, 3, 3, 1, 2, 5 if rank < 3 else 3)
    if d.clutter and d.chance(0.07):  # as many channels out as in
        i = o = d.arg("channels features planes dim", n_out)
    else:
        i = d.arg("in_channels in_channels in_ch c_in", n_in)
        o = d.arg("out_channels out_channels out_ch c_out", n_out)
    k = str(kernel) if d.chance(0.05) else d.arg("kernel_size kernel_size k ks", kernel)
    if d.clutter and rank == 2 and kernel == 3 and d.chance(0.08):  # a kernel that is not square
        k = d.arg("kernel_size kernel", d.pick("(3, 5)", "(1, 3)", "(5, 3)"), "tuple")
    d.sizes = {n_out: o}
    options = convolution_options(d, kernel, transposed)
    d.input([batch, i, *extents(d, rank)])
    made = f"Conv{'Transpose' * transposed}{rank}d({i}, {o}, {k}{options})"
    d.rows_last = False
    if transposed:
        return d.layer("conv_transpose", "conv_transpose deconv up conv_t", made)
    d.layer("convolution", f"conv conv1 convolution conv{rank}d", made)


def extents(d, rank) -> list[str]:
    """Names of the spatial sizes of a convolution's input, on lines of their own or on one."""
    extent = {1: d.pick(128, 256), 2: d.pick(16, 24, 32), 3: d.pick(8, 10)}[rank]
    if rank == 1 or not d.chance(0.4):
        names = [d.const(["length L", "height H", "depth D"][rank - 1], extent)]
        return names + [d.const(f"width{j} W w size", extent) for j in range(rank - 1)]
    names = ["height", "width"] if rank == 2 else ["depth", "height", "width"]
    names = [d.name(name) for name in names]
    d.meta.space.update(dict.fromkeys(names, extent))
    if d.chance(0.5):
        d.program.consts.append((", ".join(names), ", ".join([str(extent)] * rank)))
    else:
        d.program.consts.append((" = ".join(names), str(extent)))
    return names


def convolution_options(d, kernel, transposed) -> str:
    """Keyword arguments of a convolution: literals, constructor arguments, or arguments with defaults."""
    stride = d.pick(1, 1, 2)
    wanted = {"stride": (stride, 0.3), "padding": (int(kernel > 1), 0.35),
              "output_padding": (1, 0.3 if transposed and stride == 2 else 0),
              "dilation": (d.pick(1, 2) if kernel == 3 else 1, 0.1), "groups": (1, 0.08),
              "bias": (d.pick(False, False, True), 0.12)}  # name -> (value, probability)
    everything, how, options = d.clutter and d.chance(0.1), d.pick("literal", "argument", "default", "each"), ""
    for name, (value, p) in wanted.items():
        if not d.chance(0.9 if everything and p else p) or name == "output_padding" and "stride" not in options:
            continue
        kind = d.pick("literal", "argument", "default") if how == "each" else how
        if name in ("bias", "groups") and kind == "argument" and d.chance(0.5):
            kind = "literal"
        if kind == "argument":
            value = d.arg(name, value, "bool" if name == "bias" else "int")
        elif kind == "default":
            given = d.name(name)
            d.meta.space[given] = value
            d.program.defaults.append((given, str(value)))
            value = given
        options += f", {name}={value}"
    return options


# ----------------------------------------------------------------------------------------------------------------------
# Families: a head and what follows it


def pointwise(d):
    plain_input(d, d.pick(2, 2, 3, 4))
    if d.chance(0.25):
        residual_input(d)
    steps(d, d.r.randint(2, 5))


def linear_chain(d):
    linear(d)
    if d.chance(0.2):
        save(d)
    elif d.clutter and d.chance(0.1):
        residual_input(d)
    steps(d, d.r.randint(1, 4))
    if d.chance(0.35):
        d.pick(row_operator, reduction)(d)
        steps(d, d.r.randint(0, 1))


def convolution_chain(d):
    convolution(d)
    if d.chance(0.15):
        save(d)
    if d.chance(0.3):
        normalization(d)
    steps(d, 0 if d.clutter and d.chance(0.06) else d.r.randint(1, 4))
    if d.chance(0.2) and d.saved is None:
        pooling(d)
        steps(d, d.r.randint(0, 1))
    elif d.chance(0.15) and len(d.shape) > 3:
        reduction(d)
        after_reduction(d)


def row(d):
    plain_input(d, d.pick(2, 2, 2, 3))
    before = d.r.randint(0, 2)
    steps(d, before)
    row_operator(d)
    steps(d, d.r.randint(0 if before else 1, 2))


def reduced(d):
    plain_input(d, d.pick(2, 2, 3, 4))
    d.rows_last = len(d.shape) == 3
    steps(d, d.r.randint(1, 3))
    reduction(d)
    after_reduction(d)


def loss(d):
    """A mean or sum over everything, in one expression or step by step."""
    plain_input(d, d.pick(2, 2, 3))
    steps(d, d.r.randint(0, 2), opaque=False)
    target = d.input(d.dims, f"torch.rand({', '.join(d.dims)})")
    at_once = d.chance(0.5)
    variable = d.variable if at_once else d.name("error err cost margin_loss")
    c = d.scalar("margin width", d.pick("1.0", "1.5", "0.5"))
    d.x = d.add("formula", d.pick(*TERMS), {"y": target, "c": c}, "t" if at_once else variable, inline=at_once)
    if not at_once:
        d.variable = variable
        if d.clutter:
            d.pick(activation, clamp, scale)(d)
    d.apply(d.pick("mean_all", "mean_all", "sum_all"))
    if d.chance(0.15):
        scale(d)


def library_loss(d):
    """A loss of torch.nn.functional, of predictions and targets, often between other steps."""
    plain_input(d, 2)
    before = d.chance(0.5)
    if before:
        d.pick(scale, activation, rearranged)(d)
    rows, width = d.dims
    name = d.pick(*LOSSES, "dissimilarity", "distance")
    maker = {"cross_entropy": f"torch.randint(0, {width}, ({rows},))", "kl_div": f"torch.rand({rows}, {width}).softmax(dim=-1)",
             "bce_logits": f"torch.rand({rows}, {width})"}.get(name.removesuffix("_sum"), f"torch.randn({rows}, {width})")
    if name == "kl_div":
        d.apply("log_softmax", "F.log_softmax({x}, dim={d})", d="-1")
    target = d.input(d.dims, maker)
    if name in ("dissimilarity", "distance"):
        d.compose(name, y=target, d="1")
    else:
        far = d.add("formula", "{y} * 0.5", {"y": target}, d.name("negatives far")) if "triplet" in name else None
        d.apply(name, y=target, z=far, d="1")
    if not before or d.chance(0.3):
        scale(d)


def rearranged(d):
    """The same elements in another order, or some of them."""
    d.apply(d.pick("transpose", "flip", "roll", "tril", "sort"), d=d.pick("0", "-1"))


def diagonal(d):
    """A product with a diagonal matrix, which a kernel can write as a scaling of the rows."""
    plain_input(d, 2)
    rows = d.dims[0]
    if d.chance(0.3):
        weights = d.meta.value(d.attribute("gain weights diagonal", f"nn.Parameter(torch.randn({d.inside(rows)}))"))
    else:
        weights = d.input([rows], f"{d.pick('torch.randn', 'torch.rand')}({rows})")
        d.program.inputs.reverse()
    d.apply("diagonal", y=weights)
    steps(d, d.r.randint(1, 3))


def network(d):
    """A few layers."""
    linear(d)
    for _ in range(d.pick(1, 1, 2)):
        if d.clutter and d.chance(0.3):
            save(d)
        steps(d, d.r.randint(1, 2))
        another_linear(d)
    steps(d, d.r.randint(0, 1))
    if d.chance(0.4):
        row_operator(d)


def product(d):
    """A product of matrices, or of stacks of them, in any arrangement of the factors."""
    first, second, a, b, spellings = d.pick(*PRODUCTS)
    choices = {"b": ("batch_size B N", (4, 8)), "m": ("M rows queries", (32, 64, 128)),
               "k": ("K inner_dim depth", (32, 64, 128)), "n": ("N cols keys L", (64, 128, 256))}
    names = {}
    for letter in dict.fromkeys((first + " " + second).split()):
        options, sizes = choices[letter]
        names[letter] = d.const(options, d.pick(*sizes) if letter == "b" else d.near(*sizes))
    d.input([names[letter] for letter in first.split()])
    other = d.input([names[letter] for letter in second.split()])
    d.apply("product", *spellings, y=other, factors=(a, b))
    for _ in range(d.pick(1, 1, 2, 3)):
        d.pick(formula, activation, scale, rearranged)(d)


def any_dimension(d):
    """Reductions, arg-reductions, softmax, norms and scans along any dimension: x = torch.cumprod(x, dim=1)"""
    plain_input(d, d.pick(2, 3, 3, 4))
    d.rows_last = len(d.shape) == 3
    for _ in range(d.pick(0, 1, 1, 2)):
        d.pick(formula, activation, scale)(d)
    dim, kind = d.dimension(*map(str, range(len(d.shape))), "-1"), d.r.random()
    if kind < 0.25:
        d.apply(d.pick("softmax", "log_softmax", "normalize", "cumsum", "cumsum", "cumprod"), d=dim)
    elif kind < 0.5:
        d.compose(d.pick("mean_abs", "centre", "l2", "softmin", "rms", "frobenius", "reversed_cumsum", "entropy"), d=dim,
                  c=Value("1e-5"))
    elif kind < 0.65:
        return d.apply(d.pick("argmax", "argmax", "argmin"), d=dim)
    elif kind < 0.75:
        d.compose("sum_squares", d=dim, keep=d.pick("", ", keepdim=True"))
    else:
        name = d.pick("sum", "mean", "amax", "amin", "logsumexp", "norm", "var", "std")
        d.apply(name, d=dim, keep=d.pick("", ", keepdim=True"))
    if d.chance(0.7):
        d.pick(activation, scale, formula)(d)


def reordered(d):
    """Rows that PyTorch puts into another order, and what is computed of them: x = torch.sort(x, dim=-1)[0]"""
    plain_input(d, d.pick(2, 2, 3))
    steps(d, d.r.randint(0, 1), opaque=False)
    d.apply(d.pick("sort", "flip", "roll", "cummax", "cummin", "cat"), d="-1")
    d.pick(row_operator, reduction)(d)
    after_reduction(d)


def formulas(d):
    """Formulas one after the other: a run of pointwise operators for one kernel."""
    plain_input(d, d.pick(2, 2, 3, 4))
    other = d.another_input() if d.chance(0.4) else None
    for i in range(d.pick(1, 2, 2, 3)):
        formula(d, None if i else other)
    steps(d, d.pick(0, 0, 1))


# Family (of a Task) -> how often it is drawn, and its function.
FAMILIES = {"pointwise": (14, pointwise), "linear": (20, linear_chain), "convolution": (28, convolution_chain),
            "row": (18, row), "reduction": (8, reduced), "loss": (7, loss), "diagonal": (5, diagonal),
            "network": (7, network), "product": (16, product), "any dimension": (18, any_dimension),
            "formula": (10, formulas), "library loss": (8, library_loss), "reordered": (6, reordered)}


def draw(seed, clutter=False, families=None, plain=False) -> Program:
    """One program, a pure function of its arguments.

    clutter: long and odd signatures, unused layers, keyword arguments, docstrings of random words, as real problems
    have them: a small model must learn to copy whatever it meets. plain: ordinary names only.
    """
    families = families or FAMILIES
    d = Draft(seed, clutter, plain)
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

    On a GPU they get a larger batch, and those are left out of which some layer then has gigabytes of weights.
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

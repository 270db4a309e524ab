"""Kinds of steps, from which families.py makes problems: pointwise ones, rows, reductions, layers, heads.

Each is a function of a draft, to which it adds one step or several.
"""

from synthetic.operators import OPERATORS, POINTWISE

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
        d.save()
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
    """Arithmetic with a number: x = 0.5 * x"""
    sign = d.pick("*", "*", "/", "+", "-")
    operand = d.scalar(_SCALARS[sign], d.number())
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
    name = d.name("counts positions steps weights table")
    width = d.size(-1)
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
    if len(d.shape) < 2 or len(d.shape) == 2 and kind in ("amax", "mean"):
        kind = "clone"
    d.apply(kind, d=d.pick("1", "-1", "0") if kind == "centre" else "1", keep=", keepdim=True")


# ---- Rows, reductions, normalisations


def row_operator(d, dim=""):
    """Softmax, scans and norms over a dimension, by default the last: x = torch.log_softmax(x, dim=-1)"""
    kinds = ["softmax", "softmax", "log_softmax", "rms", "rms", "l2", "normalize", "cumsum", "share"]
    kinds += ["cumprod", "cumsum", "centre", "mean_abs", "softmin"] if dim else ["layer_norm"] * 2
    kind = d.pick(*kinds)
    if kind == "layer_norm":
        width = d.arg("normalized_shape norm_shape width", d.shape[-1]) if d.chance(0.4) else d.size(-1)
        eps = f", eps={d.arg('eps epsilon norm_eps', '1e-5', 'float')}" if d.chance(0.15) else ""
        d.layer("layer_norm", "norm ln layer_norm", f"LayerNorm({width}{eps})")
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
    made = f"BatchNorm{max(1, rank)}d({channels})"
    if kind == "group":
        groups = d.pick(*(count for count in (1, 2, 4, 8) if d.shape[1] % count == 0))
        made = f"GroupNorm({d.arg('num_groups groups n_groups', groups)}, {channels})"
    elif kind == "instance":
        made = f"InstanceNorm{rank}d({channels}{d.pick('', '', ', affine=True')})"
    d.layer(f"{kind}_norm", f"norm {kind}_norm {kind[0]}n", made)


def pooling(d):
    """Halves the spatial dimensions: self.pool = nn.MaxPool2d(kernel_size=2). Returns the layer."""
    k = d.arg("pool_size pool_kernel", 2) if d.chance(0.5) else "2"
    kind = d.pick("Max", "Avg")
    k = d.pick(k, k, f"kernel_size={k}", f"{k}, stride={k}")
    return d.layer("pooling", f"pool {kind.lower()}pool", f"{kind}Pool{len(d.shape) - 2}d({k})")


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


def features(d):
    """An input of rows of features."""
    batch = d.const("batch_size N B rows", d.pick(64, 128, 256))
    n = d.near(32, 64, 128)
    width = d.arg("in_features input_size in_dim d_in width dim", n)
    middle = [d.const("tokens seq_len length T", d.pick(8, 16))] if d.chance(0.2) else []
    d.sizes = {n: width}
    d.dims = [batch, *middle, width]
    d.input(d.dims)


def linear(d):
    """A matrix product: a layer, a parameter, or a second input."""
    features(d)
    i = d.dims[-1]
    n_out = d.near(128, 256, 512)
    o = d.arg("out_features output_size hidden_size d_out", n_out)
    d.sizes = {n_out: o}
    d.dims[-1] = o
    kind = d.pick("layer", "layer", "layer", "layer", "parameter", "input")
    if kind == "layer":
        bias = ", bias=False" if d.chance(0.15) else ""
        d.layer("linear", "linear fc gemm proj lin dense", f"Linear({i}, {o}{bias})")
        return
    if kind == "parameter":
        factor = d.meta.value(d.attribute("weight W proj", f"nn.Parameter(torch.randn({i}, {o}) * 0.1)"))
    else:  # the second factor is an input, as in a plain matrix product: get_inputs alone uses the sizes
        d.program.args.clear()
        factor = d.input([i, o])
    d.apply("product", "torch.matmul({x}, {y})", "{x} @ {y}", y=factor, factors=("{x}", "{y}"))


def dense(d, options, n):
    """A linear layer to n features, kept on self under one of `options`."""
    width = d.size(-1)
    if n not in d.sizes:
        d.sizes[n] = d.sized("hidden hidden_dim inner_dim expanded d_model", n)
    d.layer("linear", options, f"Linear({width}, {d.sizes[n]}{d.pick('', '', '', ', bias=False')})")


_OPTIONS = {"stride": (0.3, "int", "1 2"), "padding": (0.35, "int", "1 0 2"), "groups": (0.08, "int", "1"),
            "dilation": (0.04, "int", "2"), "bias": (0.12, "bool", "False True")}  # how often, type, values
_EXTENTS = {1: (128, 256), 2: (16, 24, 32), 3: (8, 10)}


def convolution(d, same=False):
    """A convolution of 1 to 3 dimensions, or a transposed one. same: one that keeps the shape, which is saved."""
    rank = d.pick(2, 2, 2, 2, 3, 1)
    kernel = d.pick(3, 3, 3, 5, 1, 1 if same else 2)
    channels = d.pick(8, 16, 32)
    batch = d.const("batch_size batch_size N B", d.pick(2, 4, 8))
    if same:
        i = o = d.sized("channels planes dim", channels)
    else:
        i = d.sized("in_channels in_channels in_ch c_in", d.pick(1, 3, 4, 8, 16))
        o = d.sized("out_channels out_channels out_ch c_out", channels)
    k = d.sized("kernel_size kernel_size k ks", kernel)
    if rank == 2 and not same and d.chance(0.06):
        k = d.arg("kernel_size kernel", f"({kernel}, {d.pick(3, 5)})", "tuple")
    options = d.pick(k, k, f"kernel_size={k}")
    if same:
        options += f", padding={d.pick(f'{k} // 2', kernel // 2, repr('same'))}"
    for name, (share, annotation, values) in _OPTIONS.items():
        if d.chance(share) and (name == "bias" or not same):
            value = d.pick(*values.split())
            options += f", {name}={d.arg(name, value, annotation) if d.chance(0.4) else value}"
    sizes = [d.const(names, d.pick(*_EXTENTS[rank])) for names in ("depth D", "height H", "width W length")[-rank:]]
    d.sizes = {channels: o}
    d.rows_last = False
    d.input([batch, i, *sizes])
    if same:
        d.save()
    elif d.chance(0.3):
        d.layer("conv_transpose", "conv_transpose deconv up conv_t", f"ConvTranspose{rank}d({i}, {o}, {options})")
        return
    d.layer("convolution", f"conv conv1 convolution conv{rank}d", f"Conv{rank}d({i}, {o}, {options})")

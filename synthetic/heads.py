"""Heads: what the problems of families.py begin with; and poolings. Each is a function of a draft (draft.py)."""

from synthetic.program import WORDS


def plain_input(d, *ranks):
    """An input of 2 to 4 dimensions with about 64 K elements."""
    dimensions = WORDS["plain_inputs"][str(d.pick(*ranks))]
    which = d.r.randrange(len(dimensions[0][1]))
    for i, (options, sizes) in enumerate(dimensions):
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
        sizes = d.layer_arguments(in_features=i, out_features=o)
        d.layer("linear", "linear fc gemm matmul proj lin dense", f"Linear({sizes}{bias})")
        return
    if kind == "parameter":
        factor = d.value(d.attribute("weight W proj", f"nn.Parameter(torch.randn({i}, {o}) * 0.1)"))
    else:  # the second factor is an input, as in a plain matrix product: get_inputs alone uses the sizes
        d.program.args.clear()
        factor = d.input([i, o])
    d.apply("product", "torch.matmul({x}, {y})", "{x} @ {y}", y=factor, factors=("{x}", "{y}"))


_OPTIONS = {"stride": (0.3, "int", "1 2"), "padding": (0.35, "int", "1 0 2"), "groups": (0.08, "int", "1"),
            "dilation": (0.06, "int", "2 2 1"), "bias": (0.3, "bool", "False True")}  # how often, type, values
_PADDED = {"stride": (1, "int", "2"), "output_padding": (1, "int", "1")}  # of a transposed one
_EXTENTS = {1: (128, 256), 2: (16, 24, 32), 3: (8, 10)}


def convolution(d, same=False):
    """A convolution of 1 to 3 dimensions, or a transposed one. same: it keeps the shape, and its input is saved."""
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
    if rank > 1 and not same and d.chance(0.15):
        if d.chance(0.5):
            k = f"({', '.join([k] * rank)})"
        else:
            k = d.arg("kernel_size kernel", tuple(d.pick(2, 3, 5) for _ in range(rank)), "tuple")
    options = d.layer_arguments(in_channels=i, out_channels=o, kernel_size=k)
    if d.chance(0.2) and "=" not in options:
        options = f"{i}, {o}, kernel_size={k}"
    if same:
        options += f", padding={d.pick(f'{k} // 2', kernel // 2, repr('same'))}"
    all_options = d.chance(0.2)  # the constructor has an argument for each, as in layers that are only wrapped
    transposed = not same and d.chance(0.3)
    padded = transposed and d.chance(0.3)
    for name, (share, annotation, values) in (_OPTIONS | _PADDED if padded else _OPTIONS).items():
        if (d.chance(share) or all_options) and (name == "bias" or not same):
            value = d.pick(*values.split())
            if all_options or d.chance(0.4):
                value = d.pick(d.arg, d.default)(name, value, annotation)
            options += f", {name}={value}"
    sizes = [d.const(names, d.pick(*_EXTENTS[rank])) for names in ("depth D", "height H", "width W length")[-rank:]]
    d.sizes = {channels: o}
    d.rows_last = False
    d.input([batch, i, *sizes])
    if same:
        d.save()
    if transposed:
        d.layer("conv_transpose", "conv_transpose deconv up conv_t", f"ConvTranspose{rank}d({options})")
        return
    d.layer("convolution", f"conv conv1 convolution conv{rank}d", f"Conv{rank}d({options})")


def pooling(d):
    """Halves the spatial dimensions: self.pool = nn.MaxPool2d(kernel_size=2). Returns the layer."""
    k = d.arg("pool_size pool_kernel", 2) if d.chance(0.5) else "2"
    kind = d.pick("Max", "Avg")
    k = d.pick(k, k, f"kernel_size={k}", f"{k}, stride={k}")
    return d.layer("pooling", f"pool {kind.lower()}pool", f"{kind}Pool{len(d.shape) - 2}d({k})")


def pooled_features(d):
    """x = self.pool(x.unsqueeze(1)).squeeze(1)"""
    size = d.arg("kernel_size pool_kernel_size", 2)
    path = d.attribute("pool max_pool avg_pool", f"nn.{d.pick('Max', 'Avg')}Pool1d({size})")
    d.x = d.add("call", "{layer}({x}.unsqueeze(1)).squeeze(1)", {"layer": path}, d.next_name())

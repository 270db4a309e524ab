"""What PyTorch users write besides the chains of heads.py.

Lone operators, products of matrices in every arrangement, reductions and scans along any dimension, formulas written
out, losses of torch.nn.functional, batch norm, mixtures of all of these, and small networks of several classes,
sequences of layers and helper methods. Which operators there are is in tables; a method says how a problem is built
from them, and shows what a forward pass of it may look like (names vary).
"""

import ast

from synthetic.habits import UserProblem
from synthetic.wording import write_class

# Products: (dimensions of the first factor, of the second, of the result, spellings). Names of sizes: b, m, k, n.
_PRODUCTS = [("m k", "k n", "m n", ("torch.matmul({x}, {y})", "{x} @ {y}", "torch.mm({x}, {y})")),
             ("k m", "k n", "m n", ("torch.matmul({x}.T, {y})", "{x}.t() @ {y}", "torch.mm({x}.T, {y})")),
             ("m k", "n k", "m n", ("torch.matmul({x}, {y}.T)", "{x} @ {y}.T", "{x} @ {y}.transpose(0, 1)")),
             ("k m", "n k", "m n", ("torch.matmul({x}.T, {y}.T)", "{x}.t() @ {y}.t()")),
             ("b m k", "b k n", "b m n", ("torch.bmm({x}, {y})", "torch.matmul({x}, {y})", "{x} @ {y}")),
             ("b m k", "b n k", "b m n", ("torch.bmm({x}, {y}.transpose(1, 2))", "{x} @ {y}.transpose(-2, -1)")),
             ("b m k", "k n", "b m n", ("torch.matmul({x}, {y})", "torch.einsum('bmk,kn->bmn', {x}, {y})")),
             ("b m k", "b k n", "b m n", ("torch.einsum('bmk,bkn->bmn', {x}, {y})",)),
             ("b m k", "n k", "b m n", ("F.linear({x}, {y})", "{x} @ {y}.t()", "torch.inner({x}, {y})"))]
_SIZES = {"b": ("batch_size B N", (4, 8)), "m": ("M rows queries", (32, 64, 128)),
          "k": ("K inner_dim depth", (32, 64, 128)), "n": ("N cols keys L", (64, 128, 256))}
# Reductions and the like, along any dimension. {d} is the dimension, {keep} its ", keepdim=True" or nothing.
# Of _ALONG the eight plainest are first.
_REDUCED = ("torch.sum({x}, dim={d}{keep})", "torch.mean({x}, dim={d}{keep})", "{x}.amax(dim={d}{keep})",
            "torch.max({x}, dim={d}{keep})[0]", "torch.min({x}, dim={d}{keep}).values", "{x}.max({d})[0]",
            "torch.logsumexp({x}, dim={d}{keep})", "torch.norm({x}, dim={d}{keep})",
            "torch.sum({x} * {x}, dim={d}{keep})", "torch.var({x}, dim={d}{keep})", "torch.std({x}, dim={d}{keep})",
            "torch.linalg.vector_norm({x}, dim={d}{keep})", "torch.linalg.norm({x}, dim={d}{keep})",
            "{x}.min(dim={d}{keep}).values", "{x}.norm(p=2, dim={d}{keep})", "{x}.mean({d}{keep})")
_FOUND = ("torch.argmax({x}, dim={d})", "torch.argmin({x}, dim={d})", "{x}.argmax({d})", "torch.max({x}, dim={d})[1]")
_ALONG = ("torch.softmax({x}, dim={d})", "F.log_softmax({x}, dim={d})", "F.normalize({x}, dim={d})",
          "torch.cumsum({x}, dim={d})", "{x}.cumsum({d})", "torch.cumprod({x}, dim={d})", "F.softmax({x}, dim={d})",
          "{x} / torch.mean(torch.abs({x}), dim={d}, keepdim=True)", "{x} - torch.mean({x}, dim={d}, keepdim=True)",
          "{x} / (torch.norm({x}, dim={d}, keepdim=True) + 1e-6)", "F.softmin({x}, dim={d})",
          "{x} / torch.sqrt(torch.mean({x} ** 2, dim={d}, keepdim=True) + 1e-5)", "{x} / torch.norm({x}, p='fro')",
          "torch.flip(torch.cumsum(torch.flip({x}, [{d}]), {d}), [{d}])",
          "F.normalize({x}, p=2.0, dim={d}, eps=1e-12)", "-({x}.exp() * {x}).sum(dim={d}, keepdim=True)")
# Formulas of one tensor, and of two.
_FORMULAS = ("0.5 * {x} * (1.0 + torch.tanh(0.79788456 * ({x} + 0.044715 * torch.pow({x}, 3))))",
             "{x} * torch.sigmoid(1.702 * {x})", "torch.where({x} > 0, {x}, 0.1 * {x})", "{x} / (1.0 + torch.abs({x}))",
             "torch.where({x} > {c}, {x}, {x} * {x})", "torch.log(1 + torch.exp(-torch.abs({x})))",
             "torch.clamp({x} + 3, 0, 6) / 6", "torch.sin({x}) * torch.cos({x})", "torch.exp(-{x} * {x})",
             "{x}.masked_fill({x} < {c}, 0.0)", "torch.maximum({x}, -{x} * {c})", "{x} * {x} + {c} * {x}",
             "torch.sqrt({x} * {x} + 1.0) - 1.0", "torch.exp2({x})", "torch.expm1({x})", "torch.log1p({x}.abs())",
             "torch.erf({x})", "torch.reciprocal({x}.abs() + {c})", "torch.sqrt(torch.abs({x}))",
             "torch.cos({x})", "F.celu({x}, alpha={c})", "F.softshrink({x}, {c})", "F.hardshrink({x}, lambd={c})",
             "F.threshold({x}, {c}, 0.0)", "torch.rsqrt({x}.abs() + {c})", "torch.pow({x}, 3)", "F.elu({x}, {c})",
             "({x} - {c}) * 2", "torch.log(torch.abs({x}) + {c})", "0.5 * ({x} + torch.tanh({x}))", "{x} * {c} ** -0.5",
             "torch.where({x}.abs() > {c}, {x}, torch.zeros_like({x}))", "torch.mul({x}, {c})", "torch.add({x}, {c})",
             "torch.div({x}, {c})", "{c} * torch.tanh({x} / {c})", "({x} + {c}).abs().sqrt()", "{x} / math.sqrt({c})",
             "F.softplus({x}, beta={c})", "torch.sign({x}) * torch.sqrt({x}.abs())", "F.elu({x}) ** 2", "3 * {x} - {c}",
             "{x} * F.relu6({x} + 3) / 6", "torch.sign({x}) * torch.sqrt(torch.abs({x}) + 1e-6)",
             "torch.exp(-{c} * {x})", "{x} / (1 + {x}.abs())",
             "torch.where({x} > {c}, {x}, {c} * torch.ones_like({x}))",
             "F.hardtanh({x}, min_val=-1, max_val=1)", "F.hardtanh({x}, min_val=0, max_val=6)")
_PAIRS = ("torch.maximum({x}, {y})", "torch.minimum({x}, {y})", "torch.where({y} > 0, {x}, {y})",
          "{x} * torch.sigmoid({y})", "torch.lerp({x}, {y}, 0.3)", "{c} * {x} + (1 - {c}) * {y}", "({x} - {y}).abs()",
          "{x}.masked_fill({y} > 0.5, 0.0)", "torch.logaddexp({x}, {y})", "torch.addcmul({x}, {y}, {y})",
          "torch.where({y} > 0, {x}, {c})", "torch.div({x}, {y}.abs() + {c})",
          "{c} * F.relu({x}) + {y}", "F.gelu({x}) + {c} * {y}", "torch.tanh({x} / {c}) * {y}")
# Layers with their arguments; of an argument its default ("" if it has none) and values.
_LAYERS = {"MaxPool{n}d": "kernel_size stride padding dilation", "AvgPool{n}d": "kernel_size stride padding",
           "Conv{n}d": "in_channels out_channels kernel_size stride padding dilation groups bias",
           "ConvTranspose{n}d": "in_channels out_channels kernel_size stride padding output_padding groups bias",
           "LPPool{n}d": "norm_type kernel_size stride", "GroupNorm": "num_groups num_channels eps affine",
           "BatchNorm{n}d": "num_features eps momentum affine", "InstanceNorm{n}d": "num_features eps affine",
           "CELU": "alpha", "ELU": "alpha", "LeakyReLU": "negative_slope", "Softmax": "dim",
           "Softshrink": "lambd", "Hardshrink": "lambd"}
_ARGUMENTS = {"kernel_size": ("", "1 2 3 3 4"), "norm_type": ("", "2"), "stride": ("1", "1 2 2 3"),
              "padding": ("0", "0 1 1"), "dilation": ("1", "1 2"), "dim": ("1", "0 -1"), "groups": ("1", "1 1 2"),
              "alpha": ("1.0", "0.5 1.5"), "bias": ("False", "True False"), "in_channels": ("", "2 3 3 8 16"),
              "out_channels": ("", "8 16 24 32"), "num_groups": ("", "1 2 4"), "num_channels": ("", "4 8 16"),
              "num_features": ("", "4 8 16"), "eps": ("1e-5", "1e-3 1e-6"), "momentum": ("0.1", "0.1 0.01"),
              "affine": ("True", "True False"), "output_padding": ("0", "0"), "lambd": ("0.5", "0.2 1.0"),
              "negative_slope": ("0.01", "0.1 0.2")}
# Activations inside a sequence of layers.
_ACTIVATIONS = ("nn.ReLU()", "nn.ReLU(inplace=True)", "nn.GELU()", "nn.SiLU()", "nn.Tanh()", "nn.LeakyReLU(0.1)",
                "nn.Hardswish()")
# What may be done with a result without computing anything new.
_REARRANGED = ("{x}.transpose(0, -1)", "torch.flip({x}, dims=[0])", "{x}.movedim(0, -1)", "{x}.roll(2, -1)",
               "torch.swapaxes({x}, 0, -1)", "{x}.transpose(0, -1).contiguous()", "torch.flip({x}, [-1])",
               "torch.tril({x})", "torch.triu({x})", "torch.triu({x}, diagonal=1)", "torch.sort({x}, dim=-1)[0]")
# The same elements in another shape: of a matrix, and of what has more dimensions.
_UNFOLDED = ("{x}.unsqueeze(1)", "torch.unsqueeze({x}, 1)", "{x}.squeeze()", "{x}.squeeze(-1)", "{x}.reshape(-1)")
_FLATTENED = ("torch.flatten({x}, 1)", "{x}.view({x}.size(0), -1)", "{x}.flatten(1)", "{x}.reshape({x}.shape[0], -1)",
              "{x}.view({x}.size(0), {x}.size(1), -1)", "{x}.squeeze(1)", "torch.flatten({x}, start_dim=1)")
# Two results of one call, and what is made of them.
_TWO = (("{a1}, {a2} = {x}.chunk(2, dim=1)", "{a1} * torch.sigmoid({a2})"), ("{a1}, _ = {x}.min(1)", "F.gelu({a1})"),
        ("{a1}, {a2} = torch.chunk({x}, 2, 1)", "F.silu({a2}) * {a1}"), ("{a1}, _ = torch.max({x}, dim=1)", "-{a1}"))
# Losses: (spelling, what the second tensor is made with). {rows} and {width} are the sizes.
_CLASSES, _NORMAL = "torch.randint(0, {width}, ({rows},))", "torch.randn({rows}, {width})"
_LOSSES = (("F.cross_entropy({x}, {y})", _CLASSES), ("F.cross_entropy({x} * {c}, {y})", _CLASSES),
           ("F.cross_entropy({x}, {y}, reduction='sum')", _CLASSES), ("F.huber_loss({x}, {y})", _NORMAL),
           ("F.kl_div(F.log_softmax({x}, dim=-1), {y}, reduction='batchmean')",
            "torch.rand({rows}, {width}).softmax(dim=-1)"),
           ("torch.mean(1 - F.cosine_similarity({x}, {y}, dim=1))", _NORMAL),
           ("F.cosine_similarity({x}, {y}, dim=1)", _NORMAL), ("torch.norm({x} - {y})", _NORMAL),
           ("F.triplet_margin_loss({x}, {y}, {y} * {c}, margin=0.5)", _NORMAL),
           ("F.smooth_l1_loss({x}, {y}) * {c}", _NORMAL), ("F.l1_loss({x}, {y}, reduction='sum')", _NORMAL),
           ("torch.mean(torch.clamp({c} - {x} * {y}, min=0))", "torch.randint(0, 2, ({rows}, {width})) * 2.0 - 1"),
           ("torch.sum(torch.clamp({c} - {x} * {y}, min=0))", "torch.randint(0, 2, ({width},)) * 2.0 - 1"),
           ("torch.mean(torch.abs({x} * {y} - {c}))", "torch.rand({width})"),
           ("F.mse_loss({x}, {y}, reduction='sum')", _NORMAL),
           ("F.binary_cross_entropy_with_logits({x}, {y}, reduction='sum')", "torch.rand({rows}, {width})"))


class AnyProblem(UserProblem):
    """A draft that can become a problem of any family."""

    def formula(self, of_two=False):
        """A formula written out, in place of one of torch's functions: x = torch.where(x > 0, x, 0.1 * x)

        of_two: with a second input, as in x = x * torch.sigmoid(other).
        """
        other = self.another_input() if of_two and len(self.inputs) == 1 else ""
        formula, value = self.r.choice(_PAIRS if other else _FORMULAS), self.pick("0.5", "0.25", "1.5", "2.0")
        given = self.formal and "{c}" in formula and len(self.inputs) == 1 and self.chance(0.4)  # an input of forward
        c = self.name("s alpha scalar value") if given else self.scalar("alpha scale c0", value)
        self.inputs += [(c, value)] if given else []
        self.line(formula, y=other, c=c)

    def lone(self):
        """One operator of the library, alone or with something around it, mostly what computes nothing new; after a
        convolution that the expert cannot write always a step that it can.

            x = torch.logaddexp(x, other)      or, on two lines,      x = x.roll(1, -1); return self.pool(x)
        Signatures are often the long ones that users write: def __init__(self, kernel_size: int, stride: int = 1, ...)
        """
        kind = self.pick(*["layer"] * 6, "call", "call", "call", "along", "along", "product", "loss", "layer norm")
        self.formal = kind == "layer" or self.chance(0.4)
        self.clutter = self.clutter and not self.formal
        if kind == "loss":
            return self.library_loss(alone=True)
        torch_only = kind == "layer" and self.layer_with_arguments()
        if kind != "layer":
            {"call": lambda: self.formulas(alone=True), "along": self.along_a_dimension, "layer norm": self.layer_norm,
             "product": lambda: self.product(alone=True)}[kind]()
        if self.formal and not torch_only and self.chance(0.4):  # something before it: the operator is what is returned
            x = self.inputs[0][0]
            self.forward.insert(0, self.pick(f"{x} = torch.flip({x}, [-1])", f"{x} = {x}.roll(1, -1)"))
        elif torch_only or self.chance(0.15 if self.formal else 0.5):
            self.pick(self.activation, self.scale, *[self.rearranged] * (0 if torch_only else 3))()

    def along_a_dimension(self):
        """A reduction, a norm, a softmax or a scan: x = torch.logsumexp(x, dim=1)"""
        self.plain_input(self.pick(2, 3, 4))
        self.line(*_ALONG, *_REDUCED, d=self.dimension("0", "1", "-1"), keep=self.pick("", ", keepdim=True"))

    def layer_norm(self):
        """Over one dimension or several, whose sizes the constructor gets in a tuple.

            self.ln = nn.LayerNorm(normalized_shape)      get_init_inputs: [(features, height, width)]
        """
        self.plain_input(self.pick(3, 4))
        sizes = [name for name, _ in self.shape][self.pick(1, 1, -2, -1):]
        name = self.name("normalized_shape norm_shape shape")
        self.args.append((name, "tuple", f"({', '.join(sizes)},)"))
        self.apply("ln norm layer_norm", f"LayerNorm({self.pick(name, f'normalized_shape={name}')})")

    def rearranged(self):
        """The elements in another order, or some of them."""
        self.line(*_REARRANGED)

    def layer_with_arguments(self):
        """A layer whose arguments are all the constructor's, the optional ones with the defaults that torch gives them.
        Returns whether it is a convolution, of which the expert writes none but depthwise ones.

            def __init__(self, kernel_size: int, stride: int = 1, padding: int = 0):
            self.pool = nn.AvgPool2d(kernel_size=kernel_size, stride=stride, padding=padding)
        """
        layer = self.pick(*["Conv{n}d"] * 8, *list(_LAYERS)[:4] * 2, *["LPPool{n}d"] * 5, *_LAYERS)
        n, given = self.pick(1, 2, 2, 3), self.pick(0, 1, 2, 9)  # spatial dimensions; how many options are passed
        dims, values = [self.const("batch_size batch_size N", self.pick(4, 8)), ""], []
        depthwise, apart = layer == "Conv{n}d" and self.chance(0.5), n == 2 and self.chance(0.15)
        for argument in _LAYERS[layer].split():
            default, choices = _ARGUMENTS[argument]
            value, sides = self.r.choice(choices.split()), argument in ("kernel_size", "stride", "padding", "dilation")
            if sides and apart:  # kernel_size_h: int, kernel_size_w: int, stride_h: int = 1, ...
                names = [self.const(f"{argument}_{side}", self.r.choice(choices.split())) for side in "hw"]
                self.args += [(name, f"int = {default}" if default else "int", name) for name in names]
                values.append(f"{argument}=({', '.join(names)})")
                continue
            if sides and n > 1 and self.chance(0.25):
                value = "(" + ", ".join(self.r.choice(choices.split()) for _ in range(n)) + ")"
                default = default and "(" + ", ".join([default] * n) + ")"
            kind = type(ast.literal_eval(value)).__name__
            passed = not default or given > 0
            given -= bool(default)
            if depthwise and argument in ("out_channels", "groups"):
                name = dims[1]
            else:
                name = self.const(argument, value) if passed else self.name(argument)
                self.args.append((name, f"{kind} = {default}" if default else kind, name if passed else ""))
            values.append(name if not (default or "=" in str(values)) and self.chance(0.5) else f"{argument}={name}")
            if argument in ("in_channels", "num_channels", "num_features"):
                dims[1] = name
        dims[1] = dims[1] or self.const("channels features", self.pick(4, 8))
        names = {1: ["length"], 2: ["height H", "width W"], 3: ["depth D", "height H", "width W"]}[n]
        dims += [self.const(name, self.pick(*{1: (128, 200), 2: (16, 24, 31), 3: (8, 9, 10)}[n])) for name in names]
        self.tensor_input(dims)
        self.apply(f"layer op conv{n}d module pool", f"{layer.format(n=n)}({', '.join(values)})")
        return "Conv" in layer and not depthwise

    def product(self, alone=False):
        """A product of two inputs in one of its arrangements, and a step or two that a kernel can do in its epilogue.

            x = torch.matmul(x, labels.T)
            x = x + self.constant
        """
        first, second, result, spellings = self.r.choice(_PRODUCTS)
        sizes = {}
        for name in dict.fromkeys(first.split() + second.split()):
            options, choices = _SIZES[name]
            n = self.r.choice(choices) if name == "b" else self.size(*choices)
            sizes[name] = self.const(options, n), n
        self.tensor_input([sizes[name][0] for name in first.split()], "torch.randn")
        other = self.tensor_input([sizes[name][0] for name in second.split()], "torch.randn")
        self.shape = [sizes[name] for name in result.split()]
        self.line(*spellings, y=other)
        for _ in range(0 if alone else self.pick(1, 1, 2, 3)):
            self.pick(self.formula, lambda: self.steps(1), self.scale, self.rearranged)()

    def any_dimension(self):
        """Reductions, arg-reductions, softmax, norms and scans along any dimension.

        What is reduced is not always last, so elements of a row may lie far apart in memory: the writer's sweeps.

            x = torch.cumprod(x, dim=1)      or      x = x / torch.mean(torch.abs(x), dim=0, keepdim=True)
            x = x.masked_fill(other > 0.5, 0.0)
        """
        self.plain_input(self.pick(2, 3, 3, 4))
        self.rows_last = len(self.shape) == 3
        for _ in range(self.pick(0, 1, 1, 2)):
            self.pick(self.formula, self.activation, self.scale)()
        d = self.dimension(*map(str, range(len(self.shape))), "-1")
        kind = self.r.random()
        if kind < 0.45:
            self.line(*_ALONG, d=d)
            return self.pick(self.formula, self.activation, self.scale, lambda: self.formula(True), lambda: None)()
        if kind < 0.6:
            return self.line(*_FOUND, d=d)
        self.line(*_REDUCED, d=d, keep=self.pick("", ", keepdim=True"))
        self.pick(self.activation, self.scale, self.formula, lambda: None)()

    def formulas(self, alone=False):
        """Formulas written out one after the other: a run of pointwise operators for one kernel.

            x = torch.minimum(x, other)
            x = torch.sqrt(x * x + 1.0) - 1.0
        """
        self.plain_input(self.pick(2, 2, 3, 4))
        for i in range(1 if alone else self.pick(1, 2, 2, 3)):
            self.formula(of_two=i == 0 and self.chance(0.4))
        self.steps(0 if alone else self.pick(0, 0, 1))

    def library_loss(self, alone=False):
        """A loss of torch.nn.functional, or one written out, of predictions and targets.

            x = F.logsigmoid(x)
            x = torch.mean(1 - F.cosine_similarity(x, labels, dim=1))
        """
        self.plain_input(2)
        before = not alone and self.chance(0.5)
        if before:
            self.pick(self.scale, self.activation, self.rearranged)()
        spelling, target = self.r.choice(_LOSSES)
        (rows, _), (width, _) = self.shape
        name = self.name("targets labels y other")
        self.inputs.append((name, target.format(rows=rows, width=width)))
        self.line(spelling, y=name, c=self.number().lstrip("-"))
        if not alone and (not before or self.chance(0.3)):
            self.scale()

    def mixture(self):
        """A layer, and then steps of every kind in any order.

        Batch norm is in training mode (KernelBench leaves modules in it), so a kernel has to compute its statistics.

            x = self.conv(x)
            x = self.avg_pool(x)
            x = x - torch.mean(x, dim=(2, 3), keepdim=True)
            x = self.batch_norm(x)
        """
        self.pick(self.linear, self.convolution, self.convolution)()
        self.rows_last = False
        if self.chance(0.3):
            self.save()
        for _ in range(self.pick(1, 2, 3, 4, 5)):
            if len(self.shape) < 2 or 1 in (self.shape[1][1], self.shape[-1][1]):  # after a reduction
                self.pick(*[self.activation, self.scale, self.clamp, self.formula] * 2, lambda: self.line(*_UNFOLDED),
                          lambda: self.line(*_REDUCED[:7], d="-1", keep=", keepdim=True"))()
            else:
                self.pick(*[lambda: self.steps(1)] * 6, self.any_norm, self.any_norm, self.centred, self.pooling,
                          self.reduction, self.formula, self.formula, self.gated, *[self.reshaped] * 4)()

    def gated(self):
        """A gate is kept beside what it is made of: gate = torch.sigmoid(x)  ...  x = gate * x + (1 - gate) * skip"""
        gate = self.name("gate g mask weight")
        self.forward.append(f"{gate} = {self.pick('torch.sigmoid', 'torch.tanh', 'F.softplus')}({self.x})")
        self.line(*["{g} * {x} + (1 - {g}) * {s}"] if self.saved else ["{x} * {g}", "{g} * {x}"], g=gate, s=self.saved)

    def reshaped(self):
        """Another shape, something along any dimension but the first, or a call with two results.

            x = x.view(x.size(0), -1)      x = torch.amin(x, dim=3, keepdim=False)      left, _ = torch.max(x, dim=1)
        """
        kind = self.pick("shape", "shape", "along", "two")
        if kind == "shape":
            self.line(*(_FLATTENED if len(self.shape) > 2 else _UNFOLDED))
        elif kind == "along":
            d = self.dimension(*map(str, range(1, len(self.shape))), "-1")
            self.line(*_REDUCED, *_ALONG[:8], d=d, keep=self.pick("", *[", keepdim=True"] * 2, ", keepdim=False"))
        else:
            (taken, then), a1, a2 = self.r.choice(_TWO), self.name("value left top"), self.name("gate right rest")
            self.forward.append(taken.format(x=self.x, a1=a1, a2=a2))
            self.line(then, a1=a1, a2=a2)
        self.shape, self.saved = [self.shape[0], ("1", 1)], None  # no longer known by name

    def any_norm(self):
        """What chains have for this shape, or batch norm: self.bn = nn.BatchNorm1d(out_features)"""
        spatial = len(self.shape) - 2
        batch_norm = f"BatchNorm{max(1, spatial)}d({self.inside(self.shape[1][0])})"
        self.pick(self.normalization if spatial else self.row_operator,
                  lambda: self.apply("bn norm batch_norm", batch_norm))()

    def centred(self):
        """x = x - torch.mean(x, dim=(2, 3), keepdim=True)"""
        d = self.pick("1", "-1", str(tuple(range(2, len(self.shape))) or 1))
        self.line("{x} - torch.mean({x}, dim={d}, keepdim=True)", "{x} - {x}.mean(dim={d}, keepdim=True)", d=d)

    def pooling(self):
        """Of a matrix over its features: x = self.pool(x.unsqueeze(1)).squeeze(1)"""
        if len(self.shape) > 2:
            return super().pooling()
        pool = self.attribute("pool max_pool avg_pool", f"nn.{self.pick('Max', 'Avg')}Pool1d({self.pick(2, 4)})")
        self.line(f"{pool}({{x}}.unsqueeze(1)).squeeze(1)")
        self.shape[1], self.saved = ("1", 1), None  # no longer known by name

    # ---- networks

    def sequence(self):
        """Layers in an nn.Sequential: a small perceptron or convolutional network.

            self.net = nn.Sequential(nn.Conv2d(channels, planes, 3, padding=1), nn.BatchNorm2d(planes), nn.GELU())
            x = self.net(x)
        """
        layers = []
        if self.chance(0.5):
            batch, width = self.const("batch_size N", self.pick(32, 64)), self.size(64, 128)
            i = self.arg("in_features input_size d_in", width)
            self.tensor_input([batch, i])
            for _ in range(self.pick(2, 2, 3)):
                o = self.arg("hidden width d_model out_features", self.size(32, 64, 128))
                layers += [f"nn.Linear({i}, {o})", self.pick(*_ACTIVATIONS)]
                layers += [f"nn.BatchNorm1d({o})"] * self.chance(0.2)
                i = o
            self.shape = [(batch, 0), (i, 2)]
        else:  # an image; after it only the number of channels is known by name
            batch = self.const("batch_size B", self.pick(2, 4))
            side = self.const("side size", self.pick(8, 16))
            i = self.arg("in_channels channels", self.pick(3, 4, 8))
            self.tensor_input([batch, i, side, side])
            for _ in range(self.pick(1, 2, 3)):
                o = self.arg("planes out_channels width", self.pick(4, 8, 16))
                kernel, bias = self.pick("3", "kernel_size=3", "1"), self.pick("", "", ", bias=False")
                layers.append(f"nn.Conv2d({i}, {o}, {kernel}, padding=1{bias})")
                layers += [f"nn.BatchNorm2d({o})"] * self.chance(0.6) + [self.pick(*_ACTIVATIONS)]
                layers += [f"nn.{self.pick('Max', 'Avg')}Pool2d(2)"] * self.chance(0.2)
                i = o
            self.shape = [(batch, 0), (i, 0), ("", 0), ("", 0)]
        self.rows_last = False
        inner = ", ".join(layers)
        if self.chance(0.5):  # a layer to a line
            inner = "".join(f"\n            {layer}," for layer in layers) + "\n        "
        self.apply("net layers features body model", f"Sequential({inner})")
        self.steps(self.pick(0, 1), opaque=False)
        if self.chance(0.3):
            self.formula()

    def block(self, build):
        """A class of its own, whose forward `build(draft)` drafts; this draft goes on with a layer of it."""
        # The block is a draft of its own, which shares this one's names and constants and starts with its shape.
        inner = type(self)(self.r.random(), self.clutter)
        inner.used, inner.consts, inner.shape, inner.dims, inner.x = self.used, self.consts, self.shape, self.dims, "x"
        build(inner)
        inner.nest()
        # What its constructor needs is passed on: an argument of the block is one of the model, too.
        self.args += [arg for arg in inner.args if arg[0] not in [name for name, _, _ in self.args]]
        inner.inputs = [("x", "")]
        name = self.pick("Block", "ResidualBlock", "Layer", "Gate", "Branch", "Unit", "Mixer", "FeedForward")
        while f"class {name}(" in "".join(self.classes):
            name += self.pick("A", "B", "2", "V2")
        self.classes.append("\n".join(write_class(inner, name)))
        by_name = not all([self.chance(0.8) for _ in inner.args])  # a chance each, all drawn
        passed = ", ".join(f"{arg}={arg}" if by_name else arg for arg, _, _ in inner.args)
        layer = self.attribute("block layer stage unit block1", f"{name}({passed})")
        self.line(f"{layer}({{x}})")

    def convolution_block(self, d):
        """Convolutions with norm and activation, and what they started from.

            identity = x
            x = self.bn1(self.conv1(x))      on two lines, once or twice
            x = torch.relu(x + identity)     on two lines
        """
        channels = d.inside(d.shape[1][0])
        d.saved = d.name("identity residual skip shortcut")
        d.forward.append(f"{d.saved} = {d.x}")
        for _ in range(self.pick(1, 2, 2)):
            d.apply("conv1 conv2 conv", f"Conv2d({channels}, {channels}, 3, padding=1{self.pick('', ', bias=False')})")
            if d.chance(0.7):
                d.apply("bn1 bn2 norm", f"BatchNorm2d({channels})")
            d.activation()
        d.line(f"{{x}} {self.pick('+', '+', '*')} {d.saved}")
        d.activation()

    def squeeze_excite(self, d):
        """Weights for the channels, from their means through two layers.

            w = torch.mean(x, dim=[2, 3])
            w = torch.sigmoid(self.fc2(torch.relu(self.fc1(w))))      on two lines
            x = x * w[:, :, None, None]
        """
        channels, n = d.shape[1]
        channels, few = d.inside(channels), d.arg("reduced squeezed bottleneck", max(2, n // 4))
        w = d.name("w s weights scale")
        one, two = (d.attribute("fc1 fc2 down up", f"nn.Linear({a}, {b})")
                    for a, b in ((channels, few), (few, channels)))
        mean = self.pick(f"{d.x}.mean(dim=(2, 3))", f"torch.mean({d.x}, dim=[2, 3])")
        d.forward += [f"{w} = {mean}", f"{w} = {self.pick('torch.relu', 'F.silu')}({one}({w}))",
                      f"{w} = torch.sigmoid({two}({w}))", f"{d.x} = {d.x} * {w}[:, :, None, None]"]
        d.activation()

    def attention_block(self, d):
        """Attention of one head, written out, with a residual step.

            scores = q @ k2.transpose(-2, -1) * 0.125      q = self.to_q(x) and so on
            scores = torch.softmax(scores, dim=-1)
            x = x + scores @ v
        """
        width = d.inside(d.shape[-1][0])
        q, k, v = names = [d.name(name) for name in ("q", "k2", "v")]
        made = f"nn.Linear({width}, {width}{self.pick('', ', bias=False')})"
        layers = [d.attribute(f"to_{name} {name}_proj", made) for name in names]
        d.forward += [f"{name} = {layer}({d.x})" for name, layer in zip(names, layers)]
        d.init.append("self.factor = 0.2")
        scores = d.name("att scores weights")
        d.forward += [f"{scores} = {q} @ {k}.transpose(-2, -1) * {self.pick('0.125', '32 ** -0.5', 'self.factor')}",
                      f"{scores} = {self.pick('torch.softmax', 'F.softmax')}({scores}, dim=-1)",
                      f"{d.x} = {d.x} + {scores} @ {v}"]
        if self.chance(0.5):
            d.apply("norm ln", f"LayerNorm({width})")

    def feed_forward_block(self, d):
        """Two layers with an activation between them, and a residual step.

            skip = x
            x = self.fc2(F.gelu(self.fc1(x)))      a line each, with a layer norm before them or without
            x = x + skip
        """
        width, n = d.shape[-1]
        width, hidden = d.inside(width), d.arg("hidden_dim d_ff inner_dim", 2 * n)
        skip = d.name("skip res shortcut")
        d.forward.append(f"{skip} = {d.x}")
        if d.chance(0.5):
            d.apply("norm ln", f"LayerNorm({width})")
        d.apply("fc1 up_proj lin1", f"Linear({width}, {hidden})")
        d.activation()
        d.apply("fc2 down_proj lin2", f"Linear({hidden}, {width})")
        d.line(f"{{x}} + {skip}")

    def several_classes(self):
        """One to three blocks, each a class, and what stands around them.

            x = self.block(x)      self.block = ResidualBlock(channels), a class in the same file
        """
        if self.chance(0.6):  # blocks of an image, else of a sequence
            batch, n = self.const("batch_size B", self.pick(2, 4)), self.pick(4, 8, 16)
            side, channels = self.const("side height size", self.pick(8, 16)), self.arg("channels dim", n)
            self.tensor_input([batch, channels, side, side])
            self.shape = [(batch, 0), (channels, n), ("", 0), ("", 0)]
            kinds = [self.convolution_block, self.squeeze_excite]
        else:
            batch, n = self.const("batch_size B", self.pick(4, 8)), self.pick(32, 64)
            tokens, width = self.const("seq_len tokens", self.pick(16, 32)), self.arg("d_model embed_dim", n)
            self.tensor_input([batch, tokens, width])
            self.shape, kinds = [(batch, 0), (tokens, 0), (width, n)], [self.attention_block, self.feed_forward_block]
        self.rows_last = len(self.shape) == 3
        for _ in range(self.pick(1, 1, 2, 3)):
            self.block(self.r.choice(kinds))
            if self.chance(0.4):
                self.steps(1, opaque=False)
        if self.chance(0.3):
            self.formula()

"""The operators that follow a problem's head, each in the spellings that real problems use.

A method here draws one operator (or a few that belong together) and appends it to the draft: a line of the forward
pass and, where it needs them, lines of the constructor and module-level constants. `Chain.steps` draws pointwise ones;
reductions, rows and normalisations are placed by heads.py. What `draft.steps(3)` may add:

    x = F.leaky_relu(x, self.negative_slope)
    x = x + self.bias
    x = x * 0.5
"""

from synthetic.draft import Draft
from synthetic.operators import POINTWISE

# What the operand of x * s, x / s, ... is called: a number; a parameter that is broadcast.
_SCALAR_NAMES = {"*": "scale scaling_factor multiplier factor gain", "/": "divisor temperature scale",
                 "+": "offset shift add_value constant", "-": "subtract_value offset margin"}
_PARAM_NAMES = {"*": "weight multiplier gain scale", "+": "bias extra_bias add_bias shift",
                "-": "subtract sub_bias centre"}


class Chain(Draft):
    """A draft that can append operators."""

    def steps(self, count, opaque=True):
        """`count` drawn operators; opaque: some of them may be such as no kernel of the expert covers."""
        for _ in range(count):
            kinds = [self.activation] * 5 + [self.leaky, self.clamp] + [self.scale] * 3 + [self.parameter] * 3
            kinds += [self.residual] * (2 if self.saved else 0) + [self.opaque] * (self.clutter and opaque)
            kinds += [self.r.choice([self.buffer, self.soft_cap])] * (self.clutter and self.chance(0.5))
            self.r.choice(kinds)()

    # ---- pointwise operators

    def activation(self, name=None):
        """A row of the table of pointwise operators, as a function or as a layer.

            x = F.softplus(x)      or      self.act = nn.Sigmoid()  ...  x = self.act(x)
        """
        if name is None:
            common = self.chance(0.7)
            name = self.r.choice([name for name, operator in POINTWISE.items()
                                  if operator.calls and (operator.common or not common)])
        operator = POINTWISE[name]
        if operator.layer and self.chance(0.4):
            return self.apply(f"{name} act activation nonlin", self.pick(operator.layer))
        self.line(self.r.choice(operator.calls))

    def leaky(self):
        """Leaky ReLU or ELU, whose slope is an argument.

            x = F.leaky_relu(x, self.negative_slope)      or      self.lrelu = nn.LeakyReLU(negative_slope=slope)
        """
        slope = self.pick("0.01", "0.1", "0.2", "0.05")
        if self.chance(0.4):
            alpha = self.arg("negative_slope slope alpha", slope, "float")
            made = self.pick("LeakyReLU({})", "LeakyReLU({})", "LeakyReLU(negative_slope={})", "ELU({})",
                             "ELU(alpha={})")
            return self.apply("leaky_relu act lrelu elu", made.format(alpha))
        call = self.pick("leaky_relu({x}, {a})", "leaky_relu({x}, {a})", "leaky_relu({x}, negative_slope={a})",
                         "elu({x}, {a})", "elu({x}, alpha={a})", "elu({x})", "leaky_relu({x})")
        self.line(f"F.{call}", a=self.scalar("negative_slope alpha", slope) if "{a}" in call else "")

    def clamp(self):
        """A lower bound, two bounds, or one for both signs.

            x = torch.clamp(x, min=-1.0, max=self.upper)      or      self.hardtanh = nn.Hardtanh(-1.0, 1.0)
        """
        low, high = self.pick(("-1.0", "1.0"), ("0.0", "1.0"), ("-2.0", "2.0"), ("-0.5", "0.5"), ("0.0", "6.0"))
        if self.chance(0.12):
            limit = self.scalar("limit bound max_abs", high)
            if self.chance(0.4):
                low, high = self.pick((low, high), (limit, "6.0") if float(low) < 0 else (low, high))
                bounds = self.pick("{}, {}", "min_val={}, max_val={}").format(low, high)
                return self.apply("hardtanh clip clamp", f"Hardtanh({bounds})")
            return self.line("torch.clamp({x}, min=-{limit}, max={limit})", "torch.clamp({x}, -{limit}, {limit})",
                             limit=limit)
        low = self.scalar("min_value lower min_val clamp_min", low)
        if self.chance(0.3):
            return self.line("torch.clamp({x}, min={low})", low=low)
        high = self.scalar("max_value upper max_val clamp_max", high)
        self.line("torch.clamp({x}, {low}, {high})", "torch.clamp({x}, min={low}, max={high})",
                  "F.hardtanh({x}, {low}, {high})", "{x}.clamp({low}, {high})", low=low, high=high)

    def scale(self):
        """Arithmetic with a number: a literal, an attribute, an input of forward or a parameter.

            x = x * self.scaling_factor      or      x = 0.5 * x
        """
        op, value = self.pick("*", "*", "/", "+", "-"), self.number()
        value = "2.0" if op == "/" and abs(float(value)) < 0.2 else value
        operand = self.scalar(_SCALAR_NAMES[op], value)
        if self.clutter and self.chance(0.1) and len(self.inputs) == 1:  # a number among the inputs of forward
            operand = self.name("s alpha factor")
            self.inputs.append((operand, str(abs(float(value)))))
        elif self.clutter and self.chance(0.2):
            operand = self.attribute(_SCALAR_NAMES[op], f"nn.Parameter(torch.tensor({float(value)}))")
        if op != "/" and self.chance(0.12):
            return self.line(f"{operand} {op} {{x}}")
        negated = op == "*" and operand.startswith("self") and self.chance(0.05)
        self.line(f"{{x}} {op} {'-' if negated else ''}{operand}")

    def parameter(self):
        """A broadcast parameter over the channel dimension (dim 1; the last one for 3-D rows).

            self.bias = nn.Parameter(torch.randn(bias_shape) * 0.3)  ...  x = x + self.bias
        """
        op = self.pick("+", "+", "*", "-")
        dim = len(self.shape) - 1 if len(self.shape) == 3 and self.rows_last else 1
        channels, trailing = self.shape[dim][0], len(self.shape) - 1 - dim
        shape = f"({channels}{', 1' * trailing or ','})"
        if self.chance(0.3) and dim == 1 and len(self.shape) == 4:
            shape = f"(1, {shape[1:]}"
        names = _PARAM_NAMES[op]
        if self.chance(0.65):
            shape = self.arg(f"{names.replace(' ', '_shape ')}_shape param_shape", shape, "tuple")
        else:
            self.inside(channels)
        make = self.pick("randn", "randn", "rand", "ones", "zeros" if op != "*" else "rand")
        spread = ""
        if self.chance(0.3):
            spread = self.pick(" * 0.1", " * 0.3", " + 0.5", " - 0.5", f" * {self.number()}", f" + {self.number()}")
        self.line(f"{{x}} {op} {self.attribute(names, f'nn.Parameter(torch.{make}({shape}){spread})')}")

    def buffer(self):
        """A tensor of the model that is not a parameter, over the last dimension.

            self.register_buffer("positions", torch.linspace(0.5, 1.5, width))  ...  x = x * self.positions
        """
        width, n = self.shape[-1]
        if not width or n == 1:
            return self.parameter()
        name = self.name("counts positions steps weights table")
        width = self.inside(width)
        made = self.pick("arange(1, {w} + 1).float()", "arange({w}) * 0.01", "linspace(0.5, 1.5, {w})", "ones({w})",
                         f"full(({{w}},), {self.pick('0.5', '2.0')})").format(w=width)
        quote = self.pick('"', "'")
        self.init.append(f"self.register_buffer({quote}{name}{quote}, torch.{made})")
        op = self.pick("*", "+", "/" if "arange(1" in made else "-")
        self.line(f"{{x}} {op} self.{name}")

    def soft_cap(self):
        """cap * tanh(x / cap)."""
        cap = self.scalar("cap limit bound", self.pick("2.0", "5.0", "3.0", "30.0"))
        self.line(f"{{x}} / {cap}")
        self.activation("tanh")
        self.line(f"{{x}} * {cap}", f"{cap} * {{x}}")

    def save(self):
        """Keep the current tensor under another name, for a residual step later."""
        self.saved = self.name("identity residual skip original shortcut")
        self.forward.append(f"{self.saved} = {self.x}")

    def residual(self):
        """x = x + identity, with what `save` kept or another input."""
        self.line(f"{{x}} {self.pick('+', '+', '*')} {self.saved}")

    def residual_input(self):
        """Another input, for residual steps; now and then it passes through a function of its own first."""
        self.saved = self.another_input()
        if self.clutter and self.chance(0.4):
            function = self.pick("torch.sigmoid({})", "torch.tanh({})", "F.silu({})", "F.relu({})", "F.gelu({})")
            self.forward.append(f"{self.saved} = {function.format(self.saved)}")
            self.activation()
            self.residual()

    def opaque(self):
        """An operator that the expert leaves to torch, or whose rows only its sweeps can take over.

            x = torch.flip(x, dims=[1])      or      x = torch.max(x, dim=1, keepdim=True).values
        """
        calls = ["F.dropout({x}, p=0.0)", "{x}.clone()",
                 f"{{x}} - {{x}}.mean(dim={self.pick('1', '-1', '0')}, keepdim=True)"]
        if len(self.shape) > 2:
            calls += ["F.softmax({x}, dim=1)", "torch.flip({x}, dims=[1])"]
            if self.shape[1][1] > 1 and self.saved is None:
                self.shape[1] = ("1", 1)
                calls = [f"torch.{f}({{x}}, dim=1, keepdim=True){self.pick('[0]', '.values')}" for f in ("max", "min")]
                calls += ["torch.logsumexp({x}, dim=1, keepdim=True)", "torch.mean({x}, dim=1, keepdim=True)",
                          "{x}.sum(dim=1, keepdim=True)"]
        self.line(*calls)

    # ---- reductions, rows, normalisations

    def dimension(self, *values) -> str:
        """The last dimension as an argument: a literal, or now and then a constructor argument kept on self."""
        value = self.pick(*values)
        return self.kept("dim axis reduce_dim", value) if self.chance(0.12) else value

    def reduction(self):
        """A reduction over the last dimension (or over all spatial ones); it ends the chain's layout.

            x = torch.logsumexp(x, dim=-1, keepdim=True)
            high = torch.amax(x, dim=1), low = torch.amin(x, dim=1), x = high - low      now and then, a line each
        """
        nd, self.saved = len(self.shape), None  # what was saved does not fit any more
        if nd > 3:
            dims = self.pick("[2, 3]", "(2, 3)", "(2, 3)", "(-2, -1)", "[-2, -1]")
            dims = dims.replace("2, 3", "2, 3, 4").replace("-2,", "-3, -2,") if nd == 5 else dims
            keep, op = self.chance(0.5), self.pick("torch.mean", "torch.mean", "torch.sum", "torch.amax")
            self.line(f"{op}({{x}}, dim={dims}{', keepdim=True' if keep else ''})")
            self.shape = self.shape[:2] + [("1", 1)] * ((nd - 2) * keep)
            return
        dim, keep = self.dimension("-1", "-1", str(nd - 1)), self.chance(0.6)
        tail = f"dim={dim}, keepdim=True)" if keep else f"dim={dim})"
        op = self.pick("sum", "mean", "amax", "amin", "logsumexp", "logsumexp")
        if self.chance(0.1):  # two of them from the same tensor
            names = self.name("high top upper total a1"), self.name("low bottom lower average a2")
            ops = self.pick(("amax", "amin"), ("sum", "amax"), ("mean", "amin"), ("amax", "mean"))
            self.forward += [f"{name} = torch.{op}({self.x}, {tail}" for name, op in zip(names, ops)]
            self.line(f" {self.pick('-', '-', '+', '*')} ".join(names))
        else:
            self.line(f"torch.{op}({{x}}, {tail}", f"{{x}}.{op}({tail}")
        self.shape = self.shape[:-1] + ([("1", 1)] if keep else [])

    def row_operator(self):
        """Softmax, cumulative sums, layer norm and other norms over the last dimension.

            x = torch.log_softmax(x, dim=-1)
            x = x / torch.sqrt(torch.mean(x ** 2, dim=-1, keepdim=True) + self.eps)
        """
        width = self.shape[-1][0]
        kind = self.pick("softmax", "softmax", "log_softmax", "layer_norm", "layer_norm", "rms", "rms", "l2", "cumsum",
                         "share")
        if kind == "layer_norm":
            width = self.arg("normalized_shape norm_shape width", width) if self.chance(0.5) else self.inside(width)
            eps = f", eps={self.arg('eps epsilon norm_eps', '1e-5', 'float')}" if self.chance(0.15) else ""
            return self.apply("norm ln layer_norm", f"LayerNorm({width}{eps})")
        dim = self.dimension("-1", str(len(self.shape) - 1))
        if kind in ("softmax", "log_softmax"):
            if self.chance(0.3):
                return self.apply(f"{kind} prob", f"{kind.title().replace('_', '')}(dim={dim})")
            self.line(f"{self.pick('torch', 'F')}.{kind}({{x}}, dim={dim})")
        elif kind == "rms":
            eps = self.scalar("eps epsilon", self.pick("1e-5", "1e-6"))
            self.line("{x} / torch.sqrt(torch.mean({x} ** 2, dim={dim}, keepdim=True) + {eps})",
                      "{x} * torch.rsqrt({x}.pow(2).mean(dim={dim}, keepdim=True) + {eps})",
                      "{x} * torch.rsqrt(torch.mean({x} * {x}, dim={dim}, keepdim=True) + {eps})", dim=dim, eps=eps)
        elif kind == "l2":
            self.line("F.normalize({x}, dim={dim})", "F.normalize({x}, p=2, dim={dim})",
                      "{x} / torch.norm({x}, dim={dim}, keepdim=True)",
                      "{x} / torch.norm({x}, p=2, dim={dim}, keepdim=True)", dim=dim)
        elif kind == "share":
            self.activation(self.pick("sigmoid", "softplus", "exp", "square"))
            self.line("{x} / torch.sum({x}, dim={dim}, keepdim=True)", "{x} / {x}.sum(dim={dim}, keepdim=True)",
                      "{x} / (torch.sum({x}, dim={dim}, keepdim=True) + {eps})", dim=dim, eps=self.pick("1e-6", "1e-5"))
        else:
            self.line(f"torch.cumsum({{x}}, dim={dim})")

    def normalization(self):
        """Group, instance or batch norm over the channels of a convolution's output.

            self.group_norm = nn.GroupNorm(num_groups, out_channels)  ...  x = self.group_norm(x)
        """
        (channels, n), nd = self.shape[1], len(self.shape) - 2
        kind = self.pick("group", "group", "instance", "batch")
        if kind == "group":
            groups = self.r.choice([g for g in (1, 2, 4, 8) if n % g == 0])
            layer = f"GroupNorm({self.arg('num_groups groups n_groups', groups)}, {channels})"
        elif kind == "instance":
            layer = f"InstanceNorm{nd}d({channels}{self.pick('', '', ', affine=True')})"
        else:
            layer = f"BatchNorm{nd}d({channels})"
        self.apply(f"norm {kind}_norm {kind[0]}n", layer)

    def pooling(self):
        """Halves the spatial dimensions: self.pool = nn.MaxPool2d(kernel_size=2)  ...  x = self.pool(x)"""
        k = self.arg("pool_size pool_kernel pool_kernel_size", 2) if self.chance(0.5) else "2"
        kind = self.pick("Max", "Avg")
        k = self.pick(k, k, f"kernel_size={k}", f"kernel_size={k}, stride={k}", f"{k}, stride={k}")
        self.apply(f"pool {kind.lower()}pool", f"{kind}Pool{len(self.shape) - 2}d({k})")
        self.saved = None  # it fits no longer

    def another_linear(self, width=None):
        """One more layer; what was saved does not fit any more. width: (expression, size) of the output, or drawn."""
        n = self.size(64, 128, 256) if width is None else width[1]
        i = self.inside(self.shape[-1][0])
        o = width[0] if width else self.arg("hidden2 out_dim classes width2 d_model", n)
        bias = ", bias=False" if self.chance(0.15) else ""
        self.apply("fc1 fc2 fc3 linear1 linear2 out head proj1 proj2 down up lin1 lin2", f"Linear({i}, {o}{bias})")
        self.shape, self.saved = self.shape[:-1] + [(o, n)], None

"""Synthesised training problems: chains of up to 5 operators after a head, as CUDA Agent makes them (PAPER section 5).

What varies: the head, the chain, the shapes, how each operator is spelled, names (real and nonsense), and in wording.py
layout, docstrings, comments, constructor styles. A small model learns to copy signatures and initialisers only if they
vary widely.

    synthesize(seed)        one problem, a pure function of its seed
    training_tasks(seed)    an endless stream of those that are fit to train on: they run, are deterministic, finite and
                            not constant, and are nowhere near an evaluation problem
"""

import itertools
import keyword
import random

import torch

from synthetic.wording import SYLLABLES, WORDS, write_problem
from tasks import Task, evaluation_fingerprints, unfit

# operator -> (functional spellings, module spellings). {x} is the tensor.
POINTWISE = {"relu": (["torch.relu({x})", "F.relu({x})", "{x}.relu()", "torch.clamp({x}, min=0.0)"], ["nn.ReLU()"]),
             "sigmoid": (["torch.sigmoid({x})", "torch.sigmoid({x})", "{x}.sigmoid()"], ["nn.Sigmoid()"]),
             "tanh": (["torch.tanh({x})", "F.tanh({x})", "{x}.tanh()"], ["nn.Tanh()"]),
             "gelu": (["F.gelu({x})"], ["nn.GELU()"]),
             "gelu_tanh": (["F.gelu({x}, approximate='tanh')"], ["nn.GELU(approximate='tanh')"]),
             "silu": (["F.silu({x})", "{x} * torch.sigmoid({x})", "torch.sigmoid({x}) * {x}"], ["nn.SiLU()"]),
             "mish": (["F.mish({x})", "{x} * torch.tanh(F.softplus({x}))"], ["nn.Mish()"]),
             "softplus": (["F.softplus({x})"], ["nn.Softplus()"]),
             "hardswish": (["F.hardswish({x})"], ["nn.Hardswish()"]),
             "hardsigmoid": (["F.hardsigmoid({x})"], ["nn.Hardsigmoid()"]),
             "softsign": (["F.softsign({x})", "{x} / (1 + torch.abs({x}))"], ["nn.Softsign()"]),
             "selu": (["F.selu({x})", "torch.selu({x})"], ["nn.SELU()"]), "relu6": (["F.relu6({x})"], ["nn.ReLU6()"]),
             "logsigmoid": (["F.logsigmoid({x})"], ["nn.LogSigmoid()"]), "abs": (["torch.abs({x})", "{x}.abs()"], []),
             "square": (["torch.square({x})", "{x} ** 2", "torch.pow({x}, 2)", "{x} * {x}"], []),
             "exp": (["torch.exp(-{x})", "torch.exp({x} * 0.1)"], []), "sin": (["torch.sin({x})"], []),
             "neg": (["-{x}", "torch.neg({x})"], [])}
_COMMON = ["relu", "sigmoid", "tanh", "gelu", "silu", "mish", "softplus", "hardswish"]
_SCALAR_NAMES = {"*": ["scale", "scaling_factor", "multiplier", "factor", "gain"],
                 "/": ["divisor", "temperature", "scale"],
                 "+": ["offset", "shift", "add_value", "constant"], "-": ["subtract_value", "offset", "margin"]}
_PARAM_NAMES = {"*": ["weight", "multiplier", "gain", "scale"], "+": ["bias", "extra_bias", "add_bias", "shift"],
                "-": ["subtract", "sub_bias", "centre"]}


# Variables of the expert's kernels, which a problem's own may not hide.
_KERNEL_NAMES = {"idx", "mask", "offs", "start", "cols", "rows", "n", "m", "k", "i", "a", "b", "d", "e", "u", "t",
                 "inner", "acc", "mean", "rstd", "total", "square", "tl", "triton", "cdiv", "fused", "row", "norm",
                 "loss", "matmul"}


class _Draft:
    """One problem while it is being written. `shape` tracks the current tensor: a list of (expression, size)."""

    def __init__(self, seed, clutter):
        self.r = random.Random(seed)
        self.clutter = clutter
        self.args, self.init, self.consts, self.forward, self.inputs = [], [], [], [], []
        self.defaults = []  # constructor arguments that nobody passes: (name, value)
        self.used = {"self", "torch", "nn", "F", "Model", "math"} | _KERNEL_NAMES | set(dir(torch.nn.Module))
        self.x = self.r.choice(["x"] * 8 + ["inputs", "inp", "A", "feats", self.nonsense(), self.nonsense()])
        self.x = "x" if self.x in self.used or keyword.iskeyword(self.x) else self.x
        self.used.add(self.x)
        self.rename = self.r.choice([0, 0, 0, 0.1, 0.4, 1])
        self.ops = 0

    def chance(self, p):
        return self.r.random() < p

    def pick(self, *options):
        return self.r.choice(options)

    def nonsense(self):
        """An identifier that means nothing here: syllables, words of prose, or letters."""
        kind = self.r.random()
        if kind < 0.4:
            return "_".join(self.r.choice(SYLLABLES) for _ in range(self.r.randint(1, 3)))
        if kind < 0.75:
            return "_".join(self.r.choice(WORDS) for _ in range(self.r.choice([1, 1, 2]))) \
                + self.pick("", "", "", "1", "2")
        if kind < 0.85:
            return "".join(self.r.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(self.r.randint(3, 12)))
        return "".join(self.r.choice("bcdfghjklmnprstvwz") + self.r.choice("aeiou")
                       for _ in range(self.r.randint(1, 4))) + self.pick("", "", "t", "ns")

    def name(self, options):
        """An unused identifier: one of the usual ones, or now and then nonsense."""
        for _ in range(5):
            name = self.nonsense() if self.chance(0.3 if self.clutter else 0.15) else self.r.choice(options)
            name += self.pick("1", "2", "0", "_1") if self.clutter and self.chance(0.06) else ""
            if name not in self.used and not keyword.iskeyword(name):
                break
        while name in self.used or keyword.iskeyword(name):
            name += "_" + self.r.choice(SYLLABLES)
        self.used.add(name)
        return name

    def const(self, options, value):
        name = self.name(options)
        self.consts.append((name, str(value)))
        return name

    def arg(self, options, value, annotation):
        """A constructor argument with the module-level constant that feeds it; returns its name."""
        name = self.const(options, value)
        self.args.append((name, annotation, name))
        return name

    def inside(self, name):
        """Make a module-level constant known to the constructor, so that `ModelNew` can be built from its arguments."""
        if name.isidentifier() and name not in [arg for arg, _, _ in self.args]:
            self.args.append((name, "int", name))
        return name

    def layer(self, options, constructor):
        name = self.name(options)
        self.init.append(f"self.{name} = {constructor}")
        return f"self.{name}"

    def number(self):
        if self.clutter and self.chance(0.08):  # digits to be copied one by one
            value = self.r.uniform(0.2, 3)
            return str(value if self.chance(0.4) else round(value, self.r.randint(3, 6)))
        return self.r.choice(["0.1", "0.5", "1.5", "2.0", "3.0", "0.25", "0.7", "-0.5", "1.2", "4.0", "2", "3",
                              str(round(self.r.uniform(-3, 4), 2) or 0.5)])

    def scalar(self, options, value):
        """A scalar operand: a constructor argument kept on self, a fixed attribute, or a literal."""
        kind = self.r.random()
        if kind < 0.55:
            name = self.arg(options, value, "float")
            self.init.append(f"self.{name} = {name}")
            return f"self.{name}"
        if kind < 0.7:
            return self.layer(options, value)
        return value

    def line(self, expression):
        """The next operator; mostly the result keeps the variable's name."""
        if self.chance(self.rename):
            self.x = self.name(["out", "y", "h", "z", "hidden", "logits", "scores", "features", "result"])
        self.forward.append(f"{self.x} = {expression}")
        self.ops += 1

    # ---- chain steps

    def activation(self, name=None):
        name = name or self.r.choice(_COMMON if self.chance(0.7) else list(POINTWISE))
        functional, modules = POINTWISE[name]
        if modules and self.chance(0.4):
            layer = self.layer([name, "act", "activation", "nonlin"], self.r.choice(modules))
            return self.line(f"{layer}({self.x})")
        self.line(self.r.choice(functional).replace("{x}", self.x))

    def leaky(self):
        slope = self.pick("0.01", "0.1", "0.2", "0.05")
        if self.chance(0.4):
            alpha = self.arg(["negative_slope", "slope", "alpha"], slope, "float")
            made = self.pick("LeakyReLU({})", "LeakyReLU({})", "LeakyReLU(negative_slope={})", "ELU({})",
                             "ELU(alpha={})")
            layer = self.layer(["leaky_relu", "act", "lrelu", "elu"], f"nn.{made.format(alpha)}")
            return self.line(f"{layer}({self.x})")
        called = self.pick("leaky_relu({}, {})", "leaky_relu({}, {})", "leaky_relu({}, negative_slope={})",
                           "elu({}, {})",
                           "elu({}, alpha={})", "elu({})", "leaky_relu({})")
        value = self.scalar(["negative_slope", "alpha"], slope) if called.count("{}") == 2 else ""
        self.line(f"F.{called.format(self.x, value)}")

    def opaque(self):
        """An operator that no kernel of the expert covers."""
        x, nd = self.x, len(self.shape)
        choices = [f"F.dropout({x}, p=0.0)", f"{x}.clone()",
                   f"{x} - {x}.mean(dim={self.pick('1', '-1', '0')}, keepdim=True)"]
        if nd > 2:
            choices += [f"F.softmax({x}, dim=1)", f"torch.flip({x}, dims=[1])"]
            if self.shape[1][1] > 1 and self.saved is None:
                self.shape[1] = ("1", 1)
                choices = [f"torch.max({x}, dim=1, keepdim=True){self.pick('[0]', '.values')}",
                           f"torch.min({x}, dim=1, keepdim=True){self.pick('[0]', '.values')}",
                           f"torch.logsumexp({x}, dim=1, keepdim=True)", f"torch.mean({x}, dim=1, keepdim=True)",
                           f"{x}.sum(dim=1, keepdim=True)"]
        self.line(self.r.choice(choices))

    def clamp(self):
        low, high = self.pick(("-1.0", "1.0"), ("0.0", "1.0"), ("-2.0", "2.0"), ("-0.5", "0.5"), ("0.0", "6.0"))
        if self.chance(0.12):
            limit = self.scalar(["limit", "bound", "max_abs"], high)
            if self.chance(0.4):
                low, high = self.pick((low, high), (limit, "6.0") if float(low) < 0 else (low, high))
                layer = self.layer(["hardtanh", "clip", "clamp"],
                                   f"nn.Hardtanh({self.pick('{}, {}', 'min_val={}, max_val={}').format(low, high)})")
                return self.line(f"{layer}({self.x})")
            return self.line(f"torch.clamp({self.x}, {self.pick('min=-{0}, max={0}', '-{0}, {0}').format(limit)})")
        low = self.scalar(["min_value", "lower", "min_val", "clamp_min"], low)
        if self.chance(0.3):
            return self.line(f"torch.clamp({self.x}, min={low})")
        high = self.scalar(["max_value", "upper", "max_val", "clamp_max"], high)
        self.line(self.pick(f"torch.clamp({self.x}, {low}, {high})", f"torch.clamp({self.x}, min={low}, max={high})",
                            f"F.hardtanh({self.x}, {low}, {high})", f"{self.x}.clamp({low}, {high})"))

    def scale(self):
        op = self.pick("*", "*", "/", "+", "-")
        value = self.number()
        value = "2.0" if op == "/" and abs(float(value)) < 0.2 else value
        operand = self.scalar(_SCALAR_NAMES[op], value)
        if self.clutter and self.chance(0.1) and len(self.inputs) == 1:  # a number among the inputs of forward
            operand = self.name(["s", "alpha", "factor"])
            self.inputs.append((operand, str(abs(float(value)))))
        elif self.clutter and self.chance(0.2):
            operand = self.layer(_SCALAR_NAMES[op], f"nn.Parameter(torch.tensor({float(value)}))")
        self.line(f"{operand} {op} {self.x}" if op != "/" and self.chance(0.12) else
                  f"{self.x} * -{operand}" if op == "*" and operand.startswith("self") and self.chance(0.05) else
                  f"{self.x} {op} {operand}")

    def parameter(self):
        """A broadcast parameter over the channel dimension (dim 1; the last one for 3-D rows)."""
        op = self.pick("+", "+", "*", "-")
        dim = len(self.shape) - 1 if len(self.shape) == 3 and self.rows_last else 1
        channels, trailing = self.shape[dim][0], len(self.shape) - 1 - dim
        shape = "(" + ", ".join([channels] + ["1"] * trailing) + ("," if not trailing else "") + ")"
        if self.chance(0.3) and dim == 1 and len(self.shape) == 4:
            shape = f"(1, {shape[1:]}"
        names = _PARAM_NAMES[op]
        if self.chance(0.65):
            shape = self.arg([n + "_shape" for n in names] + ["param_shape"], shape, "tuple")
        else:
            self.inside(channels)
        make = self.pick("torch.randn", "torch.randn", "torch.rand", "torch.ones",
                         "torch.zeros" if op != "*" else "torch.rand")
        spread = self.pick(" * 0.1", " * 0.3", " + 0.5", " - 0.5", f" * {self.number()}", f" + {self.number()}") \
            if self.chance(0.3) else ""
        self.line(f"{self.x} {op} {self.layer(names, f'nn.Parameter({make}({shape}){spread})')}")

    def buffer(self):
        """A tensor of the model that is not a parameter, over the last dimension."""
        width, n = self.shape[-1]
        if not width or n == 1:
            return self.parameter()
        name = self.name(["counts", "positions", "steps", "weights", "table"])
        width = self.inside(width)
        made = self.pick(f"torch.arange(1, {width} + 1).float()", f"torch.arange({width}) * 0.01",
                         f"torch.linspace(0.5, 1.5, {width})",
                         f"torch.ones({width})", f"torch.full(({width},), {self.pick('0.5', '2.0')})")
        quote = self.pick('"', "'")
        self.init.append(f"self.register_buffer({quote}{name}{quote}, {made})")
        op = self.pick("*", "+", "/" if "arange(1" in made else "-")
        self.line(f"{self.x} {op} self.{name}")

    def soft_cap(self):
        """cap * tanh(x / cap)."""
        cap = self.scalar(["cap", "limit", "bound"], self.pick("2.0", "5.0", "3.0", "30.0"))
        self.line(f"{self.x} / {cap}")
        self.activation("tanh")
        self.line(self.pick(f"{self.x} * {cap}", f"{cap} * {self.x}"))

    def residual(self):
        if self.saved is None:
            return self.scale()
        self.line(f"{self.x} {self.pick('+', '+', '*')} {self.saved}")

    def save(self):
        """Keep the current tensor under another name, for a residual step later."""
        self.saved = self.name(["identity", "residual", "skip", "original", "shortcut"])
        self.forward.append(f"{self.saved} = {self.x}")

    def gate(self):
        """Now and then the second tensor passes through a function of its own first."""
        if self.clutter and self.chance(0.4):
            function = self.pick("torch.sigmoid({})", "torch.tanh({})", "F.silu({})", "F.relu({})", "F.gelu({})")
            self.forward.append(f"{self.saved} = {function.format(self.saved)}")
            self.activation()
            self.residual()

    def chain(self, steps, opaque=True):
        for _ in range(steps):
            kinds = [self.activation] * 5 + [self.leaky, self.clamp] + [self.scale] * 3 + [self.parameter] * 3
            kinds += [self.residual] * (2 if self.saved else 0) + [self.opaque] * (self.clutter and opaque)
            kinds += [self.r.choice([self.buffer, self.soft_cap])] * (self.clutter and self.chance(0.5))
            self.r.choice(kinds)()

    def dimension(self, *values):
        """The last dimension as an argument: a literal, or now and then a constructor argument kept on self."""
        value = self.pick(*values)
        if self.chance(0.12):
            name = self.arg(["dim", "axis", "reduce_dim"], value, "int")
            self.init.append(f"self.{name} = {name}")
            return f"self.{name}"
        return value

    def reduction(self):
        """A reduction or row operator over the last dimension (or over all spatial ones); ends the chain's layout."""
        x, nd = self.x, len(self.shape)
        if nd >= 4:
            dims = (self.pick("[2, 3]", "(2, 3)", "(2, 3)", "(-2, -1)", "[-2, -1]") if nd == 4
                    else self.pick("(2, 3, 4)", "[2, 3, 4]"))
            keep = self.chance(0.5)
            self.line(f"{self.pick('torch.mean', 'torch.mean', 'torch.sum', 'torch.amax')}({x}, dim={dims}"
                      + (", keepdim=True)" if keep else ")"))
            self.shape = self.shape[:2] + ([("1", 1)] * (nd - 2) if keep else [])
            return
        dim = self.dimension("-1", "-1", str(nd - 1))
        keep = self.chance(0.6)
        tail = ", keepdim=True)" if keep else ")"
        name = self.pick("sum", "mean", "amax", "amin", "logsumexp", "logsumexp")
        if self.chance(0.1):  # two of them from the same tensor
            first = self.name(["high", "top", "upper", "total", "a1"])
            second = self.name(["low", "bottom", "lower", "average", "a2"])
            pair = self.pick(("amax", "amin"), ("sum", "amax"), ("mean", "amin"), ("amax", "mean"))
            self.forward += [f"{var} = torch.{op}({x}, dim={dim}{tail}" for var, op in zip((first, second), pair)]
            self.line(f"{first} {self.pick('-', '-', '+', '*')} {second}")
            self.shape = self.shape[:-1] + ([("1", 1)] if keep else [])
            return
        self.line(self.pick(f"torch.{name}({x}, dim={dim}{tail}", f"{x}.{name}(dim={dim}{tail}"))
        self.shape = self.shape[:-1] + ([("1", 1)] if keep else [])

    def row_operator(self):
        """Softmax and friends over the last dimension."""
        x = self.x
        width = self.shape[-1][0]
        kind = self.pick("softmax", "softmax", "log_softmax", "layer_norm", "layer_norm", "rms", "rms", "l2", "cumsum",
                         "share")
        dim = "" if kind == "layer_norm" else self.dimension("-1", str(len(self.shape) - 1))
        if kind in ("softmax", "log_softmax"):
            if self.chance(0.3):
                module = {"softmax": "Softmax", "log_softmax": "LogSoftmax"}[kind]
                return self.line(f"{self.layer([kind, 'prob'], f'nn.{module}(dim={dim})')}({x})")
            return self.line(f"{self.pick('torch', 'F')}.{kind}({x}, dim={dim})")
        if kind == "layer_norm":
            shape = (self.arg(["normalized_shape", "norm_shape", "width"], width, "int") if self.chance(0.5)
                     else self.inside(width))
            eps = f", eps={self.arg(['eps', 'epsilon', 'norm_eps'], '1e-5', 'float')}" if self.chance(0.15) else ""
            return self.line(f"{self.layer(['norm', 'ln', 'layer_norm'], f'nn.LayerNorm({shape}{eps})')}({x})")
        if kind == "rms":
            eps = self.scalar(["eps", "epsilon"], self.pick("1e-5", "1e-6"))
            self.line(self.pick(f"{x} / torch.sqrt(torch.mean({x} ** 2, dim={dim}, keepdim=True) + {eps})",
                                f"{x} * torch.rsqrt({x}.pow(2).mean(dim={dim}, keepdim=True) + {eps})",
                                f"{x} * torch.rsqrt(torch.mean({x} * {x}, dim={dim}, keepdim=True) + {eps})"))
        elif kind == "l2":
            self.line(self.pick(f"F.normalize({x}, dim={dim})", f"F.normalize({x}, p=2, dim={dim})",
                                f"{x} / torch.norm({x}, dim={dim}, keepdim=True)",
                                f"{x} / torch.norm({x}, p=2, dim={dim}, keepdim=True)"))
        elif kind == "share":
            self.activation(self.pick("sigmoid", "softplus", "exp", "square"))
            x = self.x
            self.line(self.pick(f"{x} / torch.sum({x}, dim={dim}, keepdim=True)",
                                f"{x} / {x}.sum(dim={dim}, keepdim=True)",
                                f"{x} / (torch.sum({x}, dim={dim}, keepdim=True) + {self.pick('1e-6', '1e-5')})"))
        else:
            self.line(f"torch.cumsum({x}, dim={dim})")

    # ---- heads

    def size(self, *choices):
        """A size near one of `choices`; now and then an odd one, which exercises masks."""
        n = self.r.choice(choices)
        return max(2, n - self.r.randint(1, n // 4)) if n >= 8 and self.chance(0.25) else n

    def tensor_input(self, dims, maker=None):
        self.dims = dims
        maker = maker or self.pick("torch.randn", "torch.rand", "torch.randn")
        name = self.x if not self.inputs else self.name(["y", "other", "target", "targets", "labels"])
        spread = self.pick(" * 2.0 + 0.5", " * 0.5", " + 0.2", " - 0.5", " * torch.rand(1) * 3",
                           " * (torch.rand(()) + 0.5)") \
            if self.clutter and maker == "torch.randn" and self.chance(0.12) else ""
        self.inputs.append((name, f"{maker}({', '.join(dims)}){spread}"))
        return name

    def plain_input(self, nd, names=None):
        """A head that is just an input of nd dimensions with about 64 K elements."""
        sizes = {2: [(64, 1024), (128, 512), (32, 2048), (256, 256)], 3: [(8, 64, 128), (16, 32, 128), (4, 128, 128)],
                 4: [(8, 16, 16, 32), (4, 32, 16, 32), (16, 8, 16, 16)]}[nd]
        names = {2: [["batch_size", "rows", "N", "M"], ["features", "dim", "cols", "width"]],
                 3: [["batch_size", "B", "N"], ["seq_len", "length", "T"], ["dim", "hidden", "features", "D"]],
                 4: [["batch_size", "N", "B"], ["channels", "features", "C"], ["height", "H", "h"],
                     ["width", "W", "w"]]}[nd]
        sizes = self.r.choice(sizes)
        self.shape = []
        for i, (options, n) in enumerate(zip(names, sizes)):
            n = self.size(n) if i else n
            self.shape.append((self.const(options, n), n))
        self.tensor_input([name for name, _ in self.shape])

    def linear(self):
        batch = self.const(["batch_size", "N", "B", "rows"], self.pick(64, 128, 256))
        n_in, n_out = self.pick(32, 64, 128), self.size(128, 256, 512)
        i = self.arg(["in_features", "input_size", "in_dim", "d_in"], n_in, "int")
        o = self.arg(["out_features", "output_size", "hidden_size", "d_out"], n_out, "int")
        if self.clutter and self.chance(0.1):
            return self.batched_matmul(batch, i, o, n_out)
        middle = [(self.const(["tokens", "seq_len", "length", "T"], self.pick(8, 16)), 0)] if self.chance(0.15) else []
        self.tensor_input([batch] + [name for name, _ in middle] + [i])
        self.shape = [(batch, 0)] + middle + [(o, n_out)]
        if self.chance(0.2):
            made = f"nn.Parameter(torch.randn({i}, {o}){self.pick('', ' * 0.1')})"
            weight = self.layer(["weight", "W", "proj"], made)
            return self.line(self.pick(f"torch.matmul({self.x}, {weight})", f"{self.x} @ {weight}"))
        if self.chance(0.15):  # the second factor is an input, as in a plain matrix product
            self.args = [arg for arg in self.args if arg[0] not in (i, o)]
            other = self.tensor_input([i, o])
            return self.line(self.pick(f"torch.matmul({self.x}, {other})", f"{self.x} @ {other}"))
        extra = ", bias=False" if self.chance(0.15) else ""
        layer = self.layer(["linear", "fc", "gemm", "proj", "lin", "dense"], f"nn.Linear({i}, {o}{extra})")
        self.line(f"{layer}({self.x})")

    def batched_matmul(self, batch, i, o, n_out):
        """Products of two stacks of matrices, both inputs."""
        self.args = [arg for arg in self.args if arg[0] not in (i, o)]
        m, n = self.const(["M", "queries", "rows"], self.pick(8, 16)), self.pick(4, 8)
        self.consts = [(name, str(n) if name == batch else value) for name, value in self.consts]
        self.tensor_input([batch, m, i])
        other = self.tensor_input([batch, i, o])
        self.shape = [(batch, 0), (m, 0), (o, n_out)]
        self.line(self.pick(f"torch.bmm({self.x}, {other})", f"torch.matmul({self.x}, {other})"))

    def another_linear(self, width=None):
        """One more layer on the current features; a residual that was saved no longer fits."""
        n = self.size(64, 128, 256) if width is None else width[1]
        i = self.inside(self.shape[-1][0])
        o = width[0] if width else self.arg(["hidden2", "out_dim", "classes", "width2", "d_model"], n, "int")
        bias = ", bias=False" if self.chance(0.15) else ""
        names = ["fc1", "fc2", "fc3", "linear1", "linear2", "out", "head", "proj1", "proj2", "down", "up", "lin1",
                 "lin2"]
        self.line(f"{self.layer(names, f'nn.Linear({i}, {o}{bias})')}({self.x})")
        self.shape, self.saved = self.shape[:-1] + [(o, n)], None

    def residual_blocks(self):
        """Blocks that widen and narrow again, each added to what it started from; or a gated one."""
        width, hidden = self.size(64, 128, 256), self.size(128, 256)
        batch = self.const(["batch_size", "N", "B"], self.pick(32, 64, 128))
        w = (self.arg(["width", "features", "dim", "d_model"], width, "int"), width)
        h = (self.arg(["hidden", "inner", "d_ff", "hidden_size"], hidden, "int"), hidden)
        middle = [(self.const(["tokens", "seq_len", "length"], 8), 0)] if self.chance(0.3) else []
        self.tensor_input([batch] + [name for name, _ in middle] + [w[0]])
        self.shape = [(batch, 0)] + middle + [w]
        skip = self.name(["residual", "skip", "identity", "shortcut"])
        for _ in range(self.pick(1, 1, 2)):
            self.forward.append(f"{skip} = {self.x}")
            if self.chance(0.4):
                self.row_operator()
            if self.chance(0.3):
                gate, bias = self.name(["gate", "g", "weights"]), self.pick("", ", bias=False")
                layer = self.layer(["gate_proj", "gate", "w1"], f"nn.Linear({w[0]}, {h[0]}{bias})")
                function = self.pick("F.silu({0})", "torch.sigmoid({0})", "F.gelu({0})")
                self.forward += [f"{gate} = {layer}({self.x})", f"{gate} = {function.format(gate)}"]
                self.another_linear(h)
                self.line(f"{self.x} * {gate}")
            else:
                self.another_linear(h)
                self.chain(self.pick(1, 1, 2), opaque=False)
            self.another_linear(w)
            self.line(f"{self.x} + {skip}")

    def convolution(self):
        nd = self.pick(2, 2, 2, 2, 3, 1)
        transposed = self.chance(0.3)
        batch = self.const(["batch_size", "batch_size", "N", "B"], self.pick(2, 4, 8))
        n_in, n_out = self.pick(3, 4, 8, 16), self.pick(8, 16, 32)
        kernel = self.pick(3, 3, 3, 1, 2, 5 if nd < 3 else 3)
        if self.clutter and self.chance(0.07):  # as many channels out as in
            i = o = self.arg(["channels", "features", "planes", "dim"], n_out, "int")
        elif self.clutter and self.chance(0.07):  # sizes as literals
            i, o = self.const(["in_channels", "channels"], n_in), str(n_out)
            self.inside(i)
        else:
            i = self.arg(["in_channels", "in_channels", "in_ch", "c_in"], n_in, "int")
            o = self.arg(["out_channels", "out_channels", "out_ch", "c_out"], n_out, "int")
        oblong = self.clutter and nd == 2 and self.chance(0.08)
        if oblong:  # a kernel that is not square
            k = self.arg(["kernel_size", "kernel"], self.pick("(3, 5)", "(1, 3)", "(5, 3)", "(2, 3)"), "tuple")
        elif self.clutter and not o.isidentifier() or self.chance(0.03):
            k = str(kernel)
        else:
            k = self.arg(["kernel_size", "kernel_size", "k", "ks"], kernel, "int")
        extent = {1: self.pick(128, 256), 2: self.pick(16, 24, 32), 3: self.pick(8, 10)}[nd]
        if nd > 1 and self.chance(0.4):
            names = (self.pick(["height", "width"], ["H", "W"]) if nd == 2
                     else self.pick(["depth", "height", "width"], ["D", "H", "W"]))
            names = [self.name([name]) for name in names]
            self.consts.append((", ".join(names), ", ".join([str(extent)] * nd)) if self.chance(0.5)
                               else (" = ".join(names), str(extent)))
        else:
            names = [self.const([["length", "L"], ["height", "H"], ["depth", "D"]][nd - 1], extent)]
            names += [self.const([f"width{j}", "W", "w", "size"], extent) for j in range(nd - 1)]
        options = self.convolution_options(nd, 2 if oblong else kernel, k, transposed)
        if nd > 1 and not oblong and self.chance(0.06):
            k = "(" + ", ".join([k] * nd) + ")"
        kind = f"ConvTranspose{nd}d" if transposed else f"Conv{nd}d"
        names_for = (["conv_transpose", "deconv", "up", "conv_t"] if transposed
                     else ["conv", "conv1", "convolution", f"conv{nd}d"])
        self.tensor_input([batch, i] + names)
        self.shape = [(batch, 0), (o, n_out)] + [("", 0)] * nd
        self.line(f"{self.layer(names_for, f'nn.{kind}({i}, {o}, {k}{options})')}({self.x})")

    def convolution_options(self, nd, kernel, k, transposed):
        """Keyword arguments of a convolution: literals, constructor arguments, or arguments with defaults."""
        stride, padding = self.pick(1, 1, 2), int(kernel > 1)
        wanted = {"stride": (stride, 0.3), "padding": (padding, 0.35),
                  "output_padding": (1, 0.3 if transposed and stride == 2 else 0),
                  "dilation": (self.pick(1, 2) if kernel == 3 else 1, 0.1), "groups": (1, 0.08),
                  "bias": (self.pick(False, False, True), 0.12)}
        if self.clutter and self.chance(0.1):  # everything
            wanted = {name: (value, p and 0.9) for name, (value, p) in wanted.items()}
        elif kernel % 2 and self.chance(0.06):
            return (self.pick(f", padding={k} // 2", ", padding='same'" if not transposed else "")
                    + self.pick("", ", bias=False"))
        how, options = self.pick("literal", "argument", "default", "each"), ""
        for name, (value, p) in wanted.items():
            if not self.chance(p) or name == "output_padding" and "stride" not in options:
                continue
            kind = self.pick("literal", "argument", "default") if how == "each" else how
            if name in ("bias", "groups") and kind == "argument" and self.chance(0.5):
                kind = "literal"
            usual = "bool" if name == "bias" else "int"
            if kind == "argument":
                value = self.arg([name], value, usual)
            elif kind == "default":
                self.defaults.append((self.name([name]), str(value)))
                value = self.defaults[-1][0]
            options += f", {name}={value}"
        return options

    def small_convolutional_network(self):
        """Convolutions with activations and pooling, flattened into a linear layer."""
        batch, classes = self.const(["batch_size", "N"], self.pick(4, 8)), self.pick(10, 16, 20)
        channels, side = self.pick(1, 3, 4), self.pick(16, 32)
        named = self.chance(0.5)
        i = self.arg(["in_channels", "channels"], channels, "int") if named else str(channels)
        side_name = self.const(["side", "size", "image_size"], side)
        self.tensor_input([batch, i, side_name, side_name])
        if self.chance(0.5):
            act = self.layer(["act", "relu", "nonlin"], self.pick("nn.ReLU()", "nn.Mish()", "nn.GELU()", "nn.SiLU()"))
        else:
            act = self.pick("F.relu", "torch.tanh", "F.silu", "torch.sigmoid")
        kind, size = self.pick("Max", "Avg"), self.pick("2", "kernel_size=2, stride=2")
        pool = self.layer(["pool", "down"], f"nn.{kind}Pool2d({size})")
        for _ in range(self.pick(1, 2, 2)):
            o = str(self.pick(4, 8, 16))
            k = self.pick("3", "kernel_size=3")
            layer = self.layer(["conv1", "conv2", "conv", "conv3"], f"nn.Conv2d({i}, {o}, {k}, padding=1)")
            self.line(f"{layer}({self.x})")
            self.line(f"{act}({self.x})")
            self.line(f"{pool}({self.x})")
            i, side = o, side // 2
        self.line(self.pick(f"torch.flatten({self.x}, 1)", f"torch.flatten({self.x}, start_dim=1)",
                            f"{self.x}.flatten(1)"))
        self.saved = None
        o = self.arg(["num_classes", "classes", "outputs"], classes, "int")
        features = self.pick(f"{i} * {side} * {side}", str(int(i) * side * side))
        layer = self.layer(["fc", "head", "fc1", "linear", "classifier"], f"nn.Linear({features}, {o})")
        self.line(f"{layer}({self.x})")
        self.shape = [(batch, 0), (o, classes)]
        self.pick(self.activation, self.row_operator, self.row_operator)()

    def normalization(self):
        """Group, instance or batch norm over the channels of a convolution's output."""
        channels, n = self.shape[1]
        nd = len(self.shape) - 2
        kind = self.pick("group", "group", "instance", "batch")
        if kind == "group":
            groups = self.arg(["num_groups", "groups", "n_groups"],
                              self.r.choice([g for g in (1, 2, 4, 8) if n % g == 0]), "int")
            layer = f"nn.GroupNorm({groups}, {channels})"
        elif kind == "instance":
            layer = f"nn.InstanceNorm{nd}d({channels}{self.pick('', '', ', affine=True')})"
        else:
            layer = f"nn.BatchNorm{nd}d({channels})"
        self.line(f"{self.layer(['norm', kind + '_norm', kind[0] + 'n'], layer)}({self.x})")

    def pooling(self):
        nd = len(self.shape) - 2
        k = self.arg(["pool_size", "pool_kernel", "pool_kernel_size"], 2, "int") if self.chance(0.5) else "2"
        kind = self.pick("Max", "Avg")
        k = self.pick(k, k, f"kernel_size={k}", f"kernel_size={k}, stride={k}", f"{k}, stride={k}")
        self.line(f"{self.layer(['pool', f'{kind.lower()}pool'], f'nn.{kind}Pool{nd}d({k})')}({self.x})")

    def loss(self):
        self.plain_input(self.pick(2, 2, 3))
        dims = [name for name, _ in self.shape]
        target = self.tensor_input(dims, "torch.rand")
        self.chain(self.r.randint(0, 2), opaque=False)
        x = self.x
        at_once = self.chance(0.7)  # rather than step by step
        expression = self.pick(
            f"torch.mean(({x} - {target}) ** 2)", f"F.mse_loss({x}, {target})",
            f"torch.mean(torch.abs({x} - {target}))",
            f"F.l1_loss({x}, {target})", f"F.smooth_l1_loss({x}, {target})",
            f"torch.mean(torch.relu(1 - {x} * {target}))",
            f"torch.mean(F.softplus(-{x} * {target}))", f"(torch.sigmoid({x}) * {target}).mean()",
            f"F.binary_cross_entropy_with_logits({x}, {target})",
            f"torch.sum(torch.tanh({x}) * {target}) / {x}.shape[0]")
        self.ops += 2
        if self.clutter and not at_once:
            self.x = self.name(["loss", "error", "err", "cost"]) if self.chance(0.7) else x
            margin = self.scalar(["margin", "width"], self.pick("1.0", "1.5", "0.5"))
            self.forward.append(f"{self.x} = " + self.pick(f"{margin} - {x} * {target}", f"{x} - {target}",
                                                           f"{x} * {target}"))
            self.pick(self.activation, self.clamp, self.scale)()
            self.forward.append("return " + self.pick(f"torch.mean({self.x})", f"{self.x}.mean()",
                                                      f"torch.mean({self.x}) * 2.0"))
        elif self.chance(0.15):
            self.x = "loss"
            self.forward += [f"loss = {expression}", f"return loss * {self.scalar(['weight', 'scale'], self.number())}"]
        else:
            self.forward.append(f"return {expression}")

    def diagonal(self):
        self.plain_input(2)
        rows = self.shape[0][0]
        if self.chance(0.3):
            d = self.layer(["gain", "weights", "diagonal"], f"nn.Parameter(torch.randn({self.inside(rows)}))")
        else:
            d = self.name(["diag", "weights", "gains", "scales"])
            self.inputs.insert(0, (d, f"{self.pick('torch.randn', 'torch.rand')}({rows})"))
        self.line(self.pick(f"torch.diag({d}) @ {self.x}", f"torch.matmul(torch.diag({d}), {self.x})"))


FAMILIES = {"pointwise": 14, "linear": 20, "convolution": 28, "row": 18, "reduction": 8, "loss": 7, "diagonal": 5,
            "network": 7}


def synthesize(seed, clutter=False) -> Task:
    """One synthesised problem, a pure function of its arguments. Its fitness (`unfit`) is the caller's to check.

    clutter: long and odd signatures, unused layers, keyword arguments, docstrings of random words, as real problems
    have them: a small model must learn to copy whatever it meets, and which techniques it can carry off on what.
    """
    d = _Draft(seed, clutter)
    family = d.r.choices(list(FAMILIES), FAMILIES.values())[0]
    d.saved, d.rows_last = None, True
    if family == "pointwise":
        d.plain_input(d.pick(2, 2, 3, 4))
        if d.chance(0.25):
            d.saved = d.tensor_input([name for name, _ in d.shape])
            d.gate()
        d.chain(d.r.randint(2, 5))
    elif family == "linear":
        d.linear()
        if d.chance(0.2):
            d.save()
        elif d.clutter and d.chance(0.1):  # another input of the same shape, for a residual step
            d.saved = d.tensor_input([name for name, _ in d.shape])
            d.gate()
        d.chain(d.r.randint(1, 4))
        if d.chance(0.35):
            d.pick(d.row_operator, d.reduction)()
            d.chain(d.r.randint(0, 1) if len(d.shape) == 2 and d.shape[1][1] > 1 else 0)
    elif family == "convolution":
        d.convolution()
        d.rows_last = False
        if d.chance(0.15):
            d.save()
        if d.chance(0.3):
            d.normalization()
        d.chain(0 if clutter and d.chance(0.06) else d.r.randint(1, 4))
        if d.chance(0.25 if clutter else 0.12) and d.saved is None:
            d.pooling()
            d.chain(d.r.randint(0, 1))
        elif d.chance(0.15) and len(d.shape) == 4:
            d.reduction()
    elif family == "row":
        d.plain_input(d.pick(2, 2, 2, 3))
        d.chain(d.r.randint(0, 2))
        d.row_operator()
        d.chain(d.r.randint(0 if d.ops > 1 else 1, 2))
    elif family == "reduction":
        d.plain_input(d.pick(2, 2, 3, 4))
        d.rows_last = len(d.shape) == 3
        d.chain(d.r.randint(1, 3))
        d.reduction()
    elif family == "loss":
        d.loss()
    elif family == "diagonal":
        d.diagonal()
        d.chain(d.r.randint(1, 3))
    elif family == "network" and clutter and d.chance(0.4):
        d.residual_blocks()
        if d.chance(0.4):
            d.row_operator()
    elif family == "network" and clutter and d.chance(0.25):
        d.small_convolutional_network()
    elif family == "network":
        d.linear()
        for _ in range(d.r.choice([1, 1, 2])):
            d.chain(d.r.randint(1, 2))
            d.another_linear()
        d.chain(d.r.randint(0, 1))
        if d.chance(0.4):
            d.row_operator()
    return Task(f"synth/{seed}", 0, write_problem(d), family)


def training_tasks(seed, evaluation=None):
    """Endless stream of synthesised problems that are fit to train on, deterministic in `seed`."""
    evaluation = evaluation_fingerprints() if evaluation is None else evaluation
    for n in itertools.count():
        task = synthesize(seed * 1_000_003 + n, clutter=True)
        if unfit(task, evaluation) is None:
            yield task

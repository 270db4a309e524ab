"""Writes one Triton kernel and the host function that launches it, line by line from torch expressions, for expert.py.

Five kinds of kernels. All address memory by the flat offset `idx`, so one rule indexes broadcast operands:

    fused    one program per 1,024 elements; a run of pointwise steps
    row      one program per row (last dimension, or all spatial ones); pointwise steps, reductions, softmax, scans
    norm     one program per normalisation group, in two sweeps (GroupNorm, InstanceNorm)
    loss     pointwise steps and a partial sum per program, finished by a short torch sum
    matmul   one program per output tile; pointwise steps on the tile before it is stored
"""

import ast
import re
from dataclasses import dataclass

import torch
import torch.nn as nn


class Unsupported(Exception):
    """What the reader or a kernel cannot express; the step stays a torch call, or the problem is passed over."""


# ----------------------------------------------------------------------------------------------------------------------
# Triton formulas of pointwise operators: lines with {x} for the operand, {a}, {b} for further arguments; the last line
# is the value. Chosen for fp32 accuracy: no overflow in exp, no cancellation beyond 1e-6.

FORMULAS = {
    "relu": ["tl.maximum({x}, 0.0)"],
    "sigmoid": ["tl.sigmoid({x})"],
    "tanh": ["2.0 * tl.sigmoid(2.0 * {x}) - 1.0"],
    "gelu": ["0.5 * {x} * (1.0 + tl.erf({x} * 0.70710678))"],
    "gelu_tanh": ["{x} * tl.sigmoid(1.59576912 * ({x} + 0.044715 * {x} * {x} * {x}))"],
    "silu": ["{x} * tl.sigmoid({x})"],
    "softplus": ["tl.where({x} > 20.0, {x}, tl.log(1.0 + tl.exp(tl.minimum({x}, 20.0))))"],
    "mish": ["e = tl.exp(tl.minimum({x}, 20.0))", "{x} * (e * (e + 2.0)) / (e * (e + 2.0) + 2.0)"],
    "hardswish": ["{x} * tl.minimum(tl.maximum({x} + 3.0, 0.0), 6.0) / 6.0"],
    "hardsigmoid": ["tl.minimum(tl.maximum({x} + 3.0, 0.0), 6.0) / 6.0"],
    "softsign": ["{x} / (1.0 + tl.abs({x}))"],
    "selu": ["1.05070099 * tl.where({x} > 0.0, {x}, 1.67326324 * (tl.exp(tl.minimum({x}, 0.0)) - 1.0))"],
    "relu6": ["tl.minimum(tl.maximum({x}, 0.0), 6.0)"],
    "logsigmoid": ["tl.minimum({x}, 0.0) - tl.log(1.0 + tl.exp(-tl.abs({x})))"],
    "abs": ["tl.abs({x})"],
    "square": ["{x} * {x}"],
    "exp": ["tl.exp({x})"],
    "log": ["tl.log({x})"],
    "sin": ["tl.sin({x})"],
    "cos": ["tl.cos({x})"],
    "sqrt": ["tl.sqrt({x})"],
    "rsqrt": ["1.0 / tl.sqrt({x})"],
    "neg": ["-{x}"],
    "leaky_relu": ["tl.where({x} > 0.0, {x}, {x} * {a})"],
    "elu": ["tl.where({x} > 0.0, {x}, {a} * (tl.exp(tl.minimum({x}, 0.0)) - 1.0))"],
    "clamp": ["tl.minimum(tl.maximum({x}, {a}), {b})"],
    "clamp_min": ["tl.maximum({x}, {a})"],
    "clamp_max": ["tl.minimum({x}, {a})"],
    "smooth_l1_loss": ["d = tl.abs({x} - {a})", "tl.where(d < 1.0, 0.5 * d * d, d - 0.5)"],
    "binary_cross_entropy_with_logits": ["tl.maximum({x}, 0.0) - {x} * {a} + tl.log(1.0 + tl.exp(-tl.abs({x})))"],
}
# nn.Module class -> (operator, attributes that become its further arguments)
MODULES = {nn.ReLU: ("relu",), nn.Sigmoid: ("sigmoid",), nn.Tanh: ("tanh",), nn.SiLU: ("silu",), nn.Mish: ("mish",),
           nn.Softplus: ("softplus",), nn.Hardswish: ("hardswish",), nn.Hardsigmoid: ("hardsigmoid",),
           nn.Softsign: ("softsign",), nn.SELU: ("selu",), nn.ReLU6: ("relu6",), nn.LogSigmoid: ("logsigmoid",),
           nn.LeakyReLU: ("leaky_relu", "negative_slope"), nn.ELU: ("elu", "alpha"),
           nn.Hardtanh: ("clamp", "min_val", "max_val")}
# Row operators: lines over the row `{x}` (masked lanes hold 0) that assign `{t}`. The row's scalars are variables.
_NEG = 'tl.where(mask, {x}, float("-inf"))'
_SUM = "tl.sum(tl.where(mask, {0}, 0.0), 0)"
ROWS = {
    "softmax": [f"m = tl.max({_NEG}, 0)", "{t} = tl.where(mask, tl.exp({x} - m), 0.0)", "{t} = {t} / tl.sum({t}, 0)"],
    "log_softmax": [f"m = tl.max({_NEG}, 0)", "{t} = {x} - m",
                    "{t} = {t} - tl.log(" + _SUM.format("tl.exp({t})") + ")"],
    "logsumexp": [f"m = tl.max({_NEG}, 0)", "{t} = m + tl.log(" + _SUM.format("tl.exp({x} - m)") + ")"],
    "sum": ["{t} = " + _SUM.format("{x}")],
    "mean": ["{t} = " + _SUM.format("{x}") + " / cols"],
    "amax": [f"{{t}} = tl.max({_NEG}, 0)"],
    "amin": ['{t} = tl.min(tl.where(mask, {x}, float("inf")), 0)'],
    "norm": ["{t} = tl.sqrt(" + _SUM.format("{x} * {x}") + ")"],
    "normalize": ["{t} = {x} / tl.maximum(tl.sqrt(" + _SUM.format("{x} * {x}") + "), 1e-12)"],
    "layer_norm": ["m = " + _SUM.format("{x}") + " / cols", "d = tl.where(mask, {x} - m, 0.0)",
                   "{t} = d / tl.sqrt(tl.sum(d * d, 0) / cols + {eps})"],
    "cumsum": ["{t} = tl.cumsum({x}, 0)"],
}
REDUCES = {"sum", "mean", "amax", "amin", "norm", "logsumexp"}


def diagonal(node):
    """The expression v of torch.diag(v), or None."""
    return node.args[0] if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.diag" else None


# ----------------------------------------------------------------------------------------------------------------------
# The kernel.


@dataclass
class _Operand:
    name: str  # in the kernel
    text: str  # on the host
    load: str  # the line that reads it; "" for scalars passed by value
    full: bool = False  # has the shape of the tensor that the kernel walks


RESERVED = {"rows", "k", "acc", "a", "b", "BM", "BN", "BK", "idx", "mask", "offs", "start", "cols", "n", "out", "m",
            "d", "e", "u", "inner", "i", "mean", "rstd", "total", "square", "tl", "BLOCK"}
_PRECEDENCE = {ast.Add: ("+", 1), ast.Sub: ("-", 1), ast.Mult: ("*", 2), ast.Div: ("/", 2)}


class Kernel:
    """One Triton kernel under construction, with the host function that launches it."""

    def __init__(self, program, kind, name, shape, layout=""):
        self.program, self.kind, self.name, self.shape, self.layout = program, kind, name, shape, layout
        self.operands = {}  # host text -> _Operand
        self.extra = {}  # further kernel arguments: name -> host expression
        self.lines = []
        self.local = {}  # variable -> "vector" or "row", once the kernel computes it
        self.values = {}  # of the step being translated

    # ---- operands

    def operand(self, text, shape):
        """The kernel's name for a host value: a tensor that broadcasts to self.shape, or (shape None) a number."""
        if text in self.operands:
            return self.operands[text].name
        name = text.split(".")[-1]
        taken = {o.name for o in self.operands.values()} | RESERVED | set(self.local)
        name = next(n for n in [name] + [f"{name}{i}" for i in range(2, 9)] if n not in taken)
        if shape is None:
            operand = _Operand(name, text, "")
        else:
            shape = (1,) * (len(self.shape) - len(shape)) + tuple(shape)
            block = [i for i, size in enumerate(shape) if size != 1]
            if len(shape) > len(self.shape) or any(shape[i] != self.shape[i] for i in block):
                raise Unsupported
            if block and block != list(range(block[0], block[-1] + 1)):
                raise Unsupported
            full = shape == tuple(self.shape)
            operand = _Operand(name, text, self.load(name, shape, block, full), full)
        self.operands[text] = operand
        return name

    def load(self, name, shape, block, full):
        if full:
            return f"{name} = tl.load({name}_ptr + idx, mask=mask" + (
                ")" if self.kind in ("fused", "loss") else ", other=0.0)"
            )
        if not block:
            return f"{name} = tl.load({name}_ptr)"
        first, last = block[0], block[-1]
        rank = len(self.shape)
        if self.kind == "matmul" and block == [1]:
            return f"{name} = tl.load({name}_ptr + cols, mask=cols < n, other=0.0)[None, :]"
        if self.kind == "row":
            if self.layout == "last" and block == [rank - 1]:
                return f"{name} = tl.load({name}_ptr + offs, mask=mask, other=0.0)"
            if self.layout == "last" and first == 0 and last == rank - 2:
                return f"{name} = tl.load({name}_ptr + tl.program_id(0))"
            if self.layout == "spatial" and block == [1]:
                return f"{name} = tl.load({name}_ptr + tl.program_id(0) % {self.argument(name + '_size', name)})"
        index = "idx"
        if last < rank - 1:
            index += f" // {self.argument('inner', last)}"
        if first > 0:
            index += f" % {self.argument(name + '_size', name)}"
        return f"{name} = tl.load({name}_ptr + {index}, mask=mask" + (
            ")" if self.kind in ("fused", "loss") else ", other=0.0)"
        )

    def argument(self, name, what):
        """An extra integer argument: the size of a parameter, or the elements below dimension `what`."""
        if name == "inner":
            name = next(
                (n for n, w in self.extra.items() if w == what), "inner" if "inner" not in self.extra else "inner2"
            )
        self.extra[name] = what
        return name

    # ---- expressions

    def expression(self, node):
        """Translate a torch expression; returns (Triton text, precedence). Appends helper lines where needed."""
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return repr(node.value), 9
        if isinstance(node, ast.Name) and node.id in self.local:
            return node.id, 9
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            if isinstance(node.operand, ast.Constant):
                return repr(-node.operand.value), 9
            return "-" + self.wrapped(node.operand, 3), 3
        if isinstance(node, ast.BinOp) and type(node.op) in _PRECEDENCE:
            symbol, level = _PRECEDENCE[type(node.op)]
            left, right = self.wrapped(node.left, level), self.wrapped(node.right, level + 1)
            return f"{left} {symbol} {right}", level
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            return self.power(node.left, node.right)
        call = self.program.reader.call(node)
        if call and call.pointwise:
            return self.formula(call)
        value = self.program.reader.evaluate(node, self.values)
        if isinstance(value, torch.Tensor):
            return self.operand(ast.unparse(node), value.shape), 9
        if type(value) in (int, float):
            return self.operand(ast.unparse(node), None), 9
        raise Unsupported

    def wrapped(self, node, level):
        text, precedence = self.expression(node)
        return text if precedence >= level else f"({text})"

    def atom(self, node):
        """The expression as something that may be repeated: a name or a number."""
        text, precedence = self.expression(node)
        if precedence == 9:
            return text
        self.lines.append(f"u = {text}")
        return "u"

    def power(self, base, exponent):
        exponent = ast.literal_eval(exponent)
        base = self.atom(base)
        if exponent in (2, 3):
            return " * ".join([base] * int(exponent)), 2
        if exponent == 0.5:
            return f"tl.sqrt({base})", 9
        raise Unsupported

    def formula(self, call):
        name, arguments, keywords = call.name, list(call.arguments), dict(call.keywords)
        if name == "pow":
            return self.power(arguments[0], arguments[1])
        if name in ("add", "sub", "mul", "div"):
            if keywords:
                raise Unsupported
            operator = {"add": ast.Add(), "sub": ast.Sub(), "mul": ast.Mult(), "div": ast.Div()}[name]
            return self.expression(ast.BinOp(arguments[0], operator, arguments[1]))
        further = [self.operand(f"self.{call.attribute}.{a}", None) for a in MODULES.get(type(call.module), ())[1:]]
        if call.module is None:
            for key in ("min", "max", "min_val", "max_val", "negative_slope", "alpha"):
                if key in keywords:
                    arguments.append(keywords[key])
            if name == "clamp" and len(arguments) == 2:
                name = "clamp_max" if "max" in keywords else "clamp_min"
            if keywords.keys() - {"min", "max", "min_val", "max_val", "negative_slope", "alpha", "inplace", "reduction",
                                  "approximate"}:
                raise Unsupported
            further = [self.wrapped(a, 9) for a in arguments[1:]]
            defaults = {"leaky_relu": ["0.01"], "elu": ["1.0"], "clamp": ["-1.0", "1.0"]}.get(name, [])
            further = further or defaults
        elif type(call.module) is nn.Softplus and (call.module.beta != 1 or call.module.threshold != 20):
            raise Unsupported
        lines = FORMULAS[name]
        if sum(line.count("{a}") > 0 for line in lines) > len(further):
            raise Unsupported
        values = dict(zip("ab", further), x=self.atom(arguments[0]))
        self.lines += [line.format(**values) for line in lines[:-1]]
        value = lines[-1].format(**values)
        simple = re.fullmatch(r"tl\.\w+\([^()]*\)", value)
        return value, 9 if simple else 3 if value.startswith("-{") else 1

    # ---- steps

    def add(self, step):
        self.lines.append(f"# {step.target} = {step.text}")
        self.values = step.values
        if step.op == "diagonal":
            vector = diagonal(self.program.reader.call(step.node).arguments[0])
            matrix = self.expression(ast.Name(step.source, ast.Load()))[0]
            shape = self.program.reader.evaluate(vector, step.values).shape
            if len(shape) != 1:
                raise Unsupported
            scale = self.operand(ast.unparse(vector), tuple(shape) + (1,))
            self.lines.append(f"{step.target} = {scale} * {matrix}")
        elif step.kind == "pointwise":
            self.lines.append(f"{step.target} = {self.expression(step.node)[0]}")
        elif step.kind == "row":
            source = self.expression(ast.Name(step.source, ast.Load()))[0]
            target = step.target
            eps = self.operand(f"self.{step.module}.eps", None) if step.op == "layer_norm" else ""
            self.lines += [line.format(x=source, t=target, eps=eps) for line in ROWS[step.op]]
            if step.op == "layer_norm":
                shape = (self.shape[-1],)
                weight = self.operand(f"self.{step.module}.weight", shape)
                bias = self.operand(f"self.{step.module}.bias", shape)
                self.lines.append(f"{target} = {target} * {weight} + {bias}")
        row = step.kind == "row" and step.op in REDUCES or \
            step.kind == "pointwise" and tuple(step.shape) != tuple(self.shape)
        self.local[step.target] = "row" if row else "vector"

    # ---- source text

    def ordered(self):
        """Operands in the order of the host function's arguments: the tensors walked, other tensors, numbers."""
        return sorted(self.operands.values(), key=lambda o: (not o.full, not o.load))

    def call(self):
        """The host call's arguments."""
        return ", ".join(o.text for o in self.ordered())

    def texts(self, final, keepdim=False, mean=False):
        """(host function, kernel) as source. `final` is the variable to store."""
        operands = self.ordered()
        if self.kind == "matmul":
            return self.matmul_texts(final, [o for o in operands if o.name not in self.factors])
        full = [o for o in operands if o.full]
        if not full:
            raise Unsupported
        main = full[0].name
        names = [o.name for o in operands]
        extra = {}
        for name, what in self.extra.items():
            if isinstance(what, str):
                extra[name] = f"{what}.numel()"
            else:
                extra[name] = f"{main}[{', '.join(['0'] * (what + 1))}].numel()"
        host = [f"def {self.name}({', '.join(names)}):"] + [f"    {o.name} = {o.name}.contiguous()" for o in full]
        scalar = self.kind == "row" and self.local[final] == "row"
        count = {"row": "cols", "norm": "cols"}.get(self.kind, "n")
        block = "BLOCK=1024"
        if self.kind in ("fused", "loss"):
            host.append(f"    n = {main}.numel()")
            grid = "triton.cdiv(n, 1024)"
            host.append(
                f"    out = torch.empty_like({main})" if self.kind == "fused" else f"    out = {main}.new_empty({grid})"
            )
        else:
            if self.kind == "norm":
                host.append(f"    cols = {main}[0].numel() // groups")
                names.append("groups")
                host[0] = f"def {self.name}({', '.join(names)}):"
                names.pop()
            else:
                host.append(
                    f"    cols = {main}.shape[-1]" if self.layout == "last" else f"    cols = {main}[0, 0].numel()"
                )
            grid = f"{main}.numel() // cols"
            if scalar:
                lead = f"{main}.shape[:-1]" if self.layout == "last" else f"{main}.shape[:2]"
                ones = "(1,)" if self.layout == "last" else "(" + ", ".join(["1"] * (len(self.shape) - 2)) + ")"
                host.append(f"    out = {main}.new_empty({lead}{' + ' + ones if keepdim else ''})")
            else:
                host.append(f"    out = torch.empty_like({main})")
            if self.kind == "row":
                block = "BLOCK=triton.next_power_of_2(cols)"
        arguments = names + ["out", count] + list(extra.values()) + [block]
        host.append(f"    {self.name}_kernel[({grid},)]({', '.join(arguments)})")
        host.append("    return " + ("out" if self.kind != "loss" else "out.sum() / n" if mean else "out.sum()"))

        formal = [f"{o.name}_ptr" if o.load else o.name for o in operands] + ["out_ptr", count] + list(extra)
        kernel = ["@triton.jit", f"def {self.name}_kernel({', '.join(formal)}, BLOCK: tl.constexpr):"]
        loads = [o.load for o in operands if o.load]
        if self.kind in ("fused", "loss"):
            body = ["idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)", "mask = idx < n"] + loads + self.lines
            if self.kind == "fused":
                body.append(f"tl.store(out_ptr + idx, {final}, mask=mask)")
            else:
                body.append(f"tl.store(out_ptr + tl.program_id(0), tl.sum(tl.where(mask, {final}, 0.0), 0))")
        elif self.kind == "row":
            body = ["start = tl.program_id(0) * cols", "offs = tl.arange(0, BLOCK)", "mask = offs < cols",
                    "idx = start + offs"]
            body += loads + self.lines
            body.append(f"tl.store(out_ptr + tl.program_id(0), {final})" if scalar
                        else f"tl.store(out_ptr + idx, {final}, mask=mask)")
        else:
            sweep = ["for i in range(0, cols, BLOCK):", "    offs = i + tl.arange(0, BLOCK)", "    mask = offs < cols",
                     "    idx = start + offs"]
            body = ["start = tl.program_id(0) * cols", "total = tl.zeros((BLOCK,), tl.float32)",
                    "square = tl.zeros((BLOCK,), tl.float32)"] + sweep
            body += [f"    {full[0].load}", f"    total += {main}", f"    square += {main} * {main}",
                     "mean = tl.sum(total, 0) / cols",
                     "rstd = 1.0 / tl.sqrt(tl.sum(square, 0) / cols - mean * mean + eps)"] + sweep
            body += ["    " + line for line in loads + self.lines]
            body.append(f"    tl.store(out_ptr + idx, {final}, mask=mask)")
        return "\n".join(host), "\n".join(kernel + ["    " + line for line in body])


    def matmul_texts(self, final, operands):
        """The tiled product of self.factors, (M, K) by (N, K) transposed or (K, N), with self.lines as its epilogue."""
        x, w = self.factors
        names = [x, w] + [o.name for o in operands]
        host = [f"def {self.name}({', '.join(names)}):"] + [f"    {name} = {name}.contiguous()" for name in
                                                              [x, w] + [o.name for o in operands if o.full]]
        host += [f"    m, k = {x}.shape", f"    n = {w}.shape[{0 if self.transposed else 1}]",
                 f"    out = {x}.new_empty(m, n)"]
        extra = [f"{what}.numel()" for what in self.extra.values()]
        if any(not isinstance(what, str) for what in self.extra.values()):
            raise Unsupported
        arguments = names + ["out", "m", "n", "k"] + extra + ["BM=128", "BN=64", "BK=32"]
        host += [f"    {self.name}_kernel[(triton.cdiv(n, 64), triton.cdiv(m, 128))]({', '.join(arguments)})",
                 "    return out"]
        formal = [f"{x}_ptr", f"{w}_ptr"] + [f"{o.name}_ptr" if o.load else o.name for o in operands]
        formal += ["out_ptr", "m", "n", "k"] + list(self.extra)
        kernel = ["@triton.jit",
                  f"def {self.name}_kernel({', '.join(formal)}, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):"]
        weight = "cols[None, :] * k + i[:, None]" if self.transposed else "i[:, None] * n + cols[None, :]"
        body = [
            "rows = tl.program_id(1) * BM + tl.arange(0, BM)",
            "cols = tl.program_id(0) * BN + tl.arange(0, BN)",
            "acc = tl.zeros((BM, BN), tl.float32)",
            "for start in range(0, k, BK):",
            "    i = start + tl.arange(0, BK)",
            f"    a = tl.load({x}_ptr + rows[:, None] * k + i[None, :], "
            "mask=(rows[:, None] < m) & (i[None, :] < k), other=0.0)",
            f"    b = tl.load({w}_ptr + {weight}, mask=(cols[None, :] < n) & (i[:, None] < k), other=0.0)",
            '    acc = tl.dot(a, b, acc, input_precision="tf32x3")',
            "idx = rows[:, None] * n + cols[None, :]",
            "mask = (rows[:, None] < m) & (cols[None, :] < n)",
        ]
        body += [o.load for o in operands if o.load] + self.lines + [f"tl.store(out_ptr + idx, {final}, mask=mask)"]
        return "\n".join(host), "\n".join(kernel + ["    " + line for line in body])

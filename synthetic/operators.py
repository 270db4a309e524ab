"""The table of operators: how problems spell them and how kernels compute them, a row each.

Spellings are torch expressions. In them {x} is the operand, {y} a second tensor, {c} and {h} are numbers, {d} is a
dimension, and {keep} is ", keepdim=True" or nothing. The lines of a kernel are Triton. (formulas.txt has more
expressions, a line each: of the functions in POINTWISE and of Python's operators.)

To add a pointwise operator: a row of POINTWISE. If problems can also spell it with other operators,
`training._WRITTEN_OUT` has to say so, or we could train on a near-duplicate of an evaluation problem.
"""

import ast
from dataclasses import dataclass, field
from pathlib import Path

FORMULAS = Path(__file__).with_name("formulas.txt").read_text().splitlines()
# Names that kernels and the functions beside them use for themselves. No variable of a problem is called so.
RESERVED = set("idx mask offs start cols rows n m k i a b d e q s u t v w inner lane width grid acc dst mu var value "
               "tl triton as_ am ak bs bk bn a_index b_index BM BN BK BR BI BLOCK fused row sweep matmul "
               "partial_sums".split())


@dataclass(frozen=True)
class Operator:
    """What an operator is called in problems, and what a kernel does for it.

    kind: pointwise; row (over neighbouring dimensions); group (a norm over groups of channels); batch (a norm over all
    dimensions but the channels); all (a reduction to one number); matmul; convolution; or torch: no kernel of ours.
    """

    kind: str = "torch"
    spellings: tuple = ()
    lines: tuple = ()  # of a kernel: see POINTWISE and ROWS
    layer: str = ""  # its constructor in torch.nn
    reads: dict = field(default_factory=dict)  # what a kernel needs of the layer: field of the lines -> attribute
    technique: str = ""  # that lets a kernel compute it
    numbers: dict = field(default_factory=dict)  # field of a spelling -> (what it may be called, values)
    common: bool = False  # drawn more often


def _pointwise(lines, *spellings, **more) -> Operator:
    """A function of single elements. lines: {x} is the element, {a} and {b} are further arguments; the last line is the
    value. They are chosen for float32: no overflow in exp, no cancellation beyond 1e-6.
    """
    return Operator("pointwise", spellings, (lines,) if isinstance(lines, str) else lines, **more)


_SLOPE = {"c": ("negative_slope alpha slope", "0.01 0.1 0.2 0.05")}
_BOUNDS = {"c": ("min_value lower min_val clamp_min", "-1.0 0.0 -2.0 -0.5"),
           "h": ("max_value upper max_val clamp_max", "1.0 2.0 0.5 6.0")}
POINTWISE = {
    "relu": _pointwise("tl.maximum({x}, 0.0)", "torch.relu({x})", "F.relu({x})", "{x}.relu()",
                       "torch.clamp({x}, min=0.0)", layer="ReLU()", common=True),
    "sigmoid": _pointwise("tl.sigmoid({x})", "torch.sigmoid({x})", "{x}.sigmoid()", layer="Sigmoid()", common=True),
    "tanh": _pointwise("2.0 * tl.sigmoid(2.0 * {x}) - 1.0", "torch.tanh({x})", "F.tanh({x})", "{x}.tanh()",
                       layer="Tanh()", common=True),
    "gelu": _pointwise("0.5 * {x} * (1.0 + tl.erf({x} * 0.70710678))", "F.gelu({x})", layer="GELU()", common=True),
    "gelu_tanh": _pointwise("{x} * tl.sigmoid(1.59576912 * ({x} + 0.044715 * {x} * {x} * {x}))",
                            "F.gelu({x}, approximate='tanh')", layer="GELU(approximate='tanh')"),
    "silu": _pointwise("{x} * tl.sigmoid({x})", "F.silu({x})", "{x} * torch.sigmoid({x})", layer="SiLU()", common=True),
    "mish": _pointwise(("e = tl.exp(tl.minimum({x}, 20.0))", "{x} * (e * (e + 2.0)) / (e * (e + 2.0) + 2.0)"),
                       "F.mish({x})", "{x} * torch.tanh(F.softplus({x}))", layer="Mish()", common=True),
    "softplus": _pointwise("tl.where({x} > 20.0, {x}, tl.log(1.0 + tl.exp(tl.minimum({x}, 20.0))))", "F.softplus({x})",
                           layer="Softplus()", common=True),
    "hardswish": _pointwise("{x} * tl.minimum(tl.maximum({x} + 3.0, 0.0), 6.0) / 6.0", "F.hardswish({x})",
                            layer="Hardswish()", common=True),
    "hardsigmoid": _pointwise("tl.minimum(tl.maximum({x} + 3.0, 0.0), 6.0) / 6.0", "F.hardsigmoid({x})",
                              layer="Hardsigmoid()"),
    "softsign": _pointwise("{x} / (1.0 + tl.abs({x}))", "F.softsign({x})", "{x} / (1 + torch.abs({x}))",
                           layer="Softsign()"),
    "selu": _pointwise("1.05070099 * tl.where({x} > 0.0, {x}, 1.67326324 * (tl.exp(tl.minimum({x}, 0.0)) - 1.0))",
                       "F.selu({x})", "torch.selu({x})", layer="SELU()"),
    "relu6": _pointwise("tl.minimum(tl.maximum({x}, 0.0), 6.0)", "F.relu6({x})", layer="ReLU6()"),
    "logsigmoid": _pointwise("tl.minimum({x}, 0.0) - tl.log(1.0 + tl.exp(-tl.abs({x})))", "F.logsigmoid({x})",
                             layer="LogSigmoid()"),
    "abs": _pointwise("tl.abs({x})", "torch.abs({x})", "{x}.abs()"),
    "square": _pointwise("{x} * {x}", "torch.square({x})", "{x} ** 2", "torch.pow({x}, 2)", "{x} * {x}"),
    "exp": _pointwise("tl.exp({x})", "torch.exp(-{x})", "torch.exp({x} * 0.1)"),
    "sin": _pointwise("tl.sin({x})", "torch.sin({x})"), "neg": _pointwise("-{x}", "-{x}", "torch.neg({x})"),
    "leaky_relu": _pointwise("tl.where({x} > 0.0, {x}, {x} * {a})", "F.leaky_relu({x}, {c})", "F.leaky_relu({x})",
                             "F.leaky_relu({x}, negative_slope={c})", layer="LeakyReLU({c})",
                             reads={"a": "negative_slope"}, numbers=_SLOPE),
    "elu": _pointwise("tl.where({x} > 0.0, {x}, {a} * (tl.exp(tl.minimum({x}, 0.0)) - 1.0))", "F.elu({x}, alpha={c})",
                      "F.elu({x}, {c})", "F.elu({x})", layer="ELU({c})", reads={"a": "alpha"}, numbers=_SLOPE),
    "clamp": _pointwise("tl.minimum(tl.maximum({x}, {a}), {b})", "torch.clamp({x}, {c}, {h})", "{x}.clamp({c}, {h})",
                        "torch.clamp({x}, min={c}, max={h})", "F.hardtanh({x}, {c}, {h})", "torch.clamp({x}, min={c})",
                        "torch.clamp({x}, -{h}, {h})", "torch.clamp({x}, min=-{h}, max={h})",
                        layer="Hardtanh({c}, {h})", reads={"a": "min_val", "b": "max_val"}, numbers=_BOUNDS),
    "formula": _pointwise((), *FORMULAS, numbers={"c": ("alpha scale c0", "0.5 0.25 1.5 2.0")}),
}
# Functions that stand in formulas only.
_LINES = {
    "celu": "tl.where({x} > 0.0, {x}, {a} * (tl.exp(tl.minimum({x}, 0.0) / {a}) - 1.0))",
    "softshrink": "{x} - tl.minimum(tl.maximum({x}, -{a}), {a})", "hardshrink": "tl.where(tl.abs({x}) > {a}, {x}, 0.0)",
    "maximum": "tl.maximum({x}, {a})", "minimum": "tl.minimum({x}, {a})", "clamp_min": "tl.maximum({x}, {a})",
    "clamp_max": "tl.minimum({x}, {a})", "sqrt": "tl.sqrt({x})", "rsqrt": "1.0 / tl.sqrt({x})", "log": "tl.log({x})",
    "reciprocal": "1.0 / {x}", "log1p": "tl.log(1.0 + {x})", "exp2": "tl.exp2({x})", "expm1": "tl.exp({x}) - 1.0",
    "cos": "tl.cos({x})", "erf": "tl.erf({x})", "lerp": "{x} + {b} * ({a} - {x})", "addcmul": "{x} + {a} * {b}",
    "threshold": "tl.where({x} > {a}, {x}, {b})", "where": "tl.where({x}, {a}, {b})",
    "masked_fill": "tl.where({a}, {b}, {x})",
    "logaddexp": "tl.maximum({x}, {a}) + tl.log(1.0 + tl.exp(-tl.abs({x} - {a})))"}
POINTWISE |= {name: _pointwise(line) for name, line in _LINES.items()}
# Other names of functions; functions that do what an operator of Python does; arguments that a spelling may leave out.
ALIASES = {"hardtanh": "clamp", "negative": "neg"}
ARITHMETIC = {"add": ast.Add, "sub": ast.Sub, "mul": ast.Mult, "div": ast.Div, "pow": ast.Pow}
DEFAULTS = {"leaky_relu": ("0.01",), "elu": ("1.0",)}

# How a kernel reduces the elements of a row: (first value, an element, how two are joined, how a block is reduced).
# A line "{s} = sum: {x} * {x}" is such a reduction; "first" gives the index of the first element for which {v} holds.
REDUCTIONS = {
    "sum": ("0.0", "tl.where(mask, {v}, 0.0)", "acc + {v}", "tl.sum"),
    "max": ('float("-inf")', 'tl.where(mask, {v}, float("-inf"))', "tl.maximum(acc, {v})", "tl.max"),
    "min": ('float("inf")', 'tl.where(mask, {v}, float("inf"))', "tl.minimum(acc, {v})", "tl.min"),
    "first": ("2147483647", "tl.where(mask & ({v}), offs, 2147483647)", "tl.minimum(acc, {v})", "tl.min")}
SCANS = ("cumsum", "cumprod")  # running ones: only in a kernel that holds the whole row

_LARGEST = "{m} = max: {x}"
_SPREAD = ("{s} = sum: {x}", "{d} = {x} - {s} / cols", "{q} = sum: {d} * {d}")  # two passes: accurate for any offset
_NORMALISED = _SPREAD + ("{t} = {d} / tl.sqrt({q} / cols + {eps})",)
_PARTIAL, _FOLD, _TILE = "partial-sums-loss", "fold-convolution-bias", "tile-matmul-tf32x3"
_LAYER = {"eps": "eps", "weight": "weight", "bias": "bias"}


def _row(technique, spellings, *lines, **more) -> Operator:
    """An operator over rows. lines: {x} is an element and {t} the result; other fields are variables of the kernel.

    spellings: separated by "; "; a bare name stands for torch.name(x, dim=d) and x.name(dim=d).
    """
    if spellings.isidentifier():
        spellings = f"torch.{spellings}({{x}}, dim={{d}}{{keep}}); {{x}}.{spellings}(dim={{d}}{{keep}})"
    return Operator("row", tuple(spellings.split("; ")), lines, technique=technique, **more)


ROWS = {
    "softmax": _row("one-program-per-row", "torch.softmax({x}, dim={d}); F.softmax({x}, dim={d})", _LARGEST,
                    "{e} = tl.exp({x} - {m})", "{s} = sum: {e}", "{t} = {e} / {s}", layer="Softmax(dim={d})"),
    "log_softmax": _row("one-program-per-row", "torch.log_softmax({x}, dim={d}); F.log_softmax({x}, dim={d})", _LARGEST,
                        "{s} = sum: tl.exp({x} - {m})", "{t} = {x} - {m} - tl.log({s})", layer="LogSoftmax(dim={d})"),
    "logsumexp": _row("one-program-per-row", "logsumexp", _LARGEST, "{s} = sum: tl.exp({x} - {m})",
                      "{t} = {m} + tl.log({s})"),
    "normalize": _row("one-program-per-row", "F.normalize({x}, dim={d}); F.normalize({x}, p=2, dim={d})",
                      "{s} = sum: {x} * {x}", "{t} = {x} / tl.maximum(tl.sqrt({s}), 1e-12)"),
    "layer_norm": Operator("row", (), _NORMALISED, "LayerNorm", _LAYER, "one-program-per-row"),
    "sum": _row("row-reduction", "sum", "{t} = sum: {x}"),
    "mean": _row("row-reduction", "mean", "{s} = sum: {x}", "{t} = {s} / cols"),
    "amax": _row("row-reduction", "torch.amax({x}, dim={d}{keep}); {x}.amax(dim={d}{keep}); "
                 "torch.max({x}, dim={d}{keep})[0]; {x}.max(dim={d}{keep}).values", "{t} = max: {x}"),
    "amin": _row("row-reduction", "torch.amin({x}, dim={d}{keep}); {x}.amin(dim={d}{keep}); "
                 "torch.min({x}, dim={d}{keep})[0]; {x}.min(dim={d}{keep}).values", "{t} = min: {x}"),
    "argmax": _row("row-reduction", "argmax", _LARGEST, "{t} = first: {x} == {m}"),
    "argmin": _row("row-reduction", "argmin", "{m} = min: {x}", "{t} = first: {x} == {m}"),
    "norm": _row("row-reduction", "torch.norm({x}, dim={d}{keep}); torch.norm({x}, p=2, dim={d}{keep}); "
                 "torch.linalg.vector_norm({x}, dim={d}{keep})", "{s} = sum: {x} * {x}", "{t} = tl.sqrt({s})"),
    "var": _row("row-reduction", "var", *_SPREAD, "{t} = {q} / (cols - 1)"),
    "std": _row("row-reduction", "std", *_SPREAD, "{t} = tl.sqrt({q} / (cols - 1))"),
    "cumsum": _row("row-scan", "torch.cumsum({x}, dim={d}); {x}.cumsum({d})", "{t} = cumsum: {x}"),
    "cumprod": _row("row-scan", "torch.cumprod({x}, dim={d})", "{t} = cumprod: {x}"),
    "group_norm": Operator("group", (), _NORMALISED, "GroupNorm", _LAYER | {"groups": "num_groups"},
                           "one-program-per-group"),
    "instance_norm": Operator("group", (), _NORMALISED, "InstanceNorm", _LAYER, "one-program-per-group"),
    "batch_norm": Operator("batch", (), ("{t} = ({x} - {mu}) / tl.sqrt({var} + {eps})",), "BatchNorm", _LAYER,
                           "statistics-then-pointwise"),
    # Reductions to one number: what each element becomes, as in POINTWISE, and what is made of the sum of n elements.
    "mean_all": Operator("all", ("torch.mean({x})", "{x}.mean()"), ("{x}", "dst.sum() / n"), technique=_PARTIAL),
    "sum_all": Operator("all", ("torch.sum({x})", "{x}.sum()"), ("{x}", "dst.sum()"), technique=_PARTIAL),
}


def _torch(*spellings) -> Operator:
    return Operator("torch", spellings)


# What stays PyTorch's. Many change the order of the elements of a row, or make them depend on one another.
TORCH = {
    "sort": _torch("torch.sort({x}, dim={d})[0]", "{x}.sort(dim={d})[0]", "{x}.sort(dim={d}).values"),
    "flip": _torch("torch.flip({x}, dims=[{d}])", "torch.flip({x}, [{d}])", "{x}.flip({d})"),
    "fliplr": _torch("torch.fliplr({x})", "{x}.fliplr()"),
    "roll": _torch("torch.roll({x}, 3, dims={d})", "{x}.roll(1, dims={d})", "torch.roll({x}, shifts=7, dims={d})"),
    "cummax": _torch("torch.cummax({x}, dim={d})[0]", "{x}.cummax(dim={d})[0]", "torch.cummax({x}, dim={d}).values"),
    "cummin": _torch("torch.cummin({x}, dim={d})[0]", "{x}.cummin(dim={d})[0]", "torch.cummin({x}, dim={d}).values"),
    "tile": _torch("torch.tile({x}, (1, 2))", "{x}.tile((1, 3))"),
    "repeat": _torch("{x}.repeat(1, 2)", "{x}.repeat(1, 3)"),
    "repeat_interleave": _torch("torch.repeat_interleave({x}, 2, dim={d})", "{x}.repeat_interleave(2, dim={d})"),
    "cat": _torch("torch.cat([{x}, {x}], dim={d})", "torch.cat(({x}, {x}), dim={d})"),
    "pad": _torch("F.pad({x}, (0, 16))", "F.pad({x}, (8, 8))"),
    "tril": _torch("torch.tril({x})", "{x}.tril()"), "triu": _torch("torch.triu({x})", "{x}.triu()"),
    "diff": _torch("torch.diff({x}, dim={d})", "{x}.diff(dim={d})"),
    "topk": _torch("torch.topk({x}, 64, dim={d})[0]", "{x}.topk(32, dim={d})[0]", "torch.topk({x}, k=50).values"),
    "transpose": _torch("{x}.transpose(0, -1)", "{x}.transpose(0, -1).contiguous()", "torch.swapaxes({x}, 0, -1)"),
    "dropout": _torch("F.dropout({x}, p=0.0)"), "clone": _torch("{x}.clone()", "{x}.contiguous()"),
    "alias": _torch("{x}", "{x}", "{x}.clone()"), "pooling": _torch(), "call": _torch(),  # call: any other expression
    "convolution": Operator("convolution", reads={"bias": "bias"}, technique=_FOLD),
    "conv_transpose": Operator("convolution", reads={"bias": "bias"}, technique=_FOLD),
    "linear": Operator("matmul", reads={"weight": "weight", "bias": "bias"}, technique=_TILE),
    "product": Operator("matmul", technique=_TILE),
    "bias": Operator("pointwise"),  # of a convolution, which a kernel adds
    "diagonal": Operator("pointwise", ("torch.diag({y}) @ {x}", "torch.matmul(torch.diag({y}), {x})"),
                         technique="diagonal-as-scaling"),
}

# What problems write as one expression of several operators: variants, each a row of (result, operator, expression). A
# result is the variable t, or "" for the last.
_KEPT = "dim={d}, keepdim=True)"
COMPOSED = {
    "rms": ((("t", "formula", "{x} ** 2"), ("t", "mean", "torch.mean({t}, " + _KEPT),
             ("", "formula", "{x} / torch.sqrt({t} + {c})")),
            (("t", "formula", "{x}.pow(2)"), ("t", "mean", "{t}.mean(" + _KEPT),
             ("", "formula", "{x} * torch.rsqrt({t} + {c})")),
            (("t", "formula", "{x} * {x}"), ("t", "mean", "torch.mean({t}, " + _KEPT),
             ("", "formula", "{x} * torch.rsqrt({t} + {c})"))),
    "l2": ((("t", "norm", "torch.norm({x}, " + _KEPT), ("", "formula", "{x} / {t}")),
           (("t", "norm", "torch.norm({x}, p=2, " + _KEPT), ("", "formula", "{x} / ({t} + 1e-6)"))),
    "share": ((("t", "sum", "torch.sum({x}, " + _KEPT), ("", "formula", "{x} / {t}")),
              (("t", "sum", "{x}.sum(" + _KEPT), ("", "formula", "{x} / ({t} + 1e-6)"))),
    "centre": ((("t", "mean", "torch.mean({x}, " + _KEPT), ("", "formula", "{x} - {t}")),
               (("t", "mean", "{x}.mean(" + _KEPT), ("", "formula", "{x} - {t}"))),
    "mean_abs": ((("t", "formula", "torch.abs({x})"), ("t", "mean", "torch.mean({t}, " + _KEPT),
                  ("", "formula", "{x} / {t}")),),
    "sum_squares": ((("t", "formula", "{x} * {x}"), ("", "sum", "torch.sum({t}, dim={d}{keep})")),
                    (("t", "formula", "{x} ** 2"), ("", "sum", "{t}.sum(dim={d}{keep})"))),
    "softmin": ((("t", "formula", "-{x}"), ("", "softmax", "torch.softmax({t}, dim={d})")),),
}

# Losses of torch.nn.functional, of predictions {x} and targets {y}: the term of an element ({a}: the target).
_HUBER = ("d = tl.abs({x} - {a})", "tl.where(d < 1.0, 0.5 * d * d, d - 0.5)")
_ENTROPY = "tl.maximum({x}, 0.0) - {x} * {a} + tl.log(1.0 + tl.exp(-tl.abs({x})))"
_TERMS = {"mse_loss": ("d = {x} - {a}", "d * d"), "l1_loss": ("tl.abs({x} - {a})",), "smooth_l1_loss": _HUBER,
          "huber_loss": _HUBER, "binary_cross_entropy_with_logits": (_ENTROPY,)}
LOSSES = {}
for _name, _term in _TERMS.items():
    LOSSES[_name] = Operator("all", (f"F.{_name}({{x}}, {{y}})",), (*_term, "dst.sum() / n"), technique=_PARTIAL)
    LOSSES[f"{_name}_sum"] = Operator("all", (f"F.{_name}({{x}}, {{y}}, reduction='sum')",), (*_term, "dst.sum()"),
                                      technique=_PARTIAL)
WRITTEN_LOSSES = ("({x} - {y}) ** 2", "torch.abs({x} - {y})", "torch.relu(1 - {x} * {y})", "F.softplus(-{x} * {y})",
                  "torch.sigmoid({x}) * {y}", "torch.clamp({c} - {x} * {y}, min=0)", "torch.abs({x} * {y} - {c})")
OPERATORS = POINTWISE | ROWS | TORCH | LOSSES

# Products: (dimensions of the factors, first factor, second factor, spellings). Names of sizes: b, m, k, n.
PRODUCTS = (
    ("mk", "kn", "{x}", "{y}", ("torch.matmul({x}, {y})", "{x} @ {y}", "torch.mm({x}, {y})")),
    ("km", "kn", "{x}.T", "{y}", ("torch.matmul({x}.T, {y})", "{x}.t() @ {y}", "torch.mm({x}.T, {y})")),
    ("mk", "nk", "{x}", "{y}.T", ("torch.matmul({x}, {y}.T)", "{x} @ {y}.T", "{x} @ {y}.transpose(0, 1)")),
    ("km", "nk", "{x}.T", "{y}.T", ("torch.matmul({x}.T, {y}.T)", "{x}.t() @ {y}.t()")),
    ("bmk", "bkn", "{x}", "{y}", ("torch.bmm({x}, {y})", "torch.matmul({x}, {y})",
                                      "torch.einsum('bmk,bkn->bmn', {x}, {y})")),
    ("bmk", "bnk", "{x}", "{y}.mT", ("torch.bmm({x}, {y}.transpose(1, 2))", "{x} @ {y}.transpose(-2, -1)")),
    ("bmk", "kn", "{x}", "{y}", ("torch.matmul({x}, {y})", "torch.einsum('bmk,kn->bmn', {x}, {y})")),
    ("bmk", "nk", "{x}", "{y}.t()", ("F.linear({x}, {y})", "{x} @ {y}.t()", "torch.inner({x}, {y})")))

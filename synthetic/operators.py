"""The table of operators: how problems spell them and how kernels compute them, a row each.

Spellings are torch expressions. In them {x} is the operand, {y} a second tensor, {c} a number, {d} a dimension, and
{keep} is ", keepdim=True" or nothing. The lines of a kernel are Triton.

To add a pointwise operator: a row of POINTWISE. If problems can also spell it with other operators, `tasks._WRITTEN_OUT`
has to say so, or we could train on a near-duplicate of an evaluation problem.
"""

import ast
from dataclasses import dataclass

# Variables that kernels use for themselves. Problems get no such names, so that nothing has to be renamed.
RESERVED = set("idx mask offs start cols rows n m k i a b d e q s u t v w inner lane width grid acc dst mu var tl triton "
               "as_ am ak bs bk bn a_index b_index BM BN BK BR BI BLOCK fused row sweep loss matmul".split())


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
    reads: tuple = ()  # what a kernel needs of the layer: (field of the lines, attribute of the layer)
    technique: str = ""  # that lets a kernel compute it
    common: bool = False  # drawn more often
    definition: tuple = ()  # the same in simpler operators, see COMPOSED


def pointwise(lines, *spellings, layer="", reads=(), common=False) -> Operator:
    """A function of single elements. lines: {x} is the element, {a} and {b} are further arguments; the last line is the
    value. They are chosen for float32: no overflow in exp, no cancellation beyond 1e-6.
    """
    lines = (lines,) if isinstance(lines, str) else lines
    return Operator("pointwise", spellings, lines, layer, tuple(zip("ab", reads)), common=common)


POINTWISE = {
    "relu": pointwise("tl.maximum({x}, 0.0)", "torch.relu({x})", "F.relu({x})", "{x}.relu()",
                      "torch.clamp({x}, min=0.0)", layer="ReLU()", common=True),
    "sigmoid": pointwise("tl.sigmoid({x})", "torch.sigmoid({x})", "torch.sigmoid({x})", "{x}.sigmoid()",
                         layer="Sigmoid()", common=True),
    "tanh": pointwise("2.0 * tl.sigmoid(2.0 * {x}) - 1.0", "torch.tanh({x})", "F.tanh({x})", "{x}.tanh()",
                      layer="Tanh()", common=True),
    "gelu": pointwise("0.5 * {x} * (1.0 + tl.erf({x} * 0.70710678))", "F.gelu({x})", layer="GELU()", common=True),
    "gelu_tanh": pointwise("{x} * tl.sigmoid(1.59576912 * ({x} + 0.044715 * {x} * {x} * {x}))",
                           "F.gelu({x}, approximate='tanh')", layer="GELU(approximate='tanh')"),
    "silu": pointwise("{x} * tl.sigmoid({x})", "F.silu({x})", "{x} * torch.sigmoid({x})", "torch.sigmoid({x}) * {x}",
                      layer="SiLU()", common=True),
    "mish": pointwise(("e = tl.exp(tl.minimum({x}, 20.0))", "{x} * (e * (e + 2.0)) / (e * (e + 2.0) + 2.0)"),
                      "F.mish({x})", "{x} * torch.tanh(F.softplus({x}))", layer="Mish()", common=True),
    "softplus": pointwise("tl.where({x} > 20.0, {x}, tl.log(1.0 + tl.exp(tl.minimum({x}, 20.0))))", "F.softplus({x})",
                          layer="Softplus()", common=True),
    "hardswish": pointwise("{x} * tl.minimum(tl.maximum({x} + 3.0, 0.0), 6.0) / 6.0", "F.hardswish({x})",
                           layer="Hardswish()", common=True),
    "hardsigmoid": pointwise("tl.minimum(tl.maximum({x} + 3.0, 0.0), 6.0) / 6.0", "F.hardsigmoid({x})",
                             layer="Hardsigmoid()"),
    "softsign": pointwise("{x} / (1.0 + tl.abs({x}))", "F.softsign({x})", "{x} / (1 + torch.abs({x}))",
                          layer="Softsign()"),
    "selu": pointwise("1.05070099 * tl.where({x} > 0.0, {x}, 1.67326324 * (tl.exp(tl.minimum({x}, 0.0)) - 1.0))",
                      "F.selu({x})", "torch.selu({x})", layer="SELU()"),
    "relu6": pointwise("tl.minimum(tl.maximum({x}, 0.0), 6.0)", "F.relu6({x})", layer="ReLU6()"),
    "logsigmoid": pointwise("tl.minimum({x}, 0.0) - tl.log(1.0 + tl.exp(-tl.abs({x})))", "F.logsigmoid({x})",
                            layer="LogSigmoid()"),
    "abs": pointwise("tl.abs({x})", "torch.abs({x})", "{x}.abs()"),
    "square": pointwise("{x} * {x}", "torch.square({x})", "{x} ** 2", "torch.pow({x}, 2)", "{x} * {x}"),
    "exp": pointwise("tl.exp({x})", "torch.exp(-{x})", "torch.exp({x} * 0.1)"),
    "sin": pointwise("tl.sin({x})", "torch.sin({x})"),
    "neg": pointwise("-{x}", "-{x}", "torch.neg({x})"),
    # These are drawn with arguments of their own (families.py), or only as part of a formula.
    "leaky_relu": pointwise("tl.where({x} > 0.0, {x}, {x} * {a})", layer="LeakyReLU()", reads=("negative_slope",)),
    "elu": pointwise("tl.where({x} > 0.0, {x}, {a} * (tl.exp(tl.minimum({x}, 0.0)) - 1.0))", layer="ELU()",
                     reads=("alpha",)),
    "clamp": pointwise("tl.minimum(tl.maximum({x}, {a}), {b})", layer="Hardtanh()", reads=("min_val", "max_val")),
    "celu": pointwise("tl.where({x} > 0.0, {x}, {a} * (tl.exp(tl.minimum({x}, 0.0) / {a}) - 1.0))"),
    "softshrink": pointwise("{x} - tl.minimum(tl.maximum({x}, -{a}), {a})"),
    "hardshrink": pointwise("tl.where(tl.abs({x}) > {a}, {x}, 0.0)"),
    "smooth_l1_loss": pointwise(("d = tl.abs({x} - {a})", "tl.where(d < 1.0, 0.5 * d * d, d - 0.5)")),
    "maximum": pointwise("tl.maximum({x}, {a})"), "minimum": pointwise("tl.minimum({x}, {a})"),
    "clamp_min": pointwise("tl.maximum({x}, {a})"), "clamp_max": pointwise("tl.minimum({x}, {a})"),
    "sqrt": pointwise("tl.sqrt({x})"), "rsqrt": pointwise("1.0 / tl.sqrt({x})"),
    "reciprocal": pointwise("1.0 / {x}"), "log": pointwise("tl.log({x})"), "log1p": pointwise("tl.log(1.0 + {x})"),
    "exp2": pointwise("tl.exp2({x})"), "expm1": pointwise("tl.exp({x}) - 1.0"), "cos": pointwise("tl.cos({x})"),
    "erf": pointwise("tl.erf({x})"), "lerp": pointwise("{x} + {b} * ({a} - {x})"),
    "addcmul": pointwise("{x} + {a} * {b}"), "threshold": pointwise("tl.where({x} > {a}, {x}, {b})"),
    "where": pointwise("tl.where({x}, {a}, {b})"), "masked_fill": pointwise("tl.where({a}, {b}, {x})"),
    "logaddexp": pointwise("tl.maximum({x}, {a}) + tl.log(1.0 + tl.exp(-tl.abs({x} - {a})))"),
    "binary_cross_entropy_with_logits":
        pointwise("tl.maximum({x}, 0.0) - {x} * {a} + tl.log(1.0 + tl.exp(-tl.abs({x})))"),
    "formula": pointwise(()),  # an expression of the functions above, and of Python's operators
}
# Other names of functions; functions that do what an operator of Python does; arguments that a spelling may leave out.
ALIASES = {"hardtanh": "clamp", "negative": "neg", "multiply": "mul", "subtract": "sub", "divide": "div"}
ARITHMETIC = {"add": ast.Add, "sub": ast.Sub, "mul": ast.Mult, "div": ast.Div, "pow": ast.Pow}
DEFAULTS = {"leaky_relu": ("0.01",), "elu": ("1.0",), "celu": ("1.0",)}

# How a kernel reduces the elements of a row: (first value, an element, how two are joined, how a block is reduced).
# A line "{s} = sum: {x} * {x}" is such a reduction; "first" gives the index of the first element for which {v} holds.
REDUCTIONS = {
    "sum": ("0.0", "tl.where(mask, {v}, 0.0)", "{s} + {v}", "tl.sum"),
    "max": ('float("-inf")', 'tl.where(mask, {v}, float("-inf"))', "tl.maximum({s}, {v})", "tl.max"),
    "min": ('float("inf")', 'tl.where(mask, {v}, float("inf"))', "tl.minimum({s}, {v})", "tl.min"),
    "first": ("2147483647", "tl.where(mask & ({v}), offs, 2147483647)", "tl.minimum({s}, {v})", "tl.min"),
}
SCANS = {"cumsum": "0.0", "cumprod": "1.0"}  # running ones, and what they begin with

_LARGEST = "{m} = max: {x}"
_SPREAD = ("{s} = sum: {x}", "{d} = {x} - {s} / cols", "{q} = sum: {d} * {d}")  # two passes: accurate for any offset
_NORMALISED = _SPREAD + ("{t} = {d} / tl.sqrt({q} / cols + {eps})",)
_LAYER = (("eps", "eps"), ("weight", "weight"), ("bias", "bias"))


def _row(technique, spellings, *lines, layer="", reads=()) -> Operator:
    """An operator over rows. lines: {x} is an element and {t} the result; other fields are variables of the kernel."""
    return Operator("row", tuple(spellings), lines, layer, reads, technique)


def _both(name) -> tuple:
    """torch.name(x, dim=d) and x.name(d)."""
    return "torch." + name + "({x}, dim={d}{keep})", "{x}." + name + "(dim={d}{keep})"


ROWS = {
    "softmax": _row("one-program-per-row", ("torch.softmax({x}, dim={d})", "F.softmax({x}, dim={d})"), _LARGEST,
                    "{e} = tl.exp({x} - {m})", "{s} = sum: {e}", "{t} = {e} / {s}", layer="Softmax(dim={d})"),
    "log_softmax": _row("one-program-per-row", ("torch.log_softmax({x}, dim={d})", "F.log_softmax({x}, dim={d})"),
                        _LARGEST, "{s} = sum: tl.exp({x} - {m})", "{t} = {x} - {m} - tl.log({s})",
                        layer="LogSoftmax(dim={d})"),
    "logsumexp": _row("one-program-per-row", _both("logsumexp"), _LARGEST, "{s} = sum: tl.exp({x} - {m})",
                      "{t} = {m} + tl.log({s})"),
    "sum": _row("row-reduction", _both("sum"), "{t} = sum: {x}"),
    "mean": _row("row-reduction", _both("mean"), "{s} = sum: {x}", "{t} = {s} / cols"),
    "amax": _row("row-reduction", _both("amax") + ("torch.max({x}, dim={d}{keep})[0]",
                                                   "torch.max({x}, dim={d}{keep}).values"), "{t} = max: {x}"),
    "amin": _row("row-reduction", _both("amin") + ("torch.min({x}, dim={d}{keep})[0]",
                                                   "{x}.min(dim={d}{keep}).values"), "{t} = min: {x}"),
    "argmax": _row("row-reduction", ("torch.argmax({x}, dim={d}{keep})", "{x}.argmax(dim={d}{keep})",
                                     "torch.max({x}, dim={d}{keep})[1]"), _LARGEST, "{t} = first: {x} == {m}"),
    "argmin": _row("row-reduction", ("torch.argmin({x}, dim={d}{keep})", "{x}.argmin(dim={d}{keep})"),
                   "{m} = min: {x}", "{t} = first: {x} == {m}"),
    "norm": _row("row-reduction", ("torch.norm({x}, dim={d}{keep})", "torch.norm({x}, p=2, dim={d}{keep})",
                                   "torch.linalg.vector_norm({x}, dim={d}{keep})", "{x}.norm(p=2, dim={d}{keep})"),
                 "{s} = sum: {x} * {x}", "{t} = tl.sqrt({s})"),
    "var": _row("row-reduction", _both("var"), *_SPREAD, "{t} = {q} / (cols - 1)"),
    "std": _row("row-reduction", _both("std"), *_SPREAD, "{t} = tl.sqrt({q} / (cols - 1))"),
    "normalize": _row("one-program-per-row", ("F.normalize({x}, dim={d})", "F.normalize({x}, p=2, dim={d})"),
                      "{s} = sum: {x} * {x}", "{t} = {x} / tl.maximum(tl.sqrt({s}), 1e-12)"),
    "layer_norm": _row("one-program-per-row", (), *_NORMALISED, layer="LayerNorm", reads=_LAYER),
    "cumsum": _row("row-scan", ("torch.cumsum({x}, dim={d})", "{x}.cumsum({d})"), "{t} = cumsum: {x}"),
    "cumprod": _row("row-scan", ("torch.cumprod({x}, dim={d})",), "{t} = cumprod: {x}"),
    "group_norm": Operator("group", (), _NORMALISED, "GroupNorm", (*_LAYER, ("groups", "num_groups")),
                           "one-program-per-group"),
    "instance_norm": Operator("group", (), _NORMALISED, "InstanceNorm", _LAYER, "one-program-per-group"),
    "batch_norm": Operator("batch", (), ("{t} = ({x} - {mu}) / tl.sqrt({var} + {eps})",), "BatchNorm", _LAYER,
                           "statistics-then-pointwise"),
}

# Reductions to one number: what each element becomes, and what is made of the sum (n: the number of elements).
WHOLE = {"mean_all": Operator("all", ("torch.mean({x})", "{x}.mean()"), ("{x}", "dst.sum() / n")),
         "sum_all": Operator("all", ("torch.sum({x})", "{x}.sum()"), ("{x}", "dst.sum()")),
         "norm_all": Operator("all", ("torch.norm({x})",), ("{x} * {x}", "torch.sqrt(dst.sum())"))}


def _along(*spellings) -> Operator:
    return Operator("torch", spellings)


# What stays PyTorch's. Most change the order of the elements of a row, or make them depend on one another.
TORCH = {
    "sort": _along("torch.sort({x}, dim={d})[0]", "torch.sort({x}, dim={d}).values", "{x}.sort(dim={d})[0]"),
    "flip": _along("torch.flip({x}, dims=[{d}])", "torch.flip({x}, [{d}])", "{x}.flip({d})"),
    "roll": _along("torch.roll({x}, 1, {d})", "{x}.roll(2, {d})", "torch.roll({x}, shifts=3, dims={d})"),
    "cummax": _along("torch.cummax({x}, dim={d})[0]", "torch.cummax({x}, dim={d}).values", "{x}.cummax({d})[0]"),
    "cummin": _along("torch.cummin({x}, dim={d})[0]", "torch.cummin({x}, dim={d}).values", "{x}.cummin({d})[0]"),
    "cat": _along("torch.cat([{x}, {x}], dim={d})", "torch.cat(({x}, {x}), {d})"),
    "transpose": _along("{x}.transpose(0, -1)", "{x}.transpose(0, -1).contiguous()", "torch.swapaxes({x}, 0, -1)"),
    "tril": _along("torch.tril({x})", "torch.triu({x})", "torch.triu({x}, diagonal=1)"),
    "dropout": _along("F.dropout({x}, p=0.0)"), "clone": _along("{x}.clone()", "{x}.contiguous()"),
    "alias": _along("{x}", "{x}", "{x}", "{x}.clone()", "{x}.clone().detach()", "{x}.detach()"),
    "flatten": _along("torch.flatten({x}, 1)", "torch.flatten({x}, start_dim=1)", "{x}.flatten(1)",
                      "{x}.view({x}.size(0), -1)"),
    "call": _along(),  # any other expression
    "pooling": Operator("torch", ()),
    "convolution": Operator("convolution", reads=(("bias", "bias"),)),
    "conv_transpose": Operator("convolution", reads=(("bias", "bias"),)),
    # The fields {a} and {b} of a product are its factors, as a matrix product of two dimensions or of stacks of them.
    "linear": Operator("matmul", ("{layer}({x})",), reads=(("weight", "weight"), ("bias", "bias"))),
    "product": Operator("matmul"),
    "diagonal": Operator("pointwise", ("torch.diag({y}) @ {x}", "torch.matmul(torch.diag({y}), {x})"), ("{y} * {x}",)),
}

# Losses of torch.nn.functional, each with the simpler operators that it is made of: (result, operator, expression). A
# result is a variable of its own (t, u), or "" for the last.
_MEAN = ("", "mean_all", "torch.mean({t})")
_DISTANCES = (("t", "formula", "{x} - {y} + 1e-06"), ("t", "norm", "torch.norm({t}, dim={d})"),
              ("u", "formula", "{x} - {z} + 1e-06"), ("u", "norm", "torch.norm({u}, dim={d})"),
              ("t", "formula", "torch.relu({t} - {u} + 0.5)"), _MEAN)
_ENTROPY = (("t", "logsumexp", "torch.logsumexp({x}, dim={d})"),
            ("u", "call", "{x}.gather(1, {y}.unsqueeze(1)).squeeze(1)"), ("t", "formula", "{t} - {u}"))
_SIMILARITY = (("t", "formula", "{x} * {y}"), ("t", "sum", "torch.sum({t}, dim={d})"),
               ("u", "norm", "torch.norm({x}, dim={d})"), ("v", "norm", "torch.norm({y}, dim={d})"),
               ("", "formula", "{t} / torch.clamp({u} * {v}, min=1e-08)"))


def _loss(spelling, term) -> Operator:
    """The mean of a term, or with reduction='sum' its sum."""
    total = "sum_all" if "'sum'" in spelling else "mean_all"
    return Operator("torch", (spelling,), definition=(("t", "formula", term),
                                                      ("", total, WHOLE[total].spellings[0].replace("x", "t"))))


_HUBER, _LOGITS = "F.smooth_l1_loss({x}, {y}, reduction='none')", "F.binary_cross_entropy_with_logits({x}, {y}, reduction='none')"
LOSSES = {
    "mse_loss": _loss("F.mse_loss({x}, {y})", "({x} - {y}) ** 2"),
    "mse_sum": _loss("F.mse_loss({x}, {y}, reduction='sum')", "({x} - {y}) ** 2"),
    "l1_loss": _loss("F.l1_loss({x}, {y})", "torch.abs({x} - {y})"),
    "l1_sum": _loss("F.l1_loss({x}, {y}, reduction='sum')", "torch.abs({x} - {y})"),
    "smooth_l1": _loss("F.smooth_l1_loss({x}, {y})", _HUBER), "huber_loss": _loss("F.huber_loss({x}, {y})", _HUBER),
    "bce_logits": _loss("F.binary_cross_entropy_with_logits({x}, {y})", _LOGITS),
    "bce_logits_sum": _loss("F.binary_cross_entropy_with_logits({x}, {y}, reduction='sum')", _LOGITS),
    "kl_div": Operator("torch", ("F.kl_div({x}, {y}, reduction='batchmean')",), definition=(
        ("t", "formula", "{y} * (torch.log(torch.clamp({y}, min=1e-38)) - {x})"), ("t", "sum_all", "torch.sum({t})"),
        ("", "call", "{t} / {x}.shape[0]"))),
    "cosine_similarity": Operator("torch", ("F.cosine_similarity({x}, {y}, dim={d})",), definition=_SIMILARITY),
    "cross_entropy": Operator("torch", ("F.cross_entropy({x}, {y})",), definition=(*_ENTROPY, _MEAN)),
    "cross_entropy_sum": Operator("torch", ("F.cross_entropy({x}, {y}, reduction='sum')",),
                                  definition=(*_ENTROPY, ("", "sum_all", "torch.sum({t})"))),
    "triplet_margin_loss": Operator("torch", ("F.triplet_margin_loss({x}, {y}, {z}, margin=0.5)",),
                                    definition=_DISTANCES),
}
OPERATORS = POINTWISE | ROWS | WHOLE | TORCH | LOSSES

# What problems write as one expression of several operators, in the same form as a definition. A row with several
# variants has them one after the other.
_KEPT = "dim={d}, keepdim=True)"
COMPOSED = {
    "rms": ((("t", "formula", "{x} ** 2"), ("t", "mean", "torch.mean({t}, " + _KEPT),
             ("", "formula", "{x} / torch.sqrt({t} + {c})")),
            (("t", "formula", "{x}.pow(2)"), ("t", "mean", "{t}.mean(" + _KEPT),
             ("", "formula", "{x} * torch.rsqrt({t} + {c})"))),
    "l2": ((("t", "norm", "torch.norm({x}, " + _KEPT), ("", "formula", "{x} / {t}")),
           (("t", "norm", "torch.norm({x}, p=2, " + _KEPT), ("", "formula", "{x} / ({t} + 1e-6)"))),
    "share": ((("t", "sum", "torch.sum({x}, " + _KEPT), ("", "formula", "{x} / {t}")),
              (("t", "sum", "{x}.sum(" + _KEPT), ("", "formula", "{x} / ({t} + 1e-6)"))),
    "centre": ((("t", "mean", "torch.mean({x}, " + _KEPT), ("", "formula", "{x} - {t}")),
               (("t", "mean", "{x}.mean(" + _KEPT), ("", "formula", "{x} - {t}"))),
    "shift_max": ((("t", "amax", "torch.amax({x}, " + _KEPT), ("", "formula", "{x} - {t}")),),
    "divide_std": ((("t", "std", "torch.std({x}, " + _KEPT), ("", "formula", "{x} / {t}")),),
    "mean_abs": ((("t", "formula", "torch.abs({x})"), ("t", "mean", "torch.mean({t}, " + _KEPT),
                  ("", "formula", "{x} / {t}")),),
    "sum_squares": ((("t", "formula", "{x} * {x}"), ("", "sum", "torch.sum({t}, dim={d}{keep})")),
                    (("t", "formula", "{x} ** 2"), ("", "sum", "{t}.sum(dim={d}{keep})"))),
    "frobenius": ((("t", "norm_all", "torch.norm({x}, p='fro')"), ("", "formula", "{x} / {t}")),),
    "reversed_cumsum": ((("t", "flip", "torch.flip({x}, [{d}])"), ("t", "cumsum", "torch.cumsum({t}, {d})"),
                         ("", "flip", "torch.flip({t}, [{d}])")),),
    "entropy": ((("t", "formula", "torch.exp({x}) * {x}"), ("t", "sum", "torch.sum({t}, " + _KEPT),
                 ("", "formula", "-{t}")),),
    "softmin": ((("t", "formula", "-{x}"), ("", "softmax", "torch.softmax({t}, dim={d})")),),
    "dissimilarity": ((("t", "cosine_similarity", "F.cosine_similarity({x}, {y}, dim={d})"),
                       ("t", "formula", "1 - {t}"), _MEAN),),
    "distance": ((("t", "formula", "{x} - {y}"), ("", "norm_all", "torch.norm({t})")),),
}

# Formulas of one tensor, and of two. {c} is a number above 0.
FORMULAS = (
    "0.5 * {x} * (1.0 + torch.tanh(0.79788456 * ({x} + 0.044715 * torch.pow({x}, 3))))",
    "{x} * torch.sigmoid(1.702 * {x})", "torch.where({x} > 0, {x}, 0.1 * {x})", "{x} / (1.0 + torch.abs({x}))",
    "torch.where({x} > {c}, {x}, {x} * {x})", "torch.log(1 + torch.exp(-torch.abs({x})))",
    "torch.clamp({x} + 3, 0, 6) / 6", "torch.sin({x}) * torch.cos({x})", "torch.exp(-{x} * {x})",
    "{x}.masked_fill({x} < {c}, 0.0)", "torch.maximum({x}, -{x} * {c})", "{x} * {x} + {c} * {x}",
    "torch.sqrt({x} * {x} + 1.0) - 1.0", "torch.exp2({x})", "torch.expm1({x})", "torch.log1p({x}.abs())",
    "torch.erf({x})", "torch.reciprocal({x}.abs() + {c})", "torch.sqrt(torch.abs({x}))", "torch.cos({x})",
    "F.celu({x}, alpha={c})", "F.softshrink({x}, {c})", "F.hardshrink({x}, lambd={c})", "F.threshold({x}, {c}, 0.0)",
    "torch.rsqrt({x}.abs() + {c})", "torch.pow({x}, 3)", "F.elu({x}, {c})", "({x} - {c}) * 2",
    "torch.log(torch.abs({x}) + {c})", "0.5 * ({x} + torch.tanh({x}))", "{x} * {c} ** -0.5",
    "torch.where({x}.abs() > {c}, {x}, torch.zeros_like({x}))", "torch.mul({x}, {c})", "torch.add({x}, {c})",
    "torch.div({x}, {c})", "{c} * torch.tanh({x} / {c})", "({x} + {c}).abs().sqrt()", "{x} / math.sqrt({c})",
    "F.elu({x}) ** 2", "3 * {x} - {c}", "{x} * F.relu6({x} + 3) / 6", "torch.exp(-{c} * {x})", "{x} / (1 + {x}.abs())",
    "F.hardtanh({x}, min_val=-1, max_val=1)", "F.hardtanh({x}, min_val=0, max_val=6)")
PAIRS = (
    "torch.maximum({x}, {y})", "torch.minimum({x}, {y})", "torch.where({y} > 0, {x}, {y})", "{x} * torch.sigmoid({y})",
    "torch.lerp({x}, {y}, 0.3)", "{c} * {x} + (1 - {c}) * {y}", "({x} - {y}).abs()", "{x}.masked_fill({y} > 0.5, 0.0)",
    "torch.logaddexp({x}, {y})", "torch.addcmul({x}, {y}, {y})", "torch.where({y} > 0, {x}, {c})",
    "torch.div({x}, {y}.abs() + {c})", "{c} * F.relu({x}) + {y}", "F.gelu({x}) + {c} * {y}",
    "torch.tanh({x} / {c}) * {y}")
# Terms of a loss, in which {y} is the target.
TERMS = ("({x} - {y}) ** 2", "torch.abs({x} - {y})", "torch.relu(1 - {x} * {y})", "F.softplus(-{x} * {y})",
         "torch.sigmoid({x}) * {y}", "torch.clamp({c} - {x} * {y}, min=0)", "torch.abs({x} * {y} - {c})",
         "torch.tanh({x}) * {y}")
# Products: (dimensions of the factors, first factor, second factor, spellings). Names of sizes: b, m, k, n.
PRODUCTS = (
    ("m k", "k n", "{x}", "{y}", ("torch.matmul({x}, {y})", "{x} @ {y}", "torch.mm({x}, {y})")),
    ("k m", "k n", "{x}.T", "{y}", ("torch.matmul({x}.T, {y})", "{x}.t() @ {y}", "torch.mm({x}.T, {y})")),
    ("m k", "n k", "{x}", "{y}.T", ("torch.matmul({x}, {y}.T)", "{x} @ {y}.T", "{x} @ {y}.transpose(0, 1)")),
    ("k m", "n k", "{x}.T", "{y}.T", ("torch.matmul({x}.T, {y}.T)", "{x}.t() @ {y}.t()")),
    ("b m k", "b k n", "{x}", "{y}", ("torch.bmm({x}, {y})", "torch.matmul({x}, {y})", "{x} @ {y}")),
    ("b m k", "b n k", "{x}", "{y}.transpose(1, 2)", ("torch.bmm({x}, {y}.transpose(1, 2))",
                                                      "{x} @ {y}.transpose(-2, -1)")),
    ("b m k", "k n", "{x}", "{y}", ("torch.matmul({x}, {y})", "torch.einsum('bmk,kn->bmn', {x}, {y})")),
    ("b m k", "b k n", "{x}", "{y}", ("torch.einsum('bmk,bkn->bmn', {x}, {y})",)),
    ("b m k", "n k", "{x}", "{y}.t()", ("F.linear({x}, {y})", "{x} @ {y}.t()", "torch.inner({x}, {y})")))

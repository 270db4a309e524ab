"""What operators are: how problems spell them and how the expert's kernels compute them, a table row each.

The generator draws pointwise operators from this table, the reader finds them by their names and layers, and
codegen.py writes their formulas. A new one is a new row; if problems can also spell it with other operators,
`tasks._WRITTEN_OUT` has to say so, or a near-duplicate of an evaluation problem could be trained on.
"""

import ast
import inspect
from dataclasses import dataclass, field

import torch.nn as nn


@dataclass(frozen=True)
class Operator:
    """A function of one tensor, element by element, with up to two further arguments."""

    # Lines of a Triton kernel; {x} is the operand, {a} and {b} are further arguments, the last line is the value.
    # Chosen for fp32: no overflow in exp, no cancellation beyond 1e-6.
    triton: tuple
    calls: tuple = ()  # spellings in `forward`; the generator draws the operator for its chains only if there are any
    layer: str = ""  # its constructor in torch.nn
    attributes: tuple = ()  # of the layer: they become {a} and {b}
    defaults: tuple = ()  # {a} and {b} of a call that does not give them
    common: bool = False  # drawn more often


POINTWISE = {
    "relu": Operator(("tl.maximum({x}, 0.0)",),
                     ("torch.relu({x})", "F.relu({x})", "{x}.relu()", "torch.clamp({x}, min=0.0)"), "ReLU()",
                     common=True),
    "sigmoid": Operator(("tl.sigmoid({x})",), ("torch.sigmoid({x})", "torch.sigmoid({x})", "{x}.sigmoid()"),
                        "Sigmoid()", common=True),
    "tanh": Operator(("2.0 * tl.sigmoid(2.0 * {x}) - 1.0",), ("torch.tanh({x})", "F.tanh({x})", "{x}.tanh()"),
                     "Tanh()", common=True),
    "gelu": Operator(("0.5 * {x} * (1.0 + tl.erf({x} * 0.70710678))",), ("F.gelu({x})",), "GELU()", common=True),
    "gelu_tanh": Operator(("{x} * tl.sigmoid(1.59576912 * ({x} + 0.044715 * {x} * {x} * {x}))",),
                          ("F.gelu({x}, approximate='tanh')",), "GELU(approximate='tanh')"),
    "silu": Operator(("{x} * tl.sigmoid({x})",),
                     ("F.silu({x})", "{x} * torch.sigmoid({x})", "torch.sigmoid({x}) * {x}"), "SiLU()", common=True),
    "mish": Operator(("e = tl.exp(tl.minimum({x}, 20.0))", "{x} * (e * (e + 2.0)) / (e * (e + 2.0) + 2.0)"),
                     ("F.mish({x})", "{x} * torch.tanh(F.softplus({x}))"), "Mish()", common=True),
    "softplus": Operator(("tl.where({x} > 20.0, {x}, tl.log(1.0 + tl.exp(tl.minimum({x}, 20.0))))",),
                         ("F.softplus({x})",), "Softplus()", common=True),
    "hardswish": Operator(("{x} * tl.minimum(tl.maximum({x} + 3.0, 0.0), 6.0) / 6.0",), ("F.hardswish({x})",),
                          "Hardswish()", common=True),
    "hardsigmoid": Operator(("tl.minimum(tl.maximum({x} + 3.0, 0.0), 6.0) / 6.0",), ("F.hardsigmoid({x})",),
                            "Hardsigmoid()"),
    "softsign": Operator(("{x} / (1.0 + tl.abs({x}))",), ("F.softsign({x})", "{x} / (1 + torch.abs({x}))"),
                         "Softsign()"),
    "selu": Operator(("1.05070099 * tl.where({x} > 0.0, {x}, 1.67326324 * (tl.exp(tl.minimum({x}, 0.0)) - 1.0))",),
                     ("F.selu({x})", "torch.selu({x})"), "SELU()"),
    "relu6": Operator(("tl.minimum(tl.maximum({x}, 0.0), 6.0)",), ("F.relu6({x})",), "ReLU6()"),
    "logsigmoid": Operator(("tl.minimum({x}, 0.0) - tl.log(1.0 + tl.exp(-tl.abs({x})))",), ("F.logsigmoid({x})",),
                           "LogSigmoid()"),
    "abs": Operator(("tl.abs({x})",), ("torch.abs({x})", "{x}.abs()")),
    "square": Operator(("{x} * {x}",), ("torch.square({x})", "{x} ** 2", "torch.pow({x}, 2)", "{x} * {x}")),
    "exp": Operator(("tl.exp({x})",), ("torch.exp(-{x})", "torch.exp({x} * 0.1)")),
    "sin": Operator(("tl.sin({x})",), ("torch.sin({x})",)),
    "neg": Operator(("-{x}",), ("-{x}", "torch.neg({x})")),
    # Never drawn from here: steps of the generator spell those with arguments, other operators need these.
    "leaky_relu": Operator(("tl.where({x} > 0.0, {x}, {x} * {a})",), (), "LeakyReLU()", ("negative_slope",), ("0.01",)),
    "elu": Operator(("tl.where({x} > 0.0, {x}, {a} * (tl.exp(tl.minimum({x}, 0.0)) - 1.0))",), (), "ELU()", ("alpha",),
                    ("1.0",)),
    "clamp": Operator(("tl.minimum(tl.maximum({x}, {a}), {b})",), (), "Hardtanh()", ("min_val", "max_val"),
                      ("-1.0", "1.0")),
    "celu": Operator(("tl.where({x} > 0.0, {x}, {a} * (tl.exp(tl.minimum({x}, 0.0) / {a}) - 1.0))",), (), "CELU()",
                     ("alpha",), ("1.0",)),
    "softshrink": Operator(("{x} - tl.minimum(tl.maximum({x}, -{a}), {a})",), (), "Softshrink()", ("lambd",), ("0.5",)),
    "hardshrink": Operator(("tl.where(tl.abs({x}) > {a}, {x}, 0.0)",), (), "Hardshrink()", ("lambd",), ("0.5",)),
    "smooth_l1_loss": Operator(("d = tl.abs({x} - {a})", "tl.where(d < 1.0, 0.5 * d * d, d - 0.5)")),
}
# More that are never drawn from here: formulas of one line, which need nothing else.
_FORMULAS = {
    "maximum": "tl.maximum({x}, {a})", "minimum": "tl.minimum({x}, {a})",
    "clamp_min": "tl.maximum({x}, {a})", "clamp_max": "tl.minimum({x}, {a})",
    "sqrt": "tl.sqrt({x})", "rsqrt": "1.0 / tl.sqrt({x})", "reciprocal": "1.0 / {x}",
    "log": "tl.log({x})", "log1p": "tl.log(1.0 + {x})", "exp2": "tl.exp2({x})", "expm1": "tl.exp({x}) - 1.0",
    "cos": "tl.cos({x})", "erf": "tl.erf({x})", "identity": "{x}",  # a dropout that drops nothing
    "lerp": "{x} + {b} * ({a} - {x})", "addcmul": "{x} + {a} * {b}", "threshold": "tl.where({x} > {a}, {x}, {b})",
    "where": "tl.where({x}, {a}, {b})", "masked_fill": "tl.where({a}, {b}, {x})",
    "logaddexp": "tl.maximum({x}, {a}) + tl.log(1.0 + tl.exp(-tl.abs({x} - {a})))",
    "binary_cross_entropy_with_logits": "tl.maximum({x}, 0.0) - {x} * {a} + tl.log(1.0 + tl.exp(-tl.abs({x})))"}
POINTWISE |= {name: Operator((formula,)) for name, formula in _FORMULAS.items()}
# Other names of functions; and functions that do what an operator of Python does.
ALIASES = {"hardtanh": "clamp", "clip": "clamp", "negative": "neg", "multiply": "mul", "subtract": "sub",
           "divide": "div", "vector_norm": "norm"}
ARITHMETIC = {"add": ast.Add, "sub": ast.Sub, "mul": ast.Mult, "div": ast.Div, "pow": ast.Pow}


def unusual(layer, known) -> bool:
    """Was a layer made with an option, none of the `known`, that is not as it is by default?"""
    options = {name: option.default for name, option in inspect.signature(type(layer)).parameters.items()}
    return any(getattr(layer, name, default) not in (default, None) for name, default in options.items()
               if name not in known and default is not inspect.Parameter.empty)


def operator_of(layer) -> str | None:
    """The name of the pointwise operator that a layer of torch.nn applies, or None."""
    if isinstance(layer, (nn.Dropout, nn.Dropout2d, nn.Identity)) and getattr(layer, "p", 0) == 0:
        return "identity"
    if type(layer) is nn.GELU:
        return "gelu_tanh" if layer.approximate == "tanh" else "gelu"
    for name, operator in POINTWISE.items():
        if operator.layer and type(layer) is getattr(nn, operator.layer.split("(")[0]):
            return None if unusual(layer, {*operator.attributes, "inplace"}) else name
    return None


@dataclass(frozen=True)
class RowOperator:
    """A function of a whole row: the last dimension, or for a reduction all spatial ones, or (sweep) any others."""

    triton: tuple  # lines over the row {x}, where masked elements hold 0, that assign {t}
    technique: str = "one-program-per-row"  # the expert's technique that lets a kernel compute it
    reduces: bool = False  # to one number for each row
    # The same for rows that are read in pieces. start: accumulators and their first value; sweep: lines for each piece
    # that update them; end: lines after the last piece, where {total} reduces over the piece; the last line of a
    # reduction assigns {t}; value: what an element becomes in a second sweep, for what does not reduce.
    start: tuple = ()
    sweep: tuple = ()
    end: tuple = ()
    value: str = ""
    integer: bool = False  # the result is an index


_MAX = 'tl.max(tl.where(mask, {x}, float("-inf")), 0)'
_SUM = "tl.sum(tl.where(mask, {x}, 0.0), 0)"
_SUM_SQUARES = "tl.sum(tl.where(mask, {x} * {x}, 0.0), 0)"
_ADD = dict(start=("s{i} = 0.0",), sweep=("s{i} += tl.where(mask, {x}, 0.0)",))
_SQUARES = dict(start=("s{i} = 0.0",), sweep=("s{i} += tl.where(mask, {x} * {x}, 0.0)",))
_TOTAL = "tl.sum(s{i}, 0)[None, :]"
# The sum of exponentials, each taken relative to the largest element so far.
_EXPONENTIALS = dict(start=("m{i} = -1e30", "s{i} = 0.0"),
                     sweep=("u = tl.maximum(m{i}, tl.where(mask, {x}, -1e30))",
                            "s{i} = s{i} * tl.exp(m{i} - u) + tl.where(mask, tl.exp({x} - u), 0.0)", "m{i} = u"))
_LARGEST = ("top{i} = tl.max(m{i}, 0)[None, :]", "all{i} = tl.sum(s{i} * tl.exp(m{i} - top{i}), 0)[None, :]")


def _found(comparison, worst, best):
    """An index of the largest or smallest element: each lane remembers its first, the end takes the first of those."""
    return dict(start=(f"m{{i}} = {worst}", "at{i} = 0"), integer=True, reduces=True, sweep=(
        f"found = mask & ({{x}} {comparison} m{{i}})", "at{i} = tl.where(found, offs, at{i})",
        "m{i} = tl.where(found, {x}, m{i})"), end=(
        f"top{{i}} = {best}(m{{i}}, 0)[None, :]",
        "{t} = tl.min(tl.where(m{i} == top{i}, at{i}, 2147483647), 0)[None, :]"))


ROWS = {
    "softmax": RowOperator((f"m = {_MAX}", "{t} = tl.where(mask, tl.exp({x} - m), 0.0)", "{t} = {t} / tl.sum({t}, 0)"),
                           **_EXPONENTIALS, end=_LARGEST, value="tl.exp({x} - top{i}) / all{i}"),
    "log_softmax": RowOperator((f"m = {_MAX}", "{t} = {x} - m",
                                "{t} = {t} - tl.log(tl.sum(tl.where(mask, tl.exp({t}), 0.0), 0))"),
                               **_EXPONENTIALS, end=_LARGEST, value="{x} - top{i} - tl.log(all{i})"),
    "logsumexp": RowOperator((f"m = {_MAX}", "{t} = m + tl.log(tl.sum(tl.where(mask, tl.exp({x} - m), 0.0), 0))"),
                             reduces=True, **_EXPONENTIALS, end=_LARGEST + ("{t} = top{i} + tl.log(all{i})",)),
    "sum": RowOperator((f"{{t}} = {_SUM}",), "row-reduction", True, **_ADD, end=(f"{{t}} = {_TOTAL}",)),
    "mean": RowOperator((f"{{t}} = {_SUM} / cols",), "row-reduction", True, **_ADD, end=(f"{{t}} = {_TOTAL} / cols",)),
    "amax": RowOperator((f"{{t}} = {_MAX}",), "row-reduction", True, ('m{i} = float("-inf")',),
                        ('m{i} = tl.maximum(m{i}, tl.where(mask, {x}, float("-inf")))',),
                        ("{t} = tl.max(m{i}, 0)[None, :]",)),
    "amin": RowOperator(('{t} = tl.min(tl.where(mask, {x}, float("inf")), 0)',), "row-reduction", True,
                        ('m{i} = float("inf")',), ('m{i} = tl.minimum(m{i}, tl.where(mask, {x}, float("inf")))',),
                        ("{t} = tl.min(m{i}, 0)[None, :]",)),
    "argmax": RowOperator((), "row-reduction", **_found(">", 'float("-inf")', "tl.max")),
    "argmin": RowOperator((), "row-reduction", **_found("<", 'float("inf")', "tl.min")),
    "norm": RowOperator((f"{{t}} = tl.sqrt({_SUM_SQUARES})",), "row-reduction", True, **_SQUARES,
                        end=(f"{{t}} = tl.sqrt({_TOTAL})",)),
    "normalize": RowOperator((f"{{t}} = {{x}} / tl.maximum(tl.sqrt({_SUM_SQUARES}), 1e-12)",), **_SQUARES,
                             end=(f"all{{i}} = tl.maximum(tl.sqrt({_TOTAL}), 1e-12)",), value="{x} / all{i}"),
    "layer_norm": RowOperator((f"m = {_SUM} / cols", "d = tl.where(mask, {x} - m, 0.0)",
                               "{t} = d / tl.sqrt(tl.sum(d * d, 0) / cols + {eps})"),
                              start=("s{i} = 0.0", "q{i} = 0.0"),
                              sweep=("s{i} += tl.where(mask, {x}, 0.0)", "q{i} += tl.where(mask, {x} * {x}, 0.0)"),
                              end=(f"top{{i}} = {_TOTAL} / cols", "all{i} = 1.0 / tl.sqrt(tl.sum(q{i}, 0)[None, :] / "
                                   "cols - top{i} * top{i} + {eps})"), value="({x} - top{i}) * all{i}"),
    "cumsum": RowOperator(("{t} = tl.cumsum({x}, 0)",), "row-scan", start=("s{i} = 0.0",),
                          value="s{i} + tl.cumsum({x}, 0)"),
    "cumprod": RowOperator(("{t} = tl.cumprod({x}, 0)",), "row-scan", start=("s{i} = 1.0",),
                           value="s{i} * tl.cumprod({x}, 0)"),
}


@dataclass(frozen=True)
class SpelledOut:
    """A function of torch.nn.functional, or its layer, as simpler operators, so that the general rules apply."""

    expression: str  # {0}, {1} are its tensors
    arguments: int = 2
    options: dict = field(default_factory=dict)  # keyword arguments: name -> default, as source; "" if it must be given
    reduction: str = "'mean'"


_CROSS_ENTROPY = SpelledOut("torch.mean(torch.logsumexp({0}, dim=1) - {0}.gather(1, {1}.unsqueeze(1)).squeeze(1))")
_SQUARED = SpelledOut("torch.mean(({0} - {1}) ** 2)")
_ABSOLUTE = SpelledOut("torch.mean(torch.abs({0} - {1}))")
_HUBER = SpelledOut("torch.mean(F.smooth_l1_loss({0}, {1}, reduction='none'))")
_LOGITS = SpelledOut("torch.mean(F.binary_cross_entropy_with_logits({0}, {1}, reduction='none'))")
_TRIPLET = SpelledOut("torch.mean(torch.relu(torch.norm({0} - {1} + 1e-06, dim=1) - "
                      "torch.norm({0} - {2} + 1e-06, dim=1) + {margin}))", 3, {"margin": "1.0"})
_DIVERGENCE = SpelledOut("torch.sum({1} * (torch.log(torch.clamp({1}, min=1e-38)) - {0})) / {0}.shape[0]",
                         reduction="'batchmean'")
_VARIANCE = SpelledOut("torch.sum(({0} - torch.mean({0}, dim={dim}, keepdim=True)) ** 2, dim={dim}, keepdim={keepdim}) "
                       "/ ({0}.shape[{dim}] - 1)", 1, {"dim": "", "keepdim": "False"})
_DEVIATION = SpelledOut(f"torch.sqrt({_VARIANCE.expression})", 1, _VARIANCE.options)
_SIMILARITY = SpelledOut("torch.sum({0} * {1}, dim={dim}) / (torch.norm({0}, dim={dim}) * torch.norm({1}, dim={dim}))"
                         ".clamp(min=1e-08)", options={"dim": "1"})
SPELLED_OUT = {"mse_loss": _SQUARED, "MSELoss": _SQUARED, "l1_loss": _ABSOLUTE, "L1Loss": _ABSOLUTE,
               "smooth_l1_loss": _HUBER, "SmoothL1Loss": _HUBER, "huber_loss": _HUBER, "HuberLoss": _HUBER,
               "binary_cross_entropy_with_logits": _LOGITS, "kl_div": _DIVERGENCE, "cosine_similarity": _SIMILARITY,
               "cross_entropy": _CROSS_ENTROPY, "CrossEntropyLoss": _CROSS_ENTROPY,
               "triplet_margin_loss": _TRIPLET, "TripletMarginLoss": _TRIPLET, "var": _VARIANCE, "std": _DEVIATION,
               "inner": SpelledOut("torch.matmul({0}, {1}.t())"), "linear": SpelledOut("torch.matmul({0}, {1}.t())"),
               "softmin": SpelledOut("torch.softmax(-{0}, dim={dim})", 1, {"dim": ""})}

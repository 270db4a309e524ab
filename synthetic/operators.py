"""What operators are: how problems spell them and how the expert's kernels compute them, a table row each.

The generator draws pointwise operators from this table, the reader finds them by their names and layers, and
codegen.py writes their formulas. A new one is a new row; if problems can also spell it with other operators,
`tasks._WRITTEN_OUT` has to say so, or a near-duplicate of an evaluation problem could be trained on.
"""

import ast
from dataclasses import dataclass

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
    positive: bool = False  # defined for x > 0 only


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
    "clamp_min": Operator(("tl.maximum({x}, {a})",)),
    "clamp_max": Operator(("tl.minimum({x}, {a})",)),
    "log": Operator(("tl.log({x})",), positive=True),
    "cos": Operator(("tl.cos({x})",)),
    "sqrt": Operator(("tl.sqrt({x})",), positive=True),
    "rsqrt": Operator(("1.0 / tl.sqrt({x})",), positive=True),
    "smooth_l1_loss": Operator(("d = tl.abs({x} - {a})", "tl.where(d < 1.0, 0.5 * d * d, d - 0.5)")),
    "binary_cross_entropy_with_logits": Operator(
        ("tl.maximum({x}, 0.0) - {x} * {a} + tl.log(1.0 + tl.exp(-tl.abs({x})))",)),
}
# Other names of functions; and functions that do what an operator of Python does.
ALIASES = {"hardtanh": "clamp", "clip": "clamp", "negative": "neg", "multiply": "mul", "subtract": "sub",
           "divide": "div"}
ARITHMETIC = {"add": ast.Add, "sub": ast.Sub, "mul": ast.Mult, "div": ast.Div}


def operator_of(layer) -> str | None:
    """The name of the pointwise operator that a layer of torch.nn applies, or None."""
    if type(layer) is nn.GELU:
        return "gelu_tanh" if layer.approximate == "tanh" else "gelu"
    for name, operator in POINTWISE.items():
        if operator.layer and type(layer) is getattr(nn, operator.layer.split("(")[0]):
            return name
    return None


@dataclass(frozen=True)
class RowOperator:
    """A function of a whole row: the last dimension, or for a reduction all spatial ones."""

    triton: tuple  # lines over the row {x}, where masked elements hold 0, that assign {t}
    technique: str = "one-program-per-row"  # the expert's technique that lets a kernel compute it
    reduces: bool = False  # to one number for each row


_MAX = 'tl.max(tl.where(mask, {x}, float("-inf")), 0)'
_SUM = "tl.sum(tl.where(mask, {x}, 0.0), 0)"
_SUM_SQUARES = "tl.sum(tl.where(mask, {x} * {x}, 0.0), 0)"
ROWS = {
    "softmax": RowOperator((f"m = {_MAX}", "{t} = tl.where(mask, tl.exp({x} - m), 0.0)", "{t} = {t} / tl.sum({t}, 0)")),
    "log_softmax": RowOperator((f"m = {_MAX}", "{t} = {x} - m",
                                "{t} = {t} - tl.log(tl.sum(tl.where(mask, tl.exp({t}), 0.0), 0))")),
    "logsumexp": RowOperator((f"m = {_MAX}", "{t} = m + tl.log(tl.sum(tl.where(mask, tl.exp({x} - m), 0.0), 0))"),
                             reduces=True),
    "sum": RowOperator((f"{{t}} = {_SUM}",), "row-reduction", True),
    "mean": RowOperator((f"{{t}} = {_SUM} / cols",), "row-reduction", True),
    "amax": RowOperator((f"{{t}} = {_MAX}",), "row-reduction", True),
    "amin": RowOperator(('{t} = tl.min(tl.where(mask, {x}, float("inf")), 0)',), "row-reduction", True),
    "norm": RowOperator((f"{{t}} = tl.sqrt({_SUM_SQUARES})",), "row-reduction", True),
    "normalize": RowOperator((f"{{t}} = {{x}} / tl.maximum(tl.sqrt({_SUM_SQUARES}), 1e-12)",)),
    "layer_norm": RowOperator((f"m = {_SUM} / cols", "d = tl.where(mask, {x} - m, 0.0)",
                               "{t} = d / tl.sqrt(tl.sum(d * d, 0) / cols + {eps})")),
    "cumsum": RowOperator(("{t} = tl.cumsum({x}, 0)",), "row-scan"),
}

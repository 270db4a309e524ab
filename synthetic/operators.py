"""The table of operators (operators.toml) and the expressions made of them (expressions.toml).

To add an operator: a row of operators.toml. That file says what a row holds. `counted` matters if problems can also
spell the operator with others: else we could train on a near-duplicate of an evaluation problem.
"""

import ast
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

# Names that kernels and the functions beside them use for themselves. No variable of a problem is called so.
RESERVED = set("idx mask offs start cols rows n m k i a b d e q s u t v w inner lane width grid acc dst mu var value "
               "tl triton as_ am ak bs bk bn a_index b_index BM BN BK BR BI BLOCK fused row sweep matmul "
               "partial_sums".split())


@dataclass(frozen=True)
class Operator:
    """What an operator is called in problems, and what a kernel does for it: a row of operators.toml.

    kind: pointwise; row (over neighbouring dimensions); group (a norm over groups of channels); batch (a norm over all
    dimensions but the channels); all (a reduction to one number); matmul; convolution; or torch: no kernel of ours.
    """

    kind: str
    spellings: list = field(default_factory=list)
    lines: list = field(default_factory=list)
    layer: str = ""
    reads: dict = field(default_factory=dict)
    technique: str = ""
    numbers: dict = field(default_factory=dict)
    common: bool = False
    counted: list = field(default_factory=list)


def _table(name) -> dict:
    return tomllib.loads(Path(__file__).with_name(name).read_text())


OPERATORS = {}
for _kind, _rows in _table("operators.toml").items():
    OPERATORS |= {name: Operator(_kind, **row) for name, row in _rows.items()}
EXPRESSIONS = _table("expressions.toml")  # "formulas", "losses", "products", "composed"

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

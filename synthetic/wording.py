"""How a synthesised problem reads: docstrings, comments, layout, signatures, and what stands there without being used.

`generator.py` drafts what a problem computes; `write_problem` makes a file of the draft.
"""

import re
from pathlib import Path

WORDS = Path(__file__).with_name("words.txt").read_text().split()
SYLLABLES = ("ka lo mi ne tu ra so vi da pe gro bal fin kor tem sha wei gat mul div sub nor act drop gam bet sig "
              "lam fac val vec out inp dim siz num cur pre post head ext reg alt adj off base mask").split()


# Layers and attributes that a constructor may hold besides what the forward pass uses, and the argument names of layers
# that may as well be passed by keyword. For `clutter`.
_UNUSED_LAYERS = ["Conv2d({a}, {b}, {k})", "Conv1d({a}, {b}, kernel_size={k})", "Linear({a}, {b})",
                  "Linear({a}, {b}, bias=False)", "LSTM({a}, {b}, num_layers={k}, batch_first=True)", "GRU({a}, {b})",
                  "Embedding({b}, {a})", "Dropout(p=0.{k})", "MaxPool2d(kernel_size={k}, stride={k}, padding=0)",
                  "AvgPool2d({k})", "AdaptiveAvgPool2d((1, 1))", "Identity()",
                  "BatchNorm2d({a}, eps=1e-5, momentum=0.1)", "LayerNorm({a})", "LayerNorm([{a}, {b}])",
                  "GroupNorm(1, {a})", "ConvTranspose2d({a}, {b}, {k}, stride={k}, padding=0, output_padding=0)",
                  "Flatten(start_dim=1)", "PReLU()", "Sequential(nn.Linear({a}, {b}), nn.ReLU())",
                  "Upsample(scale_factor={k}, mode='nearest')", "Softmax(dim=1)",
                  "Conv3d({a}, {b}, ({k}, {k}, {k}), stride=1, padding=1, dilation=1, groups=1, bias=False)",
                  "ZeroPad2d({k})", "Parameter(torch.zeros({a}, {b}))", "Parameter(torch.randn({a}, 1) * 0.02)",
                  "Parameter(torch.ones({b}))"]
_ARGUMENTS = {"Conv": ["in_channels", "out_channels", "kernel_size"], "Linear": ["in_features", "out_features"],
              "Group": ["num_groups", "num_channels"], "Batch": ["num_features"], "Instance": ["num_features"],
              "LayerNorm": ["normalized_shape"], "MaxPool": ["kernel_size"], "AvgPool": ["kernel_size"],
              "LeakyReLU": ["negative_slope"]}


def write_problem(d) -> str:
    """The problem file's text."""
    r, x = d.r, d.x
    full_name = d.chance(0.15)  # torch.nn.functional.relu in place of F.relu

    def word():
        kind = r.random()
        if not d.clutter or kind < 0.6:
            return d.nonsense() if kind < 0.06 else r.choice(WORDS)
        if kind < 0.8:
            return "".join(r.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(r.randint(2, 10)))
        return r.choice(["`True`.", "1D", "2D", "3D", "(N, C, H, W),", "e.g.,", "C = A * B,", "(batch_size, *)",
                         "GELU,", "ReLU", "Conv2d,", "x,", "A", "GEMM", "-", "Defaults to 1.", "Defaults to None",
                         "[0, 1]", "LayerNorm", "Tanh"])

    def words(low, high):
        text = " ".join(word() for _ in range(r.randint(low, high * 2 if d.clutter and d.chance(0.3) else high)))
        marks = [" "] * 32 + [", ", "; ", ": ", " ("]
        text = re.sub(r"(?<=\w) (?=\w)", lambda _: r.choice(marks), text)
        return text[:1].upper() + text[1:]

    def docstring(indent, fields=()):
        if d.chance(0.35):
            return []
        lines = [f'{indent}"""', f"{indent}{words(4, 16)}."]
        if fields and d.chance(0.4):
            lines += ["", f"{indent}{d.pick('Args', 'Args', 'Parameters')}:"]
            lines += [f"{indent}    {name} ({kind}{d.pick('', '', ', optional')}): {words(2, 10)}."
                      for name, kind in fields]
            if d.chance(0.4):
                shape = ", ".join(d.dims)
                lines += ["", f"{indent}Returns:", f"{indent}    torch.Tensor: {words(2, 8)} of shape ({shape})."]
        return lines + [f'{indent}"""']

    if d.chance(0.12):  # an argument that nothing uses, and a layer-like attribute with a default
        name = d.name(["groups", "dropout_p", "mode_id", "num_heads"])
        d.args.append((name, "int", d.const([name + "_value", "unused"], d.pick(1, 2, 8))))
    annotated = d.chance(0.4)
    defaults = d.defaults
    if d.chance(0.15):
        name = d.name(["eps_value", "momentum", "inplace", "axis"])
        defaults.append((name, d.pick("1e-5", "0.1", "False", "1")))
        d.init.append(f"self.{name} = {name}")
    if d.clutter:
        _clutter(d, defaults)
    signature = ["self"] + [f"{n}: {t}" if annotated else n for n, t, _ in d.args]
    signature += [f"{n}: {d.pick('int', 'float', 'bool', 'str')} = {v}" if annotated else f"{n}={v}"
                  for n, v in defaults]
    body = list(d.forward)
    if not body[-1].startswith("return"):
        last = body[-1].split(" = ", 1)
        body = body[:-1] + [f"return {last[1]}"] if d.chance(0.25) else body + [f"return {x}"]
    body = [line + (f"  # {words(2, 5).lower()}" if d.chance(0.05) else "") for line in body]
    if full_name:
        body = [re.sub(r"\bF\.", "torch.nn.functional.", line) for line in body]
    gap = [""] * d.pick(1, 1, 2)  # blank lines between the parts of the file
    hollow = d.pick("", "", "    ", "        ")  # what stands on a blank line inside the class
    out = ["import torch", "import torch.nn as nn"]
    if any(re.search(r"\bF\.", line) for line in body) or d.chance(0.3):
        out.append("import torch.nn.functional as F")
    out += (["import math"] if d.chance(0.04) else []) + gap
    out += ["class Model(nn.Module):"] + docstring("    ", [(n, t) for n, t, _ in d.args])
    out += [""] if len(out[-1]) > 30 and d.chance(0.2) else []
    if d.init or d.chance(0.8):
        out += [f"    def __init__({', '.join(signature)}):"]
        out += docstring("        ", [(n, t) for n, t, _ in d.args]) if d.clutter and d.chance(0.3) else []
        out += ["        " + d.pick("super().__init__()", "super(Model, self).__init__()")]
        out += ["        " + line + d.pick(*[""] * 15, " ", "  # " + words(1, 4)) for line in d.init] + [hollow]
    hint = ": torch.Tensor" if annotated else ""
    hints = [": float" if annotated and re.fullmatch(r"[\d.]+", value) else hint for _, value in d.inputs]
    arguments = ["self"] + [n + h for (n, _), h in zip(d.inputs, hints)]
    out += [f"    def forward({', '.join(arguments)}){' -> torch.Tensor' if annotated else ''}:"]
    out += docstring("        ", [(n, "torch.Tensor") for n, _ in d.inputs])
    for line in body:
        out += ["        # " + words(1, 5)] if d.clutter and d.chance(0.06) else []
        out += [hollow] if d.clutter and d.chance(0.03) else []
        out.append("        " + line)
    out += gap + (["# " + words(1, 3)] if d.chance(0.08) else [])
    equals = d.pick(*[" = "] * 9, "  = ")
    for name, value in d.consts:
        if d.chance(0.08) and value.isdigit() and int(value) % 4 == 0 and int(value) > 4 and name != d.consts[0][0]:
            value = d.pick(f"{int(value) // 4} * 4", f"{int(value) // 2} * 2")
        out.append(f"{name}{equals}{value}" + d.pick(*[""] * 14, "  ", f"  # {words(1, 3).lower()}"))
    out += gap + ["def get_inputs():"]
    if d.chance(0.6):
        out += ["    return [" + ", ".join(value for _, value in d.inputs) + "]"]
    else:
        out += [f"    {n} = {v}" for n, v in d.inputs] + ["    return [" + ", ".join(n for n, _ in d.inputs) + "]"]
    nothing = d.pick("", "  # no arguments needed", "  # Nothing to initialise") if not d.args else ""
    out += gap + ["def get_init_inputs():", f"    return [{', '.join(value for _, _, value in d.args)}]{nothing}"]
    return "\n".join(out) + d.pick("\n", "\n", "")


def _clutter(d, defaults):
    """What real problems are full of and the forward pass does not need, in the constructor and its arguments."""
    sizes = [name for name, kind, _ in d.args if kind == "int"]
    for _ in range(d.r.choice([0, 0, 1, 1, 2, 3])):  # more arguments
        value = d.pick("1", "2", "4", "0.1", "1e-5", "True", "False", "None", "'mean'", "(1, 1)", "(0, 0)", "8",
                       "[1, 2]")
        name = d.name(["eps", "momentum", "stride", "padding", "dilation", "groups", "bias", "dim", "num_heads",
                       "dropout_p", "mode", "hidden_size", "num_layers", "axis", "pool_size", "return_indices",
                       "reduction", "affine", "n_embd", "margin"])
        if d.chance(0.6):
            defaults.append((name, value))
        else:
            d.consts.append((name + "_value", value))
            d.args.insert(d.r.randint(0, len(d.args)), (name, d.pick("int", "float", "tuple", "bool"), name + "_value"))
        if d.chance(0.4):
            d.init.insert(d.r.randint(0, len(d.init)), f"self.{name} = {name}")
    for _ in range(d.r.choice([0, 0, 1, 1, 2])):  # more layers, with parameters that must be created in the same order
        a, b = (d.r.choice(sizes) if sizes and d.chance(0.6) else str(d.pick(2, 3, 4, 8, 16)) for _ in range(2))
        layer = "nn." + d.r.choice(_UNUSED_LAYERS).format(a=a, b=b, k=d.pick(1, 2, 3))
        name = d.name(["conv1", "conv2", "bn", "pool", "fc1", "proj", "dropout", "embed", "rnn", "block", "extra",
                       "head", "attn"])
        d.init.insert(d.r.randint(0, len(d.init)), f"self.{name} = {layer}")
    if d.chance(0.2):
        value = d.pick("None", "[1, 2, 3]", "(2, 2)", "3 * 4", "1.0 / 7")
        d.init.insert(d.r.randint(0, len(d.init)), f"self.{d.name(['state', 'size', 'config'])} = {value}")
    for i, line in enumerate(d.init):  # keyword arguments in place of positional ones
        found = re.fullmatch(r"(self\.\w+ = nn\.(\w+?)(?:[123]d|Transpose[123]d|Norm[123]d|Pool[123]d)?\()(.*)\)", line)
        names = next((n for k, n in _ARGUMENTS.items() if found and line.split(" = nn.")[1].startswith(k)), None)
        if names and d.chance(0.35) and "(" not in found[3] and "[" not in found[3]:
            values = found[3].split(", ")
            first = d.r.choice([0, 0, len(names) - 1])
            values = [f"{names[j]}={v}" if first <= j < len(names) and "=" not in v else v
                      for j, v in enumerate(values)]
            d.init[i] = found[1] + ", ".join(values) + ")"

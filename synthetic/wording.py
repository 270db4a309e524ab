"""How a synthesised problem reads: docstrings, comments, layout, signatures, and what stands there without being used.

`write_problem` makes a file of a draft (draft.py). Prose is random words: a model that reads it has nothing to learn
from it but to look past it.
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
_ARGUMENTS = {"Conv": "in_channels out_channels kernel_size", "Linear": "in_features out_features",
              "Group": "num_groups num_channels", "LayerNorm": "normalized_shape", "LeakyReLU": "negative_slope",
              "Batch": "num_features", "Instance": "num_features", "MaxPool": "kernel_size", "AvgPool": "kernel_size"}


# What else stands in real docstrings.
_NOISE = ["`True`.", "1D", "2D", "3D", "(N, C, H, W),", "e.g.,", "C = A * B,", "(batch_size, *)", "GELU,", "ReLU",
          "Conv2d,", "x,", "A", "GEMM", "-", "Defaults to 1.", "Defaults to None", "[0, 1]", "LayerNorm", "Tanh"]
_MARKS = [" "] * 32 + [", ", "; ", ": ", " ("]  # between words


def _word(d) -> str:
    kind = d.r.random()
    if not d.clutter or kind < 0.6:
        return d.nonsense() if kind < 0.06 else d.r.choice(WORDS)
    if kind < 0.8:
        return "".join(d.r.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(d.r.randint(2, 10)))
    return d.r.choice(_NOISE)


def _words(d, low, high) -> str:
    """`low` to `high` words, with clutter sometimes up to twice as many."""
    text = " ".join(_word(d) for _ in range(d.r.randint(low, high * 2 if d.clutter and d.chance(0.3) else high)))
    text = re.sub(r"(?<=\w) (?=\w)", lambda _: d.r.choice(_MARKS), text)
    return text[:1].upper() + text[1:]


def _docstring(d, indent, fields) -> list[str]:
    """A docstring's lines, or none. fields: (name, type) of the arguments, which it may describe."""
    if not d.formal and d.chance(0.35):
        return []
    lines = [f'{indent}"""', f"{indent}{_words(d, 4, 16)}."]
    if fields and (d.formal or d.chance(0.4)):
        lines += ["", f"{indent}{d.pick('Args', 'Args', 'Parameters')}:"]
        for name, kind in fields:
            kind, _, default = kind.partition(" = ")
            kind += d.pick("", "", ", optional") if not d.formal else ", optional" if default else ""
            default = default and f" Defaults to {default}."
            lines.append(f"{indent}    {name} ({kind}): {_words(d, 2, 10)}.{default}")
        if d.chance(0.4):
            lines += ["", f"{indent}Returns:"]
            lines.append(f"{indent}    torch.Tensor: {_words(d, 2, 8)} of shape ({', '.join(d.dims)}).")
    return lines + [f'{indent}"""']


def write_problem(d) -> str:
    """The problem file's text. Adds to the draft what nothing uses."""
    full_name = d.chance(0.15)  # torch.nn.functional.relu in place of F.relu
    if not d.formal and d.chance(0.12):  # an argument that nothing uses
        name = d.name("groups dropout_p mode_id num_heads")
        d.args.append((name, "int", d.const(f"{name}_value unused", d.pick(1, 2, 8))))
    annotated = d.formal or d.chance(0.4)
    if not d.formal and d.chance(0.15):  # a layer-like attribute with a default
        name = d.name("eps_value momentum inplace axis")
        d.defaults.append((name, d.pick("1e-5", "0.1", "False", "1")))
        d.init.append(f"self.{name} = {name}")
    if d.clutter:
        _clutter(d)
    defaults = [name + (f": {d.pick('int', 'float', 'bool', 'str')} = " if annotated else "=") + value
                for name, value in d.defaults]
    body = list(d.forward)
    if not body[-1].startswith("return"):
        if d.chance(0.7 if d.formal else 0.25) and " = " in body[-1]:
            body[-1] = "return " + body[-1].split(" = ", 1)[1]
        else:
            body.append(f"return {d.x}")
    body = [line + (f"  # {_words(d, 2, 5).lower()}" if d.chance(0.05) else "") for line in body]
    if full_name:
        body = [re.sub(r"\bF\.", "torch.nn.functional.", line) for line in body]
    gap = [""] * d.pick(1, 1, 2)  # blank lines between the parts of the file
    hollow = d.pick("", "", "    ", "        ")  # what stands on a blank line inside the class
    out = ["import torch", "import torch.nn as nn"]
    if any(re.search(r"\bF\.", line) for line in body + d.classes + [str(d.methods)]) or d.chance(0.3):
        out.append("import torch.nn.functional as F")
    out += (["import math"] if d.chance(0.04) or "math." in str(body + d.classes + d.methods) else []) + gap
    out += d.classes + _class(d, annotated, body, hollow, "Model", defaults) + gap
    return "\n".join(out + _constants_and_inputs(d, gap)).replace("'", d.quote) + d.pick("\n", "\n", "")


def write_class(d, name) -> list[str]:
    """The lines of a class that Model is made of."""
    return _class(d, d.chance(0.3), d.forward + [f"return {d.x}"], "", name) + [""] * d.pick(1, 1, 2)


def _class(d, annotated, body, hollow, name, defaults=()) -> list[str]:
    """The lines of a class. body: of forward; defaults: constructor arguments that nobody passes."""
    fields = [(name, kind) for name, kind, _ in d.args]
    signature = ["self"] + [f"{name}: {kind}" if annotated else name for name, kind in fields] + list(defaults)
    out = [f"class {name}(nn.Module):"] + _docstring(d, "    ", fields)
    out += [""] if len(out[-1]) > 30 and d.chance(0.2) else []
    if d.init or d.chance(0.8):
        head = f"    def __init__({', '.join(signature)}):"
        out.append(re.sub(rf"(.{{{d.width},}}?), ", r"\1,\n" + " " * 17, head))
        out += _docstring(d, "        ", fields) if d.clutter and d.chance(0.3) else []
        out.append("        " + d.pick("super().__init__()", f"super({name}, self).__init__()"))
        out += [f"        {line}" + d.pick(*[""] * 15, " ", "  # " + _words(d, 1, 4)) for line in d.init] + [hollow]
    arguments = ["self"]
    for name, value in d.inputs:
        hint = ": float" if re.fullmatch(r"[\d.]+", value) else ": torch.Tensor"
        arguments.append(name + hint if annotated else name)
    out.append(f"    def forward({', '.join(arguments)}){' -> torch.Tensor' if annotated else ''}:")
    out += _docstring(d, "        ", [(name, "torch.Tensor") for name, _ in d.inputs])
    for line in body:
        out += ["        # " + _words(d, 1, 5)] if d.clutter and d.chance(0.06) else []
        out += [hollow] if d.clutter and d.chance(0.03) else []
        out.append(f"        {line}")
    for method, x, lines in d.methods:
        out += [hollow, f"    def {method}(self, {x}):"] + [f"        {line}" for line in lines + [f"return {x}"]]
    return out


def _constants_and_inputs(d, gap) -> list[str]:
    """The lines after Model: module-level constants, get_inputs, get_init_inputs."""
    out = ["# " + _words(d, 1, 3)] if d.chance(0.08) else []
    equals = d.pick(*[" = "] * 9, "  = ")
    for name, value in d.consts:
        if d.chance(0.08) and value.isdigit() and int(value) % 4 == 0 and int(value) > 4 and name != d.consts[0][0]:
            value = d.pick(f"{int(value) // 4} * 4", f"{int(value) // 2} * 2")
        out.append(f"{name}{equals}{value}" + d.pick(*[""] * 14, "  ", f"  # {_words(d, 1, 3).lower()}"))
    out += gap + ["def get_inputs():"]
    if d.chance(0.6):
        out.append(f"    return [{', '.join(value for _, value in d.inputs)}]")
    else:
        out += [f"    {name} = {value}" for name, value in d.inputs]
        out.append(f"    return [{', '.join(name for name, _ in d.inputs)}]")
    nothing = d.pick("", "  # no arguments needed", "  # Nothing to initialise") if not d.args else ""
    passed = ", ".join(value for _, _, value in d.args if value)  # nothing for an argument whose default is taken
    return out + gap + ["def get_init_inputs():", f"    return [{passed}]{nothing}"]


def _clutter(d):
    """What real problems are full of and the forward pass does not need, in the constructor and its arguments."""
    sizes = [name for name, kind, _ in d.args if kind == "int"]
    for _ in range(d.r.choice([0, 0, 1, 1, 2, 3])):  # more arguments
        value = d.pick("1", "2", "4", "0.1", "1e-5", "True", "False", "None", "'mean'", "(1, 1)", "(0, 0)", "8",
                       "[1, 2]")
        name = d.name("eps momentum stride padding dilation groups bias dim num_heads dropout_p mode hidden_size "
                      "num_layers axis pool_size return_indices reduction affine n_embd margin")
        if d.chance(0.6):
            d.defaults.append((name, value))
        else:
            d.consts.append((name + "_value", value))
            d.args.insert(d.r.randint(0, len(d.args)), (name, d.pick("int", "float", "tuple", "bool"), name + "_value"))
        if d.chance(0.4):
            d.init.insert(d.r.randint(0, len(d.init)), f"self.{name} = {name}")
    for _ in range(d.r.choice([0, 0, 1, 1, 2])):  # more layers, with parameters that must be created in the same order
        a, b = (d.r.choice(sizes) if sizes and d.chance(0.6) else str(d.pick(2, 3, 4, 8, 16)) for _ in range(2))
        layer = "nn." + d.r.choice(_UNUSED_LAYERS).format(a=a, b=b, k=d.pick(1, 2, 3))
        name = d.name("conv1 conv2 bn pool fc1 proj dropout embed rnn block extra head attn")
        d.init.insert(d.r.randint(0, len(d.init)), f"self.{name} = {layer}")
    if d.chance(0.2):
        value = d.pick("None", "[1, 2, 3]", "(2, 2)", "3 * 4", "1.0 / 7")
        d.init.insert(d.r.randint(0, len(d.init)), f"self.{d.name('state size config')} = {value}")
    for i, line in enumerate(d.init):  # keyword arguments in place of positional ones
        found = re.fullmatch(r"(self\.\w+ = nn\.(\w+)\()(.*)\)", line)
        names = next((names.split() for kind, names in _ARGUMENTS.items() if found and found[2].startswith(kind)), [])
        if names and d.chance(0.35) and "(" not in found[3] and "[" not in found[3]:
            first = d.r.choice([0, 0, len(names) - 1])
            values = [f"{names[j]}={v}" if first <= j < len(names) and "=" not in v else v
                      for j, v in enumerate(found[3].split(", "))]
            d.init[i] = found[1] + ", ".join(values) + ")"

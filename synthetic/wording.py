"""How a synthesised problem reads: nested calls, docstrings, comments, layout, signatures, and what nothing uses.

`problem_text` writes a program as a user may have written it. Prose is random words: a model that reads it has nothing
to learn from it but to look past it.
"""

import random
import re

from synthetic.program import SYLLABLES, WORDS

# Layers that a constructor may hold besides what the forward pass uses. {a}, {b}: sizes.
_UNUSED_LAYERS = (
    "Conv2d({a}, {b}, {k})", "Linear({a}, {b})", "LSTM({a}, {b}, num_layers={k}, batch_first=True)",
    "GRU({a}, {b})", "Embedding({b}, {a})", "Dropout(p=0.{k})", "MaxPool2d(kernel_size={k}, stride={k}, padding=0)",
    "AdaptiveAvgPool2d((1, 1))", "Identity()", "BatchNorm2d({a}, eps=1e-5, momentum=0.1)", "LayerNorm([{a}, {b}])",
    "GroupNorm(1, {a})", "Flatten(start_dim=1)", "PReLU()", "Sequential(nn.Linear({a}, {b}), nn.ReLU())",
    "Upsample(scale_factor={k}, mode='nearest')", "ZeroPad2d({k})", "Parameter(torch.randn({a}, 1) * 0.02)",
    "Conv3d({a}, {b}, ({k}, {k}, {k}), stride=1, padding=1, dilation=1, groups=1, bias=False)")
# Names of the leading arguments of layers, which may as well be passed by keyword.
_ARGUMENTS = {"Conv": "in_channels out_channels kernel_size", "Linear": "in_features out_features",
              "Group": "num_groups num_channels", "LayerNorm": "normalized_shape", "LeakyReLU": "negative_slope",
              "Batch": "num_features", "Instance": "num_features", "MaxPool": "kernel_size", "AvgPool": "kernel_size"}
# What a line of the constructor may say in other words.
_RESTATED = ((r"(nn\.Conv.*)\)$", r"\1, padding_mode='zeros')"), (r"(nn\.Linear.*)\)$", r"\1, device=None)"),
             (r"(nn\.BatchNorm.*)\)$", r"\1, track_running_stats=True)"))
_NOISE = ("`True`.", "1D", "2D", "(N, C, H, W),", "e.g.,", "C = A * B,", "(batch_size, *)", "GELU,", "ReLU", "Conv2d,",
          "x,", "A", "GEMM", "-", "Defaults to 1.", "Defaults to None", "[0, 1]")  # what stands in real docstrings


def dress(d):
    """Complete a draft's constructor: arguments and layers that nothing uses, keywords, the order of the arguments."""
    p = d.program
    if d.chance(0.12):  # an argument that nothing uses
        name = d.name("groups dropout_p mode_id num_heads")
        p.args.append((name, "int", d.const(f"{name}_value unused", d.pick(1, 2, 8))))
    if d.chance(0.15):  # an attribute with a default
        name = d.name("eps_value momentum inplace axis")
        p.defaults.append((name, d.pick("1e-5", "0.1", "False", "1")))
        d.program.init.append(f"self.{name} = {name}")
    for pattern, otherwise in _RESTATED:
        p.init = [re.sub(pattern, otherwise, line) if d.chance(0.06) else line for line in p.init]
    annotated = d.chance(0.4)
    if d.clutter:
        _unused(d)
        p.init = [_by_keyword(d, line) for line in p.init]
    p.annotated = annotated
    fields = [f"{name}: {kind}" if annotated else name for name, kind, _ in p.args]
    for name, value in p.defaults:
        kind = d.pick("int", "float", "bool", "str")
        fields.append(f"{name}: {kind} = {value}" if annotated else f"{name}={value}")
    if p.init or fields or d.chance(0.8):
        p.signature = ", ".join(["self", *fields])


def _unused(d):
    """Arguments and layers of real problems that the forward pass does not need."""
    p = d.program
    sizes = [name for name, kind, _ in p.args if kind == "int"] or ["8"]
    for _ in range(d.pick(0, 0, 1, 1, 2, 3)):
        value = d.pick("1", "2", "4", "0.1", "1e-5", "True", "False", "None", "'mean'", "(1, 1)", "(0, 0)", "[1, 2]")
        name = d.name("eps momentum stride padding dilation groups bias dim num_heads dropout_p mode hidden_size "
                      "num_layers axis pool_size return_indices reduction affine n_embd margin")
        if d.chance(0.6):
            p.defaults.append((name, value))
        else:
            p.consts.append((name + "_value", value))
            place = d.r.randint(0, len(p.args))
            p.args.insert(place, (name, d.pick("int", "float", "tuple", "bool"), name + "_value"))
        if d.chance(0.4):
            p.init.insert(d.r.randint(0, len(p.init)), f"self.{name} = {name}")
    for _ in range(d.pick(0, 0, 1, 1, 2)):  # their parameters must be created in the same order
        a, b = d.pick(*sizes, "4", "16"), d.pick(*sizes, "2", "8")
        layer = "nn." + d.pick(*_UNUSED_LAYERS).format(a=a, b=b, k=d.pick(1, 2, 3))
        name = d.name("conv1 conv2 bn pool fc1 proj dropout embed rnn block extra head attn")
        p.init.insert(d.r.randint(0, len(p.init)), f"self.{name} = {layer}")


def _by_keyword(d, line) -> str:
    """A line of the constructor, now and then with keyword arguments in place of positional ones."""
    layer = re.fullmatch(r"(self\.\w+ = nn\.(\w+)\()([^(\[]*)\)", line)
    names = [_ARGUMENTS[kind].split() for kind in _ARGUMENTS if layer and layer[2].startswith(kind)]
    if not names or not d.chance(0.35):
        return line
    first, values = d.pick(0, 0, len(names[0]) - 1), layer[3].split(", ")
    for i, name in enumerate(names[0]):
        if first <= i < len(values) and "=" not in values[i]:
            values[i] = f"{name}={values[i]}"
    return f"{layer[1]}{', '.join(values)})"


class Style:
    """How one user writes, drawn from a seed."""

    def __init__(self, program):
        self.r, self.program = random.Random(f"style {program.seed}"), program
        self.clutter = program.clutter
        self.nesting = self.pick(0, 0, 0.15, 0.4, 0.8)  # how often a line moves into the one that follows it
        self.width = self.pick(999, 999, 999, 999, 50, 70)  # where the constructor's signature breaks
        self.hollow = self.pick("", "", "    ", "        ")  # what stands on a blank line inside the class
        self.gap = [""] * self.pick(1, 1, 2)  # blank lines between the parts of the file
        self.documented = self.chance(0.65)

    def chance(self, p) -> bool:
        return self.r.random() < p

    def pick(self, *options):
        return self.r.choice(options)

    # ---- prose

    def word(self) -> str:
        kind = self.r.random()
        if not self.clutter or kind < 0.6:
            return self.pick(*WORDS)
        if kind < 0.8:
            return "".join(self.r.choices(SYLLABLES, k=self.r.randint(1, 4)))
        return self.pick(*_NOISE)

    def words(self, low, high) -> str:
        """`low` to `high` words, with clutter sometimes up to twice as many."""
        high *= 1 + (self.clutter and self.chance(0.3))
        text = self.word()
        for _ in range(self.r.randint(low, high) - 1):
            text += self.pick(*[" "] * 32, ", ", "; ", ": ", " (") + self.word()
        return text[:1].upper() + text[1:]

    def docstring(self, indent, fields) -> list[str]:
        """A docstring's lines, or none. fields: (name, type) of the arguments, which it may describe."""
        if not self.documented or self.chance(0.2):
            return []
        lines = [f'{indent}"""', f"{indent}{self.words(4, 16)}."]
        if fields and self.chance(0.4):
            lines += ["", f"{indent}{self.pick('Args', 'Args', 'Parameters')}:"]
            for name, kind in fields:
                lines.append(f"{indent}    {name} ({kind}{self.pick('', '', ', optional')}): {self.words(2, 10)}.")
            if self.chance(0.4):
                lines += ["", f"{indent}Returns:", f"{indent}    torch.Tensor: {self.words(2, 8)}."]
        return lines + [f'{indent}"""']

    # ---- the forward pass

    def lines(self) -> list[str]:
        """The lines of forward: each step's, with those of inline steps inside, and now and then others, too."""
        out, later = [], [str(step) for step in self.program.steps]
        for i, step in enumerate(self.program.steps):
            target, value = step.result.text, step.expression()
            if out and self.joins(i):
                before, _, inner = out.pop().partition(" = ")
                alone = re.search(rf"[(]{before}[,)]", value)  # an argument needs no brackets
                text = inner if _is_call(inner) or alone else f"({inner})"
                value = re.sub(rf"(?<![\w.]){before}\b(?!\s*=[^=])", lambda _: text, value)
            elif re.match(r"self\.\w+\(|F\.", str(out[-1:])[2:].partition(" = ")[2]) and self.chance(self.nesting / 2):
                in_place = re.fullmatch(rf"({target}) ([-+*/]) ([\w.]+)", value)
                if in_place and step.source.text == target:
                    out.append(f"{target} {in_place[2]}= {in_place[3]}")
                    continue
            out.append(f"{target} = {value}")
        return [line.replace(", ", ",") if self.chance(0.06) else line for line in out]

    def joins(self, i) -> bool:
        """Whether the line before step i moves into it: always if that step is inline."""
        before, step = self.program.steps[i - 1:i + 1]
        readers = [other for other in self.program.steps if before.result in other.operands.values()]
        named = re.findall(rf"(?<![\w.]){before.result.text}\b", step.expression())
        possible = len(readers) == 1 and readers[0] is step and len(named) == 1
        return before.inline or possible and before.name != "alias" and self.chance(self.nesting)

    def helper(self, body) -> tuple[list, list]:
        """Now and then the last lines, where they use one variable alone, become a method: (body, its lines)."""
        variable = body[-1].split(" = ")[0]
        count = 0
        while count < len(body) - 1:
            line = body[-1 - count]
            names = set(re.findall(r"(?<![\w.'\"])[A-Za-z_]\w*(?!\w|\s*=[^=])", line)) - {"self", "torch", "F", "nn", "True"}
            if not line.startswith(f"{variable} = ") or names - {variable}:
                break
            count += 1
        if not count or not self.chance(0.1):
            return body, []
        name = self.pick("_helper", "apply_tail", "activate", "post_process", "_finish")
        lines = body[-count:] + [f"return {variable}"]
        return body[:-count] + [f"{variable} = self.{name}({variable})"], [
            self.hollow, f"    def {name}(self, {variable}):", *(f"        {line}" for line in lines)]


def _is_call(text) -> bool:
    """Whether an expression is one call, such as torch.tanh(x + (y))."""
    depth = 0
    for i, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0 and (letter == ")" and i < len(text) - 1 or letter in " -"):
            return False
    return text.endswith(")") and not text.startswith("(")


def problem_text(program) -> str:
    """A program as a problem file in KernelBench's format. The same program always gives the same text."""
    style = Style(program)
    body, helper = style.helper(style.lines())
    target, operator, value = body[-1].partition(" = ")
    if operator and style.chance(0.25):
        body[-1] = f"return {value}"
    else:
        body.append(f"return {program.result.text}")
    body = [line + (f"  # {style.words(2, 5).lower()}" if style.chance(0.05) else "") for line in body]
    model = _class(program, style, body) + helper
    out = ["import torch", "import torch.nn as nn"]
    if style.chance(0.15):
        model = [re.sub(r"\bF\.", "torch.nn.functional.", line) for line in model]
    if "F." in "".join(model) or style.chance(0.3):
        out.append("import torch.nn.functional as F")
    out += ["import math"] * ("math." in "".join(model) or style.chance(0.04)) + style.gap
    text = "\n".join(out + model + style.gap + _constants_and_inputs(program, style))
    return text.replace("'", style.pick("'", "'", '"')) + style.pick("\n", "\n", "")


def _class(program, style, body) -> list[str]:
    """The lines of Model. body: of forward."""
    fields = [(name, kind) for name, kind, _ in program.args]
    out = ["class Model(nn.Module):"] + style.docstring("    ", fields)
    if program.signature:
        head = f"    def __init__({program.signature}):"
        out.append(re.sub(rf"(.{{{style.width},}}?), ", r"\1,\n" + " " * 17, head))
        out += style.docstring("        ", fields) if style.clutter and style.chance(0.3) else []
        out.append("        " + style.pick("super().__init__()", "super(Model, self).__init__()"))
        for line in program.init:
            out.append(f"        {line}" + style.pick(*[""] * 15, " ", "  # " + style.words(1, 4)))
        out.append(style.hollow)
    arguments = ["self"]
    for value, _ in program.inputs:
        hint = ": float" if value.shape is None else ": torch.Tensor"
        arguments.append(value.text + hint * program.annotated)
    out.append(f"    def forward({', '.join(arguments)}){' -> torch.Tensor' * program.annotated}:")
    out += style.docstring("        ", [(value.text, "torch.Tensor") for value, _ in program.inputs])
    for line in body:
        if style.clutter and style.chance(0.06):
            out.append("        # " + style.words(1, 5))
        out.append(f"        {line}")
    return out


def _constants_and_inputs(program, style) -> list[str]:
    """The lines after Model: module-level constants, get_inputs, get_init_inputs."""
    out = ["# " + style.words(1, 3)] * style.chance(0.08)
    equals = style.pick(*[" = "] * 9, "  = ")
    for i, (name, value) in enumerate(program.consts):
        if i and value.isdigit() and int(value) % 4 == 0 and int(value) > 4 and style.chance(0.08):
            value = style.pick(f"{int(value) // 4} * 4", f"{int(value) // 2} * 2")
        out.append(f"{name}{equals}{value}" + style.pick(*[""] * 14, "  ", f"  # {style.words(1, 3).lower()}"))
    out += style.gap + ["def get_inputs():"]
    if style.chance(0.6):
        out.append(f"    return [{', '.join(maker for _, maker in program.inputs)}]")
    else:
        out += [f"    {value.text} = {maker}" for value, maker in program.inputs]
        out.append(f"    return [{', '.join(value.text for value, _ in program.inputs)}]")
    nothing = "" if program.args else style.pick("", "  # no arguments needed", "  # Nothing to initialise")
    passed = ", ".join(constant for _, _, constant in program.args)
    return out + style.gap + ["def get_init_inputs():", f"    return [{passed}]{nothing}"]

"""The programmatic expert behind the built-in cold start.

It reads a problem (problem.py, reader.py) and renders a `ModelNew` in which Triton kernels (codegen.py) take over as
many steps as the given techniques allow. Each technique is also a skill (name, description, tags, body), so the same
expert writes what the skill library says.

    parsed = read(task)                          steps, shapes, constructor text; None if the reader cannot follow it
    applicable(parsed)                           the techniques that change anything for this problem
    solution = render(parsed, techniques)        .code, and .used: the techniques that really show up in it

The expert is fixed: it knows techniques, not when they pay. Which of them are worth it, and where, is what
reinforcement learning has to find out.
"""

import contextlib
import json
import math
import re
from collections import Counter, namedtuple
from dataclasses import replace
from pathlib import Path

from synthetic.codegen import Kernel, Unsupported, Window
from synthetic.operators import ROWS, unusual
from synthetic.problem import follow, read  # noqa: F401  the expert's first half

# ----------------------------------------------------------------------------------------------------------------------
# Techniques, as skills: their texts are in techniques.json. Several wordings of each are drawn from when the cold start
# is written, so that a policy must read a skill rather than recognise one fixed string.


# name, description, scope and tags are as a skill's; motivation and idea are lists of wordings.
Technique = namedtuple("Technique", "name description scope tags motivation idea")
_TEXTS = json.loads(Path(__file__).with_name("techniques.json").read_text())
TECHNIQUES = {entry["name"]: Technique(**entry) for entry in _TEXTS}
ALL = frozenset(TECHNIQUES)
_LAST_RESORT = "window"  # no technique to be chosen: what a solution does that would have no kernel without it


def techniques_in(code) -> set[str]:
    """Which techniques a kernel source shows, told from its structure (also for code that a model wrote)."""
    found = set()
    for body in re.findall(r"@triton\.jit\s*\ndef \w+\(.*?\):\n(.*?)(?=\n\S|\Z)", code, re.DOTALL):
        # Every step is headed by the torch line that it replaces; a folded bias is no step of its own.
        folded = len(re.findall(r"# \w+ = self\.\w+\(\w+\)\n\s+(\w+) = \1 \+ bias\d?$", body, re.MULTILINE))
        operators = len(re.findall(r"^\s+# ", body, re.MULTILINE)) - folded
        row = "start" in body and "offs" in body
        sweep = "lane = tl.program_id(1)" in body
        norm = row and not sweep and re.search(r"for \w+ in range", body)
        product = "tl.dot(" in body
        partial = re.search(r"tl\.store\(dst_ptr \+ tl\.program_id\(0\), tl\.sum\(", body)
        statistics = re.search(r"/ tl\.sum\(|tl\.log\(tl\.sum|d = tl\.where\(mask|tl\.maximum\(tl\.sqrt\(tl\.sum"
                               r"|all\d* = ", body)
        normalised = re.search(r"tl\.sqrt\(var\d? \+", body)  # it reads the statistics as it would a parameter
        broadcast = len(re.findall(r"(?:idx|idx // \w+|tl\.program_id\(0\)) % \w+", body))
        shown = {
            "index-broadcast-parameter": not norm and not normalised and broadcast > folded,
            "partial-sums-loss": partial,
            "one-program-per-group": norm and not partial,
            "row-scan": row and not norm and not partial and "tl.cum" in body,
            "one-program-per-row": row and not norm and not partial and "tl.cum" not in body and statistics,
            "row-reduction": row and not norm and re.search(r"# .*\b(sum|mean|a?max|a?min|argmax|argmin|norm)\(", body),
            "fuse-neighbours-into-row": row and operators >= 2,
            "tile-matmul-tf32x3": product,
            "fuse-pointwise-run": not row and not partial and operators >= (3 if product else 2),
            "diagonal-as-scaling": re.search(r"# .*torch\.diag\(", body),
        }
        found |= {name for name, shows in shown.items() if shows}
    around = {"fold-convolution-bias": r"F\.conv\w*\(\w+(?:\.contiguous\(.*?\))?, self\.\w+\.weight, None",
              "channels-last-convolution": r"F\.conv\w*\(\w+\.contiguous\(memory_format=",
              "statistics-then-pointwise": r"torch\.var_mean\(.*\n.*= fused"}  # what shows outside the kernels
    return found | {name for name, pattern in around.items() if re.search(pattern, code)}


# ----------------------------------------------------------------------------------------------------------------------
# Rendering: which steps a kernel takes over.


_IMPORTS = ("import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\nimport triton\n"
            "import triton.language as tl")


# plan: the steps of the methods that have a kernel, each with what runs it (not the torch call for the statistics of a
# batch norm); used: the techniques that show up in the code.
Solution = namedtuple("Solution", "plan code used")


class _Kernels:
    """The kernels of a solution, without doubles, and the lines of its plan."""

    def __init__(self):
        self.texts, self.names, self.counts, self.plan = [], {}, Counter(), []

    def name(self, kernel, variables) -> str:
        """The name of the function that launches a kernel, which joins the others if it is a new one."""
        kind = kernel.kind
        plain = re.sub(r"\n +#.*", "", kernel.text("_"))  # but for comments
        if plain not in self.names:
            self.counts[kind] += 1
            name = f"{kind}_kernel" if kind in variables else kind  # no local variable may hide it
            self.names[plain] = name + (str(self.counts[kind]) if self.counts[kind] > 1 else "")
            self.texts.append(kernel.text(self.names[plain]))
        return self.names[plain]

    def describe(self, said):
        """Extend the plan by a method's [(kernel or "torch", its steps)], unless all of it stays with torch."""
        for name, steps in said if {runs for runs, _ in said} - {"torch"} else []:
            if name == "torch" and self.plan and self.plan[-1].startswith("torch:"):
                self.plan[-1] += f"; {steps}"
            else:
                self.plan.append(f"{name}: {steps}")


class _Renderer:
    """One pass over the steps of a function: at each, the first kind of kernel that fits takes as many as it can."""

    def __init__(self, parsed, techniques, kernels):
        self.parsed, self.steps, self.techniques, self.kernels = parsed, list(parsed.steps), techniques, kernels
        self.forward = []  # (line of the new function, what the plan says of it: see _Kernels.describe)
        self.channels_last = {}  # variable -> whether all channels of a pixel are neighbours in its memory
        self.variables = set(parsed.inputs) | {step.target for step in self.steps}
        i = 0
        while i < len(self.steps):
            i = (self.loss(i) or self.rows(i) or self.norm(i) or self.statistics(i) or self.fused(i)
                 or self.matmul(i) or self.window(i) or self.torch(i))

    # ---- how a kernel takes over some steps

    def take(self, kind, i, first, last, shape, dims=(), bias_of=None):
        """Let a kernel take over steps[i:j], for the largest j from `last` down to `first` for which that can be done.

        bias_of: a convolution called without bias, which the kernel adds first. Returns j, or None if no j will do.
        """
        for j in range(last, first - 1, -1):
            if self.closed(i, j) and (kernel := self.build(kind, self.steps[i:j], shape, dims, bias_of)):
                self.emit(kernel)
                return j

    def closed(self, i, j) -> bool:
        """Whether steps[i:j] can be one kernel: nothing that it computes but its last target is read later."""
        inner = {step.target for step in self.steps[i:j]} - {self.steps[j - 1].target}
        for step in self.steps[j:]:
            if step.reads & inner:
                return False
            inner -= {step.target}
        return self.parsed.result not in inner

    def build(self, kind, steps, shape, dims=(), bias_of=None) -> Kernel | None:
        """A kernel over `steps`, or None if one of them cannot be translated."""
        last = kind == "fused" and len(shape) > 3 and any(self.channels_last.get(name) for name in steps[0].reads)
        kernel = Kernel(self.parsed, kind, shape, dims, last)
        with contextlib.suppress(Unsupported, ValueError, TypeError, KeyError, AttributeError):
            if bias_of:
                kernel.add_bias(bias_of)
            for step in steps:
                if step.target in kernel.reserved and step.kind in ("pointwise", "row") and kind != "loss":
                    return None
                kernel.add(step)
            kernel.text(kind)
            return kernel

    def emit(self, kernel):
        """Append the call of a kernel."""
        name = self.kernels.name(kernel, self.variables)
        self.forward.append((f"{kernel.last.target} = {name}({kernel.call()})", (name, "; ".join(kernel.plan))))
        self.channels_last[kernel.last.target] = kernel.channels_last

    def pointwise(self, step) -> bool:
        """Whether a pointwise step may enter a kernel under the current techniques."""
        if step.kind != "pointwise" or not step.shape:
            return False
        if step.op == "diagonal":
            return "diagonal-as-scaling" in self.techniques
        if "index-broadcast-parameter" in self.techniques:
            return True
        kernel = self.build("fused", [step], step.shape)
        return kernel is not None and not any("% " in operand.load for operand in kernel.operands.values())

    def end_of_run(self, i, fits) -> int:
        """Where the run of steps from i on ends for which `fits` holds."""
        return next((j for j in range(i, len(self.steps)) if not fits(self.steps[j])), len(self.steps))

    def take_with_followers(self, kind, i, technique, bias_of=None):
        """`take` step i and, with the technique, the run of pointwise steps of its shape that follows it."""
        joins, shape = technique in self.techniques, self.steps[i].shape
        end = self.end_of_run(i + 1, lambda step: joins and self.pointwise(step) and step.shape == shape)
        return self.take(kind, i, i + 1, end, shape, (), bias_of)

    # ---- kinds of kernels: each returns the step that comes after what it took over, or None

    def fused(self, i, bias_of=None):
        """A run of pointwise steps; without the technique only one, and only in a solution without any kernel."""
        allowed = "fuse-pointwise-run" in self.techniques or not self.kernels.texts or bias_of
        if allowed and self.pointwise(self.steps[i]):
            return self.take_with_followers("fused", i, "fuse-pointwise-run", bias_of)

    def rows(self, i, bias_of=None):
        """An operator over rows, with its neighbours: a row to a program, or a sweep for other rows (templates.py)."""
        steps, neighbours = self.steps, "fuse-neighbours-into-row" in self.techniques
        k = self.end_of_run(i, lambda step: neighbours and self.pointwise(step))
        if k == len(steps) or not self.row(steps[k]):
            return None
        row, (first, last) = steps[k], steps[k].dims
        shape = tuple(row.values[row.source].shape)
        cols = math.prod(shape[first:last + 1])
        rows = math.prod(shape) // cols
        if any(step.shape != shape for step in steps[i:k]) or cols < 2:
            return None

        def joins(step):
            same_rows = self.row(step) and step.dims == row.dims and step.values[step.source].shape == shape
            fits = step.shape == shape or math.prod(step.shape) == rows
            return neighbours and (same_rows or fits and self.pointwise(step))

        end, spatial = self.end_of_run(k + 1, joins), first == 2 and ROWS[row.op].reduces
        whole = last == len(shape) - 1 and (first == last or spatial) and ROWS[row.op].triton and cols <= 16384
        for kind, fits in (("row", whole), ("sweep", rows >= 32)):  # fewer rows do not keep a GPU busy
            if fits and (j := self.take(kind, i, k + 1, end, shape, row.dims, bias_of)):
                return j

    def row(self, step) -> bool:
        return step.kind == "row" and ROWS[step.op].technique in self.techniques

    def loss(self, i):
        """Pointwise steps and the reduction over everything that ends them."""
        steps = self.steps
        k = self.end_of_run(i, lambda step: step.kind == "pointwise" and step.shape == steps[i].shape)
        joins = k - i <= 1 or "fuse-pointwise-run" in self.techniques  # else the last pointwise step joins, no other
        if "partial-sums-loss" in self.techniques and joins and k < len(steps) and steps[k].kind == "all":
            return self.take("loss", i, k + 1, k + 1, steps[k].values[steps[k].source].shape)

    def norm(self, i, bias_of=None):
        """A normalisation over groups of channels, with the pointwise steps that follow."""
        step = self.steps[i]
        if step.kind == "norm" and step.op != "batch" and "one-program-per-group" in self.techniques:
            return self.take_with_followers("norm", i, "fuse-neighbours-into-row", bias_of)

    def statistics(self, i):
        """Batch norm, or layer norm of few long rows: mean and variance by torch, the rest in a pointwise kernel."""
        step = self.steps[i]
        if step.op not in ("batch", "layer_norm") or "statistics-then-pointwise" not in self.techniques:
            return None
        dims = written = [d for d in range(len(step.shape)) if d != 1]
        if step.op == "layer_norm":  # the layer knows how many they are: a model would have to count
            dims = list(range(step.dims[0], step.dims[1] + 1))
            written = f"tuple(range(-len(self.{step.module}.normalized_shape), 0))"
        names = ("mu", "var") if not {"mu", "var"} & self.variables else ("mu2", "var2")
        call = f"torch.var_mean({step.source}, dim={written}, correction=0, keepdim=True)"
        self.forward.append((f"{names[1]}, {names[0]} = {call}", None))
        self.steps[i] = replace(step, kind="norm", dims=dims, statistics=names)
        j = self.take_with_followers("fused", i, "fuse-pointwise-run")
        if j is None:
            self.forward.pop()
            self.steps[i] = step
        return j

    def matmul(self, i):
        """A product of matrices, with its bias and the pointwise steps that follow as the epilogue."""
        if self.steps[i].kind == "matmul" and "tile-matmul-tf32x3" in self.techniques:
            return self.take_with_followers("matmul", i, "fuse-pointwise-run")

    def window(self, i):
        """A pooling or depthwise convolution, where there is nothing else for a kernel: torch's are hard to beat."""
        with contextlib.suppress(Unsupported):
            if _LAST_RESORT in self.techniques:
                self.emit(Window(self.steps[i]))
                return i + 1

    def torch(self, i):
        """A step that stays a torch call; a convolution may leave its bias to what follows."""
        step = self.steps[i]
        last = self.channels_last[step.target] = self.pays_channels_last(i)
        if "fold-convolution-bias" in self.techniques and _convolution(step) and step.layer.bias is not None \
                and self.only_next_reads(i):
            written = len(self.forward)
            self.stay(step, self.convolution(step, "None", last))
            if j := self.folded(i):
                return j
            del self.forward[written:]
        self.stay(step, self.convolution(step, f"self.{step.module}.bias", last) if last else None)
        return i + 1

    def stay(self, step, line=None):
        """Leave a step to torch, written as it is or as `line`; of a statement the plan has the first line."""
        self.forward.append((line or str(step), ("torch", str(step).split("\n")[0])))

    def folded(self, i):
        """Go on after a convolution without its bias: the next kernel adds it, after a pooling, too, which lets it
        through; where each channel is normalised by itself it makes no difference. Returns the step that comes after
        what was taken over; nothing if the bias has to stay.
        """
        step, then, i = self.steps[i], self.steps[i + 1], i + 1
        if then.kind == "norm" and then.op != "group":
            return i
        if _lets_bias_through(then.layer) and self.only_next_reads(i):
            self.stay(then)
            step, i = replace(step, target=then.target, shape=then.shape), i + 1
        fits = self.steps[i].shape == step.shape
        return self.rows(i, step) or fits and (self.norm(i, step) or self.fused(i, step))

    def only_next_reads(self, i) -> bool:
        """Whether nothing but the next step reads what step i assigns."""
        target, following = self.steps[i].target, self.steps[i + 1:]
        return bool(following) and target in following[0].reads and (
            following[0].target == target or not any(target in step.reads for step in following[1:]))

    def pays_channels_last(self, i) -> bool:
        """Whether a convolution is better called in channels-last memory, in which cuDNN works: a transposed one of
        more than one dimension (others are rounded otherwise there), and pointwise steps, which can stay there, to the
        end of the function.
        """
        kind, layer = _convolution(self.steps[i]), self.steps[i].layer
        return bool("channels-last-convolution" in self.techniques and kind and kind[1] and kind[2] != "1"
                    and layer.groups == 1 and max(layer.kernel_size) > 1
                    and i + 1 < self.end_of_run(i + 1, self.pointwise) == len(self.steps))

    def convolution(self, step, bias, channels_last) -> str:
        """A convolution's line as a function's call, with this bias, and from channels-last memory to such memory."""
        layer, (transposed, rank) = f"self.{step.module}", _convolution(step).groups()
        source, function, options = step.source, "conv", "stride padding dilation groups"
        if transposed:
            function, options = "conv_transpose", "stride padding output_padding groups dilation"
        if channels_last:
            source += f".contiguous(memory_format=torch.channels_last{'_3d' * (rank == '3')})"
        passed = ", ".join(f"{layer}.{option}" for option in options.split())
        return f"{step.target} = F.{function}{rank}d({source}, {layer}.weight, {bias}, {passed})"


def _convolution(step):
    """A match (transposed or None, dimensions) of a layer that a function's call can stand for; None for others."""
    kind = re.fullmatch(r"Conv(Transpose)?([123])d", type(step.layer).__name__)
    return kind if kind and step.source and step.layer.padding_mode == "zeros" else None


def _lets_bias_through(layer) -> bool:
    """Whether a layer is a pooling of which it is the same to add a number before or after."""
    kind = re.fullmatch(r"(Adaptive)?(Max|Avg)Pool[123]d", type(layer).__name__)
    unpadded = kind and (kind[2] == "Max" or getattr(layer, "padding", 0) in (0, (0,), (0, 0), (0, 0, 0)))
    return bool(unpadded) and not unusual(layer, {"stride", "padding", "dilation", "count_include_pad"})


def render(parsed, techniques) -> Solution | None:
    """Write `ModelNew` with the given techniques where they apply. None when no kernel of any kind is possible.

    A solution needs at least one kernel of its own; if the techniques allow none, the first one that would is added.
    """
    views = any(".view(" in line for part in parsed.parts for method in part.methods for line in method.lines)
    barred = {"channels-last-convolution"} if views else set()  # a view wants contiguous memory
    for forced in [set()] + [{name} for name in TECHNIQUES] + [
            {"one-program-per-row", "fuse-neighbours-into-row"}, {_LAST_RESORT}]:
        kernels = _Kernels()
        parts = [_class(part, (techniques | forced) - barred, kernels) for part in parsed.parts]
        if kernels.texts:
            code = "\n\n".join(text for text in [_IMPORTS, parsed.preamble, *parts, *kernels.texts] if text) + "\n"
            return Solution("\n".join(kernels.plan), code, techniques_in(code))
    return None


def _class(part, techniques, kernels) -> str:
    """A class of the solution: methods that were followed are written anew, others are copied."""
    main = part.name == "Model"
    out = [f"class {'ModelNew' if main else part.name}({part.bases}):"] + [f"    {line}" for line in part.lines]
    for method in part.methods:
        lines = _rewritten(method.body, techniques, kernels) if method.body else method.lines
        signature = method.signature
        if main and method.name == "__init__":
            lines = ["super().__init__()"] + [line for line in method.lines if "super(" not in line]
        elif main and method.name == "forward" and method.body and "=" not in signature:  # without annotations
            signature = f"self, {', '.join(method.body.inputs)}"
        out += [f"    def {method.name}({signature}):"] + ["        " + line for line in lines] + [""]
    return "\n".join(out[:-1])


def _rewritten(body, techniques, kernels) -> list[str]:
    """The lines of a method with kernels."""
    forward = _Renderer(body, techniques, kernels).forward or [("", None)]
    kernels.describe([said for _, said in forward if said])
    *lines, last = [line for line, _ in forward]
    target, _, value = last.partition(" = ")
    lines += [f"return {value}"] if target == body.result else [last, f"return {body.result}"]
    return [line.replace("\n", "\n        ") for line in lines if line]


def applicable(parsed) -> set[str]:
    """The techniques that show up in the fullest solution."""
    solution = render(parsed, ALL)
    return solution.used if solution else set()

"""The programmatic expert behind the built-in cold start.

It reads a problem's `forward` (reader.py) and renders a `ModelNew` in which Triton kernels (codegen.py) take over as
many steps as the given techniques allow. Each technique is also a skill (name, description, tags, body), so the same
expert writes what the skill library says.

    program = read(task)                         steps, shapes, constructor text; None if the reader cannot follow it
    applicable(program)                          the techniques that change anything for this problem
    solution = render(program, techniques)       .code, and .used: the techniques that really show up in it

The expert is fixed: it knows techniques, not when they pay. Which of them are worth it, and where, is what
reinforcement learning has to find out.
"""

import ast
import math
import re
from dataclasses import dataclass

import torch
import torch.nn as nn

from synthetic.codegen import RESERVED, Kernel, Unsupported
from synthetic.reader import read  # noqa: F401  the expert's first half

# ----------------------------------------------------------------------------------------------------------------------
# Techniques, as skills. Paraphrases are drawn from when the cold start is written, so that a policy must read a skill
# rather than recognise one fixed string.


@dataclass(frozen=True)
class Technique:
    name: str
    description: str
    scope: str
    tags: tuple
    motivation: tuple  # paraphrases
    idea: tuple  # paraphrases


TECHNIQUES = {t.name: t for t in [
    Technique("fuse-pointwise-run", "Compute a run of pointwise operators in one Triton kernel.", "general",
              ("pointwise", "fusion", "activation"),
              ("Every pointwise operator of PyTorch reads and writes the whole tensor once.",
               "A chain of elementwise calls is bound by memory traffic and by one launch per call."),
              ("Load each element once, apply all operators in registers, store once.",
               "Put the whole chain into a single kernel so that intermediates never reach memory.")),
    Technique("index-broadcast-parameter", "Read a broadcast parameter inside the kernel by channel index.", "general",
              ("broadcast", "parameter", "bias", "scale"),
              ("A bias or scale of shape (C, 1, 1) that stays in torch costs a full extra pass.",
               "Broadcast adds and multiplications break a chain of fused operators in two."),
              ("Load the parameter with idx // inner % size, where inner is the number of elements per channel.",
               "Compute the channel from the flat offset and load the parameter next to the element.")),
    Technique("fold-convolution-bias", "Add the bias of a convolution inside the kernel that follows it.",
              "task_specific/convolution", ("convolution", "bias", "epilogue"),
              ("A convolution with bias adds it in a pass of its own over the output.",
               "The library convolution launches a second kernel just to add its bias."),
              ("Call the convolution without bias and add the bias as the first operator of the fused kernel.",
               "Pass bias None to F.conv and treat the bias as a broadcast parameter of the tail.")),
    Technique("one-program-per-row", "Softmax, log-softmax, layer norm or logsumexp with one program per row.",
              "task_specific/row", ("softmax", "layer_norm", "logsumexp", "row"),
              ("A row operator written as several torch calls reads the row several times.",
               "Statistics over a row need the row only once if one program holds it."),
              ("Let one program load a full row, reduce it with tl.max and tl.sum, and write the result.",
               "Use BLOCK = next_power_of_2(cols) with a mask, and keep the row in registers.")),
    Technique("fuse-neighbours-into-row", "Move pointwise operators beside a row operator into its kernel.",
              "task_specific/row", ("row", "fusion", "prologue", "epilogue"),
              ("Pointwise operators before and after a row operator each cost a pass over memory.",
               "A row kernel already holds the row in registers when its neighbours need it."),
              ("Apply the operators before the reduction right after the load, those after it right before the store.",
               "Extend the row kernel by the pointwise steps around it instead of launching more kernels.")),
    Technique("row-reduction", "Sum, mean, max or min over the last dimensions with one program per row.",
              "task_specific/reduction", ("reduction", "sum", "mean", "max"),
              ("A reduction reads a large tensor to write a small one; what precedes it should not be written at all.",
               "Reducing in torch forces the operand into memory first."),
              ("One program per row loads the row, reduces it and stores one number.",
               "Reduce in registers with tl.sum or tl.max and store a single value per row.")),
    Technique("one-program-per-group", "Group or instance norm with one program per group, in two sweeps.",
              "task_specific/normalization", ("group_norm", "instance_norm", "statistics"),
              ("Library group norm takes several kernels for statistics, scale and shift.",
               "A normalisation group is contiguous in memory, so one program can own it."),
              ("Sum x and x * x in one sweep, then normalise, scale and shift in a second.",
               "Accumulate both moments in a loop, form mean and rstd, and write the result in a second loop.")),
    Technique("partial-sums-loss", "Compute a mean or sum over everything by partial sums inside the kernel.",
              "task_specific/loss", ("loss", "mean", "partial_sum"),
              ("A loss writes a full tensor of terms only to average it again.",
               "Elementwise loss terms need not be stored before their mean is taken."),
              ("Each program computes its terms and stores their sum; a short torch sum finishes the loss.",
               "Mask the terms, reduce them with tl.sum to one value per program, and add those up.")),
    Technique("diagonal-as-scaling", "Replace a product with a diagonal matrix by scaling the rows.",
              "task_specific/diagonal", ("diagonal", "matmul", "structure"),
              ("torch.diag(d) @ x builds a dense matrix of zeros and multiplies by it.",
               "A diagonal factor does cubic work where one multiplication per element is enough."),
              ("Multiply row i by d[i] inside a pointwise kernel, with index idx // cols.",
               "Load d by the row index and scale; no matrix is built.")),
    Technique("tile-matmul-tf32x3", "Multiply matrices in tiles with tl.dot in tf32x3 and finish the tile in place.",
              "task_specific/matmul", ("matmul", "linear", "tl.dot", "epilogue"),
              ("Library fp32 products do not use the tensor cores, and what follows them reads the result again.",
               "A product kept in torch writes its output before the next operator can start."),
              ("Accumulate a tile with tl.dot and input_precision tf32x3, then apply bias and activation to the tile.",
               "Three TF32 products keep fp32 accuracy on tensor cores; the epilogue runs on the accumulator.")),
    Technique("row-scan", "Cumulative sum along the last dimension with one program per row.",
              "task_specific/scan", ("scan", "cumsum", "row"),
              ("A scan kept in torch cannot be fused with what surrounds it.",
               "Cumulative sums over rows that fit a block need no second pass."),
              ("Load the row into one program and apply tl.cumsum along it.",
               "Use tl.cumsum on a masked row and store it directly.")),
]}
ALL = frozenset(TECHNIQUES)


def techniques_in(code) -> set[str]:
    """Which techniques a kernel source shows, judged from its structure (also for code that a model wrote)."""
    found = set()
    for body in re.findall(r"@triton\.jit\s*\ndef \w+\(.*?\):\n(.*?)(?=\n\S|\Z)", code, re.DOTALL):
        # Every step is headed by the torch line that it replaces; a folded bias is no step of its own.
        folded = len(re.findall(r"# \w+ = self\.\w+\(\w+\)\n\s+(\w+) = \1 \+ bias\d?$", body, re.MULTILINE))
        operators = len(re.findall(r"^\s+# ", body, re.MULTILINE)) - folded
        row = "start" in body and ("offs" in body)
        norm = row and re.search(r"for \w+ in range", body)
        product = "tl.dot(" in body
        partial = re.search(r"tl\.store\(out_ptr \+ tl\.program_id\(0\), tl\.sum\(", body)
        if not norm and len(re.findall(r"(?:idx|idx // \w+|tl\.program_id\(0\)) % \w+", body)) > folded:
            found.add("index-broadcast-parameter")
        if partial:
            found.add("partial-sums-loss")
        elif norm:
            found.add("one-program-per-group")
        elif row and "tl.cumsum" in body:
            found.add("row-scan")
        elif row and re.search(
            r"/ tl\.sum\(|tl\.log\(tl\.sum|d = tl\.where\(mask|tl\.maximum\(tl\.sqrt\(tl\.sum", body
        ):
            found.add("one-program-per-row")
        if row and not norm and re.search(r"# .*\b(sum|mean|amax|amin|norm)\(", body):
            found.add("row-reduction")
        if (row or norm) and operators >= 2:
            found.add("fuse-neighbours-into-row")
        if product:
            found.add("tile-matmul-tf32x3")
        if not row and not partial and operators >= (3 if product else 2):
            found.add("fuse-pointwise-run")
        if re.search(r"# .*torch\.diag\(", body):
            found.add("diagonal-as-scaling")
    if re.search(r"F\.conv\w*\(\w+, self\.\w+\.weight, None", code):
        found.add("fold-convolution-bias")
    return found
ROW_TECHNIQUE = {"sum": "row-reduction", "mean": "row-reduction", "amax": "row-reduction", "amin": "row-reduction",
                 "norm": "row-reduction", "cumsum": "row-scan"}  # the others: one-program-per-row


# ----------------------------------------------------------------------------------------------------------------------
# Rendering: which steps a kernel takes over.


@dataclass
class Solution:
    code: str
    used: set  # techniques that show up in it


class _Renderer:
    def __init__(self, program, techniques, lazy=True):
        self.p, self.techniques, self.lazy = program, techniques, lazy
        self.forward, self.texts = [], []
        self.names = {}

    def on(self, technique):
        return technique in self.techniques

    def kernel_name(self, kind):
        variables = set(self.p.inputs) | {step.target for step in self.p.steps}
        base = f"{kind}_kernel" if kind in variables else kind  # a local variable would hide the function
        self.names[kind] = self.names.get(kind, 0) + 1
        return base if self.names[kind] == 1 else f"{base}{self.names[kind]}"

    def run(self):
        i, steps = 0, self.p.steps
        while i < len(steps):
            i = self.loss(i) or self.rows(i) or self.norm(i) or self.fused(i) or self.matmul(i) or self.torch(i)
        return self

    # ---- windows of steps that one kernel may replace

    def closed(self, i, j):
        """Whether steps[i:j] can be one kernel: nothing that it computes but its last target is read later."""
        final = self.p.steps[j - 1].target
        inner = {s.target for s in self.p.steps[i:j]} - {final}
        for step in self.p.steps[j:]:
            if step.reads & inner:
                return False
            inner -= {step.target}
        return self.p.result not in inner

    def pointwise(self, step, alone=False):
        """Whether a pointwise step may enter a kernel under the current techniques."""
        if step.kind != "pointwise" or not step.shape:
            return False
        if step.op == "diagonal":
            return self.on("diagonal-as-scaling")
        if alone or self.on("index-broadcast-parameter"):
            return True
        kernel = self.build("fused", [step], step.shape)
        return kernel is not None and not any("% " in o.load for o in kernel.operands.values())

    def emit(self, kernel, steps, keepdim=False, mean=False, extra_call=""):
        kernel.name = self.kernel_name(kernel.kind)
        final = steps[-1].target
        host, body = kernel.texts(final, keepdim, mean)
        self.forward.append(f"{final} = {kernel.name}({kernel.call()}{extra_call})")
        self.texts += [host, body]

    def build(self, kind, steps, shape, layout="", prefix=None, final=None):
        """A kernel over `steps`, or None if one of them cannot be translated. final: what to store if none."""
        kernel = Kernel(self.p, kind, kind, shape, layout)
        try:
            if prefix:
                prefix(kernel)
            for step in steps:
                if step.target in RESERVED:
                    return None
                if step.kind == "pointwise" and tuple(step.shape) == tuple(shape) and any(
                        kernel.local.get(v) == "row" and step.values[v].dim() != len(shape) for v in step.reads):
                    return None  # a row's number without keepdim does not broadcast along the row
                kernel.add(step)
            kernel.texts(steps[-1].target if steps else final)
        except (Unsupported, ValueError, TypeError, KeyError, AttributeError):
            return None
        return kernel

    def fused(self, i, prefix=None):
        steps = self.p.steps
        alone = not self.on("fuse-pointwise-run")
        if not self.pointwise(steps[i], alone=False) or (alone and self.texts and prefix is None):
            return None
        j = i + 1
        while not alone and j < len(steps) and self.pointwise(steps[j]) and steps[j].shape == steps[i].shape:
            j += 1
        while j > i:
            kernel = self.build("fused", steps[i:j], steps[i].shape, prefix=prefix) if self.closed(i, j) else None
            if kernel:
                self.emit(kernel, steps[i:j])
                return j
            j -= 1
        return None

    def rows(self, i, prefix=None):
        steps = self.p.steps
        k = i
        if self.on("fuse-neighbours-into-row"):
            while k < len(steps) and self.pointwise(steps[k]):
                k += 1
        if k == len(steps) or steps[k].kind != "row":
            return None
        first = steps[k]
        if not self.on(ROW_TECHNIQUE.get(first.op, "one-program-per-row")):
            return None
        shape = tuple(first.values[first.source].shape)
        cols = shape[-1] if first.layout == "last" else math.prod(shape[2:])
        if any(s.shape != shape for s in steps[i:k]) or cols > 16384 or cols < 2:
            return None
        j = k + 1
        if self.on("fuse-neighbours-into-row"):
            reduced = shape[:-1] if first.layout == "last" else shape[:2]
            while j < len(steps):
                s = steps[j]
                row = s.kind == "row" and s.layout == first.layout and tuple(s.values[s.source].shape) == shape \
                    and self.on(ROW_TECHNIQUE.get(s.op, "one-program-per-row"))
                small = s.kind == "pointwise" and math.prod(s.shape) == math.prod(reduced)
                if not (row or self.pointwise(s) and (s.shape == shape or small)):
                    break
                j += 1
        while j > k:
            kernel = self.build("row", steps[i:j], shape, first.layout, prefix) if self.closed(i, j) else None
            if kernel:
                self.emit(kernel, steps[i:j], keepdim=len(steps[j - 1].shape) == len(shape))
                return j
            j -= 1
        return None

    def loss(self, i):
        """Pointwise steps and the reduction over everything that ends them."""
        if not self.on("partial-sums-loss"):
            return None
        steps = self.p.steps
        k = i
        while k < len(steps) and steps[k].kind == "pointwise" and steps[k].shape == steps[i].shape:
            k += 1
        if k == len(steps) or steps[k].kind != "all":
            return None
        shape = tuple(steps[k].values[steps[k].source].shape)
        # Without the fusion technique only the last pointwise step joins the reduction.
        start = i if self.on("fuse-pointwise-run") else max(i, k - 1)
        if start != i or not self.closed(i, k + 1):
            return None
        kernel = Kernel(self.p, "loss", "loss", shape)
        try:
            for step in steps[i:k]:
                kernel.add(step)
            kernel.values = steps[k].values
            kernel.expression(ast.Name(steps[k].source, ast.Load()))
            kernel.lines.append(f"# {steps[k].target} = {steps[k].text}")
            host, body = kernel.texts(steps[k].source, mean=steps[k].op == "mean")
        except (Unsupported, ValueError, TypeError, KeyError, AttributeError):
            return None
        kernel.name = self.kernel_name("loss")
        host, body = kernel.texts(steps[k].source, mean=steps[k].op == "mean")
        self.forward.append(f"{steps[k].target} = {kernel.name}({kernel.call()})")
        self.texts += [host, body]
        return k + 1

    def norm(self, i):
        steps, step = self.p.steps, self.p.steps[i]
        if step.kind != "norm" or not self.on("one-program-per-group"):
            return None
        layer, shape = getattr(self.p.model, step.module), step.shape
        j = i + 1
        while (self.on("fuse-neighbours-into-row") and j < len(steps) and self.pointwise(steps[j])
               and steps[j].shape == shape):
            j += 1

        def prefix(kernel):
            x = kernel.operand(step.source, shape)
            kernel.operand(f"self.{step.module}.eps", None)
            line = f"{step.target} = ({x} - mean) * rstd"
            if layer.weight is not None:
                channel = (shape[1],) + (1,) * (len(shape) - 2)
                line += f" * {kernel.operand(f'self.{step.module}.weight', channel)}"
                line += f" + {kernel.operand(f'self.{step.module}.bias', channel)}"
            kernel.lines += [f"# {step.target} = {step.text}", line]
            kernel.local[step.target] = "vector"

        groups = f"self.{step.module}.num_groups" if step.op == "group" else f"{step.source}.shape[1]"
        while j > i:
            kernel = (self.build("norm", steps[i + 1 : j], shape, prefix=prefix, final=step.target) if self.closed(i, j)
                      else None)
            if kernel:
                self.emit(kernel, steps[i:j], extra_call=f", {groups}")
                return j
            j -= 1
        return None

    def matmul(self, i):
        """A product of two matrices, with its bias and the pointwise steps that follow as the epilogue."""
        steps, step = self.p.steps, self.p.steps[i]
        call = self.p.reader.call(step.node)
        if not self.on("tile-matmul-tf32x3") or call is None or step.kind != "torch" or len(step.shape) != 2:
            return None
        layer = call.module if isinstance(call.module, nn.Linear) else None
        if layer is None and call.name not in ("matmul", "mm") or not isinstance(call.arguments[0], ast.Name):
            return None
        x = call.arguments[0].id
        weight = f"self.{call.attribute}.weight" if layer else ast.unparse(call.arguments[1])
        value = self.p.reader.evaluate(ast.parse(weight, mode="eval").body, step.values)
        if not isinstance(value, torch.Tensor) or value.dim() != 2 or step.values[x].dim() != 2 or \
                not re.fullmatch(r"[\w.]+", weight):
            return None

        def prefix(kernel):
            kernel.transposed = layer is not None
            kernel.factors = (kernel.operand(x, tuple(step.shape)), kernel.operand(weight, tuple(step.shape)))
            kernel.lines += [f"# {step.target} = {step.text}", f"{step.target} = acc"]
            kernel.local[step.target] = "vector"
            if layer and layer.bias is not None:
                bias = kernel.operand(f"self.{call.attribute}.bias", (step.shape[1],))
                kernel.lines[-1] += f" + {bias}"

        j = i + 1
        while (self.on("fuse-pointwise-run") and j < len(steps) and self.pointwise(steps[j])
               and steps[j].shape == step.shape):
            j += 1
        while j > i:
            kernel = self.build("matmul", steps[i + 1:j], step.shape, prefix=prefix, final=step.target) \
                if self.closed(i, j) else None
            if kernel:
                self.emit(kernel, steps[i:j])
                return j
            j -= 1
        return None

    def torch(self, i):
        """A step that stays a torch call; a convolution may hand its bias to the kernel that follows."""
        steps, step = self.p.steps, self.p.steps[i]
        layer = getattr(self.p.model, step.module) if step.module else None
        if self.on("fold-convolution-bias") and isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d,
                                                                   nn.ConvTranspose2d, nn.ConvTranspose3d)) \
                and layer.bias is not None and layer.padding_mode == "zeros" and i + 1 < len(steps):

            def prefix(kernel):
                x = kernel.operand(step.target, step.shape)
                bias = kernel.operand(f"self.{step.module}.bias", (step.shape[1],) + (1,) * (len(step.shape) - 2))
                kernel.lines += [f"# {step.target} = {step.text}", f"{step.target} = {x} + {bias}"]
                kernel.local[step.target] = "vector"

            attribute, rank = f"self.{step.module}", len(step.shape) - 2
            transposed = "Transpose" in type(layer).__name__
            order = ["stride", "padding", "output_padding", "groups", "dilation"] if transposed else \
                ["stride", "padding", "dilation", "groups"]
            options = ", ".join(f"{attribute}.{o}" for o in order)
            function = f"F.conv{'_transpose' if transposed else ''}{rank}d"
            self.forward.append(f"{step.target} = {function}({step.source}, {attribute}.weight, None, {options})")
            following = steps[i + 1]
            if step.target in following.reads and following.shape == step.shape and self.closed_over(i):
                j = self.rows(i + 1, prefix) or self.fused(i + 1, prefix)
                if j:
                    return j
            self.forward.pop()
        self.forward.append(f"{step.target} = {step.text}")
        return i + 1

    def closed_over(self, i):
        """Whether the value that step i assigns is read by nobody but the kernel that starts with step i + 1."""
        step, following = self.p.steps[i], self.p.steps[i + 1]
        if following.target == step.target:
            return True
        return not any(step.target in s.reads for s in self.p.steps[i + 2:])


def render(program, techniques) -> Solution | None:
    """Write `ModelNew` with the given techniques where they apply. None when no kernel of any kind is possible.

    A solution needs at least one kernel of its own; if the techniques allow none, the first one that would is added.
    """
    for forced in [set()] + [{name} for name in TECHNIQUES] + [{"one-program-per-row", "fuse-neighbours-into-row"}]:
        renderer = _Renderer(program, set(techniques) | forced).run()
        if renderer.texts:
            break
    else:
        return None
    code = ["import torch", "import torch.nn as nn", "import torch.nn.functional as F", "import triton",
            "import triton.language as tl", ""]
    if program.classes:
        code += [program.classes, ""]
    code.append("class ModelNew(nn.Module):")
    if program.has_init:
        code += [f"    def __init__({program.signature}):", "        super().__init__()"]
        code += ["        " + line for line in program.init] + [""]
    code.append(f"    def forward(self, {', '.join(program.inputs)}):")
    lines = list(renderer.forward)
    target, _, value = lines[-1].partition(" = ")
    lines = lines[:-1] + [f"return {value}"] if target == program.result else lines + [f"return {program.result}"]
    code += ["        " + line for line in lines]
    code = "\n".join(code) + "\n\n" + "\n\n".join(renderer.texts) + "\n"
    return Solution(code, techniques_in(code))


def applicable(program) -> set[str]:
    """The techniques that show up in the fullest solution."""
    solution = render(program, ALL)
    return solution.used if solution else set()

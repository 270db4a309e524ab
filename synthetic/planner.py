"""Which steps of a program join which kernel, and the ModelNew that comes of it.

    found = solution(program, techniques)     .code, .used: the techniques that show up in it, .shown
    applicable(program)                       the techniques that can show up

Each technique is also a skill (its texts are in techniques.toml). The planner knows techniques, not when they pay:
which of them are worth it, and where, is what reinforcement learning has to find out.
"""

import functools
import math
import re
from collections import namedtuple
from dataclasses import replace

from skills import Skill
from synthetic.kernels import TEMPLATES, Kernel, Unsupported
from synthetic.program import Program, Step, Value, table

Technique = namedtuple("Technique", "name description scope tags motivation idea")
TECHNIQUES = {name: Technique(name, **row) for name, row in table("techniques.toml").items()}
ALL = frozenset(TECHNIQUES)
LONGEST_ROW = 16384  # elements that one program holds
FEWEST_PROGRAMS = 32  # fewer do not keep a GPU busy

# used: names of techniques; shown: technique -> lines of the code that show it.
Solution = namedtuple("Solution", "code used shown")


def solution(program, techniques) -> Solution | None:
    """A ModelNew with the given techniques where they apply. None if no kernel of any kind is possible.

    A solution needs at least one kernel. If the techniques allow none, one pointwise step gets a kernel of its own; if
    there is no such step, the first technique that allows a kernel is added.
    """
    return _solution(program, frozenset(techniques))


@functools.lru_cache(maxsize=64)  # the cold start asks for several solutions of a program, often for the same ones
def _solution(program, techniques) -> Solution | None:
    for attempt, more in enumerate([[], [], *([name] for name in TECHNIQUES)]):
        planner = Planner(program, {*techniques, *more}, single=attempt > 0)
        if planner.texts:
            model = "\n".join(model_text(program, planner.forward))
            code = "\n\n".join([f"{TEMPLATES['imports']}\n{model}", *planner.texts]) + "\n"
            return Solution(code, frozenset(planner.shown), planner.shown)
    return None


def applicable(program) -> frozenset[str]:
    """The techniques that show up in the fullest solution."""
    full = solution(program, ALL)
    return full.used if full else frozenset()


def write_skill(technique, rng, lines) -> Skill:
    """A technique as a skill, in one of several wordings. lines: of code, for its example."""
    motivation = rng.choice(technique.motivation)
    idea = rng.choice(technique.idea)
    content = "\n".join([f"Motivation: {motivation}", f"Key Idea: {idea}", "Example:", *lines])
    return Skill(technique.name, technique.description, technique.scope, tuple(technique.tags), content)


def model_text(program, forward) -> list[str]:
    """The lines of ModelNew."""
    out = ["import math", ""] * any("math." in line for line in forward) + ["class ModelNew(nn.Module):"]
    if program.signature:
        out += [f"    def __init__({program.signature}):", "        super().__init__()"]
        out += [f"        {line}" for line in program.init] + [""]
    inputs = ", ".join(value.text for value, _ in program.inputs)
    return out + [f"    def forward(self, {inputs}):"] + [f"        {line}" for line in forward]


class Planner:
    """One pass over the steps: at each, the first kind of kernel that fits takes as many as it can."""

    def __init__(self, program: Program, techniques, single=False):
        self.techniques = techniques
        self.single = single  # whether the first pointwise step gets a kernel
        self.steps = list(program.steps)
        self.variables = {value.text for value, _ in program.inputs} | {step.result.text for step in self.steps}
        self.forward = []  # lines of ModelNew.forward
        self.texts = []  # of the kernels
        self.shown = {}  # technique -> lines of the code that show it
        self.names = {}  # text of a kernel -> its name
        i = 0
        while i < len(self.steps):
            i = self.loss(i) or self.rows(i) or self.batch(i) or self.fused(i) or self.matmul(i) or self.torch(i)
        self.forward[-1] = "return " + self.forward[-1].partition(" = ")[2]

    # ---- how a kernel takes over some steps

    def take(self, kind, i, first, last, shape, dims=()):
        """Let a kernel take over steps[i:j], for the largest j from `last` down to `first` for which that can be done.

        Returns j, or None if no j will do.
        """
        for j in range(last, first - 1, -1):
            kernel = None if self.read_later(i, j) else self.build(kind, self.steps[i:j], shape, dims)
            if kernel:
                self.emit(kernel)
                return j

    def read_later(self, i, j) -> bool:
        """Whether a later step reads what steps[i:j] compute, their last result aside."""
        inner = {step.result.number for step in self.steps[i:j - 1]}
        for step in self.steps[j:]:
            if inner & {value.number for value in step.operands.values()}:
                return True
        return False

    def build(self, kind, steps, shape, dims=()) -> Kernel | None:
        """A kernel over `steps`, or None if one of them cannot be translated."""
        kernel = Kernel(kind, shape, dims, self.variables)
        try:
            for step in steps:
                kernel.add(step)
            kernel.complete()
        except Unsupported:
            return None
        return kernel

    def emit(self, kernel):
        """Append the call of a kernel, which joins the others unless it is the same as one of them."""
        text = kernel.text("{name}")
        plain = re.sub(r"\n +#.*", "", text)
        if plain not in self.names:
            same = [name for name in self.names.values() if name.startswith(kernel.kind)]
            self.names[plain] = kernel.kind + (str(len(same) + 1) if same else "")
            self.texts.append(text.replace("{name}", self.names[plain]))
        passed = ", ".join(operand.text for operand in kernel.operands.values())
        self.forward.append(f"{kernel.steps[-1].result.text} = {self.names[plain]}({passed})")
        # Note the techniques that the kernel shows, each with lines that show it.
        body = [line for line in "\n".join(kernel.body).split("\n") if not re.match(" *(for|idx|offs|mask) ", line)]
        steps = [line.strip() for line in body if "tl.load" not in line]
        own = [step for step in kernel.steps if step.name != "bias"]
        if len(own) > 1 + (kernel.kind in ("matmul", "partial_sums")):
            self.shown.setdefault("fuse-neighbours-into-row" if kernel.dims else "fuse-pointwise-run", steps[:4])
        for step in own:
            if step.operator.technique:
                place = steps.index(f"# {step}")
                dot = ['acc = tl.dot(a, b, acc, input_precision="tf32x3")'] * (kernel.kind == "matmul")
                self.shown.setdefault(step.operator.technique, dot + steps[place:place + 4 - len(dot)])
        broadcast = [line.strip() for line in body if "tl.load" in line and "% " in line]
        if len(broadcast) > len(kernel.steps) - len(own) and own[0].operator.kind not in ("group", "batch"):
            self.shown.setdefault("index-broadcast-parameter", broadcast[:2])

    def pointwise(self, step) -> bool:
        """Whether a pointwise step may enter a kernel under the present techniques."""
        if step.operator.kind != "pointwise" or not step.result.shape:
            return False
        if step.name == "diagonal" or "index-broadcast-parameter" in self.techniques:
            return not step.operator.technique or step.operator.technique in self.techniques
        kernel = Kernel("fused", step.result.shape)
        try:
            for value in step.operands.values():
                kernel.value(value)
        except Unsupported:
            return False
        return not any("% " in line.text for line in kernel.loads())

    def allowed(self, step, *kinds) -> bool:
        """Whether a kernel may compute a step of one of these kinds."""
        return step.operator.kind in kinds and step.operator.technique in self.techniques

    def end_of_run(self, i, fits) -> int:
        """Where the run of steps from i on ends for which `fits` holds."""
        while i < len(self.steps) and fits(self.steps[i]):
            i += 1
        return i

    def take_with_followers(self, kind, i):
        """`take` step i and, with the technique, the run of pointwise steps of its shape that follows it."""
        shape = self.steps[i].result.shape
        first = i + 1
        end = self.end_of_run(first, lambda step: self.pointwise(step) and step.result.shape == shape)
        if self.steps[i].name == "bias":  # not alone
            first += 1
        return self.take(kind, i, first, end if "fuse-pointwise-run" in self.techniques else min(first, end), shape)

    # ---- kinds of kernels: each returns the step that comes after what it took over, or None

    def fused(self, i):
        """A run of pointwise steps; without the technique one step, and only if it is the only kernel."""
        step = self.steps[i]
        wanted = "fuse-pointwise-run" in self.techniques or self.single and not self.texts
        if step.name == "bias" or wanted and self.pointwise(step):
            return self.take_with_followers("fused", i)

    def rows(self, i):
        """An operator over rows or groups, with its neighbours: a row to a program, or a sweep for other rows."""
        neighbours = "fuse-neighbours-into-row" in self.techniques
        k = self.end_of_run(i + (self.steps[i].name == "bias"), lambda step: neighbours and self.pointwise(step))
        if k == len(self.steps) or not self.allowed(self.steps[k], "row", "group"):
            return None
        shape = tuple(self.steps[k].source.shape)
        dims = self.steps[k].attributes["dims"]
        group = self.steps[k].operator.kind == "group"
        cols = math.prod(shape[dims[0]:dims[1] + 1])
        rows = math.prod(shape) // cols

        def joins(step):
            if self.allowed(step, "row"):
                return step.attributes["dims"] == dims and step.source.shape == shape and not group
            return self.pointwise(step) and (step.result.shape == shape or math.prod(step.result.shape) == rows)

        end = self.end_of_run(k + 1, joins) if neighbours else k + 1
        if dims[1] == len(shape) - 1 and dims[0] in (2, dims[1]) and cols <= LONGEST_ROW and not group:
            j = self.take("row", i, k + 1, end, shape, dims)
            if j:
                return j
        if rows >= FEWEST_PROGRAMS or group:
            return self.take("sweep", i, k + 1, end, shape, dims)

    def loss(self, i):
        """Pointwise steps and the reduction over everything that ends them."""
        shape = self.steps[i].result.shape
        k = self.end_of_run(i, lambda step: step.operator.kind == "pointwise" and step.result.shape == shape)
        joins = k - i <= 1 or "fuse-pointwise-run" in self.techniques  # else the last pointwise step joins, no other
        if joins and k < len(self.steps) and self.allowed(self.steps[k], "all"):
            return self.take("partial_sums", i, k + 1, k + 1, self.steps[k].source.shape)

    def batch(self, i):
        """Batch norm: mean and variance by torch, the rest in a pointwise kernel."""
        step = self.steps[i]
        if not self.allowed(step, "batch"):
            return None
        dims = [d for d in range(len(step.result.shape)) if d != 1]
        x = step.source.text
        line = f"var, mu = torch.var_mean({x}, dim={dims}, correction=0, keepdim=True)"
        shape = tuple(1 if d in dims else n for d, n in enumerate(step.result.shape))
        statistics = {"mu": Value("mu", shape, -1), "var": Value("var", shape, -2)}
        self.steps[i] = replace(step, operands=step.operands | statistics)
        self.forward += [line, f"update_running({step.attributes['layer']}, {x}, mu, var)"]
        j = self.take_with_followers("fused", i)
        self.shown[step.operator.technique] = [line]
        self.texts.append(TEMPLATES["update_running"])
        return j

    def matmul(self, i):
        """A product of matrices, with its bias and the pointwise steps that follow as the epilogue."""
        step = self.steps[i]
        if not self.allowed(step, "matmul"):
            return None
        if step.name == "linear":
            weight = step.operands["weight"]
            factors = {"a": step.source, "b": Value(f"{weight.text}.t()", weight.shape[::-1], weight.number)}
            step = self.steps[i] = replace(step, operands=step.operands | factors)
        return self.take_with_followers("matmul", i)

    def torch(self, i):
        """A step that stays a torch call."""
        j = self.folded(i)
        if j is None:
            self.forward.append(str(self.steps[i]))
        return j or i + 1

    def folded(self, i):
        """Call a convolution without its bias, which the next kernel adds; None where no kernel follows.

        Where each channel is normalised by itself the bias makes no difference.
        """
        step = self.steps[i]
        j = i + 1
        reading = [k for k, other in enumerate(self.steps) if step.result in other.operands.values()]
        if not self.allowed(step, "convolution") or "bias" not in step.operands or reading != [j]:
            return None
        if self.steps[j].name == "batch_norm":  # its running mean includes the bias
            return None
        call = step.operator.lines[0].format(rank=len(step.result.shape) - 2, x=step.source.text, **step.attributes)
        line = f"{step.result.text} = {call}"
        self.forward.append(line)
        if self.steps[j].name != "instance_norm":
            raw = replace(step.result, number=-3 - i)
            self.steps[i] = Step("bias", "{x} + {y}", {"x": raw, "y": step.operands["bias"]}, {}, step.result)
            j = self.rows(i) or self.fused(i)
            self.steps[i] = step
        if j is None:
            self.forward.pop()
        else:
            self.shown[step.operator.technique] = [line]
        return j

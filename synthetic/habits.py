"""How PyTorch users write what heads.py and networks.py compute.

Names that usually stand for something else, calls inside calls, steps in place, a method for the last lines, copies,
reductions over several dimensions, long signatures.
"""

import ast
import re

from synthetic.heads import Problem

# Names that problems are full of. What one stands for says its definition, not the name.
_USUAL = ("matmul gemm linear conv conv_transpose bn norm ln fc pool max_pool avg_pool gap act relu gelu softmax "
          "hardtanh dropout loss scaling_factor add_value subtract_value multiply_value divide_value divisor "
          "constant_value min_value max_value sum_tensor multiplier weight bias scale dim")
# What a line of the constructor may say in other words.
_RESTATED = ((r"(nn\.Conv.*)\)$", r"\1, padding_mode='zeros')"), (r"(nn\.Linear.*)\)$", r"\1, device=None)"),
             (r"(nn\.BatchNorm.*)\)$", r"\1, track_running_stats=True)"),
             (r"torch\.tensor\((-?[\d.]+)\)", r"torch.tensor([\1])"), (r"(torch\.randn\(.*?\))", r"\1 / 4 ** 0.5"))


class UserProblem(Problem):
    """A draft as a user may have written it."""

    def __init__(self, seed, clutter):
        super().__init__(seed, clutter)
        self.x = "A" if self.chance(0.15) else self.x
        self.used |= {"A", "B"} if self.x == "A" else set()  # two tensors, A and B
        # Where lines of the constructor's arguments break; around strings.
        self.width, self.quote = self.pick(999, 999, 999, 999, 50, 70), self.pick("'", "'", '"')
        self.nesting = self.pick(0, 0, 0.15, 0.4, 0.8)  # how often a line moves into the one that follows it

    def name(self, options):
        """Now and then one that usually stands for something else, or begins as another does: pool_size, pool_stride"""
        if self.args and self.chance(0.15):
            first = self.r.choice(self.args)[0].split("_")[0]
            return super().name(" ".join(f"{first}_{option}" for option in options.split()))
        return super().name(_USUAL if self.chance(0.2) else options)

    def input_name(self) -> str:
        return "B" if self.x == "A" and len(self.inputs) == 1 else super().input_name()

    def another_input(self) -> str:
        """A second tensor of the current shape, or one that is broadcast to it."""
        first = self.pick(0, 0, 0, len(self.shape) - 1) if self.inputs else 0
        return self.tensor_input([name for name, _ in self.shape[first:]])

    def finish(self):
        """Now and then the last lines, where they use the current tensor alone, become a method of their own.

            x = self.linear(x)
            x = self.post_process(x)      def post_process(self, x): the lines after the linear layer
        """
        self.args.sort(key=lambda arg: " = " in arg[1])  # those with defaults are last
        for pattern, otherwise in _RESTATED:
            self.init = [re.sub(pattern, otherwise, line) if self.chance(0.06) else line for line in self.init]
        self.nest()
        lines = []
        for line in reversed(self.forward):
            names = {n.id for n in ast.walk(ast.parse(line)) if isinstance(n, ast.Name)}
            if not line.startswith(f"{self.x} = ") or names - {self.x, "self", "torch", "F", "nn"}:
                break
            lines.insert(0, line)
        if lines and self.chance(0.1):
            lines = lines[-self.r.randint(1, len(lines)):]
            name = self.name("_helper apply_tail activate post_process _finish")
            self.methods.append((name, self.x, lines))
            self.forward[-len(lines):] = [f"{self.x} = self.{name}({self.x})"]
        self.forward = [line.replace(", ", ",") if self.chance(0.06) else line for line in self.forward]

    def nest(self):
        """Now and then a line moves into the one after it, or works in place; `nesting` says how often.

            x = F.relu(self.conv(x))      x = (x - 1.5) * self.scale      x *= self.scale
        """
        lines = self.forward[:1]
        for i, line in enumerate(self.forward[1:], 2):
            (before, _, inner), (target, _, value) = lines[-1].partition(" = "), line.partition(" = ")
            named = rf"(?<![\w.]){before}\b"
            needed = target != before and (before == self.x or re.search(named, " ".join(self.forward[i:])))
            if inner and not needed and len(re.findall(named, value)) == 1 and self.chance(self.nesting):
                whole = isinstance(ast.parse(inner).body[0].value, ast.Call) or re.search(rf"\({before}[,)]", value)
                lines[-1] = f"{target} = " + re.sub(named, lambda _: inner if whole else f"({inner})", value)
            else:
                fresh = re.match(r"self\.|F\.(?!dropout)", inner) and self.chance(self.nesting / 2)  # not shared
                lines.append(re.sub(rf"^({before}) = \1 ([-+*/]) (?=\S+$)", r"\1 \2= ", line) if fresh else line)
        self.forward = lines

    def save(self):
        """Now and then it is a copy: identity = x.clone().detach()"""
        super().save()
        if self.chance(0.3):
            self.forward[-1] += self.pick(".clone()", ".clone().detach()", ".detach()")

    def residual(self):
        """Now and then again and again: x = x + identity; x = x * identity; x = x + identity"""
        for _ in range(self.pick(1, 1, 1, 2, 3)):
            super().residual()

    def reduction(self):
        """Now and then over all dimensions but the first, or followed by another step: torch.sum(x, dim=[1, 2, 3])"""
        if len(self.shape) > 3 and self.chance(0.3):
            dims = self.pick("[{}]", "({})").format(", ".join(map(str, range(1, len(self.shape)))))
            self.line("torch.sum({x}, dim={d})", "torch.mean({x}, dim={d}, keepdim=True)", "torch.amax({x}, dim={d})",
                      "torch.sum({x}, dim={d}, keepdim=True)", d=dims)
            self.shape, self.saved = self.shape[:1], None
        else:
            super().reduction()
        for _ in range(self.pick(0, 0, 1, 2)):
            self.pick(self.activation, self.scale, self.clamp)()

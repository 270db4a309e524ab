"""Which problems a run trains on: an endless stream of tasks, without problems that are unfit.

    task_stream(options)        the stream of a run: synthesised problems, or the user's
    training_tasks(seed)        synthesised problems, of which two in three are about redundant operators
    family_tasks(seed)          problems of families.py alone
    unfit(task, evaluation)     why a problem is left out: it does not run, or it is near an evaluation problem

Two problems are near if their classes use the same operators the same number of times. Names, order, shapes, constants
and spelling do not matter: F.relu, x.relu() and nn.ReLU() are one operator. This is stricter than text similarity. A
list of hashes is enough to check it, so we need not ship KernelBench's problems.
"""

import ast
import functools
import hashlib
import itertools
import random
import re
import warnings

import torch
from tqdm import tqdm

from command.progress import in_words
from synthetic import redundant
from synthetic.families import draw, task_of
from synthetic.program import OPERATORS, WORDS
from tasks import GPU_BATCH_FACTOR, PROBLEMS, Task, TaskError, construct, elements, listed_tasks, scale_batch

MOST_ON_GPU = 1 << 30  # elements of all tensors of a training problem
MOST_CHECKED = 2**25  # `unfit` runs problems of up to so many elements on the CPU: three forwards in about a second


def family_tasks(seed, device="cpu"):
    """Endless stream of problems of families.py that are fit to train on, deterministic in `seed`.

    Their names are ordinary ones, since skills quote them.
    """
    for n in itertools.count():
        program = draw(seed * 1_000_003 + n, clutter=True, plain=True)
        task = fit(task_of(program), device, program.elements)
        if task:
            yield task


def training_tasks(seed, device="cpu"):
    """Endless stream of problems that are fit to train on: of three, two are of redundant.py and one of families.py."""
    others = family_tasks(seed, device)
    for n in itertools.count():
        task = next(others) if n % 3 == 2 else fit(redundant.task(seed * 1_000_003 + n), device)
        if task:
            yield task


SYNTHESISED = {"synth": training_tasks}  # --tasks NAME -> function of (seed, device), an endless iterator over Tasks


def fit(task, device, size=None) -> Task | None:
    """A synthesised task as it is trained on, or None if it is unfit.

    On a GPU it gets a larger batch. A problem is left out of which some layer then has gigabytes of weights. size: see
    `unfit`.
    """
    if unfit(task, evaluation_fingerprints(), size) is not None:
        return None
    if device != "cpu":
        task = scale_batch(task, GPU_BATCH_FACTOR)
        if elements(task.source, MOST_ON_GPU) > MOST_ON_GPU:
            return None
    return task


def task_stream(options, fitness=None):
    """Endless training tasks, the same for the same options. Raises TaskError when there are none.

    fitness: see `in_random_order`. run.resume_run skips the tasks of complete steps. On a GPU synthesised problems have
    a larger batch (scale_batch), so that kernels take long enough to be measured.
    """
    if options.tasks in SYNTHESISED:
        return SYNTHESISED[options.tasks](options.seed, options.device)
    rng = random.Random(options.seed)  # for the order of the tasks
    return in_random_order(listed_tasks(options.tasks), rng, {} if fitness is None else fitness)


def in_random_order(tasks, rng, fitness):
    """Every task once, then all again in another order, and so on. Tasks that are `unfit` are left out.

    fitness: {a task's name: why it is left out, or None}. A task is checked the first time that it comes up. A run
    saves `fitness`, so that a resumed run does not check again. Raises TaskError when none is left.
    """
    while True:
        for task in rng.sample(tasks, len(tasks)):
            if task.name not in fitness:
                fitness[task.name] = unfit(task, evaluation_fingerprints())
                if fitness[task.name]:
                    tqdm.write(f"{task.name} is left out: {fitness[task.name]}")
            if not fitness[task.name]:
                yield task
        if all(fitness[task.name] for task in tasks):
            raise TaskError(f"--tasks: no problem can be trained on: {in_words(fitness.values())}")


# ----------------------------------------------------------------------------------------------------------------------
# Which problems are near each other

_NEUTRAL = set(WORDS["near"]["neutral"]["calls"].split())
_SPELLINGS = {}  # another name of an operator -> the name that we use
for _name, _others in WORDS["near"]["spellings"].items():
    _SPELLINGS |= dict.fromkeys(_others.split(), _name)
# Python's operators. A division counts as a product, since x / 2 can be written as x * 0.5.
_ARITHMETIC = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "mul", ast.Pow: "mul", ast.MatMult: "matmul"}


def operators(source) -> list[str]:
    """The operators that all classes of a problem apply, sorted, in one spelling each.

    >>> operators("class Model(nn.Module):\\n def forward(self, x):\\n  return F.relu(x) * 2 + torch.tanh(x)")
    ['add', 'mul', 'relu', 'tanh']
    """
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    methods, layers = [], {}  # layers: an attribute's name -> the names of the layers that __init__ puts there
    for one in classes:
        methods += [node for node in one.body if isinstance(node, ast.FunctionDef) and node.name != "__init__"]
        layers |= _layers(one)
    own = {node.name for node in classes + methods}
    # First the operators of each node in one spelling, then the simpler operators that count in their place.
    counted = {_spelled(name): row.counted for name, row in OPERATORS.items() if row.counted}
    names = []
    for method in methods:
        for node in ast.walk(method):
            for name in _applied(node, layers, own):
                names += counted.get(name, [name])
    return sorted(name for name in names if name not in _NEUTRAL)


def _layers(one) -> dict[str, list[str]]:
    """Attributes of a class that are layers -> the layers' names: one for self.act = nn.ReLU(), all of a Sequential."""
    layers = {}
    for node in ast.walk(one):
        if isinstance(node, ast.Assign) and (type(node.value), type(node.targets[0])) == (ast.Call, ast.Attribute):
            calls = [ast.unparse(n.func).split(".")[-1] for n in ast.walk(node.value) if isinstance(n, ast.Call)]
            inner = calls[1:] if calls[0] == "Sequential" else []
            layers[node.targets[0].attr] = inner or calls[:1]
    return layers


def _applied(node, layers, own) -> list[str]:
    """The operators that one node of a method's syntax tree applies. (Those in its operands are nodes of their own.)

    own: names of the problem's classes and methods. A call of one does not count, since its own operators do.
    """
    if not isinstance(node, (ast.BinOp, ast.AugAssign, ast.UnaryOp, ast.Call)):
        return []
    if all(n.id == "math" for n in ast.walk(node) if isinstance(n, ast.Name)):
        return []  # an expression of `math` alone is a number, such as math.sqrt(2 / math.pi)
    if isinstance(node, (ast.BinOp, ast.AugAssign)):
        return [_ARITHMETIC.get(type(node.op), "other")]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return ["neg"]
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return []
    names = [node.func.attr]  # F.relu, x.relu or self.act: the name behind the dot
    if isinstance(node.func.value, ast.Name) and node.func.value.id == "self":
        names = layers.get(names[0], names)  # self.act -> the layers that __init__ puts there
    if _cut_at_zero(node):
        return ["relu"]
    return [_spelled(name) for name in names if name not in own]


@functools.cache
def _spelled(name) -> str:
    """The one spelling of an operator's name.

    >>> [_spelled(name) for name in ("BatchNorm2d", "batch_norm", "mse_loss", "Conv2d", "relu6")]
    ['batchnorm', 'batchnorm', 'mse', 'conv2d', 'clamp']
    """
    name = name.lower().replace("_", "").removesuffix("loss")
    name = re.sub(r"(?<!conv)(?<!pool)[123]d$", "", name)  # BatchNorm1d and 2d are one operator
    return _SPELLINGS.get(name, name)


def _cut_at_zero(call) -> bool:
    """Does a call clamp at a lower bound of 0 only, such as torch.clamp(x, min=0)? Then it counts as a ReLU."""
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    bounds = [ast.unparse(n) for n in (*call.args, *keywords.values()) if isinstance(n, ast.Constant)]
    clamp = call.func.attr in ("clamp", "clip", "clamp_min", "clamp_", "clamp_min_")
    return clamp and bounds in (["0"], ["0.0"]) and "max" not in keywords


def fingerprint(source) -> str:
    """Hash of a problem's operators, equal for near problems: 12 hexadecimal digits."""
    return hashlib.sha1(" ".join(operators(source)).encode()).hexdigest()[:12]


@functools.cache
def evaluation_fingerprints() -> frozenset[str]:
    """Fingerprints of all built-in problems and of KernelBench's levels 1 to 3 (shipped as hashes)."""
    known = {fingerprint(path.read_text()) for path in PROBLEMS.glob("[lr]*/*.py")}
    return frozenset(known | set((PROBLEMS / "kernelbench_fingerprints.txt").read_text().split()))


def unfit(task, evaluation, size=None) -> str | None:
    """Why a problem may not be trained on, or None if it may.

    It must not be near an evaluation problem. As in the CUDA Agent paper it must run, return finite tensors, be
    deterministic, and depend on its inputs: else a kernel that ignores them is correct. It is run in this process,
    because it is ours or the user's, unless it has more than MOST_CHECKED elements. size: how many, if that is known.
    """
    if fingerprint(task.source) in evaluation:
        return "near an evaluation problem"
    if size is None:
        size = elements(task.source, MOST_CHECKED)
    if size > MOST_CHECKED:
        return None
    try:
        torch.default_generator.manual_seed(0)  # torch.manual_seed takes a millisecond to remember who asked for CUDA's
        with warnings.catch_warnings(action="ignore"), torch.no_grad():  # no warnings of rejected problems
            model, get_inputs = construct(task.source)
            inputs = get_inputs()
            first, again, other = model(*inputs), model(*inputs), model(*get_inputs())
    except Exception as error:  # any type: the problem is rejected
        return f"does not run: {type(error).__name__}: {' '.join(str(error).split())[:100]}"
    first, again, other = map(_flat, (first, again, other))
    if not first or not all(isinstance(x, torch.Tensor) and torch.isfinite(x).all() for x in first):
        return "does not return finite tensors"
    if not all(map(torch.equal, first, again)):
        return "not deterministic"
    return "constant output" if all(map(_constant, first, other)) else None


def _flat(output) -> list:
    """The tensors of an output that may be nested in tuples and lists."""
    return sum(map(_flat, output), []) if isinstance(output, (tuple, list)) else [output]


def _constant(first, other) -> bool:
    """Has an output one value only, or equal values for two different inputs? first, other: its values for these."""
    first, other = first.float(), other.float()
    return first.numel() > 1 and first.std() < 1e-6 or first.allclose(other, rtol=1e-4, atol=1e-6)

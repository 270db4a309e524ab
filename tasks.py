"""What a problem is. This file has three topics, one after the other: sources, size, and decontamination.

A problem is the text of a Python file in KernelBench's format: a class `Model(nn.Module)`, module-level constants,
`get_inputs()` with the list of forward's arguments, and `get_init_inputs()` with the constructor's. A candidate answers
with a class `ModelNew` that has the same constructor and computes the same function.

1. Sources. Each gives `Task` records, and `task_stream` makes training tasks out of one of them:

    builtin_tasks      the evaluation problems in `problems/`; only `reinforce.py --tasks builtin` trains on them
    kernelbench_tasks  a KernelBench checkout (evaluation only)
    folder_tasks       a folder of the user's own problem files
    parquet_tasks      a file in the layout of the paper's RL data (hkust-nlp/drkernel-rl-data)
    SYNTHESISED        endless problems, by the name of their distribution (synthetic/ adds them)

2. Size: `scale_batch` enlarges a problem for a GPU, `elements` counts what it holds.
3. Decontamination: `unfit` keeps out training problems that do not run or resemble an evaluation problem.
"""

import ast
import contextlib
import hashlib
import json
import math
import random
import re
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from command.files import ROOT, find_path, read_parquet, user_error
from command.process import UserError
from command.progress import in_words

PROBLEMS = ROOT / "problems"

# Built-in and synthesised problems are small (about 64 K elements a tensor), so that a CPU can interpret kernels. On a
# GPU the batch is this many times larger. The modelled clock divides the GPU's speed by the same number, so the costs
# of launches, bytes and FLOPs keep their proportions.
GPU_BATCH_FACTOR = 256
MOST_CHECKED = 2**25  # `unfit` runs problems of up to so many elements on the CPU: three forwards in about a second
SYNTHESISED = {}  # --tasks NAME -> function of (seed, device) that returns an endless iterator over Tasks


class TaskError(UserError):
    """A problem that cannot be used."""


@dataclass(frozen=True)
class Task:
    """A problem. Equal sources are one task for the sandbox, whatever their names."""

    name: str  # unique within its source, such as "level1/3_softmax"
    level: int  # KernelBench's level: 1 single operators, 2 fused chains, 3 networks; 0 for synthesised problems
    source: str  # the problem file's text
    family: str = ""  # of a synthesised problem: the operator that it is named after


def load_task(path, level=0, name=None) -> Task:
    """Read one problem file. `path` may be relative to the repository. name: default is the file's, without .py.

    Raises TaskError if the file cannot be read or is not in KernelBench's format. Its text is not executed here.
    """
    path = find_path(path)
    with user_error(f"{path}: cannot read the problem", TaskError):
        source = path.read_text(encoding="utf-8-sig")
    if problem := malformed(source):
        raise TaskError(f"{path}: {problem}")
    return Task(name or path.stem, level, source)


def malformed(source) -> str | None:
    """Why a text is not a problem in KernelBench's format, or None if it is."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError) as error:
        return f"not valid Python ({getattr(error, 'msg', error)}, line {getattr(error, 'lineno', 1)})"
    defined = [node.name for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    missing = [name for name in ("Model", "get_inputs", "get_init_inputs") if name not in defined]
    return f"does not define {', '.join(missing)} (KernelBench's format)" if missing else None


def listed_tasks(path) -> list[Task]:
    """The user's problems: those of a folder, or of a parquet file. Raises UserError, also if there are none."""
    tasks = parquet_tasks(path) if Path(path).suffix == ".parquet" else folder_tasks(path)
    if not tasks:
        raise TaskError(f"{path}: no problems there")
    return tasks


def parquet_tasks(path) -> list[Task]:
    """The rows of a file in the layout of the paper's RL data (release: verl_patch/utils/dataset/rl_dataset.py).

    A row's `reward_model.ground_truth` is the problem. `extra_info.entry_point` names its class, which we rename to
    Model, because our prompts ask for ModelNew. Both columns are objects, or JSON text. Rows that are no problem are
    counted. Raises TaskError for KernelBench's problems, such as the paper's validation set.
    """
    tasks, left_out = [], Counter()
    for number, row in enumerate(read_parquet(path, ["data_source", "reward_model", "extra_info"])):
        if "kernelbench" in str(row["data_source"]).lower():
            raise TaskError(f"{path}: KernelBench's problems are for evaluation only (bench.py --kernelbench)")
        info, reward = _object(row["extra_info"]), _object(row["reward_model"])
        entry, source = info.get("entry_point") or "Model", reward.get("ground_truth") or ""
        if entry != "Model":  # leave names behind a dot: nn.LayerNorm, if the class is LayerNorm
            source = re.sub(r"(?<![\w.])Model\b", "OtherModel", source)
            source = re.sub(rf"(?<![\w.]){re.escape(entry)}\b", "Model", source)
        if problem := malformed(source):
            left_out[problem.split(" (")[0]] += 1
        else:
            tasks.append(Task(f"{Path(path).stem}/{info.get('uuid') or number}", 0, source))
    print(f"{path}: {len(tasks)} problems; left out: {in_words(left_out)}")
    return tasks


def _object(value) -> dict:
    """A column of a parquet file that holds an object, or its JSON text; {} for anything else."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    return value if isinstance(value, dict) else {}


def folder_tasks(folder, level=0) -> list[Task]:
    """Every .py file of a folder as a problem, in the order of their ids (`<id>_<name>.py`), then of their names.

    A problem's name is folder/file, such as level1/3_softmax. For a level, only files with an id count. Without a level
    (a user's folder) we print the files that are no problem. Raises TaskError if there are no files.
    """
    folder, tasks = find_path(folder), []
    files = list(folder.glob("[0-9]*.py" if level else "*.py"))
    files.sort(key=lambda path: (int(re.match(r"\d*", path.name)[0] or 0), path.name))
    if not files:
        raise TaskError(f"{folder}: {'no problem files (*.py) there' if folder.is_dir() else 'no such folder'}")
    for path in files:
        try:
            tasks.append(load_task(path, level, f"{folder.name}/{path.stem}"))
        except TaskError as error:
            if level:
                raise
            print(f"left out: {error}")
    return tasks


def builtin_tasks(level=None, device="cpu") -> list[Task]:
    """The built-in evaluation problems of one level, or of all; for a GPU with GPU_BATCH_FACTOR times the batch."""
    tasks = []
    for number in (1, 2, 3):
        if level in (None, number):
            tasks += folder_tasks(PROBLEMS / f"level{number}", number)
    return tasks if device == "cpu" else [scale_batch(task, GPU_BATCH_FACTOR) for task in tasks]


def redundant_tasks(device="cpu") -> list[Task]:
    """The evaluation problems in which an operator may be redundant (synthetic/redundant.py)."""
    tasks = folder_tasks(PROBLEMS / "redundant")
    return tasks if device == "cpu" else [scale_batch(task, GPU_BATCH_FACTOR) for task in tasks]


def kernelbench_tasks(folder, level) -> list[Task]:
    """The problems of one level of a KernelBench checkout (`folder` is the repository or its KernelBench/ folder).

    If the level is not there, it raises a TaskError that says where to get it. We ship only hashes of these problems.
    """
    for base in (find_path(folder), find_path(folder) / "KernelBench"):
        if (base / f"level{level}").is_dir():
            return folder_tasks(base / f"level{level}", level)
    raise TaskError(f"{folder}: no level{level}/ there; clone https://github.com/ScalingIntelligence/KernelBench")


def problem_id(name) -> int:
    """The number that a problem's file name begins with: 5 of level1/5_Matrix_scalar_multiplication."""
    return int(name.split("/")[-1].split("_")[0])


def chosen_tasks(tasks, ids) -> list:
    """The tasks that --ids names: "5,10,15", "1-20", "every5" (ids divisible by 5) or a mixture; all when it is None.

    Raises UserError for a part of another form, or one that names none of the tasks.

    >>> [task.name for task in chosen_tasks([Task(f"level1/{n}_x", 1, "") for n in range(1, 11)], "2-3,every5")]
    ['level1/2_x', 'level1/3_x', 'level1/5_x', 'level1/10_x']
    """
    if ids is None:
        return tasks
    by_id = {problem_id(task.name): task for task in tasks}  # id -> task
    wanted = set()
    for part in ids.replace(" ", "").split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?|every([1-9]\d*)", part)
        numbers = set()  # the ids that this part names
        if match and match[3]:
            numbers = {number for number in by_id if number % int(match[3]) == 0}
        elif match:
            numbers = {number for number in by_id if int(match[1]) <= number <= int(match[2] or match[1])}
        if not numbers:
            raise UserError(f"--ids {ids}: {part!r} is not there, or not an id (write 5,10,15 or 1-20 or every5)")
        wanted |= numbers
    return [by_id[number] for number in sorted(wanted)]


def scale_batch(task, factor) -> Task:
    """The same problem with `factor` times the batch.

    By our convention the batch is the file's first module-level integer, or a product of integers. In the family
    "diagonal" it is the second: the first is the size of the matrix. A problem without such a number does not change.

    >>> scale_batch(Task("a", 1, "batch = 4 * 2"), 256).source
    'batch = 2048'
    """
    sizes = list(re.finditer(r"^\w+ *= *(\d+(?: *\* *\d+)*) *(?:#|$)", task.source, re.MULTILINE))
    place = 1 if task.family == "diagonal" else 0
    if len(sizes) <= place:
        return task
    size = sizes[place]
    scaled = factor * math.prod(map(int, size[1].split("*")))
    return replace(task, source=f"{task.source[:size.start(1)]}{scaled}{task.source[size.end(1):]}")


# ----------------------------------------------------------------------------------------------------------------------
# Training tasks

def task_stream(options, fitness=None):
    """Endless training tasks, the same for the same options. Raises TaskError when there are none.

    fitness: see `in_random_order`. run.resume_run skips the tasks of complete steps. On a GPU synthesised and built-in
    problems get a larger batch (scale_batch), so that kernels take long enough to be measured.
    """
    if options.tasks in SYNTHESISED:
        return SYNTHESISED[options.tasks](options.seed, options.device)
    rng = random.Random(options.seed)  # for the order of the tasks
    if options.tasks == "builtin":  # the evaluation problems themselves: none is unfit
        tasks = builtin_tasks(device=options.device)
        return in_random_order(tasks, rng, dict.fromkeys(task.name for task in tasks))
    return in_random_order(listed_tasks(options.tasks), rng, {} if fitness is None else fitness)


def in_random_order(tasks, rng, fitness):
    """Every task once, then all again in another order, and so on. Tasks that are `unfit` are left out.

    fitness: {a task's name: why it is left out, or None}. A task is checked the first time that it comes up. A run
    saves `fitness`, so that a resumed run does not check again. Raises TaskError when none is left.
    """
    evaluation = evaluation_fingerprints()
    while True:
        for task in rng.sample(tasks, len(tasks)):
            if task.name not in fitness:
                fitness[task.name] = unfit(task, evaluation)
                if fitness[task.name]:
                    tqdm.write(f"{task.name} is left out: {fitness[task.name]}")
            if not fitness[task.name]:
                yield task
        if all(fitness[task.name] for task in tasks):
            raise TaskError(f"--tasks: no problem can be trained on: {in_words(fitness.values())}")


# ----------------------------------------------------------------------------------------------------------------------
# The size of a problem

def construct(source) -> tuple:
    """(model, get_inputs) of a problem's text. Runs the text, and raises whatever that raises."""
    names = {}  # what the problem's text defines
    exec(compile(source, "problem", "exec"), names)
    arguments, keywords = names["get_init_inputs"](), {}
    if list(map(type, arguments)) == [list, dict]:  # KernelBook's problems
        arguments, keywords = arguments
    return names["Model"](*arguments, **keywords), names["get_inputs"]


def elements(source, enough) -> int:
    """Number of elements of inputs, parameters and outputs, counted on PyTorch's meta device, which takes no memory.

    Outputs are not computed if inputs and parameters have more than `enough`. 0 if the problem does not run.
    """
    import torch  # here, since that takes a second
    try:
        with torch.device("meta"), torch.no_grad(), warnings.catch_warnings(action="ignore"):
            model, get_inputs = construct(source)
            inputs = get_inputs()
            total = _elements([*inputs, *model.parameters()])
            if total > enough:
                return total
            output = model(*inputs)
    except Exception:  # a problem's code may raise anything
        return 0
    return total + _elements(output if isinstance(output, (tuple, list)) else [output])


def _elements(values) -> int:
    return sum(value.numel() for value in values if hasattr(value, "numel"))


# ----------------------------------------------------------------------------------------------------------------------
# Decontamination: a training problem must not be an evaluation problem in disguise.
# Two problems are near if their classes use the same operators the same number of times. Names, order, shapes,
# constants and spelling do not matter: F.relu, x.relu() and nn.ReLU() are one operator. This is stricter than text
# similarity. A list of hashes is enough to check it, so we need not ship KernelBench's problems.

# Names are compared in lower case, without underscores and a final "loss". Alternative name -> the name that we use.
_SPELLINGS = {"hardtanh": "clamp", "relu6": "clamp", "clampmin": "clamp", "clampmax": "clamp", "clip": "clamp",
              "multiply": "mul", "divide": "mul", "div": "mul", "subtract": "sub", "max": "amax", "min": "amin",
              "swish": "silu", "mm": "matmul", "bmm": "matmul", "inner": "matmul", "linear": "matmul",
              "vectornorm": "norm", "negative": "neg", "huber": "smoothl1", "rsqrt": "sqrt"}
# Python's operators. A division counts as a product, since x / 2 can be written as x * 0.5.
_ARITHMETIC = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "mul", ast.Pow: "mul", ast.MatMult: "matmul"}
# An operator -> simpler operators that we count in its place, so that both ways to write it are equal.
_WRITTEN_OUT = {"silu": ["mul", "sigmoid"], "mish": ["mul", "tanh", "softplus"], "softsign": ["abs", "add", "mul"],
                "pow": ["mul"], "square": ["mul"], "mse": ["mean", "mul", "sub"], "l1": ["abs", "mean", "sub"],
                "logsigmoid": ["log", "sigmoid"], "logsoftmax": ["log", "softmax"], "softmin": ["neg", "softmax"],
                "addcmul": ["add", "mul"], "lerp": ["add", "mul", "sub"], "expm1": ["exp", "sub"],
                "log1p": ["add", "log"], "reciprocal": ["mul"], "normalize": ["mul", "norm"],
                "leakyrelu": ["mul", "where"], "hardsigmoid": ["add", "clamp", "mul"],
                "hardswish": ["add", "clamp", "mul", "mul"], "gelu": ["add", "erf", "mul", "mul", "mul"]}
# Calls that do not count, such as those that only change a tensor's shape, type or device.
_NEUTRAL = {"contiguous", "clone", "detach", "view", "reshape", "flatten", "size", "dim", "numel", "expand",
            "unsqueeze", "squeeze", "identity", "dropout", "device", "to", "float", "tensor", "init", "super"}


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
    # First the operators of each node in one spelling, then the simpler operators in their place (_WRITTEN_OUT).
    names = []
    for method in methods:
        for node in ast.walk(method):
            for name in _applied(node, layers, own):
                names += _WRITTEN_OUT.get(name, [name])
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
    spelled = "relu" if _cut_at_zero(node) else None
    return [spelled or _spelled(name) for name in names if name not in own]


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


def evaluation_fingerprints() -> frozenset[str]:
    """Fingerprints of all built-in problems and of KernelBench's levels 1 to 3 (shipped as hashes)."""
    known = {fingerprint(path.read_text()) for path in PROBLEMS.glob("[lr]*/*.py")}
    return frozenset(known | set((PROBLEMS / "kernelbench_fingerprints.txt").read_text().split()))


def unfit(task, evaluation) -> str | None:
    """Why a problem may not be trained on, or None if it may.

    It must not be near an evaluation problem. As in the CUDA Agent paper it must run, return finite tensors, be
    deterministic, and depend on its inputs: else a kernel that ignores them is correct. It is run in this process,
    because it is ours or the user's, unless it has more than MOST_CHECKED elements.
    """
    if fingerprint(task.source) in evaluation:
        return "near an evaluation problem"
    if elements(task.source, MOST_CHECKED) > MOST_CHECKED:
        return None
    import torch
    try:
        torch.manual_seed(0)
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

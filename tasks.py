"""What a problem is, and where problems come from.

A problem is the source of a Python file in KernelBench's format: a class `Model(nn.Module)`, module-level constants,
`get_inputs()` and `get_init_inputs()`, the two lists of positional arguments for `forward` and `__init__`. A candidate
answers with a class `ModelNew` that has the same constructor and computes the same function.

Sources of problems, all giving `Task` records:

    builtin_tasks      the evaluation problems in `problems/`, written for this project; trained on by
                       `reinforce.py --tasks builtin` only
    kernelbench_tasks  a KernelBench checkout (evaluation only)
    folder_tasks       a folder of the user's own problem files

`synthetic/generator.py` adds training problems without end; `unfit` and `fingerprint` below keep them clear of
evaluation.
"""

import ast
import contextlib
import hashlib
import importlib.util
import math
import os
import pickle
import re
import shutil
import signal
import sys
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).absolute().parent

# What cannot work is told at once, and not by the import that fails first.
if sys.platform != "linux":
    sys.exit("error: this needs Linux, for Triton and to confine the candidates' processes (on Windows: WSL)")
if missing := [name for name in ("torch", "triton", "transformers") if not importlib.util.find_spec(name)]:
    sys.exit(f"error: {', '.join(missing)}: not installed (pip install -r requirements.txt)")
if Path(sys.argv[0]).absolute().parent == ROOT and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a program of ours; until run_command Ctrl-C just ends it

# OpenMP's threads wait for work by spinning, by default for so long that two processes on the same cores slow each
# other down several times. With this they spin for a fraction of a millisecond, then sleep: a small model's next
# operator comes sooner. libgomp reads it when torch is loaded, so every program of ours imports this file before torch.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

import torch
from tqdm import tqdm

PROBLEMS = ROOT / "problems"

# Built-in and synthesised problems are sized for Triton's interpreter (about 64 K elements a tensor). On a GPU the same
# problem gets a batch this many times larger; the modelled clock divides the GPU's rates by the same number, so that a
# problem means the same on both: launches, bytes and FLOPs keep their proportions.
GPU_BATCH_FACTOR = 256
# KernelBench's sizes are meant for a GPU. Elements of all tensors of a problem: so many of them the interpreter gets
# through in a second (measured on two busy cores), and so many a shrunken problem has at most.
INTERPRETED, SHRUNKEN = 100_000, 400_000


class UserError(ValueError):
    """Bad input of the user's. The message is one line that says what is wrong; no traceback is shown with it."""


class TaskError(UserError):
    """A problem that cannot be used."""


# ----------------------------------------------------------------------------------------------------------------------
# The command lines: how they end, and what they may be given


def run_command(main):
    """Run a command line's main() and exit with the status that it returns.

    A UserError becomes one line on stderr and status 2, as argparse reports a bad option; so does a full disk. Ctrl-C
    and SIGTERM are KeyboardInterrupts, which close all that is open, and become one line and status 130.
    """
    name = Path(sys.argv[0]).name
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # and not ignored, as in the background of a script
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt as error:
        print(f"{name}: interrupted{'; ' if str(error) else ''}{error}", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        line = str(error) if isinstance(error, UserError) else full_disk(error)
        if line is None:
            raise
        print(f"{name}: error: {line}", file=sys.stderr)
        sys.exit(2)


@contextlib.contextmanager
def told(problem, kind=UserError):
    """Around the reading of a file: whatever is wrong with it becomes one line, an error of a `kind` with `problem`."""
    try:
        yield
    except UserError:
        raise
    except (OSError, EOFError, RuntimeError, KeyError, TypeError, ValueError, pickle.UnpicklingError) as error:
        raise kind(f"{problem} ({type(error).__name__})") from None


@contextlib.contextmanager
def resumable(how, save=lambda: None):
    """Tell whoever interrupts this block `how` to go on, after save() has saved what is complete."""
    try:
        yield
    except KeyboardInterrupt:
        save()
        raise KeyboardInterrupt(how) from None
    except Exception as error:
        if not (line := full_disk(error)):
            raise
        raise UserError(f"{line}; when there is space: {how}") from None


@contextlib.contextmanager
def uninterrupted():
    """Ctrl-C and SIGTERM take effect at the end of this block."""
    came, numbers = [], (signal.SIGINT, signal.SIGTERM)
    numbers = [number for number in numbers if signal.getsignal(number) is signal.default_int_handler]
    for number in numbers:
        signal.signal(number, lambda *_: came.append(True))
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt


def full_disk(error) -> str | None:
    """A line that tells of a full disk, if an exception does. PyTorch and safetensors have errors of their own for it.
    """
    said = any(words in str(error) for words in ("No space left", "uota exceeded", "File too large", "unexpected pos"))
    return f"the disk is full ({str(error).splitlines()[0][:200]})" if said else None


def check_numbers(options, above_0=(), at_most={}):
    """Raise UserError for a number that is negative, infinite or nan; for 0 where it is forbidden; above a bound.

    options: {name: value}; what is no number is left alone. above_0: names. at_most: {name: bound}.
    """
    for name, value in options.items():
        if type(value) in (int, float):
            most = at_most.get(name, 2**63 - 1)  # the largest seed
            if not 0 <= value <= most or value == 0 and name in above_0:
                least, limit = "above" if name in above_0 else "from", f" to {most}" if name in at_most else ""
                raise UserError(f"{flag(name)} {value:g}: choose a number {least} 0{limit}")


def check_device(device):
    """Raise UserError for a device that is not there; tell what a GPU's candidates will miss."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: no GPU is available here")
    if device == "cuda" and not shutil.which("ninja"):
        print("ninja is not installed: kernels in CUDA C++ cannot be compiled (pip install ninja)", file=sys.stderr)


def flag(name) -> str:
    """What an option is called on the command line."""
    return "--" + name.replace("_", "-")


def found(path) -> Path:
    """The file or folder of this name, or where there is none, the one in the repository if it is there."""
    return ROOT / path if not Path(path).exists() and (ROOT / path).exists() else Path(path)


@dataclass(frozen=True)
class Task:
    name: str  # unique within its source, such as "level1/3_softmax"
    level: int  # KernelBench's level: 1 single operators, 2 fused chains, 3 networks; 0 for synthesised problems
    source: str  # the problem file's text
    family: str = ""  # of a synthesised problem: its head operator


def load_task(path, level=0, name=None) -> Task:
    """Read one problem file. Raises TaskError when it is missing or lacks one of the names of the format."""
    path = found(path)
    with told(f"{path}: cannot read the problem", TaskError):
        source = path.read_text()
    check_format(source, path)
    return Task(name or path.stem, level, source)


def check_format(source, where="problem"):
    """Raise TaskError unless `source` defines Model, get_inputs and get_init_inputs at module level."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if getattr(error, "lineno", None) else ""
        raise TaskError(f"{where}: not valid Python{line}") from None
    defined = {node.name for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    missing = [name for name in ("Model", "get_inputs", "get_init_inputs") if name not in defined]
    if missing:
        raise TaskError(f"{where}: does not define {', '.join(missing)} (KernelBench format)")


def _numbered(base, level) -> list[Task]:
    """All problem files `<id>_<name>.py` of a level's folder, which is in `base`, in the order of their ids."""
    folder = base / f"level{level}"
    files = [path for path in folder.glob("*.py") if re.match(r"\d+_", path.name)]
    if not files:
        raise TaskError(f"{folder}: no problem files (<id>_<name>.py) there")
    files.sort(key=lambda path: problem_id(path.name))
    return [load_task(path, level, f"{folder.name}/{path.stem}") for path in files]


def builtin_tasks(level=None, device="cpu") -> list[Task]:
    """The built-in evaluation problems of one level, or of all; with a larger batch when they are to run on a GPU."""
    levels = [1, 2, 3] if level is None else [level]
    tasks = [task for n in levels for task in _numbered(PROBLEMS, n)]
    return tasks if device == "cpu" else [scale_batch(task, GPU_BATCH_FACTOR) for task in tasks]


def kernelbench_tasks(folder, level) -> list[Task]:
    """The problems of one level of a KernelBench checkout (`folder` is the repository or its KernelBench/ folder)."""
    folder = found(folder)
    for base in (folder, folder / "KernelBench"):
        if (base / f"level{level}").is_dir():
            return _numbered(base, level)
    raise TaskError(f"{folder}: no level{level}/ there; clone https://github.com/ScalingIntelligence/KernelBench and "
                    "pass its folder as --kernelbench")


def folder_tasks(folder) -> list[Task]:
    """Every .py file of a folder as a problem, in the order of their names. Raises TaskError if there is none."""
    files = sorted(found(folder).glob("*.py"))
    if not files:
        raise TaskError(f"{folder}: no problem files (*.py) there")
    return [load_task(path) for path in files]


def problem_id(name) -> int:
    """The number that a problem's file name begins with: 5 of level1/5_Matrix_scalar_multiplication."""
    return int(name.split("/")[-1].split("_")[0])


def chosen_tasks(tasks, ids) -> list:
    """The tasks that --ids names: "5,10,15", "1-20", "every5" (ids divisible by 5) or a mixture; all when it is None.

    Raises UserError for anything else, or an id that is not there.
    """
    if ids is None:
        return tasks
    numbers, wanted = {problem_id(task.name): task for task in tasks}, set()
    for part in ids.replace(" ", "").split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?|every(\d*[1-9]\d*)", part)
        if not match:
            raise UserError(f"--ids {ids}: cannot read '{part}' (write 5,10,15 or 1-20 or every5)")
        first, last, step = match.groups()
        # No level is as long as 9,999: a longer list would only take memory before it is refused.
        wanted.update(range(int(first), min(int(last or first), int(first) + 9999) + 1) if first else
                      [number for number in numbers if number % int(step) == 0])
    missing = wanted - set(numbers)
    if missing or not wanted:
        raise UserError(f"--ids {ids}: there is no {f'problem {min(missing)}' if missing else 'such problem'} there")
    return [numbers[number] for number in sorted(wanted)]


def scale_batch(task, factor) -> Task:
    """Multiply the batch size: the file's first module-level integer, by this project's convention.

    Of a synthesised product with a diagonal matrix it is the second, the columns, as the rows are both sides of it.
    """
    values = [node.value for node in ast.parse(task.source).body if isinstance(node, ast.Assign)]
    sizes = [value for value in values if re.fullmatch(r"\d+( \* \d+)*", ast.unparse(value))]  # 512, or 256 * 2
    which = 1 if task.family == "diagonal" else 0
    if len(sizes) <= which:
        return task
    value, lines = sizes[which], task.source.split("\n")
    line, size = lines[value.lineno - 1], math.prod(map(int, ast.unparse(value).split(" * ")))
    lines[value.lineno - 1] = line[:value.col_offset] + str(size * factor) + line[value.end_col_offset:]
    return replace(task, source="\n".join(lines))


# ----------------------------------------------------------------------------------------------------------------------
# Problems of KernelBench's sizes on a machine without a GPU


def made(source) -> tuple:
    """(model, get_inputs) of a problem file's text. Raises whatever that raises."""
    space = {}
    exec(compile(source, "problem", "exec"), space)
    return space["Model"](*space["get_init_inputs"]()), space["get_inputs"]


def elements(source, enough) -> int:
    """How many elements inputs, parameters and output have together; without the output where `enough` are exceeded.

    0 if the problem does not run. It is run without memory, on PyTorch's meta device.
    """
    try:
        with torch.device("meta"), torch.no_grad(), warnings.catch_warnings(action="ignore"):
            model, get_inputs = made(source)
            inputs = get_inputs()
            total = sum(t.numel() for t in [*inputs, *model.parameters()] if isinstance(t, torch.Tensor))
            output = model(*inputs) if total <= enough else ()
    except Exception:  # whatever a problem may raise
        return 0
    outputs = output if isinstance(output, (tuple, list)) else [output]
    return total + sum(t.numel() for t in outputs if isinstance(t, torch.Tensor))


def _capped(source):
    """A problem's text with its sizes (module level, get_inputs, get_init_inputs) capped, lower and lower."""
    for most in (1000, 1):  # all sizes; where that does not run, as with literals in the constructor, the batch alone
        for cap in (1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1):
            tree = ast.parse(source)
            outside = [n for node in tree.body if not isinstance(node, ast.ClassDef) for n in ast.walk(node)]
            sizes = [n for n in outside if isinstance(n, ast.Constant) and type(n.value) is int and n.value > cap]
            for size in sorted(sizes, key=lambda n: (n.lineno, n.col_offset))[:most]:
                size.value = cap + size.value % cap  # multiples of the cap become it, others keep what is left over
            yield ast.unparse(tree)


def shrunken(task, enough=20 * SHRUNKEN) -> tuple[Task, int]:
    """(the problem with its sizes capped to have at most SHRUNKEN elements, how many it has; see `elements`).

    Where that cannot be had, the smallest version that runs, or the problem as it is; 0 if that cannot be built.
    """
    best, smallest = task, elements(task.source, SHRUNKEN)
    for source in _capped(task.source):
        if 0 < smallest <= SHRUNKEN:
            break
        count = elements(source, enough)
        if count and (count < smallest or not smallest):
            smallest, best = count, replace(task, source=source)
    return best, smallest


def without_a_gpu(tasks, seconds, shrink) -> tuple[list, dict]:
    """KernelBench's problems as they can be run here, and {name: why} of those that are too large to be interpreted.

    seconds: for a candidate. shrink: make smaller what is too large. Both are told before anything starts.
    """
    most, kept, too_large = int(INTERPRETED * seconds), [], {}
    for task in tqdm(tasks, desc="shrinking", unit="problem", disable=None if shrink else True):
        task, count = shrunken(task, most) if shrink else (task, elements(task.source, most))
        kept.append(task)
        if count > most:
            why = f"its tensors take {4e-9 * count:.2g} GB; without a GPU {4e-9 * most:.2g} GB are possible"
            tqdm.write(f"{task.name}: {why}", file=sys.stderr)
            too_large[task.name] = why
    if too_large:
        print(f"{len(too_large)} of {len(tasks)} problems count as unusable"
              f"{'' if shrink else '; --shrink makes them smaller'}", file=sys.stderr)
    return kept, too_large


# ----------------------------------------------------------------------------------------------------------------------
# Decontamination: a training problem must not be an evaluation problem in disguise (CUDA Agent filters its tasks so).
#
# Two problems count as near when their `Model` classes use the same operators the same number of times, whatever their
# names, order, shapes, constants and spelling (F.relu, x.relu(), nn.ReLU() are one operator). That is stricter than
# text similarity, and it can be checked against a list of hashes without having the evaluation problems at hand.

# Names are compared in lower case, without underscores and a final "loss". Another name -> its name here.
_SPELLINGS = {"hardtanh": "clamp", "relu6": "clamp", "clampmin": "clamp", "clampmax": "clamp", "clip": "clamp",
              "multiply": "mul", "divide": "mul", "div": "mul", "subtract": "sub", "max": "amax", "min": "amin",
              "swish": "silu", "mm": "matmul", "bmm": "matmul", "inner": "matmul", "linear": "matmul",
              "vectornorm": "norm", "negative": "neg", "huber": "smoothl1", "rsqrt": "sqrt"}
# Python's operators; operators -> those that they can be written with; and what computes nothing.
_ARITHMETIC = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "mul", ast.Pow: "mul", ast.MatMult: "matmul"}
_WRITTEN_OUT = {"silu": ["mul", "sigmoid"], "mish": ["mul", "tanh", "softplus"], "softsign": ["abs", "add", "mul"],
                "pow": ["mul"], "square": ["mul"], "mse": ["mean", "mul", "sub"], "l1": ["abs", "mean", "sub"],
                "logsigmoid": ["log", "sigmoid"], "logsoftmax": ["log", "softmax"], "softmin": ["neg", "softmax"],
                "addcmul": ["add", "mul"], "lerp": ["add", "mul", "sub"], "expm1": ["exp", "sub"],
                "log1p": ["add", "log"], "reciprocal": ["mul"], "normalize": ["mul", "norm"],
                "leakyrelu": ["mul", "where"], "hardsigmoid": ["add", "clamp", "mul"],
                "hardswish": ["add", "clamp", "mul", "mul"], "gelu": ["add", "erf", "mul", "mul", "mul"]}
_NEUTRAL = {"contiguous", "clone", "detach", "view", "reshape", "flatten", "size", "dim", "numel", "expand",
            "unsqueeze", "squeeze", "identity", "dropout", "device", "to", "float", "tensor", "init", "super"}


def operators(source) -> list[str]:
    """The operators that a problem's Model applies, sorted, in one spelling each.

    >>> operators("class Model(nn.Module):\\n def forward(self, x):\\n  return F.relu(x) * 2 + torch.tanh(x)")
    ['add', 'mul', 'relu', 'tanh']
    """
    found = []
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    methods = [n for c in classes for n in c.body if isinstance(n, ast.FunctionDef)]
    own = {node.name for node in classes + methods}  # what these apply is looked at there
    layers = {}  # attribute name -> layer classes, for self.act = nn.ReLU(); several in an nn.Sequential
    for node in (n for c in classes for n in ast.walk(c)):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            if isinstance(node.targets[0], ast.Attribute):
                made = [ast.unparse(n.func).split(".")[-1] for n in ast.walk(node.value) if isinstance(n, ast.Call)]
                layers[node.targets[0].attr] = made[1:] or made if made[0] == "Sequential" else made[:1]
    for node in (n for method in methods if method.name != "__init__" for n in ast.walk(method)):
        if all(n.id == "math" for n in ast.walk(node) if isinstance(n, ast.Name)):
            continue  # a number, such as math.sqrt(2 / math.pi)
        if isinstance(node, (ast.BinOp, ast.AugAssign)):
            found.append(_ARITHMETIC.get(type(node.op), "other"))
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            found.append("neg")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            names = [node.func.attr]
            if isinstance(node.func.value, ast.Name) and node.func.value.id == "self":
                names = layers.get(names[0], names)
            found += ["relu" if _cut_at_zero(node) else _spelled(name) for name in names if name not in own]
    found = [part for name in found for part in _WRITTEN_OUT.get(name, [name])]
    return sorted(name for name in found if name not in _NEUTRAL)


def _spelled(name) -> str:
    name = name.lower().replace("_", "").removesuffix("loss")
    name = re.sub(r"(?<!conv)(?<!pool)[123]d$", "", name)  # BatchNorm1d and 2d are one operator
    return _SPELLINGS.get(name, name)


def _cut_at_zero(call) -> bool:
    """Is it torch.clamp(x, min=0), or another spelling of that?"""
    bounds = [ast.unparse(n) for n in [*call.args, *(k.value for k in call.keywords)] if isinstance(n, ast.Constant)]
    lower = call.func.attr in ("clamp", "clip", "clamp_min", "clamp_", "clamp_min_")
    return lower and bounds in (["0"], ["0.0"]) and "max" not in [k.arg for k in call.keywords]


def fingerprint(source) -> str:
    """Hash of a problem's operators; equal for near problems."""
    return hashlib.sha1(" ".join(operators(source)).encode()).hexdigest()[:12]


def evaluation_fingerprints() -> frozenset[str]:
    """Fingerprints of all built-in problems and of KernelBench's levels 1 to 3 (shipped as hashes)."""
    known = {fingerprint(path.read_text()) for path in PROBLEMS.glob("level*/*.py")}
    return frozenset(known | set((PROBLEMS / "kernelbench_fingerprints.txt").read_text().split()))


def unfit(task, evaluation) -> str | None:
    """Why a synthesised problem may not be trained on, or None if it may. evaluation: fingerprints to stay clear of."""
    if fingerprint(task.source) in evaluation:
        return "near an evaluation problem"
    try:
        torch.manual_seed(0)
        with warnings.catch_warnings(action="ignore"), torch.no_grad():  # a refused problem's warnings help nobody
            model, get_inputs = made(task.source)
            inputs, others = get_inputs(), get_inputs()
            first, again, other = model(*inputs), model(*inputs), model(*others)
    except Exception as error:  # a problem that does not run is no problem; the synthesiser goes on to the next seed
        return f"does not run: {type(error).__name__}"
    if not isinstance(first, torch.Tensor):
        return "does not return one tensor"
    if not torch.isfinite(first).all():
        return "not finite"
    if not torch.equal(first, again):
        return "not deterministic"
    if first.numel() > 1 and first.float().std() < 1e-6 or torch.allclose(first, other, rtol=1e-4, atol=1e-6):
        return "constant output"
    return None


def unfit_on_gpu(task, device="cuda", fastest=1.0, slowest=100.0) -> str | None:
    """Why a problem is no use with a clock, or None: it must run under torch.compile, too, and take 1 to 100 ms.

    CUDA Agent's filters, beside those of `unfit`. fastest, slowest: limits of one eager forward in ms.
    """
    try:
        with torch.device(device), torch.no_grad():
            model, get_inputs = made(task.source)
            inputs, times = get_inputs(), []
            want = model(*inputs)
            for _ in range(5):
                start = time.perf_counter()
                model(*inputs).sum().item()  # waits for the device
                times.append(1000 * (time.perf_counter() - start))
            if not fastest <= min(times) <= slowest:
                return f"takes less than {fastest:g} ms" if min(times) < fastest else f"takes more than {slowest:g} ms"
            same = torch.allclose(torch.compile(model)(*inputs), want, rtol=1e-2, atol=1e-2)
    except Exception as error:  # out of memory, or not compilable
        return f"does not run: {type(error).__name__}"
    return None if same else "torch.compile gives other values"

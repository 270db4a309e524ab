"""What a problem is, and where problems come from.

A problem is the source of a Python file in KernelBench's format: a class `Model(nn.Module)`, module-level constants,
`get_inputs()` and `get_init_inputs()`, the two lists of positional arguments for `forward` and `__init__`. A candidate
answers with a class `ModelNew` that has the same constructor and computes the same function.

Sources of problems, all giving `Task` records:

    builtin_tasks      the evaluation problems in `problems/`, written for this project; never trained on
    kernelbench_tasks  a KernelBench checkout (evaluation only)
    folder_tasks       a folder of the user's own problem files
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

PROBLEMS = Path(__file__).parent / "problems"

# Built-in and synthesised problems are sized for Triton's interpreter (about 64 K elements a tensor). On a GPU the same
# problem gets a batch this many times larger; the modelled clock of sandbox.py divides the GPU's rates by the same
# number, so that a problem means the same on both: launches, bytes and FLOPs keep their proportions.
GPU_BATCH_FACTOR = 256


class TaskError(ValueError):
    """A problem that cannot be used. The message is one line, fit to be shown to the user."""


@dataclass(frozen=True)
class Task:
    name: str  # unique within its source, such as "level1/3_softmax"
    level: int  # KernelBench's level: 1 single operators, 2 fused chains, 3 networks; 0 for synthesised problems
    source: str  # the problem file's text


def load_task(path, level=0, name=None) -> Task:
    """Read one problem file. Raises TaskError when it is missing or lacks one of the names of the format."""
    path = Path(path)
    try:
        source = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: cannot read the problem ({type(error).__name__})") from None
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


def _numbered(folder, level, prefix) -> list[Task]:
    """All problem files `<id>_<name>.py` of a folder, in the order of their ids."""
    folder = Path(folder)
    files = [path for path in folder.glob("*.py") if re.match(r"\d+_", path.name)] if folder.is_dir() else []
    if not files:
        raise TaskError(f"{folder}: no problem files (<id>_<name>.py) there")
    files.sort(key=lambda path: int(path.name.split("_")[0]))
    return [load_task(path, level, prefix + path.stem) for path in files]


def builtin_tasks(level=None, device="cpu") -> list[Task]:
    """The built-in evaluation problems of one level, or of all; with a larger batch when they are to run on a GPU."""
    levels = [1, 2, 3] if level is None else [level]
    tasks = [task for n in levels for task in _numbered(PROBLEMS / f"level{n}", n, f"level{n}/")]
    if device == "cpu":
        return tasks
    return [Task(task.name, task.level, scale_batch(task.source, GPU_BATCH_FACTOR)) for task in tasks]


def kernelbench_tasks(folder, level) -> list[Task]:
    """The problems of one level of a KernelBench checkout (`folder` is the repository or its KernelBench/ folder)."""
    folder = Path(folder)
    for base in (folder, folder / "KernelBench"):
        if (base / f"level{level}").is_dir():
            return _numbered(base / f"level{level}", level, f"level{level}/")
    raise TaskError(f"{folder}: no level{level}/ there; clone https://github.com/ScalingIntelligence/KernelBench and pass "
                    "its folder as --kernelbench")


def folder_tasks(folder) -> list[Task]:
    """Every .py file of a folder as a problem, in the order of their names. Raises TaskError if there is none."""
    files = sorted(Path(folder).glob("*.py")) if Path(folder).is_dir() else []
    if not files:
        raise TaskError(f"{folder}: no problem files (*.py) there")
    return [load_task(path) for path in files]


def scale_batch(source, factor) -> str:
    """Multiply the batch size: the file's first module-level integer constant, by this project's convention."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and type(node.value.value) is int:
            lines = source.split("\n")
            line, value = lines[node.lineno - 1], node.value
            lines[node.lineno - 1] = line[:value.col_offset] + str(value.value * factor) + line[value.end_col_offset:]
            return "\n".join(lines)
    return source

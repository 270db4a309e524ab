"""What is a problem, where do problems come from, and how large is one?

A problem is the text of a Python file in KernelBench's format: a class `Model(nn.Module)`, module-level constants,
`get_inputs()` with the list of forward's arguments, and `get_init_inputs()` with the constructor's. A candidate answers
with a class `ModelNew` that has the same constructor and computes the same function.

    builtin_tasks      the evaluation problems in problems/level1 to level3
    redundant_tasks    the evaluation problems in problems/redundant, in which an operator may be redundant
    kernelbench_tasks  a KernelBench checkout (evaluation only)
    folder_tasks       a folder of the user's own problem files
    parquet_tasks      a file in the layout of the paper's RL data (hkust-nlp/drkernel-rl-data)

synthetic/training.py makes a stream of training tasks out of these or of synthesised problems. It leaves out problems
that do not run, or that resemble an evaluation problem.
"""

import ast
import contextlib
import json
import math
import re
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from command.files import ROOT, find_path, read_parquet, user_error
from command.process import UserError
from command.progress import in_words

PROBLEMS = ROOT / "problems"

# Built-in and synthesised problems are small (about 64 K elements a tensor), so that a CPU can interpret kernels. On a
# GPU the batch is this many times larger. The modelled clock divides the GPU's speed by the same number, so the costs
# of launches, bytes and FLOPs keep their proportions.
GPU_BATCH_FACTOR = 256


class TaskError(UserError):
    """A problem that cannot be used."""


@dataclass(frozen=True)
class Task:
    """A problem. Equal sources are one task for the sandbox, whatever their names."""

    name: str  # unique within its source, such as "level1/3_softmax"
    level: int  # KernelBench's level: 1 single operators, 2 fused chains, 3 networks; 0 for all others
    source: str  # the problem file's text
    family: str = ""  # of a synthesised problem: the operator that it is named after


def load_task(path, level=0, name=None) -> Task:
    """Read one problem file. `path` may be relative to the repository. name: default is the file's, without .py.

    Spaces at the ends of lines go: a small model copies tokens, and `)` with a space after it is another token.

    Raises TaskError if the file cannot be read or is not in KernelBench's format. Its text is not executed here.
    """
    path = find_path(path)
    with user_error(f"{path}: cannot read the problem", TaskError):
        source = re.sub(r"[ \t]+$", "", path.read_text(encoding="utf-8-sig"), flags=re.MULTILINE)
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
    tasks = []
    left_out = Counter()
    for number, row in enumerate(read_parquet(path, ["data_source", "reward_model", "extra_info"])):
        if "kernelbench" in str(row["data_source"]).lower():
            raise TaskError(f"{path}: KernelBench's problems are for evaluation only (bench.py --kernelbench)")
        info = _object(row["extra_info"])
        reward = _object(row["reward_model"])
        entry = info.get("entry_point") or "Model"
        source = reward.get("ground_truth") or ""
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
    """The evaluation problems in which an operator may be redundant (synthetic/redundant.py).

    A kernel without a redundant one, such as a flip directly before a sum, is correct and faster than one with it.
    """
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
    """The tasks that --ids names, such as "5,10", "1-20" or "2,every5" (2, and ids divisible by 5). None: all of them.

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
# The size of a problem

def init_arguments(get_init_inputs) -> tuple[list, dict]:
    """(arguments, keywords) of a problem's constructor. In KernelBook's problems the list is [arguments, keywords]."""
    arguments = list(get_init_inputs())
    keywords = {}
    if list(map(type, arguments)) == [list, dict]:
        arguments, keywords = arguments
    return arguments, keywords


def construct(source) -> tuple:
    """(model, get_inputs) of a problem's text. Runs the text, and raises whatever that raises."""
    names = {}  # what the problem's text defines
    exec(compile(source, "problem", "exec"), names)
    arguments, keywords = init_arguments(names["get_init_inputs"])
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

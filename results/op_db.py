"""Somebody else's test suite for the sandbox: PyTorch's own operator database, each operator as task and as candidate.

    python results/op_db.py [--only NAME]        needs expecttest; writes results/op_db/table.md

One sample of each operator in four dtypes becomes a task in KernelBench's format; the candidate is the reference
renamed, which must be correct without a kernel of its own. Each one that is not has its reason in the table.
"""

import argparse
import collections
import contextlib
import operator
import re
import sys
import tempfile
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tasks import Task, TaskError

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.complex64)
SOURCE = """import torch
from math import inf, nan
from torch import device
class Model(torch.nn.Module):
    def forward(self, *t):
        return {call}
get_inputs = lambda: torch.load({path!r})
get_init_inputs = list
"""
# What the test suite's own functions around operators do. {0}, {1}: arguments; {all} of them; {more}: keywords.
WRITTEN = {"T": "{0}.T", "H": "{0}.H", "mT": "{0}.mT", "mH": "{0}.mH", "einsum": "torch.einsum({1}, {0})",
           "slice": "torch.ops.aten.slice.Tensor({all})",
           "svd_lowrank": "torch.svd_lowrank({0} @ {1}.mT, {more})",
           "pca_lowrank": "torch.pca_lowrank({0} @ {1}.mT, {more})",
           "normal in_place": "{0}.clone().normal_({1}, {2})", "where": "torch.where({1}, {0}, {2})",
           "linalg.pinv singular": "torch.linalg.pinv({0} @ {1}.mT)",
           "nn.functional.embedding": "torch.nn.functional.embedding({1}, {0}, {more})",
           "polygamma": "torch.polygamma({1}, {0})", "special.polygamma": "torch.special.polygamma({1}, {0})"}


def call_of(op, label, arguments, keywords):
    """Python that calls an operator of the database. Raises TypeError for a function of the test suite."""
    written = WRITTEN.get(label) or WRITTEN.get(op.name)
    if written:
        return written.format(*arguments, all=", ".join(arguments), more=", ".join(keywords))
    for path in op.name.removeprefix("torch."), f"Tensor.{op.name}", f"ops.aten.{op.name}":
        with contextlib.suppress(AttributeError):
            if callable(operator.attrgetter(path)(torch)):
                return f"torch.{path}({', '.join([*arguments, *keywords])})"
    raise TypeError("a function of the test suite")


def expression(value, tensors) -> str:
    """Python for an argument; its tensors are appended to `tensors`. Raises TypeError for other objects."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            raise TypeError("sparse or quantized")
        tensors.append(value.detach().clone())
        return f"t[{len(tensors) - 1}]"
    if isinstance(value, dict):
        return "{" + "".join(f"{key!r}: {expression(item, tensors)}, " for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        parts = "".join(expression(item, tensors) + ", " for item in value)
        return f"[{parts}]" if isinstance(value, list) else f"({parts})"
    if value is Ellipsis or isinstance(value, (bool, int, float, complex, str, slice, type(None), torch.dtype,
                                               torch.layout, torch.memory_format, torch.device)):
        return repr(value)
    raise TypeError(f"a {type(value).__name__} as an argument")


def tasks(folder, only):
    """Yields (label, Task or None, why not) for each operator and dtype."""
    from torch.testing._internal.common_methods_invocations import op_db
    for op in op_db:
        label = f"{op.name} {op.variant_test_name}".strip()
        for dtype in DTYPES:
            if dtype not in op.dtypes or only not in label:
                continue
            tensors, entry = [], f"{label} {str(dtype).split('.')[1]}"
            torch.manual_seed(0)
            try:
                sample = next(iter(op.sample_inputs("cpu", dtype)))
                arguments = [expression(value, tensors) for value in (sample.input, *sample.args)]
                keywords = [f"{key}={expression(value, tensors)}" for key, value in sample.kwargs.items()]
                call = call_of(op, label, arguments, keywords)
            except (TypeError, StopIteration, RuntimeError) as error:
                yield entry, None, str(error) or "no sample"
                continue
            path = str(Path(folder) / f"{re.sub(r'[^A-Za-z0-9]', '_', entry)}.pt")
            torch.save(tensors, path)
            yield entry, Task(entry, 0, SOURCE.format(call=call, path=path)), None


REASONS = {  # kind of reason: (what the operator's name and the error say); the first that fits
    "random or uninitialised": "output is random|^(new_)?empty",
    "values or shapes are read back": "reads computed values|value-dependent|another shape than while|be on (CPU|cpu)",
    "the reference itself cannot be a task": "the reference fails|something other than tensors",
    "sparse or quantized": "sparse|quantized|Sparse",
    "changes an input, or an output is no memory of its own": "memory of its own|in place",
    "changes the size of a tensor's memory": "resize",
    "no shapes without values (PyTorch's meta device)": "no fake impl",
    "PyTorch errs on it within a dispatch mode": "pinv",
    "statistics of another precision on a CPU": "native_layer_norm"}


def kind_of(text) -> str:
    return next((kind for kind, pattern in REASONS.items() if re.search(pattern, text)), "other")


def table(correct, failed) -> str:
    """Markdown. failed: [(operator and dtype, kind of reason, reason)]."""
    lines = ["# PyTorch's operator database: each operator as its own candidate", "",
             f"torch {torch.__version__}, modelled clock, {correct + len(failed)} samples", "", "| what | samples |",
             "|---|---|", f"| correct | {correct} |"]
    counts = collections.Counter(kind for _, kind, _ in failed)
    lines += [f"| {kind} | {count} |" for kind, count in counts.most_common()]
    lines += ["", "| not correct | kind | reason |", "|---|---|---|"]
    lines += [f"| {entry} | {kind} | {why[:110].replace('|', '/')} |" for entry, kind, why in failed]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="operators whose name contains this")
    only = parser.parse_args().only
    from sandbox import Sandbox
    warnings.simplefilter("ignore")
    correct, failed, futures = 0, [], {}
    with tempfile.TemporaryDirectory() as folder, Sandbox(require_kernel=False, trials=2) as sandbox:
        for entry, task, why in tasks(folder, only):
            if task is None:
                failed.append((entry, "no task can be made of it", why))
            else:
                code = task.source.replace("class Model(", "class ModelNew(")
                futures[entry] = sandbox.submit([(task, code)])[0]
        for entry, future in futures.items():
            try:
                verdict = future.result()
                text = "" if verdict.correct else verdict.rejected or verdict.error
            except TaskError as error:
                text = str(error).removeprefix(f"{entry}: ")
            correct += not text
            failed += [(entry, kind_of(f"{entry}: {text}"), text)] if text else []
    text = table(correct, failed)
    if not only:
        folder = Path(__file__).with_suffix("")
        folder.mkdir(exist_ok=True)
        (folder / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

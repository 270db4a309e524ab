"""Every built-in problem is usable, deterministic, not trivial, of the promised size, and scales by its batch alone."""

import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from synthetic.generator import synthesize
from tasks import builtin_tasks, scale_batch

TASKS = builtin_tasks()


def load(source):
    """The names that a problem file defines."""
    names = {"__name__": "problem"}
    exec(compile(source, "problem.py", "exec"), names)
    return names


def build(source, seed):
    """(model, inputs) of a problem, both from one seed as every harness for this format makes them."""
    names = load(source)
    torch.manual_seed(seed)
    model = names["Model"](*names["get_init_inputs"]())
    return model, names["get_inputs"]()


class LargestTensor(TorchDispatchMode):
    """Remembers the element count of the largest tensor that any operator returned, and the number of operators."""

    def __init__(self):
        super().__init__()
        self.elements, self.operators = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.operators += 1
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return result


def test_counts_and_names():
    counts = {level: sum(task.level == level for task in TASKS) for level in (1, 2, 3)}
    assert counts[1] >= 14 and counts[2] >= 14 and counts[3] >= 4
    assert len({task.name for task in TASKS}) == len(TASKS)
    for level in (1, 2, 3):  # ids 1, 2, 3, ... without a gap, so that --ids means what it says
        ids = [int(re.match(rf"level{level}/(\d+)_\w+$", task.name)[1]) for task in TASKS if task.level == level]
        assert ids == list(range(1, len(ids) + 1))


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_runs_deterministic_finite_not_constant(task):
    outputs = []
    for _ in range(2):
        model, inputs = build(task.source, 0)
        kept = [value.clone() for value in inputs]
        with torch.no_grad():
            outputs.append(model(*inputs))
        assert all(torch.equal(a, b) for a, b in zip(kept, inputs)), "changes its inputs"
    first, again = outputs
    assert isinstance(first, torch.Tensor) and first.dtype == torch.float32
    assert torch.equal(first, again), "not deterministic for a seed"
    assert torch.isfinite(first).all()
    if first.numel() > 1:  # spread against magnitude, so that shares of 1/1024 count as well
        assert first.std() > 0.02 * first.abs().mean(), "(nearly) constant"
    with torch.no_grad():
        other = model(*load(task.source)["get_inputs"]())  # the same parameters, the next inputs
    # Neither zeros nor the answer to other inputs may pass as an answer, even at the loose tolerance of 1e-2.
    for wrong in (torch.zeros_like(first), other):
        assert not torch.allclose(wrong, first, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_size(task):
    model, inputs = build(task.source, 0)
    with torch.no_grad(), LargestTensor() as seen, FlopCounterMode(display=False) as flops:
        model(*inputs)
    largest = max([seen.elements] + [value.numel() for value in inputs])
    assert 32 * 1024 <= largest <= 256 * 1024
    assert flops.get_total_flops() < 1e9
    assert max(len(line) for line in task.source.split("\n")) <= 120


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_first_constant_is_the_leading_dimension(task):
    """`tasks.scale_batch` doubles the first input's first dimension and nothing that the constructor sees."""
    doubled = scale_batch(task, 2).source
    assert load(doubled)["get_init_inputs"]() == load(task.source)["get_init_inputs"]()
    model, inputs = build(task.source, 0)
    model2, inputs2 = build(doubled, 0)
    assert [p.shape for p in model.parameters()] == [p.shape for p in model2.parameters()]
    assert inputs2[0].shape[0] == 2 * inputs[0].shape[0]
    for a, b in zip(inputs, inputs2):  # whatever does not grow with the batch keeps its shape altogether
        assert b.shape in (a.shape, (2 * a.shape[0], *a.shape[1:]))
    with torch.no_grad(), LargestTensor() as seen:
        model(*inputs)
    with torch.no_grad(), LargestTensor() as seen2:
        model2(*inputs2)
    assert seen2.operators == seen.operators  # no loop over the batch
    assert seen2.elements <= 2 * seen.elements  # no tensor that grows with the batch squared


@pytest.mark.parametrize("seed", [17, 80, 250])  # the diagonal is a parameter; an input; the columns are 512 * 4
def test_a_larger_batch_makes_no_larger_diagonal_matrix(seed):
    task = synthesize(seed, clutter=True)
    assert task.family == "diagonal" and "torch.diag(" in task.source
    work = []
    for problem in (task, scale_batch(task, 4)):
        model, inputs = build(problem.source, 0)
        with torch.no_grad(), LargestTensor() as seen, FlopCounterMode(display=False) as flops:
            model(*inputs)
        work.append((seen.elements, flops.get_total_flops()))
    assert work[1] == (4 * work[0][0], 4 * work[0][1])

"""Every built-in problem is usable, deterministic, not trivial, of the promised size, and scales by its batch alone."""

import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from synthetic.families import FAMILIES, draw, task_of
from tasks import builtin_tasks, scale_batch

TASKS = builtin_tasks()


class LargestTensor(TorchDispatchMode):
    """Counts operators, and the elements of the largest tensor that one has returned."""

    elements = operators = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.operators += 1
        for value in torch.utils._pytree.tree_leaves(result):
            if torch.is_tensor(value):
                self.elements = max(self.elements, value.numel())
        return result


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


def work(model, inputs):
    """(elements of the largest tensor, operators, FLOPs) of one forward."""
    with torch.no_grad(), LargestTensor() as seen, FlopCounterMode(display=False) as flops:
        model(*inputs)
    return seen.elements, seen.operators, flops.get_total_flops()


def test_counts_and_names():
    for level, count in ((1, 20), (2, 16), (3, 5)):  # ids 1, 2, 3, ... without a gap: --ids means what it says
        ids = [int(re.match(rf"level{level}/(\d+)_\w+$", task.name)[1]) for task in TASKS if task.level == level]
        assert ids == list(range(1, count + 1))


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_runs_deterministic_finite_not_constant(task):
    (model, inputs), (twin, same) = build(task.source, 0), build(task.source, 0)
    kept = [value.clone() for value in inputs]
    with torch.no_grad():
        first, again = model(*inputs), twin(*same)
        other = model(*load(task.source)["get_inputs"]())  # the same parameters, the next inputs
    assert all(torch.equal(a, b) for a, b in zip(kept, inputs)), "changes its inputs"
    assert isinstance(first, torch.Tensor) and first.dtype == torch.float32
    assert torch.equal(first, again), "not deterministic for a seed"
    assert torch.isfinite(first).all()
    if first.numel() > 1:  # spread against magnitude, so that shares of 1/1024 count as well
        assert first.std() > 0.02 * first.abs().mean(), "(nearly) constant"
    # Neither zeros nor the answer to other inputs may pass as an answer, even at the loose tolerance of 1e-2.
    for wrong in (torch.zeros_like(first), other):
        assert not torch.allclose(wrong, first, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_size_and_that_it_grows_with_the_batch_alone(task):
    """`tasks.scale_batch` doubles the first input's first dimension and nothing that the constructor sees."""
    doubled = scale_batch(task, 2).source
    (model, inputs), (model2, inputs2) = build(task.source, 0), build(doubled, 0)
    assert [p.shape for p in model.parameters()] == [p.shape for p in model2.parameters()]
    assert inputs2[0].shape[0] == 2 * inputs[0].shape[0]
    for a, b in zip(inputs, inputs2):  # whatever does not grow with the batch keeps its shape altogether
        assert b.shape in (a.shape, (2 * a.shape[0], *a.shape[1:]))
    (elements, operators, flops), (elements2, operators2, _) = work(model, inputs), work(model2, inputs2)
    assert 32 * 1024 <= max([elements] + [value.numel() for value in inputs]) <= 256 * 1024 and flops < 1e9
    assert operators2 == operators  # no loop over the batch
    assert elements2 <= 2 * elements  # no tensor that grows with the batch squared


@pytest.mark.parametrize("seed", [0, 2, 3])
def test_a_larger_batch_makes_no_larger_diagonal_matrix(seed):
    task = task_of(draw(seed, True, {"diagonal": FAMILIES["diagonal"]}))
    assert "torch.diag(" in task.source
    (elements, _, flops), large = (work(*build(one.source, 0)) for one in (task, scale_batch(task, 4)))
    assert (large[0], large[2]) == (4 * elements, 4 * flops)

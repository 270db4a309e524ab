"""Every built-in problem is usable, deterministic, not trivial, of the promised size, and scales by its batch alone."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from synthetic.families import FAMILIES, draw, task_of
from tasks import builtin_tasks, construct, problem_id, scale_batch

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


def build(source):
    """(model, inputs, the function that gives the next inputs) of a problem, both from one seed as every harness for
    this format makes them."""
    torch.manual_seed(0)
    model, get_inputs = construct(source)
    return model, get_inputs(), get_inputs


def work(model, inputs, *_):
    """(elements of the largest tensor, operators, FLOPs) of one forward."""
    with torch.no_grad(), LargestTensor() as seen, FlopCounterMode(display=False) as flops:
        model(*inputs)
    return seen.elements, seen.operators, flops.get_total_flops()


def test_counts_and_names():
    for level, count in ((1, 20), (2, 16), (3, 5)):  # ids 1, 2, 3, ... without a gap: --ids means what it says
        ids = [problem_id(task.name) for task in TASKS if task.level == level]
        assert ids == list(range(1, count + 1))


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_runs_deterministic_finite_not_constant(task):
    (model, inputs, more), (twin, same, _) = build(task.source), build(task.source)
    with torch.no_grad():
        first, other = model(*inputs), model(*more())  # the same parameters, the next inputs
        again = twin(*same)
    assert all(map(torch.equal, inputs, build(task.source)[1])), "changes its inputs"
    assert first.dtype == torch.float32 and torch.isfinite(first).all()
    assert torch.equal(first, again), "not deterministic for a seed"
    if first.numel() > 1:  # spread against magnitude, so that shares of 1/1024 count as well
        assert first.std() > 0.02 * first.abs().mean(), "(nearly) constant"
    # Neither zeros nor the answer to other inputs may pass as an answer, even at the loose tolerance of 1e-2.
    for wrong in (torch.zeros_like(first), other):
        assert not torch.allclose(wrong, first, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_size_and_that_it_grows_with_the_batch_alone(task):
    """`tasks.scale_batch` doubles the first input's first dimension and nothing that the constructor sees."""
    small, large = build(task.source), build(scale_batch(task, 2).source)
    assert [p.shape for p in small[0].parameters()] == [p.shape for p in large[0].parameters()]
    assert large[1][0].shape[0] == 2 * small[1][0].shape[0]
    for a, b in zip(small[1], large[1]):  # whatever does not grow with the batch keeps its shape altogether
        assert b.shape in (a.shape, (2 * a.shape[0], *a.shape[1:]))
    (elements, operators, flops), (elements2, operators2, _) = work(*small), work(*large)
    assert 32 * 1024 <= max([elements] + [value.numel() for value in small[1]]) <= 256 * 1024 and flops < 1e9
    assert operators2 == operators  # no loop over the batch
    assert elements2 <= 2 * elements  # no tensor that grows with the batch squared


@pytest.mark.parametrize("seed", [0, 2, 3])
def test_a_larger_batch_makes_no_larger_diagonal_matrix(seed):
    task = task_of(draw(seed, True, {"diagonal": FAMILIES["diagonal"]}))
    assert "torch.diag(" in task.source
    (elements, _, flops), large = (work(*build(one.source)) for one in (task, scale_batch(task, 4)))
    assert (large[0], large[2]) == (4 * elements, 4 * flops)

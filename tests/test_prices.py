"""What the modelled clock charges: launches, bytes and FLOPs of kernels, factors for operators, an order of pairs."""

import pytest
import torch

from candidates import by_elements, by_rows, fails, passes, problem, replaced
from judge import prices


def milliseconds(box, task, code, kernel="apply"):
    """Modelled time of the launches of one kernel, without their launch overhead."""
    found = passes(box, task, code)
    share = sum(entry.share for entry in found.profile if entry.name == kernel)
    return share * found.candidate_ms - prices.LAUNCH_MS


def moved(ms):
    """Elements of four bytes that are loaded and stored in this time."""
    return ms * prices.BANDWIDTH / 4


@pytest.mark.parametrize("body, out", [("x", "torch.empty_like(x)"), ("x + 1", "x = x + 1")])  # the latter in place
def test_a_kernel_costs_what_it_moves(box, body, out):
    code = replaced(by_elements("tl.maximum(v, 0.0)"), ("512", "1024"), ("torch.empty_like(x)", out))
    task = problem(f"torch.relu({body})", "torch.randn(1024, 64)")
    assert moved(milliseconds(box, task, code)) == pytest.approx(2 * 1024 * 64, rel=0.02)


def test_parameters_cost_what_they_would_among_larger_tensors(box):
    state, size = "self.bias = torch.nn.Parameter(torch.randn(256, 64))", 256 * 64
    task = problem("x + self.bias", "torch.randn(256, 64)", state)
    add = replaced(by_elements("v + tl.load(y + o, mask=o < n)", state=state), ("apply(x, out", "apply(x, y, out"),
                   ("](x, out", "](x, self.bias, out"), ("512", "2048"))
    assert moved(milliseconds(box, task, add)) == pytest.approx((2 + 1 / 256) * size, rel=0.01)
    reference = prices.milliseconds((2 + 1 / 256) * size * 4)
    assert passes(box, task, add).reference_ms == pytest.approx(reference, rel=0.01)


def priced(call) -> prices.Operators:
    with torch.no_grad(), prices.Operators([]) as watch:
        call()
    return watch


def bytes_of(call) -> list:
    """What the price of each kernel of a call is worth."""
    return [round((ms - prices.LAUNCH_MS) * prices.BANDWIDTH) for ms, _, _ in priced(call).events]


def test_operators_cost_what_cuda_launches_for_them():
    x, y, image = torch.randn(128, 64), torch.randn(128, 64), torch.randn(2, 8, 16, 16)
    size = x.numel() * 4
    assert bytes_of(lambda: x.view(-1).t().detach()[1:]) == bytes_of(lambda: x.contiguous()) == []
    assert bytes_of(lambda: torch.empty_like(x)) == []
    assert bytes_of(lambda: torch.relu(x)) == bytes_of(lambda: x * 2.0) == [2 * size]
    assert bytes_of(lambda: x + y) == [3 * size] and bytes_of(lambda: x + y[:1]) == [2 * size + 256]
    assert bytes_of(lambda: x.fill_(1.0)) == bytes_of(lambda: torch.zeros(128, 64)) == [size]
    assert bytes_of(lambda: x[:1].expand(128, 64) * 1.0) == [size + 256]
    for count, call in ((1, lambda: torch.softmax(x, 1)), (1, lambda: torch.nn.functional.layer_norm(x, (64,))),
                        (2, lambda: torch.nn.functional.group_norm(image, 2)), (4, lambda: x.sort(1)),
                        (4, lambda: torch.logsumexp(x, 1)), (2, lambda: torch.nn.functional.mse_loss(x, y))):
        assert len(bytes_of(call)) == count
    assert priced(lambda: torch.nn.Linear(64, 32)(x)).flops == 2 * 128 * 64 * 32
    convolution, out = torch.nn.Conv2d(8, 4, 3), 2 * 4 * 14 * 14  # and the bias is a pass of its own
    assert priced(lambda: convolution(image)).flops == 2 * out * 8 * 9
    assert bytes_of(lambda: convolution(image))[1] == 3 * out * 4


def test_what_the_reference_calls_may_be_called(box):
    """It costs both the same, whatever it costs."""
    extra = by_elements("v * 1.0").replace("return out", "return torch.searchsorted(out[0].sort().values, out)")
    fails(box, problem("x * 1.0"), extra, "aten.searchsorted has no price")
    passes(box, problem("torch.searchsorted(x[0].sort().values, x)"), extra)


def test_what_lays_values_out_anew_may_always_be_called(box):
    more = "x.t().reshape(-1), x[None].mT @ x; return out"
    passes(box, problem("x * 1.0"), by_elements("v * 1.0").replace("return out", more))


def test_kernels_of_a_task_are_ordered_as_on_a_gpu(box):
    """Fusing more is faster, and none is slower than four launches."""
    one = by_elements("tl.sigmoid(tl.abs(v * 2)) + 1")
    two = replaced(one, (" + 1,", ","), ("return out", "return out + 1"))
    three = replaced(two, ("v * 2", "v"), ("](x, out", "](x * 2, out"))
    task = problem("torch.sigmoid((x * 2).abs()) + 1", "torch.randn(64, 1024)")
    speedups = [passes(box, task, code).speedup for code in (three, two, one)]
    assert 1 <= speedups[0] < speedups[1] < speedups[2], speedups


SLOW = """
@triton.jit
def slow(a, b):
    return tl.where(tl.sin(tl.sin(a)) > 2.0, 0.0, a + b)
"""


def test_a_function_of_elements_costs_what_it_does(box):
    def costs(expression, form, *results):
        task = problem(expression, "torch.randn(64, 1024)")
        return [passes(box, task, form(result, SLOW)).candidate_ms for result in results]

    direct, mapped = costs("x + x", by_elements, "tl.where(tl.sin(tl.sin(v)) > 2.0, 0.0, v + v)",
                           "tl.map_elementwise(slow, v, v)")
    assert mapped == pytest.approx(direct, rel=0.01)
    plain, slow = costs("x.sum(1)", by_rows, "tl.sum(v, 0)", "tl.reduce(v, 0, slow)")
    flops = 400 * 64 * 1024  # of the sines
    assert slow - plain > 0.5 * flops / prices.PEAK

"""Operators that do more than their price says, or write where an index says: a candidate may not call them."""

import pytest
import torch

from judge import prices, recorder
from candidates import passes
from test_cheats import POINTWISE, fails_here, forward, victim

WEIGHTS = "self.weights = torch.randn(512, 512)"
MATRICES = POINTWISE.replace("self.bias = torch.nn.Parameter(torch.zeros(64))", WEIGHTS).replace("64", "512").replace(
    "torch.sigmoid(x + self.bias)", "torch.sigmoid(x @ self.weights)")
PRICED_ALIKE = {  # {an operator in place: what it may not be cheaper than}
    "torch.zeros(256, 512).addmm_(x, w)": "x @ w", "torch.zeros(1, 256, 512).baddbmm_(x[None], w[None])[0]": "x @ w",
    "torch.zeros(256, 512).addbmm_(x[None], w[None])": "x @ w", "(x + 0).cumsum_(1)": "(x + 0).cumsum(1)",
    "x.topk(512, 1).values": "x.sort(1).values",
    "x.add(0).masked_fill_(x[:1] > 0, 1)": "x.add(0).masked_fill(x[:1] > 0, 1)"}


@pytest.mark.parametrize("name", PRICED_ALIKE)
def test_no_operator_is_cheaper_under_another_name(name):
    x, w = torch.randn(256, 512), torch.randn(512, 512)
    prices_of = []
    for call in (name, PRICED_ALIKE[name]):
        with torch.no_grad(), prices.Clock() as clock:
            eval(call, {"torch": torch, "x": x, "w": w})
        prices_of.append(sum(milliseconds for milliseconds, _, _ in clock.events))
    assert prices_of[0] >= prices_of[1]


UNKNOWN = [  # products, sorts and indices that are not checked
    "torch.conv_tbc(x[:, None], w[:, :, None], w[0, :1])", "torch._foreach_mul(list(x.unbind(1)), 2.0)[0]",
    "torch.ops.aten._foreach_addcmul([x], [x], [x])[0]", "torch.ops.aten._compute_linear_combination(w, x)",
    "torch.nn.functional.embedding_bag(torch.arange(512).repeat(256, 1), w, per_sample_weights=x, mode='sum')",
    "(torch.complex(x, x) @ torch.complex(w, w)).real", "x.to(torch.cfloat) @ w.to(torch.cfloat)",
    "torch.nn.functional.scaled_dot_product_attention(x[None, None], w[None, None], w[None, None])",
    "x.median(1, keepdim=True).values", "torch.searchsorted(x, x)", "torch.bilinear(x, x, w.view(1, 512, 512))",
    "torch.ops.aten.max_pool2d_with_indices_backward(x[None], x[None], [1, 1], [1, 1], [0, 0], [1, 1], False, far)",
    "torch.ops.aten._segment_reduce_backward(x, x, x, 'sum', lengths=far)", "torch.ops.aten._unsafe_index(x, [far])",
    "torch.ops.aten._reshape_alias_copy(x, [4], [1 << 20])", "torch.empty_permuted((4, 4), (0, 1))",
    "torch.ops.aten.embedding_renorm_(x, far, 1.0, 2.0)", "torch.ops.aten.resize(x, [1 << 20])"]


class Steps(prices.Mode):
    """Notes the steps that a candidate's process would record, and runs none of them that may not be called."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        def layout(tensor):
            return [0, str(tensor.dtype), list(tensor.shape), list(tensor.stride()), 0]

        step = ["operator", f"{prices.operator_name(func)}.{func._overloadname}",
                *(recorder.write_value(value, layout) for value in (args, kwargs or {})), []]
        reason = prices.refusal(step, set())
        if reason is not None:
            raise PermissionError(reason)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("call", UNKNOWN)
def test_an_operator_whose_work_is_not_known_is_refused(call):
    far = torch.zeros(1, 256, 512).long()
    names = {"torch": torch, "x": torch.randn(256, 512), "w": torch.randn(512, 512), "far": far}
    with torch.no_grad(), Steps(), pytest.raises(PermissionError, match="has no modelled price"):
        eval(call, names)


@pytest.mark.skipif(not hasattr(torch.ops.aten, "_foreach_mm"), reason="PyTorch has it since 2.13")
def test_the_refusal_comes_before_the_replay_and_names_the_operator(box):
    product = "torch.ops.aten._foreach_mm([x], [self.weights])[0]"
    code = forward(f"return fused({product}, torch.zeros(512))", WEIGHTS)
    fails_here(box, code, MATRICES, says="aten._foreach_mm has no modelled price")
    same = MATRICES.replace("x @ self.weights", product)
    passes(box, victim(same), code)

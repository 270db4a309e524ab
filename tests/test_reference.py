"""The reference: which inputs trials have, how closely outputs must agree, and which tasks can be used."""

import math
import pickle

import pytest
import torch

from candidates import agrees, copied, replaced, small_task
from judge.trials import Bound, compare, named, sharing
from judge.reference import Reference
from tasks import Task, TaskError


@pytest.fixture
def load(tmp_path):
    """load(task, secret, facts): a Reference."""
    settings = {"device": "cpu", "clock": "modelled", "tolerance": 1e-4, "trials": 5, "scratch": str(tmp_path)}
    return lambda task, secret=b"0", facts=None: Reference(task.source, settings, secret, facts)


def given(inputs, body="return x * 2") -> Task:
    return small_task("given", body, inputs=inputs)


def is_right(reference, function, trials=range(5), text="text") -> list:
    """In which trials does a function of the inputs give what the reference gives?"""
    right = []
    for trial in trials:
        inputs = reference.inputs(text, trial)
        reference.load(trial > 0)
        expected = reference.run(inputs, 1)
        got = expected._replace(leaves=named([function(*[x.clone() for x in inputs])]))
        right.append(reference.mistake(trial, trial > 0, inputs, {}, expected, got) is None)
    return right


# ---------------------------------------------------------------------------------------------------------------------
# Inputs


def test_inputs_are_new_for_each_text_trial_task_and_secret(load):
    task, other = given("torch.randn(64, 64)"), given("torch.randn(64, 64)", "return x * 3")
    first = load(task)
    again = first.inputs("text", 2)[0]
    assert torch.equal(again, first.inputs("text", 2)[0]) and torch.equal(again, load(task).inputs("text", 2)[0])
    others = [first.inputs("other", 2), first.inputs("text", 3), load(other).inputs("text", 2),
              load(task, b"1").inputs("text", 2)]
    assert not any(torch.equal(again, x) for x, in others)
    seeds = {first.blueprint()["seed"], *(first.derive("text", trial) for trial in range(5))}
    assert len(seeds) == 6  # what a recorder is told is the seed of no trial


DOMAINS = {  # what get_inputs draws: what stays true of it in every trial
    "torch.randint(0, 9, (64, 64))": lambda x: x.dtype == torch.int64 and 0 <= x.min() and x.max() < 9,
    "torch.rand(64, 64) > 0.5": lambda x: x.dtype == torch.bool,
    "(torch.rand(64, 64) > 0.5).float()": lambda x: bool(((x == 0) | (x == 1)).all()),
    "torch.randn(64, 64).softmax(-1)": lambda x: x.min() >= 0 and (x.sum(-1) - 1).abs().max() < 1e-3,
    "torch.rand(64, 64)": lambda x: 0 <= x.min() and x.max() <= 1,
    "torch.rand(64, 64) * 9 + 0.1": lambda x: x.min() > 0,
    "torch.randn(64, 64).tril()": lambda x: torch.equal(x, x.tril()),
    "torch.randn(64, 64).to(torch.float8_e4m3fn)": lambda x: x.dtype == torch.float8_e4m3fn,
    "torch.randn(64, 64).relu()": lambda x: x.min() >= 0 and 0.3 < (x == 0).float().mean() < 0.7,
    "-torch.rand(64, 64)": lambda x: x.max() <= 0,
    "torch.randint(-5, 5, (64, 64)).float()": lambda x: torch.equal(x, x.round()),
    "(lambda x: x + x.mT)(torch.randn(64, 64))": lambda x: torch.equal(x, x.mT),
}


@pytest.mark.parametrize("inputs", DOMAINS)
def test_a_structured_trial_keeps_the_tasks_domain(load, inputs):
    reference = load(given(inputs, "return x.float()"))
    assert not reference.notes
    for trial in range(6):
        (x,) = reference.inputs("text", trial)
        assert DOMAINS[inputs](x), (trial, x)


def test_trials_have_structure(load):
    """Each of these kinds of rows occurs."""
    reference, seen = load(given("torch.randn(256, 64)", "return x + 0")), set()
    for text in map(str, range(4)):
        (x,) = reference.inputs(text, 1)
        order, large = x.diff(dim=1), x.abs() > 20
        shifts = large[:, 1:] ^ large[:, :-1]
        rows = {"ascending": (order > 0).all(1), "descending": (order < 0).all(1), "one spike": large.sum(1) == 1,
                "side by side": (large.sum(1) > 1) & (shifts.sum(1) <= 2) & ~large.all(1), "high": (x > 20).all(1),
                "low": (x < -20).all(1), "equal values": (order == 0).sum(1) > 8, "zero": (x == 0).all(1),
                "constant": (order == 0).all(1) & (x != 0).all(1), "tiny": (x.abs() < 1e-3).all(1) & (x != 0).all(1),
                "negative": (x < 0).all(1), "sparse": (0 < (x != 0).sum(1)) & ((x != 0).sum(1) < 16),
                "whole": (x == x.round()).all(1) & (order != 0).any(1)}
        seen.update(name for name, found in rows.items() if found.any())
    assert seen == rows.keys()


def test_what_the_reference_cannot_take_is_dropped_and_said(load):
    """No rows of zeros where the reference divides by them; no other parameters where it takes their root."""
    ratio = load(given("torch.randn(64, 64)", "return x / x.norm(dim=1, keepdim=True)"))
    assert "zero" in ratio.notes[0] and "constant" not in ratio.notes[0]
    assert all(ratio.inputs("text", trial)[0].any(1).all() for trial in range(1, 9))
    state = "self.size = torch.nn.Parameter(torch.rand(64) + 1)"
    root = load(small_task("root", "return x * self.size.sqrt()", state=state))
    assert not root.notes and (root.state(True)["size"] > 0).all()  # its signs are kept
    state = "self.gate = torch.nn.Parameter(torch.zeros(1))"
    fixed = load(small_task("fixed", "return x / (self.gate == 0)", state=state))
    assert fixed.state(True) is fixed.state(False) and "not perturbed" in fixed.notes[0]


def test_what_was_measured_is_not_measured_again(load, monkeypatch):
    state = "self.size = torch.nn.Parameter(torch.randn(64))"
    for body in "return x * self.size", "return x / x.norm(dim=1, keepdim=True)", "return x / (self.size < 9)":
        task = small_task("again", body, state=state)
        first = load(task)
        with monkeypatch.context() as patch:
            patch.setattr(Reference, "measure", None)
            second = load(task, facts=pickle.loads(pickle.dumps(first.facts())))
        assert second.notes == first.notes and second.bounds(1, True) == first.bounds(1, True)
        assert torch.equal(second.state(True)["size"], first.state(True)["size"])
        assert all(torch.equal(second.inputs("x", trial)[0], first.inputs("x", trial)[0]) for trial in range(5))


# ---------------------------------------------------------------------------------------------------------------------
# Tolerance


@pytest.mark.parametrize("dtype, right, wrong", [
    (torch.float32, 2e-5, 1e-3), (torch.float16, 2e-3, 1e-2), (torch.bfloat16, 1.5e-2, 8e-2),
    (torch.float64, 1e-11, 1e-8), (torch.complex64, 2e-5, 1e-3)])
def test_the_tolerance_is_relative_and_a_few_units_of_the_last_place(load, dtype, right, wrong):
    for scale in 1.0, 1000.0:
        reference = load(given(f"(torch.rand(1000) + 0.5).to({dtype}) * {scale}", "return x + 0"))
        for error in right, wrong:
            assert all(is_right(reference, lambda x: x + (x.abs() * error).to(dtype))) == (error == right)


def recurrence(x):
    h = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        h = torch.sigmoid(x[:, t]) * h + x[:, t] * 0.1
    return h


def mean_of_blocks(x):
    return torch.nn.functional.group_norm(x, 4).view(8, 32, 32).sum(1).sum(1) / 1024


def variance_in_one_pass(x):
    mean = x.mean((2, 3), keepdim=True)
    return (x - mean) / ((x * x).mean((2, 3), keepdim=True) - mean * mean + 1e-5).sqrt()


def largest(x):
    return x.abs().amax(1, keepdim=True)


def attention(x):
    """What a kernel computes that keeps scores in single precision, and their exponentials in half."""
    scores = x.float() @ x.float().mT * (32 ** -0.5 * 1.44269504)
    scores = torch.where(torch.ones(64, 64).tril() > 0, scores, -1.0e6)
    p = torch.exp2(scores - scores.amax(-1, keepdim=True))
    return ((p.half().float() @ x.float()) / p.sum(-1, keepdim=True)).half()


SQUARE, NOISE = "torch.randn(64, 64)", "return torch.nn.functional.group_norm(x, 4).mean((1, 2, 3))"
TWINS = {  # name: (inputs, reference, a right function, a wrong one that is right for some inputs, or off by 5 %)
    "two neighbours never win both": (
        "torch.randn(4, 1024)", "return x.topk(2, 1).values", lambda x: x.sort(1, descending=True).values[:, :2],
        lambda x: x.view(4, -1, 2).amax(2).topk(2, 1).values),
    "only a recurrence's last steps": (
        "torch.randn(8, 64, 16)", "from test_reference import recurrence\nreturn recurrence(x)", recurrence,
        lambda x: recurrence(x[:, -24:])),
    "half of a mean's elements": (
        "torch.rand(1 << 18)", "return x.mean()", lambda x: x.view(1024, -1).mean(1).mean(), lambda x: x[::2].mean()),
    "small outputs": (f"{SQUARE} * 1e-4", "return x + 0", lambda x: x * (1 + 1e-5), torch.zeros_like),
    "small outputs beside large ones": (f"{SQUARE} * 3", "return x.exp()", lambda x: x.double().exp().float(),
                                        lambda x: torch.where(x < 0, 0.0, x.exp())),
    # No more accuracy is asked than the reference has
    "sums of 4,096 products in another order": (
        "torch.randn(16, 4096).half()", "return x @ x.mT", lambda x: (x.float() @ x.mT.float()).half(),
        lambda x: x @ x.mT * 1.05),
    "a product of half precision inside": (
        SQUARE, "return (x.half() @ x.half().mT).float()", lambda x: x.half().float() @ x.half().float().mT,
        lambda x: x @ x.mT * 1.05),
    "bfloat16 inside": (SQUARE, "return torch.nn.functional.silu(x.bfloat16() * 2).float()",
                        lambda x: torch.nn.functional.silu(x * 2), lambda x: torch.nn.functional.silu(x * 2) * 1.05),
    "a sum of half precision inside": (
        SQUARE, "return x.to(torch.float16).sum(1, dtype=torch.float16).float()", lambda x: x.sum(1),
        lambda x: x.sum(1) * 1.05),
    "half precision inside of attention": (
        "torch.randn(1, 2, 64, 32).half()",
        "return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)", attention,
        lambda x: attention(x) * 1.05),
    "one step of half precision in place of two": (
        f"{SQUARE}.half()", "return torch.nn.functional.silu(x * 2) * x",
        lambda x: (torch.nn.functional.silu(x.float() * 2) * x.float()).half(),
        lambda x: torch.nn.functional.silu(x * 2) * x * 1.05),
    "a variance in one pass": ("torch.randn(4, 8, 32, 32)", "return torch.nn.functional.instance_norm(x)",
                               variance_in_one_pass, lambda x: variance_in_one_pass(x) * 1.05),
    "rounding noise": ("torch.randn(8, 16, 8, 8)", NOISE, mean_of_blocks, lambda x: torch.full((8,), 1e-3)),
    "rounding": (SQUARE, "return torch.round(x / x.abs().amax(1, keepdim=True) * 127)",
                 lambda x: torch.round(x * (127 / largest(x))), lambda x: torch.round(x * (120 / largest(x)))),
    "ambiguous indices": (SQUARE, "return x.softmax(1).argmax(1)",
                          lambda x: (x - x.amax(1, keepdim=True)).exp().argmax(1), lambda x: x.argmin(1)),
    "no twin of the same shape in float64": (
        SQUARE, "return (x.view(torch.int32) & 0x7FFFFFFF).view(torch.float32)", torch.abs, lambda x: x),
}


@pytest.mark.parametrize("name", TWINS)
def test_an_honest_result_is_right_and_a_cheaper_one_is_wrong_with_any_secret(load, name):
    inputs, body, right, wrong = TWINS[name]
    for secret in range(4):
        reference = load(given(inputs, body), bytes([secret]))
        assert all(is_right(reference, right)) and not all(is_right(reference, wrong)), secret


def test_where_the_output_is_noise_for_these_inputs_alone_the_bound_follows(load):
    """A sum that telescopes: for three of these, the first and the last value of each row are tiny."""
    body = "x = x.diff(dim=1)\nreturn torch.cat([x, x], 1).mean(1)"
    for secret in range(6):
        reference = load(given("torch.randn(32, 640)", body), bytes([secret]))
        for text in map(str, range(6)):
            assert all(is_right(reference, lambda x: (x[:, -1] - x[:, 0]) / 639, text=text))
        assert not all(is_right(reference, lambda x: (x[:, -1] - x[:, 1]) / 639))


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("x, y, says", [
    ([1.0] * 9, [1.0] * 8, "shape [8] instead of [9]"),
    ([1.0], [1], "torch.int64 on cpu instead of torch.float32 on cpu"),
    ([1.0] * 1000, [1.0] * 7 + [2.0] + [1.0] * 992, "1% of output [1000], worst at [7]: expected 1, got 2"),
    ([NAN, INF, -INF], [NAN, INF, -INF], None), ([INF], [-INF], "100%"), ([-INF], [-1e30], "100%"),
    ([NAN], [1.0], "100%"), ([1.0], [NAN], "100%"), ([1.0], [INF], "100%"), ([3], [3], None), ([], [], None),
    ([1 << 40], [(1 << 40) + 1], "100%"), ([True], [False], "100%"), ([1 + 1j], [1 - 1j], "100%")])
def test_compare_says_what_is_wrong_where_and_by_how_much(x, y, says):
    """Values that are not finite, or no fractions, must be equal."""
    found = compare(named([torch.tensor(x)]), named([torch.tensor(y)]), [Bound(0.0)])
    assert found is says is None or says in found


def test_outputs_must_have_bytes_of_their_own():
    x = torch.zeros(8, 8)
    views = x[:4], x.view(torch.int32)[2:], torch.zeros(8).expand(8, 8), x[:0], torch.zeros(4), x[7:]
    assert sharing(views, []) == [1, 2, 5] and sharing([torch.zeros(4), x.mT], [x]) == [1]
    assert sharing([x[:, :4], x[:, 4:]], []) == [1]  # columns of one matrix


# ---------------------------------------------------------------------------------------------------------------------
# Parameters and buffers


def test_parameters_are_moved_and_buffers_stay_but_for_running_statistics(load):
    state = ("self.norm, self.fc = torch.nn.BatchNorm1d(8).eval(), torch.nn.Linear(8, 8); "
             "torch.nn.init.zeros_(self.fc.bias); self.register_buffer('table', torch.rand(8))")
    reference = load(small_task("layers", "return self.fc(self.norm(x)) * self.table", inputs="torch.randn(16, 8)",
                                state=state))
    plain, moved = reference.state(False), reference.state(True)
    assert torch.equal(plain["table"], moved["table"]) and (moved["norm.running_var"] > 0.5).all()
    for name in "norm.weight", "norm.bias", "norm.running_mean", "fc.weight", "fc.bias":
        assert (plain[name] != moved[name]).float().mean() > 0.99, name


# ---------------------------------------------------------------------------------------------------------------------
# Tasks

X = "torch.randn(8, 8)"
COMPLEX = "torch.randn(8, 32, dtype=torch.complex64)"
USABLE = {  # name: (arguments, inputs, body); the reference itself is right as a candidate
    "the changed input is the output": ("x", X, "return x.add_(1)"),
    "complex in, complex out": ("x, y", f"{COMPLEX}, torch.polar(torch.ones(32), torch.rand(32))", "return x * y"),
    "bool in, bool out": ("m, x", f"torch.rand(8, 8) > 0.5, {X}", "return torch.logical_xor(m, x < 0)"),
    "NaN": ("x", X, "return torch.log(x) * 2"),
    "on the GPU": ("x", "torch.randn(8, 8, device='cuda')", "return x.cuda() * 2"),
    "a named tuple": ("x", X, "return torch.max(x, 1)"),
    "what PyTorch decomposes without values": (
        "x", "torch.randn(2, 3, 8, 8)", "return torch.nn.functional.interpolate(x, scale_factor=2, mode='bilinear')"),
    "a buffer on a CPU only": ("x", X, "return torch.nn.functional.logsigmoid(x)"),
    # PyTorch conjugates and negates lazily
    "torch.conj": ("x", "torch.rand(16, 16)", "f = torch.fft.fft2(x)\nreturn (torch.conj(f) * f).real"),
    "adjoint": ("x", COMPLEX, "return x.mH @ x"), "ihfft": ("x", X, "return torch.fft.ihfft(x)"),
    "conj of the imaginary part": ("x", COMPLEX, "return x.conj().imag.clone()"),
    "an output that is conjugated": ("x", COMPLEX, "return (x * 2).conj()"),
    "views that share memory": ("x", X, "y = x.clone()\ny[1:].view(-1)[3:].mul_(3)\nreturn y.t()"),
}


@pytest.mark.parametrize("name", USABLE)
def test_the_reference_itself_is_right(box, name):
    arguments, inputs, body = USABLE[name]
    task = small_task(name, body, arguments, inputs)
    agrees(box, task, copied(task))


def test_constructor_arguments_may_be_a_list_and_a_dict(box):
    """As in KernelBook: [args, kwargs]."""
    task = small_task("book", "return x * self.c", state="self.c = a * b")
    for init in "[[3], {'b': 2}]", "[3, 2]":
        source = replaced(task.source, ("__init__(self)", "__init__(self, a, b=1)"), ("return []", f"return {init}"))
        agrees(box, Task("book", 0, source), copied(Task("book", 0, source)))


def test_a_task_that_is_random_by_itself_is_said_to_be_unusable(load):
    with pytest.raises(TaskError, match="output is random"):
        load(small_task("random", "return self.drop(x) * 2", state="self.drop = torch.nn.Dropout(0.1)"))

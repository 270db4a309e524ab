"""The order of judgement, and the measured clock's parts: recording without values, replaying, reading times.

Where there is no GPU a kernel's launch is a Python function here: LAUNCHES.
"""

import math
from types import SimpleNamespace

import pytest
import torch

from candidates import HONEST, copied, replaced, times, verdict
from conftest import read_lines
from judge import measured, recorder, replayer, scorer
from judge.correctness import Trial, as_bytes, identical
from judge.judgement import has_extension, judge
from judge.measured import Measured, Timing
from judge.messages import Gone
from judge.verdict import EXTENSION, Failed
from sandbox import Sandbox
from program.files import ROOT
from tasks import Task

# ---------------------------------------------------------------------------------------------------------------------
# The order of judgement


class Scripted:
    """A back end whose candidate gives `factor` times the expected output, and launches the kernels `own`.

    fails: {name of a method: exception}; needs: the kernels without which the output is another one.
    """

    longest = math.inf

    def __init__(self, factor=1.0, own=("k",), needs=("k",), changes=(), fails=None):
        self.factor, self.own, self.needs, self.changes, self.fails = factor, own, needs, changes, fails or {}
        self.calls = []

    def note(self, name):
        self.calls.append(name)
        if name in self.fails:
            raise self.fails[name]

    def start(self, code, timeout):
        self.note("start")
        return True

    def run(self, trial, mute=()):
        self.note("run")
        return [trial.expected[0] * (2.0 if set(mute) & set(self.needs) else self.factor)], list(self.changes)

    def profile(self, trial):
        self.note("profile")
        return [[1.0, "mm", False], *([1.0, name, True] for name in self.own)]

    def time(self, verdict):
        self.note("time")
        verdict.reference_ms, verdict.candidate_ms, verdict.speedup, verdict.speedup_low = 2.0, 1.0, 2.0, 1.9

    def close(self):
        self.calls.append("close")


CHECKED = ["start", "run", "run"]
PROFILED = [*CHECKED, "profile"]


@pytest.mark.parametrize("back_end, calls, expected", [
    (Scripted(), [*PROFILED, "run", "time"], {"correct": True, "speedup": 2.0, "coverage": 0.5}),
    (Scripted(fails={"start": Failed({"failed": "compile", "error": "no", "line": 1})}), ["start"],
     {"compiled": False, "error": "no"}),
    (Scripted(fails={"start": Failed({"failed": "build", "error": "no"})}), ["start"],
     {"compiled": True, "error": "no"}),
    (Scripted(fails={"run": TimeoutError()}), ["start", "run"], {"compiled": True, "error": "no result within 7 s"}),
    (Scripted(fails={"run": Gone()}), ["start", "run"], {"error": "ended without a result"}),
    (Scripted(changes=[0]), ["start", "run"], {"compiled": True, "rejected": "changes its input tensors in place"}),
    (Scripted(2.0), ["start", "run"], {"error": "wrong values"}),
    (Scripted(own=()), PROFILED, {"rejected": "launches no kernel of its own"}),
    (Scripted(needs=()), [*PROFILED, "run"], {"rejected": "do not reach the output", "coverage": 0.0}),
    (Scripted(own=("k", "decoy")), [*PROFILED, "run", "run", "run", "time"],
     {"correct": True, "speedup": 2.0, "coverage": 1 / 3}),
    (Scripted(own=(EXTENSION,), needs=()), [*PROFILED, "time"], {"correct": True, "coverage": 0.5, "speedup": 2.0}),
])
def test_the_first_step_that_fails_decides(back_end, calls, expected):
    trial = Trial([], 0, [torch.ones(3)], [(1.0, 0.0, 0.0)], [])
    reference = SimpleNamespace(trial=lambda index: trial, tolerance=1e-4)
    settings = {"timeout": 7, "trials": 2, "require_kernel": True, "clock": "measured"}
    verdict = judge(back_end, reference, "class ModelNew: pass", settings)
    assert back_end.calls == [*calls, "close"] and verdict.clock == "measured"
    expected = {"correct": False, "speedup": None, "speedup_low": 1.9 if "speedup" in expected else None} | expected
    for name, value in expected.items():
        found = getattr(verdict, name)
        assert value in found if isinstance(value, str) else found == pytest.approx(value), (name, verdict)


def test_what_is_refused_is_not_started():
    back_end = Scripted()
    verdict = judge(back_end, None, "import ctypes\nclass ModelNew: pass", {"timeout": 7, "clock": "modelled"})
    assert verdict.rejected == "imports ctypes" and verdict.clock == "modelled" and not back_end.calls


# ---------------------------------------------------------------------------------------------------------------------
# Recording on tensors without values, and replaying

HEAD = HONEST[:HONEST.index("class ModelNew")]
MODEL = """
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.table = torch.arange(4.0)
        self.calls, self.buffer = 0, None

    def forward(self, x):
        FORWARD
"""


@pytest.fixture
def recording(tmp_path, monkeypatch):
    """recording(forward's lines, code before the class): (program, constants, model, source)."""
    # A recording patches its process for good; afterwards the test's is as before.
    for owner, names in ((recorder.jit.JITFunction, ["run"]), (recorder.autotuner.Autotuner, ["run"]),
                         (torch.version, ["cuda"]), (torch.library, ["wrap_triton"]),
                         (torch.cuda, [name for name in vars(torch.cuda) if not name.startswith("_")])):
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(torch.Tensor, "is_cuda", torch.Tensor.is_cuda)
    monkeypatch.setattr(recorder.driver, "set_active", lambda active: None)
    recorder.pretend_gpu(recorder.H200)

    def record(forward, before="", model=MODEL):
        source = HEAD + before + model.replace("FORWARD", forward.replace("\n", "\n        "))
        module = scorer.load_module("candidate", source, tmp_path / "candidate.py")
        torch.manual_seed(0)
        model = module.ModelNew()
        calls = scorer.without_values([[["torch.float32", [3, 4], [4, 1]]]] * recorder.CALLS)
        return *recorder.record(model, calls, "meta"), model, source

    return record


def names_of(program):
    return [step[1].split(".")[0] for step in program["steps"]]


@pytest.mark.parametrize("forward, steps", [
    ("return self.linear(x).relu()", ["addmm", "relu"]),
    ("return self.norm(x)", ["add_", "batch_norm"]),  # a GPU has its own kernels for it
    ("return x + torch.zeros(4, device=x.device)", ["zeros", "add"]),
    ("return x * 2 if self.linear.bias.abs().sum().item() > 0 else x", ["abs", "sum", "mul"]),
    ("bias_silu_scale[(1,)](x, self.linear.bias, x, 2.0, x.numel(), 4, BLOCK=16)\nreturn x", ["bias_silu_scale"]),
])
def test_a_forward_is_recorded_without_values_as_a_gpu_would_do_it(recording, forward, steps):
    program, constants, model, _ = recording(forward)
    assert [name for name in names_of(program) if not name.startswith("empty")] == steps
    for name, (number, *_) in program["state"].items():  # parameters have values
        if number in constants and name != "norm.num_batches_tracked":  # which has been counted up since
            assert identical(constants[number], as_bytes(model.state_dict()[name]))


@pytest.mark.parametrize("forward, says", [
    ("return x if x.sum() > 0 else -x", "reads computed values"),
    ("return x[x > 0]", "values|nonzero"),
    ("return x.cpu()", "to the CPU"),
    ("self.calls += 1\nreturn x * self.calls", "keeps state"),
])
def test_what_depends_on_values_or_on_earlier_calls_is_refused(recording, forward, says):
    with pytest.raises((RuntimeError, NotImplementedError), match=says):
        recording(forward)


LAUNCHES = {"bias_silu_scale": lambda x_ptr, bias_ptr, out_ptr, factor, **_: out_ptr.copy_(
    torch.nn.functional.silu(x_ptr + bias_ptr) * factor)}
LAUNCH = "bias_silu_scale[(1,)](x, self.linear.bias, out, 2.0, x.numel(), 4, BLOCK=16)"


@pytest.fixture
def replay(recording, monkeypatch):
    """replay(the same as recording): a Program, its inputs, and the model."""
    monkeypatch.setattr(replayer.Program, "run_kernel", lambda self, name, grid, arguments, options:
                        LAUNCHES[name](**arguments, **options))

    def make(forward, before="", claimed=()):
        program, constants, model, source = recording(forward, before)
        state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        for name in claimed:
            constants[program["state"][name][0]] = name
        return replayer.Program(source, program, constants, state, torch.device("cpu")), [torch.randn(3, 4)], model

    return make


def run(program, inputs):
    with torch.no_grad():
        return program.forward([x.clone() for x in inputs])


@pytest.mark.parametrize("forward", [
    "return self.linear(x) + self.table", "return self.norm(x), [x[1:], {'a': x.t()}]",
    "y = torch.empty_like(x)\ny.copy_(x)\nreturn y.view(-1)[2:].mul_(3)"])
def test_a_program_gives_what_the_model_gives(replay, forward):
    program, inputs, model = replay(forward, claimed=["linear.weight"] if "linear" in forward else ())
    torch.testing.assert_close(run(program, inputs), recorder.torch.no_grad()(model.forward)(*inputs))


def test_a_kernel_that_is_left_out_leaves_no_result_and_uninitialised_memory_is_poison(replay):
    program, inputs, model = replay("out = torch.empty_like(x)\n" + LAUNCH + "\nreturn out")
    expected = torch.nn.functional.silu(inputs[0] + model.linear.bias.detach()) * 2
    torch.testing.assert_close(run(program, inputs), expected)
    program.mute = {"bias_silu_scale"}
    assert not torch.isclose(run(program, inputs), expected).any() and run(program, inputs).isfinite().all()
    program, inputs, _ = replay("return torch.empty_like(x)")
    assert run(program, inputs).isnan().all()


def test_a_buffer_of_an_earlier_call_is_uninitialised_memory_and_parameters_are_set_back(replay):
    program, inputs, _ = replay("if self.buffer is None: self.buffer = torch.zeros(3, 4, device=x.device)\n"
                                "return self.buffer + x")
    assert run(program, inputs).isnan().all()
    program, inputs, _ = replay("self.table.add_(1)\nself.norm.running_mean.add_(1)\n"
                                "return x * 0 + self.table[0] + self.norm.running_mean")
    first = run(program, inputs)
    program.restore()
    assert torch.equal(run(program, inputs), first + 1)  # of the table, which is no parameter
    program.restore(everything=True)
    assert torch.equal(run(program, inputs), first)


# ---------------------------------------------------------------------------------------------------------------------
# A whole sandbox, whose replayer calls operators on the CPU


def test_candidates_are_judged_each_by_what_it_does():
    task = times(2)
    honest = copied(task)

    def changed(statement):
        return replaced(honest, ("        return", f"        {statement}\n        return"))
    codes = {honest: None, honest.replace("2.0", "2.001"): "wrong values", changed("x.zero_()"): "in place",
             changed("raise ValueError('enough')"): "enough", "def x(": "does not parse",
             honest.replace("def forward", "def backward"): "forward",
             changed("self.n = getattr(self, 'n', 0) + 1\n        x = x * self.n"): "keeps state"}
    with Sandbox("cpu", clock="measured", trials=2, measure=0.001, workers=2, require_kernel=False) as box:
        verdicts = box.score(task, list(codes))
    for found, says in zip(verdicts, codes.values()):
        assert found.clock == "measured" and found.correct == (says is None), found
        assert says is None or says in (found.rejected or found.error), found
    assert verdicts[0].speedup == verdicts[0].reference_ms / verdicts[0].candidate_ms


# ---------------------------------------------------------------------------------------------------------------------
# Reading times


def batches(reference, candidate, clearing=0.0, measure=0.0, spent=0.002) -> Timing:
    """Timing after as many batches as are enough. reference, candidate: seconds of a batch, by its number."""
    timing = Timing(patience=0.01)
    while not timing.enough(measure):
        number = len(timing.contended)
        timing.add(reference(number), candidate(number), clearing, spent)
    return timing


@pytest.mark.parametrize("slow, least, most, disturbed", [
    (lambda batch: False, 15, 16, False),
    (lambda batch: batch in (1, 2, 4), 15, 40, False),
    (lambda batch: batch % 2, 50, 61, True),
])
def test_what_is_disturbed_is_timed_for_longer(slow, least, most, disturbed):
    """slow(batch): is the candidate slowed down in this batch?"""
    timing = batches(lambda batch: 1e-4, lambda batch: 1e-4 if slow(batch) else 5e-5, measure=0.03)
    assert least <= len(timing.contended) <= most and timing.disturbed() == disturbed
    reference, candidate, low = timing.summary()
    assert reference == pytest.approx(0.1) and candidate == pytest.approx(0.05) and low <= reference / candidate


@pytest.mark.parametrize("kind, error, elements, wrong", [
    ("Candidate", 1e-3, 1000, True), ("Candidate", 1e-3, 9, False), ("Candidate", 0.1, 1, True),
    ("Candidate", 1e-5, 1000, False), ("Extension", 1e-3, 1, True)])
def test_of_a_timed_call_few_elements_may_be_less_exact(kind, error, elements, wrong):
    candidate = getattr(measured, kind).__new__(getattr(measured, kind))
    candidate.reference = SimpleNamespace(run=lambda trial: ([torch.ones(1000)], []), tolerance=1e-4)
    candidate.task = SimpleNamespace(first=SimpleNamespace(allowed=[(1.0, 0.0, 0.0)]))
    found = torch.ones(1000)
    found[:elements] += error
    assert candidate.are_wrong([(Trial([], 0), [found])]) == wrong


def test_inputs_that_a_task_does_not_draw_are_scaled_in_timed_calls():
    reference = SimpleNamespace(draw=lambda *purpose: [torch.ones(2), torch.ones(2), 3, torch.arange(2)])
    task = SimpleNamespace(reference=reference, constant=[True, False, False, True])
    (a, *rest), (b, *_) = Measured.new_inputs(task, 1, 0), Measured.new_inputs(task, 1, 1)
    assert not a.equal(b) and 0.8 <= float(a.min()) <= float(a.max()) <= 1
    assert rest[0].equal(torch.ones(2)) and rest[1] == 3 and rest[2].equal(torch.arange(2))


MEASURED = {case["name"]: case for case in read_lines(ROOT / "results/adversaries/measured.jsonl")}


@pytest.mark.parametrize("name, says", [
    ("extension_name", "do not reach the output"), ("extension_name, another name", "do not reach the output"),
    ("pdl_overlap", "no argument or launch option launch_pdl"), ("ptx_options", "launch option ptx_options"),
    ("serve_batch_honest", ""), ("spoil_one_honest", "")])
def test_programs_that_cheat_the_measured_clock_without_a_gpu(name, says, box):
    case = MEASURED[name]
    found = verdict(box, Task(name, 0, case["task"]), case["code"])
    assert found.correct == (not says) and says in (found.rejected or found.error or ""), found


def test_only_a_call_makes_an_extension():
    assert has_extension("import torch\nx = torch.utils.cpp_extension.load_inline(name='x')")
    assert not has_extension("# load_inline\nx = 'load_inline()'") and not has_extension("def (")

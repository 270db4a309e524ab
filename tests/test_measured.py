"""The order of judgement, and the measured clock's parts: recording without values, replaying, reading times.

Where there is no GPU a kernel's launch is a Python function here: LAUNCHES.
"""

import contextlib
import math
import random
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import pytest
import torch

from candidates import HONEST, copied, replaced, small_task, times, verdict
from conftest import read_lines
from judge import correctness, measured, recorder, replayer, scorer
from judge.correctness import Reference, Trial, digest
from judge.judgement import has_extension, judge
from judge.measured import Measured, Timing
from judge.messages import Gone
from judge.verdict import EXTENSION, Failed, describe
from sandbox import Sandbox, Verdict
from tasks import ROOT, Task

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

    def close(self, verdict):
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
    (Scripted(fails={"time": OSError()}), [*PROFILED, "run", "time"], {"error": "ended without a result"}),
    (Scripted(fails={"run": KeyError()}), ["start", "run"], {"error": "makes no sense"}),
    (Scripted(changes=[0]), ["start", "run"], {"compiled": True, "rejected": "changes its input tensors in place"}),
    (Scripted(2.0), ["start", "run"], {"correct_loose": False, "error": "wrong values"}),
    (Scripted(1.001), [*PROFILED, "run", "time"],
     {"correct_loose": True, "error": "wrong values", "reference_ms": 2.0, "candidate_ms": 1.0}),
    (Scripted(own=()), PROFILED, {"rejected": "launches no kernel of its own"}),
    (Scripted(needs=()), [*PROFILED, "run"], {"rejected": "do not reach the output", "coverage": 0.0}),
    (Scripted(own=("k", "decoy")), [*PROFILED, "run", "run", "run", "time"],
     {"correct": True, "speedup": 2.0, "coverage": 1 / 3}),
    (Scripted(own=(EXTENSION,), needs=()), [*PROFILED, "time"], {"correct": True, "coverage": 0.5, "speedup": 2.0}),
])
def test_the_first_step_that_fails_decides(back_end, calls, expected):
    trial = Trial([], 0, [torch.ones(3)], [(1.0, 0.0, 0.0)], [])
    reference = SimpleNamespace(trial=lambda index: trial)
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
        calls = scorer.without_values([[["torch.float32", [3, 4], [4, 1]]]] * 4)
        return *recorder.record(model, calls, "meta"), model, source

    return record


def names_of(program):
    return [step[1].split(".")[0] for step in program["steps"]]


@pytest.mark.parametrize("forward, steps", [
    ("return self.linear(x).relu()", ["addmm", "relu"]),
    ("return self.norm(x)", ["add_", "batch_norm"]),  # a GPU has its own kernels for it
    ("return torch.nn.functional.dropout(x, 0.5, True)", ["dropout"]),
    ("return x.reshape(4, 3) @ x", ["mm"]),
    ("return x + torch.zeros(4, device=x.device)", ["zeros", "add"]),
    ("return x * 2 if self.linear.bias.abs().sum().item() > 0 else x", ["abs", "sum", "mul"]),
    ("with torch.cuda.device(x.device):\n    return x * torch.cuda.get_device_properties(0).multi_processor_count",
     ["mul"]),
    ("bias_silu_scale[(1,)](x, self.linear.bias, x, 2.0, x.numel(), 4, BLOCK=16)\nreturn x", ["bias_silu_scale"]),
])
def test_a_forward_is_recorded_without_values_as_a_gpu_would_do_it(recording, forward, steps):
    program, constants, model, _ = recording(forward)
    assert [name for name in names_of(program) if not name.startswith("empty")] == steps
    for name, (number, *_) in program["state"].items():  # parameters have values
        if number in constants and name != "norm.num_batches_tracked":  # which has been counted up since
            assert digest(constants[number]) == digest(model.state_dict()[name])


@pytest.mark.parametrize("x, weight, memory", [  # channels-last if either is, but for depthwise convolutions
    ("x", "w", torch.contiguous_format), ("x.contiguous(memory_format=last)", "w", torch.channels_last),
    ("x", "w.contiguous(memory_format=last)", torch.channels_last),
    ("x.contiguous(memory_format=last)", "w[:, :1], groups=4", torch.contiguous_format)])
def test_a_convolution_is_recorded_as_cudnn_leaves_its_result(recording, x, weight, memory):
    program, *_ = recording("x, last = torch.stack([x] * 4).expand(5, 4, 3, 4).clone(), torch.channels_last\n"
                            f"w = x[:4, :, :2, :2].clone()\nreturn torch.conv2d({x}, {weight})")
    shape, strides = program["steps"][-1][4][0][2:4]
    assert strides == list(torch.empty(shape).contiguous(memory_format=memory).stride())


@pytest.mark.parametrize("forward, says", [
    ("return x if x.sum() > 0 else -x", "reads computed values"),
    ("return x * x.max().item()", "reads computed values"),
    ("return x[x > 0]", "values|nonzero"),
    ("return x.cpu()", "to the CPU"),
    ("self.calls += 1\nreturn x * self.calls", "keeps state"),
    ("self.calls += 1\nreturn x if self.calls > 3 else -x", "keeps state"),
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


def test_of_an_autotuned_kernel_the_quickest_configuration_that_works_is_taken(replay, monkeypatch):
    configs = "[triton.Config({'BLOCK': b}) for b in (8, 16, 32)]"
    tuned = f"tuned = triton.autotune({configs}, key=['n'])(bias_silu_scale)\n"
    launch = LAUNCH.replace("bias_silu_scale", "tuned").replace(", BLOCK=16", "")
    program, inputs, _ = replay("out = torch.empty_like(x)\n" + launch + "\nreturn out", tuned)
    seconds, ran = {16: 3.0, 32: 2.0}, []

    def kernel(BLOCK, **arguments):
        ran.append(BLOCK)
        if BLOCK not in seconds:
            raise RuntimeError("out of resources")

    monkeypatch.setitem(LAUNCHES, "bias_silu_scale", kernel)
    monkeypatch.setattr(replayer.Stopwatch, "stop", lambda self: seconds[ran[-1]])
    assert program.untried
    run(program, inputs)
    assert set(ran) == {8, 16, 32} and ran[-1] == 32
    ran.clear()
    run(program, inputs)
    assert ran == [32]


def test_a_kernel_that_a_gpu_refuses_is_not_known_as_compiled(replay, monkeypatch):
    """Else another candidate could launch what one configuration of an autotuned kernel was refused for."""
    program, *_ = replay("out = torch.empty_like(x)\n" + LAUNCH + "\nreturn out")
    [launch] = [step for step in program.recording["steps"] if recorder.launches_of(step)]
    monkeypatch.setattr(replayer.Program, "compile_launch", Mock(side_effect=RuntimeError("out of resource")))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of resource"):
            program.compile(launch, known=set())
    assert not program.compiled


def test_a_forward_that_replaces_a_buffer_gets_a_verdict_on_the_measured_clock():
    """Its first values are not those that the recorder sees later: it is told so, and nothing breaks."""
    task = small_task("moving", "self.mean = 0.9 * self.mean + 0.1 * x.mean(0)\n        return x - self.mean",
                      state="self.register_buffer('mean', torch.zeros(64))")
    with Sandbox("cpu", clock="measured", trials=1) as box:
        found = verdict(box, task, task.source.replace("class Model", "class ModelNew"))
    assert "its parameters are not the reference's" in found.error


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
             changed("self.n = getattr(self, 'n', 0) + 1"): "keeps state"}
    with Sandbox("cpu", clock="measured", trials=2, measure=0.001, workers=2, require_kernel=False) as box:
        verdicts = box.score(task, list(codes))
    for found, says in zip(verdicts, codes.values()):
        assert found.clock == "measured" and found.correct == (says is None), found
        assert says is None or says in (found.rejected or found.error), found
    assert verdicts[0].speedup == verdicts[0].reference_ms / verdicts[0].candidate_ms
    assert {"start", "check", "time", "wait", "compile"} <= set(verdicts[0].seconds)
    assert verdicts[1].correct_loose and verdicts[1].reference_ms and verdicts[1].speedup is None


def test_of_a_large_task_no_values_are_kept(monkeypatch, tmp_path):
    """Its verdicts are those of a small one."""
    monkeypatch.setattr(correctness, "LARGE", 1)
    monkeypatch.chdir(tmp_path)
    with Sandbox("cpu", clock="measured", trials=3, measure=0.001, workers=1, require_kernel=False) as box:
        job = {"name": "large", "source": times(2).source, "seed": 1, "known": [], "part": 1.0}
        task = Measured(Reference(job, box.settings), box.control, box.settings, MagicMock())
        verdicts = dict(task.judge([copied(times(2)), copied(times(2)).replace("2.0", "2.001")]))
        task.connection.close()
    assert task.large and task.first.inputs[0].is_meta and task.first.expected[0].is_meta
    assert 0 not in task.reference.kept
    assert verdicts[0].correct and verdicts[0].speedup and "wrong values" in verdicts[1].error, verdicts


def test_a_task_is_run_while_it_shares_the_gpu_and_constructed_while_it_does_not(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    inside, found = [], []

    def noting(method):
        def noted(*arguments, **more):
            found.append((method.__name__, len(inside)))
            return method(*arguments, **more)
        return noted

    @contextlib.contextmanager
    def shared():
        inside.append(True)
        yield
        inside.pop()
    for name in ("run", "draw", "construct"):
        monkeypatch.setattr(Reference, name, noting(getattr(Reference, name)))
    source = replaced(times(2).source, ("x * 2.0", "x.mean().sqrt() * x"))
    job = {"name": "task", "source": source, "seed": 1, "known": []}
    Reference(job, {"protocol": "strict", "device": "cpu"}, shared)
    assert set(found) == {("run", 1), ("draw", 1), ("construct", 0)} and not inside


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


@pytest.mark.parametrize("spent, count", [(0.002, 8), (0.06, 5), (0.3, 5)])
def test_five_long_batches_are_enough(spent, count):
    assert len(batches(lambda batch: 1e-2, lambda batch: 5e-3, spent=spent).contended) == count


@pytest.mark.parametrize("count", [1, 2, 3, 10])
def test_some_calls_of_a_batch_are_always_left_out(monkeypatch, count):
    """Where there are several; each call's outputs are checked in some batch."""
    timed, checked = [], set()
    monkeypatch.setattr(measured, "BATCHES", 200)
    task = SimpleNamespace(patience=1.0, graphs=False, calls=list(range(count)), settings={"measure": 0.0}, flops=1,
                           bandwidth=1.0, peak=None, first=SimpleNamespace(changed=[], allowed=None),
                           new_inputs=lambda seed, slot: [torch.ones(1)])
    candidate = measured.Candidate.__new__(measured.Candidate)
    candidate.task, candidate.deadline = task, 0.0
    candidate.acquire, candidate.put, candidate.has_changed = Mock(), Mock(), lambda *_: False
    candidate.order = lambda order, call: checked.add(call)
    candidate.connection, candidate.are_wrong = SimpleNamespace(results=lambda _: [torch.ones(1)]), lambda *_: True

    def batch(seed, calls, graphs):
        timed.append(calls)
        return {"seconds": {"reference": 1e-3, "candidate": 1e-3}, "clearing": 0.0}
    candidate.batch = batch
    verdict = Verdict()
    candidate.time(verdict)
    assert verdict.rejected == measured.OTHERWISE  # what `are_wrong` says decides
    assert {len(calls) for calls in timed} == {max(1, int(0.75 * count))} and checked == set(range(count))


@pytest.mark.parametrize("clearing, disturbed", [(0.005, False), (0.02, True)])
def test_who_needs_long_to_clear_the_cache_is_not_alone(clearing, disturbed):
    assert batches(lambda batch: 1e-4, lambda batch: 5e-5, clearing).disturbed() == disturbed


@pytest.mark.parametrize("change, apart", [
    (lambda x: x * 1.01, False), (lambda x: torch.where(x > x.quantile(0.995), 9.0, x), False),
    (lambda x: torch.where(x > x.quantile(0.9), 9.0, x), True), (lambda x: x.flip(0), True),
    (lambda x: x * 0 + torch.nan, True), (lambda x: (x * 0).int(), False)])
def test_a_call_that_was_left_out_is_far_from_the_reference(change, apart):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e-4
    assert replayer.far_apart(change(x), x) == apart and not replayer.far_apart(x, x * torch.nan)


@pytest.mark.parametrize("kind, error, elements, wrong", [
    ("Candidate", 1e-3, 1000, True), ("Candidate", 1e-3, 9, False), ("Candidate", 0.1, 1, True),
    ("Candidate", 1e-5, 1000, False), ("Extension", 1e-3, 1, True)])
def test_of_a_timed_call_few_elements_may_be_less_exact(kind, error, elements, wrong):
    candidate = getattr(measured, kind).__new__(getattr(measured, kind))
    candidate.reference = SimpleNamespace(run=lambda trial: ([torch.ones(1000)], []))
    candidate.task = SimpleNamespace(first=SimpleNamespace(allowed=[(1.0, 0.0, 0.0)]))
    found = torch.ones(1000)
    found[:elements] += error
    assert candidate.are_wrong([(Trial([], 0), [found])], Verdict(correct=True)) == wrong


@pytest.mark.parametrize("kind", [measured.Candidate, measured.Extension])
def test_a_forward_that_hangs_does_not_take_all_of_a_candidates_time(kind):
    """But for that of an extension, which may compile meanwhile."""
    candidate = kind.__new__(kind)
    candidate.connection, trial = Mock(order=Mock(side_effect=TimeoutError)), Trial([], 0, [], [], [])
    candidate.deadline = measured.time.monotonic() + 60
    with pytest.raises(Failed, match="more than 10 s") if kind is measured.Candidate else pytest.raises(TimeoutError):
        candidate.run(trial)
    assert (candidate.connection.order.call_args.args[1] < candidate.deadline - 49) == (kind is measured.Candidate)
    candidate.tuning = True  # that of an autotuned kernel, too, while it tries configurations
    with pytest.raises(TimeoutError):
        candidate.run(trial)
    candidate.deadline -= 55  # nearer than that
    with pytest.raises(TimeoutError):
        candidate.run(trial)


def test_an_extensions_calls_are_never_quicker_than_they_are(monkeypatch):
    """Orders take one millisecond, and now and then another; two calls take half of one."""
    now, rng = [0.0], random.Random(0)

    def order(name, deadline, side, calls, graphs, cold=False):
        now[0] += 0.001 + 0.00025 * len(calls) + rng.choice([0.0, 0.0, 0.001]) + cold
    monkeypatch.setattr(measured.time, "perf_counter", lambda: now[0])
    extension = measured.Extension.__new__(measured.Extension)
    extension.deadline, extension.least = 0.0, {}
    found = [extension.from_outside(SimpleNamespace(order=order), "candidate", [0, 1], False) for _ in range(100)]
    assert min(found) == pytest.approx(0.0005) and max(found) == pytest.approx(0.0015)


def test_inputs_that_a_task_does_not_draw_are_scaled_in_timed_calls():
    reference = SimpleNamespace(draw=lambda *purpose: [torch.ones(2), torch.ones(2), 3, torch.arange(2)], strict=True)
    task = SimpleNamespace(reference=reference, constant=[True, False, False, True])
    (a, *rest), (b, *_) = Measured.new_inputs(task, 1, 0), Measured.new_inputs(task, 1, 1)
    assert not a.equal(b) and 0.8 <= float(a.min()) <= float(a.max()) <= 1
    assert rest[0].equal(torch.ones(2)) and rest[1] == 3 and rest[2].equal(torch.arange(2))


MEASURED = {case["name"]: case for case in read_lines(ROOT / "results/adversaries/measured.jsonl")}


@pytest.mark.parametrize("name, says", [
    ("extension_name", "do not reach the output"), ("extension_name, another name", "do not reach the output"),
    ("pdl_overlap", "no argument or launch option launch_pdl"), ("ptx_options", "launch option ptx_options"),
    ("spoil_one", "touches what another program"), ("skip_quarter", "touches what another program"),
    ("serve_batch", "touches what another program"), ("serve_batch_honest", ""), ("spoil_one_honest", "")])
def test_programs_that_cheat_the_measured_clock_without_a_gpu(name, says, box):
    case = MEASURED[name]
    found = verdict(box, Task(name, 0, case["task"]), case["code"])
    assert found.correct == (not says) and says in (found.rejected or found.error or ""), found


def test_of_a_gpus_error_only_what_happened_is_told():
    told = "CUDA error: an illegal memory access was encountered"
    assert describe(RuntimeError(f"{told}\nSearch for it elsewhere")) == (f"RuntimeError: {told}", None)


def test_only_a_call_makes_an_extension():
    assert has_extension("import torch\nx = torch.utils.cpp_extension.load_inline(name='x')")
    assert not has_extension("# load_inline\nx = 'load_inline()'") and not has_extension("def (")

"""One verdict per candidate whatever it does, and the right one: honest kernels, mistakes, faults, the command line."""

import contextlib
import functools
import glob
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import sandbox as sandbox_module
from candidates import APPLY, HONEST, TASK, WITHOUT_LAYER, all_pass, copied, replaced, small_task, solution, times
from judge import messages, pool
from judge.pool import Pool
from sandbox import Sandbox, feedback
from tasks import PROBLEMS, Task, TaskError

ROOT = Path(__file__).parent.parent
changed = functools.partial(replaced, HONEST)


def soon(condition, seconds=10) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def verdict(box, code, task=TASK):
    return box.score(task, [code])[0]


def test_an_honest_kernel_is_correct_and_faster_for_saving_launches(box):
    v = verdict(box, HONEST)
    assert v.compiled and v.correct and v.rejected is None and v.error is None
    # The reference launches four kernels (addmm, add, silu, mul), the candidate two; each costs at least 2 us.
    assert v.reference_ms > 0.008 and 0.004 < v.candidate_ms < v.reference_ms
    assert v.speedup == pytest.approx(v.reference_ms / v.candidate_ms) and v.speedup_low == v.speedup
    assert {(entry.name, entry.own) for entry in v.profile} == {("bias_silu_scale", True), ("addmm", False)}
    own = next(entry.share for entry in v.profile if entry.own)
    assert v.coverage == pytest.approx(own) and sum(entry.share for entry in v.profile) == pytest.approx(1)
    assert all(text in feedback(v) for text in ("modelled", "bias_silu_scale (yours)", "of the memory bandwidth"))
    assert 0 < v.bandwidth < 1 and 0 < v.arithmetic < 1 and len(feedback(v).split()) <= 80


def test_parameters_are_not_bytes_that_a_kernel_saves(box):
    """On a GPU the batch is 256 times larger and the parameters are not; the share of the bandwidth is one of that."""
    task = Task("one row", 0, replaced(TASK.source, *WITHOUT_LAYER, ("[32, 2.5]", "[65536, 2.5]"),
                                       ("torch.randn(rows, 32)", "torch.randn(1, 65536)")))
    v = verdict(box, changed(*WITHOUT_LAYER), task)
    assert v.correct and 0.8 < v.bandwidth < 1, v


def test_a_seed_makes_verdicts_reproducible_and_candidates_of_a_task_are_judged_at_the_same_time(box):
    slow = changed(("import triton\n", "import triton, time\nbegan = time.time()\ntime.sleep(2)\n"
                    "raise ValueError(f'{began} {time.time()}')\n"))
    with Sandbox("cpu", trials=2, seed=0, workers=3) as other:
        assert verdict(other, HONEST) == verdict(box, HONEST)
        other.score(TASK, [f"{HONEST}# {i}\n" for i in range(3)])  # so that there are three scorers
        errors = [v.error for v in other.score(TASK, [f"{slow}# {i}\n" for i in range(3)])]
        first, second, _ = sorted([float(number) for number in re.findall(r"\d+\.\d+", error)] for error in errors)
        assert second[0] < first[1], errors


@pytest.mark.parametrize("old, new, compiled, says", [
    ("x * tl.sigmoid(x) * factor", "x * tl.sigmoid(x)", True, "wrong values"),
    ("x = self.linear(x)", "x = self.liner(x)", True, "liner"),
    ("return out", "return out[:, 1:]", True, "shape [64, 31] instead of [64, 32]"),
    ("return out", "return out.half()", True, "dtype"),
    ("return out", "return None", True, "instead of tensor"),
    ("tl.load(x_ptr + offsets, mask=mask)", "tl.load(x_ptr + offsets + 1, mask=mask)", True, "out-of-bounds"),
    ("tl.sigmoid(x)", "tl.sigmoyd(x)", False, "tl.sigmoyd"),
    ("x * tl.sigmoid(x)", "x * tl.dot(x, x)", False, "compil"),
    ("BLOCK=1024", "BLOCK=1000", False, "power of 2"),
    ("(self, x):", "(self, x)", False, "SyntaxError"),
    ("class ModelNew", "class Other", False, "ModelNew"),
    ("import triton\n", "import tritonn\n", False, "tritonn"),
])
def test_mistakes_are_named(box, old, new, compiled, says):
    v = verdict(box, changed((old, new)))
    assert not v.correct and v.speedup is None and v.compiled == compiled and v.rejected is None
    assert says.lower() in v.error.lower() and "\n" not in v.error
    assert len(feedback(v).split()) <= 120 and says.split()[0].lower() in feedback(v).lower()


def test_a_tolerance_is_a_setting():
    code = changed(("x * tl.sigmoid(x) * factor", "x * tl.sigmoid(x) * factor * 1.002"))
    for tolerance, correct in ((1e-4, False), (1e-2, True)):
        with Sandbox("cpu", trials=1, tolerance=tolerance) as sandbox:
            assert verdict(sandbox, code).correct == correct


def test_an_error_shows_the_candidates_lines(box):
    assert "silu_scale[" in verdict(box, changed(("BLOCK=1024)", "BLOCKS=1024)"))).excerpt
    assert "tl.sigmoyd" in verdict(box, changed(("tl.sigmoid", "tl.sigmoyd"))).excerpt


def test_nothing_outlives_a_killed_caller(tmp_path):
    script = tmp_path / "caller.py"
    script.write_text(f"import sys\nsys.path[:0] = {[str(ROOT), str(ROOT / 'tests')]}\nfrom test_sandbox import *\n"
                      "box = Sandbox('cpu', trials=1)\nprint(box.pool.settings['scratch'], flush=True)\n"
                      "box.score(TASK, [changed(('return out', 'while True: pass'))])\n")
    caller = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    scratch = caller.stdout.readline().strip()

    def left():
        return subprocess.run(["pgrep", "-f", scratch], capture_output=True, text=True).stdout.split()

    soon(lambda: len(left()) >= 5)  # until the candidate runs: fork server, scorer, candidate, and two supervisors
    caller.kill()
    caller.wait()
    assert soon(lambda: not left() and not os.path.exists(scratch)), left()


def test_a_caller_that_is_gone_before_the_sandbox_is_up_leaves_nothing(tmp_path):
    scratch = tmp_path / "scratch"
    for heard in (False, True):  # it goes before the fork server is ready, or without reading that it is
        scratch.mkdir()
        caller, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settings = {"device": "cpu", "clock": "modelled", "scratch": str(scratch)}
        server = subprocess.Popen([sys.executable, "-m", "judge.scorer", "--fork-server", str(there.fileno()),
                                   json.dumps(settings)], pass_fds=[there.fileno()], cwd=ROOT)
        there.close()
        if heard:
            assert soon(lambda: select.select([caller], [], [], 0)[0], 60)
        caller.close()
        assert server.wait(60) == 0 and not scratch.exists()


def test_tuples_scalars_integers_and_strided_inputs(box):
    task = small_task("mixed", 'y = x * factor\n        return y, (y[index], {"sum": y.sum(dim=1)})',
                      "x, index, factor", "torch.randn(32, 16).t(), torch.randint(0, 16, (8,)), 3")
    code = solution(replaced(APPLY, ("RESULT", "v * factor"), ("n, BLOCK", "n, factor, BLOCK")), """
assert index.dtype == torch.int64 and not x.is_contiguous()
x, y = x.contiguous(), x.new_empty(x.shape)
apply[(1,)](x, y, x.numel(), factor, BLOCK=512)
return y, (y[index], {"sum": y.sum(dim=1)})""", "x, index, factor")
    v = verdict(box, code, task)
    assert v.correct, v
    assert not verdict(box, replaced(code, ("y.sum(dim=1)", "y.sum(dim=1) + 1")), task).correct


@pytest.mark.parametrize("old, new", [
    ("return torch", "raise ValueError('broken'); return torch"),
    ("return [32, 2.5]", "return [32]"),
    ("return torch", "import os; os._exit(1); return torch"),
    ("* self.factor", "* float('nan') if False else 'text'"),
])
def test_a_failing_reference_is_an_unusable_task(box, old, new):
    with pytest.raises(TaskError):
        box.score(Task("broken", 0, TASK.source.replace(old, new)), [HONEST])


@pytest.fixture
def files(tmp_path, monkeypatch):
    (tmp_path / "task.py").write_text(TASK.source)
    (tmp_path / "good.py").write_text(HONEST)
    (tmp_path / "latin.py").write_bytes(HONEST.encode() + "# é".encode("latin-1"))
    (tmp_path / "empty.py").write_text("import torch")
    monkeypatch.chdir(tmp_path)


def test_command_line(files, capsys):
    arguments = ["task.py", "good.py", "--trials", "1", "--json", "--device", "cpu"]
    answer = json.loads(subprocess.run([sys.executable, str(ROOT / "sandbox.py"), *arguments], capture_output=True,
                                       text=True, check=True).stdout)
    assert list(answer) == ["compiled", "correct", "speedup", "coverage", "clock", "reference_ms", "candidate_ms",
                            "rejected", "error"]
    assert answer["correct"] and answer["clock"] == "modelled" and answer["speedup"] > 1
    assert sandbox_module.main(["task.py", "latin.py", *arguments[4:]]) == 0
    assert "UTF-8" in json.loads(capsys.readouterr().out)["error"]


def test_the_readmes_kernel(capsys):
    problem, kernel = PROBLEMS / "level1/2_SquaredRelu.py", PROBLEMS / "my_kernel.py"
    assert f"{problem.relative_to(ROOT)} {kernel.relative_to(ROOT)}" in (ROOT / "README.md").read_text()
    assert sandbox_module.main([str(problem), str(kernel), "--trials", "1", "--json", "--device", "cpu"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["correct"] and answer["coverage"] == 1 and answer["speedup"] > 2


@pytest.mark.parametrize("arguments, message", [
    (["task.py", "good.py", "--trials", "0"], "trials 0: choose a number above 0"),
    (["task.py", "none.py"], "none.py: cannot read"),
    (["none.py", "good.py"], "none.py"),
    (["empty.py", "good.py"], "get_inputs"),
    pytest.param(["task.py", "good.py", "--device", "cuda"], "no GPU is available here",
                 marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")),
])
def test_bad_command_lines_are_one_line_errors(arguments, message, files, refusal):
    assert message in refusal(sandbox_module.main, *arguments)


# The measured clock runs without a GPU, too, but its times mean nothing there.
on_cpu = functools.partial(Sandbox, "cpu", clock="measured", trials=1, require_kernel=False, measure=0.01, seed=0)
TWICE = Task("twice", 0, times(2).source.replace("import torch", "import os, time, torch"))
TWICE_NEW = copied(TWICE)
OTHER = Task("other", 0, TWICE.source.replace("2.0", "3.0"))


def judge_copies(box, *tasks):
    all_pass(box, [(task, copied(task)) for task in tasks])


@pytest.fixture
def started(monkeypatch):
    """A list that grows by one with every scorer that is started."""
    found = []

    def start(*which):
        found.append(which)
        return messages.Child(*which)

    monkeypatch.setattr(pool, "Child", start)
    return found


FORGED = ("for fd in filter(os.path.exists, map('/proc/self/fd/{}'.format, os.listdir('/proc/self/fd'))):\n"
          "                if 'socket' in os.readlink(fd): os.write(int(fd.split('/')[-1]), b'!' * 40)")
FAULTS = {  # lines of a forward: what the verdict says
    "raise ValueError('enough')": "enough", "raise SystemExit(0)": "SystemExit", "os._exit(0)": "without a result",
    "os.abort()": "without a result", "time.sleep(99)": "no result within 6 s", FORGED: "the process",
    "while True: print('correct ' * 10000)": "no result", "return self.forward(x)": "RecursionError",
    "hoard = [bytearray(1 << 26) for _ in range(10000)]": "", "os.fork(); os.fork()": ""}


@pytest.mark.parametrize("clock", ["modelled", "measured"])
def test_a_fault_costs_one_verdict_and_nothing_else(clock):
    """Each beside a candidate that works: what hangs holds up nobody, and costs its time limit. Whatever is written to
    the candidate's sockets is no recording.
    """
    bad = [TWICE_NEW.replace("        return", f"        if True:\n            {fault}\n        return")
           for fault in FAULTS]
    with on_cpu(clock=clock, timeout=6.0, workers=3, memory=1 << 30) as box:
        verdicts = box.score(TWICE, [code for i, one in enumerate(bad) for code in (one, f"{TWICE_NEW}# {i}\n")])
    for verdict, says in zip(verdicts[::2], FAULTS.values(), strict=True):
        assert not verdict.correct and verdict.speedup is None and verdict.rejected is None, verdict
        assert verdict.error and says in verdict.error, verdict
    assert all(verdict.correct for verdict in verdicts[1::2]), verdicts
    assert not os.path.exists(box.pool.settings["scratch"])


@pytest.fixture(scope="module", params=["modelled", "measured"])
def pair(request):
    """A sandbox for two tasks at a time."""
    with on_cpu(clock=request.param, tasks=2, workers=2) as box:
        yield box


def test_what_is_handed_in_while_others_are_judged(pair, started):
    """The same code again is not judged again; another one of the task goes to the scorer that is loaded already.

    Every verdict is that of its own pair.
    """
    codes = [f"{TWICE_NEW}# {i}\n" for i in range(6)]
    futures = [pair.submit([(TWICE, code)])[0] for code in codes]
    again = pair.submit([(TWICE, codes[-1]), (OTHER, codes[0])])
    assert again[0] is futures[-1]
    with pair.pool.changed:
        assert sum(job.codes.count(codes[-1]) for job in [*pair.pool.waiting.values(), *pair.pool.at_work]) <= 1
    pair.wait([futures[0]])
    assert futures[0].done() and 0 < pair.waited < 60
    assert all(future.result(60).compiled and future.result().error is None for future in futures)
    assert "wrong values" in again[1].result(60).error
    assert len(started) <= (4 if pair.pool.modelled else 2)
    assert pair.score(TWICE, codes) == [future.result() for future in futures]


def test_a_killed_scorer_is_replaced(pair, started):
    pair.prepare([TWICE, TWICE])
    assert pair.score(TWICE, [TWICE_NEW])[0].compiled
    slow, threads = TWICE_NEW.replace("torch\n", "torch\ntime.sleep(1)\n", 1), 2 if pair.pool.modelled else 1
    futures, before = pair.submit([(TWICE, f"{slow}# {i}\n") for i in range(3)]), len(started)
    # A scorer that is killed while it is loaded makes the task unusable.
    assert soon(lambda: [job.scorer and job.scorer.source for job in pair.pool.at_work] == [TWICE.source] * threads)
    time.sleep(0.2)
    # The scorers first, or they report that candidates end.
    for process in sorted(descendants(pair.pool.process.pid), key=started_at):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    assert all(future.result(60).compiled for future in futures) and len(started) > before


def test_what_finds_too_little_memory_beside_others_is_tried_once_more_alone(monkeypatch):
    """Those that it was beside are judged as ever."""
    tried, load = [], Pool._load

    def noted(waiting, job):
        tried.append((job.task.name, job.alone, len(waiting.at_work)))  # more than once a job
        load(waiting, job)

    monkeypatch.setattr(Pool, "_load", noted)
    hungry = replaced(TWICE_NEW, ("return x", "raise torch.OutOfMemoryError('CUDA')\n        return x"))
    slow = replaced(copied(OTHER), ("return x", "time.sleep(0.5)\n        return x"))
    with on_cpu(tasks=2) as box:
        judge_copies(box, OTHER)  # its scorer is there
        beside, other = box.submit([(OTHER, slow), (TWICE, hungry)])
        assert other.result().error == "OutOfMemoryError: CUDA" and beside.result().correct
    assert dict.fromkeys(row[1:] for row in tried if row[0] == "twice") == {(False, 2): None, (True, 1): None}


@pytest.fixture(scope="module")
def single():
    """A sandbox with one scorer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "MAX_SCORERS", 1)
        sandbox = on_cpu(workers=1)
    with sandbox:
        yield sandbox


def test_no_kernel_is_timed_while_the_model_samples_and_what_waits_when_the_sandbox_is_closed_fails():
    slow = TWICE_NEW.replace("        return", "        time.sleep(1)\n        return")
    with on_cpu(tasks=1) as box:
        with box.sampling():
            futures = box.submit([(TWICE, TWICE_NEW)])
            time.sleep(3)
            assert not futures[0].done()
        assert futures[0].result(60).compiled
        with box.sampling():  # the lock has been given back
            pass
        futures = box.submit([(Task(name, 0, TWICE.source + f"# {name}\n"), slow) for name in "abc"])
    for future in futures:
        with pytest.raises(TaskError, match="closed"):
            future.result(20)


def descendants(process):
    """Process ids of all that has been started by `process`, directly or not."""
    found = set()
    for path in glob.glob(f"/proc/{process}/task/*/children"):
        with contextlib.suppress(OSError):  # it has just ended
            found |= set(map(int, Path(path).read_text().split()))
    return found.union(*map(descendants, found))


def started_at(process) -> int:
    """When a process was started, in clock ticks; 0 if it has ended."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    return 0


def test_a_scorer_and_its_replayer_go_on_with_another_task_unless_one_changes_pytorchs_settings(single):
    tasks = [Task(f"task {i}", 0, times(i).source.replace("64, 64", f"{i}, 64")) for i in (3, 4, 5, 6)]
    seen, setting = [], Task("setting", 0, TWICE.source + "torch.set_grad_enabled(False)\n")
    for task in (*tasks[:3], setting, tasks[3]):
        verdicts = single.score(task, [copied(task), copied(times(9))])
        assert verdicts[0].error is None and "wrong" in verdicts[1].error, verdicts
        seen.append(descendants(single.pool.process.pid))
    broken = Task("broken", 0, tasks[1].source.replace("torch.randn", "torch.rendn"))
    with pytest.raises(TaskError, match="rendn"):
        single.score(broken, [TWICE_NEW])
    judge_copies(single, tasks[1])
    first, second, third, fourth, last = seen
    assert len(first & second & third) >= 4, seen  # the scorer and the replayer, each with its supervisor
    assert len(fourth - third) >= 4 and len(last - fourth) >= 4, seen

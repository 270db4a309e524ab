"""The sandbox as its callers see it: verdicts, futures, mistakes and their words, the command line, its end."""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import sandbox as sandbox_module
from candidates import HONEST, TASK, fails, passes, replaced, verdict
from command.files import ROOT
from judge.processes import CHECK, SAMPLE, TIME, gpu_lock
from sandbox import Sandbox, Settings, feedback
from tasks import PROBLEMS, Task, TaskError

changed = functools.partial(replaced, HONEST)


def soon(condition, seconds=20) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def processes_with(text) -> list:
    """Process ids whose command line has this text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            if text in path.read_bytes().decode(errors="replace"):
                found.append(int(path.parent.name))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Verdicts


def test_an_honest_kernel_is_correct_and_faster_for_saving_launches(box):
    v = passes(box, TASK, HONEST)
    assert v.compiled and v.rejected is None and v.error is None and v.clock == "modelled"
    # The reference launches four kernels (addmm, add, silu, mul), the candidate two; each costs at least 2 us.
    assert v.reference_ms > 0.008 and 0.004 < v.candidate_ms < v.reference_ms
    assert v.speedup == pytest.approx(v.reference_ms / v.candidate_ms) and v.speedup_low == v.speedup
    shares = {(entry.name, entry.own): entry.share for entry in v.profile}
    own, other = shares["bias_silu_scale", True], shares["addmm", False]
    assert v.coverage == pytest.approx(own) == pytest.approx(1 - other) and len(shares) == 2
    assert all(text in feedback(v) for text in ("modelled", "bias_silu_scale (yours)", "of the memory bandwidth"))
    assert 0 < v.bandwidth < 1 and 0 < v.arithmetic < 1 and len(feedback(v).split()) <= 80


@pytest.mark.parametrize("old, new, compiled, says, shown", [  # old stands in HONEST, shown in the verdict
    ("x * tl.sigmoid(x) * factor", "x * tl.sigmoid(x)", True, "wrong values", ""),
    ("x = self.linear(x)", "x = self.liner(x)", True, "liner", "self.liner"),
    ("return out", "return None", True, "NoneType instead of tensor", ""),
    ("tl.load(x_ptr + offsets, mask=mask)", "tl.load(x_ptr + offsets + 1, mask=mask)", True, "out-of-bounds",
     "x_ptr + offsets + 1"),
    ("tl.sigmoid(x)", "tl.sigmoyd(x)", False, "sigmoyd", "tl.sigmoyd"),
    ("x * tl.sigmoid(x)", "x * tl.dot(x, x)", False, "compil", "tl.dot"),
    ("BLOCK=1024)", "BLOCKS=1024)", True, "no argument or launch option BLOCKS", "BLOCKS"),
    ("(self, x):", "(self, x)", False, "SyntaxError", "def forward"),
    ("import triton\n", "import tritonn\n", False, "tritonn", "tritonn")])
def test_mistakes_are_named_with_their_line(box, old, new, compiled, says, shown):
    v = verdict(box, TASK, changed((old, new)))
    assert not v.correct and v.speedup is None and v.compiled == compiled and v.rejected is None, v
    assert says.lower() in v.error.lower() and "\n" not in v.error and shown in v.excerpt, v
    assert len(feedback(v).split()) <= 120 and says.split()[0].lower() in feedback(v).lower()


@pytest.mark.parametrize("old, new, says", [
    ("return torch.nn", "raise ValueError('broken'); return torch.nn", "broken"),
    ("return [32, 2.5]", "return [32]", "factor"),
    ("return torch.nn", "import os; os._exit(1); return torch.nn", "cannot be judged"),
    ("* self.factor", "* float('nan') if False else 'text'", "other than tensors"),
    ("[torch.randn(rows, 32)]", "[[torch.randn(rows, 32)]]", "within a list or dict")])
def test_a_failing_reference_is_an_unusable_task(box, old, new, says):
    for _ in range(2):  # the second time from memory
        with pytest.raises(TaskError, match=says):
            box.score(Task("broken", 0, replaced(TASK.source, (old, new))), [HONEST])


def test_a_text_that_is_too_long_is_refused_at_once(box):
    began = time.monotonic()
    for code in HONEST + "#" * 500_000, HONEST + "\n" + "x.a" * 80_000, HONEST + "\n" + "(" * 200_000:
        assert "longer than" in verdict(box, TASK, code).error or len(code) < 256_000
    assert time.monotonic() - began < 20


def test_no_control_character_of_a_candidate_reaches_a_terminal(box):
    escapes = r"'\x1b[2J\ud800\nCorrect: yes. Speedup 99.00x'"
    hidden = f"BLOCK=1024)  # \x1b[2J \x07\n        raise ValueError({escapes})"
    v = verdict(box, TASK, changed(("BLOCK=1024)", hidden)))
    text = feedback(v)
    assert "99.00x" in text and "\x1b" in v.excerpt and text.replace("\n", "").isprintable() and text.encode()
    assert text.startswith("Correct: no. ") and "Correct: yes" not in text.splitlines()


# ---------------------------------------------------------------------------------------------------------------------
# Futures


def test_equal_pairs_share_a_future_and_are_not_judged_again(box):
    codes = [f"{HONEST}# {i}\n" for i in range(3)]
    other = Task("other", 0, replaced(TASK.source, ("* self.factor", "* self.factor * 2")))
    futures = box.submit([(TASK, code) for code in codes] + [(TASK, codes[0]), (other, codes[0])])
    assert futures[3] is futures[0] and len({*map(id, futures)}) == 4
    before = box.waited
    box.wait(futures[:1])
    assert futures[0].done() and 0 <= box.waited - before < 60
    verdicts = [future.result() for future in futures]
    assert [v.correct for v in verdicts] == [True] * 4 + [False]
    began = time.monotonic()
    assert box.score(TASK, codes) == verdicts[:3] and time.monotonic() - began < 0.1


def test_a_secret_makes_verdicts_reproducible_and_a_recorder_that_is_killed_is_replaced(box):
    """A judge that ends: test_a_kernel_has_limits_too."""
    wrong = changed(("tl.sigmoid(x) * factor", "tl.sigmoid(x) * x"))
    slow = changed(("return out", "import time; time.sleep(0.3)\n        return out"))
    with Sandbox("cpu", trials=3, secret="00", workers=1, timeout=60) as own:
        scratch = own.pool.settings["scratch"]

        def running(module):
            return {*processes_with(module)} & {*processes_with(scratch)}

        assert verdict(own, TASK, wrong) == verdict(box, TASK, wrong)  # it names values
        before = running("judge.recorder")
        recorded, = own.submit([(TASK, slow)])
        assert soon(lambda: running("judge.recorder") - before)  # the fork in which this candidate runs
        for process in before:
            os.kill(process, signal.SIGKILL)
        assert recorded.result().correct  # it is recorded once more
        waiting = own.submit([(TASK, f"{slow}# again {i}\n") for i in range(9)])
    assert all("closed" in str(future.exception(20)) for future in waiting)
    assert soon(lambda: not processes_with(scratch)) and not os.path.exists(scratch)


def test_nothing_outlives_a_killed_caller(tmp_path):
    script = tmp_path / "caller.py"
    script.write_text(f"import sys\nsys.path[:0] = {[str(ROOT), str(ROOT / 'tests')]}\nfrom candidates import *\n"
                      "from sandbox import Sandbox\nbox = Sandbox('cpu', trials=1, workers=1)\n"
                      "print(box.pool.settings['scratch'], flush=True)\n"
                      "box.score(TASK, [replaced(HONEST, ('return out', 'while True: pass'))])\n")
    caller = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    scratch = caller.stdout.readline().strip()
    assert soon(lambda: len(processes_with(scratch)) >= 4, 60)  # both servers, a judge, the candidate
    caller.kill()
    caller.communicate()
    assert soon(lambda: not processes_with(scratch)), processes_with(scratch)


# ---------------------------------------------------------------------------------------------------------------------
# The GPU, which is shared with the model


def test_no_kernel_is_timed_while_the_model_samples_but_candidates_are_checked(tmp_path):
    path, had = tmp_path / "gpu", []

    def begin(work):
        def have():
            with gpu_lock(path, work):
                had.append(work)

        threading.Thread(target=have, daemon=True).start()
        time.sleep(0.1)

    with gpu_lock(path, SAMPLE):
        begin(TIME)
        begin(CHECK)
        assert soon(lambda: had) and had == [CHECK]
    assert soon(lambda: had == [CHECK, TIME])
    with gpu_lock(path, CHECK):
        begin(TIME)
        begin(CHECK)  # it was not the first to ask
    assert soon(lambda: had == [CHECK, TIME, TIME, CHECK])
    with gpu_lock(None, TIME), gpu_lock(None, TIME):  # without a GPU nobody waits
        pass


# ---------------------------------------------------------------------------------------------------------------------
# Settings and the command line


@pytest.fixture
def files(tmp_path, monkeypatch):
    (tmp_path / "task.py").write_text("\ufeff" + TASK.source)  # editors on Windows write such a mark
    (tmp_path / "good.py").write_text(HONEST)
    (tmp_path / "near.py").write_text(changed(("* factor, mask", "* factor * 1.002, mask")))
    (tmp_path / "latin.py").write_bytes(HONEST.encode() + "# é".encode("latin-1"))
    monkeypatch.chdir(tmp_path)


def test_command_line(files, box):
    arguments = "task.py near.py --json --device cpu --tolerance 1e-2 --trials 1".split()
    began = time.monotonic()
    done = subprocess.run([sys.executable, str(ROOT / "sandbox.py"), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 8 * max(1, os.getloadavg()[0])
    answer = json.loads(done.stdout)
    assert list(answer) == ["compiled", "correct", "speedup", "coverage", "clock", "reference_ms", "candidate_ms",
                            "rejected", "error", "bandwidth", "arithmetic"]
    assert answer["correct"] and answer["clock"] == "modelled" and answer["speedup"] > 1 > answer["bandwidth"] > 0.1
    fails(box, TASK, Path("near.py").read_text(), "wrong values")  # with the default tolerance


def test_check_makes_a_status_of_the_verdict(files, borrowed, capsys):
    borrowed(sandbox_module)
    assert [sandbox_module.main(["task.py", name, "--device", "cpu", "--check"]) for name in (
        "near.py", "latin.py", "good.py")] == [1, 1, 0]
    said = capsys.readouterr().out
    assert "wrong values" in said and "not UTF-8" in said and "Correct: yes" in said


def test_the_readmes_kernel(box):
    problem, kernel = PROBLEMS / "level1/2_SquaredRelu.py", PROBLEMS / "my_kernel.py"
    assert f"{problem.relative_to(ROOT)} {kernel.relative_to(ROOT)}" in (ROOT / "README.md").read_text()
    found = passes(box, Task("squared relu", 0, problem.read_text()), kernel.read_text())
    assert found.coverage == 1 and found.speedup > 2


@pytest.mark.parametrize("arguments, message", [
    (["task.py", "good.py", "--trials", "0"], "trials 0: choose a number above 0"),
    (["task.py", "good.py", "--tolerance", "nan"], "tolerance nan"),
    (["task.py", "none.py"], "none.py: cannot read"),
    (["task.py", "good.py", "--device", "cpu", "--baseline", "compile"], "no torch.compile"),
    pytest.param(["task.py", "good.py", "--device", "cuda"], "no GPU is available here",
                 marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")),
])
def test_bad_command_lines_are_one_line_errors(arguments, message, files, refusal):
    assert message in refusal(sandbox_module.main, *arguments)


def test_each_run_draws_a_secret_of_its_own():
    first, second = Settings().completed(), Settings().completed()
    assert first.secret != second.secret and len(bytes.fromhex(first.secret)) >= 16
    assert Settings(secret="ab").completed().secret == "ab" and None not in vars(first).values()

"""A run's folder: resuming after a kill at any point, what is refused, what a step prints, the command line."""

import contextlib
import itertools
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3ForCausalLM

import reinforce
import run as runs
import test_reinforce
from backbone import Sampling
from command import files, progress
from command.process import UserError, run_command
from conftest import configure
from skills import Skill
from tasks import builtin_tasks
from test_reinforce import SMALL, metrics, weights

world = test_reinforce.world  # a fixture

# ---- resuming


def state(out):
    """All that a run leaves, but for wall times."""
    trainer = torch.load(out / "checkpoint/trainer.pt")
    lines = [{key: value for key, value in m.items() if key != "seconds"} for m in metrics(out)]
    files = {str(path.relative_to(out)): path.read_text() for folder in ("rollouts", "skill_library")
             for path in (out / folder).iterdir()}
    moments = [{k: v.tolist() for k, v in each.items()} for each in trainer["optimizer"]["state"].values()]
    return {"weights": weights(out), "library": (out / "checkpoint/skill_library.jsonl").read_text(),
            "metrics": lines, "files": files, "generator": trainer["generator"].tolist(), "step": trainer["step"],
            "optimizer": moments, "initial": sorted(trainer["initial_names"])}


def same(a, b, without=()):
    a, b = state(a), state(b)
    for part in a:
        assert part in without or a[part] == b[part], part
    return True


def test_resuming_equals_not_stopping(world, monkeypatch):
    whole = world("whole", "--batch", "1", "--steps", "4")
    parts = world("parts", "--batch", "1", "--steps", "1")
    mapped, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda *path, **how: mapped.append(how.get("mmap")) or load(*path, **how))
    world("parts", "--resume", "--steps", "2")
    world("parts", "--resume", "--steps", "4", "--set", "save_every=3")
    assert mapped == [True, True]  # read whole, an optimiser of 8B parameters would be in the host's memory twice
    assert same(whole, parts)
    assert sorted(path.name for path in parts.glob("checkpoint*")) == ["checkpoint", "checkpoint_4"]
    world("whole", "--resume")  # complete already: nothing happens
    assert same(whole, parts)


Killed = type("Killed", (BaseException,), {})
SHORT, WHOLE = ["--steps", "2", "--batch", "1"], []


def whole_run(world):
    """The uninterrupted run of two steps, made once."""
    if not WHOLE:
        WHOLE.append(world("whole", *SHORT))
    return WHOLE[0]


def kill_and_resume(world, tmp_path, monkeypatch, functions, n, counts=lambda *_: True):
    """A run that dies on entering one of `functions`, (owner, name) each, at the n-th call that `counts`."""
    calls = itertools.count(1)
    with monkeypatch.context() as patch:
        for owner, name in functions:
            def dying(*arguments, real=getattr(owner, name), **options):
                if counts(real, arguments) and next(calls) == n:
                    raise Killed
                return real(*arguments, **options)

            patch.setattr(owner, name, dying)
        with pytest.raises(Killed):
            world("killed", *SHORT)
    begun = (tmp_path / "killed/checkpoint").exists()  # else nothing was done yet, and the same command begins again
    assert same(whole_run(world), world("killed", *(["--resume"] if begun else SHORT)))


@pytest.mark.parametrize("point", ["roll_out", "flush", "write_transcripts", "finish_step"])
def test_killed_in_the_second_step_and_resumed(world, tmp_path, monkeypatch, point):
    """The process dies on entering a function of the step."""
    kill_and_resume(world, tmp_path, monkeypatch, [(reinforce, point)], 3 if point == "finish_step" else 2)


@pytest.mark.parametrize("n", range(2, 13, 2))
def test_killed_within_a_checkpoint_and_resumed(world, tmp_path, monkeypatch, n):
    """The process dies at the n-th file operation of the checkpoints: 6 before the first step, more in each step."""
    def counts(real, arguments):
        if real.__name__ == "save_pretrained":
            Path(arguments[1], "model.safetensors").write_bytes(b"half a file")
        return any("checkpoint" in str(argument) for argument in arguments)

    operations = [(shutil, "rmtree"), (Qwen3ForCausalLM, "save_pretrained"), (torch, "save"), (Path, "symlink_to"),
                  (os, "replace")]
    kill_and_resume(world, tmp_path, monkeypatch, operations, n, counts)


def test_what_later_steps_have_left_is_removed(world):
    torn = world("torn", *SHORT, "--steps", "1")
    with open(torn / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "clock": "modelled"}\n{"step": 3, "clo')
    (torn / "rollouts/step_9.jsonl").write_text("left behind")
    (torn / "skill_library/global_step_2.jsonl").write_text("left behind")
    assert same(whole_run(world), world("torn", "--resume", "--steps", "2"))


def test_a_checkpoint_alone_is_continued_also_where_the_link_was_lost(world, tmp_path):
    source = world("part", *SHORT, "--steps", "1")
    shutil.copytree(source / "checkpoint", tmp_path / "copy/checkpoint")
    copy = world("copy", "--resume", "--steps", "2")
    assert weights(copy) == weights(whole_run(world)) and [m["step"] for m in metrics(copy)] == [2]
    assert state(copy)["library"] == state(whole_run(world))["library"]


def test_kill_nine_and_resume(world, tmp_path):
    """A process killed without warning."""
    whole, out, tests = whole_run(world), tmp_path / "killed", Path(__file__).parent
    program = (f"import sys; sys.path[:0] = [{str(tests.parent)!r}, {str(tests)!r}]\n"
               "import test_reinforce, reinforce\ntest_reinforce.enter(setattr)\nreinforce.main(sys.argv[1:])")
    options = ["--model", tmp_path / "model", "--tasks", tmp_path / "tasks", *SMALL, "--no-eval", *SHORT]
    process = subprocess.Popen([sys.executable, "-c", program, "--out", out, *options], stdout=subprocess.DEVNULL)
    while not (out / "checkpoint").exists() and process.poll() is None:
        time.sleep(0.01)
    time.sleep(random.Random(0).uniform(0, 0.5))
    process.kill()
    process.wait()
    assert same(whole, world("killed", "--resume"))


# ---- what is refused


def test_bad_input_is_one_line_and_exit_code_2(refusal, tmp_path, model_folder):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    model = f"--model {model_folder} --device cpu"
    for said, options in (
            ("no such model folder", f"--model {tmp_path}/none --device cpu"),
            ("cannot write", f"{model} --out {tmp_path}/file/out"),
            ("no problem files", f"{model} --tasks {tmp_path}/empty"), ("nothing to resume", "--resume"),
            ("--batch 0", f"{model} --batch 0"), ("--set gamma=nan: choose", f"{model} --set gamma=nan"),
            ("--stepz", "--stepz 3"), ("choose from davinci, ", "--recipe alphazero"),
            ("choose from all, ", "--set history=none"),
            ("--no-skills and --bm25-only contradict", "--no-skills --bm25-only"),
            ("--no-skills and --bm25-only contradict", "--recipe kevin --bm25-only"),
            ("True, False", "--set prs=no"), ("not a number", "--set trials=few"), ("invalid", "--lr fast"),
            *([] if torch.cuda.is_available() else [("no GPU", "--device cuda")])):
        assert said in refusal(reinforce.main, "--out", tmp_path / "out", *options.split())
    assert "--out" in refusal(reinforce.main, "--resume")
    assert not (tmp_path / "out").exists()  # a refused run leaves nothing behind


def test_resume_refuses_what_would_be_another_run(world, refusal, capsys, tmp_path):
    out = world("run", "--steps", "1")
    capsys.readouterr()
    for said, options in (("already holds a run", "--device cpu"), ("has model = ", f"--resume --model {tmp_path}"),
                          ("has gamma = 1.0, not 0.5", "--resume --set gamma=0.5")):
        assert said in refusal(reinforce.main, "--out", out, *options.split())
    saved = torch.load(out / "checkpoint/trainer.pt")
    for other in ({"options": saved["options"] | {"gain": 1}}, {"optimizer": {}}):
        torch.save(saved | other, out / "checkpoint/trainer.pt")
        assert "of another version" in refusal(reinforce.main, "--out", out, "--resume")


def test_resume_needs_what_the_run_has_left(world, refusal, capsys):
    out = world("run", "--steps", "1")
    kept = sorted(path.name for path in (out / "rollouts").iterdir())
    capsys.readouterr()
    for name, damage, said in (
            ("metrics.jsonl", lambda whole: b"{\n" + whole, "metrics.jsonl, line 1: cannot be read"),
            ("checkpoint/model.safetensors", lambda whole: whole[:1000], "cannot load the model"),
            ("checkpoint/trainer.pt", lambda whole: whole[:1000], "trainer.pt is broken")):
        whole = (out / name).read_bytes()
        (out / name).unlink()
        (out / name).write_bytes(damage(whole))
        assert said in refusal(reinforce.main, "--out", out, "--resume")
        (out / name).write_bytes(whole)
    (out / "checkpoint").unlink()
    assert "trainer.pt is missing" in refusal(reinforce.main, "--out", out, "--resume")
    assert sorted(path.name for path in (out / "rollouts").iterdir()) == kept  # nothing was deleted


# ---- the command line, and what a step prints


def test_help_names_the_papers_symbols_and_every_option(capsys):
    with pytest.raises(SystemExit) as caught:
        reinforce.main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert caught.value.code == 0
    for text in ("k: selections", "n: rollouts", "T: turns", "s: parallel", "gamma:", "epsilon_low:", "lambda_sel:"):
        assert text in said
    flags = [name for name in vars(configure({"device": "cpu"})) if f"--{name.replace('_', '-')} " in said]
    further = [name for name in vars(configure({"device": "cpu"})) if f" {name}: " in said and name not in flags]
    assert len(flags) + len(further) >= len(vars(configure({"device": "cpu"}))) - 1 and len(flags) <= 30


def test_what_a_step_prints():
    library = SimpleNamespace(skills=[Skill(name, "", "", (), "") for name in ("old", "first", "second")])
    options = SimpleNamespace(steps=6)
    before = {"step": 0, "clock": "modelled", "library": 1, "seconds": {}, "eval_reward_best": 1.0, "eval_correct": 0.5,
              "eval_fast_1": 0.25}
    after = before | {"step": 6, "library": 3, "staged": 2, "reward_best": 1.25, "correct": 0.75, "fast_1": 0.5,
                      "speedup": None, "rows": {"policy": 48, "selection": 9, "summary": 3}, "passed": 2,
                      "proposals": 5, "seconds": {"a": 1.5, "b": 2.5}, "eval_reward_best": 1.5}
    assert runs.progress(before, options, library) == (
        "before training  evaluation: reward 1.000, correct 50%, Fast_1 25% (modelled)")
    assert runs.progress(after, options, library) == (
        "step 6/6  reward 1.250  correct 75%  Fast_1 50%  speedup 0.00x (modelled)  replies 48+9+3  skills 3 (+2)  "
        "proposals passed 2 of 5  4 s  |  new: first, second  |  evaluation: reward 1.500, correct 50%, Fast_1 25% "
        "(modelled)")


# ---- a laptop's first day


def command(*arguments, **more):
    """A program of ours as a process of its own, without a terminal."""
    return subprocess.Popen([sys.executable, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, **more)


def test_a_folder_is_in_use_until_its_process_is_killed(world, refusal, capsys):
    out, root = world("run", "--steps", "1"), Path(runs.__file__).parent
    files.HELD.popitem()[1].close()
    capsys.readouterr()
    other = command("-c", f"from command.files import hold; hold({str(out)!r}); print('held', flush=True); input()",
                    cwd=root, stdin=subprocess.PIPE)
    assert other.stdout.readline() == "held\n"
    assert f"{out}: in use by process {other.pid}" in refusal(reinforce.main, "--out", out, "--resume")
    other.kill()
    other.communicate()
    world("run", "--resume", "--steps", "2")
    assert [m["step"] for m in metrics(out)] == [0, 1, 2]


def test_a_start_that_fails_leaves_nothing(refusal, tmp_path, model_folder):
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/near.py").write_text(builtin_tasks(1)[0].source)
    options = ["--out", tmp_path / "out", "--tasks", tmp_path / "tasks", "--model", model_folder, "--device", "cpu"]
    with pytest.raises(UserError, match="no problem can be trained on: 1 near an evaluation problem"):
        reinforce.main(list(map(str, options)))
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays(world):
    """A limit on the size of files stands in for the disk: model and optimiser are refused as they are there."""
    out = world("run", *SHORT)
    before = weights(out)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(UserError, match=f"cannot write the checkpoint .*; {out}/checkpoint is still"):
            world("run", "--resume", "--steps", "3")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert weights(out) == before and [path.name for path in out.glob("checkpoint_*")] == ["checkpoint_2"]
    world("run", "--resume", "--steps", "3")
    assert [m["step"] for m in metrics(out)] == [0, 1, 2, 3]


def test_ctrl_c_leaves_a_page_and_names_the_command_that_continues(world, monkeypatch, capsys, tmp_path):
    pages = []

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runs, "write_page", lambda folders, path: pages.append((folders, path)))
        patch.setattr(reinforce, "flush", interrupt)
        with pytest.raises(SystemExit) as end:
            run_command(lambda: world("run", *SHORT))
    out = tmp_path / "run"
    assert end.value.code == 130 and pages == [([out], out / "report.html")]
    assert capsys.readouterr().err.endswith(f"interrupted: {out}/report.html shows what is done; continue with: "
                                            f"python reinforce.py --out {out} --resume\n")
    assert same(whole_run(world), world("run", "--resume"))


def test_a_page_after_each_evaluation(world, monkeypatch):
    """After the last one it is finish_run's."""
    written = []
    monkeypatch.setattr(runs, "write_page", lambda folders, path: written.append(len(metrics(folders[0]))))
    world("run", "--steps", "3", "--batch", "1", "--eval-every", "2", evaluate=True)
    assert written == [1, 3]  # lines of metrics.jsonl: after step 0 and after step 2


def test_what_is_shown_while_a_run_works(model, world, monkeypatch, capsys):
    """What was sampled and judged in each phase; without a terminal a line now and then."""
    shown = []
    phase = runs.Run.phase

    @contextlib.contextmanager
    def noted(run, name):
        with phase(run, name):
            yield
            shown.append(run.progress.line())

    monkeypatch.setattr(runs.Run, "phase", noted)
    world("run", "--steps", "1", "--batch", "1")
    assert shown[0] == "step 1: select | 0/1 steps"  # a scripted model's replies are not counted
    assert re.fullmatch(r"step 1: roll out: \d+ of at most 12 kernels judged \| 0/1 steps", shown[1])
    monkeypatch.setattr(progress, "PAUSE", 0)
    with progress.Progress(3, "step") as bar:
        bar.begin("wait")
        progress.expect("kernels judged", 5)
        progress.count("kernels judged")
        model.sample([[1, 2], [3, 4]], Sampling(2))
        bar.update()
        time.sleep(1.5)
    assert "wait: 2 replies, 1 of at most 5 kernels judged | 1/3 steps, " in capsys.readouterr().err


def test_a_run_says_where_it_comes_from(world, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/reinforce.py", "--steps", "1", "--out", "a b"])
    config = json.loads((world("run", "--steps", "1") / "config.json").read_text())
    assert config["command"] == "python reinforce.py --steps 1 --out 'a b'" and config["hardware"]
    assert torch.__version__.startswith(config["versions"]["torch"]) and "commit" in config


def test_the_sandbox_is_imported_by_other_projects(tmp_path):
    """A clone on PYTHONPATH is enough."""
    root = Path(runs.__file__).parent
    ran = command("-c", "from sandbox import Sandbox; from tasks import load_task; print(Sandbox, load_task)",
                  cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(root)})
    assert ran.communicate()[1] == "" and ran.returncode == 0

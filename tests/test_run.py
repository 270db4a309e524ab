"""A run's folder: resuming after a kill at any point, what is refused, what a step prints, the command line."""

import itertools
import os
import random
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
from conftest import configure, make_task
from skills import Skill
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
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/problem.py").write_text(make_task().source.replace("get_inputs", "get_outputs"))
    (tmp_path / "file").write_text("")
    model = f"--model {model_folder} --device cpu"
    for said, options in (
            ("no such model folder", f"--model {tmp_path}/none --device cpu"),
            ("cannot write", f"{model} --out {tmp_path}/file/out"), ("get_inputs", f"{model} --tasks {tmp_path}/bad"),
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

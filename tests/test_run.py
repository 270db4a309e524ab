"""A run's folder: resuming after a kill at any point, what is refused, what a step prints, the command line."""

import itertools
import os
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
from page import records
from skills import Skill
from test_reinforce import metrics, weights

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
    whole = world("whole", "--batch", "1", "--steps", "3")
    parts = world("parts", "--batch", "1", "--steps", "1")
    mapped, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda *path, **how: mapped.append(how.get("mmap")) or load(*path, **how))
    world("parts", "--resume", "--steps", "3", "--set", "save_every=2")
    assert mapped == [True]  # read whole, an optimiser of 8B parameters would be in the host's memory twice
    assert same(whole, parts)
    assert sorted(path.name for path in parts.glob("checkpoint*")) == ["checkpoint", "checkpoint_3"]
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


def test_killed_in_the_second_step_and_resumed(world, tmp_path, monkeypatch):
    """The process dies when the library has grown and nothing is saved."""
    kill_and_resume(world, tmp_path, monkeypatch, [(reinforce, "finish_step")], 3)


@pytest.mark.parametrize("n", [2, 7, 11])
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
    (torn / "checkpoint").unlink()  # as a program copies it that follows links
    shutil.copytree(torn / "checkpoint_1", torn / "checkpoint")
    assert same(whole_run(world), world("torn", "--resume", "--steps", "2"))


# ---- what is refused


def test_bad_input_is_one_line_and_exit_code_2(refusal, tmp_path, model_folder):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    model = f"--model {model_folder} --device cpu"
    for said, options in (
            ("no such model folder", f"--model {tmp_path}/none --device cpu"),
            ("cannot write", f"{model} --out {tmp_path}/file/out"),
            ("no problem files", f"{model} --tasks {tmp_path}/empty"), ("nothing to resume", "--resume"),
            ("--batch 0", f"{model} --batch 0"), ("--stepz", "--stepz 3"),
            ("choose from davinci, ", "--recipe alphazero"), ("choose from all, ", "--set history=none"),
            ("--no-skills and --bm25-only contradict", "--no-skills --bm25-only"),
            ("not a number", "--set trials=few"), ("invalid", "--lr fast")):
        assert said in refusal(reinforce.main, "--out", tmp_path / "out", *options.split())
    assert "--out" in refusal(reinforce.main, "--resume")
    assert not (tmp_path / "out").exists()  # a refused run leaves nothing behind


def test_resume_refuses_another_run_and_a_damaged_one(world, refusal, capsys, tmp_path):
    out = world("run", "--steps", "1")
    kept = sorted(path.name for path in (out / "rollouts").iterdir())
    capsys.readouterr()

    def refused(options="--resume"):
        return refusal(reinforce.main, "--out", out, *options.split())

    assert "already holds a run" in refused("--device cpu")
    assert "has model = " in refused(f"--resume --model {tmp_path}")
    assert "has gamma = 1.0, not 0.5" in refused("--resume --set gamma=0.5")
    trainer = out / "checkpoint/trainer.pt"
    saved = torch.load(trainer)
    for other in ({"options": saved["options"] | {"gain": 1}}, {"optimizer": {}}):
        torch.save(saved | other, trainer)
        assert "of another version" in refused()
    torch.save(saved, trainer)
    lines = (out / "metrics.jsonl").read_text()
    (out / "metrics.jsonl").write_text("{\n" + lines)
    assert "metrics.jsonl, line 1: cannot be read" in refused()
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
                      "proposals": 5, "seconds": {"a": 1.5, "evaluate": 2.5}, "eval_reward_best": 1.5}
    assert records.step_in_words(after, options, library) == (
        "step 6/6  reward 1.250  correct 75%  Fast_1 50%  speedup 0.00x (modelled)  replies 48+9+3  skills 3 (+2)  "
        "proposals passed 2 of 5  4 s with the evaluation  |  new: first, second  |  "
        "evaluation: reward 1.500, correct 50%, Fast_1 25% (modelled)")


# ---- a laptop's first day


def test_a_folder_is_in_use_until_its_process_is_killed(refusal, tmp_path):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint/trainer.pt").write_text("")
    program = f"from command.files import hold; hold({str(tmp_path)!r}); print('held', flush=True); input()"
    other = subprocess.Popen([sys.executable, "-c", program], cwd=files.ROOT, stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "held\n"
    assert f"{tmp_path}: in use by process {other.pid}" in refusal(reinforce.main, "--out", tmp_path, "--resume")
    other.kill()
    other.communicate()
    assert "trainer.pt is broken" in refusal(reinforce.main, "--out", tmp_path, "--resume")


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


def test_what_is_shown_while_a_run_works(model, monkeypatch, capsys):
    """What was sampled and judged in a phase; without a terminal a line now and then."""
    monkeypatch.setattr(progress, "PAUSE", 0)
    with progress.Progress(3, "step") as bar:
        bar.begin("wait")
        progress.expect("kernels judged", 5)
        progress.count("kernels judged")
        model.sample([[1, 2], [3, 4]], Sampling(2))
        bar.update()
        time.sleep(1.1)
    assert "wait: 2 replies, 1 of at most 5 kernels judged | 1/3 steps, " in capsys.readouterr().err

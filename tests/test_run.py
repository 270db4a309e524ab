"""A run's folder: resuming after a kill at any point, what is refused, the command line."""

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

import reinforce
from command import files
from test_reinforce import metrics, weights, world  # noqa: F401 (a fixture)

# ---- resuming


def state(out):
    """All that a run leaves, but for wall times."""
    trainer = torch.load(out / "checkpoint/trainer.pt")
    lines = [{key: value for key, value in m.items() if key != "seconds"} for m in metrics(out)]
    files = {path.name: path.read_text() for path in [*out.glob("rollouts/*"), *out.glob("skill_library/*")]}
    moments = [{k: v.tolist() for k, v in each.items()} for each in trainer["optimizer"]["state"].values()]
    return [weights(out), (out / "checkpoint/skill_library.jsonl").read_text(), lines, files, moments,
            trainer["generator"].tolist(), trainer["step"], sorted(trainer["initial_names"])]


def test_resuming_equals_not_stopping(world, monkeypatch):
    """What later steps have left is removed."""
    whole = world("whole", "--batch", "1", "--steps", "3")
    parts = world("parts", "--batch", "1", "--steps", "1")
    with open(parts / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "clock": "modelled"}\n{"step": 3, "clo')
    for name in ("rollouts/step_9.jsonl", "skill_library/global_step_2.jsonl"):
        (parts / name).write_text("left behind")
    (parts / "checkpoint").unlink()  # as a program copies it that follows links
    shutil.copytree(parts / "checkpoint_1", parts / "checkpoint")
    mapped, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda *path, **how: mapped.append(how.get("mmap")) or load(*path, **how))
    world("parts", "--resume", "--steps", "3", "--set", "save_every=2")
    assert mapped == [True]  # read whole, an optimiser of 8B parameters would be in the host's memory twice
    assert state(whole) == state(parts)
    assert sorted(path.name for path in parts.glob("checkpoint*")) == ["checkpoint", "checkpoint_3"]
    world("whole", "--resume")  # complete already: nothing happens
    assert state(whole) == state(parts)


SHORT, WHOLE = ["--steps", "2", "--batch", "1"], []  # the state that an uninterrupted run leaves, which is made once
CHECKPOINT = [(shutil, "rmtree"), (Qwen3ForCausalLM, "save_pretrained"), (torch, "save"), (Path, "symlink_to"),
              (os, "replace")]


@pytest.mark.parametrize("functions, n, says", [
    ([(reinforce, "finish_step")], 3, "continue with: python reinforce.py --out .*/killed --resume"),
    (CHECKPOINT, 2, None), (CHECKPOINT, 7, "continue"), (CHECKPOINT, 11, "continue")])
def test_interrupted_and_resumed(world, tmp_path, monkeypatch, functions, n, says):
    """It ends on entering the n-th of some calls: as the second step has changed the library and nothing is saved, or
    at a file operation of the checkpoints, of which there are 6 before the first step and more in each step."""
    calls = itertools.count(1)

    def dying(function):
        def call(*arguments, **options):
            if function.__name__ == "save_pretrained":
                Path(arguments[1], "model.safetensors").write_bytes(b"half a file")
            counts = functions != CHECKPOINT or any("checkpoint" in str(argument) for argument in arguments)
            if counts and next(calls) == n:
                raise KeyboardInterrupt
            return function(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        for owner, name in functions:
            patch.setattr(owner, name, dying(getattr(owner, name)))
        with pytest.raises(KeyboardInterrupt, match=says):
            world("killed", *SHORT)
    if not WHOLE:
        WHOLE.append(state(world("whole", *SHORT)))
    begun = (tmp_path / "killed/checkpoint").exists()  # else nothing was done yet, and the same command begins again
    assert WHOLE[0] == state(world("killed", *(["--resume"] if begun else SHORT)))


# ---- what is refused


def test_bad_input_is_one_line_and_exit_code_2(refusal, tmp_path, model_folder):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    model = f"--model {model_folder} --device cpu"
    for said, options in (
            ("no such model folder", f"--model {tmp_path}/none --device cpu"),
            ("cannot write", f"{model} --out {tmp_path}/file/out"),
            ("no problem files", f"{model} --tasks {tmp_path}/empty"), ("nothing to resume", "--resume"),
            ("choose from davinci, ", "--recipe alphazero"), ("choose from all, ", "--set history=none"),
            ("--no-skills and --bm25-only contradict", "--no-skills --bm25-only"), ("--stepz", "--stepz 3"),
            ("invalid int", "--set trials=few"), ("invalid", "--lr fast")):
        assert said in refusal(reinforce.main, "--out", tmp_path / "out", *options.split())
    assert "--out" in refusal(reinforce.main, "--resume")
    assert not (tmp_path / "out").exists()  # a refused run leaves nothing behind


def test_resume_refuses_another_run_and_a_damaged_one(world, refusal, capsys, tmp_path):
    out = world("run", "--steps", "1")
    kept, trainer = sorted((out / "rollouts").iterdir()), out / "checkpoint/trainer.pt"
    capsys.readouterr()

    def refused(options="--resume"):
        return refusal(reinforce.main, "--out", out, *options.split())

    assert "already holds a run" in refused("--device cpu")
    assert "has model = " in refused(f"--resume --model {tmp_path}")
    assert "has gamma = 1.0, not 0.5" in refused("--resume --set gamma=0.5")
    (out / "metrics.jsonl").write_text("{\n")
    assert "metrics.jsonl, line 1: cannot be read" in refused()
    torch.save(torch.load(trainer) | {"optimizer": {}}, trainer)
    assert "of another version" in refused()
    assert sorted((out / "rollouts").iterdir()) == kept  # nothing was deleted


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

"""Several ranks do what one process does: update, cold start, library, files of a run, resuming; and they end together.

Run by torchrun, this file is one of the ranks: torchrun --nproc_per_node=2 tests/test_node.py FOLDER OPTIONS ...
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import conftest  # noqa: F401 (first: it puts the root on the path)
import reinforce
import sft
from backbone import Backbone
from command.files import read_lines
from fast import ranks
from test_reinforce import enter, ingredients, library_at, metrics, world  # noqa: F401 (a fixture)
from test_sft import encoded, options, small_model


@pytest.fixture(scope="module")
def killed(model_folder, tmp_path_factory):
    """One launch of two ranks, which takes long: a cold start, and a run in whose last step rank 1 is killed.

    (the folder of what they leave, the finished process, when it ended)
    """
    folder = tmp_path_factory.mktemp("killed")
    given = [*ingredients(folder, model_folder), "--batch", "3", "--steps", "2", "--eval", "none"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--", __file__]
    done = subprocess.run([*command, folder, *given, "--out", folder / "ranks"], text=True,
                          capture_output=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})  # there may be fewer
    return folder, done, time.time()


# ---- the cold start


def training(model, out, **changes):
    """A training in batches of several parts, which two ranks begin and one alone goes on with: its history."""
    given = options(out=str(out), model="M", batch_sequences=6, **changes)
    return sft.train(model, [], encoded(33, np.random.default_rng(0)), 0, given)


def bfloat16_model(seed=0):
    return small_model(seed).bfloat16()


def training_on_a_rank(folder):
    """The first two steps; then two more, of a training that is continued."""
    saved, sft.SAVE_EVERY = sft.TrainStep.save, -1

    def save(step, path, state):
        if state["step"] in (2, 4):
            saved(step, path, state)
            ranks.each(None)  # it is written
            raise EOFError

    sft.TrainStep.save = save
    for resume in False, True:
        with contextlib.suppress(EOFError):
            training(bfloat16_model(), folder, resume=resume)


def test_two_ranks_begin_and_one_goes_on_as_one_alone(killed, tmp_path):
    folder, done, _ = killed
    assert (folder / sft.CHECKPOINT).is_file(), done.stderr
    assert torch.load(folder / sft.CHECKPOINT)["step"] == 4
    alone, resumed = bfloat16_model(), bfloat16_model(1)
    whole, again = training(alone, tmp_path), training(resumed, folder, resume=True)
    for mine, theirs in zip(resumed.parameters(), alone.parameters()):  # in all they moved by 0.02
        assert (mine - theirs).abs().float().mean() < 5e-4
    assert whole[-1]["step"] > 4
    assert [entry["loss"] for entry in again] == pytest.approx([entry["loss"] for entry in whole], abs=1e-3)


# ---- a run


def run_on_a_rank(arguments):
    """reinforce.py with scripted replies, as test_reinforce.world. Rank 1 is killed in the second step."""
    enter(setattr)
    credit, calls = reinforce.credit, []

    def credit_or_die(*given):
        calls.append(1)
        if len(calls) == 2 and ranks.rank() == 1:
            print(f"killed at {time.time()};", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return credit(*given)

    reinforce.credit = credit_or_die
    reinforce.finish_run = lambda run: None
    reinforce.main(arguments)


def test_a_rank_is_killed_and_one_process_goes_on(killed, world, tmp_path):
    whole, out, (folder, done, at) = world("whole", "--steps", "2", "--batch", "3"), tmp_path / "ranks", killed
    shutil.copytree(folder / "ranks", out, symlinks=True)
    assert done.returncode != 0 and at - float(re.search(r"killed at ([\d.]+);", done.stderr)[1]) < 30
    assert done.stdout.count("step 1/2") == 1 and "step 2/2" not in done.stdout  # the progress is told once
    world("ranks", "--resume")
    assert library_at(out, 2) == library_at(whole, 2) and len(library_at(out, 2)) > 3
    for mine, theirs in zip(metrics(out), metrics(whole), strict=True):
        assert mine.pop("seconds").keys() == theirs.pop("seconds").keys()
        for name, value in theirs.items():
            assert mine[name] == (pytest.approx(value, rel=1e-4, abs=1e-4) if isinstance(value, float) else value), name
    a, b = (torch.load(folder / "checkpoint/trainer.pt", weights_only=True) for folder in (out, whole))
    assert torch.equal(a["generator"], b["generator"]) and a["step"] == b["step"] == 2
    # AdamW divides by sqrt(v) + 1e-8: of a rare token with gradients of 1e-7, rounding moves a weight by 1 % of a step.
    for mine, theirs in zip(*(Backbone.load(folder / "checkpoint").model.parameters() for folder in (out, whole))):
        assert (mine - theirs).abs().max() < 1e-4
    for path in sorted((whole / "rollouts").iterdir()):
        mine, theirs = ([[line.get(key) for key in ("role", "task", "prompt", "reply")] for line in read_lines(file)]
                        for file in (out / "rollouts" / path.name, path))
        assert mine == theirs


def distributing_on_a_rank():
    """Equal ones are together, and each rank has about as many."""
    for items, parts in (("aabbccdd", "00110011"), ("abacad", "010101"), ("a", "0"), ("", "")):
        found = ranks.distribute(items, lambda part: [item + str(ranks.rank()) for item in part])
        assert found == [item + part for item, part in zip(items, parts)]


def all_on_a_rank(arguments):
    folder, *options = arguments
    distributing_on_a_rank()
    training_on_a_rank(Path(folder))
    run_on_a_rank(options)


if __name__ == "__main__":
    sys.argv[0] = "test_node.py"
    torch.set_num_threads(1)
    ranks.joined(all_on_a_rank)(sys.argv[1:])

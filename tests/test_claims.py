"""The table of claims: intervals over seeds and what is concluded from them, and what is read of a run's files."""

import math
import sys

import pytest

from command.files import ROOT
from conftest import write_lines

sys.path.insert(0, str(ROOT / "results"))
import claims  # noqa: E402


def test_an_interval_and_its_verdict():
    assert claims.student(4) == pytest.approx(3.182, abs=0.005)  # of a table of Student's t
    mean, half = claims.interval([1.0, 2.0, 3.0])
    assert mean == 2 and half == pytest.approx(4.303 / math.sqrt(3))
    assert claims.interval([0.3]) == (0.3, math.inf)
    assert claims.judged([0.3, 0.31, 0.32]) == "confirmed"
    assert claims.judged([-0.3, -0.31, -0.32]) == "contradicted"
    assert claims.judged([0.01, -0.01, 0.0, 0.005]) == "none seen"
    _, half = claims.interval([0.2, -0.1, 0.3])
    assert claims.judged([0.2, -0.1, 0.3]) == f"open ({math.ceil(3 * (half / (0.4 / 3)) ** 2)} seeds)"


TASK = "redundant/1_MirroredLength"  # its pair is flip before norm


def test_what_is_kept_of_a_run(tmp_path, monkeypatch):
    """Rewards with the library and without it, and uses of skills that the run has found."""
    def rollout(skills, speedup, reward):
        return {"role": "policy", "task": TASK, "skills": skills,
                "turns": [{"verdict": {"correct": speedup > 0, "speedup": speedup}, "reward": reward},
                          {"verdict": {"correct": True, "speedup": 1.0}, "reward": reward / 2}]}

    found = "leave-out-flip-before-norm"
    folder, kept = tmp_path / "run", tmp_path / "kept"
    for_all = {"eval_reward_best": 1.0, "with_fast_1.2": 0.5}
    write_lines(folder / "metrics.jsonl",
                for_all | {"step": 0, "library": 1, "with_reward_best": 1.0, "without_reward_best": 1.0},
                for_all | {"step": 2, "library": 2, "with_reward_best": 1.5, "without_reward_best": 1.25})
    write_lines(folder / "skill_library/global_step_9.jsonl", {"tags": ["old"]})
    write_lines(folder / "skill_library/global_step_10.jsonl", {"tags": ["flip", "norm"]}, {"tags": ["a", "b"]})
    write_lines(folder / "rollouts/redundant_0.jsonl", rollout([], 1.0, 1.0), rollout([], 1.0, 1.0))
    write_lines(folder / "rollouts/redundant_2.jsonl", {"role": "selection"}, rollout([found], 2.0, 1.5),
                rollout([], 1.0, 1.0))
    write_lines(folder / "rollouts/step_2.jsonl", {"role": "selection"}, rollout([found], 2.0, 1.5),
                rollout([found], 0.0, 0.0), rollout(["other"], 2.0, 1.5))
    claims.keep(folder, kept)
    monkeypatch.setattr(claims, "HELD_OUT", [("flip", "norm")])
    run = claims.Run(kept)
    assert run.by_problem() == run.by_problem(known=True, turns=claims.FIRST_TURN) == {TASK: 0.5}
    assert run.gain("with_reward_best") == 0.5
    assert run.found() == [("flip", "norm")] and claims.held(run) == 1.0
    assert run.uses == {found: [[2, TASK, 2.0]]}
    rows = {measured: values for _, measured, values in claims.claims({"default": {0: run}})}
    assert rows["reward, redundant operators, with the library, after - before"] == [0.5]
    assert rows["reward with the library - without, all 12 problems"] == [0.5]
    assert rows["the same, problems about whose pair the library has a skill"] == [0.5]
    assert rows["held-out pairs in the library"] == [1.0]
    rows = claims.claims({"default": {0: run}, "no-skills": {0: run}})
    assert [values for claim, _, values in rows if "the weights alone" in claim] == [[0.0], [0.0]]
    assert ("RL improves kernels", "the same, first turns", [0.5]) in rows

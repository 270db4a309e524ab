"""Redundant operators: what the cold start may know of the held-out pairs, and the expert's kernels; and the table of
claims in their world: intervals over seeds, what is concluded, and what is read of a run's files."""

import json
import math
import random
import sys

import pytest
import torch

from candidates import all_pass
from command.files import ROOT
from conftest import write_lines
from synthetic.lessons import Lesson
from synthetic.redundant import (HELD_OUT, NAME, REDUCTIONS, TAUGHT, TORCH, Chain, answer, draw, draw_call,
                                 problem_text)
from tasks import Task, construct

sys.path.insert(0, str(ROOT / "results"))
import claims  # noqa: E402


def chain_of(*names, seed=0):
    rng = random.Random(seed)
    return Chain(tuple(draw_call(name, rng) for name in names), "x")


def output(chain):
    model, get_inputs = construct(problem_text(chain, random.Random(0)))
    torch.manual_seed(0)
    return model(*get_inputs())


# ---- what the cold start knows

@pytest.mark.parametrize("brief", [True, False])
def test_no_lesson_names_or_shows_a_held_out_pair(brief):
    held_out, seen = [NAME.format(*pair) for pair in HELD_OUT], set()
    for seed in [*range(400), 3350, 5575]:  # in the last two, leaving out one operator brings a held-out pair together
        lesson = Lesson(seed, brief)
        assert not {*lesson.chain.pairs()} & {*HELD_OUT}
        example = lesson.write()
        if example:
            seen.add(example.kind.removesuffix("+skills"))
            assert not [name for name in held_out if name in str(example.messages)]
    assert seen == {"policy", "selection", "summary"} and not {*TAUGHT} & {*HELD_OUT}


def test_a_first_turn_leaves_out_what_a_skill_names_and_nothing_else():
    followed = 0
    for seed in range(200):
        lesson = Lesson(seed, brief=False)
        chain, reply = lesson.chain, lesson.policy().messages[-1]["content"]
        plan = reply.split("\n")[0]
        missing = [a for a, b in chain.pairs() if NAME.format(a, b) in plan]
        followed += bool(missing)
        for name, line in zip(chain.names, chain.lines):
            assert name not in TORCH or (f" {line}\n" in reply) != (name in missing)
    assert followed > 20


# ---- the expert's kernels

@pytest.mark.parametrize("pair", HELD_OUT)
def test_which_held_out_pairs_hold(pair):
    """Half of them; which ones, the model is never told."""
    assert claims.HOLDS <= {*HELD_OUT} and len(HELD_OUT) == 2 * len(claims.HOLDS)
    chain = chain_of(*pair) if pair[1] in REDUCTIONS else chain_of(*pair, "sum")
    with_a, without_a = output(chain), output(chain.without({pair}))
    assert torch.allclose(with_a, without_a, atol=1e-4) == (pair in claims.HOLDS)


def test_kernels_are_correct_with_the_operator_and_without_it_where_the_pair_holds(box):
    pairs = []
    for seed, pair in enumerate(sorted(claims.HOLDS)[::3]):
        chain = chain_of("tanh", *pair, "sigmoid", seed=seed)
        task = Task(f"pair/{seed}", 0, problem_text(chain, random.Random(seed)))
        pairs += [(task, answer(chain).code), (task, answer(chain.without({pair})).code)]
    verdicts = all_pass(box, pairs)
    for with_a, without_a in zip(verdicts[::2], verdicts[1::2]):
        assert without_a.speedup > 1.2 * with_a.speedup


def test_every_drawn_chain_has_its_pair_and_runs():
    for seed in range(60):
        pair = random.Random(seed).choice(TAUGHT)
        chain = draw(random.Random(seed), pair, 3)
        assert pair in zip(chain.names, chain.names[1:])
        assert output(chain).shape[0] > 1


# ---- the table of claims

def test_an_interval_and_its_verdict():
    assert claims.student(8) == pytest.approx(2.365, abs=0.005)  # of a table of Student's t
    mean, half = claims.interval([1.0, 2.0, 3.0])
    assert mean == 2 and half == pytest.approx(4.303 / math.sqrt(3))
    assert claims.interval([0.3]) == (0.3, math.inf)
    for values, verdict in (([0.3, 0.31, 0.32], "confirmed"), ([-0.3, -0.31, -0.32], "contradicted"),
                            ([0.01, -0.01, 0.0, 0.005], "none seen"), ([0.2, -0.1, 0.3], "open (46 seeds)")):
        assert claims.judged(values) == verdict


TASK = "redundant/1_MirroredLength"  # its pair is flip before norm


def test_what_is_kept_of_a_run(tmp_path, monkeypatch):
    """Rewards with the library and without it, and uses of skills that the run has found."""
    def rollout(skills, speedup, reward):
        return {"role": "policy", "task": TASK, "skills": skills,
                "turns": [{"verdict": {"correct": speedup > 0, "speedup": speedup}, "reward": reward},
                          {"verdict": {"correct": True, "speedup": 1.0}, "reward": reward / 2}]}

    found, folder, kept = "leave-out-flip-before-norm", tmp_path / "run", tmp_path / "kept"
    metrics = {"library": 1, "with_fast_1.2": 0.5, "with_reward_best": 1.0, "without_reward_best": 1.0}
    write_lines(folder / "metrics.jsonl", metrics | {"step": 0}, metrics | {"step": 2, "with_reward_best": 1.5})
    write_lines(folder / "skill_library/global_step_9.jsonl", {"tags": ["old"]})
    write_lines(folder / "skill_library/global_step_10.jsonl", {"tags": ["flip", "norm"]}, {"tags": ["a", "b"]})
    write_lines(folder / "rollouts/redundant_0.jsonl", rollout([], 1.0, 1.0), rollout([], 1.0, 1.0))
    write_lines(folder / "rollouts/redundant_2.jsonl", {"role": "selection"}, rollout([found], 2.0, 1.5),
                rollout([], 1.0, 1.0))
    write_lines(folder / "rollouts/step_2.jsonl", {"role": "selection"}, rollout([found], 2.0, 1.5),
                rollout([found], 0.0, 0.0), rollout(["other"], 2.0, 1.5))
    claims.keep(folder, kept)
    level2 = json.loads(claims.LEVEL2.read_text())
    level2["figures"][1]["fast_1.2"] += 0.25  # of the best turn, by the strict rule
    write_lines(kept / "level2.json", level2)
    monkeypatch.setattr(claims, "HELD_OUT", [("flip", "norm")])
    run = claims.Run(kept)
    assert run.uses == {found: [[2, TASK, 2.0]]}
    rows = {measured: values for _, measured, values in claims.claims({"default": {0: run}})}
    assert rows["reward, redundant operators, with the library, after - before"] == [0.5]
    assert rows["reward with the library - without, all 12 problems"] == [0.5]
    assert rows["the same, problems about whose pair the library has a skill"] == [0.5]
    assert rows["level 2, Fast_1.2: model before RL, with the run's last library - with its first"] == [0.25]
    assert rows["held-out pairs in the library"] == [1.0] and rows["share of them that is redundant, - 0.5"] == [0.5]
    rows = claims.claims({"default": {0: run}, "no-skills": {0: run}})
    assert [values for claim, _, values in rows if "the weights alone" in claim] == [[0.0], [0.0]]
    assert ("RL improves kernels", "the same, first turns", [0.5]) in rows

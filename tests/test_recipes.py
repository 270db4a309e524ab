"""What each recipe sets, written down from the papers and not from the code; and what only a neighbour asks for."""

import json

import pytest

from backbone import Sampling
from conftest import FakeSandbox, Scripted, configure, kernel, make_task
from policy import HISTORIES, REWARDS, rollout
from recipes import RECIPES
from sandbox import Verdict
from test_reinforce import records, world  # noqa: F401 (a fixture)

ALONE = {"skills": False, "cross_scheme": False}  # without skills there are no schemes to scale across
TABLE = {  # what is not as daVinci-kernel has it (tests/test_paper.py); all else is equal, on every device
    "davinci": {},
    "drkernel": ALONE | {"reward": "drkernel", "k": 0, "n": 16, "turns": 3, "oversample": 1},  # PRS and MRS as daVinci
    "kevin": ALONE | {"reward": "kevin", "gamma": 0.4, "turns": 4, "k": 0, "n": 16, "temperature": 0.9, "prs": False,
                      "mrs": False, "mask_void": False, "baseline": "group-norm", "loss_scale": 1.0,
                      "loss_mean": "token", "history": "condensed", "min_std": 0.0, "oversample": 1, "thinking": True},
    "cuda-agent": ALONE | {"reward": "cuda-agent", "prs": False, "mrs": False, "mask_void": False, "min_std": 0.0,
                           "oversample": 1}}
LARGE = {"drkernel": {"prompt_tokens": 10240}}  # over a billion parameters
EARNED = {  # reward of: wrong; a decoy; correct at 0.5x and 1.052x with coverage 0; at 1.053x and 10x with coverage 1
    "davinci": [0.0, 0.0, 0.75, 1.026, 1.5265, 4.0], "drkernel": [0.0, 0.0, 0.75, 1.026, 1.5265, 2.5],
    "kevin": [0.0, 0.0, 0.8, 1.352, 1.353, 10.3], "cuda-agent": [-1.0, -1.0, 1.0, 1.0, 2.0, 2.0]}


@pytest.mark.parametrize("given, large", [("cpu", False), ("cuda", False), ("cuda", True)])
@pytest.mark.parametrize("recipe", list(TABLE))
def test_a_recipe_sets_all_that_its_name_implies(recipe, given, large):
    assert list(RECIPES) == list(TABLE)
    mine, davinci = (vars(configure({"device": given, "recipe": name}, large)) for name in (recipe, "davinci"))
    assert mine == davinci | TABLE[recipe] | (LARGE.get(recipe, {}) if large else {}) | {"recipe": recipe}


@pytest.mark.parametrize("recipe", list(TABLE))
def test_the_reward_of_a_recipe(recipe):
    correct = (0.5, 0.0), (1.052, 0.0), (1.053, 1.0), (10.0, 1.0)
    wrong = Verdict(compiled=True), Verdict(compiled=True, rejected="decoy", speedup=2.0, coverage=0.9)
    verdicts = [*wrong, *(Verdict(correct=True, speedup=s, coverage=c) for s, c in correct)]
    reward = REWARDS[TABLE[recipe].get("reward", "davinci")]
    assert list(map(reward, verdicts)) == pytest.approx(EARNED[recipe])


@pytest.mark.parametrize("history, thoughts", [("all", [0, 1, 2]), ("condensed", [0, 0, 0])])
def test_kevin_drops_thoughts_and_keeps_plans_and_kernels(model, history, thoughts):
    scripted = Scripted(model.model, model.tokenizer)
    scripted.script = lambda role, prompt: ["<think>a long thought</think>" + kernel(1.5) + "\nThat is all."]
    rollout(scripted, FakeSandbox(), [(make_task(), ())], 3, Sampling(400), strategy=HISTORIES[history])
    for text, counts in (("a long thought", thoughts), ("That is all", thoughts), ("# speedup 1.5", [0, 1, 2]),
                         ("Plan: x.", [0, 1, 2])):
        assert [prompt.count(text) for _, prompt in scripted.asked] == counts


def test_a_recipe_is_five_lines(world, monkeypatch):
    """As recipes.py tells a forker: a reward, and a row by name; all else keeps davinci's values."""
    monkeypatch.setitem(REWARDS, "speed", lambda verdict: verdict.speedup if verdict.correct else 0.0)
    monkeypatch.setitem(RECIPES, "mine", dict(reward="speed", gamma=0.5))
    out = world("run", "--recipe", "mine", "--steps", "1")
    turns = [turn for line in records(out, 1, "policy") for turn in line["turns"]]
    assert all(turn["reward"] == (turn["verdict"]["speedup"] or 0.0) for turn in turns)
    config = json.loads((out / "config.json").read_text())
    assert {"gamma": 0.5, "prs": True, "k": 2, "recipe": "mine"}.items() <= config.items()

"""Every number of the paper and what each recipe sets, written down from the papers and the release, not from the code:
a slip must not pass. And what only a neighbour asks for."""

import re

import pytest

import advantages
import policy
import selector
import summarizer
from backbone import Sampling
from chat.prompts import SELECT_TOOL, UPDATE_TOOL
from command.files import ROOT
from conftest import FakeSandbox, Scripted, configure, kernel, make_task
from policy import HISTORIES, REWARDS, rollout
from recipes import RECIPES
from sandbox import Verdict

# What a model of over a billion parameters is trained with, on a GPU. Paper's symbol or the release's variable: value.
PAPER = {
    "batch": 16, "k": 3, "n": 4, "turns": 3, "s": 8, "oversample": 2,  # B, k, n, T, s, PROMPT_OVERSAMPLING_FACTOR
    "lr": 1e-6, "loss_scale": 1000.0, "grad_clip": 1.0, "clip_low": 0.2, "clip_high": 0.28,
    "temperature": 1.0, "gamma": 1.0, "selection_weight": 0.3, "summary_weight": 0.5, "min_gain": 1.2,
    "prompt_tokens": 24576, "policy_tokens": 8192, "selection_tokens": 1024, "summary_tokens": 2048,
    "trials": 5, "eval_samples": 8, "min_std": 1e-3, "steps": 200,
    "reward": "davinci", "baseline": "leave-one-out", "loss_mean": "reply", "history": "all",
    "prs": True, "mrs": True, "cross_scheme": True, "mask_void": True, "skills": True,
    "bm25_only": False, "no_verify": False, "freeze_selection": False, "freeze_summary": False, "eval": "all"}
CONSTANTS = {
    policy: {"SPEEDUP_CAP": 6.0}, advantages: {"DUAL_CLIP": 3.0, "DIVISOR_FLOOR": 0.05, "MRS_BAND": 1e-3,
                                               "MRS_LEAST": 1e-4},
    summarizer: {"MOST_PROPOSALS": 2, "MOST_CONTENT_TOKENS": 640},  # 512 and a quarter
    selector: {"MOST_SKILLS": 3, "TASK_CHARACTERS": 1000, "CANDIDATES": 20}}


def test_a_large_model_is_trained_with_the_papers_numbers():
    options = vars(configure({"device": "cuda"}, large=True))
    assert {name: options[name] for name in PAPER} == PAPER
    assert configure({"device": "cuda"}).lr == 5e-5
    for module, papers in CONSTANTS.items():
        assert vars(module) | papers == vars(module)


@pytest.mark.parametrize("tool, name, listed, fields", [
    (SELECT_TOOL, "select_skills", "selected_skills", ["name", "reason"]),
    (UPDATE_TOOL, "update_skill_library", "new_skills", ["name", "description", "scope", "tags", "content"])])
def test_the_tools_have_the_releases_names_and_fields(tool, name, listed, fields):
    arguments = tool["function"]["parameters"]["properties"]
    assert (tool["function"]["name"], list(arguments)) == (name, ["think", listed])
    assert list(arguments[listed]["items"]["properties"]) == fields


def test_what_the_table_of_differences_names_is_there():
    """results/faithful.md, column 'ours': every file, function, constant and option in backticks exists."""
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in ROOT.rglob("*.py")}
    rows = re.findall(r"^\| \d+ \|.*\|$", (ROOT / "results/faithful.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row.strip("| ").split(" | ")[3])}
    words = set(re.findall(r"\w+", "\n".join(text for name, text in sources.items() if not name.startswith("tests/"))))
    lost = [name for name in sorted(named) if name not in sources and not (ROOT / name).is_dir()
            and not set(re.findall(r"\w+", name)) <= words]
    assert 80 < len(rows) <= 120 and len(named) > 80 and not lost


# ---- recipes

ALONE = {"skills": False, "cross_scheme": False}  # without skills there are no schemes to scale across
TABLE = {  # what is not as daVinci-kernel has it (PAPER); all else is equal, on every device
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

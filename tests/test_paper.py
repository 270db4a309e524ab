"""Every number of the paper, written down from the paper and its release, not from the code: a slip must not pass."""

import re

import pytest

import advantages
import policy
import selector
import summarizer

from conftest import configure
from chat.prompts import SELECT_TOOL, UPDATE_TOOL
from command.files import ROOT

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

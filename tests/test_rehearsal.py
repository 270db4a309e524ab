"""The README's commands for real models in their order: results/rehearsal.py, with a shape of 6 million parameters."""

import json
import subprocess
import sys

import pytest

from chat_templates import template_tokenizer
from command.files import ROOT

PHASES = ["model", "data", "sft", "rl", "resume", "again", "bench", "page"]


@pytest.mark.slow
@pytest.mark.parametrize("foreign", [False, True])
def test_every_phase_ends_well_and_trains(foreign, tokenizer, tmp_path):
    """foreign: random weights with a tokenizer and a chat template that are not the tiny model's."""
    more = []
    if foreign:
        template_tokenizer(tokenizer, "qwen3").save_pretrained(tmp_path / "tokenizer")
        more = ["--tokenizer", tmp_path / "tokenizer"]
    out = tmp_path / "out"
    command = [sys.executable, "results/rehearsal.py", "--size", "tiny", "--out", out, *more]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    record = json.loads((out / "rehearsal.json").read_text())
    assert list(record) == PHASES and not any(phase["status"] for phase in record.values())
    assert record["sft"]["examples"] == 8 and "skipped" not in (out / "sft.log").read_text()
    assert record["sft"]["tokens_per_second"] > 0 and record["again"]["examples"] > 0
    steps = record["resume"]["steps"]
    assert len(steps) == 3 and steps[:2] == record["rl"]["steps"]
    assert all(step["tokens_trained"] > 0 and step["grad_norm"] > 0 and step["ratio_off"] < 1e-3 for step in steps)
    assert (out / "rl/comparison.html").exists()
    assert len((out / "bench/results.jsonl").read_text().splitlines()) == 5

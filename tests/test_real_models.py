"""A real model differs only in its name: kinds of chat template and architectures, from end to end on a CPU.

Random weights write nothing that compiles, so turns are rewarded by a die: what is tested is that every path holds.
"""

import json
import random
from pathlib import Path

import pytest
import torch

import bench
import policy
import reinforce
import sft
from backbone import Backbone
from chat.prompts import SELECT_TOOL
from chat_templates import TEMPLATES, calling, template_tokenizer
from command.files import read_lines
from conftest import CONTENT, FakeSandbox, make_task, tiny_model, write_lines
from sandbox import Verdict
from selector import selection_messages
from skills import MODEL_FILE, Skill, SkillLibrary

# Kind of template: transformers' name of the architecture that has it here.
ARCHITECTURES = dict.fromkeys(TEMPLATES, "Qwen3") | {
    "release": "Qwen2", "llama2": "Llama", "mistral": "Mistral", "falcon": "Olmo2", "smol": "SmolLM3"}


SKILLS = [Skill("fuse", "relu forward", "general", ("relu",), CONTENT)]


@pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=[pytest.mark.slow] if kind != "qwen3" else []) for kind in ARCHITECTURES])
def test_one_cold_start_one_training_step_one_problem(kind, tokenizer, tmp_path, monkeypatch):
    source, start, out = tmp_path / "source", tmp_path / "start", tmp_path / "run"
    template = Path(__file__).with_name("templates") / f"{kind}.jinja"
    task, made = make_task(), template_tokenizer(tokenizer, kind)
    tiny_model(ARCHITECTURES[kind], made, max_position_embeddings=8192).save_pretrained(source)
    made.chat_template = None  # as some base models are
    made.save_pretrained(source)
    SkillLibrary(SKILLS).save(source / MODEL_FILE)
    write_lines(tmp_path / "tasks/1_one.py", task.source)
    for module in (reinforce, bench):
        monkeypatch.setattr(module, "Sandbox", FakeSandbox)  # no reply has code

    # One cold start, from rows with tool calls and with several turns.
    talk = policy.next_messages(policy.policy_messages(task, ()), "Plan: a.", Verdict())
    talk.append({"role": "assistant", "content": "Plan: b."})
    row = {"messages": [*selection_messages(task, SKILLS), calling(None)], "tools": [SELECT_TOOL]}
    write_lines(tmp_path / "rows.jsonl", row, {"messages": talk})
    assert sft.main(f"--model {source} --data {tmp_path}/rows.jsonl --out {start} --device cpu --epochs 5 --lr 1e-2 "
                    f"--batch-tokens 1024 --chat-template {template}".split()) == 0
    history = json.loads((start / "sft.json").read_text())["history"]
    assert history[-1]["loss"] < 0.9 * history[0]["loss"] and not (start / sft.CHECKPOINT).exists()

    # One training step, in which each reply is trained on to the token.
    assert SkillLibrary.of_model(start).skills == SKILLS  # the library stays with the model
    die, before = random.Random(0), Backbone.load(start)
    monkeypatch.setitem(policy.REWARDS, "davinci", lambda verdict: die.random())
    assert reinforce.main(f"--model {start} --tasks {tmp_path}/tasks --out {out} --device cpu --eval none --steps 1 "
                          "--batch 1 --k 2 --n 2 --turns 2 --policy-tokens 40 --lr 1e-3 "
                          "--set trials=1 selection_tokens=20".split()) == 0
    line = read_lines(out / "metrics.jsonl")[-1]
    assert sum(line["rows"].values()) > 8 and line["tokens_trained"] > 0
    assert line["ratio_off"] < 1e-3 and line["grad_norm"] > 0
    after = Backbone.load(out / "checkpoint")
    assert any(not torch.equal(a, b) for a, b in zip(before.model.parameters(), after.model.parameters()))

    # The run's own good replies.
    assert sft.main(f"--model {out}/checkpoint --from-rollouts {out} --min-reward 0.2 --device cpu --epochs 1 "
                    f"--out {tmp_path}/again".split()) == 0

    # One problem of the benchmark.
    assert bench.main(f"--level 1 --ids 1 --model {out}/checkpoint --samples 1 --turns 2 --max-new-tokens 40 "
                      f"--device cpu --out {tmp_path}/bench".split()) == 0
    assert len(read_lines(tmp_path / "bench/results.jsonl")) == 1

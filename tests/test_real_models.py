"""A real model differs only in its name: architectures, each with its own kind of template, from end to end on a CPU.

Random weights write nothing that compiles, so turns are rewarded by a die: what is tested is that every path holds.
"""

import json
import random

import pytest
import torch

import bench
import policy
import reinforce
import sft
from backbone import SELECT_TOOL, Backbone
from chat_templates import TEMPLATES, template_tokenizer
from conftest import CONTENT, make_task, tiny_model
from policy import next_messages, policy_messages
from sandbox import Verdict
from selector import selection_messages
from skills import MODEL_FILE, Skill, SkillLibrary

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
ARCHITECTURES = [  # transformers' name, kind of template, what the configuration needs
    ("Qwen3", "qwen3", {"head_dim": 16}), ("Qwen2", "release", {}), ("Llama", "llama2", {}), ("Olmo2", "llama3", {}),
    ("Mistral", "mistral", {"head_dim": 8, "sliding_window": None}), ("Gemma2", "gemma", {"head_dim": 8}),
    ("Phi3", "phi", {}), ("StableLm", "zephyr", {}), ("GPTNeoX", "vicuna", {"num_key_value_heads": 4}),
    ("Qwen3Moe", "falcon", {"num_experts": 4, "head_dim": 8} | EXPERTS),
    ("DeepseekV3", "r1", {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
                          "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 2}),
    ("SmolLM3", "smol", {}), ("Granite", "granite", {"logits_scaling": 4.0}), ("Glm4", "glm", {"head_dim": 8}),
    ("GPT2", "deaf", {"num_key_value_heads": 4})]


@pytest.mark.parametrize("name, template, config", [
    pytest.param(*row, id=row[0], marks=[pytest.mark.slow] if row[0] != "Qwen3" else []) for row in ARCHITECTURES])
def test_one_cold_start_one_training_step_one_problem(name, template, config, tokenizer, tmp_path, monkeypatch):
    source, start, out = tmp_path / "source", tmp_path / "start", tmp_path / "run"
    made = template_tokenizer(tokenizer, template)
    tiny_model(name, made, **config | {"max_position_embeddings": 4096}).save_pretrained(source)
    made.save_pretrained(source)
    task = make_task()
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/1_one.py").write_text(task.source)
    skills = [Skill("fuse", "relu forward", "general", ("relu",), CONTENT)]

    # One cold start, from rows with tool calls and with several turns.
    called = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {
        "name": "select_skills", "arguments": {"think": "t", "selected_skills": [{"name": "fuse", "reason": "r"}]}}}]}
    talk = next_messages(policy_messages(task, ()), "Plan: a.", Verdict())
    talk.append({"role": "assistant", "content": "Plan: b."})
    rows = [{"messages": [*selection_messages(task, skills), called], "tools": [SELECT_TOOL]}, {"messages": talk}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert sft.main(["--model", str(source), "--data", str(tmp_path / "rows.jsonl"), "--out", str(start), "--device",
                     "cpu", "--epochs", "5", "--batch-tokens", "1024", "--lr", "1e-2"]) == 0
    history = json.loads((start / "sft.json").read_text())["history"]
    assert history[-1]["loss"] < 0.9 * history[0]["loss"] and not (start / sft.CHECKPOINT).exists()

    # One training step, in which each reply is trained on to the token.
    SkillLibrary(skills).save(start / MODEL_FILE)
    die, before = random.Random(0), Backbone.load(start)
    monkeypatch.setitem(policy.REWARDS, "davinci", lambda verdict: die.random())
    sizes = {"steps": 1, "batch": 1, "k": 2, "n": 2, "turns": 2, "trials": 1, "policy-tokens": 40,
             "selection-tokens": 20, "lr": 1e-3}
    flags = [part for size, value in sizes.items() for part in (f"--{size}", str(value))]
    assert reinforce.main(["--model", str(start), "--tasks", str(tmp_path / "tasks"), "--out", str(out), "--device",
                           "cpu", "--no-eval", *flags]) == 0
    line = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["step"] == 1 and line["rows_live"] > 8 and line["ratio_off"] < 1e-3 and line["grad_norm"] > 0
    after = Backbone.load(out / "checkpoint")
    assert any(not torch.equal(a, b) for a, b in zip(before.model.parameters(), after.model.parameters()))
    told = [json.loads(text) for text in (out / "rollouts/step_1.jsonl").read_text().splitlines()]
    assert {entry["role"] for entry in told} == {"selection", "policy"}
    assert all(len(entry["turns"]) == 2 for entry in told if entry["role"] == "policy")

    # One problem of the benchmark.
    assert bench.main(["--level", "1", "--ids", "1", "--model", str(out / "checkpoint"), "--samples", "1", "--turns",
                       "2", "--max-new-tokens", "40", "--device", "cpu", "--out", str(tmp_path / "bench")]) == 0
    assert sum(json.loads((tmp_path / "bench/summary.json").read_text())["kinds"].values()) == 1


def test_every_kind_of_template_has_an_architecture():
    assert sorted(template for _, template, _ in ARCHITECTURES) == sorted(TEMPLATES) and len(ARCHITECTURES) == 15

"""The cold start: what its examples teach, which tokens carry loss, diversity filter, batches, the shipped model."""

import argparse
import itertools
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import backbone
import sft
from backbone import Backbone, Chat, extract_code, extract_tool_call
from policy import policy_messages
from sandbox import KernelTime, Verdict
from sft import encode, make_batches
from synthetic import examples as examples_module
from synthetic import expert
from synthetic.examples import Example, Writer, diversity_filter, spoil
from synthetic.tiny import HELD_OUT, random_qwen3, train_tokenizer


class Scorer:
    """A sandbox that finds a kernel right unless it says that it is spoiled, and a later one faster."""

    def score(self, task, codes):
        return [Verdict(compiled=True, error="wrong values") if "# spoiled" in code else
                Verdict(compiled=True, correct=True, speedup=1.0 + i, coverage=0.5, clock="modelled", reference_ms=1.0,
                        candidate_ms=1 / (1 + i), profile=[KernelTime("mul", 1.0, False)])
                for i, code in enumerate(codes)]


@pytest.fixture(scope="module")
def examples():
    plain, executing = Writer(None), Writer(Scorer())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examples_module, "spoil", lambda code, rng: spoil(code, rng) + "# spoiled\n")
        return [e for writer, seeds in ((plain, 120), (executing, 60)) for seed in range(seeds)
                for e in writer.write(seed)]


@pytest.fixture(scope="module")
def chat(examples):
    return Chat(train_tokenizer([m["content"] for e in examples for m in e.messages], 1024))


def test_writing_is_repeatable(examples):
    writer = Writer(None)
    again = [e.messages for seed in range(20) for e in writer.write(seed)]
    assert len(again) > 20 and again == [e.messages for e in examples[: len(again)]]


def test_replies_parse_as_what_they_are(examples):
    assert {e.kind for e in examples} == {"policy", "policy+skills", "selection", "summary", "summary+skills"}
    for e in examples:
        reply = e.messages[-1]["content"]
        if e.kind.startswith("policy"):
            assert re.match(r"Plan: .+\.\n", reply) and "class ModelNew" in extract_code(reply)
        elif e.kind == "selection":
            chosen = extract_tool_call(reply, "select_skills")["selected_skills"]
            assert len(chosen) <= 3 and tuple(s["name"] for s in chosen) == e.skills
            assert all(f"- {s['name']} [" in e.messages[1]["content"] for s in chosen)
        else:
            written = extract_tool_call(reply, "update_skill_library")["new_skills"]
            assert 1 <= len(written) <= 2
            assert all(re.search(r"Motivation: .+\nKey Idea: .+\nExample:\n", s["content"]) for s in written)


def test_a_skill_in_the_prompt_shows_up_and_others_rarely_do():
    writer, prompted, unprompted = Writer(None), [], []
    for seed in range(300):
        rng = random.Random(seed)
        if (found := writer.task(seed)) and (applicable := expert.applicable(found[1])):
            name = rng.choice(sorted(applicable))
            prompted.append(name in writer.draw(rng, found[1], applicable, {name})[0].used)
            unprompted.append(name in writer.draw(rng, found[1], applicable, set())[0].used)
    assert sum(prompted) / len(prompted) > 0.85 and sum(unprompted) / len(unprompted) < 0.45


def test_summaries_name_what_the_best_answer_gained(examples):
    for e in (e for e in examples if "summary" in e.kind):
        first, best = re.findall(r"# (?:First|Best) answer.*?```python\n(.*?)```", e.messages[1]["content"], re.DOTALL)
        assert set(e.skills) <= expert.techniques_in(best) - expert.techniques_in(first)


def test_a_spoiled_kernel_differs_and_is_context_only(examples):
    code = next(extract_code(e.messages[-1]["content"]) for e in examples if e.kind == "policy")
    assert spoil(code, random.Random(0)) != code
    assert any(e.unlearnt for e in examples) and all(e.unlearnt in (0, 1) for e in examples)


def test_the_turn_after_a_broken_kernel_steps_back(examples):
    steps = []
    for e in (e for e in examples if e.unlearnt):
        replies = [extract_code(m["content"]) for m in e.messages if m["role"] == "assistant"]
        assert "# spoiled" in replies[0] and not any("# spoiled" in code for code in replies[1:])
        steps.append(len(expert.techniques_in(replies[1])) - len(expert.techniques_in(replies[0])))
    back, forth = sum(step < 0 for step in steps), sum(step > 0 for step in steps)
    assert len(steps) > 8 and back > len(steps) / 2 and back > 3 * forth


# ---- tokens


def test_loss_falls_on_the_assistants_tokens_only(examples, chat):
    for e in [e for e in examples if len(e.messages) > 3][:20] + examples[:40]:
        ids, mask = encode(chat, e)
        assert chat.chat_text(e.messages, e.tool, reply=False) == chat.tokenizer.decode(ids) + "\n"
        prompt = chat.chat_ids(e.messages[:2], e.tool)  # as sampling has it
        assert list(ids[:len(prompt)]) == prompt
        learnt = [m["content"] for m in e.messages if m["role"] == "assistant"][e.unlearnt:]
        runs = itertools.groupby(zip(ids, mask), key=lambda pair: pair[1])
        spans = [chat.tokenizer.decode([token for token, _ in run]) for on, run in runs if on]
        assert spans == [text + "<|im_end|>" for text in learnt]


def test_a_name_is_split_the_same_way_wherever_it_stands(chat):
    name = chat.encode("zorbag_qi")
    for text in ("self.zorbag_qi(x)", "(zorbag_qi, y)", "zorbag_qi = 3", "\n        zorbag_qi\n"):
        ids = chat.encode(text)
        assert any(ids[i:i + len(name)] == name for i in range(len(ids)))


def test_the_cache_gives_back_what_it_was_given(examples, chat, tmp_path):
    data = [encode(chat, e) for e in examples[:30]]
    sft.save_cache(tmp_path / "cache", chat.tokenizer, data)
    tokenizer, again = sft.load_cache(tmp_path / "cache")
    assert tokenizer.chat_template == chat.tokenizer.chat_template
    assert tokenizer("tl.load(x)") == chat.tokenizer("tl.load(x)")
    assert all((a == c).all() and (b == d).all() for (a, b), (c, d) in zip(data, again)) and len(again) == 30


# ---- filter and batches


def test_the_filter_down_samples_what_is_over_represented(capsys):
    dull = [Example("policy", [{}, {}, {}], None, "linear", kernel="same") for _ in range(200)]
    varied = [Example("policy", [{}, {}, {}], None, f"f{i % 5}", kernel=str(i)) for i in range(200)]
    lazy = [Example("selection", [{}, {}, {}], None, f"f{i % 5}", skills=("fuse",)) for i in range(400)]
    rare = [Example("selection", [{}, {}, {}], None, f"f{i % 5}", skills=(f"s{i}",)) for i in range(40)]
    kept = diversity_filter(dull + varied + lazy + rare, random.Random(0))
    assert sum(e.kernel == "same" for e in kept) == 40 and sum(e.skills == ("fuse",) for e in kept) == 100
    assert sum(e.kernel not in ("", "same") for e in kept) == 200 and sum(e.skills[:1] >= ("s",) for e in kept) == 40
    assert re.search(r"before +after\n +examples +840 +380\n", capsys.readouterr().out)


def test_batches_hold_every_example_once_within_their_budget():
    lengths = np.random.default_rng(0).integers(50, 3000, 500).tolist()
    batches = make_batches(lengths, 8192, random.Random(0))
    assert sorted(i for b in batches for i in b) == list(range(500))
    for batch in batches:
        width = next(w for w in sft.WIDTHS if max(lengths[i] for i in batch) <= w)
        assert width * len(batch) <= 8192
        assert width == next(w for w in sft.WIDTHS if min(lengths[i] for i in batch) <= w)


def test_a_training_step_learns_the_targets_and_nothing_else():
    torch.manual_seed(0)
    model = random_qwen3(32, 32, 64, 1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
                         tie_word_embeddings=False)
    step = sft.TrainStep(model, 1e-2, graphs=False)
    ids = torch.randint(0, 32, (4, 12))
    targets = torch.full_like(ids, -100)
    targets[:, 5] = ids[:, 6]
    logits = model(input_ids=ids).logits[:, 5].detach()
    by_hand = -logits.log_softmax(-1).gather(1, ids[:, 6:7]).mean()
    losses = [step(ids, targets).item() for _ in range(40)]
    assert losses[0] == pytest.approx(by_hand.item(), rel=1e-5) and losses[-1] < 0.1


# ---- the paper's data layout


def test_rows_of_the_papers_layout_are_read_and_bad_ones_reported(tmp_path, chat, capsys):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Plan: x."}]
    path = tmp_path / "rows.jsonl"
    as_text = {"messages": json.dumps(messages), "tools": json.dumps([backbone.SELECT_TOOL])}
    rows = [json.dumps({"messages": messages, "tools": None}), json.dumps(as_text), "not json",
            json.dumps({"prompt": "no messages"})]
    path.write_text("\n".join(rows))
    data = sft.read_rows(path, chat)
    assert len(data) == 2 and all(chat.tokenizer.decode(ids[mask]) == "Plan: x.<|im_end|>" for ids, mask in data)
    assert ["select_skills" in chat.tokenizer.decode(ids) for ids, _ in data] == [False, True]
    reported = capsys.readouterr().err
    assert f"{path}:3: not JSON" in reported and f"{path}:4: not a row of messages" in reported


def test_training_sees_each_example_once_an_epoch_and_a_part_of_the_last(monkeypatch):
    steps = []

    def step(ids, targets):
        steps.append((sorted(set(ids[:, 0].tolist()) - {0}), step.rate.item()))
        return torch.tensor(1.0)

    step.rate = torch.tensor(0.0)
    monkeypatch.setattr(sft, "TrainStep", lambda *_, **__: step)
    data = [(np.full(10, i), np.ones(10, dtype=bool)) for i in range(1, 9)]
    args = argparse.Namespace(seed=0, epochs=1.5, batch_tokens=2 * sft.WIDTHS[0], lr=1.0)
    history = sft.train(random_qwen3(32, 32, 64, 1), data, 0, args)
    assert sorted(i for batch, _ in steps[:4] for i in batch) == list(range(1, 9))  # 2 examples a batch
    assert len(steps) == 4 + 2 and [entry["step"] for entry in history] == [1, 6] and history[-1]["tokens"] == 120
    rates = [rate for _, rate in steps]
    assert rates[0] == 1 and rates == sorted(rates, reverse=True) and 0.05 < rates[-1] < 0.2


@pytest.mark.parametrize("arguments, message", [
    (["--out", "x", "--model", "no/such/folder/./", "--data", "x"], "no/such/folder"),
    (["--evaluate", "checkpoints/none"], "no such model folder"),
    ([], "--out or --cache is required"),
    (["--out", "OUT", "--epochs", "0"], "--epochs 0: choose a number above 0"),
])
def test_bad_command_lines_are_one_line_errors(arguments, message, tmp_path, monkeypatch, refusal):
    monkeypatch.chdir(tmp_path)
    assert message in refusal(sft.main, *arguments)


# ---- the shipped model


def test_the_shipped_model_is_small_complete_and_follows_a_skill():
    folder = Path(sft.__file__).parent / "checkpoints" / "tiny"
    assert sum(p.stat().st_size for p in folder.iterdir()) <= 16e6
    model = Backbone.load(folder)
    writer, seed, prompts, names = Writer(None), HELD_OUT, [], []
    while len(prompts) < 6:
        found = writer.task(seed)
        seed += 1
        name = found and next(iter(sorted(expert.applicable(found[1]))), None)
        if name:
            prompts.append(model.chat_ids(policy_messages(found[0], [writer.skill(name, random.Random(seed))])))
            names.append(name)
    replies = model.sample(prompts, 700, temperature=0)
    shown = [name in expert.techniques_in(extract_code(r.text) or "") for name, r in zip(names, replies)]
    assert sum(shown) >= 4

"""The cold start: what its examples teach, which tokens carry loss, diversity filter, batches, the shipped model."""

import argparse
import contextlib
import copy
import functools
import json
import math
import os
import random
import re
import signal
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import by_hand, held, launch, learnt, write_lines  # first: it puts the root on the path
import backbone
import sft
from backbone import Backbone, Chat, Completion, extract_code, extract_tool_call
from chat.rows import chat_row, read_file, read_rows, rollout_row
from fast import ranks
from judge.verdict import KernelTime, Verdict
from policy import policy_messages
from sft import encode, plan_batches
from synthetic import examples as examples_module
from synthetic import expert
from synthetic.examples import Example, Writer, diversity_filter, policy_reply, spoil, tool_reply
from synthetic.generator import WIDE
from synthetic.tiny import HELD_OUT, random_qwen3, train_tokenizer
from tasks import UserError


class Scorer:
    """A sandbox that finds a kernel right unless it says that it is spoiled, and a later one faster."""

    def score(self, task, codes):
        return [Verdict(compiled=True, error="wrong values") if "# spoiled" in code else
                Verdict(compiled=True, correct=True, speedup=1.0 + i, coverage=0.5, clock="modelled", reference_ms=1.0,
                        candidate_ms=1 / (1 + i), profile=[KernelTime("mul", 1.0, False)])
                for i, code in enumerate(codes)]


@pytest.fixture(scope="module")
def first_writer():
    return Writer(None)  # it takes seconds to make one


@pytest.fixture
def writer(first_writer):
    first_writer.forget()
    return first_writer


@pytest.fixture(scope="module")
def examples(first_writer):
    executing = copy.copy(first_writer)
    executing.sandbox = Scorer()
    executing.forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examples_module, "spoil", lambda code, rng: spoil(code, rng) + "# spoiled\n")
        return [e for writer, seeds in ((first_writer, 60), (executing, 60)) for seed in range(seeds)
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


def test_a_skill_in_the_prompt_shows_up_and_others_rarely_do(writer):
    prompted, unprompted = [], []
    for seed in range(150):
        rng = random.Random(seed)
        if (found := writer.task(seed)) and (applicable := expert.applicable(found[1])):
            name = rng.choice(sorted(applicable))
            prompted.append(name in writer.draw(rng, found[1], applicable, {name})[0].used)
            unprompted.append(name in writer.draw(rng, found[1], applicable, set())[0].used)
    assert sum(prompted) / len(prompted) > 0.85 and sum(unprompted) / len(unprompted) < 0.45


def test_in_a_third_of_the_prompts_with_skills_none_fits(writer):
    """Else a model learns to write fuller kernels whatever the skills say."""
    applicable = frozenset(["fuse-pointwise-run", "row-reduction"])
    shown = [{skill.name for skill in writer.injected(random.Random(seed), applicable)} for seed in range(600)]
    assert 0.28 < sum(applicable.isdisjoint(names) for names in shown) / len(shown) < 0.48
    assert sum(names <= applicable for names in shown) > 250


def test_summaries_mostly_name_what_the_best_answer_gained(examples):
    right = []
    for e in (e for e in examples if "summary" in e.kind):
        first, best = re.findall(r"# (?:First|Best) answer.*?```python\n(.*?)```", e.messages[1]["content"], re.DOTALL)
        wrong = set(e.skills) - (expert.techniques_in(best) - expert.techniques_in(first))
        assert len(wrong) <= 1  # else the s answers to one rollout would all be the same
        right.append(not wrong)
    assert 0.5 < sum(right) / len(right) < 1


def test_the_turn_after_a_broken_kernel_steps_back(examples):
    assert spoil(code := extract_code(examples[0].messages[-1]["content"]), random.Random(0)) != code
    assert {e.unlearnt for e in examples} == {0, 1}  # the broken one is context only
    steps = []
    for e in (e for e in examples if e.unlearnt):
        replies = [extract_code(m["content"]) for m in e.messages if m["role"] == "assistant"]
        assert "# spoiled" in replies[0] and not any("# spoiled" in code for code in replies[1:])
        steps.append(len(expert.techniques_in(replies[1])) - len(expert.techniques_in(replies[0])))
    back, forth = sum(step < 0 for step in steps), sum(step > 0 for step in steps)
    assert len(steps) > 8 and back > len(steps) / 2 and back > 3 * forth


def test_a_slip_is_context_and_its_repair_is_learnt(first_writer, monkeypatch):
    monkeypatch.setattr(examples_module, "SLIPPED", 1.0)
    wide = copy.copy(first_writer)
    wide.distribution = WIDE
    written = [e for seed in range(12) for e in wide.write(seed) if e.kind.startswith("policy")]
    assert len(written) > 8
    for e in written:
        first, second = [m["content"] for m in e.messages if m["role"] == "assistant"]
        with pytest.raises(SyntaxError):
            compile(extract_code(first), "first", "exec")
        compile(extract_code(second), "second", "exec")
        assert abs(len(first) - len(second)) < 2 and e.unlearnt == 1
        assert first.partition("```")[0] == second.partition("```")[0]  # the plan was right
        assert "does not parse" in e.messages[-2]["content"]


# ---- tokens


def test_loss_falls_on_the_assistants_tokens_only(examples, chat):
    for e in [e for e in examples if len(e.messages) > 3][:20] + examples[:40]:
        ids, mask = encode(chat, e.messages, e.tool, e.unlearnt)
        assert chat.chat_text(e.messages, e.tool, reply=False) == chat.tokenizer.decode(ids) + "\n"
        prompt = chat.chat_ids(e.messages[:2], e.tool)  # as sampling has it
        assert list(ids[:len(prompt)]) == prompt
        replies = [m["content"] for m in e.messages if m["role"] == "assistant"]
        assert learnt(chat, ids, mask) == [text + "<|im_end|>" for text in replies[e.unlearnt:]]


def test_a_name_is_split_the_same_way_wherever_it_stands(chat):
    name = chat.encode("zorbag_qi")
    for text in ("self.zorbag_qi(x)", "(zorbag_qi, y)", "zorbag_qi = 3", "\n        zorbag_qi\n"):
        ids = chat.encode(text)
        assert any(ids[i:i + len(name)] == name for i in range(len(ids)))


def test_the_cache_gives_back_what_it_was_given_and_not_to_another_tokenizer(examples, chat, model_folder, tmp_path,
                                                                             refusal):
    data = [encode(chat, e.messages, e.tool) for e in examples[:30]]
    sft.save_cache(tmp_path / "cache", chat.tokenizer, data)
    tokenizer, again = sft.load_cache(tmp_path / "cache")
    assert tokenizer.chat_template == chat.tokenizer.chat_template
    assert tokenizer("tl.load(x)") == chat.tokenizer("tl.load(x)")
    assert all((a == c).all() and (b == d).all() for (a, b), (c, d) in zip(data, again)) and len(again) == 30
    said = refusal(sft.main, "--model", model_folder, "--cache", tmp_path / "cache", "--out", tmp_path / "out")
    assert "another model's tokenizer" in said


# ---- filter and batches


def test_what_was_executed_counts_several_times(monkeypatch):
    made = {False: Example("policy", [{}] * 3, None, "f"), True: Example("summary", [{}] * 3, None, "f")}
    monkeypatch.setattr(sft, "write_examples", lambda first, count, executed, *_: [made[executed]] * count)
    args = argparse.Namespace(problems=5, executed=2, repeat_executed=3, no_diversity_filter=True, processes=1,
                              wide=False)
    assert Counter(e.kind for e in sft.built_in_examples(args)) == {"policy": 5, "summary": 6}


def test_the_filter_down_samples_what_is_over_represented(capsys):
    dull = [Example("policy", [{}, {}, {}], None, "linear", kernel="same") for _ in range(200)]
    varied = [Example("policy", [{}, {}, {}], None, f"f{i % 5}", kernel=str(i)) for i in range(200)]
    lazy = [Example("selection", [{}, {}, {}], None, f"f{i % 5}", skills=("fuse",)) for i in range(400)]
    rare = [Example("selection", [{}, {}, {}], None, f"f{i % 5}", skills=(f"s{i}",)) for i in range(40)]
    kept = diversity_filter(dull + varied + lazy + rare, random.Random(0))
    assert sum(e.kernel == "same" for e in kept) == 40 and sum(e.skills == ("fuse",) for e in kept) == 100
    assert sum(e.kernel not in ("", "same") for e in kept) == 200 and sum(e.skills[:1] >= ("s",) for e in kept) == 40
    assert re.search(r"before +after\n +examples +840 +380\n", capsys.readouterr().out)


@pytest.mark.parametrize("epochs, sequences", [(1, 16), (2.5, 16), (1, None), (2.5, None)])
def test_batches_hold_every_example_once_an_epoch_in_parts_that_fit(epochs, sequences):
    """A batch is so many sequences, in several parts; or one part, as large as fits."""
    lengths = np.random.default_rng(0).integers(50, 3000, 100).tolist()
    args = argparse.Namespace(seed=0, epochs=epochs, batch_tokens=8192, batch_sequences=sequences)
    batches = plan_batches(lengths, args)
    seen = Counter(i for parts in batches for part in parts for i in part)
    assert sum(seen.values()) == pytest.approx(100 * epochs, abs=16)
    assert {seen[i] for i in range(100)} <= {math.floor(epochs), math.ceil(epochs)}
    if sequences:
        assert max(sum(map(len, parts)) for parts in batches) == 16 and len(batches) == round(7 * epochs)
    else:
        assert {len(parts) for parts in batches} == {1}
    args.epochs = 0.01
    assert len(plan_batches(lengths, args)) == 1  # never none
    for part in (part for parts in batches for part in parts):
        [width] = {sft.width_for(lengths[i]) for i in part}  # one for all of a part
        assert width * len(part) <= 8192


def small_model(seed=0):
    torch.manual_seed(seed)
    return random_qwen3(32, 32, 64, 1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
                        tie_word_embeddings=False)


def encoded(count, rng):
    """Random conversations of 20 tokens: 8 of a prompt, 12 learnt, of which the next is the last one plus one."""
    starts = rng.integers(3, 18, count)
    ids = [np.concatenate([rng.integers(3, 32, 8), np.arange(start, start + 12)]).astype(np.int32) for start in starts]
    return [(each, np.arange(20) >= 8) for each in ids]


def options(**changes):
    return argparse.Namespace(**{"seed": 0, "epochs": 1, "batch_tokens": 2 * sft.WIDTHS[0], "batch_sequences": None,
                                 "lr": 1e-2, "resume": False, "save_minutes": 1e9, "out": None, "processes": 1,
                                 "cache": None, "optimizer": "adamw"} | changes)


def test_training_sees_each_example_once_an_epoch_and_a_part_of_the_last(monkeypatch):
    steps = []

    def step(parts):
        steps.append((sorted({i for ids, _ in parts for i in ids[:, 0].tolist()} - {0}), step.rate.item()))
        return torch.tensor(1.0)

    step.rate = torch.tensor(0.0)
    monkeypatch.setattr(sft, "TrainStep", lambda *_, **__: step)
    data = [(np.full(10, i), np.ones(10, dtype=bool)) for i in range(1, 9)]
    history = sft.train(random_qwen3(32, 32, 64, 1), data, 0, options(epochs=1.5, lr=1.0))
    assert sorted(i for batch, _ in steps[:4] for i in batch) == list(range(1, 9))  # 2 examples a batch
    assert len(steps) == 4 + 2 and [entry["step"] for entry in history] == [1, 6] and history[-1]["tokens"] == 120
    rates = [rate for _, rate in steps]
    assert rates == pytest.approx([0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * n / 6)) for n in range(6)])
    steps.clear()
    sft.train(random_qwen3(32, 32, 64, 1), data, 0, options(epochs=75, lr=1.0))  # 300 steps, 6 to warm up
    rates = [rate for _, rate in steps]
    assert rates[:6] == pytest.approx([(n + 1) / 6 for n in range(6)], rel=1e-2) and rates[5] == max(rates)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_training_that_was_killed_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch, optimizer):
    data, given = encoded(64, np.random.default_rng(0)), functools.partial(options, optimizer=optimizer)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a program: a worker of pytest-xdist has none
    whole, killed, resumed = small_model(), small_model(), small_model(1)
    before, history = by_hand(whole, data), sft.train(whole, data, 0, given(out=tmp_path / "none"))
    assert by_hand(whole, data) < before and not whole.training
    real, calls = sft.TrainStep.update, []

    def dying(step):
        calls.append(step)
        if len(calls) == 20:
            os.kill(os.getpid(), signal.SIGINT)  # it takes effect when the step is done
        real(step)

    with monkeypatch.context() as patch:
        patch.setattr(sft.TrainStep, "update", dying)
        with pytest.raises(KeyboardInterrupt, match="--resume continues"):
            sft.train(killed, data, 0, given(out=tmp_path))
    saved = torch.load(tmp_path / sft.CHECKPOINT)
    assert saved["step"] == len(calls) == 20
    assert any("momentum" in state for state in saved["optimizer"]["state"].values()) == (optimizer == "muon")
    with pytest.raises(UserError, match="other options or examples .lr, the examples."):
        sft.train(resumed, data[1:], 0, given(out=tmp_path, resume=True, lr=1e-3))
    again = sft.train(resumed, data, 0, given(out=tmp_path, resume=True))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters())) and not resumed.training
    assert [{**entry, "seconds": 0} for entry in again] == [{**entry, "seconds": 0} for entry in history]
    (tmp_path / sft.CHECKPOINT).write_bytes((tmp_path / sft.CHECKPOINT).read_bytes()[:1000])
    with pytest.raises(UserError, match="is broken"):
        sft.train(resumed, data, 0, given(out=tmp_path, resume=True))


def test_a_training_in_the_folder_of_a_finished_one_goes_on(tmp_path, monkeypatch):
    def load(*_):
        raise UserError("goes on")

    monkeypatch.setattr(sft, "load_data", load)
    (tmp_path / "sft.json").write_text("{}")
    for begun, told in ((False, "is complete"), (True, "goes on")):
        if begun:
            (tmp_path / sft.CHECKPOINT).touch()
        with pytest.raises(UserError, match=told):
            sft.main(["--out", str(tmp_path), "--resume"])


TRAININGS = {"rows": None, "parts": 6}  # batches of one part, and of several; a folder's name: sequences of a batch


def training_on_a_rank(folder):
    """The first four steps of the trainings."""
    saved = sft.save

    def save(args, model, step, state):
        if state["step"] == 4:
            saved(args, model, step, state)
            raise EOFError

    sft.save = save
    for name, sequences in TRAININGS.items():
        (folder / name).mkdir(exist_ok=True)
        with contextlib.suppress(EOFError):
            sft.train(small_model(), encoded(33, np.random.default_rng(0)), 0,
                      options(out=folder / name, batch_sequences=sequences, save_minutes=0))


def test_two_ranks_begin_and_one_goes_on_as_one_alone(tmp_path):
    done = launch(2, __file__, tmp_path)
    assert done.returncode == 0, done.stderr
    for name, sequences in TRAININGS.items():
        data, alone, resumed = encoded(33, np.random.default_rng(0)), small_model(), small_model(1)
        whole = sft.train(alone, data, 0, options(out=tmp_path / "none", batch_sequences=sequences))
        assert torch.load(tmp_path / name / sft.CHECKPOINT)["step"] == 4 < whole[-1]["step"]
        again = sft.train(resumed, data, 0, options(out=tmp_path / name, batch_sequences=sequences, resume=True))
        for mine, theirs in zip(resumed.parameters(), alone.parameters()):
            assert torch.allclose(mine, theirs, rtol=0, atol=1e-6)
        assert [entry["loss"] for entry in again] == pytest.approx([entry["loss"] for entry in whole], abs=1e-4)


# ---- the paper's data layout, and a run's own rollouts

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Plan: x."}]
CALLED = [TALK[0], {"role": "assistant", "content": None, "tool_calls": [
    {"function": {"name": "select_skills", "arguments": {"think": "t", "selected_skills": []}}}]}]


def test_odd_rows_are_handled_or_told_by_their_line(tmp_path, chat, capsys):
    tools = [backbone.SELECT_TOOL, backbone.UPDATE_TOOL]
    parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}, TALK[1]]
    good = [{"messages": TALK, "tools": None}, {"messages": json.dumps(TALK), "tools": json.dumps(tools)},
            {"messages": parts}, {"messages": [TALK[0] | {"name": None}, TALK[1] | {"tool_calls": []}]},
            {"messages": TALK + TALK, "enable_thinking": True}]
    bad = {"not json": "not JSON", json.dumps({"prompt": "x"}): "not a row of messages", "[1]": "not a row of messages",
           json.dumps({"messages": TALK[:1]}): "no message of the assistant's",
           json.dumps({"messages": [TALK[0], TALK[1] | {"content": " "}]}): "the reply is empty",
           json.dumps({"messages": CALLED}): "the reply is empty",  # this template does not write calls
           "\ud800\u2028".encode("utf-8", "surrogatepass"): "not JSON"}
    path = tmp_path / "rows.jsonl"
    lines = [*(json.dumps(row).replace("hi", "h\u2028i") for row in good), "", *bad]
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    data = read_rows(path, read_file(path), chat_row(chat))
    assert [chat.tokenizer.decode(ids[mask]) for ids, mask in data] == ["Plan: x.<|im_end|>"] * 4 + [
        "Plan: x.<|im_end|>" * 2]
    shown = [chat.tokenizer.decode(ids) for ids, _ in data]
    assert ["update_skill_library" in text and "select_skills" in text for text in shown] == [False, True] + [False] * 3
    assert all("h\u2028i" in text or "hi" in text for text in shown)
    reported = capsys.readouterr().err
    for number, why in enumerate(bad.values(), start=7):
        assert f"{path}:{number}: {why}" in reported
    assert f"{path}: 7 of 12 rows are skipped" in reported


def test_parquet_is_read_as_json_lines_are(tmp_path, chat, refusal):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    rows = [{"messages": json.dumps(TALK), "tools": json.dumps([backbone.SELECT_TOOL])}] * 3
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    data = read_rows(path, read_file(path), chat_row(chat))
    assert [chat.tokenizer.decode(ids[mask]) for ids, mask in data] == ["Plan: x.<|im_end|>"] * 3
    for size in (0, 10, 200):
        path.write_bytes(path.read_bytes()[:size] + b"x" * size)
        said = refusal(sft.main, "--data", path, "--out", tmp_path, "--model", "nowhere/x")
        assert "no readable parquet file" in said


def test_a_runs_good_replies_are_learnt_each_in_its_conversation(tmp_path, chat):
    turns = [{"reply": reply, "reward": reward, "feedback": f"verdict {reward}"} for reply, reward in
             (("Plan: a.", 0.0), ("Plan: b.", 2.0), ("Plan: c.", 0.5), ("Plan: d.", 1.5), ("Plan: e.", None))]
    prompt = chat.chat_text(TALK[:1])
    lines = [{"role": "policy", "prompt": prompt, "turns": turns}, {"role": "policy", "prompt": prompt, "turns": turns},
             {"role": "policy", "prompt": prompt, "turns": turns[:1]},
             {"role": "selection", "prompt": prompt, "reply": "chosen", "reward": 1.6},
             {"role": "selection", "prompt": prompt, "reply": "cut o", "finished": False, "reward": 1.6},
             {"role": "summary", "prompt": prompt, "reply": "told", "reward": 0.0}]
    write_lines(tmp_path / "step_1.jsonl", *lines)
    (tmp_path / "config.json").write_text('{"thinking": false}')
    rows = read_file(tmp_path / "step_1.jsonl")
    (ids, mask), (short, short_mask), (cut, cut_mask) = read_rows("x", rows, rollout_row(chat, 1.5, tmp_path))
    assert chat.tokenizer.decode(ids[mask]) == "Plan: b.<|im_end|>Plan: d.<|im_end|>"
    talk = [TALK[0], *({"role": role, "content": text} for turn in turns[:4] for role, text in
                       (("assistant", turn["reply"]), ("user", turn["feedback"])))]
    assert chat.tokenizer.decode(ids) + "\n" == chat.chat_text(talk[:-1], reply=False)
    assert chat.tokenizer.decode(short[short_mask]) == "chosen<|im_end|>"
    assert chat.tokenizer.decode(cut[cut_mask]) == "cut o"


@pytest.mark.parametrize("arguments, message", [
    (["--out", "x", "--model", "no/such/folder/./"], "no/such/folder"),
    (["--evaluate", "checkpoints/none"], "no such model folder"),
    ([], "--out or --cache is required"),
    pytest.param(["--out", "OUT", "--device", "cuda"], "--device cuda: no GPU is available here",
                 marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")),
    (["--out", "OUT", "--epochs", "0"], "--epochs 0: choose a number above 0"),
    (["--out", "OUT", "--model", "no/such", "--data", "none.jsonl"], "none.jsonl: no such file"),
    (["--out", "OUT", "--save-minutes", "nan"], "--save-minutes nan: choose a number from 0"),
    (["--out", "OUT", "--problems", "-1"], "--problems -1: choose a number from 0"),
    (["--cache", "none/cache"], "none/cache: there is no folder for it"),
    (["--cache", "new", "--problems", "0", "--executed", "0"], "no examples: choose larger --problems"),
    (["--cache", "broken"], "broken: not a file of encoded examples"),
    (["--out", "OUT", "--from-rollouts", "runs/x"], "--from-rollouts: say with --model"),
    (["--out", "OUT", "--data", "none.jsonl"], "--data, --from-rollouts: say with --model"),
    (["--out", "OUT", "--from-rollouts", "runs/x", "--model", "y"], "runs/x: no rollouts/step_N.jsonl there"),
])
def test_bad_command_lines_are_one_line_errors(arguments, message, tmp_path, monkeypatch, refusal):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken").write_bytes(b"PK\x03\x04 cut off")
    assert message in refusal(sft.main, *arguments)


def test_two_trainings_do_not_share_a_folder(tmp_path, refusal):
    with held(tmp_path):
        assert "another process is writing there" in refusal(sft.main, "--out", tmp_path, "--model", "./none")


# ---- evaluation, and the shipped model


class Answering:
    """A model that answers as the expert would, and without a skill every other time with nothing; it applies only what
    skills name."""

    def __init__(self, writer):
        found = [pair for seed in range(HELD_OUT, HELD_OUT + 10) if (pair := writer.task(seed))]
        self.parsed = {task.source.strip(): parsed for task, parsed in found}
        self.asked = 0

    def chat_ids(self, messages, tool=None):
        return messages, tool

    def sample(self, prompts, tokens, temperature):
        assert temperature == 0
        return [Completion([], [], [], self.answer(*prompt), True) for prompt in prompts]

    def answer(self, messages, tool):
        self.asked += 1
        if self.asked % 2 and "# Skill: " not in messages[0]["content"]:
            return "nothing"
        if tool is backbone.SELECT_TOOL:
            return tool_reply("select_skills", {"think": "t", "selected_skills": []})["content"]
        if tool:
            fields = dict.fromkeys(("name", "description", "scope", "tags", "content"), "x")
            return tool_reply("update_skill_library", {"think": "t", "new_skills": [fields]})["content"]
        named = set(re.findall(r"# Skill: (\S+)", messages[0]["content"]))
        source = re.search(r"```python\n(.*)\n```", messages[1]["content"], re.DOTALL)[1]
        return policy_reply(expert.render(self.parsed[source], named)._replace(used=named))


def test_evaluation_tells_what_the_cold_start_taught(writer, monkeypatch):
    monkeypatch.setattr("synthetic.tiny.Writer", lambda _: writer)

    class Judge:
        def score_pairs(self, pairs):
            assert len({task.name for task, _ in pairs}) == 4
            return [Verdict(compiled=True, correct="ModelNew" in code, speedup=2.0 if "ModelNew" in code else None,
                            error="no kernel", clock="modelled") for _, code in pairs]

    told = sft.evaluate(Answering(writer), Judge(), 4)
    assert told["problems"] == 4 and told["clock"] == "modelled" and told["what was wrong"] == {"no kernel": 2}
    assert (told["correct"], told["correct with skill"], told["mean speedup"]) == (50, 100, 1.0)
    assert told["select_skills well-formed"] == told["update_skill_library well-formed"] == 50
    assert told["technique without skill"] == 0 < 50 <= told["technique with skill"]


def test_the_shipped_model_is_small_complete_and_follows_a_skill(writer):
    folder = Path(sft.__file__).parent / "checkpoints" / "tiny"
    assert sum(p.stat().st_size for p in folder.iterdir()) <= 16e6
    model = Backbone.load(folder)
    seed, prompts, names = HELD_OUT, [], []
    known = expert.ALL - {"channels-last-convolution", "fold-convolution-bias"}  # it has not been shown all of these
    while len(prompts) < 6:
        found = writer.task(seed)
        seed += 1
        name = found and next(iter(sorted(expert.applicable(found[1]) & known)), None)
        if name:
            prompts.append(model.chat_ids(policy_messages(found[0], [writer.skill(name, random.Random(seed))])))
            names.append(name)
    replies = model.sample(prompts, 700, temperature=0)
    shown = [name in expert.techniques_in(extract_code(r.text) or "") for name, r in zip(names, replies)]
    assert sum(shown) >= 4


if __name__ == "__main__":
    torch.set_num_threads(1)
    ranks.joined(training_on_a_rank)(Path(sys.argv[1]))

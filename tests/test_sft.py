"""The cold start: what its examples teach, which tokens carry loss, diversity filter, batches, the shipped model; and
the update at the size of real models: AdamW on bfloat16 learns, and what saves memory changes no gradient."""

import copy
import itertools
import json
import math
import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import sft
from backbone import Backbone, Chat, Sampling
from chat.calls import extract_code, extract_tool_call
from chat.rows import read_chats, read_rollouts
from command.options import complete
from command.process import UserError
from conftest import by_hand, learnt, write_lines
from fast.optimizer import Muon, SplitAdamW
from fast.rescore import head_logits
from judge.verdict import Verdict
from policy import policy_messages
from sft import diversity_filter, encode, plan_batches
from skills import SkillLibrary
from summarizer import read_proposals
from synthetic.examples import Example, Writer, spoil
from synthetic.families import draw, task_of
from synthetic.planner import ALL, applicable
from synthetic.tiny import random_qwen3, train_tokenizer


def planned(reply) -> set[str]:
    """The techniques that a reply's first line names."""
    return ALL & set(re.findall(r"[\w-]+", reply.split("\n")[0]))


class Scorer:
    """A sandbox that finds a kernel right unless it says that it is spoiled, and a later one faster."""

    def score(self, task, codes):
        return [Verdict(compiled=True, correct="# spoiled" not in code, speedup=1.0 + i, reference_ms=1.0,
                        candidate_ms=1.0) for i, code in enumerate(codes)]


@pytest.fixture(scope="module")
def writer():
    return Writer(None)  # it takes seconds to make one


@pytest.fixture(scope="module")
def examples(writer):
    executing = copy.copy(writer)
    executing.sandbox = Scorer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("synthetic.examples.spoil", lambda code, rng: spoil(code, rng) + "# spoiled\n")
        return [e for one in (writer, executing) for seed in range(60) for e in one.write(seed)]


@pytest.fixture(scope="module")
def chat(examples):
    return Chat(train_tokenizer([m["content"] for e in examples for m in e.messages], 1024))


def test_replies_parse_as_what_they_are(writer, examples):
    again = [e.messages for seed in range(20) for e in writer.write(seed)]
    assert len(again) > 20 and again == [e.messages for e in examples[: len(again)]]  # writing is repeatable
    assert {e.kind for e in examples} == {"policy", "policy+skills", "selection", "summary", "summary+skills"}
    for e in examples:
        reply = e.messages[-1]["content"]
        if e.kind.startswith("policy"):
            assert re.match(r"Plan: .+\.\n", reply) and "class ModelNew" in extract_code(reply)
        elif e.kind == "selection":
            chosen = [skill["name"] for skill in extract_tool_call(reply, "select_skills")["selected_skills"]]
            assert len(chosen) <= 3 and tuple(chosen) == e.skills
            assert all(f"- {name} [" in e.messages[1]["content"] for name in chosen)
        else:
            written = read_proposals(extract_tool_call(reply, "update_skill_library"))
            assert written and all(proposal.rejected is None for proposal in written)


def test_the_turn_after_a_broken_kernel_steps_back(examples):
    assert spoil(code := extract_code(examples[0].messages[-1]["content"]), random.Random(0)) != code
    assert {e.unlearnt for e in examples} == {0, 1}  # the broken one is context only
    steps = []
    for e in (e for e in examples if e.unlearnt):
        replies = [m["content"] for m in e.messages if m["role"] == "assistant"]
        assert "# spoiled" in replies[0] and not any("# spoiled" in reply for reply in replies[1:])
        steps.append(len(planned(replies[1])) - len(planned(replies[0])))
    back, forth = sum(step < 0 for step in steps), sum(step > 0 for step in steps)
    assert len(steps) > 8 and back > len(steps) / 2 and back > 3 * forth


# ---- tokens


def test_loss_falls_on_the_assistants_tokens_only(examples, chat):
    for e in [e for e in examples if len(e.messages) > 3][:20] + examples[:40]:
        ids, mask = encode(chat, e.messages, e.tool, e.unlearnt)
        assert chat.chat_text(e.messages, e.tool, reply=False) == chat.tokenizer.decode(ids) + "\n"
        replies = [m["content"] for m in e.messages if m["role"] == "assistant"]
        assert learnt(chat, ids, mask) == [text + "<|im_end|>" for text in replies[e.unlearnt:]]


# ---- filter and batches


def test_the_filter_down_samples_what_is_over_represented(monkeypatch):
    talk = [{}, {}, {}]
    dull = [Example("policy", talk, None, "linear", kernel="same") for _ in range(200)]
    varied = [Example("policy", talk, None, f"f{i % 5}", kernel=str(i)) for i in range(200)]
    lazy = [Example("selection", talk, None, f"f{i % 5}", skills=("fuse",)) for i in range(400)]
    rare = [Example("selection", talk, None, f"f{i % 5}", skills=(f"s{i}",)) for i in range(40)]
    kept = set(map(id, diversity_filter(dull + varied + lazy + rare, random.Random(0))))
    assert [sum(id(e) in kept for e in group) for group in (dull, varied, lazy, rare)] == [40, 200, 100, 40]
    linear = [Example("summary", talk, None, f"f{i // 15}" if i < 60 else "linear") for i in range(150)]
    assert len(diversity_filter(linear, random.Random(0))) == 60 + 60  # of 5 families: 2 / 5 of a kind
    monkeypatch.setattr(sft, "write_examples", lambda first, count, execute, **_: dull[:2] if execute else varied[:3])
    counts = Counter(map(id, sft.built_in_examples(options())))  # executed ones are learnt three times
    assert [counts[id(e)] for e in dull[:2] + varied[:3]] == [3, 3, 1, 1, 1]


def test_examples_that_are_cut_off_entirely_are_left_out():
    ids = np.arange(8)
    [(_, mask)] = sft.fit([(ids, ids > 4), (ids, ids > 3)], 5, cut=True)
    assert mask.tolist() == [False] * 4 + [True]


@pytest.mark.parametrize("sequences", [16, 0])
def test_batches_hold_every_example_once_an_epoch_in_parts_that_fit(sequences):
    """A batch is so many sequences, in several parts of sorted lengths; or one part, as large as fits."""
    lengths = np.random.default_rng(0).integers(50, 3000, 100).tolist()
    batches = plan_batches(lengths, options(epochs=2.5, batch_tokens=8192, batch_sequences=sequences))
    parts = list(itertools.chain(*batches))
    seen = Counter(itertools.chain(*parts))
    assert seen.total() == pytest.approx(250, abs=16) and {seen[i] for i in range(100)} == {2, 3}
    widths = [[sft.width_for(lengths[i]) for i in part] for part in parts]
    assert all(several[0] * len(several) <= 8192 and several == sorted(several)[::-1] for several in widths)
    if sequences:
        assert max(sum(map(len, parts)) for parts in batches) == 16 and len(batches) == round(7 * 2.5)
    else:
        assert len(batches) == len(parts) and widths[:20] != sorted(widths[:20])[::-1]  # in random order


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
    """Those of a training from random weights, which Muon does; of a `model`, AdamW."""
    return complete(sft.Options, {"epochs": 1, "batch_tokens": 2 * sft.WIDTHS[0], "lr": 1e-2, "processes": 1} | changes)


@pytest.mark.parametrize("model", ["", "M"])
def test_a_training_that_was_killed_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch, model):
    """Lessons come first, once; then 32 examples, in 2 epochs of 16 batches."""
    def train(trained, **changes):
        return sft.train(trained, lessons, data, 0, options(model=model, epochs=2, **{"out": str(tmp_path)} | changes))

    data = encoded(40, np.random.default_rng(0))
    lessons, data = data[:8], data[8:]
    whole, resumed = small_model(), small_model(1)
    before, seen, collate = by_hand(whole, data), [], sft.collate
    with monkeypatch.context() as patch:
        patch.setattr(sft, "collate", lambda members, pad: seen.extend(map(id, members)) or collate(members, pad))
        history = train(whole, out=str(tmp_path / "none"))
    assert by_hand(whole, data) < before and not whole.training
    assert set(seen[:8]) == set(map(id, lessons)) and Counter(seen[8:]) == {id(each): 2 for each in data}
    rate = sft.learning_rate

    def killed(n, steps, options):
        if n == 20:
            raise KeyboardInterrupt
        return rate(n, steps, options)

    with monkeypatch.context() as patch:
        patch.setattr(sft, "learning_rate", killed)
        patch.setattr(sft, "SAVE_EVERY", -1)
        with pytest.raises(KeyboardInterrupt):
            train(small_model())
    assert torch.load(tmp_path / sft.CHECKPOINT)["step"] == 20
    with pytest.raises(UserError, match="was made with another --lr .0.01."):
        train(resumed, resume=True, lr=1e-3)
    again = train(resumed, resume=True, processes=7)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters())) and not resumed.training
    assert again == history


# ---- the paper's data layout, and a run's own rollouts

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Plan: x."}]


def test_odd_rows_are_handled_or_told_by_their_line(tmp_path, chat, capsys):
    good = {"messages": [TALK[0] | {"name": None}, TALK[1] | {"tool_calls": []}], "tools": None}
    bad = {"not json": "JSONDecodeError", '{"prompt": "x"}': "KeyError: 'messages'",
           json.dumps({"messages": TALK[:1]}): "UserError: no message of the assistant's",
           json.dumps({"messages": [TALK[0], TALK[1] | {"content": " "}]}): "UserError: the reply is empty"}
    path = tmp_path / "rows.jsonl"
    write_lines(path, json.dumps(good).replace("hi", "h\u2028i"), "", *bad)
    [(ids, mask)] = read_chats(path, chat)
    assert learnt(chat, ids, mask) == ["Plan: x.<|im_end|>"] and "h\u2028i" in chat.tokenizer.decode(ids)
    reported = capsys.readouterr().err
    assert all(f"{path}:{n}: skipped ({why}" in reported for n, why in enumerate(bad.values(), start=3))


def test_a_runs_good_replies_are_learnt_each_in_its_conversation(tmp_path, chat):
    turns = [{"reply": f"Plan: {name}.", "reward": reward, "feedback": f"verdict {reward}"}
             for name, reward in (("a", 0.0), ("b", 2.0), ("c", 0.5), ("d", 1.5), ("e", None))]
    prompt = chat.chat_text(TALK[:1])
    lines = [{"role": "policy", "turns": turns}, {"role": "policy", "turns": turns[:1]},
             {"role": "selection", "reply": "chosen", "reward": 1.6},
             {"role": "selection", "reply": "cut o", "finished": False, "reward": 1.6}]
    for number in (1, 2):  # the second file repeats what the first has
        write_lines(tmp_path / f"rollouts/step_{number}.jsonl", *(line | {"prompt": prompt} for line in lines))
    (tmp_path / "config.json").write_text('{"thinking": false}')
    several, chosen, cut = read_rollouts(tmp_path, chat, 1.5)
    assert learnt(chat, *several) == ["Plan: b.<|im_end|>", "Plan: d.<|im_end|>"]
    assert learnt(chat, *chosen) == ["chosen<|im_end|>"] and learnt(chat, *cut) == ["cut o"]
    talk = TALK[:1]
    for turn in turns[:4]:
        talk += [{"role": "assistant", "content": turn["reply"]}, {"role": "user", "content": turn["feedback"]}]
    assert chat.tokenizer.decode(several[0]) + "\n" == chat.chat_text(talk[:-1], reply=False)


TINY = Path(sft.__file__).parent / "checkpoints" / "tiny"


@pytest.mark.parametrize("arguments, message", [
    ("", "--out is required"), ("--out done", "done holds a training"), ("--out begun", "begun holds a training"),
    ("--out done --resume", "done holds no training.pt"), ("--out OUT --data none.jsonl", "several GPUs need --model"),
    (f"--out OUT --model {TINY} --data none.jsonl", "none.jsonl: cannot be read"),
    (f"--out OUT --model {TINY} --from-rollouts done", "condensed replies")])
def test_bad_command_lines_are_one_line_errors(arguments, message, tmp_path, monkeypatch, refusal):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "done/sft.json", {})
    write_lines(tmp_path / "done/config.json", {"history": "condensed"})
    write_lines(tmp_path / "begun/training.pt", {})
    assert message in refusal(sft.main, *arguments.split())


def test_a_pretrained_model_has_the_releases_values():
    small, given = sft.read_options(["--out", "x"]), sft.read_options("--out x --model M --epochs 1".split())
    assert (small.epochs, small.batch_sequences, small.lr) == (3, 0, 3e-3)
    assert (given.epochs, given.batch_sequences, given.lr) == (1, 64, 2e-5)
    rates = [sft.learning_rate(n, 44, given) / 2e-5 for n in (0, 1, 4, 24, 43)]  # int(0.1 N) steps of warm-up
    assert rates == pytest.approx([0, 0.25, 1, 0.5, 0.5 + 0.5 * math.cos(math.pi * 39 / 40)])
    rates = [sft.learning_rate(n, 100, small) / 3e-3 for n in (0, 1, 50, 99)]
    assert rates == pytest.approx([0.5, 1.0, 0.525, 0.05], abs=1e-3)


# ---- the shipped model


def test_the_shipped_model_is_small_complete_and_follows_a_skill(writer):
    assert sum(p.stat().st_size for p in TINY.iterdir()) <= 16e6
    seeds, others = writer.libraries(seed=0)
    assert SkillLibrary.of_model(TINY).skills == seeds
    assert SkillLibrary.load(TINY / "all_techniques.jsonl").skills == seeds + others
    model = Backbone.load(TINY)
    prompts, names = [], []
    for seed in range(900_000_000, 900_000_004):  # no seeds of its cold start
        program = draw(seed, clutter=seed % 3 > 0)
        names.append(min(applicable(program)))
        skill = writer.skill(names[-1], random.Random(seed))
        prompts.append(model.chat_ids(policy_messages(task_of(program), [skill])))
    replies = model.sample(prompts, Sampling(100, temperature=0))  # the plan is the first line
    assert sum(name in planned(reply.text) for name, reply in zip(names, replies)) > 2


# ---- AdamW


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    monkeypatch.setattr("fast.optimizer.SLICE", 1000)  # the tensors here have several, the last one shorter


def weights(dtype=torch.bfloat16):
    """A matrix of bfloat16 values of the usual size, and a norm's vector of ones, as parameters of `dtype`."""
    generator = torch.Generator().manual_seed(0)
    values = [(0.02 * torch.randn(70, 50, generator=generator)), torch.ones(33)]
    return [torch.nn.Parameter(value.bfloat16().to(dtype)) for value in values]


def train(parameters, optimizer, steps, first=0):
    """Gradients with a constant part and noise, the same for every dtype."""
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for p in parameters:
            drift = torch.linspace(-1, 1, p.numel()).view(p.shape)
            p.grad = (drift + torch.randn(p.shape, generator=generator)).bfloat16().to(p.dtype)
        optimizer.step()


def test_float32_parameters_change_as_with_torch():
    mine, theirs = weights(torch.float32), weights(torch.float32)
    groups = [[{"params": p[:1], "weight_decay": 0.1}, {"params": p[1:], "weight_decay": 0.0}] for p in (mine, theirs)]
    train(mine, SplitAdamW(groups[0], 1e-3, betas=(0.9, 0.95)), 20)
    train(theirs, torch.optim.AdamW(groups[1], 1e-3, betas=(0.9, 0.95), foreach=False), 20)
    assert all(map(torch.equal, mine, theirs))


def test_bfloat16_learns_at_the_papers_rate():
    """Half-way our optimiser is saved and loaded. (AdamW on bfloat16 alone stays where it was.)"""
    start, exact, split = weights(torch.float32), weights(torch.float32), weights()
    half, optimizer = SplitAdamW(split, 1e-6), SplitAdamW(split, 1.0)  # the rate is loaded, too
    train(exact, torch.optim.AdamW(exact, 1e-6), 200)
    train(split, half, 100)
    optimizer.load_state_dict(copy.deepcopy(half.state_dict()))
    train(split, optimizer, 100, first=100)
    for before, want, p in zip(start, exact, split):
        value = p.detach().float()  # the upper halves of float32 weights; then the rest
        value.view(torch.int32).add_(optimizer.state[p]["low"])
        moved = (want - before).abs()
        assert moved.mean() > 2e-5  # 200 steps of 1e-6, many of them back
        assert (value - want).abs().max() < 0.01 * moved.max()  # the first moment's rounding
        assert torch.equal(p, value.bfloat16())


def test_muon_is_that_of_torch():
    ours, theirs = ([torch.nn.Parameter(torch.ones(shape)) for shape in ((8, 4), (4, 8), (8, 4), (4, 4))]
                    for _ in range(2))
    optimizer = Muon([{"params": ours, "weight_decay": 0.1}])
    optimizer.param_groups[0]["lr"] = 0.01
    train(ours, optimizer, 4)
    train(theirs, torch.optim.Muon(theirs, 0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"), 4)
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, atol=1e-3, rtol=0)  # in all they moved by 0.02


# ---- rescoring


def test_logits_of_bfloat16_are_not_rounded():
    head, states = torch.nn.Linear(64, 99, bias=False).bfloat16(), 9 * torch.randn(5, 64).bfloat16()
    head.get_output_embeddings = lambda: head
    assert torch.allclose(head_logits(head, states), states.float() @ head.weight.T.float(), atol=1e-5)


def test_layers_of_a_model_from_200_million_parameters_on_are_computed_again(model, monkeypatch):
    assert not model.recompute
    for name in "backbone.RECOMPUTED", "fast.train_step.RECOMPUTED":
        monkeypatch.setattr(name, model.model.num_parameters())
    assert Backbone(model.model, model.tokenizer).recompute and not Backbone(small_model(), model.tokenizer).recompute
    sft.TrainStep(model.model, pretrained=True)
    assert any(getattr(module, "gradient_checkpointing", False) for module in model.model.modules())


def test_a_step_is_adamw_on_the_mean_of_the_sequences_mean_losses(monkeypatch):
    """The release's: every sequence weighs the same, decay 0.01 on all. Rows of 12, 12, 12, 12 and 2 learnt tokens.

    A gradient that is not finite is skipped. (A model from random weights does not wait for the norm.)
    """
    data = encoded(5, np.random.default_rng(0))
    data[4] = (data[4][0], np.arange(20) >= 18)
    model, twin = small_model(), small_model()
    step = sft.TrainStep(model, pretrained=True)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.01)
    parts, norms = [sft.collate(data[:2], 0), sft.collate(data[2:], 0)], []
    for scale in (0.2, 50.0):  # the second gradient is too long, and is clipped
        for each in (model, twin):
            each.model.norm.weight.data *= scale
        loss = torch.stack([by_hand(twin, [row]) for row in data]).mean()
        assert step(parts, 1e-2).item() == pytest.approx(loss.item(), rel=1e-4)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        for mine, other in zip(model.parameters(), twin.parameters()):
            assert torch.allclose(mine, other, atol=2e-4)
    assert norms[0] < 1 < norms[1]
    before = [p.clone() for p in model.parameters()]
    monkeypatch.setattr(step, "_weights", lambda parts: [torch.full((len(ids),), torch.nan) for ids, _ in parts])
    assert step(parts, 1e-2).isnan() and all(map(torch.equal, before, model.parameters()))


def test_matrices_that_begin_at_random_are_muons_but_for_the_embedding():
    model = small_model()
    step = sft.TrainStep(model, pretrained=False)
    muon, adamw = (set(sum((group["params"] for group in o.param_groups), [])) for o in step.optimizers)
    matrices = {p for name, p in model.named_parameters() if "layers" in name and "norm" not in name}
    assert muon == matrices and adamw == set(model.parameters()) - matrices


def losses_of(graphs, device, update):
    """Losses of ten steps on batches of two shapes in turn. update: the method of TrainStep that does a step."""
    step = sft.TrainStep(small_model().to(device), pretrained=False)
    step.graphs = {} if graphs else None
    rng = np.random.default_rng(0)
    batches = [[sft.collate(encoded(count, rng), 0)] for count in (4, 2) * 5]
    losses = [getattr(step, update)(batch, 1e-3 * (n + 1)).item() for n, batch in enumerate(batches)]
    return losses, step.graphs


def test_scoring_all_positions_changes_nothing():
    """What a graph computes, without a graph: positions that are not learnt have no weight."""
    losses = losses_of(True, "cpu", "_update")[0]
    assert losses == pytest.approx(losses_of(False, "cpu", "_update")[0], rel=1e-3) and losses[-1] < 0.9 * losses[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_of_a_step_is_the_step():
    losses, graphs = losses_of(True, "cuda", "__call__")
    assert len(graphs) == 2 and all(graphs.values())
    assert losses == pytest.approx(losses_of(False, "cuda", "__call__")[0], rel=0.02) and losses[-1] < 0.9 * losses[0]

"""Rewards, advantages, filters, loss, the training step, and resuming after a kill at any point."""

import functools
import itertools
import json
import math
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from transformers import Qwen3ForCausalLM

import reinforce
import report
import summarizer
from backbone import Backbone
from conftest import (CONTENT, FakeSandbox, Scripted, entry, kernel, make_task, plain_logprobs, proposing,
                      selecting)
from reinforce import (BASELINES, OPTIONS, RECIPES, REWARDS, SIZES, Row, clipped_loss, cuda_agent_reward, group_mean,
                       leave_one_out, micro_batches, mrs_keeps, policy_advantages, prs_probability, update)
from sandbox import Sandbox, Verdict
from skills import Skill, SkillLibrary
from synthetic.expert import ALL, read, render
from synthetic.tiny import random_qwen3


def configure(given, parameters=1e6):
    return report.configure(given, parameters, OPTIONS, SIZES, RECIPES)


# ---- rewards


def right(speedup, coverage=0.0):
    return Verdict(compiled=True, correct=True, speedup=speedup, coverage=coverage)


WRONG = [Verdict(), Verdict(compiled=True, error="wrong values"),
         Verdict(compiled=True, rejected="decoy", coverage=0.9)]


@pytest.mark.parametrize("recipe, speedup, coverage, reward", [
    ("davinci", 1.0, 1.0, 1.5), ("davinci", 2.0, 0.5, 1.75), ("davinci", 0.5, 0.0, 0.75), ("davinci", 60.0, 1.0, 4.0),
    ("drkernel", 2.0, 0.5, 1.75), ("kevin", 1.1, 1.0, 1.4), ("kevin", 10.0, 0.0, 10.3), ("cuda-agent", 0.5, 0.0, 1.0),
    ("cuda-agent", 1.04, 0.0, 1.0), ("cuda-agent", 1.06, 0.0, 2.0)])
def test_rewards(recipe, speedup, coverage, reward):
    assert REWARDS[recipe](right(speedup, coverage)) == pytest.approx(reward)
    assert [REWARDS[recipe](verdict) for verdict in WRONG] == [-1.0 if recipe == "cuda-agent" else 0.0] * 3


def test_the_third_milestone_needs_a_win_over_torch_compile_as_well():
    assert cuda_agent_reward(right(2.0), right(1.06)) == 3 and cuda_agent_reward(right(2.0), right(1.04)) == 2
    assert cuda_agent_reward(right(1.0), right(1.5)) == 1  # compiled code may be slower than eager code


def test_recipes_set_what_the_systems_differ_in():
    davinci, drkernel, kevin, _ = (configure({"device": "cpu", "recipe": name}) for name in REWARDS)
    assert (davinci.gamma, davinci.baseline, davinci.skills) == (1.0, "leave-one-out", True)
    assert (kevin.gamma, kevin.baseline, kevin.prs) == (0.4, "group-norm", False)
    assert not drkernel.skills and drkernel.prs and drkernel.mrs
    assert configure({"device": "cpu", "recipe": "kevin", "gamma": 0.9}).gamma == 0.9
    assert configure({"device": "cpu"}).lr == 5e-5 and configure({"device": "cuda"}, 8e9).lr == 1e-6
    assert (configure({"device": "cuda"}).batch, configure({"device": "cuda"}).s) == (16, 8)


# ---- advantages


def slow_policy_advantages(rewards, members, gamma, baseline, cross_scheme):
    """The double loop: every turn looks for its own group."""
    returns = [[sum(gamma ** (u - t) * row[u] for u in range(t, len(row))) for t in range(len(row))] for row in rewards]
    advantages = {}
    for i, row in enumerate(rewards):
        for t in range(len(row)):
            if not members[i][t]:
                continue
            others = [returns[j][t] for j in range(len(rewards)) if j != i and t < len(rewards[j]) and members[j][t]]
            whole = others + [returns[i][t]]
            if baseline == "leave-one-out":
                advantages[i, t] = returns[i][t] - (sum(others) / len(others) if others else 0.0)
            else:
                advantages[i, t] = returns[i][t] - sum(whole) / len(whole)
                if baseline == "group-norm":
                    spread = statistics.pstdev(whole)
                    advantages[i, t] = advantages[i, t] / spread if spread > 1e-8 else 0.0
    if cross_scheme and any(abs(a) > 1e-9 for a in advantages.values()):
        scale = max(sum(map(abs, advantages.values())) / len(advantages), 0.05)
        advantages = {key: a / scale for key, a in advantages.items()}
    return [[advantages.get((i, t)) for t in range(len(row))] for i, row in enumerate(rewards)]


@pytest.mark.parametrize("baseline", list(BASELINES))
@pytest.mark.parametrize("cross_scheme", [False, True])
def test_advantages_equal_the_slow_twin(baseline, cross_scheme):
    rng = random.Random(0)
    for _ in range(200):
        rewards = [[rng.choice([0, 0, 1.2, 2.5, rng.random()]) for _ in range(rng.randint(1, 4))]
                   for _ in range(rng.randint(1, 8))]
        members = [[rng.random() < 0.8 for _ in row] for row in rewards]
        gamma = rng.choice([1.0, 0.4])
        got = policy_advantages(rewards, members, gamma, BASELINES[baseline], cross_scheme)
        want = slow_policy_advantages(rewards, members, gamma, baseline, cross_scheme)
        for mine, slow in zip(got, want):
            assert [a is None for a in mine] == [a is None for a in slow]
            assert [a for a in mine if a is not None] == pytest.approx([a for a in slow if a is not None], abs=1e-8)


def test_equal_returns_have_exactly_no_advantage():
    for baseline in BASELINES.values():
        assert baseline([0.1 + 0.2, 0.3, 0.3]) == [0.0] * 3 or baseline is group_mean
        assert baseline([0.1] * 7) == [0.0] * 7
    timed = policy_advantages([[1.301], [1.299], [1.3]], [[True]] * 3, cross_scheme=True)
    assert max(abs(a) for row in timed for a in row) < 0.05  # neither is a timing's
    noisy = [[0.1 + 0.2], [0.3], [0.3], [0.15 * 2]]
    assert policy_advantages(noisy, [[True]] * 4, cross_scheme=True) == [[0.0]] * 4  # noise is not blown up


# ---- filters and loss


def test_prs_keeps_by_coverage():
    assert [prs_probability(right(2.0, c)) for c in (0.0, 0.3, 0.4, 1.0)] == [0.0, 0.0, pytest.approx(1.0), 1.0]
    assert prs_probability(right(2.0, 0.33)) == pytest.approx(0.3)
    assert all(prs_probability(verdict) == 1.0 for verdict in WRONG)


@pytest.mark.parametrize("change, kept", [
    ([0.0] * 50, True), ([0.0009] * 50, True), ([-0.0009] * 50, True), ([0.0011] * 50, False), ([-0.0011] * 50, False),
    ([0.5, -0.5] * 25, True), ([9.0, -9.0], True), ([9.5, -9.5], False)])
def test_mrs_judges_the_geometric_mean_and_the_worst_token(change, kept):
    old = -torch.rand(len(change), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert mrs_keeps(old + torch.tensor(change, dtype=torch.float64), old) == kept


@pytest.mark.parametrize("ratio, advantage, value, slope", [
    (1.0, 1.7, -1.7, -1.7), (1.1, 2.0, -2.2, -2.2),  # on policy: the policy gradient
    (1.5, 2.0, -2.56, 0.0), (0.5, 2.0, -1.0, -1.0),  # a good reply: no push beyond 1.28
    (0.9, -2.0, 1.8, 1.8), (0.5, -2.0, 1.6, 0.0), (1.5, -2.0, 3.0, 3.0)])  # a bad one: none below 0.8
def test_loss_is_clipped(ratio, advantage, value, slope):
    new = torch.tensor([math.log(ratio)], requires_grad=True)
    loss = clipped_loss(new, torch.zeros(1), advantage, 0.2, 0.28)
    loss.backward()
    assert loss.item() == pytest.approx(value) and new.grad.item() == pytest.approx(slope, abs=1e-6)


def sampled_rows(model, advantages, turns=2, roles=("policy",)):
    """Sequences of `turns` rows (a reply, then a later turn that extends it) sampled from the model."""
    generator, sequences, advantages = torch.Generator().manual_seed(5), [], list(advantages)
    while advantages:
        prompt = torch.randint(5, 300, (random.Random(len(advantages)).randint(4, 60),), generator=generator).tolist()
        rows = []
        for _ in range(turns):
            reply = model.sample([prompt], 30, 1.0, generator)[0]
            rows.append(Row(roles[len(sequences) % len(roles)], reply, advantages.pop(0)))
            prompt = reply.prompt_ids + reply.token_ids + [7, 8, 9]
        sequences.append(rows)
    return sequences


def naive_gradients(model, sequences):
    """One plain forward for each row, all rows, one backward."""
    rows = [row for rows in sequences for row in rows]
    loss = 0.0
    for row in rows:
        new = plain_logprobs(model, row.completion.prompt_ids, row.completion.token_ids)
        ratio = (new - torch.tensor(row.completion.logprobs)).exp()
        loss = loss - torch.minimum(ratio * row.advantage, ratio.clamp(0.8, 1.28) * row.advantage).sum() / len(rows)
    model.model.zero_grad()
    loss.backward()
    return loss.item(), [p.grad.clone() for p in model.model.parameters()]


@pytest.mark.parametrize("budget", [1, 200, 10**9])
def test_update_equals_one_naive_batch_whatever_the_micro_batches(model, budget):
    advantages = [1.0, -0.5, 0.0, 0.3, -2.0, 0.0, 0.0, 0.0, 0.7, 0.25]
    sequences = sampled_rows(model, advantages, roles=("policy", "selection", "summary"))
    args = configure({"device": "cpu", "update_tokens": budget, "grad_clip": 1e9, "mrs": False})
    loss, want = naive_gradients(model, sequences)
    model.model.zero_grad()
    stats = update(model, Mock(), sequences, args)
    assert stats["loss"] == pytest.approx(loss, abs=1e-5) and (stats["rows"], stats["rows_live"]) == (10, 6)
    for gradient, parameter in zip(want, model.model.parameters()):
        assert torch.allclose(gradient, parameter.grad, atol=2e-5 * max(1.0, gradient.abs().max().item()))


def test_rows_without_advantage_are_not_computed(model, monkeypatch):
    sequences = sampled_rows(model, [0.0, 1.0, 0.0, 0.0, -1.0, 0.0])
    seen, logprobs = [], model.logprobs
    monkeypatch.setattr(model, "logprobs", lambda rows: seen.append(rows) or logprobs(rows))
    update(model, Mock(), sequences, configure({"device": "cpu"}))
    assert sum(map(len, seen)) == 2
    idle, none = Mock(), [[Row("policy", rows[0].completion, 0.0)] for rows in sequences]
    stats = update(model, idle, none, configure({"device": "cpu"}))
    assert len(seen) == 1 and not idle.step.called and stats["rows"] == 3  # nothing to learn: the weights stay


def test_micro_batches_keep_to_the_budget_and_rollouts_together(model):
    sequences = sampled_rows(model, [1.0] * 40)
    batches = list(micro_batches(sequences, 400))
    packed, given = ([id(row) for rows in several for row in rows] for several in (batches, sequences))
    assert sorted(packed) == sorted(given)
    widths = []
    for batch in batches:
        whole = {id(rows) for rows in sequences if any(row is r for row in rows for r in batch)}
        assert len(batch) == 2 * len(whole)  # both turns of each rollout, which run as one sequence
        widths.append(max(len(row.completion.prompt_ids) + len(row.completion.token_ids) for row in batch))
        assert len(whole) * widths[-1] <= 400 or len(whole) == 1
    assert widths == sorted(widths, reverse=True) and 1 < len(batches) < 20


def test_gradients_are_clipped_by_norm(model):
    sequences = sampled_rows(model, [500.0, -400.0])
    stats = update(model, Mock(), sequences, configure({"device": "cpu", "grad_clip": 0.5}))
    norm = torch.stack([p.grad.norm() for p in model.model.parameters()]).norm().item()
    assert stats["grad_norm"] > 10 and norm == pytest.approx(0.5, rel=1e-3)


def test_replies_that_the_trainer_sees_otherwise_are_masked(model):
    """MRS on policy rows only: log-probabilities that are off by 1 % a token."""
    def off(role):
        sequences = sampled_rows(model, [1.0, 1.0], turns=1, roles=(role,))
        sequences[0][0].completion.logprobs = [p - 0.01 for p in sequences[0][0].completion.logprobs]
        stats = update(model, Mock(), sequences, configure({"device": "cpu"}))
        return stats["mrs_masked"], stats["rows"]

    assert off("policy") == (1, 2) and off("selection") == (0, 2)


# ---- the training step

SMALL = ["--batch", "2", "--k", "2", "--n", "2", "--turns", "2", "--s", "2", "--lr", "0.003", "--device", "cpu"]


def script(role, prompt):
    """Replies that a model of this kind might give. A learnt skill makes the policy faster."""
    if role == "selection":
        names = [name for name in ("seed-a", "seed-b", "learnt", "learnt-2") if f"- {name} [" in prompt]
        return [*map(selecting, names), "none of these"]
    if role == "summary":
        return [proposing(entry()), proposing(entry(content=CONTENT + "\nOr use torch.compile."), 3), "no idea"]
    if "Key Idea: fuse" in prompt:
        return [kernel(1.7), kernel(1.9, 0.35)]
    if "Speedup" in prompt:
        return [kernel(1.5), kernel(1.0), kernel(2.0, 0.1)]
    return [kernel(1.0), kernel(0.8), "```python\nclass ModelNew:\n    wrong\n```", "I cannot do that."]


@pytest.fixture
def world(request, monkeypatch, model_folder, tmp_path):
    """Everything but words and verdicts is real. Returns a function that runs reinforce.py with options."""
    model = tmp_path / "model"
    Backbone.load(model_folder).save(model)
    SkillLibrary([Skill("seed-a", "forward module", "general", ("relu",), CONTENT.replace("fuse", "a")),
                  Skill("seed-b", "inputs torch", "general", ("init",), CONTENT.replace("fuse", "b")),
                  Skill("other", "unrelated words", "general", ("scan",), "c")]).save(model / "skill_library.jsonl")
    (tmp_path / "tasks").mkdir()
    for i in range(5):
        (tmp_path / f"tasks/{i}.py").write_text(make_task(i).source)
    enter(monkeypatch.setattr)
    if not request.node.get_closest_marker("curves"):
        for module in (reinforce, report):
            monkeypatch.setattr(module, "draw_curves", lambda run: None)  # a second each

    def run(out, *options, evaluate=False):
        fresh = ["--model", str(model), "--tasks", str(tmp_path / "tasks"), *SMALL,
                 *([] if evaluate else ["--no-eval"])]
        assert reinforce.main(["--out", str(tmp_path / out), *([] if "--resume" in options else fresh), *options]) == 0
        return tmp_path / out

    return run


def enter(setattr, script=script, sandbox=FakeSandbox):
    """Put a scripted model and a fake sandbox in place of the real ones."""
    load = Backbone.load

    def scripted(path, device="cpu", dtype=None):
        model = load(path, device, dtype)
        model.__class__, model.script = Scripted, script
        return model

    setattr(Backbone, "load", scripted)
    setattr(reinforce, "Sandbox", sandbox)


def metrics(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def records(out, step, role):
    lines = map(json.loads, (out / f"rollouts/step_{step}.jsonl").read_text().splitlines())
    return [line for line in lines if line["role"] == role]


def library_at(out, step) -> list:
    """The skills of the newest snapshot that is not later."""
    steps = [int(path.stem.split("_")[-1]) for path in (out / "skill_library").iterdir()]
    return SkillLibrary.load(out / f"skill_library/global_step_{max(n for n in steps if n <= step)}.jsonl").skills


def weights(out):
    return (out / "checkpoint/model.safetensors").read_bytes()


@pytest.mark.curves
def test_training_steps(world, monkeypatch):
    """All three roles enter the loss; a skill is proposed, verified, flushed after the update, and selected later."""
    sizes, credit = [], reinforce.credit  # sizes: of the library when the rows of the loss are made
    monkeypatch.setattr(reinforce, "credit", lambda run, e: sizes.append(len(run.library)) or credit(run, e))
    out = world("run", "--steps", "6")
    lines = metrics(out)
    assert sizes == [m["library"] for m in lines[:-1]]
    assert [m["step"] for m in lines] == list(range(7)) and lines[0]["library"] == 3
    flushed = [m["step"] for m in lines[1:] if m["staged"]]
    assert flushed and sum(m["selected_learnt"] for m in lines if m["step"] > flushed[0]) > 0
    assert sum(m["selected_learnt"] for m in lines[1:flushed[0] + 1]) == 0  # not before it was flushed
    for m in lines[1:]:
        assert m["policy_rows"] + m["prs_masked"] == 2 * 3 * 2 * 2 and m["selection_rows"] == 4
        assert m["rows"] == m["policy_rows"] + m["selection_rows"] + m["summary_rows"] and m["mrs_masked"] == 0
        assert m["ratio_off"] < 1e-4 and m["clipped"] == 0 and m["grad_norm"] > 0  # exactly on-policy
        assert m["library"] == lines[m["step"] - 1]["library"] + m["staged"]
    assert sum(m["summary_rows"] for m in lines[1:]) > 0 and sum(m["prs_masked"] for m in lines[1:]) > 0
    reasons = {reason for m in lines[1:] for reason in m["rejected"]}
    assert {"lazy advice", "no tool call"} <= reasons
    names = [s.name for s in library_at(out, 6)]
    assert names[:3] == ["seed-a", "seed-b", "other"] and names[3] == "learnt" and len(set(names)) == len(names)
    assert [s.name for s in library_at(out, flushed[0] - 1)] == names[:3]
    assert SkillLibrary.of_model(out / "checkpoint").skills == library_at(out, 6)
    assert (out / "curves.png").stat().st_size > 10_000 and not list(out.glob("*.tmp*"))


@pytest.mark.parametrize("proposals, reward, staged", [
    ([(1.5, None), (2.5, None), (2.0, None), (9.0, "too slow")], 2.5, 2.5), ([], 0.0, None),
    ([(400.0, None)], reinforce.SPEEDUP_CAP, 400.0), ([(400.0, "too slow")], 0.0, None)])
def test_a_summary_earns_the_capped_speedup_of_its_best_verified_skill(proposals, reward, staged, monkeypatch):
    """Which is staged."""
    monkeypatch.setattr(reinforce.summarizer, "verify", lambda *_: None)
    proposals = [summarizer.Proposal({}, Skill(f"s{x}", "", "", [], "", x), rejected) for x, rejected in proposals]
    episode = reinforce.Episode(None, [], [], [summarizer.Summary(None, None, None, None, None, proposals)])
    args = SimpleNamespace(no_verify=False, policy_tokens=1, prompt_tokens=1, trigger=1.2)
    reinforce.verify(SimpleNamespace(args=args, model=None, sandbox=None), [episode])
    assert episode.summaries[0].reward == reward
    assert (episode.staged and episode.staged.verify_speedup) == staged


def test_records_hold_what_happened(world):
    """Rewards and advantages recomputed from the transcript alone."""
    out = world("run", "--steps", "2")
    for step in (1, 2):
        rollouts, selections, summaries = (records(out, step, role) for role in ("policy", "selection", "summary"))
        assert len(rollouts) == 2 * 3 * 2 and len(selections) == 2 * 2
        for task in {line["task"] for line in rollouts}:
            mine = [line for line in rollouts if line["task"] == task]
            rewards = [[turn["reward"] for turn in line["turns"]] for line in mine]
            kept = [[turn["advantage"] is not None for turn in line["turns"]] for line in mine]
            want = slow_policy_advantages(rewards, kept, 1.0, "leave-one-out", True)
            for line, row in zip(mine, want):
                assert [turn["advantage"] for turn in line["turns"]] == pytest.approx(row)
                for turn in line["turns"]:
                    assert turn["reward"] == reinforce.davinci_reward(Verdict(**turn["verdict"]))
                    assert turn["reply"] and turn["feedback"] and line["prompt"].startswith("<|im_start|>system")
            asked = [line for line in selections if line["task"] == task]
            for line in asked:  # schemes that chose the same skills pool their rollouts
                pooled = [max(row) for row, other in zip(rewards, mine) if set(other["skills"]) == set(line["skills"])]
                assert line["reward"] == pytest.approx(statistics.mean(pooled)) and len(pooled) in (2, 4, 6)
            want = leave_one_out([line["reward"] for line in asked])
            assert [line["advantage"] for line in asked] == pytest.approx(want)
        for line in summaries:
            passed = [p for p in line["proposals"] if not p["rejected"]]
            fastest = max((p["attempt"]["verdict"]["speedup"] for p in passed), default=0.0)
            assert line["reward"] == min(fastest, reinforce.SPEEDUP_CAP)
            assert all(p["detail"] or p["rejected"] in ("no tool call", "too many", "known already", None)
                       for p in line["proposals"])


def test_learning_moves_the_policy_to_the_better_kernel(world):
    """Thirty steps on one choice: two right kernels and two wrong replies. The mean reward must rise."""
    out = world("run", "--steps", "30", "--no-skills", "--turns", "1", "--no-prs", "--lr", "0.0005")
    first, last = (statistics.mean(m["reward_best"] for m in part) for part in (metrics(out)[1:6], metrics(out)[-5:]))
    assert last > first + 0.2


def test_ablations(world):
    base = world("base", "--steps", "2")
    out = world("a", "--steps", "2", "--no-skills")
    assert all(m["selection_rows"] == m["summaries"] == m["staged"] == 0 for m in metrics(out)[1:])
    assert all(not line["skills"] for line in records(out, 1, "policy")) and len(records(out, 1, "policy")) == 12
    out = world("b", "--steps", "2", "--bm25-only")
    assert records(out, 1, "selection") == [] and all(m["selection_rows"] == 0 for m in metrics(out)[1:])
    assert sum(len(line["skills"]) > 0 for line in records(out, 1, "policy")) == 8  # k of k + 1 schemes
    out = world("c", "--steps", "3", "--no-verify")
    proposals = [p for step in (1, 2, 3) for line in records(out, step, "summary") for p in line["proposals"]]
    assert proposals and all(p["attempt"] is None for p in proposals) and sum(m["staged"] for m in metrics(out)[1:]) > 0
    assert {line["reward"] for step in (1, 2, 3) for line in records(out, step, "summary")} <= {0.0, 1.0}
    for switch, role in (("--freeze-selection", "selection"), ("--freeze-summary", "summary")):
        out = world(role, "--steps", "2", switch)
        assert records(out, 1, role) == records(base, 1, role)  # it is used, credited and recorded all the same
        line = metrics(out)[1]
        assert line["rows"] == sum(line[f"{one}_rows"] for one in ("policy", "selection", "summary") if one != role)
        assert weights(out) != weights(base)
    out = world("d", "--steps", "1", "--baseline", "group-mean", "--no-cross-scheme")
    for line in records(out, 1, "selection"):
        group = [other["reward"] for other in records(out, 1, "selection") if other["task"] == line["task"]]
        assert line["advantage"] == pytest.approx(line["reward"] - statistics.mean(group))


def test_evaluation_before_after_and_between(world, monkeypatch):
    """On its own problems and its own random numbers: training goes on as if it had not been."""
    monkeypatch.setattr(reinforce.tasks, "builtin_tasks", lambda device: [make_task(i) for i in range(7, 10)])
    plain = world("plain", "--steps", "3")
    out = world("run", "--steps", "3", "--eval-every", "2", "--eval-samples", "2", evaluate=True)
    lines = metrics(out)
    assert [m["step"] for m in lines if "eval_reward_best" in m] == [0, 2, 3] and weights(out) == weights(plain)
    for step in (0, 2, 3):
        rollouts = [json.loads(line) for line in (out / f"rollouts/eval_{step}.jsonl").read_text().splitlines()]
        rewards = [max(t["reward"] for t in r["turns"]) for r in rollouts if r["role"] == "policy"]
        assert len(rewards) == 3 * 2 and len(rollouts) == 3 * 2 + 3
        assert lines[step]["eval_reward_best"] == pytest.approx(statistics.mean(rewards))
    assert "eval_reward_best" in metrics(world("after", "--steps", "2", evaluate=True))[2]


def test_a_step_survives_every_candidate(world, monkeypatch):
    """With the real sandbox: a kernel that works, one that is malformed, hangs, exits, crashes, floods or hoards."""
    bodies = {"no class": "ModelNew = 3", "no forward": "", "hangs": "while True:\n    pass",
              "exits": "import os\nos._exit(0)", "floods": "while True:\n    print('x' * 99999)",
              "crashes": "import ctypes\nctypes.string_at(0)",
              "hoards": "x = []\nwhile True:\n    x.append(bytearray(1 << 28))"}
    replies = [f"```python\n{body}\nclass ModelNew:\n    pass\n```" for body in bodies.values()]
    replies = iter(["expert", "no code", "```python\nclass ModelNew", *replies])

    def everything(role, prompt):
        task = make_task(int(re.search(r"relu\(x\) \* (\d)", prompt)[1]) - 2)
        return [next(replies).replace("expert", f"```python\n{render(read(task), ALL).code}```")]

    enter(monkeypatch.setattr, everything, functools.partial(Sandbox, timeout=4.0))
    out = world("run", "--steps", "1", "--batch", "5", "--n", "1", "--turns", "2", "--no-skills", "--k", "0")
    verdicts = [turn["verdict"] for line in records(out, 1, "policy") for turn in line["turns"]]
    assert len(verdicts) == 10 and all(v["correct"] or v["error"] or v["rejected"] for v in verdicts)
    assert [v["correct"] for v in verdicts] == [True] + [False] * 9 and verdicts[0]["speedup"] > 1.5


# ---- resuming


def state(out):
    """All that a run leaves, but for wall times."""
    trainer = torch.load(out / "checkpoint/trainer.pt", weights_only=True)
    lines = [{key: value for key, value in m.items() if key != "seconds"} for m in metrics(out)]
    files = {str(path.relative_to(out)): path.read_text() for folder in ("rollouts", "skill_library")
             for path in (out / folder).iterdir()}
    moments = [{k: v.tolist() for k, v in each.items()} for each in trainer["optimizer"]["state"].values()]
    return {"weights": weights(out), "library": (out / "checkpoint/skill_library.jsonl").read_text(),
            "metrics": lines, "files": files, "generator": trainer["generator"].tolist(), "step": trainer["step"],
            "optimizer": moments}


def same(a, b, without=()):
    a, b = state(a), state(b)
    for part in a:
        assert part in without or a[part] == b[part], part
    return True


def test_resuming_equals_not_stopping(world):
    whole = world("whole", "--steps", "5")
    parts = world("parts", "--steps", "2")
    world("parts", "--resume", "--steps", "3")
    world("parts", "--resume", "--steps", "5")
    assert same(whole, parts)
    before = weights(whole)
    world("whole", "--resume")  # complete already: nothing happens
    assert weights(whole) == before and len(metrics(whole)) == 6


def test_checkpoint_folder_alone_resumes(world, tmp_path):
    whole, source = world("whole", "--steps", "4"), world("part", "--steps", "2")
    (tmp_path / "copy").mkdir()
    (source / "checkpoint").rename(tmp_path / "copy/checkpoint")
    copy = world("copy", "--resume", "--steps", "4")
    assert weights(copy) == weights(whole) and [m["step"] for m in metrics(copy)] == [3, 4]
    assert state(copy)["library"] == state(whole)["library"]


class Killed(BaseException):
    pass


SHORT, WHOLE = ["--steps", "2", "--batch", "1"], []


def whole_run(world):
    """The uninterrupted run of two steps, made once."""
    if not WHOLE:
        WHOLE.append(world("whole", *SHORT))
    return WHOLE[0]


POINTS = ["select", "roll_out", "score", "summarise", "verify", "credit", "update", "flush", "record_rollouts",
          "step_metrics", "finish_step", "save_checkpoint"]


def kill_and_resume(world, monkeypatch, functions, n, counts=lambda *_: True):
    """A run that dies on entering one of `functions`, (owner, name) each, at the n-th call that `counts`."""
    calls = itertools.count(1)
    with monkeypatch.context() as patch:
        for owner, name in functions:
            def dying(*arguments, real=getattr(owner, name), **options):
                if counts(real, arguments) and next(calls) == n:
                    raise Killed
                return real(*arguments, **options)

            patch.setattr(owner, name, dying)
        with pytest.raises(Killed):
            world("killed", *SHORT)
    assert same(whole_run(world), world("killed", "--resume"))


@pytest.mark.parametrize("n, point", list(enumerate(POINTS)))
def test_killed_at_any_phase_and_resumed(world, monkeypatch, n, point):
    """The process dies on entering a function of the step, in turn in the first and in the second."""
    module = report if point == "save_checkpoint" else reinforce
    kill_and_resume(world, monkeypatch, [(module, point)], 1 + n % 2 + (point in ("finish_step", "save_checkpoint")))


@pytest.mark.parametrize("n", range(1, 10))
def test_killed_within_a_checkpoint_and_resumed(world, monkeypatch, n):
    """The process dies at the n-th file operation of the checkpoints: 4 before the first step, 5 in each step."""
    def counts(real, arguments):
        if real.__name__ == "save_pretrained":
            Path(arguments[1], "model.safetensors").write_bytes(b"half a file")
        return any("checkpoint" in str(argument) for argument in arguments)

    operations = [(shutil, "rmtree"), (Path, "rename"), (Qwen3ForCausalLM, "save_pretrained")]
    kill_and_resume(world, monkeypatch, operations, n, counts)


def test_torn_metrics_line_is_dropped(world):
    whole, torn = world("whole", "--steps", "3"), world("torn", "--steps", "2")
    with open(torn / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "clo')
    (torn / "rollouts/step_9.jsonl").write_text("left behind")
    (torn / "skill_library/global_step_3.jsonl").write_text("left behind")
    assert same(whole, world("torn", "--resume", "--steps", "3"))


@pytest.mark.parametrize("phase, kept", [("score", 3), ("credit", 0)])
def test_an_interruption_keeps_the_complete_steps_unless_weights_change(world, monkeypatch, phase, kept):
    whole, work = world("whole", "--steps", "4"), getattr(reinforce, phase)

    def interrupted(run, episodes):
        if run.step == 3:
            raise KeyboardInterrupt
        return work(run, episodes)

    monkeypatch.setattr(reinforce, phase, interrupted)
    with pytest.raises(KeyboardInterrupt):
        world("cut", "--steps", "4", "--save-every", "10")
    monkeypatch.setattr(reinforce, phase, work)
    cut = whole.parent / "cut"
    assert torch.load(cut / "checkpoint/trainer.pt", weights_only=True)["step"] == kept
    assert same(whole, world("cut", "--resume"))


def run_with_kills(command, out, options, moments):
    """Run reinforce.py in a process of its own, killed and resumed: each moment is in seconds after it has begun."""
    for moment in [*moments, None]:
        rest = ["--resume"] if (out / "config.json").exists() else options
        process = subprocess.Popen([*command, "--out", str(out), *rest], stdout=subprocess.DEVNULL)
        while moment and not (out / "metrics.jsonl").exists() and process.poll() is None:
            time.sleep(0.01)
        try:
            assert process.wait(moment) == 0
            if moment:
                shutil.rmtree(out)  # it was done before all kills were spent: once more from the start
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def test_kill_nine_and_resume(world, tmp_path):
    """A process killed without warning. tests/kill_and_resume.py does so with the real model and sandbox."""
    whole, out, root = world("whole", "--steps", "4"), tmp_path / "killed", Path(__file__).parent.parent
    program = (f"import sys; sys.path[:0] = [{str(root)!r}, {str(root / 'tests')!r}]\n"
               "import test_reinforce, reinforce\ntest_reinforce.enter(setattr)\nreinforce.main(sys.argv[1:])")
    options = [*SMALL, "--no-eval", "--model", str(tmp_path / "model"), "--tasks", str(tmp_path / "tasks")]
    run_with_kills([sys.executable, "-c", program], out, [*options, "--steps", "4"], [random.Random(0).uniform(0, 1)])
    assert same(whole, out)


@pytest.mark.parametrize("tasks", ["synth", "builtin", "folder"])
def test_tasks_go_on_where_they_were(tasks, tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.py").write_text(make_task(i).source)
    args = configure({"device": "cpu", "tasks": str(tmp_path) if tasks == "folder" else tasks, "seed": 4})
    first = [task.source for task in itertools.islice(report.task_stream(args), 7)]
    assert [task.source for task in itertools.islice(report.task_stream(args), 3, 7)] == first[3:]
    assert len(set(first)) == (3 if tasks == "folder" else 7)
    other = configure(vars(args) | {"seed": 5})
    assert [task.source for task in itertools.islice(report.task_stream(other), 7)] != first


# ---- command line


def test_help_names_the_papers_symbols(capsys):
    with pytest.raises(SystemExit) as caught:
        reinforce.main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert caught.value.code == 0
    for text in ("k: selections", "n: rollouts", "T: turns", "s: parallel", "gamma:", "epsilon_low:", "lambda_sel:"):
        assert text in said
    for name in vars(configure({"device": "cpu"})):
        assert "--" + name.replace("_", "-") in said


def test_bad_input_is_one_line_and_exit_code_2(refusal, tmp_path, model_folder):
    for name in ("empty", "weightless", "bad"):
        (tmp_path / name).mkdir()
    (tmp_path / "weightless/config.json").write_text((model_folder / "config.json").read_text())
    (tmp_path / "bad/problem.py").write_text(make_task().source.replace("get_inputs", "get_outputs"))
    (tmp_path / "file").write_text("")
    model = f"--model {model_folder} --device cpu"
    for said, options in (
            ("no such model folder", f"--model {tmp_path}/none --device cpu"),
            ("no weights", f"--model {tmp_path}/weightless --device cpu"),
            ("cannot write", f"{model} --out {tmp_path}/file/out"), ("get_inputs", f"{model} --tasks {tmp_path}/bad"),
            ("no problem files", f"{model} --tasks {tmp_path}/empty"),
            ("no problem files", f"{model} --tasks {tmp_path}/none"), ("nothing to resume", "--resume"),
            ("--batch 0", f"{model} --batch 0"), ("--stepz", "--stepz 3"), ("invalid", "--recipe alphazero"),
            ("invalid", "--lr fast"), *([] if torch.cuda.is_available() else [("no GPU", "--device cuda")])):
        assert said in refusal(reinforce.main, "--out", tmp_path / "out", *options.split())
    assert "--out" in refusal(reinforce.main, "--resume")
    assert not (tmp_path / "out").exists()  # a refused run leaves nothing behind


def test_resume_refuses_what_would_be_another_run(world, refusal, capsys, tmp_path, tokenizer):
    out = world("run", "--steps", "1")
    capsys.readouterr()
    assert "already holds a run" in refusal(reinforce.main, "--out", out, "--device", "cpu")
    assert "--model" in refusal(reinforce.main, "--out", out, "--resume", "--model", tmp_path)
    assert "--gamma" in refusal(reinforce.main, "--out", out, "--resume", "--gamma", "0.5")
    random_qwen3(len(tokenizer), 48, 64, 2, head_dim=16).save_pretrained(out / "checkpoint")
    assert "not the one" in refusal(reinforce.main, "--out", out, "--resume")


def test_resume_needs_what_the_run_has_left_and_the_folder_to_itself(world, refusal, capsys):
    out = world("run", "--steps", "1")
    checkpoint, kept = out / "checkpoint", sorted(path.name for path in (out / "rollouts").iterdir())
    capsys.readouterr()
    report._locks.clear()  # this process lets go of it
    other = ("import sys, pathlib, report\nreport.claim(pathlib.Path(sys.argv[1]))\nprint('held', flush=True)\n"
             "sys.stdin.read()")
    holder = subprocess.Popen([sys.executable, "-c", other, str(out)], text=True, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, cwd=Path(report.__file__).parent)
    assert holder.stdout.readline() == "held\n"
    assert "another process is writing there" in refusal(reinforce.main, "--out", out, "--resume")
    holder.communicate()
    library = checkpoint / "skill_library.jsonl"
    library.rename(out / "aside")
    assert f"{library} is missing" in refusal(reinforce.main, "--out", out, "--resume")
    (out / "aside").rename(library)
    whole = (checkpoint / "trainer.pt").read_bytes()
    for content in (b"", whole[:1000], whole[:-1000]):
        (checkpoint / "trainer.pt").write_bytes(content)
        assert "trainer.pt is broken" in refusal(reinforce.main, "--out", out, "--resume")
    (checkpoint / "trainer.pt").unlink()
    assert "trainer.pt is missing" in refusal(reinforce.main, "--out", out, "--resume")
    shutil.rmtree(checkpoint)
    assert "is missing, though steps are finished" in refusal(reinforce.main, "--out", out, "--resume")
    assert sorted(path.name for path in (out / "rollouts").iterdir()) == kept  # nothing was deleted
    (out / "metrics.jsonl").unlink()
    (out / "config.json").write_text("{")
    assert "config.json is broken" in refusal(reinforce.main, "--out", out, "--resume")

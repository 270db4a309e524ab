"""Rewards, advantages, filters, loss and one optimiser step, each against numbers made by hand or a slow twin."""

import itertools
import math
import random
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import reinforce
import summarizer
from advantages import BASELINES, Row, credit, cross_scheme, mismatched, policy_advantages, returns_to_go, varies
from backbone import Completion, Sampling
from conftest import configure, plain_logprobs, slow_policy_advantages
from fast import rescore
from policy import REWARDS, reward_turns
from skills import Skill, SkillLibrary
from test_roles import trajectory

# ---- advantages


@pytest.mark.parametrize("baseline", list(BASELINES))
@pytest.mark.parametrize("scaled", [False, True])
def test_advantages_equal_the_slow_twin(baseline, scaled):
    rng = random.Random(0)
    for _ in range(100):
        rewards = [[rng.choice([0, 0, 1.2, 2.5, rng.random()]) for _ in range(rng.randint(1, 4))]
                   for _ in range(rng.randint(1, 8))]
        members = [[rng.random() < 0.8 for _ in row] for row in rewards]
        tokens = [[rng.choice([0, 0, 3, 40]) for _ in row] for row in rewards]
        gamma = rng.choice([1.0, 0.4])
        got = policy_advantages([returns_to_go(row, gamma) for row in rewards], members, BASELINES[baseline])
        got = cross_scheme(got, tokens) if scaled else got
        want = slow_policy_advantages(rewards, members, tokens, gamma, baseline, scaled)
        assert got == [pytest.approx(row, abs=1e-8) for row in want]


def test_rounding_and_noise_of_times_do_not_become_advantages():
    for baseline in BASELINES.values():
        assert baseline.subtract([0.1 + 0.2, 0.3, 0.3]) == baseline.subtract([0.1] * 3) == [0.0] * 3
    timed = cross_scheme(policy_advantages([[1.301], [1.299], [1.3]], [[True]] * 3), [[9]] * 3)
    assert max(abs(a) for [a] in timed) < 0.05


# ---- filters and loss


def reply(tokens=2):
    return Completion([1], [2] * tokens, [0.0] * tokens, "", True)


@pytest.mark.parametrize("drifts, kept", [
    ([[0.0009] * 50], [True]), ([[-0.0009] * 50], [True]), ([[0.0011] * 50], [False]), ([[-0.0011] * 50], [False]),
    ([[0.003] * 10, [0.0] * 90], [True, True]),  # the long turn decides for the short one
    ([[9.0, -9.0]], [True]), ([[9.5, -9.5], [0.0]], [False, True])])  # a token's veto is its turn's
def test_mrs_looks_at_the_rollouts_geometric_mean_and_at_each_turns_worst_token(drifts, kept):
    rejected = mismatched([torch.tensor(drift, dtype=torch.float64) for drift in drifts])
    assert [not mask for mask in rejected] == kept


@pytest.mark.parametrize("ratio, advantage, value, slope", [
    (1.0, 1.7, -1.7, -1.7), (1.1, 2.0, -2.2, -2.2),  # on policy: the policy gradient
    (1.5, 2.0, -2.56, 0.0), (0.5, 2.0, -1.0, -1.0), (9.0, 2.0, -2.56, 0.0),  # a good reply: no push beyond 1.28
    (0.9, -2.0, 1.8, 1.8), (0.5, -2.0, 1.6, 0.0), (1.5, -2.0, 3.0, 3.0),  # a bad one: none below 0.8
    (2.9, -2.0, 5.8, 5.8), (3.1, -2.0, 6.0, 0.0)])  # nor above 3
def test_loss_is_clipped_at_its_own_bound_on_each_side(ratio, advantage, value, slope):
    """ratio: how many times as likely as when it was sampled a token is now."""
    new = torch.tensor([math.log(ratio)], requires_grad=True)
    model = SimpleNamespace(logprobs=lambda replies, temperature: [new])
    options = configure({"device": "cpu", "mrs": False})
    loss, off = reinforce.micro_batch_loss(model, [[Row("policy", reply(1), advantage)]], options)
    loss.backward()
    assert loss.item() == pytest.approx(value) and new.grad.item() == pytest.approx(slope, abs=1e-6)
    assert off == pytest.approx(abs(ratio - 1))


def test_a_group_varies_by_its_sample_standard_deviation():
    assert varies([1.0, 1.0015], 1e-3) and not varies([1.0, 1.0013], 1e-3)  # 0.00106 and 0.00092
    assert varies([0.3], 1e-3) and varies([1.0, 1.0], 0.0)


def sampled_rows(model, advantages, turns=2, temperature=1.0):
    """Sequences of `turns` rows (a reply, then a later turn that extends it) sampled from the model."""
    generator, sequences = torch.Generator().manual_seed(5), []
    for number in range(0, len(advantages), turns):
        prompt, rows = torch.randint(5, 300, (4 + 7 * number % 50,), generator=generator).tolist(), []
        for advantage in advantages[number:number + turns]:
            reply = model.sample([prompt], Sampling(30, temperature), generator)[0]
            rows.append(Row("policy", reply, advantage))
            prompt = reply.prompt_ids + reply.token_ids + [7, 8, 9]
        sequences.append(rows)
    return sequences


def updated(model, sequences, optimizer=None, **options):
    return reinforce.update(model, optimizer or Mock(), sequences, configure({"device": "cpu"} | options))


@pytest.mark.parametrize("budget, loss_mean, scale, positions, recompute", [
    (1, "reply", 1.0, 7, False), (200, "reply", 10.0, 10**6, True), (10**9, "token", 1.0, 7, False)])
def test_update_equals_one_naive_batch(model, inputs, monkeypatch, budget, loss_mean, scale, positions, recompute):
    """Whatever the micro-batches are, with logits in pieces and with recomputed layers.

    The naive batch: one plain forward for each row, all rows, one backward.
    """
    sequences = sampled_rows(model, [1.0, -0.5, 0.0, 0.3, -2.0, 0.0, 0.0, 0.0, 0.7, 0.25])
    rows, loss = list(itertools.chain(*sequences)), 0.0
    tokens = [len(row.completion.token_ids) for row in rows]
    for row in rows:
        new = plain_logprobs(model, row.completion.prompt_ids, row.completion.token_ids)
        ratio = (new - torch.tensor(row.completion.logprobs)).exp()
        loss -= (ratio * row.advantage).sum()  # sampled by these weights, so that nothing is clipped
    loss /= scale * (len(rows) if loss_mean == "reply" else sum(tokens))
    loss.backward()
    want = [p.grad.clone() for p in model.model.parameters()]
    model.model.zero_grad()
    inputs.clear()
    sizes, layers, head = [], [], model._head
    monkeypatch.setattr(rescore, "CHUNK", positions * len(model.tokenizer))
    monkeypatch.setattr(model, "_head", lambda hidden: sizes.append(len(hidden)) or head(hidden))
    model.model.model.layers[1].self_attn.register_forward_pre_hook(lambda *_: layers.append(1))
    model.recompute = recompute
    stats = updated(model, sequences, update_tokens=budget, grad_clip=1e9, loss_mean=loss_mean, loss_scale=scale)
    assert stats["loss"] == pytest.approx(loss.item(), abs=1e-5) and stats["grad_norm"] > 0
    assert stats["tokens_trained"] == sum(n for n, row in zip(tokens, rows) if row.advantage)
    for gradient, parameter in zip(want, model.model.parameters()):
        assert torch.allclose(gradient, parameter.grad, atol=2e-5 * max(1.0, gradient.abs().max().item()))
    assert sum(rows for rows, _ in inputs) == 4  # the turns of a rollout are one sequence, and one is not trained
    assert len(inputs) == {1: 4, 200: 2, 10**9: 1}[budget]  # as many sequences in each as the budget allows
    assert all(rows == 1 or rows * length <= budget for rows, length in inputs)
    assert max(sizes) <= positions and sum(sizes) == 2 * stats["tokens_trained"]  # again in the backward pass
    assert len(layers) == len(inputs) * (2 if recompute else 1)


def test_what_was_sampled_at_another_temperature_is_rescored_at_it(model):
    sequences = sampled_rows(model, [1.0, -0.5, 2.0, 0.3], temperature=0.7)
    off = [updated(model, sequences, temperature=at, mrs=False)["ratio_off"] for at in (0.7, 1.0)]
    assert off[0] < 1e-4 and off[1] > 0.1


def test_rows_that_are_masked_or_without_advantage_are_not_computed(model, inputs):
    sequences, idle = sampled_rows(model, [0.0, 3.0, -1.0, 0.0]), Mock()
    sequences[0][1].masked, sequences[1][0].masked = "prs", "prs"
    inputs.clear()
    stats = updated(model, sequences, idle)
    assert not inputs and not idle.step.called  # nothing to learn: the weights stay
    assert stats["tokens_trained"] == stats["grad_norm"] == stats["loss"] == 0


def test_gradients_are_clipped_by_norm_after_the_loss_is_scaled(model):
    sequences = sampled_rows(model, [500.0, -400.0])
    optimizer, norms = Mock(), []
    optimizer.zero_grad = lambda **_: model.model.zero_grad()
    optimizer.step = lambda: norms.append(math.hypot(*(p.grad.norm() for p in model.model.parameters())))
    plain = updated(model, sequences, optimizer, loss_scale=1.0, grad_clip=0.5)["grad_norm"]
    scaled = updated(model, sequences, optimizer, loss_scale=plain)["grad_norm"]
    assert plain > 10 and [scaled, *norms] == pytest.approx([1.0, 0.5, 1.0], rel=1e-3)
    sequences[0][0].advantage = math.nan  # a gradient that is not finite leaves the weights alone
    assert math.isnan(updated(model, sequences, optimizer)["grad_norm"]) and len(norms) == 2


@pytest.mark.parametrize("mrs, turns, masked", [(True, 2, 2), (True, 1, 1), (False, 2, 0)])
def test_replies_that_the_trainer_sees_otherwise_are_masked(model, mrs, turns, masked):
    """MRS: log-probabilities off by 1 % a token in one reply mask its rollout's turns."""
    sequences = sampled_rows(model, [1.0] * 4, turns)
    sequences[0][0].completion.logprobs = [p - 0.01 for p in sequences[0][0].completion.logprobs]
    stats = updated(model, sequences, mrs=mrs)
    kept = itertools.chain(*sequences[bool(masked):])
    assert stats["mrs_masked"] == masked
    assert stats["tokens_trained"] == sum(len(row.completion.token_ids) for row in kept)
    assert stats["loss"] == pytest.approx(-stats["tokens_trained"] / (30 * 4), rel=0.02)  # the others have none


# ---- score and credit, on episodes made by hand

def episode_of(rewards, selections=(), summaries=(), coverage=1.0):
    """An episode of rollouts with these rewards of their turns; 0 stands for a wrong kernel."""
    rollouts = [trajectory(*(reward or None for reward in row)) for row in rewards]
    for rollout, row in zip(rollouts, rewards):
        for turn, turn.reward in zip(rollout.turns, row):
            turn.verdict.coverage = coverage
    answers = [[SimpleNamespace(completion=reply(), reward=r) for r in several] for several in (selections, summaries)]
    return reinforce.Episode(None, answers[0], rollouts, answers[1])


def credited(*episodes, **options):
    """The rows of the loss of these episodes, in chains."""
    options = configure({"device": "cpu", "batch": 9, "cross_scheme": False} | options)
    return credit(episodes, options, torch.Generator().manual_seed(0))


def advantages_of(chains):
    return [row.advantage for row in itertools.chain(*chains)]


def test_each_role_has_its_weight_its_group_and_its_discount():
    episode = episode_of([[1.0, 2.0], [3.0, 4.0]], (1.0, 2.0), (0.0, 5.0))
    rows = credited(episode, gamma=0.5, selection_weight=0.25, summary_weight=3.0)
    assert [[(row.role, row.advantage) for row in several] for several in rows] == [
        [("policy", -3.0), ("policy", -2.0)], [("policy", 3.0), ("policy", 2.0)],  # 1 + 0.5 * 2 against 3 + 0.5 * 4
        [("selection", -0.25)], [("selection", 0.25)], [("summary", -15.0)], [("summary", 15.0)]]
    rows = credited(episode_of([[1.0], [3.0]], (1.0, 2.0), (0.0, 5.0)), freeze_selection=True, freeze_summary=True)
    assert [row.role for several in rows for row in several] == ["policy"] * 2
    rows = credited(episode_of([[1.0], [3.0]], (1.0, 1.0005), (2.0, 2.0)))  # groups without variance
    assert advantages_of(rows) == [-2.0, 2.0, 0, 0, 0, 0]


def test_what_prs_masks_stays_in_its_group():
    episode = episode_of([[0.0], [2.0], [4.0]], coverage=0.0)  # a wrong turn is never dropped
    for prs, cross_scheme, masked, largest in ((False, False, None, 3.0), (True, False, "prs", 3.0),
                                               (True, True, "prs", 1.0)):  # divided by |-3| alone
        rows = credited(episode, prs=prs, cross_scheme=cross_scheme)
        assert [row.masked for row in itertools.chain(*rows)] == [None, masked, masked]
        assert advantages_of(rows) == [-largest, 0.0, largest]
    episode.trajectories[0].turns[0].completion = reply(0)  # a prompt that was too long: in the group, but not a row
    assert advantages_of(credited(episode)) == [0.0, 3.0]


def test_a_failure_after_a_success_is_void():
    rollouts = [trajectory(2.0, None, 3.0), trajectory(None, None, 1.0), trajectory(1.0, None)]
    reward_turns(rollouts, REWARDS["cuda-agent"])
    assert [[t.masked for t in r.turns] for r in rollouts] == [[None, "void", None], [None] * 3, [None, "void"]]
    assert [[t.reward for t in r.turns] for r in rollouts] == [[2.0, 0.0, 2.0], [-1.0, -1.0, 1.0], [1.0, 0.0]]
    rows = credited(reinforce.Episode(None, [], rollouts), prs=False)
    assert [[row.advantage for row in several] for several in rows] == [[4.0, 1.0], [-3.5, 0.0, -1.0], [-0.5]]
    assert rollouts[0].turns[1].advantage is None
    for options, masked in (({}, [None, "void", "void"]), ({"mask_void": False}, [None] * 3)):
        again = [trajectory(2.0, None, None)]
        reward_turns(again, REWARDS["davinci"], **options)
        assert [turn.masked for turn in again[0].turns] == masked


def test_the_first_tasks_that_vary_are_trained_on():
    """Variance is that of the last turns' rewards."""
    tasks = [[1.0, 2.0], [3.0, 2.0]], [[1.0], [2.0]], [[1.0, 0.0], [1.0, 3.0]], [[1.0], [3.0]]
    episodes = list(map(episode_of, tasks))
    assert advantages_of(credited(*episodes, batch=2)) == [-1.0, 1.0, -3.0, -3.0, 3.0, 3.0]
    assert [e.trajectories[0].turns[0].masked for e in episodes] == ["group", None, None, "group"]
    assert len(credited(episode_of(tasks[0]), min_std=0.0)) == 2


def test_selections_of_the_same_skills_share_their_rollouts():
    a, b, c = (Skill(name, "", "", (), "") for name in "abc")
    episode = reinforce.Episode(None, [SimpleNamespace(skills=skills) for skills in ((a, b), (b, a), (c,), ())])
    for skills, speedups in (((a, b), (1.0, 2.0)), ((b, a), (3.0,)), ((c,), (4.0, 1.0)), ((), (5.0,)), ((), (1.0,))):
        episode.trajectories.append(trajectory(*speedups, skills=skills))
    reinforce.score(SimpleNamespace(options=configure({"device": "cpu"})), [episode])
    assert [s.reward for s in episode.selections] == [1.75, 1.75, 2.5, 2.0]  # 0.5 + 0.5 * the mean of the best speedups


def test_of_one_steps_equal_skills_the_fastest_joins():
    staged = [summarizer.Proposal({}, Skill(name, "how", "general", (), f"at {x}", x))
              for name, x in (("fuse", 1.0), ("row", 1.5), ("fuse", 3.0))]
    episodes = [reinforce.Episode(None, [], staged=proposal) for proposal in staged]
    library = SkillLibrary([Skill("row", "another", "general", (), "seed")])
    reinforce.flush(SimpleNamespace(library=library), episodes + [reinforce.Episode(None, [])])
    assert [(s.name, s.verify_speedup) for s in library.skills] == [("row", None), ("fuse", 3.0), ("row-2", 1.5)]
    assert [episode.staged for episode in episodes] == [None, *staged[1:]]
    assert [proposal.joined for proposal in staged] == [None, "row-2", "fuse"]

"""Reinforcement learning of the three roles on one model: the training step of daVinci-kernel. Start reading here.

    python reinforce.py                                              the tiny model, on a GPU if there is one
    python reinforce.py --model Qwen/Qwen3-8B-Base --steps 200       the paper's sizes
    python reinforce.py --out runs/NAME --resume                     continue after a crash or a kill
    python reinforce.py --recipe kevin                               a neighbour's reward and baseline
    ablations: --no-skills --bm25-only --no-verify --freeze-selection --freeze-summary --baseline group-mean

How it differs from PPO: no critic and no KL term; one update for each batch of rollouts, so the clipped ratio is 1 up
to rounding and the clip only guards; token log-probabilities are summed, not averaged, within a reply. From GRPO: the
baseline leaves the sample itself out; returns are compared turn by turn; and three roles are trained at once, each
against its own kind of group:

    role       return G                                        group that it is compared with       weight
    policy     r_t + gamma * G_{t+1}                           same task, same turn, all rollouts   1
    selection  mean over its rollouts of the best reward       the task's k selections              0.3
    summary    speedup of its best verified skill, at most 6   the task's s summaries               0.5

How it differs from the paper's release (the rest, with files: results/faithful.md):
    update        one optimiser step over all rows, so the clip hardly acts; the release takes up to five of 192 rows
    batch         too few groups with variance: trained on what is left; the release buffers them and rolls out again
    MRS           looks at a rollout's replies that have a gradient; cross_scheme's mean looks at PRS, not at MRS
    cross_scheme  its divisor has a minimum: without it, timing noise would become full advantages
    selection     its return is the mean of its rollouts' best, as in the paper; the release takes their maximum
    summary       the speedup is clipped as the Policy's; all rollouts may trigger; a known skill is not staged again
    prompts       own wording, chat template and short feedback; thinking is off; below a billion parameters
                  Selection sees 1,000 characters
    start         the checkpoint's skill library; the release begins with an empty one

In comments: N tokens of a reply; B tasks, k selections and s summaries of a task, n rollouts of a scheme, T turns.
"""

import contextlib
import itertools
import math
import statistics
from collections import defaultdict
from dataclasses import dataclass, field

import tasks  # before torch: it sets how long waiting threads spin
import torch
from tqdm import tqdm

import policy
import selector
import summarizer
from backbone import Completion, micro_batches
from fast import ranks
from page.metrics import rollout_metrics, step_metrics
from report import (command_line, finish_run, finish_step, open_run, read_metrics, record_rollouts,
                    saved_on_interrupt, task_stream)
from sandbox import Sandbox
from skills import Skill

# ----------------------------------------------------------------------------------------------------------------------
# Configuration: every number has one default, here. `name` is the flag --name, with dashes.

SIZES = {  # name: 2 CPU cores (about 7 minutes in all), one GPU, the paper (models over 1e9 parameters), meaning
    "steps": (6, 100, 200, "training steps"),
    "batch": (3, 16, 16, "B: tasks in a step"),
    "k": (3, 3, 3, "k: selections sampled for each task; with the null scheme they make k + 1 schemes"),
    "n": (2, 4, 4, "n: rollouts of each scheme"),
    "turns": (2, 3, 3, "T: turns of a rollout"),
    "s": (3, 8, 8, "s: parallel summaries of a task's best triggering rollout"),
    "oversample": (1, 1, 2, "tasks rolled out for each one that is kept: the first B whose rewards vary (--min-std)"),
    "lr": (1.5e-4, 5e-5, 1e-6, "eta: AdamW's learning rate"),
    "loss_scale": (30.0, 30.0, 1000.0, "the loss is divided by it before the clip, a tenth of a reply's tokens or so"),
    "policy_tokens": (900, 1500, 8192, "most tokens of a Policy reply"),
    "selection_tokens": (250, 400, 1024, "most tokens of a Selection reply"),
    "summary_tokens": (600, 1000, 2048, "most tokens of a Summary reply"),
    "prompt_tokens": (3500, 6500, 24576, "longest prompt; a rollout that would exceed it ends"),
    "update_tokens": (16384, 131072, 32768, "tokens, padding included, in one micro-batch of the update"),
    "trials": (3, 5, 5, "correctness trials for each kernel, with fresh inputs"),
    "eval_samples": (1, 4, 8, "rollouts for each evaluation problem; a single one is greedy"),
    "save_every": (1, 5, 5, "steps between checkpoints (Ctrl-C writes one, too); a killed run repeats those since"),
}
OPTIONS = {  # name: default, meaning
    "model": ("checkpoints/tiny", "model folder or hub id; a skill_library.jsonl in it is loaded with it"),
    "tasks": ("synth", "synthesised: synth, or wide (mixtures, too); builtin: the evaluation problems; or a folder"),
    "prompts": ("", "file of prompts laid out as chat/prompts.yaml; the release's; its RL data; or a folder of them"),
    "thinking": (False, "let replies begin with thoughts, where the model's chat template can switch them off"),
    "seed": (0, "of tasks, sampling and the modelled clock's inputs"),
    "temperature": (1.0, "of all sampling in training"),
    "gamma": (1.0, "gamma: how much of the next turn's return a turn is credited with"),
    "reward": ("davinci", "of a turn: a name in policy.REWARDS"),
    "baseline": ("leave-one-out", "what a return is compared with: mean of the others, of the group, or GRPO's"),
    "group": ("turn", "what a policy return is compared with: the same turn of its task, or every turn of it"),
    "history": ("all", "earlier replies in a later turn's prompt: all of them, or without their thoughts (condensed)"),
    "loss_mean": ("sum", "sum: of a reply's tokens, then the mean of replies; token: the mean of all tokens"),
    "skills": (True, "select and write skills; without: (k + 1) n rollouts on the bare task"),
    "prs": (True, "profiling-based rejection: drop correct turns whose kernels do little of the work"),
    "mrs": (True, "mismatch rejection: drop replies on which sampler and trainer disagree"),
    "mask_void": (True, "a turn that fails after a success is void: no loss, no member of its group"),
    "min_std": (1e-3, "a group whose rewards have a smaller standard deviation is not trained on"),
    "cross_scheme": (True, "adv_cross_scheme: divide a task's advantages by their mean magnitude"),
    "trigger": (1.2, "gain that triggers a summary and that a new skill must show"),
    "retire": (0, "take out skills that have gained nothing in so many schemes (0: never, as in the paper)"),
    "selection_weight": (0.3, "lambda_sel: weight of Selection's advantages"),
    "summary_weight": (0.5, "lambda_sum: weight of Summary's advantages"),
    "clip_low": (0.2, "epsilon_low: the ratio is clipped at 1 - this"),
    "clip_high": (0.28, "epsilon_high: the ratio is clipped at 1 + this"),
    "grad_clip": (1.0, "largest norm of the gradient"),
    "offload": (False, "keep the optimiser's state in the host's memory; what fits where: --plan"),
    "eval_every": (0, "evaluate on the built-in problems every so many steps (0: before and after)"),
    "no_eval": (False, "skip every evaluation"),
    "log": ("files", "tensorboard: metrics as its scalars, too, in the run's folder"),
    "bm25_only": (False, "ablation: BM25's first 3 skills, no Selection role"),
    "no_verify": (False, "ablation: stage the first well-formed proposal; a summary's return is 1 if it has one"),
    "freeze_selection": (False, "ablation: Selection is used but not trained"),
    "freeze_summary": (False, "ablation: Summary is used but not trained"),
}
# What daVinci-kernel adds, switched off.
OFF = dict(skills=False, cross_scheme=False, prs=False, mrs=False, mask_void=False, min_std=0.0, oversample=1)
RECIPES = {  # what a related system sets differently from OPTIONS and SIZES: a new one is a row here
    "davinci": {},
    "drkernel": dict(reward="drkernel", skills=False, cross_scheme=False, k=0, n=16, turns=3),
    "kevin": OFF | dict(reward="kevin", gamma=0.4, baseline="group-norm", group="task", loss_mean="token", k=0, n=16,
                        loss_scale=1.0, turns=4, temperature=0.9, history="condensed"),
    "cuda-agent": OFF | dict(reward="cuda-agent"),
}
CHANGEABLE = {"steps", "eval_every", "save_every", "no_eval", "offload", "log"}  # that a continued run may change

# ----------------------------------------------------------------------------------------------------------------------
# Advantages: one rule, three groupings (paper: turn-level REINFORCE with leave-one-out, TRLOO)

def leave_one_out(returns) -> list[float]:
    """A_i = G_i - mean of the others; a group of one keeps A = G.

    GRPO's baseline holds the sample itself, which shrinks the gradient by (N - 1) / N: small groups weigh less.

    >>> leave_one_out([1, 0, 0])
    [1.0, -0.5, -0.5]
    """
    total, others = sum(returns), len(returns) - 1
    return [_clean(g - (total - g) / others) if others else float(g) for g in returns]


def group_mean(returns) -> list[float]:
    """A_i = G_i - mean of all, the ablation."""
    return [_clean(g - sum(returns) / len(returns)) for g in returns]


def group_norm(returns) -> list[float]:
    """A_i = (G_i - mean) / standard deviation: GRPO, as Kevin uses it."""
    deviation = statistics.pstdev(returns) if returns else 0.0
    return [a / deviation if deviation > 1e-8 else 0.0 for a in group_mean(returns)]


def _clean(advantage) -> float:  # equal returns must give exactly 0: such a reply is not computed
    return float(advantage) if abs(advantage) > 1e-9 else 0.0


BASELINES = {"leave-one-out": leave_one_out, "group-mean": group_mean, "group-norm": group_norm}
CHOICES = {"reward": policy.REWARDS, "baseline": BASELINES, "group": ("turn", "task"), "loss_mean": ("sum", "token"),
           "history": policy.HISTORIES, "log": ("files", "tensorboard")}
DUAL_CLIP = 3.0  # a reply that was worse than its group's mean is not pushed away harder than at this ratio
DIVISOR_FLOOR = 0.05  # of adv_cross_scheme: a measured speedup scatters by a few percent, which is no signal


def returns_to_go(rewards, gamma) -> list[float]:
    """G_t = r_t + gamma * G_{t+1}: a turn is credited with what it led to.

    >>> returns_to_go([1.0, 0.0, 2.0], 0.5)
    [1.5, 1.0, 2.0]
    """
    returns = []
    for reward in reversed(rewards):
        returns.insert(0, reward + gamma * (returns[0] if returns else 0.0))
    return returns


def policy_advantages(rewards, members, tokens, gamma=1.0, baseline=leave_one_out, cross_scheme=False, group="turn"):
    """TRLOO: turn t of a rollout against turn t of all rollouts of the same task, whatever their scheme.

    rewards[i][t], members[i][t], tokens[i][t]: of turn t of rollout i; rollouts may have different lengths. A turn that
    is no member has the advantage None; earlier turns are credited with its reward all the same. tokens: that the loss
    will see, 0 where a filter masks the turn. cross_scheme divides by the mean magnitude over the task's tokens (paper:
    cross-scheme advantages). group "task": against every turn of the task (Kevin).
    """
    returns = [returns_to_go(row, gamma) for row in rewards]
    advantages = [[None] * len(row) for row in rewards]
    groups = {}  # turn, or the task -> its members, (i, t) each
    for i, row in enumerate(members):
        for t, member in enumerate(row):
            if member:
                groups.setdefault(t if group == "turn" else "task", []).append((i, t))
    for places in groups.values():
        for (i, t), advantage in zip(places, baseline([returns[i][t] for i, t in places])):
            advantages[i][t] = advantage
    places = list(itertools.chain(*groups.values()))
    total = sum(tokens[i][t] for i, t in places)
    if cross_scheme and total:
        scale = max(sum(tokens[i][t] * abs(advantages[i][t]) for i, t in places) / total, DIVISOR_FLOOR)
        advantages = [[a if a is None else a / scale for a in row] for row in advantages]
    return advantages


# ----------------------------------------------------------------------------------------------------------------------
# Filters, loss, update

def prs_probability(verdict) -> float:
    """PRS: a correct turn is kept with probability clip((coverage - 0.3) / 0.1, 0, 1), an incorrect one always."""
    return min(max(((verdict.coverage or 0.0) - 0.3) / 0.1, 0.0), 1.0) if verdict.correct else 1.0


def varies(rewards, min_std) -> bool:
    """Whether a group can teach: one reward alone, or a sample standard deviation of at least `min_std`."""
    return len(rewards) < 2 or statistics.stdev(rewards) >= min_std


def mrs_keeps(drifts) -> list[bool]:
    """MRS: which of a rollout's replies are learnt from. drifts: trainer's log-probabilities - sampler's, (N,) each.

    The geometric mean of pi_train / pi_rollout over all tokens of the rollout must lie in [0.999, 1.001], or none is;
    nor is a reply with a token whose ratio is below 1e-4. Selection's and Summary's replies stand alone.
    """
    close = abs(torch.cat(drifts).mean().exp().item() - 1.0) <= 1e-3
    return [close and drift.min().item() >= math.log(1e-4) for drift in drifts]


def clipped_loss(new, old, advantage, low, high):
    """REINFORCE with PPO's clipped ratio, summed over tokens. new (with gradients), old, advantage: (N,).

    At new = old the gradient is that of -advantage * log pi(reply). Where the advantage is negative, the loss is at
    most DUAL_CLIP times its magnitude. Returns a scalar.
    """
    ratio = (new - old).exp()  # (N,)
    loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)  # (N,)
    return torch.where(advantage < 0, loss.minimum(-DUAL_CLIP * advantage), loss).sum()


@dataclass
class Row:
    """One reply in the loss."""

    role: str
    completion: Completion
    advantage: float  # times the role's weight; 0 where a filter masks the reply


def update(model, optimizer, sequences, args) -> dict:
    """One optimiser step on the joint loss of all roles: the mean over all replies of their clipped losses.

    sequences: lists of rows that share one token sequence. A row without advantage has no gradient: it is counted in
    the mean and not computed. Gradients add up over micro-batches, whose sizes therefore do not change the result.
    """
    every = list(itertools.chain(*sequences))
    tokens = sum(len(row.completion.token_ids) for row in every)
    divisor = args.loss_scale * (len(every) if args.loss_mean == "sum" else tokens)
    live = list(filter(None, ([row for row in rows if row.advantage] for rows in sequences)))
    stats = {"loss": 0.0, "grad_norm": 0.0, "clipped": 0, "ratio_off": 0.0, "mrs_masked": 0, "rows": len(every),
             "rows_live": sum(map(len, live)), "tokens_live": 0}
    live = ranks.share(sorted(live, key=lambda rows: len(rows[-1].completion.prompt_ids)))  # parts of about one length
    total = torch.zeros((), device=model.device)
    model.release()  # the sampler's cache: activations need its memory
    for packed in micro_batches(live, args.update_tokens):
        rows = list(itertools.chain(*packed))  # of M tokens in all
        # Only tokens that the model sampled are scored. The sandbox's feedback lies between them in the context of
        # later turns, but the model did not write it, so it earns no gradient.
        asked = [(row.completion.prompt_ids, row.completion.token_ids) for row in rows]
        scored = model.logprobs(asked, args.temperature or 1.0)  # (N,) each
        sizes = [len(row.completion.token_ids) for row in rows]
        new, old = torch.cat(scored), torch.tensor([p for row in rows for p in row.completion.logprobs])  # (M,)
        drift = new.detach().cpu() - old  # (M,)
        drifts = iter(drift.split(sizes))
        keeps = [keep or not args.mrs for turns in packed for keep in mrs_keeps([next(drifts) for _ in turns])]
        advantage = torch.tensor([row.advantage * keep for row, keep in zip(rows, keeps)])
        advantage = advantage.repeat_interleave(torch.tensor(sizes))  # (M,)
        loss = clipped_loss(new, old.to(new.device), advantage.to(new.device), args.clip_low, args.clip_high) / divisor
        loss.backward()
        total += loss.detach()
        ratio = drift.exp()  # (M,)
        stats["clipped"] += ((ratio < 1 - args.clip_low) | (ratio > 1 + args.clip_high)).sum().item()
        stats["ratio_off"] = max(stats["ratio_off"], (ratio - 1).abs().max().item())
        stats["mrs_masked"] += keeps.count(False)
        stats["tokens_live"] += sum(size for size, keep in zip(sizes, keeps) if keep)
    stats["loss"] = total.item()
    parts = ranks.each(stats)
    for name, combine in zip(("loss", "clipped", "mrs_masked", "tokens_live", "ratio_off"), (sum, sum, sum, sum, max)):
        stats[name] = combine(part[name] for part in parts)
    if stats["tokens_live"]:
        stats["grad_norm"] = ranks.clip_grad_norm(optimizer, model.model.parameters(), args.grad_clip).item()
        if math.isfinite(stats["grad_norm"]):  # else the weights would be lost, all of them
            optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    model.release()  # what the update has used, too: sampling and the sandbox need it
    return stats | {"grad_clipped": stats["grad_norm"] > args.grad_clip, "zero_gradient": not stats["tokens_live"]}


# ----------------------------------------------------------------------------------------------------------------------
# The training step. `run` is report.Run: options, model, optimiser, library, generator, sandbox, seconds.

@dataclass
class Episode:
    """What one step does with one task."""

    task: tasks.Task
    selections: list[selector.Selection]  # k
    trajectories: list[policy.Trajectory] = field(default_factory=list)  # (k + 1) n
    summaries: list[summarizer.Summary] = field(default_factory=list)  # s, if a rollout triggers
    staged: Skill | None = None


def train(run, stream):
    """The paper's training step, over and over. stream: endless iterator over training tasks."""
    args = run.args
    if run.step == 0 and not read_metrics(run.out):
        finish_step(run, {"step": 0, "clock": run.clock, "library": len(run.library)} | evaluate_if_due(run, 0))
    with tqdm(total=args.steps, initial=run.step, unit="step", disable=ranks.rank() > 0 or None) as run.bar:
        while run.step < args.steps:
            run.seconds.clear()
            batch = list(itertools.islice(stream, args.batch * args.oversample))
            run.sandbox.prepare(batch)
            with run.phase("select"):  # k selections for each task; with the null scheme k + 1 schemes
                k = max(args.k, args.bm25_only) if args.skills else 0
                episodes = select(run, batch, k, args.temperature)
            with run.phase("roll out"):  # n rollouts of each scheme, T turns, every kernel judged by the sandbox
                episodes = roll_out(run, episodes, args.k + 1, args.n, args.temperature, run.generator)
            with run.phase("score"):  # rewards of turns, then of selections
                score(run, episodes)
            with run.phase("summarise"):  # s summaries of each task's best triggering rollout
                summarise(run, episodes)
            with run.phase("verify"):  # a proposal must prove itself; the best of a task is staged
                verify(run, episodes)
            with run.phase("wait"):  # for the other ranks, if there are any; all go on with all episodes
                episodes = ranks.gather(episodes)
            run.settled = None  # the weights change: a checkpoint of the step before can no longer be written
            with run.phase("update"):  # advantages of each role, one joint loss, one optimiser step
                losses = update(run.model, run.optimizer, credit(run, episodes), args)
            with run.phase("flush"):  # staged skills join the library only now
                flush(run, episodes)
            line = step_metrics(run, episodes) | losses | evaluate_if_due(run, run.step + 1)
            record_rollouts(run, run.out / f"rollouts/step_{run.step + 1}.jsonl", episodes)
            run.step += 1
            finish_step(run, line)
            run.bar.update()


def select(run, batch, k, temperature) -> list[Episode]:
    """One episode for each task, with k selections (paper: BM25 recall, LLM reranking)."""
    args = run.args
    chosen = ranks.distribute(batch, lambda part: selector.select(
        run.model, run.library, part, k, args.selection_tokens, temperature, run.generator, args.bm25_only,
        args.prompt_tokens))
    return [Episode(task, selections) for task, selections in zip(batch, chosen)]


def roll_out(run, episodes, schemes, n, temperature, generator, top_p=1.0) -> list[Episode]:
    """n rollouts of each of a task's schemes: what its selections chose, and the null scheme (paper: roll out).

    Of several ranks each rolls out some schemes of all tasks, and goes on with all rollouts of the episodes returned.
    """
    args, jobs = run.args, []
    for episode in episodes:
        skills = [selection.skills for selection in episode.selections]
        null = skills[0] if args.bm25_only and skills else ()  # BM25 alone: all schemes have its choice
        skills += [null] * (schemes - len(skills))  # one null scheme; without skills all schemes are
        jobs += [(episode.task, chosen) for chosen in skills for _ in range(n)]
    done = iter(ranks.distribute(jobs, lambda part: policy.rollout(
        run.model, run.sandbox, part, args.turns, args.policy_tokens, args.prompt_tokens, temperature, generator, top_p,
        policy.HISTORIES[args.history])))
    for episode in episodes:
        episode.trajectories = list(itertools.islice(done, schemes * n))
    return ranks.share(episodes)


def score(run, episodes):
    """Fill in the reward of every turn and of every selection (paper: reward; selection reward)."""
    trajectories = [trajectory for episode in episodes for trajectory in episode.trajectories]
    policy.reward_turns(trajectories, run.args.reward, run.compiled, run.args.mask_void)
    for episode in episodes:
        for selection in episode.selections:
            # Schemes that chose the same set of skills pool their rollouts, the null scheme included.
            pooled = [trajectory.best_reward for trajectory in episode.trajectories
                      if set(trajectory.skills) == set(selection.skills)]
            selection.reward = sum(pooled) / len(pooled)


def summarise(run, episodes):
    """s summaries of each task's best triggering rollout, if it has one (paper: summary trigger)."""
    args = run.args
    found = [(e, winner) for e in episodes if (winner := summarizer.best_trigger(e.trajectories, args.trigger))]
    if args.skills:
        answers = summarizer.propose(run.model, [winner for _, winner in found], args.s, run.library,
                                     args.summary_tokens, args.temperature, run.generator, args.prompt_tokens)
        for (episode, _), summaries in zip(found, answers):
            episode.summaries = summaries


def verify(run, episodes):
    """Verify the proposals, fill in the summaries' rewards, stage each task's best passing skill."""
    args = run.args
    if not args.no_verify:
        summarizer.verify(run.model, run.sandbox, [episode.summaries for episode in episodes], args.policy_tokens,
                          args.prompt_tokens, args.trigger)
    for episode in episodes:
        for summary in episode.summaries:
            passed = [proposal.skill for proposal in summary.proposals if not proposal.rejected]
            speedups = [1.0 if args.no_verify else min(skill.verify_speedup, policy.SPEEDUP_CAP) for skill in passed]
            summary.reward = max(speedups, default=0.0)
        episode.staged = summarizer.best_skill(episode.summaries)


def credit(run, episodes) -> list[list[Row]]:
    """Fill in every advantage and return the rows of the loss, those of one rollout together.

    A filter takes away a reply's loss only: it stays in its group, its return in the baseline. Void ones do not.
    """
    args, baseline, sequences, trained = run.args, BASELINES[run.args.baseline], [], 0
    for episode in episodes:
        rollouts = [trajectory.turns for trajectory in episode.trajectories]
        useful = trained < args.batch and varies([turns[-1].reward for turns in rollouts], args.min_std)
        trained += useful
        draws = torch.rand(sum(map(len, rollouts)), generator=run.generator, device=run.generator.device).tolist()
        for turn, draw in zip(itertools.chain(*rollouts), draws):
            dropped = args.prs and draw >= prs_probability(turn.verdict)
            turn.masked = turn.masked or ("group" if not useful else "prs" if dropped else None)
        rewards = [[turn.reward for turn in turns] for turns in rollouts]
        members = [[turn.masked != "void" for turn in turns] for turns in rollouts]
        tokens = [[0 if turn.masked else len(turn.completion.token_ids) for turn in turns] for turns in rollouts]
        advantages = policy_advantages(rewards, members, tokens, args.gamma, baseline, args.cross_scheme, args.group)
        for turns, values in zip(rollouts, advantages):
            for turn, advantage in zip(turns, values):
                turn.advantage = advantage
            if useful:
                sequences.append([Row("policy", turn.completion, 0.0 if turn.masked else turn.advantage)
                                  for turn in turns if turn.masked != "void" and turn.completion.token_ids])
        asked = [selection for selection in episode.selections if selection.completion]
        for role, answers, weight, frozen in (
                ("selection", asked, args.selection_weight, args.freeze_selection),
                ("summary", episode.summaries, args.summary_weight, args.freeze_summary)):
            returns = [answer.reward for answer in answers]
            varied = varies(returns, args.min_std)
            for answer, advantage in zip(answers, baseline(returns)):
                answer.advantage = advantage if varied else 0.0
                if not frozen:
                    sequences.append([Row(role, answer.completion, weight * answer.advantage)])
    return [rows for rows in sequences if rows]


def flush(run, episodes):
    """The staged skills join the library, of equal ones the fastest, and every step leaves a snapshot.

    Before that the library takes note of what its skills gained on the step's tasks, beside the null scheme.
    """
    for episode in episodes:
        rewards = defaultdict(list)  # a scheme's skills -> its rollouts' best rewards
        for trajectory in episode.trajectories:
            rewards[frozenset(skill.name for skill in trajectory.skills)].append(trajectory.best_reward)
        for names in filter(None, rewards):
            if without := rewards.get(frozenset()):
                run.library.note(names, statistics.fmean(rewards[names]) - statistics.fmean(without))
    run.retired = run.library.retire(run.args.retire) if run.args.retire else []
    run.seeds -= {skill.name for skill in run.retired}  # a skill that is found may take such a name
    found, seen = [episode for episode in episodes if episode.staged], set()
    for episode in sorted(found, key=lambda e: e.staged.verify_speedup or 0, reverse=True):
        texts = summarizer.identity(episode.staged)
        if texts.isdisjoint(seen):
            run.library.add(episode.staged)
        else:
            episode.staged = None
        seen |= texts
    if ranks.rank() == 0:
        run.library.save_snapshot(run.out / "skill_library", run.step + 1)


def evaluate_if_due(run, step) -> dict:
    """Metrics on the built-in problems where they are due, else nothing (paper: one greedy selection, T turns)."""
    args = run.args
    if args.no_eval or not (step in (0, args.steps) or args.eval_every and step % args.eval_every == 0):
        return {}
    generator = torch.Generator(run.model.device).manual_seed((args.seed * 1_000_003 + step) % 2**63)
    with run.phase("evaluate"):
        episodes = select(run, tasks.builtin_tasks(device=run.model.device.type), int(args.skills), 0)
        episodes = roll_out(run, episodes, 1, args.eval_samples, 0 if args.eval_samples == 1 else 1.0, generator, 0.95)
        score(run, episodes)
        episodes = ranks.gather(episodes)
    record_rollouts(run, run.out / f"rollouts/eval_{step}.jsonl", episodes)
    return {f"eval_{key}": value for key, value in rollout_metrics(episodes).items()}


# ----------------------------------------------------------------------------------------------------------------------
# The command

def main(argv=None) -> int:
    tables = OPTIONS, SIZES, RECIPES
    run = open_run(command_line(argv, __doc__, tables, CHOICES), tables, CHANGEABLE)
    args, seed = run.args, run.args.seed if run.args.device == "cpu" else None  # makes modelled verdicts exact
    with contextlib.ExitStack() as stack:
        stack.enter_context(saved_on_interrupt(run))
        run.sandbox = stack.enter_context(Sandbox(args.device, trials=args.trials, tasks=8, seed=seed))
        if args.reward == "cuda-agent" and args.device == "cuda":
            run.compiled = stack.enter_context(Sandbox(args.device, trials=1, tasks=4, baseline="compile"))
        train(run, itertools.islice(task_stream(args), run.step * args.batch * args.oversample, None))
    finish_run(run)
    return 0


if __name__ == "__main__":
    tasks.run_command(ranks.joined(main))

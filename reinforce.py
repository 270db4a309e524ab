"""Reinforcement learning of the three roles on one model: the training step of daVinci-kernel. Start reading here.

    python reinforce.py                                              the tiny model, on a GPU if there is one
    python reinforce.py --model Qwen/Qwen3-8B-Base --steps 200       the paper's sizes
    python reinforce.py --out runs/NAME --resume                     continue after a crash or a kill
    python reinforce.py --recipe kevin --turns 8 --n 16              a neighbour's reward and baseline
    ablations: --no-skills --bm25-only --no-verify --freeze-selection --freeze-summary --baseline group-mean

How it differs from PPO: no critic and no KL term; one update for each batch of rollouts, so the clipped ratio is 1 up
to rounding and the clip only guards; token log-probabilities are summed, not averaged, within a reply. How it differs
from GRPO: the baseline leaves the sample itself out; returns are compared turn by turn; and three roles are trained at
once, each against its own kind of group:

    role       return G                                        group that it is compared with       weight
    policy     r_t + gamma * G_{t+1}                           same task, same turn, all rollouts   1
    selection  mean over its rollouts of the best reward       the task's k selections              0.3
    summary    speedup of its best verified skill, at most 6   the task's s summaries               0.5

How it differs from the paper's release: MRS is judged inside the update, where the trainer's probabilities are computed
anyway, so a reply that it masks has been a member of its group. A proposal that repeats a skill of the library is
turned down (summarizer.identity), where the release only gives it another name. The divisor of adv_cross_scheme has a
floor: where all kernels are equally fast, it would blow timing noise up to full advantages. A summary's speedup is
clipped where the Policy's is: a kernel that avoids multiplying by a diagonal matrix is 300 times as fast.

A run leaves in --out: metrics.jsonl, rollouts/step_N.jsonl, skill_library/global_step_N.jsonl, curves.png, and
checkpoint/, a model folder with its skill library (bench.py loads it) that also holds all that --resume needs.

In comments: N tokens of a reply; B tasks, k selections and s summaries of a task, n rollouts of a scheme, T turns.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch: waiting threads spin for microseconds, then sleep

import argparse
import contextlib
import functools
import itertools
import json
import math
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

import policy
import selector
import summarizer
from backbone import Backbone, Completion, ModelError
from fast.optimizer import make_adamw
from report import (UsageError, clock, draw_curves, finish_step, open_folder, progress, read_metrics, record_rollouts,
                     rollout_metrics, save_checkpoint, shapes, step_metrics)
from sandbox import Sandbox
from selector import Selection
from skills import Skill, SkillLibrary, write_atomically
from summarizer import Summary
from synthetic.generator import training_tasks
from tasks import GPU_BATCH_FACTOR, Task, TaskError, builtin_tasks, folder_tasks, scale_batch

# ----------------------------------------------------------------------------------------------------------------------
# Configuration: every number has one default, here. `name` is the flag --name, with dashes.

PROFILE = {  # name: 2 CPU cores (about 8 minutes in all), one GPU, the paper (models over 1e9 parameters), meaning
    "steps": (6, 100, 200, "training steps"),
    "batch": (4, 16, 16, "B: tasks in a step"),
    "k": (2, 3, 3, "k: selections sampled for each task; with the null scheme they make k + 1 schemes"),
    "n": (2, 4, 4, "n: rollouts of each scheme"),
    "turns": (2, 3, 3, "T: turns of a rollout"),
    "s": (2, 8, 8, "s: parallel summaries of a task's best triggering rollout"),
    "lr": (5e-5, 5e-5, 1e-6, "eta: AdamW's learning rate"),
    "policy_tokens": (900, 1500, 8192, "most tokens of a Policy reply"),
    "selection_tokens": (250, 400, 1024, "most tokens of a Selection reply"),
    "summary_tokens": (600, 1000, 2048, "most tokens of a Summary reply"),
    "prompt_tokens": (3500, 7000, 24576, "longest prompt; a rollout that would exceed it ends"),
    "update_tokens": (16384, 131072, 32768, "tokens, padding included, in one micro-batch of the update"),
    "trials": (3, 5, 5, "correctness trials for each kernel, with fresh inputs"),
    "eval_samples": (1, 4, 8, "rollouts for each evaluation problem; a single one is greedy"),
    "save_every": (1, 5, 5, "steps between checkpoints (Ctrl-C writes one, too); a killed run does those since again"),
}
RECIPE = {  # name: davinci, drkernel, kevin, cuda-agent, meaning
    "gamma": (1.0, 1.0, 0.4, 1.0, "gamma: how much of the next turn's return a turn is credited with"),
    "baseline": ("leave-one-out", "leave-one-out", "group-norm", "leave-one-out",
                 "what a return is compared with: the others' mean; the group's; that, over the deviation (GRPO)"),
    "skills": (True, False, False, False, "select and write skills; without: (k + 1) n rollouts on the bare task"),
    "prs": (True, True, False, False, "profiling-based rejection: drop correct turns whose kernels do little work"),
    "mrs": (True, True, False, False, "mismatch rejection: drop replies on which sampler and trainer disagree"),
    "cross_scheme": (True, False, False, False, "adv_cross_scheme: divide a task's advantages by their mean magnitude"),
}
CONSTANTS = {  # name: default, meaning
    "model": ("checkpoints/tiny", "model folder or hub id; a skill_library.jsonl in it is loaded with it"),
    "tasks": ("synth", "synth: synthesised problems; builtin: the evaluation problems themselves, which shows that the "
                       "loop learns and is no result; or a folder of problem files"),
    "seed": (0, "of tasks, sampling and the modelled clock's inputs"),
    "temperature": (1.0, "of all sampling in training"),
    "trigger": (1.2, "gain that triggers a summary and that a new skill must show"),
    "selection_weight": (0.3, "lambda_sel: weight of Selection's advantages"),
    "summary_weight": (0.5, "lambda_sum: weight of Summary's advantages"),
    "clip_low": (0.2, "epsilon_low: the ratio is clipped at 1 - this"),
    "clip_high": (0.28, "epsilon_high: the ratio is clipped at 1 + this"),
    "grad_clip": (1.0, "largest norm of the gradient"),
    "eval_every": (0, "evaluate on the built-in problems every so many steps (0: before and after)"),
}
SWITCHES = {"bm25_only": "ablation: BM25's first 3 skills, no Selection role",
            "no_verify": "ablation: stage the first well-formed proposal; a summary's return is 1 if it has one",
            "freeze_selection": "ablation: Selection is used but not trained",
            "freeze_summary": "ablation: Summary is used but not trained", "no_eval": "skip every evaluation"}
CHANGEABLE = {"steps", "eval_every", "save_every", "no_eval"}  # what may differ when a run is continued

# ----------------------------------------------------------------------------------------------------------------------
# Reward of one turn (paper, section 2, and the neighbours')

CAP = 6.0  # a speedup beyond it earns no more


def davinci_reward(verdict) -> float:
    """r = 0.5 correct + 0.5 correct clip(speedup, 0, 6) + 0.5 correct coverage. Dr. Kernel's is the same.

    >>> from sandbox import Verdict
    >>> davinci_reward(Verdict(correct=True, speedup=8.0, coverage=0.5))
    3.75
    """
    if not verdict.correct:
        return 0.0
    return 0.5 + 0.5 * min(max(verdict.speedup, 0.0), CAP) + 0.5 * (verdict.coverage or 0.0)


def kevin_reward(verdict) -> float:
    """r = 0.3 correct + correct speedup (Kevin)."""
    return 0.3 + verdict.speedup if verdict.correct else 0.0


def cuda_agent_reward(verdict, over_compiled=None) -> float:
    """-1 wrong, 1 correct, 2 also 5 % faster than eager PyTorch, 3 also 5 % faster than torch.compile (CUDA Agent).

    over_compiled: the verdict against torch.compile; without one (no GPU) the third milestone is out of reach.
    """
    if not verdict.correct:
        return -1.0
    if verdict.speedup <= 1.05:
        return 1.0
    return 3.0 if over_compiled and over_compiled.correct and over_compiled.speedup > 1.05 else 2.0


REWARDS = {"davinci": davinci_reward, "drkernel": davinci_reward, "kevin": kevin_reward,
           "cuda-agent": cuda_agent_reward}

# ----------------------------------------------------------------------------------------------------------------------
# Advantages: one rule, three groupings (paper, section 3)


def leave_one_out(returns) -> list[float]:
    """A_i = G_i - mean of the others; a group of one keeps A = G.

    GRPO's baseline holds the sample itself, which shrinks the gradient by (N - 1) / N and biases small groups.

    >>> leave_one_out([1, 0, 0])
    [1.0, -0.5, -0.5]
    >>> leave_one_out([0.7])
    [0.7]
    """
    total, others = sum(returns), len(returns) - 1
    return [_clean(g - (total - g) / others) for g in returns] if others > 0 else [float(g) for g in returns]


def group_mean(returns) -> list[float]:
    """A_i = G_i - mean of all, the ablation.

    >>> group_mean([3, 0, 0])
    [2.0, -1.0, -1.0]
    """
    return [_clean(g - sum(returns) / len(returns)) for g in returns]


def group_norm(returns) -> list[float]:
    """A_i = (G_i - mean) / standard deviation: GRPO, as Kevin uses it.

    >>> group_norm([2, 0])
    [1.0, -1.0]
    """
    deviation = statistics.pstdev(returns) if returns else 0.0
    return [a / deviation if deviation > 1e-8 else 0.0 for a in group_mean(returns)]


def _clean(advantage) -> float:
    """Equal returns must give exactly 0: rounding noise would be blown up by adv_cross_scheme."""
    return float(advantage) if abs(advantage) > 1e-9 else 0.0


FLOOR = 0.05  # of adv_cross_scheme's divisor: a measured speedup scatters by a few percent, which is no signal
BASELINES = {"leave-one-out": leave_one_out, "group-mean": group_mean, "group-norm": group_norm}


def returns_to_go(rewards, gamma) -> list[float]:
    """G_t = r_t + gamma * G_{t+1}: a turn is credited with what it led to.

    >>> returns_to_go([1.0, 0.0, 2.0], 0.5)
    [1.5, 1.0, 2.0]
    """
    returns, following = [], 0.0
    for reward in reversed(rewards):
        following = reward + gamma * following
        returns.insert(0, following)
    return returns


def policy_advantages(rewards, members, gamma=1.0, baseline=leave_one_out, cross_scheme=False):
    """TRLOO: turn t of a rollout against turn t of all rollouts of the same task, whatever their scheme.

    rewards[i][t], members[i][t]: of turn t of rollout i; rollouts may have different lengths. A turn that is masked (no
    member) has earned its reward all the same, and earlier turns are credited with it, but it is in no group: its
    advantage is None. cross_scheme divides by the mean magnitude over all of the task's members, or by FLOOR.
    """
    returns = [returns_to_go(row, gamma) for row in rewards]
    advantages = [[None] * len(row) for row in rewards]
    for t in range(max(map(len, rewards), default=0)):
        group = [i for i, row in enumerate(rewards) if t < len(row) and members[i][t]]
        for i, advantage in zip(group, baseline([returns[i][t] for i in group])):
            advantages[i][t] = advantage
    magnitudes = [abs(a) for row in advantages for a in row if a is not None]
    if cross_scheme and any(magnitudes):
        scale = max(sum(magnitudes) / len(magnitudes), FLOOR)
        advantages = [[a if a is None else a / scale for a in row] for row in advantages]
    return advantages


# ----------------------------------------------------------------------------------------------------------------------
# Filters, loss, update (paper, section 3)


def prs_probability(verdict) -> float:
    """PRS: a correct turn is kept with probability clip((coverage - 0.3) / 0.1, 0, 1), an incorrect one always."""
    return min(max(((verdict.coverage or 0.0) - 0.3) / 0.1, 0.0), 1.0) if verdict.correct else 1.0


def mrs_keeps(new, old) -> bool:
    """MRS: is the trainer's view `new` of a reply's sampled log-probabilities `old` close enough to learn from? (N,)

    The geometric mean of pi_train / pi_rollout must lie in [0.999, 1.001], and no token's ratio below 1e-4.
    """
    log_ratio = new.detach() - old  # (N,)
    return abs(log_ratio.mean().exp().item() - 1.0) <= 1e-3 and log_ratio.min().item() >= math.log(1e-4)


def clipped_loss(new, old, advantage, low, high):
    """REINFORCE with PPO's clipped ratio, summed over tokens. new (with gradients), old: (N,); returns a scalar.

    advantage: a number, or (N,) for the tokens of several replies. At new = old the gradient is that of
    -advantage * log pi(reply).
    """
    ratio = (new - old).exp()  # (N,)
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage).sum()


@dataclass
class Row:
    """One reply in the loss."""

    role: str
    completion: Completion
    advantage: float  # times the role's weight


def micro_batches(sequences, budget):
    """Pack `sequences` (lists of rows that share one token sequence) by length into lists of at most `budget` tokens.

    Padding counts. A rollout's turns stay together, because Backbone.logprobs runs them as one sequence.
    """
    def shape(rows):  # (how many sequences they are for the model, the longest one's length)
        ids = [row.completion.prompt_ids + row.completion.token_ids for row in rows]
        apart = sum(later[:len(earlier)] != earlier for earlier, later in itertools.pairwise(ids))
        return 1 + apart, max(map(len, ids))

    batch, count, width = [], 0, 0
    for (more, length), rows in sorted(((shape(rows), rows) for rows in sequences), key=lambda item: -item[0][1]):
        if batch and (count + more) * width > budget:
            yield batch
            batch, count = [], 0
        width = max(width, length) if batch else length
        batch, count = batch + rows, count + more
    if batch:
        yield batch


def update(model, optimizer, sequences, args) -> dict:
    """One optimiser step on the joint loss of all roles: the mean over all replies of their clipped losses.

    sequences: lists of rows that share one token sequence. A row without advantage has no gradient: it is counted in
    the mean and not computed. Gradients add up over micro-batches, whose sizes therefore do not change the result.
    """
    count = sum(map(len, sequences))
    live = [[row for row in rows if row.advantage != 0] for rows in sequences]
    live = [rows for rows in live if rows]
    stats = {"loss": 0.0, "grad_norm": 0.0, "clipped": 0, "ratio_off": 0.0, "mrs_masked": 0, "rows": count,
             "rows_live": sum(map(len, live)), "tokens_live": 0}
    total = 0.0
    model.release()  # the sampler's cache: activations need its memory
    for rows in micro_batches(live, args.update_tokens):
        # Only tokens that the model sampled are scored. The sandbox's feedback lies between them in the context of
        # later turns, but the model did not write it, so it earns no gradient.
        scored = model.logprobs([(row.completion.prompt_ids, row.completion.token_ids) for row in rows])  # of (N,)
        sampled = [torch.tensor(row.completion.logprobs) for row in rows]  # of (N,); made while the GPU is at `scored`
        # Looked at on the host, in one piece: it waits for the GPU once in a micro-batch instead of once a number.
        views = torch.cat(scored).detach().cpu().split([len(new) for new in scored])
        kept = []
        for row, new, view, old in zip(rows, scored, views, sampled):
            if args.mrs and row.role == "policy" and not mrs_keeps(view, old):
                stats["mrs_masked"] += 1
                continue
            kept.append((new, old, torch.full_like(old, row.advantage)))
            ratio = (view - old).exp()  # (N,)
            stats["clipped"] += ((ratio < 1 - args.clip_low) | (ratio > 1 + args.clip_high)).sum().item()
            stats["ratio_off"] = max(stats["ratio_off"], (ratio - 1).abs().max().item())
            stats["tokens_live"] += len(view)
        if kept:
            new, old, advantage = (torch.cat(column).to(scored[0].device) for column in zip(*kept))  # (N,) of all rows
            loss = clipped_loss(new, old, advantage, args.clip_low, args.clip_high) / count
            loss.backward()
            total += loss.detach()
        del scored, new, kept  # if all is masked there was no backward: its graph would live on beside the next one
    if stats["tokens_live"]:
        stats["grad_norm"] = torch.nn.utils.clip_grad_norm_(model.model.parameters(), args.grad_clip).item()
        if math.isfinite(stats["grad_norm"]):  # else the weights would be lost, all of them
            optimizer.step()
        stats["loss"] = total.item()
    optimizer.zero_grad(set_to_none=True)
    model.release()  # what the update has used, too: sampling and the sandbox need it
    return stats


# ----------------------------------------------------------------------------------------------------------------------
# The training step (paper, section 1)


@dataclass
class Episode:
    """What one step does with one task."""

    task: Task
    selections: list[Selection]  # k
    trajectories: list[policy.Trajectory] = field(default_factory=list)  # (k + 1) n
    summaries: list[Summary] = field(default_factory=list)  # s, if a rollout triggers
    staged: Skill | None = None


@dataclass
class Run:
    """The state of a run."""

    args: argparse.Namespace
    out: Path
    model: Backbone
    optimizer: torch.optim.Optimizer
    library: SkillLibrary
    seeds: int  # the library's size before the first step
    generator: torch.Generator  # of all sampling in training
    step: int = 0  # complete steps
    settled: torch.Tensor | None = None  # the generator's state after the last of them; None while weights change
    sandbox: "TimedSandbox | None" = None
    compiled: Sandbox | None = None  # judges against torch.compile; only CUDA Agent's reward asks
    seconds: Counter = field(default_factory=Counter)  # of the current step, by phase

    @contextlib.contextmanager
    def phase(self, name, bar=None):
        """Time a phase. What the sandbox takes within it is booked under `sandbox` instead."""
        if bar is not None:
            bar.set_description(f"step {self.step + 1}: {name}")
        start, before = time.monotonic(), self.seconds["sandbox"]
        yield
        self.seconds[name] += time.monotonic() - start - (self.seconds["sandbox"] - before)


class TimedSandbox:
    """The sandbox, but the time that the model waits for it is booked apart from the model's."""

    def __init__(self, sandbox, seconds):
        self.sandbox, self.seconds = sandbox, seconds

    def __getattr__(self, name):
        return getattr(self.sandbox, name)

    def wait(self, futures):
        start = time.monotonic()
        self.sandbox.wait(futures)
        self.seconds["sandbox"] += time.monotonic() - start


def train(run, stream):
    """The paper's training step, over and over. stream: endless iterator over training tasks."""
    args = run.args
    if run.step == 0 and not read_metrics(run):
        line = {"step": 0, "clock": clock(run), "library": len(run.library), **evaluate_if_due(run, 0)}
        finish_step(run, line)
        if "eval_fast_1" in line:
            print(progress(line, args), flush=True)
    tasks = list(itertools.islice(stream, args.batch)) if run.step < args.steps else []
    run.sandbox.prepare(tasks)
    with tqdm(total=args.steps, initial=run.step, unit="step", disable=None) as bar:
        while run.step < args.steps:
            run.seconds.clear()
            # The next step's tasks, made when they are first asked for: by then the sandbox keeps the GPU busy.
            following = functools.cache(lambda: list(itertools.islice(stream, args.batch))
                                        if run.step + 1 < args.steps else [])
            with run.phase("select", bar):  # k selections for each task; with the null scheme k + 1 schemes
                episodes = select(run, tasks)
            with run.phase("roll out", bar):  # n rollouts of each scheme, T turns, every kernel judged by the sandbox
                roll_out(run, episodes, following)
            with run.phase("score", bar):  # rewards of turns, then of selections
                score(run, episodes)
            with run.phase("summarise", bar):  # s proposals from each task's best triggering rollout
                summarise(run, episodes)
            with run.phase("verify", bar):  # a proposal must prove itself; the best of a task is staged
                verify(run, episodes)
            run.settled = None
            with run.phase("update", bar):  # advantages of each role, one joint loss, one optimiser step
                losses = update(run.model, run.optimizer, credit(run, episodes), args)
            with run.phase("flush", bar):  # staged skills join the library only now
                flush(run, episodes)
            bar.set_description(f"step {run.step + 1}: evaluate")
            line = {**step_metrics(run, episodes), **losses, **evaluate_if_due(run, run.step + 1)}
            run.sandbox.prepare(following())  # now, so that references are built while this step is written down
            record_rollouts(run, run.out / f"rollouts/step_{run.step + 1}.jsonl", episodes)
            run.step, tasks = run.step + 1, following()
            finish_step(run, line)
            tqdm.write(progress(line, args), file=sys.stdout)
            bar.update()
            if "eval_reward_best" in line and run.step < args.steps:
                draw_curves(read_metrics(run), run.out / "curves.png")
    draw_curves(read_metrics(run), run.out / "curves.png")


def select(run, tasks) -> list[Episode]:
    args = run.args
    chosen = selector.select(run.model, run.library, tasks, args.k if args.skills else 0, args.selection_tokens,
                             args.temperature, run.generator, args.bm25_only, args.prompt_tokens)
    return [Episode(task, selections) for task, selections in zip(tasks, chosen)]


def roll_out(run, episodes, following):
    """following: a function that returns the next step's tasks."""
    args, jobs, here = run.args, [], [episode.task.source for episode in episodes]

    @functools.cache
    def later():
        if evaluation_is_due(args, run.step + 1):
            return []  # its tasks need the scorers first
        return [task for task in following() if task.source not in here]

    def over(trajectories):
        """A scorer that need not verify a lesson, and whose task does not come again, goes on with another task."""
        task, verified = trajectories[0].task, args.skills and not args.no_verify
        lesson = verified and summarizer.best_trigger(trajectories, args.trigger)
        if not lesson and task not in following() and (chosen := run.sandbox.pass_on(task, later())):
            later().remove(chosen)

    for episode in episodes:
        schemes = [selection.skills for selection in episode.selections]
        schemes += [()] * (args.k + 1 - len(schemes))  # the null scheme; without skills all k + 1 are
        jobs += [(episode.task, skills) for skills in schemes for _ in range(args.n)]
    done = iter(policy.rollout(run.model, run.sandbox, jobs, args.turns, args.policy_tokens, args.prompt_tokens,
                               args.temperature, run.generator, over))
    for episode in episodes:
        episode.trajectories = list(itertools.islice(done, (args.k + 1) * args.n))


def score(run, episodes):
    """Fill in the reward of every turn and of every selection (paper, sections 2 and 3)."""
    turns = [(e.task, turn) for e in episodes for trajectory in e.trajectories for turn in trajectory.turns]
    for _, turn in turns:
        turn.reward = REWARDS[run.args.recipe](turn.verdict)
    if run.compiled:  # CUDA Agent's third milestone
        fast = [(task, turn) for task, turn in turns if turn.reward == 2.0]
        verdicts = policy.score_pairs(run.compiled, [(task, turn.code) for task, turn in fast])
        for (_, turn), verdict in zip(fast, verdicts):
            turn.reward = cuda_agent_reward(turn.verdict, verdict)
    for episode in episodes:
        for selection in episode.selections:
            # Schemes that chose the same set of skills pool their rollouts, the null scheme included.
            pooled = [trajectory.best_reward for trajectory in episode.trajectories
                      if set(trajectory.skills) == set(selection.skills)]
            selection.reward = sum(pooled) / len(pooled)


def summarise(run, episodes):
    args = run.args
    found = [(e, winner) for e in episodes if (winner := summarizer.best_trigger(e.trajectories, args.trigger))]
    if args.skills and found:
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
            speedups = [1.0 if args.no_verify else min(skill.verify_speedup, CAP) for skill in passed]
            summary.reward = max(speedups, default=0.0)
        episode.staged = summarizer.best_skill(episode.summaries)


def credit(run, episodes) -> list[list[Row]]:
    """Fill in every advantage (paper, section 3) and return the rows of the loss, those of one rollout together."""
    args, baseline, sequences = run.args, BASELINES[run.args.baseline], []
    for episode in episodes:
        turns = [trajectory.turns for trajectory in episode.trajectories]
        draws = iter(torch.rand(sum(map(len, turns)), generator=run.generator, device=run.generator.device).tolist())
        kept = [[next(draws) < prs_probability(turn.verdict) or not args.prs for turn in row] for row in turns]
        members = [[keep and bool(turn.completion.token_ids) for turn, keep in zip(*pair)] for pair in zip(turns, kept)]
        advantages = policy_advantages([[turn.reward for turn in row] for row in turns], members, args.gamma, baseline,
                                       args.cross_scheme)
        for row, values in zip(turns, advantages):
            for turn, advantage in zip(row, values):
                turn.advantage = advantage
            sequences.append([Row("policy", turn.completion, turn.advantage) for turn in row
                              if turn.advantage is not None])
        asked = [selection for selection in episode.selections if selection.completion]
        for role, answers, weight, frozen in (
                ("selection", asked, args.selection_weight, args.freeze_selection),
                ("summary", episode.summaries, args.summary_weight, args.freeze_summary)):
            for answer, advantage in zip(answers, baseline([answer.reward for answer in answers])):
                answer.advantage = advantage
                if not frozen:
                    sequences.append([Row(role, answer.completion, weight * advantage)])
    return [rows for rows in sequences if rows]


def flush(run, episodes):
    for episode in episodes:
        if episode.staged:
            run.library.stage(episode.staged)
    if run.library.flush():
        run.library.save_snapshot(run.out / "skill_library", run.step + 1)


def evaluation_is_due(args, step) -> bool:
    return not args.no_eval and (step in (0, args.steps) or bool(args.eval_every) and step % args.eval_every == 0)


def evaluate_if_due(run, step) -> dict:
    """Evaluation metrics where they are due, else nothing (paper, section 1: one greedy selection, T turns)."""
    args = run.args
    if not evaluation_is_due(args, step):
        return {}
    with run.phase("evaluate"):
        tasks = builtin_tasks(device=run.model.device.type)
        selections = selector.select(run.model, run.library, tasks, int(args.skills), args.selection_tokens, 0, None,
                                     args.bm25_only, args.prompt_tokens)
        jobs = [(task, mine[0].skills if mine else ()) for task, mine in zip(tasks, selections)]
        jobs = [job for job in jobs for _ in range(args.eval_samples)]
        generator = torch.Generator(run.model.device).manual_seed(args.seed * 1_000_003 + step)  # not training's
        done = policy.rollout(run.model, run.sandbox, jobs, args.turns, args.policy_tokens, args.prompt_tokens,
                              0 if args.eval_samples == 1 else 1.0, generator)
        rollouts = iter(done)
        episodes = [Episode(task, mine, list(itertools.islice(rollouts, args.eval_samples)))
                    for task, mine in zip(tasks, selections)]
        score(run, episodes)
    record_rollouts(run, run.out / f"rollouts/eval_{step}.jsonl", episodes)
    return {f"eval_{key}": value for key, value in rollout_metrics(done).items()}


# ----------------------------------------------------------------------------------------------------------------------
# Starting and resuming


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(message)


def command_line(argv) -> dict:
    """The options that were given, without defaults."""
    parser = Parser(description=__doc__.split("\n")[0], argument_default=argparse.SUPPRESS, allow_abbrev=False)
    parser.add_argument("--out", metavar="DIR", help="folder of the run (default: runs/<date and time>)")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out from its last checkpoint")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if there is a GPU")
    parser.add_argument("--recipe", choices=list(REWARDS), help="reward, and defaults of 'recipe' (default: davinci)")

    def add(group, name, kind, meaning, defaults):
        options = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind, "metavar": "X"}
        options |= {"choices": list(BASELINES)} if name == "baseline" else {}
        group.add_argument("--" + name.replace("_", "-"), help=f"{meaning} (default: {defaults})", **options)

    for name, (default, meaning) in CONSTANTS.items():
        add(parser, name, type(default), meaning, default)
    group = parser.add_argument_group("sizes (defaults: CPU / GPU / a model over a billion parameters)")
    for name, (*defaults, meaning) in PROFILE.items():
        add(group, name, type(defaults[0]), meaning, " / ".join(map(str, defaults)))
    group = parser.add_argument_group(f"recipe (defaults: {' / '.join(REWARDS)})")
    for name, (*defaults, meaning) in RECIPE.items():
        add(group, name, type(defaults[0]), meaning, " / ".join(map(str, defaults)))
    group = parser.add_argument_group("switches")
    for name, meaning in SWITCHES.items():
        group.add_argument("--" + name.replace("_", "-"), action="store_true", help=meaning)
    return vars(parser.parse_args(argv))


def configure(given, parameters) -> argparse.Namespace:
    """All options: those given, and the defaults for this device, recipe and number of model parameters."""
    size, recipe = 2 if parameters >= 1e9 else int(given["device"] == "cuda"), given.get("recipe", "davinci")
    config = {name: default for name, (default, _) in CONSTANTS.items()} | dict.fromkeys(SWITCHES, False)
    config |= {name: row[size] for name, row in PROFILE.items()} | {"recipe": recipe}
    config |= {name: row[list(REWARDS).index(recipe)] for name, row in RECIPE.items()} | given
    for name in PROFILE:
        if config[name] < (name not in ("steps", "k", "s", "lr")):
            raise UsageError(f"--{name.replace('_', '-')} {config[name]}: too small")
    return argparse.Namespace(**config)


def open_run(given) -> Run:
    """A new run, or with --resume the run of the folder as it was at its last checkpoint."""
    out, saved = open_folder(given, CHANGEABLE)
    fresh = saved is None or saved["step"] is None
    source = given.get("model", CONSTANTS["model"][0]) if fresh else out / "checkpoint"
    model = Backbone.load(source, given["device"])
    for parameter in model.model.parameters():
        parameter.data = parameter.data.clone()  # no view of a mapped file: the last bit of a matmul knows alignment
    args = configure(given, sum(p.numel() for p in model.model.parameters()))
    library, generator = SkillLibrary.of_model(source), torch.Generator(model.device).manual_seed(args.seed)
    optimizer = make_adamw(model.model.parameters(), args.lr)
    run = Run(args, out, model, optimizer, library, len(library), generator)
    if fresh:
        write_atomically(out / "config.json", json.dumps(vars(args), indent=1))
    else:
        if saved["shapes"] != shapes(model):
            raise UsageError(f"--resume: the model in {source} is not the one that this run has trained")
        optimizer.load_state_dict(saved["optimizer"])
        generator.set_state(saved["generator"])
        run.step, run.seeds = saved["step"], saved["seeds"]
    run.settled = generator.get_state()
    # What a killed step has left is written again; nothing of it may stay if it turns out otherwise.
    write_atomically(out / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in read_metrics(run)))
    for path in [*out.glob("rollouts/*_*.jsonl"), *out.glob("skill_library/global_step_*.jsonl")]:
        if int(path.stem.rsplit("_", 1)[1]) > run.step:
            path.unlink()
    if not (out / "skill_library").is_dir():
        library.save_snapshot(out / "skill_library", run.step)
    return run


def task_stream(args):
    """Training tasks without end, the same for the same options. Raises TaskError when there are none."""
    if args.tasks == "synth":
        tasks = training_tasks(args.seed)
        yield from tasks if args.device == "cpu" else (scale_batch(task, GPU_BATCH_FACTOR) for task in tasks)
    tasks = builtin_tasks(device=args.device) if args.tasks == "builtin" else folder_tasks(args.tasks)
    rng = random.Random(args.seed)
    while True:
        yield from rng.sample(tasks, len(tasks))  # every task once, then again in another order


def main(argv=None) -> int:
    run = None
    try:
        given = command_line(argv)
        if given.get("tasks", "synth") not in ("synth", "builtin"):
            folder_tasks(given["tasks"])  # a bad folder is told before anything is loaded or written
        run = open_run(given)
        args = run.args
        kernels = args.batch * (args.k + 1) * args.n * args.turns
        print(f"{run.out}: {args.model} on {args.device}, steps {run.step} to {args.steps}. A step: {args.batch} tasks "
              f"x ({args.k} + 1) schemes x {args.n} rollouts x {args.turns} turns = {kernels} kernels.", flush=True)
        with contextlib.ExitStack() as stack:
            # A known seed makes modelled verdicts, and so a resumed run, exact; measured ones never are.
            sandbox = stack.enter_context(Sandbox(args.device, trials=args.trials, tasks=8,
                                                  seed=args.seed if args.device == "cpu" else None))
            run.sandbox = TimedSandbox(sandbox, run.seconds)
            if args.recipe == "cuda-agent" and args.device == "cuda":
                run.compiled = stack.enter_context(Sandbox(args.device, trials=1, tasks=4, baseline="compile"))
            train(run, itertools.islice(task_stream(args), run.step * args.batch, None))
    except (UsageError, ModelError, TaskError) as error:
        print(f"reinforce.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if run and run.settled is not None and run.step % run.args.save_every:
            save_checkpoint(run)
        print(f"interrupted; --out {run.out} --resume continues" if run else "interrupted", file=sys.stderr)
        return 130
    print(f"done: {run.out}/curves.png, {run.out}/metrics.jsonl, {run.out}/checkpoint/")
    return 0


if __name__ == "__main__":
    sys.exit(main())

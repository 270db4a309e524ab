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

How it differs from the paper's release: MRS is applied inside the update, where the trainer's probabilities are known
anyway, so a masked reply still counted in its group's baseline. A proposal that repeats a skill of the library is
rejected (summarizer.identity); the release gives it another name. The divisor of adv_cross_scheme has a minimum:
without it, timing noise would become full advantages. A summary's speedup is clipped as the Policy's.

In comments: N tokens of a reply; B tasks, k selections and s summaries of a task, n rollouts of a scheme, T turns.
"""

import contextlib
import itertools
import math
import statistics
import sys
from dataclasses import dataclass, field

import tasks  # before torch: it sets how long waiting threads spin
import torch
from tqdm import tqdm

import policy
import selector
import summarizer
from backbone import Completion
from fast import ranks
from report import (command_line, draw_curves, finish_step, open_run, read_metrics, record_rollouts, rollout_metrics,
                    save_checkpoint, step_metrics, task_stream)
from sandbox import Sandbox
from skills import Skill

# ----------------------------------------------------------------------------------------------------------------------
# Configuration: every number has one default, here. `name` is the flag --name, with dashes.

SIZES = {  # name: 2 CPU cores (about 8 minutes in all), one GPU, the paper (models over 1e9 parameters), meaning
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
    "save_every": (1, 5, 5, "steps between checkpoints (Ctrl-C writes one, too); a killed run repeats those since"),
}
OPTIONS = {  # name: default, meaning
    "model": ("checkpoints/tiny", "model folder or hub id; a skill_library.jsonl in it is loaded with it"),
    "tasks": ("synth", "synth: synthesised; builtin: the evaluation problems (to see it learn); or a folder"),
    "seed": (0, "of tasks, sampling and the modelled clock's inputs"),
    "temperature": (1.0, "of all sampling in training"),
    "gamma": (1.0, "gamma: how much of the next turn's return a turn is credited with"),
    "baseline": ("leave-one-out", "what a return is compared with: mean of the others, of the group, or GRPO's"),
    "skills": (True, "select and write skills; without: (k + 1) n rollouts on the bare task"),
    "prs": (True, "profiling-based rejection: drop correct turns whose kernels do little of the work"),
    "mrs": (True, "mismatch rejection: drop replies on which sampler and trainer disagree"),
    "cross_scheme": (True, "adv_cross_scheme: divide a task's advantages by their mean magnitude"),
    "trigger": (1.2, "gain that triggers a summary and that a new skill must show"),
    "selection_weight": (0.3, "lambda_sel: weight of Selection's advantages"),
    "summary_weight": (0.5, "lambda_sum: weight of Summary's advantages"),
    "clip_low": (0.2, "epsilon_low: the ratio is clipped at 1 - this"),
    "clip_high": (0.28, "epsilon_high: the ratio is clipped at 1 + this"),
    "grad_clip": (1.0, "largest norm of the gradient"),
    "offload": (False, "keep the optimiser's state in the host's memory; what fits where: --plan"),
    "eval_every": (0, "evaluate on the built-in problems every so many steps (0: before and after)"),
    "no_eval": (False, "skip every evaluation"),
    "bm25_only": (False, "ablation: BM25's first 3 skills, no Selection role"),
    "no_verify": (False, "ablation: stage the first well-formed proposal; a summary's return is 1 if it has one"),
    "freeze_selection": (False, "ablation: Selection is used but not trained"),
    "freeze_summary": (False, "ablation: Summary is used but not trained"),
}
RECIPES = {  # what a related system does differently from OPTIONS; each has its reward in REWARDS
    "davinci": {},
    "drkernel": dict(skills=False, cross_scheme=False),
    "kevin": dict(skills=False, cross_scheme=False, prs=False, mrs=False, gamma=0.4, baseline="group-norm"),
    "cuda-agent": dict(skills=False, cross_scheme=False, prs=False, mrs=False),
}
CHANGEABLE = {"offload", "steps", "eval_every", "save_every", "no_eval"}  # what may differ when a run is continued

# ----------------------------------------------------------------------------------------------------------------------
# Reward of one turn (paper: reward), and the neighbours'. A verdict is sandbox.Verdict.

SPEEDUP_CAP = 6.0  # a speedup beyond it earns no more


def davinci_reward(verdict) -> float:
    """r = 0.5 correct + 0.5 correct clip(speedup, 0, 6) + 0.5 correct coverage. Dr. Kernel's is the same.

    >>> from sandbox import Verdict
    >>> davinci_reward(Verdict(correct=True, speedup=8.0, coverage=0.5))
    3.75
    """
    if not verdict.correct:
        return 0.0
    return 0.5 + 0.5 * min(max(verdict.speedup, 0.0), SPEEDUP_CAP) + 0.5 * (verdict.coverage or 0.0)


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
# Advantages: one rule, three groupings (paper: turn-level REINFORCE with leave-one-out, TRLOO)

def leave_one_out(returns) -> list[float]:
    """A_i = G_i - mean of the others; a group of one keeps A = G.

    GRPO's baseline holds the sample itself, which shrinks the gradient by (N - 1) / N and biases small groups.

    >>> leave_one_out([1, 0, 0])
    [1.0, -0.5, -0.5]
    """
    total, others = sum(returns), len(returns) - 1
    return [_clean(g - (total - g) / others) if others else float(g) for g in returns]


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


def _clean(advantage) -> float:  # equal returns must give exactly 0: adv_cross_scheme would blow rounding noise up
    return float(advantage) if abs(advantage) > 1e-9 else 0.0


BASELINES = {"leave-one-out": leave_one_out, "group-mean": group_mean, "group-norm": group_norm}
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


def policy_advantages(rewards, members, gamma=1.0, baseline=leave_one_out, cross_scheme=False):
    """TRLOO: turn t of a rollout against turn t of all rollouts of the same task, whatever their scheme.

    rewards[i][t], members[i][t]: of turn t of rollout i; rollouts may have different lengths. A masked turn (no member)
    has earned its reward all the same, and earlier turns are credited with it, but its own advantage is None.
    cross_scheme divides by the mean magnitude over all of the task's members (paper: cross-scheme advantages).
    """
    returns = [returns_to_go(row, gamma) for row in rewards]
    advantages = [[None] * len(row) for row in rewards]
    for t in range(max(map(len, rewards), default=0)):
        group = [i for i, row in enumerate(rewards) if t < len(row) and members[i][t]]
        for i, advantage in zip(group, baseline([returns[i][t] for i in group])):
            advantages[i][t] = advantage
    magnitudes = [abs(a) for row in advantages for a in row if a is not None]
    if cross_scheme and any(magnitudes):
        scale = max(sum(magnitudes) / len(magnitudes), DIVISOR_FLOOR)
        advantages = [[a if a is None else a / scale for a in row] for row in advantages]
    return advantages


# ----------------------------------------------------------------------------------------------------------------------
# Filters, loss, update

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
    """Pack `sequences` (lists of rows), longest first, into lists of rows of at most `budget` tokens, padding included.

    A rollout's turns stay together: Backbone.logprobs runs them as one where each prompt extends the turn before it.
    """
    sized = []  # (tokens of the longest row, sequences that the model sees, rows)
    for rows in sequences:
        ids = [row.completion.prompt_ids + row.completion.token_ids for row in rows]
        apart = sum(after[:len(before)] != before for before, after in itertools.pairwise(ids))
        sized.append((max(map(len, ids)), 1 + apart, rows))
    batch, count, width = [], 0, 0
    for length, more, rows in sorted(sized, key=lambda item: -item[0]):
        if batch and (count + more) * width > budget:
            yield batch
            batch, count = [], 0
        width = width if batch else length
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
    live = ranks.share(sorted(live, key=lambda rows: len(rows[-1].completion.prompt_ids)))  # parts of about one length
    total = torch.zeros((), device=model.device)
    model.release()  # the sampler's cache: activations need its memory
    for rows in micro_batches(live, args.update_tokens):
        # Only tokens that the model sampled are scored. The sandbox's feedback lies between them in the context of
        # later turns, but the model did not write it, so it earns no gradient.
        scored = model.logprobs([(row.completion.prompt_ids, row.completion.token_ids) for row in rows])  # of (N,)
        views = torch.cat(scored).detach().cpu().split([len(new) for new in scored])  # waits for the GPU only once
        kept = []  # (new, old, advantage), (N,) each
        for row, new, view in zip(rows, scored, views):
            old = torch.tensor(row.completion.logprobs)  # (N,)
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
    return stats


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
    if run.step == 0 and not read_metrics(run):
        finish_step(run, {"step": 0, "clock": run.clock, "library": len(run.library)} | evaluate_if_due(run, 0))
    with tqdm(total=args.steps, initial=run.step, unit="step", disable=ranks.rank() > 0 or None) as run.bar:
        while run.step < args.steps:
            run.seconds.clear()
            batch = ranks.share(list(itertools.islice(stream, args.batch)))
            run.sandbox.prepare(batch)
            with run.phase("select"):  # k selections for each task; with the null scheme k + 1 schemes
                episodes = select(run, batch, args.k if args.skills else 0, args.temperature)
            with run.phase("roll out"):  # n rollouts of each scheme, T turns, every kernel judged by the sandbox
                roll_out(run, episodes, args.k + 1, args.n, args.temperature, run.generator)
            with run.phase("score"):  # rewards of turns, then of selections
                score(run, episodes)
            with run.phase("summarise"):  # s proposals from each task's best triggering rollout
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
    draw_curves(run)


def select(run, batch, k, temperature) -> list[Episode]:
    """One episode for each task, with k selections (paper: BM25 recall, LLM reranking)."""
    chosen = selector.select(run.model, run.library, batch, k, run.args.selection_tokens, temperature, run.generator,
                             run.args.bm25_only, run.args.prompt_tokens)
    return [Episode(task, selections) for task, selections in zip(batch, chosen)]


def roll_out(run, episodes, schemes, n, temperature, generator):
    """n rollouts of each of a task's schemes: what its selections chose, and the null scheme (paper: roll out)."""
    args, jobs = run.args, []
    for episode in episodes:
        skills = [selection.skills for selection in episode.selections]
        skills += [()] * (schemes - len(skills))  # one null scheme; without skills all schemes are
        jobs += [(episode.task, chosen) for chosen in skills for _ in range(n)]
    done = iter(policy.rollout(run.model, run.sandbox, jobs, args.turns, args.policy_tokens, args.prompt_tokens,
                               temperature, generator))
    for episode in episodes:
        episode.trajectories = list(itertools.islice(done, schemes * n))


def score(run, episodes):
    """Fill in the reward of every turn and of every selection (paper: reward; selection reward)."""
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
            speedups = [1.0 if args.no_verify else min(skill.verify_speedup, SPEEDUP_CAP) for skill in passed]
            summary.reward = max(speedups, default=0.0)
        episode.staged = summarizer.best_skill(episode.summaries)


def credit(run, episodes) -> list[list[Row]]:
    """Fill in every advantage and return the rows of the loss, those of one rollout together."""
    args, baseline, sequences = run.args, BASELINES[run.args.baseline], []
    for episode in episodes:
        turns = [trajectory.turns for trajectory in episode.trajectories]
        draws = iter(torch.rand(sum(map(len, turns)), generator=run.generator, device=run.generator.device).tolist())
        members = []  # not in a group: turns that PRS masks, and those whose prompt was too long to be answered
        for row in turns:
            kept = [next(draws) < prs_probability(turn.verdict) or not args.prs for turn in row]
            members.append([keep and bool(turn.completion.token_ids) for turn, keep in zip(row, kept)])
        rewards = [[turn.reward for turn in row] for row in turns]
        advantages = policy_advantages(rewards, members, args.gamma, baseline, args.cross_scheme)
        for row, values in zip(turns, advantages):
            for turn, advantage in zip(row, values):
                turn.advantage = advantage
            sequences.append([Row("policy", t.completion, t.advantage) for t in row if t.advantage is not None])
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
    """The staged skills join the library, and a new snapshot is written if there are any."""
    for episode in episodes:
        if episode.staged:
            run.library.stage(episode.staged)
    if run.library.flush() and ranks.rank() == 0:
        run.library.save_snapshot(run.out / "skill_library", run.step + 1)


def evaluate_if_due(run, step) -> dict:
    """Metrics on the built-in problems where they are due, else nothing (paper: one greedy selection, T turns)."""
    args = run.args
    if args.no_eval or not (step in (0, args.steps) or args.eval_every and step % args.eval_every == 0):
        return {}
    generator = torch.Generator(run.model.device).manual_seed(args.seed * 1_000_003 + step)  # not training's
    with run.phase("evaluate"):
        episodes = select(run, ranks.share(tasks.builtin_tasks(device=run.model.device.type)), int(args.skills), 0)
        roll_out(run, episodes, 1, args.eval_samples, 0 if args.eval_samples == 1 else 1.0, generator)
        score(run, episodes)
        episodes = ranks.gather(episodes)
    record_rollouts(run, run.out / f"rollouts/eval_{step}.jsonl", episodes)
    return {f"eval_{key}": value for key, value in rollout_metrics(episodes).items()}


# ----------------------------------------------------------------------------------------------------------------------
# The command

def main(argv=None) -> int:
    tables = OPTIONS, SIZES, RECIPES
    run = open_run(command_line(argv, __doc__, tables, choices={"baseline": BASELINES}), tables, CHANGEABLE)
    args = run.args
    kernels = args.batch * (args.k + 1) * args.n * args.turns
    print(f"{run.out}: {args.model} on {args.device}, steps {run.step} to {args.steps}. A step: {args.batch} tasks "
          f"x ({args.k} + 1) schemes x {args.n} rollouts x {args.turns} turns = {kernels} kernels.", flush=True)
    seed = args.seed if args.device == "cpu" else None  # makes modelled verdicts, and so a resumed run, exact
    try:
        with contextlib.ExitStack() as stack:
            run.sandbox = stack.enter_context(Sandbox(args.device, trials=args.trials, tasks=8, seed=seed))
            if args.recipe == "cuda-agent" and args.device == "cuda":
                run.compiled = stack.enter_context(Sandbox(args.device, trials=1, tasks=4, baseline="compile"))
            train(run, itertools.islice(task_stream(args), run.step * args.batch, None))
    except KeyboardInterrupt:
        if run.settled is not None and run.step % args.save_every and ranks.count() == 1:
            save_checkpoint(run)
        print(f"--out {run.out} --resume continues", file=sys.stderr)
        raise
    print(f"done: {run.out}/curves.png, {run.out}/metrics.jsonl, {run.out}/checkpoint/")
    return 0


if __name__ == "__main__":
    tasks.run_command(ranks.joined(main))

"""From rewards to advantages and to the loss: the paper's formulas, then the rows of a training step's loss.

The first part holds functions of plain numbers and tensors. Each has its formula and an example that a test runs:

    returns_to_go        G_t = r_t + gamma G_{t+1}
    leave_one_out        A_i = G_i - mean of the other G_j                       paper: leave-one-out baseline
    policy_advantages    leave-one-out among a task's turns of the same number   paper: turn-level REINFORCE (TRLOO)
    cross_scheme         A <- A / mean |A| of the task                           paper: cross-scheme advantages
    prs_probability      of keeping a correct turn, by its coverage              paper: profiling-based rejection (PRS)
    mismatched           do sampler and trainer disagree on a reply?             paper: mismatch rejection (MRS)
    clipped_loss         - rho A, with rho clipped                               REINFORCE with PPO's clipped ratio

The second part, `credit`, applies them to what a step has done and returns the rows of its loss.

Why leave-one-out, and not GRPO's mean? A mean that includes the sample itself shrinks its advantage by (m - 1) / m, so
small groups would weigh less. (Among groups of equal size cross_scheme takes this factor out again.) There is no critic
and no KL term. Symbols, in this file:

    i, t         a rollout, and one of its turns
    r, G, A      reward, return, advantage
    m            number of members of a group
    n_it         number of tokens of turn t of rollout i
    M            number of tokens of a micro-batch
    l_n, rho_n   of token n: its loss, and the trainer's probability of it divided by the sampler's
    q            geometric mean of rho over a rollout's tokens
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

DUAL_CLIP = 3.0  # dual clip: for A < 0 a token's loss is at most 3 |A|, however large its ratio has become
DIVISOR_FLOOR = 0.05  # least divisor of cross_scheme: timing noise of a few percent must not become an advantage
MRS_BAND = 1e-3  # most that q may differ from 1
MRS_LEAST = 1e-4  # the least rho that a token may have

# ----------------------------------------------------------------------------------------------------------------------
# Returns and baselines


def returns_to_go(rewards, gamma) -> list[float]:
    """G_t = r_t + gamma * G_{t+1}: a turn is credited with what it led to.

    >>> returns_to_go([1.0, 0.0, 2.0], gamma=0.5)
    [1.5, 1.0, 2.0]
    """
    returns = []
    for reward in reversed(rewards):
        returns.insert(0, reward + gamma * (returns[0] if returns else 0.0))
    return returns


def leave_one_out(returns) -> list[float]:
    """A_i = G_i - sum_{j != i} G_j / (m - 1) of a group of m returns (paper: TRLOO).

    A group of one has nothing to be compared with. Its advantage is the return itself, so it still learns from success.

    >>> leave_one_out([1, 0, 0])
    [1.0, -0.5, -0.5]
    >>> leave_one_out([2.5])
    [2.5]
    """
    total, others = sum(returns), len(returns) - 1
    if others == 0:
        return [float(returns[0])]
    return [without_rounding(g - (total - g) / others) for g in returns]


def group_mean(returns) -> list[float]:
    """A_i = G_i - mean(G): the baseline includes the sample itself (an ablation).

    >>> group_mean([3, 0, 0])
    [2.0, -1.0, -1.0]
    """
    return [without_rounding(g - sum(returns) / len(returns)) for g in returns]


def without_rounding(advantage) -> float:
    """Exactly 0 where equal returns differ by a rounding error: such a reply needs no gradient."""
    return float(advantage) if abs(advantage) > 1e-9 else 0.0


def same_turn(turn) -> int:
    """Turns of the same number are a group (paper: turn level)."""
    return turn


@dataclass(frozen=True)
class Baseline:
    """What a return is compared with. recipes.py adds another one to BASELINES."""

    subtract: Callable  # subtract(returns of a group) gives their advantages
    group: Callable = same_turn  # group(t) is the name of the group to which a task's turn t belongs


BASELINES = {"leave-one-out": Baseline(leave_one_out), "group-mean": Baseline(group_mean)}


# ----------------------------------------------------------------------------------------------------------------------
# Advantages of the Policy


def policy_advantages(returns, members, baseline=BASELINES["leave-one-out"]) -> list[list]:
    """Advantages of a task's turns. By default turn t is compared with turn t of all rollouts, whatever their scheme.

    returns[i][t], members[i][t]: of turn t of rollout i; rollouts may have different lengths. Returns A_it in the same
    shape; a turn that is no member (a void turn) gets None. This default is the paper's TRLOO.

    >>> policy_advantages([[4, 2], [1, 0], [1]], [[True, True], [True, True], [True]])
    [[3.0, 2.0], [-1.5, -2.0], [-1.5]]
    """
    advantages = [[None] * len(row) for row in returns]
    groups = {}  # name of a group -> places (i, t) of its members
    for i, row in enumerate(members):
        for t, member in enumerate(row):
            if member:
                groups.setdefault(baseline.group(t), []).append((i, t))
    for places in groups.values():
        for (i, t), advantage in zip(places, baseline.subtract([returns[i][t] for i, t in places])):
            advantages[i][t] = advantage
    return advantages


def cross_scheme(advantages, tokens) -> list[list]:
    """A_it <- A_it / max(sum_it n_it |A_it| / sum_it n_it, 0.05) (paper: cross-scheme advantages).

    The divisor is the mean |A| of a task's turns, over all schemes, weighted by tokens, and at least 0.05. Without this
    floor timing noise would become full advantages. tokens[i][t] is n_it, or 0 for a masked turn.

    >>> cross_scheme([[3.0], [-1.0], [None]], [[10], [10], [10]])
    [[1.5], [-0.5], [None]]
    """
    total = 0
    weighted = 0.0
    for t in range(max(map(len, advantages), default=0)):  # turn by turn: the sum's last digit depends on the order
        for row, counts in zip(advantages, tokens):
            if t < len(row) and row[t] is not None:
                total += counts[t]
                weighted += counts[t] * abs(row[t])
    if not total:
        return advantages
    divisor = max(weighted / total, DIVISOR_FLOOR)
    scaled = []
    for row in advantages:
        scaled.append([None if a is None else a / divisor for a in row])
    return scaled


# ----------------------------------------------------------------------------------------------------------------------
# Filters


def varies(rewards, min_std) -> bool:
    """Is the standard deviation of m rewards, sqrt(sum_i (r_i - mean(r))^2 / (m - 1)), at least min_std? True if m = 1.

    >>> varies([1.0, 1.0], 1e-3), varies([1.0, 0.0], 1e-3)
    (False, True)
    """
    return len(rewards) < 2 or statistics.stdev(rewards) >= min_std


def prs_probability(coverage) -> float:
    """p = clip((coverage - 0.3) / 0.1, 0, 1): a correct turn is kept with this probability (PRS).

    coverage: share of the time spent in the candidate's own kernels (sandbox.py). If it is low, PyTorch does the work,
    and training on the turn would teach that. Incorrect turns are always kept.

    >>> [round(prs_probability(coverage), 3) for coverage in (0.3, 0.35, 0.9)]
    [0.0, 0.5, 1.0]
    """
    return min(max((coverage - 0.3) / 0.1, 0.0), 1.0)


def mismatched(drifts) -> list[bool]:
    """For each reply of one rollout: do sampler and trainer disagree on it (MRS)?

    drifts: for each reply a tensor (n_it,) of log rho, the trainer's log-probabilities minus the sampler's. They are
    those of replies that are trained on. Masked replies, and those with an advantage of 0, are not among them.

        q = exp(mean of log rho over all tokens of drifts)
        all replies are rejected unless 0.999 <= q <= 1.001; a single one is rejected if a token has rho < 1e-4

    A reply of Selection or Summary counts as a rollout with one reply.

    >>> mismatched([torch.zeros(3), torch.tensor([-9.5, 9.5])])
    [False, True]
    """
    q = torch.cat(drifts).mean().exp().item()
    # Written with `not`, so that a nan counts as a mismatch, too.
    return [not (abs(q - 1.0) <= MRS_BAND and drift.min().item() >= math.log(MRS_LEAST)) for drift in drifts]


# ----------------------------------------------------------------------------------------------------------------------
# Loss


def clipped_loss(new, old, advantage, low, high):
    """REINFORCE with PPO's clipped ratio and a dual clip, summed over tokens. Returns a scalar.

        rho_n = exp(new_n - old_n),  l_n = -min(rho_n A_n, clip(rho_n, 1 - low, 1 + high) A_n)
        where A_n < 0: l_n <- min(l_n, -3 A_n)

    new (trainer's log-probabilities, with gradients), old (sampler's), advantage: (M,). A step makes one update. In
    exact arithmetic rho is then 1, and the gradient is that of -A log pi(reply). Clip and MRS limit what rounding does.

    >>> clipped_loss(torch.tensor([0.5]), torch.zeros(1), torch.tensor([2.0]), low=0.2, high=0.28)  # rho = 1.65
    tensor(-2.5600)
    """
    ratio = (new - old).exp()  # (M,)
    loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)  # (M,)
    return torch.where(advantage < 0, loss.minimum(-DUAL_CLIP * advantage), loss).sum()


# Name -> function of the loss's rows. It returns R, which divides the sum of the loss over all of their tokens. With
# "reply" R is the number of rows, so the loss is a mean over replies. recipes.py adds another one.
LOSS_MEANS = {"reply": len}


# ----------------------------------------------------------------------------------------------------------------------
# Credit: the formulas above, applied to the episodes of a step (reinforce.Episode)


@dataclass
class Row:
    """One reply in the loss."""

    role: str  # "policy", "selection" or "summary"
    completion: object  # a Completion: prompt, tokens and the sampler's log-probabilities
    advantage: float  # A, times the weight of the role
    masked: str | None = None  # why it has no loss, although it counts in R: "prs", or "mrs" (set by update)


def credit(episodes, options, generator) -> list[list[Row]]:
    """Fill in every advantage. Returns the rows of the loss, as chains: one rollout's turns, or one other reply.

    A task gives Policy rows only if the rewards of its last turns vary, and if fewer than B earlier tasks did so (see
    --oversample). A turn that PRS masks still counts in its group's baseline and in R; a void turn counts in neither.
    Rows of Selection and Summary depend on their own groups alone.
    """
    chains = []
    kept_tasks = 0
    for episode in episodes:
        # Only last turns decide. A void turn has reward 0, so a task in which all rollouts end with one is skipped.
        last_rewards = [trajectory.turns[-1].reward for trajectory in episode.trajectories]
        kept = kept_tasks < options.batch and varies(last_rewards, options.min_std)
        if kept:
            kept_tasks += 1
        mask_turns(episode.trajectories, kept, options.prs, generator)
        chains += policy_rows(episode.trajectories, options)
        answered = [selection for selection in episode.selections if selection.completion]
        chains += answer_rows("selection", answered, options.selection_weight, options.freeze_selection, options)
        chains += answer_rows("summary", episode.summaries, options.summary_weight, options.freeze_summary, options)
    return chains


def mask_turns(trajectories, kept, prs, generator):
    """Fill in `masked`: why a turn has no loss. kept: is the task trained on? Void turns have it already."""
    turns = []
    for trajectory in trajectories:
        turns += trajectory.turns
    # Draw once for each turn, needed or not: then no option changes later random numbers, and all ranks draw the same.
    draws = torch.rand(len(turns), generator=generator, device=generator.device).tolist()
    for turn, draw in zip(turns, draws):
        rejected = prs and turn.verdict.correct and draw >= prs_probability(turn.verdict.coverage or 0.0)
        if not turn.masked and not kept:
            turn.masked = "group"
        elif not turn.masked and rejected:
            turn.masked = "prs"


def policy_rows(trajectories, options) -> list[list[Row]]:
    """Fill in the advantages of one task's turns. Returns a chain of rows for each rollout that has rows."""
    returns, members, tokens, chains = [], [], [], []
    for trajectory in trajectories:
        returns.append(returns_to_go([turn.reward for turn in trajectory.turns], options.gamma))
        members.append([turn.masked != "void" for turn in trajectory.turns])
        tokens.append([0 if turn.masked else len(turn.completion.token_ids) for turn in trajectory.turns])
    advantages = policy_advantages(returns, members, BASELINES[options.baseline])
    if options.cross_scheme:
        advantages = cross_scheme(advantages, tokens)
    for trajectory, values in zip(trajectories, advantages):
        rows = []
        for turn, advantage in zip(trajectory.turns, values):
            turn.advantage = advantage
            # There is no row for a prompt that was too long to be answered, a void turn, or a task that is skipped.
            if turn.completion.token_ids and turn.masked not in ("void", "group"):
                rows.append(Row("policy", turn.completion, advantage, turn.masked))
        if rows:
            chains.append(rows)
    return chains


def answer_rows(role, answers, weight, frozen, options) -> list[list[Row]]:
    """Fill in the advantages of one task's answers of Selection or Summary. Returns their rows, each in a list.

    frozen (ablation): the role is not trained and has no rows. A row's advantage is multiplied by `weight`.
    """
    if not answers:
        return []
    returns = [answer.reward for answer in answers]
    varied = varies(returns, options.min_std)
    chains = []
    for answer, advantage in zip(answers, BASELINES[options.baseline].subtract(returns)):
        answer.advantage = advantage if varied else 0.0
        if not frozen:
            chains.append([Row(role, answer.completion, weight * answer.advantage)])
    return chains

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
    update        one optimiser step over all rows; the release's mini-batch is 576 rows (16 x 3, then x 4 x 3 in
                  fsdp_workers.py), so its at most 944 rows give one or two steps, and in the second the clip can act
    batch         too few groups with variance: we train on those; the release buffers them and rolls out again
    MRS           the geometric mean is over a rollout's replies that have a gradient
    cross_scheme  tokens masked by PRS are left out of its mean; those that MRS will mask are not known yet and stay
                  in. The divisor has a minimum: without it, timing noise would become full advantages
    selection     its return is the mean of its rollouts' best, as in the paper; the release takes their maximum
    summary       the speedup is clipped as in the Policy's reward; all n rollouts of a scheme may trigger (the release,
                  by a defect, only looks at the last); a skill that the library holds is not staged again
    prompts       own wording, chat template and short feedback; thinking is off; below a billion parameters
                  Selection sees 1,000 characters
    start         the checkpoint's skill library; the release begins with an empty one

In comments: N tokens of a reply, M tokens of a micro-batch; B tasks, k selections and s summaries of a task, n rollouts
of a scheme, T turns. A *group* is what a return is compared with; a *row* is one reply in the loss.
"""

if __name__ == "__main__":  # before torch is loaded: it sets how OpenMP's threads wait
    from command.process import begin
    begin()

import contextlib
import itertools
import math
import statistics
from collections import Counter
from dataclasses import dataclass, field

import torch
from tqdm import tqdm

import policy
import selector
import summarizer
import tasks
from backbone import Completion, Sampling, micro_batches
from fast import ranks
from command.options import complete, option, parse, setting
from command.process import run_command
from run import finish_run, finish_step, new_run, resume_run, task_stream, write_transcripts
from sandbox import Sandbox

# ----------------------------------------------------------------------------------------------------------------------
# Options: every number has one default, here. A field `name` is the flag --name with dashes, or --set name=VALUE.

# Everything beyond a plain policy gradient: skills (daVinci-kernel); PRS, MRS (Dr. Kernel); filters of the release.
OFF = dict(skills=False, cross_scheme=False, prs=False, mrs=False, mask_void=False, min_std=0.0, oversample=1)
# Which options a related system sets differently: a new one is a row here. Three values are for the sizes of Options.
RECIPES = {
    "davinci": {},
    # Dr. Kernel's script for 14B (KernelGYM): one task for each that is kept, prompts of at most 10,240 tokens
    "drkernel": dict(reward="drkernel", skills=False, cross_scheme=False, k=0, n=16, turns=3, oversample=1,
                     prompt_tokens=(3500, 6500, 10240)),
    # Kevin (arXiv 2507.11948) is a model that thinks. It writes CUDA; here it is asked for Triton as all are.
    "kevin": OFF | dict(reward="kevin", gamma=0.4, baseline="group-norm", group="task", loss_mean="token", k=0, n=16,
                        loss_scale=1.0, turns=4, temperature=0.9, history="condensed", thinking=True),
    # CUDA Agent's reward alone. It trains by PPO with a critic, and its model works with tools over many turns.
    "cuda-agent": OFF | dict(reward="cuda-agent"),
}
# What a recipe does not imitate: main says so
LEFT_OUT = {"kevin": "CUDA C++, QwQ-32B",
            "cuda-agent": "PPO's critic, tools, and rejection fine-tuning (sft.py --from-rollouts does that)"}
# Options that may differ when a run is continued
CHANGEABLE = {"out", "resume", "steps", "eval_every", "save_every", "no_eval", "offload", "log"}


@dataclass
class Options:
    """An `option` is a flag, a `setting` is changed by --set NAME=VALUE.

    Three numbers are the defaults on 2 CPU cores (about 7 minutes in all), on a GPU, and for a model over a billion
    parameters; the last ones are the paper's.
    """

    out: str = option("", "folder of the run (default: runs/<date and time>)", metavar="DIR")
    resume: bool = option(False, "continue the run in --out from its last checkpoint")
    device: str = option("", "default: cuda if there is a GPU", choices=("cpu", "cuda"))
    recipe: str = option("davinci", "reward of a related system, and the options that go with it", choices=RECIPES)
    model: str = option("checkpoints/tiny", "folder or hub id; a skill_library.jsonl in it is loaded with it")
    tasks: str = option("synth", "synth: synthesised problems; builtin: those of the evaluation; a folder; "
                        "a parquet file as hkust-nlp/drkernel-rl-data")
    prompts: str = option("", "YAML file as chat/prompts.yaml, or the release's, or a folder of them")
    thinking: bool = option(False, "let replies begin with thoughts, if the chat template can switch them on and off")
    seed: int = option(0, "of tasks, sampling and the modelled clock's inputs")
    steps: int = option((6, 100, 200), "training steps", above_0=True)
    batch: int = option((3, 16, 16), "B: tasks in a step", above_0=True)
    k: int = option((3, 3, 3), "k: selections sampled for each task; with the null scheme they make k + 1 schemes")
    n: int = option((2, 4, 4), "n: rollouts of each scheme", above_0=True)
    turns: int = option((2, 3, 3), "T: turns of a rollout", above_0=True)
    s: int = option((3, 8, 8), "s: parallel summaries of a task's best triggering rollout")
    lr: float = option((1.5e-4, 5e-5, 1e-6), "eta: AdamW's learning rate")
    policy_tokens: int = option((900, 1500, 8192), "most tokens of a Policy reply", above_0=True)
    prompt_tokens: int = option((3500, 6500, 24576), "longest prompt; a rollout beyond it ends", above_0=True)
    update_tokens: int = option((16384, 131072, 32768), "tokens of a micro-batch, with padding", above_0=True)
    reward: str = option("davinci", "of a turn: a name in policy.REWARDS", choices=policy.REWARDS)
    baseline: str = option("leave-one-out", "subtracted from a return: the mean of the others; the mean of all; the "
                           "same, and divided by the deviation", choices=("leave-one-out", "group-mean", "group-norm"))
    skills: bool = option(True, "select and write skills; without: (k + 1) n rollouts on the bare task")
    bm25_only: bool = option(False, "ablation: BM25's first 3 skills, no Selection role")
    no_verify: bool = option(False, "ablation: stage the first well-formed proposal; a summary with one has return 1")
    freeze_selection: bool = option(False, "ablation: Selection is used but not trained")
    freeze_summary: bool = option(False, "ablation: Summary is used but not trained")
    eval_every: int = option(0, "evaluate on the built-in problems every so many steps (0: before and after)")
    no_eval: bool = option(False, "skip every evaluation")
    offload: bool = option(False, "keep the optimiser's state in the host's memory")
    log: str = option("files", "the metrics' numbers to these, too", choices=("files", "tensorboard", "wandb"))

    gamma: float = setting(1.0, "gamma: share of the next turn's return in a turn's return", most=1)
    group: str = setting("turn", "a Policy group: a task's same turns (turn), or all (task)", choices=("turn", "task"))
    history: str = setting("all", "earlier replies in a prompt: all; condensed: without their thoughts",
                           choices=policy.HISTORIES)
    loss_mean: str = setting("sum", "the loss: a mean of replies (sum), of tokens (token)", choices=("sum", "token"))
    loss_scale: float = setting((30.0, 30.0, 1000.0), "c: divides the loss, so that grad_clip seldom acts; about a "
                                "tenth of the tokens of a reply", above_0=True)
    prs: bool = setting(True, "profiling-based rejection: mask correct turns whose kernels do little of the work")
    mrs: bool = setting(True, "mismatch rejection: mask replies on which sampler and trainer disagree")
    mask_void: bool = setting(True, "a turn that fails after a success is void: no loss, in no group")
    min_std: float = setting(1e-3, "a group whose rewards have a smaller standard deviation is not trained on")
    cross_scheme: bool = setting(True, "cross-scheme advantages: divide a task's advantages by their mean magnitude")
    min_gain: float = setting(1.2, "g: gain that triggers a summary and that a new skill must show")
    selection_weight: float = setting(0.3, "lambda_sel: weight of Selection's advantages")
    summary_weight: float = setting(0.5, "lambda_sum: weight of Summary's advantages")
    clip_low: float = setting(0.2, "epsilon_low: the ratio is clipped at 1 - this", most=1)
    clip_high: float = setting(0.28, "epsilon_high: the ratio is clipped at 1 + this")
    grad_clip: float = setting(1.0, "largest norm of the gradient", above_0=True)
    temperature: float = setting(1.0, "of all sampling in training")
    oversample: int = setting((1, 1, 2), "tasks rolled out for each one that is kept", above_0=True)
    selection_tokens: int = setting((250, 400, 1024), "most tokens of a Selection reply", above_0=True)
    summary_tokens: int = setting((600, 1000, 2048), "most tokens of a Summary reply", above_0=True)
    trials: int = setting((3, 5, 5), "correctness trials for each kernel, with fresh inputs", above_0=True)
    eval_samples: int = setting((1, 4, 8), "rollouts for each evaluation problem; one is greedy", above_0=True)
    save_every: int = setting((1, 5, 5), "steps between checkpoints; a killed run repeats those since", above_0=True)


def configure(given, large=False) -> Options:
    """All options. given: {name: value} of the command line, with the device. large: is it over a billion parameters?

    What was given comes before what the recipe sets, and that before the defaults. Raises UserError for a bad number.
    """
    size = 2 if large else int(given["device"] == "cuda")
    recipe = RECIPES[given.get("recipe", "davinci")]
    recipe = {name: value[size] if isinstance(value, tuple) else value for name, value in recipe.items()}
    return complete(Options, recipe | given, size)


def flat(lists) -> list:
    """One list of several."""
    return list(itertools.chain.from_iterable(lists))


# ----------------------------------------------------------------------------------------------------------------------
# Advantages: one rule, three groupings (paper: turn-level REINFORCE with leave-one-out, TRLOO)

def leave_one_out(returns) -> list[float]:
    """A_i = G_i - sum_{j != i} G_j / (m - 1) of a group of m returns; a group of one keeps A = G (paper: TRLOO).

    This is m / (m - 1) * (G_i - mean(G)). GRPO's baseline holds the sample itself, which shrinks the gradient by
    (m - 1) / m: there, small groups weigh less.

    >>> leave_one_out([1, 0, 0])
    [1.0, -0.5, -0.5]
    """
    total, others = sum(returns), len(returns) - 1
    return [_clean(g - (total - g) / others) if others else float(g) for g in returns]


def group_mean(returns) -> list[float]:
    """A_i = G_i - mean(G): an ablation."""
    return [_clean(g - sum(returns) / len(returns)) for g in returns]


def group_norm(returns) -> list[float]:
    """A_i = (G_i - mean(G)) / std(G): GRPO. Kevin takes it over all turns of a task, which needs group "task"."""
    deviation = statistics.pstdev(returns) if returns else 0.0  # of the population: divided by m, not m - 1
    return [a / deviation if deviation > 1e-8 else 0.0 for a in group_mean(returns)]


def _clean(advantage) -> float:
    """Exactly 0 for equal returns, whose difference is a rounding error: such a reply needs no gradient."""
    return float(advantage) if abs(advantage) > 1e-9 else 0.0


BASELINES = {"leave-one-out": leave_one_out, "group-mean": group_mean, "group-norm": group_norm}
DUAL_CLIP = 3.0  # dual clip, per token: for A < 0 the loss is at most -3 A (release: clip_ratio_c in actor.yaml)
DIVISOR_FLOOR = 0.05  # of cross-scheme advantages: a measured speedup scatters by a few percent, which is no signal


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

    rewards[i][t], members[i][t], tokens[i][t]: of turn t of rollout i; rollouts may have different lengths. Returns
    advantages in the same shape: None for a turn that is no member (a void turn: its reward is 0, so it adds nothing to
    earlier returns). group: "turn", or "task": against every turn of the task (Kevin).

    cross_scheme (paper: cross-scheme advantages, since the divisor is that of all schemes of a task together):
        A_it <- A_it / max(sum_it n_it |A_it| / sum_it n_it, 0.05)
    tokens: n_it, that the loss will see: 0 where PRS or another filter masks the turn.
    """
    returns = [returns_to_go(row, gamma) for row in rewards]  # G_it
    advantages = [[None] * len(row) for row in rewards]  # A_it
    groups = {}  # number of a turn, or "task" -> its members, (i, t) each
    for i, row in enumerate(members):
        for t, member in enumerate(row):
            if member:
                groups.setdefault(t if group == "turn" else "task", []).append((i, t))
    for places in groups.values():
        for (i, t), advantage in zip(places, baseline([returns[i][t] for i, t in places])):
            advantages[i][t] = advantage
    places = flat(groups.values())
    total = sum(tokens[i][t] for i, t in places)
    if cross_scheme and total:
        magnitude = sum(tokens[i][t] * abs(advantages[i][t]) for i, t in places) / total
        for i, t in places:
            advantages[i][t] /= max(magnitude, DIVISOR_FLOOR)
    return advantages


# ----------------------------------------------------------------------------------------------------------------------
# Filters

def prs_probability(verdict) -> float:
    """PRS (Dr. Kernel): a correct turn is kept with probability clip((coverage - 0.3) / 0.1, 0, 1), others always."""
    if not verdict.correct:
        return 1.0
    return min(max(((verdict.coverage or 0.0) - 0.3) / 0.1, 0.0), 1.0)


def varies(rewards, min_std) -> bool:
    """Can a group teach? It is one reward alone, or sqrt(sum_i (r_i - mean(r))^2 / (m - 1)) >= min_std of its m."""
    return len(rewards) < 2 or statistics.stdev(rewards) >= min_std


@dataclass
class Row:
    """One reply in the loss."""

    role: str  # "policy", "selection" or "summary"
    completion: Completion  # prompt, tokens and the sampler's log-probabilities
    advantage: float  # A, times the weight of the role
    masked: str | None = None  # why it has no loss although it counts in the mean: "prs", or "mrs" (found by update)
    drift: torch.Tensor | None = None  # logp_train - logp_sampler of its tokens, (N,) on the CPU; filled in by update


def reject_mismatched(rows):
    """MRS (Dr. Kernel): mask those rows of one rollout on which sampler and trainer disagree.

    rows: the rollout's rows that have a gradient, with their drift; a Selection's or Summary's row stands alone.
        rho_n = exp(logp_train_n - logp_sampler_n) of each token,  g = exp(mean over all their tokens of log rho_n)
    All are masked unless 0.999 <= g <= 1.001, and a row alone where min_n rho_n < 1e-4.
    """
    g = torch.cat([row.drift for row in rows]).mean().exp().item()
    for row in rows:
        # written with `not`, so that a nan masks the row, too
        if not (abs(g - 1.0) <= 1e-3 and row.drift.min().item() >= math.log(1e-4)):
            row.masked = "mrs"


# ----------------------------------------------------------------------------------------------------------------------
# Loss and update

def clipped_loss(new, old, advantage, low, high):
    """REINFORCE with PPO's clipped ratio and a dual clip, summed over tokens. Returns a scalar.

        rho_n = exp(new_n - old_n),  l_n = -min(rho_n A_n, clip(rho_n, 1 - low, 1 + high) A_n)
        where A_n < 0: l_n <- min(l_n, -3 A_n)

    new (trainer's log-probabilities, with gradients), old (sampler's), advantage: (M,). At new = old the gradient is
    that of -A log pi(reply).
    """
    ratio = (new - old).exp()  # (M,)
    loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)  # (M,)
    return torch.where(advantage < 0, loss.minimum(-DUAL_CLIP * advantage), loss).sum()


def micro_batch_loss(model, groups, options):
    """(sum of l_n over the M tokens of one micro-batch, a scalar with gradients; largest |rho_n - 1| of them).

    groups: lists of rows, see `update`. Fills in the drift of every row, and masks those that MRS rejects.
    """
    rows = flat(groups)
    # Only tokens that the model sampled are scored. The sandbox's feedback lies between them in the context of later
    # turns, but the model did not write it, so it earns no gradient.
    replies = [(row.completion.prompt_ids, row.completion.token_ids) for row in rows]
    new = torch.cat(model.logprobs(replies, options.temperature or 1.0))  # (M,)
    old = torch.cat([torch.tensor(row.completion.logprobs) for row in rows])  # (M,)
    sizes = [len(row.completion.token_ids) for row in rows]
    drift = new.detach().cpu() - old  # (M,), log rho_n
    for row, row_drift in zip(rows, drift.split(sizes)):
        row.drift = row_drift
    if options.mrs:
        for group in groups:
            reject_mismatched(group)
    advantages = torch.tensor([0.0 if row.masked else row.advantage for row in rows])  # (rows,)
    advantages = advantages.repeat_interleave(torch.tensor(sizes))  # (M,)
    loss = clipped_loss(new, old.to(new.device), advantages.to(new.device), options.clip_low, options.clip_high)  # ()
    return loss, (drift.exp() - 1).abs().max().item()


def update(model, optimizer, groups, options) -> dict:
    """One optimiser step on the joint loss of all roles (paper: joint training; release: seq-mean-token-sum).

        L = 1 / (c R) * sum over rows and their tokens of l_n       c = loss_scale, R = number of rows

    loss_mean "token": R = number of their tokens. A row without a gradient is counted in R and not computed. groups:
    lists of rows, one for each rollout (its turns) or reply of another role. Where each prompt extends the turn before,
    one forward serves the whole list. Gradients add up over micro-batches, whose sizes therefore do not change the
    result, and over ranks, each of which computes some of the groups. Returns the metrics of `over_ranks`, and
    grad_norm: the gradient's norm before it is clipped, 0 where no token was trained.
    """
    rows = flat(groups)  # R of them
    tokens = sum(len(row.completion.token_ids) for row in rows)
    divisor = options.loss_scale * (tokens if options.loss_mean == "token" else len(rows))
    trained = []  # the groups, without rows that need no gradient
    for group in groups:
        trained.append([row for row in group if row.advantage and not row.masked])
    trained = sorted(filter(None, trained), key=lambda group: len(group[-1].completion.prompt_ids))
    own = ranks.share(trained)  # every N-th of the sorted list: all ranks have about as many tokens
    loss = torch.zeros((), device=model.device)
    ratio_off = 0.0
    model.release()  # the sampler's cache: activations need its memory
    packed = [*micro_batches(own, options.update_tokens)]
    idle = max(ranks.each(len(packed))) - len(packed)  # all ranks compute equally many: see ranks.ShardedOptimizer
    for micro_batch in packed + [None] * idle:
        if micro_batch:
            part, off = micro_batch_loss(model, micro_batch, options)
        else:
            part, off = 0 * model.logprobs([([0], [0])])[0].sum(), 0.0
        (part / divisor).backward()  # this micro-batch's part of L adds to the gradients of those before it
        loss += part.detach() / divisor
        ratio_off = max(ratio_off, off)
    metrics = over_ranks(flat(own), loss.item(), ratio_off) | {"grad_norm": 0.0}
    if metrics["tokens_trained"]:
        norm = ranks.clip_gradients(optimizer, model.model.parameters(), options.grad_clip)
        metrics["grad_norm"] = norm.item()
        if torch.isfinite(norm):  # else skip the step: a NaN gradient would destroy every weight
            optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    model.release()  # what the update has used, too: sampling and the sandbox need it
    return metrics


def over_ranks(rows, loss, ratio_off) -> dict:
    """The metrics of an update, over all ranks. rows: those that this rank has computed.

        loss             L
        tokens_trained   tokens with a gradient: those of rows that MRS has not masked
        mrs_masked       rows that MRS has masked
        ratio_off        largest |rho_n - 1|; about 1e-5 where sampler and trainer agree
    """
    kept = [row for row in rows if not row.masked]
    own = {"loss": loss, "tokens_trained": sum(len(row.completion.token_ids) for row in kept),
           "mrs_masked": len(rows) - len(kept), "ratio_off": ratio_off}
    total = Counter()
    for part in ranks.each(own):
        largest = max(total["ratio_off"], part["ratio_off"])
        total.update(part)  # adds
        total["ratio_off"] = largest
    return dict(total)


# ----------------------------------------------------------------------------------------------------------------------
# The training step. `run` is run.Run: options, model, optimiser, library, generator, sandbox, seconds.

@dataclass
class Episode:
    """What one step does with one task."""

    task: tasks.Task
    selections: list[selector.Selection]  # k
    trajectories: list[policy.Trajectory] = field(default_factory=list)  # (k + 1) n
    summaries: list[summarizer.Summary] = field(default_factory=list)  # s, if a rollout triggers
    staged: summarizer.Proposal | None = None  # whose skill joins the library after the update


def train(run, stream):
    """The paper's training step, over and over. stream: endless iterator over training tasks."""
    options = run.options
    if not run.resumed:
        finish_step(run, {"step": 0, "clock": run.clock, "library": len(run.library)} | evaluate_if_due(run, 0))
    with tqdm(total=options.steps, initial=run.step, unit="step", disable=not run.writes or None) as run.bar:
        while run.step < options.steps:
            run.seconds.clear()
            batch = list(itertools.islice(stream, options.batch * options.oversample))
            run.sandbox.prepare(batch)  # builds references in the background, while Selection answers
            with run.phase("select"):  # k selections for each task; with the null scheme k + 1 schemes
                episodes = select(run, batch, options.k, options.temperature)
            with run.phase("roll out"):  # n rollouts of each scheme, T turns, every kernel judged by the sandbox
                sampling = Sampling(options.policy_tokens, options.temperature, max_prompt_tokens=options.prompt_tokens)
                episodes = roll_out(run, episodes, options.k + 1, options.n, sampling, run.generator)
            with run.phase("score"):  # rewards of turns, then of selections
                score(run, episodes)
            with run.phase("summarise"):  # s summaries of each task's best triggering rollout
                summarise(run, episodes)
            with run.phase("verify"):  # a proposal must prove itself; the best of a task is staged
                verify(run, episodes)
            with run.phase("wait"):  # for the other ranks, if there are any; all go on with all episodes
                episodes = ranks.gather(episodes)
            with run.phase("update"):  # advantages of each role, one joint loss, one optimiser step
                losses = update(run.model, run.optimizer, credit(run, episodes), options)
            with run.phase("flush"):  # staged skills join the library only now
                flush(run, episodes)
            line = step_metrics(run, episodes, losses) | evaluate_if_due(run, run.step + 1)
            write_transcripts(run, f"step_{run.step + 1}", episodes)
            run.step += 1
            finish_step(run, line)
            run.bar.update()


def select(run, batch, k, temperature) -> list[Episode]:
    """One episode for each task, with k selections (paper: BM25 recall, LLM reranking), or none without skills."""
    options = run.options
    k = max(k, int(options.bm25_only)) if options.skills else 0  # bm25_only: all schemes will have what BM25 chooses
    sampling = Sampling(options.selection_tokens, temperature, max_prompt_tokens=options.prompt_tokens)
    selections = ranks.distribute(batch, lambda part: selector.select(
        run.model, run.library, part, k, sampling, run.generator, options.bm25_only))
    return [Episode(task, several) for task, several in zip(batch, selections)]


def roll_out(run, episodes, schemes, n, sampling, generator) -> list[Episode]:
    """Fill in n rollouts of each of a task's schemes (paper: roll out).

    The schemes are the task's selections, filled up to `schemes` by the null scheme: training adds one, without skills
    all are null schemes (so the number of rollouts is the same), evaluation with skills has none. Work is split over
    ranks by scheme. The list returned is shorter: each rank goes on with every N-th episode, complete, until `train`
    gathers them.
    """
    options = run.options
    jobs = []
    for episode in episodes:
        skills = [selection.skills for selection in episode.selections]
        null = skills[0] if options.bm25_only and skills else ()  # BM25 alone: all schemes have its choice
        for chosen in skills + [null] * (schemes - len(skills)):
            jobs += [(episode.task, chosen)] * n  # equal jobs stay on one rank, which reads their prompt once
    history = policy.HISTORIES[options.history]  # what a later turn's prompt shows of earlier ones
    trajectories = ranks.distribute(jobs, lambda part: policy.rollout(
        run.model, run.sandbox, part, options.turns, sampling, generator, history))
    for place, episode in enumerate(episodes):
        episode.trajectories = trajectories[place * schemes * n:(place + 1) * schemes * n]
        for number, trajectory in enumerate(episode.trajectories):
            trajectory.number = number
    return ranks.share(episodes)


def score(run, episodes):
    """Fill in the reward of every turn and of every selection (paper: reward; selection reward).

    G_sel(S) = mean over rollouts i with skills S of max_t r_it. Selections of the same set of skills pool their
    rollouts; where S is empty, those of the null scheme, too.
    """
    rollouts = flat(episode.trajectories for episode in episodes)
    policy.reward_turns(rollouts, run.options.reward, run.compile_sandbox, run.options.mask_void)
    for episode in episodes:
        for selection in episode.selections:
            pooled = [t.best_reward for t in episode.trajectories if set(t.skills) == set(selection.skills)]
            selection.reward = sum(pooled) / len(pooled)


def summarise(run, episodes):
    """Fill in s summaries of each task's best triggering rollout, if it has one (paper: summary trigger)."""
    options = run.options
    if not options.skills:
        return
    # (rollout, first turn, best turn) of each episode's best triggering rollout, or None
    winners = [summarizer.best_trigger(episode.trajectories, options.min_gain) for episode in episodes]
    sampling = Sampling(options.summary_tokens, options.temperature, max_prompt_tokens=options.prompt_tokens)
    # Without a winner this still opens a session of the sampler, which draws from the generator.
    answers = summarizer.propose(run.model, [*filter(None, winners)], options.s, run.library, sampling, run.generator)
    for episode, summaries in zip(itertools.compress(episodes, winners), answers):  # the episodes that have a winner
        episode.summaries = summaries


def verify(run, episodes):
    """Verify the proposals, fill in the summaries' rewards, and stage each task's best passing proposal."""
    options = run.options
    sampling = Sampling(options.policy_tokens, temperature=0.0, max_prompt_tokens=options.prompt_tokens)
    if not options.no_verify:
        summarizer.verify(run.model, run.sandbox, [e.summaries for e in episodes], sampling, options.min_gain)
    for episode in episodes:
        for summary in episode.summaries:
            summary.reward = summary_reward(summary, options.no_verify)
        episode.staged = summarizer.best_skill(episode.summaries)


def summary_reward(summary, no_verify) -> float:
    """G_sum = max over passing proposals p of min(v_p, 6), 0 if none; v_p: speedup of the kernel that verified p.

    (Paper: the speedup that its best verified skill reached.) With --no-verify v_p is 1.
    """
    speedups = [proposal.skill.verify_speedup for proposal in summary.proposals if not proposal.rejected]
    if no_verify:
        return float(bool(speedups))
    return min(max(speedups, default=0.0), policy.SPEEDUP_CAP)


def credit(run, episodes) -> list[list[Row]]:
    """Fill in every advantage and return the rows of the loss, those of one rollout together.

    A row that PRS masks stays in its group's baseline and in the mean over rows; a void turn is in neither. A task
    whose rewards do not vary gives no Policy rows; its Selection and Summary rows depend on their own groups.
    """
    options = run.options
    groups, kept_tasks = [], 0
    for episode in episodes:
        # The release compares last-turn rewards (filters/unified_filter.py), and keeps the first B tasks that vary.
        last_rewards = [trajectory.turns[-1].reward for trajectory in episode.trajectories]
        kept = kept_tasks < options.batch and varies(last_rewards, options.min_std)
        kept_tasks += kept  # a bool: 0 or 1
        mask_turns(episode.trajectories, kept, options.prs, run.generator)
        groups += policy_rows(episode.trajectories, options)
        answered = [selection for selection in episode.selections if selection.completion]
        groups += answer_rows("selection", answered, options.selection_weight, options.freeze_selection, options)
        groups += answer_rows("summary", episode.summaries, options.summary_weight, options.freeze_summary, options)
    return groups


def mask_turns(trajectories, kept, prs, generator):
    """Note on every turn why it has no loss. kept: is the task trained on? Void turns have been noted by `score`."""
    turns = flat(trajectory.turns for trajectory in trajectories)
    # One draw for each turn, needed or not, so that no option shifts the generator, and all ranks agree.
    draws = torch.rand(len(turns), generator=generator, device=generator.device).tolist()
    for turn, draw in zip(turns, draws):
        if not turn.masked and not kept:
            turn.masked = "group"
        elif not turn.masked and prs and draw >= prs_probability(turn.verdict):
            turn.masked = "prs"


def policy_rows(trajectories, options) -> list[list[Row]]:
    """Fill in the advantages of one task's turns. Returns their rows, a list for each rollout that has any."""
    rewards, members, tokens, groups = [], [], [], []
    for trajectory in trajectories:
        rewards.append([turn.reward for turn in trajectory.turns])
        members.append([turn.masked != "void" for turn in trajectory.turns])
        tokens.append([0 if turn.masked else len(turn.completion.token_ids) for turn in trajectory.turns])
    advantages = policy_advantages(rewards, members, tokens, options.gamma, BASELINES[options.baseline],
                                   options.cross_scheme, options.group)
    for trajectory, values in zip(trajectories, advantages):
        rows = []
        for turn, advantage in zip(trajectory.turns, values):
            turn.advantage = advantage
            # no row: a prompt that was too long to be answered, a void turn, a task that is not trained on
            if turn.completion.token_ids and turn.masked not in ("void", "group"):
                rows.append(Row("policy", turn.completion, advantage, turn.masked))
        groups.append(rows)
    return list(filter(None, groups))


def answer_rows(role, answers, weight, frozen, options) -> list[list[Row]]:
    """Fill in the advantages of one task's answers of Selection or Summary. Returns their rows, each in a list.

    frozen (ablation): the role is not trained, so that there are no rows.
    """
    returns = [answer.reward for answer in answers]
    varied = varies(returns, options.min_std)
    groups = []
    for answer, advantage in zip(answers, BASELINES[options.baseline](returns)):
        answer.advantage = advantage if varied else 0.0
        if not frozen:
            groups.append([Row(role, answer.completion, weight * answer.advantage)])
    return groups


def flush(run, episodes):
    """Staged skills join the library (paper: flush), and every step leaves a snapshot of it.

    The fastest joins first; one that equals a faster one of this step (summarizer.identity) is unstaged.
    """
    seen = set()
    staged = [episode for episode in episodes if episode.staged]
    for episode in sorted(staged, key=lambda episode: episode.staged.skill.verify_speedup or 0, reverse=True):
        keys = summarizer.identity(episode.staged.skill)  # texts: its content, its name with its description
        if keys.isdisjoint(seen):
            episode.staged.joined = run.library.add(episode.staged.skill).name  # made unique by the library
        else:
            episode.staged = None
        seen |= keys
    if run.writes:
        run.library.save(run.out / f"skill_library/global_step_{run.step + 1}.jsonl")


def step_metrics(run, episodes, losses) -> dict:
    """The line of metrics.jsonl that is made of a step's episodes. losses: of `update`.

        step, clock     number of the step; are speedups modelled or measured?
        staged          skills that joined the library, at most one for each task
        library         skills in it afterwards
        rows            {role: replies in the groups that returns are compared in}
        masked          {why: replies without a loss}: "prs"; "void"; "group" (the task's rewards do not vary, or it is
                        beyond the first B that do); "mrs"
        the others      policy.rollout_metrics, selector.selection_metrics, summarizer.summary_metrics, update; seconds
                        of each phase are added by run.finish_step, eval_* by evaluate_if_due
    """
    trajectories = flat(episode.trajectories for episode in episodes)
    turns = flat(trajectory.turns for trajectory in trajectories)
    selections = flat(episode.selections for episode in episodes)
    summaries = flat(episode.summaries for episode in episodes)
    line = {"step": run.step + 1, "clock": run.clock} | policy.rollout_metrics(trajectories)
    line |= selector.selection_metrics(selections, run.initial_names) | summarizer.summary_metrics(summaries)
    line |= {"staged": sum(episode.staged is not None for episode in episodes), "library": len(run.library)}
    line["rows"] = {"policy": credited(turns), "selection": credited(selections), "summary": credited(summaries)}
    reasons = Counter(turn.masked for turn in turns)
    line["masked"] = {why: reasons[why] for why in ("prs", "void", "group")} | {"mrs": losses.pop("mrs_masked")}
    return line | losses


def credited(replies) -> int:
    """How many replies have an advantage; a void turn and a Selection that was not asked have none."""
    return sum(reply.advantage is not None for reply in replies)


def evaluate_if_due(run, step) -> dict:
    """Metrics on the built-in problems where they are due, else nothing (paper: one greedy selection, T turns)."""
    options = run.options
    # step 0 is the model before training
    if options.no_eval or not (step in (0, options.steps) or options.eval_every and step % options.eval_every == 0):
        return {}
    # a generator of its own: training goes on as if there had been no evaluation
    generator = torch.Generator(run.model.device).manual_seed((options.seed * 1_000_003 + step) % 2**63)
    sampling = Sampling(options.policy_tokens, 0.0 if options.eval_samples == 1 else 1.0, top_p=0.95,
                        max_prompt_tokens=options.prompt_tokens)
    with run.phase("evaluate"):
        episodes = select(run, tasks.builtin_tasks(device=run.model.device.type), 1, 0.0)
        episodes = roll_out(run, episodes, 1, options.eval_samples, sampling, generator)
        score(run, episodes)
        episodes = ranks.gather(episodes)
    write_transcripts(run, f"eval_{step}", episodes)
    trajectories = flat(episode.trajectories for episode in episodes)
    return {f"eval_{name}": value for name, value in policy.rollout_metrics(trajectories).items()}


# ----------------------------------------------------------------------------------------------------------------------
# The command

def main(argv=None) -> int:
    """Train, and show what was learnt. Returns the status of the process. Raises UserError for bad input."""
    given = parse(Options, argv, __doc__.split("\n")[0])
    run = resume_run(given, configure, CHANGEABLE) if given.get("resume") else new_run(given, configure)
    options = run.options
    if options.recipe in LEFT_OUT:
        print(f"--recipe {options.recipe} leaves out: {LEFT_OUT[options.recipe]}")
    with contextlib.ExitStack() as stack:  # closes the sandboxes, whatever ends the training
        run.sandbox = stack.enter_context(Sandbox(options.device, trials=options.trials, tasks=8, secret=run.secret))
        if options.reward == "cuda-agent" and options.device == "cuda":
            # only this reward compares with torch.compile, which takes long
            run.compile_sandbox = stack.enter_context(Sandbox(options.device, trials=1, tasks=4, baseline="compile"))
        # without the tasks of complete steps
        train(run, itertools.islice(task_stream(options), run.step * options.batch * options.oversample, None))
    finish_run(run)
    return 0


if __name__ == "__main__":
    run_command(ranks.joined(main))

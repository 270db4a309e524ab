"""Reinforcement learning of the three roles on one model: the training step of daVinci-kernel. Start reading here.

    python reinforce.py                                              the tiny model, on a GPU if there is one
    python reinforce.py --model Qwen/Qwen3-8B-Base --steps 200       the paper's sizes
    python reinforce.py --out runs/NAME --resume                     continue after a crash or a kill
    python reinforce.py --recipe kevin                               a related system (recipes.py)
    ablations: --no-skills --bm25-only --no-verify --freeze-selection --freeze-summary --baseline group-mean

One model answers in three roles: Selection chooses skills for a task, Policy writes kernels with them over T turns,
Summary turns the best rollout into new skills. A *rollout* is one conversation of the Policy: T kernels for one task.
A *scheme* is the set of skills that a rollout is given. A task has k + 1 schemes: Selection chooses k, and the null
scheme has no skills. Every reply gets a return G. Its advantage compares G with the returns of the reply's *group*
(advantages.py), and the role's weight multiplies the advantage in the joint loss:

    role       return G                                        group                                weight
    policy     r_t + gamma * G_{t+1}                           same task, same turn, all rollouts   1
    selection  mean over its rollouts of the best reward       the task's k selections              0.3
    summary    speedup of its best verified skill, at most 6   the task's s summaries               0.5

r_t is the reward of turn t; the options below explain the other symbols. A rollout *triggers* summaries if its first
kernel is correct and its best one at least g times as fast as PyTorch and as that first one. An operator is *redundant*
where leaving it out changes no result, as a flip directly before a sum. `train` is the step, and the functions after it
are its phases, in their order. results/faithful.md lists what the authors' release does differently.
"""

if __name__ == "__main__":
    from command.process import begin
    begin()  # before torch is loaded: it sets how OpenMP's threads wait

import itertools
from dataclasses import dataclass, field
from typing import ClassVar

from command.options import check_name, check_together, complete, option, parse, parse_early, setting


@dataclass
class Options:
    """An `option` is a flag, a `setting` is changed by --set NAME=VALUE.

    A tuple holds three defaults: on 2 CPU cores (a run takes 6 to 8 minutes), on a GPU, and for a model over a billion
    parameters. The third is from the paper, or from its release, where they say one.
    """

    GROUPS: ClassVar = {"out": "the run", "model": "model and tasks", "steps": "sizes (paper's symbol: meaning)",
                        "recipe": "recipe, reward and baseline", "skills": "ablations"}  # first option -> heading

    out: str = option("", "folder of the run (default: runs/<date and time>)", metavar="DIR")
    resume: bool = option(False, "continue the run in --out from its last checkpoint")
    device: str = option("", "default: cuda if there is a GPU", choices=("cpu", "cuda"))
    seed: int = option(0, "seed of the tasks and of all sampling")
    eval_every: int = option((2, 10, 0), "steps between evaluations on redundant operators (0: before and after alone)")
    eval: str = option("all", "which problems are evaluated", choices=("all", "redundant", "none"))
    model: str = option("checkpoints/tiny", "folder or hub id; a skill_library.jsonl in it is loaded with it")
    tasks: str = option("synth", "synth (synthesised), a folder, or a parquet file as hkust-nlp/drkernel-rl-data")
    prompts: str = option("", "YAML file as chat/prompts.yaml, or a folder of them")
    thinking: bool = option(False, "let replies begin with thoughts, if the chat template can switch them on and off")
    offload: bool = option(False, "keep the optimiser's state in the host's memory")
    steps: int = option((8, 100, 200), "training steps", above_0=True)
    batch: int = option((3, 16, 16), "B: tasks in a step", above_0=True)
    k: int = option((3, 3, 3), "k: selections sampled for each task; with the null scheme they make k + 1 schemes")
    n: int = option((2, 4, 4), "n: rollouts of each scheme", above_0=True)
    turns: int = option((2, 3, 3), "T: turns of a rollout", above_0=True)
    s: int = option((3, 8, 8), "s: parallel summaries of a task's best triggering rollout")
    lr: float = option((2e-5, 5e-5, 1e-6), "eta: AdamW's learning rate")
    policy_tokens: int = option((900, 1500, 8192), "most tokens of a Policy reply", above_0=True)
    prompt_tokens: int = option((3500, 6500, 24576), "longest prompt; a rollout ends before a longer one", above_0=True)
    update_tokens: int = option((16384, 131072, 32768), "tokens of a micro-batch, with padding", above_0=True)
    recipe: str = option("davinci", "options that go together: a name in recipes.RECIPES, such as kevin")
    reward: str = option("davinci", "r, reward of a turn: a name in policy.REWARDS")
    baseline: str = option("leave-one-out", "what a return is compared with: a name in advantages.BASELINES")
    skills: bool = option(True, "select and write skills; without, all (k + 1) n rollouts see the bare task")
    bm25_only: bool = option(False, "every scheme has BM25's first 3 skills; no Selection role")
    no_verify: bool = option(False, "stage a task's first well-formed skill unverified; a summary with one has G = 1")
    freeze_selection: bool = option(False, "Selection is used but not trained")
    freeze_summary: bool = option(False, "Summary is used but not trained")

    gamma: float = setting(1.0, "gamma: discount, how much of the next turn's return counts for a turn", most=1)
    history: str = setting("all", "which earlier turns a prompt shows: a name in policy.HISTORIES")
    loss_mean: str = setting("reply", "what the loss is a mean over: a name in advantages.LOSS_MEANS")
    loss_scale: float = setting((30.0, 30.0, 1000.0), "c: divides the loss; about a tenth of a reply's tokens",
                                above_0=True)
    prs: bool = setting(True, "PRS (profiling-based rejection): mask correct turns whose own kernels do little")
    mrs: bool = setting(True, "MRS (mismatch rejection): mask replies on which sampler and trainer disagree")
    mask_void: bool = setting(True, "a turn that fails after a success is void: no loss, in no baseline")
    min_std: float = setting(1e-3, "skip a group whose rewards deviate less (Policy: a task, by its last turns)")
    cross_scheme: bool = setting(True, "cross-scheme advantages: divide a task's advantages by their mean magnitude")
    min_gain: float = setting(1.2, "g: factor over PyTorch and turn 1 that triggers summaries, or verifies a skill")
    selection_weight: float = setting(0.3, "lambda_sel: weight of Selection's advantages")
    summary_weight: float = setting(0.5, "lambda_sum: weight of Summary's advantages")
    clip_low: float = setting(0.2, "epsilon_low: the ratio rho is clipped at 1 - this", most=1)
    clip_high: float = setting(0.28, "epsilon_high: the ratio rho is clipped at 1 + this")
    grad_clip: float = setting(1.0, "largest norm of the gradient", above_0=True)
    temperature: float = setting(1.0, "of all sampling in training")
    oversample: int = setting((1, 1, 2), "this x B tasks are rolled out; the first B whose rewards vary train Policy",
                              above_0=True)
    selection_tokens: int = setting((250, 400, 1024), "most tokens of a Selection reply", above_0=True)
    summary_tokens: int = setting((600, 1000, 2048), "most tokens of a Summary reply", above_0=True)
    trials: int = setting((3, 5, 5), "correctness trials for each kernel, with fresh inputs", above_0=True)
    eval_samples: int = setting((1, 4, 8), "rollouts of each evaluation problem; a single one is greedy", above_0=True)
    save_every: int = setting((1, 5, 5), "steps between checkpoints; a killed run repeats those since", above_0=True)


if __name__ == "__main__":
    parse_early(Options, __doc__.split("\n")[0])  # --help and misspelt flags need no torch, whose import takes seconds

import torch

import policy
import selector
import summarizer
import tasks
from advantages import BASELINES, LOSS_MEANS, clipped_loss, credit, mismatched
from backbone import Sampling
from command.process import run_command
from fast import ranks, rescore
from recipes import RECIPES
from run import finish_run, finish_step, new_run, page_if_interrupted, resume_run, step_metrics, write_transcripts
from sandbox import Sandbox

TABLES = {"recipe": RECIPES, "reward": policy.REWARDS, "baseline": BASELINES, "history": policy.HISTORIES,
          "loss_mean": LOSS_MEANS}  # option -> the table whose names it takes
CONTRADICTIONS = [("--no-skills", "--bm25-only"), ("--no-skills", "--no-verify"), ("--no-skills", "--freeze-selection"),
                  ("--no-skills", "--freeze-summary"), ("--bm25-only", "--freeze-selection")]
CHANGEABLE = {"out", "resume", "steps", "eval_every", "save_every", "eval", "offload"}  # by --resume


def configure(given, large=False) -> Options:
    """All options: the command line overrides the recipe, and the recipe overrides the defaults. Raises UserError.

    given: the names and values of the command line, and device. large: has the model over a billion parameters?
    """
    size = 2 if large else int(given["device"] == "cuda")
    name = given.get("recipe", "davinci")
    check_name(Options, "recipe", name, RECIPES)
    recipe = {name: value[size] if isinstance(value, tuple) else value for name, value in RECIPES[name].items()}
    check_together(recipe | given, CONTRADICTIONS)
    options = complete(Options, recipe | given, size)
    for name, table in TABLES.items():
        check_name(Options, name, getattr(options, name), table)
    return options


# ----------------------------------------------------------------------------------------------------------------------
# The training step. `run` is the state of a run, of class run.Run. A *rank* is one process of a run on several GPUs;
# with a single process the functions of `ranks` return what they are given.

@dataclass
class Episode:
    """What one step does with one task."""

    task: tasks.Task
    selections: list[selector.Selection]  # k
    trajectories: list[policy.Trajectory] = field(default_factory=list)  # (k + 1) n
    summaries: list[summarizer.Summary] = field(default_factory=list)  # s, if a rollout triggers
    staged: summarizer.Proposal | None = None  # the new skill that joins the library after the update


def flat(lists) -> list:
    """The items of several lists, in one list."""
    return list(itertools.chain.from_iterable(lists))


def train(run, stream):
    """Repeat the paper's training step. stream: the training tasks, without end."""
    options = run.options
    k = options.k + 1 if options.bm25_only else options.k  # with --bm25-only there is no null scheme
    with run.progress:
        if not run.step0_done:
            finish_step(run, {"step": 0, "clock": run.clock, "library": len(run.library)} | evaluate_if_due(run, 0))
        while run.step < options.steps:
            run.seconds.clear()
            batch = list(itertools.islice(stream, options.batch * options.oversample))
            run.sandbox.prepare(batch)  # builds references in the background, while Selection answers
            with run.phase("select"):  # k selections for each task; the null scheme is the (k + 1)th
                episodes = select(run, batch, k, options.temperature)
            with run.phase("roll out"):  # n rollouts of each scheme, T turns, every kernel judged by the sandbox
                sampling = Sampling(options.policy_tokens, options.temperature, max_prompt_tokens=options.prompt_tokens)
                episodes = roll_out(run, episodes, options.k + 1, options.n, sampling, run.generator)
            with run.phase("score"):  # rewards of turns, then of selections
                score(run, episodes)
            with run.phase("summarise"):  # s summaries of each task's best triggering rollout
                summarise(run, episodes)
            with run.phase("verify"):  # run each new skill; the task's best that passes is staged
                verify(run, episodes)
            with run.phase("wait"):  # for other ranks; then each rank has all episodes
                episodes = ranks.gather(episodes)
            with run.phase("update"):  # advantages (credit keeps B tasks), joint loss, one step
                losses = update(run.model, run.optimizer, credit(episodes, options, run.generator), options)
            with run.phase("flush"):  # staged skills join the library only now
                flush(run, episodes)
            line = step_metrics(run, episodes, losses) | evaluate_if_due(run, run.step + 1)
            write_transcripts(run, f"step_{run.step + 1}", episodes)
            run.step += 1  # complete steps; until here this step's number was run.step + 1
            finish_step(run, line)
            run.progress.update()


def select(run, batch, k, temperature) -> list[Episode]:
    """One episode for each task, with k selections, or none with --no-skills (paper: BM25 recall, LLM reranking)."""
    options = run.options
    sampling = Sampling(options.selection_tokens, temperature, max_prompt_tokens=options.prompt_tokens)
    selections = ranks.distribute(batch, lambda part: selector.select(
        run.model, run.library, part, k if options.skills else 0, sampling, run.generator, options.bm25_only))
    return [Episode(task, several) for task, several in zip(batch, selections)]


def roll_out(run, episodes, schemes, n, sampling, generator) -> list[Episode]:
    """Fill in n rollouts of each of a task's schemes (paper: roll out).

    The first schemes are the task's selections. The others, up to the number `schemes`, are null schemes: one in
    training, all of them with --no-skills, so that the number of rollouts stays the same. With several ranks each rolls
    out some of the schemes. Then the complete episodes are dealt out in turn; `train` gathers them again.
    """
    jobs = []  # (task, skills) of each rollout: a task's rollouts together, scheme by scheme
    for episode in episodes:
        chosen = [selection.skills for selection in episode.selections]
        for skills in chosen + [()] * (schemes - len(chosen)):
            jobs += [(episode.task, skills)] * n  # equal jobs go to one rank, which computes their prompt once
    trajectories = ranks.distribute(jobs, lambda part: policy.rollout(
        run.model, run.sandbox, part, run.options.turns, sampling, generator, policy.HISTORIES[run.options.history]))
    for place, episode in enumerate(episodes):
        episode.trajectories = trajectories[place * schemes * n:(place + 1) * schemes * n]
        for number, trajectory in enumerate(episode.trajectories):
            trajectory.number = number
    return ranks.share(episodes)


def score(run, episodes):
    """Fill in the reward of every turn, and of every selection (paper: selection reward).

    G_sel(S) = mean over the rollouts i with the set of skills S of max_t r_it. So two selections of the same skills
    share their rollouts, and an empty selection shares those of the null scheme.
    """
    rollouts = flat(episode.trajectories for episode in episodes)
    policy.reward_turns(rollouts, policy.REWARDS[run.options.reward], run.options.mask_void)
    for episode in episodes:
        for selection in episode.selections:
            pooled = [t.best_reward for t in episode.trajectories if set(t.skills) == set(selection.skills)]
            selection.reward = sum(pooled) / len(pooled)


def summarise(run, episodes):
    """Fill in s summaries of each task's best triggering rollout, if it has one (paper: summary trigger)."""
    options = run.options
    if not options.skills:
        return
    winners = [summarizer.best_trigger(episode.trajectories, options.min_gain) for episode in episodes]
    sampling = Sampling(options.summary_tokens, options.temperature, max_prompt_tokens=options.prompt_tokens)
    answers = summarizer.propose(run.model, winners, options.s, run.library, sampling, run.generator)
    for episode, summaries in zip(episodes, answers):
        episode.summaries = summaries


def verify(run, episodes):
    """Verify the proposals, fill in the summaries' rewards, and stage each task's best passing proposal."""
    options = run.options
    sampling = Sampling(options.policy_tokens, max_prompt_tokens=options.prompt_tokens)
    if not options.no_verify:
        summarizer.verify(run.model, run.sandbox, [e.summaries for e in episodes], sampling, options.min_gain)
    for episode in episodes:
        for summary in episode.summaries:
            summary.reward = summarizer.summary_reward(summary, verified=not options.no_verify)
        episode.staged = summarizer.best_skill(episode.summaries)


def update(model, optimizer, chains, options) -> dict:
    """One optimiser step on the joint loss of all roles (paper: joint training).

        L = 1 / (c R) * sum over rows and their tokens of l_n

    A row is one reply. A chain is a rollout's rows in the order of turns, or one row of another role. l_n is the loss
    of token n (advantages.clipped_loss). c is loss_scale. R is the number of rows, or what else LOSS_MEANS counts. Rows
    without a gradient count in R, but are not computed. Gradients add up over micro-batches and ranks. Returns metrics:

        loss             L
        tokens_trained   tokens with a gradient
        mrs_masked       rows that MRS has masked
        ratio_off        largest |rho_n - 1|; about 1e-5 where sampler and trainer agree
        grad_norm        the gradient's norm before it is clipped; 0 where no token was trained
    """
    divisor = options.loss_scale * LOSS_MEANS[options.loss_mean](flat(chains))
    trained = []  # the chains, without the rows that need no gradient
    for chain in chains:
        trained.append([row for row in chain if row.advantage and not row.masked])  # masked so far: by PRS
    # Sorted by length and dealt out in turn, so that all ranks get about the same number of tokens.
    own = ranks.share(sorted(filter(None, trained), key=lambda chain: len(chain[-1].completion.prompt_ids)))
    loss, ratio_off = 0.0, 0.0
    model.release()  # the sampler's cache: activations need its memory
    for micro_batch in ranks.equally_many(list(rescore.micro_batches(own, options.update_tokens))):
        part, off = micro_batch_loss(model, micro_batch, options)
        (part / divisor).backward()  # this micro-batch's part of L adds to the gradients of those before it
        loss += part.detach() / divisor
        ratio_off = max(ratio_off, off)
    # micro_batch_loss has masked the rows that MRS rejects.
    kept = [len(row.completion.token_ids) for row in flat(own) if not row.masked]
    metrics = ranks.summed({"loss": float(loss), "tokens_trained": sum(kept), "mrs_masked": len(flat(own)) - len(kept)})
    metrics |= {"ratio_off": max(ranks.each(ratio_off)), "grad_norm": 0.0}
    if metrics["tokens_trained"]:
        norm = ranks.clip_gradients(optimizer, model.model.parameters(), options.grad_clip)
        metrics["grad_norm"] = norm.item()
        if torch.isfinite(norm):  # else skip the step: a NaN gradient would destroy every weight
            optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    model.release()  # what the update has used, too: sampling and the sandbox need it
    return metrics


def micro_batch_loss(model, chains, options):
    """Mask the rows that MRS rejects, and compute the loss of one micro-batch of M tokens.

    Returns (sum of l_n with gradients, largest |rho_n - 1|), two scalars. chains is as in `update`, and empty on a rank
    that has no work left.
    """
    if not chains:
        return 0 * model.logprobs([([0], [0])])[0].sum(), 0.0  # so that this rank has a backward pass, too
    rows = flat(chains)
    # Only tokens that the model sampled are scored. The model did not write the sandbox's feedback between them.
    replies = [(row.completion.prompt_ids, row.completion.token_ids) for row in rows]
    new = torch.cat(model.logprobs(replies, options.temperature or 1.0))  # (M,)
    old = torch.cat([torch.tensor(row.completion.logprobs) for row in rows])  # (M,)
    sizes = [len(row.completion.token_ids) for row in rows]
    drift = new.detach().cpu() - old  # (M,), log rho_n
    drifts = iter(drift.split(sizes))  # one tensor for each row, in order
    for chain in chains if options.mrs else ():
        for row, rejected in zip(chain, mismatched([next(drifts) for _ in chain])):
            row.masked = "mrs" if rejected else row.masked
    advantages = torch.tensor([0.0 if row.masked else row.advantage for row in rows])  # (rows,)
    advantages = advantages.repeat_interleave(torch.tensor(sizes))  # (M,)
    loss = clipped_loss(new, old.to(new.device), advantages.to(new.device), options.clip_low, options.clip_high)  # ()
    return loss, (drift.exp() - 1).abs().max().item()


def flush(run, episodes):
    """Staged skills join the library, the fastest first (paper: flush). Of equal ones only the fastest joins."""
    joined = set()  # keys (summarizer.identity) of the skills that have joined in this step
    staged = [episode for episode in episodes if episode.staged]
    for episode in sorted(staged, key=lambda episode: episode.staged.skill.verify_speedup or 0, reverse=True):
        keys = summarizer.identity(episode.staged.skill)
        if keys.isdisjoint(joined):
            episode.staged.joined = run.library.add(episode.staged.skill).name  # made unique by the library
        else:
            episode.staged = None
        joined |= keys


def evaluate_if_due(run, step) -> dict:
    """Metrics of the evaluations that are due after `step` complete steps; 0 is the model before training.

    eval_*: the built-in problems, before and after training. with_*, without_*: those on redundant operators, with and
    without the library. They come before and after training, and every --eval-every steps.
    """
    options, line = run.options, {}
    if options.eval == "none":
        return {}
    ends = step in (0, options.steps)
    if ends and options.eval == "all":
        line |= evaluate(run, "eval", tasks.builtin_tasks(device=options.device), ["eval"], step)
    if ends or (options.eval_every and step % options.eval_every == 0):
        line |= evaluate(run, "redundant", tasks.redundant_tasks(options.device), ["with", "without"], step)
    return line


def evaluate(run, name, problems, schemes, step) -> dict:
    """Metrics of these problems. schemes: for each scheme the prefix of its metrics' names.

    The first scheme is one greedy selection, the second the null scheme. A rollout has T turns, as in training (paper).
    """
    options, line = run.options, {}
    # Greedy selection draws nothing, rollouts draw from this generator: training goes on as without an evaluation.
    generator = torch.Generator(run.model.device).manual_seed((options.seed * 1_000_003 + step) % 2**63)
    sampling = Sampling(options.policy_tokens, 0.0 if options.eval_samples == 1 else 1.0, top_p=0.95,
                        max_prompt_tokens=options.prompt_tokens)
    with run.phase("evaluate"):
        episodes = select(run, problems, 1, 0.0)
        episodes = roll_out(run, episodes, len(schemes), options.eval_samples, sampling, generator)
        score(run, episodes)
        episodes = ranks.gather(episodes)
    write_transcripts(run, f"{name}_{step}", episodes)
    for number, scheme in enumerate(schemes):
        first = number * options.eval_samples  # of this scheme's rollouts
        rollouts = flat(episode.trajectories[first:first + options.eval_samples] for episode in episodes)
        for metric, value in policy.rollout_metrics(rollouts).items():
            line[f"{scheme}_{metric}"] = value
    return line


def main(argv=None) -> int:
    """Train, and show what was learnt. Returns the status of the process. Raises UserError for bad input."""
    given = parse(Options, argv, __doc__.split("\n")[0])
    run = resume_run(given, configure, CHANGEABLE) if given.get("resume") else new_run(given, configure)
    with page_if_interrupted(run.out, f"python reinforce.py --out {run.out} --resume"), Sandbox(
            run.options.device, trials=run.options.trials, tasks=8, secret=run.secret) as run.sandbox:
        train(run, run.stream)
    finish_run(run)
    return 0


if __name__ == "__main__":
    run_command(ranks.joined(main))

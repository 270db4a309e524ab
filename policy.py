"""The Policy role: how a task, skills and feedback become a rollout of several turns (paper: multi-turn rollouts).

One rollout is one coroutine, `play`, which reads from top to bottom as a single conversation: prompt, reply, kernel,
verdict, next prompt. It yields what it needs answered, a Prompt or a Kernel, and is sent the answer. (The parameter
`generator` is always a torch.Generator, the source of random numbers.)

    play ---- Prompt ----> Backbone.sampler ---- Completion ----> play
    play ---- Kernel ----> Sandbox.submit ------- Verdict ------> play

`rollout` plays many of them in waves: the model samples a reply to each prompt, then the sandbox judges each kernel.
A Trajectory is the record of one rollout. `reward_turns` fills in the reward of each turn. `rollout_metrics` computes
what a run logs about its rollouts.

Four tables hold functions that can be exchanged. VERDICT_FORMS says how a prompt writes a verdict, HISTORIES what a
later prompt shows in training, STRATEGIES what it shows at test time, and REWARDS how a turn is rewarded. The entries
here are the paper's; recipes.py adds others. This file knows nothing of retrieval, storage or advantages.
"""

import contextlib
import functools
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from backbone import Completion
from chat.calls import extract_code
from chat.prompts import PROMPTS, fill, role_messages, skill_text
from command.progress import count, expect
from sandbox import Verdict, feedback, verdict_from_json
from skills import Skill
from tasks import Task, TaskError


class Prompt(NamedTuple):
    """What a play yields when it needs the model's reply to these token ids."""

    ids: list[int]


class Kernel(NamedTuple):
    """What a play yields when it needs the sandbox's verdict on a candidate: one file, of any number of kernels."""

    task: Task
    code: str


@dataclass
class Turn:
    """One attempt: the policy's reply and the sandbox's verdict."""

    completion: Completion  # its token_ids are empty when the prompt was too long to be answered
    code: str | None  # the candidate: the reply's code block that defines ModelNew, or None
    verdict: Verdict
    advice: str = ""  # text that a Strategy (below) adds to the feedback in the next prompt
    advice_tokens: int = 0  # tokens that the model sampled for it
    reward: float | None = None  # filled in by reward_turns
    advantage: float | None = None  # filled in by advantages.credit; None for a void turn, which is in no group
    masked: str | None = None  # why it is left out of the loss: "void", "prs" or "group"; MRS masks an advantages.Row


@dataclass
class Trajectory:
    """The record of one rollout: up to T turns on a task, with a fixed set of skills. It has at least one turn."""

    task: Task
    skills: tuple[Skill, ...]
    turns: list[Turn] = field(default_factory=list)
    number: int = 0  # its place among its task's rollouts, filled in by reinforce.roll_out

    @property
    def best_reward(self) -> float:
        return max(turn.reward for turn in self.turns)

    @property
    def tokens(self) -> int:
        """Number of tokens that the model sampled for it, advice included."""
        return sum(len(turn.completion.token_ids) + turn.advice_tokens for turn in self.turns)


def policy_messages(task, skills) -> list[dict]:
    """The first turn's prompt: the task, and the full text of the chosen skills.

    The skills end the system message, or stand where `policy_user` in another file of prompts has `__skills__`.
    """
    block = "\n\n".join(skill_text("skill", skill) for skill in skills).strip()
    if block:
        block = PROMPTS["skill_injection_header"] + block + PROMPTS["skill_injection_footer"]
    messages = role_messages("policy", task_description=task.source.strip(), skills=block + "\n\n" if block else "")
    if "__skills__" not in PROMPTS["policy_user"]:  # as in chat/prompts.yaml
        messages[0]["content"] += block
    return messages


def next_messages(messages, reply, verdict, advice="") -> list[dict]:
    """The following turn's prompt: the history, the reply just given, and the sandbox's feedback on it."""
    answer = fill("feedback", feedback=verdict_text(verdict)) + (f"\n{advice}" if advice else "")
    return messages + [{"role": "assistant", "content": reply}, {"role": "user", "content": answer}]


VERDICT_FORMS = {"text": feedback}  # name in the prompts -> how a verdict is written; recipes.py adds another


def verdict_text(verdict) -> str:
    """A verdict as the next prompt shows it."""
    return VERDICT_FORMS[PROMPTS["verdict_form"]](verdict)


# ----------------------------------------------------------------------------------------------------------------------
# Strategies: how a rollout goes on after its first attempt

def show_all(turns, generator=None) -> list[Turn]:
    """All attempts (the paper's training, and its evaluation with 3 turns)."""
    return turns


def show_none(turns, generator=None) -> list[Turn]:
    """No attempts: each one answers the first prompt (parallel sampling)."""
    return []


def best_window(turns, generator=None, keep=4) -> list[Turn]:
    """The `keep` consecutive attempts of the greatest summed reward, the first on ties (paper: sequential scaling).

    Their reward is that of the release's evaluation, without coverage: 0.5 correct + 0.5 correct min(speedup, 3).
    """
    rewards = [0.5 + 0.5 * min(turn.verdict.speedup, 3.0) if turn.verdict.correct else 0.0 for turn in turns]
    starts = range(max(1, len(turns) - keep + 1))
    start = max(starts, key=lambda i: sum(rewards[i:i + keep]))  # of equal ones max takes the first
    return turns[start:start + keep]


def as_sampled(reply) -> str:
    """An earlier reply is shown as the model wrote it."""
    return reply


def no_advice(model, trajectory, longest):
    """Ask the model nothing between a verdict and the next prompt: yield nothing."""
    yield from ()


@dataclass(frozen=True)
class Strategy:
    """How a rollout goes on after its first attempt. The defaults are the paper's training."""

    show: Callable = show_all  # (turns so far, torch.Generator) -> those that the next prompt shows, in order
    retell: Callable = as_sampled  # an earlier reply's text -> the text that later prompts show
    advise: Callable = no_advice  # (model, trajectory, longest prompt): a coroutine like `play`. It may yield Prompts
    #                               and set the last turn's `advice`
    same_prompts: bool = False  # can two attempts have the same prompt? If so, bench.py never samples greedily
    least_turns: int = 1  # the least number of turns at which the strategy has any effect


HISTORIES = {"all": Strategy()}  # in training: --set history=NAME
STRATEGIES = {  # in bench.py: --strategy NAME
    "parallel": Strategy(show=show_none, same_prompts=True),  # independent attempts
    "serial": Strategy(show=best_window)}  # the paper's: show the best 4 consecutive attempts and their verdicts


# ----------------------------------------------------------------------------------------------------------------------
# One rollout, and many together

print_once = functools.cache(print)  # prints each text only the first time


class Limits(NamedTuple):
    """When a rollout ends."""

    turns: int  # T
    prompt_tokens: float = math.inf  # no reply is sampled to a longer prompt
    tokens: float = math.inf  # a rollout that has sampled so many gets no further turn


def play(model, sandbox, trajectory, prompt, limits, strategy, generator):
    """One rollout as a coroutine, which fills `trajectory.turns`. prompt: token ids of the first one.

    It yields a Prompt and is sent the Completion, or it yields a Kernel and is sent the Verdict. It goes on after a
    correct kernel, since a later turn may be faster. If the first prompt is too long, the rollout is one turn that says
    so. If a later prompt is too long, the rollout ends. generator: the torch.Generator of strategies that draw.
    """
    if len(prompt) > limits.prompt_tokens:
        verdict = not_judged(sandbox, f"the prompt has {len(prompt)} tokens, more than {limits.prompt_tokens}")
        trajectory.turns.append(Turn(Completion(prompt, [], [], "", False), None, verdict))
    while len(prompt) <= limits.prompt_tokens:
        reply = yield Prompt(prompt)
        code = extract_code(reply.text)
        if code:
            verdict = yield Kernel(trajectory.task, code)
        else:
            cut = "" if reply.finished else f" (it was cut off after {len(reply.token_ids)} tokens)"
            verdict = not_judged(sandbox, "the reply has no code block that defines ModelNew" + cut)
        trajectory.turns.append(Turn(reply, code, verdict))
        if len(trajectory.turns) >= limits.turns or trajectory.tokens >= limits.tokens:
            return
        yield from strategy.advise(model, trajectory, limits.prompt_tokens)
        shown = strategy.show(trajectory.turns, generator)
        prompt = next_prompt(model, trajectory, shown, strategy)


def next_prompt(model, trajectory, shown, strategy) -> list[int]:
    """Token ids of the next prompt: the first prompt's messages, and the attempts that are shown.

    If all attempts are shown as they were sampled, the prompt begins with the tokens of the last prompt and its reply.
    The update then computes all turns of the rollout in one forward pass. If `retell` has changed the last reply,
    next_ids encodes all messages anew.
    """
    messages = policy_messages(trajectory.task, trajectory.skills)
    for turn in shown:
        messages = next_messages(messages, strategy.retell(turn.completion.text), turn.verdict, turn.advice)
    if len(shown) == len(trajectory.turns):
        return model.next_ids(shown[-1].completion, messages)
    return model.chat_ids(messages)


def rollout(model, sandbox, jobs, turns, sampling, generator=None, strategy=Strategy()):
    """A Trajectory for each job, in their order (paper: T = 3 turns, temperature 1.0). A job is a (task, skills) pair.

    Each rollout has up to `turns` turns. It ends earlier if its next prompt is too long. If a job's first prompt has
    more than sampling.max_prompt_tokens, its one turn says so. If a task cannot be run, only its own rollouts fail.

    sampling      a backbone.Sampling
    generator     a torch.Generator for all sampling; an equal state gives equal rollouts
    """
    limits = Limits(turns, sampling.max_prompt_tokens or math.inf)
    trajectories, plays = begin_rollouts(model, sandbox, jobs, limits, generator, strategy)
    with model.sampler(sampling, generator) as sampler:
        for _ in play_in_waves(sampler, sandbox, plays):
            pass
    return trajectories


def begin_rollouts(model, sandbox, jobs, limits, generator=None, strategy=Strategy()) -> tuple[list, list]:
    """(an empty Trajectory for each job, the `play` of each, which will fill it)."""
    expect("kernels judged", len(jobs) * limits.turns)
    # All rollouts of a scheme begin with the same prompt.
    first_prompt = functools.cache(lambda task, skills: model.chat_ids(policy_messages(task, skills)))
    trajectories, plays = [], []
    for task, skills in jobs:
        trajectory = Trajectory(task, tuple(skills))
        trajectories.append(trajectory)
        prompt = first_prompt(task, trajectory.skills)
        plays.append(play(model, sandbox, trajectory, prompt, limits, strategy, generator))
    return trajectories, plays


def play_in_waves(sampler, sandbox, plays):
    """Play all rollouts to their end, in waves: sample a reply to each prompt, then judge each kernel, and again.

    Yields the number of each play when it has ended. With a GPU a kernel is submitted as soon as its reply ends: the
    sandbox records and compiles it while other replies are still being sampled. A wave does not wait for its last
    verdicts, an eighth of them: those plays join a later wave. On a CPU the model and the sandbox need the same cores.
    So kernels wait for the wave's end, and the next wave for all verdicts.
    """
    requests = {}  # number of a play -> the Prompt or Kernel that it has yielded
    futures = {}  # number of a play -> the verdict on its kernel, while the sandbox judges it
    on_gpu = sandbox.device != "cpu"  # then sampling and compiling use different processors

    def resume(number, answer=None):
        """Send a play its answer. It runs on to its next request, or to its end."""
        requests.pop(number, None)
        with contextlib.suppress(StopIteration):  # it has ended
            requests[number] = plays[number].send(answer)

    def submit(number):
        if isinstance(requests.get(number), Kernel):
            futures[number] = sandbox.submit([requests[number]])[0]  # a Kernel is a (task, code) pair
            futures[number].add_done_callback(lambda _: count("kernels judged"))

    for number in range(len(plays)):
        resume(number)  # to its first request: a Prompt, or in a benchmark that is `continued` perhaps a Kernel
        if number not in requests:
            yield number
        submit(number)
    while requests:  # each is a Prompt, or a Kernel that has been submitted
        prompts = {number: requests[number].ids for number in sorted(requests) if number not in futures}
        with sandbox.sampling():  # the model has the GPU: no kernel is being timed
            for number, reply in sampler.write(prompts):
                resume(number, reply)
                if number not in requests:
                    yield number
                elif on_gpu:
                    submit(number)
        if not on_gpu:
            for number in prompts:
                submit(number)
        for number in judged(sandbox, futures, most_late=len(requests) // 8 if on_gpu else 0):
            resume(number, verdict_of(sandbox, futures.pop(number)))
            if number not in requests:
                yield number


def judged(sandbox, futures, most_late):
    """Yields the number of each play whose verdict is to be sent now, until at most so many are left in `futures`.

    If all are to be sent, they come in the order of the plays, so that a seed gives the same run.
    """
    while len(futures) > most_late:
        ready = [number for number in sorted(futures) if not most_late or futures[number].done()]
        yield from ready
        if not ready:
            sandbox.wait(futures.values())


def continued(play, known, keep):
    """The same play in a benchmark that was interrupted (bench.py). It asks only for answers that are not yet known.

    known: records of the first answers, in their order. keep(record) is called for each further answer. A record can be
    written as JSON. It has no prompt, since the play itself makes the prompts.
    """
    records, answer = iter(known), None
    with contextlib.suppress(StopIteration):  # the play has ended
        while True:
            request = play.send(answer)
            record = next(records, None)
            if record is None:
                answer = yield request
                record = asdict(answer)
                for name in ("prompt_ids", "logprobs"):
                    record.pop(name, None)
                keep(record)
            elif isinstance(request, Prompt):
                answer = Completion(request.ids, logprobs=[], **record)
            else:
                answer = verdict_from_json(record)


def score_pairs(sandbox, pairs) -> list[Verdict]:
    """Verdicts for (task, code) pairs, in their order. If a task cannot be used, only its own candidates fail."""
    return [verdict_of(sandbox, future) for future in sandbox.submit(pairs)]


def verdict_of(sandbox, future) -> Verdict:
    """Wait for a verdict. If the task cannot be used, the verdict says so, and stderr once for each task."""
    sandbox.wait([future])
    try:
        return future.result()
    except TaskError as error:
        print_once(f"unusable task: {error}", file=sys.stderr)
        return not_judged(sandbox, f"unusable task: {error}")


def not_judged(sandbox, error) -> Verdict:
    """The verdict on a turn that the sandbox has not judged."""
    return Verdict(clock="modelled" if sandbox.device == "cpu" else "measured", error=error)


# ----------------------------------------------------------------------------------------------------------------------
# Reward of one turn (paper: reward)

SPEEDUP_CAP = 6.0  # a larger speedup earns no more


def davinci_reward(verdict, cap=SPEEDUP_CAP) -> float:
    """r = 0.5 correct + 0.5 correct clip(speedup, 0, 6) + 0.5 correct coverage.

    >>> davinci_reward(Verdict(correct=True, speedup=8.0, coverage=0.5))
    3.75
    """
    if not verdict.correct:
        return 0.0
    return 0.5 + 0.5 * min(max(verdict.speedup, 0.0), cap) + 0.5 * (verdict.coverage or 0.0)


REWARDS = {"davinci": davinci_reward}  # name -> function of a Verdict: the reward r of its turn


def reward_turns(trajectories, reward, mask_void=True):
    """Fill in the reward of every turn. reward: a function of REWARDS.

    With mask_void a turn that fails after a success is void. In symbols: if r_t <= 0 and some earlier r_u > 0, turn t
    is void and r_t becomes 0. It is in no group and has no loss, so trying to improve a working kernel costs nothing.
    """
    for trajectory in trajectories:
        best = 0.0  # reward of the turns so far
        for turn in trajectory.turns:
            turn.reward = reward(turn.verdict)
            if mask_void and turn.reward <= 0 < best:
                turn.masked, turn.reward = "void", 0.0
            best = max(best, turn.reward)


# ----------------------------------------------------------------------------------------------------------------------
# Metrics of rollouts

def mean(values) -> float | None:
    """The mean of an iterable of numbers; None if there are none.

    >>> mean([1, 2]), mean([])
    (1.5, None)
    """
    values = list(values)
    return sum(values) / len(values) if values else None


def rollout_metrics(trajectories) -> dict:
    """What metrics.jsonl says of a step's rollouts. An evaluation's have eval_, with_ or without_ before each name.

    A rollout counts by its fastest correct turn. A rollout without a correct turn has speedup 0, so it passes no
    threshold. A mean over nothing is None.

        reward_best     mean over rollouts of the best turn's reward
        reward_first    the same of the first turn, which has only the task and the skills to go by
        correct         share of rollouts with a correct turn
        fast_1          Fast_1: share of rollouts that are correct and faster than PyTorch
        fast_1.2        Fast_1.2: the same, more than 1.2x as fast
        speedup         mean speedup of the rollouts that have a correct turn
        correct_first   share of rollouts whose first turn is correct
        coverage        mean over correct turns of Verdict.coverage, the share of time in own kernels that matter
        cheats          share of turns whose kernel was rejected as a cheat
        unfinished      share of turns whose reply was cut off at the limit of tokens
    """
    speedups, turns = [], []  # speedups: of each rollout its fastest correct turn's, or 0
    for trajectory in trajectories:
        correct = [turn.verdict.speedup for turn in trajectory.turns if turn.verdict.correct]
        speedups.append(max(correct, default=0.0))
        turns += trajectory.turns
    return {
        "reward_best": mean(trajectory.best_reward for trajectory in trajectories),
        "reward_first": mean(trajectory.turns[0].reward for trajectory in trajectories),
        "correct": mean(speedup > 0 for speedup in speedups),
        "fast_1": mean(speedup > 1 for speedup in speedups),
        "fast_1.2": mean(speedup > 1.2 for speedup in speedups),
        "speedup": mean(filter(None, speedups)),
        "correct_first": mean(trajectory.turns[0].verdict.correct for trajectory in trajectories),
        "coverage": mean(turn.verdict.coverage or 0.0 for turn in turns if turn.verdict.correct),
        "cheats": mean(bool(turn.verdict.rejected) for turn in turns),
        "unfinished": mean(bool(turn.completion.token_ids) and not turn.completion.finished for turn in turns),
    }

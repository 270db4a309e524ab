"""The Policy role: how a task, skill text and feedback become a multi-turn rollout (paper: multi-turn rollouts).

One rollout is one generator, `play`, which reads from top to bottom as a single conversation: prompt, kernel, verdict,
feedback, next prompt. What it yields says by its type what it wants: a Prompt or a Kernel.

    play ---- Prompt ----> Backbone.sampler ---- Completion ----> play
    play ---- Kernel ----> Sandbox.submit ------- Verdict ------> play

`rollout` plays many of them in waves: the model samples a reply to each prompt, then the sandbox judges each kernel.

How a rollout goes on after its first attempt is a `Strategy`: which earlier attempts the next prompt shows, and what
names the point to improve. The default, the paper's, shows all attempts; bench.py lists the others by name.

`reward_turns` then fills in what each turn has earned, and `rollout_metrics` computes what a run logs of its rollouts.
This file knows nothing of retrieval, storage or advantages.
"""

import ast
import contextlib
import functools
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from backbone import Completion, extract_code
from chat.calls import after_thoughts
from chat.prompts import PROMPTS, fill, role_messages, skill_text
from judge.verdict import printable
from command.numbers import mean
from sandbox import Verdict, feedback
from skills import Skill
from tasks import Task, TaskError


class Prompt(NamedTuple):
    """What a play yields when it wants the model's reply: token ids, which the engine samples a reply to."""

    ids: list[int]


class Kernel(NamedTuple):
    """What a play yields when it wants the sandbox's verdict."""

    task: Task
    code: str


@dataclass
class Turn:
    """One attempt: the policy's reply and the sandbox's verdict."""

    completion: Completion  # its token_ids are empty when the prompt was too long to be answered
    code: str | None  # the extracted ModelNew source; None when the reply holds none
    verdict: Verdict
    advice: str = ""  # a judge's comment on the verdict; in the next prompt it follows the feedback
    advice_tokens: int = 0  # tokens that the model sampled for it
    repeats: bool = False  # an earlier attempt had the same kernel; this one was not judged
    reward: float | None = None  # filled in by reward_turns
    advantage: float | None = None  # filled in by reinforce.py; stays None for a turn that belongs to no group
    masked: str | None = None  # why it is left out of the loss: "void", "prs" or "group"; MRS masks a reinforce.Row


@dataclass
class Trajectory:
    """One rollout of up to T turns on a task with a fixed set of skills. It always has a first turn."""

    task: Task
    skills: tuple[Skill, ...]
    turns: list[Turn] = field(default_factory=list)
    number: int = 0  # its place among its task's rollouts, filled in by reinforce.roll_out

    @property
    def best_reward(self) -> float:
        return max(turn.reward for turn in self.turns)

    @property
    def tokens(self) -> int:
        """Number of tokens that the model sampled for it, a judge's included."""
        return sum(len(turn.completion.token_ids) + turn.advice_tokens for turn in self.turns)


def policy_messages(task, skills, verifies=False) -> list[dict]:
    """The first turn's prompt: the full text of the chosen skills in the system message, the task in the user's.

    verifies: the last skill is a proposal, which this attempt verifies; the release writes it in another form.
    """
    chosen = skills[:-1] if verifies else skills
    texts = ["\n\n".join(skill_text("skill", skill) for skill in chosen)] if chosen else []
    if verifies:
        texts.append(skill_text("skill_to_verify", skills[-1]))
    block = PROMPTS["before_skill_to_verify"].join(texts).strip()
    if block:
        block = PROMPTS["skill_injection_header"] + block + PROMPTS["skill_injection_footer"]
    messages = role_messages("policy", task_description=task.source.strip(), skills=block + "\n\n" if block else "")
    if "__skills__" not in PROMPTS["policy_user"]:  # it has no place for them: they follow the system message
        messages[0]["content"] += block
    return messages


def next_messages(messages, reply, verdict, advice="") -> list[dict]:
    """The following turn's prompt: the history, the reply just given, and the sandbox's feedback on it."""
    answer = fill("feedback", feedback=verdict_text(verdict)) + (f"\n{advice}" if advice else "")
    return messages + [{"role": "assistant", "content": reply}, {"role": "user", "content": answer}]


def verdict_text(verdict) -> str:
    """A verdict as the next prompt shows it: in about 80 words, or as JSON (`verdict_form` of the prompts)."""
    return json_feedback(verdict, davinci_reward(verdict)) if PROMPTS["verdict_form"] == "json" else feedback(verdict)


def json_feedback(verdict, reward) -> str:
    """A verdict as the release shows it (vllm_async_engine.py): its server's answer, and what reward_client.py adds.

    The server's client gets a whole answer (EvaluationResponse) for a kernel that compiles only. For another, and for a
    reply without ModelNew, we have fewer keys, as it has; an excerpt tells the two apart, as it tells an error in
    forward from a wrong output. A Verdict holds no ids, dates and device, and no CPU times of the kernels.
    """
    error = "\n".join(filter(None, [printable(verdict.rejected or verdict.error or ""), verdict.excerpt])) or None
    added = {"reward": reward, "speedup": verdict.speedup or 0.0, "success": verdict.correct,
             "correctness": verdict.correct, "compiled": verdict.compiled and not verdict.rejected}
    if not verdict.compiled and not verdict.rejected:
        server = {"status": "failed", "error_message": error} if verdict.excerpt else {}
        return json.dumps(server | added | {"error": error}, ensure_ascii=False, indent=2)
    code = "RUNTIME_ERROR" if verdict.excerpt else "CORRECTNESS_ERROR"
    kernels, facts = json_profile(verdict)
    server = {"status": "completed", "compiled": True, "correctness": verdict.correct,
              "decoy_kernel": bool(verdict.rejected), "reference_runtime": verdict.reference_ms or -1.0,
              "kernel_runtime": verdict.candidate_ms or -1.0, "speedup": 0.0, "metadata": kernels,
              "error_message": error, "error_code": None if verdict.correct or verdict.rejected else code}
    if verdict.rejected:
        added |= {"error": "Reward hacking: Decoy kernel detected", "score": reward}
    else:
        added |= {"score": reward, "profiling": None} | facts
    return json.dumps(server | added, ensure_ascii=False, indent=2)


def json_profile(verdict) -> tuple[dict, dict]:
    """(the kernels, their numbers and times) of a correct verdict, as `json_feedback` has them, in microseconds."""
    profile = verdict.profile if verdict.correct else []
    total = 1000 * verdict.candidate_ms if verdict.correct else 0.0
    table = [{"name": printable(entry.name), "cuda_time_us": entry.share * total} for entry in profile]
    own = [entry.share * total for entry in profile if entry.own]
    facts = {"num_custom_kernel": len(own), "num_total_kernels": len(table),
             "custom_kernel_cuda_time_in_profiling_us": sum(own), "total_kernel_run_time_in_profiling_us": total}
    profiling = {"kernels": table, "kernel_count": len(table), "total_cuda_time_us": total}
    return {"profiling": profiling} if verdict.correct else {}, facts


# ----------------------------------------------------------------------------------------------------------------------
# Strategies: what the next attempt sees of those before it

def everything(turns, generator=None) -> list[Turn]:
    """All attempts (the paper's training and evaluation)."""
    return turns


def nothing(turns, generator=None) -> list[Turn]:
    """None: every attempt answers the first prompt (parallel sampling)."""
    return []


def latest(turns, generator=None) -> list[Turn]:
    """The last attempt alone (CudaForge)."""
    return turns[-1:]


def best_window(turns, generator=None, keep=4) -> list[Turn]:
    """The `keep` consecutive attempts of the greatest summed reward, the first on ties (paper: sequential scaling).

    The reward is that of the release's evaluation: 0.5 correct + 0.5 min(speedup, 3), without coverage.
    """
    rewards = [0.5 + 0.5 * min(turn.verdict.speedup, 3.0) if turn.verdict.correct else 0.0 for turn in turns]
    starts = range(max(1, len(turns) - keep + 1))
    start = max(starts, key=lambda i: (sum(rewards[i:i + keep]), -i))
    return turns[start:start + keep]


def ranked_parent(turns, generator=None, first=4, population=5) -> list[Turn]:
    """One of the N <= `population` fastest correct attempts, the r-th of them, from 0, with a chance in proportion to
    1 / (r + N) (EvoEngineer: evotoolkit's core/method.py).

    The `first` attempts see nothing: they are the first generation. Correctness is the gate: as long as no attempt is
    correct, the next one starts anew, too.
    """
    parents = sorted((turn for turn in turns if turn.verdict.correct), key=lambda turn: -turn.verdict.speedup)
    parents = parents[:population]
    if len(turns) < first or not parents:
        return []
    chances = 1 / torch.arange(len(parents), 2.0 * len(parents), device=generator.device if generator else "cpu")
    return [parents[torch.multinomial(chances, 1, generator=generator)]]


@dataclass(frozen=True)
class Strategy:
    """How a rollout goes on after its first attempt.

    The paper's training and evaluation: the default. The names of other strategies are in bench.py, with the systems
    that they come from; a new one is a row there.
    """

    show: Callable = everything  # (turns so far, generator) -> those that the next prompt shows, in their order
    condense: bool = False  # show earlier replies without their thoughts (Kevin)
    judge: bool = False  # after each verdict the model itself names one bottleneck (CudaForge)
    only_new: bool = False  # a kernel that an earlier attempt has written is not judged again (EvoEngineer)
    least_turns: int = 1  # with fewer turns no attempt would see an earlier one
    verifies: bool = False  # the last skill is a proposal, which the first attempt verifies (summarizer.verify)


HISTORIES = {"all": Strategy(), "condensed": Strategy(condense=True)}  # of training


def condensed(reply) -> str:
    """A reply without its thoughts: what it says before its kernel, at most 60 words, and the kernel (Kevin).

    >>> condensed("<think>Long.</think>Plan: fuse.\\n```python\\nclass ModelNew:\\n    pass\\n```\\nDone.")
    'Plan: fuse.\\n\\n```python\\nclass ModelNew:\\n    pass\\n```'
    """
    summary = " ".join(after_thoughts(reply).split("```")[0].split()[:60])
    code = extract_code(reply)
    return summary + (f"\n\n```python\n{code}```" if code else "")


def normalised(code) -> str:
    """The same text for kernels that differ in comments, blank lines and layout only."""
    try:
        return ast.unparse(ast.parse(code))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # MemoryError: of thousands of nested operators
        return " ".join(code.split())


JUDGE = ("You judge GPU kernels. Read the task, a kernel for it, and its verdict and profile. Answer with one line: "
         "the single worst problem or bottleneck, and how to remove it.")


def judge_messages(turn, task) -> list[dict]:
    """The prompt with which the model judges a turn."""
    user = f"```python\n{task.source.strip()}\n```\n\n```python\n{turn.code or ''}\n```\n\n{feedback(turn.verdict)}"
    return [{"role": "system", "content": JUDGE}, {"role": "user", "content": user}]


# ----------------------------------------------------------------------------------------------------------------------
# One rollout, and many together

print_once = functools.cache(print)


def play(model, sandbox, trajectory, prompt, max_prompt_tokens, turns, strategy, budget):
    """One rollout as a generator, which fills `trajectory.turns`. prompt: token ids of the first one.

    It yields a Prompt and is sent the Completion, or it yields a Kernel and is sent the Verdict. The rollout ends after
    `turns` turns, not counting repetitions, or when `budget` tokens were sampled, or when the next prompt would have
    more than max_prompt_tokens. A correct kernel does not end it: a later turn may be faster.
    """
    if len(prompt) > max_prompt_tokens:
        verdict = not_judged(sandbox, f"the prompt has {len(prompt)} tokens, more than {max_prompt_tokens}")
        trajectory.turns.append(Turn(Completion(prompt, [], [], "", False), None, verdict))
        return
    earlier = set()  # kernels of earlier turns
    while len(prompt) <= max_prompt_tokens:
        reply = yield Prompt(prompt)
        code = extract_code(reply.text)
        repeats = bool(code and strategy.only_new and normalised(code) in earlier)
        if repeats:
            verdict = not_judged(sandbox, "an earlier attempt had the same kernel")
        elif code:
            verdict = yield Kernel(trajectory.task, code)
            if strategy.only_new:
                earlier.add(normalised(code))
        else:
            cut = "" if reply.finished else f" (it was cut off after {len(reply.token_ids)} tokens)"
            verdict = not_judged(sandbox, "the reply has no code block that defines ModelNew" + cut)
        turn = Turn(reply, code, verdict, repeats=repeats)
        trajectory.turns.append(turn)
        if sum(not t.repeats for t in trajectory.turns) >= turns or trajectory.tokens >= budget:
            return
        question = model.chat_ids(judge_messages(turn, trajectory.task)) if strategy.judge else None
        if question and len(question) <= max_prompt_tokens:
            answer = yield Prompt(question)
            turn.advice = after_thoughts(answer.text).split("\n")[0][:400]
            turn.advice_tokens = len(answer.token_ids)
        prompt = next_prompt(model, trajectory, strategy)


def next_prompt(model, trajectory, strategy) -> list[int]:
    """Token ids of the next prompt: the first prompt's messages, and the attempts that the strategy shows.

    Where all attempts are shown it extends the last prompt token by token, so that the update computes all turns of a
    rollout in one forward pass.
    """
    shown = strategy.show(trajectory.turns)
    messages = policy_messages(trajectory.task, trajectory.skills)
    for turn in shown:
        reply = condensed(turn.completion.text) if strategy.condense else turn.completion.text
        messages = next_messages(messages, reply, turn.verdict, turn.advice)
    if len(shown) == len(trajectory.turns):  # it extends the last prompt, whose token ids are kept as they were sampled
        return model.next_ids(shown[-1].completion, messages)
    return model.chat_ids(messages)


def rollout(model, sandbox, jobs, turns, sampling, generator=None, strategy=Strategy(), budget=math.inf):
    """One Trajectory for each (task, skills) job, in their order (paper: T = 3 turns, temperature 1.0).

    Each rollout has up to `turns` turns, and ends earlier where `budget` tokens were sampled or its prompt would be too
    long. generator: of all sampling, and of a strategy that draws (EvoEngineer's); the same state, the same rollouts.
    sampling: a backbone.Sampling; a job whose first prompt is over its max_prompt_tokens gets one turn that says so.
    If a task cannot be run, only its own rollouts fail.
    """
    limit = sampling.max_prompt_tokens or math.inf  # tokens
    strategy = replace(strategy, show=functools.partial(strategy.show, generator=generator))
    trajectories = [Trajectory(task, tuple(skills)) for task, skills in jobs]
    # All rollouts of a scheme begin with the same prompt.
    first_prompt = functools.cache(
        lambda task, skills: model.chat_ids(policy_messages(task, skills, strategy.verifies)))
    plays = [play(model, sandbox, trajectory, first_prompt(trajectory.task, trajectory.skills), limit, turns, strategy,
                  budget) for trajectory in trajectories]
    with model.sampler(sampling, generator) as sampler:
        play_in_waves(sampler, sandbox, plays)
    return trajectories


def play_in_waves(sampler, sandbox, plays):
    """Play all rollouts to their end, in waves: sample a reply to each prompt, then judge each kernel, and again.

    With a GPU a kernel is submitted as soon as its reply ends: the sandbox records and compiles it while other replies
    are still being sampled. On a CPU the model and the sandbox need the same cores, so kernels wait for the wave's end.
    """
    wants = {}  # number of a play -> the Prompt or Kernel that it has yielded
    futures = {}  # number of a play -> the verdict on its kernel, while the sandbox judges it
    on_gpu = sandbox.device != "cpu"  # then sampling and compiling need different processors

    def go_on(number, answer=None):
        wants.pop(number, None)
        with contextlib.suppress(StopIteration):  # it has ended
            wants[number] = plays[number].send(answer)

    def submit(number):
        if isinstance(wants.get(number), Kernel):
            [futures[number]] = sandbox.submit([wants[number]])  # a Kernel is a (task, code) pair

    for number in range(len(plays)):
        go_on(number)  # to its first prompt
    while wants:  # all of them prompts: the turns of a wave
        prompts = {number: wants[number].ids for number in sorted(wants)}
        with sandbox.sampling():  # the model has the GPU: no kernel is being timed
            for number, reply in sampler.write(prompts):
                go_on(number, reply)
                if on_gpu:
                    submit(number)
        if not on_gpu:
            for number in prompts:
                submit(number)
        # Each verdict is a rollout's feedback. In the order of their numbers, so that a seed gives the same run.
        for number in sorted(futures):
            go_on(number, verdict_of(sandbox, futures.pop(number)))


def score_pairs(sandbox, pairs) -> list[Verdict]:
    """Verdicts for (task, code) pairs, in their order. If a task cannot be used, only its own candidates fail."""
    return [verdict_of(sandbox, future) for future in sandbox.submit(pairs)]


def verdict_of(sandbox, future) -> Verdict:
    """Wait for a verdict. If the task cannot be used, it is one that says so; stderr tells once for each task."""
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
# Reward of one turn (paper: reward), and those of related systems

SPEEDUP_CAP = 6.0  # a larger speedup earns no more
MILESTONE = 1 / 0.95  # 5 % less time (CUDA Agent)


def davinci_reward(verdict, cap=SPEEDUP_CAP) -> float:
    """r = 0.5 correct + 0.5 correct clip(speedup, 0, 6) + 0.5 correct coverage. Dr. Kernel's clips at 3.

    >>> davinci_reward(Verdict(correct=True, speedup=8.0, coverage=0.5))
    3.75
    """
    if not verdict.correct:
        return 0.0
    return 0.5 + 0.5 * min(max(verdict.speedup, 0.0), cap) + 0.5 * (verdict.coverage or 0.0)


def kevin_reward(verdict) -> float:
    """r = 0.3 correct + correct speedup (Kevin)."""
    return 0.3 + verdict.speedup if verdict.correct else 0.0


def cuda_agent_reward(verdict, over_compiled=None) -> float:
    """-1 incorrect, 1 correct, 2 also 5 % faster than eager PyTorch, 3 also 5 % faster than torch.compile (CUDA Agent).

    5 % faster means 5 % less time. over_compiled: the verdict against torch.compile; without one (no GPU) the third
    milestone cannot be reached.
    """
    if not verdict.correct:
        return -1.0
    if verdict.speedup <= MILESTONE:
        return 1.0
    return 3.0 if over_compiled and over_compiled.correct and over_compiled.speedup > MILESTONE else 2.0


REWARDS = {"davinci": davinci_reward, "drkernel": functools.partial(davinci_reward, cap=3.0), "kevin": kevin_reward,
           "cuda-agent": cuda_agent_reward}


def reward_turns(trajectories, name, compiled=None, mask_void=True):
    """Fill in the reward of every turn. name: in REWARDS. compiled: a sandbox that judges against torch.compile.

    mask_void: turn t is void iff r_t <= 0 < max over u < t of r_u; then r_t := 0. A void turn belongs to no group and
    to no loss: an attempt to improve a working kernel is not punished (release: mask_void_turn).
    """
    fast = []  # (turn, its task) that may reach CUDA Agent's third milestone
    for trajectory in trajectories:
        for turn in trajectory.turns:
            turn.reward = REWARDS[name](turn.verdict)
            if compiled and turn.reward == 2.0:
                fast.append((turn, trajectory.task))
    verdicts = score_pairs(compiled, [(task, turn.code) for turn, task in fast]) if fast else []
    for (turn, _), verdict in zip(fast, verdicts):
        turn.reward = cuda_agent_reward(turn.verdict, verdict)
    for trajectory in trajectories if mask_void else ():
        best = 0.0  # reward of the turns so far
        for turn in trajectory.turns:
            if turn.reward <= 0 < best:
                turn.masked, turn.reward = "void", 0.0
            best = max(best, turn.reward)


# ----------------------------------------------------------------------------------------------------------------------
# Metrics of rollouts

def rollout_metrics(trajectories) -> dict:
    """What metrics.jsonl says of a step's rollouts, or (with eval_ before each name) of the evaluation's.

    A rollout counts by its fastest correct turn; one without a correct turn is faster than nothing. None: mean of none.

        reward_best     mean over rollouts of the best turn's reward
        correct         share of rollouts with a correct turn
        fast_1          Fast_1: share of rollouts that are correct and faster than PyTorch
        fast_1.2        Fast_1.2: the same, more than 1.2x as fast
        speedup         mean over rollouts with a correct turn of its speedup
        correct_first   share of rollouts whose first turn is correct
        coverage        mean over correct turns of the share of time in own kernels whose results matter
        cheats          share of turns whose kernel was rejected as a cheat
        unfinished      share of turns whose reply was cut off at its longest length
    """
    speedups, turns = [], []  # of each rollout its fastest correct turn's, or 0; of all rollouts together
    for trajectory in trajectories:
        correct = [turn.verdict.speedup for turn in trajectory.turns if turn.verdict.correct]
        speedups.append(max(correct, default=0.0))
        turns += trajectory.turns
    return {
        "reward_best": mean(trajectory.best_reward for trajectory in trajectories),
        "correct": mean(speedup > 0 for speedup in speedups),
        "fast_1": mean(speedup > 1 for speedup in speedups),
        "fast_1.2": mean(speedup > 1.2 for speedup in speedups),
        "speedup": mean(filter(None, speedups)),
        "correct_first": mean(trajectory.turns[0].verdict.correct for trajectory in trajectories),
        "coverage": mean(turn.verdict.coverage or 0.0 for turn in turns if turn.verdict.correct),
        "cheats": mean(bool(turn.verdict.rejected) for turn in turns),
        "unfinished": mean(bool(turn.completion.token_ids) and not turn.completion.finished for turn in turns),
    }

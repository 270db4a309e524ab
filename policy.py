"""The Policy role: how a task, skill text and feedback become a multi-turn rollout (paper: multi-turn rollouts).

One rollout is one generator, `play`, which reads from top to bottom as a single conversation: prompt, kernel, verdict,
feedback, next prompt. `rollout` drives many of them at once: the model writes all replies that can be written, and the
sandbox judges all kernels that are there.

    play ---- prompt ----> Backbone.sampler ---- Completion ----> play
    play -- (task, code) --> Sandbox.submit ------ Verdict ------> play

How a rollout goes on after its first attempt is a `Strategy`: which earlier attempts the next prompt shows, and who
says what to improve. The paper's, the default, shows them all; bench.py has the others by name.

`reward_turns` then fills in what each turn has earned. This file knows nothing of retrieval, storage or advantages.
"""

import ast
import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

import backbone
from backbone import Completion
from chat.prompts import PROMPTS, fill, role_messages, skill_text
from sandbox import Verdict, feedback
from skills import Skill
from tasks import Task, TaskError

SAMPLER_STEPS = 8  # at most, before the sandbox may time a kernel on the GPU that both use


@dataclass
class Turn:
    """One attempt: what the policy wrote and what the sandbox said."""

    completion: Completion  # its token_ids are empty when the prompt was too long to be answered
    code: str | None  # the extracted ModelNew source; None when the reply holds none
    verdict: Verdict
    advice: str = ""  # what a judge made of the verdict; it follows the feedback
    advice_tokens: int = 0  # that the model has sampled for it
    repeats: bool = False  # an earlier attempt had the same kernel; this one was not judged
    reward: float | None = None  # filled in once by reward_turns
    advantage: float | None = None  # filled in once by reinforce.py; stays None where a turn is no member of a group
    masked: str | None = None  # why it is left out of the loss: "void", "prs" or "group" (reinforce.credit)


@dataclass
class Trajectory:
    """One rollout of up to T turns on a task with a fixed set of skills. It always has a first turn."""

    task: Task
    skills: tuple[Skill, ...]
    turns: list[Turn] = field(default_factory=list)

    @property
    def best_reward(self) -> float:
        return max(turn.reward for turn in self.turns)

    @property
    def tokens(self) -> int:
        """How many tokens the model has sampled for it, a judge's included."""
        return sum(len(turn.completion.token_ids) + turn.advice_tokens for turn in self.turns)


def policy_messages(task, skills) -> list[dict]:
    """The first turn's prompt: the chosen skills in full in the system message, the task as the user's."""
    shown = "\n\n".join(skill_text("skill", skill) for skill in skills)
    shown = shown and PROMPTS["skill_injection_header"] + shown + PROMPTS["skill_injection_footer"]
    messages = role_messages("policy", task_description=task.source.strip(), skills=shown and shown + "\n\n")
    if "__skills__" not in PROMPTS["policy_user"]:  # which else says where they stand
        messages[0]["content"] += shown
    return messages


def next_messages(messages, reply, verdict, advice="") -> list[dict]:
    """The following turn's prompt: the history, the reply just given, and the sandbox's feedback on it."""
    answer = fill("feedback", feedback=feedback(verdict)) + (f"\n{advice}" if advice else "")
    return messages + [{"role": "assistant", "content": reply}, {"role": "user", "content": answer}]


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


def ranked_parent(turns, generator=None, archive=4) -> list[Turn]:
    """One of the `archive` fastest correct attempts, the r-th fastest with a chance of 1/r (EvoEngineer).

    The first `archive` attempts see nothing: they are the first generation. Correctness is the gate: as long as no
    attempt is correct, the next one starts anew, too.
    """
    parents = sorted((turn for turn in turns if turn.verdict.correct), key=lambda turn: -turn.verdict.speedup)[:archive]
    if len(turns) < archive or not parents:
        return []
    chances = 1 / torch.arange(1.0, len(parents) + 1, device=generator.device if generator else "cpu")
    return [parents[torch.multinomial(chances, 1, generator=generator)]]


@dataclass(frozen=True)
class Strategy:
    """How a rollout goes on after its first attempt."""

    show: Callable = everything  # (turns so far, generator) -> those that the next prompt shows, in their order
    condense: bool = False  # show earlier replies without their thoughts (Kevin)
    judge: str | None = None  # "rule" or "model": who names one bottleneck after each verdict (CudaForge)
    only_new: bool = False  # a kernel that an earlier attempt has written is not judged again (EvoEngineer)


HISTORIES = {"all": Strategy(), "condensed": Strategy(condense=True)}  # of training


def condensed(reply) -> str:
    """A reply without its thoughts: what it says before its kernel, at most 60 words, and the kernel (Kevin).

    >>> condensed("<think>Long.</think>Plan: fuse.\\n```python\\nclass ModelNew:\\n    pass\\n```\\nDone.")
    'Plan: fuse.\\n\\n```python\\nclass ModelNew:\\n    pass\\n```'
    """
    summary = " ".join(backbone.after_thoughts(reply).split("```")[0].split()[:60])
    code = backbone.extract_code(reply)
    return summary + (f"\n\n```python\n{code}```" if code else "")


def normalised(code) -> str:
    """The same text for kernels that differ in comments, blank lines and layout only."""
    try:
        return ast.unparse(ast.parse(code))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last of thousands of signs in a row
        return " ".join(code.split())


JUDGE = ("You judge GPU kernels. Read the task, a kernel for it, and its verdict and profile. Answer with one line: "
         "the single worst problem or bottleneck, and how to remove it.")


def judge_messages(turn, task) -> list[dict]:
    """What the model is asked as a judge."""
    user = f"```python\n{task.source.strip()}\n```\n\n```python\n{turn.code or ''}\n```\n\n{feedback(turn.verdict)}"
    return [{"role": "system", "content": JUDGE}, {"role": "user", "content": user}]


def bottleneck(verdict) -> str:
    """One line on what to improve first: the judge that needs no model, for those that are too small to judge.

    In this order: correctness, what PyTorch still does, several kernels where one might do, distance to the roofline.
    """
    if not verdict.correct:
        return "Bottleneck: it is not correct yet. Change only what the error names."
    hottest = max(verdict.profile, key=lambda entry: entry.share, default=None)
    if hottest and not hottest.own:
        return f"Bottleneck: {hottest.name} takes {hottest.share:.0%} of the time. Do its work in a kernel of your own."
    if len(verdict.profile) > 1:
        return f"Bottleneck: {len(verdict.profile)} launches pass data through memory. Fuse them into one kernel."
    used = max(verdict.bandwidth or 0.0, verdict.arithmetic or 0.0)
    if used < 0.6:
        return f"Bottleneck: one kernel at {used:.0%} of the roofline. Change its block sizes and its memory accesses."
    return f"Bottleneck: none left, {used:.0%} of the roofline is reached. Only reading and writing less would help."


# ----------------------------------------------------------------------------------------------------------------------


def play(model, sandbox, trajectory, turns, prompt, limit, strategy=Strategy(), budget=math.inf, generator=None):
    """One rollout as a generator, which fills `trajectory.turns`.

    It yields a prompt (a list of token ids) and is sent the Completion, or it yields a (task, code) pair and is sent
    the Verdict. prompt: the first one. The rollout ends after `turns` turns that repeat none before them, when `budget`
    tokens were sampled, or when the next prompt would be longer than `limit` tokens. All turns are used, also after a
    correct one: a later turn may be faster.
    """
    if len(prompt) > limit:
        verdict = not_judged(sandbox, f"the prompt has {len(prompt)} tokens, more than {limit}")
        trajectory.turns.append(Turn(Completion(prompt, [], [], "", False), None, verdict))
        return
    known = set()  # kernels so far
    while len(prompt) <= limit:
        reply = yield prompt
        code = backbone.extract_code(reply.text)
        repeats = bool(code and strategy.only_new and normalised(code) in known)
        if repeats:
            verdict = not_judged(sandbox, "an earlier attempt had the same kernel")
        elif code:
            verdict = yield trajectory.task, code
            if strategy.only_new:
                known.add(normalised(code))
        else:
            cut = "" if reply.finished else f" (it was cut off after {len(reply.token_ids)} tokens)"
            verdict = not_judged(sandbox, "the reply has no code block that defines ModelNew" + cut)
        turn = Turn(reply, code, verdict, repeats=repeats)
        trajectory.turns.append(turn)
        if sum(not t.repeats for t in trajectory.turns) >= turns or trajectory.tokens >= budget:
            return
        if strategy.judge == "model" and len(prompt := model.chat_ids(judge_messages(turn, trajectory.task))) <= limit:
            tip = yield prompt
            turn.advice, turn.advice_tokens = backbone.after_thoughts(tip.text).split("\n")[0][:400], len(tip.token_ids)
        elif strategy.judge:
            turn.advice = bottleneck(verdict)
        prompt = next_prompt(model, trajectory, strategy, generator)


def next_prompt(model, trajectory, strategy, generator) -> list[int]:
    """Token ids of the next prompt: the first prompt's messages, and the attempts that the strategy shows."""
    shown = strategy.show(trajectory.turns, generator)
    messages = policy_messages(trajectory.task, trajectory.skills)
    for turn in shown:
        reply = condensed(turn.completion.text) if strategy.condense else turn.completion.text
        messages = next_messages(messages, reply, turn.verdict, turn.advice)
    if len(shown) == len(trajectory.turns):  # it extends the last prompt, whose ids are kept as they were sampled
        return model.next_ids(shown[-1].completion, messages)
    return model.chat_ids(messages)


def rollout(model, sandbox, jobs, turns, max_new_tokens, max_prompt_tokens=None, temperature=1.0,
            generator=None, top_p=1.0, strategy=Strategy(), budget=math.inf, ended=lambda *_: None):
    """A list of a Trajectory for every (task, skills) job, in their order (paper: T = 3 turns, temperature 1.0).

    temperature 0 is greedy; top_p: see Backbone.sampler. max_prompt_tokens, budget: where a rollout ends, see `play`; a
    first prompt that is too long gives one turn that says so. An unusable task costs its own rollouts only. ended is
    called with the number and the Trajectory of each rollout that has come to its end.
    """
    @functools.cache  # all rollouts of a scheme begin with the same prompt
    def first_prompt(task, skills):
        return model.chat_ids(policy_messages(task, skills))

    trajectories = [Trajectory(task, tuple(skills)) for task, skills in jobs]
    plays = [play(model, sandbox, t, turns, first_prompt(t.task, t.skills), max_prompt_tokens or math.inf, strategy,
                  budget, generator) for t in trajectories]
    prompts, pairs, judging = {}, {}, {}  # number of a rollout -> the prompt or pair it has yielded; a verdict's future
    on_gpu = sandbox.device != "cpu"

    def resume(number, answer=None):
        """Send a rollout what it waits for, and note what it wants next, unless that was its end."""
        try:
            wanted = plays[number].send(answer)
            (prompts if isinstance(wanted, list) else pairs)[number] = wanted
        except StopIteration:
            ended(number, trajectories[number])

    for number in range(len(plays)):
        resume(number)
    tasks = [trajectories[number].task for number in prompts]
    with model.sampler(max_new_tokens, temperature, generator, top_p) as sampler:
        while prompts or pairs or judging or sampler.waiting:
            # On a GPU each rollout goes on as soon as it can. On a CPU model and sandbox need the same cores, and a
            # seed must give the same run: all replies are written, then all kernels judged, then all next turns begin.
            if pairs and (on_gpu or not sampler.waiting):
                judging |= zip(pairs, sandbox.submit(list(pairs.values())))
                pairs.clear()
            if on_gpu or not (sampler.waiting or judging):
                for number in sorted(prompts):
                    sampler.add(prompts.pop(number), number)
            # Write a few tokens; where there is nothing to write, wait for a verdict.
            if sampler.waiting:
                replies = write(sampler, sandbox)
                if tasks:  # not before the model has taken its memory: references fill what is left
                    sandbox.prepare(tasks)
                    tasks = []
                for number, reply in replies:
                    resume(number, reply)
            elif judging:
                sandbox.wait(list(judging.values()))
            # Verdicts that have come meanwhile are the rollouts' feedback.
            for number in [number for number, future in judging.items() if future.done()]:
                resume(number, verdict_of(judging.pop(number), sandbox))
    return trajectories


def write(sampler, sandbox) -> list:
    """Let the model write until a reply ends, or for a handful of steps. Returns [(key, Completion), ...]."""
    with sandbox.sampling():  # nothing is being timed meanwhile
        for _ in range(SAMPLER_STEPS):
            if replies := sampler.step():
                break
        sampler.pause()  # nothing may be left on the GPU
    return replies


def score_pairs(sandbox, pairs) -> list[Verdict]:
    """Verdicts for (task, code) pairs, in their order. A task that cannot be used costs its own candidates only."""
    futures = sandbox.submit(pairs)
    for future in futures:
        sandbox.wait([future])
    return [verdict_of(future, sandbox) for future in futures]


def verdict_of(future, sandbox) -> Verdict:
    """What the sandbox found. If the task cannot be used, a verdict that says so; stderr is told once for each task."""
    try:
        return future.result()
    except TaskError as error:
        _say_once(f"unusable task: {error}")
        return not_judged(sandbox, f"unusable task: {error}")


@functools.cache
def _say_once(text):
    print(text, file=sys.stderr)


def not_judged(sandbox, error) -> Verdict:
    """The verdict on what never reached the sandbox."""
    return Verdict(clock="modelled" if sandbox.device == "cpu" else "measured", error=error)


# ----------------------------------------------------------------------------------------------------------------------
# Reward of one turn (paper: reward), and the neighbours'

SPEEDUP_CAP = 6.0  # a speedup beyond it earns no more
MILESTONE = 1 / 0.95  # of CUDA Agent


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
    """-1 wrong, 1 correct, 2 also 5 % faster than eager PyTorch, 3 also 5 % faster than torch.compile (CUDA Agent).

    5 % faster means 5 % less time. over_compiled: the verdict against torch.compile; without one (no GPU) the third
    milestone is out of reach.
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

    mask_void: a turn that fails after an earlier one has earned something is void. It gets no reward, is in no group
    and in no loss: an attempt to improve a working kernel is not punished (release: mask_void_turn).
    """
    turns = [(trajectory.task, turn) for trajectory in trajectories for turn in trajectory.turns]
    for _, turn in turns:
        turn.reward = REWARDS[name](turn.verdict)
    if compiled:  # CUDA Agent's third milestone
        fast = [(task, turn) for task, turn in turns if turn.reward == 2.0]
        for (_, turn), verdict in zip(fast, score_pairs(compiled, [(task, turn.code) for task, turn in fast])):
            turn.reward = cuda_agent_reward(turn.verdict, verdict)
    for trajectory in trajectories if mask_void else ():
        best = 0.0  # of the turns so far
        for turn in trajectory.turns:
            if turn.reward <= 0 < best:
                turn.masked, turn.reward = "void", 0.0
            best = max(best, turn.reward)

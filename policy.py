"""The Policy role: how a task, skill text and feedback become a multi-turn rollout (paper section 3, 'Roll out').

`rollout` plays many (task, skills) jobs at once, turn by turn: all of them sample, the sandbox scores all their
kernels, and its answers open the next turn. It knows nothing of retrieval, storage or advantages: reinforce.py fills in
each turn's reward and advantage.
"""

import sys
from collections import deque
from dataclasses import dataclass, field

import backbone
from backbone import Completion
from sandbox import Verdict, feedback
from skills import Skill
from tasks import Task, TaskError


@dataclass
class Turn:
    """One attempt: what the policy wrote and what the sandbox said."""

    completion: Completion  # its token_ids are empty when the prompt was too long to be answered
    code: str | None  # the extracted ModelNew source; None when the reply holds none
    verdict: Verdict
    reward: float | None = None  # filled once by reinforce.py
    advantage: float | None = None  # filled once by reinforce.py; None stays with turns that are no group's member


@dataclass
class Trajectory:
    """One rollout of up to T turns on a task with a fixed set of skills. It always has a first turn."""

    task: Task
    skills: tuple[Skill, ...]
    turns: list[Turn] = field(default_factory=list)

    @property
    def best_reward(self) -> float:
        return max(turn.reward for turn in self.turns)


def policy_messages(task, skills) -> list[dict]:
    """The first turn's prompt: chosen skills in full in the system message, the task as the user's."""
    system = backbone.SYSTEM["policy"]
    for skill in skills:
        system += f"\n\n# Skill: {skill.name}\n{skill.description}\n{skill.content}"
    user = f"```python\n{task.source.strip()}\n```"
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def next_messages(messages, reply, verdict) -> list[dict]:
    """The following turn's prompt: the history, the reply just given, and the sandbox's feedback on it."""
    return messages + [{"role": "assistant", "content": reply}, {"role": "user", "content": feedback(verdict)}]


def rollout(model, sandbox, jobs, turns, max_new_tokens, max_prompt_tokens=None, temperature=1.0,
            generator=None) -> list[Trajectory]:
    """One Trajectory for every (task, skills) job, in their order (paper: T = 3 turns, temperature 1.0).

    All T turns are used, also after a correct one: a later turn may be faster. A rollout whose next prompt would be
    longer than `max_prompt_tokens` ends there; a first prompt that is too long gives one turn that says so.
    temperature 0 is greedy. `sandbox` needs `prepare`, `submit`, `turn` and `device`.

    On a GPU the tasks are played in two halves: while the sandbox judges the kernels of one, the model writes those of
    the other.
    """
    trajectories = [Trajectory(task, tuple(skills)) for task, skills in jobs]
    sources = list(dict.fromkeys(task.source for task, _ in jobs))
    first = set(sources[:len(sources) // 2] if sandbox.device != "cpu" else ())
    halves = [[t for t in trajectories if (t.task.source in first) == chosen] for chosen in (True, False)]
    plays = deque(_play(model, sandbox, half, turns, max_new_tokens, max_prompt_tokens, temperature, generator)
                  for half in halves if half)
    while plays:
        play = plays.popleft()
        if next(play, None) is not None:  # has written a turn, whose kernels the sandbox now has; else it is over
            plays.append(play)
    return trajectories


def _play(model, sandbox, trajectories, turns, max_new_tokens, max_prompt_tokens, temperature, generator):
    """Play some trajectories. A generator that stops, once a turn, where there is nothing to do but to wait."""
    messages = [policy_messages(trajectory.task, trajectory.skills) for trajectory in trajectories]
    prompts = [model.chat_ids(history) for history in messages]
    limit = max_prompt_tokens or float("inf")
    alive = []
    for i, trajectory in enumerate(trajectories):
        if len(prompts[i]) <= limit:
            alive.append(i)
        else:
            error = f"the prompt has {len(prompts[i])} tokens, more than {max_prompt_tokens}"
            trajectory.turns.append(Turn(Completion(prompts[i], [], [], "", False), None, _unscored(sandbox, error)))
    for turn in range(turns):
        sandbox.prepare([trajectories[i].task for i in alive])
        replies = model.sample([prompts[i] for i in alive], max_new_tokens, temperature, generator, turn=sandbox.turn)
        codes = [backbone.extract_code(reply.text) for reply in replies]
        pairs = [(trajectories[i].task, code) for i, code in zip(alive, codes) if code]
        wait = sandbox.submit(pairs)
        yield wait
        scored = iter(score_pairs(sandbox, pairs, wait))
        still = []
        for i, reply, code in zip(alive, replies, codes):
            cut = "" if reply.finished else f" (it was cut off after {len(reply.token_ids)} tokens)"
            error = "the reply has no code block that defines ModelNew" + cut
            verdict = next(scored) if code else _unscored(sandbox, error)
            trajectories[i].turns.append(Turn(reply, code, verdict))
            messages[i] = next_messages(messages[i], reply.text, verdict)
            if turn + 1 < turns:
                prompts[i] = model.next_ids(reply, messages[i])
                still += [i] if len(prompts[i]) <= limit else []
        alive = still


def score_pairs(sandbox, pairs, wait=None) -> list[Verdict]:
    """Verdicts for (task, code) pairs, in their order. A task whose reference fails costs its own candidates only.

    wait: what sandbox.submit has returned for these pairs, if they have been handed in already.
    """
    try:
        return (wait or sandbox.submit(pairs))()
    except TaskError:
        pass  # one of the tasks; ask for each alone
    verdicts, unusable = [], {}
    for task, code in pairs:
        try:
            if task.source not in unusable:
                verdicts += sandbox.submit([(task, code)])()
                continue
        except TaskError as error:
            unusable[task.source] = str(error)
            print(f"unusable task: {error}", file=sys.stderr)
        verdicts.append(_unscored(sandbox, f"unusable task: {unusable[task.source]}"))
    return verdicts


def _unscored(sandbox, error) -> Verdict:
    """The verdict on what never reached the sandbox."""
    return Verdict(clock="modelled" if sandbox.device == "cpu" else "measured", error=error)

"""The Policy role: how a task, skill text and feedback become a multi-turn rollout (paper section 3, 'Roll out').

`rollout` plays many (task, skills) jobs at once: the model writes, the sandbox scores kernels, on a GPU as they come,
and once all rollouts of a task have their answers these open the next turn. It knows nothing of retrieval, storage or
advantages: reinforce.py fills in each turn's reward and advantage.
"""

import functools
import sys
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
            generator=None, over=lambda trajectories: None) -> list[Trajectory]:
    """One Trajectory for every (task, skills) job, in their order (paper: T = 3 turns, temperature 1.0).

    All T turns are used, also after a correct one: a later turn may be faster. A rollout whose next prompt would be
    longer than `max_prompt_tokens` ends there; a first prompt that is too long gives one turn that says so.
    temperature 0 is greedy. `sandbox` needs `prepare`, `submit`, `wait`, `turn` and `device`. `over` is called with the
    rollouts that go through their turns together as soon as these are over.

    On a GPU the rollouts of each task go through their turns independently of the other tasks', and the sandbox judges
    kernels while the model writes others. On a CPU both need the same cores.
    """
    trajectories = [Trajectory(task, tuple(skills)) for task, skills in jobs]
    groups = {}  # those that go through their turns together
    for trajectory in trajectories:
        groups.setdefault(trajectory.task.source if sandbox.device != "cpu" else "all", []).append(trajectory)
    plays = [Play(model, sandbox, group, turns, max_prompt_tokens) for group in groups.values()]
    ready, waiting, going = list(plays), [], len(plays)  # to begin a turn; for verdicts; how many have turns left

    def coming(wait):
        """The prompts of turns that can begin now; None when all turns are over (see Backbone.stream)."""
        nonlocal going
        prompts = []
        while going:
            for play in ready:
                new = play.prompts_of_next_turn()
                prompts += new
                if not new:
                    going -= 1
                    over(play.trajectories)
            unjudged = [future for play in waiting for future in play.futures.values() if not future.done()]
            ready[:] = [play for play in waiting if play.is_judged()]
            waiting[:] = [play for play in waiting if play not in ready]
            for play in ready:
                play.hear()
            if not ready and (prompts or not wait or not going):
                break
            if not ready:
                sandbox.wait(unjudged)
        return prompts or ([] if going else None)

    stream = model.stream(coming, max_new_tokens, temperature, generator, turn=sandbox.turn)
    for (play, i), reply in stream:
        if play.take(i, reply):
            waiting.append(play)
    return trajectories


class Play:
    """Some rollouts that go through their turns together."""

    def __init__(self, model, sandbox, trajectories, turns, limit):
        """limit: most tokens of a prompt, or None."""
        self.model, self.sandbox, self.trajectories, self.turns = model, sandbox, trajectories, turns
        self.limit, self.turn = limit or float("inf"), 0
        self.messages = [policy_messages(trajectory.task, trajectory.skills) for trajectory in trajectories]
        first = {}  # rollouts of a scheme begin with the same prompt
        for trajectory, history in zip(trajectories, self.messages):
            if (trajectory.task, trajectory.skills) not in first:
                first[trajectory.task, trajectory.skills] = model.chat_ids(history)
        self.prompts = [first[trajectory.task, trajectory.skills] for trajectory in trajectories]
        self.replies, self.codes, self.futures = {}, {}, {}  # of this turn, by rollout
        self.alive = []  # rollouts that take part in it
        for i, prompt in enumerate(self.prompts):
            if len(prompt) <= self.limit:
                self.alive.append(i)
            else:
                error = f"the prompt has {len(prompt)} tokens, more than {limit}"
                trajectories[i].turns.append(Turn(Completion(prompt, [], [], "", False), None,
                                                  _unscored(sandbox, error)))

    def prompts_of_next_turn(self) -> list:
        """[((self, number of the rollout), prompt), ...], none when the last turn is over."""
        if self.turn == self.turns:
            return []
        self.turn += 1
        self.sandbox.prepare([self.trajectories[i].task for i in self.alive])
        return [((self, i), self.prompts[i]) for i in self.alive]

    def take(self, i, reply) -> bool:
        """Take a reply and have the sandbox judge its kernel. Returns whether it was the turn's last."""
        self.replies[i], self.codes[i] = reply, backbone.extract_code(reply.text)
        last = len(self.replies) == len(self.alive)
        if self.sandbox.device != "cpu" or last:
            new = [i for i in self.replies if self.codes[i] and i not in self.futures]
            pairs = [(self.trajectories[i].task, self.codes[i]) for i in new]
            self.futures.update(zip(new, self.sandbox.submit(pairs)))
        return last

    def is_judged(self) -> bool:
        """Are all verdicts there on what has been handed in?"""
        return all(future.done() for future in self.futures.values())

    def hear(self):
        """Take the sandbox's verdicts and end the turn."""
        still, later = [], {}  # later: next prompts; equal ones are one list, as rollouts often repeat each other
        for i in self.alive:
            reply, trajectory = self.replies[i], self.trajectories[i]
            cut = "" if reply.finished else f" (it was cut off after {len(reply.token_ids)} tokens)"
            error = "the reply has no code block that defines ModelNew" + cut
            verdict = verdict_of(self.futures[i], self.sandbox) if self.codes[i] else _unscored(self.sandbox, error)
            trajectory.turns.append(Turn(reply, self.codes[i], verdict))
            self.messages[i] = next_messages(self.messages[i], reply.text, verdict)
            if self.turn < self.turns:
                same = id(self.prompts[i]), tuple(reply.token_ids), self.messages[i][-1]["content"]
                if same not in later:
                    later[same] = self.model.next_ids(reply, self.messages[i])
                self.prompts[i] = later[same]
                still += [i] if len(self.prompts[i]) <= self.limit else []
        self.alive, self.replies, self.codes, self.futures = still, {}, {}, {}


def score_pairs(sandbox, pairs) -> list[Verdict]:
    """Verdicts for (task, code) pairs, in their order. A task whose reference fails costs its own candidates only."""
    futures = sandbox.submit(pairs)
    for future in futures:
        sandbox.wait([future])
    return [verdict_of(future, sandbox) for future in futures]


def verdict_of(future, sandbox) -> Verdict:
    """What the sandbox found; if the task cannot be used, that, which is also said once."""
    try:
        return future.result()
    except TaskError as error:
        _say(f"unusable task: {error}")
        return _unscored(sandbox, f"unusable task: {error}")


@functools.cache
def _say(text):
    print(text, file=sys.stderr)


def _unscored(sandbox, error) -> Verdict:
    """The verdict on what never reached the sandbox."""
    return Verdict(clock="modelled" if sandbox.device == "cpu" else "measured", error=error)

"""The Policy role: how a task, skill text and feedback become a multi-turn rollout (paper section 3, 'Roll out').

`rollout` plays many (task, skills) jobs at once: the model writes, the sandbox scores kernels, on a GPU as they come,
and a verdict opens the rollout's next turn. It knows nothing of retrieval, storage or advantages: reinforce.py fills in
each turn's reward and advantage.
"""

import functools
import sys
from concurrent.futures import Future
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
    temperature 0 is greedy. `sandbox` needs `prepare`, `submit`, `wait`, `turn` and `device`.

    On a GPU every rollout goes on as soon as its own kernel has been judged, while the model writes others. On a CPU,
    where both need the same cores, all go through their turns together. `over` is called with the rollouts of a task
    (on a CPU: with all) when the last of them has ended.
    """
    trajectories = [Trajectory(task, tuple(skills)) for task, skills in jobs]
    together = sandbox.device == "cpu"
    groups = {}
    for trajectory in trajectories:
        groups.setdefault("all" if together else trajectory.task.source, []).append(trajectory)
    plays = [Play(model, sandbox, group, turns, max_prompt_tokens, together) for group in groups.values()]
    first = [prompt for play in plays for prompt in play.first_prompts()]
    writing = 0  # replies that the model is at

    def coming(wait):
        """The prompts of turns that can begin now; None when all turns are over (see Backbone.stream)."""
        nonlocal writing, first
        prompts, first = first, []
        while plays and not prompts:
            ready = sum(len(play.judged()) for play in plays)
            if not wait and 4 * ready <= writing:
                break  # to read a few would keep many waiting
            for play in plays[:]:
                prompts += play.next_prompts()
                if not play.alive:
                    plays.remove(play)
                    over(play.trajectories)
            if plays and not prompts and wait:
                sandbox.wait([future for play in plays for future in play.futures.values() if not future.done()])
        writing += len(prompts)
        return prompts or ([] if plays else None)

    for (play, i), reply in model.stream(coming, max_new_tokens, temperature, generator, turn=sandbox.turn):
        writing -= 1
        play.take(i, reply)
    return trajectories


class Play:
    """The rollouts of a task, or several tasks' that go through their turns together."""

    def __init__(self, model, sandbox, trajectories, turns, limit, together):
        """limit: most tokens of a prompt, or None."""
        self.model, self.sandbox, self.trajectories, self.turns = model, sandbox, trajectories, turns
        self.limit, self.together = limit or float("inf"), together
        self.messages = [policy_messages(trajectory.task, trajectory.skills) for trajectory in trajectories]
        first = {}  # rollouts of a scheme begin with the same prompt
        for trajectory, history in zip(trajectories, self.messages):
            if (trajectory.task, trajectory.skills) not in first:
                first[trajectory.task, trajectory.skills] = model.chat_ids(history)
        self.prompts = [first[trajectory.task, trajectory.skills] for trajectory in trajectories]
        self.later = {}  # what came after a prompt, see next_prompt
        self.replies, self.codes, self.futures = {}, {}, {}  # of turns that are not over, by rollout
        self.alive = []  # rollouts that have turns left, or are at one
        for i, prompt in enumerate(self.prompts):
            if len(prompt) <= self.limit:
                self.alive.append(i)
            else:
                error = f"the prompt has {len(prompt)} tokens, more than {limit}"
                trajectories[i].turns.append(Turn(Completion(prompt, [], [], "", False), None,
                                                  _unscored(sandbox, error)))

    def first_prompts(self) -> list:
        """[((self, number of the rollout), prompt), ...]"""
        self.sandbox.prepare([self.trajectories[i].task for i in self.alive])
        return [((self, i), self.prompts[i]) for i in self.alive]

    def take(self, i, reply):
        """Take a reply and have the sandbox judge its kernel; if they go together, once the last reply is there."""
        self.replies[i], self.codes[i] = reply, backbone.extract_code(reply.text)
        if not self.codes[i]:
            cut = "" if reply.finished else f" (it was cut off after {len(reply.token_ids)} tokens)"
            error = "the reply has no code block that defines ModelNew" + cut
            self.futures[i] = Future()
            self.futures[i].set_result(_unscored(self.sandbox, error))
        if not self.together or len(self.replies) == len(self.alive):
            new = [i for i in self.replies if i not in self.futures]
            pairs = [(self.trajectories[i].task, self.codes[i]) for i in new]
            self.futures.update(zip(new, self.sandbox.submit(pairs)))

    def judged(self) -> list:
        """The rollouts whose turns can be ended."""
        done = [i for i in self.alive if i in self.futures and self.futures[i].done()]
        return done if not self.together or len(done) == len(self.alive) else []

    def next_prompts(self) -> list:
        """End the turns that can be ended; the prompts of those that follow, as in first_prompts."""
        prompts = []
        for i in self.judged():
            reply, code, trajectory = self.replies.pop(i), self.codes.pop(i), self.trajectories[i]
            verdict = verdict_of(self.futures.pop(i), self.sandbox)
            trajectory.turns.append(Turn(reply, code, verdict))
            self.messages[i] = next_messages(self.messages[i], reply.text, verdict)
            if len(trajectory.turns) < self.turns and len(prompt := self.next_prompt(i, reply)) <= self.limit:
                self.prompts[i] = prompt
                prompts.append(((self, i), prompt))
            else:
                self.alive.remove(i)
        return prompts

    def next_prompt(self, i, reply) -> list[int]:
        """Equal ones are one list, which is worked out once: rollouts often repeat each other."""
        same = id(self.prompts[i]), tuple(reply.token_ids), self.messages[i][-1]["content"]
        if same not in self.later:  # with the prompt, so that no other list gets its id
            self.later[same] = self.prompts[i], self.model.next_ids(reply, self.messages[i])
        return self.later[same][1]


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

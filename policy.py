"""The Policy role: how a task, skill text and feedback become a multi-turn rollout (paper section 3, 'Roll out')."""

from dataclasses import dataclass, field

import backbone
from backbone import Completion
from sandbox import Verdict, feedback
from skills import Skill
from tasks import Task


@dataclass
class Turn:
    """One attempt: what the policy wrote and what the sandbox said."""

    completion: Completion
    code: str | None  # the extracted ModelNew source; None when the reply holds none
    verdict: Verdict
    reward: float | None = None  # filled once by reinforce.py
    advantage: float | None = None  # filled once by reinforce.py


@dataclass
class Trajectory:
    """One rollout of up to T turns on a task with a fixed set of skills."""

    task: Task
    skills: tuple[Skill, ...]
    turns: list[Turn] = field(default_factory=list)


def policy_messages(task, skills) -> list[dict]:
    """The first turn's prompt: chosen skills in full in the system message, the task as the user's."""
    system = backbone.SYSTEM["policy"]
    for skill in skills:
        system += f"\n\n# Skill: {skill.name}\n{skill.description}\n{skill.content}"
    return [{"role": "system", "content": system}, {"role": "user", "content": f"```python\n{task.source.strip()}\n```"}]


def next_messages(messages, reply, verdict) -> list[dict]:
    """The following turn's prompt: the history, the reply just given, and the sandbox's feedback on it."""
    return messages + [{"role": "assistant", "content": reply}, {"role": "user", "content": feedback(verdict)}]

"""The Summary role: what lesson does the best rollout hold, and does execution confirm it? (paper section 3, 'Summarise')"""

import backbone


def summary_messages(task, skills, first, best) -> list[dict]:
    """What Summary sees: the task, the skills that the policy had, the first turn and the best one with their speedups.

    first, best: (code, speedup) pairs.
    """
    user = f"```python\n{task.source.strip()}\n```\n"
    for skill in skills:
        user += f"\n# Skill in use: {skill.name}\n{skill.description}\n{skill.content}\n"
    for title, (code, speedup) in (("First answer", first), ("Best answer", best)):
        user += f"\n# {title}, speedup {speedup:.2f}\n```python\n{code.strip()}\n```\n"
    return [{"role": "system", "content": backbone.SYSTEM["summary"]}, {"role": "user", "content": user}]

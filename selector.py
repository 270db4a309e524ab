"""The Selection role: which skills may help with this task?  (Paper: BM25 recall, then LLM reranking.)

For each task the role answers k times; each answer is a *selection* of at most 3 skills, and with the null selection
(no skills) they make the k + 1 schemes that the policy's rollouts are spread over. This file knows nothing of kernels,
results or optimisers: reinforce.py fills in the reward and the advantage.
"""

from dataclasses import dataclass

import backbone
from backbone import Completion
from chat.prompts import role_messages, skill_text
from skills import Skill
from tasks import Task

TASK_CHARACTERS = 1000  # of the task's source that Selection sees; a model over a billion parameters sees all
MOST_SKILLS = 3  # that one answer may choose


@dataclass
class Selection:
    """One answer of the Selection role to one task."""

    task: Task
    candidates: list[Skill]  # what BM25 offered
    completion: Completion | None  # None where the role was not asked: no candidates, or BM25 alone decides
    skills: tuple[Skill, ...]  # what it chose; () when nothing in the answer was valid
    dropped: tuple[str, ...] = ()  # names in the answer that are no candidates, or are too many
    reward: float | None = None  # filled once by reinforce.py
    advantage: float | None = None  # filled once by reinforce.py


def selection_messages(task, candidates, characters=TASK_CHARACTERS) -> list[dict]:
    """Task head and candidate skills: names, descriptions, scopes and tags; never the bodies."""
    listed = "\n".join(skill_text("candidate", skill, number) for number, skill in enumerate(candidates, 1))
    return role_messages("selection", task_description=task.source.strip()[:characters], file_tree=listed,
                         top_k_select=MOST_SKILLS)


def read_selection(text, candidates) -> tuple[tuple[Skill, ...], tuple[str, ...]]:
    """(chosen skills in the reply's order, names dropped) of a sampled reply, which may hold anything. Never raises."""
    entries = (backbone.extract_tool_call(text, "select_skills") or {}).get("selected_skills")
    offered = {skill.name: skill for skill in candidates}
    chosen, dropped = [], []
    for entry in entries if isinstance(entries, list) else []:
        name = entry.get("name") if isinstance(entry, dict) else entry  # a bare list of names is understood too
        name = name.strip() if isinstance(name, str) else str(name)[:80]
        if name in offered and offered[name] not in chosen and len(chosen) < MOST_SKILLS:
            chosen.append(offered[name])
        elif name not in offered or offered[name] not in chosen:
            dropped.append(name)
    return tuple(chosen), tuple(dropped)


def select(model, library, tasks, k, max_new_tokens=1024, temperature=1.0, generator=None, bm25_only=False,
           max_prompt_tokens=None) -> list[list[Selection]]:
    """k selections for every task, all sampled in one batch (paper: k = 3, temperature 1.0, at most 1,024 tokens).

    Evaluation asks once, greedily: k=1, temperature=0. With `bm25_only` (an ablation) the k selections are BM25's own
    first 3. A prompt over `max_prompt_tokens` loses its last candidates until it fits.
    """
    candidates = [library.recall(task.source) for task in tasks]
    if bm25_only:
        return [[Selection(task, found, None, tuple(found[:MOST_SKILLS])) for _ in range(k)]
                for task, found in zip(tasks, candidates)]
    prompts, characters = [], None if model.large else TASK_CHARACTERS
    for i, task in enumerate(tasks):
        while len(prompt := model.chat_ids(selection_messages(task, candidates[i], characters),
                                           backbone.SELECT_TOOL)) > (max_prompt_tokens or 1e9) and candidates[i]:
            candidates[i] = candidates[i][:-1]
        prompts.append(prompt)
    asked = [i for i, found in enumerate(candidates) if found]  # with nothing to choose from nobody is asked
    replies = iter(model.sample([prompts[i] for i in asked for _ in range(k)], max_new_tokens, temperature, generator))
    selections = []
    for task, found in zip(tasks, candidates):
        mine = [Selection(task, found, next(replies) if found else None, ()) for _ in range(k)]
        for selection in mine:
            if selection.completion:
                selection.skills, selection.dropped = read_selection(selection.completion.text, found)
        selections.append(mine)
    return selections

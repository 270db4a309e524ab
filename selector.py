"""The Selection role: which skills may help with this task?  (Paper: BM25 recall, then LLM reranking.)

    recall     BM25 with the task's text as the query: at most 20 candidate skills of the library
    select     k replies of the model; each names at most 3 of these candidates to use: a *selection*

A task's k selections and the null scheme (no skills) are the k + 1 schemes that the Policy's rollouts are spread over.
This file knows nothing of kernels, results or optimisers: reinforce.py fills in the reward, advantages.py the
advantage.
"""

import re
from dataclasses import dataclass

import numpy as np
from rank_bm25 import BM25Plus

from backbone import Completion
from chat.prompts import MOST_SKILLS, SELECT_TOOL, fill, role_messages, skill_text
from skills import Skill
from tasks import Task

CANDIDATES = 20  # paper: BM25 keeps the top 20 with a score above 0
TASK_CHARACTERS = 1000  # of the task that Selection sees
LARGE_TASK_CHARACTERS = 100_000  # with a model over a billion parameters, as in the release's script for 14B


@dataclass
class Selection:
    """One answer of the Selection role to one task."""

    task: Task
    candidates: list[Skill]  # what BM25 offered
    completion: Completion | None  # None where the model was not asked: no candidates, or BM25 alone decides
    skills: tuple[Skill, ...]  # what it chose; () when nothing in the answer was valid
    dropped: tuple[str, ...] = ()  # names in the answer that are no candidates, or are too many
    reward: float | None = None
    advantage: float | None = None


# ----------------------------------------------------------------------------------------------------------------------
# BM25 recall


def words(text) -> list[str]:
    """The words that BM25 compares. Paper: lower case, split at blanks and `_ - /`, without other punctuation.

    That makes nn.LayerNorm(x) one word, which no skill contains. So we add three kinds of words: the identifiers in it,
    the parts of a CamelCase name, and a name with `_` as one word. Then layer_norm, LayerNorm and layernorm match.

    >>> words("Fuse-pointwise: nn.LayerNorm(x)")
    ['fuse', 'pointwise', 'nnlayernormx', 'nn', 'layernorm', 'x', 'layer', 'norm']
    >>> words("F.layer_norm")
    ['flayer', 'f', 'layer', 'norm', 'layernorm']
    """
    compared = []
    for word in re.split(r"[\s_/-]+", text):
        identifiers = re.findall(r"\w+", word)
        parts = re.sub(r"(?<=[a-z])(?=[A-Z\d])", " ", " ".join(identifiers)).split()
        spelled = ["".join(identifiers), *identifiers, *parts]
        compared += dict.fromkeys(name.lower() for name in spelled if name)  # each once
    for name in re.findall(r"[A-Za-z0-9]+(?:_[A-Za-z0-9]+)+", text):
        compared.append(name.replace("_", "").lower())
    return compared


def recall(library, query, top=CANDIDATES) -> list[Skill]:
    """The `top` skills whose BM25 score for a query (a `task_text`) is greatest and above 0, best first.

    BM25 weighs a word that n of N skills contain by its idf. We take that of BM25+, log((N + 1) / n). Okapi's idf is 0
    for n = N / 2 and negative above it, so in a small library the words that its skills share would not count. With
    delta=0 the idf is all that we take from BM25+. A library of one or two skills needs no ranking: all are offered.
    """
    if len(library) < 3:
        return library.skills[:top]
    if library.index is None:
        documents = []
        for skill in library.skills:
            documents.append(words(" ".join([skill.name, skill.description, *skill.tags, skill.content])))
        library.index = BM25Plus(documents, delta=0)
    scores = library.index.get_scores(words(query))  # one for each skill
    best = np.argsort(-scores, kind="stable")[:top]  # stable: equal scores keep the library's order
    return [library.skills[i] for i in best if scores[i] > 0]


# ----------------------------------------------------------------------------------------------------------------------
# LLM reranking


def task_text(task) -> str:
    """What Selection and BM25 read of a task: its source, or what `selection_task` in a file of prompts says."""
    source = task.source.strip()
    return fill("selection_task", source=source, policy_user=fill("policy_user", task_description=source, skills=""))


def selection_messages(task, candidates, characters=TASK_CHARACTERS) -> list[dict]:
    """The prompt: the task's first `characters`, and each candidate's name, description, scope and tags.

    It does not show the candidates' content (paper), so that 20 of them fit. `file_tree` is the release's name for
    their list.
    """
    listed = "\n".join(skill_text("candidate", skill, number) for number, skill in enumerate(candidates, 1))
    return role_messages("selection", task_description=task_text(task)[:characters], file_tree=listed,
                         top_k_select=MOST_SKILLS)


def fitting_prompt(model, task, candidates, longest) -> tuple[list[int], list[Skill]]:
    """Drop the lowest-ranked candidates until the prompt fits. Returns (its token ids, the candidates in it).

    longest: most tokens of the prompt, or None for no limit.
    """
    characters = LARGE_TASK_CHARACTERS if model.large else TASK_CHARACTERS
    while True:
        prompt = model.chat_ids(selection_messages(task, candidates, characters), SELECT_TOOL)
        if not longest or len(prompt) <= longest or not candidates:
            return prompt, candidates
        candidates = candidates[:-1]


def read_selection(call, candidates) -> tuple[tuple[Skill, ...], tuple[str, ...]]:
    """(chosen skills in the reply's order, names dropped) of a sampled call's arguments. Never raises.

    call: any dict, since the model wrote it; None if the reply has no call.
    """
    entries = (call or {}).get("selected_skills")
    if not isinstance(entries, list):
        return (), ()
    offered = {skill.name: skill for skill in candidates}
    chosen = {}
    dropped = []
    for entry in entries:
        # A plain list of names is valid, too.
        name = str(entry.get("name") if isinstance(entry, dict) else entry).strip()
        if name in offered and (name in chosen or len(chosen) < MOST_SKILLS):
            chosen[name] = offered[name]  # a repeated name is chosen once
        else:
            dropped.append(name)
    return tuple(chosen.values()), tuple(dropped)


def select(model, library, tasks, k, sampling, generator=None, bm25_only=False) -> list[list[Selection]]:
    """k selections for every task, all sampled in one batch (paper: k = 3, temperature 1.0, at most 1,024 tokens).

    Evaluation asks once, greedily: k = 1, temperature 0. A prompt over sampling.max_prompt_tokens loses its last
    candidates until it fits. A task without candidates gets k empty selections, without asking the model.
    bm25_only (ablation): each of the k selections is BM25's first 3 skills, without asking the model.
    """
    selections = []
    prompts, asked = [], []  # asked: the selections that the replies to the prompts fill in
    for task in tasks:
        candidates = recall(library, task_text(task))
        if bm25_only:
            several = [Selection(task, candidates, None, tuple(candidates[:MOST_SKILLS])) for _ in range(k)]
        elif not candidates:
            several = [Selection(task, [], None, ()) for _ in range(k)]
        else:
            prompt, candidates = fitting_prompt(model, task, candidates, sampling.max_prompt_tokens)
            several = [Selection(task, candidates, None, ()) for _ in range(k)]
            if candidates:
                prompts += [prompt] * k
                asked += several
        selections.append(several)
    for selection, reply in zip(asked, model.sample(prompts, sampling, generator)):
        selection.completion = reply
        call = model.tool_call(reply.text, "select_skills")
        selection.skills, selection.dropped = read_selection(call, selection.candidates)
    return selections


def selection_metrics(selections, initial_names) -> dict:
    """What metrics.jsonl says of a step's selections. initial_names: of the skills before the first step.

    reward_selection    mean reward of a selection, which is the mean of its rollouts' best rewards
    selected            mean number of skills in a selection
    selected_learnt     number of times that a selection holds a skill which the run has learnt
    """
    rewards, sizes, learnt = [], [], 0
    for selection in selections:
        rewards.append(selection.reward)
        sizes.append(len(selection.skills))
        learnt += sum(skill.name not in initial_names for skill in selection.skills)
    return {"reward_selection": sum(rewards) / len(rewards) if rewards else None,
            "selected": sum(sizes) / len(sizes) if sizes else None, "selected_learnt": learnt}

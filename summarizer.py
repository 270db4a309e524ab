"""The Summary role: what lesson does the best rollout hold, and does execution confirm it?  (Paper: summary trigger,
skill proposals, verification by execution.)

    trigger(trajectory, gain)      is the first turn correct, and the best one g times as fast as it and as PyTorch?
    propose(model, winners, s)     s answers for each task's best triggering rollout; their proposals checked for form
    verify(model, sandbox, ...)    one greedy attempt at the same task, with the proposed skill, for each proposal
    best_skill(summaries)          the proposal to stage for a task
    summary_reward(summary)        the reward of an answer

A proposal is verified by one attempt. Several would show whether the speedup is luck, but would cost as much as the
rollouts. The attempt is greedy, so that it does not depend on random numbers.

In formulas v is a speedup over PyTorch, v_1 that of a rollout's first turn, and g the required factor (--set min_gain,
1.2 in the paper). This file knows nothing of gradients or snapshot files: reinforce.py fills in the reward,
advantages.py the advantage.
"""

import re
from collections import Counter
from dataclasses import dataclass, field, replace

from backbone import Completion
from chat.advice import lazy_advice
from chat.prompts import MOST_PROPOSALS, PROMPTS, UPDATE_TOOL, fill, role_messages, skill_text
from policy import SPEEDUP_CAP, Trajectory, Turn, mean, policy_messages, rollout
from skills import Skill
from tasks import Task

MOST_CONTENT_TOKENS = 640  # paper: about 512 tokens of content. We accept 25 % more.
# Why a proposal was rejected, in the order of the checks; metrics and curves use these words. Lazy advice tells the
# reader to leave work to PyTorch or to write no kernel (chat/advice.py).
REASONS = ("no tool call", "malformed", "too many", "too long", "lazy advice", "not correct", "too slow")


@dataclass
class Proposal:
    """One skill that a summary proposes, and what became of it."""

    written: object  # the entry of new_skills as the model wrote it
    skill: Skill | None = None  # None if malformed; its verify_speedup is set when it has passed
    known: bool = False  # already in the library: verified and rewarded like any other, but not staged
    rejected: str | None = None  # one of REASONS
    detail: str = ""  # what exactly was wrong
    attempt: Turn | None = None  # the verification
    joined: str | None = None  # its name in the library; filled in by reinforce.flush if it joins


@dataclass
class Summary:
    """One answer of the Summary role to the best triggering rollout of a task."""

    task: Task
    winner: Trajectory  # the triggering rollout
    first: Turn  # the winner's first turn
    best: Turn  # the winner's fastest correct turn
    completion: Completion
    proposals: list[Proposal] = field(default_factory=list)
    reward: float | None = None
    advantage: float | None = None


def summary_messages(task, skills, first, best) -> list[dict]:
    """What Summary sees: the task, the skills that the policy had, the first turn and the best one with their speedups.

    first, best: (code, speedup) pairs. A user's file of prompts may also show the Policy's prompt (`asked`).
    """
    in_use = "\n\n".join(skill_text("skill_in_use", skill) for skill in skills).strip()
    injected = fill("skills_in_use", skills=in_use) if skills else PROMPTS["no_skills"]
    asked = "\n\n".join(f"[{message['role'].upper()}]\n{message['content']}" for message in policy_messages(task, ()))
    return role_messages("summary", task_description=task.source.strip(), task_messages_formatted=asked,
                         injected_skill_content=injected, max_skills=MOST_PROPOSALS,
                         turn1_speedup=f"{first[1]:.2f}", turn1_code=first[0].strip(),
                         best_turn_speedup=f"{best[1]:.2f}", best_turn_code=best[0].strip())


# ----------------------------------------------------------------------------------------------------------------------
# When: the trigger


def trigger(trajectory, gain) -> tuple[Turn, Turn] | None:
    """(first turn, best turn) of a rollout that is worth a summary, else None.

    Paper (summary trigger): correct_1 and v_best >= g max(1, v_1). The first turn is correct, and the fastest correct
    turn is at least g times as fast as PyTorch and at least g times as fast as the first turn.
    """
    first = trajectory.turns[0]
    if not first.verdict.correct:
        return None
    best = max((turn for turn in trajectory.turns if turn.verdict.correct), key=lambda turn: turn.verdict.speedup)
    if best.verdict.speedup < gain * max(1.0, first.verdict.speedup):
        return None
    return first, best


def best_trigger(trajectories, gain) -> tuple[Trajectory, Turn, Turn] | None:
    """(rollout, first turn, best turn) of a task's triggering rollout with the fastest best turn; None without one.
    """
    triggering = []
    for trajectory in trajectories:
        turns = trigger(trajectory, gain)
        if turns:
            triggering.append((trajectory, *turns))
    return max(triggering, key=lambda winner: winner[2].verdict.speedup, default=None)


# ----------------------------------------------------------------------------------------------------------------------
# What: proposals and their form


def propose(model, winners, s, library, sampling, generator=None) -> list[list[Summary]]:
    """s summaries of every winner, all sampled in one batch (paper: s = 8, temperature 1.0, at most 2,048 tokens).

    winners: for each task what best_trigger returns. A task without a winner gets no summaries, nor does one whose
    prompt has more than sampling.max_prompt_tokens tokens. Proposals have been checked for form (read_proposals).
    """
    prompts, winner_of_prompt = [], []  # winner_of_prompt: for each prompt its winner's index
    for place, winner in enumerate(winners):
        if not winner:
            continue
        trajectory, first, best = winner
        messages = summary_messages(trajectory.task, trajectory.skills, (first.code, first.verdict.speedup),
                                    (best.code, best.verdict.speedup))
        prompt = model.chat_ids(messages, UPDATE_TOOL)
        if not sampling.max_prompt_tokens or len(prompt) <= sampling.max_prompt_tokens:
            prompts += [prompt] * s
            winner_of_prompt += [place] * s
    known = set()
    for skill in library.skills:
        known |= identity(skill)
    summaries = [[] for _ in winners]
    # Called even without prompts: a call draws one number, however many there are, so all ranks' generators stay equal.
    for place, reply in zip(winner_of_prompt, model.sample(prompts, sampling, generator)):
        trajectory, first, best = winners[place]
        call = model.tool_call(reply.text, "update_skill_library")
        proposals = read_proposals(call, known, lambda text: len(model.encode(text)))
        summaries[place].append(Summary(trajectory.task, trajectory, first, best, reply, proposals))
    return summaries


def read_proposals(call, known=frozenset(), count_tokens=len) -> list[Proposal]:
    """The proposals in a sampled call's arguments. Never raises: a rejected proposal has its reason.

    call            any dict, since the model wrote it; None if the reply has no call
    known           keys (`identity`) of the library's skills
    count_tokens    count_tokens(text) is the length of a text in tokens

    >>> [p.rejected for p in read_proposals(None)]
    ['no tool call']
    """
    if call is None:
        return [Proposal(None, rejected="no tool call")]
    entries = call.get("new_skills")
    if not isinstance(entries, list):
        return [Proposal(entries, rejected="malformed", detail="new_skills is not a list")]
    proposals = []
    for entry in entries:
        proposal = Proposal(entry)
        try:
            proposal.skill = parse_entry(entry)
        except ValueError as problem:
            proposal.rejected = "malformed"
            proposal.detail = str(problem)
        else:
            proposal.known = not identity(proposal.skill).isdisjoint(known)
            proposal.rejected, proposal.detail = form_problem(proposal.skill, len(proposals), count_tokens)
        proposals.append(proposal)
    return proposals


def form_problem(skill, number, count_tokens) -> tuple[str | None, str]:
    """Why a well-formed skill is rejected: (one of REASONS, detail), or (None, "") if it is not.

    number: how many proposals stand before it in the answer. count_tokens: see read_proposals.
    """
    if number >= MOST_PROPOSALS:
        return "too many", ""
    tokens = count_tokens(skill.content)
    if tokens > MOST_CONTENT_TOKENS:
        return "too long", f"{tokens} tokens of content"
    advice = lazy_advice(f"{skill.name}. {skill.description}\n{skill.content}")
    return ("lazy advice", advice) if advice else (None, "")


def identity(skill) -> frozenset[str]:
    """Keys of a skill. Two skills are the same if they share a key: the content, or the name with the description.

    Spacing and case do not count. A proposal that is the same as a skill of the library is verified and rewarded, but
    not staged. A technique that keeps passing would otherwise fill BM25's top 20 with its copies.
    """
    name = re.sub(r"-\d+$", "", skill.name)  # without the number that SkillLibrary.add gave it
    keys = skill.content, f"{name}\n{skill.description}"
    return frozenset(" ".join(key.lower().split()) for key in keys)


def parse_entry(entry) -> Skill:
    """An entry of new_skills as a Skill. Raises ValueError with the reason if the entry is malformed."""
    if not isinstance(entry, dict):
        raise ValueError("not an object")
    texts = [entry.get(key) for key in ("name", "description", "scope", "content")]
    tags = entry.get("tags")
    if not isinstance(tags, list) or not 1 <= len(tags) <= 16:
        raise ValueError("tags is no list of 1 to 16 words")
    if not all(isinstance(text, str) and text.strip() for text in [*texts, *tags]):
        raise ValueError("no text in name, description, scope, content or a tag")
    name, description, scope, content = map(str.strip, texts)
    if not re.fullmatch(r"\w[\w .:/+-]{0,79}", name) or len(description) > 500:
        raise ValueError("the name is no short word or phrase, or the description has more than 500 characters")
    if not re.fullmatch(r"general|task_specific/[\w-]+", scope):
        raise ValueError("the scope is neither general nor task_specific/<family>")
    for section in ("Motivation", r"Key\s+Idea", "Example"):
        if not re.search(rf"^\W*{section}\b", content, re.MULTILINE | re.IGNORECASE):
            raise ValueError("the content lacks one of the sections Motivation, Key Idea, Example")
    return Skill(name, description, scope, tuple(tag.strip() for tag in tags), content)


# ----------------------------------------------------------------------------------------------------------------------
# Whether: verification by execution


def verify(model, sandbox, summaries, sampling, gain):
    """Fill in `attempt`, and `rejected` or the skill's verify_speedup, of every proposal that passed the form check.

    Paper (verification): the Policy answers the same task once, greedily, with the winner's skills and the new one. All
    attempts run as one batch. Equal proposals share an attempt, since greedy answers to equal prompts are equal.
    summaries: for each task the list of its summaries. sampling: the Policy's limits on length.
    """
    pairs_of_job = {}  # job, a (task, skills) pair -> the (summary, proposal) pairs that its attempt verifies
    for summary in sum(summaries, []):
        for proposal in summary.proposals:
            if not proposal.rejected:
                job = summary.task, summary.winner.skills + (proposal.skill,)
                pairs_of_job.setdefault(job, []).append((summary, proposal))
    attempts = rollout(model, sandbox, list(pairs_of_job), 1, replace(sampling, temperature=0.0))
    for pairs, attempt in zip(pairs_of_job.values(), attempts):
        for summary, proposal in pairs:
            apply_pass_rule(proposal, attempt.turns[0], summary.first, gain)


def apply_pass_rule(proposal, attempt, first, gain):
    """Paper (verification): a skill passes iff its attempt is correct and v >= g max(1, v_1).

    v: the attempt's speedup. attempt, first: Turns; `first` is the winner's first turn.
    """
    verdict = attempt.verdict
    proposal.attempt = attempt
    if not verdict.correct:
        proposal.rejected = "not correct"
        proposal.detail = verdict.rejected or verdict.error or "incorrect"
    elif verdict.speedup < gain * max(1.0, first.verdict.speedup):
        proposal.rejected = "too slow"
        proposal.detail = f"{verdict.speedup:.2f} against {first.verdict.speedup:.2f}"
    else:
        proposal.skill = replace(proposal.skill, verify_speedup=verdict.speedup)


def best_skill(summaries) -> Proposal | None:
    """The new proposal with the fastest verification among those that passed, of one task (paper: it is staged).

    Without verification (ablation) no speedup is known, and the first well-formed new proposal is staged.
    """
    proposals = sum((summary.proposals for summary in summaries), [])
    passed = [proposal for proposal in proposals if not proposal.rejected and not proposal.known]
    return max(passed, key=lambda proposal: proposal.skill.verify_speedup or 0, default=None)


def summary_reward(summary, verified=True) -> float:
    """G_sum = max over passing proposals p of min(v_p, 6), or 0 if none passed. v_p: speedup of p's verification.

    The paper calls it the speedup that its best verified skill reached. Without verification (ablation) G_sum is 1 if
    there is a well-formed proposal, else 0.
    """
    speedups = [proposal.skill.verify_speedup for proposal in summary.proposals if not proposal.rejected]
    if not verified:
        return float(bool(speedups))
    return min(max(speedups, default=0.0), SPEEDUP_CAP)


def summary_metrics(summaries) -> dict:
    """What metrics.jsonl says of a step's summaries.

    reward_summary    mean reward of a summary: the speedup of its best passing skill, at most 6, or 0
    summaries         number of summaries
    proposals         number of skills in them, malformed ones included; a reply without a list of skills counts as 1
    passed            number of proposals that passed the form check and the verification, known ones included
    rejected          number of proposals that were rejected for each of REASONS
    """
    proposals = sum((summary.proposals for summary in summaries), [])
    rejected = Counter(proposal.rejected for proposal in proposals if proposal.rejected)
    return {"reward_summary": mean(summary.reward for summary in summaries), "summaries": len(summaries),
            "proposals": len(proposals), "passed": len(proposals) - rejected.total(),
            "rejected": dict(sorted(rejected.items()))}

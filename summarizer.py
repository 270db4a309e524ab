"""The Summary role: what lesson does the best rollout hold, and does execution confirm it?  (Paper: summary trigger,
skill proposals, verification by execution.)

    trigger(trajectory, gain)      did later turns beat a correct first one by enough to be worth a lesson?
    propose(model, winners, s)     s answers for each task's best triggering rollout; their proposals checked for form
    verify(model, sandbox, ...)    every surviving proposal must prove itself in one greedy attempt at the same task
    best_skill(summaries)          the one to stage for a task

This file knows nothing of gradients or snapshot files: reinforce.py fills in the reward and the advantage.
"""

import itertools
import re
from dataclasses import dataclass, field, replace

import backbone
from backbone import Completion
from chat.prompts import PROMPTS, fill, role_messages, skill_text
from policy import Trajectory, Turn, policy_messages, rollout
from skills import Skill
from tasks import Task

MOST_PROPOSALS = 2  # in one answer
MOST_CONTENT_TOKENS = 640  # paper: about 512 tokens of content; a little over is accepted
# Why a proposal was rejected, in the order of the checks; the words that metrics and curves use.
REASONS = ("no tool call", "malformed", "too many", "too long", "lazy advice", "not correct", "too slow")


@dataclass
class Proposal:
    """One skill out of a summary, and what became of it."""

    written: object  # the entry of new_skills as the model wrote it
    skill: Skill | None = None  # None when malformed; verify_speedup is set once it has passed
    known: bool = False  # the library has it: verified and rewarded like any other, but not staged
    rejected: str | None = None  # one of REASONS
    detail: str = ""  # what exactly was wrong
    attempt: Turn | None = None  # the verification


@dataclass
class Summary:
    """One answer of the Summary role to the best triggering rollout of a task."""

    task: Task
    winner: Trajectory
    first: Turn
    best: Turn
    completion: Completion
    proposals: list[Proposal] = field(default_factory=list)
    reward: float | None = None  # filled once by reinforce.py
    advantage: float | None = None  # filled once by reinforce.py


def summary_messages(task, skills, first, best) -> list[dict]:
    """What Summary sees: the task, the skills that the policy had, the first turn and the best one with their speedups.

    first, best: (code, speedup) pairs.
    """
    shown = "\n\n".join(skill_text("skill_in_use", skill) for skill in skills)
    asked = [f"[{message['role'].upper()}]\n{message['content']}" for message in policy_messages(task, ())]
    return role_messages("summary", task_description=task.source.strip(), task_messages_formatted="\n\n".join(asked),
                         injected_skill_content=fill("skills_in_use", skills=shown) if shown else PROMPTS["no_skills"],
                         turn1_speedup=f"{first[1]:.2f}", turn1_code=first[0].strip(),
                         best_turn_speedup=f"{best[1]:.2f}", best_turn_code=best[0].strip(), max_skills=MOST_PROPOSALS)


# ----------------------------------------------------------------------------------------------------------------------
# When: the trigger


def trigger(trajectory, gain) -> tuple[Turn, Turn] | None:
    """(first turn, best turn) of a rollout that is worth a summary, else None.

    Paper: the first turn is correct, the best turn's speedup is at least 1.2 and at least 1.2x the first's.
    """
    first, right = trajectory.turns[0], [turn for turn in trajectory.turns if turn.verdict.correct]
    if not first.verdict.correct:
        return None
    best = max(right, key=lambda turn: turn.verdict.speedup)
    return (first, best) if best.verdict.speedup >= gain * max(first.verdict.speedup, 1.0) else None


def best_trigger(trajectories, gain) -> tuple[Trajectory, Turn, Turn] | None:
    """Of one task's rollouts, the triggering one with the fastest best turn; None when none triggers."""
    found = [(trajectory, *turns) for trajectory in trajectories if (turns := trigger(trajectory, gain))]
    return max(found, key=lambda item: item[2].verdict.speedup, default=None)


# ----------------------------------------------------------------------------------------------------------------------
# What: proposals and their form


def propose(model, winners, s, library, max_new_tokens=2048, temperature=1.0, generator=None,
            max_prompt_tokens=None) -> list[list[Summary]]:
    """s summaries of every winner, all sampled in one batch (paper: s = 8, temperature 1.0, at most 2,048 tokens).

    winners: (trajectory, first turn, best turn) of best_trigger. Each summary's proposals come back checked for form,
    with the reason where one is rejected. A winner whose prompt is over `max_prompt_tokens` gets no summaries.
    """
    summaries, prompts = [[] for _ in winners], []
    asked = []  # for each prompt: whose summaries its reply belongs to, and the winner
    for mine, (trajectory, first, best) in zip(summaries, winners):
        shown = [(turn.code, turn.verdict.speedup) for turn in (first, best)]
        prompt = model.chat_ids(summary_messages(trajectory.task, trajectory.skills, *shown), backbone.UPDATE_TOOL)
        if not max_prompt_tokens or len(prompt) <= max_prompt_tokens:
            prompts += [prompt] * s
            asked += [(mine, trajectory, first, best)] * s
    known = {key for skill in library.skills for key in identity(skill)} if library else set()
    replies = model.sample(prompts, max_new_tokens, temperature, generator)
    for (mine, trajectory, first, best), reply in zip(asked, replies):
        proposals = read_proposals(reply.text, known, lambda text: len(model.encode(text)))
        mine.append(Summary(trajectory.task, trajectory, first, best, reply, proposals))
    return summaries


def read_proposals(text, known=frozenset(), count_tokens=len) -> list[Proposal]:
    """The proposals of a sampled reply, which may hold anything. Never raises; rejected ones carry their reason.

    known: the `identity` of the library's skills; count_tokens: length of a text in tokens.

    >>> [p.rejected for p in read_proposals("I would rather not.")]
    ['no tool call']
    """
    call = backbone.extract_tool_call(text, "update_skill_library")
    if call is None:
        return [Proposal(None, rejected="no tool call")]
    entries = call.get("new_skills")
    if not isinstance(entries, list):
        return [Proposal(entries, rejected="malformed", detail="new_skills is not a list")]
    proposals = []
    for entry in entries:
        skill, problem = _form(entry)
        proposal = Proposal(entry, skill)
        if problem:
            proposal.rejected, proposal.detail = "malformed", problem
        elif len(proposals) >= MOST_PROPOSALS:
            proposal.rejected = "too many"
        elif (tokens := count_tokens(skill.content)) > MOST_CONTENT_TOKENS:
            proposal.rejected, proposal.detail = "too long", f"{tokens} tokens of content"
        elif advice := lazy_advice(f"{skill.description}\n{skill.content}"):
            proposal.rejected, proposal.detail = "lazy advice", advice
        proposal.known = skill is not None and not identity(skill).isdisjoint(known)
        proposals.append(proposal)
    return proposals


def identity(skill) -> frozenset[str]:
    """Texts by which a skill counts as known: its content, or its name with its description, whatever the spacing.

    Such a proposal is worth its reward, as in the release, but is not staged (the release stages it under another
    name): a technique that keeps proving itself would crowd all others out of BM25's top 20 with its copies.
    """
    name = re.sub(r"-\d+$", "", skill.name)  # the library has numbered those that had the same
    texts = skill.content, f"{name}\n{skill.description}"
    return frozenset(" ".join(text.lower().split()) for text in texts)


def _form(entry) -> tuple[Skill | None, str | None]:
    """(skill, None) for a well-formed entry of new_skills, (None, what is wrong) for any other."""
    if not isinstance(entry, dict):
        return None, "not an object"
    texts = [entry.get(key) for key in ("name", "description", "scope", "content")]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        return None, "no text in name, description, scope or content"
    (name, description, scope, content), tags = map(str.strip, texts), entry.get("tags")
    if not re.fullmatch(r"\w[\w .:/+-]{0,79}", name):
        return None, "the name is no short word or phrase"
    if not re.fullmatch(r"general|task_specific/[\w-]+", scope):
        return None, "the scope is neither general nor task_specific/<family>"
    if not isinstance(tags, list) or not tags or not all(isinstance(tag, str) and tag.strip() for tag in tags):
        return None, "tags is no list of words"
    if len(tags) > 16 or len(description) > 500:
        return None, "more than 16 tags or 500 characters of description"
    for section in ("Motivation", r"Key\s+Idea", "Example"):
        if not re.search(rf"^\W*{section}\b", content, re.MULTILINE | re.IGNORECASE):
            return None, "the content lacks one of the sections Motivation, Key Idea, Example"
    return Skill(name, description, scope, tuple(tag.strip() for tag in tags), content), None


# Advice to avoid writing kernels (the release's filter of proposals). A skill may mention torch: what stays a torch
# call, what is replaced, what is slower. It may not send the reader to torch.compile or a vendor library, back to
# PyTorch, or away from kernels. Each pattern is put together from the words above it.
_LIBRARY = (r"(?:torch[._ ]compile|torch\.jit|torch[- ]?inductor|inductor|cu-?blas(?:lt)?|cu-?dnn|cutlass|"
            r"flash[_ -]?attn)\b")
_STOCK = r"(?:eager|plain|native|stock|standard|built-?in|vanilla|regular)\s+"
_TORCH = rf"(?:{_STOCK})*(?:py)?torch\b"
_HAND = r"(?:own|custom|triton|cuda|hand-?written|hand-?rolled)\s+"
_ANY = rf"(?:(?:a|an|any|your|our|new|fused)\s+|{_HAND})*"
_OWN_KERNEL = rf"{_ANY}{_HAND}(?:\w+\s+)?kernels?\b(?!\s+(?:per|for each))"
_USE = (r"(?:us(?:e|ing)|call(?:ing)?|prefer(?:ring)?|apply(?:ing)?|try|choos(?:e|ing)|rely(?:ing)? on|"
        r"switch(?:ing)? to|stick(?:ing)? (?:to|with)|wrap\b[^.\n]{0,40}\b(?:in|with|by)|decorat\w+[^.\n]{0,40}\bwith)")
_HAND_OVER = r"(?:leave|delegat\w+|hand|dispatch\w*|defer\w*|offload\w*|pass|route)"
_DO_NOT = r"(?:avoid|do not|don't|never|no need to|not worth|unnecessary to|refrain from|skip)"
_WRITE = r"(?:writ(?:e|ing)|implement(?:ing)?)"
_LAZY = [re.compile(pattern, re.IGNORECASE) for pattern in (
    rf"\b{_USE}\s+(?:the |a |an |@|`|')*{_LIBRARY}",  # use torch.compile, call cuBLAS
    rf"\b{_USE}\s+(?:the )?{_STOCK}(?:py)?torch\b",  # use the built-in PyTorch function
    rf"\b{_HAND_OVER}\b[^.\n]{{0,50}}\bto\s+(?:the )?`?(?:{_LIBRARY}|{_TORCH}(?!\.\w))",  # leave the matmul to cuBLAS
    rf"\bf[ae]ll(?:s|ing)?[ -]?back\s+(?:to|on|onto)\s+(?:the |`)*"  # fall back to PyTorch
    rf"(?:{_LIBRARY}|{_TORCH}|eager|native|the (?:library|reference))",
    rf"\b(?:just|simply|only)\s+(?:us(?:e|ing)|call(?:ing)?|keep(?:ing)?|return(?:ing)?)\s+(?:the )?`?{_TORCH}",
    rf"\b{_USE}\s+`?torch\.[\w.]+(?:\([^)]*\))?`?\s+(?:instead\b(?! of `?torch)|directly\b)",  # use torch.sum instead
    rf"\b{_DO_NOT}\s+(?:(?:{_WRITE}|creat(?:e|ing)|add(?:ing)?|us(?:e|ing)|launch(?:ing)?)\s+)?{_OWN_KERNEL}",
    rf"\b{_DO_NOT}\s+{_WRITE}\s+{_ANY}kernels?\b",  # do not write a kernel
    rf"\b(?:instead of|rather than)\s+(?:{_WRITE}\s+)?{_OWN_KERNEL}",
    rf"\breplac\w+\s+(?:the |your |this )?(?:\w+\s+)?kernels?\s+(?:with|by)\s+(?:the |a |one )?`?"
    rf"(?:{_LIBRARY}|{_TORCH})",
)]
_TURNED_DOWN = re.compile(  # what comes before, when the advice is the opposite: "do not call cuBLAS"
    r"(?:\bnot|n't|\bnever|\bunlike|\binstead of|\brather than|\bwithout|\bavoid|\bno need to|\bthan|\bbeats|"
    r"\boutperforms|\bno longer)\s+(?:\w+\s+){0,2}$", re.IGNORECASE)


def lazy_advice(text) -> str | None:
    """The words that tell the reader not to write a kernel, or None.

    >>> lazy_advice("Use torch.compile instead.")
    'Use torch.compile'
    >>> lazy_advice("Unlike torch.matmul, one kernel keeps the row in registers; do not call cuBLAS.") is None
    True
    """
    text = re.sub(r"```.*?(```|\Z)", "", text, flags=re.DOTALL)  # an example's code gives no advice
    for pattern in _LAZY:
        for match in pattern.finditer(text):
            if not _TURNED_DOWN.search(text[max(0, match.start() - 40):match.start()]):
                return " ".join(match[0].split())
    return None


# ----------------------------------------------------------------------------------------------------------------------
# Whether: verification by execution


def verify(model, sandbox, summaries, max_new_tokens, max_prompt_tokens, gain):
    """Fill in `attempt`, and `rejected` or the skill's verify_speedup, of every proposal that passed the form check.

    Paper (verification): the policy answers the same task once, greedily, with the winning scheme's skills and the new
    one. All tasks' attempts run as one batch; equal proposals share one, since a greedy answer to one prompt is one
    answer.
    """
    jobs = {}  # (task, skills) -> the proposals that ask for this attempt
    for summary in itertools.chain(*summaries):
        for proposal in summary.proposals:
            if not proposal.rejected:
                job = summary.task, summary.winner.skills + (proposal.skill,)
                jobs.setdefault(job, []).append((summary, proposal))
    attempts = rollout(model, sandbox, list(jobs), 1, max_new_tokens, max_prompt_tokens, temperature=0)
    for asking, attempt in zip(jobs.values(), attempts):
        for summary, proposal in asking:
            apply_pass_rule(proposal, attempt.turns[0], summary.first, gain)


def apply_pass_rule(proposal, attempt, first, gain):
    """A skill passes if its attempt is correct, 1.2x as fast as PyTorch and 1.2x as fast as the winner's first turn."""
    verdict, proposal.attempt = attempt.verdict, attempt
    if not verdict.correct:
        proposal.rejected, proposal.detail = "not correct", verdict.rejected or verdict.error or "incorrect"
    elif verdict.speedup < gain * max(first.verdict.speedup, 1.0):
        proposal.rejected = "too slow"
        proposal.detail = f"speedup {verdict.speedup:.2f}, first turn {first.verdict.speedup:.2f}"
    else:
        proposal.skill = replace(proposal.skill, verify_speedup=verdict.speedup)


def best_skill(summaries) -> Skill | None:
    """Of one task's summaries, the new passing skill with the fastest verification (paper: it is staged)."""
    passed = [p.skill for summary in summaries for p in summary.proposals if not p.rejected and not p.known]
    return max(passed, key=lambda skill: skill.verify_speedup or 0, default=None)

"""The built-in cold start's examples: what the expert would answer in each role.

Five kinds, merged and shuffled (paper: cold start): (a) policy trajectories without skills, (b) with skills, (c)
selection calls, (d) summary calls that saw skills, (e) summary calls that saw none.

What they teach on purpose, and what they leave: a technique shows up nearly always when a skill names it and rarely
otherwise; a later turn adds some of what is missing, or, after a kernel that failed, steps back to the plainest one;
Selection usually, not always, picks what fits, and Summary what the best answer has and the first has not. So the
policy can follow skills and feedback but does not do so reliably on its own: every role has something to gain from RL.
"""

import gc
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import re
import signal
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import torch
from tqdm import tqdm

from chat.prompts import SELECT_TOOL, UPDATE_TOOL
from judge.processes import LIBC, PR_SET_PDEATHSIG
from policy import next_messages, policy_messages
from sandbox import Sandbox
from selector import recall, selection_messages
from skills import Skill, SkillLibrary
from summarizer import summary_messages
from synthetic.families import draw, task_of
from synthetic.kernels import TEMPLATES
from synthetic.planner import ALL, TECHNIQUES, applicable, solution, write_skill
from synthetic.redundant import TAUGHT, pair_skill
from synthetic.training import evaluation_fingerprints, unfit
from tasks import GPU_BATCH_FACTOR, scale_batch

# How often the expert ...
UNPROMPTED = 0.3  # applies a technique that no skill in the prompt names
PROMPTED = 0.95  # applies one that a skill in the prompt names
ADDED_LATER = 0.35  # applies one that is still missing, in a later turn
BROKEN_FIRST = 0.5  # begins several turns with a broken kernel
STEP_BACK = 0.85  # then starts again from the plainest kernel, instead of repairing the broken one
OTHER_LESSON = 0.3  # names, as Summary, a technique that the best answer does not have

# The techniques of widest use are left to be found; enough others are there for Selection's answers to differ.
SEED_LIBRARY = ["row-reduction", "partial-sums-loss", "row-scan", "index-broadcast-parameter", "fold-convolution-bias"]

# ----------------------------------------------------------------------------------------------------------------------
# The texts of an example.


@dataclass
class Example:
    kind: str  # "policy", "policy+skills", "selection", "summary+skills", "summary"
    messages: list  # chat messages; the assistant's are what is learnt
    tool: dict | None
    family: str = ""
    kernel: str = ""  # normalised source of the last kernel, for the diversity filter
    skills: tuple = ()  # names of the skills that are the answer (selection, summary)
    unlearnt: int = 0  # leading assistant messages without loss: a broken first attempt is only context


def policy_reply(answer, left_out=()) -> str:
    """What a solution leaves out (names of skills), its techniques and its code."""
    named = [*left_out, *(name for name in TECHNIQUES if name in answer.used)] or ["a kernel for one operator"]
    return f"Plan: {', '.join(named)}.\n\n```python\n{answer.code}```"


def policy_example(task, skills, replies, verdicts=(), unlearnt=0) -> Example:
    """Turns with these replies, of which the last is learnt. verdicts: on the replies before it."""
    messages = policy_messages(task, skills)
    for reply, verdict in zip(replies[:-1], verdicts):
        messages = next_messages(messages, reply, verdict)
    messages.append({"role": "assistant", "content": replies[-1]})
    return Example("policy" + "+skills" * bool(skills), messages, None, task.family, normalized(replies[-1]),
                   unlearnt=unlearnt)


def tool_example(kind, task, messages, tool, arguments, skills) -> Example:
    """A call of a role's tool."""
    call = json.dumps({"name": tool["function"]["name"], "arguments": arguments})
    reply = {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"}
    return Example(kind, [*messages, reply], tool, task.family, skills=tuple(skills))


def selection_example(task, candidates, applied, weighed, fitting, chosen) -> Example:
    """Selection's choice among candidates. chosen: {name of a skill: why}.

    applied: names of operators. weighed: what is considered, one after the other, and `fitting`, what of it fits.
    """
    answers = ", ".join(f"{name} {'yes' if name in fitting else 'no'}" for name in weighed)
    think = f"The forward applies {', '.join(applied)}. {answers}."
    entries = [{"name": name, "reason": reason} for name, reason in chosen.items()]
    return tool_example("selection", task, selection_messages(task, candidates), SELECT_TOOL,
                        {"think": think, "selected_skills": entries}, chosen)


def summary_example(task, skills, shown, think, written) -> Example:
    """Summary's new skills, after two kernels. shown: (code, speedup) of each."""
    entries = [{"name": s.name, "description": s.description, "scope": s.scope, "tags": list(s.tags),
                "content": s.content} for s in written]
    return tool_example("summary" + "+skills" * bool(skills), task, summary_messages(task, skills, *shown), UPDATE_TOOL,
                        {"think": think, "new_skills": entries}, [s.name for s in written])


def spoil(code, rng) -> str:
    """Break a kernel in one of these ways."""
    for pattern, replacement in rng.sample(TEMPLATES["spoiled"], len(TEMPLATES["spoiled"])):
        found = list(re.finditer(pattern, code))
        if found:
            mark = rng.choice(found)
            return code[:mark.start()] + mark.expand(replacement) + code[mark.end():]
    return code


def normalized(code) -> str:
    """A kernel's shape without its names, numbers and comments: near-duplicates have the same."""
    body = re.sub(r"#.*", "", code[code.index("def forward"):])
    return hashlib.sha1(re.sub(r"\b(?!tl\b|def\b|for\b)[a-z]\w*|\d[\d.e-]*", "_", body).encode()).hexdigest()[:12]


# ----------------------------------------------------------------------------------------------------------------------
# Writing examples.


class Writer:
    """Turns seeds into examples. `sandbox` executes the kernels of several turns, so that their feedback is real."""

    def __init__(self, sandbox):
        self.sandbox = sandbox
        self.evaluation = evaluation_fingerprints()
        self.shown = defaultdict(list)  # technique -> lines that show it, for the example of its skill
        seed = 0
        while len(self.shown) < len(ALL) or min(map(len, self.shown.values())) < 5:
            seed -= 1
            answer = solution(draw(seed, plain=True), ALL)
            if answer:
                for name, lines in answer.shown.items():
                    self.shown[name].append(lines)

    def skill(self, name, rng) -> Skill:
        return write_skill(TECHNIQUES[name], rng, rng.choice(self.shown[name]))

    def skills(self, names, rng) -> list[Skill]:
        return [self.skill(name, rng) for name in names]

    def libraries(self, seed) -> tuple[list[Skill], list[Skill]]:
        """(skills that a run begins with, those of the other techniques), with examples of the expert's."""
        others = [name for name in TECHNIQUES if name not in SEED_LIBRARY]
        return self.skills(SEED_LIBRARY, random.Random(seed)), self.skills(others, random.Random(seed))

    def injected(self, rng, fitting) -> list[Skill]:
        """1 to 3 skills for the prompt: mostly ones that fit; in a third of the prompts none, so that what a skill says
        matters, and not that there is one."""
        fitting, other = sorted(fitting), sorted(ALL - fitting)
        fits = rng.choice([0.0, 0.9, 0.9])
        names = []
        for _ in range(rng.choice([1, 1, 2, 2, 3])):
            names.append(rng.choice(fitting if fitting and rng.random() < fits else other or fitting))
        skills = self.skills(dict.fromkeys(names), rng)
        if rng.random() < 0.1:  # a pair that these problems do not have
            skills[-1] = pair_skill(rng.choice(TAUGHT), rng)
        return skills

    def answer(self, rng, program, named, have=frozenset(), unprompted=UNPROMPTED):
        """The expert's answer: techniques that a skill named, nearly always; others, with probability `unprompted`.

        have: techniques of an earlier turn, which stay. Returns (Solution, techniques asked of it).
        """
        fitting = sorted(applicable(program))
        chosen = set()
        for name in fitting:
            if rng.random() < (PROMPTED if name in named else unprompted):
                chosen.add(name)
        found = solution(program, have | chosen)
        for name in sorted(chosen & named - found.used):
            # One technique may need another to show up at all: neighbours can only join a row kernel that exists.
            for other in fitting:
                fuller = solution(program, have | chosen | {other})
                if name in fuller.used:
                    found = fuller
                    chosen.add(other)
                    break
        return found, have | chosen

    # ---- the five kinds

    def single(self, rng, task, program) -> Example:
        """One turn without or with skills. No execution: the expert's kernels are correct."""
        skills = self.injected(rng, applicable(program)) if rng.random() < 0.55 else []
        answer, _ = self.answer(rng, program, {s.name for s in skills})
        return policy_example(task, skills, [policy_reply(answer)])

    def executed(self, rng, task, program) -> list[Example]:
        """A trajectory of several turns with real feedback, and what Summary makes of it."""
        fitting = applicable(program)
        skills = self.injected(rng, fitting) if rng.random() < 0.4 else []
        named = {s.name for s in skills}
        have = frozenset()
        answers = []
        broken = rng.random() < BROKEN_FIRST
        for turn in range(rng.choice([2, 2, 3])):
            if turn == 1 and broken and rng.random() < STEP_BACK:
                have = frozenset()
                answer = solution(program, have)
            else:  # it is ambitious kernels that break
                unprompted = ADDED_LATER if turn else UNPROMPTED * (1 + broken)
                answer, have = self.answer(rng, program, named, have, unprompted)
            if turn == 0 and broken:
                answer = answer._replace(code=spoil(answer.code, rng))
            answers.append(answer)
        turns = len(answers)
        missing = sorted(fitting - have)
        if missing:  # Summary is shown a better answer, so that there is something to tell
            answer, _ = self.answer(rng, program, named | {rng.choice(missing)}, have, ADDED_LATER)
            answers.append(answer)
        verdicts = self.sandbox.score(task, [answer.code for answer in answers])
        if verdicts[0].correct == broken or not all(verdict.correct for verdict in verdicts[turns - 1:]):
            return []
        if rng.random() < 0.5:  # the clock's name is a word that the policy should not depend on
            verdicts = [replace(verdict, clock="measured") for verdict in verdicts]
        replies = list(map(policy_reply, answers[:turns]))
        trajectory = policy_example(task, skills, replies, verdicts, unlearnt=int(broken))
        summary = self.summary(rng, task, skills, answers, verdicts)
        return [trajectory] + [summary] * (summary is not None)

    def selection(self, rng, task, program) -> Example:
        """A choice from a random library: usually what fits, now and then something else."""
        useful = applicable(program)
        skills = self.skills(rng.sample(sorted(ALL), rng.randint(3, len(ALL))), rng)
        skills += [pair_skill(rng.choice(TAUGHT), rng) for _ in range(rng.choice([0, 0, 2, 8]))]
        library = SkillLibrary(skills)
        candidates = recall(library, task.source) or library.skills[:3]
        fitting = [s for s in candidates if s.name in useful and rng.random() < 0.85]
        other = [s for s in candidates if s.name in ALL - useful]
        if other and rng.random() < 0.2:
            fitting.append(rng.choice(other))
        # One candidate after the other: that nothing fits is likelier than any one set of those that may.
        weighed = [s.name for s in candidates if s.name in ALL]
        fits = {s.name for s in fitting}
        rng.shuffle(fitting)
        chosen = fitting[:rng.choice([1, 2, 2, 3, 3])]
        names = ["arithmetic" if step.name == "formula" else step.name for step in program.steps]
        reasons = {s.name: f"It has work for {s.tags[0]}." for s in chosen}
        return selection_example(task, candidates, [*dict.fromkeys(names)][:6], weighed, fits, reasons)

    def summary(self, rng, task, skills, answers, verdicts) -> Example | None:
        """What the best answer does that the first does not, as skills; None if there is nothing to tell."""
        best = max(range(len(answers)), key=lambda i: verdicts[i].speedup or 0)
        gained = answers[best].used - answers[0].used - {s.name for s in skills}
        gained = [name for name in TECHNIQUES if name in gained]
        if not verdicts[0].correct or not gained:
            return None
        rng.shuffle(gained)
        lessons = gained[:rng.choice([1, 1, 2])]
        if rng.random() < OTHER_LESSON:  # so that s answers differ, and execution can tell them apart
            lessons[0] = rng.choice(sorted(ALL - set(gained)))
        written = []
        for name in lessons:
            lines = answers[best].shown.get(name) or rng.choice(self.shown[name])
            written.append(write_skill(TECHNIQUES[name], rng, lines))
        shown = [(answers[i].code, verdicts[i].speedup) for i in (0, best)]
        return summary_example(task, skills, shown, f"The best answer adds {' and '.join(lessons)}.", written)

    def write(self, seed) -> list[Example]:
        """All examples made from one seed; none when its problem is unfit. With a sandbox, executed trajectories."""
        program = draw(seed, clutter=seed % 3 > 0)
        task = task_of(program)
        if unfit(task, self.evaluation, program.elements) is not None or not solution(program, ALL):
            return []
        rng = random.Random(f"examples {seed}")
        if self.sandbox:
            return self.executed(rng, task, program)
        if rng.random() < 0.3:  # the text of a problem as it looks on a GPU: the same, with a larger batch
            task = scale_batch(task, GPU_BATCH_FACTOR)
        examples = [self.single(rng, task, program), self.single(rng, task, program)]
        if rng.random() < 0.3:
            examples.append(self.selection(rng, task, program))
        return examples


# ----------------------------------------------------------------------------------------------------------------------
# Many examples, in several processes.


def in_processes(start, items, size, processes, title) -> list:
    """What a function makes of each item, joined; it returns a list. start: called in each process, returns it.

    size: items that a process is given at a time. The result does not depend on the number of processes. They are
    forked, since importing PyTorch anew takes each longer than its work, and have one thread each, since PyTorch's
    threads do not survive a fork. No process outlives this call or, if that is killed, the caller.
    """
    firsts = range(0, len(items), size)
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, context, _start, (start, items, size)) as pool:
        try:
            parts = tqdm(pool.map(_make_part, firsts), desc=title, total=len(firsts), unit="chunk", disable=None)
            return list(itertools.chain.from_iterable(parts))
        except KeyboardInterrupt:
            for process in multiprocessing.active_children():
                process.kill()
            raise


def _start(start, *work):
    global _make, _work
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    gc.freeze()  # else its collections would copy what the processes share
    torch.set_num_threads(1)
    _work = work
    _make = start()


def _make_part(first) -> list:
    items, size = _work
    return list(itertools.chain.from_iterable(map(_make, items[first:first + size])))


def sandbox_if(execute) -> Sandbox | None:
    """The sandbox in which the expert's kernels are run, if they are."""
    return Sandbox(device="cpu", trials=1, workers=1, secret="00") if execute else None


def write_examples(first_seed, problems, execute, processes, title) -> list[Example]:
    """Examples from `problems` consecutive seeds."""
    writer = Writer(None)

    def start():
        writer.sandbox = sandbox_if(execute)
        return writer.write

    size = 2 if execute else 50  # running them takes long, and all processes should end at about the same time
    return in_processes(start, range(first_seed, first_seed + problems), size, processes, title)

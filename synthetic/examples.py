"""The built-in cold start's examples: what the expert would answer in each role.

Five kinds, merged and shuffled (paper: cold start): (a) policy trajectories without skills, (b) with skills, (c)
selection calls, (d) summary calls that saw skills, (e) summary calls that saw none.

What they teach on purpose, and what they leave: a technique shows up nearly always when a skill names it and rarely
otherwise; a later turn adds some of what is missing, or, after a kernel that failed, steps back to the plainest one;
Selection usually, not always, picks what fits, and Summary what the best answer has and the first has not. So the
policy can follow skills and feedback but does not do so reliably on its own: every role has something to gain from RL.
"""

import hashlib
import json
import multiprocessing
import random
import re
import signal
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import torch
from tqdm import tqdm

from chat.prompts import SELECT_TOOL, UPDATE_TOOL
from judge.processes import LIBC, PR_SET_PDEATHSIG
from judge.rules import static_check
from judge.verdict import Failed, set_failure
from policy import next_messages, policy_messages
from sandbox import Sandbox, Verdict
from selector import recall, selection_messages
from skills import Skill, SkillLibrary
from summarizer import summary_messages
from synthetic import expert
from synthetic.expert import ALL, TECHNIQUES
from synthetic.generator import NARROW, WIDE, synthesize
from synthetic.redundant import TAUGHT, pair_skill
from tasks import GPU_BATCH_FACTOR, evaluation_fingerprints, scale_batch, unfit

# How often the expert ...
UNPROMPTED = 0.3  # applies a technique that no skill in the prompt names
LEVELS = 0.4, 0.8, 0.95  # the same in the wide distribution, one for each answer: what RL finds has to be written, too
PROMPTED = 0.95  # applies one that a skill in the prompt names
ADDED_LATER = 0.35  # applies one that is still missing, in a later turn (wide distribution: the largest of LEVELS)
BROKEN_FIRST = 0.5  # begins several turns with a broken kernel
STEP_BACK = 0.85  # then starts again from the plainest kernel, instead of repairing the broken one
OTHER_LESSON = 0.3  # names, as Summary, a technique that the best answer does not have
SLIPPED = 0.1  # writes a single turn of the wide distribution again, after a slip with which it does not parse

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


_MARKS = {"index-broadcast-parameter": r"% \w+", "one-program-per-group": r"total|square|rstd", "row-scan": r"cumsum",
          "partial-sums-loss": r"tl\.store|# ", "diagonal-as-scaling": r"diag|// "}


def snippet(technique, code) -> str:
    """A few lines of `code` that show a technique, for a skill's Example section."""
    if "convolution" in technique:
        mark = r"\.contiguous" if technique == "channels-last-convolution" else ""
        call = re.search(rf"^\s+(\w+ = F\.conv\w*\(\w+{mark}.*)$", code, re.MULTILINE)
        return call[1][:100] if call else ""
    kernels = re.findall(r"@triton\.jit\ndef .*?(?=\n\S(?!riton)|\Z)", code, re.DOTALL)
    kernel = next((kernel for kernel in kernels if technique in expert.techniques_in(kernel)), "")
    shown, headed = [], False  # headed: the line before is the torch line that this one replaces
    for line in kernel.strip("\n").split("\n")[2:]:
        marked = re.search(_MARKS.get(technique, r"# |tl\.(max|sum|exp|log)"), line)
        if marked or headed:
            shown.append(line)
        headed = marked and "# " in line
    return "\n".join(shown[:4])


def write_skill(name, rng, code) -> Skill:
    """A technique as a skill record, in one of several wordings, with an example from `code`."""
    t = TECHNIQUES[name]
    content = f"Motivation: {rng.choice(t.motivation)}\nKey Idea: {rng.choice(t.idea)}\nExample:\n{snippet(name, code)}"
    return Skill(t.name, t.description, t.scope, tuple(t.tags), content, None)


def policy_reply(solution, steps=False) -> str:
    """The techniques, with `steps` the plan, from which a kernel's call can be copied, and the code."""
    techniques = ", ".join(name for name in TECHNIQUES if name in solution.used) or "a kernel for one operator"
    plan = f"{solution.plan}\n" if steps else ""
    return f"Plan: {techniques}.\n{plan}\n```python\n{solution.code}```"


def tool_reply(name, arguments) -> dict:
    call = json.dumps({"name": name, "arguments": arguments})
    return {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"}


# The ways in which models break kernels: a pattern, and what stands where it is found.
_SPOILED = [(r"tl\.maximum", "tl.minimum"), (r"0\.5 \*", "0.6 *"), (r"\n +mask = .*", ""),
            (r"(return|=) (fused|row)\(", r"\1 \2d("), (r"import triton\.language as tl\n", ""),
            (r" \+ bias", " - bias"), (r"tl\.program_id\(0\) \* BLOCK", "tl.program_id(0)"), (r"dst_ptr, ", ""),
            (r"\n +self\.\w+ = .*", ""), (r"(def __init__\(self, )(\w+)", r"\1\2, \2"),
            (r"\n    # .*\n    \w+ = .*(?=\n    # )", ""), (r"(\n    # .*\n    \w+ = .*)(?=\n    # )", r"\1\1"),
            (r"\n        \w+ = .*(?=\n        return)", ""), (r"(return|=) (\w+)\((\w+), (\w+)\)", r"\1 \2(\4, \3)")]


def spoil(code, rng) -> str:
    """Break a kernel in one of these ways."""
    for pattern, replacement in rng.sample(_SPOILED, len(_SPOILED)):
        if found := list(re.finditer(pattern, code)):
            mark = rng.choice(found)
            return code[:mark.start()] + mark.expand(replacement) + code[mark.end():]
    return code


def slipped(code, rng) -> tuple[str, Verdict]:
    """The code with a slip of the pen in one place, which breaks its syntax, and what the sandbox says of it."""
    while True:
        mark = rng.choice(list(re.finditer(r"[()\[\],:]", code)))
        text = code[:mark.start()] + rng.choice(["", "(", ")", "]"]) + code[mark.end():]
        try:
            static_check(text)
        except Failed as failed:
            verdict = Verdict()
            set_failure(verdict, text, failed)
            if verdict.error:
                return text, verdict


def normalized(code) -> str:
    """A kernel's shape without its names, numbers and comments: near-duplicates have the same."""
    body = re.sub(r"#.*", "", code[code.index("def forward"):])
    return hashlib.sha1(re.sub(r"\b(?!tl\b|def\b|for\b)[a-z]\w*|\d[\d.e-]*", "_", body).encode()).hexdigest()[:12]


# ----------------------------------------------------------------------------------------------------------------------
# Writing examples.


class Writer:
    """Turns seeds into examples. `sandbox` executes the kernels of several turns, so that their feedback is real."""

    def __init__(self, sandbox, distribution=NARROW):
        self.sandbox, self.evaluation, self.distribution = sandbox, evaluation_fingerprints(), distribution
        self.levels = [UNPROMPTED] if distribution is NARROW else LEVELS
        self.later = ADDED_LATER if distribution is NARROW else max(LEVELS)
        self.codes = {name: [] for name in TECHNIQUES}  # solutions that show a technique, for the Example of its skill
        seed = 0
        while not all(self.codes.values()):
            seed -= 1
            parsed = expert.read(synthesize(seed))
            if solution := parsed and expert.render(parsed, ALL):
                self.remember(solution)
        self.first_codes = dict(self.codes)

    def remember(self, solution):
        for name in solution.used:
            self.codes[name] = self.codes[name][-20:] + [solution.code]

    def forget(self):
        """Back to the first codes: from here on examples do not depend on what was written before."""
        self.codes = dict(self.first_codes)

    def reply(self, solution) -> str:
        """With the plan's steps in the wide distribution; the narrow one's replies are a sixth shorter without."""
        return policy_reply(solution, steps=self.distribution is not NARROW)

    def skill(self, name, rng) -> Skill:
        return write_skill(name, rng, rng.choice(self.codes[name]))

    def seed_library(self, rng) -> SkillLibrary:
        """The library that a run begins with, with examples of the expert's."""
        return SkillLibrary([self.skill(name, rng) for name in SEED_LIBRARY])

    def task(self, seed, clutter=False):
        """(Task, ParsedModel) for a seed, or None when it is unfit or the expert cannot read or solve it."""
        task = synthesize(seed, clutter, self.distribution)
        parsed = None if unfit(task, self.evaluation) else expert.read(task)
        return (task, parsed) if parsed and expert.render(parsed, ALL) else None

    def injected(self, rng, applicable) -> list[Skill]:
        """1 to 3 skills for the prompt: mostly ones that fit; in a third of the prompts none, so that what a skill says
        matters, and not that there is one."""
        fitting, other = sorted(applicable), sorted(ALL - applicable)
        fits = rng.choice([0.0, 0.9, 0.9])
        names = [rng.choice(fitting if fitting and rng.random() < fits else other or fitting)
                 for _ in range(rng.choice([1, 1, 2, 2, 3]))]
        skills = [self.skill(name, rng) for name in dict.fromkeys(names)]
        if rng.random() < 0.1:  # a pair that these problems do not have
            skills[-1] = pair_skill(rng.choice(TAUGHT), rng)
        return skills

    def draw(self, rng, parsed, applicable, named, have=frozenset(), unprompted=UNPROMPTED):
        """The expert's answer: techniques that a skill named, nearly always; others, with probability `unprompted`.

        have: techniques of an earlier turn, which stay. Returns (Solution, techniques asked of it).
        """
        chosen = {name for name in sorted(applicable) if rng.random() < (PROMPTED if name in named else unprompted)}
        solution = expert.render(parsed, have | chosen)
        for name in sorted(chosen & named - solution.used):
            # One technique may need another to show up at all: neighbours can only join a row kernel that exists.
            for other in sorted(applicable - chosen):
                fuller = expert.render(parsed, have | chosen | {other})
                if name in fuller.used:
                    solution, chosen = fuller, chosen | {other}
                    break
        return solution, have | chosen

    # ---- the five kinds

    def policy(self, task, messages, skills, solution, unlearnt) -> Example:
        """The conversation so far and the answer that is learnt."""
        kind = "policy+skills" if skills else "policy"
        messages = messages + [{"role": "assistant", "content": self.reply(solution)}]
        return Example(kind, messages, None, task.family, normalized(solution.code), unlearnt=unlearnt)

    def single(self, rng, task, parsed) -> Example:
        """One turn without or with skills, or a slip and its repair. No execution: the expert's kernels are correct."""
        applicable = expert.applicable(parsed)
        skills = self.injected(rng, applicable) if rng.random() < 0.55 else []
        solution, _ = self.draw(rng, parsed, applicable, {s.name for s in skills}, unprompted=rng.choice(self.levels))
        self.remember(solution)
        messages = policy_messages(task, skills)
        slips = self.distribution is not NARROW and rng.random() < SLIPPED
        if slips:  # in the code; the plan was right
            broken, verdict = slipped(solution.code, rng)
            messages = next_messages(messages, self.reply(solution._replace(code=broken)), verdict)
        return self.policy(task, messages, skills, solution, unlearnt=int(slips))

    def executed(self, rng, task, parsed) -> list[Example]:
        """A trajectory of several turns with real feedback, and what Summary makes of it."""
        applicable = expert.applicable(parsed)
        skills = self.injected(rng, applicable) if rng.random() < 0.4 else []
        named = {s.name for s in skills}
        have, answers, broken = frozenset(), [], rng.random() < BROKEN_FIRST
        for turn in range(rng.choice([2, 2, 3])):
            if turn == 1 and broken and rng.random() < STEP_BACK:
                solution, have = expert.render(parsed, set()), frozenset()
            else:  # it is ambitious kernels that break
                unprompted = self.later if turn else 2 * UNPROMPTED if broken else UNPROMPTED
                solution, have = self.draw(rng, parsed, applicable, named, have, unprompted)
            if turn == 0 and broken:
                solution = solution._replace(code=spoil(solution.code, rng))
            answers.append(solution)
        turns, missing = len(answers), sorted(applicable - have)
        if missing:  # Summary is shown a better answer, so that there is something to tell
            solution, _ = self.draw(rng, parsed, applicable, named | {rng.choice(missing)}, have, ADDED_LATER)
            answers.append(solution)
        verdicts = self.sandbox.score(task, [solution.code for solution in answers])
        if verdicts[0].correct == broken or not all(verdict.correct for verdict in verdicts[turns - 1:]):
            return []
        if rng.random() < 0.5:  # the clock's name is a word that the policy should not depend on
            verdicts = [replace(verdict, clock="measured") for verdict in verdicts]
        messages = policy_messages(task, skills)
        for solution, verdict in zip(answers[:turns - 1], verdicts):
            messages = next_messages(messages, self.reply(solution), verdict)
        trajectory = self.policy(task, messages, skills, answers[turns - 1], unlearnt=int(broken))
        summary = self.summary(rng, task, skills, answers, verdicts)
        return [trajectory, summary] if summary else [trajectory]

    def selection(self, rng, task, parsed) -> Example:
        """A choice from a random library: usually what fits, now and then something else."""
        applicable = expert.applicable(parsed)
        skills = [self.skill(name, rng) for name in rng.sample(sorted(ALL), rng.randint(3, len(ALL)))]
        skills += [pair_skill(rng.choice(TAUGHT), rng) for _ in range(rng.choice([0, 0, 2, 8]))]
        library = SkillLibrary(skills)
        candidates = recall(library, task.source) or library.skills[:3]
        fitting = [s for s in candidates if s.name in applicable and rng.random() < 0.85]
        other = [s for s in candidates if s.name in ALL - applicable]
        if other and rng.random() < 0.2:
            fitting.append(rng.choice(other))
        # One candidate after the other: that nothing fits is likelier than any one set of those that may.
        weighed = ", ".join(f"{s.name} {'yes' if s in fitting else 'no'}" for s in candidates if s.name in ALL)
        rng.shuffle(fitting)
        chosen = fitting[:rng.choice([1, 2, 2, 3, 3])]
        arguments = {"think": f"The forward applies {', '.join(parsed.operators[:6])}. {weighed}.",
                     "selected_skills": [{"name": s.name, "reason": f"It has work for {s.tags[0]}."} for s in chosen]}
        messages = selection_messages(task, candidates) + [tool_reply("select_skills", arguments)]
        return Example("selection", messages, SELECT_TOOL, task.family, skills=tuple(s.name for s in chosen))

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
        written = [write_skill(name, rng, answers[best].code) for name in lessons]
        arguments = {"think": f"The best answer adds {' and '.join(s.name for s in written)}.",
                     "new_skills": [{"name": s.name, "description": s.description, "scope": s.scope,
                                     "tags": list(s.tags), "content": s.content} for s in written]}
        shown = [(answers[i].code, verdicts[i].speedup) for i in (0, best)]
        messages = summary_messages(task, skills, *shown) + [tool_reply("update_skill_library", arguments)]
        return Example("summary+skills" if skills else "summary", messages, UPDATE_TOOL, task.family,
                       skills=tuple(s.name for s in written))

    def write(self, seed) -> list[Example]:
        """All examples made from one seed; none when its problem is unfit. With a sandbox, executed trajectories."""
        task, parsed = self.task(seed, clutter=seed % 3 > 0) or (None, None)
        if task is None:
            return []
        rng = random.Random(f"examples {seed}")
        if self.sandbox:
            return self.executed(rng, task, parsed)
        if rng.random() < 0.3:  # the text of a problem as it looks on a GPU: the same, with a larger batch
            task = scale_batch(task, GPU_BATCH_FACTOR)
        examples = [self.single(rng, task, parsed) for _ in range(2)]
        return examples + ([self.selection(rng, task, parsed)] if rng.random() < 0.3 else [])


# ----------------------------------------------------------------------------------------------------------------------
# Many examples, in several processes.


def in_processes(function, items, size, processes, start, arguments, title) -> list:
    """function(chunk) for chunks of `size` items, joined; start(*arguments) prepares each process.

    No process outlives this call or, if that is killed, the caller.
    """
    chunks = [items[i:i + size] for i in range(0, len(items), size)]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _start, (start, *arguments)) as pool:
        try:
            parts = tqdm(pool.map(function, chunks), desc=title, total=len(chunks), unit="chunk", disable=None)
            return [result for part in parts for result in part]
        except KeyboardInterrupt:
            for process in multiprocessing.active_children():
                process.kill()
            raise


def _start(start, *arguments):
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    start(*arguments)


_writer = None  # one for each process


def _start_writer(execute, wide):
    global _writer
    torch.set_num_threads(1)
    sandbox = Sandbox(device="cpu", trials=1, workers=1, secret="00") if execute else None
    _writer = Writer(sandbox, WIDE if wide else NARROW)


def _write_many(seeds):
    _writer.forget()  # or the examples would depend on what this process wrote before
    return [example for seed in seeds for example in _writer.write(seed)]


def write_examples(first_seed, problems, execute, processes, title, wide=False) -> list[Example]:
    """Examples from `problems` consecutive seeds; the result does not depend on how many processes write them.

    wide: from the wide distribution (generator.py).
    """
    seeds = range(first_seed, first_seed + problems)
    return in_processes(_write_many, seeds, 50, processes, _start_writer, (execute, wide), title)

"""The built-in cold start's examples: what expert.py's expert would answer in each role, and the diversity filter.

Paper section 4: five kinds, merged and shuffled: (a) policy trajectories without skills, (b) with skills, (c) selection
calls, (d) summary calls that saw skills, (e) summary calls that saw none.

What they teach on purpose, and what they leave: a technique shows up nearly always when a skill names it and rarely
otherwise; a later turn adds some of what is missing, or, after a kernel that failed, steps back to the plainest one;
Selection usually, not always, picks what fits; Summary names what the best answer has and the first has not. So the
policy can follow skills and feedback but does not do so reliably on its own: every role has something to gain from RL.
"""

import hashlib
import json
import multiprocessing
import random
import re
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import torch

import backbone
from policy import next_messages, policy_messages
from sandbox import Sandbox
from selector import selection_messages
from skills import Skill, SkillLibrary
from summarizer import summary_messages
from synthetic import expert
from synthetic.expert import ALL, TECHNIQUES
from synthetic.generator import synthesize
from tasks import GPU_BATCH_FACTOR, evaluation_fingerprints, scale_batch, unfit

FREE = 0.3  # probability that the expert applies a technique that no skill named
TOLD = 0.95  # ... that a skill in the prompt named
LEARN = 0.35  # ... that is still missing in a later turn, after feedback
SPOILED = 0.35  # probability that the first of several turns is a broken kernel
RETREAT = 0.85  # ... that the turn after it starts again from the plainest kernel, instead of repairing the broken one
SEED_LIBRARY = ["row-reduction", "partial-sums-loss", "row-scan"]  # the ones of the widest use are left to be found

# ----------------------------------------------------------------------------------------------------------------------
# Writing examples.


@dataclass
class Example:
    kind: str  # "policy", "policy+skills", "selection", "summary+skills", "summary"
    messages: list  # chat messages; the assistant's are what is learnt
    tool: dict | None
    family: str = ""
    kernel: str = ""  # normalised source of the last kernel, for the diversity filter
    skills: tuple = ()  # the skills that are the answer (selection, summary)
    unlearnt: int = 0  # leading assistant messages that carry no loss: a spoiled first attempt is context, not a model


def snippet(technique, code) -> str:
    """A few lines of `code` that show a technique, for a skill's Example section."""
    if technique == "fold-convolution-bias":
        lines = re.findall(r"^\s+\w+ = F\.conv.*$", code, re.MULTILINE)
        return "\n".join(line.strip()[:100] for line in lines[:1])
    marks = {
        "index-broadcast-parameter": r"% \w+",
        "one-program-per-group": r"total|square|rstd",
        "row-scan": r"cumsum",
        "partial-sums-loss": r"tl\.store|# ",
        "diagonal-as-scaling": r"diag|// ",
    }
    for kernel in re.findall(r"@triton\.jit\ndef .*?(?=\n\S(?!riton)|\Z)", code, re.DOTALL):
        if technique in expert.techniques_in(kernel):
            lines = kernel.strip("\n").split("\n")[2:]
            mark = marks.get(technique, r"# |tl\.(max|sum|exp|log)")
            keep = [i for i, line in enumerate(lines) if re.search(mark, line)]
            keep = sorted({j for i in keep for j in (i, i + 1) if "# " in lines[i] or j == i})
            return "\n".join(lines[i] for i in keep[:4] if i < len(lines))
    return ""


def write_skill(technique, rng, code) -> Skill:
    """A technique as a skill record, in one of several wordings, with an example from `code`."""
    t = TECHNIQUES[technique]
    content = (
        f"Motivation: {rng.choice(t.motivation)}\nKey Idea: {rng.choice(t.idea)}\nExample:\n{snippet(technique, code)}"
    )
    return Skill(t.name, t.description, t.scope, t.tags, content, None)


def policy_reply(solution) -> str:
    plan = ", ".join(name for name in TECHNIQUES if name in solution.used) or "a kernel for one operator"
    return f"Plan: {plan}.\n\n```python\n{solution.code}```"


def tool_reply(name, arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def spoil(code, rng) -> str:
    """Break a kernel in one of the ways that models do."""
    ways = [lambda c: c.replace("tl.maximum", "tl.minimum", 1), lambda c: c.replace("0.5 *", "0.6 *", 1),
            lambda c: re.sub(r"\n +mask = .*", "", c, count=1),
            lambda c: re.sub(r"(return|=) (fused|row)\(", r"\1 \2d(", c, count=1),
            lambda c: c.replace("import triton.language as tl\n", "", 1), lambda c: c.replace(" + bias", " - bias", 1),
            lambda c: c.replace("tl.program_id(0) * BLOCK", "tl.program_id(0)", 1),
            lambda c: c.replace("out_ptr, ", "", 1)]
    rng.shuffle(ways)
    return next((spoiled for way in ways if (spoiled := way(code)) != code), code)


def normalized(code) -> str:
    """A kernel's shape without its names, numbers and comments: near-duplicates have the same."""
    body = re.sub(r"#.*", "", code[code.index("def forward"):])
    return hashlib.sha1(re.sub(r"\b(?!tl\b|def\b|for\b)[a-z]\w*|\d[\d.e-]*", "_", body).encode()).hexdigest()[:12]


class Writer:
    """Turns seeds into examples. `sandbox` executes multi-turn kernels so that their feedback is real."""

    def __init__(self, sandbox):
        self.sandbox, self.evaluation = sandbox, evaluation_fingerprints()
        self.first_codes = self.examples_of = {name: [] for name in TECHNIQUES}  # codes that show a technique
        seed = 0
        while any(not codes for codes in self.examples_of.values()):
            seed -= 1
            program = expert.read(synthesize(seed))
            solution = program and expert.render(program, ALL)
            self.remember(solution) if solution else None
        self.first_codes = dict(self.examples_of)

    def remember(self, solution):
        for name in solution.used:
            self.examples_of[name] = self.examples_of[name][-20:] + [solution.code]

    def forget(self):
        self.examples_of = dict(self.first_codes)

    def skill(self, name, rng):
        return write_skill(name, rng, rng.choice(self.examples_of[name]))

    def task(self, seed, clutter=False):
        """(task, program) for a seed, or None when the problem is unfit or the expert cannot read or solve it."""
        task = synthesize(seed, clutter)
        if unfit(task, self.evaluation):
            return None
        program = expert.read(task)
        return (task, program) if program and expert.render(program, ALL) else None

    def injected(self, rng, applicable):
        """1 to 3 skills for the prompt: mostly ones that fit."""
        fitting, other = sorted(applicable), sorted(ALL - applicable)
        names = [rng.choice(fitting if fitting and rng.random() < 0.8 else other or fitting)
                 for _ in range(rng.choice([1, 1, 2, 2, 3]))]
        return [self.skill(name, rng) for name in dict.fromkeys(names)]

    def draw(self, rng, program, applicable, told, have=frozenset(), free=FREE):
        """The expert's answer: techniques that it was told of, nearly always; others, with probability `free`."""
        chosen = {name for name in sorted(applicable) if rng.random() < (TOLD if name in told else free)}
        solution = expert.render(program, have | chosen)
        for name in sorted(chosen & told - solution.used):
            # One technique may need another to show up at all: neighbours can only join a row kernel that exists.
            for other in sorted(applicable - chosen):
                if name in (fuller := expert.render(program, have | chosen | {other})).used:
                    solution, chosen = fuller, chosen | {other}
                    break
        return solution, have | chosen

    # ---- the five kinds

    def single(self, rng, task, program):
        """One turn without or with skills. No execution: the expert's kernels are correct (and tested to be)."""
        applicable = expert.applicable(program)
        skills = self.injected(rng, applicable) if rng.random() < 0.55 else []
        solution, _ = self.draw(rng, program, applicable, {s.name for s in skills})
        self.remember(solution)
        messages = policy_messages(task, skills) + [{"role": "assistant", "content": policy_reply(solution)}]
        return Example("policy+skills" if skills else "policy", messages, None, task.family, normalized(solution.code))

    def executed(self, rng, task, program):
        """A multi-turn trajectory with real feedback, and what Summary makes of it."""
        applicable = expert.applicable(program)
        skills = self.injected(rng, applicable) if rng.random() < 0.4 else []
        told = {s.name for s in skills}
        have, answers, broken = frozenset(), [], rng.random() < SPOILED
        for turn in range(rng.choice([2, 2, 3])):
            if turn == 1 and broken and rng.random() < RETREAT:
                solution, have = expert.render(program, set()), frozenset()
            else:  # it is ambitious kernels that break
                free = LEARN if turn else 2 * FREE if broken else FREE
                solution, have = self.draw(rng, program, applicable, told, have, free)
            reply, code = policy_reply(solution), solution.code
            if turn == 0 and broken:
                code = spoil(code, rng)
                reply = reply.replace(solution.code, code)
            answers.append((reply, code, solution))
        shown = list(answers)  # to Summary: with a better answer, so that there is something to tell
        if missing := sorted(applicable - have):
            solution, _ = self.draw(rng, program, applicable, told | {rng.choice(missing)}, have, LEARN)
            shown.append((policy_reply(solution), solution.code, solution))
        verdicts = self.sandbox.score(task, [code for _, code, _ in shown])
        if verdicts[0].correct == broken or not all(verdict.correct for verdict in verdicts[len(answers) - 1:]):
            return []
        if rng.random() < 0.5:  # the clock's name is a word that the policy should not depend on
            verdicts = [replace(v, clock="measured") for v in verdicts]
        messages = policy_messages(task, skills)
        for (reply, _, _), verdict in zip(answers[:-1], verdicts):
            messages = next_messages(messages, reply, verdict)
        messages.append({"role": "assistant", "content": answers[-1][0]})
        trajectory = Example("policy+skills" if skills else "policy", messages, None, task.family,
                             normalized(answers[-1][1]), unlearnt=int(broken))
        summary = self.summary(rng, task, skills, shown, verdicts)
        return [trajectory, summary] if summary else [trajectory]

    def selection(self, rng, task, program):
        applicable = expert.applicable(program)
        library = SkillLibrary([self.skill(name, rng) for name in rng.sample(sorted(ALL), rng.randint(3, len(ALL)))])
        candidates = library.recall(task.source)
        if not candidates:
            candidates = library.skills[:3]
        fitting = [s for s in candidates if s.name in applicable and rng.random() < 0.85]
        other = [s for s in candidates if s.name not in applicable]
        if other and rng.random() < 0.2:
            fitting.append(rng.choice(other))
        rng.shuffle(fitting)
        chosen = fitting[:rng.choice([1, 2, 2, 3, 3])]
        arguments = {"think": f"The forward applies {', '.join(program.operators[:6])}.",
                     "selected_skills": [{"name": s.name, "reason": f"It has work for {s.tags[0]}."} for s in chosen]}
        messages = selection_messages(task, candidates)
        messages.append({"role": "assistant", "content": tool_reply("select_skills", arguments)})
        return Example("selection", messages, backbone.SELECT_TOOL, task.family, skills=tuple(s.name for s in chosen))

    def summary(self, rng, task, skills, answers, verdicts):
        """What the best answer does that the first does not, as skills; None if there is nothing to tell."""
        best = max(range(len(answers)), key=lambda i: verdicts[i].speedup or 0)
        if not verdicts[0].correct or best == 0:
            return None
        gained = answers[best][2].used - answers[0][2].used
        gained = [name for name in TECHNIQUES if name in gained and name not in {s.name for s in skills}]
        if not gained:
            return None
        rng.shuffle(gained)
        written = [write_skill(name, rng, answers[best][1]) for name in gained[:rng.choice([1, 1, 2])]]
        arguments = {
            "think": f"The best answer adds {' and '.join(s.name for s in written)}.",
            "new_skills": [
                {"name": s.name, "description": s.description, "scope": s.scope, "tags": list(s.tags),
                 "content": s.content}
                for s in written
            ],
        }
        messages = summary_messages(task, skills, *((answers[i][1], verdicts[i].speedup) for i in (0, best)))
        messages.append({"role": "assistant", "content": tool_reply("update_skill_library", arguments)})
        return Example("summary+skills" if skills else "summary", messages, backbone.UPDATE_TOOL, task.family,
                       skills=tuple(s.name for s in written))

    def write(self, seed) -> list[Example]:
        """All examples made from one seed; none when its problem is unfit. With a sandbox, executed trajectories."""
        found = self.task(seed, clutter=seed % 3 > 0)
        if found is None:
            return []
        task, program = found
        rng = random.Random(f"examples {seed}")
        if self.sandbox:
            return self.executed(rng, task, program)
        if rng.random() < 0.3:  # the text of a problem as it looks on a GPU: the same, with a larger batch
            task = scale_batch(task, GPU_BATCH_FACTOR)
        examples = [self.single(rng, task, program) for _ in range(2)]
        return examples + ([self.selection(rng, task, program)] if rng.random() < 0.3 else [])


_writer = None  # one per worker process


def _start_worker(execute):
    global _writer
    torch.set_num_threads(1)
    _writer = Writer(Sandbox(device="cpu", trials=1, workers=1) if execute else None)


def _write_many(seeds):
    _writer.forget()  # or the examples would depend on what this process wrote before
    return [example for seed in seeds for example in _writer.write(seed)]


def write_examples(first_seed, problems, execute, processes, title) -> list[Example]:
    """Examples from `problems` consecutive seeds, in parallel; the result does not depend on how many processes."""
    chunks = [range(s, min(s + 50, first_seed + problems)) for s in range(first_seed, first_seed + problems, 50)]
    examples, start = [], time.time()
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _start_worker, (execute,)) as pool:
        for done, part in enumerate(pool.map(_write_many, chunks), 1):
            examples += part
            print(f"\r{title}: {done}/{len(chunks)} chunks, {len(examples)} examples, {time.time() - start:.0f} s",
                  end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return examples


def diversity_filter(examples, rng, per_kernel=40, per_share=2.0) -> list[Example]:
    """Down-sample what is over-represented (paper section 4); without it Selection collapses onto a few skills.

    Three caps: examples per normalised kernel (near-duplicates), examples whose answer holds the same skills and
    examples of one operator family of one kind, the last two at `per_share` times an even share. Prints what it did.
    """
    order = list(examples)
    rng.shuffle(order)
    families = max(1, len({e.family for e in examples}))
    kinds = Counter(e.kind for e in examples)
    answers = {kind: len({e.skills for e in examples if e.kind == kind}) for kind in kinds}
    kernels, skills, family, kept = Counter(), Counter(), Counter(), []
    for e in order:
        if e.kernel and kernels[e.kernel] >= per_kernel:
            continue
        if e.skills and skills[e.kind, e.skills] >= per_share * max(kinds[e.kind] / answers[e.kind], 50):
            continue
        if e.family and family[e.kind, e.family] >= per_share * kinds[e.kind] / families:
            continue
        kernels[e.kernel] += 1
        skills[e.kind, e.skills] += 1
        family[e.kind, e.family] += 1
        kept.append(e)

    def row(name, measure):
        print(f"  {name:34} {measure(examples):>10} {measure(kept):>10}")

    def share(values):
        counts = Counter(values)
        return f"{max(counts.values()) / max(1, sum(counts.values())):.1%}" if counts else "-"

    print("diversity filter                         before      after")
    row("examples", len)
    for kind in sorted(kinds):
        row(f"  {kind}", lambda es, kind=kind: sum(e.kind == kind for e in es))
    row("distinct kernels", lambda es: len({e.kernel for e in es if e.kernel}))
    row("most frequent kernel", lambda es: share(e.kernel for e in es if e.kernel))
    row("most frequent selected skill", lambda es: share(s for e in es if e.kind == "selection" for s in e.skills))
    row("most frequent distilled skill", lambda es: share(s for e in es if "summary" in e.kind for s in e.skills))
    row("largest operator family", lambda es: share(e.family for e in es if e.family))
    return kept

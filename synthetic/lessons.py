"""Examples of the cold start about redundant operators: to follow a skill, to name a pair, to pick the skill that fits.

What they teach is a manner, not facts. 'Leave out A directly before B' is followed wherever A stands directly before B,
whether the result stays the same or not, and pairs of `redundant.HELD_OUT` are in no example at all.

    Policy      leaves a step out where a skill of the prompt says so. Without one it leaves nothing out in a first
                turn; in a later turn it leaves out some step now and then, whichever: it explores
    Selection   picks the skills whose A stands directly before their B out of 1 to 20, which words alone cannot tell
    Summary     compares the first kernel with the best one and names the pair

`brief` ones are short lessons: the same roles and formats, with the class alone and without its kernel. A small model
learns late to copy what it has never seen, so it takes about a million examples. Nothing is executed for them, and the
speedups that they show are drawn; examples of several turns are executed and show real verdicts.
"""

import random
import re

from chat.calls import extract_code
from chat.prompts import MOST_SKILLS
from chat.rows import encode
from chat.template import Chat
from judge.verdict import KernelTime, Verdict
from skills import Skill
from synthetic.examples import (Example, in_processes, policy_example, policy_reply, sandbox_if, selection_example,
                                spoil, summary_example)
from synthetic.planner import ALL, TECHNIQUES, Solution, write_skill
from synthetic.redundant import HELD_OUT, NAME, NAMES, TAUGHT, TEXTS, TORCH, answer, draw, pair_skill, problem_text
from tasks import Task

EXPLORES = 0.4  # how often a later turn leaves out some step
OTHER_PAIR = 0.15  # how often Summary names another pair, so that its answers differ and execution can tell them apart
BROKEN_FIRST = 0.15  # how often an executed trajectory begins with a broken kernel
RENAMED = 0.5  # how often a brief lesson has other names for its operators

TAUGHT_SET = {*TAUGHT}
OTHERS = TEXTS["others"].split()
OPERATOR = re.compile(rf"(?<!\w)({'|'.join(NAMES)})(?!\w)")


def near_miss(chain, rng) -> tuple[str, str]:
    """A taught pair of which words alone do not tell that it does not fit, or any other one."""
    names = chain.names
    fitting = {*chain.pairs()}
    kind = rng.random()
    if kind < 0.3 and fitting:
        pair = rng.choice(sorted(fitting))[::-1]
    elif kind < 0.6:
        pair = rng.choice(names), rng.choice(names)
    elif kind < 0.8:
        pair = rng.choice([(rng.choice(names), rng.choice(NAMES)), (rng.choice(NAMES), rng.choice(names))])
    else:
        pair = rng.choice(TAUGHT)
    if pair in TAUGHT_SET and pair not in fitting:
        return pair
    return rng.choice(TAUGHT)


class Lesson:
    """One chain of a seed, from which one example is written in a role."""

    def __init__(self, seed, brief):
        self.rng = random.Random(f"lesson {seed} {brief}")
        self.brief = brief
        pair = self.rng.choice(TAUGHT)
        if self.rng.random() >= 0.7:
            pair = None  # a chain without any certain pair
        self.chain = draw(self.rng, pair)
        self.task = Task(f"lesson/{seed}", 0, problem_text(self.chain, self.rng, brief), "redundant")

    def answer(self, chain) -> Solution:
        """The expert's solution; for brief lessons its class alone."""
        found = answer(chain)
        if self.brief:
            found = found._replace(code=found.code[found.code.index("class "):found.code.index("\ndef row(")])
        return found

    def reply(self, chain, left_out) -> str:
        """The solution as a reply. left_out: the pairs that its plan names."""
        return policy_reply(self.answer(chain), [NAME.format(*pair) for pair in left_out])

    def offered(self, most) -> tuple[list[Skill], list]:
        """(skills in random order, the chain's pairs that they name): up to `most`, near misses among them."""
        rng = self.rng
        pairs = self.chain.pairs()
        number = rng.randint(1, most)
        fitting = []
        if pairs:
            fitting = rng.sample(pairs, min(len(pairs), rng.choice([0, 0, 1, 1, 2]), number))
        others = {near_miss(self.chain, rng) for _ in range(number - len(fitting))}
        skills = [pair_skill(pair, rng) for pair in [*fitting, *sorted(others.difference(fitting))]]
        if not self.brief and rng.random() < 0.5:  # the techniques that a run's library has, too
            names = rng.sample(sorted(ALL), rng.randint(1, min(5, most)))
            skills = skills[:most - len(names)] + [write_skill(TECHNIQUES[name], rng, [""]) for name in names]
        rng.shuffle(skills)
        names = {skill.name for skill in skills}
        return skills, [pair for pair in dict.fromkeys(pairs) if NAME.format(*pair) in names]

    def begin(self, share) -> tuple:
        """(skills of the prompt, chain of the first turn, pairs left out in it): those that a skill names, no others.

        Only a `share` of the prompts of Policy and Summary have skills.
        """
        skills = []
        left_out = []
        if self.rng.random() < share:
            skills, left_out = self.offered(MOST_SKILLS)
        return skills, self.chain.without({*left_out}), left_out

    def policy(self) -> Example:
        """A first turn."""
        skills, *first = self.begin(0.8)
        return policy_example(self.task, skills, [self.reply(*first)])

    def later(self) -> Example:
        """A second turn, after a correct kernel: it leaves out some step of PyTorch's now and then."""
        skills, *first = self.begin(0.3)
        verdict = self.verdict(first[0])
        replies = [self.reply(*first), self.reply(*self.explored(*first))]
        return policy_example(self.task, skills, replies, [verdict], unlearnt=1)

    def explored(self, chain, left_out) -> tuple:
        """(chain, pairs that its plan names), with one call of PyTorch's fewer or, mostly, as they were."""
        # Leaving out a call may have made neighbours of two operators that are held out as a pair.
        pairs = [pair for pair in chain.pairs() if pair[0] in TORCH and pair not in HELD_OUT]
        if not pairs or self.rng.random() >= EXPLORES:
            return chain, left_out
        pair = self.rng.choice(pairs)
        return chain.without({pair}), [*left_out, pair]

    def verdict(self, chain) -> Verdict:
        """A drawn verdict on a correct kernel, in which all calls of PyTorch's take equally long."""
        rng = self.rng
        names = [name for name in chain.names if name in TORCH]
        coverage = rng.uniform(0.05, 0.3) if names else 1.0
        profile = [KernelTime(name, (1 - coverage) / len(names), False) for name in names]
        profile = sorted([*profile, KernelTime("row_kernel", coverage, True)], key=lambda entry: -entry.share)
        speedup = rng.uniform(0.9, 2.0)
        reference = rng.uniform(0.02, 0.4)
        return Verdict(True, True, speedup, coverage, rng.choice(["modelled", "measured"]), reference,
                       reference / speedup, profile=profile, bandwidth=rng.uniform(0.02, 0.4))

    def selection(self) -> Example:
        """A choice from up to 20 skills: each pair of neighbours is looked up, each technique weighed."""
        rng = self.rng
        candidates, fitting = self.offered(rng.choice([3, 6, 10, 20]))
        if not self.brief:  # now and then one that fits is passed over: answers differ, and RL can tell them apart
            fitting = [pair for pair in fitting if rng.random() < 0.9]
        offered = [s.name for s in candidates if s.name in TECHNIQUES]
        used = answer(self.chain).used if offered else ()
        weighed = offered + [f"{a} before {b}" for a, b in dict.fromkeys(self.chain.pairs())]
        fits = {*used, *(f"{a} before {b}" for a, b in fitting)}
        chosen = {NAME.format(a, b): f"`{a}` stands directly before `{b}`." for a, b in fitting}
        chosen |= {name: "It has work here." for name in offered if name in used}
        chosen = dict([*chosen.items()][:MOST_SKILLS])
        return selection_example(self.task, candidates, self.chain.names, weighed, fits, chosen)

    def summary(self) -> Example | None:
        """The pair by which the best kernel differs from the first, as a skill; None if the chain has none."""
        rng = self.rng
        chain = self.chain
        if not chain.pairs():
            return None
        skills, first, _ = self.begin(0.4)
        pairs = [pair for pair in first.pairs() if pair in chain.pairs()]
        if not pairs:
            return None
        pair = rng.choice(pairs)
        speedup = rng.uniform(0.9, 2)
        shown = [(self.answer(first).code, speedup),
                 (self.answer(first.without({pair})).code, speedup * rng.uniform(1.3, 6))]
        if not self.brief and rng.random() < OTHER_PAIR:
            pair = rng.choice(chain.pairs())
        place = [*zip(chain.names, chain.names[1:])].index(pair)  # the skill's example are the problem's own lines
        skill = pair_skill(pair, rng, chain.lines[place:place + 2])
        think = f"The best answer leaves out {pair[0]}, which stands directly before {pair[1]}."
        return summary_example(self.task, skills, shown, think, [skill])

    def executed(self, sandbox) -> Example | None:
        """A trajectory of two or three turns with real verdicts; later turns explore now and then."""
        rng = self.rng
        skills, *first = self.begin(0.3)
        replies = [self.reply(*first)]
        broken = rng.random() < BROKEN_FIRST
        turns = rng.choice([1, 1, 2])
        if broken:
            replies *= 2
        while len(replies) <= turns:
            replies.append(self.reply(*self.explored(*first)))
        if broken:
            replies[0] = spoil(replies[0], rng)
        verdicts = sandbox.score(self.task, [extract_code(text) for text in replies])
        if not broken and not verdicts[0].correct:
            return None  # an unfit problem
        return policy_example(self.task, skills, replies, verdicts, unlearnt=int(broken))

    def write(self, sandbox=None) -> Example | None:
        """One example in one of the three roles. With a sandbox, an executed trajectory."""
        if sandbox:
            return self.executed(sandbox)
        example = self.rng.choice([self.policy] * 3 + [self.selection] * 3 + [self.later, self.summary])()
        return renamed(example, self.rng) if self.brief and example and self.rng.random() < RENAMED else example


def renamed(example, rng) -> Example:
    """The same with other names for the operators, so many that no pair is known: it must be looked up."""
    names = dict(zip(NAMES, rng.sample(OTHERS, len(NAMES))))
    for message in example.messages[1:]:  # not in the role's instructions
        message["content"] = OPERATOR.sub(lambda found: names[found[1]], message["content"])
    return example


# ----------------------------------------------------------------------------------------------------------------------
# Many of them, as token ids


def sample_lessons(number) -> list[Example]:
    """Some lessons of both kinds as texts, from which the tokenizer learns their words."""
    written = (Lesson(seed, brief=seed % 3 > 0).write() for seed in range(number))
    return list(filter(None, written))


def write_lessons(tokenizer, first_seed, number, processes, brief=False, execute=False) -> list:
    """Encoded lessons (chat/rows.py) from `number` consecutive seeds."""
    chat = Chat(tokenizer)

    def start():
        sandbox = sandbox_if(execute)

        def write(seed) -> list:
            example = Lesson(seed, brief).write(sandbox)
            return [encode(chat, example.messages, example.tool, example.unlearnt)] if example else []

        return write

    size = 2 if execute else 100
    return in_processes(start, range(first_seed, first_seed + number), size, processes, "lessons")

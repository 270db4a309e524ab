"""What does a checkpoint do with pairs that its cold start never saw? (synthetic/redundant.py, HELD_OUT)

    python results/following.py checkpoints/tiny [--device cuda] [--number 100]

Policy: does it leave out what a skill names, and nothing where no skill fits; how often does a later turn explore?
Summary: does it name the pair? Selection: does it pick exactly the fitting skills out of lists of 1 to 20?
Programs, skills and kernels are drawn as in the cold start; replies are greedy, but for exploration.
"""

import argparse
import json
import random
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from command.process import begin

if __name__ == "__main__":
    begin()

from backbone import Backbone, Sampling
from chat.calls import extract_code
from chat.prompts import SELECT_TOOL, UPDATE_TOOL
from policy import next_messages, policy_messages
from sandbox import Verdict
from selector import selection_messages
from summarizer import summary_messages
from synthetic import redundant
from synthetic.examples import policy_reply
from synthetic.lessons import near_miss
from synthetic.redundant import HELD_OUT, TAUGHT, answer, draw, pair_skill, problem_text
from tasks import Task


def drawn(rng, pair) -> tuple:
    """(program, its Task) with a pair in it."""
    program = draw(rng, pair, most=2, held_out=True)
    return program, Task("probe", 0, problem_text(program, rng))


def forward_of(code) -> list[str]:
    """The lines of a class's forward, or none."""
    found = re.search(r"def forward\(.*?\):\n(.*?)(?=\n\S|\Z)", code or "", re.DOTALL)
    return [line.strip() for line in found[1].strip().split("\n")] if found else []


def same(code, program) -> bool:
    """Does the code apply exactly the steps of a program? Its forward and the headings of its kernel say so."""
    expected = answer(program).code
    headings = [re.findall(r"^    # (.*)", text or "", re.MULTILINE) for text in (code, expected)]
    return forward_of(code) == forward_of(expected) and headings[0] == headings[1]


def told(model, rng, number, pairs, fits, others) -> tuple[list, list]:
    """(prompts, what each reply should apply) of Policy: with the pair's skill if `fits`, and up to `others` more."""
    prompts, expected = [], []
    for i in range(number):
        pair = pairs[i % len(pairs)]
        program, task = drawn(rng, pair)
        skills = [pair_skill(pair, rng)] if fits else []
        more = {near_miss(program, rng) for _ in range(rng.randint(min(1, others), others))} - {*program.pairs()}
        if not fits and others:
            more |= {rng.choice(HELD_OUT)} - {*program.pairs()}
        skills += [pair_skill(other, rng) for other in sorted(more)]
        rng.shuffle(skills)
        prompts.append(model.chat_ids(policy_messages(task, skills[:3])))
        expected.append(program.without({pair}) if fits and pair_skill(pair, rng).name in {s.name for s in skills[:3]}
                        else program)
    return prompts, expected


def follows(model, rng, number, pairs, fits, others) -> float:
    prompts, expected = told(model, rng, number, pairs, fits, others)
    replies = model.sample(prompts, Sampling(700, 0.0))
    good = [same(extract_code(reply.text), program) for reply, program in zip(replies, expected)]
    return sum(good) / len(good)


def explores(model, rng, number) -> dict:
    """Of sampled second turns, without skills: how many leave a step out, and how many the held-out pair's."""
    prompts, programs = [], []
    for i in range(number):
        pair = HELD_OUT[i % len(HELD_OUT)]
        program, task = drawn(rng, pair)
        verdict = Verdict(compiled=True, correct=True, speedup=1.07, coverage=0.2, clock="modelled", reference_ms=0.21,
                          candidate_ms=0.196)
        messages = next_messages(policy_messages(task, ()), policy_reply(answer(program)), verdict)
        prompts.append(model.chat_ids(messages))
        programs.append((program, pair))
    codes = [extract_code(r.text) for r in model.sample(prompts, Sampling(700, 1.0))]
    changed = [not same(code, program) for code, (program, _) in zip(codes, programs)]
    hit = [same(code, program.without({pair})) for code, (program, pair) in zip(codes, programs)]
    greedy = [extract_code(r.text) for r in model.sample(prompts, Sampling(700, 0.0))]
    return {"explores": sum(changed) / number, "explores the pair": sum(hit) / number,
            "greedy explores": sum(not same(code, p) for code, (p, _) in zip(greedy, programs)) / number}


def names(model, rng, number, pairs) -> float:
    """Share of Summary's replies that name the pair by which two kernels differ."""
    prompts, expected = [], []
    for i in range(number):
        pair = pairs[i % len(pairs)]
        program, task = drawn(rng, pair)
        shown = [(answer(program).code, 1.1), (answer(program.without({pair})).code, 3.2)]
        prompts.append(model.chat_ids(summary_messages(task, (), *shown), UPDATE_TOOL))
        expected.append(redundant.NAME.format(*pair))
    good = 0
    for answer, name in zip(model.sample(prompts, Sampling(600, 0.0)), expected):
        entries = (model.tool_call(answer.text, "update_skill_library") or {}).get("new_skills") or [{}]
        good += isinstance(entries[0], dict) and entries[0].get("name") == name
    return good / number


def picks(model, rng, number, length, fits) -> float:
    """Share of Selection's replies that choose exactly the fitting skills of a list of this length."""
    prompts, expected = [], []
    for i in range(number):
        pair = HELD_OUT[i % len(HELD_OUT)]
        program, task = drawn(rng, pair)
        pairs = {pair} if fits else set()
        while len(pairs) < length:
            other = rng.choice([near_miss(program, rng), rng.choice(HELD_OUT)])
            pairs |= {other} - {*program.pairs()}
        skills = [pair_skill(one, rng) for one in sorted(pairs)]
        rng.shuffle(skills)
        prompts.append(model.chat_ids(selection_messages(task, skills), SELECT_TOOL))
        expected.append({redundant.NAME.format(*pair)} if fits else set())
    good = 0
    for answer, chosen in zip(model.sample(prompts, Sampling(400, 0.0)), expected):
        entries = (model.tool_call(answer.text, "select_skills") or {}).get("selected_skills")
        good += isinstance(entries, list) and {e.get("name") for e in entries if isinstance(e, dict)} == chosen
    return good / number


def measure(model, number) -> dict:
    """All figures of a checkpoint, from `number` programs each."""
    rng = random.Random("following")
    taught = [(a, b) for a, b in TAUGHT if a in redundant.TORCH and b in redundant.REDUCTIONS]
    figures = {"told, taught pairs": follows(model, rng, number, taught, True, 2),
               "told": follows(model, rng, number, HELD_OUT, True, 0),
               "told, with others": follows(model, rng, number, HELD_OUT, True, 2),
               "not told": follows(model, rng, number, HELD_OUT, False, 0),
               "told of others": follows(model, rng, number, HELD_OUT, False, 3)}
    figures |= explores(model, rng, number)
    figures |= {"names, taught pairs": names(model, rng, number, taught), "names": names(model, rng, number, HELD_OUT)}
    for length in (1, 2, 3, 6, 12, 20):
        figures[f"picks 1 of {length}"] = picks(model, rng, number, length, True)
        figures[f"picks 0 of {length}"] = picks(model, rng, number, length, False)
    return {name: round(value, 3) for name, value in figures.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="folder of a checkpoint")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--number", type=int, default=100, help="programs for each figure")
    options = parser.parse_args()
    print(json.dumps(measure(Backbone.load(options.model, options.device), options.number), indent=1))

"""What does a checkpoint do with pairs that its cold start never saw? (synthetic/redundant.py, HELD_OUT)

    python results/following.py checkpoints/tiny [--device cuda] [--number 100]

Policy: does it leave out what a skill names, and nothing where no skill fits? Summary: does it name the pair?
Selection: does it pick exactly the fitting skill out of lists of 1 to 20? Problems, skills and kernels are drawn as in
the cold start; replies are greedy.
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
from chat.prompts import MOST_SKILLS, SELECT_TOOL, UPDATE_TOOL
from policy import policy_messages
from selector import selection_messages
from summarizer import summary_messages
from synthetic.lessons import near_miss
from synthetic.redundant import HELD_OUT, NAME, answer, draw, pair_skill, problem_text
from tasks import Task


def probes(rng, number):
    """(pair, chain with it, its Task) so many times, the held-out pairs in turn."""
    for i in range(number):
        pair = HELD_OUT[i % len(HELD_OUT)]
        chain = draw(rng, pair, most=2, held_out=True)
        yield pair, chain, Task("probe", 0, problem_text(chain, rng))


def steps_of(code) -> tuple:
    """What a solution applies: the lines of its forward, and the headings in its kernels."""
    found = re.search(r"def forward\(.*?\):\n(.*?)(?=\n\S|\Z)", code or "", re.DOTALL)
    forward = [line.strip() for line in found[1].strip().split("\n")] if found else []
    return forward, re.findall(r"^    # (.*)", code or "", re.MULTILINE)


def skills_for(pair, chain, rng, fits, number) -> list:
    """`number` skills in random order: with `fits` the pair's among them, else none that fits the chain."""
    pairs = {pair} if fits else set()
    while len(pairs) < number:
        pairs |= {rng.choice([near_miss(chain, rng), rng.choice(HELD_OUT)])} - {*chain.pairs()}
    skills = [pair_skill(one, rng) for one in sorted(pairs)]
    rng.shuffle(skills)
    return skills


def follows(model, rng, number, fits, most) -> float:
    """Policy, with up to `most` skills: the share of replies that leave out the pair's A if a skill says so (`fits`),
    and nothing else."""
    prompts, expected = [], []
    for pair, chain, task in probes(rng, number):
        skills = skills_for(pair, chain, rng, fits, rng.randint(min(1, most), most))
        prompts.append(model.chat_ids(policy_messages(task, skills)))
        expected.append(answer(chain.without({pair} if fits else set())).code)
    codes = [extract_code(reply.text) for reply in model.sample(prompts, Sampling(700, 0.0))]
    return sum(steps_of(code) == steps_of(right) for code, right in zip(codes, expected)) / number


def names(model, rng, number) -> float:
    """Summary: the share of replies that name the pair by which two kernels differ."""
    prompts, expected = [], []
    for pair, chain, task in probes(rng, number):
        shown = [(answer(chain).code, 1.1), (answer(chain.without({pair})).code, 3.2)]
        prompts.append(model.chat_ids(summary_messages(task, (), *shown), UPDATE_TOOL))
        expected.append(NAME.format(*pair))
    good = 0
    for reply, name in zip(model.sample(prompts, Sampling(600, 0.0)), expected):
        entries = (model.tool_call(reply.text, "update_skill_library") or {}).get("new_skills") or [{}]
        good += isinstance(entries[0], dict) and entries[0].get("name") == name
    return good / number


def picks(model, rng, number, length, fits) -> float:
    """Selection: the share of replies that choose exactly the fitting skills of a list of this length."""
    prompts, expected = [], []
    for pair, chain, task in probes(rng, number):
        skills = skills_for(pair, chain, rng, fits, length)
        prompts.append(model.chat_ids(selection_messages(task, skills), SELECT_TOOL))
        expected.append({NAME.format(*pair)} if fits else set())
    good = 0
    for reply, chosen in zip(model.sample(prompts, Sampling(400, 0.0)), expected):
        entries = (model.tool_call(reply.text, "select_skills") or {}).get("selected_skills")
        good += isinstance(entries, list) and {e.get("name") for e in entries if isinstance(e, dict)} == chosen
    return good / number


def measure(model, number) -> dict:
    """All figures of a checkpoint, from `number` problems each."""
    rng = random.Random("following")
    figures = {"told": follows(model, rng, number, True, 1), "told, with others": follows(model, rng, number, True, 3),
               "not told": follows(model, rng, number, False, 0),
               "told of others": follows(model, rng, number, False, MOST_SKILLS), "names": names(model, rng, number)}
    for length in (1, 6, 20):
        figures[f"picks 1 of {length}"] = picks(model, rng, number, length, True)
        figures[f"picks 0 of {length}"] = picks(model, rng, number, length, False)
    return {name: round(value, 3) for name, value in figures.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="folder of a checkpoint")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--number", type=int, default=100, help="problems for each figure")
    options = parser.parse_args()
    print(json.dumps(measure(Backbone.load(options.model, options.device), options.number), indent=1))

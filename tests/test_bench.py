"""bench.py: what counts as a win; that a run can be killed at any instant; that bad input is refused in one line."""

import contextlib
import itertools
import json
import math
import sys
from collections import Counter

import pytest
import torch

import bench
from backbone import Backbone, Completion
from bench import Attempt, Sample
from conftest import FakeSandbox, kernel, selecting, write_lines
from chat.server import Server
from judge.verdict import Verdict
from command.files import ROOT
from command.options import complete
from skills import Skill, SkillLibrary
from tasks import builtin_tasks

# ---- figures


def attempt(speedup=None, low=None, coverage=0.9, **more):
    """A turn: correct with that speedup, or compiled and wrong."""
    fields = {"compiled": True, "correct": speedup is not None, "speedup": speedup, "coverage": coverage,
              "clock": "measured", "speedup_low": speedup if low is None else low}
    return Attempt("reply", Verdict(**{**fields, **more}))


def sample(*turns):
    return Sample("a", 0, [], list(turns))


def shares(row):
    return [row[f"fast_{p:g}"] for p in bench.THRESHOLDS]


CHEAT = attempt(2.0, rejected="decoy")  # never correct, whatever else its verdict says


@pytest.mark.parametrize("turn, standard, strict", [
    (attempt(1.004, low=0.996), 1, 0), (attempt(1.4, low=1.3, coverage=0.0), 2, 0), (attempt(1.2), 1, 1),
    (attempt(3.5), 5, 5), (CHEAT, 0, 0), (attempt(), 0, 0)])
def test_what_counts_as_a_win(turn, standard, strict):
    """How many of the thresholds a turn exceeds. A threshold that is only reached does not count."""
    for rule, exceeded in (("standard", standard), ("strict", strict)):
        assert shares(bench.figures({"a": [sample(turn)]}, "best turn", rule)) == [1] * exceeded + [0] * (5 - exceeded)


def test_figures_by_hand():
    """Two problems, two samples, two turns; the shares and means are worked out here in the comments."""
    samples = {"a": [sample(attempt(0.5), attempt(2.0)), sample(attempt(), attempt())],
               "b": [sample(attempt(1.0), attempt()), sample(attempt(1.3, low=1.1), attempt(0.9))]}
    row = bench.figures(samples, "best turn", "strict")
    assert row["correct"] == 0.75 and shares(row) == [0.5, 0.25, 0.25, 0, 0]
    assert math.isclose(row["geometric_mean"], (2.0 * 1.0 * 1.3) ** (1 / 3))
    assert shares(bench.figures(samples, "best turn", "standard"))[:2] == [0.5, 0.5]  # 1.3 counts by its estimate
    row = bench.figures(samples, "last turn", "strict")  # 2.0, wrong, wrong, 0.9
    assert row["correct"] == 0.5 and shares(row)[0] == 0.25


def test_what_became_of_a_problem():
    broken = [Attempt("reply", Verdict(error=error)) for error in ("does not parse", "no code block")]
    slow, fast = attempt(1.2, bandwidth=0.9), attempt(1.5, bandwidth=0.7, arithmetic=0.1)
    samples = {"a": [sample(attempt(), CHEAT, CHEAT), sample(attempt(1.5, bandwidth=0.2, arithmetic=0.4), *broken)],
               "b": [sample(slow), sample(fast)]}
    one, other = bench.all_figures(samples)["problems"].values()
    assert (list(one.values()), list(other.values())) == ([1, 1.5, 0.4, "decoy"], [2, 1.5, 0.7, ""])


# ---- a run, with a scripted model and a sandbox that believes what a kernel says of itself

LIBRARY = SkillLibrary([Skill("fuse", "fuse softplus", "general", ("softplus",), "Key Idea: one kernel softplus")])


class Scripted(Server):
    """A model whose prompts are messages, as a server's, and whose replies `script` makes up."""

    large, context, check_lengths = False, 4096, Backbone.check_lengths

    def __init__(self, script):
        self.script = script
        self.asked = Counter()  # (temperature, longest reply) -> replies

    @contextlib.contextmanager
    def sampler(self, sampling, generator=None):
        self.sampling, self.generator = sampling, generator
        yield self

    def write(self, prompts):
        for key, prompt in prompts.items():
            self.asked[self.sampling.temperature, self.sampling.max_new_tokens] += 1
            yield key, Completion(prompt, [1], [0.0], self.script(prompt.messages, self.generator), True)


def by_chance(messages, generator):
    """Selects the only skill; writes a kernel of random speed, or now and then nothing."""
    if "select_skills" in messages[0]["content"]:
        return selecting("fuse")
    luck = torch.rand((), generator=generator).item()
    return kernel(luck * 3) if luck > 0.2 else "I have no idea."


def run(tasks, path, model=None, library=None, sandbox=None, done=None, **more):
    """bench.evaluate with usual arguments."""
    given = {"samples": 2, "batch": 4, "device": "cpu", "max_new_tokens": 99, "max_prompt_tokens": 1000, "tokens": 9999}
    options = complete(bench.Options, given | more)
    return bench.evaluate(model or Scripted(by_chance), library, sandbox or FakeSandbox(), tasks, options, done or {},
                          path)


def first(path, script, **more) -> tuple:
    """(the only sample of the first built-in problem, the model)."""
    model = Scripted(script)
    [[sample]] = run(builtin_tasks(1)[:1], path, model, samples=1, **more).values()
    return sample, model


def test_one_sample_is_greedy_and_nothing_is_selected_without_a_library_or_with_bm25_alone(tmp_path):
    """With a library and several samples: test_a_served_model_gets_the_skills_of_a_snapshot."""
    sample, model = first(tmp_path / "without.jsonl", by_chance)
    assert model.asked == {(0.0, 99): 3} and model.sampling.max_prompt_tokens == 1000 and sample.skills == []
    chosen, model = first(tmp_path / "bm25.jsonl", by_chance, library=LIBRARY, bm25_only=True)
    assert model.asked == {(0.0, 99): 3} and chosen.skills == ["fuse"]


def test_a_killed_run_goes_on_where_it_was(tmp_path):
    """Batches of 2, 2, 2 and 1 problems. It is killed in the second one, and again between two batches, in a line."""
    tasks, folder, config = builtin_tasks(1)[:7], tmp_path / "parts", {"seed": 0, "samples": 2}
    path, unfinished = folder / "results.jsonl", folder / bench.UNFINISHED
    whole = run(tasks, tmp_path / "whole.jsonl", library=LIBRARY)
    lines = (tmp_path / "whole.jsonl").read_text().splitlines(keepends=True)
    bench.open_folder(folder, config)
    with pytest.raises(KeyboardInterrupt):
        run(tasks, path, library=LIBRARY, sandbox=FakeSandbox(lives=13))
    assert len(lines) == 14 and path.read_text() == "".join(lines[:4])
    with open(unfinished, "a") as file:
        file.write('{"sample": [')
    done = bench.open_folder(folder, config)
    known = sum(bench.read_answers(unfinished).values(), [])  # of the second batch
    replies = sum("text" in answer for answer in known)
    assert 4 <= replies < 12 and replies < len(known)

    model, sandbox = Scripted(by_chance), FakeSandbox()
    samples = run(tasks, path, model, LIBRARY, sandbox, done=done)
    assert model.asked[1.0, 99] == 3 * 2 * 5 - replies  # none is sampled again, and no kernel is judged again
    kernels = [turn for task in tasks[2:] for s in samples[task.name] for turn in s.turns if turn.verdict.correct]
    assert len(sandbox.scored) == len(kernels) - sum(answer.get("correct", False) for answer in known)
    assert not unfinished.exists()

    path.write_text("".join(lines[:4]) + lines[4][:50])
    done = bench.open_folder(folder, config)
    assert run(tasks, path, library=LIBRARY, done=done) == whole and path.read_text() == "".join(lines)


def test_random_numbers_are_of_the_seed_and_the_tasks(tmp_path):
    tasks = builtin_tasks(1)[:2]
    both = run(tasks, tmp_path / "both.jsonl", batch=2)  # one task a batch
    replies = [[turn.reply for one in both[task.name] for turn in one.turns] for task in tasks]
    assert replies[0] != replies[1]  # not the same numbers for every batch
    one, other = (run(tasks[1:], tmp_path / f"{seed}.jsonl", batch=2, seed=seed)[tasks[1].name] for seed in (0, 1))
    assert one == both[tasks[1].name] != other


def test_no_rank_is_left_without_a_batch(tmp_path, monkeypatch):
    tasks, model = builtin_tasks(1)[:4], Scripted(by_chance)
    whole = run(tasks, tmp_path / "whole.jsonl", batch=4)  # two tasks a batch
    monkeypatch.setattr(bench.ranks, "count", lambda: 2)
    monkeypatch.setattr(bench.ranks, "rank", lambda: 1)
    monkeypatch.setattr(bench.ranks, "each", lambda mine: [whole, mine])
    assert run(tasks, tmp_path / "mine.jsonl", model, batch=100) == whole
    assert model.asked == {(1.0, 99): 2 * 2 * 3}


# ---- strategies

KERNELS = [kernel(3.0), "I have no idea.", kernel(1.2), kernel(1.0), kernel(9.0), kernel(4.0), kernel(0.9)]


@pytest.mark.parametrize("strategy, seen", [
    ("parallel", [""] * 7), ("judge", ["", "0", "1", "2", "3", "4", "5"]),
    ("serial", ["", "0", "01", "012", "0123", "0123", "2345"])])
def test_what_an_attempt_sees(strategy, seen, tmp_path):
    """Attempts by number. serial shows the first of the best 4: 0, 4 and 5 earn 2.0, 1 nothing, 2 1.1 and 3 1.0."""
    replies, asked = iter(KERNELS), []

    def script(messages, generator):
        if "You judge" in messages[0]["content"]:
            return "Bottleneck: the tail.\nAnd more."
        asked.append(messages)
        return next(replies)

    sample, model = first(tmp_path / "results.jsonl", script, turns=7, strategy=strategy)
    shown = [[message["content"] for message in messages if message["role"] == "assistant"] for messages in asked]
    assert ["".join(str(KERNELS.index(reply)) for reply in replies) for replies in shown] == seen
    assert model.asked.keys() == {(0.0 if strategy != "parallel" else 1.0, 99)}  # one sample is greedy if that helps
    judged = strategy == "judge"  # by the same model: its first line is in the next prompt
    assert asked[2][-1]["content"].endswith("\nBottleneck: the tail.") == judged
    assert sample.turns[0].tokens == 1 + judged


def test_evolution_begins_with_nothing_and_then_shows_one_parent(tmp_path):
    """Which one: test_a_parents_chance_falls_with_its_rank. The budget of tokens ends a sample; a reply has one."""
    parents = []

    def script(messages, generator):
        parents.append(sum(message["role"] == "assistant" for message in messages))
        return kernel(2.0)

    sample, _ = first(tmp_path / "few.jsonl", script, strategy="evolve", turns=60, tokens=9)
    assert parents == [0] * 4 + [1] * 5 and len(sample.turns) == 9


# ---- the command

def by_task(messages, generator):
    """A right and fast kernel for level1/1_AffineSoftplus. Else no code."""
    if "softplus" not in messages[1]["content"]:
        return "This one is too hard."
    return f"```python\n{(ROOT / 'results/honest/level1_1_AffineSoftplus/candidate.py').read_text()}```"


def test_command_end_to_end(tmp_path, monkeypatch, capsys, borrowed, refusal):
    """A problem that is solved, one that cannot be used and one that gets no code, through the real sandbox."""
    borrowed(bench)
    model, out = Scripted(by_task), tmp_path / "out"
    monkeypatch.setattr(bench.Backbone, "load", lambda path, device: model)
    good, hard = builtin_tasks(1)[0].source, builtin_tasks(1)[4].source
    sources = {"1_Good": good, "2_Bad": good.replace("F.softplus(x)", "F.no_softplus_there(x)"), "3_Hard": hard}
    for name, source in sources.items():
        write_lines(tmp_path / f"KernelBench/level1/{name}.py", source)
    arguments = (f"--device cpu --level 1 --ids 1-3 --samples 1 --turns 2 --kernelbench {tmp_path} --model {tmp_path} "
                 f"--out {out}").split()
    assert bench.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].startswith("level1/3_Hard")  # as each ends: no kernel of it has to be judged
    summary = json.loads((out / "summary.json").read_text())
    assert [(row["counted"], row["rule"]) for row in summary["figures"]] == list(
        itertools.product(bench.COUNTED, bench.RULES))
    assert summary["clock"] == "modelled" and [shares(row)[0] for row in summary["figures"]] == [1 / 3] * 4
    good, bad, hard = (summary["problems"][f"level1/{name}"] for name in sources)
    assert [good["correct"], bad["correct"], hard["correct"]] == [1, 0, 0]
    assert "no_softplus_there" in bad["error"] and "no code block" in hard["error"]
    assert (out / "report.html").stat().st_size > 10000
    assert "(seed changed)" in refusal(bench.main, *arguments, "--seed", 1)
    model.asked.clear()
    assert bench.main(arguments) == 0 and not model.asked
    again = capsys.readouterr().out
    assert "\n3 samples found," in again and again.splitlines()[3:] == lines[6:]


@pytest.mark.parametrize("arguments, message", [
    ("--device cuda", "no GPU"), ("--server http://x --thinking", "--server and --thinking"),
    ("--strategy evolve --turns 4", "below --turns 5 no attempt sees an earlier one"),
    ("--max-new-tokens 4096 --max-prompt-tokens 1", "the model's context is 4096"),
    ("--max-new-tokens 4096", "prompts of 0 tokens"), ("--baseline compile", "no torch.compile")])
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, tmp_path, monkeypatch, refusal):
    monkeypatch.setattr(bench.Backbone, "load", lambda path, device: Scripted(by_task))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    assert message in refusal(bench.main, "--level", 1, "--model", tmp_path, *arguments.split())
    assert not (tmp_path / "runs").exists()


def test_ctrl_c_keeps_each_problem_that_is_done_and_leaves_a_page(tmp_path, monkeypatch):
    """It comes in the second batch of three."""
    monkeypatch.setattr(bench, "Sandbox", lambda *_, **settings: FakeSandbox(lives=8))
    monkeypatch.setattr(bench.Backbone, "load", lambda path, device: Scripted(lambda *_: kernel(1.5)))
    monkeypatch.setattr(sys, "argv", ["bench.py", "--ids", "1-6"])
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt, match="continue with: python bench.py --ids 1-6"):
        bench.main(f"--device cpu --ids 1-6 --samples 1 --no-skills --batch 2 --model {tmp_path} --out {out}".split())
    assert len(bench.read_results(out / "results.jsonl")) == 2
    assert "A part of the benchmark: 2 of 6 problems are done." in (out / "report.html").read_text()

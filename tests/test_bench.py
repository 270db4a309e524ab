"""bench.py: what counts as a win, that a run can be interrupted, and that bad input is refused in one line."""

import argparse
import json
import math
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch

import bench
from backbone import SELECT_TOOL, Backbone, Completion
from bench import Attempt, Sample
from chat.prompts import PROMPTS
from conftest import FakeSandbox, ScriptedSampler, kernel, selecting
from judge.verdict import KernelTime, Verdict
from page import strategies
from policy import bottleneck
from skills import Skill, SkillLibrary
from synthetic.expert import ALL, read, render
from tasks import UserError, builtin_tasks, run_command, scale_batch

# ---- figures


def attempt(speedup=None, low=None, coverage=0.9, **more):
    """A turn: correct with that speedup, or compiled and wrong."""
    right = speedup is not None
    fields = {"compiled": True, "correct": right, "correct_loose": right, "speedup": speedup,
              "speedup_low": speedup if low is None else low, "coverage": coverage, "clock": "measured"}
    return Attempt("reply", True, Verdict(**{**fields, **more}))


def right(*profile, **more):
    """The verdict on a correct kernel with a profile."""
    return Verdict(compiled=True, correct=True, speedup=1.0, profile=list(profile), **more)


def sample(*turns, task="a", index=0):
    return Sample(task, index, [], list(turns))


HALF = dict(correct_loose=True, reference_ms=3.0, candidate_ms=2.0, error="off by 1e-3")  # 1.5 times as fast


@pytest.mark.parametrize("turn, rule, tolerance, exceeded", [
    (attempt(1.004, low=0.996), "standard", 1e-4, 1), (attempt(1.004, low=0.996), "strict", 1e-4, 0),
    (attempt(1.4, low=1.3, coverage=0.0), "standard", 1e-4, 2), (attempt(1.4, coverage=0.0), "strict", 1e-4, 0),
    (attempt(1.2), "strict", 1e-4, 1), (attempt(2.01, low=1.9), "strict", 1e-4, 3),
    (attempt(**HALF), "standard", 1e-4, 0), (attempt(**HALF), "standard", 1e-2, 2),
    (attempt(**HALF), "strict", 1e-2, 0), (attempt(**HALF, clock="modelled"), "strict", 1e-2, 2)])
def test_what_counts_as_a_win(turn, rule, tolerance, exceeded):
    """How many of the thresholds a turn exceeds. A threshold that is only reached does not count."""
    row = bench.figures({"a": [sample(turn)]}, 9, "eager", tolerance, rule)
    assert [row[f"fast_{p:g}"] for p in bench.THRESHOLDS] == [1] * exceeded + [0] * (4 - exceeded)


def test_figures_by_hand():
    """Two problems, two samples, two turns; the shares and means are worked out here in the comments."""
    samples = {"a": [sample(attempt(0.5), attempt(2.0)), sample(attempt(), attempt())],
               "b": [sample(attempt(1.0), attempt(), index=0), sample(attempt(1.3, low=1.1), attempt(0.9), index=1)]}
    row = bench.figures(samples, 2, "eager", 1e-4, "strict")
    assert [row["correct"]] + [row[f"fast_{p:g}"] for p in bench.THRESHOLDS] == [0.75, 0.5, 0.25, 0.25, 0]
    assert math.isclose(row["geometric_mean"], (2.0 * 1.0 * 1.3) ** (1 / 3))
    row = bench.figures(samples, 2, "eager", 1e-4, "standard")
    assert (row["fast_1"], row["fast_1.2"]) == (0.5, 0.5)  # 1.3 now counts by its estimate
    row = bench.figures(samples, 1, "eager", 1e-4, "strict")  # first turns: 0.5, wrong, 1.0, 1.1 for sure
    assert (row["correct"], row["fast_1"]) == (0.75, 0.25)


def test_what_counts_once():
    """Task a: 3.0, then a turn that repeats it and one at 0.5; or 2.0, then wrong. Task b: never correct."""
    turns = [attempt(3.0), attempt(9.0), attempt(0.5)]
    turns[0].logprob, turns[1].logprob, turns[2].logprob, turns[1].repeats = -0.5, -9.0, -0.1, True
    samples = {"a": [sample(*turns), sample(attempt(2.0), attempt())], "b": [sample(attempt(), attempt())] * 2}
    rows = {of: bench.figures(samples, 2, "eager", 1e-4, "strict", of) for of in bench.OF}
    assert {of: (row["correct"], row["fast_1"], row["fast_2"]) for of, row in rows.items()} == {
        "mean of samples": (0.5, 0.5, 0.25), "last turn": (0.25, 0, 0), "best sample": (0.5, 0.5, 0.5),
        "least likely": (0.5, 0.5, 0.5), "most likely": (0.5, 0.5, 0)}
    assert [rows[of]["geometric_mean"] for of in bench.OF[-2:]] == pytest.approx([3, 2])


NO_CODE = Attempt("sorry", False, Verdict(error="the reply has no code block that defines ModelNew"))
UNUSABLE, BROKEN = (Attempt("reply", True, Verdict(error=error)) for error in ("unusable task: x", "does not parse"))
CHEAT = attempt(2.0, rejected="decoy")  # never correct, whatever else its verdict says


@pytest.mark.parametrize("turns, became", [
    ([NO_CODE, BROKEN, attempt()], "wrong"), ([NO_CODE, BROKEN], "broken"), ([NO_CODE], "no code"),
    ([UNUSABLE], "unusable"), ([attempt(), CHEAT], "rejected"), ([CHEAT, attempt(1.01, low=0.99)], "correct"),
    ([attempt(0.8), attempt(1.2)], "faster")])
def test_what_became_of_a_sample(turns, became):
    assert bench.kind(sample(*turns)) == became


def test_clocks_are_never_mixed():
    samples = {"a": [sample(attempt(1.5)), sample(attempt(1.5, clock="modelled"))]}
    with pytest.raises(UserError, match="mixed"):
        bench.all_figures(samples, 1, ["eager"])


# ---- a run, with a scripted model and a sandbox that believes what a kernel says of itself

LIBRARY = SkillLibrary([Skill("fuse", "fuse softplus", "general", ("softplus",), "Key Idea: one kernel softplus")])


class Scripted:
    """A model whose prompts are numbers into a list of conversations, and whose replies `script` makes up."""

    at_a_time, sample, large, context, check_lengths = None, Backbone.sample, False, 4096, Backbone.check_lengths

    def __init__(self, script):
        self.script, self.seen = script, []
        self.asked = Counter()  # (temperature, longest reply) -> replies

    def chat_ids(self, messages, tool=None):
        self.seen.append((messages, tool))
        return [len(self.seen) - 1]

    def next_ids(self, completion, messages, tool=None):
        return self.chat_ids(messages, tool)

    def sampler(self, *how):
        self.top_p = how[3] if how[3:] else 1.0
        return Sampler(self, *how)


class Sampler(ScriptedSampler):
    """It counts what it is asked for."""

    def answer(self, prompt):
        self.model.asked[self.temperature, self.limit] += 1
        return Completion(prompt, [1], [0.0], self.model.script(*self.model.seen[prompt[0]], self.generator), True)


def by_chance(messages, tool, generator):
    """Selects the only skill; writes a kernel of random speed, or now and then nothing."""
    if tool is SELECT_TOOL:
        return selecting("fuse")
    luck = torch.rand((), generator=generator).item()
    return kernel(luck * 3) if luck > 0.2 else "I have no idea."


class Scorer(FakeSandbox):
    """It finds kernels `factor` times as fast as they say, right to 1e-2 only if not `exact`, and is interrupted after
    `lives` calls."""

    def __init__(self, factor=1.0, lives=math.inf, exact=True):
        super().__init__()
        self.factor, self.lives, self.exact = factor, lives, exact

    def submit(self, pairs):
        self.lives -= 1
        if self.lives < 0:
            raise KeyboardInterrupt
        return super().submit(pairs)

    def verdict(self, task, code):
        code = re.sub(r"speedup ([\d.]+)", lambda said: f"speedup {self.factor * float(said[1])}", code)
        found = super().verdict(task, code)
        return found if self.exact else replace(found, correct=False, speedup=None, speedup_low=None)


def run(tasks, path, model=None, library=None, sandbox=None, compiled=None, done=None, **more):
    """bench.evaluate with usual arguments."""
    usual = {"samples": 2, "turns": 3, "batch": 4, "seed": 0, "device": "cpu", "temperature": 1.0, "top_p": 0.95,
             "max_new_tokens": 99, "max_prompt_tokens": 1000, "bm25_only": False, "strategy": "serial", "keep": 4,
             "judge": "rule", "tokens": 10**6}
    return bench.evaluate(model or Scripted(by_chance), library, sandbox or Scorer(), compiled, tasks,
                          argparse.Namespace(**usual | more), {} if done is None else done, path)


@pytest.fixture
def first(tmp_path):
    """A function that runs the first built-in problem: (its samples, by its name; the model)."""
    def run_first(script, **more):
        model = Scripted(script)
        return run(builtin_tasks(1)[:1], tmp_path / "results.jsonl", model, **more), model

    return run_first


def only(samples) -> Sample:
    """The only sample of the only task."""
    [[sample]] = samples.values()
    return sample


def test_selection_is_greedy_once_a_task_and_its_skills_are_injected(tmp_path):
    tasks, model = builtin_tasks(1)[:2], Scripted(by_chance)
    samples = run(tasks, tmp_path / "results.jsonl", model, LIBRARY)
    assert model.asked == {(0, 99): 2, (1.0, 99): 12}  # selections; 2 tasks, 2 samples, 3 turns
    assert model.top_p == 0.95
    assert all("Key Idea: one kernel softplus" in m[0]["content"] for m, tool in model.seen if tool is None)
    assert [len(s.turns) for rows in samples.values() for s in rows] == [3] * 4
    assert [s.skills for s in samples[tasks[0].name]] == [["fuse"]] * 2
    model = Scripted(by_chance)
    run(tasks[:1], tmp_path / "without.jsonl", model, samples=1)
    assert model.asked == {(0.0, 99): 3}  # no selection; one sample is greedy
    assert not any("Key Idea" in m[0]["content"] for m, _ in model.seen)


def test_interrupted_run_ends_as_the_uninterrupted_one(tmp_path):
    tasks, path = builtin_tasks(1)[:7], tmp_path / "parts.jsonl"  # batches of 2, 2, 2 and 1
    whole = run(tasks, tmp_path / "whole.jsonl", library=LIBRARY)
    with pytest.raises(KeyboardInterrupt):  # in the middle of the second batch
        run(tasks, path, library=LIBRARY, sandbox=Scorer(lives=5))
    lines = (tmp_path / "whole.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 14 and path.read_text() == "".join(lines[:4])
    for complete in (4, 7):  # killed while it wrote the next line: the second batch's first, its last
        path.write_text("".join(lines[:complete]) + lines[complete][:50])
        assert len(bench.read_results(path)) == complete and not path.read_text().endswith("\n")  # only read
        done, model = bench.read_results(path, mend=True), Scripted(by_chance)
        assert len(done) == complete
        assert run(tasks, path, model, LIBRARY, done=done) == whole and path.read_text() == "".join(lines)
        assert model.asked == {(0, 99): 5, (1.0, 99): 5 * 2 * 3}  # the first batch was not done again
        assert bench.read_results(path) == {(s.task, s.index): s for rows in whole.values() for s in rows}


def test_on_a_gpu_a_task_is_done_when_its_samples_are(tmp_path):
    """Not when its batch is, of which others may need minutes."""
    tasks, path, sandbox, model = builtin_tasks(1)[:4], tmp_path / "results.jsonl", Scorer(lives=2), Scripted(by_chance)
    sandbox.device, model.at_a_time = "cuda", 2
    with pytest.raises(KeyboardInterrupt):
        run(tasks, path, model, sandbox=sandbox, batch=8, turns=1)
    done, model = bench.read_results(path), Scripted(by_chance)
    assert list(done) == [(task.name, i) for task in tasks[:2] for i in range(2)]
    sandbox.lives = 9
    samples = run(tasks, path, model, sandbox=sandbox, batch=8, turns=1, done=done)
    assert model.asked == {(1.0, 99): 4} and list(samples) == [task.name for task in tasks]
    assert bench.read_results(path) == done and len(done) == 8


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
    done = {(sample.task, sample.index): sample for rows in whole.values() for sample in rows}
    monkeypatch.setattr(bench.ranks, "count", lambda: 2)
    monkeypatch.setattr(bench.ranks, "rank", lambda: 1)
    monkeypatch.setattr(bench.ranks, "each", lambda mine: [done, mine])
    assert run(tasks, tmp_path / "mine.jsonl", model, batch=100) == whole
    assert model.asked == {(1.0, 99): 2 * 2 * 3}


def test_results_with_a_broken_line_are_refused(tmp_path):
    path = tmp_path / "results.jsonl"
    for line in ("{}", "no JSON", "[1]", '{"task": "a", "index": 0, "skills": [], "turns": [3]}'):
        path.write_text(line + "\n")
        with pytest.raises(UserError, match="line 1: cannot be read"):
            bench.read_results(path)


@pytest.mark.parametrize("exact, against_eager, against_compile", [(True, [1, 1], [0, 0]), (False, [0, 1], [0, 0])])
def test_torch_compile_is_reported_beside_eager(exact, against_eager, against_compile, first):
    """Fast_2 at both tolerances of a kernel at 3x and at 1.5x; also of one that is right to one percent only."""
    samples, _ = first(lambda *_: kernel(3.0), turns=1, sandbox=Scorer(exact=exact), compiled=Scorer(0.5, exact=exact))
    rows = [row for row in bench.all_figures(samples, 1, ["eager", "compile"])["figures"]
            if (row["rule"], row["of"]) == ("standard", "mean of samples")]
    assert [row["fast_2"] for row in rows] == against_eager + against_compile
    assert [row["fast_1.2"] for row in rows] == against_eager * 2


# ---- strategies

KERNELS = [kernel(1.5), "I have no idea.", kernel(1.2), kernel(3.0), kernel(1.1), kernel(0.9)]


@pytest.mark.parametrize("strategy, seen", [
    ("parallel", ["", "", "", "", "", ""]), ("judge", ["", "0", "1", "2", "3", "4"]),
    ("serial", ["", "0", "01", "01", "23", "23"])])
def test_what_an_attempt_sees(strategy, seen, first):
    """Attempts by number. serial keeps 2: 0 earns 1.25, 1 nothing, 2 1.1, 3 2.0 and 4 1.05."""
    replies, asked = iter(KERNELS), []

    def script(messages, tool, generator):
        asked.append(messages)
        return next(replies)

    _, model = first(script, samples=1, turns=6, strategy=strategy, keep=2)
    shown = [[message["content"] for message in messages if message["role"] == "assistant"] for messages in asked]
    assert ["".join(str(KERNELS.index(reply)) for reply in replies) for replies in shown] == seen
    assert ("Bottleneck: it is not correct yet" in asked[2][-1]["content"]) == (strategy == "judge")
    assert model.asked.keys() == {(0.0 if strategy != "parallel" else 1.0, 99)}  # one sample is greedy if that helps


def test_evolution_draws_parents_by_rank_and_scores_no_kernel_twice(first):
    """Four attempts from nothing; then parents are the correct kernels, the fastest most often."""
    asked, sandbox = [], Scorer()

    def script(messages, tool, generator):
        asked.append([message["content"] for message in messages if message["role"] == "assistant"])
        n = len(asked) - 1
        return kernel(*((1.5, 0.8, "b"), (2.0, 0.8, "a"))[n % 2]) if n < 4 else kernel(1.0, 0.8, f"c\n    x = {n}")

    attempts = only(first(script, sandbox=sandbox, samples=1, turns=60, strategy="evolve")[0]).turns
    assert asked[:4] == [[]] * 4 and all(len(parents) == 1 for parents in asked[4:])
    # Without comments the first four are one kernel: the second to fourth repeat it and are not scored.
    assert [turn.repeats for turn in attempts[:5]] == [False, True, True, True, False]
    assert len(sandbox.scored) == 60 == sum(not turn.repeats for turn in attempts)
    ranks = Counter(parents[0] for parents in asked[8:])
    first = ranks[kernel(1.5, 0.8, "b")]
    assert max(ranks.values()) == first and 15 < first < 45 and len(ranks) == 4  # 1 / (1 + 1/2 + 1/3 + 1/4) is 48 %


def test_the_token_budget_ends_a_sample(first):
    sample = only(first(lambda *_: kernel(2.0), samples=1, strategy="evolve", tokens=9)[0])  # a reply has one token
    assert len(sample.turns) == 9 and len(sample.scored) == 1


def test_a_model_may_be_its_own_judge(first):
    def script(messages, tool, generator):
        advice = "<think>\nHm.\n</think>\n\nFuse the tail.\nAnd more."
        return advice if "You judge" in messages[0]["content"] else kernel(2.0)

    samples, model = first(script, samples=1, turns=9, strategy="judge", judge="model", tokens=3)
    assert [(turn.advice, turn.tokens) for turn in only(samples).turns] == [("Fuse the tail.", 2), ("", 1)]
    assert model.seen[-1][0][-1]["content"].endswith("\nFuse the tail.")


@pytest.mark.parametrize("verdict, words", [
    (Verdict(compiled=True, error="wrong"), "not correct yet"),
    (right(KernelTime("aten::mm", 0.6, False), KernelTime("tail", 0.4, True)), "aten::mm takes 60%"),
    (right(KernelTime("mean", 0.6, True), KernelTime("tail", 0.4, True)), "2 launches"),
    (right(KernelTime("all", 1.0, True), bandwidth=0.2, arithmetic=0.3), "30% of the roofline"),
    (right(KernelTime("all", 1.0, True), bandwidth=0.9), "none left, 90%")])
def test_the_rule_names_one_bottleneck(verdict, words):
    assert words in bottleneck(verdict) and "\n" not in bottleneck(verdict)


def test_comparison_by_hand():
    def step(speedup, tokens, kernels=1):
        return {"speedup": speedup, "correct": speedup > 0, "tokens": tokens, "kernels": kernels}

    runs = {"parallel": {"a": [[step(4.0, 10), step(0.0, 10)]], "b": [[step(0.5, 10), step(1.1, 30)]]},
            "evolve": {"a": [[step(0.0, 10), step(0.0, 10, 0), step(9.0, 10)]], "b": [[step(0.0, 50)]]}}
    found = strategies.compare(runs, 2)
    parallel, evolve = (found["strategies"][name][0] for name in runs)
    assert [parallel[key] for key in ("correct", "fast_1", "fast_1.2", "kernels", "tokens")] == [1, 1, 0.5, 2, 30]
    assert [evolve[key] for key in ("correct", "fast_1", "kernels", "tokens")] == [0.5, 0.5, 1.5, 40]
    assert found["budgets"]["tokens"][-1] == 30  # of parallel, which sampled fewer
    assert parallel["curves"]["kernels"] == pytest.approx([2, (4 * 1.1) ** 0.5])
    assert evolve["curves"]["kernels"] == pytest.approx([1, 3]) and evolve["curves"]["tokens"][-1] == pytest.approx(3)
    assert parallel["curves"]["tokens"][-1] == pytest.approx(2)  # b's second attempt needs 40


# ---- the command

def by_task(messages, tool, generator):
    """Of level1/1_AffineSoftplus turn 1: wrong; turn 2: right but slow; turn 3: right and fast. Else no code."""
    if "softplus" not in messages[1]["content"]:
        return "This one is too hard."
    code = render(read(builtin_tasks(1)[0]), ALL).code
    turn = sum(message["role"] == "assistant" for message in messages)
    if turn == 0:
        code = re.sub(r"(tl.store\(\w+_ptr \+ idx, \w+)", r"\1 + 1.0", code)
    if turn == 1:
        head = "def forward(self, x):\n"
        code = code.replace(head, head + "        x = x.double().exp().log().sin().asin().float() * 0.0 + x\n")
    return f"```python\n{code}```"


@pytest.fixture
def command(monkeypatch, capsys):
    """A function that runs bench.py --level 1 and returns (exit code, stdout, stderr, the model)."""
    def run_bench(*arguments, model=None, sandbox=None):
        model = model or Scripted(by_task)
        monkeypatch.setattr(bench.Backbone, "load", lambda path, device: model)
        if sandbox:
            monkeypatch.setattr(bench, "Sandbox", lambda *_, **__: sandbox)
        with pytest.raises(SystemExit) as end:
            run_command(lambda: bench.main(["--device", "cpu", "--level", "1", *map(str, arguments)]))
        out, err = capsys.readouterr()
        return end.value.code, out, err, model

    return run_bench


def test_command_end_to_end(tmp_path, command):
    """A problem that is solved, one that cannot be used and one that gets no code, through the real sandbox."""
    folder = tmp_path / "bench" / "KernelBench" / "level1"
    folder.mkdir(parents=True)
    good = builtin_tasks(1)[0].source
    (folder / "1_Good.py").write_text(good)
    (folder / "2_Bad.py").write_text(good.replace("F.softplus(x)", "F.no_softplus_there(x)"))
    (folder / "3_Hard.py").write_text(builtin_tasks(1)[4].source)
    arguments = ["--ids", "1-3", "--samples", 2, "--kernelbench", tmp_path / "bench", "--model", tmp_path,
                 "--out", tmp_path / "out"]
    code, out, err, model = command(*arguments)
    assert code == 0, err
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["clock"] == "modelled" and "modelled" in out and "measured" not in out
    assert summary["command"].startswith("python bench.py --device cpu --level 1 --ids 1-3")
    assert summary["versions"]["torch"] == torch.__version__ and summary["seed"] == 0 and summary["hardware"]
    after = {row["turns"]: row for row in summary["figures"]
             if (row["of"], row["tolerance"], row["rule"]) == ("mean of samples", 1e-4, "strict")}
    third = 1 / 3  # of all problems
    assert (after[1]["correct"], after[2]["correct"], after[3]["correct"]) == (0, third, third)
    assert (after[2]["fast_1"], after[3]["fast_1"], after[3]["fast_2"]) == (0, third, third)  # one kernel for three
    assert after[3]["geometric_mean"] > 2
    problems = [summary["problems"][f"level1/{name}"] for name in ("1_Good", "2_Bad", "3_Hard")]
    assert [problem["kinds"] for problem in problems] == [{"faster": 2}, {"unusable": 2}, {"no code": 2}]
    assert "no_softplus_there" in problems[1]["most_common_error"]
    assert (tmp_path / "out/fast_p.png").stat().st_size > 10000
    assert out.splitlines()[-1].startswith(f"{tmp_path}/out/report.html")
    assert "KernelBench, level 1; skills out of 0" in (tmp_path / "out/report.html").read_text()
    assert "level1/3_Hard" in out and "no code block" in out
    code, again, err, model = command(*arguments)
    assert code == 0 and not model.asked and again == out and "6 of 6 samples are there already" in err


def test_an_interruption_says_how_to_go_on(tmp_path, command):
    arguments = ["--ids", "1-3", "--samples", 1, "--batch", 1, "--model", tmp_path, "--out", tmp_path / "o"]
    code, _, err, _ = command(*arguments, model=Scripted(lambda *_: kernel(1.5)), sandbox=Scorer(lives=3))
    assert code == 130 and err.endswith(": interrupted; the same command goes on\n") and err.count("\n") == 1
    assert len((tmp_path / "o/results.jsonl").read_text().splitlines()) == 1  # 3 turns of the first problem


def test_edited_prompts_are_another_configuration(tmp_path, command, monkeypatch):
    monkeypatch.setitem(PROMPTS, "policy_system", PROMPTS["policy_system"])  # as it was, in the end
    arguments = ["--ids", "1", "--samples", 1, "--model", tmp_path, "--out", tmp_path / "o", "--prompts",
                 tmp_path / "own.yaml"]
    for text, expected in (("Write it.", 0), ("Write it.", 0), ("Write it well.", 2)):
        (tmp_path / "own.yaml").write_text(f"prompts: {{policy_system: {text}}}")
        code, _, err, model = command(*arguments, model=Scripted(lambda *_: kernel(1.5)), sandbox=Scorer())
        assert code == expected, err
    assert "another configuration (prompts changed)" in err and not model.asked


def test_kernelbenchs_sizes_without_a_gpu(tmp_path, command):
    """What is too large is told before anything starts and counts as unusable; --shrink makes it smaller."""
    (tmp_path / "level1").mkdir()
    (tmp_path / "level1/1_Large.py").write_text(scale_batch(builtin_tasks(1)[0], 10**6).source)
    arguments = ["--samples", 2, "--kernelbench", tmp_path, "--model", tmp_path, "--out"]
    how = {"model": Scripted(lambda *_: kernel(1.5)), "sandbox": Scorer()}
    code, out, err, model = command(*arguments, tmp_path / "a", **how)
    assert code == 0 and not model.asked and "--shrink makes them smaller" in err and "GB" in out
    assert json.loads((tmp_path / "a/summary.json").read_text())["kinds"] == {"unusable": 2}
    code, out, err, model = command(*arguments, tmp_path / "b", "--shrink", **how)
    assert code == 0 and model.asked and "KernelBench, shrunk, level 1" in out and "unusable" not in out


def test_strategies_are_compared(tmp_path, command):
    arguments = ["--ids", "1,2", "--samples", 2, "--turns", 3, "--compare-strategies", "--tokens", 5, "--model",
                 tmp_path, "--out", tmp_path / "out"]
    code, out, err, model = command(*arguments, model=Scripted(by_chance), sandbox=Scorer())
    assert code == 0, err
    found = json.loads((tmp_path / "out/strategies.json").read_text())
    assert list(found["strategies"]) == list(bench.STRATEGIES) and all(name in out for name in bench.STRATEGIES)
    assert all(len(searches) == 2 for searches in found["strategies"].values())
    assert (tmp_path / "out/strategies.png").stat().st_size > 10000
    assert json.loads((tmp_path / "out/evolve/summary.json").read_text())["config"]["strategy"] == "evolve"
    assert {temperature for temperature, _ in model.asked} == {1.0}
    code, again, err, model = command(*arguments, model=Scripted(by_chance))
    assert code == 0 and again == out and not model.asked


def test_scaling_is_fourteen_turns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the model is found all the same
    options = bench.parse("--level 1 --turns 5 --iterations 10 --keep 4 --model checkpoints/tiny --device cpu".split())
    *_, config = bench.start(options)
    assert (options.turns, config["turns"], options.tokens) == (14, 14, 14 * options.max_new_tokens)
    assert bench.strategy(options).show.keywords == {"keep": 4}


def test_bm25_alone_asks_no_selection(first):
    samples, model = first(by_chance, library=LIBRARY, bm25_only=True)
    assert model.asked == {(1.0, 99): 6} and [s.skills for s in samples["level1/1_AffineSoftplus"]] == [["fuse"]] * 2


def test_changed_configuration_is_refused(tmp_path, command, refusal):
    arguments = ["--level", 1, "--ids", "2", "--samples", 1, "--turns", 1, "--model", tmp_path, "--out", tmp_path / "o"]
    assert command(*arguments, sandbox=Scorer())[0] == 0
    for changed, name in ((["--seed", 1], "seed"), (["--samples", 2], "samples"), (["--no-skills"], "no_skills")):
        assert f"{name} changed" in refusal(bench.main, "--device", "cpu", *arguments, *changed)
    for file in ("model.safetensors", "skill_library.jsonl"):  # the model's weights, or its library, are others
        (tmp_path / file).write_text("")
        assert "weights changed" in refusal(bench.main, "--device", "cpu", *arguments)
        (tmp_path / file).unlink()


@pytest.mark.parametrize("arguments, message", [
    ("--model no/such/folder", "no/such/folder"), ("--kernelbench no/such/checkout", "no level1/ there"),
    ("--device cuda", "no GPU"), ("--baseline compile", "needs a GPU"), ("--ids 1,2,x", "cannot read 'x'"),
    ("--ids 999", "no problem 999"), ("--samples 0", "--samples 0: choose a number above 0"),
    ("--turns -1", "--turns -1: choose a number above 0"), ("--keep 0", "--keep 0: choose a number above 0"),
    ("--temperature nan", "--temperature nan: choose"), ("--top-p 3", "above 0 to 1"),
    ("--seed -1", "--seed -1: choose"), ("--shrink", "--shrink: is for --kernelbench"),
    ("--compare-strategies --samples 1", "--samples of at least 2"),
    ("--bm25-only --no-skills", "one ablation at a time"),
    ("--max-new-tokens 4096 --max-prompt-tokens 1", "the model's context is 4096"),
    ("--max-new-tokens 4096", "prompts of 0 tokens"),
    ("--timeout 1e15", "--timeout 1e+15: choose a number above 0 to 86400"),
    ("--out file", "--out file: cannot write there"), ("--out file/below", "cannot write there")])
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, tmp_path, monkeypatch, refusal):
    (tmp_path / "file").write_text("")
    arguments = arguments.split()
    if "--model" not in arguments:
        monkeypatch.setattr(bench.Backbone, "load", lambda path, device: Scripted(by_task))
        arguments += ["--model", str(tmp_path)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    assert message in refusal(bench.main, "--level", 1, *arguments)
    assert not (tmp_path / "runs").exists()

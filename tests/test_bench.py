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
from conftest import FakeSandbox, ScriptedSampler, kernel, selecting
from sandbox import Verdict
from skills import Skill, SkillLibrary
from synthetic.expert import ALL, read, render
from tasks import Task, UserError, builtin_tasks, chosen_tasks, run_command

# ---- figures


def attempt(speedup=None, low=None, coverage=0.9, **more):
    """A turn: correct with that speedup, or compiled and wrong."""
    right = speedup is not None
    fields = {"compiled": True, "correct": right, "correct_loose": right, "speedup": speedup,
              "speedup_low": speedup if low is None else low, "coverage": coverage, "clock": "measured"}
    return Attempt("reply", True, Verdict(**{**fields, **more}))


def sample(*turns, task="a", index=0):
    return Sample(task, index, [], list(turns))


def fast(turns, p=1.0, **how):
    row = {"turns": 9, "baseline": "eager", "tolerance": 1e-4, "rule": "strict", **how}
    return bench.figures({"a": [sample(*turns)]}, **row)[f"fast_{p:g}"]


@pytest.mark.parametrize("turn", [attempt(1.004, low=0.996), attempt(1.5, low=1.4, coverage=0.0)],
                         ids=["unchanged torch call", "own kernel without work"])
def test_what_wins_by_the_standard_rule_only(turn):
    assert (fast([turn], rule="standard"), fast([turn], rule="strict")) == (1.0, 0.0)


def test_threshold_is_exceeded_not_reached():
    assert [fast([attempt(1.2)], p) for p in bench.THRESHOLDS] == [1, 0, 0, 0]
    assert [fast([attempt(2.01, low=1.9)], p) for p in bench.THRESHOLDS] == [1, 1, 1, 0]


def test_a_turn_right_to_one_percent_counts_at_that_tolerance_alone():
    loose = attempt(None, correct_loose=True, reference_ms=3.0, candidate_ms=2.0, error="off by 1e-3")
    assert fast([loose], 1.2, rule="standard") == 0
    assert fast([loose], 1.2, rule="standard", tolerance=1e-2) == 1
    assert fast([loose], 1.2, rule="strict", tolerance=1e-2) == 0  # its ratio of times has no interval
    loose.verdict.clock = "modelled"
    assert fast([loose], 1.2, rule="strict", tolerance=1e-2) == 1


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
    row = bench.figures(samples, 2, "eager", 1e-4, "strict", of="best sample")  # a: 2.0, b: 1.1 for sure, estimated 1.3
    assert (row["correct"], row["fast_1"], row["fast_1.2"]) == (1, 1, 0.5)
    assert math.isclose(row["geometric_mean"], (2.0 * 1.3) ** 0.5)


NO_CODE = Attempt("sorry", False, Verdict(error="the reply has no code block that defines ModelNew"))
UNUSABLE = Attempt("reply", True, Verdict(error="unusable task: x: the reference crashes"))
BROKEN = Attempt("reply", True, Verdict(error="does not parse"))
CHEAT = attempt(2.0, rejected="decoy")  # never correct, whatever else its verdict says


@pytest.mark.parametrize("turns, became", [
    ([NO_CODE, BROKEN, attempt()], "wrong"), ([NO_CODE, BROKEN], "broken"), ([NO_CODE], "no code"),
    ([UNUSABLE], "unusable"), ([attempt(), CHEAT], "rejected"), ([CHEAT, attempt(1.01, low=0.99)], "correct"),
    ([attempt(0.8), attempt(1.2)], "faster"),
])
def test_what_became_of_a_sample(turns, became):
    assert bench.kind(sample(*turns)) == became


def test_clocks_are_never_mixed():
    samples = {"a": [sample(attempt(1.5)), sample(attempt(1.5, clock="modelled"))]}
    with pytest.raises(UserError, match="mixed"):
        bench.all_figures(samples, 1, ["eager"])


# ---- --ids


def test_ids():
    tasks = [Task(f"level1/{i}_P", 1, "") for i in range(1, 13)]
    assert chosen_tasks(tasks, "every5") == [tasks[4], tasks[9]]
    assert chosen_tasks(tasks, "10, 2-4,2") == [*tasks[1:4], tasks[9]]
    assert chosen_tasks(tasks, None) == tasks
    for bad in ("13", "3-20", "x", "", "5-", "every0", "every", "-3", "every13", "4-2"):
        with pytest.raises(UserError, match="--ids"):
            chosen_tasks(tasks, bad)


# ---- a run, with a scripted model and a sandbox that believes what a kernel says of itself

LIBRARY = SkillLibrary([Skill("fuse", "fuse softplus", "general", ("softplus",), "Key Idea: one kernel softplus")])


class Scripted:
    """A model whose prompts are numbers into a list of conversations, and whose replies `script` makes up."""

    at_a_time, sample = None, Backbone.sample

    def __init__(self, script):
        self.script, self.seen = script, []
        self.asked = Counter()  # (temperature, longest reply) -> replies
        self.model = argparse.Namespace(config=argparse.Namespace(
            get_text_config=lambda: argparse.Namespace(max_position_embeddings=4096)))

    def chat_ids(self, messages, tool=None):
        self.seen.append((messages, tool))
        return [len(self.seen) - 1]

    def next_ids(self, completion, messages, tool=None):
        return self.chat_ids(messages, tool)

    def sampler(self, *how):
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
    """It is interrupted after `lives` calls, and finds kernels `factor` times as fast as they say."""

    def __init__(self, lives=math.inf, factor=1.0):
        super().__init__()
        self.lives, self.factor = lives, factor

    def submit(self, pairs):
        self.lives -= 1
        if self.lives < 0:
            raise KeyboardInterrupt
        return super().submit(pairs)

    def verdict(self, task, code):
        found = super().verdict(task, code)
        return replace(found, speedup=found.speedup * self.factor, speedup_low=found.speedup_low * self.factor)


def run(tasks, path, model=None, library=None, sandbox=None, compiled=None, done=None, **more):
    """bench.evaluate with usual arguments."""
    usual = {"samples": 2, "turns": 3, "batch": 4, "seed": 0, "device": "cpu", "temperature": 1.0,
             "max_new_tokens": 99, "max_prompt_tokens": 1000, "bm25_only": False, "strategy": "serial", "keep": 4,
             "judge": "rule", "tokens": 10**6}
    return bench.evaluate(model or Scripted(by_chance), library, sandbox or Scorer(), compiled, tasks,
                          argparse.Namespace(**usual | more), {} if done is None else done, path)


def test_selection_is_greedy_once_a_task_and_its_skills_are_injected(tmp_path):
    tasks, model = builtin_tasks(1)[:2], Scripted(by_chance)
    samples = run(tasks, tmp_path / "results.jsonl", model, LIBRARY)
    assert model.asked == {(0, 99): 2, (1.0, 99): 12}  # selections; 2 tasks, 2 samples, 3 turns
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
        done, model = bench.read_results(path), Scripted(by_chance)
        assert len(done) == complete
        assert run(tasks, path, model, LIBRARY, done=done) == whole and path.read_text() == "".join(lines)
        assert model.asked == {(0, 99): 5, (1.0, 99): 5 * 2 * 3}  # the first batch was not done again
        assert bench.read_results(path) == {(s.task, s.index): s for rows in whole.values() for s in rows}


def test_seed_changes_the_samples(tmp_path):
    runs = [run(builtin_tasks(1)[:1], tmp_path / f"{i}.jsonl", seed=seed) for i, seed in enumerate((0, 0, 1))]
    assert runs[0] == runs[1] != runs[2]


def test_results_with_a_broken_line_are_refused(tmp_path):
    path = tmp_path / "results.jsonl"
    for line in ("{}", "no JSON", "[1]", '{"task": "a", "index": 0, "skills": [], "turns": [3]}'):
        path.write_text(line + "\n")
        with pytest.raises(UserError, match="line 1: not a result"):
            bench.read_results(path)


def test_baseline_compile_is_reported_beside_eager(tmp_path):
    samples = run(builtin_tasks(1)[:1], tmp_path / "results.jsonl", Scripted(lambda *_: kernel(1.5)),
                  compiled=Scorer(factor=0.5))
    rows = bench.all_figures(samples, 3, ["eager", "compile"])["figures"]
    assert {(row["baseline"], row["fast_1"]) for row in rows} == {("eager", 1.0), ("compile", 0.0)}
    assert {row["correct"] for row in rows} == {1.0}
    assert math.isclose(rows[-1]["geometric_mean"], 0.75)


# ---- the command

def by_task(messages, tool, generator):
    """Of level1/1_AffineSoftplus turn 1: wrong; turn 2: right but slow; turn 3: right and fast. Else no code."""
    if "softplus" not in messages[1]["content"]:
        return "This one is too hard."
    code = render(read(builtin_tasks(1)[0]), ALL).code
    turn = sum(message["role"] == "assistant" for message in messages)
    if turn == 0:
        code = re.sub(r"(tl.store\(out_ptr \+ idx, \w+)", r"\1 + 1.0", code)
    if turn == 1:
        head = "def forward(self, x):\n"
        code = code.replace(head, head + "        x = x.double().exp().log().sin().asin().float() * 0.0 + x\n")
    return f"```python\n{code}```"


def command(monkeypatch, capsys, *arguments, model=None):
    """Run bench.py; returns (exit code, stdout, stderr, the model)."""
    model = model or Scripted(by_task)
    monkeypatch.setattr(bench.Backbone, "load", lambda path, device: model)
    with pytest.raises(SystemExit) as end:
        run_command(lambda: bench.main(["--device", "cpu", *map(str, arguments)]))
    out, err = capsys.readouterr()
    return end.value.code, out, err, model


def test_command_end_to_end(tmp_path, monkeypatch, capsys):
    """A problem that is solved, one that cannot be used and one that gets no code, through the real sandbox."""
    folder = tmp_path / "bench" / "KernelBench" / "level1"
    folder.mkdir(parents=True)
    good = builtin_tasks(1)[0].source
    (folder / "1_Good.py").write_text(good)
    (folder / "2_Bad.py").write_text(good.replace("F.softplus(x)", "F.no_softplus_there(x)"))
    (folder / "3_Hard.py").write_text(builtin_tasks(1)[4].source)
    arguments = ["--level", 1, "--ids", "1-3", "--samples", 2, "--kernelbench", tmp_path / "bench", "--model", tmp_path,
                 "--out", tmp_path / "out"]
    code, out, err, model = command(monkeypatch, capsys, *arguments)
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
    assert "level1/3_Hard" in out and "no code block" in out
    code, again, err, model = command(monkeypatch, capsys, *arguments)
    assert code == 0 and not model.asked and again == out and "6 of 6 samples are there already" in err


def test_changed_configuration_is_refused(tmp_path, monkeypatch, capsys, refusal):
    arguments = ["--level", 1, "--ids", "2", "--samples", 1, "--turns", 1, "--model", tmp_path, "--out",
                 tmp_path / "out"]
    assert command(monkeypatch, capsys, *arguments)[0] == 0
    for changed, name in ((["--seed", 1], "seed"), (["--samples", 2], "samples"), (["--no-skills"], "no_skills"),
                          ([], "weights")):
        if not changed:
            (tmp_path / "model.safetensors").write_bytes(b"other weights")
        assert f"{name} changed" in refusal(bench.main, "--device", "cpu", *arguments, *changed)


@pytest.mark.parametrize("arguments, message", [
    ("--model no/such/folder", "no/such/folder"), ("--kernelbench no/such/checkout", "no level1/ there"),
    ("--device cuda", "no GPU"), ("--baseline compile", "needs a GPU"), ("--ids 1,2,x", "cannot read 'x'"),
    ("--ids 999", "no problem 999"), ("--samples 0", "--samples 0: must be above 0"),
    ("--turns -1", "--turns -1: must be above 0"),
    ("--max-new-tokens 4096 --max-prompt-tokens 1", "context of 4096 tokens"),
    ("--out file", "cannot be used as --out"), ("--out file/below", "cannot be used as --out")])
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

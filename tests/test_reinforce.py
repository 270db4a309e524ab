"""The training step, and resuming after a kill at any point."""

import functools
import itertools
import json
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3ForCausalLM

import policy
import reinforce
import report
from backbone import Backbone
from conftest import (CONTENT, FakeSandbox, Scripted, configure, entry, kernel, make_task, held, proposing,
                      read_lines, selecting, slow_policy_advantages)
from policy import davinci_reward
from reinforce import leave_one_out
from sandbox import Sandbox, Verdict
from skills import Skill, SkillLibrary
from synthetic.expert import ALL, read, render
from synthetic.tiny import random_qwen3

# ---- the training step

SMALL = ["--batch", "2", "--k", "2", "--n", "2", "--turns", "2", "--s", "2", "--lr", "0.003", "--device", "cpu"]


def script(role, prompt):
    """Replies that a model of this kind might give. A learnt skill makes the policy faster."""
    if role == "selection":
        names = [name for name in ("seed-a", "seed-b", "learnt", "learnt-2") if f"- {name} [" in prompt]
        return [*map(selecting, names), "none of these"]
    if role == "summary":
        return [proposing(entry()), proposing(entry(content=CONTENT + "\nOr use torch.compile."), 3), "no idea"]
    if "Key Idea: fuse" in prompt:
        return [kernel(1.7), kernel(1.9, 0.35)]
    if "Speedup" in prompt:
        return [kernel(1.5), kernel(1.0), kernel(2.0, 0.1)]
    return [kernel(1.0), kernel(0.8), "```python\nclass ModelNew:\n    wrong\n```", "I cannot do that."]


def ingredients(folder, model_folder) -> list:
    """Lay a model with a library and five tasks into a folder; the options of a run on them."""
    model = folder / "model"
    Backbone.load(model_folder).save(model)
    SkillLibrary([Skill("seed-a", "forward module", "general", ("relu",), CONTENT.replace("fuse", "a")),
                  Skill("seed-b", "inputs torch", "general", ("init",), CONTENT.replace("fuse", "b")),
                  Skill("other", "unrelated words", "general", ("scan",), "c")]).save(model / "skill_library.jsonl")
    (folder / "tasks").mkdir()
    for i in range(5):
        (folder / f"tasks/{i}.py").write_text(make_task(i).source)
    return ["--model", str(model), "--tasks", str(folder / "tasks"), *SMALL]


@pytest.fixture
def world(request, monkeypatch, model_folder, tmp_path):
    """Everything but words and verdicts is real. Returns a function that runs reinforce.py with options."""
    usual = ingredients(tmp_path, model_folder)
    enter(monkeypatch.setattr)
    if not request.node.get_closest_marker("curves"):
        monkeypatch.setattr(report, "draw_curves", lambda run: None)  # a second each
        monkeypatch.setattr(reinforce, "finish_run", lambda run: None)

    def run(out, *options, evaluate=False):
        fresh = usual if evaluate else [*usual, "--no-eval"]
        assert reinforce.main(["--out", str(tmp_path / out), *([] if "--resume" in options else fresh), *options]) == 0
        return tmp_path / out

    return run


def enter(setattr, script=script, sandbox=FakeSandbox):
    """Put a scripted model and a fake sandbox in place of the real ones."""
    load = Backbone.load

    def scripted(path, device="cpu", dtype=None):
        model = load(path, device, dtype)
        model.__class__, model.script = Scripted, script
        return model

    setattr(Backbone, "load", scripted)
    setattr(reinforce, "Sandbox", sandbox)


def metrics(out):
    return read_lines(out / "metrics.jsonl")


def records(out, step, role):
    return [line for line in read_lines(out / f"rollouts/step_{step}.jsonl") if line["role"] == role]


def library_at(out, step) -> list:
    return SkillLibrary.load(out / f"skill_library/global_step_{step}.jsonl").skills


def weights(out):
    return (out / "checkpoint/model.safetensors").read_bytes()


@pytest.mark.curves
def test_training_steps(world, monkeypatch, capsys):
    """All three roles enter the loss; a skill is proposed, verified, flushed after the update, and selected later."""
    sizes, credit = [], reinforce.credit  # sizes: of the library when the rows of the loss are made
    monkeypatch.setattr(reinforce, "credit", lambda run, e: sizes.append(len(run.library)) or credit(run, e))
    out = world("run", "--steps", "6")
    lines = metrics(out)
    assert sizes == [m["library"] for m in lines[:-1]]
    assert [m["step"] for m in lines] == list(range(7)) and lines[0]["library"] == 3
    flushed = [m["step"] for m in lines[1:] if m["staged"]]
    assert flushed and sum(m["selected_learnt"] for m in lines if m["step"] > flushed[0]) > 0
    assert sum(m["selected_learnt"] for m in lines[1:flushed[0] + 1]) == 0  # not before it was flushed
    assert len(list((out / "skill_library").iterdir())) == 7  # a snapshot of every step
    for m in lines[1:]:
        assert m["policy_rows"] + m["void_masked"] == 2 * 3 * 2 * 2 and m["selection_rows"] == 4
        assert m["rows_live"] == m["policy_live"] + m["selection_live"] + m["summary_live"] and m["mrs_masked"] == 0
        assert m["ratio_off"] < 1e-4 and m["clipped"] == 0 and m["grad_norm"] > 0  # exactly on-policy
        assert m["library"] == lines[m["step"] - 1]["library"] + m["staged"]
    assert sum(m["summary_rows"] for m in lines[1:]) > 0 and sum(m["prs_masked"] for m in lines[1:]) > 0
    reasons = {reason for m in lines[1:] for reason in m["rejected"]}
    assert {"lazy advice", "no tool call"} <= reasons
    names = [s.name for s in library_at(out, 6)]
    assert names[:3] == ["seed-a", "seed-b", "other"] and names[3] == "learnt" and len(set(names)) == len(names)
    assert [s.name for s in library_at(out, flushed[0] - 1)] == names[:3]
    assert SkillLibrary.of_model(out / "checkpoint").skills == library_at(out, 6)
    assert (out / "curves.png").stat().st_size > 10_000 and not list(out.glob("*.tmp*"))
    *told, done = capsys.readouterr().out.splitlines()[-3:]
    assert told[0].startswith("Skills found: ") and "learnt" in told[0] and told[-1].startswith("Proposals: ")
    assert done.startswith(f"done: {out}/report.html") and "learnt" in (out / "report.html").read_text()


def test_scalars_for_tensorboard(world, monkeypatch, refusal):
    """Every number of metrics.jsonl is written under its step. Without the package the option is refused."""
    written, packages = [], []
    writer = SimpleNamespace(add_scalar=lambda *scalar: written.append(scalar), flush=lambda: None)
    monkeypatch.setattr(report, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=packages.__contains__)))
    assert "pip install tensorboard" in refusal(reinforce.main, "--log", "tensorboard", "--out", "nowhere")
    packages.append("tensorboard")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=lambda *_, **__: writer))
    lines = metrics(world("run", "--steps", "2", "--log", "tensorboard"))
    assert written == [(name, value, m["step"]) for m in lines for name, value in m.items()
                       if isinstance(value, (int, float))]


def test_records_hold_what_happened(world):
    """Rewards and advantages recomputed from the transcript alone."""
    out = world("run", "--steps", "2")
    encode = Backbone.load(out / "checkpoint").encode
    for step in (1, 2):
        rollouts, selections, summaries = (records(out, step, role) for role in ("policy", "selection", "summary"))
        assert len(rollouts) == 2 * 3 * 2 and len(selections) == 2 * 2
        for task in {line["task"] for line in rollouts}:
            mine = [line for line in rollouts if line["task"] == task]
            rewards = [[turn["reward"] for turn in line["turns"]] for line in mine]
            members = [[turn["masked"] != "void" for turn in line["turns"]] for line in mine]
            tokens = [[0 if turn["masked"] else len(encode(turn["reply"])) + 1 for turn in line["turns"]]
                      for line in mine]
            want = slow_policy_advantages(rewards, members, tokens, 1.0, "leave-one-out", True, "turn")
            for line, row in zip(mine, want):
                assert [turn["advantage"] for turn in line["turns"]] == pytest.approx(row)
                for turn in line["turns"]:
                    assert turn["reward"] == davinci_reward(Verdict(**turn["verdict"]))
                    assert turn["reply"] and turn["feedback"] and line["prompt"].startswith("<|im_start|>system")
            asked = [line for line in selections if line["task"] == task]
            for line in asked:  # schemes that chose the same skills pool their rollouts
                pooled = [max(row) for row, other in zip(rewards, mine) if set(other["skills"]) == set(line["skills"])]
                assert line["reward"] == pytest.approx(statistics.mean(pooled)) and len(pooled) in (2, 4, 6)
            speeds = [[turn["verdict"]["speedup"] or 0.0 for turn in line["turns"]] for line in mine]
            triggered = any(row[0] and max(row) >= 1.2 * max(row[0], 1.0) for row in speeds)
            assert [line["task"] for line in summaries].count(task) == 2 * triggered
            want = leave_one_out([line["reward"] for line in asked])
            assert [line["advantage"] for line in asked] == pytest.approx(want)
        for line in summaries:
            passed = [p for p in line["proposals"] if not p["rejected"]]
            fastest = max((p["attempt"]["verdict"]["speedup"] for p in passed), default=0.0)
            assert line["reward"] == min(fastest, policy.SPEEDUP_CAP)
            assert all(p["detail"] or p["rejected"] in ("no tool call", "too many", None)
                       for p in line["proposals"])


def test_learning_moves_the_policy_to_the_better_kernel(world):
    """Thirty steps on one choice: two right kernels and two wrong replies. The mean reward must rise."""
    out = world("run", "--steps", "30", "--no-skills", "--turns", "1", "--no-prs", "--lr", "0.0005")
    first, last = (statistics.mean(m["reward_best"] for m in part) for part in (metrics(out)[1:6], metrics(out)[-5:]))
    assert last > first + 0.2


def test_ablations(world):
    base = world("base", "--steps", "1")
    out = world("a", "--steps", "1", "--no-skills")
    assert all(m["selection_rows"] == m["summaries"] == m["staged"] == 0 for m in metrics(out)[1:])
    assert all(not line["skills"] for line in records(out, 1, "policy")) and len(records(out, 1, "policy")) == 12
    out = world("b", "--steps", "1", "--bm25-only")
    assert records(out, 1, "selection") == [] and all(m["selection_rows"] == 0 for m in metrics(out)[1:])
    chosen = {(line["task"], *line["skills"]) for line in records(out, 1, "policy")}
    assert len(chosen) == 2 and all(len(skills) > 1 for skills in chosen)  # all k + 1 schemes: there is no null scheme
    out = world("no k", "--steps", "1", "--bm25-only", "--k", "0")
    assert all(len(line["skills"]) > 1 for line in records(out, 1, "policy"))
    out = world("c", "--steps", "3", "--no-verify")
    proposals = [p for step in (1, 2, 3) for line in records(out, step, "summary") for p in line["proposals"]]
    assert proposals and all(p["attempt"] is None for p in proposals) and sum(m["staged"] for m in metrics(out)[1:]) > 0
    assert {line["reward"] for step in (1, 2, 3) for line in records(out, step, "summary")} <= {0.0, 1.0}
    for switch, role in (("--freeze-selection", "selection"), ("--freeze-summary", "summary")):
        out = world(role, "--steps", "1", switch)
        assert records(out, 1, role) == records(base, 1, role)  # it is used, credited and recorded all the same
        line = metrics(out)[1]
        assert line["rows"] == sum(line[f"{one}_rows"] for one in ("policy", "selection", "summary") if one != role)
        assert weights(out) != weights(base)
    out = world("twice", "--steps", "1", "--oversample", "2")
    assert len({line["task"] for line in records(out, 1, "policy")}) == 4  # of five, for a batch of two
    out = world("d", "--steps", "1", "--baseline", "group-mean", "--no-cross-scheme")
    for line in records(out, 1, "selection"):
        group = [other["reward"] for other in records(out, 1, "selection") if other["task"] == line["task"]]
        assert line["advantage"] == pytest.approx(line["reward"] - statistics.mean(group))


def test_evaluation_before_after_and_between(world, monkeypatch):
    """On its own problems and its own random numbers: training goes on as if it had not been."""
    monkeypatch.setattr(reinforce.tasks, "builtin_tasks", lambda device: [make_task(i) for i in range(7, 10)])
    plain = world("plain", "--steps", "3")
    Scripted.draws.clear()
    out = world("run", "--steps", "3", "--eval-every", "2", "--eval-samples", "2", evaluate=True)
    lines = metrics(out)
    assert [m["step"] for m in lines if "eval_reward_best" in m] == [0, 2, 3] and weights(out) == weights(plain)
    assert Scripted.draws == {(0, 1.0), (1.0, 0.95), (1.0, 1.0)}  # selections and checks; samples; training
    for step in (0, 2, 3):
        rollouts = read_lines(out / f"rollouts/eval_{step}.jsonl")
        rewards = [max(t["reward"] for t in r["turns"]) for r in rollouts if r["role"] == "policy"]
        assert len(rewards) == 3 * 2 and len(rollouts) == 3 * 2 + 3
        assert lines[step]["eval_reward_best"] == pytest.approx(statistics.mean(rewards))
    assert "eval_reward_best" in metrics(world("after", "--steps", "2", evaluate=True))[2]


def test_a_step_survives_every_candidate(world, monkeypatch):
    """With the real sandbox: a kernel that works; replies without code, cut off, refused, that hang or exit.

    (What else a candidate may do to the sandbox: FAULTS in test_sandbox.py.)
    """
    replies = [f"```python\n{body}\nclass ModelNew:\n    pass\n```" for body in (
        "import ctypes", "while True:\n    pass", "import os\nos._exit(0)")]
    replies = iter(["expert", "no code", "```python\nclass ModelNew", *replies])

    def everything(role, prompt):
        task = make_task(int(re.search(r"relu\(x\) \* (\d)", prompt)[1]) - 2)
        return [next(replies).replace("expert", f"```python\n{render(read(task), ALL).code}```")]

    enter(monkeypatch.setattr, everything, functools.partial(Sandbox, timeout=4.0))
    out = world("run", "--steps", "1", "--batch", "3", "--n", "1", "--turns", "2", "--no-skills", "--k", "0")
    verdicts = [turn["verdict"] for line in records(out, 1, "policy") for turn in line["turns"]]
    assert len(verdicts) == 6 and all(v["correct"] or v["error"] or v["rejected"] for v in verdicts)
    assert [v["correct"] for v in verdicts] == [True] + [False] * 5 and verdicts[0]["speedup"] > 1.5


# ---- resuming


def state(out):
    """All that a run leaves, but for wall times."""
    trainer = torch.load(out / "checkpoint/trainer.pt", weights_only=True)
    lines = [{key: value for key, value in m.items() if key != "seconds"} for m in metrics(out)]
    files = {str(path.relative_to(out)): path.read_text() for folder in ("rollouts", "skill_library")
             for path in (out / folder).iterdir()}
    moments = [{k: v.tolist() for k, v in each.items()} for each in trainer["optimizer"]["state"].values()]
    return {"weights": weights(out), "library": (out / "checkpoint/skill_library.jsonl").read_text(),
            "metrics": lines, "files": files, "generator": trainer["generator"].tolist(), "step": trainer["step"],
            "optimizer": moments, "gains": trainer["gains"]}


def same(a, b, without=()):
    a, b = state(a), state(b)
    for part in a:
        assert part in without or a[part] == b[part], part
    return True


def test_resuming_equals_not_stopping(world):
    whole = world("whole", "--steps", "4")
    parts = world("parts", "--steps", "1")
    world("parts", "--resume", "--steps", "2")
    world("parts", "--resume", "--steps", "4")
    assert same(whole, parts)
    world("whole", "--resume")  # complete already: nothing happens
    assert same(whole, parts)


Killed = type("Killed", (BaseException,), {})
SHORT, WHOLE = ["--steps", "2", "--batch", "1"], []


def whole_run(world):
    """The uninterrupted run of two steps, made once."""
    if not WHOLE:
        WHOLE.append(world("whole", *SHORT))
    return WHOLE[0]


def test_checkpoint_folder_alone_resumes(world, tmp_path):
    source = world("part", *SHORT, "--steps", "1")
    (tmp_path / "copy").mkdir()
    (source / "checkpoint").rename(tmp_path / "copy/checkpoint")
    copy = world("copy", "--resume", "--steps", "2")
    assert weights(copy) == weights(whole_run(world)) and [m["step"] for m in metrics(copy)] == [2]
    assert state(copy)["library"] == state(whole_run(world))["library"]


POINTS = ["select", "roll_out", "score", "summarise", "verify", "credit", "update", "flush", "record_rollouts",
          "step_metrics", "finish_step", "save_checkpoint"]


def kill_and_resume(world, monkeypatch, functions, n, counts=lambda *_: True):
    """A run that dies on entering one of `functions`, (owner, name) each, at the n-th call that `counts`."""
    calls = itertools.count(1)
    with monkeypatch.context() as patch:
        for owner, name in functions:
            def dying(*arguments, real=getattr(owner, name), **options):
                if counts(real, arguments) and next(calls) == n:
                    raise Killed
                return real(*arguments, **options)

            patch.setattr(owner, name, dying)
        with pytest.raises(Killed):
            world("killed", *SHORT)
    assert same(whole_run(world), world("killed", "--resume"))


@pytest.mark.parametrize("n, point", list(enumerate(POINTS)))
def test_killed_at_any_phase_and_resumed(world, monkeypatch, n, point):
    """The process dies on entering a function of the step, in turn in the first and in the second."""
    owner = report if point == "save_checkpoint" else reinforce
    kill_and_resume(world, monkeypatch, [(owner, point)], 1 + n % 2 + (point in ("finish_step", "save_checkpoint")))


@pytest.mark.parametrize("n", range(1, 10))
def test_killed_within_a_checkpoint_and_resumed(world, monkeypatch, n):
    """The process dies at the n-th file operation of the checkpoints: 4 before the first step, 5 in each step."""
    def counts(real, arguments):
        if real.__name__ == "save_pretrained":
            Path(arguments[1], "model.safetensors").write_bytes(b"half a file")
        return any("checkpoint" in str(argument) for argument in arguments)

    operations = [(shutil, "rmtree"), (Path, "rename"), (Qwen3ForCausalLM, "save_pretrained")]
    kill_and_resume(world, monkeypatch, operations, n, counts)


def test_torn_metrics_line_is_dropped(world):
    torn = world("torn", *SHORT, "--steps", "1")
    with open(torn / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "clo')
    (torn / "rollouts/step_9.jsonl").write_text("left behind")
    (torn / "skill_library/global_step_2.jsonl").write_text("left behind")
    assert same(whole_run(world), world("torn", "--resume", "--steps", "2"))


@pytest.mark.parametrize("phase, kept", [("score", 1), ("credit", 0)])
def test_an_interruption_keeps_the_complete_steps_unless_weights_change(world, monkeypatch, tmp_path, phase, kept):
    cut, work = tmp_path / "cut", getattr(reinforce, phase)

    def interrupted(run, episodes):
        if run.step == 1:
            raise KeyboardInterrupt
        return work(run, episodes)

    monkeypatch.setattr(reinforce, phase, interrupted)
    with pytest.raises(KeyboardInterrupt):
        world("cut", *SHORT, "--save-every", "10")
    monkeypatch.setattr(reinforce, phase, work)
    assert torch.load(cut / "checkpoint/trainer.pt", weights_only=True)["step"] == kept
    assert same(whole_run(world), world("cut", "--resume"))


def test_an_interruption_waits_for_the_checkpoint_that_is_being_written(world, monkeypatch, tmp_path):
    work = report.save_checkpoint
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background

    def slowly(run):
        if run.step == 2:
            signal.raise_signal(signal.SIGINT)
        work(run)

    monkeypatch.setattr(report, "save_checkpoint", slowly)
    with pytest.raises(KeyboardInterrupt):
        world("cut", *SHORT, "--save-every", "2")
    signal.signal(signal.SIGINT, before)
    assert torch.load(tmp_path / "cut/checkpoint/trainer.pt", weights_only=True)["step"] == 2


def test_kill_nine_and_resume(world, tmp_path):
    """A process killed without warning. tests/kill_and_resume.py does so with the real model and sandbox."""
    whole, out, tests = whole_run(world), tmp_path / "killed", Path(__file__).parent
    program = (f"import sys; sys.path[:0] = [{str(tests.parent)!r}, {str(tests)!r}]\n"
               "import test_reinforce, reinforce\ntest_reinforce.enter(setattr)\nreinforce.main(sys.argv[1:])")
    options = ["--model", tmp_path / "model", "--tasks", tmp_path / "tasks", *SMALL, "--no-eval", *SHORT]
    process = subprocess.Popen([sys.executable, "-c", program, "--out", out, *options], stdout=subprocess.DEVNULL)
    while not (out / "metrics.jsonl").exists() and process.poll() is None:
        time.sleep(0.01)
    time.sleep(random.Random(0).uniform(0, 0.5))
    process.kill()
    process.wait()
    assert same(whole, world("killed", "--resume"))


# ---- command line


def test_help_names_the_papers_symbols(capsys):
    with pytest.raises(SystemExit) as caught:
        reinforce.main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert caught.value.code == 0
    for text in ("k: selections", "n: rollouts", "T: turns", "s: parallel", "gamma:", "epsilon_low:", "lambda_sel:"):
        assert text in said
    for name in vars(configure({"device": "cpu"})):
        assert "--" + name.replace("_", "-") in said


def test_bad_input_is_one_line_and_exit_code_2(refusal, tmp_path, model_folder):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    shutil.copytree(model_folder, tmp_path / "weightless", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "bad/problem.py").write_text(make_task().source.replace("get_inputs", "get_outputs"))
    (tmp_path / "file").write_text("")
    model = f"--model {model_folder} --device cpu"
    for said, options in (
            ("no such model folder", f"--model {tmp_path}/none --device cpu"),
            ("no file named", f"--model {tmp_path}/weightless --device cpu"),
            ("cannot write", f"{model} --out {tmp_path}/file/out"), ("get_inputs", f"{model} --tasks {tmp_path}/bad"),
            ("no problem files", f"{model} --tasks {tmp_path}/empty"),
            ("no problem files", f"{model} --tasks {tmp_path}/none"), ("nothing to resume", "--resume"),
            ("--batch 0", f"{model} --batch 0"), ("--gamma nan: choose", f"{model} --gamma nan"),
            ("--temperature -1: choose", f"{model} --temperature -1"), ("--steps 0", f"{model} --steps 0"),
            ("--stepz", "--stepz 3"), ("invalid", "--recipe alphazero"),
            ("invalid", "--lr fast"), *([] if torch.cuda.is_available() else [("no GPU", "--device cuda")])):
        assert said in refusal(reinforce.main, "--out", tmp_path / "out", *options.split())
    assert "--out" in refusal(reinforce.main, "--resume")
    assert not (tmp_path / "out").exists()  # a refused run leaves nothing behind


def test_resume_refuses_what_would_be_another_run(world, refusal, capsys, tmp_path, tokenizer):
    out = world("run", "--steps", "1")
    capsys.readouterr()
    for said, options in (("already holds a run", "--device cpu"), ("--model", f"--resume --model {tmp_path}"),
                          ("--gamma", "--resume --gamma 0.5"), ("1 steps are done already", "--resume --steps 0")):
        assert said in refusal(reinforce.main, "--out", out, *options.split())
    trainer = out / "checkpoint/trainer.pt"
    saved = torch.load(trainer, weights_only=True)
    torch.save({name: value for name, value in saved.items() if name != "gains"}, trainer)
    assert "of another version" in refusal(reinforce.main, "--out", out, "--resume")
    torch.save(saved, trainer)
    random_qwen3(len(tokenizer), 48, 64, 2, head_dim=16).save_pretrained(out / "checkpoint")
    assert "not the one" in refusal(reinforce.main, "--out", out, "--resume")


def test_a_run_killed_before_its_first_checkpoint_begins_again(world):
    out = world("run", "--steps", "1")
    begun = metrics(out)[0]
    shutil.rmtree(out / "checkpoint")
    (out / "metrics.jsonl").write_text(json.dumps(begun | {"library": 99}) + "\n")
    (out / "rollouts/my_notes.jsonl").write_text("not a step's")
    assert metrics(world("run", "--resume", "--steps", "1"))[0] == begun and (out / "rollouts/my_notes.jsonl").exists()


def test_resume_needs_what_the_run_has_left_and_the_folder_to_itself(world, refusal, capsys):
    out = world("run", "--steps", "1")
    kept = sorted(path.name for path in (out / "rollouts").iterdir())
    capsys.readouterr()
    with held(out):
        assert "another process is writing there" in refusal(reinforce.main, "--out", out, "--resume")
    for name, damage, said in (
            ("checkpoint/skill_library.jsonl", None, "skill_library.jsonl is missing"),
            ("checkpoint/trainer.pt", None, "trainer.pt is missing"),
            ("metrics.jsonl", lambda whole: b"{\n" + whole, "metrics.jsonl, line 1: cannot be read"),
            ("checkpoint/model.safetensors", lambda whole: whole[:1000], "cannot load the model"),
            *(("checkpoint/trainer.pt", lambda whole, end=end: whole[:end], "trainer.pt is broken")
              for end in (0, 1000, -1000))):
        whole = (out / name).read_bytes()
        (out / name).unlink()
        if damage:
            (out / name).write_bytes(damage(whole))
        assert said in refusal(reinforce.main, "--out", out, "--resume")
        (out / name).write_bytes(whole)
    shutil.rmtree(out / "checkpoint")
    assert "is missing, though steps are finished" in refusal(reinforce.main, "--out", out, "--resume")
    assert sorted(path.name for path in (out / "rollouts").iterdir()) == kept  # nothing was deleted
    (out / "metrics.jsonl").unlink()
    (out / "config.json").write_text("{")
    assert "config.json is broken" in refusal(reinforce.main, "--out", out, "--resume")

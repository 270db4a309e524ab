"""The training step, with a scripted model and a fake sandbox; and a run's folder: resuming after a kill at any point,
what is refused, the command line."""

import json
import os
import shutil
import statistics

import pytest
import torch

import reinforce
import run as runs
from advantages import leave_one_out
from backbone import Backbone
from command import files
from conftest import (CONTENT, FakeSandbox, Scripted, entry, kernel, make_task, proposing, selecting,
                      slow_policy_advantages, write_lines)
from policy import davinci_reward
from sandbox import Verdict
from skills import Skill, SkillLibrary

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
    for i in range(5):
        write_lines(folder / f"tasks/{i}.py", make_task(i).source)
    return ["--model", str(model), "--tasks", str(folder / "tasks"), *SMALL]


@pytest.fixture
def world(request, monkeypatch, model_folder, tmp_path):
    """Everything but words and verdicts is real. Returns a function that runs reinforce.py with options."""
    usual = ingredients(tmp_path, model_folder)
    enter(monkeypatch.setattr)
    problems = [make_task(i) for i in range(7, 10)]
    monkeypatch.setattr(reinforce.tasks, "builtin_tasks", lambda device: problems)
    monkeypatch.setattr(reinforce.tasks, "redundant_tasks", lambda device: problems[:2])
    if not request.node.get_closest_marker("curves"):
        monkeypatch.setattr(runs, "write_page", lambda folders, path: None)  # seconds each
        monkeypatch.setattr(reinforce, "finish_run", lambda run: None)

    def run(out, *options, evaluate=False):
        fresh = usual if evaluate else [*usual, "--eval", "none"]
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
    return files.read_lines(out / "metrics.jsonl")


def records(out, name, role):
    """The lines of one role. name: of the file, or the number of a training step."""
    name = f"step_{name}" if isinstance(name, int) else name
    return [line for line in files.read_lines(out / f"rollouts/{name}.jsonl") if line["role"] == role]


def library_at(out, step) -> list:
    return SkillLibrary.load(out / f"skill_library/global_step_{step}.jsonl").skills


def weights(out):
    return (out / "checkpoint/model.safetensors").read_bytes()


@pytest.mark.curves
def test_training_steps(world, monkeypatch):
    """All three roles enter the loss; a skill is proposed, verified, flushed after the update, and selected later."""
    sizes, flush = [], reinforce.flush  # sizes: of the library after the update
    monkeypatch.setattr("sys.argv", ["/somewhere/reinforce.py", "--steps", "4", "--out", "a b"])
    monkeypatch.setattr(reinforce, "flush", lambda run, e: sizes.append(len(run.library)) or flush(run, e))
    out = world("run", "--steps", "4")
    before, *lines = metrics(out)
    assert sizes == [m["library"] for m in (before, *lines[:-1])] and [m["step"] for m in lines] == [1, 2, 3, 4]
    flushed = [m["step"] for m in lines if m["staged"]][0]
    learnt = [m["selected_learnt"] for m in lines]
    assert sum(learnt[:flushed]) == 0 < sum(learnt[flushed:])  # not before it was flushed
    for size, m in zip(sizes, lines):
        assert m["rows"]["policy"] + m["masked"]["void"] == 2 * 3 * 2 * 2 and m["rows"]["selection"] == 4
        assert m["masked"]["mrs"] == 0 and m["tokens_trained"] > 0
        assert m["ratio_off"] < 1e-4 and m["grad_norm"] > 0  # exactly on-policy
        assert m["library"] == size + m["staged"]
    assert any(m["rows"]["summary"] for m in lines) and any(m["masked"]["prs"] for m in lines)
    names = [s.name for s in library_at(out, 4)]
    assert names[:4] == ["seed-a", "seed-b", "other", "learnt"] and len(set(names)) == len(names)
    assert [s.name for s in library_at(out, flushed - 1)] == names[:3]
    assert SkillLibrary.of_model(out / "checkpoint").skills == library_at(out, 4)
    assert (out / "curves.png").stat().st_size > 10_000 and "learnt" in (out / "report.html").read_text()
    config = json.loads((out / "config.json").read_text())
    assert config["command"] == "python reinforce.py --steps 4 --out 'a b'" and {"hardware", "commit"} < set(config)
    encode = Backbone.load(out / "checkpoint").encode
    for step in (1, 2, 3, 4):
        agrees_with_formulas(out, step, encode)


def agrees_with_formulas(out, step, encode):
    """Rewards and advantages recomputed from the transcript of a step alone."""
    rollouts, selections, summaries = (records(out, step, role) for role in ("policy", "selection", "summary"))
    assert len(rollouts) == 2 * 3 * 2 and len(selections) == 2 * 2
    for task in {line["task"] for line in rollouts}:
        mine, asked, told = ([line for line in lines if line["task"] == task]
                             for lines in (rollouts, selections, summaries))
        schemes = [line["skills"] for line in asked] + [[]]  # the null scheme
        assert [line["skills"] for line in mine] == [skills for skills in schemes for _ in range(2)]
        rows = [line["turns"] for line in mine]
        for turn in sum(rows, []):
            assert turn["reward"] == davinci_reward(Verdict(**turn["verdict"])) and turn["reply"] and turn["feedback"]
        rewards = [[turn["reward"] for turn in row] for row in rows]
        members = [[turn["masked"] != "void" for turn in row] for row in rows]
        tokens = [[0 if turn["masked"] else len(encode(turn["reply"])) + 1 for turn in row] for row in rows]
        want = slow_policy_advantages(rewards, members, tokens)
        assert [[turn["advantage"] for turn in row] for row in rows] == [pytest.approx(row) for row in want]
        speeds = [[turn["verdict"]["speedup"] or 0.0 for turn in row] for row in rows]
        triggering = [max(row) for row in speeds if row[0] and max(row) >= 1.2 * max(row[0], 1.0)]
        assert len(told) == 2 * bool(triggering)
        for line in told:
            passed = [p["attempt"]["verdict"]["speedup"] for p in line["proposals"] if not p["rejected"]]
            assert max(speeds[line["rollout"]]) == max(triggering) and line["reward"] == max(passed, default=0.0)
        want = leave_one_out([line["reward"] for line in asked])
        assert [line["advantage"] for line in asked] == pytest.approx(want)


def test_learning_moves_the_policy_to_the_better_kernel(world):
    """20 steps on one choice: two right kernels and two wrong replies. The mean reward must rise."""
    out = world("run", "--steps", "20", "--no-skills", "--turns", "1", "--lr", "0.0005", "--set", "prs=False")
    rewards = [m["reward_best"] for m in metrics(out)[1:]]
    assert statistics.mean(rewards[-5:]) > statistics.mean(rewards[:5]) + 0.15


def test_ablations(world):
    out = world("a", "--steps", "1", "--no-skills")
    assert records(out, 1, "selection") == records(out, 1, "summary") == []
    assert [line["skills"] for line in records(out, 1, "policy")] == [[]] * 12
    out = world("b", "--steps", "1", "--bm25-only")
    assert records(out, 1, "selection") == []
    chosen = {(line["task"], *line["skills"]) for line in records(out, 1, "policy")}
    assert len(chosen) == 2 and all(len(skills) > 1 for skills in chosen)  # all k + 1 schemes: there is no null scheme
    out = world("c", "--steps", "1", "--no-verify")
    summaries = records(out, 1, "summary")
    assert metrics(out)[1]["staged"]
    for line in summaries:  # a well-formed skill earns 1
        assert {p["attempt"] is None for p in line["proposals"]} == {True}
        assert line["reward"] == any(p["rejected"] is None for p in line["proposals"])
    out = world("frozen", "--steps", "1", "--freeze-selection", "--freeze-summary", "--set", "oversample=2")
    assert metrics(out)[1]["rows"]["selection"] > 0  # used and credited (not trained: test_credit.py)
    assert len({line["task"] for line in records(out, 1, "policy")}) == 4  # of five, for a batch of two


def best_reward(rollouts):
    return statistics.mean(max(turn["reward"] for turn in line["turns"]) for line in rollouts)


def test_evaluation_before_after_and_between(world, monkeypatch):
    """On its own problems and its own random numbers: training goes on as if it had not been. Then the page is made."""
    plain, pages = world("plain", "--steps", "2"), []
    monkeypatch.setattr(runs, "write_page", lambda folders, path: pages.append(len(metrics(folders[0]))))
    Scripted.draws.clear()
    out = world("run", "--steps", "2", "--eval-every", "1", "--set", "eval_samples=2", evaluate=True)
    lines = metrics(out)
    assert weights(out) == weights(plain)
    assert [["eval_correct" in m, "with_correct" in m] for m in lines] == [[True, True], [False, True], [True, True]]
    assert pages == [1, 2]  # after steps 0 and 1; after the last one it is finish_run's
    assert Scripted.draws == {(0, 1.0), (1.0, 0.95), (1.0, 1.0)}  # selections and checks; samples; training
    for step in (0, 2):
        rollouts = records(out, f"eval_{step}", "policy")
        assert len(rollouts) == 3 * 2 and lines[step]["eval_reward_best"] == pytest.approx(best_reward(rollouts))
    for step in (0, 1, 2):
        assert len(records(out, f"redundant_{step}", "selection")) == 2  # one a problem
        rollouts = records(out, f"redundant_{step}", "policy")
        for name, part in (("with", rollouts[0:2] + rollouts[4:6]), ("without", rollouts[2:4] + rollouts[6:])):
            assert lines[step][f"{name}_reward_best"] == pytest.approx(best_reward(part))
            assert any(r["skills"] for r in part) == (name == "with")
    Scripted.draws.clear()
    world("single", "--steps", "1", evaluate=True)
    assert Scripted.draws == {(0, 1.0), (0, 0.95), (1.0, 1.0)}  # a single sample is greedy


# ---- resuming


def state(out):
    """All that a run leaves, but for wall times."""
    trainer = torch.load(out / "checkpoint/trainer.pt")
    lines = [{key: value for key, value in m.items() if key != "seconds"} for m in metrics(out)]
    files = {path.name: path.read_text() for path in [*out.glob("rollouts/*"), *out.glob("skill_library/*")]}
    moments = [{k: v.tolist() for k, v in each.items()} for each in trainer["optimizer"]["state"].values()]
    return [weights(out), (out / "checkpoint/skill_library.jsonl").read_text(), lines, files, moments,
            trainer["generator"].tolist(), trainer["step"], sorted(trainer["initial_names"])]


def test_resuming_equals_not_stopping(world, monkeypatch):
    """What later steps have left is removed."""
    whole = world("whole", "--batch", "1", "--steps", "3")
    world("whole", "--resume")  # complete already: nothing happens
    parts = world("parts", "--batch", "1", "--steps", "1")
    with open(parts / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "clock": "modelled"}\n{"step": 3, "clo')
    for name in ("rollouts/step_9.jsonl", "skill_library/global_step_2.jsonl", "checkpoint_2/model.safetensors"):
        write_lines(parts / name, "left behind")
    (parts / "checkpoint.new").symlink_to("checkpoint_2")  # it is killed before this becomes `checkpoint`
    (parts / "checkpoint").unlink()  # as a program copies it that follows links
    shutil.copytree(parts / "checkpoint_1", parts / "checkpoint")
    mapped, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda *path, **how: mapped.append(how.get("mmap")) or load(*path, **how))
    world("parts", "--resume", "--steps", "3", "--set", "save_every=2")
    assert mapped == [True]  # read whole, an optimiser of 8B parameters would be in the host's memory twice
    assert state(whole) == state(parts)
    assert sorted(path.name for path in parts.glob("checkpoint*")) == ["checkpoint", "checkpoint_3"]


@pytest.mark.parametrize("step, says", [(0, None), (2, "continue with: .* --out .*/killed --resume")])
def test_a_run_that_is_interrupted_as_it_writes_a_checkpoint_goes_on(world, monkeypatch, step, says):
    """Before the first one it begins again. Killed after an update: test_node.py."""
    short, save = ["--steps", "2", "--batch", "1"], torch.save

    def dying(saved, path):
        if saved["step"] == step:
            raise KeyboardInterrupt
        save(saved, path)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", dying)
        with pytest.raises(KeyboardInterrupt, match=says):
            world("killed", *short)
    assert state(world("killed", *(["--resume"] if step else short))) == state(world("whole", *short))


# ---- what is refused


def test_bad_input_is_one_line_and_exit_code_2(refusal, tmp_path, model_folder):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    model = f"--model {model_folder} --device cpu"
    for said, options in (
            ("no such model folder", f"--model {tmp_path}/none --device cpu"),
            ("cannot write", f"{model} --out {tmp_path}/file/out"),
            ("no problem files", f"{model} --tasks {tmp_path}/empty"), ("nothing to resume", "--resume"),
            ("choose from davinci, ", "--recipe alphazero"), ("choose from all, ", "--set history=none"),
            ("--no-skills and --bm25-only contradict", "--no-skills --bm25-only"), ("invalid", "--lr fast")):
        assert said in refusal(reinforce.main, "--out", tmp_path / "out", *options.split())
    assert "--out" in refusal(reinforce.main, "--resume")
    assert not (tmp_path / "out").exists()  # a refused run leaves nothing behind


def test_resume_refuses_another_run_and_a_damaged_one(world, refusal, capsys):
    out = world("run", "--steps", "1")
    kept, trainer = sorted((out / "rollouts").iterdir()), out / "checkpoint/trainer.pt"
    capsys.readouterr()

    def refused(options="--resume"):
        return refusal(reinforce.main, "--out", out, *options.split())

    assert "already holds a run" in refused("--device cpu")
    assert "has gamma = 1.0, not 0.5" in refused("--resume --set gamma=0.5")
    (out / "metrics.jsonl").write_text("{\n")
    assert "metrics.jsonl, line 1: cannot be read" in refused()
    torch.save(torch.load(trainer) | {"optimizer": {}}, trainer)
    assert "of another version" in refused()
    assert sorted((out / "rollouts").iterdir()) == kept  # nothing was deleted


# ---- a laptop's first day


def test_a_folder_is_in_use_until_its_process_ends(refusal, monkeypatch, tmp_path):
    """Killed or not: the system closes its files."""
    write_lines(tmp_path / "checkpoint/trainer.pt")
    monkeypatch.setattr(files, "HELD", held := {})
    files.hold(tmp_path)
    monkeypatch.setattr(files, "HELD", {})  # of another process
    assert f"{tmp_path}: in use by process {os.getpid()}" in refusal(reinforce.main, "--out", tmp_path, "--resume")
    held.clear()
    assert "trainer.pt is broken" in refusal(reinforce.main, "--out", tmp_path, "--resume")

"""Problems: loading, decontamination, the filters of the synthesiser."""

import ast
import itertools
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import tasks
from candidates import TASK
from conftest import configure, make_task
from command.files import ROOT, find_path
from command.options import complete, parse
from command.process import UserError, run_command
from reinforce import Options
from synthetic.training import evaluation_fingerprints, fingerprint, task_stream, training_tasks, unfit
from tasks import (Task, TaskError, builtin_tasks, chosen_tasks, kernelbench_tasks, load_task,
                   redundant_tasks, scale_batch)

PROBLEM = TASK.source


def task(source):
    return Task("t", 0, source)


def files_of(folder, **sources):
    """Problem files with these names."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)


def test_bad_or_missing_problems_are_told_in_one_line(tmp_path, capsys):
    with pytest.raises(TaskError, match="cannot read the problem"):
        load_task(tmp_path / "none.py")
    files_of(tmp_path, good=PROBLEM.replace("\n", " \t\n"), half="def f(:\n", other="x = 3\n")
    assert tasks.listed_tasks(tmp_path) == [Task(f"{tmp_path.name}/good", 0, PROBLEM)]  # broken ones do not stop it
    half, other = capsys.readouterr().out.splitlines()
    assert "half.py: not valid Python" in half and "other.py: does not define Model, get_inputs" in other
    (tmp_path / "good.py").unlink()
    with pytest.raises(TaskError, match="no problems there"):
        tasks.listed_tasks(tmp_path)


@pytest.mark.parametrize("ending, status, told", [
    (lambda: 3, 3, ""), (lambda: open("no/such"), 2, "prog.py: error: [Errno 2] No such file"),
    (lambda: os.kill(os.getpid(), signal.SIGTERM), 130, "prog.py: interrupted\n")])
def test_a_command_ends_with_a_status_and_tells_bad_input_in_one_line(ending, status, told, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["folder/prog.py"])
    with pytest.raises(SystemExit) as end:
        run_command(ending)
    assert end.value.code == status and capsys.readouterr().err.startswith(told)


def test_options_are_given_or_have_the_defaults_of_a_size():
    given = parse(Options, ["--device", "cpu", "--set", "prs=False"], "What it does.")
    assert given == {"device": "cpu", "prs": False} and complete(Options, {}) == Options()
    assert [complete(Options, given, size).steps for size in range(3)] == [8, 100, 200]
    assert [complete(Options, {"gamma": share}).gamma for share in (0, 1)] == [0, 1]
    with pytest.raises(UserError, match="--prs: invalid boolean value: 'no'"):
        parse(Options, ["--set", "prs=no"], "What it does.")
    for given, least in (({"gamma": 2}, "from 0 to 1"), ({"gamma": math.nan}, "from 0"), ({"n": 0}, "above 0")):
        with pytest.raises(UserError, match=f"choose a number {least}"):
            complete(Options, given)


def test_a_missing_package_is_told_at_once():
    program = ("import importlib.util; importlib.util.find_spec = lambda name: name != 'triton'\n"
               "from command.process import begin; begin()")
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, cwd=ROOT)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "triton: not installed" in done.stderr


def test_what_is_not_in_the_current_folder_is_looked_for_in_the_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "problems").mkdir()
    assert [find_path(name) for name in ("no/such", "problems")] == [Path("no/such"), Path("problems")]
    assert find_path("checkpoints/tiny") == ROOT / "checkpoints/tiny" and tasks.folder_tasks("problems/level1")


@pytest.mark.parametrize("name", ["reinforce", "sft", "bench", "sandbox", "run"])
def test_a_program_begins_before_it_imports_torch(name):
    """Else the setting for OpenMP's threads comes too late."""
    first = next(node for node in ast.parse((ROOT / f"{name}.py").read_text()).body if not isinstance(node, ast.Expr))
    assert ast.unparse(first) == ("if __name__ == '__main__':\n    from command.process import begin\n    begin()")


def test_kernelbench_problems_come_in_the_order_of_their_ids(tmp_path):
    files_of(tmp_path / "KernelBench/level1", **dict.fromkeys(("10_B", "9_A", "100_C"), PROBLEM))
    assert [t.name for t in kernelbench_tasks(tmp_path, 1)] == ["level1/9_A", "level1/10_B", "level1/100_C"]
    with pytest.raises(TaskError, match="no level2/ there"):
        kernelbench_tasks(tmp_path, 2)


def test_scale_batch_changes_the_first_integer_and_nothing_else():
    large = scale_batch(task(PROBLEM), 10**6)
    assert large == task(PROBLEM.replace("rows = 64\n", "rows = 64000000\n"))
    parameters = 32 * 32 + 32 + 32
    assert tasks.elements(PROBLEM, 10**9) == 64 * 32 * 2 + parameters
    assert tasks.elements(large.source, 0) == 64e6 * 32 + parameters
    assert scale_batch(task("scale = 2.0\nnames = ['x']\n"), 16) == task("scale = 2.0\nnames = ['x']\n")
    assert [t.source for t in builtin_tasks(1, "cuda")] != [t.source for t in builtin_tasks(1)]


# ---- decontamination, and other filters


FORWARD = "return torch.nn.functional.silu(x + self.bias) * self.factor"
NEAR = "near an evaluation problem"


@pytest.mark.parametrize("old, new, reason", [  # PROBLEM in disguise, or another problem
    ("self.factor", "self.scale", NEAR), ("rows = 64", "rows = 4096", NEAR), ("self.linear(x)", "x @ self.w", NEAR),
    (FORWARD, "y = x + self.bias\n        return self.factor * y * y.sigmoid()", NEAR),
    ("silu", "softplus", None), ("x + self", "x - self", None)] + [(FORWARD, *pair) for pair in (
        ("return x * 0", "constant output"), ("return x + 1, torch.rand(2)", "not deterministic"),
        ("return x, x / 0", "does not return finite tensors"), ("return self", "does not return finite tensors"),
        ("return ()", "does not return finite tensors"), ("return x * 2, [x.amax(1), (x > 0, x * 0)]", None),
        ("return x @ x", "does not run: RuntimeError: mat1 and mat2 shapes cannot be multiplied (64x32 and 64x32)"))])
def test_unfit_problems_are_refused_with_their_reason(old, new, reason):
    assert old in PROBLEM and unfit(task(PROBLEM.replace(old, new)), {fingerprint(PROBLEM)}) == reason


def test_training_keeps_clear_of_the_evaluation():
    evaluation, made = evaluation_fingerprints(), list(itertools.islice(training_tasks(3), 36))
    assert len({t.source for t in made}) == 36 and not {fingerprint(t.source) for t in made} & evaluation
    assert sum(t.family == "redundant" for t in made) == 24
    assert all(unfit(t, evaluation) == NEAR for t in [*builtin_tasks(), *redundant_tasks()])
    assert all(unfit(t, frozenset()) is None for t in redundant_tasks())
    assert len(evaluation) > 41 + 150  # KernelBench's hashes are there


def test_ids():
    problems = [Task(f"level1/{i}_P", 1, "") for i in range(1, 13)]
    assert chosen_tasks(problems, "10, 2-4,2,11-99") == [*problems[1:4], *problems[9:]]
    assert chosen_tasks(problems, None) == problems
    for bad in ("13", "x", "5-", "every0", "every13", "4-2"):
        with pytest.raises(UserError, match="--ids"):
            chosen_tasks(problems, bad)


# ---- the user's own problems


def row(source=PROBLEM, entry="Model", kind="cuda_llm", **info):
    return {"data_source": kind, "reward_model": {"ground_truth": source, "style": "rule"},
            "extra_info": {"entry_point": entry} | info}


KERNELBOOK = PROBLEM.replace("return [32, 2.5]", "return [[32], {'factor': 2.5}]")
LAYER_NORM = PROBLEM.replace("Model", "LayerNorm").replace("super()", "super(LayerNorm, self)").replace(
    "nn.Linear(features, features)", "nn.LayerNorm(features)") + "Model = 3\n"
AS_JSON = {name: json.dumps(value) for name, value in row(LAYER_NORM, "LayerNorm").items()}
ROWS = [row(uuid="a"), row("def f(:"), row("x = 3"), row(KERNELBOOK, ops=["relu"]), row(None), AS_JSON]


def test_rows_of_the_papers_rl_data_are_problems(monkeypatch, capsys):
    monkeypatch.setattr(tasks, "read_parquet", lambda path, columns: ROWS)
    first, _, norm = found = tasks.listed_tasks("rl.parquet")
    assert [t.name for t in found] == ["rl/a", "rl/3", "rl/5"] and first.source == PROBLEM
    assert "class Model(nn.Module)" in norm.source and "super(Model, self)" in norm.source
    assert norm.source.count("LayerNorm") == norm.source.count("nn.LayerNorm") == 1 and "OtherModel = 3" in norm.source
    assert [unfit(t, frozenset()) for t in found] == [None] * 3
    assert "3 problems; left out: 2 does not define" in capsys.readouterr().out
    monkeypatch.setattr(tasks, "read_parquet", lambda path, columns: [row(kind="KernelBench_level2_validation")])
    with pytest.raises(TaskError, match="for evaluation only"):
        tasks.listed_tasks("rl.parquet")


def test_parquet_is_read_or_what_is_needed_is_told(tmp_path, monkeypatch):
    path = tmp_path / "rl.parquet"
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(UserError, match="rl.parquet: reading parquet needs a reader: pip install pyarrow"):
            tasks.listed_tasks(path)
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS[:-1]), path)
    assert len(tasks.listed_tasks(path)) == 2


def test_the_users_problems_are_checked_as_synthesised_ones_are(tmp_path, capsys, monkeypatch):
    fit = make_task(0).source
    files_of(tmp_path, fit=fit, random=fit.replace("torch.relu(x)", "torch.rand(4, 8) * x.tanh()"),
             near=builtin_tasks(1)[0].source)
    args, fitness = configure({"device": "cpu", "tasks": str(tmp_path)}), {}
    assert {task.source for task in itertools.islice(task_stream(args, fitness), 5)} == {fit}
    told = capsys.readouterr().out
    assert f"near is left out: {NEAR}\n" in told and "random is left out: not deterministic" in told
    with monkeypatch.context() as patch:  # a run that is continued has decided already
        patch.setattr("synthetic.training.unfit", None)
        assert {task.source for task in itertools.islice(task_stream(args, fitness), 5)} == {fit}
    (tmp_path / "fit.py").unlink()
    with pytest.raises(TaskError, match=r"no problem can be trained on: 1 \w.*, 1 \w"):
        next(task_stream(args))
    large = scale_batch(task(PROBLEM.replace("self.linear(x)", "torch.rand(1)")), 10**7)
    assert unfit(large, frozenset()) is None  # its values are not computed


# ---- the stream of a run


@pytest.mark.parametrize("tasks, distinct", [("synth", 5), ("folder", 3)])
def test_tasks_go_on_where_they_were(tasks, distinct, tmp_path):
    files_of(tmp_path, **{name: make_task(i).source for i, name in enumerate("abc")})

    def sources(seed, begin=0):
        args = configure({"device": "cpu", "tasks": str(tmp_path) if tasks == "folder" else tasks, "seed": seed})
        return [task.source for task in itertools.islice(task_stream(args), begin, 5)]

    first = sources(4)
    assert sources(4, 3) == first[3:] and len(set(first)) == distinct and sources(5) != first

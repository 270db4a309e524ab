"""report.html: what it says is what the files say; broken files are counted; a browser opens, draws and filters it."""

import base64
import gzip
import html
import json
import math
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

import report
from candidates import HONEST, TASK
from conftest import kernel, read_lines, write_lines
from page import charts, records, writer
from page.metrics import progress
from summarizer import REASONS
from tasks import ROOT

EVIL = "</script><img src=x onerror=\"document.title='owned'\">"  # a reply may hold anything


def verdict(speedup=None, **more):
    right = speedup is not None
    return {"compiled": True, "correct": right, "speedup": speedup, "coverage": 0.8, "reference_ms": 2.0,
            "candidate_ms": 1.0, "rejected": None, "error": None if right else "wrong values",
            "profile": [{"name": "fused_kernel", "share": 0.8, "own": True},
                        {"name": "aten::add", "share": 0.2, "own": False}]} | more


def turn(speedup=None, note="", **more):
    return {"reply": kernel(speedup or 0, note=note), "verdict": verdict(speedup, **more), "feedback": f"told {note}",
            "reward": 0.5 + (speedup or -0.5), "advantage": 0.1}


def policy(task, skills, *turns):
    return {"role": "policy", "task": task, "prompt": f"prompt of {task}", "skills": skills, "turns": list(turns)}


def metrics(step, **more):
    return {"step": step, "clock": "modelled", "library": 1 + step, "seconds": {"roll out": 3.0, "sandbox": 1.0},
            "rejected": {}, "reward_best": 1.0 + step / 9, "correct": 0.5, "fast_1": 0.25} | more


@pytest.fixture
def run(tmp_path):
    """Two steps: in the first a rollout on task a triggers a skill, `found`; in the second it is selected."""
    out = tmp_path / "run $x$"
    write_lines(out / "config.json", {"model": "checkpoints/tiny", "device": "cpu", "trigger": 1.5})
    evaluation = {"eval_correct": 0.9, "eval_fast_1": 0.25}
    write_lines(out / "metrics.jsonl", metrics(0, eval_reward_best=1.0, **evaluation),
          metrics(1, proposals=4, passed=1, staged=1, rejected={"too slow": 2, "no tool call": 1}),
          metrics(2, proposals=1, rejected={"a new reason": 1}, eval_reward_best=1.5, **evaluation))
    skill = {"name": "found", "description": "d", "scope": "general", "tags": [], "content": "Key Idea:\n fuse"}
    proposals = [{"written": skill, "rejected": None, "detail": "", "attempt": turn(2.5), "staged": True},
                 {"written": "?", "rejected": "malformed", "detail": "not an object", "attempt": None, "staged": False}]
    write_lines(out / "rollouts/step_1.jsonl",
          {"role": "selection", "task": "a", "prompt": "p", "reply": "r", "skills": [], "dropped": ["ghost"]},
          policy("b", [], turn()), policy("a", [], turn(3.0)), policy("a", [], turn(1.25), turn(2.25, EVIL)),
          {"role": "summary", "task": "a", "prompt": "p", "rollout": 1, "reply": "s", "reward": 2.5, "advantage": 1.0,
           "proposals": proposals})
    write_lines(out / "rollouts/step_2.jsonl",
          {"role": "selection", "task": "c", "prompt": "p", "reply": "r", "skills": ["found"], "dropped": []},
          policy("c", ["found"], turn(3.0)), policy("c", ["found"], turn(2.0)), policy("c", [], turn(1.0)),
          policy("d", ["found"], turn(1.0), turn()))
    write_lines(out / "rollouts/eval_2.jsonl", policy("e", ["found"], turn(rejected="reads the clock")))
    write_lines(out / "skill_library/global_step_0.jsonl", {**skill, "name": "seed", "content": "s"})
    write_lines(out / "skill_library/global_step_1.jsonl", {**skill, "name": "seed", "content": "s"},
          {**skill, "content": "Key Idea: fuse", "verify_speedup": 2.5})
    return out


@pytest.fixture
def benchmark(tmp_path):
    """A benchmark of a problem with two samples."""
    out = tmp_path / "bench"
    write_lines(out / "config.json", {"model": "m", "device": "cpu", "turns": 1, "source": "KernelBench", "level": 1})
    row = {"of": "mean of samples", "turns": 1, "tolerance": 1e-4, "rule": "strict", "baseline": "eager",
           "correct": 0.5, "fast_1": 0.5, "fast_2": 0.25}
    write_lines(out / "summary.json", {"clock": "modelled", "figures": [row], "problems": {
        "level1/5_X": {"kinds": {"faster": 1}, "best_speedup": 1.75, "skills": [], "most_common_error": None}}})
    write_lines(out / "results.jsonl", *({"task": "level1/5_X", "index": i, "skills": [], "turns": [
        {"reply": "r", "has_code": True, "verdict": verdict(speed)}]} for i, speed in enumerate((1.75, None))))
    return out


def made(*folders, out=None):
    """(HTML, what is packed in it) of the page of these folders."""
    path = out or folders[0] / "report.html"
    report.write_page(folders, path)
    text = path.read_text()
    return text, unpacked(re.search(r'id="packed">([^<]*)<', text)[1])


def unpacked(text):
    return json.loads(gzip.decompress(base64.b64decode(text)))


def words(text):
    """A page's words, as a reader sees them without its script."""
    return " ".join(html.unescape(re.sub(r"<(script|style|svg).*?</\1>|<[^>]*>", " ", text, flags=re.DOTALL)).split())


# ---- what it says


def test_a_run_in_words(run):
    """The figures are those of the files. Gain: (3.5 + 2.5) / 2 - 1.5 on task c; d has no null scheme."""
    text = words(made(run)[0])
    for sentence in (
            "before → after 2 steps: reward 1.000 → 1.500, correct 90% → 90%, Fast_1 25% → 25% (modelled)",
            "Skills found: 1. found (2.50x when verified).",
            "Proposals: 1 of 5 passed; turned down most often as 'too slow' (2)",
            "in step 1 on a, out of a rollout that went from 1.25x to 2.25x ( the summary )",
            "a kernel written with it reached 2.50x", "1 selection, shown in 3 rollouts",
            "+1.50 reward, mean over 1 task", "seed general seed",
            "no tool call 1 4 too slow 2 2 a new reason 1 1 staged, the best of a task 1",
            "roll out 9.0 4.5 75 %", "sandbox 3.0 1.5 25 %"):
        assert sentence in text, sentence
    assert "could not be read" not in text


def test_rollouts_are_packed_as_conversations(run):
    rollouts = {r["id"]: r for r in made(run)[1]["rollouts"]}
    outcomes = {key: r["outcome"] for key, r in rollouts.items()}
    assert outcomes == {"step_1.0": ["none chosen"], "step_1.1": ["wrong"], "step_1.2": ["faster"],
                        "step_1.3": ["faster"], "step_1.4": ["malformed", "staged"], "step_2.0": ["skills chosen"],
                        "step_2.1": ["faster"], "step_2.2": ["faster"], "step_2.3": ["correct"],
                        "step_2.4": ["correct"], "eval_2.0": ["rejected"]}
    again = run / "rollouts/step_2.jsonl"  # a task's second episode in a step
    lines = read_lines(run / "rollouts/step_1.jsonl")
    write_lines(again, *lines, *(line | {"episode": 1} for line in lines))
    repeated = records.read_rollouts(again, "training", 2, [])
    assert [r["of"] for r in repeated if r["role"] == "summary"] == ["step_2.3", "step_2.8"]
    first, second = rollouts["step_1.3"]["turns"]
    assert rollouts["step_1.4"]["of"] == "step_1.3" and "diff" not in first
    assert [line for line in second["diff"] if line[0] in "+-"] == [
        "-    # speedup 1.25 coverage 0.8 ", f"+    # speedup 2.25 coverage 0.8 {EVIL}"]
    assert second["verdict"]["profile"] == verdict()["profile"] and second["feedback"] == f"told {EVIL}"


def test_two_folders_side_by_side(run, benchmark, tmp_path):
    text, data = made(run, benchmark, out=tmp_path / "both.html")
    assert {r["folder"] for r in data["rollouts"]} == {str(run), str(benchmark)} and "Two clocks" not in text
    assert "mean of samples 1 0.0001 strict eager 50 % 50 % – – 25 % –" in words(text)
    assert [r["outcome"] for r in data["rollouts"] if r["folder"] == str(benchmark)] == [["faster"], ["wrong"]]
    write_lines(benchmark / "summary.json", {"clock": "measured", "figures": []})
    assert "Two clocks" in made(run, benchmark, out=tmp_path / "both.html")[0]


def test_a_long_run_is_thinned_by_tasks(run, monkeypatch):
    monkeypatch.setattr(writer, "MOST_TEXT", 5_000)
    for step in range(3, 60):
        write_lines(run / f"rollouts/step_{step}.jsonl", *(policy(task, [], turn(1.0)) for task in "aabb"))
    text, data = made(run)
    shown = [(r["step"], r["task"]) for r in data["rollouts"]]
    assert 20 < len(shown) < 200 and f"{len(shown)} of 239 rollouts fit on this page" in words(text)
    assert all(shown.count(key) == 2 for key in set(shown) if key[0] > 2)  # whole groups
    assert "step_1.4" in {r["id"] for r in data["rollouts"]}  # whose skill was staged


def test_curves_are_smoothed_and_the_evaluations_are_not():
    """Values 0, 2, 0, 2, ...: from 20 steps on the mean of up to 5 of them is drawn, and they are pale behind it."""
    lines = [metrics(step, correct=2.0 * (step % 2), eval_correct=2.0 * (step % 2)) for step in range(20)]
    curve, short, evaluation = (charts.learning_curve(records.Source(ROOT, metrics=lines[:n]), key, label) for
                                n, key, label in ((20, "correct", "a"), (19, "correct", "a"),
                                                  (20, "eval_correct", f"{charts.EVALUATED}a")))
    assert curve.y[:4] == [2 / 3, 1.0, 0.8, 1.2] and curve.behind == [evaluation.y] and not evaluation.behind
    assert short.y == evaluation.y[:19] == [line["correct"] for line in lines[:19]]
    axis = Figure().subplots()
    charts.draw(axis, charts.Chart("", "", [short._replace(label="b"), curve, evaluation]))
    _, pale, strong, dashed = axis.lines
    assert pale.get_color() == strong.get_color() == dashed.get_color() == "C1" and pale.get_alpha() < 1
    assert dashed.get_linestyle() == "--" and strong.get_linestyle() == "-"


def test_seconds_are_stacked():
    axis, curves = Figure().subplots(), [charts.Curve("a", [1, 2], [3.0, 4.0]), charts.Curve("b", [1, 2], [5.0, 6.0])]
    charts.draw(axis, charts.Chart("", "", curves, kind="stacked"))
    assert [(bar.get_y(), bar.get_height()) for bar in axis.patches] == [(0, 3), (0, 4), (3, 5), (4, 6)]


# ---- files that are broken


def test_broken_lines_are_counted_and_left_out(run):
    for name in ("metrics.jsonl", "rollouts/step_1.jsonl", "skill_library/global_step_1.jsonl"):
        with open(run / name, "a") as file:
            file.write('[1]\n\n{"step": "x"}\nnot json\n' + "[" * 100_000 + '\n{"step": 3, "ro')
    before = len(made(run)[1]["rollouts"])
    assert report.main([str(run)]) == 0
    assert before == 11 and words((run / "report.html").read_text()).count("5 lines could not be read") == 3


STRANGE = (None, -1e400, "\ud800", [[]], {})


def changed(value):
    """Every value that differs from `value` in one place, where something strange stands instead, or nothing."""
    places = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(places):
        for other in [*STRANGE, *changed(inner)]:
            yield (value | {key: other}) if isinstance(value, dict) else [*value[:key], other, *value[key + 1:]]
        if isinstance(value, dict):
            yield {name: inner for name, inner in value.items() if name != key}


@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts/step_1.jsonl", "skill_library/global_step_1.jsonl",
                                  "config.json", "summary.json", "results.jsonl"])
def test_whatever_stands_in_a_file_there_is_a_page(name, run, benchmark, monkeypatch):
    """One value after the other is replaced by a strange one; everything else is still shown."""
    def finite(source):
        return all(math.isfinite(value) for line in source.metrics for value in line.values()
                   if type(value) not in (str, dict))

    monkeypatch.setattr(charts, "svg", lambda sides, names: str(sides))  # drawing takes longer
    folder = benchmark if name in ("summary.json", "results.jsonl") else run
    rows = read_lines(folder / name)
    files = [[*rows[:i], other, *rows[i + 1:]] for i, row in enumerate(rows) for other in changed(row)]
    for i, lines in enumerate(files):
        write_lines(folder / name, *lines)
        source = records.read_folder(folder)
        assert finite(source) and writer.pack([source])[1] == len(source.rollouts)
        if i % max(1, len(files) // 12) == 0:  # the template takes longer
            assert len(writer.render([source], REASONS)) > 10_000
    assert len(files) > 12


def test_strange_figures_of_a_benchmark_are_drawn():
    row = {"of": "mean of samples", "turns": 1, "tolerance": 1e-4, "rule": "strict", "fast_1": 0.5, "fast_2": 0.2}
    for other in changed(row):
        assert charts.svg([charts.fast_p([row, other], 1)], ["a"]).startswith("<svg")
    assert charts.fast_p([row, row | {"turns": 2}, row | {"of": "best sample"}], 1).curves == [
        charts.Curve("strict, against None", [1.0, 2.0], [0.5, 0.2])]


def test_bad_arguments_are_refused_in_one_line(refusal, tmp_path, run):
    assert "no run" in refusal(report.main, tmp_path)
    assert "unrecognized" in refusal(report.main, run, run, run)
    assert "File exists" in refusal(report.main, run, "--out", run / "metrics.jsonl/x.html")


# ---- in a browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")


def browse(page, script, *options):
    """What a script returns that runs in a page, opened from its file by a browser without a network."""
    copy, text = page.with_name("browsed.html"), page.read_text()
    text = text.replace("<head>", "<head><script>var failures = []; onerror = m => failures.push(`${m}`)</script>", 1)
    # The clock of this browser is virtual, and unpacking takes real time: the loop lets some of it pass.
    copy.write_text(text.replace("</body>", """<pre id="said"></pre><script>const timer = setInterval(() => {
        for (let i = 0, x = 0; i < 3e6; i++) x += Math.sqrt(i);
        if (!document.querySelector("#conversation *")) return;
        clearInterval(timer);
        let said;
        try { said = (() => {%s})() } catch (error) { said = `failed: ${error}` }
        document.getElementById("said").textContent = JSON.stringify([said, failures, document.title]);
        }, 100)</script></body>""" % script))
    text = chromium(copy, "--dump-dom", *options)
    said, failures, title = json.loads(html.unescape(re.search(r'<pre id="said">(.*?)</pre>', text, re.DOTALL)[1]))
    assert not failures and title != "owned" and "failed: " not in str(said)[:8], (said, failures, title)
    return said


def chromium(page, *options):
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
               "--hide-scrollbars", f"--user-data-dir={page.parent}/profile", "--host-resolver-rules=MAP * ~NOTFOUND",
               "--window-size=1200,4500", "--virtual-time-budget=30000", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@browser
def test_a_browser_opens_filters_and_shows_conversations(run):
    made(run)
    shown = browse(run / "report.html", """
        const $ = selector => [...document.querySelectorAll(selector)], result = {};
        const choose = (name, value) => {
          document.forms[0].elements[name].value = value;
          document.forms[0].dispatchEvent(new Event("change", {bubbles: true}));
          return $("#list button").length };
        result.all = $("#list button").length;
        result.roles = ["policy", "selection", "summary", ""].map(role => choose("role", role));
        result.tasks = ["a", "c", ""].map(task => choose("task", task));
        result.steps = ["step 1", "evaluation after step 2", ""].map(step => choose("step", step));
        result.verdict = choose("verdict", "rejected");
        choose("verdict", "");
        $("[data-open$='x$:step_1.3']")[0].click();
        const conversation = document.getElementById("conversation");
        result.turns = $("#conversation .turn").length;
        result.marked = $("#list [aria-current]").map(button => button.dataset.open);
        result.keyword = $("#conversation .k")[0].textContent;
        result.added = $("#conversation .added").map(line => line.textContent);
        result.bars = $("#conversation .profile i").map(bar => bar.style.width);
        result.evil = conversation.textContent.includes("onerror") && !conversation.querySelector("img");
        result.told = $("#conversation .feedback").map(text => text.textContent);
        $("[data-open$='x$:step_1.0']")[0].click();
        result.dropped = $("#conversation .feedback").map(text => text.textContent);
        $("[data-skill=found]")[0].click();
        result.skill = [$("#list button").length, document.forms[0].elements.skill.value];
        $(".funnel [data-verdict='too slow']")[0].click();
        result.reason = document.forms[0].elements.role.value;
        $("#list button")[0].click();
        result.proposals = $("#conversation .turn .turn h4").map(title => title.textContent);
        return result""")
    assert shown["all"] == 11 and shown["roles"] == [8, 2, 1, 11] and shown["tasks"] == [4, 4, 11]
    assert shown["steps"] == [5, 1, 11] and shown["verdict"] == 1
    assert shown["turns"] == 2 and shown["marked"] == [f"{run}:step_1.3"] and shown["keyword"] == "class"
    assert shown["added"] == [f"+     # speedup 2.25 coverage 0.8 {EVIL}"] and shown["evil"]
    assert shown["bars"] == ["80%", "20%"] * 2 and shown["told"] == ["told ", f"told {EVIL}"]
    assert shown["dropped"] == ["no candidate: ghost"]
    assert shown["skill"] == [4, "found"] and shown["reason"] == "summary"
    assert shown["proposals"] == ["found staged", "a proposal without a name malformed"]


@browser
@pytest.mark.parametrize("options, ground", [
    pytest.param((), 255, id="light"),
    pytest.param(("--blink-settings=preferredColorScheme=0",), 20, id="dark", marks=pytest.mark.slow)])
def test_every_part_of_the_page_is_drawn(options, ground, run, benchmark, tmp_path):
    """On the screenshot each chart has its curves in their colours, and each section is where the page says."""
    page = tmp_path / "both.html"
    made(run, benchmark, out=page)
    boxes = browse(page, """return Object.fromEntries([...document.querySelectorAll("svg, section[id]")].map(
        part => [part.getAttribute("aria-label") || part.id, part.getBoundingClientRect()]))""", *options)
    chromium(tmp_path / "browsed.html", f"--screenshot={tmp_path}/shot.png", *options)
    shot = (255 * imread(tmp_path / "shot.png")[..., :3]).round().astype(int)
    assert abs(shot[-1, 0] - ground).max() < 8
    sections = ["overview", "curves", "benchmark", "library", "proposals", "rollouts", "seconds"]
    tops = [boxes[name]["top"] for name in sections]
    assert tops == sorted(tops) and all(boxes[name]["height"] > 40 for name in sections)
    curves = {panel[0] for panel in charts.PANELS[:2]} | {"Skill library", "Seconds of a step", "Fast_p"}
    assert curves <= set(boxes)
    blue = [0x1f, 0x77, 0xb4]
    for name in curves:
        box = {side: int(value) for side, value in boxes[name].items()}
        part = shot[box["top"]:box["bottom"], box["left"]:box["right"]]
        assert (abs(part - blue).max(axis=-1) < 40).sum() > 50, name  # the first curve
        assert (abs(part - part[0, 0]).max(axis=-1) > 60).mean() > 0.005, name  # axes and words stand out


# ---- with another framework


def test_the_page_on_other_frameworks_works_as_it_stands():
    """Called as TRL's GRPOTrainer calls it, with the sandbox that it makes itself."""
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "other_frameworks.md").read_text(), re.DOTALL)
    space = {}
    exec(code.split("# The rest needs trl")[0], space)
    good = f"Plan: x.\n```python\n{HONEST}```"
    replies = [good, [{"role": "assistant", "content": "no code"}], [{"role": "assistant", "content": good}]]
    rewards = space["kernel_reward"](prompts=["p"] * 3, completions=replies, completion_ids=[[1]] * 3,
                                     source=[TASK.source] * 3, trainer_state=None)
    space["sandbox"].close()
    assert rewards[0] == rewards[2] > 1.5 and rewards[1] == 0.0 and all(type(reward) is float for reward in rewards)


def test_the_progress_line_says_what_has_improved():
    line = {"step": 2, "clock": "modelled", "eval_reward_best": 1.5, "eval_correct": 0.9, "eval_fast_1": 0.5,
            "staged": 1, "library": 2, "seconds": {},
            **dict.fromkeys(("reward_best", "correct", "fast_1", "speedup"), 1.0),
            **dict.fromkeys(("policy_rows", "selection_rows", "summary_rows", "passed", "proposals"), 1)}
    before = {"step": 0, "eval_reward_best": 1.25, "eval_correct": 0.95, "eval_fast_1": 0.25}
    library = SimpleNamespace(skills=[SimpleNamespace(name="seed"), SimpleNamespace(name="found")])
    assert progress(line, SimpleNamespace(steps=6), before, library).endswith(
        "|  new: found  |  evaluation: reward 1.500 (+0.250), correct 90% (-5%), Fast_1 50% (+25%) (modelled)")

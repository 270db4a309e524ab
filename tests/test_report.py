"""report.html: what it says is what the files say; a browser opens, draws and filters it."""

import base64
import gzip
import html
import json
import re
import shutil
import subprocess

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

import run as report
from candidates import HONEST, TASK
from conftest import kernel, write_lines
from page import charts, writer
from program.files import ROOT

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
    return {"role": "policy", "episode": ord(task), "task": task, "prompt": f"prompt of {task}", "skills": skills,
            "turns": list(turns)}


def selection(task, skills, **more):
    row = {"role": "selection", "episode": ord(task), "task": task, "prompt": "p", "reply": "r", "skills": skills}
    return row | more


def metrics(step, **more):
    return {"step": step, "clock": "modelled", "library": 1 + step, "seconds": {"roll out": 3.0, "sandbox": 1.0},
            "rejected": {}, "rows": {"policy": 4, "selection": 2, "summary": 1}, "proposals": 0, "passed": 0,
            "staged": 0, "summaries": 1, "reward_best": 1.0 + step / 9, "correct": 0.5, "fast_1": 0.25} | more


@pytest.fixture
def run(tmp_path):
    """Two steps: in the first a rollout on task a leads to a skill, `found`, which joins as found_2, since that name is
    taken; in the second it is selected."""
    out = tmp_path / "run $x$"
    write_lines(out / "config.json", {"model": "checkpoints/tiny", "device": "cpu", "trigger": 1.5})
    evaluation = {"eval_correct": 0.9, "eval_fast_1": 0.25}
    write_lines(out / "metrics.jsonl", metrics(0, eval_reward_best=1.0, **evaluation),
          metrics(1, proposals=4, passed=1, staged=1, rejected={"too slow": 2, "no tool call": 1}),
          metrics(2, proposals=1, rejected={"malformed": 1}, eval_reward_best=1.5, **evaluation))
    skill = {"name": "found", "description": "d", "scope": "general", "tags": [], "content": "Key Idea:\n fuse"}
    proposals = [{"written": skill, "rejected": None, "detail": "", "attempt": turn(2.5), "staged": "found_2"},
                 {"written": "?", "rejected": "malformed", "detail": "not an object", "attempt": None, "staged": None}]
    write_lines(out / "rollouts/step_1.jsonl",
          selection("a", [], dropped=["ghost"]),
          policy("b", [], turn()), policy("a", [], turn(3.0)), policy("a", [], turn(1.25), turn(2.25, EVIL)),
          {"role": "summary", "episode": ord("a"), "task": "a", "prompt": "p", "rollout": 1, "reply": "s",
           "reward": 2.5, "advantage": 1.0, "proposals": proposals})
    write_lines(out / "rollouts/step_2.jsonl",
          selection("c", ["found_2"], dropped=[]),
          policy("c", ["found_2"], turn(3.0)), policy("c", ["found_2"], turn(2.0)), policy("c", [], turn(1.0)),
          policy("d", ["found_2"], turn(1.0), turn()))
    write_lines(out / "rollouts/eval_2.jsonl", policy("e", ["found_2"], turn(rejected="reads the clock")))
    write_lines(out / "skill_library/global_step_0.jsonl", {**skill, "name": "found", "content": "s"})
    write_lines(out / "skill_library/global_step_1.jsonl", {**skill, "name": "found", "content": "s"},
          {**skill, "name": "found_2", "verify_speedup": 2.5})
    return out


@pytest.fixture
def bench_folder(tmp_path):
    """A benchmark of a problem with two samples."""
    out = tmp_path / "bench"
    write_lines(out / "config.json", {"model": "m", "device": "cpu", "turns": 1, "source": "KernelBench, level 1"})
    row = {"counted": "best turn", "rule": "strict", "correct": 0.5, "fast_1": 0.5, "fast_1.2": 0.5, "fast_1.5": 0.5,
           "fast_2": 0.25, "fast_3": 0.0, "geometric_mean": 1.75}
    write_lines(out / "summary.json", {"clock": "modelled", "figures": [row, row | {"counted": "last turn"}],
                                       "skills": "no skills", "hardware": "h"})
    rows = []
    for i, speedup in enumerate((1.75, None)):
        turns = [{"reply": "r", "verdict": verdict(speedup)}]
        rows.append({"task": "level1/5_X", "index": i, "skills": [], "turns": turns})
    write_lines(out / "results.jsonl", *rows)
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
            "Skills found: 1. found_2 (2.50x when verified).",
            "Proposals: 1 of 5 passed; rejected most often as 'too slow' (2)",
            "in step 1 on a, out of a rollout that went from 1.25x to 2.25x ( the summary )",
            "a kernel written with it reached 2.50x", "found general seed", "found_2 general found",
            "no tool call 1 4 malformed 1 3 too slow 2 1 staged, the best of a task 1"):
        assert sentence in text, sentence


def test_rollouts_are_packed_as_conversations(run):
    rollouts = {r["id"]: r for r in made(run)[1]["rollouts"]}
    assert list(rollouts) == [f"step_1.{i}" for i in range(5)] + ["eval_2.0"] + [f"step_2.{i}" for i in range(5)]
    first, second = rollouts["step_1.3"]["turns"]
    assert rollouts["step_1.4"]["winner"] == "step_1.3"
    assert "speedup 1.25" in first["reply"] and EVIL in second["reply"]
    assert second["verdict"]["profile"] == verdict()["profile"] and second["feedback"] == f"told {EVIL}"


def test_two_folders_side_by_side(run, bench_folder, tmp_path):
    text, data = made(run, bench_folder, out=tmp_path / "both.html")
    assert {r["folder"] for r in data["rollouts"]} == {str(run), str(bench_folder)} and "Two clocks" not in text
    assert "best turn strict 50.0 50.0 50.0 50.0 25.0 0.0 1.75x last turn" in words(text)
    write_lines(bench_folder / "config.json", {"model": "m", "device": "cuda", "source": "KernelBench, level 1"})
    assert "Two clocks" in made(run, bench_folder, out=tmp_path / "both.html")[0]


def test_of_a_long_run_every_nth_step_is_shown(run, monkeypatch):
    monkeypatch.setattr(writer, "MOST_TEXT", 10_000)
    for step in range(3, 60):
        write_lines(run / f"rollouts/step_{step}.jsonl", *(policy(task, [], turn(1.0)) for task in "aabb"))
    text, data = made(run)
    shown = [r["step"] for r in data["rollouts"]]
    assert 20 < len(shown) < 200 and f"{len(shown)} of 239 rollouts fit on this page" in words(text)
    assert all(shown.count(step) == 4 for step in set(shown) if step > 2)


def test_curves():
    """The evaluation's are dashed, in the colour of training's; a step without the metric is left out."""
    lines = [metrics(0, correct=None, eval_correct=0.25), metrics(1, eval_correct=0.75), metrics(2, correct=0.75)]
    labels = {"fast_1": "a", "correct": "b", "eval_correct": f"{charts.EVALUATED}b"}
    curves = [charts.learning_curve(lines, metric, label) for metric, label in labels.items()]
    assert [(curve.x, curve.y) for curve in curves[1:]] == [([1, 2], [0.5, 0.75]), ([0, 1], [0.25, 0.75])]
    axis = Figure().subplots()
    charts.draw(axis, charts.Chart("", "", curves))
    other, training, evaluation = axis.lines
    assert training.get_color() == evaluation.get_color() == "C1" != other.get_color()
    assert evaluation.get_linestyle() == "--" and training.get_linestyle() == "-"


def test_fast_p_is_drawn_of_the_best_turns(bench_folder):
    [curve] = charts.fast_p(json.loads((bench_folder / "summary.json").read_text())["figures"]).curves
    assert curve == ("strict rule", [1, 1.2, 1.5, 2, 3], [0.5, 0.5, 0.5, 0.25, 0])


# ---- files that are broken


def test_a_line_that_a_kill_has_cut_off_is_left_out(run):
    for name in ("metrics.jsonl", "rollouts/step_1.jsonl", "skill_library/global_step_1.jsonl"):
        with open(run / name, "a") as file:
            file.write('{"step": 3, "ro')
    assert report.main([str(run)]) == 0 and len(made(run)[1]["rollouts"]) == 11


def test_a_broken_line_and_a_missing_field_are_told_in_one_line(refusal, run):
    path = run / "rollouts/step_2.jsonl"
    lines = path.read_text()
    path.write_text(lines + "no JSON\n")
    assert f"{path}, line 6: cannot be read" in refusal(report.main, run)
    path.write_text(lines.replace('"episode"', '"other"'))
    assert f"{path}: a line lacks a field (KeyError)" in refusal(report.main, run)


def test_bad_arguments_are_refused_in_one_line(refusal, tmp_path, run):
    assert "no run" in refusal(report.main, tmp_path)
    assert "unrecognized" in refusal(report.main, run, run, run)
    assert "File exists" in refusal(report.main, run, "--out", run / "metrics.jsonl/x.html")


# ---- in a browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")


def browse(page, script):
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
    text = chromium(copy, "--dump-dom")
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
        result.lines = $("#conversation .code span").map(line => line.textContent).filter(line => line.includes("img"));
        result.bars = $("#conversation .profile i").map(bar => bar.style.width);
        result.evil = conversation.textContent.includes("onerror") && !conversation.querySelector("img");
        result.told = $("#conversation .feedback").map(text => text.textContent);
        $("[data-open$='x$:step_1.0']")[0].click();
        result.dropped = $("#conversation .feedback").map(text => text.textContent);
        $("[data-skill=found_2]")[0].click();
        result.skill = [$("#list button").length, document.forms[0].elements.skill.value];
        $(".funnel [data-verdict='too slow']")[0].click();
        result.reason = document.forms[0].elements.role.value;
        $("#list button")[0].click();
        result.proposals = $("#conversation .turn .turn h4").map(title => title.textContent);
        return result""")
    assert shown["all"] == 11 and shown["roles"] == [8, 2, 1, 11] and shown["tasks"] == [4, 4, 11]
    assert shown["steps"] == [5, 1, 11] and shown["verdict"] == 1
    assert shown["turns"] == 2 and shown["marked"] == [f"{run}:step_1.3"] and shown["keyword"] == "class"
    assert f"    # speedup 2.25 coverage 0.8 {EVIL}" in shown["lines"] and shown["evil"]
    assert shown["bars"] == ["80%", "20%"] * 2 and shown["told"] == ["told ", f"told {EVIL}"]
    assert shown["dropped"] == ["no candidate: ghost"]
    assert shown["skill"] == [4, "found_2"] and shown["reason"] == "summary"
    assert shown["proposals"] == ["found staged", "a proposal without a name malformed"]


@browser
def test_every_part_of_the_page_is_drawn(run, bench_folder, tmp_path):
    """On the screenshot each chart has its curves in their colours, and each section is where the page says."""
    page = tmp_path / "both.html"
    made(run, bench_folder, out=page)
    boxes = browse(page, """return Object.fromEntries([...document.querySelectorAll("svg, section[id]")].map(
        part => [part.getAttribute("aria-label") || part.id, part.getBoundingClientRect()]))""")
    chromium(tmp_path / "browsed.html", f"--screenshot={tmp_path}/shot.png")
    shot = (255 * imread(tmp_path / "shot.png")[..., :3]).round().astype(int)
    sections = ["overview", "curves", "library", "proposals", "benchmark", "rollouts"]
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
    assert rewards[0] == rewards[2] > 1.0 and rewards[1] == 0.0 and all(type(reward) is float for reward in rewards)

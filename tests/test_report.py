"""report.html: what it says is what the files say; a browser opens, draws and filters it."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import run as report
import sandbox
from candidates import HONEST, TASK
from conftest import kernel, write_lines
from page import charts, writer
from command.files import ROOT

EVIL = "</script><img src=x onerror=\"document.title='owned'\">"  # a reply may hold anything


def turn(speedup=None, note="", **more):
    verdict = {"compiled": True, "correct": speedup is not None, "speedup": speedup, "coverage": 0.8} | more
    return {"reply": kernel(speedup or 0, note=note), "verdict": verdict, "feedback": f"told {note}",
            "reward": 0.5 + (speedup or -0.5), "advantage": 0.1}


def policy(task, skills, *turns):
    return {"role": "policy", "episode": ord(task), "task": task, "prompt": "p", "skills": skills, "turns": turns}


def metrics(step, **more):
    return {"step": step, "library": 1 + step, "seconds": {"roll out": 3.0, "sandbox": 1.0}, "rejected": {},
            "proposals": 0, "passed": 0, "reward_best": 1.0 + step / 9, "correct": 0.5, "fast_1": 0.25} | more


@pytest.fixture
def run(request, monkeypatch, tmp_path):
    """Two steps: in the first a rollout on task a leads to a skill, `found`, which joins as found_2, since that name is
    taken; in the second it is selected. A picture takes half a second, so it is drawn only where it is looked at."""
    if not request.node.get_closest_marker("curves"):
        monkeypatch.setattr(charts, "save_curves", lambda run, path: Path(path).write_bytes(b""))
    out = tmp_path / "run $x$"
    write_lines(out / "config.json", {"model": "checkpoints/tiny", "device": "cpu"})
    evaluation = {"eval_correct": 0.9, "eval_fast_1": 0.25}
    write_lines(out / "metrics.jsonl", metrics(0, eval_reward_best=1.0, **evaluation),
          metrics(1, proposals=4, passed=1, rejected={"too slow": 2, "no tool call": 1}),
          metrics(2, proposals=1, rejected={"malformed": 1}, eval_reward_best=1.5, **evaluation))
    skill = {"name": "found", "description": "d", "scope": "general", "tags": [], "content": "Key Idea:\n fuse"}
    proposals = [{"written": skill, "rejected": None, "detail": "", "attempt": turn(2.5), "staged": "found_2"},
                 {"written": "?", "rejected": "malformed", "detail": "not an object", "attempt": None, "staged": None}]
    asked = {"episode": ord("a"), "task": "a", "prompt": "p", "reply": "r"}
    write_lines(out / "rollouts/step_1.jsonl", asked | {"role": "selection", "skills": [], "dropped": ["ghost"]},
                policy("b", [], turn()), policy("a", [], turn(3.0)), policy("a", [], turn(1.25), turn(2.25, EVIL)),
                asked | {"role": "summary", "rollout": 1, "reward": 2.5, "advantage": 1.0, "proposals": proposals})
    write_lines(out / "rollouts/step_2.jsonl", policy("c", ["found_2"], turn(3.0)), policy("c", [], turn(1.0)))
    write_lines(out / "rollouts/eval_2.jsonl", policy("e", ["found_2"], turn(rejected="reads the clock")))
    write_lines(out / "skill_library/global_step_0.jsonl", skill)
    write_lines(out / "skill_library/global_step_1.jsonl", skill, {**skill, "name": "found_2", "verify_speedup": 2.5})
    return out


def made(*folders):
    """(the page of these folders, its HTML, the rollouts in it)."""
    assert report.main([*map(str, folders)]) == 0
    path = folders[0] / ("report.html" if len(folders) == 1 else "comparison.html")
    text = path.read_text()
    return path, text, json.loads(re.search(r'id="data">([^<]*)<', text)[1])


def words(text):
    """A page's words, as a reader sees them without its script."""
    return " ".join(html.unescape(re.sub(r"<(script|style|svg).*?</\1>|<[^>]*>", " ", text, flags=re.DOTALL)).split())


# ---- what it says


def test_a_run_in_words_and_conversations(run):
    """The figures are those of the files."""
    _, text, listed = made(run)
    rollouts = {r["id"]: r for r in listed}
    assert list(rollouts) == [f"step_1.{i}" for i in range(5)] + ["eval_2.0", "step_2.0", "step_2.1"]
    first, second = rollouts["step_1.3"]["turns"]
    assert rollouts["step_1.4"]["winner"] == "step_1.3"
    assert "speedup 1.25" in first["reply"] and EVIL in second["reply"] and second["feedback"] == f"told {EVIL}"
    text = words(text)
    for sentence in (
            "before training -> after 2 steps: reward 1.000 -> 1.500, correct 90% -> 90%, Fast_1 25% -> 25% (modelled)",
            "Skills found: 1. found_2 (2.50x when verified).",
            "Proposals: 1 of 5 passed; rejected: 2 too slow, 1 no tool call, 1 malformed.",
            "Proposed in step 1 on a by this summary ; a kernel written with it reached 2.50x.",
            "Later selected for c (step 2), where this rollout reached 3.00x.",
            "found general seed", "found_2 general found"):
        assert sentence in text, sentence
    assert "No kernel was correct" not in text


def test_a_page_says_where_it_comes_from_and_whether_it_is_of_a_part(run):
    facts = {"command": "python reinforce.py --steps 5", "commit": "abc-dirty", "hardware": "2 cores",
             "versions": {"torch": "1.0", "triton": "3"}}
    write_lines(run / "config.json", {"model": "m", "device": "cpu", "steps": 5} | facts)
    write_lines(run / "metrics.jsonl", metrics(0), metrics(1, correct=0.0), metrics(2, correct=0.0))
    text = words(made(run)[1])
    for sentence in ("python reinforce.py --steps 5 Commit abc-dirty; 2 cores; torch 1.0, triton 3.",
                     "A part of the run: 2 of 5 steps are done.",
                     "No kernel was correct in any step, so nothing could be learnt: these tasks"):
        assert sentence in text, sentence


def test_two_folders_side_by_side(run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    _, text, rollouts = made(run, other)
    assert {r["folder"] for r in rollouts} == {str(run), str(other)} and "Two clocks" not in text
    write_lines(other / "config.json", {"model": "m", "device": "cuda"})
    assert "Two clocks" in made(run, other)[1]


def test_of_a_long_run_every_nth_step_is_shown(run, monkeypatch):
    monkeypatch.setattr(writer, "MOST_TEXT", 10_000)
    for step in range(3, 60):
        write_lines(run / f"rollouts/step_{step}.jsonl", *(policy(task, [], turn(1.0)) for task in "aabb"))
    _, text, rollouts = made(run)
    shown = [r["step"] for r in rollouts]
    assert 8 < len(shown) < 200 and f"{len(shown)} of 236 rollouts fit on this page" in words(text)
    assert all(shown.count(step) == 4 for step in set(shown) if step > 2)


def test_curves():
    """A step without the metric is left out."""
    lines = [metrics(0, correct=None), metrics(1), metrics(2, correct=0.75)]
    assert charts.learning_curve(lines, "correct") == ([1, 2], [0.5, 0.75])


# ---- files that are broken


def test_broken_files_are_told_in_one_line(refusal, run, tmp_path):
    with open(run / "rollouts/step_1.jsonl", "a") as file:
        file.write('{"step": 3, "ro')  # a line that a kill has cut off is left out
    assert len(report.write_page([run], tmp_path / "page.html")[0].rollouts) == 8
    path = run / "rollouts/step_2.jsonl"
    path.write_text('{"role": "summary"}\n')
    assert "a line lacks a field (KeyError)" in refusal(report.main, run)
    assert "no run" in refusal(report.main, tmp_path)


# ---- in a browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def browse(page, script):
    """What a script returns that runs in a page, opened from its file by a browser without a network."""
    copy, text = page.with_name("browsed.html"), page.read_text()
    text = text.replace("<head>", "<head><script>var failures = []; onerror = m => failures.push(`${m}`)</script>", 1)
    copy.write_text(text.replace("</body>", """<pre id="said"></pre><script>{
        let said;
        try { said = (() => {%s
        })() } catch (error) { said = `failed: ${error}` }
        document.getElementById("said").textContent = JSON.stringify([said, failures, document.title]);
        }</script></body>""" % script))
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
               f"--user-data-dir={page.parent}/profile", "--host-resolver-rules=MAP * ~NOTFOUND",
               "--virtual-time-budget=30000", "--dump-dom", copy.as_uri()]
    text = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    said, failures, title = json.loads(html.unescape(re.search(r'<pre id="said">(.*?)</pre>', text, re.DOTALL)[1]))
    assert not failures and title != "owned", (said, failures, title)
    return said


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
@pytest.mark.slow
@pytest.mark.curves
def test_a_browser_opens_filters_and_shows_conversations(run):
    assert browse(made(run)[0], Path(__file__).with_name("browse.js").read_text()) == {
        "roles": [6, 1, 1, 8], "steps": [5, 1, 8], "skill": [2, 8], "verdict": 1, "turns": 2, "evil": True, "charts": 1,
        "marked": [f"{run}:step_1.3"], "told": ["told ", f"told {EVIL}"], "dropped": ["no candidate: ghost"],
        "proposals": ["found staged", "a proposal without a name malformed"]}


# ---- with another framework


def test_the_page_on_other_frameworks_works_as_it_stands(borrowed):
    """Called as TRL calls it, with the sandbox that it makes itself."""
    borrowed(sandbox)
    space = {}
    for code in re.findall(r"```python\n(.*?)```", (ROOT / "other_frameworks.md").read_text(), re.DOTALL):
        if "GRPOTrainer" not in code:  # it needs TRL
            exec(code, space)
    talk = [{"role": "assistant", "content": f"```python\n{HONEST}```"}, {"role": "tool", "content": "no code"}]
    reward, none = space["kernel_reward"](completions=[talk, "no code"], source=[TASK.source] * 2, prompts=["p"] * 2)
    environment = space["KernelEnvironment"]()
    environment.reset(prompt="p", source=TASK.source)
    assert "Correct: yes" in environment.score_kernel(HONEST) and "Compiled: no" in environment.score_kernel("x = 3")
    assert environment.get_reward() == reward > 1.0 and none == 0.0

"""A benchmark of a served model ends with a result or with one line, however the server misbehaves."""

import json
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from transformers.utils.import_utils import is_accelerate_available, is_serve_available

import bench
from backbone import Sampling
from chat import server
from chat.server import Messages, Server
from command.files import ROOT
from command.process import UserError
from conftest import FakeSandbox, kernel, selecting
from skills import Skill, SkillLibrary


def saying(**choice) -> dict:
    return {"choices": [{"message": {"content": kernel(1.5)}, "finish_reason": "stop"} | choice]}


GOOD = saying() | {"usage": {"completion_tokens": 7}}


class Stub(BaseHTTPRequestHandler):
    """A server of the protocol. `script` says what becomes of each request for a reply; its last entry repeats.

    An entry is a status, an answer, or something that goes wrong, by name; or a function of the request gives it.
    """

    script, asked, models = [], [], {"data": [{"id": "M", "max_model_len": 5000}]}

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.act(self.models)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((body, self.headers["Authorization"]))
        entry = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        self.act(entry(body) if callable(entry) else entry)

    def act(self, what):
        if what == "hang":
            time.sleep(1)
        elif what != "drop":
            failed = isinstance(what, int)
            text = "why not\nin two lines" if failed else what if isinstance(what, str) else json.dumps(what)
            self.send_response(what if failed else 200)
            self.send_header("Content-Length", str(len(text) + 1000 * (what == "cut off")))
            self.end_headers()
            self.wfile.write(text.encode())
        if what in ("drop", "cut off"):
            self.connection.close()


@pytest.fixture
def url(monkeypatch):
    monkeypatch.setattr(server, "PAUSES", (0.01, 0.02))
    monkeypatch.setattr(bench, "Sandbox", FakeSandbox)
    monkeypatch.setattr(bench, "report", lambda folder, summary: (folder / "summary.json").write_text(
        json.dumps(summary)))  # without its pictures, which take a second
    for name, value in (("asked", []), ("script", [GOOD]), ("models", Stub.models)):
        monkeypatch.setattr(Stub, name, value)
    with ThreadingHTTPServer(("127.0.0.1", 0), Stub) as stub:
        threading.Thread(target=stub.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{stub.server_address[1]}"
        stub.shutdown()


def replies(model, count=1):
    return model.sample([Messages([{"role": "user", "content": f"p{i}"}]) for i in range(count)], Sampling(50))


PASSING = [500, 429, "drop", "cut off", "{no json", "[]", {"error": {"message": "overloaded"}}, {"choices": [{}]},
           {"choices": [None]}, saying(message={"content": [{"type": "image_url"}]})]


@pytest.mark.parametrize("failure", PASSING, ids=str)
def test_what_fails_is_asked_again_and_then_fails_alone(url, failure, capsys):
    model = Server(url)
    Stub.script = [failure, failure, GOOD]
    [reply] = replies(model)
    Stub.script = [failure, failure, failure, GOOD]
    [lost] = replies(model)  # the server still lists its model, so the run goes on
    assert (reply.text, len(reply.token_ids), reply.finished) == (kernel(1.5), 7, True)
    assert (lost.text, lost.token_ids, lost.finished) == ("", [], False) and len(Stub.asked) == 6
    assert model.statistics()["replies"] == 1 and sum(model.statistics()["without_reply"].values()) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "gives no reply to a prompt" in err
    assert [body["seed"] for body, _ in Stub.asked[:3]] == [0, 0, 0]


LENGTH = len(kernel(1.5)) // 4


@pytest.mark.parametrize("answer, text, tokens, finished", [
    (saying(message={"content": [{"type": "text", "text": "abcd"}]}, finish_reason="length"), "abcd", 1, False),
    (saying(message={}), "", 0, True), (saying() | {"usage": None}, kernel(1.5), LENGTH, True),
    (saying(finish_reason=None) | {"usage": {"completion_tokens": None}}, kernel(1.5), LENGTH, True)])
def test_answers_in_other_layouts_are_read(answer, text, tokens, finished):
    assert server.read_answer(answer) == (text, tokens, finished)


def test_a_refused_prompt_and_a_reply_that_takes_too_long_are_asked_once(url, capsys):
    model = Server(url)
    model.timeout = 0.2
    Stub.script = [GOOD, 400, 413, 422, "hang", GOOD]
    assert [bool(replies(model)[0].text) for _ in range(6)] == [True, False, False, False, False, True]
    err = capsys.readouterr().err
    assert len(Stub.asked) == 6 and err.count("\n") == 4 and "TimeoutError" in err
    assert "HTTP Error 400: Bad Request why not in two lines\n" in err


def test_a_server_that_answers_no_prompt_ends_with_one_line(url):
    model = Server(url)
    Stub.script = [400]
    with pytest.raises(UserError, match=r"it answered no prompt: HTTPError: HTTP Error 400: .*--max-prompt-tokens"):
        replies(model, 3)
    Stub.script = [GOOD, 400]
    assert replies(model)[0].text  # after that, such prompts fail alone
    assert not any(reply.text for reply in replies(model, 3))


@pytest.mark.parametrize("address, listed, message", [
    ("{}", 401, "401: Unauthorized .*key is read from OPENAI_API_KEY"), ("{}", "[]", "AttributeError"),
    ("{}", {"data": None}, "lists no model"), ("{}", {"data": [{}]}, "no model"), ("not a url", 200, "")])
def test_a_server_that_lists_no_model_is_refused_in_one_line(url, address, listed, message):
    Stub.models = listed
    with pytest.raises(UserError, match=f"^[^\n]*{message}[^\n]*$"):
        Server(address.format(url))


def test_the_usual_environment_variable_gives_the_key(url, monkeypatch):
    for key, sent in (("", None), ("sk-1\n", "Bearer sk-1")):
        monkeypatch.setenv("OPENAI_API_KEY", key)
        replies(Server(url))
        assert Stub.asked[-1][1] == sent


BENCH = ["--device", "cpu", "--level", "1", "--ids", "1,3", "--samples", "2", "--turns", "2", "--server"]


def test_a_benchmark_keeps_what_was_judged_and_says_how_long_the_server_took(url, tmp_path, capsys):
    Stub.script = [lambda body: {1: 500, 3: 400}.get(body["seed"] % 4, GOOD)]  # a reply in each wave, and a failure
    assert bench.main([*BENCH, url, "--batch", "2", "--out", str(tmp_path), "--served-model", "N"]) == 0
    samples = bench.read_results(tmp_path / "results.jsonl").values()
    correct = [turn.verdict.correct for sample in samples for turn in sample.turns]
    assert sorted(correct) == [False] * 4 + [True] * 4
    assert [body["model"] for body, _ in Stub.asked] == ["N"] * (4 + 2 * 3 + 2)  # a refused prompt is not asked again
    served = json.loads((tmp_path / "summary.json").read_text())["server"]
    assert served["replies"] == 4 and sorted(served["without_reply"].values()) == [2, 2]
    assert f"{url}: {json.dumps(served)}" in capsys.readouterr().out


def test_a_server_that_goes_away_costs_no_sample(url, tmp_path):
    """It answers three prompts of eight. The same command asks for the others."""
    def gone(body):
        Stub.models = 500
        return 500

    Stub.script, listed = [GOOD, GOOD, GOOD, gone], Stub.models
    with pytest.raises(UserError, match="models: HTTPError: HTTP Error 500"):
        bench.main([*BENCH, url, "--out", str(tmp_path)])
    assert sum(map(len, bench.read_answers(tmp_path / bench.UNFINISHED).values())) == 3
    Stub.script, Stub.models, Stub.asked = [GOOD], listed, []
    assert bench.main([*BENCH, url, "--out", str(tmp_path)]) == 0 and len(Stub.asked) == 5
    assert len(bench.read_results(tmp_path / "results.jsonl")) == 4


def test_a_served_model_gets_the_skills_of_a_snapshot(url, tmp_path, capsys):
    def script(body):
        selects = "select_skills" in body["messages"][0]["content"]
        return saying(message={"content": selecting("fuse")}) if selects else GOOD

    Stub.script, library = [script], tmp_path / "snapshot.jsonl"
    SkillLibrary([Skill("fuse", "fuse softplus", "general", ("softplus",), "Key Idea: one kernel")]).save(library)
    assert bench.main([*BENCH, url, "--out", str(tmp_path / "o"), "--library", str(library)]) == 0
    samples = bench.read_results(tmp_path / "o/results.jsonl").values()
    assert [(s.skills, [turn.tokens for turn in s.turns]) for s in samples] == [(["fuse"], [7, 7])] * 4
    asked = [body for body, _ in Stub.asked]
    assert [(body["temperature"], body["max_tokens"]) for body in asked] == [(0.0, 1024)] * 2 + [(1.0, 1250)] * 8
    assert ["one kernel" in body["messages"][0]["content"] for body in asked] == [False] * 2 + [True] * 8
    assert [len(body["messages"]) for body in asked] == [2] * 6 + [4] * 4
    assert {body["top_p"] for body in asked[2:]} == {0.95} and len({body["seed"] for body in asked[2:]}) == 8
    config = json.loads((tmp_path / "o/config.json").read_text())
    assert config["model"] == config["checkpoint"] == "M"
    assert "skills out of 1\nM on" in capsys.readouterr().out


def test_an_interrupt_waits_for_no_reply(url):
    began, before = time.monotonic(), threading.enumerate()
    Stub.script = [lambda body: "hang" if body["seed"] else GOOD]
    with Server(url).sampler(Sampling(50)) as sampler:
        assert next(sampler.write(dict.fromkeys((0, 1), Messages([{"role": "user", "content": "p"}]))))[0] == 0
    assert time.monotonic() - began < 0.8  # the other one hangs for a second
    assert all(thread.daemon for thread in threading.enumerate() if thread not in before)


@pytest.mark.slow
def test_transformers_serve_is_walked(tmp_path, monkeypatch, capsys):
    """A real server, and what it does with a name that it does not know."""
    if not is_serve_available() or not is_accelerate_available():
        pytest.skip("transformers serve needs accelerate, fastapi, uvicorn and openai")
    monkeypatch.setattr(bench, "Sandbox", FakeSandbox)
    monkeypatch.setattr(server, "PAUSES", (0.1,))
    with socket.create_server(("127.0.0.1", 0)) as free:
        host, port = free.getsockname()
    model, url = str(ROOT / "checkpoints/tiny"), f"http://{host}:{port}"
    command = [sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve", model,
               "--host", host, "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as serving:
        try:
            while socket.socket().connect_ex((host, port)):
                assert serving.poll() is None, "it could not start"
                time.sleep(0.5)
            given = [*BENCH, url, "--max-new-tokens", "40", "--out"]
            assert bench.main([*given, str(tmp_path / "o"), "--served-model", model]) == 0
            assert '"replies": 8' in capsys.readouterr().out
            with pytest.raises(UserError, match="no/such|answered no prompt"):
                bench.main([*given, str(tmp_path / "other"), "--served-model", "no/such"])
        finally:
            serving.terminate()

"""A benchmark of a served model ends with a result or with one line, however the server misbehaves."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import bench
from backbone import Sampling
from chat import server
from chat.server import Messages, Server
from command.process import UserError
from conftest import FakeSandbox, kernel, selecting
from skills import Skill, SkillLibrary

GOOD = {"choices": [{"message": {"content": kernel(1.5)}, "finish_reason": "stop"}], "usage": {"completion_tokens": 7}}


def saying(**choice) -> dict:
    return {"choices": [{"message": {"content": kernel(1.5)}, "finish_reason": "stop"} | choice]}


class Stub(BaseHTTPRequestHandler):
    """A server of the protocol. `script` says what becomes of each request for a reply; its last entry repeats.

    An entry is a status, an answer, or something that goes wrong, by name; or a function of the request gives it.
    """

    script, asked, models = [], [], {"data": [{"id": "M", "max_model_len": 5000}]}

    def log_message(self, *_):
        pass

    def answer(self, status, text):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        self.act(self.models)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((body, self.headers["Authorization"]))
        entry = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        self.act(entry(body) if callable(entry) else entry)

    def act(self, what):
        if what == "drop":
            self.connection.close()
        elif what == "hang":
            time.sleep(1)
        elif isinstance(what, int):
            self.answer(what, "why not\nin two lines")
        else:
            self.answer(200, what if isinstance(what, str) else json.dumps(what))


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


@pytest.mark.parametrize("failure", [500, "drop", "{no json", {"choices": []}, saying(message={"content": 5})], ids=str)
def test_what_fails_is_asked_again_and_then_fails_alone(url, failure, capsys):
    model = Server(url)
    Stub.script = [failure, failure, GOOD]
    [reply] = replies(model)
    assert (reply.text, len(reply.token_ids), reply.finished) == (kernel(1.5), 7, True) and len(Stub.asked) == 3
    Stub.script = [failure, failure, failure, GOOD]
    [lost] = replies(model)  # the server still lists its model, so the run goes on
    assert (lost.text, lost.token_ids, lost.finished) == ("", [], False) and len(Stub.asked) == 6
    assert model.statistics()["replies"] == 1 and sum(model.statistics()["without_reply"].values()) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "gives no reply to a prompt" in err
    assert [body["seed"] for body, _ in Stub.asked[:3]] == [0, 0, 0]


@pytest.mark.parametrize("answer, text, tokens, finished", [
    (saying(message={"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "bcd"}]}), "abcd", 1, True),
    (saying(message={"content": None}, finish_reason="length"), "", 0, False)])
def test_answers_in_other_layouts_are_read(url, answer, text, tokens, finished):
    Stub.script = [answer]
    [reply] = replies(Server(url))
    assert (reply.text, len(reply.token_ids), reply.finished) == (text, tokens, finished)


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
    Stub.script = [401]
    with pytest.raises(UserError, match="model M: HTTPError: HTTP Error 401: .*key is read from OPENAI_API_KEY"):
        replies(model)


@pytest.mark.parametrize("listed, message", [
    (401, "OPENAI_API_KEY"), ("{", "JSON"), ({"data": None}, "lists no model")])
def test_a_server_that_lists_no_model_is_refused_in_one_line(url, listed, message):
    Stub.models = listed
    with pytest.raises(UserError, match=f"^[^\n]*{message}[^\n]*$"):
        Server(url)


BENCH = ["--device", "cpu", "--level", "1", "--ids", "1,3", "--samples", "2", "--turns", "2", "--server"]


def test_a_server_that_goes_away_costs_no_sample(url, tmp_path):
    """It answers three prompts of eight. The same command asks for the others."""
    def once(body):
        if len(Stub.asked) > 3:
            Stub.models = 500
        return 500 if len(Stub.asked) > 3 else GOOD

    Stub.script, listed = [once], Stub.models
    with pytest.raises(UserError, match="models: HTTPError: HTTP Error 500"):
        bench.main([*BENCH, url, "--out", str(tmp_path)])
    assert sum(map(len, bench.read_answers(tmp_path / bench.UNFINISHED).values())) == 3
    Stub.script, Stub.models, Stub.asked = [GOOD], listed, []
    assert bench.main([*BENCH, url, "--out", str(tmp_path)]) == 0 and len(Stub.asked) == 5
    samples = bench.read_results(tmp_path / "results.jsonl").values()
    assert all(turn.verdict.correct for sample in samples for turn in sample.turns) and len(samples) == 4


def test_a_served_model_gets_the_skills_of_a_snapshot(url, tmp_path, monkeypatch):
    def script(body):
        selects = "select_skills" in body["messages"][0]["content"]
        return saying(message={"content": selecting("fuse")}) if selects else GOOD

    monkeypatch.setenv("OPENAI_API_KEY", "sk-1\n")
    Stub.script, library = [script], tmp_path / "snapshot.jsonl"
    SkillLibrary([Skill("fuse", "fuse softplus", "general", ("softplus",), "Key Idea: one kernel")]).save(library)
    assert bench.main([*BENCH, url, "--ids", "1", "--out", str(tmp_path / "o"), "--library", str(library)]) == 0
    samples = bench.read_results(tmp_path / "o/results.jsonl").values()
    assert [sample.skills for sample in samples] == [["fuse"]] * 2
    assert [turn.tokens for sample in samples for turn in sample.turns] == [7] * 4
    selection, *policy = [body for body, _ in Stub.asked]
    assert (selection["temperature"], selection["max_tokens"]) == (0.0, 1024)
    assert [(body["temperature"], body["top_p"], body["max_tokens"]) for body in policy] == [(1.0, 0.95, 1250)] * 4
    assert len({body["seed"] for body in policy}) == 4
    assert all("one kernel" in body["messages"][0]["content"] for body in policy)
    assert sorted(len(body["messages"]) for body in policy) == [2, 2, 4, 4]
    assert {key for _, key in Stub.asked} == {"Bearer sk-1"}
    assert json.loads((tmp_path / "o/config.json").read_text())["checkpoint"] == "M"
    assert json.loads((tmp_path / "o/summary.json").read_text())["server"]["replies"] == 5

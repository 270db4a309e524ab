"""Chat templates of every kind: what is fed, what is learnt, what the next turn extends; prompts of a file."""

import json
import random
import types
from pathlib import Path

import pytest

from backbone import Backbone, Chat, Completion, Sampling
import recipes  # noqa: F401 (it enters the release's form of a verdict)
from chat import prompts
from chat.calls import extract_code
from chat.prompts import SELECT_TOOL
from chat.rows import encode, encode_rollout, read_chats
from chat_templates import CALL, TEMPLATES, calling, template_tokenizer
from conftest import configure, learnt, make_task, write_lines
from policy import next_messages, policy_messages
from judge.verdict import KernelTime, Verdict
from run import check
from selector import selection_messages
from skills import Skill
from summarizer import summary_messages
from command.process import UserError


@pytest.fixture(params=TEMPLATES)
def chat(request, tokenizer):
    made = Chat(template_tokenizer(tokenizer, request.param))
    made.kind = request.param
    return made


TALK = [{"role": role, "content": text} for role, text in (
    ("system", "You write kernels."), ("user", "The task."), ("assistant", "  Plan: one.\n```python\nx = 1\n```\n"),
    ("user", "Compiled: no."), ("assistant", "Plan: two."), ("user", "Still no."), ("assistant", "\nPlan: three. "))]


def test_half_a_surrogate_pair_can_be_read(tokenizer):
    chat = Chat(tokenizer)
    assert chat.encode("a \ud83d b") == chat.encode("a ? b") and chat.encode("é\U0001f600") != chat.encode("??")


def test_what_is_learnt_is_each_reply_with_its_end(chat):
    ids, mask = encode(chat, TALK)
    replies = [message["content"] for message in TALK if message["role"] == "assistant"]
    if chat.kind == "llama2":
        replies = [" " + reply.strip() for reply in replies]  # the blank is after its prompt
    end = chat.tokenizer.decode(chat.end)
    assert learnt(chat, ids, mask) == [reply + end for reply in replies]
    assert end.strip() and chat.end[-1] in chat.tokenizer.all_special_ids
    text = chat.tokenizer.decode(ids)
    places = [text.find(message["content"].strip()) for message in TALK]
    assert places == sorted(places) and places[0] >= 0  # everything is fed, in its order, the system message first
    # Where the template does not rewrite earlier turns, what is fed is what it writes.
    if TEMPLATES[chat.kind][0] in ("plain", "strips", "no system"):
        assert chat.chat_text(TALK, reply=False).startswith(text)
    # Every prompt is the one that is sampled from.
    prompt, starts = chat.chat_ids(TALK[:2]), [i for i in range(1, len(mask)) if mask[i] and not mask[i - 1]]
    assert ids[:starts[0]].tolist() == prompt and len(starts) == 3


def test_a_next_turn_extends_what_was_sampled_token_by_token(chat):
    """Replies are random tokens, which no text would give again."""
    rng, end = random.Random(0), chat.tokenizer.decode(chat.end)
    for finished in (True, False):
        messages, prompt = TALK[:2], chat.chat_ids(TALK[:2])
        for turn in range(3):
            tokens = [rng.randrange(3, 400) for _ in range(9)] + chat.end[-1:] * finished
            text = chat.tokenizer.decode(tokens[:9])
            messages = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": f"No {turn}."}]
            after = chat.next_ids(Completion(prompt, tokens, [], text, finished), messages)
            assert after[:len(prompt) + len(tokens)] == prompt + tokens
            added = chat.tokenizer.decode(after[len(prompt) + len(tokens):])
            assert added.startswith(end) != finished or TEMPLATES[chat.kind][0] == "no end"
            assert f"No {turn}." in added and text not in added and added.count(end) <= 2
            start = chat.chat_text(TALK[:2]).rpartition("The task.")[2]  # how the template begins a reply
            assert added.endswith(start)
            prompt = after
    changed = [*messages[:-2], {"role": "assistant", "content": "A summary."}, messages[-1]]
    assert chat.next_ids(Completion(prompt, tokens, [], text, True), changed) == chat.chat_ids(changed)


def test_a_reply_that_ended_with_another_token_gets_the_templates_end_as_well(tokenizer):
    made = template_tokenizer(tokenizer, "qwen3")
    made.chat_template = ("{% for m in messages %}{{ m.role + m.content }}{% if m.role == 'assistant' %}<|im_end|>"
                          "{% else %}<|endoftext|>{% endif %}{% endfor %}")
    chat, stop = Chat(made), made.convert_tokens_to_ids("<|endoftext|>")
    after = chat.next_ids(Completion([5], [6, stop], [], "x", True), [TALK[1], TALK[4] | {"content": "x"}, TALK[5]])
    assert after[:3] == [5, 6, stop] and made.decode(after[3:]) == "<|im_end|>userStill no.<|endoftext|>"


def read(path, chat, *rows) -> list:
    """What read_chats learns of rows: for each the texts, and the pair."""
    write_lines(path / "rows.jsonl", *rows)
    return [(learnt(chat, *pair), *pair) for pair in read_chats(path / "rows.jsonl", chat)]


def test_tool_calls_are_learnt_as_the_template_writes_them(chat, tmp_path):
    row = {"messages": json.dumps([*TALK[:2], calling(None, json.dumps(CALL))]), "tools": json.dumps([SELECT_TOOL]),
           "enable_thinking": False}
    [([reply], ids, mask)] = read(tmp_path, chat, row)
    assert "two passes" in reply and reply.endswith(chat.tokenizer.decode(chat.end))
    assert "select_skills" in chat.tokenizer.decode(ids[:mask.argmax()])  # the prompt says what can be called
    assert chat.tool_call(reply, "select_skills") == CALL
    reads = chat.kind in ("qwen3", "release")  # with the others the call became text
    assert "<tool_call>" in reply and chat.tool_role == (reads or chat.kind == "lfm2", reads)
    if reads:
        whole = chat.tokenizer.apply_chat_template([*TALK[:2], calling()], tools=[SELECT_TOOL], tokenize=False,
                                                   enable_thinking=False)
        assert chat.tokenizer.decode(ids) == whole.rstrip("\n")


def test_thoughts_are_learnt_whatever_a_row_says_of_thinking(tokenizer, tmp_path, capsys):
    chat = Chat(template_tokenizer(tokenizer, "qwen3"))
    thought = {"role": "assistant", "content": "<think>\nWhy.\n</think>\n\nPlan: one."}
    row = {"messages": [*TALK[:2], thought]}
    first, second, third, plain = read(tmp_path, chat, row, row | {"enable_thinking": False},
                                       {"messages": [*row["messages"], *TALK[3:5]]}, {"messages": TALK})
    assert first[0] == second[0] == third[0][:1] == [thought["content"] + "<|im_end|>"] and len(plain[0]) == 3
    assert third[0][1].endswith("</think>\n\nPlan: two.<|im_end|>")
    assert "Why." in chat.tokenizer.decode(third[1])  # kept as it was written, though the template would drop it now
    assert "3 rows hold thoughts, which the model will write with --thinking only" in capsys.readouterr().out


def test_rows_in_other_layouts_are_read(tokenizer, tmp_path, capsys):
    chat = Chat(template_tokenizer(tokenizer, "deaf"))  # it writes no calls
    contents = [[{"type": "text", "text": "Plan: "}, {"type": "text", "text": "two."}],
                [{"type": "image_url", "image_url": "x"}]]
    rows = [{"messages": [*TALK[:2], {"role": "assistant", "content": content}], "tools": ""} for content in contents]
    [[plain], *_], [[called], *_] = read(tmp_path, chat, *rows, {"messages": [*TALK[:2], calling("So:")]})
    assert plain == "Plan: two." + chat.tokenizer.decode(chat.end)
    assert called.startswith("So:") and chat.tool_call(called, "select_skills") == CALL
    assert "rows.jsonl:2: skipped (ValueError: a message holds something else than text)" in capsys.readouterr().err


def test_a_thought_that_the_template_opens_belongs_to_the_reply(model_folder):
    """Cut off inside it, a reply is no answer; whole, it is learnt as it was sampled, the opening but once."""
    model = Backbone.load(model_folder)
    [reply, other] = model.sample([model.encode("Why? <think>\n"), model.encode("What is <think> for?")],
                                  Sampling(4, temperature=0))
    assert reply.text == "<think>\n" + model.tokenizer.decode(reply.token_ids) and not reply.finished
    assert extract_code(reply.text + "\n```python\nclass ModelNew:\n    pass\n```") is None
    assert not other.text.startswith("<think>")
    stop = types.SimpleNamespace(prompt=reply.prompt_ids, tokens=[5, model.stop_ids[0]], logprobs=[0.0, 0.0])
    assert model._completion(stop).text == model.tokenizer.decode([5])  # it ended: a model may answer without a thought

    ran, text = Chat(template_tokenizer(model.tokenizer, "r1")), "<think>\nWhy.\n</think>\n\nPlan: one."
    prompt = ran.chat_ids([TALK[1]])
    ids, mask = encode_rollout(ran, 0.5, {"prompt": ran.tokenizer.decode(prompt), "reply": text, "reward": 1.0})
    written = ran.encode(text.removeprefix("<think>\n")) + ran.end
    assert list(ids) == prompt + written and list(mask) == [False] * len(prompt) + [True] * len(written)


def test_a_template_that_cannot_write_messages_says_so(tokenizer):
    chat = Chat(template_tokenizer(tokenizer, "mistral"))
    with pytest.raises(UserError, match="roles must alternate"):
        chat.chat_text([TALK[1], TALK[1]])


# ---- prompts of a file

RELEASE = Path(__file__).with_name("release_prompts")  # in the layout of the release's kernel/config
SKILLS = [Skill("fuse", "d", "general", ("a", "b"), "body __task_description__"),
          Skill("tile", "e", "general", (), "x")]


@pytest.fixture
def release_prompts(monkeypatch):
    """Read them, and leave the prompts as they were."""
    for table in (prompts.PROMPTS, prompts.SELECT_TOOL, prompts.UPDATE_TOOL):
        for key in table:
            monkeypatch.setitem(table, key, table[key])
    prompts.read_prompts(RELEASE)


FUSE = "---\nname: fuse\ndescription: d\nscope: general\ntags: [a, b]\n---\n\nbody __task_description__"
TILE = "---\nname: tile\ndescription: e\nscope: general\ntags: []\n---\n\nx"


def texts(messages) -> list:
    return [message["content"] for message in messages]


def test_prompts_of_a_folder_in_the_releases_layout(release_prompts):
    task, ours = make_task(), prompts.PROMPTS["policy_system"]  # what the files lack stays ours
    _, asked = texts(policy_messages(task, ()))
    assert texts(selection_messages(task, SKILLS)) == ["Choose 3.", (
        f"## Task\n{asked}\n## Skills\n 1. **fuse**  [scope=general]  [tags: a, b]\n    d\n"
        " 2. **tile**  [scope=general]\n    e\nCode {like} __init__ stays.")]
    assert texts(policy_messages(task, SKILLS)) == [f"{ours}\n\n===\n{FUSE}\n\n\n{TILE}\n==", asked]
    for skills, text in ((SKILLS, f"{FUSE}\n\n\n{TILE}"), ((), "(none: this rollout was of the null scheme)")):
        assert texts(summary_messages(task, skills, ("one", 1.0), ("two", 2.0))) == [
            "At most 2.", f"[SYSTEM]\n{ours}\n\n[USER]\n{asked}|{text}|1.00|one|two"]


def test_tools_of_the_releases_layout_say_how_many_skills_a_call_holds(release_prompts):
    for tool, said, name, entry in (
            (SELECT_TOOL, "Pick the top 3 most apt.", "selected_skills",
             {"type": "array", "description": "Picks (at most 3).", "maxItems": 3}),
            (prompts.UPDATE_TOOL, "Add with at most 2 skills.", "new_skills",
             {"type": "array", "description": "New (at most 2).", "items": {"type": "object"}, "maxItems": 2})):
        assert tool["function"]["description"] == said
        assert str(tool["function"]["parameters"]["properties"][name]) == str(entry)  # in this order


RIGHT = Verdict(compiled=True, correct=True, speedup=8.0, coverage=0.5, reference_ms=1.0, candidate_ms=0.125,
                profile=[KernelTime("k\u00e9", 0.5, True), KernelTime("mm", 0.25, False)])
KERNELS = [{"name": "k\u00e9", "cuda_time_us": 62.5}, {"name": "mm", "cuda_time_us": 31.25}]
WRONG = {"status": "completed", "compiled": True, "correctness": False, "decoy_kernel": False,
         "reference_runtime": -1.0, "kernel_runtime": -1.0, "speedup": 0.0, "metadata": {},
         "error_message": "bad\n  1> x", "error_code": "RUNTIME_ERROR", "reward": 0.0, "success": False}
TIMES = {"score": 0.0, "profiling": None, "num_custom_kernel": 0, "num_total_kernels": 0,
         "custom_kernel_cuda_time_in_profiling_us": 0, "total_kernel_run_time_in_profiling_us": 0.0}
FAILED = {"reward": 0.0, "speedup": 0.0, "success": False, "correctness": False, "compiled": False}


@pytest.mark.parametrize("verdict, state", [
    (RIGHT, WRONG | TIMES | {
        "correctness": True, "reference_runtime": 1.0, "kernel_runtime": 0.125, "speedup": 8.0,
        "metadata": {"profiling": {"kernels": KERNELS, "kernel_count": 2, "total_cuda_time_us": 125.0}},
        "error_message": None, "error_code": None, "reward": 2.25, "success": True, "score": 2.25,
        "num_custom_kernel": 1, "num_total_kernels": 2, "custom_kernel_cuda_time_in_profiling_us": 62.5,
        "total_kernel_run_time_in_profiling_us": 125.0}),
    (Verdict(compiled=True, error="bad", excerpt="  1> x"), WRONG | TIMES),
    (Verdict(compiled=True, error="wrong"),
     WRONG | TIMES | {"error_message": "wrong", "error_code": "CORRECTNESS_ERROR"}),
    (Verdict(compiled=True, rejected="a decoy"),
     WRONG | {"compiled": False, "decoy_kernel": True, "error_message": "a decoy", "error_code": None,
              "error": "Reward hacking: Decoy kernel detected", "score": 0.0}),
    (Verdict(error="bad", excerpt="  1> x"),
     {"status": "failed", "error_message": "bad\n  1> x"} | FAILED | {"error": "bad\n  1> x"}),
    (Verdict(error="no code"), FAILED | {"error": "no code"})])
def test_feedback_of_the_releases_layout_is_the_state_as_json(release_prompts, verdict, state):
    """Keys, values and their order, as its reward_client.py gives them for these answers of its server."""
    check(configure({"device": "cpu", "reward": "drkernel"}))  # as reinforce.py begins
    answer = next_messages([], "r", verdict)[-1]["content"]
    assert answer == f"Verdict {{1}}:\n{json.dumps(state, ensure_ascii=False, indent=2)}\nAgain.\n"


def test_a_policy_prompt_of_ones_own_has_a_place_for_skills(release_prompts, tmp_path):
    own = {"policy_system": "", "policy_user": "A __skills__B __task_description__"}
    (tmp_path / "own.yaml").write_text(json.dumps({"prompts": own}))
    prompts.read_prompts(tmp_path / "own.yaml")
    task = make_task()
    assert texts(policy_messages(task, SKILLS[:1])) == [f"A \n\n===\n{FUSE}\n==\n\nB {task.source.strip()}"]
    assert f"## Task\nA B {task.source.strip()}\n" in selection_messages(task, SKILLS, 100_000)[1]["content"]


@pytest.mark.parametrize("text, why", [
    ("{", "ParserError"), ("prompts: {a: 1}", "no map of texts"),
    ("prompts: {a: b}\ntools: {summary: [{function: {name: f}}]}", "the tool of summary is called f"),
    ("per_turn_prompts: [{name: tool_response, template: '{0}'}]", "IndexError")])
def test_a_file_that_holds_no_prompts_is_refused(tmp_path, release_prompts, text, why):
    path, before = tmp_path / "x.yaml", dict(prompts.PROMPTS)
    path.write_text(text)
    with pytest.raises(UserError, match=f"^[^\n]*{why}[^\n]*$"):
        prompts.read_prompts(path)
    assert prompts.PROMPTS == before
    path.write_text((RELEASE / "kernel_trainer.yaml").read_text())
    with pytest.raises(UserError, match="has one of prompts, tools"):
        prompts.read_prompts(tmp_path)

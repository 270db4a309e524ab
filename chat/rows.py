"""Conversations as token ids with a mask of what is to be learnt: what sft.py trains on.

An encoded conversation is a pair of arrays: token ids (L,), int32, and a mask (L,), True on what is to be learnt.
"""

import json
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

from chat.prompts import fill, read_prompts
from chat.template import Chat, Completion
from tasks import UserError, told


def encode(chat, messages, tool=None, unlearnt=0) -> tuple[np.ndarray, np.ndarray]:
    """Encode messages that hold replies of the assistant's. Raises UserError where there is none, or an empty one.

    Assembled with the functions that sampling uses, so that the cold start sees exactly the prompts of the rollouts.
    (The text of a whole chat could be split into tokens in another way, and many templates write an earlier reply
    otherwise than the last one: the mask would not fit.) The first `unlearnt` replies, wrong on purpose, have no loss.
    """
    replies, completion = [], None  # [(prompt ids, reply ids, learnt?)]
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = chat.next_ids(completion, messages[:i], tool) if completion else chat.chat_ids(messages[:i], tool)
            reply = chat.reply_ids(messages[:i + 1], tool)
            replies.append((prompt, reply, len(replies) >= unlearnt))
            completion = Completion(prompt, reply, [], message["content"], True)
    if not replies:
        raise UserError("no message of the assistant's")
    return join(replies)


def join(replies) -> tuple[np.ndarray, np.ndarray]:
    """Encode a conversation: [(prompt ids, reply ids, learnt?), ...], where each prompt extends the turn before it.

    The sandbox's feedback sits in the context, but the model did not write it: it carries no loss. The token that ends
    a reply is learnt.
    """
    ids, mask = [], []
    for prompt, reply, learnt in replies:
        ids, mask = prompt + reply, mask + [False] * (len(prompt) - len(mask)) + [learnt] * len(reply)
    return np.array(ids, dtype=np.int32), np.array(mask, dtype=bool)


def read_file(path) -> list[tuple[int, object]]:
    """[(number in the file, row), ...] of a parquet file or of JSON lines, which are not parsed yet. Raises UserError.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    if path.suffix != ".parquet":
        return [(number, line) for number, line in enumerate(path.read_bytes().split(b"\n"), 1) if line.strip()]
    try:
        import pyarrow.parquet
        return list(enumerate(pyarrow.parquet.read_table(path).to_pylist(), 1))
    except ImportError:
        raise UserError("reading parquet needs a reader: pip install pyarrow") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: no readable parquet file ({str(error).strip().splitlines()[0][:150]})") from None


def read_rows(path, rows, encode_row) -> list[tuple[np.ndarray, np.ndarray]]:
    """Encode the rows of `read_file` by encode_row, which returns None for a row that has nothing to learn.

    A row that cannot be used is reported by its number in the file and skipped.
    """
    data = []
    for number, row in tqdm(rows, desc="tokens", unit="row", disable=None):
        try:
            data.append(encode_row(json.loads(row) if isinstance(row, bytes) else row))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
            why = (str(error) if isinstance(error, UserError) else "not JSON" if isinstance(error, json.JSONDecodeError)
                   else f"not a row of messages ({type(error).__name__}: {error})")
            tqdm.write(f"{path}:{number}: {why[:200]}; skipped", file=sys.stderr)
    if len(data) < len(rows):
        print(f"{path}: {len(rows) - len(data)} of {len(rows)} rows are skipped", file=sys.stderr)
    return [encoded for encoded in data if encoded]


def chat_row(chat):
    """The encode_row of the paper's released data: rows with `messages` and `tools`, lists or JSON text, and perhaps
    `enable_thinking`. Tool calls are learnt as the model's own chat template writes them."""
    chats = {thinking: Chat(chat.tokenizer, thinking) for thinking in (False, True)}

    def encode_row(row):
        messages = [_message(fields) for fields in _parsed(row["messages"])]
        return encode(chats[bool(row.get("enable_thinking"))], messages, _parsed(row.get("tools")))

    return encode_row


def _parsed(value):
    return json.loads(value) if isinstance(value, str) else value


def _message(fields) -> dict:
    """A message as chat templates want it: content is a text, and a call's arguments are an object."""
    content, calls = fields.get("content") or "", _parsed(fields.get("tool_calls")) or []
    message = {name: value for name, value in fields.items() if value is not None and name != "tool_calls"}
    message["content"] = content if isinstance(content, str) else "".join(part["text"] for part in content)
    for call in calls:
        call["function"]["arguments"] = _parsed(call["function"]["arguments"])
    return message | ({"tool_calls": calls} if calls else {})


def rollout_files(run) -> list[Path]:
    """A run's rollouts/step_N.jsonl; its prompts are then those that the run had, as replies follow what was asked.

    Raises UserError where there are none, and for a run whose later prompts did not hold the replies as they were.
    """
    files = sorted(Path(run).glob("rollouts/step_*.jsonl"))
    if not files:
        raise UserError(f"{run}: no rollouts/step_N.jsonl there")
    options = _options(run)
    if options.get("history") == "condensed":
        raise UserError(f"{run}: later prompts held condensed replies (--history condensed), which are not recorded")
    if options.get("prompts"):
        read_prompts(options["prompts"])
    return files


def _options(run) -> dict:
    config = Path(run, "config.json")
    with told(f"{config}: cannot be read"):
        return dict(json.loads(config.read_text()))


def rollout_row(chat, least, run):
    """The encode_row of a run's rollouts/step_N.jsonl: replies of any role that earned `least` are learnt, those before
    them are context (CUDA Agent: rejection fine-tuning). None for a line without such a reply, and for a repeated one.
    Of a run with --thinking they may begin with thoughts.
    """
    chat, known = Chat(chat.tokenizer, bool(_options(run).get("thinking"))), set()

    def encode_row(line):
        turns, replies, prompt = line.get("turns", [line]), [], chat.encode(line["prompt"])
        good = [turn["reward"] is not None and turn["reward"] >= least for turn in turns]
        last = max((i for i, learnt in enumerate(good) if learnt), default=-1)
        for turn, learnt in zip(turns[:last + 1], good):
            reply = chat.encode(turn["reply"].removeprefix(chat.opened(prompt)))
            reply += chat.end if turn.get("finished", True) else []
            replies.append((prompt, reply, learnt))
            said = [".", turn["reply"], fill("feedback", feedback=turn.get("feedback"))]
            asked = [{"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), said)]
            prompt = chat.next_ids(Completion(prompt, reply, [], turn["reply"], turn.get("finished", True)), asked)
        repeated = str(replies) in known
        known.add(str(replies))
        return join(replies) if replies and not repeated else None

    return encode_row

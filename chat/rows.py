"""Conversations as token ids with a mask of what is to be learnt: what sft.py trains on.

An encoded conversation is a pair of arrays: token ids (L,), int32, and a mask (L,), True on what is to be learnt. The
cold start encodes its examples with `encode`; read_chats and read_rollouts encode what stands in files.
"""

import functools
import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from tqdm import tqdm

from chat.calls import text_of
from chat.prompts import fill, read_prompts
from chat.template import Chat, Completion
from command.files import read_parquet, user_error
from command.process import UserError


def encode(chat, messages, tool=None, unlearnt=0) -> tuple[np.ndarray, np.ndarray]:
    """Encode messages with replies of the assistant. Raises UserError if there is no reply, or an empty one.

    We assemble token ids with the functions that sampling uses, so the cold start sees exactly the prompts of rollouts.
    Encoding the text of the whole chat would not do: it can be split into tokens in another way, and many templates
    write an earlier reply differently from the last one, so the mask would not fit. The first `unlearnt` replies, which
    are wrong on purpose, have no loss.
    """
    replies, completion = [], None  # [(prompt ids, reply ids, learnt?)]
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            if completion:
                text = ""
                prompt = chat.next_ids(completion, messages[:i], tool)
            else:
                text = chat.chat_text(messages[:i], tool)
                prompt = chat.encode(text)
            reply = chat.reply_ids(messages[:i + 1], tool, text)
            replies.append((prompt, reply, len(replies) >= unlearnt))
            completion = Completion(prompt, reply, [], message["content"], True)
    if not replies:
        raise UserError("no message of the assistant's")
    return join(replies)


def join(replies) -> tuple[np.ndarray, np.ndarray]:
    """Encode a conversation: [(prompt ids, reply ids, learnt?), ...], where each prompt extends the turn before it.

    The sandbox's feedback is in the context, but the model did not write it, so it has no loss. The token that ends a
    reply is learnt.
    """
    ids, mask = [], []
    for prompt, reply, learnt in replies:
        ids = prompt + reply
        mask += [False] * (len(prompt) - len(mask)) + [learnt] * len(reply)
    return np.array(ids, dtype=np.int32), np.array(mask, dtype=bool)


# ----------------------------------------------------------------------------------------------------------------------
# Files


def read_rows(path, encode_row) -> list[tuple[np.ndarray, np.ndarray]]:
    """Encode each row of a file of JSON lines, or of a parquet file, by encode_row(row).

    encode_row returns None for a row that has nothing to learn. A row that cannot be used is skipped and reported with
    its number in the file. Raises UserError for a file that cannot be read.
    """
    with user_error(f"{path}: cannot be read"):
        rows = read_parquet(path) if Path(path).suffix == ".parquet" else Path(path).read_bytes().split(b"\n")
    data = []
    for number, row in enumerate(tqdm(rows, desc="tokens", unit="row", disable=None), 1):
        try:
            encoded = encode_row(_parsed(row)) if row else None
            if encoded:
                data.append(encoded)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
            tqdm.write(f"{path}:{number}: skipped ({type(error).__name__}: {str(error)[:150]})", file=sys.stderr)
    return data


def read_chats(path, chat) -> list[tuple[np.ndarray, np.ndarray]]:
    """Encode a file in the layout of the paper's released data: rows with `messages` and `tools`, lists or JSON text.

    Tool calls are learnt as the model's own chat template writes them. Thoughts are learnt as replies of a model with
    thinking, also where the row's `enable_thinking` does not say so: else the template would not write them.
    """
    chats = {thinking: Chat(chat.tokenizer, thinking) for thinking in (False, True)}
    thoughts = Counter()

    def encode_row(row):
        messages = [_message(fields) for fields in _parsed(row["messages"])]
        thinks = any(m["role"] == "assistant" and "<think>" in m["content"] for m in messages)
        thoughts.update([thinks])
        return encode(chats[thinks or bool(row.get("enable_thinking"))], messages, _parsed(row.get("tools")))

    data = read_rows(path, encode_row)
    if thoughts[True]:
        print(f"{path}: {thoughts[True]} rows hold thoughts, which the model will write with --thinking only")
    return data


def _parsed(value):
    return json.loads(value or "null") if isinstance(value, (str, bytes)) else value


def _message(fields) -> dict:
    """A message as chat templates want it: its content is a text, and the arguments of a call are an object."""
    message = {name: value for name, value in fields.items() if value is not None}
    message["content"] = text_of(message.get("content"))
    calls = _parsed(message.pop("tool_calls", None))
    if calls:
        message["tool_calls"] = calls
        for call in calls:
            call["function"]["arguments"] = _parsed(call["function"]["arguments"])
    return message


def read_rollouts(run, chat, least) -> list[tuple[np.ndarray, np.ndarray]]:
    """Encode the replies of a run of reinforce.py that earned at least `least` (CUDA Agent: rejection fine-tuning).

    Takes over the prompts and the thinking that the run had: its replies answer those prompts. Equal conversations
    count once. Raises UserError without such a run, or if its later prompts did not show replies as they were sampled.
    """
    config = Path(run, "config.json")
    with user_error(f"{config}: cannot be read"):
        options = dict(json.loads(config.read_text()))
    if options.get("history") == "condensed":
        raise UserError(f"{run}: later prompts showed condensed replies (history=condensed), which are not recorded")
    if options.get("prompts"):
        read_prompts(options["prompts"])
    chat = Chat(chat.tokenizer, bool(options.get("thinking")))
    encoded = {}  # token ids and mask as bytes -> the pair: equal ones are one entry
    for path in sorted(Path(run).glob("rollouts/step_*.jsonl")):
        for ids, mask in read_rows(path, functools.partial(encode_rollout, chat, least)):
            encoded.setdefault((ids.tobytes(), mask.tobytes()), (ids, mask))
    return list(encoded.values())


def encode_rollout(chat, least, line) -> tuple[np.ndarray, np.ndarray] | None:
    """Encode a line of rollouts/step_N.jsonl: replies that earned `least` are learnt; those before them are context.

    None for a line without such a reply. Replies of a run with --thinking may begin with thoughts.
    """
    replies, prompt = [], chat.encode(line["prompt"])
    for turn in line.get("turns", [line]):
        finished = turn.get("finished", True)
        reply = chat.encode(turn["reply"].removeprefix(chat.opened(prompt)))
        if finished:
            reply += chat.end
        replies.append((prompt, reply, turn["reward"] is not None and turn["reward"] >= least))
        # The next turn's prompt, for which the template only needs the reply and the feedback on it.
        messages = [{"role": "user", "content": "."}, {"role": "assistant", "content": turn["reply"]},
                    {"role": "user", "content": fill("feedback", feedback=turn.get("feedback"))}]
        prompt = chat.next_ids(Completion(prompt, reply, [], turn["reply"], finished), messages)
    while replies and not replies[-1][2]:
        replies.pop()  # no reply after it is learnt
    return join(replies) if replies else None

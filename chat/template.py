"""Messages to token ids, by the chat template of whatever model it is."""

import contextlib
import functools
import json
import secrets
from dataclasses import dataclass

from jinja2 import TemplateError

from chat.calls import extract_tool_call
from chat.prompts import SELECT_TOOL
from command.process import UserError

MARK = f"reply{secrets.token_hex(8)}"  # stands for a text where a template is asked what it writes around it
TOOL_CALL = "<tool_call>%s</tool_call>"  # how a reply calls a tool where the template has no form that we can read


@dataclass
class Completion:
    """One sampled reply."""

    prompt_ids: list[int]
    token_ids: list[int]  # what the model wrote, its end-of-turn token included
    logprobs: list[float]  # of each token of token_ids, as it was sampled, at that temperature
    text: str  # token_ids as text, without the end-of-turn token; see `opened` for one that was cut off
    finished: bool  # False when max_new_tokens cut the reply off


class Chat:
    """The tokenizer and its chat template: messages to token ids. All that the cold start needs of a backbone.

    We find out what a template does by letting it write MARK. It may have no system role or no tools, strip replies,
    put empty thoughts before them, or write earlier replies differently from how they were sampled.
    """

    tool_call = staticmethod(extract_tool_call)

    def __init__(self, tokenizer, thinking=False):
        """thinking: may replies begin with thoughts, where the template can switch them off?"""
        self.tokenizer = tokenizer
        self.thinking = thinking

    def _template(self, messages, tools=None, reply=False) -> str:
        return self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=reply,
                                                  enable_thinking=self.thinking)

    @functools.cached_property
    def system_role(self) -> bool:
        """Does the template write system messages?"""
        with contextlib.suppress(TemplateError, TypeError):
            return MARK in self._template([{"role": "system", "content": MARK}, {"role": "user", "content": "."}])
        return False

    @functools.cached_property
    def tool_role(self) -> tuple[bool, bool]:
        """(does the template show tools, does it write calls in a form that we read?) What it does not do becomes text.

        It is tried: written, as it would be sampled, and read, a call must be the same. Where the template writes calls
        in a form that we do not read, tools become text as well, so that nothing asks for it.
        """
        name = SELECT_TOOL["function"]["name"]
        arguments = {"think": "It's \"bound\"\nby <b> \\ memory.", "list": [{"name": "a_b", "reason": "it's {1}"}]}
        call = {"id": "123456789", "type": "function", "function": {"name": name, "arguments": arguments}}
        called = [{"role": "user", "content": "."}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        write = functools.partial(self._template, tools=[SELECT_TOOL])
        shown = writes = reads = False
        with contextlib.suppress(UserError, TemplateError, TypeError):
            prompt = write(called[:1])
            whole = write(called)
            shown = name in prompt
            writes = whole.count(name) > prompt.count(name)
            reads = shown and self.tool_call(self._reply_text(called, write), name) == arguments
        return shown and (reads or not writes), reads

    @functools.cached_property
    def end(self) -> list[int]:
        """How the template ends a reply: token ids up to the first special one. The last of them ends a turn.

        It need not be the tokenizer's end of text: base models end a text with another token than a turn.
        """
        after = self.encode(self._around([{"role": "user", "content": "."}, {"role": "assistant"}], 1,
                                         functools.partial(self.chat_text, reply=False))[1])
        special = {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        special = [place for place, token in enumerate(after) if token in special]
        return after[:special[0] + 1] if special else [self.tokenizer.eos_token_id]

    def _around(self, messages, place, write) -> tuple[str, str]:
        """The texts before and after the reply that is message number `place`. Raises UserError if it is left out.

        write: messages to text.
        """
        marked = [*messages[:place], {"role": "assistant", "content": MARK}, *messages[place + 1:]]
        before, found, after = write(marked).rpartition(MARK)
        if not found:
            raise UserError("the model's chat template leaves a reply out")
        return before, after

    def _reply_text(self, messages, write, prompt="") -> str:
        """The last message, an assistant's, as it would be sampled after the others, without its end.

        write: messages to text; with reply=True it ends with the beginning of a reply. prompt: what it writes so for
        the others, if that is known. Raises UserError if the template writes nothing for the message, or changes it.
        """
        whole = write(messages, reply=False)
        place = len(messages) - 1
        before, after = self._around(messages, place, functools.partial(write, reply=False))
        prompt = prompt or write(messages[:-1], reply=True)
        starts = [text for text in (prompt, before) if whole.startswith(text)]
        if not starts or not whole.endswith(after):
            raise UserError("the model's chat template writes the reply otherwise than it is")
        text = whole[len(starts[0]):len(whole) - len(after)]
        if not text.strip():
            raise UserError("the reply is empty as the model's chat template writes it")
        return text

    def chat_text(self, messages, tool=None, reply=True) -> str:
        """Messages [{"role", "content"}, ...] as the text that the model reads. Raises UserError if that cannot be.

        tool: SELECT_TOOL or UPDATE_TOOL, which the reply may call; None; or a list of tools. reply: end with the
        beginning of the next reply? Where the template shows no tools (`tool_role`) the first message says what can be
        called and how; where it writes no calls, they are text; without `system_role` the system message opens the
        user's.
        """
        tools = [tool] if isinstance(tool, dict) else tool or None
        if any("tool_calls" in message for message in messages) and not self.tool_role[1]:
            messages = list(map(_spelled, messages))
        if tools and not self.tool_role[0]:
            messages, tools = with_tools(messages, tools), None
        if len(messages) > 1 and messages[0]["role"] == "system" and not self.system_role:
            text = f"{messages[0]['content']}\n\n{messages[1]['content']}"
            messages = [messages[1] | {"content": text}, *messages[2:]]
        try:
            return self._template(messages, tools, reply)
        except (TemplateError, TypeError) as error:
            raise UserError(f"the model's chat template cannot write these messages ({error})") from None

    def encode(self, text) -> list[int]:
        """Token ids of a text, without special tokens around it. Half a surrogate pair becomes `?`: it has no token."""
        return self.tokenizer(text.encode(errors="replace").decode(), add_special_tokens=False)["input_ids"]

    def chat_ids(self, messages, tool=None) -> list[int]:
        """Token ids of the prompt for the next reply."""
        return self.encode(self.chat_text(messages, tool))

    def opened(self, prompt_ids) -> str:
        """`<think>`, if the prompt ends with it because the template opens a thought there; else an empty text.

        A reply that was cut off begins with it, so that code in an unfinished thought does not count as an answer.
        """
        # `<think>` is one token or a few.
        return "<think>\n" if self.tokenizer.decode(prompt_ids[-8:]).rstrip().endswith("<think>") else ""

    def reply_ids(self, messages, tool=None, prompt="") -> list[int]:
        """Token ids of the last message, an assistant's, tool calls included, as it would be sampled after the others.

        prompt: chat_text of the others, if that is known. Raises UserError if the template writes nothing for the
        message, or changes it.
        """
        return self.encode(self._reply_text(messages, functools.partial(self.chat_text, tool=tool), prompt)) + self.end

    def next_ids(self, completion, messages, tool=None) -> list[int]:
        """Prompt ids for the turn after `completion`; `messages` holds its text as the assistant's last message.

        Earlier turns are kept token by token as they were sampled, so the next prompt extends the last one, and we
        train on what was sampled. (Encoded anew, a text can be split in another way, and many templates drop thoughts
        from earlier replies.) The template writes only what follows the reply. If the caller has changed the reply,
        everything is encoded anew.
        """
        place = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
        if messages[place]["content"] != completion.text:
            return self.chat_ids(messages, tool)
        added = self.encode(self._around(messages, place, functools.partial(self.chat_text, tool=tool))[1])
        if completion.finished and completion.token_ids[-1] in added[:len(self.end)]:
            added = added[added.index(completion.token_ids[-1]) + 1:]  # this token was sampled already
        return completion.prompt_ids + completion.token_ids + added


def with_tools(messages, tools) -> list[dict]:
    """Messages of which the first says what can be called, and how: for whoever is not shown `tools` otherwise."""
    call = TOOL_CALL % '{"name": ..., "arguments": {...}}'
    said = "\n\n# Tools\n" + "\n".join(map(json.dumps, tools)) + f"\nCall one with {call}"
    return [messages[0] | {"content": messages[0]["content"] + said}, *messages[1:]]


def _spelled(message) -> dict:
    """A message whose tool calls have become text."""
    rest = dict(message)
    calls = [TOOL_CALL % json.dumps(call["function"]) for call in rest.pop("tool_calls", ())]
    return rest | {"content": "\n".join([rest["content"], *calls]).strip()} if calls else rest

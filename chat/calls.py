"""What a reply says: the kernel in it, the tool calls in it, and where its thoughts end.

A reply is text that a model sampled: anything can be in it, and nothing here may raise.
"""

import ast
import contextlib
import json
import re
import warnings


# Neither holds another beginning: else a thousand beginnings without an end would be read a thousand times.
_CALL = re.compile(r"<tool_call>((?:(?!<tool_call>).)*?)</tool_call>", re.DOTALL)
_FUNCTION = re.compile(r"<function=([\w.-]+)>((?:(?!<function=).)*?)</function>", re.DOTALL)
# A line that opens a block: a fence begins it, or stands behind words and code between single or double backticks.
_OPENING = re.compile(r"(?:[^`]|(?<!`)`{1,2}(?!`))*(`{3,})([^`]*)")
_CLOSING = re.compile(r"[ \t]*(`{3,})(?![`\w])")
_MARGIN = re.compile(r"[ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)?")  # before a fence, in an entry of a list, too


def after_thoughts(text) -> str:
    """The reply without its thoughts. Text in an unfinished <think> is no part of the answer."""
    return text.rpartition("</think>")[2].partition("<think>")[0].strip()


def text_of(content) -> str:
    """The text of a message's content: a text, a list of parts, or None. Raises ValueError if not all of it is text.

    >>> text_of([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
    'ab'
    """
    parts = content if isinstance(content, list) else [{"text": content or ""}]
    texts = [part.get("text") for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a message holds something else than text")
    return "".join(texts)


def fenced_blocks(text) -> list[tuple[str, str]]:
    """(words after the fence, body) of each closed block between two fences, lines of three or more backticks.

    A closing fence begins its line, at most three blanks further in than the opening one. It has at least as many
    backticks, and no word follows it. So backticks in a string, or in an indented docstring, close nothing. A body
    loses the indentation of its first line, which it has in a list. Behind a block with a longer fence stand the blocks
    within it.

    >>> fenced_blocks("1. ```python\\n   s = '```'\\n   ```")
    [('python', "s = '```'\\n")]
    """
    lines = text.split("\n")
    blocks = []
    begin = None  # number of the first line within the present block
    for number, line in enumerate(lines):
        if begin is None:
            opening = _OPENING.fullmatch(line)
            if opening:
                begin = number + 1
                fence = len(opening[1])
                deepest = len(_MARGIN.match(line)[0]) + 3  # column at which a closing fence can stand
            continue
        closing = _CLOSING.match(line)
        if closing and len(closing[1]) >= fence and closing.start(1) <= deepest:
            body = "".join(line + "\n" for line in lines[begin:number])
            indentation = re.match(r"\s*", body)[0].rpartition("\n")[2]
            body = re.sub(f"^{indentation}", "", body, flags=re.MULTILINE)
            blocks.append((opening[2].strip(), body))
            if fence > 3:
                blocks += fenced_blocks(body)
            begin = None
    return blocks


def extract_code(text) -> str | None:
    """The last fenced code block that defines `ModelNew`, or None; one within a thought does not count.

    >>> extract_code("Plan: x\\n```python\\nclass ModelNew:\\n    pass\\n```")
    'class ModelNew:\\n    pass\\n'
    """
    for _, body in reversed(fenced_blocks(after_thoughts(text))):
        if re.search(r"(?m)^\s*class\s+ModelNew\b", body):
            return body
    return None


def extract_tool_call(text, name):
    """The arguments (a dict) of the last well-formed call of tool `name` in a reply, or None. Never raises.

    Three forms are understood: JSON inside <tool_call> (Qwen3), <function=name><parameter=key>value</parameter>
    (Qwen3-Coder and the paper's release), and a fenced JSON block, either the whole call or only its arguments.

    >>> extract_tool_call('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', "f")
    {'a': 1}
    """
    text = after_thoughts(text)
    calls = [_call_from_json(body, name) for body in _CALL.findall(text)]
    for function, body in _FUNCTION.findall(text):
        if function == name:
            pairs = re.findall(r"<parameter=([\w.-]+)>(.*?)</parameter>", body, re.DOTALL)
            calls.append({key: _literal_or_text(value.strip()) for key, value in pairs})
    if not any(calls):
        calls = [_call_from_json(body, name, bare=True) for info, body in fenced_blocks(text) if info in ("", "json")]
    return next(filter(None, reversed(calls)), None)


def _literal_or_text(text):
    """What a text says in JSON, or as a list or dict in Python's spelling, as the released checkpoints write them."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text, strict=False)
    with (contextlib.suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError, SystemError),
          warnings.catch_warnings(action="ignore")):  # of "\\d" in a string
        value = ast.literal_eval(text) if text[:1] in ("[", "{") else text
        return json.loads(json.dumps(value))  # a transcript holds JSON: no sets, no bytes
    return text


def _call_from_json(text, name, bare=False):
    """Arguments from `{"name": ..., "arguments": {...}}`; with `bare`, also from the arguments object alone."""
    call = _literal_or_text(text.strip())
    if not isinstance(call, dict):
        return None
    if call.get("name") == name:
        arguments = call.get("arguments", call.get("args"))
        if isinstance(arguments, str):
            arguments = _literal_or_text(arguments)  # some models quote it twice
        return arguments if isinstance(arguments, dict) else None
    return call if bare and "name" not in call else None

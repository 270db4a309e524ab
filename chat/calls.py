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
# The line that opens a block: a fence begins it, or stands behind words and code between single or double backticks.
_OPENING = re.compile(r"^(?:[^\n`]|(?<!`)`{1,2}(?!`))*`{3,}[^\n`]*\n", re.MULTILINE)


def after_thoughts(text) -> str:
    """The reply without its thoughts. Text in an unfinished <think> is no part of the answer."""
    return text.rpartition("</think>")[2].partition("<think>")[0].strip()


def extract_code(text):
    """The last fenced code block that defines `ModelNew`, or None; one within a thought does not count.

    >>> extract_code("Plan: x\\n```python\\nclass ModelNew:\\n    pass\\n```")
    'class ModelNew:\\n    pass\\n'
    """
    text, code, position = after_thoughts(text), None, 0
    while opening := _OPENING.search(text, position):
        body, closing, _ = text[opening.end():].partition("```")
        if closing and re.search(r"(?m)^\s*class\s+ModelNew\b", body):
            code = body
        position = opening.end() + len(body) + len(closing)
    return code


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
        fenced = re.findall(r"```(?:json)?[ \t]*\n(.*?)```", text, re.DOTALL)
        calls = [_call_from_json(body, name, bare=True) for body in fenced]
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

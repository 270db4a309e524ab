"""Chat templates of every kind that models come with, in our own wording (templates/*.jinja), and their special tokens.

What they do is the point, not whose they are: some know no system role or no tools, strip replies, put thoughts before
them, rewrite earlier ones, or end a turn with no token of its own.
"""

from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

# name: (kind, special tokens, end of text)
TEMPLATES = {
    # Drops earlier thoughts, writes an empty one before the last reply; tools and calls as XML with JSON.
    "qwen3": ("rewrites", ["<|im_start|>", "<|im_end|>"], "<|endoftext|>"),
    # The release's kind: no thoughts, a line break first, calls as parameters in Python's spelling.
    "release": ("plain", ["<|im_start|>", "<|im_end|>"], "<|endoftext|>"),
    # The system message within the first user's; replies stripped, a blank before the end; no tools.
    "llama2": ("strips", ["<s>"], "</s>"),
    "llama3": ("strips", ["<s>", "<|start|>", "<|stop|>", "<|eot|>"], "<|endoftext|>"),
    # No system role; user and assistant must take turns; tools stand before the last user's message.
    "mistral": ("no system", ["<s>", "[INST]", "[/INST]", "[TOOLS]", "[/TOOLS]", "[CALLS]"], "</s>"),
    "gemma": ("no system", ["<bos>", "<turn>", "<end>"], "<eos>"),
    "zephyr": ("plain", [], "</s>"),
    # Ends a turn with words alone.
    "falcon": ("no end", [], "<|endoftext|>"),
    # Opens a thought for the model, and leaves the thoughts of earlier replies out.
    "r1": ("opens a thought", ["<s>", "<user>", "<assistant>"], "</s>"),
    # Writes an empty thought for the model that is in no earlier message.
    "smol": ("adds a thought", ["<|im_start|>", "<|im_end|>"], "<|endoftext|>"),
    # Writes the arguments of a call one by one, in a form of its own.
    "glm": ("plain", ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"], "<|endoftext|>"),
    # Shows tools, and leaves calls out without a word.
    "lfm2": ("plain", ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"], "<|endoftext|>"),
    # Leaves system messages out without a word.
    "deaf": ("no system", ["<|user|>", "<|assistant|>"], "</s>"),
}


GLM_RESPONSE = {"start_anchor": "<|assistant|>", "fields": {"content": {}, "tool_calls": {
    "open_pattern": r"<tool_call>(?P<name>\w+)\n", "close": "</tool_call>", "repeats": True, "content": "xml-inline",
    "content_args": {"tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
                     "value_parser": {"name": "json"}},
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}}}}


# Templates that claim to write calls, with a response template that is to read them: what a model would sample is not
# what comes back. name: (how a call is written, response template of the call).
_HEAD = ("{{ '<|system|>' }}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}"
         "{% if not m.tool_calls %}{{ '<|%s|>%s<|end|>' % (m.role, m.content) }}{% else %}"
         "{% set f = m.tool_calls[0]['function'] %}")
_TAIL = "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
CALLING = {
    # The end of the reply is a part of the call's pattern, but not of the text that is parsed (Llama 3.x).
    "ends": ("{{ '<|assistant|>{\"name\": \"' + f.name + '\", \"parameters\": ' + f.arguments | tojson }}}<|end|>",
             {"open_pattern": r'\{"name": "(?P<name>\w+)", "parameters": ', "close": "}<|end|>", "content": "json"}),
    # Values in quotes that they may contain themselves (LFM2).
    "quotes": ("{{ '<|assistant|>[' + f.name + '(' }}"
               "{% for k, v in f.arguments.items() %}{{ k }}='{{ v | tojson }}'{% endfor %}"
               "{{ ')]<|end|>' }}",
               {"open_pattern": r"\[(?P<name>\w+)\(", "close": ")]", "content": "xml-inline", "content_args": {
                   "tag_pattern": r"(?P<key>\w+)='(?P<value>[^']*)'", "value_parser": {"name": "json"}}}),
    # A call has a header, and ends otherwise than a reply (gpt-oss).
    "header": ("{{ '<|assistant|> to=' + f.name + '<|user|>' + f.arguments | tojson + '<|call|>' }}",
               {"open_pattern": r" to=(?P<name>\w+)<\|user\|>", "close": "<|call|>", "content": "json"}),
    # The end of a call is another token than a reply's (Gemma 4).
    "other end": ("{{ '<|assistant|>call:' + f.name + f.arguments | tojson + '<|call|>' }}",
                  {"open_pattern": r"call:(?P<name>\w+)", "close": "<|call|>", "content": "json"}),
}


CALL = {"think": "It's 'bound' by memory.", "selected_skills": [{"name": "fuse", "reason": "it's two passes"}]}


def calling(content="", arguments=CALL, name="select_skills") -> dict:
    """A reply that calls a tool."""
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def calling_tokenizer(tokenizer, name):
    """A tokenizer with a template of CALLING, and its response template."""
    call, response = CALLING[name]
    special = ["<|user|>", "<|assistant|>", "<|end|>", "<|call|>"]
    made = template_tokenizer(tokenizer, "zephyr", _HEAD + call + _TAIL, special)
    response |= {"repeats": True, "transform": {"type": "function", "function": {
        "name": "{name}", "arguments": "{content}"}}}
    made.response_template = {"start_anchor": "<|assistant|>", "fields": {"content": {}, "tool_calls": response}}
    return made


def template_tokenizer(tokenizer, name, template="", special=()):
    """A tokenizer with the pieces of `tokenizer`, and a template of TEMPLATES with its special tokens."""
    _, known, end = TEMPLATES[name]
    special = list(special) or known
    template = template or Path(__file__).with_name("templates").joinpath(f"{name}.jinja").read_text()
    base = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    bos = {"bos_token": special[0]} if "bos_token" in template else {}
    made = PreTrainedTokenizerFast(tokenizer_object=base, eos_token=end, pad_token="<|endoftext|>", **bos)
    made.add_special_tokens({"additional_special_tokens": special})
    made.chat_template = template
    return made

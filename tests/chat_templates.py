"""Chat templates of every kind that models come with, in our own wording: for each what it is like, the template, and
the special tokens that it writes. What they do is the point, not whose they are: some know no system role or no tools,
strip replies, put thoughts before them, rewrite earlier ones, or end a turn with no token of its own."""

from transformers import PreTrainedTokenizerFast

THINK = "<think>\\n\\n</think>\\n\\n"  # within a template

# name: (kind, template, special tokens, end of text)
TEMPLATES = {
    # Drops earlier thoughts, writes an empty one before the last reply; tools and calls as XML with JSON.
    "qwen3": ("rewrites", """
{%- macro start(role) %}{{ '<|im_start|>' + role + '\\n' }}{% endmacro %}
{%- if tools %}{{ start('system') }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif -%}
You can call: <tools>{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
</tools><|im_end|>{{ '\\n' }}
{%- elif messages[0].role == 'system' %}{{ start('system') + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(asked=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or m.role == 'system' and loop.index0 %}{{ start(m.role) + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{%- set thought, said = m.reasoning_content or '', m.content %}
{%- if '</think>' in said %}{% set thought = said.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set said = said.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{{- start('assistant') }}
{%- if loop.index0 > ns.asked and (loop.last or thought) %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}
{{- said }}
{%- for call in m.tool_calls or [] %}{{ '\\n' if said or loop.index0 }}<tool_call>
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>{{ '\\n' }}
{%- elif m.role == 'tool' %}{{ start('user') + '<tool_response>' + m.content + '</tool_response><|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ start('assistant') }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}""", ["<|im_start|>", "<|im_end|>"], "<|endoftext|>"),
    # The release's kind: no thoughts, a line break first, calls as parameters in Python's spelling.
    "release": ("plain", """
{% for m in messages %}{{ '<|im_start|>' + m.role }}
{%- if m.content or not m.tool_calls %}{{ '\\n' + m.content }}{% endif %}
{%- if tools and loop.first %}
Functions:{% for tool in tools %} {{ tool.function.name }}({{ tool.function.parameters | string }}){% endfor %}
{%- endif %}
{%- for call in m.tool_calls or [] %}{{ '\\n' }}<tool_call>
<function={{ call.function.name }}>
{% for name, value in call.function.arguments | items -%}
<parameter={{ name }}>
{{ (value | tojson) if value is mapping else (value | string) }}
</parameter>
{% endfor -%}
</function>
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}""", ["<|im_start|>", "<|im_end|>"], "<|endoftext|>"),
    # The system message within the first user's; replies stripped, a blank before the end; no tools.
    "llama2": ("strips", """{{ bos_token }}{% for m in messages %}
{%- if m.role == 'user' %}[INST] {% if loop.index0 == 1 and messages[0].role == 'system' %}
{{- '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' }}{% endif %}{{ m.content | trim }} [/INST]
{%- elif m.role == 'assistant' %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}""",
               ["<s>"], "</s>"),
    "llama3": ("strips", """{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|stop|>

{% if tools and loop.index0 == 1 %}{{ tools | tojson }}
{% endif %}{% if m.tool_calls %}{% for call in m.tool_calls -%}
{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}{% endfor %}{% else %}
{{- m.content | trim }}{% endif %}<|eot|>{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant<|stop|>

{% endif %}""", ["<s>", "<|start|>", "<|stop|>", "<|eot|>"], "<|endoftext|>"),
    # No system role; user and assistant must take turns; tools stand before the last user's message.
    "mistral": ("no system", """{{ bos_token }}{% for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set users = messages[loop.index0:] | selectattr('role', 'equalto', 'user') | list %}
{%- if m.role == 'user' %}{% if tools and users | length == 1 %}
{{- '[TOOLS]' + tools | tojson + '[/TOOLS]' }}{% endif %}{{ '[INST] ' + m.content + ' [/INST]' }}
{%- elif m.tool_calls %}[CALLS]{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}{{ eos_token }}
{%- else %}{{ m.content + eos_token }}{% endif %}{% endfor %}""",
                ["<s>", "[INST]", "[/INST]", "[TOOLS]", "[/TOOLS]", "[CALLS]"], "</s>"),
    "gemma": ("no system", """{{ bos_token }}{% for m in messages %}
{%- if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{{- '<turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim + '<end>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<turn>model\\n' }}{% endif %}""", ["<bos>", "<turn>", "<end>"], "<eos>"),
    "zephyr": ("plain", """{% for m in messages %}
{{- '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}""", [], "</s>"),
    # Ends a turn with words alone.
    "falcon": ("no end", """{% for m in messages %}{{ m.role | capitalize + ': ' + m.content + '\\n\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}""", [], "<|endoftext|>"),
    # Opens a thought for the model, and leaves the thoughts of earlier replies out.
    "r1": ("opens a thought", """{{ bos_token }}{% for m in messages %}
{%- if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}{{ '<user>' + m.content }}
{%- else %}{{ '<assistant>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<assistant><think>\\n' }}{% endif %}""", ["<s>", "<user>", "<assistant>"], "</s>"),
    # Writes an empty thought for the model that is in no earlier message.
    "smol": ("adds a thought", """{% for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if not enable_thinking %}{{ '""" + THINK + """' }}{% endif %}{% endif %}""",
             ["<|im_start|>", "<|im_end|>"], "<|endoftext|>"),
    # Writes the arguments of a call one by one, in a form of its own.
    "glm": ("plain", """{% for m in messages %}{% if tools and loop.first %}{{ tools | tojson }}{% endif %}
{{- '<|' + m.role + '|>\\n' + m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}
{% for k, v in c.function.arguments | items %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson }}</arg_value>
{% endfor %}</tool_call>{% endfor %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% endif %}""", ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"], "<|endoftext|>"),
    # Shows tools, and leaves calls out without a word.
    "lfm2": ("plain", """{% for m in messages %}{% if tools and loop.first %}{{ tools | tojson }}{% endif %}
{{- '<|' + m.role + '|>' + m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}""",
             ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"], "<|endoftext|>"),
    # Leaves system messages out without a word.
    "deaf": ("no system", """{% for m in messages %}
{%- if m.role != 'system' %}{{ '<|' + m.role + '|>' + m.content + eos_token }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}""",
             ["<|user|>", "<|assistant|>"], "</s>"),
}


GLM_RESPONSE = {"start_anchor": "<|assistant|>", "fields": {"content": {}, "tool_calls": {
    "open_pattern": r"<tool_call>(?P<name>\w+)\n", "close": "</tool_call>", "repeats": True, "content": "xml-inline",
    "content_args": {"tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
                     "value_parser": {"name": "json"}},
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}}}}


def template_tokenizer(tokenizer, name):
    """A tokenizer with the pieces of `tokenizer`, and a template of TEMPLATES with its special tokens."""
    from tokenizers import Tokenizer

    _, template, special, end = TEMPLATES[name]
    base = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    bos = {"bos_token": special[0]} if "bos_token" in template else {}
    made = PreTrainedTokenizerFast(tokenizer_object=base, eos_token=end, pad_token="<|endoftext|>", **bos)
    made.add_special_tokens({"additional_special_tokens": special})
    made.chat_template = template
    return made

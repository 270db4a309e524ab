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
    # No system role; user and assistant must take turns; tools stand before the last user's message.
    "mistral": ("no system", ["<s>", "[INST]", "[/INST]", "[TOOLS]", "[/TOOLS]", "[CALLS]"], "</s>"),
    # Ends a turn with words alone.
    "falcon": ("no end", [], "<|endoftext|>"),
    # Opens a thought for the model, and leaves the thoughts of earlier replies out.
    "r1": ("opens a thought", ["<s>", "<user>", "<assistant>"], "</s>"),
    # Writes an empty thought for the model that is in no earlier message.
    "smol": ("adds a thought", ["<|im_start|>", "<|im_end|>"], "<|endoftext|>"),
    # Shows tools, and leaves calls out without a word.
    "lfm2": ("plain", ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"], "<|endoftext|>"),
    # Leaves system messages out without a word.
    "deaf": ("no system", ["<|user|>", "<|assistant|>"], "</s>"),
}


CALL = {"think": "It's 'bound' by memory.", "selected_skills": [{"name": "fuse", "reason": "it's two passes"}]}


def calling(content="", arguments=CALL, name="select_skills") -> dict:
    """A reply that calls a tool."""
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def template_tokenizer(tokenizer, name):
    """A tokenizer with the pieces of `tokenizer`, and a template of TEMPLATES with its special tokens."""
    _, special, end = TEMPLATES[name]
    template = Path(__file__).with_name("templates").joinpath(f"{name}.jinja").read_text()
    base = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    bos = {"bos_token": special[0]} if "bos_token" in template else {}
    made = PreTrainedTokenizerFast(tokenizer_object=base, eos_token=end, pad_token="<|endoftext|>", **bos)
    made.add_special_tokens({"additional_special_tokens": special})
    made.chat_template = template
    return made

"""The tiny backbone of checkpoints/tiny: its tokenizer, its random weights, and what the cold start taught it."""

import random
from collections import Counter

import numpy as np

import backbone
from fast.attention import attention_kind
from policy import policy_messages
from selector import selection_messages
from skills import SkillLibrary
from summarizer import summary_messages
from synthetic import expert
from synthetic.examples import SEED_LIBRARY, Writer
from synthetic.expert import ALL

# ----------------------------------------------------------------------------------------------------------------------
# The tiny backbone: a small Qwen3 with a byte-level BPE of its own.

CHAT_TEMPLATE = """{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content }}{% if loop.first and tools %}

# Tool
{% for t in tools %}{{ t.function.name }}({{ t.function.parameters.properties.keys() | join(', ') }}){% endfor %}{% endif %}<|im_end|>
{% endfor -%}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def train_tokenizer(texts, vocabulary):
    """A tokenizer for copying: a piece of text is one token if it is common, else it is spelled letter by letter.

    Pieces are imports, API names (`tl.load(`), words of prose with their space, identifiers, numbers, and what lies
    between them. A problem's own names must be copied, and most are rare: subwords learnt by BPE would cut them into
    tokens that training has hardly seen, which a small model can neither read nor write. It knows every letter well.

    texts: one string for each example; a piece must occur in 0.2 % of them. vocabulary: tokens at most.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    split = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"import [\w. ]+\n|\b(?:tl|torch|nn|F|triton)\.[\w.]+\(?|self\."
                                   r"|[A-Za-z_]+ (?=[A-Za-z])|[A-Za-z_]+|[0-9]+|[^A-Za-z_0-9]+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    spread = Counter()  # in how many texts a piece occurs
    for text in texts:
        spread.update({piece for piece, _ in split.pre_tokenize_str(text)})
    pieces = [piece for piece in spread if spread[piece] >= 0.002 * len(texts) and len(piece) > 1]
    pieces.sort(key=lambda piece: (-spread[piece] * (len(piece) - 1), piece))  # by the tokens that it saves
    known = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    known += pieces[:vocabulary - len(known)]
    # BPE without merges spells; with ignore_merges it looks a whole piece up first.
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(known)}, [], ignore_merges=True))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(known[:3])
    return wrap_tokenizer(tokenizer.to_str(), CHAT_TEMPLATE)


def wrap_tokenizer(text, template):
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(text), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    wrapped.chat_template = template
    return wrapped


def tiny_model(tokenizer):
    """A Qwen3 of about 6 million parameters with random weights."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=896, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, tie_word_embeddings=True, max_position_embeddings=8192,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention_kind(config))


# ----------------------------------------------------------------------------------------------------------------------
# What the cold start taught: measured on held-out problems.

HELD_OUT = 900_000_000  # seeds from here on are never trained on


def evaluate(model, sandbox, problems, seed=HELD_OUT) -> dict:
    """Greedy first turns on held-out problems, and the three reply formats. The issue's figures, all in percent."""
    writer = Writer(None)
    rng = random.Random(f"evaluate {seed}")
    found = []
    while len(found) < problems:
        found += [pair] if (pair := writer.task(seed)) else []
        seed += 1
    library = [writer.skill(name, rng) for name in SEED_LIBRARY]

    def kernels(skill_sets):
        prompts = [model.chat_ids(policy_messages(task, skills)) for (task, _), skills in zip(found, skill_sets)]
        return [backbone.extract_code(c.text) or "" for c in model.sample(prompts, 1200, temperature=0)]

    # the matching skill: one technique per problem, applicable to it, drawn at random
    matching = [rng.choice(sorted(expert.applicable(program)) or [None]) for _, program in found]
    plain = kernels([[] for _ in found])
    told = kernels([[writer.skill(name, rng)] if name else [] for name in matching])
    pairs = [(task, code) for (task, _), code in zip(found, plain)]
    pairs += [(task, code) for (task, _), code in zip(found, told)]
    verdicts = sandbox.score_pairs(pairs)
    wrong = Counter((v.rejected or v.error or "")[:60] for v in verdicts if not v.correct)
    shown = [(name in expert.techniques_in(a), name in expert.techniques_in(b))
             for name, a, b in zip(matching, plain, told) if name]

    select = [
        model.chat_ids(
            selection_messages(task, SkillLibrary(library).recall(task.source) or library), backbone.SELECT_TOOL
        )
        for task, _ in found
    ]
    calls = [backbone.extract_tool_call(c.text, "select_skills") for c in model.sample(select, 400, temperature=0)]
    summaries = []
    for task, program in found:
        first, best = expert.render(program, set()), expert.render(program, ALL)
        summaries.append(
            model.chat_ids(summary_messages(task, [], (first.code, 1.0), (best.code, 2.5)), backbone.UPDATE_TOOL)
        )
    updates = [
        backbone.extract_tool_call(c.text, "update_skill_library") for c in model.sample(summaries, 800, temperature=0)
    ]

    def percent(flags):
        return round(100 * sum(map(bool, flags)) / max(1, len(flags)), 1)

    n = len(found)
    return {
        "problems": n,
        "clock": verdicts[0].clock,
        "correct": percent([v.correct for v in verdicts[:n]]),
        "correct with skill": percent([v.correct for v in verdicts[n:]]),
        "mean speedup": round(float(np.mean([v.speedup or 0 for v in verdicts[:n]])), 3),
        "mean speedup with skill": round(float(np.mean([v.speedup or 0 for v in verdicts[n:]])), 3),
        "technique without skill": percent([a for a, _ in shown]),
        "technique with skill": percent([b for _, b in shown]),
        "select_skills well-formed": percent([isinstance((c or {}).get("selected_skills"), list) for c in calls]),
        "update_skill_library well-formed": percent(
            [
                bool((c or {}).get("new_skills"))
                and all(isinstance(s, dict) and {"name", "description", "scope", "tags", "content"} <= set(s)
                        for s in c["new_skills"])
                for c in updates
            ]
        ),
        "what was wrong": dict(wrong.most_common(5)),
    }

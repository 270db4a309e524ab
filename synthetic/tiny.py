"""The tiny model of checkpoints/tiny: its tokenizer and its random weights."""

from collections import Counter
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from fast.attention import attention_kind

CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text()


def train_tokenizer(texts, vocabulary):
    """A tokenizer for copying: a piece of text is one token if it is common, else it is spelled letter by letter.

    Pieces are imports, API names (`tl.load(`), words of prose with their space, identifiers, numbers, and what lies
    between them. A problem's own names must be copied, and most are rare: subwords learnt by BPE would cut them into
    tokens that training has hardly seen, which a small model can neither read nor write. It knows every letter well.

    texts: one string for each example; a piece must occur in 0.2 % of them. vocabulary: tokens at most.
    """
    split = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"import [\w. ]+\n|\b(?:tl|torch|nn|F|triton|libdevice)\.[\w.]+\(?|self\."
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
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE, eos_token="<|im_end|>",
                                   pad_token="<|endoftext|>")


def random_qwen3(vocab_size, hidden_size=256, intermediate_size=896, num_hidden_layers=6, **more):
    """A Qwen3 with random weights, of about 6 million parameters unless told otherwise. more: of its Qwen3Config."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True}
    config = Qwen3Config(vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=intermediate_size,
                         num_hidden_layers=num_hidden_layers, **{**heads, **more})
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention_kind(config))


def tiny_model(tokenizer):
    """The model that the built-in cold start trains. One key/value head halves the cache, which sampling reads."""
    return random_qwen3(len(tokenizer), num_key_value_heads=1, max_position_embeddings=8192,
                        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None)

"""Give the tiny model the shape of Qwen3-8B without changing what it writes, so that a whole step can be measured.

    python results/node/enlarge.py /tmp/8b                      (16.4 GB on disk, on a GPU in half a minute)
    python reinforce.py --model /tmp/8b --offload --steps 2 --eval none
    python results/node/enlarge.py /tmp/8b --tokenizer DIR      random weights, with the tokenizer of a real model

A step of a model with random weights earns no reward and trains nothing. Here every matrix of the tiny model lies in a
corner of a large one whose other entries are zero: added layers add nothing to the residual stream, added heads and
channels stay zero. Norms divide by a mean over more channels, which their weights make up for. The head is a matrix of
its own, also for shapes where it is tied to the embeddings: the 0.6b shape has 0.75 billion parameters then.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config  # noqa: E402

SHAPES = {  # layers, width, query heads, key/value heads, head dimension, feed-forward, vocabulary, tied embeddings
    "14b": (40, 5120, 40, 8, 128, 17408, 151936, False),
    "8b": (36, 4096, 32, 8, 128, 12288, 151936, False),
    "4b": (36, 2560, 32, 8, 128, 9728, 151936, True),
    "1.7b": (28, 2048, 16, 8, 128, 6144, 151936, True),
    "0.6b": (28, 1024, 16, 8, 128, 3072, 151936, True),
    "tiny": (6, 256, 4, 1, 64, 896, 2048, True),  # checkpoints/tiny itself
}


def qwen3_shape(name) -> dict:
    """One of SHAPES as arguments of Qwen3Config."""
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
             "intermediate_size", "vocab_size", "tie_word_embeddings")
    return dict(zip(names, SHAPES[name]))


def random_model(shape, device="cuda"):
    """A Qwen3 of one of SHAPES with random weights in bfloat16, made on the device."""
    config = Qwen3Config(**qwen3_shape(shape), max_position_embeddings=40960, eos_token_id=None, pad_token_id=0,
                         bos_token_id=None)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def enlarge(small, **shape):
    """A model of this shape (numbers of Qwen3Config) that computes what `small` does."""
    old = small.config
    wider = shape["hidden_size"] / old.hidden_size
    config = Qwen3Config(**shape, max_position_embeddings=40960,
                         rope_parameters=old.rope_parameters, rms_norm_eps=old.rms_norm_eps / wider,
                         pad_token_id=old.pad_token_id, bos_token_id=None, eos_token_id=old.eos_token_id)
    with torch.device(small.device):
        large = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    group, old_group = (c.num_attention_heads // c.num_key_value_heads for c in (config, old))
    heads = [i // old_group * group + i % old_group for i in range(old.num_attention_heads)]
    # A rotation turns channels c and c + D / 2 at a speed that falls with c / D: a head twice as long, every second.
    longer = config.head_dim // old.head_dim
    channels = torch.arange(old.head_dim, device=small.device) * longer

    def rows_of(heads):
        """Rows of a projection that belong to these heads of the large model, in the small one's order."""
        return torch.cat([head * config.head_dim + channels for head in heads])

    queries, keys = rows_of(heads), rows_of(range(old.num_key_value_heads))
    with torch.no_grad():
        for name, weight in large.named_parameters():
            weight.fill_(1.0 if weight.dim() == 1 else 0.0)
        source = dict(small.named_parameters())
        for name, weight in large.named_parameters():
            value = source.get("model.embed_tokens.weight" if name == "lm_head.weight" else name)
            if value is None:  # a layer that the small model does not have
                continue
            value = value.to(weight.dtype)
            if "q_proj" in name or "k_proj" in name or "v_proj" in name:
                weight[queries if "q_proj" in name else keys, :value.shape[1]] = value
            elif "o_proj" in name:
                weight[:value.shape[0], queries] = value
            elif "q_norm" in name:  # mean over `longer` times as many channels, scores divided by its root once more
                weight[channels] = value
            elif "k_norm" in name:
                weight[channels] = value / longer ** 0.5
            elif weight.dim() == 1:
                weight[:len(value)] = value / wider ** 0.5
            else:
                weight[:value.shape[0], :value.shape[1]] = value
        # Tokens that the tokenizer does not have get the logit of the padding, which no text ever contains.
        large.lm_head.weight[old.vocab_size:] = large.lm_head.weight[old.pad_token_id].clone()
    return large


def with_tokenizer(shape, folder, device):
    """A model of random weights, and a tokenizer that is not ours: nothing that it writes compiles."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = random_model(shape, device)
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    return model, tokenizer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--model", default=str(ROOT / "checkpoints/tiny"))
    parser.add_argument("--tokenizer", help="random weights with this folder's tokenizer, instead of --model's")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.tokenizer:
        model, tokenizer = with_tokenizer(args.shape, args.tokenizer, device)
    else:
        small = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).to(device)
        model = enlarge(small, **qwen3_shape(args.shape) | {"tie_word_embeddings": False})
        tokenizer = AutoTokenizer.from_pretrained(args.model)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    for file in Path(args.model).glob("skill_library.jsonl"):
        (Path(args.out) / file.name).write_text(file.read_text())

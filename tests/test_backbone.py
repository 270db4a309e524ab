"""The model's side: parsing never raises, and four ways to get the same log-probabilities agree."""

import json
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from backbone import Backbone, Sampling
from chat.calls import extract_code, extract_tool_call
from chat_templates import template_tokenizer
from conftest import plain_logprobs, tiny_model
from fast.attention import fuse_norms
from command.process import UserError

# ---- parsing

ARGUMENTS = {"a": [1, "Example:\n```python\nx\n```\n"]}
CALL = json.dumps({"name": "f", "arguments": ARGUMENTS})


@pytest.mark.parametrize("text", [
    f"thinking\n<tool_call>\n{CALL}\n</tool_call>trailing",
    f"<tool_call>{json.dumps({'name': 'f', 'arguments': json.dumps(ARGUMENTS)})}</tool_call>",
    f"<tool_call><function=f>\n<parameter=a>\n{ARGUMENTS['a']}\n</parameter>\n</function></tool_call>",
    f"<tool_call>{dict(name='f', args=ARGUMENTS)}</tool_call>",  # the released checkpoints' spelling
    f'<think>\n<tool_call>{{"name": "f", "arguments": {{}}}}</tool_call></think><tool_call>{CALL}</tool_call>',
    f"```json\n{CALL}\n```", f"````\n```json\n{CALL}\n```\n````", f"```\n{json.dumps(ARGUMENTS)}\n```",
    f'<tool_call>{{"name": "f", "arguments": {{"a": 0}}}}</tool_call><tool_call>broken</tool_call><tool_call>{CALL}'
    '</tool_call><tool_call>{"name": "g", "arguments": 1}</tool_call>'])
def test_every_form_of_a_tool_call_is_read(text):
    assert extract_tool_call(text, "f") == ARGUMENTS


MALFORMED = [f"<tool_call>{call}</tool_call>" for call in (
    "", "[]", '{"name": "f"}', '{"name": "f", "arguments": [1]}', '{"name": ["f"], "arguments": {}}',
    '{"name": "g", "arguments": {"a": 1}}', "{'name': 'f', 'arguments': {'a'}}", "[" * 100_000,
    "{'name': 'f', 'arguments': " + "[" * 5000, "[" + "-" * 9999 + "1]")] + [
    "</tool_call><tool_call>", "<function=f></function>", "```json\n[1, 2]\n```", "\x00\ud800\uffff",
    '```json\n{"name": "g", "arguments": {"a": 1}}\n```', "```json\n" + '{"a":' * 50_000 + "\n```",
    f"<think><tool_call>{CALL}</tool_call>\n```python\nclass ModelNew:\n    pass\n```\nor",  # cut off
    f"<think>```json\n{CALL}\n```\n```python\nclass ModelNew:\n    pass\n```</think>",
    "```python\nclass ModelNew", "class ModelNew: pass", "```python\n# class ModelNew\n```", "```" + "a" * 50_000 + "`",
    "<tool_call>" * 10_000, "<function=f>" * 10_000, "`````x\n" * 3000 + "```\n" * 3000, "```x\n```\n" * 5000,
    " " * 30_000 + "x" + "``\n" * 5000, "```x\n" * 2000 + "       ```x\n" * 2000]


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_replies_give_none(text):
    began = time.monotonic()
    assert extract_tool_call(text, "f") is None
    assert extract_code(text) is None
    assert time.monotonic() - began < 2  # 30 s, where a pattern is tried again at each character


KERNEL = "class ModelNew:\n    s = '```'\n"
DOCUMENTED = 'class ModelNew:\n    """\n    ```\n    x\n    ```\n    """\n'
WHOLE = f"import torch\n\n{KERNEL}"


@pytest.mark.parametrize("reply, code", [
    (f"1. Fuse:\n\n   ```python\n   {KERNEL.replace(chr(10), chr(10) + '   ')}```\n2. Done.", KERNEL),
    (f"- ```python\n  {KERNEL.replace(chr(10), chr(10) + '  ')}```", KERNEL),
    (f"```python\n{DOCUMENTED}```", DOCUMENTED), (f"Use ```tl.dot``` for it.\nSo:```python\n{KERNEL}```", KERNEL),
    (f"````python\n{KERNEL}````", KERNEL), (f"`````\n````\n```python\n{KERNEL}```\n````\n`````", KERNEL),
    (f"```python\n{KERNEL}```\nBetter:\n```py title=x\n{WHOLE}```\n```python\nprint(ModelNew)\n```", WHOLE),
    (f"```python\r\n{KERNEL}```\r\nOr:\n```python\n# cut off\n{KERNEL}", KERNEL),
    (f"```python\n{KERNEL}```</answer>", KERNEL), (f"```python\n{KERNEL}", None)])
def test_code_is_the_last_block_that_defines_model_new(reply, code):
    """Fences are matched by line, indentation and length."""
    assert extract_code(reply) == code


def test_a_value_that_is_no_json_stays_text():
    """A transcript holds JSON; Python literals can be more than that."""
    values = ["{1, 2}", "(1, 2)", "\\d", "[1, 'x', None, (2,)]"]
    read = [extract_tool_call(f"<function=f><parameter=a>{value}</parameter></function>", "f")["a"] for value in values]
    assert read == values[:3] + [[1, "x", None, [2]]]


# ---- sampling and rescoring

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 9, 8], [11] * 40, [5, 6, 7], [30, 31]]


@pytest.mark.parametrize("top_p", [1.0, 0.2])
def test_sampling_follows_the_distribution(model, top_p):
    """The first token's frequencies over 4,000 draws against the model's own softmax, of the likeliest tokens alone."""
    with torch.no_grad():
        shares = model.model(torch.tensor([PROMPTS[1]])).logits[0, -1].softmax(-1)
    ordered, order = shares.sort(descending=True)
    dropped = ordered.cumsum(0) - ordered >= top_p  # the token that crosses the bound stays
    want = torch.zeros_like(shares)
    want[order] = ordered.masked_fill(dropped, 0)
    model.engine.most = 4000
    draws = model.sample([PROMPTS[1]] * 4000, Sampling(1, top_p=top_p), torch.Generator().manual_seed(1))
    got = torch.bincount(torch.tensor([draw.token_ids[0] for draw in draws]), minlength=len(want)) / 4000
    assert not got[want == 0].any()
    assert (got - want / want.sum()).abs().sum() / 2 < 0.2 < (got - want.roll(1)).abs().sum() / 2
    for draw in draws[::500]:  # log-probabilities are those of the whole distribution
        assert draw.logprobs[0] == pytest.approx(shares[draw.token_ids[0]].log().item(), abs=1e-4)


def test_a_reply_ends_with_any_of_the_models_own_end_tokens(tokenizer, tmp_path):
    """The template's end of a turn, the tokenizer's end of text, and what generation_config.json names."""
    chat = Backbone(tiny_model("Llama", end := template_tokenizer(tokenizer, "qwen3")), end)
    assert chat.stop_ids == sorted(end.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"]))
    chat.model.generation_config.eos_token_id = [7, 8]
    chat = Backbone(chat.model, end)
    stops = set(chat.stop_ids)
    assert {7, 8} < stops and chat.end == end.convert_tokens_to_ids(["<|im_end|>"])
    chat.save(tmp_path)
    assert Backbone.load(tmp_path).model.generation_config.eos_token_id == chat.stop_ids
    replies = chat.sample(PROMPTS * 10, Sampling(200), torch.Generator().manual_seed(0))
    last = {reply.token_ids[-1] for reply in replies if reply.finished}
    assert 1 < len(last) and last <= stops and not any(stops & set(reply.token_ids[:-1]) for reply in replies)
    assert {reply.finished or len(reply.token_ids) for reply in replies} == {True, 200}
    assert not any("<|im_end|>" in reply.text for reply in replies)
    with pytest.raises(ValueError):
        chat.sample([[]], Sampling(20))


# ---- loading

def test_a_broken_folder_is_told_in_one_line(model, tmp_path):
    model.save(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    weights = {name: weight for name, weight in whole.items() if name != "model.layers.1.mlp.down_proj.weight"}
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(UserError, match="cannot load the model"):
        Backbone.load(tmp_path)
    save_file(whole, path, {"format": "pt"})
    for file in ("chat_template.jinja", "config.json"):
        (tmp_path / file).write_text("")
        with pytest.raises(UserError, match="^[^\n]*(cannot load the model|chat template)[^\n]*$"):
            Backbone.load(tmp_path)


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Mistral", "Olmo2", "SmolLM3"])
def test_supported_architectures_are_sampled_and_rescored_as_by_their_own_forward(name, tokenizer):
    model = Backbone(tiny_model(name, tokenizer), tokenizer)
    replies = model.sample(PROMPTS, Sampling(20), torch.Generator().manual_seed(0))
    for reply, new in zip(replies, model.logprobs([(r.prompt_ids, r.token_ids) for r in replies])):
        want = plain_logprobs(model, reply.prompt_ids, reply.token_ids)
        assert (want - torch.tensor(reply.logprobs)).abs().max() < 1e-4
        assert (want - new).abs().max() < 1e-4
    before = model.logprobs([(PROMPTS[1], PROMPTS[2])])[0]
    fuse_norms(model.model)  # as on a GPU
    assert torch.allclose(model.logprobs([(PROMPTS[1], PROMPTS[2])])[0], before, atol=1e-4)
    assert any("forward" in vars(module) for module in model.model.modules())


@pytest.mark.parametrize("changes", [
    {"model_type": "gemma"}, {"sliding_window": 8, "use_sliding_window": True},
    {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}])
def test_other_architectures_are_refused_in_one_line(model, tmp_path, changes):
    model.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UserError, match="only qwen3, .* with full attention are supported"):
        Backbone.load(tmp_path)

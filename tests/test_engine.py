"""The rollout engine against transformers' generate, and the decode attention against PyTorch's."""

import functools
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from backbone import Backbone, Sampling
from fast.attention import attend
from fast.slots import Slots

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 9, 8], [11] * 40, [5, 6, 7], [30, 31], [12] * 25, [40, 41, 42], [13, 14] * 9]

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def attend_in_pytorch(query, keys, values, scale, where):
    slots, places = where.T
    mask = torch.arange(keys.shape[2], device=keys.device) <= places[:, None, None, None]
    return F.scaled_dot_product_attention(query, keys[slots], values[slots], mask, scale=scale,
                                          enable_gqa=True).transpose(1, 2)


def compare_attention(device, dtype, bound, n, heads, groups, dim, length):
    """The kernel against PyTorch, with n sequences in n + 2 slots of this length."""
    torch.manual_seed(0)
    query = torch.randn(n, heads, 1, dim, device=device, dtype=dtype)
    keys, values = (torch.randn(n + 2, groups, length, dim, device=device, dtype=dtype) for _ in range(2))
    slots, position = torch.randperm(n + 2, device=device)[:n], torch.randint(0, length, (n,), device=device)
    position[0], position[-1] = 0, length - 1
    where = torch.stack([slots, position], 1)
    values[slots[-1], :, -1] += 30  # so that it shows if the last one is not read
    want = attend_in_pytorch(query.float(), keys.float(), values.float(), dim**-0.5, where)
    assert (attend(query, keys, values, dim**-0.5, where) - want).abs().max() < bound


@needs_gpu
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
def test_decode_attention_on_a_gpu(dtype, bound):
    for shape in [(3, 8, 2, 64, 200), (1, 4, 4, 16, 70), (2, 6, 2, 40, 130), (64, 32, 8, 128, 1300)]:
        compare_attention("cuda", dtype, bound, *shape)


def test_decode_attention_in_tritons_interpreter():
    """In a process of its own: Triton reads the variable when a kernel is defined."""
    program = "import test_engine as t; t.compare_attention('cpu', t.torch.float32, 1e-5, 2, 3, 1, 40, 33)"
    env = os.environ | {"PYTHONPATH": ":".join(sys.path), "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", program], env=env, check=True)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=needs_gpu)])
def model(request, model_folder):
    return Backbone.load(model_folder, request.param)


@functools.cache
def plain_reply(model, prompt, limit=60):
    """(tokens, log-probabilities) of the greedy reply to a tuple of tokens by transformers' generate."""
    ids = torch.tensor([prompt], device=model.device)
    out = model.model.generate(ids, do_sample=False, max_new_tokens=limit, eos_token_id=model.stop_ids,
                               output_logits=True, return_dict_in_generate=True)
    tokens = out.sequences[0, len(prompt):].tolist()
    return tokens, torch.cat(out.logits).float().log_softmax(-1)[range(len(tokens)), tokens].tolist()


@pytest.fixture(params=["as it is", "as on a GPU"])
def engine(request, model, monkeypatch):
    """Also with the slots and the order of work of a GPU, on a CPU with the kernel's twin in PyTorch."""
    if request.param == "as on a GPU":
        if model.device.type == "cuda":
            pytest.skip("it is on a GPU")
        monkeypatch.setattr("fast.slots.attend", attend_in_pytorch)
        for name, value in {"kind": Slots, "block": 4, "longest": 0}.items():
            monkeypatch.setattr(model.engine, name, value)
    return model.engine


def generate(model, prompts, limit, temperature=0, generator=None):
    replies = model.sample(prompts, Sampling(limit, temperature), generator)
    return [(reply.token_ids, reply.logprobs) for reply in replies]


def generator_for(model, seed=7):
    return torch.Generator(model.device).manual_seed(seed)


@pytest.mark.parametrize("most", [2, 64])
def test_replies_are_those_of_generate_whatever_was_sampled_before(model, engine, most, monkeypatch):
    """With fewer slots than prompts, each slot goes from one sequence to the next. Every limit is kept."""
    monkeypatch.setattr(engine, "most", most)
    for count, limit in ((8, 60), (1, 60), (5, 20), (8, 1), (3, 17)):
        for prompt, (tokens, logprobs) in zip(PROMPTS, generate(model, PROMPTS[:count], limit)):
            want, want_logprobs = plain_reply(model, tuple(prompt))
            assert tokens == want[:limit]
            assert logprobs == pytest.approx(want_logprobs[:limit], abs=1e-5)
    assert generate(model, [], 20) == []


def test_finished_sequences_are_replaced_before_the_others_end(model, monkeypatch, inputs):
    """With four slots the next prompts begin when some replies have ended, not when all have."""
    monkeypatch.setattr(model.engine, "most", 4)
    monkeypatch.setattr(model.engine, "slots", None)  # on a GPU earlier ones are kept, and they may be more
    often = torch.arange(0, 900, 50, device=model.device)  # one token in 50 ends a reply
    monkeypatch.setattr(model.engine.write_token, "stops", often)
    monkeypatch.setattr(model.engine, "stop_ids", often.tolist())
    generate(model, [[n] * 9 for n in range(20, 36)], 100, 1.0, generator_for(model))
    read = [rows for rows, width in inputs if width > 1]
    assert read[0] == 4 and sum(read) == 16 and len(read) > 4


def test_equal_prompts_are_read_once(model, engine, inputs, monkeypatch):
    monkeypatch.setattr(model.engine, "slots", None)  # on a GPU earlier ones are kept, and they may be fewer
    replies = generate(model, PROMPTS[:3] * 4, 60)
    assert [tokens for tokens, _ in replies] == [plain_reply(model, tuple(prompt))[0] for prompt in PROMPTS[:3] * 4]
    assert sum(rows for rows, width in inputs if width > 1) == 3


def test_sampling_is_a_function_of_the_generator(model, engine, monkeypatch):
    monkeypatch.setattr(engine, "most", 4)
    model.release()  # on a GPU earlier slots are kept, and another number of them rounds otherwise
    first = generate(model, PROMPTS, 30, 1.0, generator_for(model))
    assert first == generate(model, PROMPTS, 30, 1.0, generator_for(model))
    assert first != generate(model, PROMPTS, 30, 1.0, generator_for(model, 8))


TALKS = [prompt * 12 for prompt in PROMPTS[:3]] + [prompt * 11 for prompt in PROMPTS[:3]]


@pytest.mark.parametrize("most", [64, 3])
def test_conversations(model, engine, most, monkeypatch):
    """Their histories outgrow the first slots, of which there may be too few; every reply is generate's."""
    monkeypatch.setattr(engine, "most", most)
    monkeypatch.setattr(engine, "slots", None)
    wave = dict(enumerate(TALKS))
    with model.sampler(Sampling(30, 0)) as sampler:
        for turn in range(3):
            for i, reply in sampler.write(wave):
                want, want_logprobs = plain_reply(model, tuple(reply.prompt_ids), 30)
                assert reply.token_ids == want
                assert reply.logprobs == pytest.approx(want_logprobs, abs=1e-4)
                wave[i] = reply.prompt_ids + reply.token_ids + [11 + turn] * 20  # of the next wave

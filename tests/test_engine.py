"""The rollout engine against its slow twin, and the decode attention against PyTorch's."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from backbone import Backbone
from fast.engine import BLOCK, Engine, Slots, at_once

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 9, 8], [11] * 40, [5, 6, 7], [30, 31], [12] * 25, [40, 41, 42], [13, 14] * 9]

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

KERNELS = """
import sys, torch, torch.nn.functional as F
from fast.attention import append, attend, fused_rotation, rotate
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb
device, dtypes, shapes = %r
torch.manual_seed(0)
for dtype, bound in dtypes:
    for n, H, groups, D, T in shapes:
        query = torch.randn(n, H, 1, D, device=device, dtype=dtype)
        keys, values = (torch.randn(n + 1, groups, T, D, device=device, dtype=dtype)[:n] for _ in range(2))
        position = torch.randint(0, T, (n,), device=device)
        position[0], position[-1] = 0, T - 1
        key, value = (torch.randn(n, 1, groups, D, device=device, dtype=dtype).transpose(1, 2) for _ in range(2))
        value[-1] += 30  # so that it shows if the last one is not read
        keys_too, values_too = keys.clone(), values.clone()
        keys_too[torch.arange(n), :, position] = key[:, :, 0]
        values_too[torch.arange(n), :, position] = value[:, :, 0]
        append(key, value, keys, values, position)
        assert torch.equal(keys, keys_too) and torch.equal(values, values_too)
        mask = torch.arange(T, device=device) <= position[:, None, None, None]
        want = F.scaled_dot_product_attention(query.float(), keys.float(), values.float(), attn_mask=mask,
                                              enable_gqa=True).transpose(1, 2)
        got = attend(query, keys, values, position, D**-0.5)
        assert (got - want).abs().max() < bound, (dtype, n, H, (got - want).abs().max())
        cos, sin = (torch.randn(n, 1, D, device=device, dtype=dtype) for _ in range(2))
        for mine, theirs in zip(rotate(query, key, cos, sin), apply_rotary_pos_emb(query, key, cos, sin)):
            assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-6), (dtype, n, H, (mine - theirs).abs().max())
        assert (attend(query, keys, values, position.clamp(max=T - 2), D**-0.5) - want)[-1].abs().max() > bound

# A model that rotates a quarter of each head: its cos and sin are narrower than a head.
model = GPTNeoXForCausalLM(GPTNeoXConfig(hidden_size=64, num_attention_heads=2, num_hidden_layers=1,
                                         intermediate_size=64, vocab_size=50)).to(device)
modeling = sys.modules[type(model).__module__]
theirs = modeling.apply_rotary_pos_emb
query, key = (torch.randn(3, 2, 1, 32, device=device) for _ in range(2))
with fused_rotation(model):
    assert modeling.apply_rotary_pos_emb is not theirs
    for width in (8, 32):
        cos, sin = (torch.randn(3, 1, width, device=device) for _ in range(2))
        for mine, want in zip(modeling.apply_rotary_pos_emb(query, key, cos, sin), theirs(query, key, cos, sin)):
            assert torch.allclose(mine, want, atol=1e-6), width
assert modeling.apply_rotary_pos_emb is theirs
print("all right")
"""


def run_kernels(device, dtypes, shapes, **environment):
    done = subprocess.run([sys.executable, "-c", KERNELS.replace("%r", f"'{device}', {dtypes}, {shapes}")], text=True,
                          capture_output=True, env=os.environ | environment, cwd=Path(__file__).parent.parent)
    assert done.stdout.strip() == "all right", done.stderr[-2000:]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the next one is the real thing")
def test_kernels_in_the_interpreter():
    run_kernels("cpu", "[(torch.float32, 1e-5)]", [(2, 4, 2, 16, 70), (1, 3, 1, 40, 33)],
                TRITON_INTERPRET="1")


@needs_gpu
def test_kernels_on_a_gpu():
    run_kernels("cuda", "[(torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)]",
                [(3, 8, 2, 64, 200), (1, 4, 4, 16, 70), (2, 6, 2, 40, 130), (64, 32, 8, 128, 1300)])


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=needs_gpu)])
def model(request, model_folder):
    return Backbone.load(model_folder, request.param)


@pytest.fixture(scope="module")
def plain(model):
    """What the model's own cache gives greedily for PROMPTS, 60 tokens."""
    return [model._decode_plain(prompt, 60, 0, None) for prompt in PROMPTS]


@pytest.fixture(params=["one block at a time", "a block ahead"])
def pace(request, model, monkeypatch):
    if request.param == "a block ahead":
        monkeypatch.setattr(model.engine, "block", 4)
        monkeypatch.setattr(model.engine, "ahead", 1)


@pytest.mark.parametrize("rows", [1, 3, 4, 8, 64])
def test_slots_that_change_hands_give_what_the_plain_path_gives(model, pace, plain, rows):
    for (tokens, logprobs), (want, want_logprobs) in zip(generate(model, PROMPTS, 60, 0, None, rows), plain):
        assert tokens == want
        assert logprobs == pytest.approx(want_logprobs, abs=1e-5)


def test_calls_do_not_see_what_earlier_ones_have_left(model, pace, plain):
    """One after the other, in slots that are kept on a GPU: more sequences, fewer, and some that shrink on the way."""
    for count, limit in ((8, 60), (1, 60), (5, 20), (8, 60), (3, 60)):
        for (tokens, _), (want, _) in zip(generate(model, PROMPTS[:count], limit, 0, None, 64), plain):
            assert tokens == want[:limit]


@pytest.mark.parametrize("limit", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_every_limit_is_kept(model, pace, plain, limit):
    for (tokens, _), (want, _) in zip(generate(model, PROMPTS, limit, 0, None, 4), plain):
        assert tokens == want[:limit]


def test_nothing_to_write(model):
    assert generate(model, [], 10, 1.0, None) == []
    assert generate(model, [[5], [6]], 0, 1.0, None) == [([], []), ([], [])]


def test_finished_sequences_are_replaced_before_the_others_end(model, monkeypatch):
    """Eight prompts in four slots: the second four start when the short ones have ended, not when all have."""
    admitted = []
    admit = Engine._admit
    monkeypatch.setattr(Engine, "_admit", lambda self, slots, rows, *rest: (admitted.append(list(rows)),
                                                                             admit(self, slots, rows, *rest)))
    ended = [len(tokens) for tokens, _ in generate(model, PROMPTS, 40, 1.0, generator_for(model), 4)]
    assert admitted[0] == [0, 1, 2, 3] and sum(map(len, admitted)) == len(PROMPTS)
    assert all(1 <= length <= 40 for length in ended)


def test_a_prompt_is_held_once_for_all_its_replies(model, plain, monkeypatch):
    """On a CPU. Eight slots, of which some change hands: in each step every prompt at work is there once, and no other.
    """
    if model.engine.keeps:
        pytest.skip("the slots of a GPU hold whole sequences")
    prompts, step, seen = PROMPTS[:3] * 4, Slots.step, []

    def watched(slots, *rest):
        rows = [row for shared in slots.prompts for some in shared.rows for row in some]
        seen.append((sum(len(shared.rows) for shared in slots.prompts), sorted(rows) == list(range(slots.count))))
        assert all(len(shared.rows) == len(shared.lengths) == len(shared.keys[0]) for shared in slots.prompts)
        step(slots, *rest)

    monkeypatch.setattr(Slots, "step", watched)
    replies = generate(model, prompts, 60, 0, None, 8)
    assert [tokens for tokens, _ in replies] == [plain[i % 3][0] for i in range(12)]
    assert all(whole and 1 <= count <= 4 for count, whole in seen), seen  # twice while one is read for later replies


@pytest.mark.parametrize("wanted", [True, False])
def test_a_turn_ends_early_where_somebody_waits_for_its_end(model, plain, wanted, monkeypatch):
    """As on a GPU: a block is written while the one before is looked at, if nobody wants the turn's end."""
    held, step = [], Slots.step

    class Turn:
        def __enter__(self):
            held.append(0)
            return self

        def __exit__(self, *_):
            pass

        def wanted(self):
            return wanted

    def counted(*arguments):
        held[-1] += 1
        step(*arguments)

    monkeypatch.setattr(Slots, "step", counted)
    monkeypatch.setattr(model.engine, "block", 4)
    monkeypatch.setattr(model.engine, "ahead", 1)
    replies = generate(model, PROMPTS, 60, 0, None, 8, Turn)
    assert [tokens for tokens, _ in replies] == [tokens for tokens, _ in plain]
    longest = max(len(tokens) for tokens, _ in plain)
    if wanted:
        assert held[0] == 3 and set(held[1:-1]) == {4} and len(held) == -(-longest // 4)
    else:
        assert len(held) == 1 and held[0] <= min(59, longest + 2 * 4)


def test_sampling_is_a_function_of_the_generator(model):
    first = generate(model, PROMPTS, 30, 1.0, generator_for(model), 4)
    assert first == generate(model, PROMPTS, 30, 1.0, generator_for(model), 4)
    assert first != generate(model, PROMPTS, 30, 1.0, generator_for(model, 8), 4)


def test_after_a_release_sampling_is_a_function_of_the_generator_again(model, monkeypatch):
    """Though the slots are kept, and have been used unevenly."""
    monkeypatch.setattr(model.engine, "keeps", True)
    monkeypatch.setattr(model.engine, "_give_back", lambda: None)
    generate(model, PROMPTS, 30, 0, None, 8)
    slots = model.engine.slots
    generate(model, PROMPTS[:3], 30, 0, None, 8)
    model.release()
    first = generate(model, PROMPTS, 30, 1.0, generator_for(model), 8)
    model.release()
    assert first == generate(model, PROMPTS, 30, 1.0, generator_for(model), 8) and model.engine.slots is slots
    monkeypatch.undo()
    model.release()


def test_sampled_logprobs_are_the_trainers(model):
    for temperature in (1.0, 0.5):
        replies = model.sample(PROMPTS * 3, 40, temperature, generator_for(model), batch_size=16)
        for reply, new in zip(replies, model.logprobs([(r.prompt_ids, r.token_ids) for r in replies])):
            assert (new.cpu() - torch.tensor(reply.logprobs)).abs().max() < 1e-4


def test_a_big_cache_is_given_back(model, monkeypatch):
    model.sample(PROMPTS, 20)
    assert (model.engine.slots is not None) == model.engine.cuda
    model.release()
    assert (model.engine.slots is not None) == model.engine.cuda  # a small one stays, with its graphs
    monkeypatch.setattr("fast.engine.SMALL", 0)
    model.release()
    assert model.engine.slots is None
    if model.engine.cuda:
        before = torch.cuda.memory_reserved()
        monkeypatch.setattr("fast.engine.SPARE", 1 << 60)  # more than there is: given back at the end of every call
        generate(model, [[5] * 20000], 20, 0, None)  # a cache of 10 MB
        assert model.engine.slots is None and torch.cuda.memory_reserved() <= before


def test_a_kept_slot_that_changes_hands_forgets_its_text(model, pace, plain, monkeypatch):
    monkeypatch.setattr(model.engine, "slots", None)
    monkeypatch.setattr(model.engine, "keeps", True)
    for _ in range(2):
        for (tokens, _), (want, _) in zip(generate(model, PROMPTS, 60, 0, None, 3), plain):
            assert tokens == want


class Conversations:
    """A source of prompts for the engine: the next turn of a conversation comes a while after its last reply."""

    def __init__(self, model, prompts, turns, seed):
        self.model, self.turns, self.chance = model, turns, random.Random(seed)
        self.coming = [(i, 0, prompt) for i, prompt in enumerate(prompts)]  # (conversation, turn, prompt)
        self.prompts, self.talks, self.left = {}, [[] for _ in prompts], len(prompts) * turns

    def source(self, wait):
        if not self.left:
            return None
        now = [one for one in self.coming if one[1] == 0 or self.chance.random() < 0.4] or self.coming[:wait]
        self.coming = [one for one in self.coming if one not in now]
        self.prompts.update({(i, turn): prompt for i, turn, prompt in now})
        return [((i, turn), prompt) for i, turn, prompt in now]

    def hold(self, *rest):
        for reply in self.model.engine.stream(self.source, *rest):
            i, turn = reply.key
            assert reply.prompt == self.prompts[i, turn]
            self.talks[i].append((reply.prompt, reply.tokens, reply.logprobs))
            self.left -= 1
            if turn + 1 < self.turns:
                self.coming.append((i, turn + 1, reply.prompt + reply.tokens + [11 + turn] * 20))
        return self.talks


@pytest.mark.parametrize("rows, keeps", [(64, True), (3, True), (64, None), (3, None)])
def test_conversations_at_their_own_pace(model, pace, rows, keeps, monkeypatch):
    """Their histories outgrow the first slots, of which there may be too few; every reply is the plain path's."""
    monkeypatch.setattr(model.engine, "slots", None)
    monkeypatch.setattr(model.engine, "keeps", model.engine.keeps if keeps is None else keeps)
    prompts = [prompt * 12 for prompt in PROMPTS[:5]] + [prompt * 11 for prompt in PROMPTS]
    talks = Conversations(model, prompts, 3, seed=rows).hold(30, 0, None, rows)
    assert [len(talk) for talk in talks] == [3] * len(prompts)
    for talk in talks:
        for prompt, tokens, logprobs in talk:
            want, want_logprobs = model._decode_plain(prompt, 30, 0, None)
            assert tokens == want
            assert logprobs == pytest.approx(want_logprobs, abs=1e-4)


def test_a_later_turn_reads_only_what_is_new(model, monkeypatch):
    monkeypatch.setattr(model.engine, "slots", None)
    monkeypatch.setattr(model.engine, "keeps", True)
    read, whole = [], []
    reads, prefill = Slots.read, Engine._prefill
    monkeypatch.setattr(Slots, "read", lambda slots, rows, prompts: (
        read.extend(len(prompt) - len(slots.text[row]) for row, prompt in zip(rows, prompts)),
        reads(slots, rows, prompts))[1])
    monkeypatch.setattr(Engine, "_prefill", lambda self, prompts: (whole.extend(map(len, prompts)),
                                                                   prefill(self, prompts))[1])
    prompts = [prompt * 12 for prompt in PROMPTS[:5]] + [prompt * 11 for prompt in PROMPTS]
    talks = Conversations(model, prompts, 3, seed=1).hold(30, 0, None)
    assert len(read) == 2 * len(prompts) and max(read) <= 21 and len(whole) == len({tuple(p) for p in prompts})
    for updated in (False, True):
        later = [prompt + tokens + [15] * 5 for prompt, tokens, _ in (talk[-1] for talk in talks)]
        if updated:
            with torch.no_grad():
                next(model.model.parameters()).add_(0)
        read.clear()
        replies = generate(model, later, 30, 0, None)
        assert len(read) == (0 if updated else len(later))
        for talk, prompt, (tokens, logprobs) in zip(talks, later, replies):
            assert tokens == model._decode_plain(prompt, 30, 0, None)[0]
            talk.append((prompt, tokens, logprobs))


def test_another_stream_in_the_middle_of_one_is_refused(model):
    stream = model.engine.stream(at_once(PROMPTS), 60, 1.0, generator_for(model), 4)
    next(stream)
    other = generate(model, PROMPTS, 20, 0, None)
    with pytest.raises(RuntimeError, match="another stream"):
        list(stream)
    assert other == generate(model, PROMPTS, 20, 0, None)


def test_slots_made_for_the_few_that_came_first_are_replaced(model, monkeypatch):
    """One prompt, and as soon as that is being written many more."""
    widths, step = [], Slots.step
    monkeypatch.setattr(model.engine, "slots", None)
    monkeypatch.setattr(Slots, "step", lambda slots, *rest: (widths.append(slots.count), step(slots, *rest)))
    coming = [[("first", PROMPTS[0])], [(i, PROMPTS[i % 8]) for i in range(40)]]
    replies = list(model.engine.stream(lambda wait: coming.pop(0) if coming else None, 60, 1.0, generator_for(model)))
    assert len(replies) == 41 and widths[0] == 1 and max(widths) >= 40


def test_prompts_that_fit_go_before_a_few_that_are_too_long_for_the_slots(model, plain, monkeypatch):
    monkeypatch.setattr(model.engine, "slots", None)
    monkeypatch.setattr(model.engine, "keeps", True)
    long = [9, 8, 7] * 200  # the slots are made for 512 tokens
    coming = [[(0, PROMPTS[0])], [("long", long), *((i, PROMPTS[i]) for i in range(1, 8))]]
    lengths, step = [], Slots.step
    monkeypatch.setattr(Slots, "step", lambda slots, *rest: (lengths.append((slots.length, slots.count)),
                                                             step(slots, *rest)))
    replies = {reply.key: reply.tokens for reply in model.engine.stream(
        lambda wait: coming.pop(0) if coming else None, 60, 0, None, 2)}
    assert [replies[i] for i in range(8)] == [tokens for tokens, _ in plain]
    assert replies["long"] == model._decode_plain(long, 60, 0, None)[0]
    assert lengths[0][0] == 512 and lengths[-1] == (1024, 1)  # the long one comes last, alone


def generator_for(model, seed=7):
    return torch.Generator(model.device).manual_seed(seed)


def generate(model, prompts, *rest):
    replies = {reply.key: (reply.tokens, reply.logprobs) for reply in model.engine.stream(at_once(prompts), *rest)}
    return [replies[i] for i in range(len(prompts))]


@needs_gpu
@pytest.mark.parametrize("experts", ["eager", None])
def test_a_step_that_cannot_be_recorded_is_launched_kernel_by_kernel(tokenizer, experts, capsys):
    """transformers' plain loop over a mixture's experts asks the GPU which were chosen."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                            num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4,
                            num_experts_per_tok=2, moe_intermediate_size=32, initializer_range=0.15)
    mixture = Qwen3MoeForCausalLM._from_config(config, attn_implementation="causal", experts_implementation=experts)
    model = Backbone(mixture.to("cuda").eval(), tokenizer)
    for rows in (64, 3):
        replies = generate(model, PROMPTS, 30, 0, None, rows)
        assert [tokens for tokens, _ in replies] == [model._decode_plain(p, 30, 0, None)[0] for p in PROMPTS]
    told = capsys.readouterr().out.count("cannot be recorded")
    assert told == (not model.engine.slots.graphs) and (told == 1 or experts is None)
    sampled = model.sample(PROMPTS, 30, 1.0, torch.Generator("cuda").manual_seed(0))
    for reply, new in zip(sampled, model.logprobs([(r.prompt_ids, r.token_ids) for r in sampled])):
        assert (new - torch.tensor(reply.logprobs, device="cuda")).abs().max() < 1e-3

"""The update at the size of real models: AdamW on bfloat16 learns, and what saves memory changes no gradient. A step of
the cold start."""

import copy

import numpy as np
import pytest
import torch

from conftest import by_hand
import backbone
import fast.optimizer
import fast.rescore
import fast.train_step
import sft
from backbone import Backbone
from fast.optimizer import SplitAdamW
from test_sft import encoded, small_model

# ---- AdamW


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    monkeypatch.setattr(fast.optimizer, "SLICE", 1000)  # the tensors here have several, the last one shorter


def weights(dtype=torch.bfloat16):
    """A matrix of bfloat16 values of the usual size, and a norm's vector of ones, as parameters of `dtype`."""
    generator = torch.Generator().manual_seed(0)
    values = [(0.02 * torch.randn(70, 50, generator=generator)), torch.ones(33)]
    return [torch.nn.Parameter(value.bfloat16().to(dtype)) for value in values]


def train(parameters, optimizer, steps, first=0):
    """Gradients with a constant part and noise, the same for every dtype."""
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for p in parameters:
            drift = torch.linspace(-1, 1, p.numel()).view(p.shape)
            p.grad = (drift + torch.randn(p.shape, generator=generator)).bfloat16().to(p.dtype)
        optimizer.step()


def test_float32_parameters_change_as_with_torch():
    mine, theirs = weights(torch.float32), weights(torch.float32)
    groups = [[{"params": p[:1], "weight_decay": 0.1}, {"params": p[1:], "weight_decay": 0.0}] for p in (mine, theirs)]
    train(mine, SplitAdamW(groups[0], 1e-3, betas=(0.9, 0.95)), 20)
    train(theirs, torch.optim.AdamW(groups[1], 1e-3, betas=(0.9, 0.95), foreach=False), 20)
    assert all(map(torch.equal, mine, theirs))


def test_bfloat16_learns_at_the_papers_rate():
    """Half-way our optimiser is saved and loaded. (AdamW on bfloat16 alone stays where it was.)"""
    start, exact, split = weights(torch.float32), weights(torch.float32), weights()
    half, optimizer = SplitAdamW(split, 1e-6), SplitAdamW(split, 1.0)  # the rate is loaded, too
    train(exact, torch.optim.AdamW(exact, 1e-6), 200)
    train(split, half, 100)
    optimizer.load_state_dict(copy.deepcopy(half.state_dict()))
    train(split, optimizer, 100, first=100)
    for before, want, p in zip(start, exact, split):
        value = p.detach().float()  # the upper halves of float32 weights; then the rest
        value.view(torch.int32).add_(optimizer.state[p]["low"])
        moved = (want - before).abs()
        assert moved.mean() > 2e-5  # 200 steps of 1e-6, many of them back
        assert (value - want).abs().max() < 0.01 * moved.max()  # the first moment's rounding
        assert torch.equal(p, value.bfloat16())
    assert (split[0] != weights()[0]).float().mean() > 0.2


def test_muon_is_that_of_torch():
    ours, theirs = ([torch.nn.Parameter(torch.ones(shape)) for shape in ((8, 4), (4, 8), (8, 4), (4, 4))]
                    for _ in range(2))
    optimizer = fast.optimizer.Muon([{"params": ours, "weight_decay": 0.1}])
    optimizer.param_groups[0]["lr"] = 0.01
    train(ours, optimizer, 4)
    train(theirs, torch.optim.Muon(theirs, 0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"), 4)
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, atol=1e-3, rtol=0)  # in all they moved by 0.02


# ---- rescoring


def test_logits_of_bfloat16_are_not_rounded():
    head, states = torch.nn.Linear(64, 99, bias=False).bfloat16(), 9 * torch.randn(5, 64).bfloat16()
    head.get_output_embeddings = lambda: head
    assert torch.allclose(fast.rescore.head_logits(head, states), states.float() @ head.weight.T.float(), atol=1e-5)


def test_layers_of_a_model_from_200_million_parameters_on_are_computed_again(model, monkeypatch):
    assert not model.recompute
    for module in (backbone, fast.train_step):
        monkeypatch.setattr(module, "RECOMPUTED", model.model.num_parameters())
    assert Backbone(model.model, model.tokenizer).recompute and not Backbone(small_model(), model.tokenizer).recompute
    sft.TrainStep(model.model, pretrained=True)
    assert any(getattr(module, "gradient_checkpointing", False) for module in model.model.modules())


def test_a_step_is_adamw_on_the_mean_of_the_sequences_mean_losses(monkeypatch):
    """The release's: every sequence weighs the same, decay 0.01 on all. Rows of 12, 12, 12, 12 and 2 learnt tokens.

    A gradient that is not finite is skipped. (A model from random weights does not wait for the norm.)
    """
    data = encoded(5, np.random.default_rng(0))
    data[4] = (data[4][0], np.arange(20) >= 18)
    model, twin = small_model(), small_model()
    step = sft.TrainStep(model, pretrained=True)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.01)
    parts, norms = [sft.collate(data[:2], 0), sft.collate(data[2:], 0)], []
    for scale in (0.2, 50.0):  # the second gradient is too long, and is clipped
        for each in (model, twin):
            with torch.no_grad():
                each.model.norm.weight *= scale
        loss = torch.stack([by_hand(twin, [row]) for row in data]).mean()
        assert abs(loss - by_hand(twin, data)) > 1e-3  # the mean over tokens is another
        assert step(parts, 1e-2).item() == pytest.approx(loss.item(), rel=1e-4)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        for mine, other in zip(model.parameters(), twin.parameters()):
            assert torch.allclose(mine, other, atol=2e-4)
    assert norms[0] < 1 < norms[1]
    before = [p.clone() for p in model.parameters()]
    monkeypatch.setattr(step, "_weights", lambda parts: [torch.full((len(ids),), torch.nan) for ids, _ in parts])
    assert step(parts, 1e-2).isnan() and all(map(torch.equal, before, model.parameters()))


def test_matrices_that_begin_at_random_are_muons_but_for_the_embedding():
    model = small_model()
    step = sft.TrainStep(model, pretrained=False)
    muon, adamw = (set(sum((group["params"] for group in o.param_groups), [])) for o in step.optimizers)
    matrices = {p for name, p in model.named_parameters() if "layers" in name and "norm" not in name}
    assert muon == matrices and adamw == set(model.parameters()) - matrices

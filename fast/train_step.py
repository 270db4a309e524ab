"""One step of supervised training on a batch: the loss of a batch, its gradient in little memory, the optimiser."""

import functools
import os

import torch

from fast import ranks
from fast.optimizer import Muon, make_adamw
from fast.rescore import RECOMPUTED, head_logits, recompute_layers, token_logprobs


class TrainStep:
    """Forward, backward and an optimiser's step on a batch.

    pretrained: as the release trains (verl_patch/trainer/code/fsdp_sft_trainer.py): AdamW with weight decay 0.01 on all
    parameters, and a loss in which every sequence weighs the same. From RECOMPUTED parameters on layers are computed
    again in the backward pass. host: keep the optimiser's state in the host's memory.

    Otherwise weights begin at random, and every token weighs the same. Muon (Keller Jordan, 2024) updates the layers'
    matrices: it makes all singular values of a matrix's momentum about equal before it steps, so that a rare direction
    moves the matrix as much as a common one. Its steps get the size of AdamW's, so that both share a rate. On a GPU
    norms, rotary embeddings and activations are fused, by which a small model is bound. All layers are the same, so one
    compiled layer serves for all: compiling the whole model takes two minutes.
    """

    def __init__(self, model, pretrained, host=False):
        self.model, self.pretrained = model, pretrained
        self.head = functools.partial(head_logits, model)
        if pretrained:
            self.optimizers = [ranks.sharded(make_adamw, model.parameters(), lr=0.0, betas=(0.9, 0.95),
                                             weight_decay=0.01, host=host, fused=True)]
            if model.num_parameters() >= RECOMPUTED:
                recompute_layers(model)
            return
        layers = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
        if model.device.type == "cuda":
            for layer in layers:
                layer.compile(dynamic=True)
        inner = set(layers.parameters())
        groups = [{"params": [], "weight_decay": 0.1}, {"params": [], "weight_decay": 0.1},
                  {"params": [], "weight_decay": 0.0}]  # matrices of the layers, other matrices, vectors
        for p in model.parameters():
            groups[2 if p.dim() < 2 else p not in inner]["params"].append(p)
        self.optimizers = [Muon([groups.pop(0)]),
                           make_adamw(groups, lr=0.0, betas=(0.9, 0.95), fused=True)]

    def __call__(self, parts, rate):
        """One step at a learning rate, on [(ids, targets), ...] from the CPU. Returns the loss, L in sft.py.

        ids (B, L); targets (B, L): the next token where it is learnt, else -100. With several ranks each computes its
        share of the parts; the loss that it returns is its share, too.
        """
        weighed = [(*part, weights) for part, weights in zip(parts, self._weights(parts))]
        total = 0.0
        for part in dealt(weighed):
            loss = self._loss(*part)
            loss.backward()
            total += loss.detach()
        norm = ranks.clip_gradients(self.optimizers[-1], self.model.parameters(), 1.0)  # paper: gradient clip 1.0
        # As the release we skip an update that is not finite, which would destroy every weight. Looking at the norm
        # waits for the GPU, and a tiny model's steps are too short for that.
        skipped = self.pretrained and not torch.isfinite(norm)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            if not skipped:
                optimizer.step()
            optimizer.zero_grad()
        return total

    def save(self, path, state):
        """Replace a checkpoint in one instant: a kill leaves the last one or this one. All ranks must call this.

        state: a dict that is saved with the weights and the optimisers' state.
        """
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]  # collects what other ranks have of them
        if ranks.rank() == 0:
            whole = state | {"model": self.model.state_dict(), "optimizers": optimizers}
            torch.save(whole, path.with_suffix(".new"))
            os.replace(path.with_suffix(".new"), path)

    def load(self, saved):
        """Take the weights and the optimisers' state of a checkpoint, a dict as `save` has written it."""
        self.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"]):
            optimizer.load_state_dict(state)

    def _weights(self, parts) -> list[torch.Tensor]:
        """The weight in the loss of each token of a row, (B,) for each part."""
        counts = [(targets >= 0).sum(1) for _, targets in parts]  # (B,): learnt tokens of a row
        if self.pretrained:
            rows = sum(map(len, counts))
            return [1 / (rows * count.clamp(min=1)) for count in counts]
        tokens = max(1, sum(count.sum().item() for count in counts))
        return [torch.full(count.shape, 1 / tokens) for count in counts]

    def _loss(self, ids, targets, weights) -> torch.Tensor:
        """sum over rows i and their learnt tokens of -w_i log pi(token), a scalar."""
        device = self.model.device
        learnt = targets >= 0
        positions = learnt.flatten().nonzero()[:, 0]  # (N,)
        weights = weights[:, None].expand_as(targets)[learnt]  # (N,)
        # Weights in float32 stay so, and products are computed in bfloat16. Weights in bfloat16 need no autocast.
        mixed = device.type == "cuda" and self.model.dtype == torch.float32
        with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
            logprobs = token_logprobs(self.model, self.head, ids.to(device), positions.to(device),
                                      targets[learnt].to(device))
        return -(logprobs * weights.to(device)).sum()


def dealt(parts) -> list[tuple]:
    """This rank's share of [(ids, targets, weights), ...].

    All ranks have equally many parts, because they add up gradients together after each (fast/ranks.py): some have one
    of a single token without weight.
    """
    ids, targets, weights = parts[0]
    idle = (ids[:1, :1], targets[:1, :1], 0 * weights[:1])
    return ranks.share(parts + [idle] * (-len(parts) % ranks.count()))

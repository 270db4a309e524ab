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
    parameters, and a loss in which every sequence weighs the same. With RECOMPUTED parameters or more, the backward
    pass computes the layers again. host: keep the optimiser's state in the host's memory.

    Otherwise weights begin at random, and every token weighs the same. Muon (Keller Jordan, 2024) updates the layers'
    matrices: it makes all singular values of a matrix's momentum about equal before it steps, so that a rare direction
    moves the matrix as much as a common one. Its steps get the size of AdamW's, so that both share a rate. On a GPU
    we fuse norms, rotary embeddings and activations, which limit a small model's speed. We compile each layer: all are
    alike, so they share the compiled code. Compiling the whole model takes two minutes. And a whole step is one CUDA
    graph for each shape of a batch, because launching its kernels one by one takes longer than running them.
    """

    def __init__(self, model, pretrained, host=False):
        self.model, self.pretrained = model, pretrained
        self.head = functools.partial(head_logits, model)
        # None: no graphs. Else shape of a batch -> None after the first one, then (graph, its input, its loss)
        self.graphs = None
        if pretrained:
            self.optimizers = [ranks.sharded(make_adamw, model.parameters(), lr=0.0, betas=(0.9, 0.95),
                                             weight_decay=0.01, host=host, fused=True)]
            if model.num_parameters() >= RECOMPUTED:
                recompute_layers(model)
            return
        layers = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
        gpu = model.device.type == "cuda"
        if gpu:
            for layer in layers:
                layer.compile(dynamic=True)
            self.graphs, self.pool = {}, torch.cuda.graph_pool_handle()
            self.rate = torch.zeros((), device=model.device)  # a graph reads it
        inner = set(layers.parameters())
        groups = [{"params": [], "weight_decay": 0.1}, {"params": [], "weight_decay": 0.1},
                  {"params": [], "weight_decay": 0.0}]  # matrices of the layers, other matrices, vectors
        for p in model.parameters():
            groups[2 if p.dim() < 2 else p not in inner]["params"].append(p)
        self.optimizers = [Muon([groups.pop(0)]),
                           make_adamw(groups, lr=0.0, betas=(0.9, 0.95), fused=True, capturable=gpu)]

    def __call__(self, parts, rate):
        """One step at a learning rate, on [(ids, targets), ...] from the CPU. Returns the loss, L in sft.py.

        ids (B, L); targets (B, L): the next token where it is learnt, else -100. With several ranks each computes its
        share of the parts; the loss that it returns is its share, too.
        """
        if self.graphs is None or len(parts) > 1:
            return self._update(parts, rate)
        self.rate.fill_(rate)
        batch = parts[0]
        shape = batch[0].shape
        if shape not in self.graphs:  # the first batch compiles what is missing, and makes the optimisers' state
            self.graphs[shape] = None
            return self._update(parts, self.rate)
        if self.graphs[shape] is None:
            graph, held = torch.cuda.CUDAGraph(), [x.to(self.model.device) for x in batch]
            with torch.cuda.graph(graph, pool=self.pool):
                loss = self._update([held], self.rate)
            self.graphs[shape] = graph, held, loss
        graph, held, loss = self.graphs[shape]
        for there, here in zip(held, batch):
            there.copy_(here)
        graph.replay()
        return loss

    def _update(self, parts, rate):
        """One step, kernel by kernel. rate: a number, or a tensor that a graph reads."""
        weighed = [(*part, weights) for part, weights in zip(parts, self._weights(parts))]
        total = 0.0
        for part in dealt(weighed):
            loss = self._loss(*part)
            loss.backward()
            total += loss.detach()
        norm = ranks.clip_gradients(self.optimizers[-1], self.model.parameters(), 1.0)  # paper: gradient clip 1.0
        # With a pretrained model we skip an update that is not finite, as the release does: it would destroy every
        # weight. For a tiny model we do not look. Reading the norm waits for the GPU, and its steps are too short.
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
        tokens = sum(count.sum() for count in counts).clamp(min=1)
        return [(1 / tokens).expand_as(count) for count in counts]

    def _loss(self, ids, targets, weights) -> torch.Tensor:
        """sum over rows i and their learnt tokens of -w_i log pi(token), a scalar."""
        device = self.model.device
        learnt = targets >= 0
        weights = weights[:, None].expand_as(targets)
        if self.graphs is None:
            positions = learnt.flatten().nonzero()[:, 0]  # (N,)
            targets, weights = targets[learnt], weights[learnt]
        else:  # how much a graph computes cannot hang on the data: it scores all positions
            positions = torch.arange(learnt.numel(), device=learnt.device)
            targets, weights = targets.clamp(min=0).flatten(), (weights * learnt).flatten()
        # Weights in float32 stay so, and products are computed in bfloat16. Weights in bfloat16 need no autocast.
        mixed = device.type == "cuda" and self.model.dtype == torch.float32
        with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
            logprobs = token_logprobs(self.model, self.head, *(x.to(device) for x in (ids, positions, targets)))
        return -(logprobs * weights.to(device)).sum()


def dealt(parts) -> list[tuple]:
    """This rank's share of [(ids, targets, weights), ...].

    All ranks have equally many parts, because they add up gradients together after each (fast/ranks.py): some have one
    of a single token without weight.
    """
    ids, targets, weights = parts[0]
    idle = (ids[:1, :1], targets[:1, :1], 0 * weights[:1])
    return ranks.share(parts + [idle] * (-len(parts) % ranks.count()))

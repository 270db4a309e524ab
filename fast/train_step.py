"""One step of supervised training on a batch, as fast as a small model allows: compiled layers, CUDA graphs."""

import torch
import torch.nn.functional as F

from fast import ranks
from fast.optimizer import Muon, make_adamw


class TrainStep:
    """Forward, backward and an optimiser's step on a batch; on a GPU captured once per shape as a CUDA graph.

    A small model is bound by kernel launches, which a graph removes, and then by what lies between the products: norms,
    rotary embeddings and activations, which torch.compile joins. All layers are the same, so one is compiled for all:
    the whole model as one takes two minutes.

    muon: for weights that begin at random. The layers' matrices are then Muon's.
    """

    def __init__(self, model, learning_rate, graphs, muon=False):
        self.model, self.graphs, self.captured, self.pool = model, graphs, {}, None
        self.device = model.device
        layers = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
        for layer in layers if graphs else ():
            layer.compile(dynamic=True)
        self.rate = torch.tensor(learning_rate, device=self.device)  # a tensor, so that a captured step can be told it
        inner = set(layers.parameters())
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        vectors = [p for p in model.parameters() if p.dim() < 2]
        self.optimizer = ranks.sharded(
            Muon if muon else make_adamw,
            [{"params": [p for p in matrices if p in inner], "weight_decay": 0.1, "orthogonal": muon},
             {"params": [p for p in matrices if p not in inner], "weight_decay": 0.1},
             {"params": vectors, "weight_decay": 0.0}],
            lr=self.rate, betas=(0.9, 0.95), fused=True, capturable=self.device.type == "cuda")

    def loss(self, ids, targets):
        """The mean loss. ids (B, L); targets (B, L): the next token where it is learnt, else -100."""
        kind = self.device.type
        # Weights stay as they are, matrix products are done in bfloat16. A graph must not keep cached casts of weights.
        with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda", cache_enabled=False):
            logits = self.model(input_ids=ids, use_cache=False).logits  # (B, L, V)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100)

    def add(self, ids, targets, share=1.0):
        """Add the gradient of `share` times the mean loss, which is returned."""
        loss = share * self.loss(ids, targets)
        loss.backward()
        return loss.detach()

    def update(self):
        """Change the weights by the gradient that has been added up."""
        ranks.clip_grad_norm(self.optimizer, self.model.parameters(), 1.0)  # paper: gradient clip 1.0
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def compute(self, ids, targets):
        """One step on a batch of one part."""
        loss = self.add(ids, targets)
        self.update()
        return loss

    def __call__(self, parts):
        """One step on a batch from the CPU, [(ids, targets), ...]: the mean loss over all its learnt tokens.

        With several ranks each computes its share of the parts, or of the rows where there is one part; the loss that
        it returns is its share, too.
        """
        if not self.graphs:
            learnt = sum((targets >= 0).sum().item() for _, targets in parts)
            own = ranks.share(parts) if len(parts) > 1 else [tuple(map(ranks.share, parts[0]))]
            counts = [(targets >= 0).sum().item() for _, targets in own]
            loss = sum(self.add(ids.to(self.device), targets.to(self.device), count / learnt)
                       for (ids, targets), count in zip(own, counts) if count)
            self.update()
            return loss
        [(ids, targets)] = parts
        shape = tuple(ids.shape)
        if shape not in self.captured:
            # PyTorch's recipe for a capture: a first step on a side stream (here this batch's real step), then the
            # recording, which computes nothing. Graphs share a memory pool, as only one runs at a time.
            static = ids.to(self.device), targets.to(self.device)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                loss = self.compute(*static)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                result = self.compute(*static)
            self.pool = self.pool or graph.pool()
            self.captured[shape] = (graph, *static, result)
            return loss
        # A graph reads and writes the tensors of its capture: the batch is copied into them.
        graph, static_ids, static_targets, result = self.captured[shape]
        static_ids.copy_(ids, non_blocking=True)
        static_targets.copy_(targets, non_blocking=True)
        graph.replay()
        return result

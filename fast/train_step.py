"""One step of supervised training on a batch, as fast as a small model allows: compiled layers, CUDA graphs."""

import torch
import torch.nn.functional as F

from fast import ranks
from fast.optimizer import Muon, make_adamw


class TrainStep:
    """Forward, backward and an optimiser's step on a batch; on a GPU captured once per shape as a CUDA graph.

    A small model is bound by kernel launches, which a graph removes, and then by norms, rotary embeddings and
    activations, which torch.compile fuses. All layers are the same, so one compiled layer serves for all: compiling the
    whole model takes two minutes.

    muon: for weights that begin at random. Muon then updates the layers' matrices.
    """

    def __init__(self, model, learning_rate, graphs, muon=False):
        self.model, self.graphs, self.captured = model, graphs, {}  # {shape: a graph, its batch and its result}
        self.pool = torch.cuda.graph_pool_handle() if graphs else None
        self.device = model.device
        layers = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
        for layer in layers if graphs else ():
            layer.compile(dynamic=True)
        self.rate = torch.tensor(learning_rate, device=self.device)  # a tensor: a captured step reads its present value
        inner = set(layers.parameters())
        groups = [{"params": [], "weight_decay": 0.1, "orthogonal": muon}, {"params": [], "weight_decay": 0.1},
                  {"params": [], "weight_decay": 0.0}]  # matrices of the layers, other matrices, vectors
        for p in model.parameters():
            groups[2 if p.dim() < 2 else p not in inner]["params"].append(p)
        self.optimizer = ranks.sharded(Muon if muon else make_adamw, groups, lr=self.rate, betas=(0.9, 0.95),
                                       fused=True, capturable=self.device.type == "cuda")

    def add(self, ids, targets, share=1.0):
        """Add the gradient of `share` times the mean loss, which is returned.

        ids (B, L); targets (B, L): the next token where it is learnt, else -100.
        """
        # Weights stay in float32, products are computed in bfloat16. A graph must not keep cached casts of weights.
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda", cache_enabled=False):
            logits = self.model(input_ids=ids, use_cache=False).logits  # (B, L, V)
        loss = share * F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()
        return loss.detach()

    def update(self):
        """Change the weights by the gradient that was added up."""
        ranks.reduce_and_clip_gradients(self.optimizer, self.model.parameters(), 1.0)  # paper: gradient clip 1.0
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def __call__(self, parts):
        """One step on a batch from the CPU, [(ids, targets), ...]: the mean loss over all its learnt tokens.

        With several ranks each computes its share of the parts, or of the rows where there is one part; the loss that
        it returns is its share, too.
        """
        if self.graphs:
            return self._replay(*parts[0])
        learnt = sum((targets >= 0).sum().item() for _, targets in parts)
        own = ranks.share(parts) if len(parts) > 1 else [tuple(map(ranks.share, parts[0]))]
        loss = 0.0
        for ids, targets in own:
            count = (targets >= 0).sum().item()
            if count:
                loss += self.add(ids.to(self.device), targets.to(self.device), count / learnt)
        self.update()
        return loss

    def _replay(self, ids, targets):
        """One step by the CUDA graph of its shape, which the first batch of that shape captures."""
        if ids.shape not in self.captured:
            # PyTorch's recipe for a capture: a first step on a side stream (here this batch's real step), then the
            # capture, which computes nothing. Graphs share a memory pool, as only one runs at a time.
            static = ids.to(self.device), targets.to(self.device)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                loss = self.add(*static)
                self.update()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                result = self.add(*static)
                self.update()
            self.captured[ids.shape] = (graph, *static, result)
            return loss
        # A graph reads and writes the tensors of its capture: the batch is copied into them.
        graph, static_ids, static_targets, result = self.captured[ids.shape]
        static_ids.copy_(ids, non_blocking=True)
        static_targets.copy_(targets, non_blocking=True)
        graph.replay()
        return result

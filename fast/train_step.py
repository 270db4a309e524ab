"""One step of supervised training on a batch; the layers of a small model are compiled."""

import torch
import torch.nn.functional as F

from fast import ranks
from fast.optimizer import make_adamw


class TrainStep:
    """Forward, backward and an optimiser's step on a batch.

    compiled: fuse norms, rotary embeddings and activations, by which a small model is bound. All layers are the same,
    so one compiled layer serves for all: compiling the whole model takes two minutes.

    muon: for weights that begin at random. Muon (Keller Jordan, 2024) then updates the layers' matrices: it makes all
    singular values of a matrix's momentum about equal before it steps, so that a rare direction moves the matrix as
    much as a common one. Its steps get the size of AdamW's, so that both share a rate.
    """

    def __init__(self, model, compiled, muon=False):
        self.model = model
        layers = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
        if compiled:
            for layer in layers:
                layer.compile(dynamic=True)
        inner = set(layers.parameters())
        groups = [{"params": [], "weight_decay": 0.1}, {"params": [], "weight_decay": 0.1},
                  {"params": [], "weight_decay": 0.0}]  # matrices of the layers, other matrices, vectors
        for p in model.parameters():
            groups[2 if p.dim() < 2 else p not in inner]["params"].append(p)
        self.optimizers = []
        if muon:
            self.optimizers.append(torch.optim.Muon([groups.pop(0)], adjust_lr_fn="match_rms_adamw"))
        self.optimizers.append(ranks.sharded(make_adamw, groups, lr=0.0, betas=(0.9, 0.95), fused=True))

    def __call__(self, parts, rate):
        """One step at a learning rate, on [(ids, targets), ...] from the CPU: the mean loss over all learnt tokens.

        ids (B, L); targets (B, L): the next token where it is learnt, else -100.

        With several ranks each computes its share of the parts, or of the rows where there is one part; the loss that
        it returns is its share, too.
        """
        learnt = max(1, sum((targets >= 0).sum().item() for _, targets in parts))
        own = ranks.share(parts) if len(parts) > 1 else [tuple(map(ranks.share, parts[0]))]
        total, device = 0.0, self.model.device
        for ids, targets in own:
            if len(ids):  # there may be fewer rows than ranks
                # Weights stay in float32, products are computed in bfloat16.
                with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                    logits = self.model(input_ids=ids.to(device), use_cache=False).logits  # (B, L, V)
                targets = targets.to(device).flatten()
                loss = F.cross_entropy(logits.float().flatten(0, 1), targets, ignore_index=-100, reduction="sum")
                (loss / learnt).backward()
                total += loss.detach() / learnt
        ranks.reduce_and_clip_gradients(self.optimizers[-1], self.model.parameters(), 1.0)  # paper: gradient clip 1.0
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        return total

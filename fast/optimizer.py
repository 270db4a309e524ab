"""Two optimisers: AdamW for weights in bfloat16, in 12 bytes a parameter, and Muon for all matrices of a shape at once.

A weight of 0.02 in bfloat16 has neighbours 1e-4 away: AdamW's step of 1e-6 (the paper's learning rate) rounds to
nothing, and the model never changes. The usual cure is a float32 master copy of every weight. But bfloat16
is the upper half of float32: the lower half alone, kept beside the weight as 16-bit integers, makes the pair the whole
float32. The bytes of a parameter, and GB for 8.19 billion of them (Qwen3-8B; an H200 has 150 GB):

    weight 2 + low 2 + gradient 2 + first moment 2 + second moment 4     12    98
    float32 master and moments: 2 + 4 + 2 + 4 + 4                        16   131   activations hardly fit
    all bfloat16: 2 + 2 + 2 + 2                                           8    66   learns nothing at 1e-6
    low, moments of 8 bits: 2 + 2 + 2 + 1 + 1                             8    66   block scales, kernels of their own
    low and moments in the host's memory (host=True): 2 + 2               4    33   1.3 s each way over PCIe (50 GB/s)

The first moment moves by a tenth of the difference in each step, which bfloat16 (8 significant bits) can hold. The
second moves by 0.1 %, which it would round away, so that is in float32. Gradients are what autograd leaves: bfloat16,
also summed over micro-batches; a micro-batch below 1/500 of the sum so far is lost in it.
"""

import math
import weakref

import torch

SLICE = 2**24  # elements worked on at a time: five float32 temporaries of 64 MiB; an embedding of Qwen3-8B has 622 M


def make_adamw(parameters, lr, host=False, **options) -> torch.optim.Optimizer:
    """torch.optim.AdamW where all parameters are float32, SplitAdamW where some are bfloat16, or with `host`.

    parameters: tensors or parameter groups. host: see SplitAdamW. options: as of torch.optim.AdamW.
    """
    parameters = list(parameters)
    groups = [entry["params"] if isinstance(entry, dict) else [entry] for entry in parameters]
    if host or any(p.dtype != torch.float32 for p in sum(groups, [])):
        return SplitAdamW(parameters, lr, host=host, **options)
    return torch.optim.AdamW(parameters, lr=lr, **options)


class SplitAdamW(torch.optim.Optimizer):
    """AdamW in float32 arithmetic on weights that are the sum of a bfloat16 and a 16-bit remainder.

    State of a parameter: step (int), low (int16), exp_avg (bfloat16), exp_avg_sq (float32). A float32 parameter has a
    `low` of zeros and its first moment in float32, and changes bit for bit as with torch.optim.AdamW.

    host: the state of a GPU's parameters is kept in the host's memory, and copied to the GPU slice by slice.
    """

    def __init__(self, params, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, host=False, **ignored):
        """ignored: options of torch.optim.AdamW that choose how it computes (`fused`)."""
        self.host = host
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=self._zeros(p, p.dtype), exp_avg_sq=self._zeros(p, torch.float32),
                                 low=self._zeros(p, torch.int16))
                state["step"] += 1
                flat = [state[name].view(-1) for name in ("exp_avg", "exp_avg_sq", "low")]
                for parts in zip(*(x.split(SLICE) for x in [p.view(-1), p.grad.reshape(-1), *flat])):
                    here = [x.to(p.device, non_blocking=True) for x in parts]
                    adamw_step(group, state["step"], *here)
                    for x, y in zip(parts, here):  # copying a tensor to itself does nothing
                        x.copy_(y, non_blocking=True)
        if self.host and p.is_cuda:
            torch.cuda.synchronize()

    def _zeros(self, p, dtype):
        """A state tensor for a parameter, on the GPU or in the host's memory."""
        if not (self.host and p.is_cuda):
            return torch.zeros_like(p, dtype=dtype)
        zeros, cuda = torch.zeros(p.shape, dtype=dtype), torch.cuda.cudart()
        cuda.cudaHostRegister(zeros.data_ptr(), zeros.nbytes, 0)  # pinned; PyTorch would pin a power of two of bytes
        # Memory that is freed while it is pinned would be given out again, and copies to what straddles it fail.
        weakref.finalize(zeros, cuda.cudaHostUnregister, zeros.data_ptr()).atexit = False
        return zeros

    def load_state_dict(self, state_dict):
        """As torch's, but tensors keep their dtypes: torch would cast `low` and the second moment to the weight's."""
        super().load_state_dict(state_dict | {"state": {}})
        parameters = sum((group["params"] for group in self.param_groups), [])
        for number, p in enumerate(parameters):  # torch numbers parameters in this order; its `step` is a tensor
            for name, value in state_dict["state"].get(number, {}).items():
                self.state[p][name] = int(value) if name == "step" else self._zeros(p, value.dtype).copy_(value)


def adamw_step(group, step, p, gradient, exp_avg, exp_avg_sq, low):
    """Update a slice (n,) of a parameter and of its state, in place. On float32, `.float()` is the slice itself."""
    rate = float(group["lr"])
    beta1, beta2 = group["betas"]
    master = p.float()
    gradient = gradient.float()
    first = exp_avg.float()
    master.view(torch.int32).add_(low)  # the bits of float32: the weight's, 16 zeros after them, plus the remainder
    master.mul_(1 - rate * group["weight_decay"])
    first.lerp_(gradient, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    deviation = (exp_avg_sq.sqrt() / (1 - beta2**step) ** 0.5).add_(group["eps"])
    master.addcdiv_(first, deviation, value=-rate / (1 - beta1**step))
    exp_avg.copy_(first)
    p.copy_(master)  # to the nearest, so the remainder is in -32768 ... 32768; the last costs one bit of float32
    low.copy_(master.view(torch.int32).sub(p.float().view(torch.int32)).clamp_(max=32767))


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon with adjust_lr_fn="match_rms_adamw", for all matrices of one shape at once.

    torch's works matrix by matrix: with 42 small matrices a slow CPU needs 29 ms to launch its operators, and 28 ms for
    all the rest of a step. params: matrices in float32. The rate may be a tensor, as a CUDA graph needs it.
    """

    MOMENTUM = 0.95

    def __init__(self, params, lr=0.0, weight_decay=0.1):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            by_shape = {}
            for p in group["params"]:
                by_shape.setdefault(p.shape, []).append(p)
            for shape, matrices in by_shape.items():
                gradients = torch.stack([p.grad for p in matrices])  # (n, rows, columns)
                state = self.state[matrices[0]]  # for all n of them
                if not state:
                    state["momentum"] = torch.zeros_like(gradients)
                momentum = state["momentum"].lerp_(gradients, 1 - self.MOMENTUM)
                update = orthogonal(gradients.lerp(momentum, self.MOMENTUM)).to(gradients.dtype)
                torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
                rate = group["lr"] * 0.2 * math.sqrt(max(shape))  # AdamW's update has a root mean square of about 0.2
                torch._foreach_sub_(matrices, list((update * rate).unbind()))


def orthogonal(matrices):
    """About U V^T of each matrix U S V^T, (n, rows, columns), in bfloat16: five steps of Newton and Schulz.

    The coefficients are Muon's (Keller Jordan, 2024). They bring all singular values to between about 0.7 and 1.2.
    """
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.mT if tall else x

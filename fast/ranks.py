"""Several processes, one for each GPU of a node: torchrun --nproc_per_node=8 -- reinforce.py ... (or sft.py, bench.py)

A process is a *rank*. Every rank holds all weights, samples and scores its own part of a batch's rollouts in a sandbox
of its own, and computes the gradient of its own part of the replies. Then all ranks hold the same again:

    distribute                  each rank works on a part of a list, and all get all results
    share, gather               the same in two steps: a rank's part of a list; the list again from the parts' results
    loss.backward               as soon as a parameter's gradient is complete, it is added up over the ranks, and rank r
                                keeps elements r/N ... (r+1)/N of it (reduce-scatter); the whole gradient is freed
    optimizer.step              each rank updates that part of every weight; the parts are collected (all-gather)

So a parameter takes 2 bytes for its weight, 2/N for its gradient and 8/N for the optimiser's state (optimizer.py): ZeRO
stage 2. With eight cards of 80 GB (85.9e9 bytes), in GB for each card:

    parameters                          8.19e9 (Qwen3-8B)     14.77e9 (Qwen3-14B)
    weights, 2 bytes                         16.4                  29.5
    gradients and state, 10/N bytes          10.2                  18.5    with --offload 2/N: 2.0 and 3.7
    the largest whole gradient                1.2                   1.6    the head's
    32,768 tokens of layers' inputs           9.7                  13.4    layers x width x 2 bytes
    one layer, computed again                 8                    10      later the head: CHUNK in rescore.py
    in all                                   46                    73      with --offload 37 and 58

We do not use PyTorch's fully_shard, which shards the weights as well: the sampler reads all of them for every token,
through CUDA graphs that hold their addresses, so it would need a second, whole copy, which undoes the saving. We do not
use its ZeroRedundancyOptimizer, which distributes whole tensors: an embedding of 1.2 GB is one, so ranks would wait for
one another. Here any optimiser works: a part of a tensor is a tensor.

Random numbers depend on the seed, the prompt, and how often the prompt came before (engine.py). So rollouts that
begin with the same prompt stay on one rank, which also reads it only once; and every rank makes the same draws from the
run's generator. So a run is the same on any number of ranks, up to rounding, and can go on with another number of them.
In a process that torchrun has not started, or has started alone, each function here returns what it is given.
"""

import functools
import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from command.process import UserError

# PyTorch 2.13 renamed them, and warns at every call of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def count() -> int:
    """N, the number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """The number of this one. Rank 0 writes the files of a run and shows its progress."""
    return dist.get_rank() if dist.is_initialized() else 0


# ----------------------------------------------------------------------------------------------------------------------
# The beginning and the end of a process

def joined(main):
    """main(), which runs together with the other ranks. When one of them ends with an error, torchrun ends all; what
    the others say then, about connections that were closed, is not the cause.
    """
    def run(*args):
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            join()
        status = main(*args)
        if count() > 1:
            dist.destroy_process_group()
        return status

    return run


def join():
    """Join the ranks that torchrun has started on this machine: each sees one GPU, as cuda:0, and its share of cores.

    Raises UserError where there are fewer GPUs than ranks.
    """
    size, number = (int(os.environ[name]) for name in ("WORLD_SIZE", "LOCAL_RANK"))
    gpus = torch.cuda.device_count()  # does not initialise CUDA: which GPUs are visible can still be changed
    if 0 < gpus < size:
        raise UserError(f"--nproc_per_node {size}: there are {gpus} GPUs here")
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[number]  # the sandbox's processes inherit it
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[number * len(cores) // size:(number + 1) * len(cores) // size] or cores)
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # torchrun sets 1, with which 32 GB of zeros take 30 s
    # torchrun sends SIGTERM when another rank has ended. A handler in Python would have to wait for the main thread,
    # which may wait for that rank in a collective operation; the operating system ends us at once.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if number:
        sys.stdout = open(os.devnull, "w")
    # Objects travel between hosts' memories, by gloo. A rank may wait long for the others; torchrun ends it with them.
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=timedelta(days=7))


# ----------------------------------------------------------------------------------------------------------------------
# Lists

def each(value) -> list:
    """Every rank's value, an object that can be pickled, in the order of ranks. Waits for all of them."""
    values = [value] * count()
    if count() > 1:
        dist.all_gather_object(values, value)
    return values


def first(value):
    """Rank 0's value, an object that can be pickled, on every rank. The others' values are ignored."""
    values = [value]
    if count() > 1:
        dist.broadcast_object_list(values)
    return values[0]


def share(items) -> list:
    """This rank's part of a list that all ranks have: every N-th item."""
    return items[rank()::count()]


def gather(part) -> list:
    """The list whose `share` each rank has worked on, whole and in its order, on every rank."""
    parts = each(part)
    whole = [None] * sum(map(len, parts))
    for number, values in enumerate(parts):
        whole[number::len(parts)] = values
    return whole


def equally_many(items) -> list:
    """This rank's items, filled up with empty lists, so that all ranks have equally many."""
    return items + [[]] * (max(each(len(items))) - len(items))


def summed(numbers) -> dict:
    """A dict of numbers, each added up over the ranks."""
    parts = each(numbers)
    return {name: sum(part[name] for part in parts) for name in numbers}


def distribute(items, work) -> list:
    """work(items), a result for each in their order, on every rank: each of them works on its part of the list.

    items can be hashed. Equal ones have the same rank, and all ranks have about as many; neighbours have different
    ranks, so that the long rollouts of a task are not all on one. Results are objects that can be pickled.
    """
    places = {}  # item -> where it stands in the list
    for place, item in enumerate(items):
        places.setdefault(item, []).append(place)
    parts = [[] for _ in range(count())]
    for equal in sorted(places.values(), key=len, reverse=True):
        min(parts, key=len).extend(equal)
    own = sorted(parts[rank()])
    results = {}
    for done in each(dict(zip(own, work([items[place] for place in own])))):
        results |= done
    return [results[place] for place in range(len(items))]


# ----------------------------------------------------------------------------------------------------------------------
# The update

def sharded(make, parameters, **options):
    """make(parameters, **options), an optimiser, or with several ranks a ShardedOptimizer of it."""
    return ShardedOptimizer(make, parameters, **options) if count() > 1 else make(parameters, **options)


def clip_gradients(optimizer, parameters, largest) -> torch.Tensor:
    """Scale the gradients of `parameters`, added up over all ranks, down where their norm is above `largest`.

    Returns the norm. optimizer: of `sharded`.
    """
    if not isinstance(optimizer, ShardedOptimizer):
        return torch.nn.utils.clip_grad_norm_(parameters, largest)
    square = torch.zeros((), device=optimizer.whole[0].device)
    for p, own in zip(optimizer.whole, optimizer.own):
        if own.grad is not None and (own.numel() < p.numel() or rank() == 0):  # what every rank has counts once
            square += torch.linalg.vector_norm(own.grad, dtype=torch.float32) ** 2
    dist.all_reduce(square)
    torch.nn.utils.clip_grads_with_norm_(optimizer.own, largest, square.sqrt())
    return square.sqrt()


class ShardedOptimizer:
    """An optimiser of which each rank has the part for its own part of every parameter.

    A parameter whose elements cannot be split evenly is updated by every rank, as a whole. While it exists, gradients
    are added up over the ranks in every backward pass. So all ranks must compute equally many, each of which reaches
    the same parameters: a rank that has run out of work computes one of a loss of 0.
    """

    def __init__(self, make, parameters, **options):
        """make, parameters (tensors or groups), options: as of `sharded`."""
        self.optimizer = make(parameters, **options)
        self.whole, self.own = [], []  # parameters; views of this rank's parts, which change with the whole
        for group in self.param_groups:  # no state has been made yet: it will be that of the parts
            self.whole += group["params"]
            group["params"] = [torch.nn.Parameter(self.part(p.data)) for p in group["params"]]
            self.own += group["params"]
        for p, own in zip(self.whole, self.own):
            p.register_post_accumulate_grad_hook(functools.partial(self._reduce, own))

    def _reduce(self, own, p):
        """Add this rank's part of the sum of all ranks' gradients of p to own.grad, and free the whole gradient."""
        gradient, p.grad = p.grad.reshape(-1), None
        part = gradient
        if own.numel() < p.numel():
            part = torch.empty_like(own)
            _reduce_scatter(part, gradient)
        else:
            dist.all_reduce(part)
        own.grad = part if own.grad is None else own.grad.add_(part)

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def part(self, tensor):
        """This rank's part of a parameter, or of a tensor of its shape: (elements / N,), a view."""
        flat = tensor.view(-1)
        return flat if len(flat) % count() else flat.chunk(count())[rank()]

    @torch.no_grad()
    def step(self):
        self.optimizer.step()
        for p, own in zip(self.whole, self.own):
            if own.numel() < p.numel():
                _all_gather(p.view(-1), own)

    def zero_grad(self, set_to_none=True):
        for own in self.own:
            own.grad = None

    # ---- on disk: as if there were no ranks, so that another number of them can go on

    def state_dict(self) -> dict:
        """The whole optimiser's, in the host's memory. To be called by all ranks; only rank 0 gets its tensors."""
        saved = self.optimizer.state_dict()
        for number, state in saved["state"].items():  # the optimiser's own dicts stay as they are
            p = self.whole[number]
            saved["state"][number] = state | {name: self._gathered(state[name], p) for name in tensors_of(state)}
        return saved

    def _gathered(self, value, p):
        value = value.to(p.device)
        if value.numel() < p.numel():
            part, value = value, torch.empty(p.numel(), dtype=value.dtype, device=p.device)
            _all_gather(value.view(torch.uint8), part.view(torch.uint8))  # NCCL has no 16-bit integers
        return value.view(p.shape).cpu() if rank() == 0 else None

    def load_state_dict(self, saved):
        """Take this rank's part of a whole optimiser's state."""
        states = {}
        for number, state in saved["state"].items():
            states[number] = state | {name: self.part(state[name]).clone() for name in tensors_of(state)}
        self.optimizer.load_state_dict(saved | {"state": states})


def tensors_of(state) -> list[str]:
    """Names of what an optimiser keeps for each element of a parameter: all but `step`."""
    return [name for name, value in state.items() if torch.is_tensor(value) and value.dim()]

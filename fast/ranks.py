"""Several processes, one for each GPU of a node: torchrun --nproc_per_node=8 -- reinforce.py ... (or sft.py, bench.py)

A process is a *rank*. Every rank holds all weights, samples and scores its own part of a batch's rollouts in a sandbox
of its own, and computes the gradient of its own part of the replies. Then all ranks hold the same again:

    distribute          a part of a list is worked on by each rank, and all get all results
    share, gather       the same in two steps: a part of a list, and the list again from what became of the parts
    clip_grad_norm      gradients are added up (all-reduce), and rank r keeps elements r/N ... (r+1)/N of each
    optimizer.step      each rank updates that part of every weight; the parts are collected (all-gather)

So a parameter takes 2 bytes for its weight, 2 for its gradient and 8/N for the optimiser's state (optimizer.py): ZeRO
stage 1. Why not PyTorch's fully_shard, which shards the weights as well? The sampler reads all of them for every token,
through CUDA graphs that know their addresses, so it would need a second, whole copy; and weights in bfloat16 are the
small part. Why not its ZeroRedundancyOptimizer? That gives out whole tensors, of which an embedding of 1.2 GB is one,
so ranks would wait for one another. A part of a tensor is a tensor, too: any optimiser takes it as it is.

Random numbers depend on the seed, the prompt, and how often the prompt came before (engine.py). So rollouts that begin
with the same prompt stay on one rank, which also reads it only once; and every rank makes the same draws from the run's
generator. So a run is the same on any number of ranks, up to rounding, and can go on with another number of them. In a
process that torchrun has not started, or has started alone, every function here gives back what it is given.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

# Since PyTorch 2.13 it has another name, and tells so at every call.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def count() -> int:
    """N, the number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """The number of this one. Rank 0 writes the files of a run and shows its progress."""
    return dist.get_rank() if dist.is_initialized() else 0


# ----------------------------------------------------------------------------------------------------------------------
# The beginning and the end of a process


def joined(main):
    """main(), joined with the other ranks while it runs. Whatever ends one of them ends all, and is told once."""
    def run(*args):
        if int(os.environ.get("WORLD_SIZE", 1)) == 1:
            return main(*args)
        join()
        try:
            return main(*args)
        except BaseException as error:
            if "gloo" in str(error):  # another rank is gone; torchrun is about to end this one as well
                time.sleep(10)
            if getattr(error, "code", 1) and not first_to_tell():
                os._exit(1)  # another rank has ended before, and said why
            raise
        finally:
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()

    return run


def join():
    """Join the ranks that torchrun has started on this machine: each sees one GPU, as cuda:0, and its share of cores.

    Ends the process with one line where there are fewer GPUs than ranks.
    """
    size, number = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    gpus = torch.cuda.device_count()  # asks without making use of them: what is visible can still be changed
    if 0 < gpus < size:
        sys.exit(f"{os.path.basename(sys.argv[0])}: error: --nproc_per_node {size}: there are {gpus} GPUs here")
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[number]  # the sandbox's processes inherit it
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[number * len(cores) // size:(number + 1) * len(cores) // size] or cores)
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # torchrun says 1, with which 32 GB of zeros take 30 s
    end_with_the_others()
    if number:
        sys.stdout = open(os.devnull, "w")
    # Objects travel between hosts' memories, by gloo. A rank may wait long for the others; one that has ended ends all.
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=timedelta(days=7))


def end_with_the_others():
    """End this process at once when torchrun asks for it, as it does when another rank has ended.

    Python calls its signal handlers between two steps of the main thread, which may wait in a collective operation for
    the rank that is gone. So a thread waits for the signal, through the pipe that Python writes its number to.
    """
    receive, send = os.pipe()
    os.set_blocking(send, False)
    signal.set_wakeup_fd(send)
    signal.signal(signal.SIGTERM, lambda *_: None)

    def wait():
        while os.read(receive, 1)[0] != signal.SIGTERM:
            pass
        if first_to_tell():
            print(f"{os.path.basename(sys.argv[0])}: error: a rank was killed (or torchrun was), and the run ends with "
                  "it; --resume continues", file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def first_to_tell() -> bool:
    """Is this rank the first that says why the run ends? Asks torchrun's store, which outlives every rank."""
    with contextlib.suppress(RuntimeError):
        where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return dist.TCPStore(*where, is_master=False, timeout=timedelta(seconds=5)).add("has told", 1) == 1
    return True


# ----------------------------------------------------------------------------------------------------------------------
# Lists


def each(value) -> list:
    """Every rank's value, an object that can be pickled, in the order of ranks. Waits for all of them."""
    values = [value] * count()
    if count() > 1:
        dist.all_gather_object(values, value)
    return values


def first(value):
    """Rank 0's value, an object that can be pickled, on every rank. What the others pass counts for nothing."""
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
    return [parts[i % len(parts)][i // len(parts)] for i in range(sum(map(len, parts)))]


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
    own, done = sorted(parts[rank()]), {}
    for results in each(dict(zip(own, work([items[place] for place in own])))):
        done |= results
    return [done[place] for place in range(len(items))]


# ----------------------------------------------------------------------------------------------------------------------
# The update


def sharded(make, parameters, **options):
    """make(parameters, **options), an optimiser, or with several ranks a ShardedOptimizer of it."""
    return ShardedOptimizer(make, parameters, **options) if count() > 1 else make(parameters, **options)


def clip_grad_norm(optimizer, parameters, largest) -> torch.Tensor:
    """Add up the gradients of all ranks, and scale them down where their norm is above `largest`. Returns the norm.

    With several ranks each then has its part of the gradients; those of the whole parameters are freed one by one.
    """
    if not isinstance(optimizer, ShardedOptimizer):
        return torch.nn.utils.clip_grad_norm_(parameters, largest)
    square = torch.zeros((), device=optimizer.whole[0].device)
    reached = torch.tensor([p.grad is not None for p in optimizer.whole], dtype=torch.int32, device=square.device)
    dist.all_reduce(reached, dist.ReduceOp.MAX)
    for p, own, has in zip(optimizer.whole, optimizer.own, reached.tolist()):
        if not has:  # on no rank: it stays as it is, as in one process
            continue
        gradient = torch.zeros_like(p) if p.grad is None else p.grad  # None: no reply of this rank has reached it
        dist.all_reduce(gradient)
        own.grad, p.grad = optimizer.part(gradient).clone(), None
        if own.numel() < p.numel() or rank() == 0:  # what every rank has counts once
            square += torch.linalg.vector_norm(own.grad, dtype=torch.float32) ** 2
    dist.all_reduce(square)
    torch.nn.utils.clip_grads_with_norm_(optimizer.own, largest, square.sqrt())
    return square.sqrt()


class ShardedOptimizer:
    """An optimiser of which each rank has the part for its own part of every parameter.

    A parameter whose elements cannot be split evenly is updated by every rank, as a whole.
    """

    def __init__(self, make, parameters, **options):
        """make, parameters (tensors or groups), options: as of `sharded`."""
        self.optimizer = make(parameters, **options)
        self.whole = [p for group in self.param_groups for p in group["params"]]
        self.own = [torch.nn.Parameter(self.part(p.data)) for p in self.whole]  # views: they change with the whole
        own = iter(self.own)
        for group in self.param_groups:  # no state has been made yet: it will be that of the parts
            group["params"] = [next(own) for _ in group["params"]]

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
        for p in [*self.whole, *self.own]:
            p.grad = None

    # ---- on disk: as if there were no ranks, so that another number of them can go on

    def state_dict(self) -> dict:
        """The whole optimiser's, in the host's memory. To be called by all ranks; only rank 0 gets its tensors."""
        saved = self.optimizer.state_dict()
        for number, state in saved["state"].items():
            p, own = self.whole[number], self.own[number]
            saved["state"][number] = {name: self._gathered(value, p, own) if torch.is_tensor(value) and value.dim()
                                      else value for name, value in state.items()}
        return saved

    def _gathered(self, value, p, own):
        value = value.to(p.device)
        if own.numel() < p.numel():
            parts, value = value, torch.empty(p.numel(), dtype=value.dtype, device=p.device)
            _all_gather(value.view(torch.uint8), parts.view(torch.uint8))  # NCCL knows no 16-bit integers
        return value.view(p.shape).cpu() if rank() == 0 else None

    def load_state_dict(self, saved):
        """Take this rank's part of a whole optimiser's state."""
        states = {number: {name: self.part(value).clone() if torch.is_tensor(value) and value.dim() else value
                           for name, value in state.items()} for number, state in saved["state"].items()}
        self.optimizer.load_state_dict(saved | {"state": states})

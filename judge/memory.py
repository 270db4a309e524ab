"""The memory that an interpreted Triton launch may touch: every access is checked, and what it costs is accumulated.

Blocks here have one more dimension in front, the programs that run in lockstep (lockstep.py): pointers are an array
(programs, *block), or (1, *block) where all programs agree.
"""

import numpy as np
import torch

from judge.compiler import KernelError
from judge.lockstep import Diverged
from judge.prices import CACHE_SECTORS, SECTOR, WARP_BYTES, program_milliseconds
from judge.races import ATOMIC, RACE, Races
from tasks import GPU_BATCH_FACTOR


class Memory:
    """The storages that a launch may touch. Reads and writes go through numpy views of them, never through an address.

    With `counting`, accesses are logged, and `flush` works out what they cost, program by program:

    bytes        moved between the GPU's memory and its L2 cache: whole sectors of 32 bytes, as a cache of CACHE_SECTORS
                 would have fetched them if the programs had run in order
    requested    bytes that pass through the L1 caches, whether they are found there or not: see `requests`
    flops        the arithmetic, in fp32 FLOPs; has_dot: is tl.dot part of it?
    conflicts    the most atomics on one address
    largest      milliseconds of the program that takes longest

    parameters: addresses of storages that are no smaller here than on a GPU. Their bytes count that much less, and once
    fetched they stay at hand without taking room in the cache, until something is stored in them.
    warps: of each program. written: the addresses of storages in which something was stored; loaded: {storage number:
    dtype} of those from which something was loaded.
    """

    def __init__(self, storages, counting=False, parameters=(), warps=4):
        self.storages = sorted({s.data_ptr(): s for s in storages if s.nbytes()}.values(), key=lambda s: s.data_ptr())
        self.starts = np.array([s.data_ptr() for s in self.storages], dtype=np.uint64)
        self.views, self.written, self.loaded, self.undo, self.races = {}, set(), {}, [], Races()
        self.counting, self.warps = counting, warps
        self.parameters = {number for number, s in enumerate(self.storages) if s.data_ptr() in parameters}
        self.log = []  # (storage number, bytes' offsets, mask or None, bytes of an element, kind) since the last flush
        self.fetched = 0  # sectors so far, which is the cache's clock
        self.touched = {}  # {storage number: the value of `fetched` when each of its sectors was last touched}
        self.atomics = {}  # {storage number: atomics on each of its elements}
        self.bytes, self.requested, self.flops, self.conflicts, self.largest = 0, 0, 0, 0, 0.0
        self.flushed_flops, self.flushed_atomics = 0, 0
        self.has_dot = self.has_atomics = False

    # --- access

    def locate(self, pointers, mask, size, kind):
        """(storage number, element indices, 0 where masked). Raises KernelError outside of every tensor.

        mask: None where all elements are active; size: bytes of an element; kind: "load", "store" or "atomic".
        (None, None) if nothing is active.
        """
        active = pointers if mask is None else pointers[mask]
        if active.size == 0:
            return None, None
        low, high = int(active.min()), int(active.max())
        number = int(np.searchsorted(self.starts, low, side="right")) - 1
        start = int(self.starts[number]) if number >= 0 else 0
        end = start + self.storages[number].nbytes() if number >= 0 else 0
        if low >= end or high + size > end:
            if len(pointers) > 1:  # each program may have a tensor of its own
                raise Diverged
            where = f"{(high + size - end) // size} elements past the end" if low < end else "no tensor there"
            raise KernelError(f"out-of-bounds {'load' if kind == 'load' else 'store'} ({where})", stage="launch")
        offsets = pointers - np.uint64(start)
        if mask is not None:
            offsets = np.where(mask, offsets, np.uint64(0))
        if self.counting:
            self.log.append((number, offsets.astype(np.int64), mask, size, kind))
        if (low - start) % size or self.counting and (offsets % np.uint64(size)).any():
            raise KernelError("misaligned address", stage="launch")
        return number, (offsets // np.uint64(size)).astype(np.int64)

    def view(self, number, dtype):
        """A storage as a numpy array of `dtype`."""
        if (number, dtype) not in self.views:
            raw = torch.empty(0, dtype=torch.uint8).set_(self.storages[number]).numpy()
            self.views[number, dtype] = raw[:raw.nbytes // dtype.itemsize * dtype.itemsize].view(dtype)
        return self.views[number, dtype]

    def load(self, pointers, mask, other, dtype):
        number, index = self.locate(pointers, mask, dtype.itemsize, "load")
        if number is None:
            return np.broadcast_to(other, pointers.shape)
        self.races.look(number, index, dtype.itemsize, mask)
        self.races.look_between_threads(number, index, dtype.itemsize, mask)
        self.loaded[number] = dtype
        values = self.view(number, dtype)[index]
        return values if mask is None else np.where(mask, values, other)

    def store(self, pointers, mask, values):
        number, index = self.locate(pointers, mask, values.dtype.itemsize, "store")
        if number is None:
            return
        view, bits = self.view(number, values.dtype), f"u{values.dtype.itemsize}"
        self.races.look(number, index, values.dtype.itemsize, mask,
                        lambda stamps: view[index].view(bits) == values.view(bits))
        self.races.look_between_threads(number, index, values.dtype.itemsize, mask, "overwrites")
        self.before_store(number, values.dtype, index, mask)
        if mask is not None:
            index, values = index[mask], values[mask]
        view[index] = values
        if (view[index].view(bits) != values.view(bits)).any():
            raise KernelError("overwrites " + RACE.format("stores in the same place"))

    def before_atomic(self, pointers, mask, dtype, sem, scope):
        """Check an atomic's addresses, one row for each program, and note its order: a scalar one is a signal, as far
        as `sem` and `scope` (Triton's) let it be seen by other programs.
        """
        number, index = self.locate(pointers, mask, dtype.itemsize, "atomic")
        if number is None:
            return
        self.has_atomics = True
        self.races.look(number, index, dtype.itemsize, mask, lambda stamps: stamps & ATOMIC != 0)
        self.before_store(number, dtype, index, mask, ATOMIC)
        self.races.places.clear()  # threads wait for an atomic as they do for a barrier
        if pointers[0].size == 1:
            active = slice(None) if mask is None else mask.reshape(-1)
            order = "" if "CTA" in str(scope) else str(sem)
            self.races.atomics += [(program, address, "RELEASE" in order, "ACQUIRE" in order) for program, address in
                                   zip(self.races.programs[active].tolist(), pointers.reshape(-1)[active].tolist())]

    def before_store(self, number, dtype, index, mask, atomic=0):
        """Note what is about to be overwritten, and by whom."""
        self.written.add(self.storages[number].data_ptr())
        if number in self.parameters:
            self.parameters.remove(number)
            self.touched.pop(number, None)
        undo = self.races.write(number, self.storages[number].nbytes(), index, dtype.itemsize, mask, atomic)
        index = index if mask is None else index[mask]
        view = self.view(number, dtype)
        self.undo += [undo, (view, index, view[index])]

    # --- cost

    def roll_back(self):
        """Undo everything since the last flush."""
        for view, index, values in reversed(self.undo):
            view[index] = values
        self.undo, self.log, self.flops = [], [], self.flushed_flops
        del self.races.atomics[self.flushed_atomics:]

    def flush(self, programs):
        """Accumulate the cost of what the log holds, program by program: each finds in the cache what others left."""
        moved, requested, accesses = np.zeros(programs), np.zeros(programs), []
        for number, offsets, mask, size, kind in self.log:
            if kind == "load":  # is it still what was loaded?
                self.races.look(number, offsets // size, size, mask)
            elif kind == "atomic":
                index = (offsets if mask is None else offsets[mask]).reshape(-1) // size
                count = np.bincount(index, minlength=self.storages[number].nbytes() // size)
                self.atomics[number] = self.atomics.get(number, 0) + count
                self.conflicts = max(self.conflicts, int(self.atomics[number].max()))
            sectors = offsets >> SECTOR if mask is None else np.where(mask, offsets >> SECTOR, -1)
            starts = new_sectors(sectors, -1)
            requested += self.requests(sectors, starts, size)
            accesses.append((number, kind, sectors, starts))
        for program in range(programs if accesses else 0):
            for number, kind, sectors, starts in accesses:
                row = program if len(sectors) > 1 else 0
                moved[program] += self.fetch(number, sectors[row][starts[row]], kind != "load")
        self.bytes, self.requested = self.bytes + moved.sum(), self.requested + requested.sum()
        flops = (self.flops - self.flushed_flops) / programs
        self.largest = max(self.largest, program_milliseconds(moved, requested, flops, self.has_dot).max())
        self.undo, self.log, self.flushed_flops, self.flushed_atomics = [], [], self.flops, len(self.races.atomics)

    def requests(self, sectors, starts, size):
        """Bytes that one access takes of the L1 cache's rate, in each program: of its elements, or of its sectors where
        these are more, and no less than a request by each warp.

        Sectors are counted along the dimension in which neighbours lie together.
        """
        block = tuple(range(1, sectors.ndim))
        active = np.count_nonzero(sectors >= 0, axis=block)
        found = np.count_nonzero(starts, axis=block)
        for axis in block[:-1]:
            found = np.minimum(found, np.count_nonzero(new_sectors(sectors, axis), axis=block))
        return np.maximum(np.maximum(active * size, found << SECTOR), (active > 0) * self.warps * WARP_BYTES)

    def fetch(self, number, sectors, stores):
        """Bytes moved for sectors of a storage: those that are not in the cache, a cache's worth came after them. What
        is stored where it was loaded is written back all the same.
        """
        keys = [~number, number] if stores else [number]  # of what was stored, of what was loaded or stored
        for key in keys:
            if key not in self.touched:
                count = (self.storages[number].nbytes() >> SECTOR) + 1
                self.touched[key] = np.full(count, -CACHE_SECTORS - 1, dtype=np.int64)
        touched = self.touched[keys[0]]
        missing = np.sort(sectors[self.fetched - touched[sectors] > CACHE_SECTORS])
        fetched = 1 + np.count_nonzero(missing[1:] != missing[:-1]) if missing.size else 0  # each of them once
        if number in self.parameters:
            touched[sectors] = np.iinfo(touched.dtype).max
            return (fetched << SECTOR) / GPU_BATCH_FACTOR
        self.fetched += fetched
        for key in keys:
            self.touched[key][sectors] = self.fetched
        return fetched << SECTOR


def new_sectors(sectors, axis):
    """Where an element's sector is another than its neighbour's before it along an axis. Masked elements are -1."""
    line = np.moveaxis(sectors, axis, -1) if sectors.ndim > 1 else sectors[:, None]
    new = line >= 0
    new[..., 1:] &= line[..., 1:] != line[..., :-1]
    return np.moveaxis(new, -1, axis).reshape(sectors.shape)


def only_moves(memory, run):
    """Has a launch only moved data? Then it stores the same elements of other data as well.

    run(memory) repeats the launch. Before that, of what it has loaded from one tensor one half becomes -m, the rest m,
    the largest magnitude among them: what compares, clamps or sorts values, or works on negative ones only, then stores
    others. The halves are the larger values, and then twice such as have nothing in common: neighbours are often alike,
    and the largest of a few would be what all of them are. Counted are elements: more than half of those that it stores
    must be moved ones, so that computing a few is no way out.
    """
    places = {number: np.flatnonzero(stamps) for number, (_, stamps) in memory.races.stamps.items()}
    moved = 0
    for source, dtype in memory.loaded.items():
        values, bits = memory.view(source, dtype), f"u{dtype.itemsize}"
        same = [number for number in places if memory.races.stamps[number][0] == dtype.itemsize and number != source
                and number not in memory.atomics]
        stored = {number: memory.view(number, dtype)[places[number]] for number in same}
        few = [x[::len(x) // 16 + 1].view(bits) for x in stored.values()]  # looking at a few saves most repetitions
        if not any(2 * (values.view(bits) == x[:, None]).any(axis=1).sum() > len(x) for x in few):
            continue
        smallest, middle, largest = np.sort(values)[[0, len(values) // 2, -1]]
        if dtype.kind == "f":
            largest = np.fmax.reduce(np.abs(values))
            smallest = -largest
        if smallest == largest or not np.isfinite(largest):
            continue

        def any_half(x):
            return x.view(bits).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(63) == 1

        original = values.copy()
        kept = [(memory.storages[number], memory.storages[number].clone()) for number in {source, *places}]

        def restore():
            for storage, old in kept:
                storage.copy_(old)

        moves = {number: np.ones(len(old), bool) for number, old in stored.items()}
        try:
            for half in (lambda x: x >= middle, any_half, lambda x: ~any_half(x)):
                restore()
                values[:] = np.where(half(original), smallest, largest)
                run(Memory(memory.storages))
                for number, old in stored.items():
                    new = memory.view(number, dtype)[places[number]]
                    moves[number] &= new.view(bits) == np.where(half(old), smallest, largest).view(bits)
            moved += sum(np.count_nonzero(x) for x in moves.values())
        except KernelError:  # those were indices
            pass
        finally:
            restore()
    return 2 * moved > sum(map(len, places.values()))

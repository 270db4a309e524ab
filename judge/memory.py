"""The memory that an interpreted Triton launch may touch: every access is checked, and what it costs is accumulated.

Blocks here have one more dimension in front, the programs that run in lockstep (lockstep.py): pointers are an array
(programs, *block), or (1, *block) where all programs agree.
"""

import numpy as np
import torch

from judge.compiler import KernelError
from judge.races import ATOMIC, RACE, Races


class Memory:
    """The storages that a launch may touch. Reads and writes go through numpy views of them, never through an address.

    With `counting`, accesses are logged, and `flush` works out the `bytes` that the card would have moved for them:
    whole sectors of 32 bytes, as a cache of `cache_sectors` would have fetched them if the programs had run in order.
    parameters: addresses of storages that are no smaller here than on a GPU. Their bytes count `parameters_share`
    times, and once fetched they stay at hand without taking room in the cache, until something is stored in them.

    flops: what the arithmetic costs, in fp32 FLOPs; has_dot, has_atomics: are tl.dot, atomics part of it?
    written: the addresses of storages in which something was stored.
    """

    SECTOR = 5  # log2 of the bytes in which memory is fetched

    def __init__(self, storages, cache_sectors=0, counting=False, parameters=(), parameters_share=1.0):
        self.storages = sorted({s.data_ptr(): s for s in storages if s.nbytes()}.values(), key=lambda s: s.data_ptr())
        self.starts = np.array([s.data_ptr() for s in self.storages], dtype=np.uint64)
        self.views, self.written, self.undo, self.races = {}, set(), [], Races()
        self.cache_sectors, self.counting = cache_sectors, counting
        self.parameters = {number for number, s in enumerate(self.storages) if s.data_ptr() in parameters}
        self.parameters_share = parameters_share
        self.log = []  # (storage number, bytes' offsets, mask or None, size if loaded) of accesses since the last flush
        self.fetched = 0  # sectors so far, which is the cache's clock
        self.touched = {}  # {storage number: the value of `fetched` when each of its sectors was last touched}
        self.bytes, self.flops, self.flushed_flops, self.flushed_atomics = 0, 0, 0, 0
        self.has_dot = self.has_atomics = False

    # --- access

    def locate(self, pointers, mask, size, store):
        """(storage number, element indices, 0 where masked). Raises KernelError outside of every tensor.

        mask: None where all elements are active; size: bytes of an element. (None, None) if nothing is active.
        """
        active = pointers if mask is None else pointers[mask]
        if active.size == 0:
            return None, None
        low, high = int(active.min()), int(active.max())
        number = int(np.searchsorted(self.starts, low, side="right")) - 1
        start = int(self.starts[number]) if number >= 0 else 0
        end = start + self.storages[number].nbytes() if number >= 0 else 0
        if low >= end or high + size > end:
            where = f"{(high + size - end) // size} elements past the end" if low < end else "no tensor there"
            raise KernelError(f"out-of-bounds {'store' if store else 'load'} ({where})", stage="launch")
        offsets = pointers - np.uint64(start)
        if mask is not None:
            offsets = np.where(mask, offsets, np.uint64(0))
        if self.counting:
            self.log.append((number, offsets.astype(np.int64), mask, 0 if store else size))
        if (low - start) % size:
            raise KernelError("misaligned address", stage="launch")
        return number, (offsets // np.uint64(size)).astype(np.int64)

    def view(self, number, dtype):
        """A storage as a numpy array of `dtype`."""
        if (number, dtype) not in self.views:
            raw = torch.empty(0, dtype=torch.uint8).set_(self.storages[number]).numpy()
            self.views[number, dtype] = raw[:raw.nbytes // dtype.itemsize * dtype.itemsize].view(dtype)
        return self.views[number, dtype]

    def load(self, pointers, mask, other, dtype):
        number, index = self.locate(pointers, mask, dtype.itemsize, store=False)
        if number is None:
            return np.broadcast_to(other, pointers.shape)
        self.races.look(number, index, dtype.itemsize, mask)
        values = self.view(number, dtype)[index]
        return values if mask is None else np.where(mask, values, other)

    def store(self, pointers, mask, values):
        number, index = self.locate(pointers, mask, values.dtype.itemsize, store=True)
        if number is None:
            return
        view, bits = self.view(number, values.dtype), f"u{values.dtype.itemsize}"
        self.races.look(number, index, values.dtype.itemsize, mask,
                        lambda stamps: view[index].view(bits) == values.view(bits))
        self.before_store(number, values.dtype, index, mask)
        if mask is not None:
            index, values = index[mask], values[mask]
        view[index] = values
        if (view[index].view(bits) != values.view(bits)).any():
            raise KernelError("overwrites " + RACE.format("stores in the same place"))

    def before_atomic(self, pointers, mask, dtype):
        """Check an atomic's addresses, one row for each program, and note its order: a scalar one is a signal."""
        number, index = self.locate(pointers, mask, dtype.itemsize, store=True)
        if number is None:
            return
        self.has_atomics = True
        self.races.look(number, index, dtype.itemsize, mask, lambda stamps: stamps & ATOMIC != 0)
        self.before_store(number, dtype, index, mask, ATOMIC)
        if pointers[0].size == 1:
            active = slice(None) if mask is None else mask.reshape(-1)
            self.races.atomics += zip(self.races.programs[active].tolist(), pointers.reshape(-1)[active].tolist())

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

    def compute(self, flops):
        """Count arithmetic, in fp32 FLOPs."""
        if self.counting:
            self.flops += flops

    def roll_back(self):
        """Undo everything since the last flush."""
        for view, index, values in reversed(self.undo):
            view[index] = values
        self.undo, self.log, self.flops = [], [], self.flushed_flops
        del self.races.atomics[self.flushed_atomics:]

    def flush(self, programs):
        """Accumulate the cost of what the log holds, program by program: each finds in the cache what others left."""
        for number, offsets, mask, size in self.log:
            if size:  # is it still what was loaded?
                self.races.look(number, offsets // size, size, mask)
        for program in range(programs if self.log else 0):
            for number, offsets, mask, _ in self.log:
                row = offsets[program if len(offsets) > 1 else 0]
                if mask is not None:
                    row = row[mask[program if len(mask) > 1 else 0]]
                self.fetch(number, row >> self.SECTOR)
        self.undo, self.log, self.flushed_flops, self.flushed_atomics = [], [], self.flops, len(self.races.atomics)

    def fetch(self, number, sectors):
        """Touch sectors of a storage, and count those that are not in the cache: a cache's worth came after them."""
        if number not in self.touched:
            count = (self.storages[number].nbytes() >> self.SECTOR) + 1
            self.touched[number] = np.full(count, -self.cache_sectors - 1, dtype=np.int64)
        touched = self.touched[number]
        missing = np.sort(sectors[self.fetched - touched[sectors] > self.cache_sectors])
        fetched = 1 + np.count_nonzero(missing[1:] != missing[:-1]) if missing.size else 0  # each of them once
        if number in self.parameters:
            touched[sectors] = np.iinfo(touched.dtype).max
            self.bytes += self.parameters_share * (fetched << self.SECTOR)
        else:
            self.fetched += fetched
            touched[sectors] = self.fetched
            self.bytes += fetched << self.SECTOR

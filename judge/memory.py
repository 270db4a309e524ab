"""The memory that an interpreted Triton launch may touch: every access is checked, and what it costs is accumulated.

Blocks here have one more dimension in front, the programs that run in lockstep (lockstep.py): pointers are an array
(programs, *block), or (1, *block) where all programs agree.
"""

import numpy as np
import torch

from judge.compiler import KernelError
from judge.lockstep import Diverged
from judge.prices import CACHE_SECTORS, SECTOR, WARP_BYTES, program_milliseconds
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
    warps: of each program. written: the addresses of storages in which something was stored.
    """

    def __init__(self, storages, counting=False, parameters=(), warps=4):
        by_address = {storage.data_ptr(): storage for storage in storages if storage.nbytes()}
        self.storages = [by_address[address] for address in sorted(by_address)]
        self.starts = np.array(sorted(by_address), dtype=np.uint64)
        self.views, self.written = {}, set()  # the former: {(storage number, dtype): the storage as a numpy array}
        self.undo = []  # (view, indices, values before) of each store since the last flush
        self.counting, self.warps = counting, warps
        self.parameters = {number for number, s in enumerate(self.storages) if s.data_ptr() in parameters}
        self.log = []  # (storage number, bytes' offsets, mask or None, bytes of an element, kind) since the last flush
        self.fetched = 0  # sectors so far, which is the cache's clock
        self.touched = {}  # {storage number: the value of `fetched` when each of its sectors was last touched}
        self.atomics = {}  # {storage number: atomics on each of its elements}
        self.bytes = self.requested = self.flops = self.flushed_flops = self.conflicts = 0
        self.largest, self.has_dot = 0.0, False

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
        values = self.view(number, dtype)[index]
        return values if mask is None else np.where(mask, values, other)

    def store(self, pointers, mask, values):
        number, index = self.locate(pointers, mask, values.dtype.itemsize, "store")
        if number is None:
            return
        index = self.before_store(number, values.dtype, index, mask)
        self.view(number, values.dtype)[index] = values if mask is None else values[mask]

    def before_atomic(self, pointers, mask, dtype):
        """Check an atomic's addresses, one row for each program. The interpreter then writes there by address."""
        number, index = self.locate(pointers, mask, dtype.itemsize, "atomic")
        if number is not None:
            self.before_store(number, dtype, index, mask)

    def before_store(self, number, dtype, index, mask):
        """Note what is about to be overwritten. Returns the indices that are not masked."""
        self.written.add(self.storages[number].data_ptr())
        if number in self.parameters:
            self.parameters.remove(number)
            self.touched.pop(number, None)
        index = index if mask is None else index[mask]
        view = self.view(number, dtype)
        self.undo.append((view, index, view[index]))
        return index

    # --- cost

    def roll_back(self):
        """Undo everything since the last flush."""
        for view, index, values in reversed(self.undo):
            view[index] = values
        self.undo, self.log, self.flops = [], [], self.flushed_flops

    def flush(self, programs):
        """Accumulate the cost of what the log holds, program by program: each finds in the cache what others left."""
        moved, requested, accesses = np.zeros(programs), np.zeros(programs), []
        for number, offsets, mask, size, kind in self.log:
            if kind == "atomic":
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
        self.bytes += moved.sum()
        self.requested += requested.sum()
        flops = (self.flops - self.flushed_flops) / programs
        self.largest = max(self.largest, program_milliseconds(moved, requested, flops, self.has_dot).max())
        self.undo, self.log, self.flushed_flops = [], [], self.flops

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
        """Bytes moved for sectors of a storage: those that have left the cache, because a cache's worth of others was
        fetched since. What is stored where it was loaded is written back all the same.
        """
        keys = [~number, number] if stores else [number]  # of what was stored, of what was loaded or stored
        for key in keys:
            if key not in self.touched:
                self.touched[key] = np.full((self.storages[number].nbytes() >> SECTOR) + 1, -CACHE_SECTORS - 1)
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

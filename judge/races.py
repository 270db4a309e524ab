"""Races between the programs of one launch: what a GPU leaves to chance is an error here.

On a GPU the programs of a grid run in any order and side by side. So a program must not rely on what another one has
stored, or not stored yet, until atomics put the two in order: one stores, then does an atomic; the other does one on
the same address after that, then loads. (Or a chain of several programs.) `Races` notes who has last written each
element and the order of the atomics. It is an error

    to load or to change an element that another program has stored, and to load or to overwrite one that another has
    changed by an atomic, unless such a chain leads from there to here;
    to store where another program of the same lockstep has loaded (looked at where launches are priced);
    to store different values at one place in one statement.

Likewise within a program, whose threads run in any order, too: to load an element from another place in a block than
it was stored from needs a barrier in between. Which thread holds which element is the compiler's choice; for blocks of
one shape it is the same, as a rule. Atomics are taken for barriers, reductions (which may be) are not.

The same bits stored over another program's are no error. Not seen: a store over what a program has loaded that ran
before, and results that depend on the order of atomics alone. Against both, programs run in another order, and with
atomics in at least two parts, in every trial but the priced one (interpreter.py): then the values are wrong. An atomic
on a block of more than one element puts nothing in order, nor does a volatile load, a relaxed atomic or one of scope
"cta"; one that only acquires or only releases is half of an order.
"""

import numpy as np

from judge.compiler import KernelError

RACE = ("what another program of the same launch {}: on a GPU programs run in no order, "
        "unless atomics make them wait; use a second launch")
PROGRAM, ATOMIC, TIME = (1 << 31) - 1, 1 << 31, 32  # a stamp: program, by an atomic?, number of atomics before it


def across(programs, block):
    """Numbers of programs in the shape of (programs, *block) arrays."""
    return programs.reshape(-1, *[1] * (block.ndim - 1))


def places_in(block):
    """A number for each place of a block in (programs, *block) arrays; blocks of other sizes have other numbers."""
    return np.arange(block[0].size, 2 * block[0].size).reshape(block.shape[1:])


class Races:
    """Of one launch. `programs` holds the numbers, from 1, of those that run now in lockstep."""

    def __init__(self):
        self.programs = None
        self.stamps = {}  # {storage number: (bytes of an element, stamp of each element's last writer, or 0)}
        self.places = {}  # {storage number: each element's place in the block that was stored since a barrier, or 0}
        self.atomics = []  # (program, address, does it release, acquire) of each scalar atomic, in order

    def look(self, number, index, size, mask, harmless=lambda stamps: False):
        """Raises KernelError if an element's last writer is unknown to a program that comes to it.

        size: bytes of an element; harmless(stamps): where that does not matter.
        """
        if number not in self.stamps:
            return
        grain, stamps = self.stamps[number]
        if size > grain:
            for part in range(size // grain):
                self.look(number, index * (size // grain) + part, grain, mask, harmless)
            return
        stamps = stamps[index if size == grain else index * size // grain]
        programs = across(self.programs, index)
        foreign = (stamps & PROGRAM != programs) & (stamps != 0) & (True if mask is None else mask)
        if not foreign.any():
            return
        foreign, stamps = np.broadcast_arrays(foreign & ~np.asarray(harmless(stamps)), stamps)
        for program, theirs in zip(self.programs, (row[found] for row, found in zip(stamps, foreign))):
            known = self.known(program) if theirs.size else {}
            for stamp in np.unique(theirs).tolist():
                if known.get(stamp & PROGRAM, -1) < stamp >> TIME:
                    raise KernelError("touches " + RACE.format("changed" if stamp & ATOMIC else "stored"))

    def look_between_threads(self, number, index, size, mask, what="loads"):
        """Raises KernelError if a program loads or overwrites what other threads of its own have stored since a
        barrier: what is not at the same place of a block of the same size.
        """
        grain, stamps = self.stamps.get(number, (size, None))
        if number in self.places and grain == size:
            stored, own = self.places[number][index], stamps[index] & PROGRAM == across(self.programs, index)
            moved = (stored != 0) & (stored != places_in(index)) & own
            if (moved if mask is None else moved & mask).any():
                raise KernelError(f"{what} what other threads of the program have stored: "
                                  "that needs tl.debug_barrier()")

    def known(self, program):
        """{another program: the number of its last atomic that came before what `program` does now}."""
        known, addresses = {program: len(self.atomics)}, set()
        for time in range(len(self.atomics) - 1, -1, -1):
            other, address, releases, acquires = self.atomics[time]
            if other in known and acquires:
                addresses.add(address)
            elif other not in known and releases and address in addresses:
                known[other] = time
        return known

    def write(self, number, length, index, size, mask, atomic=0):
        """Note the writers of elements. Returns what undoes it. length: bytes of the storage."""
        grain, stamps = self.stamps.setdefault(number, (size, np.zeros(length // size + 1, dtype=np.int64)))
        programs = across(self.programs, index)
        writers = np.broadcast_to(programs if len(index) > 1 else programs[-1:], index.shape)
        places = np.broadcast_to(places_in(index), index.shape)
        if mask is not None:
            index, writers, places = index[mask], writers[mask], places[mask]
        place = (index * size // grain).reshape(-1, 1) + np.arange(max(1, size // grain))
        self.places.setdefault(number, np.zeros(len(stamps), dtype=np.int64))[place] = places.reshape(-1, 1)
        undo = stamps, place, stamps[place]
        stamps[place] = writers.reshape(-1, 1) | atomic | len(self.atomics) << TIME
        return undo

"""The GPU lock: many may share the GPU to check candidates and to sample from the model, one alone times a kernel.

The lock itself (GpuLock) is in the trainer's process, so no candidate can take it. A scorer asks for it over the socket
that it has (RemoteLock), and what a scorer holds is released when the scorer ends.

    scorer -> sandbox    {"lock": number, "exclusive": bool}, later {"unlock": number}
    sandbox -> scorer    {"granted": number}

A request for the GPU alone comes before all shared ones. The shared ones are granted all the same: whoever times a
kernel has to share the GPU between two batches, to put new inputs there and to compare the results.
"""

import contextlib
import itertools
import threading
import time


class GpuLock:
    """The lock, in the trainer's process. owner: (scorer, number), or any other pair that nobody else uses."""

    def __init__(self):
        self.lock = threading.Lock()
        self.holders = {}  # owner -> whether it has the GPU alone
        self.waiting = []  # (owner, exclusive, granted) of every request that has not been granted, oldest first

    def request(self, owner, exclusive, granted):
        """Ask for the GPU. granted() is called once it is had, from this or any other thread; it must not block."""
        with self.lock:
            self.waiting.append((owner, exclusive, granted))
        self._grant()

    def release(self, owner):
        """Give the GPU back, or take back a request that has not been granted. Others' are left alone."""
        with self.lock:
            self.holders.pop(owner, None)
            self.waiting = [request for request in self.waiting if request[0] != owner]
        self._grant()

    def release_all(self, scorer):
        """Release all that a scorer which has ended holds or waits for."""
        with self.lock:
            owners = [*self.holders, *(owner for owner, _, _ in self.waiting)]
        for owner in owners:
            if owner[0] is scorer:
                self.release(owner)

    @contextlib.contextmanager
    def shared(self):
        """Share the GPU within this context. Entering it waits until nobody has the GPU alone, or wants it."""
        had = threading.Event()
        owner = None, had
        self.request(owner, False, had.set)
        try:
            had.wait()
            yield
        finally:
            self.release(owner)

    def _grant(self):
        """Grant all requests that can be granted now."""
        granted = []
        with self.lock:
            while self.waiting:
                first = next((request for request in self.waiting if request[1]), self.waiting[0])
                if self.holders and (first[1] or any(self.holders.values())):
                    break
                self.waiting.remove(first)
                self.holders[first[0]] = first[1]
                granted.append(first[2])
        for tell in granted:  # without the lock: each sends a message
            tell()


class RemoteLock:
    """The lock as a scorer sees it. Any number of threads use it at once; each holds it once at most.

    send: a function that sends a message to the sandbox, for use by any thread.
    """

    def __init__(self, send):
        self.send, self.numbers, self.asked, self.thread = send, itertools.count(), {}, threading.local()

    def acquire(self, exclusive) -> float:
        """Wait for the GPU; returns the seconds. What this thread holds is released first."""
        self.release()
        began, number, had = time.monotonic(), next(self.numbers), threading.Event()
        self.asked[number], self.thread.holds = had, number
        self.send({"lock": number, "exclusive": exclusive})
        had.wait()
        return time.monotonic() - began

    def release(self):
        """Release what this thread holds, if it holds anything."""
        number = getattr(self.thread, "holds", None)
        if number is not None:
            self.thread.holds = None
            self.send({"unlock": number})

    def granted(self, number):
        """Called by the thread that receives the scorer's messages."""
        self.asked.pop(number).set()

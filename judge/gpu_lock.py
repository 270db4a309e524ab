"""The GPU lock: many may share the GPU to check candidates and to sample from the model, one alone times a kernel.

The lock itself (GpuLock) is in the trainer's process. A scorer asks for it over the socket that it has (RemoteLock),
for the one candidate whose turn it is; what a scorer holds is released when the scorer ends.

    scorer -> sandbox    {"lock": alone?}, later {"unlock": True}
    sandbox -> scorer    {"granted": True}

A request for the GPU alone comes before all shared ones.
"""

import contextlib
import threading


class GpuLock:
    """The lock, in the trainer's process. An owner is any object: a scorer's connection, say."""

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

    @contextlib.contextmanager
    def shared(self):
        """Share the GPU within this context. Entering it waits until nobody has the GPU alone, or wants it."""
        had = threading.Event()
        self.request(had, False, had.set)
        try:
            had.wait()
            yield
        finally:
            self.release(had)

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
    """The lock as a scorer sees it, for one thread at a time. send: a function that sends a message to the sandbox."""

    def __init__(self, send):
        self.send, self.had = send, threading.Event()  # set by the thread that receives the scorer's messages

    def acquire(self, exclusive):
        """Wait for the GPU. What is held is released first."""
        self.release()
        self.had.clear()
        self.send({"lock": exclusive})
        self.had.wait()

    def release(self):
        self.send({"unlock": True})

"""The GPU lock: many may share the GPU to load tasks, check candidates and sample from the model, one alone times.

The lock itself (GpuLock) is in the trainer's process. A scorer asks for it over the socket that it has (RemoteLock),
for the one candidate whose turn it is; what a scorer holds is released when the scorer ends.

    scorer -> sandbox    {"lock": alone?}, later {"unlock": True}
    sandbox -> scorer    {"granted": True}

A request for the GPU alone comes before all shared ones.
"""

import contextlib
import threading

from judge.messages import receive


@contextlib.contextmanager
def sharing(lock, *owner):
    """Share the GPU within this context. Entering it waits until no owner has the GPU alone, or wants it."""
    lock.acquire(*owner, False)
    try:
        yield
    finally:
        lock.release(*owner)


class GpuLock:
    """The lock, in the trainer's process. An owner is any object: a scorer's connection, say."""

    def __init__(self):
        self.changed = threading.Condition()
        self.holders = {}  # owner -> whether it has the GPU alone
        self.waiting = 0  # requests for the GPU alone

    def acquire(self, owner, exclusive):
        """Wait for the GPU."""
        with self.changed:
            self.waiting += exclusive
            try:
                self.changed.wait_for(lambda: not self.holders if exclusive else
                                      not self.waiting and not any(self.holders.values()))
                self.holders[owner] = exclusive
            finally:
                self.waiting -= exclusive

    def release(self, owner):
        """Give the GPU back, if the owner has it."""
        with self.changed:
            self.holders.pop(owner, None)
            self.changed.notify_all()

    def shared(self):
        return sharing(self, object())


class RemoteLock:
    """The lock as a scorer sees it, for one thread at a time. tell: a function that sends the sandbox a message."""

    def __init__(self, sock, tell):
        self.sock, self.tell = sock, tell

    def acquire(self, exclusive):
        """Wait for the GPU. What is held is released first."""
        self.release()
        self.tell({"lock": exclusive})
        receive(self.sock)  # while candidates are judged, the sandbox sends nothing else

    def release(self):
        self.tell({"unlock": True})

    shared = sharing  # for a scorer that holds nothing yet

"""A scorer's process (scorer.py) as the pool sees it: orders and answers, and its requests for the GPU."""

import time

from judge.messages import Child, receive, send
from tasks import TaskError


class ScorerConnection:
    """A scorer's process as the pool sees it. Starting one raises Orphaned when there is no fork server."""

    def __init__(self, fork_server, gpu):
        self.child, self.gpu = Child(fork_server, "scorer"), gpu
        self.source = None  # of the task that it is loaded with
        self.large = False  # does that take much of the GPU's memory?

    def order(self, order, patience):
        """Send an order (see judge/scorer.py) and yield the answers; the last one has a "done".

        The scorer's requests for the GPU arrive meanwhile, and are waited for. Raises Gone or OSError when the scorer
        has ended, TimeoutError (an OSError) when it is silent for `patience` seconds.
        """
        answer = {}
        send(self.child.sock, order)
        while "done" not in answer:
            answer = receive(self.child.sock, time.monotonic() + patience)
            if "lock" in answer:
                self.gpu.acquire(self, answer["lock"])
                send(self.child.sock, {"granted": True})
            elif "unlock" in answer:
                self.gpu.release(self)
            else:
                yield answer

    def load(self, task, seed, known, part, patience):
        """Have it build a task's reference, in place of another task's. Raises TaskError, and what `order` does.

        part: of the GPU's memory, for what runs the reference and the candidates.
        """
        job = {"name": task.name, "source": task.source, "seed": seed, "known": list(known), "part": part}
        (answer,) = self.order({"task": job}, patience)
        if answer["done"]:
            raise TaskError(answer["done"])
        self.source, self.large = task.source, answer["large"]

    def close(self, wait=False):
        """End the process with all that it has started; with `wait`, return only when they are gone."""
        self.child.close(wait)
        self.gpu.release(self)

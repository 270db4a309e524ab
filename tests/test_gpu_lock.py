"""The GPU lock: who gets it when, in one process and over a socket."""

import socket
import threading
import time
from unittest.mock import Mock

import pytest

from judge import measured
from judge.gpu_lock import GpuLock, RemoteLock
from judge.messages import Gone, receive, send


@pytest.fixture
def lock():
    return GpuLock()


def in_thread(work, *arguments):
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread


def remote(lock):
    """A scorer's lock, whose other end does what ScorerConnection does; its socket ends it."""
    here, there = socket.socketpair()

    def serve():
        try:
            while True:
                message = receive(here)
                if "lock" in message:
                    lock.acquire(here, message["lock"])
                    send(here, {"granted": True})
                else:
                    lock.release(here)
        except (Gone, OSError):
            lock.release(here)

    in_thread(serve)
    return RemoteLock(there, lambda message: send(there, message))


def test_requests_for_the_gpu_alone_come_first(lock):
    had = []

    def take(name, exclusive):
        lock.acquire(name, exclusive)
        had.append(name)

    lock.acquire("a", False)
    lock.acquire("b", False)  # who shares it does not wait
    for name, exclusive in [("alone", True), ("shares", False), ("too", False)]:
        in_thread(take, name, exclusive)
        time.sleep(0.05)
    for released, expected in [("a", []), ("b", ["alone"]), ("nobody", ["alone"])]:
        lock.release(released)
        time.sleep(0.05)
        assert had == expected
    lock.release("alone")
    time.sleep(0.05)
    assert sorted(had[1:]) == ["shares", "too"]


def test_many_share_and_one_is_alone(lock):
    """Nine scorers take the lock at random; the trainer's model takes it, too."""
    inside, seen, over = [], [], threading.Event()

    def work(exclusive):
        inside.append(exclusive)
        seen.append(list(inside))
        time.sleep(0.001)
        inside.remove(exclusive)

    def use(scorer, turn):
        while not over.is_set():
            scorer.acquire(turn % 3 == 0)  # what it holds is released first, or it would wait for itself
            work(turn % 3 == 0)
            if turn % 2:
                scorer.release()
            turn += 1
        scorer.release()
        scorer.release()  # twice is not once too often

    threads = [in_thread(use, remote(lock), turn) for turn in range(9)]
    for _ in range(20):
        with lock.shared():
            work(False)
    over.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert not inside and max(map(len, seen)) > 1
    assert all(together == [True] for together in seen if True in together)


def test_what_a_scorer_held_or_waited_for_is_released_when_it_ends(lock):
    dying, waiting = remote(lock), remote(lock)
    dying.acquire(True)
    in_thread(waiting.tell, {"lock": True})
    time.sleep(0.1)
    waiting.sock.close()
    dying.sock.close()
    in_thread(lock.acquire, "next", True).join(10)
    assert lock.holders == {"next": True}


@pytest.mark.parametrize("kind, left", [(measured.Candidate, 30), (measured.Extension, 60)])
def test_a_candidates_turn_on_the_gpu_is_short_and_ends_with_it(kind, left):
    """What hangs in it must not go on while others are timed."""
    candidate, events = kind.__new__(kind), []
    candidate.task = Mock(usable_connection=lambda: events.append("ends"))
    candidate.task.gpu.release = lambda: events.append("released")
    candidate.connection = Mock()
    candidate.deadline = measured.time.monotonic() + 60
    candidate.take_turn()
    assert abs(candidate.deadline - measured.time.monotonic() - left) < 1
    candidate.close()
    assert events[-2:] == ["ends", "released"]

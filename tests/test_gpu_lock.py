"""The GPU lock: who gets it when, in one process and over a socket."""

import threading
import time
from unittest.mock import Mock

import pytest

from judge.gpu_lock import GpuLock, RemoteLock


class Scorer:
    """A scorer's RemoteLock joined to a GpuLock, as ScorerConnection does it; it may die, and then answers nothing."""

    def __init__(self, lock):
        self.lock, self.remote, self.alive = lock, RemoteLock(self.deliver), True

    def deliver(self, message):
        if "unlock" in message:
            self.lock.release(self)
        else:
            self.lock.request(self, message["lock"], lambda: self.alive and self.remote.had.set())

    def die(self):
        self.alive = False
        self.lock.release(self)


class Lock(GpuLock):
    """had: names in the order in which they got the lock."""

    def __init__(self):
        super().__init__()
        self.had = []

    def ask(self, name, exclusive):
        self.request(name, exclusive, lambda: self.had.append(name))


@pytest.fixture
def lock():
    return Lock()


def in_thread(work, *arguments):
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread


def test_requests_for_the_gpu_alone_come_first_and_others_in_their_order(lock):
    for name in "abcdefg":
        lock.ask(name, exclusive=name in "cef")
    assert lock.had == ["a", "b"]
    lock.release("e")  # takes its request back
    for name, expected in [("a", []), ("b", ["c"]), ("c", ["f"]), ("f", ["d", "g"]), ("d", []), ("g", [])]:
        lock.had.clear()
        lock.release(name)
        assert lock.had == expected, name
    lock.release("nobody")
    with lock.shared():
        pass


def test_many_share_and_one_is_alone(lock):
    """Nine scorers take the lock at random; the trainer's model takes it, too."""
    inside, seen, over = [], [], threading.Event()

    def work(exclusive):
        inside.append(exclusive)
        seen.append(list(inside))
        time.sleep(0.001)
        inside.remove(exclusive)

    def use(remote, turn):
        while not over.is_set():
            remote.acquire(turn % 3 == 0)
            work(turn % 3 == 0)
            remote.release()
            turn += 1

    threads = [in_thread(use, Scorer(lock).remote, turn) for turn in range(9)]
    for _ in range(20):
        with lock.shared():
            work(False)
    over.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert not inside and max(map(len, seen)) > 1
    assert all(together == [True] for together in seen if True in together)


def test_a_scorer_holds_the_lock_once_and_may_release_it_twice(lock):
    scorer = Scorer(lock)
    scorer.remote.release()
    for exclusive in (False, False, True, True, False):
        scorer.remote.acquire(exclusive)  # what it holds is released first, or it would wait for itself
    lock.ask("sharing", False)
    assert lock.had == ["sharing"]
    lock.release("sharing")
    scorer.remote.release()
    scorer.remote.release()
    lock.ask("alone", True)
    assert lock.had == ["sharing", "alone"]


def test_what_a_scorer_held_or_waited_for_is_released_when_it_ends(lock):
    dying, waiting, other = Scorer(lock), Scorer(lock), Scorer(lock)
    dying.remote.acquire(True)
    in_thread(waiting.remote.acquire, True)
    thread = in_thread(other.remote.acquire, False)
    time.sleep(0.1)
    assert not other.remote.had.is_set()
    waiting.die()
    dying.die()
    thread.join(10)
    lock.ask("alone", True)
    assert other.remote.had.is_set() and lock.had == []
    other.die()
    assert lock.had == ["alone"]


def test_who_is_interrupted_while_it_waits_to_share_leaves_no_request(lock, monkeypatch):
    lock.ask("alone", True)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threading.Event, "wait", Mock(side_effect=KeyboardInterrupt))
        with lock.shared():
            raise AssertionError("not reached")
    lock.release("alone")
    lock.ask("next", True)
    assert lock.had == ["alone", "next"]

"""The GPU lock: who gets it when, in one process and over a socket."""

import threading
import time

import pytest

from judge.gpu_lock import GpuLock, RemoteLock


class Scorer:
    """A scorer's RemoteLock joined to a GpuLock, as sandbox.Scorer does it; it may die, and then answers nothing."""

    def __init__(self, lock):
        self.lock, self.remote, self.alive = lock, RemoteLock(self.deliver), True

    def deliver(self, message):
        if "unlock" in message:
            self.lock.release((self, message["unlock"]))
        else:
            number = message["lock"]
            self.lock.request((self, number), message["exclusive"], lambda: self.alive and self.remote.granted(number))

    def die(self):
        self.alive = False
        self.lock.release_all(self)


@pytest.fixture
def lock():
    return GpuLock()


def in_thread(work, *arguments):
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread


def test_requests_for_the_gpu_alone_come_first_and_others_in_their_order(lock):
    had = []
    for owner, exclusive in [("a", False), ("b", False), ("c", True), ("d", False), ("e", True), ("f", True),
                             ("g", False)]:
        lock.request((None, owner), exclusive, lambda owner=owner: had.append(owner))
    assert had == ["a", "b"]
    lock.release((None, "e"))  # takes its request back
    for owner, expected in [("a", []), ("b", ["c"]), ("c", ["f"]), ("f", ["d", "g"]), ("d", []), ("g", [])]:
        del had[:]
        lock.release((None, owner))
        assert had == expected, owner
    lock.release((None, "nobody"))
    with lock.shared():
        pass


def test_many_share_and_one_is_alone(lock):
    """Three scorers with three threads each take the lock at random; the trainer's model takes it, too."""
    inside, seen, over = [], [], threading.Event()

    def use(remote, turn):
        while not over.is_set():
            exclusive = turn % 3 == 0
            assert remote.acquire(exclusive) >= 0
            inside.append(exclusive)
            seen.append(list(inside))
            time.sleep(0.001)
            inside.remove(exclusive)
            remote.release()
            turn += 1

    threads = [in_thread(use, scorer.remote, turn) for scorer in [Scorer(lock) for _ in range(3)] for turn in range(3)]
    for _ in range(20):
        with lock.shared():
            inside.append(False)
            seen.append(list(inside))
            inside.remove(False)
    over.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert not inside and max(map(len, seen)) > 1
    assert all(together == [True] for together in seen if True in together)


def test_a_thread_holds_the_lock_once_and_may_release_it_twice(lock):
    scorer = Scorer(lock)
    scorer.remote.release()
    for exclusive in (False, False, True, True, False):
        scorer.remote.acquire(exclusive)  # what it holds is released first, or it would wait for itself
    had = []
    lock.request((None, "other"), False, lambda: had.append(1))
    assert had == [1]
    lock.release((None, "other"))
    scorer.remote.release()
    scorer.remote.release()
    lock.request((None, "other"), True, lambda: had.append(2))
    assert had == [1, 2]


def test_what_a_scorer_held_or_waited_for_is_released_when_it_ends(lock):
    dying, other, had = Scorer(lock), Scorer(lock), []
    dying.remote.acquire(True)
    in_thread(dying.remote.acquire, True)  # waits for the scorer's first thread
    thread = in_thread(lambda: had.append(other.remote.acquire(False)))
    time.sleep(0.1)
    assert not had
    dying.die()
    thread.join(10)
    assert had[0] > 0.05
    lock.request((None, "alone"), True, lambda: had.append("alone"))
    assert had[1:] == []
    other.die()
    assert had[1:] == ["alone"]


def test_who_is_interrupted_while_it_waits_to_share_leaves_no_request(lock, monkeypatch):
    lock.request((None, "alone"), True, lambda: None)

    def interrupted(event):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Event, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            with lock.shared():
                raise AssertionError("not reached")
    lock.release((None, "alone"))
    had = []
    lock.request((None, "next"), True, lambda: had.append(1))
    assert had == [1]

"""The trainer's side of the judge: passes each candidate to a recorder, and what comes back to a judge.

    submit(task, code)      a thread: a judge loads the task (`judge_of`), a recorder has the candidate's forward
                            (`record`), and the judge says what it is worth (`judged`), unless the recorder has said
                            that the candidate fails

A recorder has one candidate at a time. A judge has one too, and holds as many tasks as fit into memory (`choose`), for
all turns of their rollouts. A judge that ends is forked again, and loads its tasks again when they are needed. Nothing
of a candidate is parsed here; the size of its text is looked at, and the first words of its recording, no more.
"""

import contextlib
import os
import pickle
import queue
import shutil
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from judge.processes import Gone, Server
from judge.verdict import Failed, Verdict, failed_in, set_failure
from tasks import TaskError, elements

MOST_BYTES = 256_000  # of a candidate's text
MOST_VERDICTS = 10_000  # that are remembered
BYTES_PER_ELEMENT = 40  # of a task's inputs, parameters and outputs: an estimate of what loading it takes
PATIENCE = 5  # seconds that a task stays loaded on a GPU after its candidates were last active, see Entry
GPU_SECONDS = 20  # that a judge may check, or time, a candidate, without waiting for the GPU
CLOSED = "the sandbox is closed"


@dataclass(eq=False)
class Entry:
    """A task, as the trainer sees it."""

    name: str
    source: str
    loading: int = 0  # bytes of memory that loading it may take
    room: int = 0  # bytes that a recording of a candidate may have
    blueprint: bytes = b""  # what a recorder is told of it; empty until a judge has loaded it
    facts: bytes = b""  # what that judge has measured, for the next one that loads it
    unusable: str = ""  # why no candidate can be judged
    begun: int = 0  # candidates that have a thread
    active: float = 0.0  # when (time.monotonic) one of them last began, waited for a judge or left one
    alone: int = 0  # candidates that are to be judged while no other task is loaded
    first: threading.Lock = field(default_factory=threading.Lock)  # of who counts its elements, or waits


@dataclass(eq=False)
class Judge:
    """A judge's process, as the trainer sees it."""

    connection: Connection | None = None
    loaded: dict = field(default_factory=dict)  # {Entry of a task that it holds: bytes of memory reserved for it}
    busy: bool = False

    def end(self):
        if self.connection is not None:
            self.connection.close()
        self.connection = None
        self.loaded.clear()


class Pool:
    """Threads, and the processes that they speak to. settings: sandbox.Settings as a dict, without any None."""

    def __init__(self, settings):
        self.on_gpu = settings["device"] != "cpu"
        scratch = tempfile.mkdtemp(prefix="sandbox-")
        self.settings = settings | {"scratch": scratch, "seconds": settings["timeout"], "gpu": None}
        self.capacity = settings["memory"]  # bytes for all loaded tasks together
        if self.on_gpu:
            path, free = gpu_of(settings["device"])
            self.settings |= {"seconds": GPU_SECONDS, "gpu": path}
            self.capacity = free * 2 // 3
        self.closed = False
        self.changed = threading.Condition()  # guards what follows, and is notified when a judge becomes idle
        self.futures = {}  # {(source, code): Future of its Verdict}
        self.entries = {}  # {source: Entry}
        self.judges = [Judge() for _ in range(settings["tasks" if self.on_gpu else "workers"])]
        self.servers, self.forks = [], None  # all servers; the one that forks judges
        self.recorders = queue.LifoQueue()  # idle ones; None: not started yet
        # Most threads wait, for a recorder or for the judge that holds their task.
        self.executor = ThreadPoolExecutor(512 if self.on_gpu else 2 * settings["workers"])
        early = settings["workers"] if self.on_gpu else 1  # recorders that import torch before there is work
        for _ in range(settings["workers"] - early):
            self.recorders.put(None)
        for role in [self.start_forks, *[self.start_recorder] * early]:
            self.executor.submit(role)

    def submit(self, pairs) -> list[Future]:
        """See Sandbox.submit. Raises TaskError when the sandbox is closed."""
        with self.changed:
            if self.closed:
                raise TaskError(CLOSED)
            futures = [self.future(task, code) for task, code in pairs]
            while len(self.futures) > MOST_VERDICTS:
                del self.futures[next(iter(self.futures))]
        return futures

    def future(self, task, code) -> Future:
        known = self.futures.get((task.source, code))
        if known is not None and not (known.done() and known.exception()):
            return known
        self.futures[task.source, code] = future = self.executor.submit(self.verdict, self.entry(task), code)
        return future

    def entry(self, task) -> Entry:
        return self.entries.setdefault(task.source, Entry(task.name, task.source))

    def prepare(self, tasks):
        """See Sandbox.prepare."""
        with self.changed:
            for entry in self.entries.values():
                entry.unusable = ""  # memory may have been short
            if self.on_gpu and not self.closed:
                self.executor.submit(self.load_what_fits, list(map(self.entry, tasks)))

    def close(self):
        """See Sandbox.close."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
            servers = list(self.servers)  # none is started from now on
        for server in servers:
            server.close()
        self.executor.shutdown()  # what is left of the queue raises TaskError
        shutil.rmtree(self.settings["scratch"], ignore_errors=True)

    # ---- one candidate

    def verdict(self, entry, code) -> Verdict:
        """The verdict on one candidate. Raises TaskError."""
        if len(code.encode(errors="surrogatepass")) > MOST_BYTES:
            return self.failed(code, Failed(f"the code is longer than {MOST_BYTES:,} bytes", "compile"))
        with self.changed:
            entry.begun += 1
            entry.active = time.monotonic()
        try:
            if not entry.blueprint:
                self.hold(entry)
            recording = self.record(entry, code)
            if failed := failed_in(recording):
                return self.failed(code, failed)
            verdict = self.judged(entry, code, recording)
            is_short = self.on_gpu and (verdict.error or "").startswith("OutOfMemoryError:")  # beside other tasks
            return self.judged_alone(entry, code, recording) if is_short else verdict
        except Gone as error:
            return self.failed(code, Failed(f"the recorder failed on it ({error})"))
        finally:
            with self.changed:
                entry.begun -= 1
                self.changed.notify_all()

    def record(self, entry, code) -> bytes:
        """What a recorder says of a candidate. If its server ends, once more with a new one. Raises Gone."""
        order = pickle.dumps((code, entry.blueprint))
        for is_last in False, True:
            server = self.recorders.get()
            try:
                server = server or self.start("judge.recorder")
                return server.ask(order, entry.room)
            except Gone:
                server.close()
                server = None
                if is_last:
                    raise
            finally:
                self.recorders.put(server)

    def judged(self, entry, code, recording) -> Verdict:
        """What a judge says of a recording."""
        with self.judge_of(entry) as judge:
            began = time.monotonic()
            try:
                return self.ask(judge, "judge", entry.source, code, recording)
            except Gone:
                late = time.monotonic() - began >= self.settings["seconds"]
                return self.failed(code, Failed(f"no result within {self.settings['seconds']:g} s" if late else (
                    "the process ended without a result (crash, exit, memory limit or GPU error)")))

    def judged_alone(self, entry, code, recording) -> Verdict:
        """The same, while no other task is loaded."""
        with self.judge_of(entry) as judge, self.changed:
            self.drop(judge, entry)
            entry.alone += 1
        try:
            return self.judged(entry, code, recording)
        finally:
            with self.changed:
                entry.alone -= 1

    def failed(self, code, failed) -> Verdict:
        verdict = Verdict(clock=self.settings["clock"])
        set_failure(verdict, code, failed)
        return verdict

    # ---- judges

    @contextlib.contextmanager
    def judge_of(self, entry):
        """A judge that holds this task, for one candidate. Raises TaskError."""
        self.estimate(entry)
        holds = False
        while not holds:  # where memory is short beside other tasks, it is tried once more
            judge, holds = self.acquire(entry)
            try:
                holds = holds or self.load(judge, entry)
                if holds:
                    yield judge
            finally:
                with self.changed:
                    entry.active = time.monotonic()
                    judge.busy = False
                    self.changed.notify_all()

    def acquire(self, entry) -> tuple:
        """(a judge that is busy from now on, does it hold the task already?). Raises TaskError."""
        with entry.first, self.changed:  # one a task: else hundreds of threads would wake up for each verdict
            judge = None
            while not judge:  # once a second, as patience with other tasks may have come to its end
                entry.active = time.monotonic()
                judge = self.changed.wait_for(lambda: self.closed or entry.unusable or self.choose(entry), 1.0)
            if self.closed or entry.unusable:
                raise TaskError(entry.unusable or CLOSED)
            judge.busy = True
            holds = entry in judge.loaded
            if not holds:
                self.make_room(judge, entry)
                judge.loaded[entry] = self.size(entry)
            return judge, holds

    def choose(self, entry):
        """The judge that is to hold a task now, or None: it has to wait. The caller holds self.changed.

        With a GPU at most one judge holds a task. Without one, several hold a task that has several candidates. A task
        is loaded when it fits beside those that are needed.
        """
        holders = [judge for judge in self.judges if entry in judge.loaded]
        idle = [judge for judge in holders if not judge.busy]
        if idle or holders and (self.on_gpu or entry.begun < 2):
            return idle[0] if idle else None
        idle = [judge for judge in self.judges if not judge.busy]
        needed = self.used(by_needed=True)
        fits = needed + self.size(entry) <= self.capacity or needed == 0
        return min(idle, key=lambda judge: len(judge.loaded)) if idle and fits else None

    def is_needed(self, entry) -> bool:
        """Is a task to stay loaded? With a GPU, while it has candidates: to load one takes a second.

        But not for a candidate that is compiled for long, which may take half a minute. If other tasks need the memory,
        its task is loaded once more.
        """
        return self.on_gpu and entry.begun > 0 and time.monotonic() < entry.active + PATIENCE

    def used(self, by_needed=False) -> int:
        """Bytes of memory that loaded tasks take: all, or those that cannot go now (needed, or in a busy judge)."""
        total = 0
        for judge in self.judges:
            total += sum(size for entry, size in judge.loaded.items()
                         if not by_needed or judge.busy or self.is_needed(entry))
        return total

    def make_room(self, judge, entry):
        """Have this judge and idle ones drop tasks that are not needed, the oldest first, until its new one fits."""
        for other in self.judges:
            for old in list(other.loaded) if other is judge or not other.busy else ():
                may_go = old in other.loaded and old is not entry and not self.is_needed(old)
                if may_go and self.used() + self.size(entry) > self.capacity:
                    self.drop(other, old)

    def drop(self, judge, entry):
        """Have a judge drop a task. self.changed is held until the memory is free."""
        del judge.loaded[entry]
        with contextlib.suppress(Gone):
            self.ask(judge, "drop", entry.source)

    def estimate(self, entry):
        """Note how much memory it may take to load a task."""
        if not entry.loading:
            with entry.first:  # one thread counts
                if not entry.loading:
                    count = elements(entry.source, self.capacity) if self.on_gpu else 1 << 16
                    entry.loading = BYTES_PER_ELEMENT * count or self.capacity // 4

    def size(self, entry) -> int:
        """Bytes of memory to keep free for loading a task."""
        return self.capacity if entry.alone else entry.loading

    def load_what_fits(self, entries):
        """Have judges load tasks, the largest first, which take longest; but none that would not fit beside those."""
        for entry in entries:
            self.estimate(entry)
        with self.changed:
            room = self.capacity - self.used(by_needed=True)
        for entry in sorted(entries, key=lambda entry: -entry.loading):
            if entry.loading <= room:
                room -= entry.loading
                self.executor.submit(self.hold, entry)

    def hold(self, entry):
        """Wait for an idle judge that holds a task; it is loaded if none does."""
        with self.judge_of(entry):
            pass

    def load(self, judge, entry) -> bool:
        """Have a judge load a task. If it cannot, says so, and has it loaded alone next time, or notes why never.

        It is loaded once more where memory is short or, with a GPU, where the judge ends, perhaps for want of memory.
        """
        short = False
        try:
            known = self.ask(judge, "load", entry.source, entry.name, entry.facts)
            if judge.connection is None:
                raise Gone("loading it breaks the GPU's state")
        except Gone as error:
            known = {"unusable": f"{entry.name}: the reference cannot be judged against ({error})"}
            short = self.on_gpu
        with self.changed:
            if "unusable" not in known:
                entry.facts, entry.room, entry.blueprint = known["facts"], known["room"], known["blueprint"]
                entry.loading = min(entry.loading, known["takes"])  # the next time, as the facts are known then
                judge.loaded[entry] = self.capacity if entry.alone else known["takes"]
                return True
            judge.loaded.pop(entry, None)
            if (short or "OutOfMemoryError" in known["unusable"]) and entry.loading < self.capacity:
                entry.loading = self.capacity
            else:
                entry.unusable = known["unusable"]
            return False

    def ask(self, judge, *order):
        """A judge's answer to an order. Raises Gone when it ends. Then, or with a broken GPU, it holds no task."""
        try:
            if judge.connection is None:
                judge.connection = self.start_forks().fork()
            judge.connection.send(order)
            answer, broken = judge.connection.recv()
            if broken:
                with self.changed:
                    judge.end()
            return answer
        except (EOFError, OSError, Gone) as error:
            with self.changed:
                judge.end()
            if self.closed:
                raise TaskError(CLOSED) from None
            raise Gone(f"{type(error).__name__} {error}") from None

    # ---- servers

    def start(self, module, jailed=True) -> Server:
        """A new server, which ends with the thread that starts it. Raises TaskError when the sandbox is closed."""
        with self.changed:
            if self.closed:
                raise TaskError(CLOSED)
            server = Server(module, self.settings, jailed)
            self.servers = [other for other in self.servers if other.process.poll() is None] + [server]
            return server

    def start_recorder(self):
        server = None
        try:
            server = self.start("judge.recorder")
        finally:
            self.recorders.put(server)

    def start_forks(self) -> Server:
        """The server that forks judges."""
        with self.changed:
            if self.forks is None or self.forks.process.poll() is not None:
                self.forks = self.start("judge.judgement", jailed=False)
                self.forks.connection.send(self.settings["secret"])
            return self.forks


def gpu_of(device) -> tuple:
    """(the file by which all processes of this user agree on who has this GPU, bytes of its memory that are free)."""
    import torch
    path = f"{tempfile.gettempdir()}/gpu-{os.getuid()}-{torch.cuda.get_device_properties(device).uuid}"
    return path, torch.cuda.mem_get_info(device)[0]

"""The trainer's side of the judge: passes each candidate to a recorder, and what comes back to a judge.

    submit(task, code)      a thread: `describe` the task (a judge loads it), `record` the candidate, ask the judge

A recorder has one candidate at a time. A judge has one too, and holds as many tasks as fit into memory (`choose`), for
all turns of their rollouts. One that ends is forked again: a candidate costs only itself. Nothing of a candidate is
parsed here; the size of its text is looked at, and no more.
"""

import contextlib
import os
import pickle
import queue
import shutil
import tempfile
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from judge.processes import Gone, Server
from judge.rules import MOST_BYTES
from judge.verdict import Failed, Verdict, set_failure
from tasks import TaskError, elements

MOST_VERDICTS = 10_000  # that are remembered
BYTES_PER_ELEMENT = 40  # of a task's inputs, parameters and outputs: an estimate of what loading it takes
GPU_SECONDS = 20  # that a judge may check, or time, a candidate, without waiting for the GPU
CLOSED = "the sandbox is closed"


@dataclass(eq=False)
class Judge:
    """A judge's process, as the trainer sees it."""

    connection: Connection | None = None
    loaded: dict = field(default_factory=dict)  # {source of a task that it holds: bytes of memory that it takes}
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
            self.capacity = free // 2
        self.closed = False
        self.changed = threading.Condition()  # guards what follows, and is notified when a judge becomes idle
        self.futures = {}  # {(source, code): Future of its Verdict}
        # By source: what a judge said of a task, bytes of memory that loading it may take, why it cannot be used
        self.tasks, self.estimates, self.unusable = {}, {}, {}
        # By source: how many candidates have a thread, how many wait for a judge, and the lock of the first of these
        self.begun, self.waiting, self.first = Counter(), Counter(), defaultdict(threading.Lock)
        self.judges = [Judge() for _ in range(settings["tasks" if self.on_gpu else "workers"])]
        self.servers, self.forks = [], None  # all servers; the one that forks judges
        self.recorders = queue.LifoQueue()  # idle ones; None: not started yet
        for _ in range(settings["workers"]):
            self.recorders.put(None)
        # Most threads wait, for a recorder or for the judge that holds their task.
        self.executor = ThreadPoolExecutor(512 if self.on_gpu else 2 * settings["workers"])
        for role in self.start_recorder, self.start_forks:  # they import torch before there is work
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
        self.futures[task.source, code] = future = self.executor.submit(self.verdict, task, code)
        return future

    def prepare(self, tasks):
        """See Sandbox.prepare."""
        with self.changed:
            self.unusable.clear()  # memory may have been short
            if self.on_gpu and not self.closed:
                for task in tasks:
                    self.executor.submit(self.load_if_it_fits, task)

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

    def verdict(self, task, code) -> Verdict:
        """The verdict on one candidate. Raises TaskError."""
        if len(code.encode(errors="surrogatepass")) > MOST_BYTES:
            return self.failed(code, f"the code is longer than {MOST_BYTES:,} bytes", "parse")
        with self.changed:
            self.begun[task.source] += 1
        try:
            recording = self.record(code, self.describe(task))
            return self.judged(task, code, recording)
        except Gone as error:
            return self.failed(code, f"the recorder failed on it ({error})")
        finally:
            with self.changed:
                self.begun[task.source] -= 1
                self.changed.notify_all()

    def judged(self, task, code, recording) -> Verdict:
        """What a judge says of a recording."""
        with self.judge_of(task) as judge:
            began = time.monotonic()
            try:
                verdict, broken = self.ask(judge, "judge", task.source, code, recording)
            except Gone:
                late = time.monotonic() - began >= self.settings["seconds"]
                return self.failed(code, f"no result within {self.settings['seconds']:g} s" if late else (
                    "the process ended without a result (crash, exit, memory limit or GPU error)"))
            if broken:
                judge.end()
            return verdict

    def failed(self, code, error, stage="forward") -> Verdict:
        verdict = Verdict(clock=self.settings["clock"])
        set_failure(verdict, code, Failed(error, stage))
        return verdict

    def describe(self, task) -> dict:
        """What a judge says of a task when it loads it. Raises TaskError."""
        if task.source not in self.tasks:
            self.estimate(task)
            with self.judge_of(task):
                pass
        return self.tasks[task.source]

    def estimate(self, task):
        """Note how much memory it may take to load a task."""
        if task.source not in self.estimates:
            count = elements(task.source, self.capacity) if self.on_gpu else 1 << 16
            self.estimates[task.source] = BYTES_PER_ELEMENT * count or self.capacity // 4

    def load_if_it_fits(self, task):
        """Have a judge load a task, unless others would have to be dropped for it."""
        self.estimate(task)
        if self.used() + self.estimates[task.source] <= self.capacity:
            with self.judge_of(task):
                pass

    def record(self, code, known) -> bytes:
        """What a recorder says of a candidate. If its server ends, once more with a new one. Raises Gone."""
        order = pickle.dumps((code, known["blueprint"], self.settings["clock"]))
        for is_last in False, True:
            server = self.recorders.get()
            try:
                server = server or self.start("judge.recorder")
                return server.ask(order, known["room"])
            except Gone:
                if server is not None:
                    server.close()
                server = None
                if is_last:
                    raise
            finally:
                self.recorders.put(server)

    # ---- judges

    @contextlib.contextmanager
    def judge_of(self, task):
        """A judge that holds this task, for one candidate. Raises TaskError."""
        with self.changed:
            self.waiting[task.source] += 1
            first = self.first[task.source]
        with first, self.changed:  # one a task: else hundreds of threads would wake up for each verdict
            self.changed.wait_for(lambda: self.closed or task.source in self.unusable or self.choose(task.source))
            judge = self.choose(task.source)
            self.waiting[task.source] -= 1
            if self.closed or task.source in self.unusable:
                raise TaskError(self.unusable.get(task.source, CLOSED))
            judge.busy, is_new = True, task.source not in judge.loaded
            judge.loaded.setdefault(task.source, self.estimates[task.source])
        try:
            if is_new:
                self.make_room(judge, task.source)
                self.load(judge, task)
            yield judge
        finally:
            with self.changed:
                judge.busy = False
                self.changed.notify_all()

    def choose(self, source):
        """The judge that is to hold a task now, or None: it has to wait. self.changed is held.

        With a GPU only one judge holds a task, without one another where several candidates wait for it. A task is
        loaded when it fits beside those that are needed.
        """
        holders = [judge for judge in self.judges if source in judge.loaded]
        idle = [judge for judge in holders if not judge.busy]
        if idle or holders and (self.on_gpu or self.waiting[source] < 2):
            return idle[0] if idle else None
        idle = [judge for judge in self.judges if not judge.busy]
        needed = self.used(self.is_needed)
        fits = needed + self.estimates[source] <= self.capacity or needed == 0
        return min(idle, key=lambda judge: len(judge.loaded)) if idle and fits else None

    def is_needed(self, judge, source) -> bool:
        """Must a judge keep a task now? With a GPU, as long as it has candidates: to load one takes a second."""
        return judge.busy or self.on_gpu and self.begun[source] > 0

    def used(self, counts=lambda judge, source: True) -> int:
        """Bytes of memory that loaded tasks take, or those for which counts(judge, source) is true."""
        total = 0
        with self.changed:
            for judge in self.judges:
                total += sum(size for source, size in judge.loaded.items() if counts(judge, source))
        return total

    def make_room(self, judge, source):
        """Have idle judges drop the tasks that were loaded first, until the new one of this judge fits."""
        with self.changed:
            used = self.used()
            for other in self.judges:
                for old in list(other.loaded) if other is judge or not other.busy else ():
                    if used > self.capacity and old != source and not (self.on_gpu and self.begun[old]):
                        used -= other.loaded.pop(old)
                        with contextlib.suppress(OSError):  # it has ended, which will be noticed when it is asked
                            other.connection.send(("drop", old))

    def load(self, judge, task):
        """Have a judge load a task. Raises TaskError."""
        try:
            known = self.ask(judge, "load", task.source, task.name)
        except Gone as error:
            known = {"unusable": f"{task.name}: the reference cannot be judged against ({error})"}
        with self.changed:
            if "unusable" in known:
                judge.loaded.pop(task.source, None)
                self.unusable[task.source] = known["unusable"]
                raise TaskError(known["unusable"])
            self.tasks[task.source] = known
            judge.loaded[task.source] = known["takes"]

    def ask(self, judge, *order):
        """A judge's answer to an order. Raises Gone when it ends, and it has no task then."""
        try:
            if judge.connection is None:
                judge.connection = self.start_forks().fork()
            judge.connection.send(order)
            return judge.connection.recv()
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
        with contextlib.suppress(queue.Empty):
            self.recorders.get_nowait()
            self.recorders.put(self.start("judge.recorder"))

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
    open(path, "a").close()
    return path, torch.cuda.mem_get_info(device)[0]

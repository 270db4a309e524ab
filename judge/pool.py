"""The trainer's side of the judge: threads that pass candidates on, from the queue to a recorder, and then to a judge.

A recorder thread takes candidates of tasks that a judge has described (their *blueprint*) to a jailed server, and
brings back recordings. A judge thread has one judge, a fork of the judges' server, that is loaded with one task at a
time; it loads tasks and takes recordings of them. A judge that dies is forked again: a candidate costs only itself.
"""

import contextlib
import shutil
import tempfile
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from judge.processes import NVCC_SECONDS, ROOM, Fork, Gone, Server, receive, send
from judge.rules import MOST_BYTES, has_extension
from judge.verdict import Failed, Verdict, describe, out_of_memory, set_failure, verdict_from_json
from tasks import Task, TaskError

MAX_VERDICTS = 10000  # that are remembered
STARTING = 120  # seconds that a server may take to start, on a busy machine
GPU_SECONDS = 30  # that a judge may take for one candidate, without waiting for the GPU
WITHOUT_GPU = "CUDA C++ (load_inline) cannot be judged without a GPU: write it in Triton, or use one"


@dataclass(eq=False)
class Job:
    """A candidate without a verdict or, without code, a task that is to be loaded."""

    task: Task
    code: str | None = None
    future: Future = field(default_factory=Future)
    recording: dict | None = None  # what the recorder has made of it
    extension: bool = False  # is it CUDA C++, which cannot be recorded?
    alone: bool = False  # is it judged once more, with the GPU's memory to itself?

    def wants_recording(self) -> bool:
        return self.code is not None and self.recording is None and not self.extension


@dataclass(eq=False)
class Judge:
    """What a judge thread has."""

    process: Fork | None = None
    source: str | None = None  # of the task that the process has loaded
    job: Job | None = None  # that it does, or did last

    def end(self):
        if self.process is not None:
            self.process.close()
        self.process = self.source = None


class GpuLock:
    """Many may share the GPU: to load tasks, check candidates, sample from the model. One alone times a candidate.

    A request for the GPU alone comes before later ones to share it, except while the model is sampling: judges, which
    would else wait until sampling ends, go on checking.
    """

    def __init__(self):
        self.changed = threading.Condition()
        self.holders = {}  # owner -> "share", "alone" or "sample"
        self.waiting = 0  # requests for the GPU alone

    def acquire(self, owner, how):
        """Wait for the GPU. What the owner has of it is released first, if it is something else."""
        with self.changed:
            if self.holders.get(owner) != how:
                self.release(owner)
                self.waiting += how == "alone"
                self.changed.wait_for(lambda: self.is_free(how))
                self.waiting -= how == "alone"
                self.holders[owner] = how
                self.changed.notify_all()

    def is_free(self, how) -> bool:
        held = self.holders.values()
        if how == "alone":
            return not held
        return "alone" not in held and ("sample" in held or self.waiting == 0)

    def release(self, owner):
        with self.changed:
            self.holders.pop(owner, None)
            self.changed.notify_all()

    @contextlib.contextmanager
    def shared_by_model(self):
        """See Sandbox.sampling."""
        owner = object()
        self.acquire(owner, "sample")
        try:
            yield
        finally:
            self.release(owner)


class Pool:
    """Queue, threads and processes. settings: sandbox.Settings as a dict, without any None."""

    JUDGE, RECORDER = "judge.judgement", "judge.recorder"

    def __init__(self, settings):
        self.settings = settings | {"scratch": tempfile.mkdtemp(prefix="sandbox-")}
        self.modelled = settings["clock"] == "modelled"
        self.on_gpu = settings["device"] != "cpu"
        self.gpu = GpuLock()
        self.closed = False
        self.starting = threading.Lock()
        self.changed = threading.Condition()  # guards what follows, and is notified when a job may begin
        self.waiting = []  # Jobs that no thread has
        self.futures, self.verdicts = {}, {}  # (source, code) -> Future, of candidates without a verdict and with one
        self.blueprints, self.unusable = {}, {}  # by source: what a recorder is given; why a task cannot be used
        self.idle, self.busy = [], []  # Judges; the least recently used of the idle ones comes first
        self.servers, self.recorders, self.judges = [], [], None  # all; those of recorders without work; the judges'
        judges = settings["workers" if self.modelled else "tasks"]
        roles = [self._record] * min(settings["workers"], 16) + [self._judge] * judges
        self.threads = [threading.Thread(target=role, daemon=True) for role in roles]
        for thread in self.threads:
            thread.start()

    def submit(self, pairs) -> list[Future]:
        """See Sandbox.submit. Raises TaskError when the sandbox is closed."""
        with self.changed:
            if self.closed:
                raise TaskError("the sandbox is closed")
            futures = [self._future(task, code) for task, code in pairs]
            self.changed.notify_all()
        return futures

    def _future(self, task, code) -> Future:
        key = task.source, code
        known = self.futures.get(key) or self.verdicts.get(key)
        if known is not None:
            return known
        job = Job(task, code, extension=has_extension(code[:MOST_BYTES]))
        job.future.set_running_or_notify_cancel()  # from now on it cannot be cancelled
        self.futures[key] = job.future
        if len(code.encode(errors="surrogatepass")) > MOST_BYTES:
            self._finish(job, self._failed(code, f"the code is longer than {MOST_BYTES:,} bytes", "parse"))
        elif self.modelled and job.extension:
            self._finish(job, self._failed(code, WITHOUT_GPU, "parse"))
        else:
            self.waiting.append(job)
        return job.future

    def prepare(self, tasks):
        """See Sandbox.prepare."""
        with self.changed:
            self.unusable.clear()  # memory may have been short
            self.waiting = [job for job in self.waiting if job.code is not None]  # without earlier preparations
            if not self.modelled and self.settings["tasks"] > 1:
                self.waiting += [Job(task) for task in list(dict.fromkeys(tasks))[:self.settings["tasks"]]]
            self.changed.notify_all()

    def close(self):
        """See Sandbox.close."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        with self.starting:  # nothing is started from now on
            for server in self.servers:  # a process that ends gives back the GPU
                server.close()
        for thread in self.threads:
            thread.join(20)
        for key in list(self.futures):
            self.futures.pop(key).set_exception(TaskError("the sandbox is closed"))
        shutil.rmtree(self.settings["scratch"], ignore_errors=True)

    def _start(self, module, **options) -> Server:
        """A new server, which ends with the thread that starts it. Raises Gone when the sandbox is closed."""
        with self.starting:
            if self.closed:
                raise Gone("the sandbox is closed")
            server = Server(module, self.settings, **options)
            self.servers = [other for other in self.servers if other.process.poll() is None] + [server]
            return server

    def _failed(self, code, error, stage="forward", line=None) -> Verdict:
        verdict = Verdict(clock=self.settings["clock"])
        set_failure(verdict, code, Failed(error, stage, line))
        return verdict

    def _finish(self, job, verdict=None, error=None):
        """A candidate has its verdict or, where it cannot be judged, an error."""
        key = job.task.source, job.code
        with self.changed:
            if self.closed:  # then its process has been killed
                return
            self.futures.pop(key, None)
            if verdict is not None:
                self.verdicts[key] = job.future
            if len(self.verdicts) > MAX_VERDICTS:
                del self.verdicts[next(iter(self.verdicts))]
            self.changed.notify_all()
        if error is not None:
            job.future.set_exception(error)
        else:
            job.future.set_result(verdict)

    def _put_back(self, job):
        with self.changed:
            self.waiting.append(job)
            self.changed.notify_all()

    # ---- the threads of recorders

    def _record(self):
        """Record one candidate after the other until the sandbox is closed."""
        if threading.current_thread() is self.threads[0]:  # it imports torch before there is work
            with contextlib.suppress(Gone, OSError):  # it is tried again when there is work
                self.recorders.append(self._start(self.RECORDER))
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.closed or self._recordable())
                if self.closed:
                    return
                job = self._recordable()[0]
                self.waiting.remove(job)
            answer = self._recording(job)
            if "failed" in answer:
                self._finish(job, self._failed(job.code, answer["error"], answer["failed"], answer.get("line")))
            else:
                job.recording = answer
                self._put_back(job)

    def _recordable(self) -> list:
        """Candidates that may be recorded now.

        Recordings that wait for a judge take memory. Where they are many, only those come that an idle judge waits for:
        it keeps its task until that has no more candidates (see _is_for).
        """
        jobs = [job for job in self.waiting if job.wants_recording() and job.task.source in self.blueprints]
        if sum(job.recording is not None for job in self.waiting) > 2 * self.settings["workers"]:
            loaded = {judge.source for judge in self.idle}
            return [job for job in jobs if job.task.source in loaded]
        return jobs

    def _recording(self, job):
        """What a recorder answers. If its server ends, once more with a new one."""
        order = {"code": job.code, "blueprint": self.blueprints[job.task.source], "clock": self.settings["clock"]}
        for fresh in False, True:
            server = None
            try:
                with self.changed:
                    server = self.recorders.pop() if self.recorders and not fresh else None
                server = server or self._start(self.RECORDER)
                send(server.sock, order)
                answer = receive(server.sock, time.monotonic() + self.settings["timeout"] + STARTING, ROOM)
                if not isinstance(answer, dict) or "failed" in answer and not (
                        isinstance(answer["failed"], str) and isinstance(answer.get("error"), str)):
                    raise Gone("an answer that makes no sense")
                self.recorders.append(server)
                return answer
            except (Gone, OSError) as error:
                why = f"the recorder failed on it ({error}: {server and server.last_line()})"
                if server is not None:
                    server.close()
        return {"failed": "forward", "error": why}

    # ---- the threads of judges

    def _judge(self):
        """Load tasks and judge recorded candidates until the sandbox is closed."""
        judge = Judge()
        with contextlib.suppress(Gone, OSError):  # it is tried again when there is work
            judge.process = self._fork()
        with self.changed:
            self.idle.append(judge)
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.closed or self._take(judge))
                self.idle.remove(judge)
                if self.closed:
                    return judge.end()
                self.busy.append(judge)
                self.changed.notify_all()  # another one may be the least recently used now
            self._do(judge, judge.job)
            with self.changed:
                self.busy.remove(judge)
                self.idle.append(judge)
                self.changed.notify_all()

    def _take(self, judge) -> bool:
        """Choose an idle judge's next job, preferably of the task that it has loaded. self.changed is held."""
        wanted = {source for source, _ in self.futures}
        unwanted = [other for other in self.idle if other.source not in wanted]
        jobs = [job for job in self.waiting if self._is_for(job, judge, unwanted)]
        if not jobs or any(other.job.alone for other in self.busy):
            return False
        judge.job = min(jobs, key=lambda job: (job.alone, job.code is None, job.task.source != judge.source))
        self.waiting.remove(judge.job)
        return True

    def _is_for(self, job, judge, unwanted) -> bool:
        """May this idle judge do a job now? One that has loaded its task or, where none has, the least recently used.

        unwanted: idle judges whose task has no candidates. No other judge drops its task: that would be for each
        candidate when those of several tasks are recorded in turn.
        """
        source, described = job.task.source, job.task.source in self.blueprints
        if job.wants_recording() and described or job.alone and self.busy:
            return False
        if any(other.job.task.source == source for other in self.busy) and not (self.modelled and described):
            return False
        free = [other for other in self.idle if other.source == source] or unwanted
        return judge in free[:1]

    def _do(self, judge, job):
        """Load the job's task and judge its candidate, if that has been recorded. Whatever fails is its result."""
        verdict = error = None
        try:
            for other in list(self.idle) if job.alone else []:  # none of them is given work meanwhile
                other.end()
            self._load(judge, job.task)
            if job.wants_recording():
                return self._put_back(job)
            if job.code is not None:
                verdict = self._verdict(judge, job)
        except TaskError as failure:
            error = failure
        except Exception as failure:  # such as RecursionError for a recording that is nested too deeply
            verdict = self._failed(job.code or "", f"the judge failed on it ({describe(failure)[0]})")
        short = isinstance(error, TaskError) or out_of_memory(verdict and verdict.error or "")
        if short and self.on_gpu and not job.alone:  # CUDA does not always name what a task lacks
            judge.end()
            job.alone = True
            return self._put_back(job)
        if isinstance(error, TaskError):
            self.unusable[job.task.source] = str(error)
        self._finish(job, verdict, error)

    def _load(self, judge, task):
        """Have the judge loaded with this task, in a new process unless it is so already. Raises TaskError or Gone."""
        if judge.source == task.source:
            return
        if task.source in self.unusable:
            raise TaskError(self.unusable[task.source])
        if judge.process is None or judge.source is not None and not self.on_gpu:  # there, to start one takes a second
            judge.end()
            judge.process = self._fork()
        order = {"load": {"name": task.name, "source": task.source}}
        answer = self._ask(judge, order, 3 * self.settings["timeout"] + STARTING)
        if "blueprint" not in answer:
            judge.end()
            why = answer.get("unusable", f"{task.name}: the reference cannot be judged against: {answer.get('died')}")
            raise TaskError(why)
        judge.source = task.source
        self.blueprints.setdefault(task.source, answer["blueprint"])

    def _verdict(self, judge, job) -> Verdict:
        """Have a candidate judged."""
        seconds = GPU_SECONDS if self.on_gpu else self.settings["timeout"] + 30  # the judge's own limit is shorter
        if job.extension:
            seconds += self.settings["timeout"] + NVCC_SECONDS
        answer = self._ask(judge, {"judge": job.code, "recording": job.recording}, seconds)
        if "died" in answer:
            return self._failed(job.code, answer["died"])
        if answer["broken"]:
            judge.end()
        return verdict_from_json(answer["verdict"])

    def _ask(self, judge, order, seconds) -> dict:
        """A judge's answer to an order or, when it ends or is silent for so long, {"died": why}; it is ended then.

        It may ask for the GPU meanwhile; waiting for that does not count.
        """
        sock, deadline, answer = judge.process.sock, time.monotonic() + seconds, {}
        try:
            send(sock, order)
            while "gpu" in (answer := receive(sock, deadline)):
                began = time.monotonic()
                self.gpu.acquire(judge, answer["gpu"])
                deadline += time.monotonic() - began
                send(sock, {"granted": True})
            return answer
        except TimeoutError:
            answer = {"died": f"no result within {seconds:g} s"}
        except (Gone, OSError):
            answer = {"died": "the process ended without a result (crash, exit, memory limit or GPU error)"}
        finally:
            if "died" in answer:  # before another one is timed beside it
                judge.end()
            self.gpu.release(judge)
        return answer

    def _fork(self) -> Fork:
        """A new judge, from a new server if none is running. Raises Gone."""
        with self.changed:
            if self.judges is None or self.judges.process.poll() is not None:
                environment = {}
                self.judges = self._start(self.JUDGE, jailed=False, **environment)
                self.judges.sock.send(self.settings["secret"].encode())
        return self.judges.fork()

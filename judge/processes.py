"""Processes that can be trusted with nothing: how they are started, spoken to, confined and ended.

A fresh Python with torch and triton takes seconds to start, a fork milliseconds. So one *warm parent* imports
everything (CUDA stays untouched: a process that has used it cannot be forked) and forks every other process on
request. Between the warm parent and each process stands a *keeper*, which ends the process with all that it has
started as soon as it returns, or as soon as the other end of its socket is closed. Closing a socket is the only way to
kill, and it always works: also when the closing is done by the kernel because the owner was killed.

    caller -- warm parent -- keeper -- process          one socket pair from each process to whoever asked for it

What a process in the role of a candidate is kept from, and where:

    everywhere            its own process group and scratch folder (removed with it), closed file descriptors, no
                          output streams, an environment without secrets; limits on CPU seconds, file size and open
                          files; descendants that leave the process group are found and killed
    with a GPU            its resident memory and the number of its processes are watched
    without a GPU         a limit on its address space; a system call filter: no new processes or programs, no
                          sockets, no access to other processes (x86-64 and arm64)
    as root, or where     without a GPU: process, network and IPC namespaces, and a file system that is read-only but
    user namespaces are   for a scratch folder in memory: it sees no other process and leaves nothing in /tmp or
    permitted             /dev/shm; with a GPU only the network is cut (compilers must run, GPU memory be shared),
                          and what it leaves in those two is removed after it (only as root)
Not prevented: reading files that this user can read, exhausting the GPU's memory, attacks on the kernel or the driver.
"""

import contextlib
import ctypes
import gc
import glob
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
import time
import traceback
from pathlib import Path

import torch

from judge.rules import FORBIDDEN

# ---------------------------------------------------------------------------------------------------------------------
# Messages: JSON beside raw tensor bytes, because unpickling runs code

TORCH_NAMES = {str(getattr(torch, name)): getattr(torch, name) for name in dir(torch)
               if isinstance(getattr(torch, name), (torch.dtype, torch.layout, torch.memory_format))}


class Gone(Exception):
    """The other process has ended, or sent what is no message."""


class Orphaned(Exception):
    """The warm parent has ended: no more processes can be had from it."""


def encode(value, tensor, other=None):
    """JSON for nested lists, tuples, dicts, numbers, strings, dtypes, and tensors through the function `tensor`.

    `other` may turn a value of any other type into a {kind: content} dict. Raises TypeError for what remains.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, torch.Tensor):
        return {"tensor": tensor(value)}
    if isinstance(value, list):
        return [encode(item, tensor, other) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item, tensor, other) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, tensor, other), encode(item, tensor, other)] for key, item in value.items()]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return {"torch": str(value)}
    found = other(value) if other is not None else None
    if found is None:
        raise TypeError(f"a {type(value).__name__} cannot be passed on")
    return found


def decode(value, tensor, other=None):
    """The inverse of `encode`; raises ValueError, KeyError or TypeError on what is not its output."""
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
    if kind == "device":
        return torch.device(content)
    if kind == "torch":
        return TORCH_NAMES[content]
    if other is None:
        raise ValueError(f"unknown kind {kind}")
    return other(kind, content)


def dense(tensor):
    """The bytes from a tensor's first to its last element, as a uint8 tensor on its device."""
    span = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride())) + 1 if tensor.numel() else 0
    start = tensor.storage_offset() * tensor.element_size()
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.detach().untyped_storage())
    return raw[start:start + span * tensor.element_size()]


def strided(raw, dtype, shape, stride):
    """The tensor that `dense` took apart. Raises ValueError if it would not fit into the bytes."""
    span = sum((n - 1) * s for n, s in zip(shape, stride)) + 1 if all(shape) else 0
    if min([0, *shape, *stride]) < 0 or span * dtype.itemsize > raw.numel():
        raise ValueError("the tensor does not fit its bytes")
    return torch.empty(0, dtype=dtype, device=raw.device).set_(
        raw.untyped_storage(), raw.storage_offset() // dtype.itemsize, shape, stride)


def send(sock, tree):
    """Send nested lists, dicts, numbers, strings and tensors. Strides are kept, shared memory and devices are not."""
    chunks, total = [], 0

    def add(tensor):
        nonlocal total
        chunks.append(dense(tensor).cpu().numpy().data)
        total += chunks[-1].nbytes
        return [total - chunks[-1].nbytes, total, str(tensor.dtype), list(tensor.shape), list(tensor.stride())]

    header = json.dumps(encode(tree, add)).encode()
    sock.settimeout(None)
    sock.sendall(struct.pack("<QQ", len(header), total) + header)
    for chunk in chunks:
        sock.sendall(chunk)


def receive(sock, deadline=None, limit=1 << 36):
    """The next message. Raises Gone, or TimeoutError once time.monotonic() passes `deadline`."""
    def read(count):
        buffer = bytearray(count)
        view = memoryview(buffer)
        while view.nbytes:
            sock.settimeout(None if deadline is None else max(deadline - time.monotonic(), 1e-6))
            got = sock.recv_into(view)
            if got == 0:
                raise Gone
            view = view[got:]
        return buffer

    def tensor(meta):
        start, end, dtype, shape, stride = meta
        return strided(payload[start:end].clone(), TORCH_NAMES[dtype], shape, stride)

    try:
        header, total = struct.unpack("<QQ", read(16))
        if header + total > limit:
            raise Gone
        tree = json.loads(read(header).decode())
        payload = torch.frombuffer(read(total), dtype=torch.uint8) if total else torch.empty(0, dtype=torch.uint8)
        return decode(tree, tensor)
    except TimeoutError:
        raise
    except (OSError, ValueError, KeyError, TypeError, IndexError, RuntimeError, MemoryError, RecursionError):
        raise Gone from None


def watch(sock, seconds):
    """Wait for a message without going to sleep, at most `seconds`: to wake up can take longer than a kernel runs."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not select.select([sock], [], [], 0)[0]:
        pass


class Child:
    """A process forked by the warm parent to play `role`. Closing the connection kills it and all that it started.

    Raises Orphaned when there is no warm parent any more.
    """

    def __init__(self, warm, role):
        self.sock, there = socket.socketpair()
        self.life, token = os.pipe()  # the keeper holds the other end until nothing of the process is left
        try:
            socket.send_fds(warm, [role.encode()], [there.fileno(), token])
        except OSError:
            self.close()
            raise Orphaned from None
        finally:
            there.close()
            os.close(token)

    def ask(self, tree, deadline=None):
        """Send a message and wait for the answer. Raises Gone or TimeoutError."""
        try:
            send(self.sock, tree)
        except OSError:
            raise Gone from None
        return receive(self.sock, deadline)

    def start_and_stop(self, deadline):
        """Seconds between the starting signal and the process's own: one byte each way. Raises Gone or TimeoutError."""
        try:
            began = time.perf_counter()
            self.sock.send(b"!")
            watch(self.sock, 1.0)
            if not select.select([self.sock], [], [], max(deadline - time.monotonic(), 0.0))[0]:
                raise TimeoutError
            seconds = time.perf_counter() - began
            if not self.sock.recv(1):
                raise Gone
        except TimeoutError:
            raise
        except OSError:
            raise Gone from None
        return seconds

    def close(self, wait=False):
        """Have the process killed; with `wait`, return only when it and all its descendants are gone."""
        if self.life is not None:
            self.sock.close()
            if wait:
                select.select([self.life], [], [], 20)
            os.close(self.life)
            self.life = None


# ---------------------------------------------------------------------------------------------------------------------
# Memory of a GPU that many processes use

LEFT = 128 << 20  # bytes that PyTorch may keep for later in each of them
BLANK = 256 << 20  # bytes; to overwrite so many leaves nothing else in any L2 cache


def spare_memory():
    """Have PyTorch give back what it keeps for later in this process, if that is much: others need it.

    Not else, as to free and to allocate memory makes the processes of a GPU wait for each other.
    """
    if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > LEFT:
        torch.cuda.empty_cache()


def overwrite(memory) -> float:
    """Take the GPU over from other processes, which takes longer than many a kernel, and overwrite `memory`.

    Returns the seconds of the latter.
    """
    synchronize = torch.cuda.synchronize if memory.is_cuda else lambda: None
    memory[:1].zero_()
    synchronize()
    began = time.perf_counter()
    memory.zero_()
    synchronize()
    return time.perf_counter() - began


ALIGN = 512  # bytes; what cudaMalloc guarantees, so that shared tensors are as well aligned as a model's own


def plan(tensors):
    """Where each tensor lies in an arena: ([(start, end, dtype, shape, stride)], total bytes)."""
    places, total = [], 0
    for tensor in tensors:
        size = dense(tensor).numel()
        places.append([total, total + size, str(tensor.dtype), list(tensor.shape), list(tensor.stride())])
        total += -(-size // ALIGN) * ALIGN
    return places, total


def views(raw, places):
    """The tensors of a plan in an arena's bytes."""
    return [strided(raw[start:end], TORCH_NAMES[dtype], shape, stride) for start, end, dtype, shape, stride in places]


def export(raw):
    """A handle to a CUDA byte tensor that another process can open, as JSON; None where CUDA IPC does not work."""
    try:
        return [part.hex() if isinstance(part, bytes) else part for part in raw.untyped_storage()._share_cuda_()]
    except RuntimeError:
        return None


def attach(handle):
    """The bytes behind a handle from another process. Raises RuntimeError where that is not possible."""
    device, memory, size, offset, counter, position, event, sync = handle
    storage = torch.UntypedStorage._new_shared_cuda(device, bytes.fromhex(memory), size, offset, bytes.fromhex(counter),
                                                    position, bytes.fromhex(event), sync)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


# ---------------------------------------------------------------------------------------------------------------------
# The warm parent

ROOT = Path(__file__).absolute().parent.parent


def start(program, settings):
    """Run `python program... --warm-parent` in an environment without secrets. Returns (its socket, its process).

    settings must hold "scratch", a folder for every process of this warm parent, and "device". Raises RuntimeError when
    the warm parent does not come up.
    """
    control, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    keep = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "PYTHONPATH",
            "VIRTUAL_ENV", "CC", "CXX")
    environment = {name: os.environ[name] for name in keep if name in os.environ}
    environment.update(HOME=settings["scratch"], OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TRITON_DEFAULT_FP_FUSION="1",
                       PYTORCH_NVML_BASED_CUDA_CHECK="1",  # asking whether there is a GPU must not start CUDA
                       CUDA_DEVICE_MAX_CONNECTIONS="2",  # on an H200 CUDA starts and ends in 0.26 s, by default in 0.32
                       NVCC_APPEND_FLAGS="--default-stream per-thread")  # an extension's kernels, see worker.PER_THREAD
    with there, open(os.path.join(settings["scratch"], "warm.log"), "wb+") as log:
        process = subprocess.Popen(
            [sys.executable, *program, "--warm-parent", str(there.fileno()), json.dumps(settings)], env=environment,
            pass_fds=[there.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log,
            start_new_session=True, cwd=ROOT)  # so that `-m judge.scorer` is found
        there.close()
        if control.recv(16) != b"ready":
            log.seek(0)
            raise RuntimeError("the sandbox does not start: " + log.read().decode(errors="replace")[-500:])
    return control, process


def warm_parent(control, settings, roles):
    """Fork one keeper for each request until the caller closes its end. roles: {name: function(sock, warm, settings)}.

    The role "scorer" may itself ask for processes, through the socket that it is given as `warm`; others get None.
    """
    torch.set_num_threads(1)
    settings["isolation"] = ways_to_isolate(settings["device"])
    gc.collect()
    gc.freeze()  # or the first collection in each fork would copy every page
    bell, rope = socket.socketpair()  # is rung when a child has ended
    rope.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(rope.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's business; it closes the socket
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what a killed keeper leaves behind comes here
    requests, for_scorers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.send(b"ready")
    keepers = set()
    while True:
        for sock in select.select([control, requests, bell], [], [])[0]:
            if sock is bell:
                bell.recv(4096)
                bury(keepers, settings)
                continue
            data, descriptors, _, _ = socket.recv_fds(sock, 256, 2)
            if not data:
                deadline = time.monotonic() + 5
                while keepers and time.monotonic() < deadline:  # they clear up
                    time.sleep(0.02)
                    bury(keepers, settings)
                remove(settings["scratch"])
                return
            role, keeper_id = data.decode(), os.fork()
            keepers.add(keeper_id)
            if keeper_id == 0:
                if sock is control or role != "scorer":
                    warm = for_scorers if role == "scorer" else None
                    keeper(socket.socket(fileno=descriptors[0]), role, roles[role], warm, settings)
                os._exit(0)
            for descriptor in descriptors:
                os.close(descriptor)


# ---------------------------------------------------------------------------------------------------------------------
# Keepers, and what they confine

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18


def keeper(sock, role, play, warm, settings):
    """Fork the process that plays the role; kill it when it ends or the peer hangs up, with all its descendants."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of the process become children of this one
    hostile = role == "candidate"
    scratch = tempfile.mkdtemp(prefix=f"tmp{os.getpid()}-", dir=settings["scratch"])
    if hostile and settings["isolation"] is not None:
        isolate(settings["device"], settings["isolation"])
    child = os.fork()
    if child == 0:
        try:
            os.setpgid(0, 0)
            if hostile and settings["device"] != "cpu":
                with contextlib.suppress(OSError):  # only root may
                    os.setgid(GROUPS + os.getppid())
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # after setgid, which would take it back
            confine(sock, role, warm, scratch, settings)
            play(sock, warm, settings)
        except (Gone, OSError, KeyboardInterrupt):
            pass
        except BaseException:
            if role == "scorer":  # a mistake of ours, or a broken GPU: worth a trace
                with open(os.path.join(settings["scratch"], "scorer.log"), "a") as log:
                    traceback.print_exc(file=log)
        finally:
            os._exit(0)
    if warm is not None:
        warm.close()
    waiter = select.poll()
    waiter.register(sock, 0)  # POLLHUP is reported without asking: the peer has closed its end
    waiter.register(os.pidfd_open(child), select.POLLIN)
    if settings["device"] == "cpu" or not hostile:
        waiter.poll()
    while not waiter.poll(50):  # with a GPU neither address space nor forks can be limited, so both are watched
        resident = int(Path(f"/proc/{child}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        if resident > settings["memory"] or crowd(child) > CROWD:
            break
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        pass
    while True:  # the end of a process namespace kills all in it; without one, what left the group is an orphan here
        for orphan in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            os.kill(int(orphan), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            break
    for left in [*glob.glob(f"/dev/shm/torch_{child}_*"), *glob.glob(f"/dev/shm/cuda.shm.*.{child:x}.*")]:
        os.unlink(left)  # what PyTorch and the driver shared with others
    remove(scratch)
    if hostile and settings["device"] != "cpu":
        clear_away(os.getpid())
    sock.close()


GROUPS = 1 << 30  # plus its keeper's process id: the group under which a candidate runs on a GPU


def remove(folder):
    """Remove a folder with all that is in it, as far as that is possible."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:  # somebody has nested a thousand folders
        subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL)


def clear_away(keeper_id):
    """Remove what a keeper's process has left where everybody may write."""
    for place in ("/dev/shm", "/tmp"):
        for entry in os.scandir(place) if os.path.isdir(place) else ():
            with contextlib.suppress(OSError):
                if entry.stat(follow_symlinks=False).st_gid == GROUPS + keeper_id:
                    remove(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)


def bury(keepers, settings):
    """Reap what has ended. A candidate on a GPU can kill its keeper: then end its orphans, and clear up after them.

    keepers: process ids of all keepers, and of those who clear up for them; the ended ones are taken out.
    """
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] in keepers and os.WIFSIGNALED(ended[1]):
                deputy = os.fork()
                if deputy == 0:
                    try:
                        time.sleep(0.5)  # until the orphans are dead
                        for folder in glob.glob(f"{settings['scratch']}/tmp{ended[0]}-*"):
                            remove(folder)
                        clear_away(ended[0])
                    finally:
                        os._exit(0)
                keepers.add(deputy)
            keepers.discard(ended[0])
    children = {int(child) for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}
    for orphan in children - keepers:  # its end rings the bell again
        with contextlib.suppress(ProcessLookupError):
            os.kill(orphan, signal.SIGKILL)


CROWD = 64  # processes that a candidate may start on a GPU, compilers in the main


def crowd(process):
    """How many descendants a process has; not counted beyond CROWD."""
    found, waiting = 0, [str(process)]
    while waiting and found <= CROWD:
        parent = waiting.pop()
        for thread in glob.glob(f"/proc/{parent}/task/*/children"):
            try:
                children = Path(thread).read_text().split()
            except OSError:
                continue  # it has ended
            found += len(children)
            waiting += children
    return found


def isolate(device, user):
    """Give this process's future children namespaces of their own. Raises OSError where that is not permitted.

    user: take a user namespace as well, which an ordinary user needs for the others.
    """
    wanted = (NEWNET if device != "cpu" else NEWPID | NEWNET | NEWIPC) | (NEWUSER if user else 0)
    ids = os.getuid(), os.getgid()
    if LIBC.unshare(wanted):
        raise PermissionError
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        for name, number in zip(("uid_map", "gid_map"), ids):
            Path(f"/proc/self/{name}").write_text(f"{number} {number} 1")


def ways_to_isolate(device):
    """The argument `user` with which `isolate` works here, or None. Tried in processes of their own."""
    for user in (False, True):
        child = os.fork()
        if child == 0:
            try:
                isolate(device, user)
                inner = os.fork()
                if inner == 0:
                    torch.zeros(1, device=device)  # a GPU must still be usable
                    os._exit(0)
                os._exit(os.waitpid(inner, 0)[1] != 0)
            finally:
                os._exit(1)
        if os.waitpid(child, 0)[1] == 0:
            return user
    return None


def read_only_except(scratch):
    """In a mount namespace of its own: all file systems read-only, but `scratch` and /dev/shm, which are in memory."""
    def mount(source, target, kind, flags, options=None):
        return LIBC.mount(*(text and text.encode() for text in (source, target, kind)), flags, options)

    if LIBC.unshare(NEWNS) or mount(None, "/", None, MS_REC | MS_PRIVATE):
        return
    mount("proc", "/proc", "proc", 0)
    for folder in (scratch, "/dev/shm"):
        mount("tmpfs", folder, "tmpfs", 0, b"size=256m")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        point = line.split()[1].encode().decode("unicode_escape")
        if point != scratch and not point.startswith(("/dev/", "/proc/")):
            locked = os.statvfs(point).f_flag & (os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC)  # may not be dropped
            mount(None, point, None, MS_REMOUNT | MS_BIND | MS_RDONLY | locked)


def filter_system_calls():
    """Refuse FORBIDDEN, and clone except for threads, in this process and for good. Returns whether that worked.

    The filter is a program of (code, jump if true, jump if false, value), jumps counting from the next instruction.
    """
    if os.uname().machine not in FORBIDDEN:
        return False
    architecture, clone, numbers = FORBIDDEN[os.uname().machine]
    load, equal, above, bits, answer = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF: load word, jump if ==, >=, &; return
    allow, refuse, unknown = 0x7FFF0000, 0x50000 | 1, 0x50000 | 38  # EPERM; ENOSYS makes libc fall back to clone
    rules = [(load, 0, 0, 4), (equal, 1, 0, architecture), (answer, 0, 0, refuse), (load, 0, 0, 0),
             (above, 0, 1, 0x40000000), (answer, 0, 0, refuse), (equal, 0, 1, 435), (answer, 0, 0, unknown)]
    for number in numbers:
        rules += [(equal, 0, 1, number), (answer, 0, 0, refuse)]
    rules += [(equal, 0, 3, clone), (load, 0, 0, 16), (bits, 1, 0, 0x10000), (answer, 0, 0, refuse),
              (answer, 0, 0, allow)]  # 0x10000: CLONE_THREAD, in the first argument
    code = b"".join(struct.pack("HBBI", *rule) for rule in rules)
    buffer = ctypes.create_string_buffer(code)
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(rules), ctypes.addressof(buffer)))
    LIBC.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, which an ordinary user needs for the next
    return LIBC.prctl(22, 2, ctypes.c_void_p(ctypes.addressof(program)), 0, 0) == 0  # PR_SET_SECCOMP, filter


def confine(sock, role, warm, scratch, settings):
    """Surroundings and limits of a process before it plays its role."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    last = 3
    for descriptor in sorted({sock.fileno()} | ({warm.fileno()} if warm is not None else set())):
        os.closerange(last, descriptor)
        last = descriptor + 1
    os.closerange(last, 65536)
    if role == "candidate" and settings["device"] == "cpu" and settings["isolation"] is not None:
        read_only_except(scratch)
    os.chdir(scratch)
    folders = {"HOME": "", "TMPDIR": "", "TRITON_CACHE_DIR": "triton", "TORCH_EXTENSIONS_DIR": "extensions"}
    for name, folder in folders.items():
        os.environ[name] = os.path.join(scratch, folder)
    tempfile.tempdir = None
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if role not in ("scorer", "reference"):
        seconds = int(settings["timeout"] * 2) + 5
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 28, 1 << 28))
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    if settings["device"] == "cpu":  # CUDA reserves more address space than there is memory
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        limit = used + settings["memory"] * (4 if role in ("scorer", "reference") else 1)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        if role == "candidate":
            filter_system_calls()

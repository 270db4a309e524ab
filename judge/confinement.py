"""What a process is kept from: namespaces, a read-only file system, a filter of system calls, limits.

`confine` is called in each process before it plays its role, `isolate` in the supervisor of a candidate before the
candidate is forked. processes.py lists which of these apply where.
"""

import ctypes
import os
import resource
import struct
import tempfile
from pathlib import Path

import torch

from judge.rules import FORBIDDEN

LIBC = ctypes.CDLL(None, use_errno=True)
NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, FILTER = 22, 38, 2


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
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # without it an ordinary user may not set a filter
    return LIBC.prctl(PR_SET_SECCOMP, FILTER, ctypes.c_void_p(ctypes.addressof(program)), 0, 0) == 0


def confine(sock, role, asks, scratch, settings):
    """Surroundings and limits of a process before it plays its role.

    It keeps no descriptors but those of `sock` and `asks` (its socket to the fork server, or None).
    """
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    last = 3
    for descriptor in sorted(one.fileno() for one in (sock, asks) if one is not None):
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

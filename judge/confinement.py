"""What a process is kept from: namespaces, a read-only file system, limits.

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

LIBC = ctypes.CDLL(None, use_errno=True)
HOSTILE = {"candidate", "compiler", "replayer", "extension"}  # roles that hold a candidate's code, or its kernels'
NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 1 << 17, 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 2, 4, 16384, 1 << 18
MOUNT_SETATTR = 442  # the number of a system call, the same on all machines
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 24, 38
DAC_OVERRIDE = 1 << 1  # the capability to read what another user owns


def has_gpu(role, settings) -> bool:
    """Is a role played with a GPU in reach, or with what only goes with one: a compiler that starts others?"""
    return settings["device"] != "cpu" and role != "candidate"


def demand(answer):
    """What a function of libc answers. Raises OSError where it failed: nothing goes on half confined."""
    if answer < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return answer


def isolate(device, user):
    """Give this process's future children namespaces of their own. Raises OSError where that is not permitted.

    user: take a user namespace as well, which an ordinary user needs for the others.
    """
    wanted = NEWNET | NEWUTS | (NEWPID | NEWIPC if device == "cpu" else 0) | (NEWUSER if user else 0)
    ids = os.getuid(), os.getgid()
    demand(LIBC.unshare(wanted))
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        for name, number in zip(("uid_map", "gid_map"), ids):
            Path(f"/proc/self/{name}").write_text(f"{number} {number} 1")


def ways_to_isolate(device, scratch):
    """(the argument `user` with which `isolate` works here, does `read_only_except` work), or None without namespaces.

    Tried in processes of their own, the strictest way first.
    """
    for mounts, user in [(True, False), (True, True)] * (device == "cpu") + [(False, False), (False, True)]:
        child = os.fork()
        if child == 0:
            try:
                isolate(device, user)
                inner = os.fork()
                if inner == 0:
                    if mounts:
                        read_only_except(scratch)
                    torch.zeros(1, device=device)  # a GPU must still be usable
                    os._exit(0)
                os._exit(os.waitpid(inner, 0)[1] != 0)
            finally:
                os._exit(1)
        if os.waitpid(child, 0)[1] == 0:
            return user, mounts
    return None


def read_only_except(scratch):
    """In a mount namespace of its own: all file systems read-only and without devices, and new ones in memory on
    `scratch` and /dev/shm. Raises OSError where that cannot be had (Linux 5.12).
    """
    def mount(source, target, kind, flags, options=None):
        demand(LIBC.mount(*(text and text.encode() for text in (source, target, kind)), flags, options))

    demand(LIBC.unshare(NEWNS))
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV)
    attributes = struct.pack("QQQQ", 1 | 2 | 4, 0, 0, 0)  # read-only, nosuid, nodev; the mounts below as well (0x8000)
    demand(LIBC.syscall(MOUNT_SETATTR, -100, b"/", 0x8000, attributes, len(attributes)))
    for folder in (scratch, "/dev/shm"):
        mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, b"size=256m")


def drop_privileges(kept=0):
    """No capability but those of the mask `kept`, in this process and for good: not by running a program either."""
    for number in range(64):
        LIBC.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)  # an ordinary user may not, and no_new_privs is as good
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kept &= int(status["CapPrm"], 16)
    demand(LIBC.capset(struct.pack("Ii", 0x20080522, 0), struct.pack("6I", kept, kept, 0, 0, 0, 0)))
    demand(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def confine(sock, role, asks, scratch, settings):
    """Surroundings and limits of a process before it plays its role.

    It keeps no descriptors but those of `sock` and `asks` (its socket to the fork server, or None).
    """
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    kept = sorted(one.fileno() for one in (sock, asks) if one is not None)
    for last, following in zip([2, *kept], [*kept, 65536]):
        os.closerange(last + 1, following)
    without_gpu, hostile = not has_gpu(role, settings), role in HOSTILE
    isolation = settings["isolation"][not without_gpu]
    if hostile and without_gpu and isolation is not None and isolation[1]:
        read_only_except(scratch)
    os.chdir(scratch)
    compiled = scratch if without_gpu or role == "extension" else settings["scratch"]  # who compiles does not launch
    os.environ.update(HOME=scratch, TMPDIR=scratch, TRITON_CACHE_DIR=os.path.join(compiled, "triton"),
                      TORCH_EXTENSIONS_DIR=os.path.join(scratch, "extensions"))
    tempfile.tempdir = None
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    trusted = role == "scorer" or role == "replayer" and settings["clock"] == "measured"  # it serves many candidates
    if not trusted:
        seconds = int(settings["timeout"] * 2) + 5
        for kind, limit in ("CPU", seconds), ("FSIZE", 1 << 28), ("NOFILE", 1024):
            resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (limit, limit))
    if without_gpu:  # CUDA reserves more address space than there is memory
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        limit = used + settings["memory"] * (4 if trusted else 1)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    if hostile:
        drop_privileges(0 if without_gpu else DAC_OVERRIDE)  # compilers read what may belong to another user

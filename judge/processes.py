"""How processes that are not trusted are started and ended. (messages.py: how they are spoken to.)

A fresh Python with torch and triton takes seconds to start, a fork milliseconds. So one *fork server* imports
everything (CUDA stays untouched: a process that has used it cannot be forked) and forks every other process on
request. Between the fork server and each process stands a *supervisor*, which ends the process with all that it has
started as soon as it returns, or as soon as the other end of its socket is closed. Closing a socket is the only way to
kill, and it always works: also when the closing is done by the kernel because the owner was killed.

    caller -- fork server -- supervisor -- process      one socket pair from each process to the one that asked for it

What a process is kept from that holds a candidate's code or the kernels of that code (confinement.HOSTILE), and where.
A candidate's Python never has a GPU; who compiles its kernels, who replays them, and a CUDA extension may have one.

    everywhere            its own process group and scratch folder (removed with it), closed file descriptors, no
                          output streams, an environment without secrets; limits on CPU seconds, file size and open
                          files; descendants that leave the process group are found and killed; no capability of
                          root's and no way to get one; its resident memory and its descendants are watched
    with a GPU            at most 64 descendants (compilers); of root's capabilities it keeps the one to read any file
    without a GPU         at most 8 descendants (a process with more is killed within a twentieth of a second); a limit
                          on its address space
    as root, or where     without a GPU: process, network, host name and IPC namespaces, and (Linux 5.12) a file system
    user namespaces are   that is read-only and without devices except for a scratch folder in memory: it sees no other
    permitted             process and leaves nothing in /tmp or /dev/shm; with a GPU only network and host name are cut
                          (compilers must run, GPU memory be shared)

A part that is there but fails ends the process. Not prevented: reading files that this user can read, exhausting memory
by files that have no name, or the GPU's memory, slowing others down, attacks on the kernel or the driver; with a GPU,
and where there are no namespaces, also writing what this user can write, say into /tmp, and signals; where there are no
namespaces, the network.
"""

import contextlib
import gc
import glob
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

from judge.confinement import HOSTILE, LIBC, confine, has_gpu, isolate, ways_to_isolate
from judge.messages import Gone
from program.files import ROOT

INHERITED = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES",
             "PYTHONPATH", "VIRTUAL_ENV", "CC", "CXX")  # variables of the environment; none holds a secret
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
MAX_PROCESSES = 8, 64  # descendants that a process may have without a GPU, and with one (compilers)

# ---------------------------------------------------------------------------------------------------------------------
# The fork server


def start(settings):
    """Run `python -m judge.scorer --fork-server` in an environment without secrets. Returns (its socket, its process).

    settings must hold "scratch", a folder for every process of this fork server, and "device". Raises RuntimeError when
    the fork server does not come up.
    """
    control, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
    environment.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TRITON_DEFAULT_FP_FUSION",
                                      "TRITON_STORE_BINARY_ONLY"), "1"), HOME=settings["scratch"],
                       PYTORCH_NVML_BASED_CUDA_CHECK="1",  # asking whether there is a GPU must not start CUDA
                       CUDA_DEVICE_MAX_CONNECTIONS="2",  # on an H200 CUDA starts and ends in 0.26 s, by default in 0.32
                       NVCC_APPEND_FLAGS="--default-stream per-thread")  # an extension's kernels, replayer.PER_THREAD
    with there, open(os.path.join(settings["scratch"], "fork_server.log"), "wb+") as log:
        command = [sys.executable, "-m", "judge.scorer", "--fork-server", str(there.fileno()), json.dumps(settings)]
        process = subprocess.Popen(command, env=environment, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL,
                                   stdout=subprocess.DEVNULL, stderr=log, start_new_session=True, cwd=ROOT)
        there.close()
        if control.recv(16) != b"ready":
            log.seek(0)
            raise RuntimeError("the sandbox does not start: " + log.read().decode(errors="replace")[-500:])
    return control, process


def fork_server(control, settings, roles):
    """Fork one supervisor for each request until the caller closes its end.

    roles: {name: function(sock, fork_server, settings)}. The role "scorer" may itself ask for processes, through the
    socket that it is given as `fork_server`; others get None.
    """
    torch.set_num_threads(1)
    settings["isolation"] = [ways_to_isolate(device, settings["scratch"]) for device in ("cpu", settings["device"])]
    gc.collect()
    gc.freeze()  # or the first collection in each fork would copy every page
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's business; it closes the socket
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what a killed supervisor leaves behind becomes a child of this one
    requests, for_scorers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.suppress(BrokenPipeError):  # the caller has gone: then there is nothing to read but the end
        control.send(b"ready")
    supervisors = set()
    while True:
        ready = select.select([control, requests], [], [], 0.1 if supervisors else None)[0]
        reap(supervisors)
        for sock in ready:
            data = b""
            with contextlib.suppress(ConnectionResetError):  # it has gone before it read "ready"
                data, descriptors, _, _ = socket.recv_fds(sock, 256, 2)
            if not data:
                deadline = time.monotonic() + 5
                while supervisors and time.monotonic() < deadline:  # they clean up
                    time.sleep(0.02)
                    reap(supervisors)
                remove(settings["scratch"])
                return
            role, supervisor = data.decode(), os.fork()
            if supervisor == 0:
                if sock is control or role != "scorer":
                    asks = for_scorers if role == "scorer" else None
                    supervise(socket.socket(fileno=descriptors[0]), role, roles[role], asks, settings)
                os._exit(0)
            supervisors.add(supervisor)
            list(map(os.close, descriptors))


def reap(supervisors):
    """Take note of children that have ended. A candidate on a GPU can kill its supervisor: then kill its orphans.

    supervisors: process ids of all supervisors; those that have ended are taken out.
    """
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG)[0]):
            supervisors.discard(ended)
    for orphan in children(os.getpid()) - supervisors:
        with contextlib.suppress(ProcessLookupError):
            os.kill(orphan, signal.SIGKILL)


def children(process) -> set:
    """Process ids of a process's children."""
    found = set()
    for thread in glob.glob(f"/proc/{process}/task/*/children"):
        with contextlib.suppress(OSError):  # it has ended
            found |= {int(child) for child in Path(thread).read_text().split()}
    return found


def remove(folder):
    """Remove a folder with all that is in it, as far as that is possible, however deep."""
    subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL)


# ---------------------------------------------------------------------------------------------------------------------
# Supervisors


def supervise(sock, role, play, asks, settings):
    """Fork the process that plays the role; kill it when it ends or the peer hangs up, with all its descendants.

    asks: the socket to the fork server that the process may have, or None.
    """
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of the process become children of this one
    hostile, with_gpu = role in HOSTILE, has_gpu(role, settings)
    scratch = tempfile.mkdtemp(prefix=f"tmp{os.getpid()}-", dir=settings["scratch"])
    if hostile and settings["isolation"][with_gpu] is not None:
        isolate(settings["device"] if with_gpu else "cpu", settings["isolation"][with_gpu][0])
    process = os.fork()
    if process == 0:
        run_role(sock, role, play, asks, scratch, settings)
    if asks is not None:
        asks.close()
    waiter = select.poll()
    waiter.register(sock, 0)  # POLLHUP is reported without asking: the peer has closed its end
    waiter.register(os.pidfd_open(process), select.POLLIN)
    if not hostile:
        waiter.poll()
    while not waiter.poll(50):  # with a GPU the address space cannot be limited, and nowhere the number of forks
        resident = int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        if resident > settings["memory"] or crowded(process, MAX_PROCESSES[with_gpu]):
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    while True:  # the end of a process namespace kills all in it; without one, what left the group is an orphan here
        for orphan in children(os.getpid()):
            os.kill(orphan, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            break
    for left in [*glob.glob(f"/dev/shm/torch_{process}_*"), *glob.glob(f"/dev/shm/cuda.shm.*.{process:x}.*")]:
        os.unlink(left)  # what PyTorch and the driver shared with others
    with contextlib.suppress(RecursionError):  # of a thousand nested folders; they go when the sandbox is closed
        shutil.rmtree(scratch, ignore_errors=True)
    sock.close()


def run_role(sock, role, play, asks, scratch, settings):
    """The supervised process, from the fork to its end."""
    try:
        os.setpgid(0, 0)
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        confine(sock, role, asks, scratch, settings)
        play(sock, asks, settings)
    except (Gone, OSError, KeyboardInterrupt):
        pass
    except BaseException:
        if role == "scorer":  # a mistake of ours, or a broken GPU: worth a trace
            with open(os.path.join(settings["scratch"], "scorer.log"), "a") as log:
                traceback.print_exc(file=log)
    finally:
        os._exit(0)


def crowded(process, most) -> bool:
    """Has a process more than `most` descendants?"""
    found, waiting = 0, [process]
    while waiting and found <= most:
        new = children(waiting.pop())
        found += len(new)
        waiting += new
    return found > most

"""What a candidate cannot reach, and what it cannot use up: a fault costs one verdict and nothing else.

Each attempt to get out is shown to work in a process without a jail. The attempts harm nothing.
"""

import os
import random
import socket
import subprocess
import sys

import pytest

from candidates import HONEST, TASK, agrees, by_elements, copied, problem, replaced, solution, verdict
from judge import processes
from command.files import ROOT
from sandbox import Sandbox
from test_sandbox import processes_with, soon

needs_jail = pytest.mark.skipif(not processes.jail(), reason="bubblewrap does not start here: only limits apply")
TWICE = problem("x * 2.0")


def forward(statements, top="") -> str:
    """A candidate for TWICE whose forward has these statements."""
    return solution(f"import ctypes, os, socket, sys, threading, time\n{top}", f"{statements}\nreturn x * 2.0")


@pytest.fixture(scope="module")
def small():
    """A sandbox with narrow limits, started in an environment with secrets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", "hf_secret")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        with Sandbox("cpu", trials=1, timeout=5, memory=1 << 30, workers=2) as box:
            box.score(TWICE, [copied(TWICE)])
            yield box


# ---------------------------------------------------------------------------------------------------------------------
# Reach

ATTEMPTS = {  # what a candidate tries; OUTSIDE is a folder of the user's, OTHER the trainer's process, PORT its server
    "read a file": "open(f'{OUTSIDE}/victim').read()",
    "read a problem": "os.stat(f'{ROOT}/problems')",
    "change the judge": "os.utime(f'{ROOT}/judge/program.py')",
    "write among the programs": "assert os.access(sys.prefix, os.W_OK)",
    "send the trainer a signal": "os.kill(OTHER, 0)",
    "read the trainer's environment": "open(f'/proc/{OTHER}/environ').read()",
    "read the parent's memory": "open(f'/proc/{os.getppid()}/mem', 'rb').close()",
    "use the network": "socket.create_connection(('127.0.0.1', PORT), 5).close()",
    "change the kernel": "open('/proc/sys/kernel/core_pattern', 'r+').close()",
    "see the secrets": "assert 'HF_TOKEN' in os.environ or 'AWS_SECRET_ACCESS_KEY' in os.environ",
    "have a capability": "assert int(open('/proc/self/status').read().split('CapEff:')[1].split()[0], 16)",
    "see the run's secret": "assert SECRET in ' '.join(sys.argv + list(os.environ.values()))",
    "raise a limit": "resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 16, 1 << 16))",
}
TOOLS = """
import ctypes, os, resource, socket, sys

def attempts():
    for attempt in ATTEMPTS:
        try:
            exec(attempt)
            yield attempt
        except (AssertionError, OSError, ValueError):
            pass
"""


@needs_jail
def test_what_is_outside_is_out_of_reach(small, tmp_path):
    (tmp_path / "victim").write_text("kept")
    with socket.create_server(("127.0.0.1", 0)) as server:
        names = {"OUTSIDE": str(tmp_path), "OTHER": os.getpid(), "PORT": server.getsockname()[1], "ROOT": str(ROOT),
                 "SECRET": small.settings.secret[:9], "ATTEMPTS": [*ATTEMPTS.values()]}
        top = TOOLS + "".join(f"{name} = {value!r}\n" for name, value in names.items())
        jailed = verdict(small, TWICE, forward("raise ValueError(f'found {[*attempts()]}')", top=top)).error
        assert os.listdir(tmp_path) == ["victim"]
        outside = [sys.executable, "-c", f"{top}\nprint(*attempts(), sep='\\n')", names["SECRET"]]
        free = subprocess.run(outside, capture_output=True, text=True, env=os.environ | {"HF_TOKEN": "x"}).stdout
    assert "found []" in jailed and len(free.splitlines()) >= 9, (jailed, free)


@needs_jail
def test_nothing_is_mounted_anew(small):
    """Also not by root of a user namespace of its own."""
    code = forward("""
libc, tried = ctypes.CDLL(None, use_errno=True), []
tried.append(libc.mount(None, b'/', None, 32 | 4096, None))
tried.append(libc.umount2(b'/tmp', 2))
libc.unshare(0x10000000 | 0x00020000)
tried.append(libc.mount(None, b'/', None, 32 | 4096, None))
raise ValueError(f'mounted {tried}')""")
    assert "mounted [-1, -1, -1]" in verdict(small, TWICE, code).error


@needs_jail
def test_a_candidate_leaves_nothing_to_the_next_one(small):
    leave = forward("""
open('/tmp/left', 'w').write('x')
if os.fork() == 0:
    os.setsid()
    time.sleep(600)""")
    look = forward("""
processes = sum(name.isdigit() for name in os.listdir('/proc'))
raise ValueError(f'sees {os.path.exists("/tmp/left")} {os.access("/dev/shm", os.W_OK)} {processes}')""")
    small.score(TWICE, [f"{leave}# {i}\n" for i in range(2)])  # one in each of the servers
    for found in small.score(TWICE, [f"{look}# {i}\n" for i in range(2)]):
        assert "sees False False 2" in found.error, found


def test_where_no_jail_starts_it_is_said_and_limits_still_apply(monkeypatch, capfd):
    monkeypatch.setattr(processes.shutil, "which", lambda name: None)
    monkeypatch.setattr(processes.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(processes, "jail", processes.jail.__wrapped__)
    with Sandbox("cpu", trials=1, timeout=5, memory=1 << 30, workers=1) as box:
        agrees(box, TWICE, copied(TWICE))
        assert "too many processes" in verdict(box, TWICE, forward(FAULTS["forks"][0])).error
        agrees(box, TWICE, copied(TWICE) + "# again\n")
    assert "only limits apply" in capfd.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# Use

ALL_SOCKETS = "for fd in range(3, 64):\n    try:\n        ACT\n    except OSError:\n        pass\n"
FAULTS = {  # name: (statements of a forward, what the verdict says)
    "exits": ("raise SystemExit(0)", "SystemExit"),
    "prints": ("while True: print('correct ' * 10000)", "no result within 5 s"),
    "memory": ("bytearray(1 << 31)", "MemoryError"),
    "forks": ("for _ in range(8): os.fork()\ntime.sleep(60)", "too many processes"),  # 256, and no more
    "threads": ("threading.stack_size(1 << 16)\n"
                "for _ in range(100): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
                "time.sleep(60)", "too many processes or threads"),
    "a large file": ("open('big', 'wb').write(bytes(1 << 29))", ""),
    "many files": ("i = 0\nwhile True:\n    open(str(i := i + 1), 'w').close()", "too many files"),
    "kills its parent": ("os.kill(os.getppid(), 9)\ntime.sleep(9)", ""),
    "writes to its socket": (ALL_SOCKETS.replace("ACT", "os.write(fd, b'!' * 64)"), ""),
    "sends half a message": (ALL_SOCKETS.replace("ACT", "os.write(fd, bytes([99] + [0] * 15))") + "time.sleep(99)",
                             "no result within 5 s"),
}


def test_a_fault_costs_one_verdict_and_nothing_else(small):
    """Each beside a candidate that works: what hangs holds up no other, and costs its time limit."""
    codes = []
    for fault, _ in FAULTS.values():
        codes += [forward(fault), f"{copied(TWICE)}# {len(codes)}\n"]
    verdicts = small.score(TWICE, codes)
    for (name, (_, says)), found in zip(FAULTS.items(), verdicts[::2], strict=True):
        assert not found.correct and found.rejected is None and found.error and says in found.error, (name, found)
    assert {found.rejected for found in verdicts[1::2]} == {"launches no kernel of its own"}


ENDLESS = "    while n > 0:\n        x += tl.load(x_ptr)\n    tl.store"
KERNELS = {"endless": ("    tl.store", ENDLESS, "no result within 5 s"),
           "many programs": ("(triton.cdiv(n, 1024),)", "(1 << 30,)", ""),
           "a hoard": ("    tl.store", "    x += tl.sum(tl.zeros((16384, 16384), tl.float32))\n    tl.store", "")}


def test_a_kernel_has_limits_too(small):
    """Where kernels run there is a limit on time and memory; the judge goes on with the next candidate."""
    changes = [replaced(HONEST, (old, new)) for old, new, _ in KERNELS.values()]
    *bad, good = small.score(TASK, [*changes, HONEST])
    for (_, _, says), found in zip(KERNELS.values(), bad, strict=True):
        assert not found.correct and found.error and says in found.error, found
    assert good.correct, good


@pytest.mark.slow
def test_of_hundreds_of_candidates_half_of_them_hostile_nothing_is_lost_or_left():
    """In random order and with all workers."""
    chance, honest = random.Random(0), by_elements("v * 2.0")
    kinds = chance.choices(list(FAULTS), k=256) + ["honest"] * 256
    chance.shuffle(kinds)
    codes = [(honest if kind == "honest" else forward(FAULTS[kind][0])) + f"# {i}\n" for i, kind in enumerate(kinds)]
    with Sandbox("cpu", trials=2, timeout=5, memory=1 << 30) as box:
        scratch = box.pool.settings["scratch"]
        for kind, found in zip(kinds, box.score(TWICE, codes), strict=True):
            assert found.correct == (kind == "honest") and (found.correct or found.error), (kind, found)
    assert soon(lambda: not processes_with(scratch)) and not os.path.exists(scratch)

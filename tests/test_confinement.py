"""What a process that holds a candidate's code, or that of its kernels, cannot do to the machine, nor to the scorer.

Each attempt succeeds in a naive jail, which is a fork and nothing else, and fails in a confined process. All harm that
is done in the naive jail stays in it: no attempt there touches more than a file, a number or memory of its own.
"""

import contextlib
import ctypes
import errno
import json
import os
import socket
import struct
import threading
import time
from pathlib import Path

import pytest
import torch

from candidates import by_elements, passes, problem
from judge import confinement, messages, rules

LIBC = ctypes.CDLL(None, use_errno=True)
X86 = os.uname().machine == "x86_64"
pytestmark = pytest.mark.skipif(os.uname().machine not in rules.MACHINES, reason="no filter for this machine")


def call(number, *arguments):
    """A system call by its number. Raises OSError."""
    answer = LIBC.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    if answer < 0:
        raise OSError(ctypes.get_errno(), "")
    return answer


def jailed(role, isolation, scratch, attempt):
    """What `attempt()` returns in a process of that role, or the name of the error that it raises. role None: naive."""
    here, there = socket.socketpair()
    settings = {"device": "cpu", "clock": "modelled", "isolation": [isolation, None], "timeout": 20,
                "memory": 1 << 30, "scratch": str(scratch)}
    supervisor = os.fork()
    if supervisor == 0:  # as processes.supervise does it
        with contextlib.suppress(BaseException):
            if isolation is not None:
                confinement.isolate("cpu", isolation[0])
            process = os.fork()
            if process == 0:
                if role is not None:
                    confinement.confine(there, role, None, str(scratch), settings)
                try:
                    result = attempt()
                except OSError as error:
                    result = errno.errorcode[error.errno]
                there.sendall(json.dumps(result).encode())
                os._exit(0)
            os.waitpid(process, 0)
        os._exit(0)
    there.close()
    os.waitpid(supervisor, 0)
    data = here.makefile().read()
    return json.loads(data) if data else "ended"


def mount(source, target, kind, flags):
    if LIBC.mount(source, target, kind, flags, None):
        raise OSError(ctypes.get_errno(), "")


@pytest.fixture(scope="module")
def ways(tmp_path_factory):
    """The best isolation that can be had here, and none."""
    best = confinement.ways_to_isolate("cpu", str(tmp_path_factory.mktemp("scratch")))
    return {"best": best, "none": None}


# ---------------------------------------------------------------------------------------------------------------------
# Files, other processes, memory that nobody counts: anybody may do this in the naive jail

ATTEMPTS = {  # name: what is done with a folder outside of the jail, and the process outside whose id is given
    "writing a file": lambda outside, other: (outside / "new").write_text("here"),
    "changing a file that was there": lambda outside, other: os.truncate(outside / "victim", 0),
    "linking a file to another place": lambda outside, other: os.link(outside / "victim", outside / "linked"),
    "replacing a file": lambda outside, other: os.rename(outside / "victim", outside / "moved"),
    "writing through /proc": lambda outside, other: open(f"/proc/{other}/cwd/../new", "w").close(),
    "a signal to the scorer": lambda outside, other: os.kill(other, 0),
    "the scorer's memory": lambda outside, other: len(Path(f"/proc/{other}/environ").read_bytes()),
    "the scorer's files": lambda outside, other: len(os.readlink(f"/proc/{other}/fd/0")),
    "a program": lambda outside, other: os.spawnv(os.P_WAIT, "/bin/true", ["true"]),
    "a socket": lambda outside, other: socket.socket().fileno(),
    "a file in memory": lambda outside, other: os.memfd_create("hoard"),
    "the keyring": lambda outside, other: call(250 if X86 else 219, 0, -3, 1),
    "slowing all processes down": lambda outside, other: os.setpriority(os.PRIO_PROCESS, 0, 5),
}


def outcomes(attempts, *arguments):
    """{name: the result, or the name of the error}."""
    found = {}
    for name, attempt in attempts.items():
        try:
            found[name] = attempt(*arguments)
        except OSError as error:
            found[name] = errno.errorcode[error.errno]
    return found


def test_what_anybody_may_do(tmp_path, ways):
    outside, scratch = tmp_path / "outside", tmp_path / "scratch"
    outside.mkdir(), scratch.mkdir()
    victim, other, landlock = outside / "victim", os.getpid(), LIBC.syscall(444, None, 0, 1) > 5

    def attempt(role, isolation):
        for path in outside.iterdir():
            path.unlink()
        victim.write_text("kept")
        return jailed(role, isolation, scratch, lambda: outcomes(ATTEMPTS, outside, other))

    naive = attempt(None, None)
    assert sum(not isinstance(outcome, str) for outcome in naive.values()) >= 10, naive  # a container may refuse some
    for role in ("candidate", "replayer"):
        for isolation in ways.values():
            found = attempt(role, isolation)
            all_of_it = landlock or isolation is not None and isolation[1]  # else there is only the filter
            done = {name for name in list(ATTEMPTS)[0 if all_of_it else 8:] if not isinstance(found[name], str)}
            assert not done, (role, isolation, found)
            assert not all_of_it or list(outside.iterdir()) == [victim] and victim.read_text() == "kept"


def test_what_it_needs_it_still_has(tmp_path, ways):
    def work():
        os.mkdir("a"), os.mkdir("b")
        Path("a/file").write_text("text")
        os.rename("a/file", "b/file")
        thread = threading.Thread(target=lambda: Path("/dev/shm/note").write_text("x"))
        thread.start(), thread.join()
        return Path("b/file").read_text() + Path("/dev/shm/note").read_text()

    for number, isolation in enumerate(ways.values()):
        scratch = tmp_path / str(number)
        scratch.mkdir()
        assert jailed("candidate", isolation, scratch, work) == "textx"
    Path("/dev/shm/note").unlink()


# ---------------------------------------------------------------------------------------------------------------------
# Root, and the way back to it


def test_nothing_of_root_is_left(tmp_path, ways):
    """Capabilities, and the ways to have them again."""
    def status():
        lines = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return {name: lines[name] for name in ("CapPrm", "CapEff", "CapInh", "CapAmb", "NoNewPrivs", "Seccomp")}

    for role in ("candidate", "replayer"):
        for isolation in ways.values():
            found = jailed(role, isolation, tmp_path, status)
            assert {int(found[name], 16) for name in found if name.startswith("Cap")} == {0}
            assert (found["NoNewPrivs"], found["Seccomp"]) == ("1", "2")
    again = struct.pack("Ii", 0x20080522, 0), struct.pack("6I", 1 << 21, 1 << 21, 0, 0, 0, 0)
    assert jailed("candidate", None, tmp_path, lambda: call(126 if X86 else 91, *again)) == "EPERM"


CLONE_NEWUSER, SIGCHLD = 0x10000000, 17
UNDONE = {  # ways to undo the read-only file system, and to be root elsewhere: nothing that a naive jail could survive
    "remount": lambda: mount(None, b"/", None, 32 | 4096),
    "unmount": lambda: LIBC.umount2(b"/dev/shm", 2) and call(166 if X86 else 39, b"/dev/shm", 2),
    "mount_setattr": lambda: call(442, -100, b"/", 0x8000, struct.pack("QQQQ", 0, 1, 0, 0), 32),
    "a clone of the tree": lambda: call(428, -100, b"/", 1 | 0x8000),
    "a file system by descriptors": lambda: call(430, b"tmpfs", 0),
    "a user namespace": lambda: call(272 if X86 else 97, CLONE_NEWUSER),
    "the same by clone": lambda: call(56 if X86 else 220, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0),
    "the same by clone3": lambda: call(435, struct.pack("8Q", CLONE_NEWUSER, 0, 0, 0, SIGCHLD, 0, 0, 0), 64),
    "the same by a 32-bit number": lambda: call(0x40000000 + 272, CLONE_NEWUSER),
    "the way out of a folder": lambda: call(161 if X86 else 51, b"."),
    "a device": lambda: call(259 if X86 else 33, -100, b"device", 0o20666, 0x103),
    "a setting of the kernel": lambda: open("/proc/sys/kernel/core_pattern", "w").close(),
    "a device that is there": lambda: open("/dev/zero", "rb").close(),
}


def test_the_file_system_stays_read_only(tmp_path, ways):
    for role in ("candidate", "replayer"):
        found = jailed(role, ways["best"], tmp_path, lambda: outcomes(UNDONE))
        if ways["best"] is None or not ways["best"][1]:
            found.pop("a device that is there")  # which harms nobody
        assert set(found.values()) <= {"EPERM", "EROFS", "EACCES", "ENOSYS"}, found


def test_every_call_of_the_table_is_refused(tmp_path):
    """Whatever its arguments: here such that would do nothing."""
    def refused(numbers):
        found = []
        for number in numbers:
            LIBC.syscall(ctypes.c_long(number), *[ctypes.c_long(-1)] * 6)
            found.append(ctypes.get_errno())
        return found

    column = rules.MACHINES[os.uname().machine][0]
    numbers = [number for line in rules.REFUSED_EVERYWHERE + rules.REFUSED_WITHOUT_GPU for number in line[column]]
    assert set(jailed("candidate", None, tmp_path, lambda: refused(numbers))) == {errno.EPERM}


def test_with_a_gpu_processes_programs_and_sockets_are_left(tmp_path):
    """The filter alone, as it is there."""
    def work():
        confinement.drop_privileges(confinement.DAC_OVERRIDE)
        confinement.filter_system_calls(with_gpu=True)
        refused = ("a user namespace", "the same by clone", "the same by clone3", "remount")
        return [os.spawnv(os.P_WAIT, "/bin/true", ["true"]), socket.socket().fileno() > 0,
                *outcomes({name: UNDONE[name] for name in refused}).values()]

    assert jailed(None, None, tmp_path, work) == [0, True, "EPERM", "EPERM", "ENOSYS", "EPERM"]


def test_who_cannot_be_confined_does_not_go_on(tmp_path, monkeypatch):
    real = confinement.LIBC

    class Failing:
        def __getattr__(self, name):
            return (lambda *_: -1) if name == broken else getattr(real, name)

    monkeypatch.setattr(confinement, "LIBC", Failing())
    for broken, outcome in {"prctl": "ended", "capset": "ended", "unshare": "ended", None: "went on"}.items():
        isolation = (False, True) if broken == "unshare" else None
        assert jailed("candidate", isolation, tmp_path, lambda: "went on") == outcome


# ---------------------------------------------------------------------------------------------------------------------
# The scorer's memory and time


def sent(header, payload):
    """What is made of a message for which there is room of 4,096 bytes."""
    here, there = socket.socketpair()
    with here:
        there.sendall(struct.pack("<QQ", len(header), len(payload)) + header + payload)
        there.close()
        return messages.receive(here, room=4096)


def named(*places):
    return json.dumps([{"tensor": [start, end, "torch.uint8", [end - start], [1]]} for start, end in places]).encode()


FORGED = {  # name: (header, tensors' bytes)
    "one tensor named forty times": (named(*[(0, 1000)] * 40), bytes(1000)),
    "tensors that overlap": (named((0, 600), (400, 1000)), bytes(1000)),
    "tensors in another order": (named((500, 1000), (0, 500)), bytes(1000)),
    "bytes that no tensor names": (named((0, 10)), bytes(1000)),
    "more bytes than there is room for": (named((0, 5000)), bytes(5000)),
    "a list of lists": (b"[" + b"[]," * 9999 + b"[]]", b""),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_message_takes_no_more_than_there_is_room_for(name, monkeypatch):
    monkeypatch.setattr(messages, "HEADER", 20000)
    header, payload = FORGED[name]
    with pytest.raises(messages.Gone):
        sent(header, payload)


def test_honest_messages_arrive_whole():
    tree = {"a": [torch.arange(6.).reshape(2, 3).T, (1, "b")], "e": torch.empty(0, 3), "s": torch.tensor(2.5),
            "x": torch.zeros(1).expand(4, 4)}
    here, there = socket.socketpair()
    with here, there:
        messages.send(there, tree, room=100)
        got = messages.receive(here, room=100)
        assert got["a"][1] == (1, "b") and got["e"].shape == (0, 3) and got["x"].stride() == (0, 0)
        assert torch.equal(got["a"][0], tree["a"][0]) and got["a"][0].stride() == (1, 3) and got["s"] == 2.5
        with pytest.raises(ValueError, match="too much to pass on: 400 bytes"):
            messages.send(there, [torch.zeros(100)], room=100)


def test_a_trickle_ends_at_the_deadline():
    here, there = socket.socketpair()
    with here, there:
        def trickle():
            with contextlib.suppress(OSError):
                there.sendall(struct.pack("<QQ", 1000, 0))
                while True:
                    there.send(b" ")
                    time.sleep(0.05)

        threading.Thread(target=trickle, daemon=True).start()
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            messages.receive(here, began + 0.5)
        assert time.monotonic() - began < 2


def test_who_does_not_read_is_not_waited_for():
    fork_server, requests = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with fork_server, requests:
        child, began = messages.Child(fork_server, "replayer"), time.monotonic()  # nobody takes the request
        with pytest.raises(TimeoutError):
            child.ask([torch.zeros(1 << 22)], began + 0.5)
        assert time.monotonic() - began < 5
        child.close()


WIDE = problem("torch.sigmoid(x) * 2.0", "torch.randn(256, 256)")
FUSED = by_elements("tl.sigmoid(v) * 2.0")
HOARDS = {  # what a forward returns in place of its output: what the verdict says
    "[out] * 7": "1,835,008 bytes (1,572,864 are allowed)",
    "out.expand(7, 256, 256)": "no memory of its own",
    "[out[:1, :1]] * 40000": "(2,097,152 are allowed)",
    "out + BIG[:1]": "269,484,032 bytes of tensors (269,",
    "out.flatten()[:: 2]": "wrong output: shape",
}


def test_outputs_and_recordings_have_limits(box):
    """Of outputs, and of what is recorded. An output's gaps count for nothing, as they are not passed on."""
    def candidate(what):
        big = "BIG = torch.zeros(257 << 20, dtype=torch.uint8)\n\n" if "BIG" in what else ""
        return FUSED.replace("return out", f"return {what}").replace("class", big + "class")

    verdicts = box.score(WIDE, [candidate(what) for what in HOARDS])
    for verdict, says in zip(verdicts, HOARDS.values()):
        assert not verdict.correct and says in verdict.error, verdict
    part = "part = torch.empty(256, 4096)[:, ::16]\n        part.copy_(out)\n        return part"
    passes(box, WIDE, FUSED.replace("return out", part))

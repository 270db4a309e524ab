"""What a process that holds a candidate's code, or that of its kernels, cannot do to the machine, nor to the scorer.

Each attempt succeeds in a naive jail, which is a fork and nothing else, and fails in a confined process. The attempts
harm nothing but a folder of their own.
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

from candidates import by_elements, passes, problem, replaced, verdict
from judge import confinement, messages

LIBC = ctypes.CDLL(None, use_errno=True)


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


@pytest.fixture(scope="module")
def best(tmp_path_factory):
    """The best isolation that can be had here: the arguments of confinement.isolate, and whether mounts work."""
    found = confinement.ways_to_isolate("cpu", str(tmp_path_factory.mktemp("scratch")))
    if found is None or not found[1]:
        pytest.skip("no namespaces, or no mounts within them: only limits apply here")
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Files, the network, other processes: all that anybody may do in the naive jail

ATTEMPTS = {  # name: what is done with a folder outside of the jail, the process outside whose id is given, its port
    "writing a file": lambda outside, other, port: (outside / "new").write_text("here"),
    "changing a file that was there": lambda outside, other, port: os.truncate(outside / "victim", 0),
    "linking a file to another place": lambda outside, other, port: os.link(outside / "victim", outside / "linked"),
    "replacing a file": lambda outside, other, port: os.rename(outside / "victim", outside / "moved"),
    "writing through /proc": lambda outside, other, port: open(f"/proc/{other}/cwd/../new", "w").close(),
    "a signal to the scorer": lambda outside, other, port: os.kill(other, 0),
    "the scorer's memory": lambda outside, other, port: len(Path(f"/proc/{other}/environ").read_bytes()),
    "the scorer's files": lambda outside, other, port: len(os.readlink(f"/proc/{other}/fd/0")),
    "the network": lambda outside, other, port: socket.create_connection(("127.0.0.1", port)).close(),
    "a setting of the kernel": lambda outside, other, port: open("/proc/sys/kernel/core_pattern", "w").close(),
    "a device": lambda outside, other, port: open("/dev/zero", "rb").close(),
}


def outcomes(*arguments):
    """{name of an attempt: the result, or the name of the error}."""
    found = {}
    for name, attempt in ATTEMPTS.items():
        try:
            found[name] = attempt(*arguments)
        except OSError as error:
            found[name] = errno.errorcode.get(error.errno, str(error))
    return found


def test_what_anybody_may_do(tmp_path, best):
    outside, scratch = tmp_path / "outside", tmp_path / "scratch"
    outside.mkdir(), scratch.mkdir()
    victim, server = outside / "victim", socket.create_server(("127.0.0.1", 0))
    other, port = os.getpid(), server.getsockname()[1]

    def attempt(role, isolation):
        for path in outside.iterdir():
            path.unlink()
        victim.write_text("kept")
        return jailed(role, isolation, scratch, lambda: outcomes(outside, other, port))

    with server:
        naive = attempt(None, None)
        assert sum(not isinstance(outcome, str) for outcome in naive.values()) >= 8, naive  # containers refuse some
        for role in ("candidate", "replayer"):
            found = attempt(role, best)
            assert all(isinstance(outcome, str) for outcome in found.values()), found
            assert list(outside.iterdir()) == [victim] and victim.read_text() == "kept"


def test_what_it_needs_it_still_has(tmp_path, best):
    def work():
        os.mkdir("a"), os.mkdir("b")
        Path("a/file").write_text("text")
        os.rename("a/file", "b/file")
        thread = threading.Thread(target=lambda: Path("/dev/shm/note").write_text("x"))
        thread.start(), thread.join()
        return Path("b/file").read_text() + Path("/dev/shm/note").read_text()

    for number, isolation in enumerate((best, None)):
        scratch = tmp_path / str(number)
        scratch.mkdir()
        assert jailed("candidate", isolation, scratch, work) == "textx"
    Path("/dev/shm/note").unlink()


# ---------------------------------------------------------------------------------------------------------------------
# Root, and the way back to it


def test_nothing_of_root_is_left(tmp_path):
    """Capabilities, and the ways to have them again."""
    def status():
        lines = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return {name: lines[name] for name in ("CapPrm", "CapEff", "CapInh", "CapAmb", "NoNewPrivs")}

    def again():
        capabilities = struct.pack("Ii", 0x20080522, 0), struct.pack("6I", 1 << 21, 1 << 21, 0, 0, 0, 0)
        confinement.demand(LIBC.capset(*capabilities))

    for role in ("candidate", "replayer"):
        found = jailed(role, None, tmp_path, status)
        assert found.pop("NoNewPrivs") == "1" and {int(mask, 16) for mask in found.values()} == {0}
    assert jailed("candidate", None, tmp_path, again) == "EPERM"


def test_the_file_system_stays_read_only(tmp_path, best):
    """Also for root of a user namespace of its own, which anybody may be."""
    def remount():
        confinement.demand(LIBC.mount(None, b"/", None, 32 | 4096, None))

    def remount_as_root():
        confinement.demand(LIBC.unshare(confinement.NEWUSER | confinement.NEWNS))
        remount()

    for attempt in (remount, remount_as_root):
        assert jailed("candidate", best, tmp_path, attempt) in ("EPERM", "EINVAL", "ENOSPC")


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
    for found, says in zip(verdicts, HOARDS.values()):
        assert not found.correct and says in found.error, found
    part = "part = torch.empty(256, 4096)[:, ::16]\n        part.copy_(out)\n        return part"
    passes(box, WIDE, FUSED.replace("return out", part))


def test_a_candidate_that_starts_many_processes_ends(box):
    forks = ("for _ in range(20):\n            if os.fork() == 0:\n                time.sleep(60)\n"
             "        time.sleep(60)\n")
    code = replaced(FUSED, ("import torch\n", "import os\nimport time\nimport torch\n"), (
        "        out = torch", f"        {forks}        out = torch"))
    began = time.monotonic()
    assert "ended without a result" in verdict(box, WIDE, code).error
    assert time.monotonic() - began < 20

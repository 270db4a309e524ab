"""Messages between processes: nested values and tensors over a socket, and tensors in GPU memory that both can see.

A message is JSON beside the raw bytes of its tensors, because unpickling would run the sender's code. The reader of a
message from a process that is not trusted says how many bytes its tensors may have; the JSON then has a limit, too. The
tensors follow the JSON in the order of their names there, one after the other, so none can be named twice.
"""

import contextlib
import json
import os
import select
import socket
import struct
import time

import torch

TORCH_NAMES = {str(getattr(torch, name)): getattr(torch, name) for name in dir(torch)
               if isinstance(getattr(torch, name), (torch.dtype, torch.layout, torch.memory_format))}


HEADER = 2 << 20  # bytes of JSON from a process that is not trusted; Python's objects are up to 50 times as large
ROOM = 256 << 20  # bytes of tensors from such a process, where nothing else is known


class Gone(Exception):
    """The other process has ended, or sent what is no message."""


# ---------------------------------------------------------------------------------------------------------------------
# Values as JSON, tensors as bytes


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
    found = other(value) if other is not None else None
    if found is None:
        raise TypeError(f"a {type(value).__name__} cannot be passed on")
    return found


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


def layouts_in(value) -> list:
    """What stands for each tensor in a value as `encode` writes it."""
    if isinstance(value, dict) and "tensor" in value:
        return [value["tensor"]]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(layouts_in, parts), [])


def elements_spanned(shape, stride) -> int:
    """How many elements lie between a tensor's first and its last one, both included."""
    return sum((n - 1) * step for n, step in zip(shape, stride)) + 1 if all(shape) else 0


def dense(tensor):
    """The bytes from a tensor's first to its last element, as a uint8 tensor on its device."""
    size = elements_spanned(tensor.shape, tensor.stride()) * tensor.element_size()
    start = tensor.storage_offset() * tensor.element_size()
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.detach().untyped_storage())
    return raw[start:start + size]


def strided(raw, dtype, shape, stride):
    """The tensor that `dense` took apart. Raises ValueError if it would not fit into the bytes."""
    if min([0, *shape, *stride]) < 0 or elements_spanned(shape, stride) * dtype.itemsize > raw.numel():
        raise ValueError("the tensor does not fit its bytes")
    return torch.empty(0, dtype=dtype, device=raw.device).set_(
        raw.untyped_storage(), raw.storage_offset() // dtype.itemsize, shape, stride)


def place(tensor, start) -> list:
    """Where a tensor's bytes lie, from byte `start`, and what they are: [start, end, dtype, shape, stride]."""
    return [start, start + dense(tensor).numel(), str(tensor.dtype), list(tensor.shape), list(tensor.stride())]


# ---------------------------------------------------------------------------------------------------------------------
# Over a socket. One thread may send while another one receives.


def send(sock, tree, room=None):
    """Send nested lists, dicts, numbers, strings and tensors. Strides are kept, shared memory and devices are not.

    room: what the reader's is. Raises ValueError for a message that it would not take.
    """
    chunks, total = [], 0

    def add(tensor):
        nonlocal total
        chunks.append(dense(tensor).cpu().numpy().data)
        total += chunks[-1].nbytes
        return place(tensor, total - chunks[-1].nbytes)

    header = json.dumps(encode(tree, add)).encode()
    if room is not None and (len(header) > HEADER or total > room):
        raise ValueError(f"too much to pass on: {total:,} bytes of tensors ({room:,} are allowed), "
                         f"described in {len(header):,} ({HEADER:,} are allowed)")
    sock.sendall(struct.pack("<QQ", len(header), total) + header)
    for chunk in chunks:
        sock.sendall(chunk)


def receive(sock, deadline=None, room=None):
    """The next message. Raises Gone or OSError: TimeoutError once time.monotonic() passes `deadline`.

    room: how many bytes its tensors may have in all; None if the sender is trusted with that and the JSON's length.
    """
    taken = 0

    def read(count):
        buffer = torch.empty(count, dtype=torch.uint8)
        view = memoryview(buffer.numpy())
        while view.nbytes:
            await_input(sock, deadline)
            got = sock.recv_into(view)
            if got == 0:
                raise Gone
            view = view[got:]
        return buffer

    def tensor(entry):
        nonlocal taken
        start, end, dtype, shape, stride = entry
        if not start == taken <= end <= total:
            raise ValueError("tensors overlap")
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError
        taken = end
        return strided(read(end - start), TORCH_NAMES[dtype], shape, stride)

    try:
        header, total = struct.unpack("<QQ", read(16).numpy())
        if room is not None and (header > HEADER or total > room):
            raise Gone
        tree = decode(json.loads(read(header).numpy().tobytes()), tensor)
        if taken != total:
            raise Gone
        return tree
    except (ValueError, KeyError, TypeError, IndexError, RuntimeError, MemoryError, RecursionError):
        raise Gone from None


def await_input(file, deadline):
    """Sleep until a socket or pipe has input or its other end is closed. Raises TimeoutError after `deadline`."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    if not poll.poll(None if deadline is None else max(deadline - time.monotonic(), 0.0) * 1e3):
        raise TimeoutError


class Child:
    """A process forked by the fork server to play `role`. Closing the connection kills it and all that it started.

    fork_server: a socket on which it takes requests (see processes.py). Raises RuntimeError when it has ended.
    """

    def __init__(self, fork_server, role):
        self.sock, there = socket.socketpair()
        self.life, token = os.pipe()  # the supervisor holds the other end until nothing of the process is left
        try:
            socket.send_fds(fork_server, [role.encode()], [there.fileno(), token])
        except OSError:
            self.close()
            raise RuntimeError("the sandbox's fork server has ended") from None
        finally:
            there.close()
            os.close(token)

    def ask(self, tree, deadline, room=ROOM):
        """Send a message and wait for the answer, see `receive`. Raises Gone or OSError."""
        self.sock.settimeout(max(deadline - time.monotonic(), 1e-3))  # it may not read
        send(self.sock, tree)
        self.sock.settimeout(None)
        return receive(self.sock, deadline, room)

    def hang_up(self):
        """Have the process killed. A thread that is receiving from it gets Gone."""
        with contextlib.suppress(OSError):  # it has been hung up, or closed
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self, wait=False):
        """Have the process killed; with `wait`, return only when it and all its descendants are gone."""
        if self.life is not None:
            self.sock.close()
            if wait:
                with contextlib.suppress(TimeoutError):
                    await_input(self.life, time.monotonic() + 20)
            os.close(self.life)
            self.life = None


# ---------------------------------------------------------------------------------------------------------------------
# In the memory of a GPU that many processes use

LEFT = 128 << 20  # bytes that PyTorch may keep for later in each of them
BLANK = 256 << 20  # bytes; to overwrite so many leaves nothing else in any L2 cache
ALIGN = 512  # bytes; what cudaMalloc guarantees, so that shared tensors are as well aligned as a model's own


def spare_memory(much=LEFT):
    """Have PyTorch give back what it keeps for later in this process, if that is `much` (bytes): others need it.

    Not else, as to free and to allocate memory makes the processes of a GPU wait for each other.
    """
    if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > much:
        torch.cuda.empty_cache()


def plan(tensors):
    """Lay tensors side by side in shared memory: ([what `place` says of each], total bytes)."""
    places, total = [], 0
    for tensor in tensors:
        places.append(place(tensor, total))
        total = -(-places[-1][1] // ALIGN) * ALIGN
    return places, total


def slots_and_outputs(raw, places, count, slots) -> tuple:
    """The tensors that lie in shared memory: (for each of `slots` sets of inputs its `count` tensors, outputs).

    raw: that memory, a byte tensor; places: `plan` of all of them.
    """
    tensors = [strided(raw[start:end], TORCH_NAMES[dtype], shape, stride)
               for start, end, dtype, shape, stride in places]
    return [tensors[i * count:(i + 1) * count] for i in range(slots)], tensors[slots * count:]


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

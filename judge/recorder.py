"""Runs a candidate's Python in a jail, and hands back what its forward does, as data.

    python -m judge.recorder FD SETTINGS        a server: it forks one recorder for each order (processes.serve_orders)

Everything pretends that there is a GPU. The forward is recorded (forward.py); then Triton compiles each kernel that was
launched for the real GPU. With a GPU the judge is given the machine code, without one the text of Triton's IR. What
Triton compiles is accepted, however it is spelt; with a GPU tensor descriptors made by the host are not supported.

A candidate's Python is free to do what the jail allows: no reference, no answer and no clock is here.
"""

import os
import pickle
import resource
import sys
import tomllib
import types
from pathlib import Path
from unittest.mock import MagicMock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import autotuner, driver, jit

from judge.forward import PretendCuda, Recorder, launch, launch_tuned, record
from judge.processes import begin_server, serve_orders
from judge.program import launches_in, packed
from judge.reference import load_module, seed_everything
from judge.verdict import Failed, describe, failure

COMPILE_SECONDS = 20  # of a CPU, for all kernels of a candidate
RUN = jit.JITFunction.run  # another stands in its place
TENSOR = torch.tensor
H200 = tomllib.loads(Path(__file__).with_name("h200.toml").read_text())["properties"]  # found where no GPU is
SHARED_MEMORY = 227 << 10  # bytes that a program of a kernel may use

# ---------------------------------------------------------------------------------------------------------------------
# A GPU that is not there


def refused(why, stage):
    """A function that nobody may call."""
    def function(*_, **__):
        raise Failed(why, stage)
    return function


def pretend_gpu(properties):
    """Let PyTorch and Triton speak of a GPU in a process that has none. properties: of the GPU, by PyTorch's names.

    It changes this process for good: Triton's kernels can be recorded and compiled, but not run.
    """
    device = types.SimpleNamespace(**properties)
    anything = MagicMock(cuda_stream=0)  # streams, events, contexts: their methods do nothing
    names = {"is_available is_bf16_supported": True, "device_count": 1, "current_device memory_allocated": 0,
             "synchronize set_device empty_cache": None,
             "get_device_properties": device, "get_device_name": device.name,
             "get_device_capability": (device.major, device.minor),
             "Stream Event current_stream default_stream stream device device_of _DeviceGuard": anything}
    for together, value in names.items():
        for name in together.split():
            setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    torch.version.cuda = torch.version.cuda or "12.8"
    torch.set_default_device = lambda place: None
    no_compile = refused("uses torch.compile in place of a kernel", "rejected")
    torch.compile = lambda model=None, **_: no_compile if model else lambda function: no_compile
    no_cuda = refused("CUDA C++ is not judged here: write the kernel in Triton", "compile")
    torch.utils.cpp_extension = sys.modules["torch.utils.cpp_extension"] = MagicMock(load_inline=no_cuda, load=no_cuda)
    torch.library.wrap_triton = lambda kernel: kernel  # it matters to torch.compile only
    torch._C._cuda_getCurrentRawStream = lambda index: 0  # what files that inductor wrote import
    torch._C._dynamo.guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype, device="cuda")
    torch.Tensor.is_cuda = property(lambda tensor: True)  # asserted by many a kernel's wrapper
    torch.Tensor.get_device = lambda tensor: 0
    torch.tensor = lambda data, device=None, **more: TENSOR(data, **more)  # with values, if PyTorch's functions call it
    torch.Tensor.new_tensor = lambda x, data, dtype=None, **_: TENSOR(data, dtype=dtype or x.dtype)
    there = {"multiprocessor_count": device.multi_processor_count, "max_shared_mem": SHARED_MEMORY, "warpSize": 32,
             "max_num_regs": 65536}
    driver.set_active(types.SimpleNamespace(
        utils=types.SimpleNamespace(get_device_properties=lambda index: there), get_current_device=lambda: 0,
        get_current_stream=lambda index: 0, get_active_torch_device=lambda: torch.device("cuda", 0),
        get_current_target=lambda: GPUTarget("cuda", 10 * device.major + device.minor, 32)))


# ---------------------------------------------------------------------------------------------------------------------
# Compiling what was launched


def compile_all(recorder, text) -> dict:
    """Compile each kernel of a recorded forward, once for each specialisation. Returns {as Triton made it: its number}.

    As with Triton, a configuration that does not compile is not tried, unless none is left.
    """
    used, hard = resource.getrusage(resource.RUSAGE_SELF), resource.getrlimit(resource.RLIMIT_CPU)[1]
    most = int(used.ru_utime + used.ru_stime) + COMPILE_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (min(most, hard), hard))  # see processes.watch
    compiled = {}  # {a kernel as Triton has compiled it: its number}
    for row in recorder.rows:
        alternatives = row[1] if row[0] == "tuned" else [[row]]
        for rows in list(alternatives):
            try:
                for entry in launches_in(rows):
                    compile_launch(entry, recorder.calls[id(entry)], compiled, text)
            except Failed:
                alternatives.remove(rows)
                if not alternatives:
                    raise
    return compiled


def compile_launch(entry, call, compiled, text):
    """Compile the kernel of a launch, and keep those of its arguments that the compiled kernel takes. Raises Failed."""
    kernel, args, kwargs = call
    try:
        kernel.pre_run_hooks.clear()  # `launch` has called them
        result = RUN(kernel, *args, grid=None, warmup=True, **kwargs)
        check_limits(result.metadata, entry["grid"])
    except Exception as error:
        raise compile_error(error, kernel, text) from None
    entry["compiled"] = compiled.setdefault(result, len(compiled))
    kinds = result.src.signature
    entry["arguments"] = taken(tuple(kinds.values()), {"tuple": [entry["arguments"][name] for name in kinds]})


def taken(kind, value) -> list:
    """[[type, value]] of what a compiled kernel takes of a parameter. kind: its type; a tuple's types as a tuple."""
    if isinstance(kind, tuple):
        return sum(map(taken, kind, value["tuple"]), [])
    if kind == "constexpr":
        return []
    if kind.startswith("tensordesc"):  # the descriptor is followed by its shape and strides
        shape, strides = value["tuple"][1:]
        return [[kind, value], *(["i32", length] for length in shape), *(["i64", step] for step in strides)]
    return [[kind, value]]


def check_limits(metadata, grid):
    """Raise OutOfResources for a launch that no GPU takes."""
    for used, limit, what in ((metadata.shared, SHARED_MEMORY, "shared memory"), (metadata.num_warps, 32, "warps"),
                              (metadata.num_ctas, 8, "CTAs in a cluster"), (max(grid[1:]), 65_535, "grid in y or z")):
        if used > limit:
            raise triton.OutOfResources(used, limit, what)


def description(result, on_gpu) -> dict:
    """What the judge needs to launch a kernel: with a GPU its machine code, without one the text of Triton's IR."""
    metadata = result.metadata
    code = result.asm["cubin"] if on_gpu else str(result.asm["ttir"]).encode()
    return {"name": metadata.name, "code": code, "shared": metadata.shared, "scratch": metadata.global_scratch_size,
            "num_warps": metadata.num_warps, "num_ctas": metadata.num_ctas}


def compile_error(error, kernel, text):
    """What compiling raised, as Failed, with the line of the candidate's text where that is known."""
    while hasattr(error.__cause__, "node"):  # an error in a called function is wrapped in its caller's
        error = error.__cause__
    line = kernel.fn.__code__.co_firstlineno
    source = getattr(error, "src", None)
    if source and error.node is not None and source in text:
        line = text[:text.index(source)].count("\n") + error.node.lineno
    why = getattr(error, "error_message", None) or str(error).strip().split("\n")[-1]
    return Failed(f"{type(error).__name__}: {why}", "compile", line)


# ---------------------------------------------------------------------------------------------------------------------
# One candidate


def answer(order) -> bytes:
    """The recording of a candidate, or why there is none.

    order: (its text, its task's blueprint), pickled by the trainer.
    """
    text, blueprint = pickle.loads(order)
    text = text.removeprefix("\ufeff")
    blueprint = pickle.loads(blueprint)
    path = os.path.abspath("candidate.py")
    stage = "compile"
    try:
        pretend_gpu(blueprint.get("gpu") or H200)
        with PretendCuda() as constructor:
            module = load_module(text, path)
            if not hasattr(module, "ModelNew"):
                raise Failed("the code defines no class ModelNew", "compile")
            stage = "forward"
            seed_everything(blueprint["seed"])
            model = module.ModelNew(*blueprint["arguments"], **blueprint["keywords"])
        recorder, program = record(model, blueprint)
        program["fixed"] |= constructor.reads_parameters
        compiled = [description(result, "gpu" in blueprint) for result in compile_all(recorder, text)]
        return packed({"program": program, "constants": recorder.contents, "compiled": compiled})
    except BaseException as error:  # also SystemExit
        why, line = describe(error, path)
        if isinstance(error, Failed):
            stage, why, line = error.stage, str(error)[:300], error.line or line
        return failure(stage, why, line)


@triton.jit
def warm(x):
    pass


def warm_up():
    """Record and compile something: forks of this process find imported and loaded what that takes."""
    pretend_gpu(H200)
    record(torch.nn.Linear(1, 1), {"inputs": [torch.empty(1, 1, device="meta")], "state": {}, "room": 1 << 20})
    RUN(warm, 1.0, grid=None, warmup=True)
    Recorder.active = None


def main():
    connection, settings = begin_server(sys.argv)
    os.nice(5)  # compiling must not slow down the judges, which keep a GPU busy
    jit.JITFunction.run, autotuner.Autotuner.run = launch, launch_tuned
    autotuner.Autotuner.best_config = property(refused(
        "reads best_config, which is not known while forward is recorded", "forward"))
    if settings["device"] == "cpu":
        CUDABackend.make_cubin = lambda *_: b""  # up to PTX: assembling takes a third of the time, and nobody runs it
    warm_up()
    serve_orders(connection, answer, settings)


if __name__ == "__main__":
    main()

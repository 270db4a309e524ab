"""A GPU that is not there: code written for one runs in a process that has none, with PyTorch and with Triton.

The recorder uses it. Within a forward all tensors say that they are on a GPU, and are on the CPU or without values.
"""

import types
from unittest.mock import MagicMock

import torch
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from judge.program import tensors_in

H200 = {"name": "NVIDIA H200", "multi_processor_count": 132, "total_memory": 141 << 30, "major": 9, "minor": 0,
        "warp_size": 32, "max_threads_per_multi_processor": 2048, "L2_cache_size": 60 << 20, "is_integrated": 0,
        "regs_per_multiprocessor": 65536, "shared_memory_per_block": 48 << 10, "is_multi_gpu_board": 0,
        "shared_memory_per_multiprocessor": 228 << 10, "clock_rate": 1_980_000, "memory_clock_rate": 3_201_000,
        "memory_bus_width": 6144, "gcnArchName": "", "max_threads_per_block": 1024,
        "shared_memory_per_block_optin": 227 << 10}  # what a candidate finds where no GPU is
SHARED_MEMORY = 227 << 10  # bytes that a program of a kernel may use
TO_HOST = set("cpu item tolist numpy __array__ __dlpack__ __reduce_ex__ __float__ __int__ __bool__".split())  # methods
TENSOR = torch.tensor


class PretendCuda(TorchFunctionMode):
    """Lets code written for a GPU run without one. "cuda" means where a call's first tensor is, or else the CPU.

    Within a forward all tensors say that they are on a GPU. In a constructor (recorder: None), whose parameters go to
    the GPU afterwards, they say where they are.
    """

    def __init__(self, recorder=None):
        super().__init__()
        self.recorder, self.reads_parameters = recorder, False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if self.recorder is not None and func == torch.Tensor.device.__get__:
            return torch.device("cuda", 0)
        if name in ("__getitem__", "__setitem__"):
            args = (args[0], with_values(args[1]), *args[2:])
        sources = tensors_in([args, kwargs])
        place = sources[0].untyped_storage().device if sources else torch.device("cpu")
        if name in TO_HOST and self.recorder is not None:
            self.recorder.note_read(name, sources[0])
        self.reads_parameters |= name in TO_HOST and sources[0].requires_grad
        args = args if func is torch.device else tuple(place if is_cuda(value) else value for value in args)
        if is_cuda(kwargs.get("device")) or type(kwargs.get("device")) is int:
            kwargs["device"] = place
        return func(*args, **kwargs)


def with_values(index):
    """An index whose lists are tensors on the CPU: PyTorch makes them where the indexed tensor is, without values."""
    if isinstance(index, tuple):
        return tuple(map(with_values, index))
    return torch.as_tensor(index) if hasattr(index, "__len__") and not tensors_in(index) else index


def is_cuda(value) -> bool:
    return isinstance(value, (str, torch.device)) and "cuda" in str(value)


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
    torch.library.wrap_triton = lambda kernel: kernel  # it matters to torch.compile only
    torch._C._cuda_getCurrentRawStream = lambda index: 0  # what files that inductor wrote import
    torch._C._dynamo.guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype, device="cuda")
    torch.Tensor.is_cuda = property(lambda tensor: True)  # asserted by many a kernel's wrapper
    torch.Tensor.get_device = lambda tensor: 0
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    torch.tensor = lambda data, device=None, **more: TENSOR(data, **more)  # with values, if PyTorch's functions call it
    torch.Tensor.new_tensor = lambda x, data, dtype=None, **_: TENSOR(data, dtype=dtype or x.dtype)
    there = {"multiprocessor_count": device.multi_processor_count, "max_shared_mem": SHARED_MEMORY, "warpSize": 32,
             "max_num_regs": 65536}
    driver.set_active(types.SimpleNamespace(
        utils=types.SimpleNamespace(get_device_properties=lambda index: there), get_current_device=lambda: 0,
        get_current_stream=lambda index: 0, get_active_torch_device=lambda: torch.device("cuda", 0),
        get_current_target=lambda: GPUTarget("cuda", 10 * device.major + device.minor, 32)))

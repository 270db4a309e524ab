"""What a candidate may not do, on one page: which rule applies where, and why."""

import ast

from judge.correctness import Verdict, describe, numbered

# ---------------------------------------------------------------------------------------------------------------------
# What can be judged without running anything


ATTACKS = {  # modules that a kernel has no use for, but an attack on the process that runs it has
    "ctypes", "cffi", "gc", "inspect", "threading", "_thread", "multiprocessing", "concurrent", "asyncio", "subprocess",
    "socket", "signal", "fcntl", "importlib", "builtins"}
INSIDES = {"__subclasses__", "__globals__", "__builtins__", "__code__", "__closure__", "_getframe", "f_back",
           "f_globals", "f_locals", "tb_frame", "settrace", "setprofile",
           "is_current_stream_capturing", "_cuda_isCurrentStreamCapturing"}  # what is recorded is what will be timed
COMPILERS = {"torch.compile", "torch.jit", "torch._dynamo", "torch._inductor"}


def offence(tree):
    """Why a candidate's syntax tree is refused, or None: the few things with which it could fool its own process."""
    modules = {"torch", "triton", "time"}  # names that stand for modules or for what was imported from them
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for name in names:
                if name.split(".")[0] in ATTACKS:
                    return f"imports {name}"
            modules.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if node.attr in INSIDES:
                return f"reaches for {node.attr}"
            if ast.unparse(node) in COMPILERS:
                return f"uses {ast.unparse(node)} in place of a kernel"
            root = node
            while isinstance(root, ast.Attribute):
                root = root.value
            patched = isinstance(node.ctx, (ast.Store, ast.Del)) and isinstance(root, ast.Name) and root.id in modules
            if patched and not ast.unparse(node).startswith("torch.backends."):
                return f"replaces {ast.unparse(node)}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("exec", "eval", "__import__"):
                return f"calls {node.func.id}"
            target = ast.unparse(node.args[0]) if node.args else ""
            if node.func.id in ("setattr", "delattr") and target.split(".")[0] in modules:
                return f"replaces an attribute of {target}"
    return None


def static_check(code):
    """Judge what needs no execution: returns a Verdict, or None to go on."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        text, line = describe(error, "")
        return Verdict(error=f"does not parse: {text}", excerpt=numbered(code, line))
    if not any(isinstance(node, ast.ClassDef) and node.name == "ModelNew" for node in tree.body):
        return Verdict(error="the code defines no class ModelNew")
    reason = offence(tree)
    return Verdict(compiled=True, rejected=reason) if reason else None


# ---------------------------------------------------------------------------------------------------------------------
# ATen operators
import re
REFUSED_OPERATORS = {"from_file", "set_", "resize_", "_resize_output_"}  # in a program: they reach outside of its tensors
CPU_ONLY = ("mkldnn", "fbgemm", "nnpack", "quantized", "slow_conv")  # what no GPU has cannot be priced for one
HOST_READS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique", "_unique2"}
UNPRICED = re.compile(r"_*(linalg_(?!vector_norm)|fft|trilinear|euclidean_dist|[cp]dist|int_mm|grouped_mm|scaled_mm|"
                      r"scaled_grouped|weight_int|native_multi_head|transformer|matrix_exp|cholesky|geqrf|orgqr|ormqr|"
                      r"lu_|triangular_solve|lstm|gru|rnn|thnn|fused_dropout|ctc_loss)")

# ---------------------------------------------------------------------------------------------------------------------
# System calls

# System calls that a candidate has no use for without a GPU: fork, vfork, execve, execveat, ptrace, socket,
# process_vm_readv, process_vm_writev, io_uring_setup.
FORBIDDEN = {"x86_64": (0xC000003E, 56, [57, 58, 59, 322, 101, 41, 310, 311, 425]),
             "aarch64": (0xC00000B7, 220, [221, 281, 117, 198, 270, 271, 425])}

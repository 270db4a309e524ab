"""Triton kernels where there is no GPU, first half: taken from a candidate's text, compiled for a real target.

    kernels, text = build(code, constants)       only @triton.jit functions, and only Triton's own language inside them
    compile_kernel(kernel, arguments, options)    for sm_90 (needs no GPU): refuses what a GPU would refuse, and blocks
                                                  on which the compiler would work for a minute

interpreter.py runs what `build` returns.

What holds: nothing of a candidate's text is executed but the kernels' bodies; imports are looked up, not executed, and
only public names of Triton's language are found; the syntax tree that was checked is the one that is compiled and the
one that is interpreted, and the text is not read again. What does not: a body may loop for ever or fill the memory, and
an error in Triton's own builtins or in its compiler is within reach; the replayer's confinement is for that.
"""

import ast
import builtins
import contextlib
import copy
import hashlib
import inspect
import linecache
import math
import re

import torch
import triton
import triton.language as tl
import triton.language.extra.cuda.libdevice  # so that `member` finds them
import triton.language.extra.libdevice
from triton.runtime import jit
from triton.tools.tensor_descriptor import TensorDescriptor

from judge.rules import (KERNEL_BUILTINS, KERNEL_HELPERS, KERNEL_MODULES, KERNEL_SYNTAX, KERNEL_TYPES, dotted,
                         imports)

FILE = "<candidate>"  # the name under which a candidate's kernels are compiled; lines agree with the candidate's text
MOST_PER_THREAD = 512  # elements of a block: a softmax with so many takes the compiler 10 s, with twice as many 43
NO_TEXT = "def kernel(): pass\n"  # every line of a candidate's text as Triton sees it, which is given the tree instead


class KernelError(Exception):
    """A kernel that a GPU would refuse, or that takes too long to compile.

    `line`: the candidate's, where known; `stage`: compile or launch.
    """

    def __init__(self, message, line=None, stage="compile"):
        super().__init__(message)
        self.line = line
        self.stage = stage


# ---------------------------------------------------------------------------------------------------------------------
# From the candidate's text: only Triton's own language, nothing else of Python

BUILTINS = {name: getattr(builtins, name) for name in KERNEL_BUILTINS}
MEMBERS = {"value", "type", "dtype", "shape", "element_ty", "ALL", "NONE"}
for cls in (tl.tensor, tl.dtype, tl.block_type, getattr(tl, "tensor_descriptor", tl.tensor)):
    MEMBERS |= {name for name in dir(cls) if not name.startswith("_")}


def decorator(node, name):
    """A function's decorator of this name (@triton.jit, @jit or @triton.jit(...) for "jit"), or None."""
    for found in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
        if ast.unparse(getattr(found, "func", found)).split(".")[-1] == name:
            return found


def is_kernel(node):
    """Is this AST node a function that is compiled for the GPU, or one that runs while another is compiled?"""
    return decorator(node, "jit") is not None or decorator(node, "constexpr_function") is not None


def statements(body):
    """Statements with those inside of `if`, `try`, `with` and classes, not those of functions.

    Of a name that is imported in two branches the last one counts; so what is `else` or `except` comes first.
    """
    for node in body:
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for block in ("handlers", "orelse", "body", "finalbody"):
                yield from statements(getattr(node, block, []))


def member(owner, name):
    """What a kernel may use as `owner.name`, where the owner is a module; else None."""
    found = getattr(owner, name, None)
    home = getattr(found, "__name__" if inspect.ismodule(found) else "__module__", None)
    if name.startswith("_"):
        return None
    if owner is triton or inspect.ismodule(found):
        return found if name in KERNEL_HELPERS or home in KERNEL_MODULES and inspect.ismodule(found) else None
    language = isinstance(found, (tl.dtype, tl.constexpr, jit.JITCallable)) or tl.core.is_builtin(found)
    libdevice = inspect.isfunction(found) and home == owner.__name__ and home.endswith(".libdevice")
    return found if language or libdevice or name in KERNEL_TYPES else None


def find(path):
    """What a kernel may use by a path that begins with "triton", or None."""
    root, *names = path.split(".")
    found = triton if root == "triton" else None
    for name in names:
        found = member(found, name) if inspect.ismodule(found) else None
    return found


def imported(body):
    """{name: path} of what statements import of Triton that kernels may use, or give a name of their own."""
    bound = {"triton": "triton"}
    for node in body:
        found = []
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found = [(name.split(".")[0], name.split(".")[0] if "." in name else path)  # `import a.b` binds a
                     for name, path in imports(ast.Module([node], []))]
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):  # sine = tl.math.sin
            root, *rest = dotted(node.value) or [""]
            found = [(node.targets[0].id, ".".join([bound.get(root, ""), *rest]))]
        for name, path in found:
            if find(path) is not None:
                bound[name] = path
            elif isinstance(node, ast.Assign):
                bound.pop(name, None)
    return bound


def check_kernel(node, scope):
    """Raise KernelError unless the function uses only what Triton's language has.

    Interpreting runs a kernel's body as Python, so this is the border: no imports, no names but Triton's, the kernels
    and the constants in `scope`, no attribute that is not a member of Triton's tensors and types. Defaults are run when
    the kernel is defined, so they call nothing.
    """
    local = {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)} | {
        n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}

    def refuse(child, what, why="is not available inside a Triton kernel"):
        raise KernelError(f"{what} {why}", getattr(child, "lineno", node.lineno))

    def resolve(child):
        """The object that a dotted name rooted in a module stands for, or None when it is not rooted in one."""
        names = dotted(child)
        if not names or names[0] in local:
            return None
        found = scope.get(names[0])
        for count, name in enumerate(names[1:], 2):
            if not inspect.ismodule(found):
                return None
            owner, found = found, member(found, name)
            if found is None:
                exists = hasattr(owner, name) or name.startswith("_")
                refuse(child, ".".join(names[:count]), *([] if exists else [f"is not in triton {triton.__version__}"]))
        return found

    for default in filter(None, [*node.args.defaults, *node.args.kw_defaults]):
        if any(isinstance(child, ast.Call) for child in ast.walk(default)):
            refuse(default, f"a default that is computed ({ast.unparse(default)})")
    for child in ast.walk(node):
        if not isinstance(child, KERNEL_SYNTAX) or child is not node and isinstance(child, ast.FunctionDef):
            refuse(child, f"`{ast.unparse(child).strip().splitlines()[0][:60]}`")
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Load) and child.id not in local:
            if child.id not in scope and child.id not in BUILTINS:
                raise KernelError(f"NameError: {child.id} is not defined for the kernel", child.lineno)
        if isinstance(child, ast.Attribute) and resolve(child) is None:
            if inspect.ismodule(resolve(child.value)) or child.attr not in MEMBERS:
                refuse(child, ast.unparse(child))


def simplify_annotation(parameter):
    """Of annotations only tl.constexpr and types of numbers mean anything: remove any other."""
    text = ast.unparse(parameter.annotation).strip("'")
    if not re.fullmatch(r"([\w.]+\.)?constexpr", text):
        kind = jit._normalize_ty(text)
        kept = ast.copy_location(ast.Constant(kind), parameter)
        parameter.annotation = kept if kind in jit.type_canonicalisation_dict.values() else None


def build(code, constants):
    """The @triton.jit functions of a candidate's source, other functions' own excepted, and nothing else of it.

    Returns {name: JITFunction} and the text of all that they are made of, without comments and places.
    `constants` are the values of global names that kernels may use. Raises KernelError for a kernel that reaches
    outside Triton's language.
    """
    body = list(statements(ast.parse(code).body))
    known = imported(body)
    scope = {"triton": triton, "tl": tl, **constants, **{name: find(path) for name, path in known.items()}}
    nodes = {node.name: node for node in body if is_kernel(node)}
    if len(nodes) < sum(map(is_kernel, body)):  # which one is launched?
        raise KernelError("two kernels have the same name")
    options = {name: decorator(node, "jit") for name, node in nodes.items()}
    scope.update(dict.fromkeys(nodes, True))
    for node in nodes.values():
        node.decorator_list, node.returns = [], None
        for parameter in ast.walk(node.args):
            if isinstance(parameter, ast.arg) and parameter.annotation is not None:
                simplify_annotation(parameter)
        check_kernel(node, scope)
    linecache.cache[FILE] = (0, None, [NO_TEXT] * max([node.end_lineno for node in nodes.values()], default=0), FILE)
    scope.update(__name__="kernels", __builtins__=dict(BUILTINS))
    exec(compile(ast.Module(list(nodes.values()), []), FILE, "exec"), scope)
    text, kernels = "\n".join(map(ast.unparse, nodes.values())) + repr((known, constants)), {}
    for name, node in nodes.items():
        if options[name] is None:
            scope[name] = triton.constexpr_function(scope[name])
            continue
        scope[name] = kernels[name] = kernel = triton.jit(scope[name])
        kernel.parse = lambda node=node: ast.Module([copy.deepcopy(node)], [])
        kernel.imported, kernel.hash = known, hashlib.sha256((name + text).encode()).hexdigest()  # not of NO_TEXT
    return kernels, text


# ---------------------------------------------------------------------------------------------------------------------
# Compiling for a real target


@contextlib.contextmanager
def as_kernel_error(kernel):
    """Within it, what the compiler raises becomes a KernelError with the compiler's message and the candidate's line.
    """
    try:
        yield
    except KernelError as error:
        error.line = error.line or kernel.fn.__code__.co_firstlineno
        raise
    except Exception as error:
        line, inner = None, error
        while inner is not None and hasattr(inner, "node"):  # an error in a called function is wrapped in its caller's
            error, inner = inner, inner.__cause__
            if error.node is not None and error.src == NO_TEXT:  # not a line of Triton's own functions
                line = error.node.lineno
        text = getattr(error, "error_message", None) or str(error).strip().split("\n")[-1] or type(error).__name__
        raise KernelError(f"{type(error).__name__}: {text}", line) from None


def check_shared_memory(size):
    if size > 227 * 1024:
        raise KernelError(f"out of resource: shared memory, required {size} bytes, limit 232448")


def translated(kernel, arguments, options):
    """One specialisation in Triton's own representation, for sm_90: (module, stages that follow, metadata).

    arguments, options: as of compile_kernel. Raises KernelError for blocks on which the compiler would work for long.
    """
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource, make_backend

    signature, constants = {}, {}
    for parameter in kernel.params:
        value = arguments[parameter.name]
        runtime = isinstance(value, (torch.Tensor, TensorDescriptor, tuple, int, float)) and not (
            isinstance(value, int) and value == 1)
        if parameter.is_constexpr or not runtime:  # Triton specialises on None and on 1, as on a constexpr
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        else:
            signature[parameter.name] = parameter.annotation_type or jit.mangle_type(value)
    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    source = ASTSource(kernel, signature, constexprs=constants)
    settings = backend.parse_options(options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages, metadata = {}, {"hash": "", "target": target, **settings.__dict__}
    backend.add_stages(stages, settings, source.language)
    module = source.make_ir(target, settings, backend.get_codegen_implementation(settings),
                            backend.get_module_map(), context)
    shapes, threads = re.findall(r"tensor<((?:\d+x)+)", str(module)), 32 * settings.num_warps
    largest = max((math.prod(map(int, shape.split("x")[:-1])) for shape in shapes), default=1)
    if largest > MOST_PER_THREAD * threads:
        raise KernelError(f"compiling takes too long: a block of {largest} elements for {threads} threads, at most "
                          f"{MOST_PER_THREAD} for each: use smaller blocks, or more warps")
    return module, stages, metadata


def compile_kernel(kernel, arguments, options):
    """Compile one specialisation for sm_90. Raises KernelError with the compiler's message.

    arguments: {parameter: value}, tensors for pointers (of any device, also meta); options: num_warps and others.
    Nothing runs the result, so compiling ends with LLVM's code: what follows it (LLVM's PTX, ptxas) has little left to
    refuse and takes a fifth of the time.
    """
    with as_kernel_error(kernel):
        module, stages, metadata = translated(kernel, arguments, options)
        for stage, lower in stages.items():
            if stage == "ptx":
                break
            module = lower(module, metadata)
        check_shared_memory(metadata.get("shared", 0))


def compile_for_device(kernel, arguments, options):
    """Compile a launch to the machine code of the GPU, with what launches it, into Triton's folder of compiled kernels.

    In a process that pretends to have the GPU (recorder.pretend_gpu). arguments: as in compile_kernel, tensors of the
    same alignment as those of the launch. Raises KernelError.
    """
    from triton.backends.nvidia.driver import CudaLauncher

    with as_kernel_error(kernel):
        translated(kernel, arguments, options)  # for what it refuses: a few milliseconds
        found = kernel.run(**arguments, **options, grid=(1, 1, 1), warmup=True)
        check_shared_memory(found.metadata.shared)
        CudaLauncher(found.src, found.metadata)  # a C compiler builds it


def warm_up():
    """Compile something, so that forks of this process find the compiler's libraries loaded (0.1 s)."""
    kernel = build("@triton.jit\ndef copy(x, y):\n    tl.store(y, tl.load(x))", {})[0]["copy"]
    compile_kernel(kernel, {"x": torch.empty(0), "y": torch.empty(0)}, {})

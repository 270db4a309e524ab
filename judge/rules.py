"""What a candidate may not do, on one page of tables.

The static check looks at the whole text, in the recorder, before anything of it runs. A candidate's Python is jailed
without reference, answers or clock, so these rules protect little: they tell a model clearly that an attempt was seen,
and keep compilers from passing for kernels. The other tables limit what is run in the judge: a program's operators and
launch options and, without a GPU, what kernels are made of. With a GPU, whatever Triton compiles is accepted.
"""

import ast
import contextlib
import threading

from judge.verdict import Failed, describe

MOST_BYTES = 256_000  # of a candidate's text; pool.py looks
LONGEST_PATH = 8  # names in a dotted path; longer ones are not looked at, so that reading takes linear time

# ---------------------------------------------------------------------------------------------------------------------
# Static check

# No kernel needs them. They read the process's memory, start others, or act on the process that records the forward.
MODULES = {"ctypes", "cffi", "gc", "subprocess", "multiprocessing", "socket", "signal"}

# They lead to the frames and classes of the code that records the forward. The last one tells a candidate in CUDA C++
# whether it is being captured: then it could do less whenever it is timed.
ATTRIBUTES = {"_getframe", "f_back", "f_globals", "f_locals", "tb_frame", "settrace", "setprofile", "__subclasses__",
              "is_current_stream_capturing", "_cuda_isCurrentStreamCapturing"}

# They generate the kernels that the candidate should write. torch._inductor.runtime, its helpers, is allowed.
COMPILERS = {"torch.compile", "torch.jit.script", "torch.jit.trace", "torch._dynamo", "torch._inductor.compile",
             "torch._inductor.compile_fx", "torch._inductor.aot_compile", "torch._inductor.standalone_compile"}

TEXT_RUNNERS = {"exec", "eval", "__import__"}  # they run text that this check has not seen

# ---------------------------------------------------------------------------------------------------------------------
# Programs. Other launch options name files, go to ptxas's command line, or start a launch before the last has ended.

LAUNCH_OPTIONS = {"num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion", "debug"}
# Operators that reach memory or files outside of a program's tensors, or write to the judge's output.
REFUSED_OPERATORS = {"from_file", "set", "set_", "resize", "resize_", "resize_as", "resize_as_", "_resize_output",
                     "_resize_output_", "_print", "set_grad_enabled", "_cufft_set_plan_cache_max_size"}

# ---------------------------------------------------------------------------------------------------------------------
# Kernels without a GPU, where their bodies run as Python. interpreter.py adds the names in Triton's own modules.

KERNEL_SYNTAX = tuple(getattr(ast, name) for name in (
    "Assign AugAssign AnnAssign For While If Expr Return Pass Assert operator unaryop boolop cmpop BinOp UnaryOp "
    "BoolOp Compare IfExp Subscript Slice Tuple List ListComp comprehension Constant JoinedStr FormattedValue "
    "Starred expr_context FunctionDef arguments arg Call keyword Attribute Name").split())
KERNEL_BUILTINS = "range min max len int float bool abs tuple print isinstance sum str".split()
KERNEL_HELPERS = {"cdiv", "next_power_of_2"}  # of the module triton itself

# ---------------------------------------------------------------------------------------------------------------------
# Reading a text

_parsing = threading.Lock()


def parse(text) -> ast.Module:
    """ast.parse, for threads: in two at once it can raise SystemError (CPython 3.11)."""
    with _parsing:
        return ast.parse(text.removeprefix("\ufeff"))  # a byte order mark


def dotted(node) -> list:
    """["a", "b", "c"] for the syntax of a.b.c; an empty list for anything but a dotted path."""
    names = []
    while isinstance(node, ast.Attribute) and len(names) < LONGEST_PATH:
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def imports(tree):
    """(name, what it stands for) of all that a source imports: ("F", "torch.nn.functional"), for example.

    The name has dots in `import a.b`, which binds a; what it stands for begins with a dot in a relative import.
    """
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            package = "." * node.level + f"{node.module or ''}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                yield alias.asname or alias.name, package + alias.name


def offence(tree):
    """(why the static check refuses a candidate, line or None), or None."""
    names = {}  # {name: the module, or what of a module, that it stands for}
    for name, path in imports(tree):
        if path.split(".")[0] in MODULES:
            return f"imports {path}", None
        root = name.split(".")[0]
        names[root] = path if name == root else root  # `import a.b` binds a
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            return f"uses {node.attr}", node.lineno
        if isinstance(node, (ast.Attribute, ast.Name)):
            root, *rest = dotted(node) or [""]
            path = ".".join([names.get(root, root), *rest])
            if path in COMPILERS:
                return f"uses {path} in place of a kernel", node.lineno
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in TEXT_RUNNERS:
            return f"calls {node.func.id}", node.lineno
    return None


def static_check(text):
    """Raise Failed for a text that does not parse, breaks a rule, or has no ModelNew. Nothing of it is run."""
    try:
        tree = parse(text)
        found = offence(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        why, line = describe(error)
        raise Failed(f"does not parse: {why}", "parse", line) from None
    if found:
        raise Failed(found[0], "rejected", found[1])
    if not any(isinstance(node, ast.ClassDef) and node.name == "ModelNew" for node in ast.walk(tree)):
        raise Failed("the code defines no class ModelNew", "parse")


def has_extension(text) -> bool:
    """Does it have nvcc compile CUDA C++? That takes most of a minute, and cannot be recorded."""
    if "load_inline" not in text:
        return False
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):  # static_check says so
        calls = [node.func for node in ast.walk(parse(text)) if isinstance(node, ast.Call)]
        return any(dotted(function)[-1:] == ["load_inline"] for function in calls)
    return False

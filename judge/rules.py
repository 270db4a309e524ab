"""What a candidate may not do, on one page of tables.

The static check looks at the whole text, in the recorder, before anything of it runs. A candidate's Python is jailed
without reference, answers or clock, so these rules protect little: they tell a model clearly that an attempt was seen,
and keep compilers from passing for kernels. What Triton compiles is accepted, however it is spelt.
"""

import ast

from judge.verdict import Failed, describe

MOST_BYTES = 256_000  # of a candidate's text; pool.py looks
LONGEST_PATH = 8  # names in a dotted path; longer ones are not looked at, so that reading takes linear time

# ---------------------------------------------------------------------------------------------------------------------
# Static check

# No kernel needs them. They read the process's memory, start others, or act on the process that records the forward.
MODULES = {"ctypes", "cffi", "gc", "subprocess", "multiprocessing", "socket", "signal"}

# They lead to the frames and classes of the code that records the forward.
ATTRIBUTES = {"_getframe", "f_back", "f_globals", "f_locals", "tb_frame", "settrace", "setprofile", "__subclasses__"}

# They generate the kernels that the candidate should write. torch._inductor.runtime, its helpers, is allowed.
COMPILERS = {"torch.compile", "torch.jit.script", "torch.jit.trace", "torch._dynamo", "torch._inductor.compile",
             "torch._inductor.compile_fx", "torch._inductor.aot_compile", "torch._inductor.standalone_compile"}

TEXT_RUNNERS = {"exec", "eval", "__import__"}  # they run text that this check has not seen

# ---------------------------------------------------------------------------------------------------------------------
# Reading a text


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
        if isinstance(node, ast.Call) and dotted(node.func)[-1:] == ["load_inline"]:
            raise Failed("CUDA C++ (load_inline) is not judged here: write the kernel in Triton", "parse", node.lineno)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in TEXT_RUNNERS:
            return f"calls {node.func.id}", node.lineno
    return None


def static_check(text):
    """Raise Failed for a text that does not parse, breaks a rule, or has no ModelNew. Nothing of it is run."""
    try:
        tree = ast.parse(text)
        reason = offence(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        why, line = describe(error)
        raise Failed(f"does not parse: {why}", "parse", line) from None
    if reason:
        raise Failed(reason[0], "rejected", reason[1])
    if not any(isinstance(node, ast.ClassDef) and node.name == "ModelNew" for node in ast.walk(tree)):
        raise Failed("the code defines no class ModelNew", "parse")


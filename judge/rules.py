"""What a candidate may not do, on one page: which rule applies where, and why.

    rule               looked at by                      kind     why
    static check       judgement.static_check, in the    denies   the few things with which a candidate could fool the
                       scorer, before anything runs               process that runs it; the reason is told
    kernels            compiler.check_kernel, member     allows   where there is no GPU a kernel's body runs as Python,
                                                                  in a process that must hold none of the candidate's;
                                                                  with one it is compiled by such a process
    ATen operators     prices.refusal, in the scorer,    allows   a recording may name any operator: some leave their
                       before the program is replayed             tensors, and most do more work than their bytes show
                                                                  (which the measured clock sees)

Each section below holds the tables of one rule; the last function is what the static check refuses.
"""

import ast
import re
import threading

_parsing = threading.Lock()


def parse(code) -> ast.Module:
    """ast.parse, for threads: in two at once it can raise SystemError (CPython 3.11)."""
    with _parsing:
        return ast.parse(code)


def dotted(node):
    """["a", "b", "c"] for the syntax of a.b.c, an empty list for what is no dotted name."""
    names = []
    while isinstance(node, ast.Attribute):
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


# ---------------------------------------------------------------------------------------------------------------------
# Static check: the whole source

ATTACKS = {  # modules that a kernel has no use for, but an attack on the process that runs it has
    "ctypes", "cffi", "gc", "inspect", "threading", "_thread", "multiprocessing", "concurrent", "asyncio", "subprocess",
    "socket", "signal", "fcntl", "importlib", "builtins"}
# Attributes that lead from an object to the interpreter's insides, or say that a CUDA graph is being recorded: what is
# recorded is what will be timed.
INSIDES = {
    "__subclasses__", "__globals__", "__builtins__", "__code__", "__closure__", "_getframe", "f_back", "f_globals",
    "f_locals", "tb_frame", "settrace", "setprofile", "is_current_stream_capturing", "_cuda_isCurrentStreamCapturing"}
COMPILERS = {"torch.compile", "torch.jit", "torch._dynamo", "torch._inductor"}  # they write the kernels themselves
TEXT_RUNNERS = {"exec", "eval", "__import__"}  # run what no check has seen

# ---------------------------------------------------------------------------------------------------------------------
# Kernels: Triton's language and nothing else of Python. compiler.py adds the members of Triton's types.

KERNEL_SYNTAX = tuple(getattr(ast, name) for name in (
    "Assign AugAssign For While If Expr Return Pass Assert operator unaryop boolop cmpop BinOp UnaryOp BoolOp Compare "
    "IfExp Subscript Slice Tuple List ListComp comprehension Constant JoinedStr FormattedValue Starred expr_context "
    "FunctionDef arguments arg AnnAssign Call keyword Attribute Name").split())
KERNEL_BUILTINS = "range min max len int float bool abs tuple print isinstance sum str".split()
KERNEL_HELPERS = {"cdiv", "next_power_of_2"}  # of the module triton itself
KERNEL_MODULES = {"triton.language", *(f"triton.language.{name}" for name in (
    "core math standard random target_info extra extra.libdevice extra.cuda extra.cuda.libdevice").split())}
KERNEL_TYPES = {"tensor", "tensor_descriptor", "dtype", "block_type", "pointer_type", "constexpr", "const", "range",
                "static_range", "tuple", "slice", "condition", "PropagateNan", "TRITON_MAX_TENSOR_NUMEL"}

# ---------------------------------------------------------------------------------------------------------------------
# Launch options. Others name files, go to ptxas's command line, or let a launch begin before the last one has ended.

LAUNCH_OPTIONS = {"num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion", "debug"}

# ---------------------------------------------------------------------------------------------------------------------
# ATen operators, where there is no GPU

# In the candidate's process nothing is computed, so a forward cannot decide by what it computes.
HOST_READS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique", "_unique2"}
REFUSED_OPERATORS = {"from_file", "set", "resize", "_resize_output"}  # they reach outside of a recording's tensors
# A candidate may call what is known to be worth its price: what PyTorch calls pointwise or a view (also in place or
# for lists of tensors), what makes tensors of none, what prices.py has by name, and these. Anything else only where the
# reference calls it: then it costs both the same. On complex numbers only pointwise operators and views are known.
ONE_PASS = re.compile(  # they read their inputs once and write their outputs once
    r"_(log_|safe_)?softmax|hardswish|glu|_prelu_kernel|floor_divide|addr|nll_loss(2d)?_forward|exponential"
    r"|cat|stack|repeat|flip|roll|rot90|tril|triu|diag_embed|block_diag|trace|pixel_(un)?shuffle|native_channel_shuffle"
    r"|im2col|col2im|(reflection|replication)_pad[123]d|upsample_(nearest[123]d|linear1d|bilinear2d|trilinear3d)"
    r"|native_dropout|index_(put|fill|add)|scatter(_add|_reduce)?")  # they check their indices
REFERENCE_ONLY = re.compile(  # although prices.py has them
    r".*backward.*|_reshape_alias.*|_?nested.*"  # they go where an index or a stride says, and some do not check it
    r"|_?empty_(permuted|.*quantized)"  # what is not initialised and not poisoned
    r"|_*(mkldnn|fbgemm|nnpack|quantized|slow_conv).*"  # no GPU has them
    r"|conv_tbc|_foreach.*"  # one product for each tap; one kernel for each tensor, if not all are dense and alike
    r"|median|nanmedian|kthvalue|mode"  # they sort, but cost no more than a sum
    r"|_*scaled_dot_product.*")  # a product, a softmax and a product in one: cheaper than any of them

# ---------------------------------------------------------------------------------------------------------------------
# The static check


def offence(tree):
    """Why the static check refuses a candidate's syntax tree, or None."""
    names = {"torch": "torch", "triton": "triton", "time": "time"}  # {what stands for a module or a part of one: which}
    for name, path in imports(tree):
        if path.split(".")[0] in ATTACKS:
            return f"imports {path}"
        root = name.split(".")[0]
        names[root] = path if name == root else root  # `import a.b` binds a
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Name)) and (reason := offending_name(node, names)):
            return reason
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            target = ast.unparse(node.args[0]) if node.args else ""
            if node.func.id in TEXT_RUNNERS:
                return f"calls {node.func.id}"
            if node.func.id in ("setattr", "delattr") and target.split(".")[0] in names:
                return f"replaces an attribute of {target}"
    return None


def offending_name(node, names):
    """What is wrong with the use of a name or an attribute, or None. names: see `offence`."""
    if isinstance(node, ast.Attribute) and node.attr in INSIDES:
        return f"reaches for {node.attr}"
    root, *rest = dotted(node) or [""]
    if COMPILERS & {".".join([root, *rest]), ".".join([names.get(root, ""), *rest])}:
        return f"uses {ast.unparse(node)} in place of a kernel"
    if rest and root in names and not isinstance(node.ctx, ast.Load) and \
            not ".".join([root, *rest]).startswith("torch.backends."):  # the only ones that a candidate may set
        return f"replaces {ast.unparse(node)}"

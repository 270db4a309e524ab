"""Lazy advice (paper: proposals that tell the reader not to write a kernel are rejected), found by its words."""

import re

# Advice to write no kernel or to leave work out (release: skill_summary_env.py). A skill may mention torch: what stays
# a torch call, what is replaced, what is slower. A phrase begins and ends at a word; a blank is also `-` or `_`.
_LIBRARY = "(the )?(torch.compile|torch.jit|inductor|cublas|cublaslt|cudnn|cutlass)"
_LAZY = [re.compile(rf"\b({phrase})\b", re.IGNORECASE) for phrase in (
    rf"f[ae]ll(s|ing)? ?back (to|on) ({_LIBRARY}|(the )?(eager|native|library|reference|(py)?torch))",
    rf"(us(e|ing)|call(ing)?|prefer|rely on) {_LIBRARY}",
    rf"(leave|hand|delegate|wrap) [^.]{{1,50}} (to|in|with) ({_LIBRARY}|(py)?torch)",
    "(just|simply|only) (use|call|keep) (py)?torch",
    "use (the )?(eager|plain|native|built in) (py)?torch",
    r"use torch\.\S+ (directly|instead(?! of torch))",
    "(avoid|instead of|rather than) (writing|custom|(your|our) own) ([a-z]+ ){0,3}kernels?"
    "(?! launch| per | for (each|every) )",
    "skip (writing )?((the|a|custom|cuda|triton) )*kernels?",
    r"(not|[a-z]+n't|never|no need to) write ((a|any|your|own|custom|cuda|triton) )*kernels?",
    r"(not|[a-z]+n't|never) (call|write|use) (cuda|triton)(?! graphs?|\.\w)",
    "drop the ((custom|cuda|triton) )*(kernel|cuda|triton)",
    "skip (the )?(computation|ops?|operators?)(?! by )|eliminate the (kernel|op|operator) entirely",
    "replac(e|ing) the ([a-z]+ )?kernel (with|by) (py)?torch",
)]
# What comes before such words where the advice is the opposite: "do not call cuBLAS"
_TURNED_DOWN = re.compile(r"(\bnot|n't|\b(never|without|avoid|instead of|rather than|than|unlike)) (\w+ ){0,2}$", re.I)


def lazy_advice(text) -> str | None:
    """The words that tell the reader not to write a kernel, or None.

    >>> lazy_advice("Use `torch.compile` instead.")
    'Use torch.compile'
    >>> lazy_advice("Unlike torch.matmul, one kernel keeps the row in registers; do not call cuBLAS.") is None
    True
    """
    text = re.sub(r"```.*?(```|\Z)", "", text, flags=re.DOTALL)  # an example's code gives no advice
    text = " ".join(re.sub("[-_`*]", " ", text).replace("\u2019", "'").split())
    for pattern in _LAZY:
        for match in pattern.finditer(text):
            if not _TURNED_DOWN.search(text[max(0, match.start() - 40):match.start()]):
                return match[0]
    return None

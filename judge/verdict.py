"""The record of how a candidate fared, and how a step of the judgement enters its results."""

import traceback
from dataclasses import dataclass, field

from judge.prices import bytes_in

EXTENSION = "CUDA extension"  # the label of its kernels, which have no names here; no kernel can have this one


@dataclass
class KernelTime:
    name: str  # an ATen operator's or a Triton kernel's name
    share: float  # of the forward's time, 0 to 1, all calls of that name together
    own: bool  # is it one of the candidate's kernels?


@dataclass
class Verdict:
    compiled: bool = False  # the source runs, defines ModelNew, and every launched kernel compiles
    correct: bool = False  # every trial's output agrees within Settings.tolerance
    speedup: float | None = None  # reference_ms / candidate_ms, eager PyTorch being the reference; None unless correct
    coverage: float | None = None  # share of the forward's time in own kernels whose results reach the output
    clock: str = "modelled"  # or "measured"; the two are never compared
    reference_ms: float | None = None
    candidate_ms: float | None = None
    rejected: str | None = None  # the reason, when the candidate was caught cheating; then it is not correct
    error: str | None = None  # one line: what went wrong, otherwise
    speedup_low: float | None = None  # lower end of the speedup's 95 % interval; the speedup itself when modelled
    profile: list = field(default_factory=list)  # [KernelTime], hottest first
    excerpt: str = ""  # the candidate's lines around an error, numbered
    disturbed: bool = False  # something else used the GPU meanwhile: the times scatter, or clearing the cache waits
    bandwidth: float | None = None  # inputs, parameters, outputs once, per candidate_ms: share of the device's rate
    arithmetic: float | None = None  # the reference's FLOPs, likewise: share of the device's fp32 peak
    tuned: list = field(default_factory=list)  # which configurations of its autotuned kernels were cheapest (modelled)


def verdict_from_json(record) -> Verdict:
    """A Verdict out of the objects that it became as JSON, in a scorer's answer or in a file."""
    return Verdict(**record | {"profile": [KernelTime(**entry) for entry in record["profile"]]})


# ---------------------------------------------------------------------------------------------------------------------
# What went wrong


OUT_OF_MEMORY = "OutOfMemoryError"  # how a line of `describe` begins where the GPU's memory did not suffice


def out_of_memory(text) -> bool:
    """Does an error's text say so? In a confined process PyTorch raises another: it may not ask NVML who holds it."""
    return OUT_OF_MEMORY in text or "NVML_SUCCESS" in text


def line_in(error, path):
    """The line of a file in which an exception was raised, or None."""
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == path]
    return lines[-1] if lines else None


def describe(error, path=""):
    """(one line of text, line number in the file `path` or None) for an exception."""
    line = line_in(error, str(path)) or getattr(error, "lineno", None)
    text = str(error)
    if "Error building extension" in text:  # of nvcc's pages of output, what it complains about
        text = "\n".join(["Error building extension"] + [row for row in text.split("\n") if "error:" in row][:2])
    text = " ".join(text.split())
    name = OUT_OF_MEMORY if out_of_memory(text) else type(error).__name__
    return f"{name}: {text}"[:300] if text else name, line


def numbered(code, line, around=2):
    """The candidate's lines around `line`, numbered, or an empty string."""
    lines = code.split("\n")
    if not isinstance(line, int) or not 0 < line <= len(lines):
        return ""
    first, last = max(line - 1 - around, 0), min(line + around, len(lines))
    return "\n".join(f"{i + 1:4d}{'>' if i + 1 == line else ' '} {lines[i]}" for i in range(first, last))[:600]


def failure(error, stage, path="") -> dict:
    """What a process answers whose candidate has failed: see `Failed`."""
    text, line = describe(error, path)
    if hasattr(error, "stage"):  # compiler.KernelError
        stage, text, line = error.stage, str(error)[:300], error.line
    return {"failed": stage, "error": text, "line": line}


class Failed(Exception):
    """The candidate's code failed: `stage` is compile, build or forward; `line` is its line, where known.

    answer: what the process that ran it sent: {"failed": stage, "error": text, "line": number}.
    """

    def __init__(self, answer):
        super().__init__(str(answer.get("error"))[:400])
        self.stage = answer["failed"]
        self.line = answer.get("line")


# ---------------------------------------------------------------------------------------------------------------------
# Entering results


def reject(verdict, reason):
    """Enter that the candidate was caught cheating."""
    verdict.correct = False
    verdict.rejected = reason


def set_failure(verdict, code, stage, error, line=None):
    """Enter that the candidate failed at `stage`, with its lines around `line`."""
    verdict.compiled, verdict.correct = stage != "compile", False
    verdict.error, verdict.excerpt = str(error)[:400], numbered(code, line)


def set_profile(verdict, events, own):
    """Enter profile and coverage. events: [[milliseconds, label, is it an own kernel]]; own: labels that count."""
    total = max(sum(ms for ms, _, _ in events), 1e-9)
    shares = {}
    for ms, label, mine in events:
        shares[str(label), bool(mine)] = shares.get((str(label), bool(mine)), 0.0) + ms / total
    verdict.profile = [KernelTime(label, share, mine) for (label, mine), share in
                       sorted(shares.items(), key=lambda entry: (-entry[1], entry[0]))]
    verdict.coverage = sum(entry.share for entry in verdict.profile if entry.own and entry.name in own)


def set_roofline(verdict, reference, flops, bandwidth, peak, scale=1):
    """Enter how much of the device the candidate uses, counting only what the task cannot do without.

    bandwidth: bytes per millisecond; flops: of the reference's forward; peak: FLOPs per millisecond, or None; scale: by
    how much less a parameter's byte counts.
    """
    first = reference.trial(0)
    needed = bytes_in([first.inputs, first.expected]) + bytes_in(reference.state) / scale
    milliseconds = max(verdict.candidate_ms, 1e-9)
    verdict.bandwidth = needed / milliseconds / bandwidth
    verdict.arithmetic = flops / milliseconds / peak if peak else None


def reaching(names, still_right):
    """The kernels of `names` without which the output is no longer right. still_right(muted names) -> bool."""
    if not names or still_right(sorted(names)):
        return set()
    return {name for name in names if len(names) == 1 or not still_right([name])}

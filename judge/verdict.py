"""The record of how a candidate fared, and how errors become its words.

A Verdict is filled in by judgement.py, step by step; whatever goes wrong with a candidate on the way is a Failed.
"""

import re
import traceback
from dataclasses import dataclass, field


@dataclass
class KernelTime:
    name: str  # an ATen operator's or a Triton kernel's name
    share: float  # of the forward's time, 0 to 1, all calls of that name together
    own: bool  # is it one of the candidate's kernels?


@dataclass
class Verdict:
    compiled: bool = False  # the source runs, defines ModelNew, and every launched kernel compiles
    correct: bool = False  # every trial's output agrees within t of reference.py
    speedup: float | None = None  # reference_ms / candidate_ms, eager PyTorch being the reference; None unless correct
    coverage: float | None = None  # share of the forward's time in own kernels without which the output is wrong
    clock: str = "modelled"  # or "measured"; the two are never compared
    reference_ms: float | None = None
    candidate_ms: float | None = None
    rejected: str | None = None  # the rule that the candidate broke; then it is not correct
    error: str | None = None  # one line: what went wrong, otherwise
    speedup_low: float | None = None  # lower end of the speedup's 95 % interval; the speedup itself when modelled
    profile: list = field(default_factory=list)  # [KernelTime], hottest first
    excerpt: str = ""  # the candidate's lines around an error, numbered
    disturbed: bool = False  # something else used the GPU meanwhile: the times scatter
    bandwidth: float | None = None  # inputs, parameters, outputs once, per candidate_ms: share of the device's rate
    arithmetic: float | None = None  # the reference's FLOPs, likewise: share of the device's fp32 peak
    note: str = ""  # what was not looked at, and why: "its parameters were not perturbed: ..."


def verdict_from_json(record) -> Verdict:
    """A Verdict out of the objects that it became as JSON, in a judge's answer or in a file."""
    return Verdict(**record | {"profile": [KernelTime(**entry) for entry in record["profile"]]})


# ---------------------------------------------------------------------------------------------------------------------
# What went wrong


class Failed(Exception):
    """The candidate failed. stage: "compile" (until all of its kernels are compiled), "rejected" (it broke a rule),
    "forward"; line: the candidate's."""

    def __init__(self, text, stage="forward", line=None):
        super().__init__(text)
        self.stage = stage
        self.line = line


def failure(stage, error, line=None) -> bytes:
    """What a recorder sends in place of a recording: why there is none."""
    return f"failed {stage} {line or ''} {error}".encode(errors="replace")


def failed_in(answer) -> Failed | None:
    """The Failed that a recorder's answer speaks of; None where it may be a recording. Nothing in it is trusted."""
    found = re.fullmatch(rb"failed (compile|forward|rejected) (\d{0,9}) (.*)", answer[:2000], re.DOTALL)
    if found:
        stage, line, error = [part.decode(errors="replace") for part in found.groups()]
        return Failed(error, stage, int(line) if line else None)
    return None


def printable(text) -> str:
    """One line without control characters and lone surrogates, so that no terminal acts on it."""
    return "".join(c if c.isprintable() else " " for c in str(text)[:4000]).strip()


def describe(error, path=""):
    """(one line of text, line number in the file `path` or None) for an exception."""
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == str(path)]
    line = lines[-1] if lines else getattr(error, "lineno", None)
    text = " ".join(printable(error).split())
    name = type(error).__name__
    if "NVML_SUCCESS" in text:  # in a confined process PyTorch, short of memory, may not ask NVML who holds it
        name = "OutOfMemoryError"
    return f"{name}: {text}"[:300] if text else name, line


def numbered(code, line) -> str:
    """The candidate's lines around `line`, two on either side, numbered, or an empty string."""
    lines = code.split("\n")
    if not isinstance(line, int) or not 0 < line <= len(lines):
        return ""
    excerpt = []
    for number in range(max(line - 2, 1), min(line + 2, len(lines)) + 1):
        mark = ">" if number == line else " "
        excerpt.append(f"{number:4d}{mark} {lines[number - 1]}")
    return "\n".join(excerpt)[:600]


# ---------------------------------------------------------------------------------------------------------------------
# Entering results


def set_failure(verdict, code, failed):
    """Enter that the candidate failed. failed: a Failed."""
    text = printable(failed)[:400]
    verdict.compiled = failed.stage != "compile"
    verdict.correct = False
    verdict.excerpt = numbered(code, failed.line)
    if failed.stage == "rejected":
        verdict.rejected = text
    else:
        verdict.error = text


def set_profile(verdict, events, counting):
    """Enter profile and coverage. events: [[milliseconds, label, is it an own kernel]]; counting: labels that count."""
    total = max(sum(ms for ms, _, _ in events), 1e-9)
    shares = {}
    for ms, label, own in events:
        shares[label, own] = shares.get((label, own), 0.0) + ms / total
    verdict.profile = [KernelTime(label, share, own) for (label, own), share in shares.items()]
    verdict.profile.sort(key=lambda entry: (-entry.share, entry.name))
    verdict.coverage = sum(entry.share for entry in verdict.profile if entry.own and entry.name in counting)


def set_roofline(verdict, needed, flops, bandwidth, peak):
    """Enter how much of the device the candidate uses, counting only what the task cannot do without.

    needed: bytes of inputs, parameters and outputs; flops: of the reference's forward; bandwidth: the device's, bytes
    per millisecond; peak: its FLOPs per millisecond, or None.
    """
    milliseconds = max(verdict.candidate_ms, 1e-9)
    verdict.bandwidth = needed / milliseconds / bandwidth
    verdict.arithmetic = flops / milliseconds / peak if peak else None

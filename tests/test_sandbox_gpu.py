"""The measured clock on a GPU. Skips itself where there is none."""

import pytest
import torch

import candidates
from candidates import WITHOUT_LAYER, copied, replaced, verdict
from judge.measured import Side, spoil, unused
from judge.program import raw
from sandbox import Sandbox
from command.files import ROOT, read_lines
from tasks import Task

if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)

# The task of the tests without a GPU, but larger and only what the kernel does
TASK = Task("scaled_silu", 0, replaced(candidates.TASK.source, *WITHOUT_LAYER, ("rows = 64\n\n", ""),
                                       ("torch.randn(rows, 32)", "torch.randn(8192, 2048)"),
                                       ("[32, 2.5]", "[2048, 2.5]")))
HONEST = replaced(candidates.HONEST, *WITHOUT_LAYER)


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox("cuda", trials=3, timeout=40) as box:
        yield box


def test_an_honest_fusion_is_measured_near_its_share_of_the_memory_traffic(sandbox):
    v = verdict(sandbox, TASK, HONEST)
    assert v.correct and v.clock == "measured" and v.rejected is None and v.error is None, v
    # Eager makes three passes over 64 MB (six transfers), the kernel one (two): 3x at best.
    assert 2.0 < v.speedup < 3.6 and v.speedup_low <= v.speedup
    assert 0.02 < v.candidate_ms < 0.2
    assert v.coverage > 0.9 and v.profile[0].name == "bias_silu_scale" and v.profile[0].own


CASES = {case["name"]: case for case in read_lines(ROOT / "results/adversaries/measured.jsonl")}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["kind"] != "open"])
def test_programs_that_cheat_the_measured_clock(name, sandbox):
    """And honest ones that do the same work. A naive checker (the reference's values, once) believes all of them."""
    task, code, kind = Task(name, 0, CASES[name]["task"]), CASES[name]["code"], CASES[name]["kind"]
    verdicts = sandbox.score(task, [code, code + "# again"])
    if kind == "harmless":  # it may be right, but is paid no more than honest work, which is judged as before
        honest = sandbox.score(task, [CASES[name + "_honest"]["code"]])[0]
        assert honest.correct and all(not v.correct or v.speedup < 1.15 * honest.speedup for v in verdicts), verdicts
    else:
        assert [v.correct for v in verdicts] == [kind == "honest"] * 2, verdicts


def test_the_reference_itself_is_as_fast_as_itself():
    waits = Task("waits", 0, replaced(TASK.source, ("        return torch", "        torch.cuda.synchronize()\n"
                                                    "        return torch")))  # cannot be captured
    with Sandbox("cuda", trials=2, require_kernel=False) as box:
        (v,), (slow,) = box.score(TASK, [copied(TASK)]), box.score(waits, [copied(TASK)])
    assert v.correct and 0.97 < v.speedup < 1.03, v
    # Steps that Python calls: behind a long pause the candidate's are launched ahead, the reference waits for its end.
    assert slow.correct and 0.9 < slow.speedup < 5, slow


def test_a_graph_finds_nothing_of_its_earlier_replays():
    inputs = [torch.ones(100_000, device="cuda")]
    side = Side(lambda given: given[0] + 1, {0: inputs}, lambda: None, lambda output, inputs: {"output": output})
    assert side.capture()
    for _ in range(2):
        spoil(unused(side.graphs))
        side.fill({0: inputs})
        output = side.graphs[0][1]
        assert len(raw(output).unique()) == 1 and (output != 2).all()
        side.seconds([0], True)
        assert (output == 2).all()


def test_an_illegal_access_costs_one_verdict(sandbox):
    bad = replaced(HONEST, ("tl.store(out_ptr + offsets,", "tl.store(out_ptr + offsets * 1000003,"))
    broken, good = sandbox.score(TASK, [bad, HONEST + "\n# again\n"])
    assert not broken.correct and broken.error and good.correct, (broken, good)


CONFIGS = "triton.Config({'BLOCK': b}, num_warps=w) for b in (16, 1024, 2048) for w in (4, 8)"


@pytest.mark.parametrize("code, least", [
    (replaced(HONEST, ("BLOCK=1024)", "BLOCK=1024, num_ctas=2)")), 1.0),
    (replaced(HONEST, ("@triton.jit", f"@triton.autotune([{CONFIGS}], key=['n'])\n@triton.jit"), (", BLOCK=1024", ""),
              ("(triton.cdiv(n, 1024),)", "lambda meta: (triton.cdiv(n, meta['BLOCK']),)")), 2.0),
])
def test_clusters_are_launched_and_of_configurations_the_best_is_timed(sandbox, code, least):
    v = verdict(sandbox, TASK, code)
    assert v.correct and least < v.speedup < 3.6, v

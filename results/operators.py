"""How long PyTorch's operators and Triton kernels take on a GPU beside what the modelled clock says of them.

    python results/operators.py --measure operators.json        (needs a GPU; two minutes)
    python results/operators.py results/measured_clock/operators.json

The source of judge/prices.py's factors. The references of synthesised problems (`training_tasks(78)`, which no other
figure is measured on) and the expert's fullest kernels for them run at the batch sizes usual on a GPU, every ATen call
and launch between two events, queued behind a pause, the median of five. The second command works out what the modelled
clock says of the same calls and prints measured / modelled.
"""

import argparse
import contextlib
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
from triton.runtime import jit  # noqa: E402

from judge.replayer import EventClock  # noqa: E402
from instructions import compile_all, load  # noqa: E402
from measured_clock import solved  # noqa: E402
from judge.prices import Call, Clock  # noqa: E402
from policy import score_pairs  # noqa: E402
from sandbox import Sandbox  # noqa: E402
from synthetic.generator import synthesize, training_tasks  # noqa: E402
from tasks import GPU_BATCH_FACTOR, scale_batch  # noqa: E402

SEED = 78


class Calls(Clock):
    """A modelled clock that also collects [operator, milliseconds] of every ATen call that is not free."""

    def __init__(self, parameters):
        super().__init__(parameters)
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = len(self.events)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.events[before:]:
            call = Call(func, args, kwargs or {}, out)
            slow = torch.Tag.pointwise in func.tags and call.slowdown() > 1
            self.calls.append([call.name + (" (broadcast or strided)" if slow else ""),
                               sum(event[0] for event in self.events[before:])])
        return out


def problem(name):
    """The synthesised problem of that name."""
    return synthesize(int(name.split("/")[1]), clutter=True)


def reference(source, device):
    """(model, inputs) of a problem."""
    torch.manual_seed(0)
    module = {}
    exec(compile(source, "reference", "exec"), module)
    with torch.device(device):
        return module["Model"](*module["get_init_inputs"]()).to(device), module["get_inputs"]()


def candidate(name):
    """(model, inputs) of the expert's code for a problem, on a GPU."""
    [(task, code)], module = solved([problem(name)]), {}
    exec(compile(scale_batch(task, GPU_BATCH_FACTOR).source, "reference", "exec"), module)
    with torch.device("cuda"):
        return load(code).ModelNew(*module["get_init_inputs"]()).cuda(), module["get_inputs"]()


def compiled(name):
    """A call of the expert's code, for `compile_all`."""
    model, inputs = candidate(name)
    return torch.no_grad()(lambda: model(*inputs))


@contextlib.contextmanager
def watching(clock):
    """Launches of Triton kernels go through `clock`."""
    launch = jit.JITFunction.run
    jit.JITFunction.run = lambda kernel, *args, **options: launch(kernel, *args, **options) if options.get("warmup") \
        else clock.around(kernel.fn.__name__, True, lambda: launch(kernel, *args, **options))
    try:
        with clock:
            yield
    finally:
        jit.JITFunction.run = launch


def measured(model, inputs):
    """[[operator or kernel, milliseconds, own kernel?]] of one forward on a GPU."""
    runs = []
    model(*inputs)
    for _ in range(5):
        clock = EventClock()
        torch.cuda._sleep(20_000_000)  # clock cycles, in which the host queues everything
        clock.around("nothing", False, lambda: None)
        with watching(clock):
            model(*inputs)
        torch.cuda.synchronize()
        (a, b, _, _), *marks = clock.marks
        pair = a.elapsed_time(b)
        runs.append([(label, max(start.elapsed_time(end) - pair, 1e-4), own) for start, end, label, own in marks])
    torch.cuda.empty_cache()
    return [[calls[0][0], statistics.median(ms for _, ms, _ in calls), calls[0][2]] for calls in zip(*runs)]


def measure(count):
    """{"operators": {problem: [[operator, ms]]}, "kernels": {problem: [[kernel, ms]]}}."""
    names = []
    for task in training_tasks(SEED):
        if task.family not in ("convolution", "network", "diagonal") or len(names) % 3 == 0:
            names.append(task.name)
        if len(names) == count:
            break
    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "operators": {}, "kernels": {}}
    solvable = [task.name for task, code in solved(map(problem, names))
                if task.family != "diagonal" and "@triton.jit" in code]
    compile_all([(compiled, name) for name in solvable])
    for name in names:
        source = scale_batch(problem(name), GPU_BATCH_FACTOR).source
        found["operators"][name] = [[label, ms] for label, ms, _ in measured(*reference(source, "cuda"))]
    for name in solvable:
        found["kernels"][name] = [[label, ms] for label, ms, own in measured(*candidate(name)) if own]
    return found


def compare_operators(found):
    """{operator: [measured / modelled]}, of calls that are modelled to take 10 microseconds or more."""
    ratios = defaultdict(list)
    for name, calls in found.items():
        model, inputs = reference(problem(name).source, "cpu")
        clock = Calls({t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]})
        waiting = iter(calls)
        with clock:
            model(*inputs)
        for operator, ms in clock.calls:  # calls that are free here may have been timed there
            got = next((time for label, time in waiting if label == operator.split(" ")[0]), None)
            if got is None:  # the GPU goes about it in another way
                break
            if ms >= 0.01:
                ratios[operator].append(got / ms)
    return ratios


def compare_kernels(found):
    """{kind of kernel: [measured / modelled]}, of those that take 6 microseconds or more."""
    ratios = defaultdict(list)
    with Sandbox("cpu", trials=1) as box:
        verdicts = score_pairs(box, list(solved(map(problem, found))))
    for calls, verdict in zip(found.values(), verdicts):
        modelled = {entry.name: entry.share * verdict.candidate_ms for entry in verdict.profile if entry.own}
        for kernel in modelled:
            ms = sum(time for label, time in calls if label == kernel)
            if ms >= 0.006:
                ratios[kernel.rstrip("0123456789").split("_")[0].rstrip("0123456789") + " kernel"].append(
                    ms / modelled[kernel])
    return ratios


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", help="milliseconds of every call, as JSON")
    parser.add_argument("--measure", action="store_true", help="write the file instead of reading it")
    parser.add_argument("--count", type=int, default=400, help="problems (default: 400)")
    args = parser.parse_args()
    if args.measure and not torch.cuda.is_available():
        sys.exit("no GPU here")
    torch.set_grad_enabled(False)
    if args.measure:
        Path(args.file).write_text(json.dumps(measure(args.count)))
        return
    found = json.loads(Path(args.file).read_text())
    print(f"{'operator or kernel':34} calls   measured / modelled: median, 10 %, 90 %")
    for ratios in (compare_operators(found["operators"]), compare_kernels(found["kernels"])):
        for name, values in sorted(ratios.items(), key=lambda item: -len(item[1])):
            values.sort()
            print(f"{name:34} {len(values):5}   {statistics.median(values):19.2f} {values[len(values) // 10]:8.2f}"
                  f" {values[-1 - len(values) // 10]:5.2f}")


if __name__ == "__main__":
    main()

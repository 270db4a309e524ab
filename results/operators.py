"""How long PyTorch's operators take on a GPU beside what the modelled clock says: the source of roofline.py's factors.

    python results/operators.py --measure operators.json        (needs a GPU; half a minute)
    python results/operators.py results/measured_clock/operators.json

The references of synthesised problems (`training_tasks(78)`, which no other figure is measured on) run at the batch
sizes usual on a GPU, every ATen call between two events, launches queued behind a pause, the median of five. The
second command works out what the modelled clock says of the same calls and prints measured / modelled.
"""

import argparse
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch  # noqa: E402

from host import EventClock  # noqa: E402
from roofline import Clock, slowdown, tensors_in  # noqa: E402
from synthesizer import synthesize, training_tasks  # noqa: E402
from tasks import GPU_BATCH_FACTOR, scale_batch  # noqa: E402

SEED = 78


class Calls(Clock):
    """A modelled clock that also collects [operator, milliseconds] of every ATen call that is not free."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = len(self.events)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.events[before:]:
            name = func._schema.name.split("::")[1]
            factor = slowdown(name, func, args, tensors_in(args), tensors_in(out))
            slow = torch.Tag.pointwise in func.tags and factor > 1
            self.calls.append([name + (" (broadcast or strided)" if slow else ""),
                               sum(event[0] for event in self.events[before:])])
        return out


def reference(source, device):
    """(model, inputs) of a problem."""
    torch.manual_seed(0)
    module = {}
    exec(compile(source, "reference", "exec"), module)
    with torch.device(device):
        return module["Model"](*module["get_init_inputs"]()).to(device), module["get_inputs"]()


def measured(source):
    """[[operator, milliseconds]] of one forward on a GPU."""
    model, inputs = reference(source, "cuda")
    runs = []
    model(*inputs)
    for _ in range(5):
        clock = EventClock()
        torch.cuda._sleep(20_000_000)  # clock cycles, in which the host queues everything
        clock.around("nothing", False, lambda: None)
        with clock:
            model(*inputs)
        torch.cuda.synchronize()
        (a, b, _, _), *marks = clock.marks
        runs.append([(label, max(start.elapsed_time(end) - a.elapsed_time(b), 1e-4)) for start, end, label, _ in marks])
    return [[calls[0][0], statistics.median(ms for _, ms in calls)] for calls in zip(*runs)]


def measure(count):
    """{name of a problem: measured(its reference)}."""
    found = {}
    for task in training_tasks(SEED):
        if task.family in ("convolution", "network", "diagonal") and len(found) % 3:
            continue
        found[task.name] = measured(scale_batch(task.source, GPU_BATCH_FACTOR))
        torch.cuda.empty_cache()
        if len(found) == count:
            return found


def compare(found):
    """{operator: [measured / modelled]}, of calls that are modelled to take 10 microseconds or more."""
    ratios = defaultdict(list)
    for name, calls in found.items():
        clock, waiting = Calls(), iter(calls)
        model, inputs = reference(synthesize(int(name.split("/")[1]), clutter=True).source, "cpu")
        with clock:
            model(*inputs)
        for operator, ms in clock.calls:  # calls that are free here may have been timed there
            got = next((time for label, time in waiting if label == operator.split(" ")[0]), None)
            if got is None:  # the GPU goes about it in another way
                break
            if ms >= 0.01:
                ratios[operator].append(got / ms)
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
    ratios = compare(json.loads(Path(args.file).read_text()))
    print(f"{'operator':34} calls   measured / modelled: median, 10 %, 90 %")
    for name, values in sorted(ratios.items(), key=lambda item: -len(item[1])):
        values.sort()
        print(f"{name:34} {len(values):5}   {statistics.median(values):19.2f} {values[len(values) // 10]:8.2f}"
              f" {values[-1 - len(values) // 10]:5.2f}")


if __name__ == "__main__":
    main()

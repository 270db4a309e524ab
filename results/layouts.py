"""What channels-last memory does to cuDNN's convolutions: python results/layouts.py [--out FILE]      (needs a GPU)

For convolutions of several shapes: milliseconds of contiguous tensors with and without bias, and of a channels-last
input, once with and once without making it so; and whether the results are the same numbers. cuDNN's kernels work in
channels-last memory, so contiguous tensors are rearranged before and after.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

# (function, input's shape, weight's shape, stride)
CASES = [(F.conv_transpose2d, (32, 64, 256, 256), (64, 64, 4, 4), 2),
         (F.conv_transpose2d, (64, 32, 128, 128), (32, 64, 3, 3), 1),
         (F.conv_transpose3d, (16, 32, 16, 32, 32), (32, 64, 3, 3, 3), 2),
         (F.conv_transpose3d, (16, 64, 24, 48, 48), (64, 128, 3, 3, 3), 2),
         (F.conv2d, (128, 8, 128, 128), (64, 8, 3, 3), 1), (F.conv2d, (128, 64, 128, 128), (128, 64, 3, 3), 1),
         (F.conv2d, (32, 128, 28, 28), (256, 128, 3, 3), 1), (F.conv3d, (16, 32, 32, 64, 64), (64, 32, 3, 3, 3), 1)]


def milliseconds(call) -> float:
    """Median of ten calls."""
    times = []
    for _ in range(12):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return round(statistics.median(times[2:]), 3)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", help="file for the figures")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("results/layouts.py: needs a GPU")
    rows = []
    for function, shape, weights, stride in CASES:
        x, weight = torch.randn(shape, device="cuda"), torch.randn(weights, device="cuda") / 8
        bias = torch.randn(weights[1 if "transpose" in function.__name__ else 0], device="cuda")
        memory = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
        last = x.contiguous(memory_format=memory)
        difference = (function(x, weight, stride=stride) - function(last, weight, stride=stride)).abs().max()
        rows.append({"function": function.__name__, "input": shape, "weight": weights, "stride": stride,
                     "contiguous, bias": milliseconds(lambda: function(x, weight, bias, stride)),
                     "contiguous": milliseconds(lambda: function(x, weight, None, stride)),
                     "made channels-last": milliseconds(
                         lambda: function(x.contiguous(memory_format=memory), weight, None, stride)),
                     "channels-last": milliseconds(lambda: function(last, weight, None, stride)),
                     "largest difference": float(f"{difference.item():.1e}")})
        print(rows[-1], flush=True)
    if args.out:
        Path(args.out).write_text(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__,
                                              "milliseconds": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

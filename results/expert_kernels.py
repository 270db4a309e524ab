"""What the expert's kernels are worth on a GPU, and why they are as they are: python results/expert_kernels.py

    convolutions   cuDNN's by the memory of its input, which works in channels-last memory: contiguous tensors with and
                   without a bias, a channels-last input, one that is made so; the largest difference of the results
    products       torch's in fp32, the expert's, the expert's without copying a second factor whose summed dimension is
                   not contiguous, and with other precisions of tl.dot; the largest error, against float64
    windows        torch's poolings and depthwise convolutions, and the expert's

Milliseconds on the GPU (results/instructions.py), which it needs. cuDNN may compute in TF32, as it does by default.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

from instructions import load, milliseconds  # noqa: E402

from synthetic import expert  # noqa: E402
from tasks import Task  # noqa: E402

# (function, input's shape, weight's shape, stride)
CONVOLUTIONS = [(F.conv_transpose2d, (32, 64, 256, 256), (64, 64, 4, 4), 2),
                (F.conv_transpose2d, (64, 32, 128, 128), (32, 64, 3, 3), 1),
                (F.conv_transpose3d, (16, 32, 16, 32, 32), (32, 64, 3, 3, 3), 2),
                (F.conv_transpose3d, (16, 64, 24, 48, 48), (64, 128, 3, 3, 3), 2),
                (F.conv2d, (128, 8, 128, 128), (64, 8, 3, 3), 1), (F.conv2d, (128, 64, 128, 128), (128, 64, 3, 3), 1),
                (F.conv2d, (32, 128, 28, 28), (256, 128, 3, 3), 1),
                (F.conv3d, (16, 32, 32, 64, 64), (64, 32, 3, 3, 3), 1)]
# (first factor's shape, second one's, what is done with them)
PRODUCTS = [((4096, 4096), (4096, 4096), "x @ y"), ((1024, 8192), (8192, 8192), "x @ y.t()"),
            ((8, 1024, 2048), (2048, 768), "x @ y"), ((16, 1024, 2048), (16, 2048, 768), "torch.bmm(x, y)"),
            ((16384, 32), (32, 16384), "x @ y")]
PRECISIONS = ("ieee", "bf16x3", "bf16x6")
# (layer, input's shape)
WINDOWS = [("AvgPool2d(11)", (16, 64, 1024, 1024)), ("AvgPool2d(3, 2, 1)", (16, 32, 1024, 1024)),
           ("MaxPool2d(3, 2, 1)", (16, 64, 512, 512)), ("MaxPool2d(2)", (128, 64, 128, 128)),
           ("MaxPool3d(3, 1, 1)", (8, 16, 64, 64, 64)), ("MaxPool1d(4)", (64, 64, 32768)),
           ("Conv2d(128, 128, (3, 7), groups=128, bias=False)", (32, 128, 128, 256)),
           ("Conv2d(64, 64, 3, padding=1, groups=64)", (16, 64, 512, 512))]
took = partial(milliseconds, times=3)
PROBLEM = """import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {init}

    def forward(self, {names}):
        return {result}

def get_inputs():
    return [{inputs}]

def get_init_inputs():
    return []
"""


def written(init, shapes, result):
    """(torch's module, source of the expert's) of a problem with these inputs."""
    fields = {"init": init, "names": ", ".join("xy"[:len(shapes)]), "result": result,
              "inputs": ", ".join(f"torch.randn{shape}" for shape in shapes)}
    source = PROBLEM.format(**fields)
    return load(source).Model().cuda(), expert.render(expert.read(Task("measured", 1, source)), expert.ALL).code


def convolution(function, shape, weights, stride):
    x, weight = torch.randn(shape, device="cuda"), torch.randn(weights, device="cuda") / 8
    bias = torch.randn(weights[1 if "transpose" in function.__name__ else 0], device="cuda")
    memory = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    last = x.contiguous(memory_format=memory)
    difference = (function(x, weight, stride=stride) - function(last, weight, stride=stride)).abs().max()
    return {"function": f"{function.__name__}, stride {stride}", "input": shape, "weight": weights,
            "contiguous, bias": took(lambda: function(x, weight, bias, stride)),
            "contiguous": took(lambda: function(x, weight, None, stride)),
            "made channels-last": took(lambda: function(x.contiguous(memory_format=memory), weight, None, stride)),
            "channels-last": took(lambda: function(last, weight, None, stride)),
            "largest difference": difference.item()}


def product(first, second, result):
    model, code = written("pass", [first, second], result)
    x, y = torch.randn(first, device="cuda"), torch.randn(second, device="cuda")
    exact = model(x.double(), y.double())
    copied = ".mT.contiguous().mT"
    assert copied in code and "tf32x3" in code
    found = {"product": f"{list(first)}, {list(second)}: {result}"}
    models = {"torch": model, "expert": load(code).ModelNew(),
              "without the copy": load(code.replace(copied, "")).ModelNew()}
    models |= {name: load(code.replace("tf32x3", name)).ModelNew() for name in PRECISIONS}
    for name, called in models.items():
        found[name] = took(lambda: called(x, y))
        found[f"{name}, error"] = (called(x, y) - exact).abs().max().item()
    return found


def window(layer, shape):
    model, code = written(f"self.layer = nn.{layer}", [shape], "self.layer(x)")
    ours = load(code).ModelNew().cuda()
    ours.load_state_dict(model.state_dict())
    x = torch.randn(shape, device="cuda")
    return {"layer": layer, "input": shape, "torch": took(lambda: model(x)), "expert": took(lambda: ours(x)),
            "largest difference": (model(x) - ours(x)).abs().max().item()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", help="file for the figures")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("results/expert_kernels.py: needs a GPU")
    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    with torch.no_grad():
        for name, cases, measure in (("convolutions", CONVOLUTIONS, convolution), ("products", PRODUCTS, product),
                                     ("windows", WINDOWS, window)):
            found[name] = []
            for case in cases:
                found[name].append({key: float(f"{value:.4g}") if isinstance(value, float) else value
                                    for key, value in measure(*case).items()})
                print(found[name][-1], flush=True)
    if args.out:
        Path(args.out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

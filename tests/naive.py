"""What a first implementation of a sandbox looks like; the cheats of test_cheats.py fool it.

It executes the candidate beside the reference and compares the outputs with allclose at 1e-2. Run as a program, with
Triton's interpreter switched on: python naive.py FOLDER
"""

import json
import os
import sys
from pathlib import Path


def naive(task, code):
    """Is it correct? All in one process, as a first implementation would."""
    import torch

    space = {"__name__": "task"}
    exec(compile(task, "task.py", "exec"), space)
    Path("candidate.py").write_text(code)  # Triton reads a kernel's text from its file
    exec(compile(code, "candidate.py", "exec"), space)
    torch.manual_seed(42)
    reference = space["Model"](*space["get_init_inputs"]())
    torch.manual_seed(42)
    candidate = space["ModelNew"](*space["get_init_inputs"]())
    with torch.no_grad():
        torch.manual_seed(43)
        inputs = space["get_inputs"]()
        candidate(*inputs)  # warm up
        expected = reference(*inputs).clone()
        return bool(torch.allclose(candidate(*inputs), expected, atol=1e-2, rtol=1e-2))


def main():
    """Answer a JSON list of [task, code] on stdin with a line of JSON each, from a fork of its own."""
    import torch  # noqa: F401  once, for all candidates
    import triton  # noqa: F401

    os.chdir(sys.argv[1])
    for task, code in json.load(sys.stdin):
        if os.fork() == 0:
            print(json.dumps(naive(task, code)), flush=True)
            os._exit(0)
        os.wait()


if __name__ == "__main__":
    main()

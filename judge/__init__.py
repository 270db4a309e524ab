"""Everything behind Sandbox: is a candidate correct, and how fast is it? Imports tasks.py and itself only.

    messages.py       how processes speak to each other: values, tensors, GPU memory that both see
    processes.py      how processes are started and ended: the fork server and the supervisors
    confinement.py    what a process is kept from
    gpu_lock.py       who may use the GPU: many to check, one alone to time
    pool.py           who judges what, and when: a queue, threads, scorers and the connections to them
    scorer.py         what each process does: scorer, candidate, compiler, replayer
    rules.py          what a candidate may not do: one page, a table for each rule
    verdict.py        the record of how a candidate fared
    correctness.py    the reference, trials, tolerance
    perturbation.py   parameters other than the constructor's
    judgement.py      the order in which a candidate is judged
    recorder.py       one forward of a candidate, as data
    modelled.py       the clock without a GPU: replays what was recorded, and prices every step
    prices.py         what each step would cost on a GPU
    compiler.py       Triton kernels from a candidate's text, compiled for a GPU that is not there
    interpreter.py    the same kernels, run in numpy
    lockstep.py       Triton's operations and CUDA's libdevice functions, for all programs of a launch at once
    memory.py         what an interpreted kernel may touch, and what that costs
    measured.py       the clock with a GPU
    replayer.py       the process on the GPU that replays what was recorded, under that clock

    pool -- scorer -- candidate                  records; it never has a GPU
               |'---- replayer                   without a GPU: replays, interprets, prices
               '----- compiler, replayer         with one: compiles without it; replays and times on it
"""

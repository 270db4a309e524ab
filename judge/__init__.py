"""Everything behind Sandbox: is a candidate correct, and how fast is it? Imports tasks.py and itself only.

    messages.py       how processes speak to each other: values, tensors, GPU memory that both see
    processes.py      how processes are started and ended: the fork server and the supervisors
    confinement.py    what a process is kept from
    gpu_lock.py       who may use the GPU: many to check, one alone to time
    connection.py     a scorer as the sandbox sees it: orders, answers, requests for the GPU
    scorer.py         what each of them does: scorer, candidate, replayer
    rules.py          what a candidate may not do, and where that is looked at
    correctness.py    trials, tolerance, the verdict
    judgement.py      the order in which a candidate is judged
    modelled.py       the clock without a GPU: record a forward, replay it, price every step
    interpreter.py    Triton kernels in numpy, all programs of a launch at once
    compiler.py       Triton kernels from a candidate's text, compiled for a GPU that is not there
    measured.py       the clock with a GPU
    worker.py         the process that runs a model under it
    client.py         the scorer's side of that process
    side_effects.py   which candidates may share one

    Sandbox -- scorer -- candidate, replayer       without a GPU
                  '----- client -- worker          with one
"""

"""Runs a program that nobody trusts, and says whether it is right and how fast. Imports tasks.py, command/ and itself.

    pool.py           the trainer's side: a queue, and threads that pass candidates to recorders and judges
    processes.py      how processes speak, how they are jailed, limited, started and ended
    recorder.py       in a jail: a candidate's Python runs there, and only there; its forward becomes a program
    rules.py          what a candidate may not do, on one page
    program.py        a program: operators and kernel launches as data, checked once, run on any device
    judgement.py      the judge: a process with one task's reference, and the order in which a candidate is judged
    reference.py      the reference, inputs of trials, tolerance
    interpreter.py    without a GPU: runs a kernel's IR for all programs of a launch at once, and counts what it does
    ir.py             without a GPU: reads that IR, which Triton has compiled the kernel to
    operations.py     without a GPU: what the IR's operations do to tensors; memory
    prices.py         without a GPU: what each step would cost on one
    measured.py       with a GPU: launches compiled kernels, and times both sides
    extension.py      with a GPU: candidates in CUDA C++, each in a process of its own
    verdict.py        how a candidate fared

    pool --- judge server --- judges, each with one task          (without a GPU: a fork of it for each candidate)
       '---- recorder servers, each in a jail --- a recorder for each candidate; it never has a GPU
"""

"""Runs a program that nobody trusts, and says whether it is correct and how fast. Imports tasks.py and command/.

    pool.py           the trainer's side: passes candidates to recorders, and what comes back to judges
    processes.py      how processes are started, jailed, limited and ended; who has the GPU
    recorder.py       in a jail: a candidate's Python runs there, and only there; its kernels are compiled
    forward.py        ... and its forward becomes a program
    program.py        a program: operators and kernel launches as data, run row by row on any device
    judgement.py      the judge: a process that holds tasks, and the order in which a candidate is judged
    reference.py      the reference, its answers, how far they are from float64
    trials.py         ... its structured inputs, and how closely a candidate must agree
    prices.py         without a GPU: what each step would cost on one; its tables are in h200.toml
    ir.py             without a GPU: a kernel's text in Triton's IR becomes operations,
    operations.py     ... what most of them compute, many by operations.toml,
    interpreter.py    ... and how all programs of a launch run at once, and what is counted
    measured.py       with a GPU: launches compiled kernels, and times both sides
    verdict.py        how a candidate fared

    pool --- judge server --- judges, forks of it, each with some tasks
       '---- recorder servers, each in a jail --- a recorder for each candidate, a fork; it never has a GPU
"""

"""What makes large and fast runs possible: a student may skip it. Imports nothing of ours.

    engine.py       add prompts, step, take the replies that ended: which sequences are written when
    slots.py        the keys and values of the sequences that are being written, and how prompts are read
    step.py         one more token of each sequence; on a GPU as one CUDA graph
    prompts.py      on a CPU: slots that share a prompt's keys and values
    attention.py    Triton kernels: attention of one token to the slots; RMSNorm; the head's product in float32
    optimizer.py    Muon for weights that begin at random, AdamW for weights in bfloat16
    train_step.py   a step of supervised training: compiled layers, CUDA graphs
    recompute.py    layers that the backward pass computes again, where memory is short
    plan.py         which models fit on which GPUs
    ranks.py        one process for each GPU of a node: lists and gradients that they share

    backbone -- engine -- step -- slots -- attention          sft -- train_step -- optimizer, ranks
            '-- recompute                                     reinforce -- optimizer, ranks, plan

Words of its own: a *slot* holds one sequence; a *batch* is the list of slots that a step computes; a *block* is a few
tokens of every sequence, launched together; a *text* is what a finished sequence has left in its slot.
"""

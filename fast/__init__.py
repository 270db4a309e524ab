"""The same, faster: what makes large and fast runs possible. It imports nothing from other folders but command/.

A student needs two things of it: backbone.py tells how the engine samples; and with one process, which is the usual
case, `ranks.share`, `gather` and `distribute` give back what they are given. The rest may be skipped.

    engine.py       samples many replies together: prompts in, replies out as they end
    slots.py        the keys and values of the sequences that are being sampled, and the prefill of prompts
    step.py         one more token of each sequence; on a GPU as one CUDA graph
    prompts.py      on a CPU: slots that share a prompt's keys and values
    attention.py    Triton kernels: attention of one token to the slots; RMSNorm as one kernel
    rescore.py      log-probabilities of given tokens in little memory: the head in chunks, layers computed again; how
                    the rows of an update are packed into micro-batches
    optimizer.py    AdamW for weights in bfloat16
    train_step.py   a step of supervised training
    ranks.py        one process for each GPU of a node: lists and gradients that they share

    backbone -- engine -- step, slots -- attention     sft -- train_step -- rescore, optimizer, ranks
            '-- rescore                                         reinforce, run -- optimizer, ranks

Terms of its own: a *slot* holds one sequence; a *batch* is the list of slots that a step computes; a *block* is a few
tokens of every sequence, launched together.
"""

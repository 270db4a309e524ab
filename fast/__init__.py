"""Delete it and all still runs, only slower. Imports nothing of ours.

    engine.py       many replies at once: slots, CUDA graphs, shared prompts
    attention.py    attention over the cache, norms and rotary embedding in Triton
    optimizer.py    AdamW for weights in bfloat16

    backbone -- engine -- attention          sft, reinforce -- optimizer
"""

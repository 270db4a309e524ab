"""Made by program, not by a model: training problems with known solutions, and the tiny model's cold start.

    program.py      operators; a program: a list of steps; its text as a problem, as a user may have written it
    draft.py        a program while it is drawn
    heads.py        what problems begin with
    families.py     kinds of steps, kinds of problems
    kernels.py      one Triton kernel
    planner.py      a program as a solution: which steps join which kernel
    redundant.py    chains of operators of which one may be redundant, and the pairs that no example shows
    training.py     the stream of training tasks; no problem that resembles an evaluation problem may be in it
    examples.py     the five kinds of examples
    lessons.py      examples about redundant operators, long and brief ones
    tiny.py         the tiny model: tokenizer, random weights

    program -.- draft - heads - families ------.- training - examples - lessons - sft.py - tiny
             '- kernels - planner - redundant -'

Their tables are data: operators.toml (how problems spell an operator, how kernels compute it), expressions.toml (of
several operators), words.toml (the vocabulary of problems), kernels.toml (templates), techniques.toml (their texts).

A program is drawn once and printed twice, as a problem and as a solution. Neither text is ever read back, and every
name in a solution stands in its problem: a model cannot learn to guess one.

To add a pointwise operator: a row of operators.toml. To add a formula: a line of expressions.toml, and its kernel's
lines under [triton] there. To add a family: a function and a row of `families.FAMILIES`.
`python sft.py` then trains a model that knows it.
"""

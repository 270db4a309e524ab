"""Made by program, not by a model: training problems, an expert that solves them, and the tiny model's cold start.

    generator.py    problems without end: chains of operators with names, shapes and styles of all kinds
    wording.py      how a drafted problem is written down
    reader.py       the expert's first half: what does this forward compute?
    expert.py       the second: techniques, and a ModelNew that applies some of them
    codegen.py      one Triton kernel, line by line
    examples.py     the five kinds of examples, and the diversity filter
    tiny.py         the tiny model: tokenizer, random weights, evaluation

    generator -> reader -> expert -> examples -> sft.py
"""

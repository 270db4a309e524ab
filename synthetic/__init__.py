"""Made by program, not by a model: training problems, an expert that solves them, and the tiny model's cold start.

    operators.py    the table of operators: how problems spell them, how kernels compute them
    draft.py        a problem while it is being written: names, constants, lines
    chain.py        the operators that follow a problem's head
    heads.py        what a problem begins with; chains and other plain families
    habits.py       how users write: names, helper methods, copies
    networks.py     products, reductions, formulas, losses, lone operators, mixtures, networks of several classes
    generator.py    the narrow and the wide distribution; problems without end
    wording.py      how a drafted problem is written down (its vocabulary: words.txt)
    problem.py      the expert's first half: what does this problem compute?
    reader.py       one function of it, as steps
    templates.py    the kinds of kernels
    codegen.py      one Triton kernel, line by line
    expert.py       its second half: techniques, and a ModelNew that applies some of them (texts: techniques.json)
    examples.py     the five kinds of examples
    tiny.py         the tiny model: tokenizer, random weights

    operators -- draft - chain - heads - habits - networks - generator --.
        |                                                                |-- examples -- sft.py -- tiny
        '------- problem - reader - codegen - expert --------------------'

To add a pointwise operator that the expert can write: a row in `operators.POINTWISE`, and, if problems can also spell
it with other operators, one in `tasks._WRITTEN_OUT`. `python sft.py` then trains a model that knows it.
"""

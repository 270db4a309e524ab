"""What the model reads: prompts, and the chat template that makes token ids of them. It knows no weights.

    prompts.py      the prompts and tools of the three roles, from prompts.yaml or a file of the user's
    release.py      the forms of the paper's release: its prompt files, its limits in tools, its feedback as JSON
    calls.py        a reply's kernel, its tool calls, and what it says after its thoughts
    advice.py       does a skill's text advise to write no kernel?
    template.py     messages to token ids, by the chat template of whatever model it is
    server.py       a model behind a server of OpenAI's protocol, in place of a backbone
    rows.py         conversations to token ids with a mask of what is to be learnt: examples, data files, rollouts

    sft -- rows -- template -- prompts -- prompts.yaml        backbone -- template, calls        selector, policy,
                        `----- calls                                                           summarizer -- prompts
"""

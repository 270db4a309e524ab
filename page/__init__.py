"""The page: 'reads what was found, trains nothing': tables and pictures for whoever looks at results.

    levels.py        a level's summary as a text table and a picture; the machine that it was made on
    strategies.py    test-time strategies beside each other: at equal budgets, best so far

    bench ---> levels, strategies

It imports nothing of the other rooms: it takes the plain records that are also written as JSON.
"""

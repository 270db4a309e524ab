"""The page: 'reads what was found, trains nothing'. Tables, pictures and one HTML page out of what runs have left.

In reading order:

    records.py      files of a folder -> plain records: metrics, skills and their story, rollouts; broken lines counted
    metrics.py      a step's episodes -> its line in metrics.jsonl, and the line that it prints
    charts.py       records -> charts, as SVG for the page and as pictures: curves.png, fast_p.png
    writer.py       records and charts -> report.html, with page.html, style.css and script.js
    levels.py       a benchmark's summary as a text table; the machine that it was made on
    strategies.py   test-time strategies beside each other: at equal budgets, best so far

    (root: report) ---> writer ---> charts ---> records        (root: bench) ---> levels, strategies ---> charts

It imports nothing of the other rooms, so it also shows a run that another version has made, or half of one.
"""

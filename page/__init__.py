"""The page: tables, charts and one HTML page, made from the files that a run or a benchmark has left in its folder.

In reading order:

    records.py      files of a folder -> plain records: metrics, rollouts, skills, where each came from; a run in words
    charts.py       records -> a picture: curves.png
    levels.py       a benchmark's summary as a text table; the machine that it was measured on
    writer.py       records, pictures and tables -> report.html
    page.html       the template that writer.py fills in; style.css its looks; script.js the browser of rollouts

    (root: run) ---> writer ---> records, charts, levels        (root: bench) ---> levels

A *rollout* on the page is any reply, or chain of replies, to one prompt: the Policy's turns, one answer of Selection,
one answer of Summary with its proposals.
"""

"""The page: 'reads a folder's files, trains nothing'. report.html of a run or of a benchmark, out of what it has left.

In reading order:

    records.py   files of a folder -> plain records: metrics, skills and their story, rollouts; broken lines are counted
    charts.py    records -> curves, as SVG for the page and as curves.png
    writer.py    records and charts -> one HTML file, with page.html, style.css and script.js

    (root: report) ---> writer ---> charts ---> records

It imports nothing of the other rooms, so it also shows a run that another version has made, or half of one.
"""

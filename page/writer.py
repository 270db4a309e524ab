"""One HTML file out of records and charts: no network, no server, and small enough to be sent by mail.

The texts of the rollouts are most of it. They are one JSON object, compressed and written in base64, which script.js
unpacks; everything else is plain HTML, so that the page is readable without a script. Models write what they like, so
nothing that comes out of a file becomes markup: Jinja escapes it here, and script.js only ever sets text.
"""

import base64
import difflib
import gzip
import itertools
import json
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from page import charts, records

MOST_TEXT = 12_000_000  # characters of replies on a page: with prompts and feedback 2 to 4 MB when compressed


def render(sources, reasons) -> str:
    """The page of one folder, or of two side by side. reasons: why proposals are rejected, in the order of checks."""
    folder = Path(__file__).parent
    environment = Environment(loader=FileSystemLoader(folder), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    runs = [source for source in sources if source.metrics]
    packed, shown = pack(sources)
    text = environment.get_template("page.html").render(
        sources=sources, runs=runs, charts=charts, panels=list(zip(*map(charts.run_charts, runs))), packed=packed,
        shown=shown, read=lambda name: (folder / name).read_text(), lessons=records.lessons,
        funnel=lambda source: records.funnel(source, reasons))
    return text.encode(errors="replace").decode()  # half a surrogate pair cannot be written to a file


def pack(sources) -> tuple[str, int]:
    """(all rollouts for script.js: JSON, compressed, in base64; how many they are).

    The object is {texts, rollouts}; a prompt that several rollouts have is stored once, `prompt` is its place in
    `texts`. Of a long run not all fit on a page: then every n-th task of a step is there, with all its rollouts, so
    that one stands beside those that it was compared with; and every task whose skill was staged.
    """
    n = 1 + sum(len(turn["reply"]) for s in sources for rollout in s.rollouts for turn in rollout["turns"]) // MOST_TEXT
    texts, rollouts = {}, []
    for source in sources:
        for rollout in every_nth_task(source.rollouts, n):
            rollouts.append(rollout | {"folder": str(source.folder), "turns": with_changes(rollout["turns"]),
                                       "prompt": texts.setdefault(rollout["prompt"], len(texts))})
    data = json.dumps({"texts": list(texts), "rollouts": rollouts}, separators=(",", ":")).encode()
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode(), len(rollouts)


def every_nth_task(rollouts, n) -> list:
    """The rollouts of every n-th task of all steps, and of those whose skill was staged. A task's are in a row."""
    tasks = itertools.groupby(rollouts, key=lambda rollout: (rollout["phase"], rollout["step"], rollout["task"]))
    groups = [list(group) for _, group in tasks]
    kept = [group for i, group in enumerate(groups) if i % n == 0 or any(rollout["staged"] for rollout in group)]
    return sum(kept, [])


def with_changes(turns) -> list:
    """The turns, each but the first with `diff`: how its reply differs from the one before, as a unified diff."""
    changed = list(turns[:1])
    for before, turn in zip(turns, turns[1:]):
        lines = difflib.unified_diff(before["reply"].split("\n"), turn["reply"].split("\n"), n=3, lineterm="")
        changed.append(turn | {"diff": list(lines)[2:]})  # without the two lines that name the files
    return changed

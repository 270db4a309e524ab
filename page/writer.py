"""One HTML file out of records and charts: no network, no server, and small enough to be sent by mail.

The texts of the rollouts are most of it. They are one JSON object, compressed and written in base64, which script.js
unpacks; everything else is plain HTML, so that the page is readable without a script. Models write what they like, so
nothing that comes out of a file becomes markup: Jinja escapes it here, and script.js only ever sets text.
"""

import base64
import gzip
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
        shown=shown, read=lambda name: (folder / name).read_text(), lessons=records.lessons, reasons=reasons)
    return text.encode(errors="replace").decode()  # half a surrogate pair cannot be written to a file


def pack(sources) -> tuple[str, int]:
    """(all rollouts for script.js: JSON, compressed, in base64; how many they are).

    The object is {texts, rollouts}; a prompt that several rollouts have is stored once, `prompt` is its place in
    `texts`. Where not all fit on a page, only every n-th step of a run is there, or every n-th sample of a benchmark.
    """
    characters = 0
    for source in sources:
        for rollout in source.rollouts:
            characters += sum(len(turn["reply"]) for turn in rollout.get("turns", [rollout]))
    n = 1 + characters // MOST_TEXT
    texts = {}
    rollouts = []
    for source in sources:
        for rollout in source.rollouts:
            if rollout.get("index", rollout["step"]) % n == 0:
                place = texts.setdefault(rollout.get("prompt", ""), len(texts))
                rollouts.append(rollout | {"folder": str(source.folder), "prompt": place})
    data = json.dumps({"texts": list(texts), "rollouts": rollouts}, separators=(",", ":")).encode()
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode(), len(rollouts)

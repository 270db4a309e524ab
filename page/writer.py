"""One HTML file out of records and charts: no network, no server, and small enough to be sent by mail.

The texts of the rollouts are most of it. They are one JSON object, compressed and written in base64, which script.js
unpacks; everything else is plain HTML, so that the page is readable without a script. Models write what they like, so
nothing that comes out of a file becomes markup: Jinja escapes it here, and script.js only ever sets text.
"""

import base64
import difflib
import gzip
import json
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from page import charts
from page.records import funnel, lessons

MOST_TEXT = 40_000_000  # characters of replies that are tried first; they become a tenth when compressed
MOST_PACKED = 3_000_000  # bytes of compressed rollouts, before base64 makes them a third longer


def render(sources, reasons) -> str:
    """The page of one folder, or of two side by side. reasons: why proposals are rejected, in the order of checks."""
    folder = Path(__file__).parent
    environment = Environment(loader=FileSystemLoader(folder), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    figures = {title: (caption, Markup(svg)) for title, (caption, svg) in charts.charts(sources).items()}
    seconds = figures.pop(charts.SECONDS, None)
    packed, shown = pack(sources)
    text = environment.get_template("page.html").render(
        sources=sources, charts=figures, seconds=seconds, packed=packed, shown=shown,
        style=Markup((folder / "style.css").read_text()), script=Markup((folder / "script.js").read_text()),
        lessons=lessons, funnel=lambda source: funnel(source, reasons), phases=charts.phases, columns=columns)
    return text.encode(errors="replace").decode()  # half a surrogate pair cannot be written to a file


def columns(source) -> list[str]:
    """The metrics of a run that are numbers, in the order in which they first appear."""
    names = dict.fromkeys(name for line in source.metrics for name in line)
    return [name for name in names if name not in ("clock", "seconds", "rejected")]


def pack(sources) -> tuple[str, int]:
    """(all rollouts for script.js: JSON, compressed, in base64; how many they are).

    The object is {texts, rollouts}; a prompt that several rollouts have is stored once, `prompt` is its place in
    `texts`. Of a long run not all fit on a page: then every n-th task of a step is there, with all its rollouts, so
    that one stands beside those that it was compared with; and every task whose skill was staged.
    """
    characters = sum(len(turn["reply"]) for s in sources for rollout in s.rollouts for turn in rollout["turns"])
    stride = 1 + characters // MOST_TEXT
    while True:
        texts, rollouts = {}, []
        for place, source in enumerate(sources):
            for rollout in every_nth_task(source.rollouts, stride):
                prompt = texts.setdefault(rollout["prompt"], len(texts))
                rollouts.append(rollout | {"source": place, "prompt": prompt, "turns": with_changes(rollout["turns"])})
        data = json.dumps({"texts": list(texts), "rollouts": rollouts}, separators=(",", ":")).encode()
        packed = gzip.compress(data, 9, mtime=0)
        if len(packed) <= MOST_PACKED:
            return base64.b64encode(packed).decode(), len(rollouts)
        stride *= 2


def every_nth_task(rollouts, n) -> list:
    """The rollouts of every n-th task of all steps, and of those whose skill was staged."""
    def key(rollout):
        return rollout["phase"], rollout["step"], rollout["task"]

    kept = set(list(dict.fromkeys(map(key, rollouts)))[::n])
    kept |= {key(rollout) for rollout in rollouts if "staged" in rollout["outcome"]}
    return [rollout for rollout in rollouts if key(rollout) in kept]


def with_changes(turns) -> list:
    """The turns, each but the first with `diff`: how its reply differs from the one before, as a unified diff."""
    changed = list(turns[:1])
    for before, turn in zip(turns, turns[1:]):
        lines = difflib.unified_diff(before["reply"].split("\n"), turn["reply"].split("\n"), n=3, lineterm="")
        changed.append(turn | {"diff": list(lines)[2:]})  # without the two lines that name the files
    return changed

"""One HTML file out of records and pictures: no network and no server.

The rollouts are most of it: one JSON object, which script.js shows. Everything else is plain HTML, so that the page is
readable without a script. Models write what they like, so nothing that comes out of a file becomes markup: Jinja
escapes it here, and script.js only ever sets text.
"""

import base64
import json
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from page import charts, levels, records

MOST_TEXT = 12_000_000  # characters of rollouts on a page, so that it can be sent by mail


def render(sources) -> str:
    """The page of one folder, or of several side by side. sources: a records.Source of each."""
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
    data, shown = rollouts_as_json(sum((source.rollouts for source in sources), []))
    text = environment.get_template("page.html").render(
        sources=sources, runs=[source for source in sources if source.metrics], data=data, shown=shown,
        panels=charts.PANELS, embedded=embedded, lessons=records.lessons, table=levels.table)
    return text.encode(errors="replace").decode()  # half a surrogate pair cannot be written to a file


def embedded(path) -> str:
    """A picture as an address that holds the whole file."""
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


def rollouts_as_json(rollouts) -> tuple[str, int]:
    """(the rollouts for script.js, as JSON that may stand within a script element; how many they are).

    Where not all fit on a page, only every n-th step of a run is there, or every n-th sample of a benchmark.
    """
    n = 1 + len(json.dumps(rollouts)) // MOST_TEXT
    shown = [rollout for rollout in rollouts if rollout.get("index", rollout["step"]) % n == 0]
    return json.dumps(shown).replace("<", "\\u003c"), len(shown)  # no </script> within

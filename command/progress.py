"""What a program shows while it works: how much is done, and what has been counted in the present phase.

    with Progress(6, "step") as progress:
        progress.begin("roll out")      shown: roll out: 31 replies, 12 of at most 48 kernels judged | 0/6 steps
        count("replies")                called by whatever samples, in any thread
        progress.update()               a step is done

On a terminal this is one line, redrawn each second; elsewhere, as in a log file, a line is printed now and then. The
counts belong to the process: the engine and the sandbox count without knowing whether anybody shows it.
"""

import sys
import threading
import time
from collections import Counter

from tqdm import tqdm

PAUSE = 30  # seconds between two lines where there is no terminal
counts, expected = Counter(), Counter()  # what -> how many are done; how many there can be, where that is known
counting = threading.Lock()  # verdicts arrive in other threads


def count(what):
    """One more of it is done."""
    with counting:
        counts[what] += 1


def expect(what, number):
    """At most so many more of it will come."""
    with counting:
        counts[what] += 0
        expected[what] += number


def in_words(things) -> str:
    """How often each thing is there, the most frequent first. things: an iterable of texts, or a Counter.

    >>> in_words(["too slow", "malformed", "too slow"])
    '2 too slow, 1 malformed'
    """
    return ", ".join(f"{number} {thing}" for thing, number in Counter(things).most_common()) or "none"


class Progress:
    """A context in which a thread shows what is done. total, done: numbers of `unit`. hidden: show nothing."""

    def __init__(self, total=0, unit="step", done=0, hidden=False):
        self.total, self.unit, self.done, self.hidden = total, unit, done, hidden
        self.name, self.began = "", time.monotonic()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._show, daemon=True)

    def begin(self, name):
        """A phase begins: it is counted anew."""
        with counting:
            counts.clear()
            expected.clear()
        self.name, self.began = name, time.monotonic()

    def update(self, number=1):
        """So many units are done."""
        self.done += number

    def say(self, text):
        """Print lines to stdout, above the line that is redrawn."""
        tqdm.write(text)
        sys.stdout.flush()  # a file or a pipe gets it now, too

    def line(self) -> str:
        """The line that is shown, without times."""
        parts = []
        with counting:
            for what in sorted(counts, reverse=True):  # replies before kernels
                bound = f" of at most {expected[what]}" if expected[what] else ""
                parts.append(f"{counts[what]}{bound} {what}")
        return f"{self.name}{': ' * bool(parts)}{', '.join(parts)} | {self.done}/{self.total} {self.unit}s"

    def _show(self):
        """Redraw the line, or print it now and then, until the context is left."""
        last = time.monotonic()  # a line was printed
        with tqdm(disable=None, bar_format="{desc} [{elapsed}]", leave=False, delay=1, dynamic_ncols=True) as bar:
            while not self.ended.wait(1.0):
                if not bar.disable:
                    bar.set_description_str(self.line())
                elif time.monotonic() - last > PAUSE:
                    last = time.monotonic()
                    print(f"{self.line()}, {last - self.began:.0f} s", file=sys.stderr, flush=True)

    def __enter__(self):
        if not self.hidden:
            self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        if not self.hidden:
            self.thread.join()

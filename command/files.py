"""Files: found from any current folder, read with one clear error, written in one instant."""

import contextlib
import fcntl
import importlib.util
import json
import os
import pickle
from pathlib import Path

from command.process import UserError

ROOT = Path(__file__).absolute().parent.parent  # of the repository
HELD = {}  # path -> the open file whose lock this process has: see hold


def find_path(path) -> Path:
    """The file or folder of this name or, where there is none, the one in the repository if it is there."""
    if not Path(path).exists() and (ROOT / path).exists():
        return ROOT / path
    return Path(path)


@contextlib.contextmanager
def user_error(problem, kind=UserError):
    """Around the reading of a file: whatever is wrong with it becomes one line, a UserError that begins with `problem`.

    kind: a subclass of UserError to raise instead.
    """
    try:
        yield
    except UserError:
        raise
    except (OSError, EOFError, RuntimeError, KeyError, TypeError, ValueError, pickle.UnpicklingError) as error:
        raise kind(f"{problem} ({type(error).__name__})") from None


def write_atomically(path, text):
    """Replace a file in one instant: a reader, or a process killed here, sees the old text or the new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def read_parquet(path, columns=None) -> list[dict]:
    """The rows of a parquet file, or only these columns of them. Raises UserError without a reader, or a readable file.
    """
    if not importlib.util.find_spec("pyarrow"):
        raise UserError(f"{path}: reading parquet needs a reader: pip install pyarrow")
    with user_error(f"{path}: cannot be read"):
        import pyarrow.parquet  # optional: for such a file only
        return pyarrow.parquet.read_table(path, columns=columns).to_pylist()


def read_lines(path, record=dict) -> list:
    """`record` of each line of a .jsonl file; empty without a file. A last line that a kill has cut off is left out.

    Raises UserError for any other line that cannot be read, or of which no record can be made.
    """
    text = path.read_bytes() if path.is_file() else b""
    records = []
    whole = text[:text.rfind(b"\n") + 1]
    for number, line in enumerate(whole.splitlines(), start=1):
        with user_error(f"{path}, line {number}: cannot be read; mend or remove it"):
            records.append(record(json.loads(line)))
    return records


def hold(folder):
    """Make a folder, and keep it for this process until it ends, killed or not: the system then frees the lock.

    Raises UserError where that cannot be done, and where another process has it.
    """
    path = Path(folder).absolute() / "in_use"
    if path in HELD:
        return
    with user_error(f"--out {folder}: cannot write there"):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise UserError(f"{folder}: in use by process {file.read()}") from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    HELD[path] = file

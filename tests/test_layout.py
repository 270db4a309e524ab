"""The house: which files stand at the root, what the folders' maps name, who imports whom."""

import ast
import re
from graphlib import TopologicalSorter

import pytest

from command.files import ROOT

FILES = ("reinforce advantages selector policy summarizer skills sandbox backbone sft bench tasks run recipes").split()
FOLDERS = ["command", "chat", "judge", "fast", "synthetic", "page"]
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path
           for path in [*ROOT.glob("*.py"), *(path for folder in FOLDERS for path in (ROOT / folder).glob("*.py"))]}


def imports(name) -> set:
    """Our modules that a module imports, wherever in it the import stands."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & set(MODULES)


def test_the_root_is_the_paper():
    assert sorted(path.stem for path in ROOT.glob("*.py")) == sorted(FILES)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folders_map_names_each_of_its_files(folder):
    listed = re.findall(r"^    (\w+\.py)\s", ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text()),
                                                               clean=False), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in (ROOT / folder).glob("*.py") if path.stem != "__init__")


def test_who_may_import_whom():
    may = {"command": {"command"}, "judge": {"judge", "tasks", "command"},
           "chat": {"chat", "judge", "tasks", "command"}, "fast": {"fast", "command"}, "page": {"page", "command"},
           "tasks": {"command"}}  # a jailed process sees tasks.py and command/
    for name in MODULES:
        imported = {other.split(".")[0] for other in imports(name)}
        assert imported <= may.get(name.split(".")[0], imported), name
        assert not imported & {"reinforce", "sft", "bench"}, name


def test_importing_does_not_start_cuda():
    """Else it is too late for a rank of torchrun to choose its GPU. Looked at: a module's own lines, and its fields."""
    for path in MODULES.values():
        assert not re.search(r"^(\w|    \w+: ).*torch\.cuda\.", path.read_text(), re.MULTILINE), path


def test_no_circle():
    list(TopologicalSorter({name: imports(name) for name in MODULES}).static_order())  # raises CycleError

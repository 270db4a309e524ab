"""What is a skill, and how does the library grow and persist?  (Paper: skill library, flush.)

A skill is advice in words. The Summary role writes it, execution verifies it, BM25 finds it again (selector.recall),
and the Policy sees it in its prompt if Selection chooses it. The library is a list of skills in memory, and a
JSON-lines file on disk in the release's format:

    library = SkillLibrary.of_model("checkpoints/tiny")     skill_library.jsonl in the model's folder, or an empty one
    skill = library.add(skill)                              the skill joins, under a unique name
    library.save(path)                                      written in one instant

A skill that passed verification in a training step is *staged*: it joins after the step's update. This file knows
nothing of models or GPUs.
"""

import contextlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from command.files import user_error, write_atomically

MODEL_FILE = "skill_library.jsonl"  # the library that travels with a model


@dataclass(frozen=True)
class Skill:
    """One line of a library file, in the release's format (skill_library.jsonl). It never changes once it is made."""

    name: str
    description: str
    scope: str  # "general" or "task_specific/<family>"; prompts show it, but no metric uses it
    tags: tuple[str, ...]
    content: str  # sections Motivation, Key Idea, Example
    verify_speedup: float | None = None  # of its verification's kernel; None if it was not verified, as a seed skill


def skill_from_json(record) -> Skill:
    """A parsed line as a Skill; unknown fields are ignored. Raises KeyError, TypeError or ValueError if it is no skill.

    The authors' files hold lines without a scope, which we read as general, and tags as one text, which we leave out.

    >>> skill_from_json({"name": "a", "description": "b", "tags": "x, y", "content": "c"})
    Skill(name='a', description='b', scope='general', tags=(), content='c', verify_speedup=None)
    """
    name, description, content = (record[key] for key in ("name", "description", "content"))
    scope = record.get("scope") or "general"
    tags = record.get("tags")
    tags = tuple(tags) if isinstance(tags, list) else ()
    if not all(isinstance(text, str) and text.strip() for text in [name, description, scope, content, *tags]):
        raise ValueError("an empty text")
    speedup = record.get("verify_speedup")
    if type(speedup) not in (int, float, type(None)):
        raise ValueError("verify_speedup is no number")
    return Skill(name.strip(), description, scope, tags, content, speedup)


class SkillLibrary:
    """Skills with unique names, oldest first. So transcripts and metrics can refer to a skill by its name.

    Skills join, after the update of a step (paper: flush), and are never changed or removed.
    """

    def __init__(self, skills=()):
        self.skills: list[Skill] = []
        self.index = None  # BM25 over self.skills: selector.recall builds and keeps it here until a skill joins
        for skill in skills:
            self.add(skill)

    def __len__(self):
        return len(self.skills)

    def add(self, skill) -> Skill:
        """Append a skill. Returns it as it joined: a name that is taken becomes name-2, name-3, ..."""
        taken = {other.name for other in self.skills}
        name, number = skill.name, 1
        while name in taken:
            number += 1
            name = f"{skill.name}-{number}"
        joined = replace(skill, name=name)
        self.skills.append(joined)
        self.index = None
        return joined

    # ---- on disk

    @classmethod
    def load(cls, path):
        """A library from JSON lines. Raises UserError with the number of a line that is no skill.

        Unlike command.files.read_lines it accepts a last line without a line break, since people edit these files.
        """
        library = cls()
        for number, line in enumerate(Path(path).read_bytes().split(b"\n"), start=1):
            if line.strip():
                with user_error(f"{path}, line {number}: not a skill; mend or remove it"):
                    library.add(skill_from_json(json.loads(line)))
        return library

    @classmethod
    def of_model(cls, model):
        """The library in a model's folder, or in its repository on the hub. Without one, an empty library.

        model: a path, or a hub id such as Qwen/Qwen3-8B. A model without a library is no error: the release's runs
        begin with an empty one. Raises UserError as `load` does.
        """
        path = Path(model, MODEL_FILE)
        if not Path(model).is_dir():
            from huggingface_hub import hf_hub_download  # only for hub ids: a folder never needs it
            with contextlib.suppress(OSError, ValueError):  # no such file there, or no network
                path = Path(hf_hub_download(str(model), MODEL_FILE))
        return cls.load(path) if path.is_file() else cls()

    def save(self, path):
        """Write all skills, one line each. A kill leaves the old file or the new one."""
        write_atomically(path, "".join(json.dumps(asdict(skill)) + "\n" for skill in self.skills))

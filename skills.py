"""What is a skill, and how does the library grow, persist and answer?  (Paper: skill library, BM25 recall, flush.)

A skill is a piece of advice in words that the policy may be shown: written by the Summary role, proven by execution,
found again by BM25. The library is a list of them in memory and a JSON-lines file on disk:

    library = SkillLibrary.of_model("checkpoints/tiny")     skill_library.jsonl in the model's folder, or an empty one
    library.recall(task.source)                             at most 20 candidates for the Selection role
    library.add(skill)                                      a staged skill joins after the update; names made unique
    library.save_snapshot(folder, step)                     folder/global_step_<step>.jsonl, written atomically

This file knows nothing of models or GPUs.
"""

import json
import os
import re
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from rank_bm25 import BM25Okapi

MODEL_FILE = "skill_library.jsonl"  # the library that travels with a model
CANDIDATES = 20  # paper: BM25 keeps the top 20 with a score above 0


@dataclass(frozen=True)
class Skill:
    """One line of a library file, in the release's format (skill_library.jsonl)."""

    name: str
    description: str
    scope: str  # "general" or "task_specific/<family>"
    tags: tuple[str, ...]
    content: str  # sections Motivation, Key Idea, Example
    verify_speedup: float | None = None  # of the kernel that proved it; None for seeds, which are unverified


def skill_from_json(record) -> Skill:
    """A parsed line as a Skill; unknown fields are ignored. Raises ValueError saying what is wrong.

    >>> skill_from_json({"name": "a", "description": "b", "scope": "general", "tags": ["t"], "content": "c"}).tags
    ('t',)
    """
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    for key in ("name", "description", "scope", "content"):
        if not isinstance(record.get(key), str) or not record[key].strip():
            raise ValueError(f"no text in {key!r}")
    tags, speedup = record.get("tags", []), record.get("verify_speedup")
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise ValueError("'tags' is not a list of strings")
    if type(speedup) not in (int, float, type(None)):
        raise ValueError("'verify_speedup' is not a number")
    return Skill(record["name"].strip(), record["description"], record["scope"], tuple(tags), record["content"],
                 speedup)


def words(text) -> list[str]:
    """The words that BM25 compares: lower case, split at whatever is neither letter nor digit.

    >>> words("Fuse-pointwise_run: nn.GELU()")
    ['fuse', 'pointwise', 'run', 'nn', 'gelu']
    """
    return re.findall(r"[^\W_]+", text.lower())


def write_atomically(path, text):
    """Replace a file in one instant: a reader, or a process killed here, sees the old text or the new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


class SkillLibrary:
    """Skills with unique names, and a BM25 index over them."""

    def __init__(self, skills=()):
        self.skills: list[Skill] = []
        self.gains = {}  # name -> (schemes that showed the skill beside a null scheme, the sum of what they gained)
        self._index = None  # BM25 over self.skills; built at the first recall after a change
        for skill in skills:
            self.add(skill)

    def __len__(self):
        return len(self.skills)

    # ---- growth

    def add(self, skill):
        """A skill joins, under a name that is unique (name, name-2, name-3, ...)."""
        taken = {other.name for other in self.skills}
        name, n = skill.name, 2
        while name in taken:
            name, n = f"{skill.name}-{n}", n + 1
        self.skills.append(replace(skill, name=name))
        self._index = None

    # ---- proof in use

    def note(self, names, gain):
        """In one more scheme, rollouts that were shown these skills earned so much more than those without any."""
        for name in names:
            schemes, total = self.gains.get(name, (0, 0.0))
            self.gains[name] = schemes + 1, total + gain

    def retire(self, after) -> list[Skill]:
        """Take out, and return, the skills that have gained nothing in `after` schemes or more (paper: future work)."""
        useless = {name for name, (schemes, total) in self.gains.items() if schemes >= after and total <= 0}
        gone = [skill for skill in self.skills if skill.name in useless]
        self.skills = [skill for skill in self.skills if skill.name not in useless]
        self.gains = {name: gain for name, gain in self.gains.items() if name not in useless}
        self._index = None if gone else self._index
        return gone

    # ---- on disk

    @classmethod
    def load(cls, path):
        """A library from JSON lines. A broken line is reported with its number and skipped; the rest is kept.

        Raises OSError when the file cannot be read.
        """
        skills = []
        for number, line in enumerate(Path(path).read_bytes().split(b"\n"), start=1):
            if not line.strip():
                continue
            try:
                skills.append(skill_from_json(json.loads(line)))
            except (ValueError, RecursionError) as error:
                print(f"{path}, line {number}: not a skill ({error}); skipped", file=sys.stderr)
        return cls(skills)

    @classmethod
    def of_model(cls, model):
        """The library in a model's folder, or beside a model on the hub. Without one, an empty library."""
        if Path(model).is_dir():
            path = Path(model) / MODEL_FILE
            return cls.load(path) if path.is_file() else cls()
        from huggingface_hub import hf_hub_download  # only for hub ids: a folder never needs it
        try:
            return cls.load(hf_hub_download(str(model), MODEL_FILE))
        except (OSError, ValueError):  # no such file there, or no network
            return cls()

    def save(self, path):
        """Write all skills, atomically."""
        write_atomically(path, "".join(json.dumps(asdict(skill)) + "\n" for skill in self.skills))

    def save_snapshot(self, folder, step):
        """Write the library as it is after a step: folder/global_step_<step>.jsonl."""
        self.save(Path(folder) / f"global_step_{step}.jsonl")

    # ---- retrieval

    def recall(self, query, top=CANDIDATES) -> list[Skill]:
        """The skills that share telling words with `query` (a task's source): BM25 score above 0, best first.

        Okapi's idf of a word that most skills hold, log((N - n + 0.5) / (n + 0.5)), is not positive: among one or two
        skills, or a few alike, none scores above 0. They are returned whole then, or a library that starts empty would
        never be used.
        """
        if len(self.skills) < 3:
            return self.skills[:top]
        if self._index is None:
            self._index = BM25Okapi([words(" ".join([s.name, s.description, *s.tags, s.content])) for s in self.skills])
        known = [word for word in words(query) if word in self._index.idf]  # the others add nothing and cost time
        scores = self._index.get_scores(known)  # one for each skill
        best = np.argsort(-scores, kind="stable")[:top]  # stable: equal scores keep the library's order
        found = [self.skills[i] for i in best if scores[i] > 0]
        return found or (self.skills[:top] if self._index.average_idf <= 0 else [])

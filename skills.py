"""What is a skill, and how does the library grow, persist and rewind?  (Paper, section 3: 'Select' and 'Flush'.)

A skill is a piece of advice in words that the policy may be shown: written by the Summary role, proven by execution,
found again by BM25. The library is a list of them in memory and a JSON-lines snapshot on disk:

    library = SkillLibrary.of_model("checkpoints/tiny")     skill_library.jsonl in the model's folder, or an empty one
    library.recall(task.source)                             at most 20 candidates for the Selection role
    library.stage(skill)                                    verified in this step; nobody can select it yet
    library.flush()                                         after the update: staged skills join, names made unique
    library.save_snapshot(folder, step)                     folder/global_step_<step>.jsonl, written atomically
    SkillLibrary.newest(folder, step)                       a restart at `step`: the newest snapshot that is not later
"""

import json
import os
import re
import sys
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from rank_bm25 import BM25Okapi

MODEL_FILE = "skill_library.jsonl"  # the library that travels with a model
CANDIDATES = 20  # paper: BM25 keeps the top 20 with a score above 0


@dataclass(frozen=True)
class Skill:
    """One line of a snapshot (paper, section 3, 'Flush')."""

    name: str
    description: str
    scope: str  # "general" or "task_specific/<family>"
    tags: tuple[str, ...]
    content: str  # sections Motivation, Key Idea, Example
    verify_speedup: float | None = None  # of the kernel that proved it; None for seeds, which are unverified


def skill_from_json(record) -> Skill:
    """A parsed snapshot line as a Skill; unknown fields are ignored. Raises ValueError saying what is wrong.

    >>> skill_from_json({"name": "a", "description": "b", "scope": "general", "tags": ["t"], "content": "c"}).tags
    ('t',)
    """
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    for key in ("name", "description", "scope", "content"):
        if not isinstance(record.get(key), str) or not record[key].strip():
            raise ValueError(f"no text in {key!r}")
    tags = record.get("tags", [])
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise ValueError("'tags' is not a list of strings")
    speedup = record.get("verify_speedup")
    if speedup is not None and (isinstance(speedup, bool) or not isinstance(speedup, (int, float))):
        raise ValueError("'verify_speedup' is not a number")
    description, scope, content = (record[key] for key in ("description", "scope", "content"))
    return Skill(record["name"].strip(), description, scope, tuple(tags), content, speedup)


def words(text) -> list[str]:
    """BM25's words (paper, section 3): lower case, split at `_ - /`, punctuation dropped.

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
    """Skills with unique names, the staged ones that wait for the end of the step, and a BM25 index over the former."""

    def __init__(self, skills=()):
        self.skills: list[Skill] = []
        self.staged: list[Skill] = []
        self._names: set[str] = set()
        self._postings = None  # the index; built at the first recall after a change
        for skill in skills:
            self._add(skill)

    def __len__(self):
        return len(self.skills)

    def _add(self, skill) -> Skill:
        name, n = skill.name, 2
        while name in self._names:
            name, n = f"{skill.name}-{n}", n + 1
        self._names.add(name)
        skill = replace(skill, name=name)
        self.skills.append(skill)
        self._postings = None
        return skill

    # ---- growth

    def stage(self, skill):
        """Hold a verified skill back until the update is done, so that this step's rollouts are all on one library."""
        self.staged.append(skill)

    def flush(self) -> list[Skill]:
        """Staged skills join the library. Returns them under the names that they got (name, name-2, name-3, ...)."""
        added = [self._add(skill) for skill in self.staged]
        self.staged = []
        return added

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

    @classmethod
    def newest(cls, folder, step):
        """The newest snapshot that is not later than `step`. Raises FileNotFoundError when there is none."""
        found = [(int(match[1]), path) for path in Path(folder).glob("global_step_*.jsonl")
                 if (match := re.fullmatch(r"global_step_(\d+)\.jsonl", path.name)) and int(match[1]) <= step]
        if not found:
            raise FileNotFoundError(f"{folder}: no snapshot of the skill library up to step {step}")
        return cls.load(max(found)[1])

    def save(self, path):
        """Write all skills, not the staged ones, atomically."""
        write_atomically(path, "".join(json.dumps(asdict(skill)) + "\n" for skill in self.skills))

    def save_snapshot(self, folder, step):
        self.save(Path(folder) / f"global_step_{step}.jsonl")

    # ---- retrieval

    def recall(self, query, top=CANDIDATES) -> list[Skill]:
        """The skills that share telling words with `query` (a task's source): BM25 score above 0, best first.

        A library of one or two skills is returned whole: Okapi's idf, log((N - n + 0.5) / (n + 0.5)), is never positive
        there, so a library that starts empty would never be used.
        """
        if len(self.skills) < 3:
            return self.skills[:top]
        if self._postings is None:
            self._postings = self._index()
        scores = np.zeros(len(self.skills))
        for word, count in Counter(words(query)).items():
            if word in self._postings:
                rows, weights = self._postings[word]
                scores[rows] += count * weights
        best = np.argsort(-scores, kind="stable")[:top]  # stable: equal scores keep the library's order
        return [self.skills[i] for i in best if scores[i] > 0]

    def _index(self) -> dict:
        """word -> (rows of the skills that hold it, what one occurrence in a query adds to their scores).

        rank-bm25 counts words and computes idf; its own get_scores visits every skill for every word of the query,
        which takes a second for 10,000 skills. The sums are the same.
        """
        bm25 = BM25Okapi([words(" ".join([s.name, s.description, *s.tags, s.content])) for s in self.skills])
        rows, frequencies = {}, {}
        for row, counts in enumerate(bm25.doc_freqs):
            for word, count in counts.items():
                rows.setdefault(word, []).append(row)
                frequencies.setdefault(word, []).append(count)
        length = np.array(bm25.doc_len) / bm25.avgdl
        postings = {}
        for word in rows:
            r, f = np.array(rows[word]), np.array(frequencies[word])
            weight = f * (bm25.k1 + 1) / (f + bm25.k1 * (1 - bm25.b + bm25.b * length[r]))
            postings[word] = r, bm25.idf[word] * weight
        return postings

"""The skill library: what it keeps, what it refuses, what it finds."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from rank_bm25 import BM25Okapi

from skills import Skill, SkillLibrary, skill_from_json, words, write_atomically


def skill(name, content="Motivation: m\nKey Idea: k\nExample:\ne", description="d", tags=("t",), **more):
    return Skill(name, description, "general", tags, content, **more)


LIBRARY = [skill("fuse-pointwise", "relu gelu chain in one kernel"), skill("row-softmax", "softmax exp over one row"),
           skill("fold-bias", "convolution without bias, epilogue adds it", tags=("convolution", "bias")),
           skill("group-stats", "group norm in two sweeps"), skill("scan", "cumsum along a row")]


def test_roundtrip_keeps_every_field(tmp_path):
    library = SkillLibrary([skill("a", "line one\nline two \u00e9", verify_speedup=1.75), skill("b", tags=())])
    library.save(tmp_path / "skill_library.jsonl")
    assert SkillLibrary.of_model(tmp_path).skills == library.skills
    first = json.loads((tmp_path / "skill_library.jsonl").read_text().split("\n")[0])
    assert list(first) == ["name", "description", "scope", "tags", "content", "verify_speedup"]


def test_staged_skills_are_invisible_until_flush():
    library = SkillLibrary(LIBRARY)
    library.stage(skill("new", "softmax softmax"))
    assert len(library) == 5 and "new" not in [s.name for s in library.recall("softmax")]
    assert [s.name for s in library.flush()] == ["new"]
    assert len(library) == 6 and "new" in [s.name for s in library.recall("softmax")]
    assert library.flush() == []


def test_names_are_unique():
    library = SkillLibrary([skill("a"), skill("a-2")])
    for _ in range(3):
        library.stage(skill("a"))
    assert [s.name for s in library.flush()] == ["a-3", "a-4", "a-5"]
    assert [s.name for s in SkillLibrary([skill("x"), skill("x"), skill("x")]).skills] == ["x", "x-2", "x-3"]


def test_restart_takes_the_newest_snapshot_not_later(tmp_path):
    for step in (0, 9, 10):
        SkillLibrary(LIBRARY[:1 + step // 5]).save_snapshot(tmp_path, step)
    (tmp_path / "global_step_5.jsonl.tmp").write_text("half a line")
    (tmp_path / "global_step_x.jsonl").write_text("")
    assert len(SkillLibrary.newest(tmp_path, 9)) == 2
    assert len(SkillLibrary.newest(tmp_path, 8)) == 1
    assert len(SkillLibrary.newest(tmp_path, 1000)) == 3
    with pytest.raises(FileNotFoundError, match="no snapshot"):
        SkillLibrary.newest(tmp_path / "other", 3)


@pytest.mark.parametrize(
    "line, reason",
    [
        (b'{"name": "half', "not a skill"),
        (b"[1, 2]", "not a JSON object"),
        (b'{"name": "n"}', "no text in 'description'"),
        (b'{"name": " ", "description": "d", "scope": "s", "content": "c"}', "no text in 'name'"),
        (b'{"name": "n", "description": "d", "scope": "s", "content": "c", "tags": "t"}', "tags"),
        (
            b'{"name": "n", "description": "d", "scope": "s", "content": "c", "verify_speedup": "fast"}',
            "verify_speedup",
        ),
        (b"\xff\xfe\x00", "not a skill"),
        (b"[" * 100000, "not a skill"),
    ],
)
def test_broken_line_is_reported_and_skipped(tmp_path, capsys, line, reason):
    good = [
        json.dumps({"name": n, "description": "d", "scope": "general", "tags": ["t"], "content": "c"}).encode()
        for n in "ab"
    ]
    (tmp_path / "library.jsonl").write_bytes(b"\n".join([good[0], line, b"", good[1]]))
    assert [s.name for s in SkillLibrary.load(tmp_path / "library.jsonl").skills] == ["a", "b"]
    said = capsys.readouterr().err
    assert "line 2" in said and reason in said and said.count("\n") == 1


def test_unknown_fields_and_missing_tags_are_no_offence():
    assert skill_from_json({"name": "n", "description": "d", "scope": "s", "content": "c", "author": 1}).tags == ()


def test_recall_equals_rank_bm25():
    rng = np.random.default_rng(0)
    vocabulary = [f"w{i}" for i in range(60)]
    skills = [skill(f"s{i}", " ".join(rng.choice(vocabulary, rng.integers(3, 30)))) for i in range(40)]
    library = SkillLibrary(skills)
    slow = BM25Okapi([words(" ".join([s.name, s.description, *s.tags, s.content])) for s in skills])
    for _ in range(20):
        query = " ".join(rng.choice(vocabulary + ["unknown"], 12))
        scores = slow.get_scores(words(query))
        want = [skills[i].name for i in np.argsort(-np.round(scores, 9), kind="stable")[:20] if scores[i] > 0]
        got = [s.name for s in library.recall(query)]
        assert len(got) == len(want) <= 20
        order = {s.name: round(score, 6) for s, score in zip(skills, scores)}
        assert [order[n] for n in got] == [order[n] for n in want]


def test_recall_finds_by_meaningful_words_and_drops_the_rest():
    library = SkillLibrary(LIBRARY)
    assert library.recall("x = torch.Softmax(x)")[0].name == "row-softmax"
    assert library.recall("self.bias_of_convolution")[0].name == "fold-bias"
    assert library.recall("unrelated vocabulary") == []
    assert library.recall("") == []
    assert len(library.recall("row", top=1)) == 1


def test_small_libraries_are_recalled_whole():
    assert SkillLibrary().recall("softmax") == []
    assert [s.name for s in SkillLibrary([skill("only")]).recall("softmax")] == ["only"]


def test_ten_thousand_skills_are_searched_in_milliseconds():
    rng = np.random.default_rng(0)
    vocabulary = np.array([f"w{i}" for i in range(3000)])
    library = SkillLibrary()
    library.skills = [skill(f"s{i}", " ".join(vocabulary[rng.integers(0, 3000, 60)])) for i in range(10_000)]
    library.recall("w1")  # builds the index
    index = library._postings
    query = " ".join(vocabulary[rng.integers(0, 3000, 150)])
    seconds = min(_timed(library, query) for _ in range(5))
    assert seconds < 0.05  # 2 ms here; the rest is for slow machines
    assert library._postings is index


def _timed(library, query):
    start = time.perf_counter()
    library.recall(query)
    return time.perf_counter() - start


def test_killed_while_writing_leaves_a_whole_file(tmp_path):
    """A writer that is killed at a random moment leaves one of the complete texts."""
    path = tmp_path / "file"
    write_atomically(path, "0" * 200_000)
    program = ("import sys; from skills import write_atomically\nprint('go', flush=True)\n"
               f"for i in range(10**6): write_atomically({str(path)!r}, str(i % 10) * 200_000)")
    root = str(Path(__file__).parent.parent)
    writer = subprocess.Popen([sys.executable, "-c", program], cwd=root, stdout=subprocess.PIPE,
                              env={**os.environ, "PYTHONPATH": root})
    writer.stdout.readline()
    time.sleep(0.2)
    writer.kill()
    writer.wait()
    text = path.read_text()
    assert len(text) == 200_000 and len(set(text)) == 1

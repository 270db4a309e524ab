"""The skill library: what it keeps, what it refuses, and what BM25 finds in it (selector.recall)."""

import json

import pytest

from command.process import UserError
from conftest import write_lines
from selector import recall
from skills import Skill, SkillLibrary, skill_from_json


def skill(name, content="Motivation: m\nKey Idea: k\nExample:\ne", description="d", tags=("t",), **more):
    return Skill(name, description, "general", tags, content, **more)


def test_roundtrip_keeps_every_field(tmp_path):
    library = SkillLibrary([skill("a", "line one\nline two \u00e9", verify_speedup=1.75), skill("b", tags=())])
    library.save(tmp_path / "skill_library.jsonl")
    assert SkillLibrary.of_model(tmp_path).skills == library.skills
    first = json.loads((tmp_path / "skill_library.jsonl").read_text().split("\n")[0])
    assert list(first) == ["name", "description", "scope", "tags", "content", "verify_speedup"]


def test_a_skill_that_joins_has_a_name_of_its_own_and_is_found():
    library = SkillLibrary([skill("a"), skill("a-2"), skill("b")])
    assert recall(library, "softmax") == []
    assert [library.add(skill("a", "softmax")).name for _ in range(3)] == ["a-3", "a-4", "a-5"]
    assert [s.name for s in library.skills] == ["a", "a-2", "b", "a-3", "a-4", "a-5"] and len(library) == 6
    assert [s.name for s in recall(library, "softmax")] == ["a-3", "a-4", "a-5"]


RECORD = {"name": "n", "description": "d", "scope": "general", "tags": ["t"], "content": "c"}


@pytest.mark.parametrize("line", [
    '{"name": "half', [1, 2], {"name": "n"}, RECORD | {"name": " "}, RECORD | {"tags": [1]},
    RECORD | {"verify_speedup": "fast"}])
def test_a_broken_line_is_refused_with_its_number(tmp_path, line):
    write_lines(tmp_path / "skill_library.jsonl", RECORD, "", line, RECORD)
    with pytest.raises(UserError, match="skill_library.jsonl, line 3: not a skill"):
        SkillLibrary.of_model(tmp_path)


@pytest.mark.parametrize("fields, scope, tags", [
    ({"scope": "s", "author": 1}, "s", ()), ({"scope": None, "tags": None}, "general", ()),
    ({"scope": "", "tags": ["a"]}, "general", ("a",))])
def test_the_release_takes_lines_without_scope_or_list_of_tags(fields, scope, tags):
    made = skill_from_json({"name": " n ", "description": "d", "content": "c"} | fields)
    assert (made.name, made.scope, made.tags) == ("n", scope, tags)


def test_the_best_twenty_are_recalled_and_equal_scores_keep_the_librarys_order():
    content = {30: "softmax softmax"} | dict.fromkeys(range(6), "relu") | dict.fromkeys(range(90, 190), "cumsum")
    library = SkillLibrary([skill(f"s{i}", content.get(i, "softmax"), description="") for i in range(190)])
    assert [s.name for s in recall(library, "softmax")] == ["s30"] + [f"s{i}" for i in range(6, 25)]


@pytest.mark.parametrize("query, written", [
    ("F.layer_norm(x)", "LayerNorm in one sweep"), ("self.bn = nn.BatchNorm2d(c)", "batch_norm folded"),
    ("nn.LayerNorm(8)", "layer-norm"), ("x = F.relu(x)", "ReLU"), ("nn.ReLU()", "a relu/gelu chain"),
    ("x = torch.Softmax(x)", "exp over one row, of softmax"), ("self.my_convolution", "convolution")])
def test_code_finds_what_a_skill_calls_otherwise(query, written):
    library = SkillLibrary([skill(f"s{i}", text) for i, text in enumerate(("scan", written, "sort", written))])
    assert recall(library, query) == [library.skills[1], library.skills[3]]  # half of the library; and no other
    assert recall(library, query, top=1) == library.skills[1:2]
    assert recall(library, "unrelated vocabulary") == recall(library, "") == []
    assert recall(SkillLibrary(library.skills[:2]), "nothing of it") == library.skills[:2]  # too few to rank

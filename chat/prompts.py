"""The prompts and tools of the three roles: those of prompts.yaml, or of a file of the user's in the same layout.

The release's prompts are in such a file, too, and a released checkpoint does best with the prompts that it was trained
on. What that file does not hold is the Policy's first prompt, which is in the rows of the release's RL data
(first_prompt), and how skills are written, which is in the release's code (RELEASE_FORMS).
"""

import hashlib
import json
import re
from pathlib import Path

import yaml

from tasks import UserError

PROMPTS = {}  # texts by name
SELECT_TOOL, UPDATE_TOOL = {}, {}

_SKILL = "---\nname: __name__\ndescription: __description__\nscope: __scope__\ntags: [__tags__]\n---\n\n__content__"
RELEASE_FORMS = {
    "candidate": "__number__. **__name__**  [scope=__scope__]  [tags: __tags__]\n    __description__",
    "skill": _SKILL, "skill_in_use": _SKILL, "skills_in_use": "__skills__", "no_skills": "(no skill was given)"}


def read_prompts(path) -> str:
    """Take prompts and tools from a YAML file in the layout of prompts.yaml or of the release's; what it lacks stays.

    But where it has both roles' user prompts, skills are written as in the release unless it says how (RELEASE_FORMS).
    path: a file, or a folder, of which every .yaml and .parquet file is read. Of a parquet file (the release's RL data)
    the Policy's first prompt is taken. Returns a digest of all prompts. Raises UserError.
    """
    kinds = (".yaml", ".parquet")
    files = sorted(f for f in Path(path).rglob("*") if f.suffix in kinds) if Path(path).is_dir() else [Path(path)]
    if not files:
        raise UserError(f"{path}: no .yaml file of prompts there")
    for file in files:
        try:
            _take(first_prompt(file) if file.suffix == ".parquet" else yaml.safe_load(file.read_text()))
        except (OSError, ImportError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{file}: no file of prompts ({type(error).__name__}: {reason})") from None
    return hashlib.sha256(json.dumps([PROMPTS, SELECT_TOOL, UPDATE_TOOL], sort_keys=True).encode()).hexdigest()[:16]


def first_prompt(path) -> dict:
    """The Policy's first prompt, made of the first row of the release's RL data; in the layout of prompts.yaml.

    A row's prompt is one message of the user's that holds the code of the row's task. There is no system message, and
    skills stand before the last paragraph (release: inject_skill_into_messages). Raises an error of any kind.
    """
    from pyarrow.parquet import ParquetFile  # only for such a file
    row = next(ParquetFile(path).iter_batches(1), None).to_pylist()[0]
    [message], code = row["prompt"], row["reward_model"]["ground_truth"].strip()
    if code not in message["content"]:
        raise ValueError("the first row's prompt does not hold the code of its task")
    head, gap, last = message["content"].replace(code, "__task_description__").rpartition("\n\n")
    return {"prompts": {"policy_system": "", "policy_user": f"{head}{gap}__skills__{last}"}}


def _take(found):
    """Take the prompts and tools of a file as YAML has it. Raises an error of any kind for another layout."""
    texts, tools = dict(found.get("prompts") or {}), found.get("tools") or {}
    for turn in found.get("per_turn_prompts", ()):  # the release's multi_turn_kernel.yaml: the message with feedback
        if turn["name"] == "tool_response":
            texts["feedback"] = turn["template"].replace("{feedback}", "__feedback__")
    if not texts or not all(isinstance(text, str) for text in texts.values()):
        raise ValueError("no map of texts under `prompts`")
    if {"selection_user", "summary_user"} <= texts.keys() and PROMPTS:  # the release's, or all of one's own
        texts = RELEASE_FORMS | texts
    for role, known in (("selection", SELECT_TOOL), ("summary", UPDATE_TOOL)):
        if role in tools:
            name = tools[role][0]["function"]["name"]
            if known and name != known["function"]["name"]:
                raise ValueError(f"the tool of {role} is called {name}, not {known['function']['name']}")
            known.update(tools[role][0])
    PROMPTS.update(texts)


def fill(form, /, **values) -> str:
    """A prompt with values for its __placeholders__. In one pass, as a value may hold such a word, too."""
    return re.sub(r"__(\w+?)__", lambda match: str(values.get(match[1], match[0])), PROMPTS[form])


def role_messages(role, **values) -> list[dict]:
    """What a role is asked: its system message, unless that is empty, and the user's."""
    return [{"role": who, "content": fill(f"{role}_{who}", **values)} for who in ("system", "user")
            if PROMPTS[f"{role}_{who}"]]


def skill_text(form, skill, number=0) -> str:
    """A skill as the prompt `form` shows it: a candidate, a skill for the Policy, a skill in use for Summary."""
    return fill(form, **vars(skill) | {"tags": ", ".join(skill.tags), "number": f"{number:2}"})


read_prompts(Path(__file__).with_name("prompts.yaml"))

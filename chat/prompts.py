"""The prompts and tools of the three roles: those of prompts.yaml, or of a file of the user's in the same layout.

The release's prompts are in such a file, too. A released checkpoint does best with the prompts that it was trained on.
Two things are not in that file. How skills are written is in the release's code (RELEASE_FORMS). The Policy's first
prompt is in the rows of the release's RL data: copy it into a YAML file of your own, as `policy_user`, with
__task_description__ and __skills__ (before its last paragraph) in their places and an empty `policy_system`.
"""

import re
from pathlib import Path

import yaml

from program.process import UserError

PROMPTS = {}  # texts by name
SELECT_TOOL, UPDATE_TOOL = {}, {}

_SKILL = "---\nname: __name__\ndescription: __description__\nscope: __scope__\ntags: [__tags__]\n---\n\n__content__"
RELEASE_FORMS = {
    "candidate": "__number__. **__name__**  [scope=__scope__]  [tags: __tags__]\n    __description__",
    "skill": _SKILL, "skill_in_use": _SKILL, "skills_in_use": "__skills__", "no_skills": "(no skill was given)"}


def read_prompts(path):
    """Replace prompts and tools by those of a YAML file, in the layout of prompts.yaml or of the release's file.

    What the file lacks stays, with one exception: if it has the user prompts of both Selection and Summary but does not
    say how skills are written, they are written as in the release (RELEASE_FORMS). path: a file, or a folder of which
    every .yaml file is read, in the order of their names. Raises UserError.
    """
    for file in sorted(Path(path).rglob("*.yaml")) or [Path(path)]:
        try:
            _take(yaml.safe_load(file.read_text()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{file}: no file of prompts ({type(error).__name__}: {reason})") from None


def _take(found):
    """Take the prompts and tools of a file as YAML has it. Raises an error of any kind for another layout."""
    texts = dict(found.get("prompts") or {})
    tools = found.get("tools") or {}
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
    """A prompt with values for its __placeholders__. It is done in one pass, since a value may contain such a word."""
    return re.sub(r"__(\w+?)__", lambda match: str(values.get(match[1], match[0])), PROMPTS[form])


def role_messages(role, **values) -> list[dict]:
    """The messages of a role's prompt: system, unless that is empty, and user."""
    return [{"role": who, "content": fill(f"{role}_{who}", **values)} for who in ("system", "user")
            if PROMPTS[f"{role}_{who}"]]


def skill_text(form, skill, number=0) -> str:
    """A skill as the prompt `form` shows it: a candidate, a skill for the Policy, a skill in use for Summary."""
    return fill(form, **vars(skill) | {"tags": ", ".join(skill.tags), "number": f"{number:2}"})


read_prompts(Path(__file__).with_name("prompts.yaml"))

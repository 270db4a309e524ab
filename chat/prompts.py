"""The prompts and tools of the three roles: those of prompts.yaml, or of a file of the user's in the same layout.

`--prompts` reads the prompt files of the paper's release, too (chat/release.py): give it a copy of its kernel/config.
The Policy's first prompt is in none of these files but in the rows of the release's RL data: write it into a YAML file
of your own as `policy_user`, with __task_description__ and __skills__ (before its last paragraph) in their places, and
with an empty `policy_system`.
"""

import re
from pathlib import Path

import yaml

from chat import release
from command.process import UserError

MOST_SKILLS = 3  # that one answer of Selection may choose
MOST_PROPOSALS = 2  # in one answer of Summary
PROMPTS = {}  # texts by name
SELECT_TOOL, UPDATE_TOOL = {}, {}
KEYS = ("prompts", "tools", "per_turn_prompts")  # of a file of prompts


def read_prompts(path):
    """Replace prompts and tools by those of a YAML file, in the layout of prompts.yaml or of the release's files.

    What the file lacks stays as it was. path: a file, or a folder of which every .yaml file with one of KEYS is read,
    in the order of their names. Raises UserError.
    """
    files = sorted(Path(path).rglob("*.yaml"))
    read = 0
    for file in files or [Path(path)]:
        try:
            layout = yaml.safe_load(file.read_text()) or {}
            if not files or any(key in layout for key in KEYS):  # other files of a folder are no prompts
                _take(layout)
                read += 1
        except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{file}: no file of prompts ({type(error).__name__}: {reason})") from None
    if not read:
        raise UserError(f"{path}: no .yaml file in it has one of {', '.join(KEYS)}")


def _take(layout):
    """Take the prompts and tools of a parsed file. Raises an error of any kind for one that is in no known layout."""
    layout = release.in_our_layout(layout, {"selection": MOST_SKILLS, "summary": MOST_PROPOSALS})
    texts, tools = layout["prompts"], layout["tools"]
    if not texts or not all(isinstance(text, str) for text in texts.values()):
        raise ValueError("no map of texts under `prompts`")
    for role, known in (("selection", SELECT_TOOL), ("summary", UPDATE_TOOL)):
        if role in tools:
            tool = tools[role][0]
            name = tool["function"]["name"]
            if known and name != known["function"]["name"]:
                raise ValueError(f"the tool of {role} is called {name}, not {known['function']['name']}")
            known.update(tool)
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
    tags = ", ".join(skill.tags)
    return fill(form, **vars(skill) | {"content": skill.content.strip(), "number": f"{number:2}", "tags": tags,
                                       "tag_note": f"  [tags: {tags}]" if tags else ""})


read_prompts(Path(__file__).with_name("prompts.yaml"))

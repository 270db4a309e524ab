"""The prompts and tools of the three roles: those of prompts.yaml, or of a file of the user's in the same layout.

The release's prompts are such files, too: `--prompts` with a copy of its kernel/config. A released checkpoint does best
with the prompts that it was trained on. What the release has in code instead is in RELEASE_FORMS and `limit_tool`. The
Policy's first prompt is in the rows of its RL data: copy it into a YAML file of your own, as `policy_user`, with
__task_description__ and __skills__ (before its last paragraph) in their places and an empty `policy_system`. Its words
for Summary where no skill was in use are in skill_prompt_builder.py: ours say the same; `no_skills` changes them.
"""

import re
from pathlib import Path

import yaml

from command.process import UserError

MOST_SKILLS = 3  # that one answer of Selection may choose
MOST_PROPOSALS = 2  # in one answer of Summary
PROMPTS = {}  # texts by name
SELECT_TOOL, UPDATE_TOOL = {}, {}
KEYS = ("prompts", "tools", "per_turn_prompts")  # of a file of prompts

_HEAD = "---\nname: __name__\ndescription: __description__\nscope: __scope__\ntags: %s\n---\n\n__content__"
RELEASE_FORMS = {  # skill_library.py, skill_prompt_builder.py, vllm_async_engine_skill.py
    "selection_task": "__policy_user__",
    "candidate": "__number__. **__name__**  [scope=__scope__]__tag_note__\n    __description__",
    "skill": _HEAD % "[__tags__]" + "\n", "skill_in_use": _HEAD % "[__tags__]" + "\n", "skills_in_use": "__skills__",
    "no_skills": "(none: this rollout was of the null scheme)",
    "skill_to_verify": _HEAD % "__tag_list__", "before_skill_to_verify": "\n\n---\n\n"}


def read_prompts(path):
    """Replace prompts and tools by those of a YAML file, in the layout of prompts.yaml or of the release's files.

    What the file lacks stays, with one exception: if it has the user prompts of both Selection and Summary but does not
    say how candidates are written, all forms are the release's. path: a file, or a folder of which every .yaml file
    with one of KEYS is read, in the order of their names. Raises UserError.
    """
    files = sorted(Path(path).rglob("*.yaml"))
    read = 0
    for file in files or [Path(path)]:
        try:
            found = yaml.safe_load(file.read_text()) or {}
            if not files or any(key in found for key in KEYS):  # other files of a folder are no prompts
                _take(found)
                read += 1
        except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{file}: no file of prompts ({type(error).__name__}: {reason})") from None
    if not read:
        raise UserError(f"{path}: no .yaml file in it has one of {', '.join(KEYS)}")


def _take(found):
    """Take the prompts and tools of a file as YAML has it. Raises an error of any kind for another layout."""
    texts = dict(found.get("prompts") or {})
    tools = found.get("tools") or {}
    for turn in found.get("per_turn_prompts") or ():  # the release's multi_turn_kernel.yaml: the message with feedback
        if turn["name"] == "tool_response":
            texts |= {"feedback": turn["template"].format(feedback="__feedback__"), "verdict_form": "json"}
    if not texts or not all(isinstance(text, str) for text in texts.values()):
        raise ValueError("no map of texts under `prompts`")
    release = {"selection_user", "summary_user"} <= texts.keys() and "candidate" not in texts
    for role, known in (("selection", SELECT_TOOL), ("summary", UPDATE_TOOL)):
        if role in tools:
            tool = tools[role][0]
            name = tool["function"]["name"]
            if known and name != known["function"]["name"]:
                raise ValueError(f"the tool of {role} is called {name}, not {known['function']['name']}")
            if release:
                limit_tool(role, tool["function"])
            known.update(tool)
    PROMPTS.update(RELEASE_FORMS | texts if release else texts)


def limit_tool(role, function):
    """Say in a tool's texts how many skills a call may hold, as the release's skill_prompt_builder.py does."""
    most = MOST_SKILLS if role == "selection" else MOST_PROPOSALS
    said = function["description"]
    if role == "selection":
        function["description"] = said.replace("the most", f"the top {most} most", 1)
    else:
        function["description"] = f"{said.rstrip('.')} with at most {most} skills."
    for entry in function["parameters"]["properties"].values():
        if entry["type"] == "array":
            entry["maxItems"] = most
            entry["description"] = f"{entry['description'].rstrip('.')} (at most {most})."


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
                                       "tag_list": list(skill.tags), "tag_note": f"  [tags: {tags}]" if tags else ""})


read_prompts(Path(__file__).with_name("prompts.yaml"))

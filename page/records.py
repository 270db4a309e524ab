"""What a run or a benchmark has left in its folder, as plain records and in words.

run.py and bench.py wrote these files. A line that cannot be read, or that lacks a field, is a UserError of one line;
a last line that a kill has cut off is left out.
"""

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from command.files import read_lines, user_error
from command.process import UserError
from command.progress import in_words

# Metrics of the evaluation that are reported in words: (metric, its name, its format).
EVALUATION = (("eval_reward_best", "reward", ".3f"), ("eval_correct", "correct", ".0%"),
              ("eval_fast_1", "Fast_1", ".0%"))


@dataclass
class Source:
    """One folder that the page shows."""

    folder: Path
    config: dict
    metrics: list  # of a run: the lines of metrics.jsonl, step 0 first
    summary: dict = field(default_factory=dict)  # of a benchmark that has ended: its summary.json
    rollouts: list = field(default_factory=list)  # see read_rollouts
    skills: list = field(default_factory=list)  # see skill_stories

    @property
    def clock(self) -> str:
        """Are the speedups modelled or measured?"""
        return "modelled" if self.config["device"] == "cpu" else "measured"


def read_folder(folder) -> Source:
    """All that the page shows of a folder. Raises UserError if it holds neither a run nor a benchmark."""
    folder = Path(folder)
    if not (folder / "metrics.jsonl").is_file() and not (folder / "results.jsonl").is_file():
        raise UserError(f"{folder}: no run (metrics.jsonl) and no benchmark (results.jsonl)")
    with user_error(f"{folder}: config.json or summary.json is missing or broken, or a line lacks a field"):
        config = json.loads((folder / "config.json").read_text())
        source = Source(folder, config, read_lines(folder / "metrics.jsonl"))
        if (folder / "summary.json").is_file():
            source.summary = json.loads((folder / "summary.json").read_text())
        for step, path in numbered(folder, "rollouts/*_*.jsonl"):
            source.rollouts += read_rollouts(folder, path, step)
        source.rollouts += read_rollouts(folder, folder / "results.jsonl", 0)
        snapshots = [read_lines(path) for _, path in numbered(folder, "skill_library/global_step_*.jsonl")]
        if snapshots:
            source.skills = skill_stories(snapshots[0], snapshots[-1], source.rollouts)
    return source


def numbered(folder, pattern) -> list[tuple[int, Path]]:
    """The files of a pattern whose names end in _<number>: (number, path), sorted by the number."""
    named = [(path.stem.rsplit("_", 1)[1], path) for path in folder.glob(pattern)]
    return sorted((int(number), path) for number, path in named if number.isdigit())  # a user's copy may be there


def read_rollouts(folder, path, step) -> list[dict]:
    """The lines of a transcript, or of a benchmark's results.jsonl, in which there is only the Policy.

    Each gets an id, its folder, its step and, where it has none, its role. A summary gets `winner`: the id of the
    rollout that it sums up. (The transcript has the number of that rollout among those of its task.)
    """
    rollouts = read_lines(path)
    policy = defaultdict(list)  # episode (all that a step did with one task) -> ids of its Policy rollouts
    for number, rollout in enumerate(rollouts):
        rollout |= {"id": f"{path.stem}.{number}", "folder": str(folder), "step": step}
        if rollout.setdefault("role", "policy") == "policy":
            policy[rollout.get("episode")].append(rollout["id"])
        elif rollout["role"] == "summary":
            rollout["winner"] = policy[rollout["episode"]][rollout["rollout"]]
    return rollouts


def skill_stories(seeds, skills, rollouts) -> list[dict]:
    """The skills of the last snapshot, each with its `origin`: the summary that proposed it, or None of a seed.

    seeds: the first snapshot. The origin is empty where the transcript of that step is missing. `use` is the fastest
    rollout that was given the skill on another task than the origin's, or None.
    """
    origins = {}
    for rollout in rollouts:
        for proposal in rollout.get("proposals", []):
            origins[proposal["staged"]] = rollout  # under None one of those that were not staged
    for seed in seeds:
        origins[seed["name"]] = None
    stories = []
    for skill in skills:
        origin = origins.get(skill["name"], {})
        stories.append(skill | {"origin": origin, "use": best_use(skill["name"], origin, rollouts)})
    return stories


def best_use(name, origin, rollouts) -> dict | None:
    """The fastest Policy rollout that was given this skill, on a task that did not bring it forth, or None.

    It gets `speedup`, its best turn's, or 0 without a correct turn.
    """
    own_task = (origin or {}).get("task")
    uses = []
    for rollout in rollouts:
        if rollout["role"] == "policy" and name in rollout["skills"] and rollout["task"] != own_task:
            speedups = [turn["verdict"]["speedup"] for turn in rollout["turns"] if turn["verdict"]["correct"]]
            uses.append(rollout | {"speedup": max(speedups, default=0.0)})
    return max(uses, key=lambda use: use["speedup"], default=None)


def step_in_words(line, options, library) -> str:
    """What a step prints; before the first step only the evaluation. line: of metrics.jsonl. library: after the step.

    `replies a+b+c` are those of Policy, Selection and Summary in the groups of the loss.
    """
    parts = ["before training"]  # then, if there are any, the skills found and the evaluation
    if line["step"]:
        included = " with the evaluation" if "evaluate" in line["seconds"] else ""
        rows = "+".join(map(str, line["rows"].values()))
        parts = [f"step {line['step']}/{options.steps}  reward {line['reward_best']:.3f}  "
                 f"correct {line['correct']:.0%}  Fast_1 {line['fast_1']:.0%}  speedup {line['speedup'] or 0:.2f}x "
                 f"({line['clock']})  replies {rows}  skills {line['library']} (+{line['staged']})  proposals "
                 f"passed {line['passed']} of {line['proposals']}  {sum(line['seconds'].values()):.0f} s{included}"]
    if line.get("staged"):
        parts.append("new: " + ", ".join(skill.name for skill in library.skills[-line["staged"]:]))
    if "eval_fast_1" in line:
        figures = [f"{label} {line[key]:{form}}" for key, label, form in EVALUATION]
        parts.append(f"evaluation: {', '.join(figures)} ({line['clock']})")
    if "with_reward_first" in line:
        parts.append(f"redundant operators, first turn: reward {line['with_reward_first']:.3f} with the library, "
                     f"{line['without_reward_first']:.3f} without")
    return ("  |  " if line["step"] else "  ").join(parts)


def lessons(source) -> list[str]:
    """In a few sentences: is it complete? Of a run: the evaluation before and after, skills found, proposals."""
    sentences = []
    config = source.config
    if "steps" in config and source.metrics and source.metrics[-1]["step"] < config["steps"]:
        sentences.append(f"A part of the run: {source.metrics[-1]['step']} of {config['steps']} steps are done.")
    if "problems" in config and not source.summary:
        done = len({rollout["task"] for rollout in source.rollouts})
        sentences.append(f"A part of the benchmark: {done} of {len(config['problems'])} problems are done.")
    steps = [line for line in source.metrics if line["step"]]
    if steps and not any(line["correct"] for line in steps):
        sentences.append("No kernel was correct in any step, so nothing could be learnt: these tasks are too hard for "
                         "this model.")
    evaluated = [line for line in source.metrics if "eval_fast_1" in line]
    if len(evaluated) > 1:
        before = evaluated[0]
        after = evaluated[-1]
        changes = [f"{label} {before[key]:{form}} -> {after[key]:{form}}" for key, label, form in EVALUATION]
        sentences.append(f"On the built-in problems, before training -> after {after['step']} steps: "
                         f"{', '.join(changes)} ({source.clock}).")
    found = [f"{skill['name']} ({skill['verify_speedup'] or 0:.2f}x when verified)" for skill in source.skills
             if skill["origin"] is not None]
    if source.skills:
        sentences.append(f"Skills found: {len(found)}. {', '.join(found)}." if found else "Skills found: none.")
    proposals, passed = (sum(line[name] for line in steps) for name in ("proposals", "passed"))
    rejected = Counter()  # {reason: proposals rejected for it}
    for line in steps:
        rejected.update(line["rejected"])
    if proposals:
        sentences.append(f"Proposals: {passed} of {proposals} passed; rejected: {in_words(rejected)}.")
    return sentences

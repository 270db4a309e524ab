"""What a run or a benchmark has left in its folder, as plain records: metrics, rollouts, skills and their story.

run.py and bench.py wrote these files. A line that cannot be read, or that lacks a field, is a UserError of one line;
a last line that a kill has cut off is left out.
"""

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from program.files import read_lines, told
from program.process import UserError

# Metrics of the evaluation that are reported in words: (metric, its name, its format).
EVALUATION = (("eval_reward_best", "reward", ".3f"), ("eval_correct", "correct", ".0%"),
              ("eval_fast_1", "Fast_1", ".0%"))


@dataclass
class Source:
    """One folder that the page shows."""

    folder: Path
    config: dict = field(default_factory=dict)
    metrics: list = field(default_factory=list)  # of a run: the lines of metrics.jsonl, step 0 first
    summary: dict = field(default_factory=dict)  # of a benchmark that has ended: its summary.json
    rollouts: list = field(default_factory=list)  # see read_rollouts
    skills: list = field(default_factory=list)  # see skill_stories

    @property
    def clock(self) -> str:
        """Are the speedups modelled or measured?"""
        return "modelled" if self.config["device"] == "cpu" else "measured"

    @property
    def steps(self) -> list:
        """The metrics of training steps, without the evaluation before the first."""
        return [line for line in self.metrics if line["step"] > 0]

    @property
    def rejected(self) -> Counter:
        """{reason: proposals rejected for it} over all steps."""
        return sum((Counter(line["rejected"]) for line in self.steps), Counter())

    def count(self, metric) -> int:
        """A metric's sum over all steps."""
        return sum(line[metric] for line in self.steps)


def read_folder(folder) -> Source:
    """All that the page shows of a folder. Raises UserError if it holds neither a run nor a benchmark."""
    folder = Path(folder)
    if not (folder / "metrics.jsonl").is_file() and not (folder / "results.jsonl").is_file():
        raise UserError(f"{folder}: no run (metrics.jsonl) and no benchmark (results.jsonl)")
    source = Source(folder, read_object(folder / "config.json"), read_lines(folder / "metrics.jsonl"))
    if (folder / "summary.json").is_file():
        source.summary = read_object(folder / "summary.json")
    for step, path in numbered(folder, "rollouts/*_*.jsonl"):
        phase = "evaluation" if path.stem.startswith("eval") else "training"
        source.rollouts += read_rollouts(path, phase, step)
    source.rollouts += read_rollouts(folder / "results.jsonl", "benchmark", 0)
    snapshots = [read_lines(path) for _, path in numbered(folder, "skill_library/global_step_*.jsonl")]
    if snapshots:
        with told(f"{folder}: a line lacks a field"):
            source.skills = skill_stories(snapshots[0], snapshots[-1], source.rollouts)
    return source


def read_object(path) -> dict:
    """The object that a .json file holds. Raises UserError."""
    with told(f"{path}: cannot be read"):
        return dict(json.loads(path.read_text()))


def numbered(folder, pattern) -> list[tuple[int, Path]]:
    """The files of a pattern whose names end in _<number>: (number, path), sorted by the number."""
    named = [(path.stem.rsplit("_", 1)[1], path) for path in folder.glob(pattern)]
    return sorted((int(number), path) for number, path in named if number.isdigit())  # a user's copy may be there


def read_rollouts(path, phase, step) -> list[dict]:
    """The lines of a transcript, or of a benchmark's results.jsonl, in which there is only the Policy.

    Each gets an id, its phase, its step and, where it has none, its role. A summary gets `winner`: the id of the
    rollout that it sums up. (The transcript has the number of that rollout among those of its task.)
    """
    rollouts = read_lines(path)
    policy = defaultdict(list)  # episode (all that a step did with one task) -> ids of its Policy rollouts
    with told(f"{path}: a line lacks a field"):
        for number, rollout in enumerate(rollouts):
            rollout |= {"id": f"{path.stem}.{number}", "phase": phase, "step": step}
            if phase == "benchmark":
                rollout["role"] = "policy"
            elif rollout["role"] == "policy":
                policy[rollout["episode"]].append(rollout["id"])
            elif rollout["role"] == "summary":
                rollout["winner"] = policy[rollout["episode"]][rollout["rollout"]]
    return rollouts


def skill_stories(seeds, skills, rollouts) -> list[dict]:
    """The skills of the last snapshot, each with where it came from.

    seeds: the first snapshot. origin: None of a seed, else the summary that proposed the skill; empty where the
    transcript of that step is missing. winner: the rollout that the summary sums up.
    """
    by_id = {}
    origins = {}
    for rollout in rollouts:
        by_id[rollout["id"]] = rollout
        for proposal in rollout.get("proposals", []):
            origins[proposal["staged"]] = rollout  # under None one of those that were not staged
    for seed in seeds:
        origins[seed["name"]] = None
    stories = []
    for skill in skills:
        story = skill | {"origin": origins.get(skill["name"], {})}
        if story["origin"]:
            story["winner"] = by_id[story["origin"]["winner"]]
        stories.append(story)
    return stories


def lessons(source) -> list[str]:
    """A run in a few sentences: the evaluation before and after, the skills found, what became of the proposals."""
    sentences = []
    evaluated = [line for line in source.metrics if "eval_fast_1" in line]
    if len(evaluated) > 1:
        before, after = evaluated[0], evaluated[-1]
        changes = [f"{label} {before[key]:{form}} -> {after[key]:{form}}" for key, label, form in EVALUATION]
        sentences.append(f"On the built-in problems, before -> after {after['step']} steps: "
                         f"{', '.join(changes)} ({source.clock}).")
    found = [f"{skill['name']} ({skill['verify_speedup'] or 0:.2f}x when verified)" for skill in source.skills
             if skill["origin"] is not None]
    if source.skills:
        sentences.append(f"Skills found: {len(found)}. {', '.join(found)}." if found else "Skills found: none.")
    for reason, count in source.rejected.most_common(1):
        sentences.append(f"Proposals: {source.count('passed')} of {source.count('proposals')} passed; rejected most "
                         f"often as '{reason}' ({count}).")
    return sentences

"""What a run or a benchmark has left in its folder, as plain records: metrics, skills and their story, rollouts.

Nothing here trusts the files: a killed run ends in half a line, and people edit and merge them. A line from which no
record can be made is left out and counted in Source.skipped.

A *rollout* is here any reply, or chain of replies, that answers one prompt: the Policy's turns, one answer of
Selection, one of Summary with its proposals. `rollout_record` says what is in its record.
"""

import json
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

OUTCOMES = ("faster", "correct", "rejected", "wrong", "broken")  # of a Policy rollout, by its best turn
# What the page shows of a turn and of a verdict, by its name in the file.
TURN = ("reply", "reward", "advantage", "feedback", "dropped")
VERDICT = ("speedup", "coverage", "reference_ms", "candidate_ms", "rejected", "error", "profile")

# Metrics of the evaluation that are told in words: (metric, its name, its format).
EVALUATION = (("eval_reward_best", "reward", ".3f"), ("eval_correct", "correct", ".0%"),
              ("eval_fast_1", "Fast_1", ".0%"))


@dataclass
class Source:
    """One folder that the page shows."""

    folder: Path
    config: dict = field(default_factory=dict)
    metrics: list = field(default_factory=list)  # a run's lines of metrics.jsonl, step 0 first
    summary: dict = field(default_factory=dict)  # a benchmark's summary.json
    rollouts: list = field(default_factory=list)  # see rollout_record
    skills: list = field(default_factory=list)  # see skill_stories
    skipped: Counter = field(default_factory=Counter)  # file name -> lines that could not be read

    @property
    def clock(self) -> str:
        """modelled or measured, whichever the speedups are."""
        return (self.metrics[-1] if self.metrics else self.summary).get("clock", "unknown")

    @property
    def steps(self) -> list:
        """The lines of training steps, without the evaluation before the first."""
        return [line for line in self.metrics if line["step"] > 0]

    @property
    def rejected(self) -> Counter:
        """Why proposals were turned down -> how many, over all steps."""
        return sum((Counter(line["rejected"]) for line in self.steps), Counter())

    def count(self, metric) -> int:
        """A metric's sum over all steps."""
        return int(sum(line.get(metric, 0) for line in self.steps))


def read_folder(folder) -> Source:
    """All that the page shows of a folder. Raises OSError, also if neither a run nor a benchmark is there."""
    source = Source(Path(folder))
    folder, skipped = source.folder, source.skipped
    if not any((folder / name).is_file() for name in ("metrics.jsonl", "results.jsonl", "summary.json")):
        raise FileNotFoundError(f"{folder}: no run (metrics.jsonl) and no benchmark (results.jsonl, summary.json)")
    for part, record in (("config", dict), ("summary", summary_record)):
        for value in read(folder / f"{part}.json", record, skipped):  # one, or none if it is broken or not there
            setattr(source, part, value)
    source.metrics = sorted(read(folder / "metrics.jsonl", metrics_record, skipped), key=lambda line: line["step"])
    for step, path in numbered(folder, "rollouts/*_*.jsonl"):
        phase = "evaluation" if path.stem.startswith("eval") else "training"
        source.rollouts += read_rollouts(path, phase, step, skipped)
    source.rollouts += read_rollouts(folder / "results.jsonl", "benchmark", 0, skipped)
    snapshots = [read(path, skill_record, skipped) for _, path in numbered(folder, "skill_library/global_step_*.jsonl")]
    source.skills = skill_stories(snapshots[0], snapshots[-1], source.rollouts) if snapshots else []
    return source


def numbered(folder, pattern) -> list[tuple[int, Path]]:
    """The files of a pattern whose names end in _<number>, with that number, in its order."""
    found = [(path.stem.rsplit("_", 1)[1], path) for path in folder.glob(pattern)]
    return sorted((int(number), path) for number, path in found if number.isdigit())


def read(path, record, skipped) -> list:
    """`record` of what a .json file holds, or of each line of a .jsonl file; empty where there is no file.

    Where `record` fails, the line is counted and left out. NaN and Infinity, which a browser cannot read, become None.
    """
    text, records = path.read_bytes() if path.is_file() else b"", []
    for line in [text] if path.suffix == ".json" else text.split(b"\n"):
        try:
            if line.strip():
                records.append(record(json.loads(line, parse_constant=lambda name: None)))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):
            skipped[path.name] += 1
    return records


def read_rollouts(path, phase, step, skipped) -> list[dict]:
    """The rollouts of a transcript, or of a benchmark's results.jsonl, with what follows from where they stand.

    Each gets an id, its phase and step. A summary's `of`: the id of the rollout that it sums up.
    """
    rollouts, policy = read(path, rollout_record, skipped), defaultdict(list)  # episode -> its Policy's ids
    for i, rollout in enumerate(rollouts):
        rollout |= {"id": f"{path.stem}.{i}", "phase": phase, "step": step}
        if rollout["role"] == "policy":
            policy[rollout["episode"], rollout["task"]].append(rollout["id"])
        rollout["of"] = dict(enumerate(policy[rollout["episode"], rollout["task"]])).get(rollout["of"])
    return rollouts


# ----------------------------------------------------------------------------------------------------------------------
# Records: each is made of one JSON object, and raises if that is not what it should be


def number(value) -> float | None:
    """A finite number, or None for anything else."""
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def numbers(values) -> dict:
    """The finite numbers among a dict's values."""
    return {key: value for key, value in values.items() if number(value) is not None}


def metrics_record(line) -> dict:
    """A line of metrics.jsonl with nothing but numbers, its clock, and its counts of seconds and of rejections."""
    return numbers(line) | {"step": int(line["step"]), "clock": str(line["clock"]),
                            "seconds": numbers(line.get("seconds", {})), "rejected": numbers(line.get("rejected", {}))}


def summary_record(summary) -> dict:
    """A summary.json."""
    return summary | {"clock": str(summary["clock"]), "figures": list(map(dict, summary["figures"]))}


def skill_record(line) -> dict:
    """A line of a library's snapshot."""
    return {name: str(line[name]) for name in ("name", "description", "scope", "content")} | {
        "speedup": number(line.get("verify_speedup"))}


def rollout_record(row) -> dict:
    """A line of a transcript or of results.jsonl. Only the Policy has more turns than one, and a benchmark no other.

    role, task, prompt; skills: names that the Policy was shown, or that Selection chose; turns: see turn_record;
    outcome: the best turn's, or what became of the answer; reward, speedup: of the best turn; of: which of the task's
    rollouts a summary sums up; staged: the skills that it has added to the library (see words).
    """
    role, skills = row.get("role", "policy"), [str(name) for name in row.get("skills", ())]
    turns = [turn_record(turn) for turn in (row["turns"] if role == "policy" else [row])]
    verdicts = [turn["verdict"] for turn in turns] if role == "policy" else []
    outcomes = {"policy": sorted((verdict["outcome"] for verdict in verdicts), key=OUTCOMES.index)[:1],
                "selection": ["skills chosen" if skills else "none chosen"],
                "summary": sorted({proposal["outcome"] for proposal in turns[0]["proposals"]})}
    return {"role": role, "episode": number(row.get("episode")), "task": str(row["task"]), "skills": skills,
            "prompt": str(row.get("prompt") or ""), "turns": turns, "outcome": outcomes[role],
            "of": number(row.get("rollout")),
            "reward": max((turn["reward"] for turn in turns if number(turn.get("reward")) is not None), default=None),
            "speedup": max((v["speedup"] for v in verdicts if v["outcome"] in ("faster", "correct")), default=None),
            "staged": [words(p["written"]["content"]) for p in turns[0]["proposals"] if p["outcome"] == "staged"]}


def turn_record(turn) -> dict:
    """What the page shows of a reply, as it is in the file. `outcome`: what became of its kernel, or of a proposal."""
    record = {name: turn[name] for name in TURN if name in turn} | {"reply": str(turn["reply"])}
    if "verdict" in turn:
        record["verdict"] = {name: turn["verdict"][name] for name in VERDICT} | {"outcome": outcome(turn["verdict"])}
    record["proposals"] = [
        {"written": p["written"], "detail": p["detail"], "attempt": p["attempt"] and turn_record(p["attempt"]),
         "outcome": str(p["rejected"] or ("staged" if p["staged"] else "passed"))} for p in turn.get("proposals", ())]
    return record


def outcome(verdict) -> str:
    """What became of a kernel: one of OUTCOMES."""
    if verdict["rejected"]:
        return "rejected"
    if verdict["correct"]:
        return "faster" if verdict["speedup"] > 1 else "correct"
    return "wrong" if verdict["compiled"] else "broken"


# ----------------------------------------------------------------------------------------------------------------------
# The library's story


def skill_stories(seeds, skills, rollouts) -> list[dict]:
    """For each skill of the last snapshot: what it says, where it came from, and what it was good for since.

    seeds: the first snapshot. origin: None for a seed, else the record of the summary that proposed it, with the
    rollout that it sums up as `winner`; empty where the transcripts do not tell. used: see usage.
    """
    def known_by(skill):
        return skill["name"], skill["content"]

    by_id, seeds = {rollout["id"]: rollout for rollout in rollouts}, set(map(known_by, seeds))
    origins = {skill: summary | {"winner": by_id.get(summary["of"])}
               for summary in rollouts for skill in summary["staged"]}
    return [skill | {"used": usage(skill["name"], rollouts),
                     "origin": None if known_by(skill) in seeds else origins.get(words(skill["content"]), {})}
            for skill in skills]


def words(text) -> str:
    """A skill's content, by which it is known: its name may have got a number when it joined the library."""
    return " ".join(text.split())


def usage(name, rollouts) -> dict:
    """What a skill was good for: selections and training rollouts with it, and its gain.

    gain: mean over tasks of (mean reward of the rollouts with the skill - mean reward of those with the null scheme, in
    the same step), or None; tasks: how many have both. Other skills may have been selected with it.
    """
    having, without = defaultdict(list), defaultdict(list)  # (step, task) -> rewards
    for rollout in rollouts:
        null = not rollout["skills"]
        if (rollout["role"], rollout["phase"]) == ("policy", "training") and (null or name in rollout["skills"]):
            (without if null else having)[rollout["step"], rollout["task"]].append(rollout["reward"] or 0.0)
    gains = [mean(rewards) - mean(without[key]) for key, rewards in having.items() if key in without]
    return {"selections": sum(rollout["role"] == "selection" and name in rollout["skills"] for rollout in rollouts),
            "training": sum(map(len, having.values())), "gain": mean(gains), "tasks": len(gains)}


def mean(values) -> float | None:
    """Their mean, or None without any."""
    values = list(values)
    return sum(values) / len(values) if values else None


def funnel(source, reasons) -> list[tuple[str, int, int]]:
    """(reason, proposals turned down for it, proposals left after it) in the order of the checks.

    reasons: that order; a reason that is not among them comes last.
    """
    left, rows = source.count("proposals"), []
    for reason, count in sorted(source.rejected.items(), key=lambda row: [*reasons, row[0]].index(row[0])):
        left -= int(count)
        rows.append((reason, int(count), left))
    return rows


# ----------------------------------------------------------------------------------------------------------------------
# What was learnt, in words


def lessons(source) -> list[str]:
    """A run in a few sentences: the evaluation before and after, the skills found, what became of the proposals."""
    told, evaluated = [], [line for line in source.metrics if {key for key, _, _ in EVALUATION} <= set(line)]
    if len(evaluated) > 1:
        first, last = evaluated[0], evaluated[-1]
        changes = ", ".join(f"{label} {first[key]:{form}} -> {last[key]:{form}}" for key, label, form in EVALUATION)
        told.append(f"On the built-in problems, before -> after {last['step']} steps: {changes} ({source.clock}).")
    found = [skill for skill in source.skills if skill["origin"] is not None]
    if found:
        verified = ", ".join(f"{skill['name']} ({skill['speedup'] or 0:.2f}x when verified)" for skill in found)
        told.append(f"Skills found: {len(found)}. {verified}.")
    elif source.skills:
        told.append("Skills found: none.")
    if source.count("proposals"):
        why = "".join(f"; turned down most often as '{reason}' ({count:.0f})"
                      for reason, count in source.rejected.most_common(1))
        told.append(f"Proposals: {source.count('passed')} of {source.count('proposals')} passed{why}.")
    return told

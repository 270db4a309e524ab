"""What a run or a benchmark has left in its folder, as plain records: metrics, skills and their story, rollouts.

Nothing here trusts the files: a killed run ends in half a line, and people edit and merge them. What cannot be read is
left out and counted in Source.skipped, and what is read is made of numbers, texts and lists that the page can show.

A *rollout* is here any reply, or chain of replies, that answers one prompt: the Policy's turns, one answer of
Selection, one of Summary with its proposals. `read_transcript` says what is in its record.
"""

import json
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

OUTCOMES = ("faster", "correct", "rejected", "wrong", "broken", "no code")  # of a Policy rollout, by its best turn

# Metrics of the evaluation that are told in words: (metric, its name, its format).
EVALUATION = (("eval_reward_best", "reward", ".3f"), ("eval_correct", "correct", ".0%"),
              ("eval_fast_1", "Fast_1", ".0%"))


@dataclass
class Source:
    """One folder that the page shows."""

    folder: Path
    config: dict
    metrics: list = field(default_factory=list)  # a run's lines of metrics.jsonl, step 0 first
    summary: dict = field(default_factory=dict)  # a benchmark's summary.json
    rollouts: list = field(default_factory=list)  # see read_transcript
    skills: list = field(default_factory=list)  # see skill_stories
    skipped: Counter = field(default_factory=Counter)  # file name -> lines that could not be read

    @property
    def clock(self) -> str:
        """modelled or measured, whichever the speedups are."""
        return str((self.metrics[-1] if self.metrics else self.summary).get("clock") or "unknown")

    @property
    def steps(self) -> list:
        """The lines of training steps, without the evaluation before the first."""
        return [line for line in self.metrics if line["step"] > 0]

    def count(self, metric) -> int:
        """A metric's sum over all steps."""
        return int(sum(line.get(metric, 0) for line in self.steps))


def read_folder(folder) -> Source:
    """All that the page shows of a folder. Raises OSError, also if neither a run nor a benchmark is there."""
    source = Source(Path(folder), {})
    folder, skipped = source.folder, source.skipped
    if not any((folder / name).is_file() for name in ("metrics.jsonl", "results.jsonl", "summary.json")):
        raise FileNotFoundError(f"{folder}: no run (metrics.jsonl) and no benchmark (results.jsonl, summary.json)")
    source.config = read_object(folder / "config.json", skipped)
    source.summary = clean_summary(read_object(folder / "summary.json", skipped), skipped)
    lines = read_lines(folder / "metrics.jsonl", {"step": int}, skipped)
    source.metrics = [clean_metrics(line) for line in sorted(lines, key=lambda line: line["step"])]
    for step, path in numbered(folder, "rollouts/*_*.jsonl"):
        phase = "evaluation" if path.stem.startswith("eval") else "training"
        source.rollouts += read_transcript(path, phase, step, skipped)
    source.rollouts += read_transcript(folder / "results.jsonl", "benchmark", 0, skipped)
    snapshots = [read_lines(path, {"name": str, "content": str}, skipped)
                 for _, path in numbered(folder, "skill_library/global_step_*.jsonl")]
    if snapshots:
        source.skills = skill_stories(snapshots, source)
    return source


# ----------------------------------------------------------------------------------------------------------------------
# Files


def numbered(folder, pattern) -> list[tuple[int, Path]]:
    """The files of a pattern whose names end in _<number>, with that number, in its order."""
    found = [(path.stem.rsplit("_", 1)[1], path) for path in folder.glob(pattern)]
    return sorted((int(number), path) for number, path in found if number.isdigit())


def read_object(path, skipped) -> dict:
    """The JSON object that a file holds; empty, and counted, if it holds anything else. No file is an empty object."""
    try:
        value = json.loads(path.read_bytes()) if path.is_file() else {}
    except (ValueError, RecursionError):
        value = None
    skipped[path.name] += not isinstance(value, dict)
    return value if isinstance(value, dict) else {}


def read_lines(path, required, skipped) -> list[dict]:
    """The objects of a JSON-lines file. A line without the `required` fields, {name: type}, is counted and left out."""
    rows = []
    for line in path.read_bytes().split(b"\n") if path.is_file() else []:
        try:
            row = json.loads(line) if line.strip() else {}
            complete = all(isinstance(row[name], kind) for name, kind in required.items())
        except (ValueError, RecursionError, KeyError, TypeError):
            complete = False
        if complete:
            rows.append(row)
        else:
            skipped[path.name] += bool(line.strip())
    return rows


def number(value) -> float | None:
    """A finite number, or None for anything else."""
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def numbers(values) -> dict:
    """The finite numbers among a dict's values; empty for what is no dict."""
    items = values.items() if isinstance(values, dict) else ()
    return {key: value for key, value in items if number(value) is not None}


def clean_metrics(line) -> dict:
    """A line of metrics.jsonl with nothing but numbers, its clock, and its counts of seconds and of rejections."""
    return numbers(line) | {"clock": str(line.get("clock") or ""), "seconds": numbers(line.get("seconds")),
                            "rejected": numbers(line.get("rejected"))}


def clean_summary(summary, skipped) -> dict:
    """A summary.json, its problems as rows of the page's table; empty, and counted, if it is broken."""
    try:
        problems = [(task, problem["best_speedup"], ", ".join(f"{n} {kind}" for kind, n in problem["kinds"].items()),
                     ", ".join(problem["skills"]), problem["most_common_error"] or "")
                    for task, problem in summary.get("problems", {}).items()]
        return summary and summary | {"figures": list(map(dict, summary["figures"])), "problems": problems}
    except (KeyError, TypeError, ValueError, AttributeError):
        skipped["summary.json"] += 1
        return {}


# ----------------------------------------------------------------------------------------------------------------------
# Transcripts


def read_transcript(path, phase, step, skipped) -> list[dict]:
    """The rollouts of rollouts/*.jsonl, or of a benchmark's results.jsonl:

    id, phase ("training", "evaluation" or "benchmark"), step, role, task; skills: names that the Policy was shown, or
    that Selection chose; outcome: of OUTCOMES, or what became of the answer; reward, speedup: of the best turn; prompt;
    turns: reply, reward, advantage, verdict, feedback, proposals; of a summary: the id of the rollout that it sums up.
    """
    rollouts, policy = [], defaultdict(list)  # policy: task -> ids of its Policy rollouts
    for i, row in enumerate(read_lines(path, {"task": str}, skipped)):
        role = row.get("role", "policy")
        try:
            rollout = READERS[role](row)
        except (KeyError, TypeError, AttributeError, ValueError):
            skipped[path.name] += 1
            continue
        rollout |= {"id": f"{path.stem}.{i}", "phase": phase, "step": step, "role": role, "task": row["task"],
                    "prompt": str(row.get("prompt") or "")}
        if role == "policy":
            policy[row["task"]].append(rollout["id"])
        elif role == "summary":
            place, ids = row.get("rollout"), policy[row["task"]]
            rollout["of"] = ids[place] if type(place) is int and 0 <= place < len(ids) else None
        rollouts.append(rollout)
    return rollouts


def read_turn(turn) -> dict:
    """One reply with what the sandbox said of it."""
    reply, verdict = turn["reply"], turn.get("verdict")
    result = {"reply": reply + "", "reward": number(turn.get("reward")), "advantage": number(turn.get("advantage")),
              "feedback": str(turn.get("feedback") or "")}
    if verdict:
        names = ("speedup", "coverage", "reference_ms", "candidate_ms")
        result["verdict"] = {name: number(verdict.get(name)) for name in names} | {
            "outcome": outcome(verdict, turn), "problem": str(verdict.get("rejected") or verdict.get("error") or ""),
            "profile": [[str(k["name"]), number(k["share"]) or 0, bool(k["own"])] for k in verdict.get("profile", ())]}
    return result


def outcome(verdict, turn) -> str:
    """What became of one kernel: one of OUTCOMES."""
    if verdict.get("rejected"):
        return "rejected"
    if verdict.get("correct"):
        return "faster" if (number(verdict.get("speedup")) or 0) > 1 else "correct"
    if not turn.get("has_code", True) or "no code block" in str(verdict.get("error")):
        return "no code"
    return "wrong" if verdict.get("compiled") else "broken"


def read_policy(row) -> dict:
    """The turns of a Policy rollout, of training or of a benchmark."""
    turns = list(map(read_turn, row["turns"]))
    verdicts = [turn["verdict"] for turn in turns]
    best = min((verdict["outcome"] for verdict in verdicts), key=OUTCOMES.index)
    fastest = [verdict["speedup"] for verdict in verdicts if verdict["outcome"] in ("faster", "correct")]
    return {"skills": list(map(str, row["skills"])), "outcome": [best], "turns": turns,
            "reward": max((turn["reward"] for turn in turns if turn["reward"] is not None), default=None),
            "speedup": max((speedup for speedup in fastest if speedup is not None), default=None)}


def read_selection(row) -> dict:
    """An answer of Selection: the skills that it chose, and names that were no candidates."""
    skills, dropped = list(map(str, row["skills"])), [f"no candidate: {name}" for name in row.get("dropped", ())]
    return {"skills": skills, "outcome": ["skills chosen" if skills else "none chosen"], "speedup": None,
            "reward": number(row.get("reward")), "turns": [read_turn(row) | {"feedback": "\n".join(dropped)}]}


def read_summary(row) -> dict:
    """An answer of Summary: its proposals, each with its verification. rollout: the number of the one summarised."""
    turn = read_turn(row) | {"proposals": []}
    for proposal in row["proposals"]:
        written = proposal["written"] if isinstance(proposal["written"], dict) else {}
        turn["proposals"].append({
            "name": str(written.get("name", "")), "content": " ".join(str(written.get("content")).split()),
            "outcome": str(proposal["rejected"] or ("staged" if proposal["staged"] else "passed")),
            "detail": str(proposal["detail"]), "attempt": proposal["attempt"] and read_turn(proposal["attempt"])})
    return {"skills": [], "outcome": sorted({p["outcome"] for p in turn["proposals"]}), "turns": [turn],
            "reward": number(row.get("reward")), "speedup": None}


READERS = {"policy": read_policy, "selection": read_selection, "summary": read_summary}


# ----------------------------------------------------------------------------------------------------------------------
# The library's story


def skill_stories(snapshots, source) -> list[dict]:
    """For each skill of the last snapshot: what it says, where it came from, and what it was good for since.

    origin: None for a seed, else step, task, summary, rollout (ids), first (speedup of the summarised rollout's first
    turn), best (of its best), needed (what it took to pass). Empty where the transcripts do not tell. used: see usage.
    """
    seeds, rollouts = {skill["name"] for skill in snapshots[0]}, {rollout["id"]: rollout for rollout in source.rollouts}
    origins = defaultdict(list)  # content -> origins; a name may have got a number in the library, the content stays
    for summary in source.rollouts:
        for proposal in summary["turns"][0].get("proposals", ()):
            if proposal["outcome"] == "staged":
                winner = rollouts.get(summary["of"])
                first = winner and winner["turns"][0]["verdict"]["speedup"]
                origins[proposal["content"]].append({
                    "step": summary["step"], "task": summary["task"], "summary": summary["id"],
                    "rollout": summary["of"], "first": first, "best": winner and winner["speedup"],
                    "needed": (number(source.config.get("trigger")) or 1.2) * max(first or 0, 1.0)})
    stories = []
    for skill in snapshots[-1]:
        found = origins[" ".join(skill["content"].split())]
        origin = None if skill["name"] in seeds else found.pop(0) if found else {}
        stories.append({name: str(skill.get(name, "")) for name in ("name", "description", "scope", "content")} | {
            "speedup": number(skill.get("verify_speedup")), "origin": origin,
            "used": usage(skill["name"], source.rollouts)})
    return stories


def usage(name, rollouts) -> dict:
    """What a skill was good for: selections, training rollouts and evaluation rollouts with it, and its gain.

    gain: mean over tasks of (mean reward of the rollouts with the skill - mean reward of those with the null scheme, in
    the same step), or None; tasks: how many have both. Other skills may have been selected with it.
    """
    policy = [rollout for rollout in rollouts if rollout["role"] == "policy"]
    having, without = defaultdict(list), defaultdict(list)  # (step, task) -> rewards
    for rollout in policy:
        if rollout["phase"] == "training" and (name in rollout["skills"] or not rollout["skills"]):
            rewards = having if rollout["skills"] else without
            rewards[rollout["step"], rollout["task"]].append(rollout["reward"] or 0.0)
    gains = [mean(rewards) - mean(without[key]) for key, rewards in having.items() if key in without]
    return {"selections": sum(rollout["role"] == "selection" and name in rollout["skills"] for rollout in rollouts),
            "training": sum(map(len, having.values())), "gain": mean(gains), "tasks": len(gains),
            "evaluation": sum(rollout["phase"] == "evaluation" and name in rollout["skills"] for rollout in policy)}


def mean(values) -> float | None:
    """Their mean, or None without any."""
    values = list(values)
    return sum(values) / len(values) if values else None


def funnel(source, reasons) -> list[tuple[str, int, int]]:
    """(reason, proposals turned down for it, proposals left after it) in the order of the checks.

    reasons: that order; a reason that is not among them comes last.
    """
    rejected = sum((Counter(line["rejected"]) for line in source.steps), Counter())
    left, rows = source.count("proposals"), []
    for reason in sorted(rejected, key=lambda name: reasons.index(name) if name in reasons else len(reasons)):
        left -= int(rejected[reason])
        rows.append((reason, int(rejected[reason]), left))
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
        told.append(f"Skills found: {len(found)}. " + ", ".join(
            f"{skill['name']} ({skill['speedup'] or 0:.2f}x when verified)" for skill in found) + ".")
        most = max(found, key=lambda skill: skill["used"]["training"])
        if most["used"]["gain"] is not None:
            told.append(f"Most used of them: {most['name']}, in {most['used']['training']} rollouts; reward "
                        f"{most['used']['gain']:+.2f} against the null scheme on the same tasks.")
    elif source.skills:
        told.append("Skills found: none.")
    if source.count("proposals"):
        most = max(funnel(source, ()), key=lambda row: row[1], default=None)
        why = f"; turned down most often as '{most[0]}' ({most[1]})" if most else ""
        told.append(f"Proposals: {source.count('passed')} of {source.count('proposals')} passed{why}.")
    return told

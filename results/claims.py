"""The paper's claims in the world of redundant operators (synthetic/redundant.py): every arm, and the table.

    python results/claims.py --seeds 8                 runs what is missing, as many at once as there are cores for
    python results/claims.py --device cuda --arms default,no-skills,no-verify --kept results/claims/measured
    python results/claims.py --table                   the table alone, from results/claims/

A run takes two cores (--cores). Its small files stay in results/claims/ARM/SEED: metrics.jsonl, the library, and
problems.json (the evaluation's rewards with and without the library, and where training used what was found). A killed
run is continued. Before RL the model can be given the library that a run has found. For that, bench.py runs it with
each library of the arms in LIBRARIES, and the rewards stay in results/claims/ARM/SEED/before.json. With a KernelBench
checkout, bench.py can do the same for its level 2; the table reads such a summary.json as .../ARM/SEED/level2.json.

A claim is *confirmed* or *contradicted* where the 95 % interval over seeds (Student's t) excludes zero, *none seen*
where it lies within 0.05 of zero, else *open*, with the number of seeds that would settle it if the mean stayed.
"""

import argparse
import itertools
import json
import math
import os
import queue
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from command.files import read_lines  # noqa: E402
from command.process import UserError, run_command  # noqa: E402

NARROW = 0.05  # of reward: an interval within this of zero shows that there is no effect worth naming
ARMS = {
    "default": [],
    "no-skills": ["--no-skills"],
    "no-verify": ["--no-verify"],
    "bm25-only": ["--bm25-only"],
    "freeze-selection": ["--freeze-selection"],
    "freeze-summary": ["--freeze-summary"],
    "group-mean": ["--baseline", "group-mean"],
}
LIBRARIES = "default", "no-verify"
AS_ON_CPU = ("--batch 3 --n 2 --turns 2 --s 3 --lr 2e-5 --eval-every 2 --set eval_samples=1 trials=3 save_every=1"
             ).split()  # with a GPU: the defaults of a run without one
# The evaluation problems whose held-out pair is redundant, and that pair; found by running all of them.
PAIR_OF = {"redundant/1_MirroredLength": ("flip", "norm"), "redundant/2_ShiftedPeak": ("roll", "amax"),
           "redundant/3_SortedSpread": ("sort", "std"), "redundant/4_RunningPeak": ("cummax", "amax"),
           "redundant/5_DoubledMean": ("cat", "mean"), "redundant/6_RepeatedFloor": ("repeat", "amin"),
           "redundant/7_PaddedTotal": ("pad", "sum"), "redundant/8_MirroredLogTotal": ("fliplr", "logsumexp")}
LEVEL2 = ROOT / "results/kernelbench/level2.json"  # with the skills that every run begins with
ALL_TURNS, FIRST_TURN = slice(None), slice(1)
HOLDS = {*PAIR_OF.values()}  # the others of redundant.HELD_OUT do not hold; the model is told neither list


# ----------------------------------------------------------------------------------------------------------------------
# Running the arms


def run_all(run, jobs, options):
    """run(arm, seed, cores, options) for each (arm, seed), on cores of its own. Prints a line as each one ends."""
    cores = sorted(os.sched_getaffinity(0))
    places = queue.Queue()
    each = len(cores) if options.device == "cuda" else options.cores  # runs side by side would disturb measured times
    for first in range(0, len(cores) - each + 1, each):
        places.put(cores[first:first + each])

    def one(job):
        place = places.get()
        try:
            run(*job, place, options)
        finally:
            places.put(place)

    with ThreadPoolExecutor(max(1, places.qsize())) as pool:
        list(pool.map(one, jobs))


def train(arm, seed, cores, options):
    """One run of reinforce.py; what is kept of it is copied when it is complete."""
    folder, kept = Path(options.runs, arm, str(seed)), Path(options.kept, arm, str(seed))
    if (kept / "problems.json").is_file():
        return
    command = [sys.executable, str(ROOT / "reinforce.py"), "--out", str(folder)]
    if (folder / "config.json").is_file():
        command.append("--resume")
    else:
        command += ["--seed", str(seed), "--device", options.device, "--steps", str(options.steps), "--eval",
                    "redundant", *ARMS[arm], *(AS_ON_CPU if options.device == "cuda" else ())]
    if call(command, f"{folder}.log", cores):
        keep(folder, kept)


def try_library(arm, seed, cores, options):
    """The rewards of the model before RL with the library of a run: {task: [rewards of the turns]}."""
    folder, kept = Path(options.runs, arm, f"{seed}_before"), Path(options.kept, arm, str(seed))
    if (kept / "before.json").is_file():
        return
    command = [sys.executable, str(ROOT / "bench.py"), "--level", "0", "--samples", "1", "--turns", "2", "--out",
               str(folder), "--device", options.device, "--library", str(kept / "skill_library.jsonl")]
    if call(command, f"{folder}.log", cores):
        from bench import read_results
        from policy import davinci_reward
        rewards = {}
        for sample in read_results(folder / "results.jsonl").values():
            rewards[sample.task] = [davinci_reward(turn.verdict) for turn in sample.turns]
        (kept / "before.json").write_text(json.dumps(rewards, indent=1))


def call(command, log, cores) -> bool:
    """Run a command on these cores. Was it successful?"""
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w") as file:
        status = subprocess.run(["taskset", "-c", ",".join(map(str, cores)), *command], stdout=file, stderr=file,
                                env=os.environ | {"OMP_NUM_THREADS": str(len(cores))}, cwd=ROOT, check=False).returncode
    print(f"{log}: " + ("failed" if status else "done"), flush=True)
    return not status


def keep(folder, kept):
    """Copy what the table needs from a complete run."""
    kept.mkdir(parents=True, exist_ok=True)
    shutil.copy(folder / "metrics.jsonl", kept)
    shutil.copy(last(folder, "skill_library/global_step_*.jsonl"), kept / "skill_library.jsonl")
    rewards = {}  # step -> task -> [rewards of the turns with the library, of those without it]
    for path in folder.glob("rollouts/redundant_*.jsonl"):
        step = path.stem.split("_")[1]
        by_task = rewards[step] = {}
        for line in read_lines(path):
            if line["role"] == "policy":
                by_task.setdefault(line["task"], []).append([turn["reward"] for turn in line["turns"]])
    (kept / "problems.json").write_text(json.dumps({"rewards": rewards, "uses": uses(folder)}, indent=1))


def uses(folder) -> dict:
    """{skill about a held-out pair that the run found: [step, task, speedup] of first turns that were given it}"""
    found = {}
    for path in sorted(folder.glob("rollouts/step_*.jsonl")):
        for line in read_lines(path):
            verdict = line["turns"][0]["verdict"] if line["role"] == "policy" else {}
            for name in line["skills"] if verdict.get("correct") else ():
                if pair_named(name):
                    step = int(path.stem.split("_")[1])
                    found.setdefault(name, []).append([step, line["task"], verdict["speedup"]])
    return found


def pair_named(name) -> bool:
    return name.startswith("leave-out-")


def last(folder, pattern) -> Path:
    """The file whose name ends with the largest number."""
    return max(folder.glob(pattern), key=lambda path: int(path.stem.split("_")[-1]))


# ----------------------------------------------------------------------------------------------------------------------
# Figures of a run, and the table


class Run:
    """What is kept of one run."""

    def __init__(self, folder):
        self.metrics = read_lines(folder / "metrics.jsonl")
        self.skills = read_lines(folder / "skill_library.jsonl")
        record = json.loads((folder / "problems.json").read_text())
        self.rewards, self.uses = record["rewards"], record["uses"]
        self.last_step = max(self.rewards, key=int)  # with an evaluation
        before = folder / "before.json"
        self.before = json.loads(before.read_text()) if before.is_file() else {}
        level2 = folder / "level2.json"
        self.kernelbench = shares_of(level2) if level2.is_file() else {}

    def first(self, name):
        return next(line[name] for line in self.metrics if name in line)

    def final(self, name):
        return next(line[name] for line in reversed(self.metrics) if name in line)

    def gain(self, name):
        return self.final(name) - self.first(name)

    def total(self, name, steps=slice(None)) -> float:
        """The sum of a metric over training steps: all of them, or a part."""
        return float(sum(line.get(name, 0) for line in self.metrics[1:][steps]))

    def passing(self) -> float | None:
        """The share of all proposals that pass."""
        proposals = self.total("proposals")
        return self.total("passed") / proposals if proposals else None

    def found(self) -> list[tuple]:
        """Pairs that the run has found and verified (or, without verification, only proposed)."""
        known = {tuple(pair) for pair in HELD_OUT}
        return [tuple(skill["tags"]) for skill in self.skills if tuple(skill["tags"]) in known]

    def reward(self, step, turns) -> float:
        """The mean reward with the library in the evaluation after a step. turns: see at_same_step."""
        return statistics.mean(max(with_library[turns]) for with_library, _ in self.rewards[step].values())

    def by_problem(self, known=False, turns=ALL_TURNS) -> dict:
        """{task: reward with the library minus without} in the last evaluation.

        known: only problems about whose pair the library had a skill at that time. turns: see at_same_step.
        """
        step = self.last_step
        library = next(line["library"] for line in self.metrics if line["step"] == int(step))
        pairs = {tuple(skill["tags"]) for skill in self.skills[:library]}
        differences = {}
        for task, (with_library, without) in self.rewards[step].items():
            if not known or PAIR_OF.get(task) in pairs:
                differences[task] = max(with_library[turns]) - max(without[turns])
        return differences

    def brought_before(self, turns=ALL_TURNS) -> float | None:
        """The same before RL: the model before RL with this library, minus without any."""
        without = {task: rewards[1] for task, rewards in self.rewards["0"].items()}
        values = [max(found[turns]) - max(without[task][turns]) for task, found in self.before.items()]
        return statistics.mean(values) if values else None

    def weights_bring(self) -> float | None:
        """The reward with the library after RL, minus that of the model before RL with the same library."""
        before = [max(rewards) for rewards in self.before.values()]
        return self.reward(self.last_step, ALL_TURNS) - statistics.mean(before) if before else None

    def brings(self, **which) -> float | None:
        """The mean of `by_problem`; None without such a problem."""
        values = self.by_problem(**which).values()
        return statistics.mean(values) if values else None


def shares_of(path) -> dict:
    """Shares of problems in a summary.json of bench.py, by best turn and strict rule: {"correct": 0.6, ...}"""
    figures = json.loads(path.read_text())["figures"]
    return next(row for row in figures if (row["counted"], row["rule"]) == ("best turn", "strict"))


HELD_OUT = []  # filled in by main: synthetic.redundant imports torch, which the table does not need otherwise


def student(n) -> float:
    """The 97.5 % quantile of Student's t with n - 1 degrees of freedom, by Cornish and Fisher's expansion."""
    v, z = n - 1, 1.959964
    if v < 5:  # too few for the expansion
        return (12.706, 4.303, 3.182, 2.776)[v - 1]
    return (z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
            + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3))


def interval(values) -> tuple[float, float]:
    """(mean, half of the 95 % interval); infinite for one value."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return mean, math.inf
    return mean, student(len(values)) * statistics.stdev(values) / math.sqrt(len(values))


def judged(values, narrow=NARROW) -> str:
    """The verdict on a claim that says the values are above zero."""
    mean, half = interval(values)
    if abs(mean) > half:
        return "confirmed" if mean > 0 else "contradicted"
    if abs(mean) + half <= narrow:
        return "none seen"
    seeds = math.ceil(len(values) * (half / max(abs(mean), 1e-3)) ** 2) if math.isfinite(half) else 0
    return f"open ({seeds} seeds)" if seeds else "open"


def paired(left, right, figure) -> list[float]:
    """figure(run of `left`) minus figure(run of `right`), for each seed for which both have one."""
    differences = []
    for seed in sorted(left.keys() & right.keys()):
        pair = figure(left[seed]), figure(right[seed])
        if None not in pair:
            differences.append(pair[0] - pair[1])
    return differences


def defined(values) -> list[float]:
    return [value for value in values if value is not None]


def at_same_step(left, right, turns) -> list[float]:
    """Reward with the library of `left` minus `right`, for each seed, at the last evaluation that both runs have.

    turns: a slice of a rollout's turns, of which the best one counts.
    """
    differences = []
    for seed in sorted(left.keys() & right.keys()):
        step = max(left[seed].rewards.keys() & right[seed].rewards.keys(), key=int)
        differences.append(left[seed].reward(step, turns) - right[seed].reward(step, turns))
    return differences


def claims(arms) -> list[tuple]:
    """(claim, what is measured, its value for each seed). arms: {arm: {seed: Run}}. Claims without runs are missing."""
    default = arms.get("default", {})
    runs = [default[seed] for seed in sorted(default)]
    rows = []
    if runs:
        rows += [
            ("RL improves kernels", "reward, redundant operators, with the library, after - before",
             [run.gain("with_reward_best") for run in runs]),
            ("RL improves kernels", "the same, first turns",
             [run.reward(run.last_step, FIRST_TURN) - run.reward("0", FIRST_TURN) for run in runs]),
            ("RL improves kernels", "the same, Fast_1.2", [run.gain("with_fast_1.2") for run in runs]),
            ("The weights learn without the library, too", "reward without the library, after - before",
             [run.gain("without_reward_best") for run in runs]),
            ("Skills help before RL", "reward with the library that the run has found - without a library",
             defined(run.brought_before() for run in runs)),
            ("Skills help before RL", "the same, first turns",
             defined(run.brought_before(FIRST_TURN) for run in runs)),
            ("Skills help after RL", "reward with the library - without, all 12 problems",
             [run.brings() for run in runs]),
            ("Skills help after RL", "the same, first turns", [run.brings(turns=FIRST_TURN) for run in runs]),
            ("Skills help after RL, where one fits", "the same, problems about whose pair the library has a skill",
             defined(run.brings(known=True) for run in runs)),
            ("Skills help after RL, where one fits", "the same, first turns",
             defined(run.brings(known=True, turns=FIRST_TURN) for run in runs)),
            ("Training the weights helps, too", "reward with the library of the run, model after RL - model before RL",
             defined(run.weights_bring() for run in runs)),
            ("RL finds what the cold start did not teach", "held-out pairs in the library",
             [float(len(run.found())) for run in runs]),
            ("What it finds is right", "share of them that is redundant, - 0.5",
             [held(run) - 0.5 for run in runs if run.found()]),
            ("What it finds is used", "correct first turns with a leave-out skill, 1.2x or faster",
             [float(sum(use[2] >= 1.2 for found in run.uses.values() for use in found)) for run in runs]),
        ]
        start = shares_of(LEVEL2)
        for name, title in (("fast_1.2", "Fast_1.2"), ("fast_1", "Fast_1"), ("correct", "correct")):
            rows.append(("What it finds helps on KernelBench",
                         f"level 2, {title}: model before RL, with the run's last library - with its first",
                         [run.kernelbench[name] - start[name] for run in runs if run.kernelbench]))
    for arm, claim in (("no-verify", "Verification matters"), ("bm25-only", "Reranking beats BM25 alone"),
                       ("freeze-selection", "Training Selection helps"), ("freeze-summary", "Training Summary helps"),
                       ("no-skills", "A library learns faster than the weights alone"),
                       ("group-mean", "Leave-one-out beats the group's mean")):
        if default.keys() & arms.get(arm, {}).keys():
            rows.append((claim, f"reward with the library at the same step, default - {arm}",
                         at_same_step(default, arms[arm], ALL_TURNS)))
            rows.append((claim, "the same, first turns", at_same_step(default, arms[arm], FIRST_TURN)))
    if runs:
        rows.append(("Skills move from general to specific", "found skills selected, second half of the steps - first",
                     [run.total("selected_learnt", slice(len(run.metrics) // 2, None))
                      - run.total("selected_learnt", slice(len(run.metrics) // 2)) for run in runs]))
    if default.keys() & arms.get("freeze-summary", {}).keys():
        rows.append(("Training Summary helps", "share of proposals that pass, default - freeze-summary",
                     paired(default, arms["freeze-summary"], Run.passing)))
    if default.keys() & arms.get("no-verify", {}).keys():
        rows.append(("Verification matters", "reward before RL, with the library of default - of no-verify",
                     paired(default, arms["no-verify"], Run.brought_before)))
        rows.append(("Verification keeps false skills out",
                     "share of held-out pairs that is redundant, default - no-verify",
                     paired(default, arms["no-verify"], held)))
    return rows


def held(run) -> float:
    """The share of the held-out pairs in a library that are redundant; 0.5, as by guessing, if there is none."""
    found = run.found()
    return sum(pair in HOLDS for pair in found) / len(found) if found else 0.5


def print_table(arms):
    """The table, in Markdown, and by problem what the library brings after RL."""
    print("| claim | quantity | mean [95 % interval over seeds] | seeds | verdict |\n|---|---|---|---|---|")
    for claim, measured, values in claims(arms):
        if values:
            mean, half = interval(values)
            print(f"| {claim} | {measured} | {mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}] | {len(values)} "
                  f"| {judged(values)} |")
    differences = {}  # task -> one value for each seed
    for run in arms.get("default", {}).values():
        for task, value in run.by_problem().items():
            differences.setdefault(task, []).append(value)
    if differences:
        means = {task: statistics.mean(values) for task, values in differences.items()}
        mean, half = interval([*means.values()])
        print(f"\nAfter RL, with the library - without: {mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}] over "
              f"{len(means)} problems: " + ", ".join(f"{task} {value:+.2f}" for task, value in means.items()))


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=8, help="runs of each arm")
    parser.add_argument("--arms", default=",".join(ARMS), help="which, with commas between them")
    parser.add_argument("--steps", type=int, default=8, help="training steps of a run")
    parser.add_argument("--cores", type=int, default=2, help="of a run")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cuda: measured, one run at a time")
    parser.add_argument("--runs", default=str(ROOT / "runs" / "claims"), help="folder of the whole runs")
    parser.add_argument("--kept", default=str(ROOT / "results" / "claims"), help="folder of what is kept of the runs")
    parser.add_argument("--table", action="store_true", help="run nothing")
    options = parser.parse_args(argv)
    names = options.arms.split(",")
    if unknown := set(names) - ARMS.keys():
        raise UserError(f"--arms: {', '.join(sorted(unknown))} is not one of {', '.join(ARMS)}")
    if not options.table:
        jobs = list(itertools.product(range(options.seeds), names))
        run_all(train, [(arm, seed) for seed, arm in jobs], options)
        run_all(try_library, [(arm, seed) for seed, arm in jobs if arm in LIBRARIES], options)
    from synthetic.redundant import HELD_OUT as pairs
    HELD_OUT.extend(pairs)
    arms = {}
    for path in sorted(Path(options.kept).glob("*/*/problems.json")):
        arms.setdefault(path.parts[-3], {})[int(path.parts[-2])] = Run(path.parent)
    print_table(arms)
    return 0


if __name__ == "__main__":
    run_command(main)

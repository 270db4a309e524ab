"""The default run with one change of the training step undone, one setting moved, or a recipe: what does each do?

    python results/changes.py today --seed 0 --out runs/changes          (further options go to reinforce.py)
    python results/changes.py --table runs/changes

Where an option of reinforce.py undoes a change, it is used; where none does, a function below takes the place of the
present one and does what the lines of 7f1ee9f did; `--list` says which is which. Each run is a folder NAME-SEED of
--out, of which the table reads metrics.jsonl and config.json.

Three changes cannot show in a run on a CPU, where one program samples and trains: MRS by rollout instead of by reply,
the dual clip and the ratio's clip. Over the 60 default steps no ratio was further than 3.3e-5 from 1, and MRS masked
nothing.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import reinforce  # noqa: E402
import summarizer  # noqa: E402
from paired import interval  # noqa: E402
from report import read_metrics  # noqa: E402
from tasks import UserError, run_command, told  # noqa: E402

# ----------------------------------------------------------------------------------------------------------------------
# What no option undoes. Each takes the present function and returns the one that takes its place.


def filters_first(advantages):
    """A turn that PRS drops leaves its group: baseline and scale are those of the turns that are left."""
    def replaced(rewards, members, tokens, *rest):
        kept = [[member and count > 0 for member, count in zip(*pair)] for pair in zip(members, tokens)]
        return advantages(rewards, kept, tokens, *rest)
    return replaced


def scale_by_turn(advantages):
    """adv_cross_scheme divides by the mean magnitude over turns: each weighs the same, however long it is."""
    def replaced(rewards, members, tokens, *rest):
        return advantages(rewards, members, [[min(count, 1) for count in row] for row in tokens], *rest)
    return replaced


def known_earns_nothing(read):
    """A proposal that repeats a skill of the library is turned down: it is not verified, and its return is 0."""
    def replaced(*given):
        proposals = read(*given)
        for proposal in proposals:
            proposal.rejected = proposal.rejected or ("known already" if proposal.known else None)
        return proposals
    return replaced


def three_seeds(open_run):
    """The library begins with its first three skills."""
    def replaced(*given):
        run = open_run(*given)
        del run.library.skills[3:]
        run.seeds = {skill.name for skill in run.library.skills}
        return run
    return replaced


def two_steps(update):
    """Two optimiser steps, each on the rows of half of the tasks (the release takes up to five of 192 rows).

    The ratio is to the model before both, as in the release: on a CPU the sampler's log-probabilities are its own.
    """
    def replaced(model, optimizer, sequences, args):
        half = (len(sequences) + 1) // 2
        a, b = (update(model, optimizer, part, args) for part in (sequences[:half], sequences[half:]))
        sums = {name: a[name] + b[name] for name in ("clipped", "mrs_masked", "rows", "rows_live", "tokens_live")}
        both = {name: max(a[name], b[name]) for name in ("grad_norm", "ratio_off", "grad_clipped")}
        return sums | both | {"loss": (a["loss"] + b["loss"]) / 2, "zero_gradient": not sums["tokens_live"]}
    return replaced


# ----------------------------------------------------------------------------------------------------------------------

SCALE, VOID, FLAT = ["--loss-scale", "1"], ["--no-mask-void"], ["--min-std", "0"]
SIZES = ["--k", "2", "--batch", "4", "--s", "2"]
GROUPS = reinforce, "policy_advantages", filters_first  # module, name, what makes the function that takes its place
BY_TURN = reinforce, "policy_advantages", scale_by_turn
KNOWN = summarizer, "read_proposals", known_earns_nothing
SEEDS = reinforce, "open_run", three_seeds
CHANGES = {  # name: options, replaced functions, what is otherwise than in the default run
    "today": ([], [], "nothing: the default run"),
    "before": (SCALE + VOID + FLAT + SIZES, [GROUPS, BY_TURN, KNOWN, SEEDS], "all that is undone below, together"),
    "filters-first": ([], [GROUPS], "a turn that PRS drops leaves its group"),
    "no-scale": (SCALE, [], "the loss is not scaled, so that the gradient's clip binds"),
    "known-zero": ([], [KNOWN], "a known proposal earns nothing"),
    "no-void": (VOID, [], "a turn that fails after a success is a member with return 0"),
    "sizes": (SIZES, [], "4 tasks of 2 + 1 schemes and 2 summaries, not 3 of 3 + 1 and 3: as many kernels"),
    "three-seeds": ([], [SEEDS], "three seed skills instead of five"),
    "scale-by-turn": ([], [BY_TURN], "adv_cross_scheme over turns, not over tokens"),
    "flat-groups": (FLAT, [], "groups without variance are trained on, too"),
    "lr-low": (["--lr", "5e-5"], [], "learning rate / 3"),
    "lr-high": (["--lr", "4.5e-4"], [], "learning rate x 3"),
    "two-steps": (["--no-mrs"], [(reinforce, "update", two_steps)], "two optimiser steps a batch"),
    "no-prs": (["--no-prs"], [], "PRS off"),
    "group-mean": (["--baseline", "group-mean"], [], "the group's mean instead of the others'"),
    "no-cross-scheme": (["--no-cross-scheme"], [], "adv_cross_scheme off"),
    # The paper's ablations.
    "no-skills": (["--no-skills"], [], "no skills"),
    "bm25-only": (["--bm25-only"], [], "BM25's first three skills, no Selection"),
    "no-verify": (["--no-verify"], [], "proposals are not verified"),
    "freeze-selection": (["--freeze-selection"], [], "Selection is not trained"),
    "freeze-summary": (["--freeze-summary"], [], "Summary is not trained"),
    "oversample": (["--oversample", "2"], [], "6 tasks rolled out, the first 3 that vary trained on: twice the time"),
    # The neighbours, each at what takes about as long as the default run; reward is their own, and none has skills.
    "drkernel": (["--recipe", "drkernel", "--batch", "1", "--steps", "3"], [], "Dr. Kernel, 3 steps of a task"),
    "kevin": (["--recipe", "kevin", "--batch", "1", "--n", "8", "--steps", "3"], [], "Kevin, 3 steps of a task, n = 8"),
    "cuda-agent": (["--recipe", "cuda-agent"], [], "CUDA Agent"),
}


def train(name, seed, out, options):
    """The default run with the change `name`."""
    given, replaced, _ = CHANGES[name]
    for module, attribute, make in replaced:
        setattr(module, attribute, make(getattr(module, attribute)))
    folder = str(Path(out) / f"{name}-{seed}")
    return reinforce.main(["--device", "cpu", *given, "--seed", str(seed), "--out", folder, *options])


def gain(run) -> float:
    """Of the best turn's reward on the built-in problems. run: the lines of its metrics.jsonl."""
    return run[-1]["eval_reward_best"] - run[0]["eval_reward_best"]


def spread(values) -> str:
    """Mean and 95 % interval."""
    return interval(values).partition(", n")[0].replace(", 95 % interval", "") if values else "-"


def row(name, runs, today) -> str:
    """A line of the table. runs, and today, those of the default run: seed -> the lines of metrics.jsonl."""
    def before_after(key, form):
        return " -> ".join(f"{statistics.mean(run[i]['eval_' + key] for run in runs.values()):{form}}" for i in (0, -1))

    def total(key):
        return sum(step[key] for step in steps)

    def live(role):
        return f"{total(role + '_live')}/{total(role + '_rows')}"

    steps = [line for run in runs.values() for line in run if line["step"] > 0]
    summaries = [step["reward_summary"] for step in steps if step["reward_summary"] is not None]
    paired = {} if name == "today" or "--recipe" in CHANGES[name][0] else today  # a recipe has its own reward
    against = [gain(run) - gain(paired[seed]) for seed, run in runs.items() if seed in paired]
    cells = [name, len(runs), before_after("reward_best", ".3f"), spread([gain(run) for run in runs.values()]),
             spread(against), before_after("correct", ".0%"), before_after("fast_1", ".0%"),
             f"{total('prs_masked') / total('turns'):.0%}", f"{total('grad_clipped')} of {len(steps)}",
             total("zero_gradient"), f"{statistics.mean(summaries):.2f}" if summaries else "-",
             live("policy"), live("selection"), live("summary")]
    return "| " + " | ".join(map(str, cells)) + " |"


def read_run(folder) -> list[dict]:
    """The lines of a run's metrics.jsonl, each step's with the number of its Policy turns. Raises UserError."""
    lines = read_metrics(folder)
    with told(f"{folder}/config.json: cannot be read"):
        args = argparse.Namespace(**json.loads((folder / "config.json").read_text()))
    if not lines or lines[-1]["step"] < max(args.steps, 1) or "eval_reward_best" not in lines[-1]:
        raise UserError(f"{folder}: not finished, or not evaluated")
    return [line | {"turns": args.batch * args.oversample * (args.k + 1) * args.n * args.turns} for line in lines]


def table(folder):
    """Print the table of all finished runs in a folder, in the order of CHANGES. Raises UserError if there is none."""
    found = {name: {} for name in CHANGES}
    for path in sorted(folder.glob("*-*/metrics.jsonl")):
        name, _, seed = path.parent.name.rpartition("-")
        try:
            if name in found:
                found[name][seed] = read_run(path.parent)
        except UserError as error:
            print(error, file=sys.stderr)
    if not any(found.values()):
        raise UserError(f"{folder}: no finished run in it")
    print("| change | runs | reward | gain, 95 % interval over runs | the same minus today's, same seeds | correct "
          "| Fast_1 | turns that PRS masks | clipped steps | steps without gradient | Summary's return "
          "| live rows: Policy | Selection | Summary |")
    print("|" + "---|" * 14, *[row(name, runs, found["today"]) for name, runs in found.items() if runs], sep="\n")


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("name", nargs="?", choices=list(CHANGES), metavar="NAME", help="what is changed; see --list")
    parser.add_argument("--seed", type=int, default=0, help="of the run (default: 0)")
    parser.add_argument("--out", default="runs/changes", help="folder of the runs (default: runs/changes)")
    parser.add_argument("--list", action="store_true", help="tell the names, and how each is done")
    parser.add_argument("--table", metavar="DIR", help="print the table of the finished runs of a folder, as Markdown")
    args, options = parser.parse_known_args(argv)
    if args.name and not args.table:
        return train(args.name, args.seed, args.out, options)
    if options or not (args.list or args.table):
        parser.error(f"unknown: {' '.join(options)}" if options else "give a NAME, --list or --table DIR")
    if args.table:
        table(Path(args.table))
        return 0
    for name, (given, replaced, meaning) in CHANGES.items():
        how = given + [f"{make.__name__}()" for _, _, make in replaced]
        print(f"{name:18}{meaning}  [{' '.join(how) or '-'}]")
    return 0


if __name__ == "__main__":
    run_command(main)

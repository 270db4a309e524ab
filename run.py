"""What a run leaves behind and how it is shown: folder, metrics, transcripts, checkpoint, resuming, the page.

    python run.py DIR [DIR ...]    a run or a benchmark as one HTML page, or several of them side by side

The folder of a run, --out of reinforce.py:

    config.json                            every option of the run, written when it begins
    metrics.jsonl                          one object a step; step_metrics says what each number means
    rollouts/step_N.jsonl                  first prompts, and every reply, verdict, selection, proposal and rejection
    rollouts/eval_N.jsonl                  the same for the evaluation after step N
    rollouts/redundant_N.jsonl             the same for the evaluation on redundant operators after step N
    skill_library/global_step_N.jsonl      the library after step N
    checkpoint -> checkpoint_N/            a model folder with its skill library (bench.py loads it), and trainer.pt:
                                           all that --resume needs
    curves.png, report.html                all of it to look at, made after each evaluation, at the end, on Ctrl-C
    in_use                                 the process that uses the folder

A run may be killed at any instant. --resume continues from its last checkpoint, removes the files of later steps, and
repeats these steps. A checkpoint holds all that one step hands to the next: weights, optimiser, library, and the state
of the random generator. The position in the stream of tasks follows from the number of the step. So on a CPU the
resumed run equals an uninterrupted one bit for bit.

`episodes` is a list of reinforce.Episode, `options` a reinforce.Options. reinforce.py imports this file, so this file
cannot import those classes.
"""

if __name__ == "__main__":  # before torch is loaded: it sets how OpenMP's threads wait
    from command.process import begin
    begin()

import contextlib
import functools
import itertools
import json
import os
import shutil
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from command.options import Parser

PARSER = Parser(description="A run or a benchmark as one HTML page, or several side by side.")
PARSER.add_argument("folders", metavar="DIR", nargs="+", type=Path, help="--out of reinforce.py or of bench.py; the "
                    "page of one is DIR/report.html, that of several comparison.html in the first")
if __name__ == "__main__" and {"-h", "--help"}.intersection(sys.argv):
    PARSER.parse_args()  # --help needs no torch, whose import takes seconds

import torch
from tqdm import tqdm

from backbone import Backbone, check_device
from chat.prompts import PROMPTS, read_prompts
from fast import ranks
from fast.optimizer import make_adamw
from page import charts, levels, records
from page.writer import render
from policy import rollout_metrics, verdict_text
from command.files import find_path, hold, read_lines, user_error, write_atomically
from command.process import UserError, run_command
from command.progress import Progress
from sandbox import Sandbox
from selector import selection_metrics
from skills import MODEL_FILE, SkillLibrary
from summarizer import summary_metrics
from synthetic.training import task_stream


@dataclass
class Run:
    """The state of a run: what reinforce.py's phases read, and what one step hands to the next."""

    options: object  # reinforce.Options
    out: Path  # the run's folder
    model: Backbone  # the weights that are trained
    library: SkillLibrary  # grows after each update
    initial_names: set  # names of the skills before the first step; all others count as learnt
    optimizer: torch.optim.Optimizer  # or, with several ranks, ranks.ShardedOptimizer
    generator: torch.Generator  # of all sampling in training
    secret: str = ""  # the inputs of correctness trials follow from it; no candidate may know it
    step0_done: bool = False  # is the evaluation before training already in metrics.jsonl?
    step: int = 0  # complete steps
    sandbox: Sandbox | None = None  # opened by reinforce.main, which also closes it
    seconds: Counter = field(default_factory=Counter)  # of the current step, by phase
    progress: Progress | None = None  # shows the step and its phase, see reinforce.train
    stream: object = None  # iterator over the training tasks of later steps
    fitness: dict = field(default_factory=dict)  # name of a user's task -> why it is left out, or None
    writes: bool = field(default_factory=lambda: ranks.rank() == 0)  # rank 0 writes files and progress

    @property
    def clock(self) -> str:
        """The clock of all verdicts. Figures of the two clocks are never compared."""
        return "modelled" if self.options.device == "cpu" else "measured"

    @contextlib.contextmanager
    def phase(self, name):
        """Time a phase and show its name. The time that it waits for the sandbox is counted as `sandbox` instead."""
        self.progress.begin(name if name == "evaluate" else f"step {self.step + 1}: {name}")
        start = time.monotonic()
        before = self.sandbox.waited
        yield
        waited = self.sandbox.waited - before
        self.seconds["sandbox"] += waited
        self.seconds[name] += time.monotonic() - start - waited


# ----------------------------------------------------------------------------------------------------------------------
# Beginning and resuming


def new_run(given, configure) -> Run:
    """A new run: check the options, load the model, and write the folder. The sandbox is not open yet.

    given: what the command line gives, a dict. configure: see reinforce.configure. Raises UserError. A run that is
    refused leaves nothing behind.
    """
    name = given.get("out") or time.strftime("runs/%Y%m%d-%H%M%S")
    taken = (Path(name) / "checkpoint").exists() or bool(read_metrics(Path(name)))
    # All ranks take rank 0's values (ranks.first): clocks differ, and rank 0 may write there before others look.
    name, taken = ranks.first((name, taken))
    if taken:
        raise UserError(f"{name} already holds a run: continue it with --resume, or choose another --out")
    given = {"device": "cuda" if torch.cuda.is_available() else "cpu"} | given
    options = configure(given)  # to check the options early; `load` repeats it when the model's size is known
    check(options)
    fitness = {}
    stream = task_stream(options, fitness)  # fills in fitness
    first = next(stream)  # raises TaskError where no task may be trained on
    run = load(Path(name), find_path(options.model), given, configure)
    run.stream = itertools.chain([first], stream)
    run.fitness = fitness
    run.model.check_lengths(run.options.prompt_tokens, run.options.policy_tokens)
    prepare_folder(run)
    if not run.model.large:  # 100 GB take minutes to write: a large run that is killed early begins again
        save_checkpoint(run)
    return run


def resume_run(given, configure, changeable) -> Run:
    """The run in --out as it was at its last checkpoint; see new_run. changeable: options that may differ now.

    Raises UserError, also for a folder that holds no checkpoint, and for another option that differs.
    """
    if "out" not in given:  # the default is the present date and time
        raise UserError("--resume: say which run with --out")
    out = Path(given["out"])
    folder = out / "checkpoint"  # a link, see save_checkpoint
    path = folder / "trainer.pt"
    if not path.is_file():
        raise UserError(f"--resume: nothing to resume in {out}: {path} is missing")
    if ranks.rank() == 0:
        hold(out)  # no other process may use the folder now
    with user_error(f"--resume: {path} is broken"):
        # Mapped, not read: 65 GB of an 8B's optimiser must not be in the host's memory twice; ranks share one copy.
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    for name, value in given.items():
        if value != saved["options"].get(name) and name not in changeable:
            raise UserError(f"--resume: {out} has {name} = {saved['options'].get(name)}, not {value}")
    given = saved["options"] | given  # the command line may change some
    with user_error(f"--resume: {path} is of another version"):
        check(configure(given))
    run = load(out, folder, given, configure)  # the checkpoint is a model folder like any other
    with user_error(f"--resume: {path} is of another version"):
        run.optimizer.load_state_dict(saved["optimizer"])
        run.generator.set_state(saved["generator"])
        run.initial_names = set(saved["initial_names"])
        run.secret = saved["secret"]
        run.fitness = saved["fitness"]
    run.step = saved["step"]
    run.step0_done = run.step > 0 or bool(read_metrics(out))
    prepare_folder(run)
    run.stream = task_stream(run.options, run.fitness)
    drawn = run.step * run.options.batch * run.options.oversample
    for _ in tqdm(range(drawn), "tasks of the complete steps", delay=1, disable=None):
        next(run.stream)
    return run


def check(options):
    """Raise UserError, before the model is loaded, for options that cannot work. Loading 8B parameters takes a while.

    It also reads the prompts. They are global: all roles use those that were read last.
    """
    check_device(options.device)
    if options.prompts:
        read_prompts(options.prompts)
    PROMPTS["shown_reward"] = options.reward


def load(out, source, given, configure) -> Run:
    """A run with the model and the library of a folder or hub id, and a new optimiser and generator.

    Some defaults depend on the model's size (reinforce.Options), which is known only now.
    """
    model = Backbone.load(source, given["device"])
    for parameter in model.model.parameters():
        # A copy: weights in a memory-mapped file are aligned otherwise, which may change the last bit of a product.
        parameter.data = parameter.data.clone()
    options = configure(given, model.large)
    model.thinking = options.thinking
    library = SkillLibrary.of_model(source)
    optimizer = ranks.sharded(make_adamw, model.model.parameters(), lr=options.lr, host=options.offload)
    generator = torch.Generator(model.device).manual_seed(options.seed)
    names = {skill.name for skill in library.skills}
    secret = ranks.first(os.urandom(16).hex())
    return Run(options, out, model, library, names, optimizer, generator, secret)


def prepare_folder(run):
    """Prepare the run's folder: write the options, and remove the files of steps after the checkpoint.

    These steps are repeated. On a GPU they may have other results, so none of their files may stay.
    """
    run.progress = Progress(run.options.steps, "step", run.step, hidden=not run.writes)
    if not run.writes:
        return
    out = run.out
    options = run.options
    hold(out)
    write_atomically(out / "config.json", json.dumps(asdict(options) | levels.provenance(options.device), indent=1))
    lines = [json.dumps(line) + "\n" for line in read_metrics(out) if line["step"] <= run.step]
    write_atomically(out / "metrics.jsonl", "".join(lines))
    for pattern in ("rollouts/*_*.jsonl", "skill_library/global_step_*.jsonl"):
        for step, path in records.numbered(out, pattern):
            if step > run.step:
                path.unlink()
    drawn = options.batch * options.oversample  # tasks of a step
    print(f"{out}: {options.model} on {options.device}, steps {run.step} to {options.steps}. A step: {drawn} tasks x "
          f"({options.k} + 1) schemes x {options.n} rollouts x {options.turns} turns = "
          f"{drawn * (options.k + 1) * options.n * options.turns} kernels.", flush=True)


# ----------------------------------------------------------------------------------------------------------------------
# The end of a step


def step_metrics(run, episodes, losses) -> dict:
    """The line of metrics.jsonl that is made of a step's episodes. losses: of reinforce.update.

        step, clock     number of the step; are speedups modelled or measured?
        staged          skills that joined the library, at most one for each task
        library         skills in it afterwards
        rows            {role: number of replies with an advantage}. More than the loss has: replies of skipped
                        tasks and of frozen roles count, too
        masked          {reason: number of replies without a loss}. "prs", "mrs": see advantages.py. "void": see
                        policy.reward_turns. "group": the task is skipped, as its rewards do not vary or B tasks before
                        it were kept
        the others      see policy.rollout_metrics, selector.selection_metrics, summarizer.summary_metrics and
                        reinforce.update; finish_step adds `seconds`, reinforce.evaluate_if_due the evaluations
    """
    trajectories, selections, summaries = [], [], []
    for episode in episodes:
        trajectories += episode.trajectories
        selections += episode.selections
        summaries += episode.summaries
    turns = list(itertools.chain.from_iterable(trajectory.turns for trajectory in trajectories))
    line = {"step": run.step + 1, "clock": run.clock} | rollout_metrics(trajectories)
    line |= selection_metrics(selections, run.initial_names) | summary_metrics(summaries)
    line |= {"staged": sum(episode.staged is not None for episode in episodes), "library": len(run.library)}
    line["rows"] = {"policy": compared(turns), "selection": compared(selections), "summary": compared(summaries)}
    reasons = Counter(turn.masked for turn in turns)  # None: not masked before the update
    line["masked"] = {why: reasons[why] for why in ("prs", "void", "group")} | {"mrs": losses.pop("mrs_masked")}
    return line | losses


def compared(replies) -> int:
    """Number of replies with an advantage. A void turn, and a Selection that was not sampled, have none."""
    return sum(reply.advantage is not None for reply in replies)


def finish_step(run, line):
    """Commit a step: its metrics, then perhaps a checkpoint. Steps after the last checkpoint are repeated by --resume.

    line: what metrics.jsonl gets; the seconds of each phase are added to it. Step 0 is the evaluation before training.
    """
    # They add up to the step's: waiting for the sandbox is counted once (Run.phase).
    line["seconds"] = {name: round(value, 3) for name, value in run.seconds.items()}
    if run.writes:
        run.library.save(run.out / f"skill_library/global_step_{run.step}.jsonl")
        with open(run.out / "metrics.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
    if run.step == run.options.steps or (run.step and run.step % run.options.save_every == 0):
        save_checkpoint(run)
    if not run.writes:
        return
    if run.step or "with_reward_best" in line:  # step 0 is only shown if it was evaluated
        run.progress.say(records.step_in_words(line, run.options, run.library))
    if "evaluate" in line["seconds"] and run.step < run.options.steps:  # after the last step finish_run does it
        write_page([run.out], run.out / "report.html")


def save_checkpoint(run):
    """Write a folder checkpoint_N: a model, its skill library, and trainer.pt; then let `checkpoint` point to it.

    The link is replaced in one instant, after the folder is on the disk. So it never points to a half-written folder.
    The next complete save removes such a folder.
    """
    optimizer = run.optimizer.state_dict()  # each rank has a part of it, so all must call this
    if not run.writes:
        return
    folder = run.out / f"checkpoint_{run.step}"
    link = run.out / "checkpoint"
    state = {"step": run.step, "options": asdict(run.options), "initial_names": [*run.initial_names],
             "optimizer": optimizer, "generator": run.generator.get_state(), "secret": run.secret,
             "fitness": run.fitness}
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed here
    folder.mkdir()
    try:
        run.model.save(folder)
        run.library.save(folder / MODEL_FILE)
        torch.save(state, folder / "trainer.pt")
    except Exception as error:  # safetensors and torch raise different types if the disk is full
        shutil.rmtree(folder)
        kept = f"; {link} is still the one before" if link.exists() else ""
        raise UserError(f"{folder}: cannot write the checkpoint ({str(error).splitlines()[0]}){kept}") from None
    os.sync()  # the system may lose power, too
    new = run.out / "checkpoint.new"  # a link cannot be changed, only replaced
    new.unlink(missing_ok=True)
    new.symlink_to(folder.name)
    if link.is_dir() and not link.is_symlink():  # the run was copied by a program that follows links
        shutil.rmtree(link)
    os.replace(new, link)
    for step, path in records.numbered(run.out, "checkpoint_*"):
        if step != run.step:
            shutil.rmtree(path)


def read_metrics(out) -> list[dict]:
    """The lines of a run's metrics.jsonl, each with its step; empty where there is no run.

    A last line that a kill has cut off is left out. Raises UserError for any other line that cannot be read.
    """
    return read_lines(out / "metrics.jsonl", lambda line: line | {"step": int(line["step"])})


# ----------------------------------------------------------------------------------------------------------------------
# Transcripts


def write_transcripts(run, name, episodes):
    """rollouts/NAME.jsonl: a line for each selection, rollout and summary, with replies, verdicts and the first prompt.

    With --set history=all a later prompt is the earlier text and its `feedback`, so it is not written. Rewards and
    advantages can be recomputed from these lines. The gradient cannot: token ids and log-probabilities are missing.
    """
    if not run.writes:
        return
    # Decode each prompt once: many replies share one. Special tokens show where messages begin and end.
    text = functools.cache(lambda ids: run.model.tokenizer.decode(ids, skip_special_tokens=False))
    lines = []
    for number, episode in enumerate(episodes):
        # (role, completion, the rest of its line)
        answers = [("selection", s.completion, selection_record(s)) for s in episode.selections if s.completion]
        answers += [("policy", t.turns[0].completion, rollout_record(t)) for t in episode.trajectories]
        answers += [("summary", s.completion, summary_record(s)) for s in episode.summaries]
        for role, completion, record in answers:
            prompt = text(tuple(completion.prompt_ids))
            opening = {"role": role, "episode": number, "task": episode.task.name, "prompt": prompt}
            lines.append(json.dumps(opening | record, default=vars) + "\n")
    write_atomically(run.out / f"rollouts/{name}.jsonl", "".join(lines))


def answer_record(answer) -> dict:
    """What the records of turns, selections and summaries share: the reply, its reward and its advantage.

    finished: did the reply end by itself, before its limit of tokens?
    """
    return {"reply": answer.completion.text, "finished": answer.completion.finished, "reward": answer.reward,
            "advantage": answer.advantage}


def selection_record(selection) -> dict:
    """skills: names of those that it chose. dropped: names in its reply that are no candidates, or are too many."""
    names = [skill.name for skill in selection.skills]
    return {"skills": names, "dropped": selection.dropped} | answer_record(selection)


def rollout_record(trajectory) -> dict:
    """The skills that the rollout was given, and its turns."""
    return {"skills": [skill.name for skill in trajectory.skills], "turns": list(map(turn_record, trajectory.turns))}


def turn_record(turn) -> dict:
    """A turn, or a proposal's verification, with what the sandbox said.

    masked: why the turn has no loss, or null; see step_metrics. MRS is missing here: a rank knows it of its own replies
    only.
    """
    shown = verdict_text(turn.verdict)
    return answer_record(turn) | {"verdict": turn.verdict, "feedback": shown, "masked": turn.masked}


def summary_record(summary) -> dict:
    """rollout: number of the rollout that it sums up, from 0. staged: the name of its skill in the library, or null."""
    proposals = [{"written": p.written, "rejected": p.rejected, "detail": p.detail, "known": p.known,
                  "attempt": turn_record(p.attempt) if p.attempt else None, "staged": p.joined}
                 for p in summary.proposals]
    return {"rollout": summary.winner.number, "proposals": proposals} | answer_record(summary)


# ----------------------------------------------------------------------------------------------------------------------
# Curves and the page


def write_page(folders, path) -> list:
    """The curves of each run, and one HTML file that shows a run or a benchmark, or several of them one after another.

    All of it is made from the folders alone. Returns a page.records.Source of each. Raises UserError.
    """
    sources = [records.read_folder(folder) for folder in folders]
    for source in sources:
        if source.metrics:
            charts.save_curves(source, source.folder / "curves.png")
    write_atomically(path, render(sources))
    return sources


@contextlib.contextmanager
def page_if_interrupted(out, command):
    """In this context Ctrl-C and SIGTERM write the page and print the command that continues."""
    try:
        yield
    except KeyboardInterrupt:
        if ranks.rank() == 0:
            write_page([out], out / "report.html")
        raise KeyboardInterrupt(f"{out}/report.html shows what is done; continue with: {command}") from None


def finish_run(run):
    """Write the page, and print in words what was learnt."""
    if run.writes:
        [source] = write_page([run.out], run.out / "report.html")
        print(*records.lessons(source), f"done: {run.out}/report.html, {run.out}/curves.png, {run.out}/metrics.jsonl, "
              f"{run.out}/checkpoint/", sep="\n")


def main(argv=None) -> int:
    """Make the page of some folders. Returns the status of the process. Raises UserError for bad input."""
    folders = PARSER.parse_args(argv).folders
    path = folders[0] / ("report.html" if len(folders) == 1 else "comparison.html")
    write_page(folders, path)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    run_command(main)

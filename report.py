"""The folder of a training run: metrics, records of every reply, checkpoints, curves. Bookkeeping of reinforce.py.

    metrics.jsonl            one object a step; README.md says what each number means
    rollouts/step_N.jsonl    every prompt, reply, verdict, selection, proposal, and why a proposal was rejected
    checkpoint/              a model folder with its skill library, and trainer.pt: all that --resume needs
    curves.png

`run` is reinforce.Run, `episodes` a list of reinforce.Episode. A step is complete once its checkpoint is; what a
kill leaves of a later one is written again.
"""

import contextlib
import functools
import json
import os
import shutil
import time
from collections import Counter
from pathlib import Path

import torch

from sandbox import feedback
from skills import MODEL_FILE, write_atomically
from summarizer import REASONS


class UsageError(ValueError):
    """A command line that cannot be followed. The message is one line, fit to be shown to the user."""


def clock(run):
    return "modelled" if run.sandbox.device == "cpu" else "measured"


def mean(values) -> float | None:
    values = list(values)
    return sum(values) / len(values) if values else None


def rollout_metrics(trajectories) -> dict:
    """Means over rollouts; a rollout counts by its best turn, and a wrong one as not faster than anything."""
    best = [max((t.verdict.speedup for t in tr.turns if t.verdict.correct), default=0.0) for tr in trajectories]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    return {"reward_best": mean(trajectory.best_reward for trajectory in trajectories),
            "reward_turn": mean(turn.reward for turn in turns), "correct": mean(speedup > 0 for speedup in best),
            "fast_1": mean(speedup > 1 for speedup in best), "fast_1.2": mean(speedup > 1.2 for speedup in best),
            "speedup": mean(s for s in best if s),
            "correct_first": mean(trajectory.turns[0].verdict.correct for trajectory in trajectories),
            "coverage": mean(turn.verdict.coverage or 0.0 for turn in turns if turn.verdict.correct),
            "cheats": mean(bool(turn.verdict.rejected) for turn in turns),
            "unfinished": mean(not turn.completion.finished for turn in turns)}


def step_metrics(run, episodes) -> dict:
    trajectories = [trajectory for episode in episodes for trajectory in episode.trajectories]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    selections = [selection for episode in episodes for selection in episode.selections]
    summaries = [summary for episode in episodes for summary in episode.summaries]
    proposals = [proposal for summary in summaries for proposal in summary.proposals]
    seeds = {skill.name for skill in run.library.skills[:run.seeds]}
    return {"step": run.step + 1, "clock": clock(run), **rollout_metrics(trajectories),
            "reward_selection": mean(selection.reward for selection in selections),
            "reward_summary": mean(summary.reward for summary in summaries),
            "selected": mean(len(selection.skills) for selection in selections),
            "selected_learnt": sum(skill.name not in seeds for s in selections for skill in s.skills),
            "selected_invalid": sum(len(selection.dropped) for selection in selections),
            "summaries": len(summaries), "proposals": len(proposals), "passed": sum(not p.rejected for p in proposals),
            "rejected": dict(sorted(Counter(p.rejected for p in proposals if p.rejected).items())),
            "staged": sum(episode.staged is not None for episode in episodes), "library": len(run.library),
            "policy_rows": sum(turn.advantage is not None for turn in turns),
            "selection_rows": sum(selection.advantage is not None for selection in selections),
            "summary_rows": sum(summary.advantage is not None for summary in summaries),
            "prs_masked": sum(turn.advantage is None and bool(turn.completion.token_ids) for turn in turns)}


def progress(m, args) -> str:
    """The line that a step prints; before the first step only the evaluation."""
    evaluation = f"evaluation: reward {m['eval_reward_best']:.3f}, correct {m['eval_correct']:.0%}, " \
                 f"Fast_1 {m['eval_fast_1']:.0%} ({m['clock']})" if "eval_fast_1" in m else ""
    if m["step"] == 0:
        return f"before training  {evaluation}"
    text = (f"step {m['step']}/{args.steps}  reward {m['reward_best']:.3f}  correct {m['correct']:.0%}  "
            f"Fast_1 {m['fast_1']:.0%}  speedup {m['speedup'] or 0:.2f}x ({m['clock']})  rows {m['policy_rows']}"
            f"+{m['selection_rows']}+{m['summary_rows']}  skills {m['library']} (+{m['staged']})  "
            f"proposals passed {m['passed']} of {m['proposals']}  {sum(m['seconds'].values()):.0f} s")
    return text + ("  |  " + evaluation if evaluation else "")


def record_rollouts(run, path, episodes):
    """One line for each selection, rollout and summary: every prompt, reply, verdict and rejected proposal.

    A later turn's prompt is what came before it and the `feedback` there, so only the first is written out.
    """
    @functools.cache  # many replies answer the same prompt
    def text(ids):
        return run.model.tokenizer.decode(ids, skip_special_tokens=False)

    def opening(role, task, completion):
        return {"role": role, "task": task.name, "prompt": text(tuple(completion.prompt_ids))}

    def attempt(turn):
        return {"reply": turn.completion.text, "verdict": turn.verdict, "feedback": feedback(turn.verdict),
                "reward": turn.reward, "advantage": turn.advantage}

    lines = []
    for e in episodes:
        lines += [opening("selection", e.task, s.completion) | {
            "reply": s.completion.text, "skills": [skill.name for skill in s.skills], "dropped": s.dropped,
            "reward": s.reward, "advantage": s.advantage} for s in e.selections if s.completion]
        lines += [opening("policy", e.task, t.turns[0].completion) | {
            "skills": [skill.name for skill in t.skills], "turns": list(map(attempt, t.turns))} for t in e.trajectories]
        lines += [opening("summary", e.task, s.completion) | {
            "reply": s.completion.text, "reward": s.reward, "advantage": s.advantage, "proposals": [
                {"written": p.written, "rejected": p.rejected, "detail": p.detail,
                 "attempt": p.attempt and attempt(p.attempt), "staged": bool(p.skill) and p.skill == e.staged}
                for p in s.proposals]} for s in e.summaries]
    write_atomically(path, "".join(json.dumps(line, default=vars) + "\n" for line in lines))


def read_metrics(run) -> list[dict]:
    """The lines of complete steps: not one that a kill cut off, nor one whose checkpoint was never written."""
    path, kept = run.out / "metrics.jsonl", []
    for line in path.read_text().splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError):
            kept += [m for m in [json.loads(line)] if m["step"] <= run.step]
    return kept


def finish_step(run, line):
    """Commit a step: metrics first, then the checkpoint. Killed before that, all since the old one is done again."""
    line["seconds"] = {name: round(value, 3) for name, value in run.seconds.items()}
    with open(run.out / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
    run.settled = run.generator.get_state()
    if run.step % run.args.save_every == 0 or run.step == run.args.steps:
        save_checkpoint(run)


def shapes(model) -> list[list[int]]:
    return [list(parameter.shape) for parameter in model.model.parameters()]


def save_checkpoint(run):
    """A model folder, its skill library, and trainer.pt, of the last complete step.

    Complete at any instant: written aside, then swapped in.
    """
    folder, new, old = (run.out / name for name in ("checkpoint", "checkpoint.new", "checkpoint.old"))
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    run.model.save(new)
    run.library.save(new / MODEL_FILE)
    torch.save({"step": run.step, "config": vars(run.args), "seeds": run.seeds, "optimizer": run.optimizer.state_dict(),
                "generator": run.settled, "shapes": shapes(run.model)}, new / "trainer.pt")
    for path in new.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def open_folder(given, changeable) -> tuple[Path, dict | None]:
    """(folder of the run, its saved state or None for a new run); fills the options `given` up from the latter.

    changeable: options that may differ from the saved ones. Raises UsageError.
    """
    resume, named = given.pop("resume", False), given.pop("out", None)
    if resume and named is None:
        raise UsageError("--resume: say which run with --out")
    out, saved = Path(named or time.strftime("runs/%Y%m%d-%H%M%S")), None
    if resume:
        folder, new, old = (out / name for name in ("checkpoint", "checkpoint.new", "checkpoint.old"))
        if old.exists() and not folder.exists():
            new.rename(folder)  # killed in mid-swap: the new one was complete
        if (folder / "trainer.pt").is_file():
            saved = torch.load(folder / "trainer.pt", map_location="cpu", weights_only=True)
        elif (out / "config.json").is_file():  # killed before its first checkpoint: begin again
            saved = {"step": None, "config": json.loads((out / "config.json").read_text())}
        else:
            raise UsageError(f"--resume: nothing to resume in {out}")
        for name, value in given.items():
            if value != saved["config"][name] and name not in changeable:
                raise UsageError(f"--resume: {out} has --{name.replace('_', '-')} {saved['config'][name]}, not {value}")
        given |= {name: value for name, value in saved["config"].items() if name not in given}
    elif (out / "checkpoint").exists() or (out / "metrics.jsonl").is_file() and (out / "metrics.jsonl").stat().st_size:
        raise UsageError(f"{out} already holds a run: continue it with --resume, or choose another --out")
    given.setdefault("device", "cuda" if torch.cuda.is_available() else "cpu")
    if given["device"] == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: no GPU is available here")
    try:
        write_atomically(out / ".writable", "")
        (out / ".writable").unlink()
        if not any(out.iterdir()):
            out.rmdir()  # a run that is refused for another reason leaves nothing behind
    except OSError as error:
        raise UsageError(f"--out {out}: cannot write there ({error.strerror})") from None
    return out, saved


def draw_curves(metrics, path):
    """curves.png: rewards, training, evaluation, skills, rejected proposals and seconds over the steps."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps, name = [m for m in metrics if m["step"] > 0], f"({metrics[-1]['clock']} clock)"
    figure, axes = plt.subplots(2, 3, figsize=(15, 8), layout="constrained")
    for axis, title, keys in (
            (axes[0, 0], "reward by role", ["reward_best", "reward_turn", "reward_selection", "reward_summary"]),
            (axes[0, 1], f"training tasks {name}", ["correct", "fast_1", "fast_1.2", "coverage"]),
            (axes[0, 2], f"built-in problems {name}", ["eval_reward_best", "eval_correct", "eval_fast_1"]),
            (axes[1, 0], "skills", ["library", "proposals", "passed", "selected_learnt"])):
        for key in keys:
            points = [(m["step"], m[key]) for m in metrics if m.get(key) is not None]
            xs, ys = [x for x, _ in points], [y for _, y in points]
            if len(points) > 30 and key != "library":  # a step's tasks are few: show the mean of ten steps, too
                [line] = axis.plot(xs, ys, alpha=0.2)
                ys = [mean(ys[max(0, i - 4):i + 6]) for i in range(len(ys))]
                axis.plot(xs, ys, color=line.get_color(), label=key)
            elif points:
                axis.plot(xs, ys, marker=".", label=key)
        axis.set_title(title)
    stacks = [{reason: [m["rejected"].get(reason, 0) / max(m["proposals"], 1) for m in steps] for reason in REASONS},
              {phase: [m["seconds"].get(phase, 0) for m in steps] for m in steps for phase in m["seconds"]}]
    for axis, title, stack in zip(axes[1, 1:], ("share of proposals rejected", "seconds of a step"), stacks):
        stack = {label: values for label, values in stack.items() if any(values)}
        if stack:
            axis.stackplot([m["step"] for m in steps], list(stack.values()), labels=list(stack))
        axis.set_title(title)
    for axis in axes.flat:
        axis.set_xlabel("step")
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
        else:
            axis.text(0.5, 0.5, "none in this run", ha="center", transform=axis.transAxes)
    figure.savefig(path.with_suffix(".new.png"), dpi=100)
    os.replace(path.with_suffix(".new.png"), path)
    plt.close(figure)

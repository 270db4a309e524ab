"""The numbers of a run's metrics.jsonl, out of what its steps have done; README.md says what each one means.

An episode is all that a step did with one task (reinforce.Episode).
"""

from collections import Counter

from page.records import EVALUATION, mean


def rollout_metrics(episodes) -> dict:
    """Means over rollouts and over turns, of training tasks or of the evaluation's problems.

    A rollout counts by its best turn, and a wrong one as not faster than anything. Fast_p is the share of all rollouts
    that are correct and more than p times as fast as PyTorch. None stands for a mean of nothing.
    """
    trajectories = [trajectory for episode in episodes for trajectory in episode.trajectories]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    # for each rollout the speedup of its fastest correct turn, or 0
    best = [max((turn.verdict.speedup for turn in trajectory.turns if turn.verdict.correct), default=0.0)
            for trajectory in trajectories]
    last = [trajectory.turns[-1].verdict for trajectory in trajectories]
    return {"reward_best": mean(trajectory.best_reward for trajectory in trajectories),
            "reward_turn": mean(turn.reward for turn in turns),
            "correct": mean(speedup > 0 for speedup in best),
            "fast_1": mean(speedup > 1 for speedup in best), "fast_1.2": mean(speedup > 1.2 for speedup in best),
            "speedup": mean(s for s in best if s),
            "correct_last": mean(verdict.correct for verdict in last),
            "fast_1_last": mean(verdict.correct and verdict.speedup > 1 for verdict in last),
            "correct_first": mean(trajectory.turns[0].verdict.correct for trajectory in trajectories),
            "coverage": mean(turn.verdict.coverage or 0.0 for turn in turns if turn.verdict.correct),
            "cheats": mean(bool(turn.verdict.rejected) for turn in turns),
            "unfinished": mean(bool(turn.completion.token_ids) and not turn.completion.finished for turn in turns)}


def step_metrics(run, episodes) -> dict:
    """What a step's line in metrics.jsonl says of its episodes: every role's rewards, counts and rows of the loss."""
    turns = [turn for episode in episodes for trajectory in episode.trajectories for turn in trajectory.turns]
    selections = [selection for episode in episodes for selection in episode.selections]
    summaries = [summary for episode in episodes for summary in episode.summaries]
    proposals = [proposal for summary in summaries for proposal in summary.proposals]
    replies = {"policy": turns, "selection": selections, "summary": summaries}
    return {"step": run.step + 1, "clock": run.clock, **rollout_metrics(episodes),
            # Selection: its reward, skills in a selection, learnt ones among all, names that were no candidates
            "reward_selection": mean(selection.reward for selection in selections),
            "selected": mean(len(selection.skills) for selection in selections),
            "selected_learnt": sum(skill.name not in run.seeds for s in selections for skill in s.skills),
            "selected_invalid": sum(len(selection.dropped) for selection in selections),
            # Summary: its reward, and what became of its proposals
            "reward_summary": mean(summary.reward for summary in summaries),
            "summaries": len(summaries), "proposals": len(proposals), "passed": sum(not p.rejected for p in proposals),
            "known": sum(p.known and not p.rejected for p in proposals),  # passed, but the library had it already
            "rejected": dict(sorted(Counter(p.rejected for p in proposals if p.rejected).items())),
            "staged": sum(episode.staged is not None for episode in episodes), "retired": len(run.retired),
            "library": len(run.library),
            # replies in a group; those of them with an advantage other than 0 that is not masked before the update
            **{f"{role}_rows": sum(reply.advantage is not None for reply in group) for role, group in replies.items()},
            **{f"{role}_live": sum(bool(reply.advantage) and not getattr(reply, "masked", None) for reply in group)
               for role, group in replies.items()},
            # turns masked by PRS, void, or of a task that is not trained on
            **{f"{why}_masked": sum(turn.masked == why for turn in turns) for why in ("prs", "void", "group")}}


def progress(m, args, before, library) -> str:
    """The line that a step prints; before the first step only the evaluation.

    m: a line of metrics.jsonl. before: the first of the run, with which an evaluation is compared. library: after m.
    """
    text = "before training" if m["step"] == 0 else (
        f"step {m['step']}/{args.steps}  reward {m['reward_best']:.3f}  correct {m['correct']:.0%}  "
        f"Fast_1 {m['fast_1']:.0%}  speedup {m['speedup'] or 0:.2f}x ({m['clock']})  replies {m['policy_rows']}"
        f"+{m['selection_rows']}+{m['summary_rows']}  skills {m['library']} (+{m['staged']})  "
        f"proposals passed {m['passed']} of {m['proposals']}  {sum(m['seconds'].values()):.0f} s")
    if m.get("staged"):
        text += "  |  new: " + ", ".join(skill.name for skill in library.skills[-m["staged"]:])
    if m.get("retired"):
        text += f"  |  retired: {m['retired']}"
    if "eval_fast_1" in m:
        parts = []
        for key, label, form in EVALUATION:
            gain = f" ({m[key] - before[key]:+{form}})" if m["step"] and key in before else ""
            parts.append(f"{label} {m[key]:{form}}{gain}")
        text += f"{'  |' if m['step'] else ''}  evaluation: {', '.join(parts)} ({m['clock']})"
    return text

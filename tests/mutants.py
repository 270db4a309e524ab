"""One-line mutants of the method's modules: does a test fail for each? Slow, so not part of the test suite.

    python tests/mutants.py [--quick] [--only TEXT] [--first N]

Each row of MUTANTS is a file, a piece of one of its lines, and what takes its place. A copy of the repository is made,
the mutant put in, the test files of its group run until one fails. What survives is printed at the end.
"""

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch  # noqa: F401  once, for all mutants
import transformers  # noqa: F401

ROOT = Path(__file__).parent.parent
TESTS = {  # file -> the test files that should notice, quick ones first
    "reinforce.py": ["test_paper.py", "test_credit.py", "test_reinforce.py"],
    "policy.py": ["test_paper.py", "test_credit.py", "test_roles.py", "test_reinforce.py"],
    "selector.py": ["test_paper.py", "test_roles.py", "test_reinforce.py"],
    "summarizer.py": ["test_paper.py", "test_roles.py", "test_credit.py", "test_reinforce.py"],
    "skills.py": ["test_paper.py", "test_skills.py"]}
MUTANTS = [line.split(" => ") for line in r"""
reinforce.py => (total - g) / others) if => total / others) if
reinforce.py => if others else float(g) => if others else 0.0
reinforce.py => g - sum(returns) / len(returns) => g - sum(returns) / (len(returns) + 1)
reinforce.py => a / deviation if => a * deviation if
reinforce.py => if abs(advantage) > 1e-9 => if abs(advantage) > 1e-30
reinforce.py => reward + gamma * (returns[0] => reward + (returns[0]
reinforce.py => in reversed(rewards) => in rewards
reinforce.py => setdefault(t if group == "turn" => setdefault(t if group != "turn"
reinforce.py => if member: => if True:
reinforce.py => baseline([returns[i][t] => baseline([rewards[i][t]
reinforce.py => tokens[i][t] * abs(advantages[i][t]) => abs(advantages[i][t])
reinforce.py => / total, DIVISOR_FLOOR) => / total, 0)
reinforce.py => if cross_scheme and total: => if total:
reinforce.py => else a / scale for a => else a * scale for a
reinforce.py => - 0.3) / 0.1, 0.0), 1.0) => - 0.4) / 0.1, 0.0), 1.0)
reinforce.py => 0.0), 1.0) if verdict.correct else 1.0 => 0.0), 1.0) if verdict.correct else 0.0
reinforce.py => statistics.stdev(rewards) => statistics.pstdev(rewards)
reinforce.py => len(rewards) < 2 or => len(rewards) > 1 and
reinforce.py => - 1.0) <= 1e-3 => - 1.0) <= 1e-2
reinforce.py => abs(torch.cat(drifts).mean() => abs(drifts[0].mean()
reinforce.py => math.log(1e-4) => math.log(1e-5)
reinforce.py => return [close and drift.min() => return [drift.min()
reinforce.py => -torch.minimum(ratio * advantage => -torch.maximum(ratio * advantage
reinforce.py => ratio.clamp(1 - low, 1 + high) => ratio.clamp(1 - high, 1 + low)
reinforce.py => torch.where(advantage < 0 => torch.where(advantage > 0
reinforce.py => (count + more) * width > budget => count * width > budget
reinforce.py => key=lambda item: -item[0] => key=lambda item: item[0]
reinforce.py => 1 + apart, rows)) => 1, rows))
reinforce.py => args.loss_scale * (len(every) => (len(every)
reinforce.py => if args.loss_mean == "sum" else tokens) => if args.loss_mean != "sum" else tokens)
reinforce.py => [row for row in rows if row.advantage] => [row for row in rows]
reinforce.py => keep or not args.mrs for => keep for
reinforce.py => keep or not args.mrs for => True for
reinforce.py => row.advantage * keep for => row.advantage for
reinforce.py => (ratio > 1 + args.clip_high)).sum() => (ratio > 1 + args.clip_high)).any()
reinforce.py => (ratio < 1 - args.clip_low) => (ratio < 0)
reinforce.py => model.model.parameters(), args.grad_clip => model.model.parameters(), 1e9
reinforce.py => if math.isfinite(stats["grad_norm"]): => if True:
reinforce.py => if stats["tokens_live"]: => if True:
reinforce.py => stats["grad_norm"] > args.grad_clip => stats["grad_norm"] < args.grad_clip
reinforce.py => "zero_gradient": not stats => "zero_gradient": bool(stats
reinforce.py => args.batch * args.oversample)) => args.batch))
reinforce.py => args.k if args.skills else 0 => args.k
reinforce.py => losses = update(run.model => flush(run, episodes); losses = update(run.model
reinforce.py => if args.bm25_only and skills else () => if False else ()
reinforce.py => for chosen in skills for _ in range(n)] => for _ in range(n) for chosen in skills]
reinforce.py => if set(trajectory.skills) == set(selection.skills) => if trajectory.skills == selection.skills
reinforce.py => if set(trajectory.skills) == set(selection.skills) => if trajectory.skills
reinforce.py => sum(pooled) / len(pooled) => max(pooled)
reinforce.py => best_trigger(e.trajectories, args.trigger) => best_trigger(e.trajectories)
reinforce.py => args.prompt_tokens, args.trigger) => args.prompt_tokens)
reinforce.py => if not args.no_verify: => if True:
reinforce.py => min(skill.verify_speedup, policy.SPEEDUP_CAP) => skill.verify_speedup
reinforce.py => if not proposal.rejected] => ]
reinforce.py => max(speedups, default=0.0) => min(speedups, default=0.0)
reinforce.py => trained < args.batch and varies => varies
reinforce.py => row[-1].reward for row in turns => row[0].reward for row in turns
reinforce.py => trained += useful => trained += 1
reinforce.py => args.prs and draw >= => draw >=
reinforce.py => args.prs and draw >= => args.prs and draw <
reinforce.py => turn.masked != "void" for turn in row] for => not turn.masked for turn in row] for
reinforce.py => 0 if turn.masked else len( => 0 if not turn.masked else len(
reinforce.py => members, tokens, args.gamma => members, tokens, 1.0
reinforce.py => 0.0 if turn.masked else turn.advantage => turn.advantage
reinforce.py => if turn.masked != "void" and turn => if turn
reinforce.py => asked, args.selection_weight, => asked, args.summary_weight,
reinforce.py => episode.summaries, args.summary_weight, => episode.summaries, 1.0,
reinforce.py => args.summary_weight, args.freeze_summary => args.summary_weight, False
reinforce.py => asked, args.selection_weight, args.freeze_selection => asked, args.selection_weight, False
reinforce.py => advantage if useful else 0.0 => advantage
reinforce.py => "skill_library", run.step + 1) => "skill_library", run.step)
reinforce.py => 0 if args.eval_samples == 1 else 1.0 => 1.0
reinforce.py => 0 if args.eval_samples == 1 else 1.0 => 0
reinforce.py => int(args.skills), 0) => int(args.skills), 1.0)
reinforce.py => run.step * drawn, None) => 0, None)
policy.py => 0.5 + 0.5 * min( => 0.3 + 0.5 * min(
policy.py => verdict.speedup, 0.0), SPEEDUP_CAP) + 0.5 => verdict.speedup, 0.0), SPEEDUP_CAP) + 1.0
policy.py => return 0.3 + verdict.speedup => return verdict.speedup
policy.py => return 3.0 if over_compiled and over_compiled.correct and => return 3.0 if over_compiled and
policy.py => if turn.reward == 2.0] => if turn.reward >= 1.0]
policy.py => cuda_agent_reward(turn.verdict, verdict) => cuda_agent_reward(verdict, turn.verdict)
policy.py => if turn.reward <= 0 < best => if turn.reward < 0 < best
policy.py => if turn.reward <= 0 < best => if turn.reward <= 0
policy.py => turn.masked, turn.reward = "void", 0.0 => turn.masked = "void"
policy.py => trajectories if mask_void else () => trajectories
policy.py => best = max(best, turn.reward) => best = turn.reward
policy.py => max(turn.reward for turn in self.turns) => self.turns[-1].reward
policy.py => if len(prompt) > limit: => if len(prompt) >= limit:
policy.py => while len(prompt) <= limit: => while len(prompt) < limit:
policy.py => == turns: => == turns + 1:
policy.py => "content": feedback(verdict)}] => "content": ""}]
policy.py => \n{skill.description}\n{skill.content}" => \n{skill.description}"
policy.py => code = backbone.extract_code(reply.text) => code = reply.text
policy.py => if reply.finished else f" => if True else f"
policy.py => clock="modelled" if sandbox.device == "cpu" => clock="modelled" if sandbox.device != "cpu"
policy.py => temperature, generator) as sampler => 1.0, generator) as sampler
selector.py => task.source.strip()[:TASK_CHARACTERS] => task.source.strip()[:TASK_CHARACTERS + 1]
selector.py => len(chosen) < MOST_SKILLS => len(chosen) <= MOST_SKILLS
selector.py => offered[name] not in chosen and len => len
selector.py => name.strip() if => name if
selector.py => library.recall(task.source) for => library.recall(tasks[0].source) for
selector.py => tuple(found[:MOST_SKILLS]) => tuple(found)
selector.py => len(prompt) > max_prompt_tokens and => len(prompt) > max_prompt_tokens + 1 and
selector.py => candidates[i][:-1] => candidates[i][1:]
selector.py => if found]  # with nothing => ]  # with nothing
selector.py => for i in asked for _ in range(k)] => for _ in range(k) for i in asked]
selector.py => max_new_tokens, temperature, generator)) => max_new_tokens, 1.0, generator))
summarizer.py => if not first.verdict.correct: => if False:
summarizer.py => >= gain * max(first.verdict.speedup, 1.0) => > gain * max(first.verdict.speedup, 1.0)
summarizer.py => >= gain * max(first.verdict.speedup, 1.0) else None => >= gain * first.verdict.speedup else None
summarizer.py => best = max(right, key= => best = min(right, key=
summarizer.py => return max(found, key=lambda item: item[2] => return max(found, key=lambda item: item[1]
summarizer.py => if (turns := trigger(trajectory, gain)) => if (turns := trigger(trajectory))
summarizer.py => for turn in (first, best)] => for turn in (first, first)]
summarizer.py => prompts += [prompt] * s => prompts += [prompts[0] if prompts else prompt] * s
summarizer.py => or len(prompt) <= max_prompt_tokens => or len(prompt) < max_prompt_tokens
summarizer.py => or len(prompt) <= max_prompt_tokens => or True
summarizer.py => len(proposals) >= MOST_PROPOSALS => len(proposals) > MOST_PROPOSALS
summarizer.py => > MOST_CONTENT_TOKENS => >= MOST_CONTENT_TOKENS
summarizer.py => not identity(skill).isdisjoint(known) => False
summarizer.py => lazy_advice(f"{skill.description}\n{skill.content}") => lazy_advice(skill.content)
summarizer.py => len(tags) > 16 => len(tags) > 17
summarizer.py => len(description) > 500 => len(description) > 501
summarizer.py => summary.winner.skills + (proposal.skill,) => (proposal.skill,)
summarizer.py => list(jobs), 1, max_new_tokens => list(jobs), 2, max_new_tokens
summarizer.py => max_prompt_tokens, temperature=0) => max_prompt_tokens, temperature=1.0)
summarizer.py => summary.first, gain) => summary.best, gain)
summarizer.py => summary.first, gain) => summary.first)
summarizer.py => speedup < gain * max(first.verdict.speedup, 1.0) => speedup < gain * first.verdict.speedup
summarizer.py => if not p.rejected and not p.known] => if not p.rejected]
summarizer.py => if not p.rejected and not p.known] => if not p.known]
summarizer.py => key=lambda skill: skill.verify_speedup or 0 => key=lambda skill: -(skill.verify_speedup or 0)
skills.py => if len(self.skills) < 3: => if len(self.skills) < 4:
skills.py => if scores[i] > 0] => if scores[i] >= 0]
skills.py => np.argsort(-scores, kind="stable") => np.argsort(scores, kind="stable")
skills.py => *s.tags, s.content]) => s.content])
skills.py => [s.name, s.description, => [s.name,
skills.py => self.staged = [] => pass
skills.py => name, n = f"{skill.name}-{n}", n + 1 => name, n = f"{skill.name}-{n}", n + 2
skills.py => os.replace(temporary, path) => os.rename(temporary, str(path) + "x")
""".strip().splitlines()]


def survives(copy, tests, file, old, new) -> bool:
    """Whether all of `tests` pass with `new` in place of `old`, which must stand on one line of the file at least."""
    source = (ROOT / file).read_text()
    if old not in source:
        raise SystemExit(f"{file}: no line has {old!r}")
    (copy / file).write_text(source.replace(old, new, 1))
    child = os.fork()  # torch is imported already, the repository's own modules are not
    if not child:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os.chdir(copy)
        sys.path[0] = str(copy)
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-k", "not killed and not kill_nine and not survives",
                            *(f"tests/{name}" for name in tests)])
        os._exit(int(code))
    _, status = os.waitpid(child, 0)
    (copy / file).write_text(source)
    return status == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="mutants whose line has this text")
    parser.add_argument("--quick", action="store_true", help="without tests/test_reinforce.py")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    args = parser.parse_args()
    rows = [row for row in MUTANTS[args.first:] if args.only in " => ".join(row)]
    alive = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", "__pycache__", "runs"))
        for file, tests in TESTS.items():
            if args.quick and "test_reinforce.py" in tests:
                tests.remove("test_reinforce.py")
            if any(row[0] == file for row in rows) and not survives(copy, tests, file, "", ""):
                raise SystemExit(f"{file}: its tests fail without any mutant")
        for number, row in enumerate(rows, start=1):
            alive += [" => ".join(row)] if (survived := survives(copy, TESTS[row[0]], *row)) else []
            print(f"{number} of {len(rows)}: {'SURVIVES' if survived else 'noticed'} {row}", flush=True)
    print(f"{len(rows) - len(alive)} of {len(rows)} noticed", *alive, sep="\n")


if __name__ == "__main__":
    main()

"""Related systems, each as rows of the tables that the paper's files look names up in. Read this file last.

    python reinforce.py --recipe kevin         options, reward, baseline and history of a related system
    python bench.py --strategy evolve ...      its strategy at test time

It is also the example of how a fork adds something of its own: write a function, enter it in a table under a name, and
give that name as an option. reinforce.py and bench.py import this file, so that its rows are there.

    table                       a row is
    policy.REWARDS              Reward(of a Verdict)              --reward NAME
    policy.HISTORIES            Strategy(...) in training         --set history=NAME
    policy.STRATEGIES           Strategy(...) at test time        bench.py --strategy NAME
    policy.VERDICT_FORMS        a Verdict as a text               `verdict_form` in a file of prompts
    advantages.BASELINES        Baseline(of a group's returns)    --baseline NAME
    advantages.LOSS_MEANS       what divides the loss             --set loss_mean=NAME
    RECIPES                     options that go together          --recipe NAME

A reward in three lines, with a row of options for it:

    REWARDS["speed"] = Reward(lambda verdict: verdict.speedup if verdict.correct else 0.0)
    RECIPES["mine"] = dict(reward="speed", gamma=0.5)
"""

import ast
import atexit
import functools
import statistics

import torch

from advantages import BASELINES, LOSS_MEANS, Baseline, group_mean
from chat.calls import after_thoughts, extract_code
from chat.release import json_feedback
from policy import HISTORIES, REWARDS, STRATEGIES, VERDICT_FORMS, Prompt, Reward, Strategy, davinci_reward, score_pairs
from sandbox import Sandbox, feedback

# ----------------------------------------------------------------------------------------------------------------------
# Options

# Everything beyond a plain policy gradient: the skills of daVinci-kernel, the filters of Dr. Kernel and of the release.
OFF = dict(skills=False, cross_scheme=False, prs=False, mrs=False, mask_void=False, min_std=0.0, oversample=1)
# Which options a related system sets differently. Three values are for the sizes of command.options.SIZES.
RECIPES = {
    "davinci": {},
    # Dr. Kernel's script for 14B: one task for each that is kept, prompts of at most 10,240 tokens
    "drkernel": dict(reward="drkernel", skills=False, cross_scheme=False, k=0, n=16, turns=3, oversample=1,
                     prompt_tokens=(3500, 6500, 10240)),
    # Kevin (arXiv 2507.11948) is a model that thinks. It writes CUDA C++; the prompts here ask for Triton or CUDA.
    "kevin": OFF | dict(reward="kevin", gamma=0.4, baseline="group-norm", loss_mean="token", k=0, n=16, loss_scale=1.0,
                        turns=4, temperature=0.9, history="condensed", thinking=True),
    # CUDA Agent's reward alone. It trains by PPO with a critic, and its model works with tools over many turns.
    "cuda-agent": OFF | dict(reward="cuda-agent"),
}
# What a recipe does not imitate: reinforce.py says so when it begins.
LEFT_OUT = {"kevin": "CUDA C++, QwQ-32B",
            "cuda-agent": "PPO's critic, tools, and rejection fine-tuning (sft.py --from-rollouts does that)"}


# ----------------------------------------------------------------------------------------------------------------------
# Dr. Kernel (arXiv 2602.05885) is daVinci-kernel without the library: turn-level REINFORCE with leave-one-out, PRS and
# MRS. Its reward clips the speedup at 3.

REWARDS["drkernel"] = Reward(functools.partial(davinci_reward, cap=3.0))


# ----------------------------------------------------------------------------------------------------------------------
# Kevin trains a model that thinks. Its reward has no cap and no coverage. Returns are discounted by 0.4 and compared
# with those of all turns of a task, as in GRPO. Later prompts show earlier replies without their thoughts.

def kevin_reward(verdict) -> float:
    """r = 0.3 correct + correct speedup."""
    return 0.3 + verdict.speedup if verdict.correct else 0.0


def group_norm(returns) -> list[float]:
    """A_i = (G_i - mean(G)) / std(G) (GRPO). The deviation is the population's: divided by m, not by m - 1.

    >>> group_norm([3.0, 1.0])
    [1.0, -1.0]
    """
    deviation = statistics.pstdev(returns)
    return [a / deviation if deviation > 1e-8 else 0.0 for a in group_mean(returns)]


def whole_task(turn) -> str:
    """All turns of a task are one group."""
    return "task"


def tokens(rows) -> int:
    """The loss is a mean over tokens."""
    return sum(len(row.completion.token_ids) for row in rows)


def condensed(reply) -> str:
    """A reply without its thoughts: what it says before its kernel, at most 60 words, and the kernel.

    >>> condensed("<think>Long.</think>Plan: fuse.\\n```python\\nclass ModelNew:\\n    pass\\n```\\nDone.")
    'Plan: fuse.\\n\\n```python\\nclass ModelNew:\\n    pass\\n```'
    """
    summary = " ".join(after_thoughts(reply).split("```")[0].split()[:60])
    code = extract_code(reply)
    return summary + (f"\n\n```python\n{code}```" if code else "")


REWARDS["kevin"] = Reward(kevin_reward)
BASELINES["group-norm"] = Baseline(group_norm, whole_task)
LOSS_MEANS["token"] = tokens
HISTORIES["condensed"] = Strategy(retell=condensed)


# ----------------------------------------------------------------------------------------------------------------------
# CUDA Agent (arXiv 2602.24286) rewards milestones instead of a speedup: correct, faster than eager PyTorch, and faster
# than torch.compile. The last one needs a second verdict, so it is a `revise` of its Reward.

MILESTONE = 1 / 0.95  # 5 % faster means 5 % less time


def milestone_reward(verdict) -> float:
    """-1 incorrect, 1 correct, 2 also 5 % faster than eager PyTorch."""
    if not verdict.correct:
        return -1.0
    return 2.0 if verdict.speedup > MILESTONE else 1.0


def third_milestone(trajectories, sandbox):
    """Turns that are 5 % faster than torch.compile, too, get 3. Without a GPU there is no such verdict."""
    if sandbox.device == "cpu":
        return
    turns, pairs = [], []
    for trajectory in trajectories:
        for turn in trajectory.turns:
            if turn.reward == 2.0:
                turns.append(turn)
                pairs.append((trajectory.task, turn.code))
    for turn, verdict in zip(turns, score_pairs(compiled_sandbox(sandbox.device), pairs)):
        if verdict.correct and verdict.speedup > MILESTONE:
            turn.reward = 3.0


@functools.cache
def compiled_sandbox(device) -> Sandbox:
    """The sandbox that judges against torch.compile, opened when it is first needed. It is closed with the program."""
    sandbox = Sandbox(device, trials=1, tasks=4, baseline="compile")
    atexit.register(sandbox.close)
    return sandbox


REWARDS["cuda-agent"] = Reward(milestone_reward, third_milestone)


# ----------------------------------------------------------------------------------------------------------------------
# CudaForge needs no training: after each verdict the model itself, as a judge, names the worst bottleneck, and the next
# attempt sees that line. (Here without NCU's metrics.)

JUDGE = ("You judge GPU kernels. Read the task, a kernel for it, and its verdict and profile. Answer with one line: "
         "the single worst problem or bottleneck, and how to remove it.")


def latest(turns, generator=None) -> list:
    """The last attempt alone."""
    return turns[-1:]


def judge_messages(turn, task) -> list[dict]:
    """The prompt with which the model judges a turn."""
    user = f"```python\n{task.source.strip()}\n```\n\n```python\n{turn.code or ''}\n```\n\n{feedback(turn.verdict)}"
    return [{"role": "system", "content": JUDGE}, {"role": "user", "content": user}]


def ask_judge(model, trajectory, longest):
    """Let the model judge the last turn; its first line becomes the turn's advice. See policy.Strategy.advise."""
    turn = trajectory.turns[-1]
    question = model.chat_ids(judge_messages(turn, trajectory.task))
    if len(question) <= longest:
        answer = yield Prompt(question)
        turn.advice = after_thoughts(answer.text).split("\n")[0][:400]
        turn.advice_tokens = len(answer.token_ids)


STRATEGIES["judge"] = Strategy(show=latest, advise=ask_judge)


# ----------------------------------------------------------------------------------------------------------------------
# EvoEngineer needs no training, either: attempts are a population, and the next attempt sees one parent, drawn by rank.
# (Here without crossover and insights.)

def ranked_parent(turns, generator=None, first=4, population=5) -> list:
    """A parent: one of the N <= `population` fastest correct attempts (evotoolkit, core/method.py).

    The r-th of them, from 0, has a chance in proportion to 1 / (r + N). The `first` attempts see nothing: they are the
    first generation. As long as no attempt is correct, the next one starts anew, too.
    """
    parents = sorted((turn for turn in turns if turn.verdict.correct), key=lambda turn: -turn.verdict.speedup)
    parents = parents[:population]
    if len(turns) < first or not parents:
        return []
    chances = 1 / torch.arange(len(parents), 2.0 * len(parents), device=generator.device if generator else "cpu")
    return [parents[torch.multinomial(chances, 1, generator=generator)]]


def repeated(code, turns) -> str | None:
    """A kernel that an earlier attempt has written is not judged again. See policy.Strategy.refuse."""
    earlier = {normalised(turn.code) for turn in turns if turn.code}
    return "an earlier attempt had the same kernel" if normalised(code) in earlier else None


@functools.cache
def normalised(code) -> str:
    """The same text for kernels that differ in comments, blank lines and layout only."""
    try:
        return ast.unparse(ast.parse(code))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # MemoryError: of thousands of nested operators
        return " ".join(code.split())


STRATEGIES["evolve"] = Strategy(show=ranked_parent, refuse=repeated, same_prompts=True, least_turns=5)


# ----------------------------------------------------------------------------------------------------------------------
# The release's feedback, for its own prompts

def release_feedback(verdict) -> str:
    """The verdict and its reward as JSON."""
    return json_feedback(verdict, davinci_reward(verdict))


VERDICT_FORMS["json"] = release_feedback

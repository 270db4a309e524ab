"""Related systems, added to the tables of functions in policy.py and advantages.py. Read this file last.

    python reinforce.py --recipe kevin         options, reward, baseline and history of a related system
    python bench.py --strategy evolve ...      its strategy at test time

It is also an example for forks: write a function, and give it a name in one of these tables. The name is then the value
of an option. reinforce.py and bench.py import this file, so its entries can be used there.

    table                       an entry                                        is chosen by
    policy.REWARDS              function: Verdict -> reward                     --reward NAME
    policy.HISTORIES            Strategy(...), used in training                 --set history=NAME
    policy.STRATEGIES           Strategy(...), used at test time                bench.py --strategy NAME
    policy.VERDICT_FORMS        function: Verdict -> text                       `verdict_form` in a file of prompts
    advantages.BASELINES        Baseline(subtract, group)                       --baseline NAME
    advantages.LOSS_MEANS       function: rows -> R, the divisor of the loss    --set loss_mean=NAME
    RECIPES                     options that go together                        --recipe NAME

A reward and a recipe that uses it, in two lines:

    REWARDS["speed"] = lambda verdict: verdict.speedup if verdict.correct else 0.0
    RECIPES["mine"] = dict(reward="speed", gamma=0.5)
"""

import functools
import statistics

import torch

from advantages import BASELINES, LOSS_MEANS, Baseline, group_mean
from chat.calls import after_thoughts, extract_code
from chat.prompts import PROMPTS
from chat.release import json_feedback
from policy import HISTORIES, REWARDS, STRATEGIES, VERDICT_FORMS, Prompt, Strategy, davinci_reward
from sandbox import feedback

# ----------------------------------------------------------------------------------------------------------------------
# Options

# Turns off what daVinci-kernel, Dr. Kernel and the release add to a plain policy gradient: skills and filters.
OFF = dict(skills=False, cross_scheme=False, prs=False, mrs=False, mask_void=False, min_std=0.0, oversample=1)
# The options that a system sets differently. A tuple: on a CPU, on a GPU, for a model over a billion parameters.
RECIPES = {
    "davinci": {},
    # As in Dr. Kernel's script for 14B: no oversampling, prompts of at most 10,240 tokens.
    "drkernel": dict(reward="drkernel", skills=False, cross_scheme=False, k=0, n=16, turns=3, oversample=1,
                     prompt_tokens=(3500, 6500, 10240)),
    # Kevin (arXiv 2507.11948) trains QwQ-32B, a model that thinks, to write CUDA C++. Our prompts ask for Triton.
    "kevin": OFF | dict(reward="kevin", gamma=0.4, baseline="group-norm", loss_mean="token", k=0, n=16, loss_scale=1.0,
                        turns=4, temperature=0.9, history="condensed", thinking=True),
    # CUDA Agent's reward alone. CUDA Agent itself trains by PPO with a critic, lets the model use tools over many
    # turns, and begins with rejection fine-tuning (sft.py --from-rollouts does that).
    "cuda-agent": OFF | dict(reward="cuda-agent"),
}


# ----------------------------------------------------------------------------------------------------------------------
# Dr. Kernel (arXiv 2602.05885) has turn-level REINFORCE with leave-one-out, PRS and MRS. daVinci-kernel adds the skill
# library to it. Dr. Kernel's reward clips the speedup at 3.

REWARDS["drkernel"] = functools.partial(davinci_reward, cap=3.0)


# ----------------------------------------------------------------------------------------------------------------------
# Kevin trains a model that thinks. Its reward has no cap and no coverage. Returns are discounted by 0.4. All turns of a
# task are one group, normalised as in GRPO. Later prompts show earlier replies without their thoughts.

def kevin_reward(verdict) -> float:
    """r = 0.3 correct + correct speedup."""
    return 0.3 + verdict.speedup if verdict.correct else 0.0


def group_norm(returns) -> list[float]:
    """A_i = (G_i - mean(G)) / std(G) (GRPO). std divides by m, not by m - 1. A_i is 0 if std is 0.

    >>> group_norm([3.0, 1.0])
    [1.0, -1.0]
    """
    deviation = statistics.pstdev(returns)
    return [a / deviation if deviation > 1e-8 else 0.0 for a in group_mean(returns)]


def whole_task(turn) -> str:
    """All turns of a task are one group."""
    return "task"


def token_count(rows) -> int:
    """Number of tokens in the replies of these rows: the loss is then a mean over tokens."""
    return sum(len(row.completion.token_ids) for row in rows)


def condensed(reply) -> str:
    """A reply without its thoughts: what it says before its kernel, at most 60 words, and the kernel.

    >>> condensed("<think>Long.</think>Plan: fuse.\\n```python\\nclass ModelNew:\\n    pass\\n```\\nDone.")
    'Plan: fuse.\\n\\n```python\\nclass ModelNew:\\n    pass\\n```'
    """
    summary = " ".join(after_thoughts(reply).split("```")[0].split()[:60])
    code = extract_code(reply)
    return summary + (f"\n\n```python\n{code}```" if code else "")


REWARDS["kevin"] = kevin_reward
BASELINES["group-norm"] = Baseline(group_norm, whole_task)
LOSS_MEANS["token"] = token_count
HISTORIES["condensed"] = Strategy(retell=condensed)


# ----------------------------------------------------------------------------------------------------------------------
# CUDA Agent (arXiv 2602.24286) rewards milestones instead of a speedup. We leave out its third one, 5 % faster than
# torch.compile with reward 3, because it needs a second timing.

def milestone_reward(verdict) -> float:
    """-1: incorrect. 1: correct. 2: also 5 % faster than eager PyTorch, that is, in 5 % less time."""
    if not verdict.correct:
        return -1.0
    return 2.0 if verdict.speedup > 1 / 0.95 else 1.0


REWARDS["cuda-agent"] = milestone_reward


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
    """Draw a parent: one of the `population` fastest correct attempts, faster ones more often.

    If there are N of them, the r-th fastest, from 0, has a probability in proportion to 1 / (r + N) (evotoolkit,
    core/method.py). The `first` attempts are the first generation and see no parent, nor do attempts before the first
    correct one.
    """
    distinct = {turn.code: turn for turn in turns if turn.verdict.correct}  # of equal kernels the last one
    parents = sorted(distinct.values(), key=lambda turn: -turn.verdict.speedup)[:population]
    if len(turns) < first or not parents:
        return []
    chances = 1 / torch.arange(len(parents), 2.0 * len(parents), device=generator.device if generator else "cpu")
    return [parents[torch.multinomial(chances, 1, generator=generator)]]


STRATEGIES["evolve"] = Strategy(show=ranked_parent, same_prompts=True, least_turns=5)


# ----------------------------------------------------------------------------------------------------------------------
# The release's feedback, for its own prompts

def release_feedback(verdict) -> str:
    """The verdict and its reward, by the run's --reward, as JSON."""
    return json_feedback(verdict, REWARDS[PROMPTS["shown_reward"]](verdict))


VERDICT_FORMS["json"] = release_feedback

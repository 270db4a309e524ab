"""A step of several H200 of one node, reckoned from what was measured on one.

    python results/node/reckon.py

Measured on one H200: the rates of the update, of writing tokens, of reading prompts, and the link to the host. Assumed:
how long replies are, and the links between GPUs. From these the sampling of a step is simulated reply by reply on each
rank; the rest is division. A step has 16 tasks that are trained on, k + 1 = 4 schemes, n = 4 rollouts, 3 turns;
--oversample 2, the default of large models, rolls out 32 tasks.
"""

import heapq
import random
import statistics
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))
from fast import plan  # noqa: E402

# Measured: ../README.md, u1.json, ../paper_step
BANDWIDTH, OVERHEAD = 4.2e12, 0.0018  # of writing a token: bytes per second, and seconds beyond what they take
PREFILL = 5e14  # FLOP per second of reading prompts
KERNEL = 0.026  # seconds that the sandbox has the GPU for a kernel: nothing is written meanwhile
UPDATE = {"8B": 8230, "14B": 4570}  # tokens per second; 14B by its parameters
OPTIMIZER = 0.38 / plan.SHAPES["8B"].parameters  # seconds for a parameter
TO_HOST = 55e9  # bytes per second, of --offload
# Assumed
LINK = 200e9  # bytes per second that a rank sends to others (NVLink 4 has 450)
GATHER = 1.0  # seconds in which 16 tasks' episodes go through the hosts' memory (150 MB)
REPLY, SPREAD = 1500, 0.3  # tokens of a reply; its standard deviation between tasks, and again within a task
PROMPT, FEEDBACK = 2000, 400  # tokens of a first prompt, and of a verdict
VERDICT = 3.0  # seconds until it comes; other replies are written meanwhile
SELECTION, SUMMARY = 300, 800  # tokens of these roles' replies
TRIGGERED, ATTEMPTS = 0.5, 4  # share of tasks that trigger a summary, and verifications of one
LONGEST = PROMPT + 2 * (REPLY + FEEDBACK) + 8192  # tokens of a slot: a third turn's prompt and the longest reply
TRAINED = 1.8e6  # tokens of the update


def around(mean, rng) -> int:
    """A length, log-normal."""
    return max(1, round(mean * rng.lognormvariate(-SPREAD**2 / 2, SPREAD)))


def rollouts_of_a_step(tasks, rng) -> list:
    """[((task, scheme), [tokens of each turn's reply])]; those of a scheme begin with the same prompt.

    A task's three selections choose one of two sets of skills, or none. So they often choose the same: in transcripts
    of default runs with the model of d7d6189 a task has 2.1 different schemes of four.
    """
    rollouts = []
    for task in range(tasks):
        mean = around(REPLY, rng)
        for scheme in [*(rng.randrange(3) for _ in range(3)), 0]:
            rollouts += [((task, scheme), [around(mean, rng) for _ in range(3)]) for _ in range(4)]
    return rollouts


def deal(rollouts, ranks, by) -> list:
    """The rollouts of each rank. by: "scheme", as ranks.distribute; "task", all of one together; or "rollout"."""
    if by == "task":
        return [[one for one in rollouts if one[0][0] % ranks == rank] for rank in range(ranks)]
    if by == "rollout":
        return [rollouts[rank::ranks] for rank in range(ranks)]
    parts, schemes = [[] for _ in range(ranks)], {}
    for one in rollouts:
        schemes.setdefault(one[0], []).append(one)
    for scheme in sorted(schemes.values(), key=len, reverse=True):
        min(parts, key=len).extend(scheme)
    return parts


def sampling(shape, rollouts, slots, judged=True) -> float:
    """Seconds in which a rank writes its rollouts, `slots` at a time, and judges their kernels.

    First turns come before later ones, as the engine takes short prompts first. Where each rollout has a slot of its
    own a later turn reads only what is new, else its whole prompt.
    """
    read = PROMPT * len({scheme for scheme, _ in rollouts})
    queue = [(0, 0.0, number) for number in range(len(rollouts))]  # (turn, when its prompt is there, rollout)
    active, now, step = [], 0.0, 0  # active: (step that writes its last token, turn, rollout), a heap
    while queue or active:
        for turn, _, number in sorted(entry for entry in queue if entry[1] <= now)[:slots - len(active)]:
            queue = [entry for entry in queue if entry[2] != number]
            heapq.heappush(active, (step + rollouts[number][1][turn], turn, number))
            if turn:
                read += FEEDBACK if len(rollouts) <= slots else PROMPT + turn * (REPLY + FEEDBACK)
        if not active:
            now = min(at for _, at, _ in queue)
            continue
        context = sum(PROMPT + turn * (REPLY + FEEDBACK) + REPLY / 2 for _, turn, _ in active)
        token = OVERHEAD + (2 * shape.parameters + context * shape.cache) / BANDWIDTH
        end, turn, number = heapq.heappop(active)
        now, step = now + (end - step) * token, end
        if turn + 1 < len(rollouts[number][1]):
            queue.append((turn + 1, now + VERDICT, number))
    kernels = sum(len(lengths) for _, lengths in rollouts) if judged else 0
    return now + read * 2 * shape.parameters / PREFILL + kernels * KERNEL


def seconds(name, gpus, tasks, offload, by="scheme", exact=False, seed=0) -> dict:
    """Of each phase of a step. exact: a cache of which each sequence takes what it needs, not a slot of LONGEST."""
    shape, rng, phases = plan.SHAPES[name], random.Random(seed), {}
    free = plan.CARDS[141] - plan.RESERVED - plan.resident(shape, gpus, offload)
    slots = min(256, int(plan.room_for_cache(free) / shape.cache / (4000 if exact else LONGEST)))
    rollouts, triggered = rollouts_of_a_step(tasks, rng), [t for t in range(tasks) if rng.random() < TRIGGERED]
    phases["roll out"] = max(sampling(shape, part, slots) for part in deal(rollouts, gpus, by))
    for phase, asked, mean, number, judged in (
            ("select", range(tasks), SELECTION, 3, False), ("summarise", triggered, SUMMARY, 8, False),
            ("verify", triggered, REPLY, ATTEMPTS, True)):
        replies = [((task, 0), [around(mean, rng)]) for task in asked for _ in range(number)]
        phases[phase] = max(sampling(shape, part, slots, judged) for part in deal(replies, gpus, "task"))
    moved = 16 * shape.parameters / TO_HOST if offload else 0
    phases["update"] = (1.01 * TRAINED / UPDATE[name] + OPTIMIZER * shape.parameters + moved) / gpus
    # gradients there and back, and weights back; gathered: what the rollouts are, once for 16 tasks
    phases["links"] = (gpus - 1) / gpus * 6 * shape.parameters / LINK + GATHER * tasks / 16 if gpus > 1 else 0
    return phases | {"slots": slots, "step": sum(phases.values())}


def mean_seconds(*options, **more) -> dict:
    """Over ten drawn steps."""
    runs = [seconds(*options, **more, seed=seed) for seed in range(10)]
    return {key: statistics.mean(run[key] for run in runs) for key in runs[0]}


def main():
    columns = "slots", "select", "roll out", "summarise", "verify", "update", "links", "step"
    print("| | N | " + " | ".join(columns) + " | efficiency | by task | by rollout | exact cache |")
    print("|---" * (len(columns) + 6) + "|")
    for name in ("8B", "14B"):
        for tasks in (16, 32):
            for offload in (False, True):
                for gpus in (1, 2, 4, 8):
                    if plan.refusal(name, plan.SHAPES[name], gpus, plan.CARDS[141], 32768, offload):
                        continue
                    found = mean_seconds(name, gpus, tasks, offload)
                    alone = mean_seconds(name, 1, tasks, True)["step"]  # the faster way for one GPU
                    others = [mean_seconds(name, gpus, tasks, offload, **other)["step"]
                              for other in ({"by": "task"}, {"by": "rollout"}, {"exact": True})]
                    print(f"| {name}, {tasks} tasks{', --offload' * offload} | {gpus} | "
                          + " | ".join(f"{found[key]:.0f}" for key in columns)
                          + f" | {alone / gpus / found['step']:.0%} | "
                          + " | ".join(f"{other:.0f}" for other in others) + " |")


if __name__ == "__main__":
    main()

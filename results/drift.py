"""How far sampler and trainer disagree on the same tokens by rounding alone, and how many rollouts MRS masks for it.

    python results/drift.py checkpoints/tiny runs/seed0 --dtype bfloat16 --temperatures 1 1.5 2

The prompts are those of the run's rollouts, each once. For each role and temperature: replies, their tokens and nats a
token (how peaked the model is), median and maximum of |g - 1| (advantages.mismatched; the turns of a rollout are
one reply here), and the share of replies that MRS would mask. A temperature below 1 makes random weights peaked.
"""

import argparse
import random
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

from backbone import Backbone, Sampling  # noqa: E402
from command.files import read_lines  # noqa: E402
from command.process import run_command  # noqa: E402
from advantages import mismatched  # noqa: E402


def prompts_of(run) -> dict:
    """{role: its prompts} of a run's rollouts."""
    found = {}
    for path in sorted(Path(run, "rollouts").glob("*.jsonl")):
        for record in read_lines(path):
            if "prompt" in record:
                found.setdefault(record["role"], {})[record["prompt"]] = None
    return {role: list(prompts) for role, prompts in found.items()}


@torch.no_grad()
def measure(model, prompts, tokens, temperature) -> str:
    """One line of the table, for replies to these prompts."""
    ids = [model.encode(prompt) for prompt in prompts]
    replies = model.sample(ids, Sampling(tokens, temperature), torch.Generator(model.device).manual_seed(0))
    distances, nats, lengths, masked = [], [], [], 0
    for reply in replies:
        sampled = torch.as_tensor(reply.logprobs)
        [trained] = model.logprobs([(reply.prompt_ids, reply.token_ids)], temperature)
        drift = trained.cpu() - sampled
        masked += sum(mismatched([drift]))
        distances.append(abs(drift.mean().exp().item() - 1))
        nats.append(-sampled.mean().item())
        lengths.append(len(sampled))
    return (f"{len(replies):4d} replies  {statistics.mean(lengths):5.0f} tokens  {statistics.mean(nats):6.3f} nats  "
            f"median {statistics.median(distances):.6f}  max {max(distances):.6f}  masked {masked / len(replies):.0%}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model")
    add("run")
    add("--dtype", default="bfloat16")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--temperatures", type=float, nargs="+", default=[1.0])
    add("--prompts", type=int, default=24, help="of each role, drawn at random")
    add("--tokens", type=int, default=800, help="of a reply, at most")
    args = parser.parse_args()
    model = Backbone.load(args.model, args.device, getattr(torch, args.dtype))
    for temperature in args.temperatures:
        for role, prompts in prompts_of(args.run).items():
            chosen = random.Random(0).sample(prompts, min(args.prompts, len(prompts)))
            print(f"{temperature:g} {role:<10}", measure(model, chosen, args.tokens, temperature), flush=True)


if __name__ == "__main__":
    run_command(main)

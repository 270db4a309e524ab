"""Walk through the README's commands for real models in their order, with a stand-in of true shape.

    python results/rehearsal.py --size 0.6b                     on a CPU, about half an hour and 15 GB
    python results/rehearsal.py --size 8b [--ranks 2]           on one GPU of 80 GB, or two; 200 GB of disk
    python results/rehearsal.py --size 8b --phases model,data,sft        a part of it: the next call goes on
    python results/rehearsal.py --size 0.6b --tokenizer DIR     with the tokenizer and chat template of a real Qwen3

    model    a model folder: the tiny model in the shape of Qwen3 (node/enlarge.py), or random weights with --tokenizer
    data     rows, tasks and prompts in the layout of the released ones, of our own making
    sft      two steps on tool calls and conversations of several turns, for 8b of up to 32,768 tokens
    rl       steps of reinforce.py on the tasks; for 8b of 192 kernels each
    resume   one step more, from the checkpoint
    again    sft.py --from-rollouts on that run
    bench    five built-in problems
    page     the report of run and benchmark

Each phase is a command with a log in --out. rehearsal.json there gets its seconds, exit status, peak memory (of the
largest process in the host's memory; of all GPUs together, sampled twice a second) and what the program itself reports.
Where the model writes no kernels that earn a reward (random weights, replies cut short for a CPU) rewards are drawn at
random, so that the update has something to do: reinforce.py is then run by this file, and the record says so.
"""

import argparse
import importlib.util
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import reinforce  # noqa: E402
from chat.calls import extract_tool_call  # noqa: E402
from chat.prompts import PROMPTS  # noqa: E402
from fast import ranks  # noqa: E402
from command.files import read_lines, write_atomically  # noqa: E402
from command.process import run_command  # noqa: E402
from synthetic.examples import write_examples  # noqa: E402
from synthetic.training import family_tasks  # noqa: E402

SMALL = "--turns 2 --policy-tokens 100 --prompt-tokens 6000 --set selection_tokens=40 summary_tokens=100 trials=2"
SIZES = {  # rows of the cold start; replies of the longest; options of sft.py, of reinforce.py and of bench.py; steps
    "tiny": (8, 2, "--batch-sequences 4 --offload", f"--batch 1 --k 2 --n 2 --offload {SMALL}",
             "--max-new-tokens 60", 2),
    "0.6b": (4, 2, "--batch-sequences 2 --batch-tokens 1024", f"--batch 1 --k 1 --n 1 --update-tokens 1024 {SMALL}",
             "--turns 2 --max-new-tokens 40", 1),  # 15 GB of memory
    "8b": (128, 80, "--offload", "--batch 2 --policy-tokens 1024 --offload", "--max-new-tokens 1024", 2)}
PHASES = ["model", "data", "sft", "rl", "resume", "again", "bench", "page"]
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES")  # nvidia-smi itself shows all GPUs
NVIDIA_SMI = ["nvidia-smi"] + (["-i", VISIBLE] if VISIBLE else [])
PARQUET = importlib.util.find_spec("pyarrow")  # else rows are JSON lines, and tasks a folder of problems


# ----------------------------------------------------------------------------------------------------------------------
# Data


def cold_start_row(example, replies) -> dict:
    """An example in the layout of the release's rows (scripts/skill_data/merge_and_shuffle.py): texts of JSON.

    A conversation is repeated until it has so many replies.
    """
    opening = [message for message in example.messages if message["role"] == "system"]
    talk = example.messages[len(opening):]
    if example.tool:
        name = example.tool["function"]["name"]
        call = {"name": name, "arguments": extract_tool_call(talk.pop()["content"], name)}
        talk.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]})
    else:
        talk *= max(1, 2 * replies // len(talk))
    tools = json.dumps([example.tool]) if example.tool else None
    return {"messages": json.dumps(opening + talk), "tools": tools, "enable_thinking": False}


def write_data(out, count, longest):
    """The cold start's rows, one of 16 a long one; RL tasks, every second under another class name; prompts."""
    examples = write_examples(0, 24, False, 2, "single turns") + write_examples(500_000_000, 8, True, 2, "trajectories")
    calls = [example for example in examples if example.tool]
    talks = [example for example in examples if example.messages[-3]["role"] == "assistant"]  # of several turns
    rows, tasks = [], []
    for number in range(count):
        kind = calls if number % 2 else talks
        rows.append(cold_start_row(kind[number // 2 % len(kind)], 0 if number % 16 else longest))
    write_atomically(out / "sft.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for number, task in enumerate(itertools.islice(family_tasks(7, device=device), 12)):
        write_atomically(out / f"tasks/{number}.py", task.source)
        name = "Model" if number % 2 else "Net"
        tasks.append({"data_source": "rehearsal", "extra_info": {"entry_point": name, "uuid": str(number)},
                      "reward_model": {"ground_truth": re.sub(r"\bModel\b", name, task.source)}})
    if PARQUET:
        import pyarrow.parquet
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), out / "sft.parquet")
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(tasks), out / "rl.parquet")
    texts = {name: text for name, text in PROMPTS.items() if re.fullmatch("(selection|summary)_(system|user)", name)}
    turn = {"name": "tool_response", "template": "The verdict on your kernel:\n{feedback}\nWrite a faster ModelNew."}
    write_atomically(out / "prompts/prompts.yaml", json.dumps({"prompts": texts, "per_turn_prompts": [turn]}))


# ----------------------------------------------------------------------------------------------------------------------
# The phases


def reinforce_by_chance(argv):
    """reinforce.py, with rewards that are drawn at random from 0 to 4."""
    chance = random.Random(0)
    reinforce.policy.REWARDS["davinci"] = lambda verdict: 4 * chance.random()
    run_command(lambda: ranks.joined(reinforce.main)(argv))


def command(phase, args, out) -> list[str]:
    """The arguments of Python in a phase."""
    _, _, sft, rl, bench, steps = SIZES[args.size]
    rows, tasks = ("sft.parquet", "rl.parquet") if PARQUET else ("sft.jsonl", "tasks")
    rewards = "results/rehearsal.py by-chance" if args.by_chance else "reinforce.py"
    rl = (f"{rewards} --model {out}/sft --tasks {out}/{tasks} --prompts {out}/prompts --freeze-selection "
          f"--freeze-summary --eval none --out {out}/rl {rl} --steps")
    text = {"model": f"results/node/enlarge.py {out}/model --shape {args.size}",
            "sft": f"sft.py --model {out}/model --data {out}/{rows} --out {out}/sft --epochs 1 {sft}",
            "rl": f"{rl} {steps}", "resume": f"{rl} {steps + 1} --resume",
            "again": f"sft.py --model {out}/rl/checkpoint --from-rollouts {out}/rl --min-reward 0.5 --out {out}/again "
                     f"--epochs 1 {sft}",
            "bench": f"bench.py --level 1 --ids 1-5 --model {out}/rl/checkpoint --samples 1 --out {out}/bench {bench}",
            "page": f"run.py {out}/rl {out}/bench"}[phase]
    if phase == "model" and args.tokenizer:
        text += f" --tokenizer {Path(args.tokenizer).absolute()}"
    if phase not in ("model", "page") and args.ranks > 1:
        text = f"-m torch.distributed.run --standalone --nproc_per_node={args.ranks} -- {text}"
    return text.split()


def run_phase(arguments, log) -> dict:
    """Run Python. Returns the command, its exit status, and its peak memory in GB."""
    print("python", *arguments, flush=True)
    ended, gpu = 0, 0.0
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w") as file:
        process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
    while not ended:
        if torch.cuda.is_available():
            used = subprocess.run([*NVIDIA_SMI, "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
                                  capture_output=True, text=True).stdout
            gpu = max(gpu, sum(map(int, used.split())) * 2**20 / 1e9)
        time.sleep(0.5)
        ended, status, usage = os.wait4(process.pid, os.WNOHANG)
    process.returncode = os.waitstatus_to_exitcode(status)
    return {"command": " ".join(["python", *arguments]), "status": process.returncode,
            "host_gb": usage.ru_maxrss * 1024 / 1e9, "gpu_gb": gpu}


def reported(folder) -> dict:
    """What sft.py or reinforce.py itself says in its folder about the training."""
    if (folder / "sft.json").exists():
        record = json.loads((folder / "sft.json").read_text())
        rate = record["tokens"] / record["training_seconds"]  # of one epoch
        return {"examples": record["examples"], "tokens_per_second": round(rate, 1), "history": record["history"]}
    steps = [step for step in read_lines(folder / "metrics.jsonl") if step["step"]]  # run.step_metrics
    return {"steps": steps} if steps else {}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="0.6b")
    parser.add_argument("--tokenizer", help="folder with a tokenizer and its chat template")
    parser.add_argument("--ranks", type=int, default=1, help="processes, one for each GPU (torchrun)")
    parser.add_argument("--phases", default=",".join(PHASES), help="(default: all)")
    parser.add_argument("--out", help="(default: runs/rehearsal_SIZE)")
    args = parser.parse_args()
    args.by_chance = args.tokenizer is not None or args.size != "8b"
    out = Path(args.out or f"runs/rehearsal_{args.size}").absolute()
    path = out / "rehearsal.json"
    record = json.loads(path.read_text()) if path.exists() else {}
    for phase in args.phases.split(","):
        began, log, found = time.monotonic(), out / f"{phase}.log", {"status": 0}
        shutil.rmtree(out / phase, ignore_errors=True)  # of an earlier call
        if phase == "data":
            write_data(out, *SIZES[args.size][:2])
        else:
            found = run_phase(command(phase, args, out), log) | {"random_rewards": args.by_chance}
        found["seconds"] = round(time.monotonic() - began, 1)
        record[phase] = found | reported(out / phase.replace("resume", "rl"))
        write_atomically(path, json.dumps(record, indent=1) + "\n")
        print(json.dumps(record[phase]), flush=True)
        if found["status"]:
            sys.exit(f"{log} ends with: {log.read_text()[-1000:]}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["by-chance"]:
        reinforce_by_chance(sys.argv[2:])
    main()

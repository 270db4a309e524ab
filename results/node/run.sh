#!/usr/bin/env bash
# What only a machine with several GPUs can show: bash results/node/run.sh [GPUS] [SHAPE] [MODEL] [OUT]
# The update of SHAPE (of update_speed.py) and three steps on MODEL, on 1, 2, 4, ... GPUs, into OUT. Compare `seconds` in
# update_*.json and in run_*/metrics.jsonl with README.md here. Then kill a rank (kill -9) while a run goes on: it ends
# within 30 s with one line, and --resume goes on with any number of GPUs.
set -euo pipefail
gpus=${1:-2} shape=${2:-8b} model=${3:-checkpoints/tiny} out=${4:-runs/node}
cd "$(dirname "$0")/../.."
mkdir -p "$out"
launch() { python -m torch.distributed.run --standalone --nproc_per_node="$1" -- "${@:2}"; }
for ((n = 1; n <= gpus; n *= 2)); do
    for more in "" --offload; do
        launch "$n" results/update_speed.py --shape "$shape" --tokens 8192 --micro-batches 2 --sharded $more \
            --out "$out/update_$n$more.json"
    done
    launch "$n" reinforce.py --model "$model" --steps 3 --no-eval --offload --out "$out/run_$n"
done

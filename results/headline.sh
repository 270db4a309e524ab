#!/usr/bin/env bash
# From random weights to KernelBench on one GPU: bash results/headline.sh KERNELBENCH [OUT] [STAGE ...]
#
#   sft             a cold start of 26 million parameters: about 12 minutes for its examples on 16 cores, 6 on an H200
#   ceiling         the expert itself as a policy: the most that imitation can give
#   before          KernelBench before reinforcement learning
#   rl              all three roles on synthesised networks, about 20 minutes
#   after           KernelBench after it
#   without_skills  the same without skills in the prompts
#
# Without a STAGE all of them run. Each continues where it was interrupted. Environment variables, with their defaults:
# PROBLEMS 150000, EXECUTED 4000, EPOCHS 1, SIZE small, STEPS 40, BATCH 8, LR 5e-5, LEVELS "1 2 3", IDS (all), SAMPLES 1
# (greedy; more are sampled, into other folders), DEVICE cuda, GPUS 1 (for rl), SEED 0.
set -euo pipefail
kernelbench=$(realpath "$1") out=${2:-runs/headline}
stages=("${@:3}")
[ ${#stages[@]} -gt 0 ] || stages=(sft ceiling before rl after without_skills)
cd "$(dirname "$0")/.."
device=${DEVICE:-cuda} seed=${SEED:-0} levels=${LEVELS:-1 2 3}
cold_start=(python sft.py --problems "${PROBLEMS:-150000}" --executed "${EXECUTED:-4000}" --seed "$seed"
            --epochs "${EPOCHS:-1}" --device "$device" --out "$out/sft")
run=(python)
[ "${GPUS:-1}" = 1 ] || run=(python -m torch.distributed.run --nproc_per_node="$GPUS" --)
learning=("${run[@]}" reinforce.py --model "$out/sft" --tasks synth --device "$device" --seed "$seed" --out "$out/rl"
          --steps "${STEPS:-40}" --batch "${BATCH:-8}" --lr "${LR:-5e-5}" --turns 2 --s 4
          --eval-every 10 --set trials=3 save_every=5)

# bench MODEL NAME [OPTION ...]: every level, into a folder of that name.
bench() {
    for level in $levels; do
        python bench.py --kernelbench "$kernelbench" --level "$level" --model "$1" --device "$device" --seed "$seed" \
            --samples "${SAMPLES:-1}" ${IDS:+--ids "$IDS"} --out "$out/$2_level$level${SAMPLES:+_$SAMPLES}" "${@:3}"
    done
}

mkdir -p "$out"
for stage in "${stages[@]}"; do
    echo "== $stage"
    case $stage in
        sft) [ -f "$out/sft/sft.json" ] || "${cold_start[@]}" $([ ! -f "$out/sft/training.pt" ] || echo --resume) ;;
        ceiling) python results/ceiling.py --kernelbench "$kernelbench" --levels $levels --device "$device" \
                     ${IDS:+--ids "$IDS"} --out "$out/ceiling.json" ;;
        before) bench "$out/sft" before ;;
        rl) "${learning[@]}" $([ ! -f "$out/rl/config.json" ] || echo --resume) ;;
        after) bench "$out/rl/checkpoint" after ;;
        without_skills) bench "$out/rl/checkpoint" without_skills --no-skills ;;
        *) echo "no stage $stage" >&2; exit 2 ;;
    esac
done

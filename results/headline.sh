#!/usr/bin/env bash
# From random weights to KernelBench on one GPU: bash results/headline.sh KERNELBENCH [OUT] [STAGE ...]
#
#   examples   the wide cold start's, on the CPU alone (reckoned: 12 minutes on sixteen cores)
#   sft        26 million parameters (reckoned: 6 minutes of an H200)
#   ceiling    the expert itself as a policy: the most that imitation can give
#   before     the cold start on all levels
#   rl         all three roles on synthesised networks, about 20 minutes
#   after      what reinforcement learning made of it, on all levels
#   without_skills  the same, but no skills in the prompts
#
# Without a STAGE all of them. Each goes on where it was interrupted, so a lent GPU can be used piece by piece. By
# environment variables, with what they are here: PROBLEMS 150000, EXECUTED 4000, EPOCHS 1, SIZE small, STEPS 40,
# BATCH 8, LR 5e-5, LEVELS "1 2 3", IDS (all), SAMPLES 1 (greedy; more are sampled, into other folders), DEVICE cuda,
# GPUS 1 (for rl), SEED 0.
set -euo pipefail
kernelbench=$(realpath "$1") out=${2:-runs/headline}
stages=("${@:3}")
[ ${#stages[@]} -gt 0 ] || stages=(examples sft ceiling before rl after without_skills)
cd "$(dirname "$0")/.."
device=${DEVICE:-cuda} seed=${SEED:-0} levels=${LEVELS:-1 2 3}
cold_start=(python sft.py --wide --problems "${PROBLEMS:-150000}" --executed "${EXECUTED:-4000}" --seed "$seed"
            --size "${SIZE:-small}" --epochs "${EPOCHS:-1}" --device "$device" --cache "$out/examples.pt")
run=(python)
[ "${GPUS:-1}" = 1 ] || run=(python -m torch.distributed.run --nproc_per_node="$GPUS" --)
learning=("${run[@]}" reinforce.py --model "$out/sft" --tasks wide --device "$device" --seed "$seed" --out "$out/rl"
          --steps "${STEPS:-40}" --batch "${BATCH:-8}" --lr "${LR:-5e-5}" --turns 2 --s 4 --trials 3
          --eval-every 10 --save-every 5)

# bench MODEL NAME [OPTION ...]: every level, into a folder of that name; a rerun goes on where it was.
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
        examples) "${cold_start[@]}" ;;
        sft) [ -f "$out/sft/sft.json" ] || "${cold_start[@]}" --out "$out/sft" \
                 $([ ! -f "$out/sft/training.pt" ] || echo --resume) ;;
        ceiling) python results/ceiling.py --kernelbench "$kernelbench" --levels $levels --device "$device" \
                     ${IDS:+--ids "$IDS"} --out "$out/ceiling.json" ;;
        before) bench "$out/sft" before ;;
        rl) "${learning[@]}" $([ ! -f "$out/rl/config.json" ] || echo --resume) ;;
        after) bench "$out/rl/checkpoint" after ;;
        without_skills) bench "$out/rl/checkpoint" without_skills --no-skills ;;
        *) echo "no stage $stage" >&2; exit 2 ;;
    esac
done

#!/usr/bin/env bash
# Trains the debug model with AdamW, Muon, Shampoo and SOAP on the matrices, each at the best of a few
# learning rates, and prints a table; the loss curves go to TensorBoard and to one PNG.
#
#   NGPU=2 bash scripts/compare_optimizers.sh [--section.key value ...]
#
#   NGPU         ranks (default: 2)
#   STEPS        steps of the compared runs (default: 300)
#   SWEEP_STEPS  steps of each run that only chooses a rate (default: 60)
#   FOLDER       outputs to go on with, outputs/optimizers-N; runs that are complete there are kept
#                (default: the first N that is free)
#
# Further arguments go to every run. Also reads CONFIG_FILE, LOG_RANK and TRAIN_FILE like
# scripts/run_train.sh. The sweep is recorded in sweep.md beside the runs.
set -euo pipefail

SETUP_DEV=1
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
export NGPU=${NGPU:-2}
steps=${STEPS:-300}
sweep_steps=${SWEEP_STEPS:-60}

"$VENV_PYTHON" "$ROOT/scripts/build_corpus.py"
folder=${FOLDER:-$(_new_output_folder optimizers)}
mkdir -p "$folder"
folder=$(realpath "$folder")

# Half a decade apart. [optimizer].lr is the rate of embedding, head and norms, on AdamW in every run.
rates() {
    case $1 in
        Muon) echo 0.003 0.01 0.03 ;;
        *) echo 0.001 0.003 0.01 ;;
    esac
}

run() { # folder, optimizer, rate, steps, then overrides
    local where=$1 name=$2 rate=$3 count=$4
    shift 4
    if [ -e "$where/complete" ]; then
        echo "Keeping $where"
        return
    fi
    bash "$ROOT/scripts/run_train.sh" --checkpoint.no-enable --job.dump_folder "$where" \
        --matrix_optimizer.name "$name" --matrix_optimizer.lr "$rate" --optimizer.lr 0.003 \
        --matrix_optimizer.soap.max_precond_dim 1024 --training.local_batch_size 1 \
        --training.steps "$count" --lr_scheduler.warmup_steps $((count / 10)) "$@"
    touch "$where/complete"
}

cd "$ROOT"
for name in AdamW Muon Shampoo SOAP; do
    for rate in $(rates "$name"); do
        run "$folder/sweep/$name-$rate" "$name" "$rate" "$sweep_steps" "$@"
    done
done
"$VENV_PYTHON" scripts/optimizer_report.py sweep "$folder/sweep" | tee "$folder/sweep.md"
for name in AdamW Muon Shampoo SOAP; do
    rate=$("$VENV_PYTHON" scripts/optimizer_report.py best "$folder/sweep" "$name")
    run "$folder/$name-$rate" "$name" "$rate" "$steps" "$@"
done
"$VENV_PYTHON" scripts/optimizer_report.py compare "$folder"

#!/usr/bin/env bash
# Trains one configuration three times on the same data: owner shards, stock FSDP2-Muon, and
# DDP-Muon (the oracle); then prints the three side by side.
#
#   STEPS=50 bash scripts/compare_modes.sh [--section.key value ...]
#
# Reads NGPU, CONFIG_FILE, LOG_RANK and TRAIN_FILE like scripts/run_train.sh. The runs go to
# outputs/compare-N, the first N that is free.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
export NGPU=${NGPU:-4}
steps=${STEPS:-50}

"$VENV_PYTHON" "$ROOT/scripts/build_corpus.py"
folder=$(_new_output_folder compare)

run() { # name, then this mode's overrides
    local name=$1
    shift
    bash "$ROOT/scripts/run_train.sh" --training.steps "$steps" --checkpoint.no-enable \
        --job.dump_folder "$folder/$name" "$@"
}

run ddp --parallelism.data_parallel_replicate_degree "$NGPU" \
    --parallelism.data_parallel_shard_degree 1 "$@"
run stock --owner_fsdp.mode stock "$@"
run zero3 --owner_fsdp.mode zero3 "$@"

cd "$ROOT"
"$VENV_PYTHON" scripts/compare_runs.py "$folder/ddp" "$folder/stock" "$folder/zero3"

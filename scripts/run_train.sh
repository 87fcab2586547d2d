#!/usr/bin/env bash
# Trains one configuration on this machine, with the contract of TorchTitan's own run_train.sh:
#
#   NGPU=4 CONFIG_FILE=train_configs/debug_muon.toml bash scripts/run_train.sh --training.steps 20
#
#   NGPU          ranks to start, on GPUs or on CPU cores (default: 4)
#   CONFIG_FILE   TOML file (default: train_configs/debug_muon.toml)
#   LOG_RANK      ranks whose output is shown, separated by commas (default: 0)
#   TRAIN_FILE    module to run (default: torchtitan_matrixfsdp.train; TorchTitan's own, where torch sees
#                 a GPU: torchtitan.train, without this package's checkpoint guarantees)
#   --section.key value ...    overrides of the TOML file, passed on
#
# Paths in the TOML file and in overrides are relative to this clone, from whichever folder the
# script is called.
set -euo pipefail

NGPU=${NGPU:-4}
CONFIG_FILE=${CONFIG_FILE:-train_configs/debug_muon.toml}
LOG_RANK=${LOG_RANK:-0}
TRAIN_FILE=${TRAIN_FILE:-torchtitan_matrixfsdp.train}

if [ -f "$CONFIG_FILE" ]; then
    CONFIG_FILE=$(realpath "$CONFIG_FILE")
fi
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
cd "$ROOT"
[ -f "$CONFIG_FILE" ] || _die "CONFIG_FILE: no such file: $CONFIG_FILE"

if "$VENV_PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
else
    # The ranks share the cores already.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
fi

# A free port is chosen (localhost:0), so several runs can share a machine.
exec "$VENV_PYTHON" -m torch.distributed.run \
    --nproc_per_node="$NGPU" --rdzv_backend c10d --rdzv_endpoint="localhost:0" \
    --local-ranks-filter "$LOG_RANK" --role rank --tee 3 \
    -m "$TRAIN_FILE" --job.config_file "$CONFIG_FILE" "$@"

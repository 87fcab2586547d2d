#!/usr/bin/env bash
# From a fresh clone to a trained model: sets up, builds the corpus and the tokenizer, trains
# train_configs/debug_muon.toml on 4 ranks and prints a summary as its last line.
#
#   bash scripts/quickstart.sh [--section.key value ...]
#
# Reads what scripts/run_train.sh reads (NGPU, CONFIG_FILE, LOG_RANK, TRAIN_FILE). Each run gets a
# folder of its own, outputs/quickstart-N, unless --job.dump_folder names one; nothing is deleted.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
# For run_train.sh, also where summarize_run.py needs the number.
export NGPU=${NGPU:-4}

"$VENV_PYTHON" "$ROOT/scripts/build_corpus.py"

# The dump folder (the last one given counts, as in TorchTitan), and the arguments that a run which
# goes on from this one's checkpoint needs: all but the number of steps.
dump_folder="" value_of="" resume_args=()
for arg in "$@"; do
    case $value_of in
        steps)
            value_of=""
            continue
            ;;
        dump_folder) dump_folder=$arg ;;
    esac
    value_of=""
    case $arg in
        --training.steps)
            value_of=steps
            continue
            ;;
        --training.steps=*) continue ;;
        --job.dump[_-]folder) value_of=dump_folder ;;
        --job.dump[_-]folder=*) dump_folder=${arg#*=} ;;
    esac
    resume_args+=("$arg")
done
if [ -z "$dump_folder" ]; then
    # In a folder that holds a finished run, TorchTitan would resume from its last step and do nothing.
    dump_folder=$(_new_output_folder quickstart)
    set -- --job.dump_folder "$dump_folder" "$@"
    resume_args=(--job.dump_folder "$dump_folder" ${resume_args[@]+"${resume_args[@]}"})
fi
resume="NGPU=$NGPU${CONFIG_FILE:+ CONFIG_FILE=$(printf %q "$CONFIG_FILE")} bash scripts/run_train.sh"
resume+=$(printf ' %q' "${resume_args[@]}")

bash "$ROOT/scripts/run_train.sh" "$@"
cd "$ROOT"
"$VENV_PYTHON" scripts/summarize_run.py "$dump_folder" --ranks "$NGPU" --resume-command "$resume"

#!/usr/bin/env bash
# One machine: one process per GPU, or per CPU share where there is no GPU.
#
#   launchers/local.sh RECIPE NUM_GPUS [KEY=VALUE ...] [--folder FOLDER] [--resume]
#   launchers/local.sh tweeteval-emotion-large 8 training.micro_batch_size=4
set -euo pipefail
recipe=${1:?usage: local.sh RECIPE NUM_GPUS [KEY=VALUE ...]}
num_gpus=${2:?usage: local.sh RECIPE NUM_GPUS [KEY=VALUE ...]}
shift 2
exec ds-distill launch "$recipe" --num-gpus "$num_gpus" "$@"

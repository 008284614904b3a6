#!/usr/bin/env bash
# Several machines without ssh between them: run this on each, with the same arguments. ENDPOINT is
# HOST:PORT on one of them, which the others reach; NODES is their number, or MIN:MAX.
#
#   launchers/each_node.sh NODES ENDPOINT NUM_GPUS RECIPE FOLDER [KEY=VALUE ...]
#   launchers/each_node.sh 2 10.0.0.1:29400 8 tweeteval-emotion-large /shared/runs/emotion
#
# FOLDER is on a file system that all machines see. A run that is in it goes on. After a rank, or
# with MIN:MAX a machine, has gone, the others start anew from the last checkpoint.
set -euo pipefail
usage="usage: each_node.sh NODES ENDPOINT NUM_GPUS RECIPE FOLDER [KEY=VALUE ...]"
nodes=${1:?$usage}
endpoint=${2:?$usage}
num_gpus=${3:?$usage}
recipe=${4:?$usage}
folder=${5:?$usage}
shift 5
exec ds-distill launch "$recipe" --num-gpus "$num_gpus" --nnodes "$nodes" \
    --rdzv-endpoint "$endpoint" --max-restarts "${MAX_RESTARTS:-3}" --folder "$folder" "$@"

#!/usr/bin/env bash
# Several machines, started from one of them over ssh (pdsh).
#
#   launchers/multi_node.sh RECIPE HOSTFILE FOLDER [KEY=VALUE ...] [--resume]
#   launchers/multi_node.sh tweeteval-emotion-large hostfile /shared/runs/emotion
#
# Needed on every machine: pdsh and ssh without a password from this one to it, the same Python
# environment at the same path, and FOLDER on a file system that all machines see.
# HOSTFILE is like hostfile.example. Variables that are to reach the other machines stand in
# .deepspeed_env, in this folder or at home: see deepspeed_env.example. DeepSpeed itself hands on
# only those whose names begin with NCCL, PYTHON, MLFLOW, UCX or MV2.
set -euo pipefail
usage="usage: multi_node.sh RECIPE HOSTFILE FOLDER [KEY=VALUE ...]"
recipe=${1:?$usage}
hostfile=${2:?$usage}
folder=${3:?$usage}
shift 3

for directory in . "$HOME"; do
    # The launcher crashes on such a line.
    if [ -f "$directory/.deepspeed_env" ] && grep -nE '^[[:space:]]*(#|$)' "$directory/.deepspeed_env"; then
        echo "$directory/.deepspeed_env: take out the blank and comment lines above" >&2
        exit 2
    fi
done
export PDSH_RCMD_TYPE=ssh
exec ds-distill launch "$recipe" --hostfile "$hostfile" --folder "$folder" "$@"

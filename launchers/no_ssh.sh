#!/usr/bin/env bash
# Several machines without ssh between them: run this on each, with its own NODE_RANK (0, 1, ...)
# and otherwise the same arguments. NODE_RANK is the machine's line in HOSTFILE, counted from 0;
# MASTER is the address of the first machine, seen from all others.
#
#   launchers/no_ssh.sh NODE_RANK MASTER HOSTFILE RECIPE FOLDER [KEY=VALUE ...] [--resume]
#   launchers/no_ssh.sh 0 10.0.0.1 hostfile tweeteval-emotion-large /shared/runs/emotion
#
# FOLDER is on a file system that all machines see. MASTER_PORT (29500) must be free and open.
# Without GPUs set DS_ACCELERATOR=cpu.
set -euo pipefail
usage="usage: no_ssh.sh NODE_RANK MASTER HOSTFILE RECIPE FOLDER [KEY=VALUE ...]"
node_rank=${1:?$usage}
master=${2:?$usage}
hostfile=${3:?$usage}
recipe=${4:?$usage}
folder=${5:?$usage}
shift 5

export PYTHONSAFEPATH=1 # no script in this folder is taken for a library
exec deepspeed --no_ssh --node_rank "$node_rank" --hostfile "$hostfile" \
    --master_addr "$master" --master_port "${MASTER_PORT:-29500}" \
    --log_level warning --no_local_rank --module ds_distill run "$recipe" --folder "$folder" "$@"

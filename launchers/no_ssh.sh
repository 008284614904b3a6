#!/usr/bin/env bash
# Several machines without ssh between them: run this on each, with its own NODE_RANK (0, 1, ...)
# and otherwise the same arguments. NODE_RANK is the machine's line in HOSTFILE, counted from 0;
# MASTER is the address of the first machine, seen from all others.
#
#   launchers/no_ssh.sh NODE_RANK MASTER HOSTFILE RECIPE FOLDER [KEY=VALUE ...] [--resume]
#   launchers/no_ssh.sh 0 10.0.0.1 hostfile tweeteval-emotion-large /shared/runs/emotion
#
# FOLDER is on a file system that all machines see. MASTER_PORT (29500) must be free and open.
set -euo pipefail
usage="usage: no_ssh.sh NODE_RANK MASTER HOSTFILE RECIPE FOLDER [KEY=VALUE ...]"
node_rank=${1:?$usage}
master=${2:?$usage}
hostfile=${3:?$usage}
recipe=${4:?$usage}
folder=${5:?$usage}
shift 5
exec ds-distill launch "$recipe" --hostfile "$hostfile" --no-ssh --node-rank "$node_rank" \
    --master-addr "$master" --master-port "${MASTER_PORT:-29500}" --folder "$folder" "$@"

#!/usr/bin/env bash
# Several machines, started from one of them, or from a login node, by DeepSpeed's runner.
#
#   launchers/multi_node.sh RECIPE HOSTFILE FOLDER [KEY=VALUE ...] [OPTION ...]
#   launchers/multi_node.sh tweeteval-emotion-large hostfile /shared/runs/emotion
#
# Needed: pdsh; `ssh HOST true` without a question from here to every machine of HOSTFILE (it is
# like hostfile.example); the same Python environment and working folder at the same path; and FOLDER
# on a file system that all machines see. Variables for ranks stand in ~/.deepspeed_env.
set -euo pipefail
usage="usage: multi_node.sh RECIPE HOSTFILE FOLDER [KEY=VALUE ...]"
recipe=${1:?$usage}
hostfile=${2:?$usage}
folder=${3:?$usage}
shift 3
exec ds-distill launch "$recipe" --hostfile "$hostfile" --folder "$folder" "$@"

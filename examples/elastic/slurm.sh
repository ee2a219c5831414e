#!/bin/bash
# Replicas: every task of the array is one, with a life of its own. They share a folder on a disk that all nodes mount,
# and continue what is in it: `mkdir run1; COMMFREE_STORE=file://$PWD/run1 sbatch examples/elastic/slurm.sh`
#SBATCH --job-name=elastic
#SBATCH --array=0-7              # at most max_replicas
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --requeue                # a preempted task waits for another node, and then joins again
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@60       # a minute before its time is over, it leaves
set -euo pipefail
: "${COMMFREE_STORE:?is the URL of the store}"
export COMMFREE_STORE
exec python examples/elastic/train.py

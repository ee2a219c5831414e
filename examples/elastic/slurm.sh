#!/bin/bash
# Replicas: every task of the array is one, with a life of its own. `sbatch examples/elastic/slurm.sh`, after
# slurm_lighthouse.sh. COMMFREE_TOKEN, a secret, is taken from the environment of sbatch.
#SBATCH --job-name=elastic
#SBATCH --array=0-7              # at most max_replicas
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --requeue                # a preempted task waits for another node, and then joins again
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@60       # a minute before its time is over, it leaves
set -euo pipefail
COMMFREE_RENDEZVOUS=$(cat lighthouse.url)
export COMMFREE_RENDEZVOUS
# exec: TERM reaches torchrun, which passes it on. --max-restarts: a crash costs no place in the queue.
exec torchrun --standalone --nproc-per-node 1 --max-restarts 3 examples/elastic/train.py

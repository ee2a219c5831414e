#!/bin/bash
# The meeting point: a small job on a node that is not preempted. `sbatch examples/elastic/slurm_lighthouse.sh`
#SBATCH --job-name=lighthouse
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=1
#SBATCH --time=7-00:00:00
set -euo pipefail
address=$(hostname --ip-address | tr ' ' '\n' | grep -v '^127\.' | head -n 1)
echo "http://$address:29510" > lighthouse.url  # on the disk that all nodes share
exec commfree-lighthouse --bind "$address"

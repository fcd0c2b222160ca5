#!/bin/bash
# Train on an array of Slurm jobs, each with a GPU. Job 0 founds the run, the others join it when their turn comes; the run
# begins when every stage has a peer. A preempted job is requeued, and joins again. Submit from a folder that all nodes share:
#   sbatch deploy/slurm.sh my.toml                             # or without a configuration
# Job 0 has the text, and its end is the run's, so put it where nothing is preempted, and the others on cheap nodes:
#   sbatch --array=0 --partition=reliable deploy/slurm.sh my.toml
#   sbatch --array=1-15 --partition=spot deploy/slurm.sh
# Go on after the time limit:  sbatch deploy/slurm.sh --resume
#SBATCH --job-name=muletrain
#SBATCH --array=0-3
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=4
#SBATCH --mem=32G
#SBATCH --gres=gpu:1
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@120
#SBATCH --output=muletrain-%A-%a.log
set -euo pipefail

# the environment in which muletrain is installed
if [[ -n ${MULETRAIN_VENV:-} ]]; then
    # shellcheck disable=SC1091
    source "$MULETRAIN_VENV/bin/activate"
fi

deploy=${MULETRAIN_DEPLOY:-$SLURM_SUBMIT_DIR/deploy} # Slurm runs a copy of this script
cd "$SLURM_SUBMIT_DIR"
threads=${SLURM_CPUS_PER_TASK:-1}

if ((SLURM_ARRAY_TASK_ID > 0)); then
    command=("$deploy/join-when-ready" . --name "job-$SLURM_ARRAY_TASK_ID" --threads "$threads")
elif ((${SLURM_RESTART_COUNT:-0} > 0)); then
    command=("$deploy/found-or-return" "--name job-0")
else
    command=(muletrain start "$@" --name job-0 --set "compute.threads=$threads")
fi

# Slurm sends SIGTERM to this shell before the end of the time or a preemption: pass it on, and wait for the checkpoint
"${command[@]}" &
child=$!
trap 'kill -TERM "$child"' TERM
code=0
wait "$child" || code=$?
while kill -0 "$child" 2>/dev/null; do # the signal ended 'wait', not the command
    code=0
    wait "$child" || code=$?
done
exit "$code"

#!/bin/bash
# A training as a Slurm job that continues until it is finished, over as many jobs as that takes:
#
#   sbatch --nodes 4 scripts/slurm_train.sh OUT RECIPE [OPTIONS of braid train]
#
# Five minutes before the limit of the job, or when it is preempted, the run saves and the job is requeued. It is
# requeued after a failure too, if this job has saved a checkpoint: one that fails at the start would fail again.
#SBATCH --job-name=braid
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append

if [ $# -lt 2 ]; then
  echo "usage: sbatch --nodes N $0 OUT RECIPE [OPTIONS]" >&2
  exit 2
fi
out=$1
shift
started=$(mktemp)
stopped=no

# Only this shell receives the signal (B:). srun passes it on to torchrun, and torchrun to the ranks.
trap 'stopped=yes; kill -TERM "$step" 2>/dev/null' TERM

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 torchrun \
  --nnodes "$SLURM_NNODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" --max-restarts 3 --shutdown-timeout 240 \
  --rdzv-backend c10d --rdzv-endpoint "$head:29500" --rdzv-id "$SLURM_JOB_ID" \
  -m braid train "$@" --out "$out" &
step=$!

wait "$step"
code=$?
# A signal ends `wait` before the step has saved and ended.
while kill -0 "$step" 2>/dev/null; do
  wait "$step"
  code=$?
done

saved=$(find "$out/checkpoints" -maxdepth 1 -name 'step-*' -newer "$started" 2>/dev/null | head -n 1)
rm -f "$started"
if [ "$code" -eq 0 ]; then
  exit 0
fi
if [ "$stopped" = yes ] || [ -n "$saved" ]; then
  echo "braid: requeued, to continue from the newest checkpoint in $out" >&2
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"

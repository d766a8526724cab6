#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

# One task a node: torchrun, which starts a rank for each GPU. Submit it with `sbatch slurm.sh` from
# a folder that all nodes see, with train.py and data in it, and with your Python environment
# activated: sbatch passes it on. --cpus-per-task: no more than a node has, or the job is refused.
#
# The checkpoints go into the same folder, under the job's number, which a requeued job keeps. To go
# on with those of an older job, name its folder below.
#
# A rank that dies: torchrun starts all ranks again, from the last checkpoint. A node that dies, or
# a job that is preempted: SLURM puts the job back into the queue (--requeue). And so do the lines
# below, when two minutes are left. The signal goes from SLURM to this shell (--signal=B:), from the
# shell to each torchrun (scancel), and from each torchrun to its ranks, which save and end. What is
# not saved when torchrun's patience ends is lost: the step in which they are, one more, and the
# save have to fit into it. Where they take longer, raise it together with --signal.
#
# A GPU that is broken, on a node that answers, uses up --max-restarts, and the job fails: nothing
# here tells SLURM. That takes a health check in its prolog, which drains the node. Without one,
# submit again with `sbatch --exclude=NODE slurm.sh`.

set -euo pipefail

requeue() {
    echo "time is nearly up: the ranks save, then back into the queue"
    scancel --signal=USR1 "$SLURM_JOB_ID" # to srun's tasks, not to this shell
    wait "$training" || true
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
}
trap requeue USR1

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
export OMP_NUM_THREADS=8
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # or a restart may call dead ranks (torch 2.13)
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=90    # seconds from a signal until torchrun kills; 30 else
# export NCCL_DEBUG=INFO                    # what NCCL found and chose: read it on a new cluster
# export NCCL_SOCKET_IFNAME=eth0            # where its ranks first meet, if it picks the wrong one
# export GLOO_SOCKET_IFNAME=eth0            # the same for gloo

srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" \
    --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" \
    --rdzv-backend c10d \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-endpoint "$first:$((20000 + SLURM_JOB_ID % 10000))" \
    --max-restarts 3 \
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    train.py --strategy hsdp --data data --checkpoints "checkpoints-$SLURM_JOB_ID" &
training=$!
wait "$training" # in the background, because bash runs a trap only between commands

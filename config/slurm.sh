#!/bin/sh
# A Slurm job array on one experiment: one task a GPU, any number of them; they share the runs through file locks.
#
#     mkdir -p out && sbatch config/slurm.sh config/self_value_51m.py [--key=value ...]
#
# Two minutes before the time limit Slurm sends USR1 to this script, which ends the training with SIGTERM: it finishes
# the step, saves, and the task goes back into the queue. A signal of its own, since SIGTERM comes with scancel too, and
# what was cancelled must stay so. Set time, partition and account to those of your machine.
#SBATCH --job-name=nanoAblate
#SBATCH --array=0-7
#SBATCH --ntasks=1 --cpus-per-task=4 --mem=32G --gres=gpu:1
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue --open-mode=append
#SBATCH --output=out/slurm-%A_%a.log

cd "${SLURM_SUBMIT_DIR:-.}" || exit 2
requeue=
python train.py "$@" &
training=$!
trap 'requeue=yes; kill -TERM $training' USR1
trap 'kill -TERM $training' TERM
wait $training
status=$?
while kill -0 $training 2>/dev/null; do # a signal ends `wait` before the training has ended
    wait $training
    status=$?
done
if [ "$requeue" ] && [ $status = 143 ]; then
    scontrol requeue "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
fi
exit $status

# Runs the miner with the flags in "$@" on the nodes of this job, until it ends for good.
#
# Preempted, a miner gets SIGTERM and the partition's GraceTime: it checkpoints and ends with status 0.
# To Slurm the job is over then, so this script queues it again. Before the job's time is over
# (--signal above, 180 s) it does the same. Exit status 1 is a fault: the miner is started again, as pm2
# does; 2 (bad configuration) and 3 (deregistered) end the job.

again=""
save() {
    again=yes
    scancel --signal=TERM "$SLURM_JOB_ID.$step"
}
trap save USR1

step=-1
while :; do
    step=$((step + 1))
    # Each task is one node's launcher, and reads SLURM_NNODES and SLURM_NODEID by itself. %n in a
    # flag is the number of its node.
    srun --kill-on-bad-exit=0 --wait=0 bash -c 'exec "${@//%n/$SLURM_NODEID}"' miner \
        ${DT_MINER:-.venv/bin/python neurons/miner.py} "$@" &
    # USR1 ends a wait before srun has ended: wait again until it has.
    until wait $!; status=$?; ! kill -0 $! 2>/dev/null; do :; done
    if scontrol show job "$SLURM_JOB_ID" | grep -q "PreemptTime=[0-9]"; then again=yes; fi
    if [ -n "$again" ] || [ "$status" != 1 ]; then break; fi
    echo "The miner failed; it is started again in ${DT_PAUSE:-10} s"
    sleep "${DT_PAUSE:-10}"
done
if [ -n "$again" ] && [ "$status" -lt 2 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"

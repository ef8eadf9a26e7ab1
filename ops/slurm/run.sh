# Runs the miner with the flags in "$@" on the nodes of this job, until it ends for good.
#
# Each node's task starts the launcher, or torchrun, and starts it again whatever ends it, as pm2 does; not after
# 2 (bad configuration), 3 (deregistered) or 4 (the network is finished), which end the job, nor after a stop
# that was asked for.
#
# Preempted, a miner gets SIGTERM and the partition's GraceTime: it checkpoints and ends. To Slurm the
# job is over then, so this script queues it again. Before the job's time is over (--signal above, 180 s)
# it does the same.

export DT_PAUSE=${DT_PAUSE:-10}

# Waits for $child and sets $status, to 0 once a stop was $asked for: bash does not have the status of a
# child whose wait a signal ended early.
ended() {
    wait "$child"
    status=$?
    [ -n "$asked" ] || return 0
    while kill -0 "$child" 2>/dev/null; do wait "$child"; done
    status=0
}

# Slurm sends SIGTERM to all processes of a step, and torchrun gives up on its ranks at a second one. But
# a child that started while Slurm went through its list has not got it.
stop() {
    asked=yes
    [ $((SECONDS - began)) -ge 5 ] || kill -TERM "$child" 2>/dev/null
}

# %n in a word is the number of the node.
task="$(declare -f ended stop)"'
asked=""
trap stop TERM
while :; do
    began=$SECONDS
    "${@//%n/$SLURM_NODEID}" & child=$!
    [ -z "$asked" ] || kill -TERM "$child" 2>/dev/null
    ended
    [ -z "$asked" ] || exit 0
    case $status in 2 | 3 | 4) break ;; esac
    echo "The miner of node $SLURM_NODEID ended with status $status; it is started again in $DT_PAUSE s"
    sleep "$DT_PAUSE" & child=$!
    ended
    [ -z "$asked" ] || exit 0
done
# The other nodes would wait for this one until the time limit. The signal reaches this node
# too, and would end scancel before it has told the others: it is ignored.
trap "" TERM
[ "$SLURM_NNODES" = 1 ] || scancel --signal=TERM "$SLURM_JOB_ID.$SLURM_STEP_ID"
exit "$status"
'

asked=""
save() {
    asked=yes
    scancel --signal=TERM "$SLURM_JOB_ID.$step"
}
trap save USR1

step=-1
while :; do
    step=$((step + 1))
    srun --kill-on-bad-exit=0 --wait=0 bash -c "$task" miner ${DT_MINER:-.venv/bin/python neurons/miner.py} "$@" &
    child=$!
    ended
    if scontrol show job "$SLURM_JOB_ID" | grep -q "PreemptTime=[0-9]"; then asked=yes; fi
    # The tasks end for good only with these; anything else is srun's own failure, or a step was lost.
    case $asked$status in yes* | 0 | 2 | 3 | 4) break ;; esac
    echo "srun ended with status $status; the miner is started again in $DT_PAUSE s"
    sleep "$DT_PAUSE"
done
if [ -n "$asked" ] && [[ "$status" != [234] ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"

#!/usr/bin/env bash
# torchrun for one node of a miner of several; pm2 and ops/slurm run it:
#
#   ops/torchrun.sh --nnodes 2 --node_rank 0 --nproc_per_node 4 --master_addr 10.0.0.1 -- --network FILE ...
#
# Before the two dashes stand torchrun's own words, behind them flags of the miner. torchrun ends with status 1
# whatever ended its ranks. So settings are checked first, and status 2, 3 or 4 is this script's. Its ranks get
# as long to stop as --neuron.stop_timeout says.

words=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    case $1 in
        --node_rank | --node-rank) export GROUP_RANK=$2 ;;
        --node_rank=* | --node-rank=*) export GROUP_RANK=${1#*=} ;;
    esac
    words+=("$1")
    shift
done
shift
here=$(dirname "$(dirname "$(readlink -f "$0")")")
python=${DT_PYTHON:-$here/.venv/bin/python} program=${DT_PROGRAM:-$here/neurons/miner.py}
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}
seconds=$("$python" "$program" check "$@") || exit
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$((${seconds%.*} + 20))
exec "$python" -m torch.distributed.run --max_restarts 0 "${words[@]}" "$program" "$@"

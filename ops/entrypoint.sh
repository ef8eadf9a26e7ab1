#!/usr/bin/env bash
# Runs the miner in a container, whatever the restart policy.
#
# Docker starts a container again after every status, or after every one but 0; what ended with 2 (bad
# configuration), 3 (the hotkey is lost) or 4 (the network is finished) would ask chain and bucket again
# without end. So after these
# this waits, until `docker stop` or a person changes what the last line says and starts it again.
set -u
cd "$(dirname "$0")/.."

stop=""
ask() { stop=yes; [ -z "${child:-}" ] || kill -TERM "$child" 2>/dev/null; }
trap ask TERM INT

${DT_MINER:-.venv/bin/python neurons/miner.py} "$@" &
child=$!
[ -z "$stop" ] || ask
wait "$child"
status=$?
if [ -n "$stop" ]; then
    # bash does not have the status of a child whose wait a signal ended early.
    while kill -0 "$child" 2>/dev/null; do wait "$child"; done
    exit 0
fi
case $status in
2 | 3 | 4)
    echo "The miner ended with status $status, and a start cannot help: correct what its last line says, then docker restart" >&2
    sleep infinity &
    child=$!
    wait "$child"
    ;;
esac
exit "$status"

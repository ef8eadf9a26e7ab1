#!/usr/bin/env bash
# Brings the miner that runs under pm2 to another version; the old one runs on if anything is wrong.
#
#   scripts/update.sh v1.4.0            a tag; see scripts/update.sh --help
set -euo pipefail
folder=$(cd "$(dirname "$0")/.." && pwd)
python=$folder/.venv/bin/python
if [ ! -x "$python" ]; then
    echo "error: there is no $python, so there is no miner to update: make setup" >&2
    exit 2
fi
exec "$python" "$folder/scripts/update.py" "$@"

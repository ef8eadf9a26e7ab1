#!/usr/bin/env bash
# Creates .venv and installs this project from its own files. Run by `make setup`; safe to run again.
#
#   PYTHON=python3.12 scripts/setup.sh     another interpreter (>= 3.11)
#   DT_TORCH=keep     scripts/setup.sh     use the torch of PYTHON (e.g. a vendor's CUDA image)
#   DT_TORCH=cuda|cpu scripts/setup.sh     do not look for a GPU, install this build
set -euo pipefail
cd "$(dirname "$0")/.."

torch_version=$(sed -n 's/^torch==//p' constraints.txt)
stamp=.venv/.installed
wanted=$(cat pyproject.toml constraints.txt scripts/setup.sh | sha256sum | cut -d' ' -f1)-${DT_TORCH:-auto}
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && exit 0

python=${PYTHON:-}
if [ -z "$python" ]; then
    for candidate in python3 python3.13 python3.12 python3.11; do
        if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            python=$candidate
            break
        fi
    done
fi
if [ -z "$python" ]; then
    echo "error: no Python >= 3.11 found, so nothing can be installed: apt install python3, or set PYTHON=/path/to/python" >&2
    exit 2
fi

torch=${DT_TORCH:-}
if [ -z "$torch" ]; then
    if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
        torch=keep # a working CUDA build is already here
    elif command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
        torch=cuda
    else
        torch=cpu
    fi
fi

echo "setup: $("$python" --version), torch: $torch"
venv_flags=()
[ "$torch" = keep ] && venv_flags+=(--system-site-packages)
if "$python" -c 'import ensurepip' 2>/dev/null; then
    "$python" -m venv "${venv_flags[@]}" .venv
else
    # Debian splits ensurepip off into python3-venv. pip's own wheel can install itself.
    "$python" -m venv --without-pip "${venv_flags[@]}" .venv
    .venv/bin/python scripts/bootstrap_pip.py
fi
pip=(.venv/bin/python -m pip --disable-pip-version-check --quiet)

constraints=constraints.txt
case $torch in
keep)
    constraints=.venv/constraints.txt
    grep -v '^torch==' constraints.txt >"$constraints"
    ;;
cuda) "${pip[@]}" install "torch==$torch_version" ;;
cpu)
    # "+cpu" can only be a CPU build; PyPI has none, PyTorch's own index does.
    "${pip[@]}" install "torch==$torch_version+cpu" 2>/dev/null ||
        "${pip[@]}" install "torch==$torch_version+cpu" --extra-index-url https://download.pytorch.org/whl/cpu ||
        "${pip[@]}" install "torch==$torch_version" # e.g. macOS, where every build is a CPU build
    ;;
*)
    echo "error: DT_TORCH=$torch is unknown: use keep, cuda or cpu" >&2
    exit 2
    ;;
esac
"${pip[@]}" install -c "$constraints" -e '.[local,dev]'
echo "$wanted" >"$stamp"

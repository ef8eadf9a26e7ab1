#!/usr/bin/env bash
# Creates .venv and installs this project with what it needs, all of it by hash. Safe to run again.
#
#   scripts/setup.sh              what a miner needs, nothing else (make setup)
#   scripts/setup.sh local        and a subnet on this machine (make run)
#   scripts/setup.sh local dev    and tests, linters, types (make dev, make test)
#   PYTHON=python3.12 ...         another interpreter (>= 3.11)
#   DT_TORCH=keep ...             use the torch of PYTHON (e.g. a vendor's CUDA image)
#   DT_TORCH=cuda|cpu ...         do not look for a GPU, install this build
#
# scripts/lock.py writes the lists in requirements/.
set -euo pipefail
cd "$(dirname "$0")/.."

sets=(production)
for word in "$@"; do
    case $word in
    local) sets+=(local) ;;
    dev) sets+=(test dev) ;; # with local, which has some of its packages
    *)
        echo "error: there is no set $word, so nothing was installed: local, local dev or none" >&2
        exit 2
        ;;
    esac
done

lists=(requirements/build.txt requirements/torch-*.txt requirements/production.txt)
base=$(cat pyproject.toml scripts/setup.sh "${lists[@]}" | sha256sum | cut -d' ' -f1)-${DT_TORCH:-auto}
# Each set has a stamp, so that `make setup` leaves what `make dev` added.
stamp() { [ "$1" = production ] && echo .venv/.installed || echo ".venv/.installed-$1"; }
content() { [ "$1" = production ] && echo "$base" || cat <(echo "$base") "requirements/$1.txt" | sha256sum; }
missing=()
for set in "${sets[@]}"; do
    [ "$(cat "$(stamp "$set")" 2>/dev/null)" = "$(content "$set")" ] || missing+=("$set")
done
[ ${#missing[@]} = 0 ] && exit 0

pip=(.venv/bin/python -m pip --disable-pip-version-check --quiet)
# Nothing is taken that is not in the list, nor built with a tool that is not.
install() { "${pip[@]}" install --require-hashes --no-deps --no-build-isolation "$@"; }

install_production() {
    local python=${PYTHON:-} candidate
    if [ -z "$python" ]; then
        for candidate in python3 python3.13 python3.12 python3.11; do
            if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
                python=$candidate
                break
            fi
        done
    fi
    if [ -z "$python" ]; then
        echo "error: no Python >= 3.11 found, so nothing can be installed: apt install python3.11 python3.11-venv, or set PYTHON=/path/to/python" >&2
        exit 2
    fi

    local torch=${DT_TORCH:-}
    if [ -z "$torch" ]; then
        if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
            torch=keep # a working CUDA build is already here
        elif [[ $(timeout 60 nvidia-smi -L 2>/dev/null || true) == *GPU* ]]; then
            torch=cuda
        else
            torch=cpu
        fi
    fi
    echo "setup: $("$python" --version), torch: $torch"

    local flags=()
    case $torch in
    keep) flags=(--system-site-packages) ;;
    cuda | cpu) ;;
    *)
        echo "error: DT_TORCH=$torch is unknown, so nothing was installed: use keep, cuda or cpu" >&2
        exit 2
        ;;
    esac
    if "$python" -c 'import ensurepip' 2>/dev/null; then
        "$python" -m venv "${flags[@]}" .venv
    else
        # Debian splits ensurepip off into python3-venv. pip's own wheel can install itself.
        "$python" -m venv --without-pip "${flags[@]}" .venv
        .venv/bin/python scripts/bootstrap_pip.py
    fi
    install -r requirements/build.txt
    install -r requirements/production.txt
    # "+cpu" is a tenth of the size, but not on PyPI. What an index serves under this name and is not
    # on the list is refused; PyPI's build runs without a GPU, too.
    case $torch in
    cuda) install -r requirements/torch-cuda.txt ;;
    cpu)
        install -r requirements/torch-cpu.txt 2>/dev/null ||
            install -r requirements/torch-cpu.txt --extra-index-url https://download.pytorch.org/whl/cpu 2>/dev/null ||
            install -r requirements/torch-cuda.txt
        ;;
    esac
    # setuptools would warn of folders in the working directory.
    PYTHONWARNINGS=ignore "${pip[@]}" install --no-deps --no-build-isolation --no-index -e .
    # Where an index has no build for the CPU, the build with CUDA is three times as large.
    echo "setup: torch $(.venv/bin/python -c 'from importlib.metadata import version; print(version("torch"))')," \
        ".venv takes $(du -sh .venv | cut -f1)"
}

for set in "${missing[@]}"; do
    case $set in
    production) install_production ;;
    *) install -r "requirements/$set.txt" ;;
    esac
    content "$set" >"$(stamp "$set")"
done

#!/usr/bin/env bash
# Run the GPU tests and the peer benchmarks on a machine with a GPU and no network.
#
#     ci/gpu.sh [WHEEL_DIR]
#
# Wheels in WHEEL_DIR are installed for this run only, into a temporary folder. Logs and JSON
# go to ${OUT:-gpu-results}. A peer that is not installed is left out of its table.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
wheels=${1:-}
out=${OUT:-gpu-results}
python=${PYTHON:-python3}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
mkdir -p "$out"

if [[ -n $wheels ]]; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl
fi
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

status=0
run() { # NAME COMMAND...
    local name=$1 start=$SECONDS
    shift
    echo "::: $name"
    if "$@" 2>&1 | tee "$out/$name.log"; then
        echo "::: $name: ok, $((SECONDS - start)) s"
    else
        echo "::: $name: FAILED, $((SECONDS - start)) s"
        status=1
    fi
}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv | tee "$out/device.csv"
"$python" -m pip list --format=json >"$out/packages.json"
# Without this, every test would be skipped and the run would pass.
"$python" -c 'import cupy, sys; sys.exit(None if cupy.is_available() else "CuPy sees no GPU")'

# Several processes where pytest-xdist is there; pytest-benchmark warns beside it, an error here.
workers=()
if "$python" -c 'import xdist' 2>/dev/null; then
    workers=(-p no:benchmark -n "${WORKERS:-8}" --dist worksteal)
fi
# The marker also picks the `xp[cupy]` case of every test over array backends.
RTXARR_TEST_BACKENDS=cupy,numpy run tests \
    "$python" -m pytest -m gpu "${workers[@]}" --junitxml="$out/tests.xml"
for peer in asv_benchmarks/peers/*.py; do
    name=$(basename "$peer" .py)
    [[ $name == _* ]] || run "peer-$name" "$python" "$peer" --json "$out/peer-$name.json"
done
exit $status

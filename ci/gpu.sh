#!/usr/bin/env bash
# Run the GPU tests and the peer benchmarks on a machine with a GPU and no network.
#
#     ci/gpu.sh [-w WHEEL_DIR] [PART...]
#
# Wheels in WHEEL_DIR are installed for this run only, into a temporary folder. A part is a folder or
# file of tests, "rest" for all tests outside of those folders, "alone" for those that take most of a
# GPU's memory, "sanitize", or the name of a peer benchmark; without any, all tests and then all peers
# run. Each part has LIMIT seconds (default 300) and a log of its own in ${OUT:-gpu-results}; the tests
# that failed are named at its end. A peer that is not installed is left out of its table.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
wheels=
if [[ ${1:-} == -w ]]; then
    wheels=$2
    shift 2
fi
out=${OUT:-gpu-results}
python=${PYTHON:-python3}
folders=(tests/autograd tests/kernels tests/libs tests/geom tests/nn tests/optim tests/polygraph
    tests/recipes)
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
mkdir -p "$out"

if [[ -n $wheels ]]; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl
fi
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

status=0
run() { # NAME COMMAND...
    local name=$1 start=$SECONDS log code=0
    shift
    log=$out/${name//\//-}.log
    timeout "${LIMIT:-300}" "$@" >"$log" 2>&1 || code=$?
    grep -E '^(FAILED|ERROR) ' "$log" | cut -c1-200 || true
    tail -n 1 "$log" | cut -c1-200
    # 5: no test of this part is for a GPU.
    [[ $code == 0 || $code == 5 ]] || status=1
    echo "::: $name: exit status $code, $((SECONDS - start)) s"
}

# Several processes where pytest-xdist is there; pytest-benchmark warns beside it, an error here.
workers=()
if "$python" -c 'import xdist' 2>/dev/null; then
    workers=(-p no:benchmark -n "${WORKERS:-8}" --dist worksteal)
fi

tests() { # NAME PATH...
    local name=$1
    shift
    # The marker also picks the `xp[cupy]` case of every test over array backends.
    RTXARR_TEST_BACKENDS=cupy,numpy run "$name" "$python" -m pytest -m gpu -rfE --tb=short \
        -p no:cacheprovider "${workers[@]}" --junitxml="$out/${name//\//-}.xml" "$@"
}

part() {
    case $1 in
    tests/*) tests "$1" "$1" ;;
    rest) tests rest tests "${folders[@]/#/--ignore=}" ;;
    alone)
        local several=("${workers[@]}")
        workers=()
        tests alone tests/geom/test_long_graphs.py
        workers=("${several[@]}")
        ;;
    sanitize)
        local tool
        for tool in memcheck racecheck; do
            # What cuda.core asks of an older driver is answered by an error, which says nothing.
            run "sanitize-$tool" compute-sanitizer --tool "$tool" --report-api-errors no \
                --error-exitcode 1 \
                "$python" -m pytest -m gpu -x -p no:cacheprovider tests/kernels tests/polygraph
        done
        ;;
    *) run "peer-$1" "$python" "asv_benchmarks/peers/$1.py" --json "$out/peer-$1.json" ;;
    esac
}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv | tee "$out/device.csv"
"$python" -m pip list --format=json >"$out/packages.json"
# Without this, every test would be skipped and the run would pass.
"$python" -c 'import cupy, sys; sys.exit(None if cupy.is_available() else "CuPy sees no GPU")'

parts=("$@")
if [[ ${#parts[@]} == 0 ]]; then
    parts=("${folders[@]}" rest alone)
    for peer in asv_benchmarks/peers/*.py; do
        name=$(basename "$peer" .py)
        [[ $name == _* ]] || parts+=("$name")
    done
fi
for name in "${parts[@]}"; do
    part "$name"
done
exit $status

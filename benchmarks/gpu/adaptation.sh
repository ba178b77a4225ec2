#!/usr/bin/env bash
# Runs arms of `benchmarks adaptation` on a GPU host where benchmarks/gpu/bundle.sh's bundle lies in SITE, three
# seeds side by side:
#   benchmarks/gpu/adaptation.sh OUT off frozen        # then: adapting; control; and without arms: the report alone
# Runs are kept in RUNS, and copied to OUT in the end; one that is broken off is run again. SECONDS_AT_MOST ends all as
# Ctrl-C does. CONVERGE=--converge asks whether the embedded drafter is converged, too.
set -uom pipefail # m: what runs in the background can be interrupted
out=$(mkdir -p "$1" && cd "$1" && pwd)
shift
cd "$(dirname "$0")/../.." || exit
export PYTHONPATH=$PWD:$PWD/clients/tlt_client:$PWD/examples/grpo:${SITE:-/tmp/site}${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2
runs=${RUNS:-/tmp/adaptation}
bench=("${PYTHON:-python3}" -m benchmarks adaptation --out "$runs")
limited=(timeout --signal=INT --kill-after=60 "${SECONDS_AT_MOST:-540}")
mkdir -p "$runs"
if [ $# -gt 0 ]; then
  for seed in ${SEEDS:-0 1 2}; do
    "${limited[@]}" "${bench[@]}" --arms "$@" --seeds "$seed" >"$out/seed-$seed.txt" 2>&1 &
  done
  wait
  tail -n 2 "$out"/seed-*.txt
fi
"${limited[@]}" "${bench[@]}" --report ${CONVERGE:-} --json "$out/adaptation.h200.json" 2>&1 | tee "$out/report.txt"
cp -r "$runs" "$out/runs"

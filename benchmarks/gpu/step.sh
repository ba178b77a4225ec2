#!/usr/bin/env bash
# Runs parts of `benchmarks step` on a GPU host where benchmarks/gpu/bundle.sh's bundle lies in SITE:
#   benchmarks/gpu/step.sh OUT seed_0 seed_1 seed_2          # 4 x 8 responses a step, one server, six minutes each
#   benchmarks/gpu/step.sh OUT trained_0 trained_1 trained_2 # the arms that have servers of their own, on the same host
#   benchmarks/gpu/step.sh OUT 8x8 16x8 long_0 longtrained_0 # off and bandit; long responses, activations computed again
#   benchmarks/gpu/step.sh OUT change_0 change_1 change_2    # the task changes: off, frozen, online
#   benchmarks/gpu/step.sh OUT join                          # one result of the parts that are there
# OUT gets each part's result and what it printed, as well as the servers' logs. A part whose result is there is left out;
# SECONDS_AT_MOST ends all as Ctrl-C does, and what a part had by then is kept beside it. MODELS is where models are kept,
# STEPS how many an arm takes.
set -uo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
shift
cd "$(dirname "$0")/../.." || exit
export PYTHONPATH=$PWD:$PWD/clients/tlt_client:$PWD/examples/grpo:${SITE:-/tmp/site}${PYTHONPATH:+:$PYTHONPATH}
export FLASHINFER_CUDA_ARCH_LIST=9.0a FLASHINFER_WORKSPACE_BASE=${FLASHINFER_WORKSPACE_BASE:-/tmp/flashinfer}
export PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
models=${MODELS:-/tmp/models/7b}
deadline=$((SECONDS + ${SECONDS_AT_MOST:-570}))

measure() { # NAME FLAG ...
  local name=$1 began=$SECONDS left=$((deadline - SECONDS))
  [ -f "$out/$name.json" ] && { echo "$name: is there"; return; }
  [ "$left" -gt 0 ] || { echo "$name: no time is left"; return; }
  mkdir -p "$out/logs/$name"
  timeout --signal=INT --kill-after=60 "$left" "$python" -m benchmarks step --json "$out/$name.partial.json" \
    --logs "$out/logs/$name" --policies "${POLICIES:-/tmp/policies}" ${STEPS:+--steps "$STEPS"} "${@:2}" >"$out/$name.txt" 2>&1
  local code=$?
  [ "$code" = 0 ] && mv "$out/$name.partial.json" "$out/$name.json"
  echo "$name: exit $code after $((SECONDS - began)) s; $(tail -n 1 "$out/$name.txt")"
}

for part in "$@"; do
  case $part in
    seed_*) measure "$part" --models "$models" --seeds "${part##*_}" --arms off static frozen again ;;
    trained_*) measure "$part" --models "$models" --seeds "${part##*_}" --arms online muted plain ;;
    8x8) measure "$part" --models "$models" --arms off frozen --prompts 8 --replayed ;;
    16x8) measure "$part" --models "$models" --arms off frozen --prompts 16 --replayed --checkpointing ;;
    change_*) measure "$part" --models "$models" --arms off frozen online --change --seeds "${part##*_}" ;;
    long_*) measure "$part" --models "$models-long" --workload long --seeds "${part##*_}" --arms off static frozen \
      --checkpointing ;;
    longtrained_*) measure "$part" --models "$models-long" --workload long --seeds "${part##*_}" --arms online muted \
      --checkpointing ;;
    join)
      mapfile -t parts < <(find "$out" -maxdepth 1 -name '*[0-9].json' ! -name 'step.*' | sort)
      "$python" -m benchmarks step --join "${parts[@]}" --json "$out/step.h200.json" 2>&1 | tee "$out/step.txt"
      ;;
    *) echo "step.sh: $part: not a part" >&2; exit 2 ;;
  esac
done

#!/usr/bin/env bash
# Measures strategies on a GPU host where benchmarks/gpu/bundle.sh's bundle lies in SITE, and upstream's in UPSTREAM:
#   benchmarks/gpu/strategy.sh OUT costs graphs strategy_1 ...      stages, one after another
# OUT gets each stage's result, what it printed and the end of each server's log. A stage whose result is there is left
# out, so that a command that was broken off goes on; SECONDS_AT_MOST ends all as Ctrl-C does. MODELS is where models are
# made and kept. Hosts of several GPUs run a stage on each: CUDA_VISIBLE_DEVICES, and taskset for cores of its own. Stages:
#   costs       a step of plain decoding, of off and of one arm, kernel by kernel    costs_long  at 31,000 tokens
#   switching   answers, costs, graphs             capture     of hidden states, for a trainer; capture_eagle3
#   sharing     a drafter trainer beside the server on its GPU; LOSS is the drafter's
#   graphs      memory of CUDA graphs            strategy_{1,2,16}     batches from 1, 2, 16        drain     128 and 512
#   ranks       on two GPUs: arms drawn for 10,000 steps        join      strategy and shapes of the parts there
#   one_sample  responses with speculation against off
#   shapes_X    a step's costs in the shape of another model, 1500m, 32b, moe or fp8, and updates under load
#   history     groups of siblings in two epochs, by history alone, and beside a fresh and a stale drafter
# and, of long responses and contexts, each part with a name of its own, to be joined by hand (--join):
#   accepted, eagle3    to natural ends      simulated   accept lengths      context     up to 32,768 tokens
#   natural_{1,128}      batches from 1, from 128     natural_drain_{32,128,512}
set -uo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
shift
cd "$(dirname "$0")/../.." || exit
export PYTHONPATH=$PWD:$PWD/clients/tlt_client:${SITE:-/tmp/site}${PYTHONPATH:+:$PYTHONPATH}
export FLASHINFER_CUDA_ARCH_LIST=9.0a FLASHINFER_WORKSPACE_BASE=${FLASHINFER_WORKSPACE_BASE:-/tmp/flashinfer}
export NCCL_CUMEM_ENABLE=0 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
models=(--models "${MODELS:-/tmp/models/7b}")
long=(--workload long --models "${MODELS:-/tmp/models/7b}-long")
peer=(--upstream "${UPSTREAM:-/tmp/upstream}")
deadline=$((SECONDS + ${SECONDS_AT_MOST:-1500}))

measure() { # NAME COMMAND FLAG ...
  local name=$1 logs began=$SECONDS left=$((deadline - SECONDS))
  [ -f "$out/$name.json" ] && { echo "$name: is there"; return; }
  [ "$left" -gt 0 ] || { echo "$name: no time is left"; return; }
  logs=$out/logs/$name
  mkdir -p "$logs"
  timeout --signal=INT --kill-after=60 "$left" "$python" -m benchmarks "$2" --json "$out/$name.json" --logs "$logs" \
    "${@:3}" >"$out/$name.txt" 2>&1
  echo "$name: exit $? after $((SECONDS - began)) s; $(tail -n 1 "$out/$name.txt")"
}

join() { # COMMAND PART ...
  [ -f "$2" ] || return
  "$python" -m benchmarks "$1" --join "${@:2}" --json "$out/$1.h200.json" >"$out/$1.txt" 2>&1
  echo "$1: joined $(($# - 1)) parts, exit $?; $out/$1.txt"
}

for stage in "$@"; do
  case $stage in
    costs) measure profile.h200 profile "${long[@]}" "${peer[@]}" --arm 3,1,4 --batches 1 32 128 --traces "$out/traces" ;;
    costs_long) measure profile_long profile "${long[@]}" --arm 3,1,4 --batches 1 4 --context 31000 --traces "$out/traces_long" ;;
    shapes_*) measure "$stage" shapes --shapes "${stage#shapes_}" --models "${MODELS:-/tmp/models/7b}-fp8" ;;
    history) measure history.h200 history --drain "${long[@]}" --rounds "${ROUNDS:-3}" ;;
    one_sample) measure one_sample.h200 one_sample "${long[@]}" ;;
    sharing) measure sharing.h200 sharing "${models[@]}" --rounds "${ROUNDS:-8}" --loss "${LOSS:-hass}" ;;
    switching) measure switching.h200 switching "${models[@]}" ;;
    capture) measure capture.h200 capture "${models[@]}" --rounds "${ROUNDS:-9}" ;;
    capture_eagle3) measure capture_eagle3.h200 capture "${models[@]}" --eagle3 --rounds "${ROUNDS:-9}" ;;
    graphs) measure graphs.h200 graphs "${models[@]}" ;;
    strategy_1) measure strategy_1 strategy "${models[@]}" "${peer[@]}" --batches 1 ;;
    strategy_2) measure strategy_2 strategy "${models[@]}" "${peer[@]}" --batches 2 4 8 ;;
    strategy_16) measure strategy_16 strategy "${models[@]}" "${peer[@]}" --batches 16 32 64 128 256 ;;
    drain) measure drain.h200 drain "${models[@]}" "${peer[@]}" ;;
    ranks) measure switching.h200x2 switching --shape 18m --models "${MODELS:-/tmp/models/7b}-18m" --ranks 2 --steps 10000 ;;
    join)
      join strategy "$out"/strategy_[0-9]*.json
      join shapes "$out"/shapes_*.json
      ;;
    accepted) measure accept_length_1 accept_length "${long[@]}" --natural ;;
    eagle3) measure accept_length_2 accept_length "${long[@]}" --natural --eagle3 ;;
    simulated) measure accept_length_3 accept_length "${long[@]}" ;;
    context) measure context.h200 context "${long[@]}" ;;
    natural_1) measure natural_1 strategy "${long[@]}" "${peer[@]}" --natural --rounds "${ROUNDS:-3}" \
      --batches 1 8 32 64 ;;
    natural_128) measure natural_128 strategy "${long[@]}" "${peer[@]}" --natural --rounds "${ROUNDS:-3}" \
      --batches 128 256 ;;
    natural_drain_*) measure "$stage" drain "${long[@]}" "${peer[@]}" --natural --requests "${stage##*_}" \
      --rounds "${ROUNDS:-3}" ;;
    *) echo "strategy.sh: $stage: not a stage" >&2; exit 2 ;;
  esac
done

#!/usr/bin/env bash
# Runs parts of `benchmarks step` on a GPU host where benchmarks/gpu/bundle.sh's bundle lies in SITE:
#   benchmarks/gpu/step.sh OUT off_bandit online join        # what matters most
#
# part        arms, and modes; `_D` behind it: of seed D, else of 0             seconds on an H200; sums are estimates
# off_bandit  off, frozen; plain; 14 steps                                      440
# plain       plain alone; 14 steps                                             120
# online      online; 14 steps                                                  240
# muted       muted, likewise                                                   210
# seed        off, static, frozen, again, and replays, of 14 steps              440
# modes       off, frozen: on_policy, offload, one_step_off, partial            130 + 15 x (8 + 10 + 6 + 6) = 580
# long        off, static, frozen: long responses, activations computed again   700, estimated
# longonline  online, likewise; longmuted: muted                                350
# change      off, frozen, online: the task changes                             900, estimated
# 8x8         off, frozen: larger steps, as 16x8                                130 + 20 x (5 + 3) = 290; 430, estimated
# apart       off, frozen, online, on two GPUs; and one step off                600, estimated
# join        one result of the parts that are there
#
# Where FLASHINFER_WORKSPACE_BASE is empty, the first part compiles attention for five minutes beside three others'.
# The first summand is what starts take (a server with its arms 75, models 40, a drafter trainer 15, held-out problems
# 5 an arm), the second what steps do; STEPS is how many an arm takes. OUT gets each part's result and what it printed,
# as well as the servers' logs. A part whose result is there is left out; SECONDS_AT_MOST (540) ends all as Ctrl-C does.
# What a part had by then, whole arms, is kept as PART.partial.json. MODELS is where models are kept.
set -uo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
shift
cd "$(dirname "$0")/../.." || exit
export PYTHONPATH=$PWD:$PWD/clients/tlt_client:$PWD/examples/grpo:${SITE:-/tmp/site}${PYTHONPATH:+:$PYTHONPATH}
export FLASHINFER_CUDA_ARCH_LIST=9.0a FLASHINFER_WORKSPACE_BASE=${FLASHINFER_WORKSPACE_BASE:-/tmp/flashinfer}
export NCCL_CUMEM_ENABLE=0 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
models=${MODELS:-/tmp/models/7b}
deadline=$((SECONDS + ${SECONDS_AT_MOST:-540}))

measure() { # NAME FLAG ...
  local name=$1 began=$SECONDS left=$((deadline - SECONDS))
  [ -f "$out/$name.json" ] && { echo "$name: is there"; return; }
  [ "$left" -gt 0 ] || { echo "$name: no time is left"; return; }
  mkdir -p "$out/logs/$name"
  timeout --signal=INT --kill-after=60 "$left" "$python" -m benchmarks step --json "$out/$name.partial.json" \
    --logs "$out/logs/$name" --policies "${POLICIES:-$out/policies}" ${STEPS:+--steps "$STEPS"} "${@:2}" \
    >"$out/$name.txt" 2>&1
  local code=$?
  [ "$code" = 0 ] && mv "$out/$name.partial.json" "$out/$name.json"
  echo "$name: exit $code after $((SECONDS - began)) s; $(tail -n 1 "$out/$name.txt")"
}

for part in "$@"; do
  seed=0
  [[ $part =~ _([0-9]+)$ ]] && seed=${BASH_REMATCH[1]}
  demo=(--models "$models" --seeds "$seed")
  long=(--models "$models-long" --workload long --seeds "$seed" --checkpointing --replayed --steps "${STEPS:-10}")
  case ${part%_"$seed"} in
    off_bandit) measure "$part" "${demo[@]}" --arms off frozen plain --replayed ;;
    plain) measure "$part" "${demo[@]}" --arms plain --replayed ;;
    online) measure "$part" "${demo[@]}" --arms online --replayed ;;
    muted) measure "$part" "${demo[@]}" --arms muted --replayed ;;
    seed) measure "$part" "${demo[@]}" --arms off static frozen again ;;
    modes) measure "$part" "${demo[@]}" --arms off frozen --replayed --steps "${STEPS:-15}" \
      --modes on_policy offload one_step_off partial ;;
    long) measure "$part" "${long[@]}" --arms off static frozen ;;
    longonline) measure "$part" "${long[@]}" --arms online --packs 3 ;;
    longmuted) measure "$part" "${long[@]}" --arms muted --packs 3 ;;
    change) measure "$part" "${demo[@]}" --arms off frozen online --change --packs 4 --judged-every 1 ;;
    8x8) measure "$part" "${demo[@]}" --arms off frozen --prompts 8 --replayed ;;
    16x8) measure "$part" "${demo[@]}" --arms off frozen --prompts 16 --replayed --checkpointing ;;
    apart) measure "$part" "${demo[@]}" --arms off frozen online --apart --replayed --modes on_policy one_step_off ;;
    join)
      mapfile -t parts < <(find "$out" -maxdepth 1 -name '*.json' ! -name '*.partial.json' ! -name 'step.*' | sort)
      "$python" -m benchmarks step --join "${parts[@]}" --json "$out/step.h200.json" 2>&1 | tee "$out/step.txt"
      ;;
    *) echo "step.sh: $part: not a part" >&2; exit 2 ;;
  esac
done

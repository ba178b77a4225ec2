#!/usr/bin/env bash
# Measures hot reload on a GPU host where benchmarks/gpu/bundle.sh's bundle lies in SITE:
#   benchmarks/gpu/reload.sh OUT swap ...           on one GPU, in twelve minutes; more flags of `swap`
#   benchmarks/gpu/reload.sh OUT publications ...   on two, in five with --ranks 1; more flags of `publications`
# OUT gets the result, what was printed, and the end of each server's log. With attention compiled before: keep
# FLASHINFER_WORKSPACE_BASE from host to host, else the first server starts two and a half minutes later.
# MODELS is where models are made and kept; SECONDS_AT_MOST ends the command as Ctrl-C does.
set -uo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
what=$2
shift 2
cd "$(dirname "$0")/../.." || exit
export PYTHONPATH=$PWD:$PWD/clients/tlt_client:${SITE:-/tmp/site}${PYTHONPATH:+:$PYTHONPATH}
export FLASHINFER_CUDA_ARCH_LIST=9.0a FLASHINFER_WORKSPACE_BASE=${FLASHINFER_WORKSPACE_BASE:-/tmp/flashinfer}
export NCCL_CUMEM_ENABLE=0 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
machine=h200$([ "$gpus" -gt 1 ] && echo "x$gpus")
case $what in
  swap) command=(swap --models "${MODELS:-/tmp/models/7b}") ;;
  publications) command=(publications) ;;
  *) echo "reload.sh: $what: swap or publications" >&2; exit 2 ;;
esac
logs=$(mktemp -d)
began=$SECONDS
timeout --signal=INT "${SECONDS_AT_MOST:-900}" "$python" -m benchmarks "${command[@]}" --logs "$logs" \
  --json "$out/$what.$machine.json" "$@" 2>&1 | tee "$out/$what.txt"
rc=${PIPESTATUS[0]}
for log in "$logs"/*.log; do [ -f "$log" ] && tail -n 200 "$log" >"$out/$(basename "$log").txt"; done
echo "$what: exit $rc after $((SECONDS - began)) s" | tee -a "$out/$what.txt"
exit "$rc"

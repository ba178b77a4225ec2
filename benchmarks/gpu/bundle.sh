#!/usr/bin/env bash
# Carries this project's server to a GPU host that reaches no package registry:  benchmarks/gpu/bundle.sh OUT
#
# Makes OUT/site.tar.xz of 43 MiB in a few minutes, where a registry is reachable: our fork of SGLang, its kernels for
# Hopper and what they import, for Linux x86-64, Python 3.12, torch 2.11.0+cu130, triton 3.6.0 and an nvcc 13.0 on the
# host; and OUT/upstream.tar.gz, the files that the fork changes as upstream ships them, for its peer. There, in a
# checkout:
#   mkdir /tmp/site && tar xJf site.tar.xz -C /tmp/site && cp REVISION .    # what results are signed with, without git
#   mkdir /tmp/upstream && cp -al /tmp/site/sglang /tmp/upstream            # for --upstream /tmp/upstream
#   tar xzf upstream.tar.gz -C /tmp/upstream --unlink-first
#   export PYTHONPATH=$PWD:$PWD/clients/tlt_client:/tmp/site
#   export FLASHINFER_CUDA_ARCH_LIST=9.0a FLASHINFER_WORKSPACE_BASE=/tmp/flashinfer
#   python3 -m tlt_server serve --attention-backend flashinfer ...
# The first start compiles attention for two and a half minutes; keep FLASHINFER_WORKSPACE_BASE for the next host.
# Small, because it leaves out what a text model on one Hopper GPU never runs: FlashAttention-3 (340 MB) and FlashMLA,
# kernels for other GPUs, image generation, tests. So the attention backend must be flashinfer or triton.
# PYTHON names an interpreter that has tlt-server; WHEEL a pristine SGLang wheel, if it is here already.
set -euo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

wheel=${WHEEL:-}
if [ -z "$wheel" ]; then
  "$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_34_x86_64 \
    -d "$scratch/pristine" sglang==0.5.17
  wheel=$(echo "$scratch"/pristine/*.whl)
fi
(cd "$here/../.." && "$python" -m tlt_server fork build --python 3.12 --out "$scratch/wheels" --wheel "$wheel")

"$python" -m zipfile -e "$wheel" "$scratch/upstream"
awk '!/^#/ {print $3}' "$here/../../patches/images.sha256" | tar czf "$out/upstream.tar.gz" -C "$scratch/upstream" -T -

# pip takes each glibc tag by itself, not "this or older"
tags=()
for tag in manylinux_2_{35,34,31,28,27,26,24,17,12}_x86_64 manylinux{2014,2010,1}_x86_64; do tags+=(--platform "$tag"); done
"$python" -m pip download -q --no-deps --only-binary=:all: --implementation cp --python-version 3.12 "${tags[@]}" \
  -d "$scratch/wheels" -r "$here/bundle.txt"

site=$scratch/site
mkdir "$site"
for wheel in "$scratch"/wheels/*.whl; do "$python" -m zipfile -e "$wheel" "$site"; done
cp "$here/stand_ins.py" "$site/sitecustomize.py"

cd "$site"
rm -rf sgl_kernel/{flash_ops,flashmla_ops,infllm_ops}* sgl_kernel/sm100 ./*_cu12.abi3.so torchao/_C_*.so
rm -rf sglang/{multimodal_gen,test} sglang/srt/{server,grpc,multimodal}/_core*.so
rm -rf xgrammar/lib/libxgrammar.a build_backend.py build_utils.py test tools
rm -rf flashinfer/data/cutlass/{docs,examples,media,python,test}
rm -rf flashinfer/data/cccl/{benchmarks,ci,docs,python,test} flashinfer/data/cccl/*/{benchmarks,benchmarking,examples,test,testing}
find . -type d -name tests -prune -exec rm -rf {} +
# sgl_kernel's hold device code and are left as they came
find . -name '*.so' -size +300k -not -path './sgl_kernel/*' -exec strip --strip-unneeded {} +
# older than what flashinfer compiled on an earlier host, which a later one takes as it is then
tar c --mtime=2000-01-01 . | xz -T0 -7 >"$out/site.tar.xz"
(cd "$here/../.." && "$python" -c 'from tlt_server.results import git_revision; print(git_revision())') >"$out/REVISION"
ls -l "$out"/{site.tar.xz,upstream.tar.gz,REVISION}

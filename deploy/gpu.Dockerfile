# tlt-server on NVIDIA GPUs. Context: the repository.
#   docker build -f deploy/gpu.Dockerfile -t tlt-server:0.1.0-gpu .
#
# PYTHON_VERSION  3.11 or 3.12
# CUDA_VERSION    a 13.0 release: torch 2.11.0 of PyPI and SGLang's kernels are built for CUDA 13.0
ARG PYTHON_VERSION=3.12
ARG CUDA_VERSION=13.0.1

# Our wheels, and the fork's, made from the pristine SGLang and patches/. git and the build tools stay in this stage.
FROM python:${PYTHON_VERSION}-slim-bookworm AS wheels
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN apt-get update \
 && apt-get install --yes --no-install-recommends git \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY LICENSE NOTICE README.md pyproject.toml ./
COPY clients/tlt_client clients/tlt_client
COPY patches patches
COPY tlt_server tlt_server
RUN --mount=type=cache,target=/root/.cache/pip \
    pip wheel --no-deps --wheel-dir /wheels ./clients/tlt_client . \
 && pip install /wheels/*.whl uv==0.13.8 \
 && tlt-server fork build --out /wheels

# devel, not runtime: FlashInfer, Triton and SGLang compile kernels at first use, with nvcc, gcc and Python's headers.
FROM nvidia/cuda:${CUDA_VERSION}-devel-ubuntu24.04 AS server
ARG PYTHON_VERSION
RUN apt-get update \
 && apt-get install --yes --no-install-recommends build-essential ca-certificates libnuma1 \
 && rm -rf /var/lib/apt/lists/*
COPY --from=wheels /usr/local/bin/uv /usr/local/bin/uv
COPY deploy/locks /etc/tlt-server/locks
# Bytecode now: the user who runs the server may not write it later.
ENV PATH=/opt/venv/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    UV_COMPILE_BYTECODE=1 \
    UV_LINK_MODE=copy \
    UV_PYTHON_INSTALL_DIR=/opt/python \
    VIRTUAL_ENV=/opt/venv
# uv brings a whole Python of the version asked for, headers included; Ubuntu 24.04 has 3.12 alone.
RUN uv venv --managed-python --python "${PYTHON_VERSION}" /opt/venv
# All that is not ours first: a layer of gigabytes that a change of ours leaves in the cache.
RUN --mount=type=cache,target=/root/.cache/uv \
    uv pip install --no-deps --require-hashes --requirement "/etc/tlt-server/locks/gpu-${PYTHON_VERSION}.txt"
RUN --mount=type=cache,target=/root/.cache/uv \
    --mount=type=bind,from=wheels,source=/wheels,target=/wheels \
    uv pip install --no-deps /wheels/*.whl \
 && uv pip check \
 && tlt-server fork check

# The folders are made here so that a volume mounted on one belongs to the user: the drafter trainer's checkpoints and
# drafters, the sockets between it and a server, and .cache, which keeps models and compiled kernels: FlashInfer,
# DeepGEMM, tvm-ffi and Hugging Face write below it of their own accord, Triton is told to.
RUN useradd --create-home --uid 10001 tlt \
 && install --directory --owner tlt --group tlt /home/tlt/.cache /home/tlt/drafters /home/tlt/link
ENV TRITON_CACHE_DIR=/home/tlt/.cache/triton
USER 10001
WORKDIR /home/tlt
VOLUME /home/tlt/.cache
EXPOSE 30000
# /health has the model answer one token, for which it gives itself 20 seconds. The first start loads the model and
# compiles kernels.
HEALTHCHECK --interval=30s --timeout=25s --start-period=15m --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:30000/health', timeout=24)"]
ENTRYPOINT ["tlt-server", "serve", "--host", "0.0.0.0", "--port", "30000"]

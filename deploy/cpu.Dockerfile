# tlt-server on a machine without a GPU. Context: the repository.
#   docker build -f deploy/cpu.Dockerfile -t tlt-server:0.1.0-cpu .
#
# PYTHON_VERSION  3.11 or 3.12
# TORCH_INDEX     where torch comes from; the default has CPU builds, a tenth the size of PyPI's
ARG PYTHON_VERSION=3.12

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
 && pip install /wheels/*.whl \
 && tlt-server fork build --out /wheels

FROM python:${PYTHON_VERSION}-slim-bookworm AS server
ARG PYTHON_VERSION
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONUNBUFFERED=1
COPY deploy/constraints/cpu.txt /etc/tlt-server/constraints.txt
COPY deploy/locks /etc/tlt-server/locks
# torch first, alone: everything after it keeps the build that it finds.
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --index-url "${TORCH_INDEX}" --constraint /etc/tlt-server/constraints.txt torch torchvision
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,from=wheels,source=/wheels,target=/wheels \
    pip install --no-deps --require-hashes --requirement "/etc/tlt-server/locks/cpu-${PYTHON_VERSION}.txt" \
 && pip install --no-deps /wheels/*.whl \
 && pip check \
 && tlt-server fork check

# The folders are made here so that a volume mounted on one belongs to the user: downloads, the drafter trainer's
# checkpoints and drafters, and the sockets between it and a server.
RUN useradd --create-home --uid 10001 tlt \
 && install --directory --owner tlt --group tlt /home/tlt/.cache /home/tlt/drafters /home/tlt/link
USER 10001
WORKDIR /home/tlt
VOLUME /home/tlt/.cache
EXPOSE 30000
# /health has the model answer one token, for which it gives itself 20 seconds.
HEALTHCHECK --interval=30s --timeout=25s --start-period=5m --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:30000/health', timeout=24)"]
ENTRYPOINT ["tlt-server", "serve", "--host", "0.0.0.0", "--port", "30000"]

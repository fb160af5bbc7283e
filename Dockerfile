# Two images, for machines without and with NVIDIA GPUs:
#
#     docker build --target cpu --tag discern:cpu .
#     docker build --target cuda --tag discern:cuda .
#     docker run --rm --volume "$PWD:/workspace" discern:cpu demo
#
# Packages have the versions of requirements.lock. Other extras: --build-arg EXTRAS=hf,zh

FROM python:3.11-slim AS wheel
COPY pyproject.toml README.md LICENSE /source/
COPY src /source/src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist /source

FROM python:3.11-slim AS base
# gcc compiles the CPU kernels and the launchers of Triton's kernels when they are first used.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home discern \
    && install --directory --owner discern /workspace
ARG EXTRAS=remote,serve
WORKDIR /workspace
ENTRYPOINT ["discern"]
CMD ["--help"]

# PyPI's torch includes the CUDA libraries: the host provides the driver, through the NVIDIA Container Toolkit.
FROM base AS cuda
RUN --mount=type=bind,source=requirements.lock,target=/requirements.lock \
    pip install --no-cache-dir --constraint /requirements.lock torch nvidia-ml-py
RUN --mount=type=bind,source=requirements.lock,target=/requirements.lock \
    --mount=type=bind,from=wheel,source=/dist,target=/dist \
    pip install --no-cache-dir --constraint /requirements.lock "$(echo /dist/*.whl)[$EXTRAS]"
USER 1000

FROM base AS cpu
RUN --mount=type=bind,source=requirements.lock,target=/requirements.lock \
    pip install --no-cache-dir --constraint /requirements.lock torch --extra-index-url https://download.pytorch.org/whl/cpu
RUN --mount=type=bind,source=requirements.lock,target=/requirements.lock \
    --mount=type=bind,from=wheel,source=/dist,target=/dist \
    pip install --no-cache-dir --constraint /requirements.lock "$(echo /dist/*.whl)[$EXTRAS]"
USER 1000

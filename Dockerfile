# Two images from one file: `--target build` has wanbuild and makes artifacts, `--target serve` has wanrun alone.
#
#   docker build --target serve --build-arg ARTIFACT=wan2.1-1.3b -t wan .      # an artifact inside the context
#   docker run --rm -v "$PWD/videos:/videos" wan --prompt "A cat walks on the grass" --output /videos/cat.mp4
#
# For NVIDIA GPUs: --build-arg EXTRA=cuda13, and `docker run --gpus all`.
ARG PYTHON=3.12-slim-bookworm

FROM python:${PYTHON} AS base
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
RUN useradd --create-home --uid 10001 wan && mkdir /artifact /videos && chown wan /artifact /videos
WORKDIR /src
COPY pyproject.toml README.md constraints.txt ./
COPY build/wanbuild build/wanbuild
COPY runtime/wanrun runtime/wanrun

FROM base AS build
RUN pip install --constraint constraints.txt '.[build]'
USER 10001
WORKDIR /artifact
ENTRYPOINT ["wanbuild"]
CMD ["--help"]

FROM base AS wheels
ARG EXTRA=
RUN pip wheel --constraint constraints.txt --wheel-dir /wheels ".${EXTRA:+[${EXTRA}]}"

FROM python:${PYTHON} AS serve
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 WANRUN_ARTIFACT=/artifact
RUN useradd --create-home --uid 10001 wan && mkdir /videos && chown wan /videos
RUN --mount=type=bind,from=wheels,source=/wheels,target=/wheels pip install --no-index /wheels/*.whl
ARG ARTIFACT=artifacts/demo/artifact
COPY --chown=root:root ${ARTIFACT} /artifact
USER 10001
WORKDIR /videos
ENTRYPOINT ["wanrun"]
CMD ["--help"]

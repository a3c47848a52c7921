# Three images from one file: `--target build` has wanbuild and makes artifacts, `--target runtime` has wanrun alone, and
# `--target serve` is `runtime` with an artifact in it.
#
#   docker build --target serve --build-arg ARTIFACT=wan2.1-1.3b -t wan .      # an artifact inside the context
#   docker run --rm --user "$(id -u)" -v "$PWD/videos:/videos" -v wan-cache:/cache wan \
#     --prompt "A cat walks on the grass" --output cat.mp4
#
# As a server, with a page at http://localhost:8000/ (docs/serving.md):
#
#   docker run --rm -p 8000:8000 -e WANRUN_API_KEYS="me $(openssl rand -hex 16)" -v wan-videos:/videos wan \
#     serve /artifact --host 0.0.0.0 --data /videos
#
# Without an artifact, which is then mounted at /artifact or named as hf://OWNER/NAME (docs/deploy):
#
#   docker build --target runtime --build-arg EXTRA=cuda13 -t wanrun .
#   docker run --rm --gpus all -v "$PWD/wan2.1-1.3b:/artifact:ro" -v "$PWD/videos:/videos" wanrun --prompt "A cat"
#
# It runs as any user id. /cache keeps embeddings of prompts, and programs that were compiled there.
# For NVIDIA GPUs: --build-arg EXTRA=cuda13, and `docker run --gpus all`. For TPUs: EXTRA=tpu.
ARG PYTHON=3.12.11-slim-bookworm

FROM python:${PYTHON} AS base
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
RUN useradd --create-home --uid 10001 wan && mkdir --mode=1777 /artifact /videos
WORKDIR /src
COPY pyproject.toml README.md constraints.txt ./
COPY build/wanbuild build/wanbuild
COPY runtime/wanrun runtime/wanrun
COPY runtime/wancli runtime/wancli
COPY runtime/wanserve runtime/wanserve
COPY runtime/wanhub runtime/wanhub
COPY runtime/wanfleet runtime/wanfleet
COPY runtime/wanreport runtime/wanreport

FROM base AS build
RUN pip install --constraint constraints.txt '.[build]'
USER 10001
WORKDIR /artifact
ENTRYPOINT ["wanbuild"]
CMD ["--help"]

# The packages that the artifact's executables load with, in its own versions; the others as in constraints.txt. Without
# an artifact in the context (the pattern then matches nothing), all as in constraints.txt.
FROM base AS wheels
ARG EXTRA=
ARG ARTIFACT=artifacts/demo/artifact
COPY constraints.txt ${ARTIFACT}/requirements.tx[t] /artifact/
RUN touch /artifact/requirements.txt \
  && sed -nE 's/^([A-Za-z0-9_.-]+)==.*/^\1/p' /artifact/requirements.txt > /own \
  && grep --invert-match --ignore-case --file=/own constraints.txt > /others \
  && pip wheel --constraint /others --requirement /artifact/requirements.txt --wheel-dir /wheels \
    ".[serve${EXTRA:+,${EXTRA}}]"

FROM python:${PYTHON} AS runtime
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 \
  WANRUN_ARTIFACT=/artifact XDG_CACHE_HOME=/cache
RUN useradd --create-home --uid 10001 wan && mkdir --mode=1777 /videos /cache
RUN --mount=type=bind,from=wheels,source=/wheels,target=/wheels pip install --no-index /wheels/*.whl
VOLUME /cache
EXPOSE 8000
USER 10001
WORKDIR /videos
ENTRYPOINT ["wanrun"]
CMD ["--help"]

FROM runtime AS serve
ARG ARTIFACT=artifacts/demo/artifact
COPY --chown=root:root ${ARTIFACT} /artifact

# hypocenter in a container: the CPU image by default, the NVIDIA one by `--target nvidia`.
#
#   docker build -t hypocenter .
#   docker run --rm -it hypocenter run -p 'import os' -n 40
#   docker run --rm -it -v "$PWD:/models:ro" hypocenter run /models/model.gguf
#   docker build --target nvidia -t hypocenter:nvidia .
#   docker run --rm -it --gpus all hypocenter:nvidia run --device cuda
#
#   docker run --rm -it -p 127.0.0.1:8080:8080 hypocenter serve --host 0.0.0.0
#
# Whether it is healthy is asked of `hypo serve` at port 8080. A container that serves elsewhere, or
# by TLS, says so by `--health-cmd`; one that serves nothing by `--no-healthcheck`.
# `docker stop -t 45` leaves open answers the time of --grace.
#
# Kernels are compiled for the processor that builds the image; on
# another one they are compiled anew at the first run.

FROM python:3.11.14-slim-bookworm AS base
ENV PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN useradd --create-home --uid 10001 hypo && python -m venv /opt/hypocenter
ENV PATH=/opt/hypocenter/bin:$PATH
WORKDIR /opt/source
COPY pyproject.toml constraints.txt README.md LICENSE NOTICE ./
COPY hashes ./hashes
COPY src ./src

FROM base AS nvidia
# PyTorch's CUDA build has no hash of ours and brings the Triton that belongs to it, so that pin does
# not hold here. Triton needs a C compiler while it runs.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && grep -v '^triton==' constraints.txt > /tmp/constraints.txt \
    && pip install --require-hashes --no-deps -r hashes/build.txt \
    && pip install --require-hashes --no-deps -r hashes/base.txt \
        -r hashes/server.txt -r hashes/gpu.txt \
    && pip install -c /tmp/constraints.txt torch \
    && pip install --no-deps --no-build-isolation .
USER hypo
WORKDIR /home/hypo
# What runs on the CPU only: a builder has no GPU, so its kernels are compiled at the first run.
RUN hypo warm --quiet
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m CMD \
    ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8080/health', timeout=4)"]
ENTRYPOINT ["hypo"]
CMD ["--help"]

FROM base AS cpu
RUN pip install --require-hashes --no-deps -r hashes/build.txt \
    && pip install --require-hashes --no-deps -r hashes/base.txt -r hashes/server.txt \
    && pip install --no-deps --no-build-isolation .
USER hypo
WORKDIR /home/hypo
RUN hypo warm --quiet
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m CMD \
    ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8080/health', timeout=4)"]
ENTRYPOINT ["hypo"]
CMD ["--help"]

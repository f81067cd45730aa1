# docker build -t phalanx .                                 with JAX for CPUs
# docker build -t phalanx --build-arg JAX=cuda12 .          for NVIDIA GPUs: cuda12 or cuda13; or tpu
# docker run --rm -v "$PWD":/work phalanx run --workers 2 train.py
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
WORKDIR /source
COPY LICENSE README.md hatch_build.py pyproject.toml ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
ARG JAX=cpu
COPY constraints.txt /
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --constraint /constraints.txt "$(echo /wheels/*.whl)[data,tensorboard]" "jax[${JAX}]" \
    && useradd --create-home --uid 1000 phalanx
# By its number, because a pod that must not run as root accepts no name.
USER 1000
WORKDIR /work
# Without a shell, so that the launcher is process 1 and gets the SIGTERM of `docker stop`. It passes it on to the workers.
ENTRYPOINT ["phalanx"]
CMD ["--help"]

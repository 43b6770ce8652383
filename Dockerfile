# safelaunch in an image: the wheel, built here and installed beside torch. docs/schedulers.md says more.
#
#     docker build -t safelaunch .
#     docker run --rm --cap-add=SYS_PTRACE --shm-size=2g safelaunch demo
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
COPY . /src
# What builds the wheel does not get into the image.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir build && python -m build --wheel --outdir /dist /src

FROM python:${PYTHON}-slim
# For GPUs: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# The newest torch of that index; safelaunch works with 2.6 and later.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --index-url "${TORCH_INDEX}" torch numpy
COPY --from=build /dist /dist
RUN pip install --no-cache-dir /dist/*.whl && rm -r /dist
WORKDIR /work
ENTRYPOINT ["safelaunch"]
CMD ["--help"]

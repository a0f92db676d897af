# medusa-runtime: the base image of functions. `make image` builds it; docs/images.md tells how to build on it.
#
# One file for all variants (images/variants.toml): slim (torch engine), cpu (with vLLM), cuda (with vLLM).
# Layers, from what is read last in a cold start and changes least to what changes most:
#   base · standard library, compiled · packages that a start does not read · packages that it reads · the runtime
ARG BASE_IMAGE=docker.io/library/python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b

FROM ${BASE_IMAGE} AS base
ARG VARIANT=slim
# The secrets are settings of the building machine (registry, certificates): mounted for one step, never in a layer.
COPY images/base.sh images/variants.toml /build/
RUN --mount=type=secret,id=ca,target=/etc/ssl/certs/ca-certificates.crt \
    --mount=type=secret,id=apt,target=/etc/apt/sources.list.d/build.sources \
    sh /build/base.sh "${VARIANT}" && rm -r /build

FROM base AS packages
ARG VARIANT=slim
# cuda only: the compute capabilities of the GPUs that the image is for, such as 9.0 or 8.0,9.0. Empty: all.
ARG GPU
COPY images/variants.toml images/install.py images/gpu_code.py /build/
COPY images/locks /build/locks
RUN --mount=type=secret,id=ca,target=/etc/ssl/certs/ca-certificates.crt \
    --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 /build/install.py packages "${VARIANT}" "${GPU}"

FROM packages AS runtime
RUN --mount=type=secret,id=apt,target=/etc/apt/sources.list.d/build.sources \
    apt-get update -q && apt-get install -qy --no-install-recommends gcc libc6-dev
COPY . /source
COPY images/medusa-install /opt/medusa/bin/medusa-install
COPY images/install.py images/cold_start.py images/split.py /build/
COPY images/trace /build/trace
RUN --mount=type=secret,id=ca,target=/etc/ssl/certs/ca-certificates.crt \
    --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 /build/install.py runtime
# A real cold start shows which files it reads; the tree is split into layers by that.
ARG VARIANT=slim
RUN /opt/medusa/bin/python /build/cold_start.py /source/examples/pydoc-lm "${VARIANT}" \
    && /opt/medusa/bin/python /build/split.py digest

FROM base
LABEL org.opencontainers.image.title="medusa-runtime" \
      org.opencontainers.image.description="Base image of model functions that answer about as soon as the weights can be read" \
      org.opencontainers.image.licenses="Apache-2.0" \
      com.amazonaws.sagemaker.capabilities.accept-bind-to-port="true"
# Each layer after its digest, by which a cache knows whether it is still the same (images/split.py).
COPY --from=runtime /layers/cold /opt/medusa/layers/
RUN --mount=type=bind,from=runtime,target=/dev/built python3 /dev/built/build/split.py copy cold /dev/built
COPY --from=runtime /layers/hot /opt/medusa/layers/
RUN --mount=type=bind,from=runtime,target=/dev/built python3 /dev/built/build/split.py copy hot /dev/built
COPY --from=runtime /layers/own /opt/medusa/layers/
RUN --mount=type=bind,from=runtime,target=/dev/built python3 /dev/built/build/split.py copy own /dev/built
# Any user id works, so HOME is the one folder that is writable when the root is read-only.
ENV PATH=/opt/medusa/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR /function
EXPOSE 8080
STOPSIGNAL SIGTERM
ENTRYPOINT ["medusa"]
CMD ["serve"]

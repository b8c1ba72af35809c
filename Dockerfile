# syntax=docker/dockerfile:1
# The agent's image. Another base, or a mirror of it: --build-arg BASE_IMAGE=...; it needs glibc, which the driver's library uses.
ARG BASE_IMAGE=python:3.13-slim-bookworm

FROM ${BASE_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /src
RUN python -m venv /opt/build && python -m venv --without-pip /opt/gpu-cost-exporter
COPY requirements/build.txt requirements/runtime.txt requirements/
RUN /opt/build/bin/pip install --require-hashes -r requirements/build.txt \
 && /opt/build/bin/pip --python /opt/gpu-cost-exporter/bin/python install --require-hashes --only-binary :all: \
      -r requirements/runtime.txt
COPY pyproject.toml README.md LICENSE ./
COPY exporter exporter
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
 && /opt/build/bin/pip --python /opt/gpu-cost-exporter/bin/python install --no-deps --no-index /wheels/*.whl \
 && /opt/gpu-cost-exporter/bin/python -m compileall -q /opt/gpu-cost-exporter/lib

FROM ${BASE_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="gpu-cost-exporter" \
      org.opencontainers.image.description="GPU utilisation exporter and pod attribution for Kubernetes" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /opt/gpu-cost-exporter /opt/gpu-cost-exporter
COPY rules /usr/share/gpu-cost-exporter/rules
COPY dashboards/fleet.json /usr/share/gpu-cost-exporter/dashboards/
ENV PATH=/opt/gpu-cost-exporter/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# uid 0, because the kubelet's socket belongs to root; it needs no capability: run it with --cap-drop ALL.
USER 0:0
EXPOSE 9400
# Python as PID 1 ends on SIGTERM only because the agent handles it.
STOPSIGNAL SIGTERM
ENTRYPOINT ["gpu-cost-exporter"]
CMD ["agent"]

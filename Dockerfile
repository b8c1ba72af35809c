# Two images with the same files: the agent (default) and, with --target service, the cost service. `make image` builds both and sets the labels.
# The base image is pinned by digest, because a tag can move. For a mirror: --build-arg BASE_IMAGE=... (`make image RELEASE=1` requires a digest).
# The base image needs Python 3.11 or later, a shell, glibc (for the driver's library) and libstdc++ (for gRPC).
ARG BASE_IMAGE=python:3.13.13-slim-bookworm@sha256:355bfa66770995d7e9a0da4b3473b44d0cb451f6b56f5615ad9c39e3c4eca03f

FROM ${BASE_IMAGE} AS build
# The base image can have another user.
# hadolint ignore=DL3002
USER 0:0
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PYTHONDONTWRITEBYTECODE=1
WORKDIR /src
COPY requirements/build.txt requirements/runtime.txt requirements/
# The hashes cover the wheels of a version for all architectures; nothing is compiled.
RUN python3 -m venv /opt/build \
 && python3 -m venv --without-pip /opt/gpu-cost-exporter \
 && /opt/build/bin/pip install --require-hashes --only-binary :all: -r requirements/build.txt
COPY pyproject.toml README.md LICENSE ./
COPY exporter exporter
COPY simulator simulator
COPY deploy/image/finish.sh ./
COPY scripts/pins.py scripts/sbom.py scripts/
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
 && sh finish.sh

# The common part of both images. pip is removed, so that nothing can be installed in a running container. The build fails if the base image
# has pip in another folder.
FROM ${BASE_IMAGE} AS runtime
# hadolint ignore=DL3002
USER 0:0
ARG BASE_IMAGE
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.base.name="${BASE_IMAGE}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN find / -xdev \( -path '*-packages/pip' -o -path '*-packages/pip-*' -o -path '*-packages/setuptools*' -o -path '*/ensurepip' \
      -o -path '*/python-wheels' -o -path '*/bin/pip*' \) -prune -exec rm -rf {} + \
 && python3 -c 'import importlib.util as modules, shutil, sys; \
      left = [*filter(modules.find_spec, ("pip", "ensurepip", "setuptools")), *filter(shutil.which, ("pip", "pip3"))]; \
      sys.exit(f"the base image still has {left} after the removal" if left else 0)'
COPY deploy/image/healthcheck.py contrib/digest/digest.py /usr/share/gpu-cost-exporter/
COPY rules /usr/share/gpu-cost-exporter/rules
COPY dashboards/fleet.json dashboards/oncall.json dashboards/finops.json /usr/share/gpu-cost-exporter/dashboards/
COPY --from=build /opt/gpu-cost-exporter /opt/gpu-cost-exporter
ENV PATH=/opt/gpu-cost-exporter/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# The program handles SIGTERM; as PID 1, Python does not stop on it by default.
STOPSIGNAL SIGTERM
# For Docker and Podman; Kubernetes probes /healthz and /readyz.
HEALTHCHECK --interval=30s --timeout=10s --start-period=30s \
  CMD ["/opt/gpu-cost-exporter/bin/python", "-IS", "/usr/share/gpu-cost-exporter/healthcheck.py"]
ENTRYPOINT ["gpu-cost-exporter"]

FROM runtime AS service
LABEL org.opencontainers.image.title="gpu-cost-exporter cost service" \
      org.opencontainers.image.description="Cost of the GPUs of a fleet: pages, API, budgets and metrics"
# A new volume that is mounted here gets the owner of this folder; without the folder root would own it.
RUN install -d -o 65534 -g 65534 /var/lib/gpu-cost-exporter
USER 65534:65534
EXPOSE 9401
CMD ["serve"]

FROM runtime AS agent
LABEL org.opencontainers.image.title="gpu-cost-exporter" \
      org.opencontainers.image.description="GPU utilisation exporter and pod attribution for Kubernetes"
# For the NVIDIA container runtime: all GPUs, and only NVML from the driver. The cost service does not set them and gets no GPU.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=utility
# uid 0, because root owns the directory of the kubelet's socket (0750). No capability is needed: run it with --cap-drop ALL. Without the
# kubelet (--attribution off) any user works: --user 65534.
# hadolint ignore=DL3002
USER 0:0
EXPOSE 9400
CMD ["agent"]

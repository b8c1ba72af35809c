# Installs the program and its dependencies in /opt/gpu-cost-exporter.
set -eu
home=/opt/gpu-cost-exporter
pins=/src/requirements/runtime.txt
install() { /opt/build/bin/pip --python "$home/bin/python" install --quiet --no-compile "$@"; }

# Wheels for musl exist, but the driver's library needs glibc.
"$home/bin/python" -c 'import platform, sys; sys.exit(0 if platform.libc_ver()[0] == "glibc" else "the base image has no glibc; use a base image with glibc")'
install --require-hashes --only-binary :all: -r "$pins"
install --no-deps --no-index /wheels/*.whl
cd "$home"/lib/python3.*/site-packages
# The bill of materials of the image, as CycloneDX. Later steps install no packages.
/opt/build/bin/python /src/scripts/sbom.py --pins "$pins" --folder "$PWD" --base / > "$home/sbom.cdx.json"

# The program uses only credentials and transport of the Kubernetes client; the unused models and API classes take 100 MB.
find kubernetes/client/api kubernetes/client/models kubernetes/aio/client/api kubernetes/aio/client/models \
  -name '*.py' ! -name __init__.py -delete

# Compile here, because Python cannot write bytecode to a read-only root. Sources in an image do not change.
"$home/bin/python" -m compileall -q -j 0 --invalidation-mode unchecked-hash .

# Fail the build, and not the start on a node, if the base image lacks a library such as libstdc++, or a package needs a file that was
# removed above.
"$home/bin/python" -c 'import aiohttp, bcrypt, google.protobuf, grpc, h2, pynvml, sqlite3, ssl, yaml
import kubernetes.aio.client.api_client, kubernetes.aio.config.incluster_config, kubernetes.aio.config.kube_config'

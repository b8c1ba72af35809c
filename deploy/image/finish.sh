# Fills /opt/gpu-cost-exporter with the program and the packages that it needs.
set -eu
home=/opt/gpu-cost-exporter
pins=/src/requirements/runtime.txt
install() { /opt/build/bin/pip --python "$home/bin/python" install --quiet --no-compile "$@"; }

# There are wheels for musl, too; the driver's library is not.
"$home/bin/python" -c 'import platform, sys; sys.exit(0 if platform.libc_ver()[0] == "glibc" else "the base has no glibc")'
install --require-hashes --only-binary :all: -r "$pins"
install --no-deps --no-index /wheels/*.whl
cd "$home"/lib/python3.*/site-packages
# What is in the image, as CycloneDX: nothing comes after it.
/opt/build/bin/python /src/scripts/sbom.py --pins "$pins" --folder "$PWD" --base / > "$home/sbom.cdx.json"

# Of the Kubernetes client, credentials and transport are used; its typed models and calls, never loaded, are 100 MB.
find kubernetes/client/api kubernetes/client/models kubernetes/aio/client/api kubernetes/aio/client/models \
  -name '*.py' ! -name __init__.py -delete

# Compiled here, once: a read-only root cannot keep what Python compiles. Nobody changes a source in an image.
"$home/bin/python" -m compileall -q -j 0 --invalidation-mode unchecked-hash .

# A base that lacks what their libraries need, as libstdc++, is refused here and not on a node; and so is a package that needs what was
# taken from it.
"$home/bin/python" -c 'import aiohttp, bcrypt, google.protobuf, grpc, h2, pynvml, sqlite3, ssl, yaml
import kubernetes.aio.client.api_client, kubernetes.aio.config.incluster_config, kubernetes.aio.config.kube_config'

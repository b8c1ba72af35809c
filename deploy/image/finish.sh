# Fills /opt/gpu-cost-exporter with the program and what a requirements file names: sh finish.sh FILE
set -eu
home=/opt/gpu-cost-exporter
install() { /opt/build/bin/pip --python "$home/bin/python" install --quiet --no-compile "$@"; }

# There are wheels for musl, too; the driver's library is not.
"$home/bin/python" -c 'import platform, sys; sys.exit(0 if platform.libc_ver()[0] == "glibc" else "the base has no glibc")'
install --require-hashes --only-binary :all: -r "$1"
install --no-deps --no-index /wheels/*.whl
cd "$home"/lib/python3.*/site-packages
# What is in the image, as CycloneDX: nothing comes after it.
/opt/build/bin/python /src/scripts/sbom.py --pins "/src/$1" --folder "$PWD" --base / > "$home/sbom.cdx.json"

# Of the Kubernetes client, credentials and transport are used; its typed models and calls, never loaded, are 100 MB.
find kubernetes/client/api kubernetes/client/models kubernetes/aio/client/api kubernetes/aio/client/models \
  -name '*.py' ! -name __init__.py -delete
# Of plotly, the script that pages load is used; its Python, never loaded, is 60 MB.
if [ -d plotly ]; then find plotly -type f ! -path plotly/__init__.py ! -name plotly.min.js -delete; fi

# Compiled here, once: a read-only root cannot keep what Python compiles. Nobody changes a source in an image.
"$home/bin/python" -m compileall -q -j 0 --invalidation-mode unchecked-hash .

# A base that lacks what their libraries need, as libstdc++, is refused here and not on a node; and so is a package that needs what was
# taken from it.
"$home/bin/python" -c 'import aiohttp, bcrypt, google.protobuf, grpc, h2, pynvml, sqlite3, ssl, yaml
import kubernetes.aio.client.api_client, kubernetes.aio.config.incluster_config, kubernetes.aio.config.kube_config'
if [ -d plotly ]; then "$home/bin/python" -c 'from exporter.service.responses import assets; assets()'; fi

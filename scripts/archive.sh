#!/bin/bash
# Packs the agent with its libraries for hosts without pip: dist/gpu-cost-exporter-<version>-linux-<machine>.tar.gz, for /opt.
#   ./scripts/archive.sh 3.11 3.12      # libraries for these Python versions and the architecture of this machine
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' exporter/__init__.py)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
home=$folder/gpu-cost-exporter

install() { "$python" -m pip --disable-pip-version-check --quiet install --no-compile --only-binary :all: "$@"; }

"$python" -m build --wheel --no-isolation --outdir "$folder/wheel" . > /dev/null
for one in "$@"; do
  install --require-hashes --python-version "$one" --target "$home/lib/$one" -r requirements/runtime.txt
  install --upgrade --no-deps --no-index --python-version "$one" --target "$home/lib/$one" "$folder"/wheel/*.whl
  # The program uses only credentials and transport of the Kubernetes client; the unused models and API classes take 100 MB.
  find "$home/lib/$one"/kubernetes{,/aio}/client/{api,models} -name '*.py' ! -name __init__.py -delete
  rm -rf "$home/lib/$one/bin"
done
mkdir -p "$home/bin" dist
cp deploy/archive/gpu-cost-exporter "$home/bin/"
cp -r LICENSE deploy/systemd deploy/slurm "$home/"
archive=dist/gpu-cost-exporter-$version-linux-$(uname -m).tar.gz
tar --create --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$(git log -1 --format=%ct)" --directory "$folder" gpu-cost-exporter \
  | gzip --no-name --best > "$archive"
echo "$archive  $(stat --format=%s "$archive") bytes, for Python $*"

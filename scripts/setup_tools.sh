#!/usr/bin/env bash
# Installs the tools of `make` that are missing: the virtual environment, Prometheus and Alertmanager, tools of the tests.
# Usage: scripts/setup_tools.sh venv PYTHON | demo | deploy | test
set -euo pipefail
cd "$(dirname "$0")/.."
tools=$PWD/.tools
export PATH=$tools/bin:$PATH DEBIAN_FRONTEND=noninteractive

skipped=0
# Downloads show their progress on a terminal only; otherwise only errors are shown.
quiet=-qq
[ -t 2 ] && quiet=-q=0
say() { echo "setup: $*" >&2; }
have() { command -v "$1" >/dev/null 2>&1; }
root() { [ "$(id -u)" = 0 ]; }

# refresh_lists: fetches the package lists at most once per run, as root only.
refresh_lists() {
  [ -n "${lists_fresh:-}" ] && return 0
  lists_fresh=1
  if root; then apt-get -qq update || say "apt-get update failed; continuing with the existing package lists"; fi
}

# apt_install PACKAGE...: installs packages as root; otherwise prints the missing packages and the command.
apt_install() {
  if ! have apt-get; then say "skipped: $* (no apt-get on this system; install it with the package manager)"; return 1; fi
  if ! root; then say "skipped: $* (not root; run: sudo apt-get install -y --no-install-recommends $*)"; return 1; fi
  apt-get -qq install -y --no-install-recommends "$@" >/dev/null 2>&1 && return 0
  refresh_lists
  apt-get -qq install -y --no-install-recommends "$@" >/dev/null || { say "skipped: $* (apt-get install failed)"; return 1; }
}

# apt_unpack PACKAGE: unpacks a package in .tools. An installation of Debian's prometheus would start services; unpacking
# starts none, and needs root only for missing package lists.
apt_unpack() {
  if ! have apt-get || ! have dpkg; then say "skipped: $1 (no apt-get on this system; install the program on the PATH)"; return 1; fi
  mkdir -p "$tools/packages" "$tools/root" "$tools/bin"
  say "downloading the package $1 ..."
  (cd "$tools/packages" && apt-get $quiet -o APT::Sandbox::User=root download "$1" >&2 2>/dev/null) || {
    refresh_lists
    (cd "$tools/packages" && apt-get $quiet -o APT::Sandbox::User=root download "$1" >&2) || {
      say "skipped: $1 (cannot be downloaded; run: sudo apt-get update && sudo apt-get install -y $1)"
      return 1
    }
  }
  dpkg -x "$tools/packages/$1"_*.deb "$tools/root"
}

# link PROGRAM [FOLDER]: links a program of a package in .tools/bin; FOLDER is its folder in the package, by default usr/bin.
link() { ln -sf "../root/${2:-usr/bin}/$1" "$tools/bin/$1"; }

make_venv() {
  local python=$1
  have "$python" || { say "$python not found; install Python 3.11 or later, or set its path: make PYTHON=/path/to/python3"; exit 1; }
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    say "$("$python" --version) is too old; expected: Python 3.11 or later; set another one: make PYTHON=python3.12"
    exit 1
  }
  say "creating the virtual environment .venv ..."
  "$python" -m venv .venv >/dev/null 2>&1 && return 0
  rm -rf .venv
  local version
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  apt_install "python$version-venv" || apt_install python3-venv || exit 1
  "$python" -m venv .venv
}

demo_tools() {
  if ! have prometheus || ! have promtool; then
    if apt_unpack prometheus; then link prometheus; link promtool; else skipped=1; fi
  fi
  if ! have prometheus-alertmanager && ! have alertmanager; then
    if apt_unpack prometheus-alertmanager; then link prometheus-alertmanager; link amtool; else skipped=1; fi
  fi
  into_system alertmanager default.tmpl || skipped=1
  prometheus_pages
}

# into_system PART FILE: copies an unpacked folder to the only path from which Debian's programs read it. Without its
# templates Alertmanager does not start; without its pages Prometheus has no web interface.
into_system() {
  local place=/usr/share/prometheus
  if [ -e "$place/$1/$2" ] || [ ! -e "$tools/root$place/$1/$2" ]; then return 0; fi
  if root; then mkdir -p "$place" && cp -rL "$tools/root$place/$1" "$place/"; return; fi
  say "skipped: $place/$1 (not root; run: sudo mkdir -p $place && sudo cp -rL $tools/root$place/$1 $place/)"
  return 1
}

# Scripts and styles of Prometheus' pages are in separate packages. The demo works without them.
prometheus_pages() {
  local package
  if [ -e /usr/share/prometheus/web/templates ] || [ ! -e "$tools/root/usr/share/prometheus/web" ]; then return 0; fi
  for package in fonts-glyphicons-halflings libjs-bootstrap4 libjs-d3 libjs-eonasdan-bootstrap-datetimepicker libjs-jquery \
      libjs-jquery-hotkeys libjs-moment libjs-moment-timezone libjs-mustache libjs-popper.js libjs-rickshaw; do
    apt_unpack "$package" || return 0
  done
  into_system web templates || true
}

# A real container runtime, unpacked only: this starts and installs no service.
container_tools() {
  if ! have containerd || ! have ctr || ! have containerd-shim-runc-v2; then
    if apt_unpack containerd; then link containerd; link ctr; link containerd-shim-runc-v2; else skipped=1; fi
  fi
  have runc || { apt_unpack runc && link runc usr/sbin; } || skipped=1
  if have runc && ! runc --version >/dev/null 2>&1; then apt_install libseccomp2 || skipped=1; fi
  # A busybox of the system can need libraries that the container of the test does not have.
  [ -x "$tools/bin/busybox" ] || { apt_unpack busybox-static && link busybox bin; } || skipped=1
}

# Additional versions of the tools that read the rules: links .tools/bin/PROGRAM-SUFFIX to programs of another Debian suite.
# The package lists of the suite are separate from those of the system, and no package is installed. .tools/unavailable lists
# each unavailable program with the reason, which the tests show.
# suite_tools SUITE SUFFIX PACKAGE PROGRAM...
suite_tools() {
  local suite=$1 suffix=$2 package=$3 program missing=() reason
  shift 3
  for program in "$@"; do
    if [ -x "$tools/bin/$program-$suffix" ]; then mark_available "$program-$suffix"; else missing+=("$program"); fi
  done
  [ "${#missing[@]}" = 0 ] && return 0
  if reason=$(unpack_from_suite "$suite" "$package" "${missing[@]}"); then
    for program in "${missing[@]}"; do
      ln -sf "../suites/$suite/root/usr/bin/$program" "$tools/bin/$program-$suffix"
      mark_available "$program-$suffix"
    done
    return 0
  fi
  skipped=1
  say "skipped: ${missing[*]} of Debian $suite ($reason)"
  for program in "${missing[@]}"; do
    mark_available "$program-$suffix"
    echo "$program-$suffix: $reason" >>"$tools/unavailable"
  done
}

mark_available() {
  [ -f "$tools/unavailable" ] || return 0
  sed -i "/^$1: /d" "$tools/unavailable"
}

# debian_mirror: prints the Debian mirror of this machine's apt, but not that of security updates, which has no other suites.
debian_mirror() {
  # The addresses that apt would fetch: other commands show a repository only after its lists were fetched.
  apt-get update --print-uris 2>/dev/null | sed -n "s,^'\(.*/debian\)/dists/.*,\1,p" | sort -u | head -n 1
}

# unpack_from_suite SUITE PACKAGE PROGRAM...: prints the reason of a failure in one line.
unpack_from_suite() {
  local suite=$1 package=$2 folder=$tools/suites/$1 keyring mirror program programs=() options
  shift 2
  keyring=$(ls /usr/share/keyrings/debian-archive-keyring.{pgp,gpg} 2>/dev/null | head -n 1)
  if ! have apt-get || ! have dpkg-deb; then echo "no apt-get on this system"; return 1; fi
  [ -n "$keyring" ] || { echo "package debian-archive-keyring is missing, which has the keys of Debian's packages"; return 1; }
  mirror=${DEBIAN_MIRROR:-$(debian_mirror)}
  [ -n "$mirror" ] || { echo "apt has no Debian mirror; set one: DEBIAN_MIRROR=<address>"; return 1; }
  mkdir -p "$folder/lists/partial" "$folder/cache/archives/partial" "$folder/packages" "$folder/root"
  echo "deb [signed-by=$keyring] $mirror $suite main" >"$folder/sources.list"
  options=(-qq -o "Dir::Etc::SourceList=$folder/sources.list" -o Dir::Etc::SourceParts=/dev/null -o "Dir::State=$folder"
    -o "Dir::State::Lists=$folder/lists" -o Dir::State::Status=/dev/null -o "Dir::Cache=$folder/cache" -o APT::Sandbox::User=
    -o Acquire::Languages=none -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false -o APT::Update::Error-Mode=any
    -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20 -o Acquire::Retries=1)
  if [ ! -e "$folder/lists_read" ]; then  # once per run, also after a failure: a mirror that does not respond costs 20 s
    touch "$folder/lists_read"
    apt-get "${options[@]}" update >"$folder/lists_log" 2>&1 || true
  fi
  (cd "$folder/packages" && apt-get "${options[@]}" download "$package") >"$folder/log" 2>&1 || {
    echo "package $package cannot be downloaded: $(grep -h -m 1 '^[EW]:' "$folder/lists_log" "$folder/log" | head -n 1)"
    return 1
  }
  for program in "$@"; do programs+=("./usr/bin/$program"); done
  dpkg-deb --fsys-tarfile "$folder/packages/$package"_*.deb | tar -x -C "$folder/root" "${programs[@]}" 2>"$folder/log" || {
    echo "package $package of Debian $suite has no $*"
    return 1
  }
  dpkg-deb -f "$folder/packages/$package"_*.deb Version >"$folder/root/$package.version"
  rm -rf "$folder/packages/$package"_*.deb
  for program in "$@"; do
    ldd "$folder/root/usr/bin/$program" 2>&1 | grep -q 'not found' && {
      echo "$program of Debian $suite needs newer libraries than this system has"
      return 1
    }
  done
  return 0
}

# Versions for the rule tests: the oldest supported Prometheus and vmalert, and newer ones.
rules_tools() {
  rm -f "$tools"/suites/*/lists_read
  case "$(promtool --version 2>&1)" in *"version 2.42."*) ;; *) suite_tools bookworm 2.42 prometheus prometheus promtool ;; esac
  suite_tools trixie 2.53 promtool promtool
  suite_tools trixie 2.53 prometheus prometheus
  suite_tools trixie 1.112 victoria-metrics vmalert vmalert-tool victoria-metrics
  suite_tools forky 3 promtool promtool
  suite_tools forky 3 prometheus prometheus
  suite_tools forky new victoria-metrics vmalert vmalert-tool victoria-metrics
  rm -rf "$tools"/suites/*/{lists,lists_read,cache}
}

# Grafana's published types, and a compiler that checks the dashboards against them, in the versions of the lock file.
schema_tools() {
  local place=$tools/grafana_schema
  cmp -s tests/grafana_schema/package-lock.json "$place/node_modules/.lock" && return 0
  have npm || apt_install npm || return 1
  mkdir -p "$place" && cp tests/grafana_schema/package.json tests/grafana_schema/package-lock.json "$place/"
  npm --prefix "$place" ci --ignore-scripts --no-audit --no-fund >/dev/null 2>&1 || {
    say "skipped: Grafana's types (npm ci failed in $place)"
    return 1
  }
  cp tests/grafana_schema/package-lock.json "$place/node_modules/.lock"
}

# Tools that check the manifests: helm, and schemas of custom resources. requirements/dev.txt contains hadolint.
helm_version=v3.17.3
prometheus_operator_version=v0.85.0

deploy_tools() {
  mkdir -p "$tools/bin"
  if [ -x .venv/bin/helm ]; then ln -sf ../../.venv/bin/helm "$tools/bin/helm"; fi
  if ! have helm; then
    say "building helm $helm_version, because no package for this machine exists; this takes minutes"
    go_program helm.sh/helm/v3/cmd/helm "$helm_version" || skipped=1
  fi
  manifest_schemas || skipped=1
  compose_schema || skipped=1
}

# go_program PACKAGE VERSION: builds a program in .tools/bin.
go_program() {
  if ! have go; then say "skipped: ${1##*/} (Go not found; install Go, or install ${1##*/} on the PATH)"; return 1; fi
  GOBIN=$tools/bin GOFLAGS= go install "$1@$2" || { say "skipped: ${1##*/} (go install $1@$2 failed)"; return 1; }
}

# The schemas of the Prometheus operator's kinds, from the CRDs in its Go module.
manifest_schemas() {
  local module=github.com/prometheus-operator/prometheus-operator folder kind crds=()
  folder=$(cd "$tools" && GOFLAGS= go mod download -json "$module@$prometheus_operator_version" 2>/dev/null |
    sed -n 's/^\t"Dir": "\(.*\)",$/\1/p') && [ -n "$folder" ] || {
    say "skipped: schemas of PodMonitor, ServiceMonitor and PrometheusRule (go mod download $module failed, or Go not found)"
    return 1
  }
  for kind in podmonitors servicemonitors prometheusrules; do
    crds+=("$folder/example/prometheus-operator-crd/monitoring.coreos.com_$kind.yaml")
  done
  rm -rf "$tools/schemas"
  .venv/bin/python scripts/schemas.py "$tools/schemas" "${crds[@]}" || {
    say "skipped: schemas of PodMonitor, ServiceMonitor and PrometheusRule (scripts/schemas.py failed)"
    return 1
  }
}

# The schema of compose files, published in the Go module of the parser.
compose_schema() {
  local module=github.com/compose-spec/compose-go/v2@v2.16.2 folder
  [ -e "$tools/compose-spec.json" ] && return 0
  if have go && folder=$(cd "$tools" && GOFLAGS= go mod download -json "$module" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p') &&
      [ -n "$folder" ]; then
    install -m 0644 "$folder/schema/compose-spec.json" "$tools/compose-spec.json"
    return
  fi
  say "skipped: the schema of compose files (go mod download $module failed, or Go not found)"
  return 1
}

# Tools that build and run the image. Their recommended packages contain services and network tools, which are not needed.
image_tools() {
  if ! have podman || ! have buildah || ! have runc; then apt_install podman buildah runc || return 1; fi
  image_base
}

# A substitute for the base image, because tests use no registry: Python, a shell and their dependencies from packages of this
# system, without documentation, in .tools/image_base/base.tar. Nothing is installed.
image_base() {
  local place=$tools/image_base
  local packages=(python3-venv dash coreutils findutils grep sed base-files base-passwd libc-bin libstdc++6 tzdata)
  [ -e "$place/base.tar" ] && return 0
  if ! have apt-get || ! have dpkg; then say "skipped: the substitute for the base image (no apt-get on this system)"; return 1; fi
  rm -rf "$place" && mkdir -p "$place/archives/partial" "$place/root"
  image_packages "$place" "${packages[@]}" 2>/dev/null || { refresh_lists; image_packages "$place" "${packages[@]}"; } || {
    say "skipped: the substitute for the base image (cannot download ${packages[*]})"
    return 1
  }
  local package
  for package in "$place"/archives/*.deb; do dpkg -x "$package" "$place/root"; done
  cp "$place/root/usr/share/base-passwd/passwd.master" "$place/root/etc/passwd"
  cp "$place/root/usr/share/base-passwd/group.master" "$place/root/etc/group"
  rm -rf "$place/archives" "$place/root/usr/share/"{doc,man,info,locale,lintian}
  tar -C "$place/root" --owner=0 --group=0 --numeric-owner --sort=name -cf "$place/base.part" .
  rm -rf "$place/root" && mv "$place/base.part" "$place/base.tar"
}

# image_packages FOLDER PACKAGE...: downloads packages with all dependencies, as for a system without packages.
image_packages() {
  local place=$1
  shift
  apt-get -qq -o Dir::State::status=/dev/null -o "Dir::Cache::archives=$place/archives" -o APT::Sandbox::User=root \
    -o Debug::NoLocking=1 install -y --download-only --no-install-recommends "$@"
}

test_tools() {
  image_tools || skipped=1
  container_tools
  rules_tools
  schema_tools || skipped=1
  have openssl || apt_install openssl || skipped=1
  # systemd-analyze checks the unit; no service is started.
  have systemd-analyze || apt_install systemd || skipped=1
  have chromium || have chromium-browser || have google-chrome || apt_install chromium || skipped=1
  have cc || apt_install gcc libc6-dev || skipped=1
  if ! have kubectl && ! have kustomize; then
    if have go; then
      mkdir -p "$tools/bin"
      GOBIN=$tools/bin GOFLAGS= go install sigs.k8s.io/kustomize/kustomize/v5@v5.7.1 || {
        say "skipped: kustomize (go install failed)"
        skipped=1
      }
    else
      say "skipped: kustomize (neither kubectl nor Go found; install one of them for the deployment tests)"
      skipped=1
    fi
  fi
}

# done_with NAME: creates the file that marks a complete installation for make, unless a tool was skipped.
done_with() {
  [ "$skipped" = 0 ] || return 0
  mkdir -p "$tools"
  touch "$tools/.$1"
}

case "${1:-}" in
  venv) make_venv "${2:-python3}" ;;
  demo) demo_tools; done_with demo ;;
  deploy) deploy_tools; done_with deploy ;;
  test) test_tools; done_with test ;;
  *) say "usage: $0 venv PYTHON | demo | deploy | test"; exit 2 ;;
esac

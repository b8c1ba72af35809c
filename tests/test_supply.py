"""Release artefacts: reproducible, without extra files, with parts listed, licensed, pinned and audited."""

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from agent_support import ROOT, answering
from files_support import bill_problem, read_yaml
from packaging.utils import canonicalize_name

from exporter import __version__

sys.path.insert(0, str(ROOT / "scripts"))

import audit
import pins
import release
import sbom

# May be distributed with this program, Apache-2.0, unchanged; each name as in its package.
ALLOWED_LICENCES = {
    "Apache-2.0",
    "MIT",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSD License",  # jinja2, nvidia-ml-py: three clauses, a number that their classifier lacks
    "ISC",
    "PSF-2.0",
    "MPL-2.0",  # certifi: a list of certificates, unchanged
}
EPOCH = "1700000000"


def script(name: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / f"{name}.py"), *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the last commit with `make dist`."""
    folder = tmp_path_factory.mktemp("dist") / "out"
    release.make("HEAD", folder)
    return folder


def in_commit(folder: str) -> set[str]:
    listed = subprocess.run(
        ["git", "ls-tree", "-r", "--name-only", "HEAD", folder], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return set(listed.stdout.splitlines())


def test_builds_of_a_commit_are_reproducible_in_any_environment(dist: Path) -> None:
    # A failure would have raised an exception; the checksums are those of these files.
    sums = dict(reversed(line.split("  ")) for line in (dist / "SHA256SUMS").read_text(encoding="utf-8").splitlines())
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in dist.iterdir()}
    del files["SHA256SUMS"]
    assert sums == files
    assert set(files) == {
        f"gpu_cost_exporter-{__version__}-py3-none-any.whl",
        f"gpu_cost_exporter-{__version__}.tar.gz",
        f"gpu-cost-exporter-{__version__}.cdx.json",
    }


@pytest.mark.parametrize("other", [{"a.whl": b"2"}, {}, {"a.whl": b"1", "b.whl": b"1"}])
def test_differing_build_is_not_released(tmp_path: Path, other: dict[str, bytes]) -> None:
    builds = []
    for number, files in enumerate(({"a.whl": b"1"}, other)):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        builds.append(sorted(folder.iterdir()))
    with pytest.raises(release.BuildError, match=r"^[ab]\.whl: two builds of the same commit differ$"):
        release.compare(*builds)
    release.compare(builds[0], builds[0])


def test_wheel_contains_exactly_the_program_and_its_data(dist: Path) -> None:
    (path,) = dist.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        metadata = wheel.read(f"gpu_cost_exporter-{__version__}.dist-info/METADATA").decode()
    own = f"gpu_cost_exporter-{__version__}.dist-info"
    about = {"METADATA", "WHEEL", "entry_points.txt", "licenses/LICENSE", "RECORD"}
    simulator = {name.removeprefix("simulator/") for name in in_commit("simulator/")}
    assert names == in_commit("exporter/") | simulator | {f"{own}/{name}" for name in about}
    assert "exporter/py.typed" in names
    assert f"\nVersion: {__version__}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata


def test_sdist_contains_the_wheel_sources_rules_and_dashboards(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        members = archive.getmembers()
    names = {member.name.partition("/")[2] for member in members if member.isfile()}
    top = {name for name in names if not name.startswith(("exporter/", "simulator/"))}
    assert names - top == in_commit("exporter/") | in_commit("simulator/")
    assert {"PKG-INFO", "pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "rules/prometheus-rules.yaml"} <= top
    assert not [name for name in top if name.startswith(("tests", "docs", "deploy", "benchmarks", "requirements"))]
    assert {(member.uid, member.gid, member.uname, member.gname) for member in members} == {(0, 0, "", "")}
    assert {member.mode for member in members} == {0o644}


def test_version_is_defined_once_and_used_everywhere() -> None:
    paths = [path for path in sorted(in_commit(".")) if is_text(path) and (ROOT / path).is_file()]
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in paths}
    assert [path for path, text in texts.items() if re.search(r"^__version__\s*=", text, re.MULTILINE)] == [
        "exporter/__init__.py"
    ]
    chart = read_yaml(texts["deploy/helm/gpu-cost-exporter/Chart.yaml"])
    named = re.compile(r"gpu-cost-exporter(?:-service)?[:-](?:\$\{VERSION:-)?(\d+\.\d+\.\d+)|newTag:\s*(\d+\.\d+\.\d+)")
    shown = {
        (path, "".join(found))
        for path, text in texts.items()
        if path.startswith(("deploy/", "docs/", "README"))
        # The packaged chart has the chart's own version.
        for found in named.findall(text.replace(f"gpu-cost-exporter-{chart['version']}.tgz", ""))
    } | {("deploy/helm/gpu-cost-exporter/Chart.yaml", chart["appVersion"])}
    assert len(shown) > 5
    assert {one for one in shown if one[1] != __version__} == set()
    assert importlib.metadata.version("gpu-cost-exporter") == __version__


def is_text(path: str) -> bool:
    return path.endswith((".py", ".md", ".yaml", ".toml", ".json", ".sh")) or path in {"Makefile", "Dockerfile"}


# The bill of materials.


def test_sbom_is_valid_and_lists_pinned_packages_with_licences_and_hashes(dist: Path) -> None:
    text = (dist / f"gpu-cost-exporter-{__version__}.cdx.json").read_text(encoding="utf-8")
    assert bill_problem(text) is None
    bill = json.loads(text)
    expected = pins.read(ROOT / "requirements" / "runtime.txt")
    listed = {one["name"]: one for one in bill["components"]}
    assert {name: one["version"] for name, one in listed.items()} == {
        name: pin.version for name, pin in expected.items() if pin.here
    }
    for found, one in listed.items():
        assert one["purl"] == f"pkg:pypi/{found}@{one['version']}"
        (reference,) = one["externalReferences"]
        assert [entry["content"] for entry in reference["hashes"]] == list(expected[found].hashes)
    (wheel,) = dist.glob("*.whl")
    subject = bill["metadata"]["component"]
    assert subject["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}]
    assert (subject["type"], subject["version"]) == ("application", __version__)
    edges = {one["ref"]: one["dependsOn"] for one in bill["dependencies"]}
    assert reached(subject["purl"], edges) == {subject["purl"], *(one["purl"] for one in listed.values())}


def reached(start: str, edges: dict[str, list[str]]) -> set[str]:
    found, ahead = set(), [start]
    while ahead:
        if (one := ahead.pop()) not in found:
            found.add(one)
            ahead += edges[one]
    return found


def test_sbom_is_deterministic_and_dated_by_the_commit() -> None:
    words = ("--pins", str(ROOT / "requirements" / "runtime.txt"))
    first, second = (script("sbom", *words, SOURCE_DATE_EPOCH=EPOCH, PYTHONHASHSEED=seed).stdout for seed in "12")
    assert first == second
    assert json.loads(first)["metadata"]["timestamp"] == "2023-11-14T22:13:20Z"
    other = json.loads(script("sbom", "--pins", str(ROOT / "requirements" / "build.txt")).stdout)
    assert "timestamp" not in other["metadata"]
    assert other["serialNumber"] != json.loads(first)["serialNumber"]


def test_cyclonedx_tool_reports_the_same_packages_and_licences(dist: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "cyclonedx_py",
        "environment",
        "--output-reproducible",
        "--no-validate",
        sys.executable,
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    theirs = {canonicalize_name(one["name"]): one for one in json.loads(done.stdout)["components"]}
    bill = json.loads((dist / f"gpu-cost-exporter-{__version__}.cdx.json").read_text(encoding="utf-8"))
    for one in bill["components"]:
        other = theirs[one["name"]]
        assert one["version"] == other["version"]
        assert one["purl"] == other["purl"]
        if said := other.get("licenses"):
            assert licences(one) == licences({"licenses": [known(said[0])]}), one["name"]


def known(said: dict[str, Any]) -> dict[str, Any]:
    """Return a licence of the other tool by the name in ours."""
    if "expression" in said or "id" in said["license"]:
        return said
    name = said["license"]["name"]
    return {"license": {"name": sbom.SPDX.get(name, name.rpartition(" :: ")[2])}}


def licences(component: dict[str, Any]) -> list[str]:
    """Return the licences of a component, each by its name."""
    (said,) = component["licenses"]
    if "expression" in said:
        return [str(name) for name in re.split(r" (?:AND|OR) ", said["expression"])]
    return [str(said["license"].get("id") or said["license"]["name"])]


def test_every_licence_is_allowed(dist: Path) -> None:
    bill = json.loads((dist / f"gpu-cost-exporter-{__version__}.cdx.json").read_text(encoding="utf-8"))
    found = {one["name"]: set(licences(one)) for one in bill["components"]}
    assert {name: names - ALLOWED_LICENCES for name, names in found.items() if names - ALLOWED_LICENCES} == {}
    assert set.union(*found.values()) == ALLOWED_LICENCES, "the list has an unused licence"


def test_sbom_of_unpinned_packages_is_not_written(tmp_path: Path) -> None:
    text = (ROOT / "requirements" / "runtime.txt").read_text(encoding="utf-8")
    lists = tmp_path / "runtime.txt"
    lists.write_text(re.sub(r"^aiohttp==\S+", "aiohttp==3.0.0", text, flags=re.MULTILINE), encoding="utf-8")
    done = script("sbom", "--pins", str(lists))
    assert (done.returncode, done.stdout) == (1, "")
    assert "sbom: aiohttp 3.0.0 is pinned, but not installed" in done.stderr


STATUS = """Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.36-9+deb12u13
Description: GNU C Library
 Package: not-a-field

Package: libstdc++6
Status: install ok installed
Architecture: amd64
Version: 1:12.2.0-14~x
Description: more

Package: removed
Status: deinstall ok config-files
Architecture: all
Version: 1
"""


def test_sbom_of_a_debian_base_lists_every_installed_package(tmp_path: Path) -> None:
    (tmp_path / "var/lib/dpkg").mkdir(parents=True)
    (tmp_path / "etc").mkdir()
    (tmp_path / "var/lib/dpkg/status").write_text(STATUS, encoding="utf-8")
    (tmp_path / "etc/os-release").write_text('NAME="Debian"\nID=debian\nVERSION_ID="12"\n', encoding="utf-8")
    done = script("sbom", "--pins", str(ROOT / "requirements" / "runtime.txt"), "--base", str(tmp_path))
    assert bill_problem(done.stdout) is None
    listed = [one["purl"] for one in json.loads(done.stdout)["components"] if not one["purl"].startswith("pkg:pypi/")]
    assert listed == [
        f"pkg:generic/python@{platform.python_version()}",
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u13?arch=amd64&distro=debian-12",
        "pkg:deb/debian/libstdc%2B%2B6@1%3A12.2.0-14~x?arch=amd64&distro=debian-12",
    ]


# Pins.


def test_installed_packages_match_the_pins() -> None:
    done = script("pins")
    assert (done.stdout, done.returncode) == ("", 0)


HASH = "--hash=sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("aiohttp>=3", "'aiohttp>=3' is not pinned to one version"),
        ("aiohttp==3.*", "'aiohttp==3.*' is not pinned to one version"),
        ("aiohttp==3.1", "aiohttp has no sha256"),
        ("aiohttp==3.1 --hash=md5:00", "aiohttp has no sha256, or a hash of another kind"),
        (f"aiohttp @ https://example.org/a.whl {HASH}", "is not pinned to one version"),
        (f"https://example.org/a.whl {HASH}", "is not a requirement by name"),
        (f"./a.whl {HASH}", "is not a requirement by name"),
        (f"aiohttp==3.1 {HASH}\naiohttp==3.1 {HASH}", "aiohttp appears twice"),
    ],
)
def test_unpinned_line_is_reported(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "runtime.txt"
    path.write_text(f"{line}\n", encoding="utf-8")
    with pytest.raises(pins.PinError, match=re.escape(said)):
        pins.read(path)


def test_inconsistent_missing_and_leftover_pins_are_reported(tmp_path: Path) -> None:
    lists = {
        "build": f"hatchling==1.0 {HASH}",
        "runtime": f"pynvml==12.0 {HASH}",
        "dev": f"hatchling==2.0 {HASH}\nruff==1.0 {HASH}\nhelm==1.0 ; sys_platform == 'plan9' {HASH}",
    }
    for name, text in lists.items():
        (tmp_path / f"{name}.txt").write_text(f"{text}\n", encoding="utf-8")
    installed = {"hatchling": "1.0", "pynvml": "11.0", "leftover": "0.1", "gpu-cost-exporter": __version__}
    assert [*pins.findings(tmp_path, installed, {"runtime": ["pynvml>=13", "aiohttp>=3"]})] == [
        "runtime.txt: pynvml is not the intended package; use nvidia-ml-py",
        "runtime.txt: 'pynvml>=13' is required, but 12.0 is pinned; run: make requirements",
        "runtime.txt: 'aiohttp>=3' is required, but nothing is pinned; run: make requirements",
        "dev.txt: hatchling 2.0, in another list 1.0; run: make requirements",
        "installed: pynvml 11.0, pinned 12.0; run: make install",
        "installed: ruff is missing, pinned 1.0; run: make install",
        "installed: leftover 0.1 is not pinned; remove it, or add it to requirements/",
    ]


# The audit, by pip-audit itself, of a server that answers like OSV.

Known = dict[tuple[str, str], tuple[str, tuple[str, ...], str]]
KNOWN: Known = {("jinja2", "3.1.0"): ("GHSA-h5c8-rqwp-cp95", ("CVE-2024-22195",), "3.1.3")}


def vulnerability(name: str, found: tuple[str, tuple[str, ...], str]) -> dict[str, object]:
    identifier, aliases, fixed_in = found
    events = [{"introduced": "0"}, {"fixed": fixed_in}]
    affected = {"package": {"name": name, "ecosystem": "PyPI"}, "ranges": [{"type": "ECOSYSTEM", "events": events}]}
    return {
        "id": identifier,
        "aliases": list(aliases),
        "summary": "what it is",
        "schema_version": "1.6.0",
        "modified": "2024-01-11T00:00:00Z",
        "published": "2024-01-11T00:00:00Z",
        "affected": [affected],
    }


@contextmanager
def osv(known: Known, status: int = 200) -> Iterator[str]:
    """Serve these vulnerabilities; yield the address."""

    class Query(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            name = asked["package"]["name"]
            assert asked["package"]["ecosystem"] == "PyPI"
            found = known.get((name, asked["version"]))
            body = json.dumps({"vulns": [vulnerability(name, found)]} if found else {}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with answering(Query) as address:
        yield f"http://{address}/v1/query"


def test_audit_queries_every_pinned_package_and_reports_no_findings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with osv(KNOWN) as url:
        assert audit.main(["--osv-url", url]) == 0
    names = {
        name for one in pins.LISTS for name, pin in pins.read(ROOT / "requirements" / f"{one}.txt").items() if pin.here
    }
    assert capsys.readouterr().out == f"audit: {url} checked {len(names)} packages, findings: 0\n"


def test_audit_fails_on_a_finding_and_shows_the_fixed_version(capsys: pytest.CaptureFixture[str]) -> None:
    version = pins.read(ROOT / "requirements" / "runtime.txt")["aiohttp"].version
    found = {("aiohttp", version): ("GHSA-0000-0000-0000", ("CVE-2026-0001",), "99.0")}
    with osv(KNOWN | found) as url:
        assert audit.main(["--osv-url", url, str(ROOT / "requirements" / "runtime.txt")]) == 1
    said = capsys.readouterr().out
    assert f"\naudit: aiohttp {version}: CVE-2026-0001, GHSA-0000-0000-0000; fixed in 99.0: make requirements " in said


def test_accepted_finding_passes_and_an_obsolete_acceptance_fails() -> None:
    finding = audit.Finding(name="a", version="1", ids=("GHSA-1", "CVE-1"), fixed_in=())
    answer = audit.Answer(findings=(finding,), unknown=(), asked=1)
    assert [*audit.judged(answer, {"CVE-1": "its code is not reached"})] == []
    assert [*audit.judged(answer, {})] == [
        "a 1: GHSA-1, CVE-1; no version fixes it: make requirements UPGRADE=--upgrade"
    ]
    none = audit.Answer(findings=(), unknown=("b",), asked=1)
    assert [*audit.judged(none, {"CVE-1": "its code is not reached"})] == [
        "b: unknown to the service; its vulnerabilities are unknown",
        "CVE-1: accepted in scripts/audit.py, but no longer reported; remove it",
    ]


@pytest.mark.parametrize(
    ("status", "known", "reason"),
    [
        (200, {}, "it reports no vulnerability of jinja2==3.1.0, which has known ones"),
        (503, KNOWN, "503"),
    ],
)
def test_audit_with_an_empty_or_failing_service_is_reported_as_not_done(
    capsys: pytest.CaptureFixture[str], status: int, known: Known, reason: str
) -> None:
    lists = str(ROOT / "requirements" / "build.txt")
    with osv(known, status) as url:
        assert audit.main(["--osv-url", url, lists]) == 0
        said = capsys.readouterr().out
        assert said.startswith(f"audit: not checked: {url}: ")
        assert reason in said
        assert said.endswith("; run `make audit` with access to one of them\n")


def test_check_continues_without_an_audit_service_and_required_audit_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with osv({}) as url:
        pass
    lists = str(ROOT / "requirements" / "build.txt")
    assert audit.main(["--osv-url", url, lists]) == 0
    assert ": Failed to establish a new connection: [Errno 111] Connection refused; run" in capsys.readouterr().out
    # The index is another server, which is not under test.
    monkeypatch.setattr(audit, "withdrawn", lambda _: iter(()))
    assert audit.main(["--osv-url", url, "--required", lists]) == 1
    assert "audit: vulnerabilities of the pinned packages are unknown\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("base", "is_built"),
    [
        ("", True),
        ("python:3.13-slim-bookworm", False),
        ("python:3.13-slim-bookworm@sha256:abc", False),
        ("mirror.example.org/python@sha256:" + "0123456789abcdef" * 4, True),
    ],
)
def test_release_image_requires_the_digest_of_its_base(base: str, is_built: bool) -> None:  # noqa: FBT001 - a case
    command = ["make", "-C", str(ROOT), "image", "RELEASE=1", "BUILDER=echo", f"BASE_IMAGE={base}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == is_built, done
    assert ("BASE_IMAGE=" in done.stdout, f"BASE_IMAGE={base} " in done.stdout) == (bool(base) and is_built,) * 2
    assert is_built or "has no digest" in done.stderr


RELEASE = ROOT / ".github" / "workflows" / "release.yaml"


def test_the_release_pins_every_action_and_names_no_registry() -> None:
    text = RELEASE.read_text(encoding="utf-8")
    used = re.findall(r"uses: (\S+)@(\S+) # v\d+\.\d+\.\d+$", text, re.MULTILINE)
    assert len(used) == text.count("uses: ") > 0
    assert all(re.fullmatch(r"[0-9a-f]{40}", commit) for _, commit in used)
    assert not re.findall(r"[\w-]+\.io\b", text)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"run: make ([a-z]+)", text)) == {"dist", "archive"} <= targets


def test_published_chart_has_the_image_registry_as_default(tmp_path: Path) -> None:
    steps = read_yaml(RELEASE.read_text(encoding="utf-8"))["jobs"]["publish"]["steps"]
    (run,) = (step["run"] for step in steps if step.get("name", "").startswith("Chart"))
    shutil.copytree(ROOT / "deploy" / "helm", tmp_path / "deploy" / "helm")
    env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "REGISTRY": "registry.example.org"}
    env |= {"REPOSITORY": "owner/gpu-cost-exporter", "VERSION": __version__}
    script = run.partition("helm package")[0]
    assert "helm template" in script
    done = subprocess.run(["bash", "-ec", script], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("libraries", "code"), [(("3.0", f"3.{sys.version_info.minor}"), 0), (("3.0",), 1)])
def test_archive_program_selects_a_python_with_its_libraries(
    tmp_path: Path, libraries: tuple[str, ...], code: int
) -> None:
    (tmp_path / "bin").mkdir()
    program = shutil.copy(ROOT / "deploy" / "archive" / "gpu-cost-exporter", tmp_path / "bin")
    for version in libraries:
        (tmp_path / "lib" / version).mkdir(parents=True)
        (tmp_path / "lib" / version / "exporter").symlink_to(ROOT / "exporter")
    env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    done = subprocess.run([program, "--version"], env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == code
    assert done.stdout == (f"gpu-cost-exporter {__version__}\n" if code == 0 else "")
    assert ("no supported Python on the PATH; expected: python3.0;" in done.stderr) is (code == 1)

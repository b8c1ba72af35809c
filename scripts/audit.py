"""Checks pinned packages: known vulnerabilities from a public service, withdrawn versions from the index."""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pins import LISTS, ROOT

# A version with known vulnerabilities. A service that reports none for it, such as a mirror of an index, is not usable.
CONTROL = "jinja2==3.1.0"
# Accepted findings: id, and the reason why it has no effect here. Remove a finding that is no longer reported.
ACCEPTED: dict[str, str] = {}
HOSTS = {"osv": "api.osv.dev", "pypi": "pypi.org"}
TIMEOUT_SECONDS = 5
_LONGEST = 160
# Prefix of the HTTP library before the cause.
_CONNECTION = re.compile(r"""\w+\(["']?(?:HTTPS?Connection(?:Pool)?\(.*?\)|<.*?>): """)
_CLOSING = re.compile(r"""["']\)+$""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A known vulnerability of a pinned version."""

    name: str
    version: str
    ids: tuple[str, ...]
    fixed_in: tuple[str, ...]

    def __str__(self) -> str:
        """Return the finding as one line."""
        fix = f"fixed in {' or '.join(self.fixed_in)}" if self.fixed_in else "no version fixes it"
        return f"{self.name} {self.version}: {', '.join(self.ids)}; {fix}: make requirements UPGRADE=--upgrade"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of a service about a list: findings, unknown packages, and the number of packages."""

    findings: tuple[Finding, ...]
    unknown: tuple[str, ...]
    asked: int


class UnansweredError(Exception):
    """A service is unreachable, or its response is invalid; the message has the reason."""


def ask(service: str, lists: Sequence[Path], words: Sequence[str]) -> Answer:
    """Return the findings of a service for these lists, from pip-audit.

    Raises:
        UnansweredError: The service gives no response.
    """
    requirements = [word for path in lists for word in ("--requirement", str(path))]
    command = [sys.executable, "-m", "pip_audit", "--vulnerability-service", service, "--disable-pip", *requirements]
    command += ["--format", "json", "--aliases", "on", "--progress-spinner", "off", "--timeout", str(TIMEOUT_SECONDS)]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError) as error:
        raise UnansweredError(_reason(done)) from error
    return Answer(
        findings=tuple(
            Finding(
                name=package["name"],
                version=package["version"],
                ids=tuple(dict.fromkeys([found["id"], *found["aliases"]])),
                fixed_in=tuple(found["fix_versions"]),
            )
            for package in packages
            for found in package.get("vulns", ())
        ),
        unknown=tuple(package["name"] for package in packages if "skip_reason" in package),
        asked=len(packages),
    )


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last message of a program; of a failed connection its cause."""
    lines = done.stderr.strip().splitlines()
    telling = [line for line in lines if ": " in line and not line.startswith(" ")] or lines
    last = telling[-1] if telling else f"ended with {done.returncode}"
    cause = last.rpartition("(Caused by ")[2]
    return _CLOSING.sub("", _CONNECTION.sub("", cause))[:_LONGEST]


def control(service: str, words: Sequence[str]) -> None:
    """Check that the service reports a version with known vulnerabilities.

    Raises:
        UnansweredError: The service reports no vulnerability.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "control.txt"
        path.write_text(f"{CONTROL}\n", encoding="utf-8")
        if not ask(service, [path], [*words, "--no-deps"]).findings:
            raise UnansweredError(f"it reports no vulnerability of {CONTROL}, which has known ones")


def judged(answer: Answer, accepted: dict[str, str]) -> Iterator[str]:
    """Yield the lines that fail the audit."""
    seen = set()
    for finding in answer.findings:
        known = accepted.keys() & set(finding.ids)
        seen |= known
        if not known:
            yield str(finding)
    for name in answer.unknown:
        yield f"{name}: unknown to the service; its vulnerabilities are unknown"
    for one in sorted(accepted.keys() - seen):
        yield f"{one}: accepted in scripts/audit.py, but no longer reported; remove it"


def withdrawn(lists: Sequence[Path]) -> Iterator[str]:
    """Yield the pinned versions that were withdrawn from the index.

    Raises:
        UnansweredError: The index gives no response.
    """
    seen = set()
    for path in lists:
        words = [
            "install",
            "--dry-run",
            "--no-deps",
            "--ignore-installed",
            "--require-hashes",
            "--quiet",
            "--report",
            "-",
        ]
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words, "--requirement", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UnansweredError(_reason(done))
        for one in json.loads(done.stdout)["install"]:
            if one["is_yanked"]:
                seen.add(f"{one['metadata']['name']} {one['metadata']['version']}: withdrawn from the index")
    yield from sorted(seen)


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--required", action="store_true", help="fail if no service responds; check the index, too")
    parser.add_argument("--osv-url", help="query only this address, with the API of https://api.osv.dev/v1/query")
    default = [ROOT / "requirements" / f"{name}.txt" for name in LISTS]
    parser.add_argument("lists", nargs="*", type=Path, default=default, help="requirements files; default: all")
    return parser.parse_args(words)


def vulnerabilities(lists: Sequence[Path], osv_url: str | None) -> list[str]:
    """Return the lines that fail the audit, from the first service that answers.

    Raises:
        UnansweredError: No service responds.
    """
    words = ["--osv-url", osv_url] if osv_url else []
    silent = []
    for service in ("osv",) if osv_url else HOSTS:
        name = osv_url or HOSTS[service]
        try:
            control(service, words)
            answer = ask(service, lists, [*words, "--require-hashes"])
        except UnansweredError as error:
            silent.append(f"{name}: {error}")
            continue
        found = [*judged(answer, ACCEPTED)]
        print(f"audit: {name} checked {answer.asked} packages, findings: {len(found)}")
        return found
    raise UnansweredError("; ".join(silent))


def main(words: Sequence[str] | None = None) -> int:
    """Exit with 1 for a finding, and with ``--required`` if no service responds."""
    given = arguments(words)
    found = []
    try:
        found += vulnerabilities(given.lists, given.osv_url)
    except UnansweredError as error:
        print(f"audit: not checked: {error}; run `make audit` with access to one of them")
        found += ["vulnerabilities of the pinned packages are unknown"] if given.required else []
    if given.required:
        try:
            found += withdrawn(given.lists)
        except UnansweredError as error:
            found.append(f"the index was not checked for withdrawn versions: {error}")
    for line in found:
        print(f"audit: {line}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

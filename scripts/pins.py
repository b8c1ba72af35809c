"""Reads the pinned requirements and, run by itself, holds the environment to them: nothing of it asks a network."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LISTS = ("build", "runtime", "dev")
OWN = "gpu-cost-exporter"
# Packages that were given up, forked, or are named so that they are taken for another; each with what is meant.
MEANT = {
    "grpc": "grpcio",
    "jinja": "jinja2",
    "kubernetes-asyncio": "kubernetes, which has kubernetes.aio",
    "nvidia-ml-py3": "nvidia-ml-py",
    "prometheus": "prometheus-client",
    "py-bcrypt": "bcrypt",
    "py3nvml": "nvidia-ml-py",
    "pynvml": "nvidia-ml-py",
    "yaml": "pyyaml",
}
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


class PinError(ValueError):
    """A line that pins nothing; the message has the line and the fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """One line of a requirements file: exactly one version, and the sha256 of every file that it may be."""

    name: str
    version: str
    hashes: tuple[str, ...]
    here: bool
    """Whether it is for this platform and Python."""


def read(path: Path) -> dict[str, Pin]:
    """Every pin of a file by its canonical name.

    Raises:
        PinError: A line is no ``name==version`` with hashes, or a name stands twice.
    """
    pins: dict[str, Pin] = {}
    for line in _lines(path.read_text(encoding="utf-8")):
        pin = _pin(line, path.name)
        if pin.name in pins:
            raise PinError(f"{path.name}: {pin.name} stands twice; run: make requirements")
        pins[pin.name] = pin
    return pins


def _lines(text: str) -> Iterator[str]:
    """Lines with their continuations, without comments."""
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            yield line.strip()


def _pin(line: str, file: str) -> Pin:
    words, *_ = line.partition("--hash")
    hashes = tuple(sorted(_HASH.findall(line)))
    try:
        wanted = Requirement(words)
    except InvalidRequirement as error:
        raise PinError(f"{file}: {words.strip()!r} is no requirement by name; run: make requirements") from error
    (specifier, *more) = [*wanted.specifier, None]
    if specifier is None or more != [None] or specifier.operator != "==" or "*" in specifier.version or wanted.url:
        raise PinError(f"{file}: {words.strip()!r} is not pinned to one version; run: make requirements")
    if not hashes or line.count("--hash") != len(hashes):
        raise PinError(f"{file}: {wanted.name} has no sha256, or another hash; run: make requirements")
    here = wanted.marker is None or wanted.marker.evaluate()
    return Pin(name=canonicalize_name(wanted.name), version=specifier.version, hashes=hashes, here=here)


def findings(folder: Path, installed: dict[str, str], wanted: dict[str, Iterable[str]]) -> Iterator[str]:
    """Say what is wrong with the pins of a folder, or differs from what is installed.

    Args:
        folder: Where ``<list>.txt`` of every list is.
        installed: Version by canonical name.
        wanted: Requirements that a list must hold, by its name.
    """
    known: dict[str, Pin] = {}
    for name in LISTS:
        try:
            pins = read(folder / f"{name}.txt")
        except PinError as error:
            yield str(error)
            continue
        for pin in pins.values():
            other = known.setdefault(pin.name, pin)
            if other.version != pin.version:
                yield f"{name}.txt: {pin.name} {pin.version}, elsewhere {other.version}; run: make requirements"
            if pin.name in MEANT:
                yield f"{name}.txt: {pin.name} is not what is meant: take {MEANT[pin.name]}"
        yield from _unmet(name, pins, wanted.get(name, ()))
    yield from _differing(known, installed)


def _unmet(name: str, pins: dict[str, Pin], wanted: Iterable[str]) -> Iterator[str]:
    for text in wanted:
        requirement = Requirement(text)
        pin = pins.get(canonicalize_name(requirement.name))
        if pin is None or not requirement.specifier.contains(pin.version, prereleases=True):
            found = pin.version if pin else "nothing"
            yield f"{name}.txt: {text!r} is wanted and {found} is pinned; run: make requirements"


def _differing(known: dict[str, Pin], installed: dict[str, str]) -> Iterator[str]:
    for pin in known.values():
        found = installed.get(pin.name)
        if pin.here and found != pin.version:
            yield f"installed: {pin.name} {found or 'is missing'}, pinned {pin.version}; run: make install"
    for name in sorted(installed.keys() - known.keys() - {OWN}):
        yield f"installed: {name} {installed[name]} is pinned nowhere; remove it, or name it in requirements/"


def asked_for() -> dict[str, Iterable[str]]:
    """What pyproject.toml and the .in files want, by list."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return {
        "runtime": project["project"]["dependencies"],
        "build": [*project["build-system"]["requires"], *_wanted_in("build")],
        "dev": _wanted_in("dev"),
    }


def _wanted_in(name: str) -> list[str]:
    lines = _lines((ROOT / "requirements" / f"{name}.in").read_text(encoding="utf-8"))
    found = [line for line in lines if not line.startswith("-")]
    here = default_environment()
    return [line for line in found if (marker := Requirement(line).marker) is None or marker.evaluate(dict(here))]


def main() -> int:
    """Print every finding; the exit code is 1 when there is one."""
    installed = {canonicalize_name(one.name): one.version for one in importlib.metadata.distributions()}
    found = [*findings(ROOT / "requirements", installed, asked_for())]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "check"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        found += done.stdout.splitlines()
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

"""Reads the pinned requirements; as a program, compares them with the environment, without network access."""

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
# Names of abandoned, forked or misleading packages, with the intended package.
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
    """A line is not a valid pin; the message has the line and the fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """One line of a requirements file: one version, and the sha256 of each of its files."""

    name: str
    version: str
    hashes: tuple[str, ...]
    here: bool
    """Whether the pin applies to this platform and Python."""


def read(path: Path) -> dict[str, Pin]:
    """Return every pin of a file by its canonical name.

    Raises:
        PinError: A line is not ``name==version`` with hashes, or a name appears twice.
    """
    pins: dict[str, Pin] = {}
    for line in _lines(path.read_text(encoding="utf-8")):
        pin = _pin(line, path.name)
        if pin.name in pins:
            raise PinError(f"{path.name}: {pin.name} appears twice; run: make requirements")
        pins[pin.name] = pin
    return pins


def _lines(text: str) -> Iterator[str]:
    """Yield the lines with their continuations, without comments."""
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            yield line.strip()


def _pin(line: str, file: str) -> Pin:
    words, *_ = line.partition("--hash")
    hashes = tuple(sorted(_HASH.findall(line)))
    try:
        wanted = Requirement(words)
    except InvalidRequirement as error:
        raise PinError(f"{file}: {words.strip()!r} is not a requirement by name; run: make requirements") from error
    (specifier, *more) = [*wanted.specifier, None]
    if specifier is None or more != [None] or specifier.operator != "==" or "*" in specifier.version or wanted.url:
        raise PinError(f"{file}: {words.strip()!r} is not pinned to one version; run: make requirements")
    if not hashes or line.count("--hash") != len(hashes):
        raise PinError(f"{file}: {wanted.name} has no sha256, or a hash of another kind; run: make requirements")
    here = wanted.marker is None or wanted.marker.evaluate()
    return Pin(name=canonicalize_name(wanted.name), version=specifier.version, hashes=hashes, here=here)


def findings(folder: Path, installed: dict[str, str], wanted: dict[str, Iterable[str]]) -> Iterator[str]:
    """Report mistakes in the pins of a folder, and differences to the installed packages.

    Args:
        folder: Folder with ``<list>.txt`` of every list.
        installed: Installed version by canonical name.
        wanted: Requirements that a list must contain, by the name of the list.
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
                yield f"{name}.txt: {pin.name} {pin.version}, in another list {other.version}; run: make requirements"
            if pin.name in MEANT:
                yield f"{name}.txt: {pin.name} is not the intended package; use {MEANT[pin.name]}"
        yield from _unmet(name, pins, wanted.get(name, ()))
    yield from _differing(known, installed)


def _unmet(name: str, pins: dict[str, Pin], wanted: Iterable[str]) -> Iterator[str]:
    for text in wanted:
        requirement = Requirement(text)
        pin = pins.get(canonicalize_name(requirement.name))
        if pin is None or not requirement.specifier.contains(pin.version, prereleases=True):
            found = pin.version if pin else "nothing"
            yield f"{name}.txt: {text!r} is required, but {found} is pinned; run: make requirements"


def _differing(known: dict[str, Pin], installed: dict[str, str]) -> Iterator[str]:
    for pin in known.values():
        found = installed.get(pin.name)
        if pin.here and found != pin.version:
            yield f"installed: {pin.name} {found or 'is missing'}, pinned {pin.version}; run: make install"
    for name in sorted(installed.keys() - known.keys() - {OWN}):
        yield f"installed: {name} {installed[name]} is not pinned; remove it, or add it to requirements/"


def asked_for() -> dict[str, Iterable[str]]:
    """Return the requirements of pyproject.toml and the .in files, by list."""
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
    """Print every finding; exit code 1 for a finding."""
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

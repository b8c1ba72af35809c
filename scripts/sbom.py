"""Writes a bill of materials (CycloneDX, JSON) of an installed environment: packages, versions, licences and hashes.

It needs only ``packaging``, because the build of the image has no other package.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pins import OWN, Pin, read

SPECIFICATION = "1.6"
Component = dict[str, Any]
# Licence names of packages without a licence expression.
SPDX = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "License :: OSI Approved :: Apache Software License": "Apache-2.0",
    "License :: OSI Approved :: MIT License": "MIT",
    "License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "License :: OSI Approved :: Python Software Foundation License": "PSF-2.0",
}
_IDS = {*SPDX.values(), "BSD-2-Clause", "ISC", "0BSD", "Unlicense", "Zlib"}
_SPACE = uuid.UUID("8f1d4d8a-6f0e-5d0c-9c36-2b5f0d6f8f11")


def licence(metadata: Mapping[str, Any], classifiers: Iterable[str]) -> list[dict[str, Any]]:
    """Return a package's licence in CycloneDX's form; empty if the package names none."""
    text = metadata.get("License-Expression")
    if text:
        return [{"expression": text}] if " " in text else [{"license": {"id": text}}]
    said = [line.strip() for line in (metadata.get("License") or "", *classifiers) if line.strip()]
    for one in said:
        known = one if one in _IDS else SPDX.get(one)
        if known:
            return [{"license": {"id": known}}]
    # A name instead of an id: "BSD" can mean several licences.
    return [{"license": {"name": said[-1].splitlines()[0].rpartition(" :: ")[2]}}] if said else []


def component(distribution: importlib.metadata.Distribution, pin: Pin | None) -> Component:
    """Return a package of an environment; a pinned one with the hashes of all files of its version."""
    name, version = canonicalize_name(distribution.name), distribution.version
    metadata = {key: str(value) for key, value in distribution.metadata.items()}
    classifiers = [
        line
        for key, line in distribution.metadata.items()
        if key == "Classifier" and line.startswith("License ::") and line.count("::") > 1
    ]
    purl = f"pkg:pypi/{name}@{version.replace('!', '%21')}"
    found: Component = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    if licences := licence(metadata, classifiers):
        found["licenses"] = licences
    if pin is not None:
        hashes = [{"alg": "SHA-256", "content": one} for one in pin.hashes]
        address = f"https://pypi.org/project/{name}/{version}/"
        found["externalReferences"] = [
            {"type": "distribution", "url": address, "comment": "one file of these hashes", "hashes": hashes}
        ]
    return found


def needed(distribution: importlib.metadata.Distribution, extras: Iterable[str]) -> Iterator[str]:
    """Yield the names of the packages that a distribution requires on this platform."""
    for text in distribution.requires or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield canonicalize_name(requirement.name)


def dependencies(environment: Mapping[str, importlib.metadata.Distribution]) -> dict[str, list[str]]:
    """Return for each package its requirements in the environment, including extras that other packages request."""
    extras: dict[str, set[str]] = {name: set() for name in environment}
    for distribution in environment.values():
        for text in distribution.requires or ():
            requirement = Requirement(text)
            extras.setdefault(canonicalize_name(requirement.name), set()).update(requirement.extras)
    return {
        name: sorted({one for one in needed(distribution, extras[name]) if one in environment})
        for name, distribution in environment.items()
    }


def system(root: Path) -> list[Component]:
    """Return Python, and the packages in ``/var/lib/dpkg/status`` of a Debian base; other bases have no such file."""
    purl = f"pkg:generic/python@{platform.python_version()}"
    python = {"type": "platform", "bom-ref": purl, "name": "python", "version": platform.python_version(), "purl": purl}
    status = root / "var/lib/dpkg/status"
    if not status.is_file():
        return [python]
    text = (root / "etc/os-release").read_text(encoding="utf-8")
    release = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', text, re.MULTILINE))
    found = []
    for block in status.read_text(encoding="utf-8").split("\n\n"):
        fields = dict(re.findall(r"^([A-Z][\w-]*): (.*)$", block, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed"):
            name, version = fields["Package"], fields["Version"]
            where = f"arch={fields['Architecture']}&distro={release['ID']}-{release.get('VERSION_ID', 'unknown')}"
            quoted = version.replace("+", "%2B").replace(":", "%3A")
            purl = f"pkg:deb/{release['ID']}/{name.replace('+', '%2B')}@{quoted}?{where}"
            found.append({"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl})
    return [python, *sorted(found, key=lambda one: str(one["bom-ref"]))]


def bill(
    environment: Mapping[str, importlib.metadata.Distribution],
    pins: Mapping[str, Pin],
    base: Sequence[Component] = (),
    wheel: Path | None = None,
    epoch: int | None = None,
) -> Component:
    """Return the bill of materials; the same input gives the same bill.

    Args:
        environment: Distribution by canonical name; gpu-cost-exporter is the subject.
        pins: Pins of the distributions.
        base: Components of the base image.
        wheel: The wheel of gpu-cost-exporter, for its hash.
        epoch: Date of the bill in Unix seconds; None: the bill has no date.
    """
    packages = {name: component(one, pins.get(name)) for name, one in sorted(environment.items())}
    subject = packages.pop(OWN) | {"type": "application"}
    if wheel is not None:
        subject["hashes"] = [{"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}]
    edges = dependencies(environment)
    references = {name: one["bom-ref"] for name, one in (packages | {OWN: subject}).items()}
    metadata: Component = {"component": subject}
    if epoch is not None:
        metadata["timestamp"] = datetime.fromtimestamp(epoch, UTC).isoformat().replace("+00:00", "Z")
    content: Component = {
        "metadata": metadata,
        "components": [*packages.values(), *base],
        "dependencies": [
            {"ref": references[name], "dependsOn": [references[one] for one in edges[name]]}
            for name in sorted(references)
        ]
        + [{"ref": one["bom-ref"]} for one in base],
    }
    digest = uuid.uuid5(_SPACE, json.dumps(content, sort_keys=True))
    head = {"bomFormat": "CycloneDX", "specVersion": SPECIFICATION, "serialNumber": f"urn:uuid:{digest}", "version": 1}
    return head | content


def installed(paths: Sequence[str], only: Iterable[str] | None) -> dict[str, importlib.metadata.Distribution]:
    """Return the distributions of these folders by name; with ``only``, those names and gpu-cost-exporter."""
    found = {canonicalize_name(one.name): one for one in importlib.metadata.distributions(path=list(paths))}
    return found if only is None else {name: one for name, one in found.items() if name in {*only, OWN}}


def main(words: Sequence[str] | None = None) -> int:
    """Write the bill to standard output; exit code 1 if a pinned package is not installed."""
    parser = argparse.ArgumentParser(description="Write a bill of materials as CycloneDX JSON.")
    parser.add_argument("--pins", type=Path, required=True, help="installed requirements file")
    parser.add_argument("--folder", help="site-packages folder of the pinned packages; default: that of this Python")
    parser.add_argument("--base", type=Path, help="root folder with Python and Debian packages to list, too")
    parser.add_argument("--wheel", type=Path, help="wheel of gpu-cost-exporter")
    given = parser.parse_args(words)
    pins = read(given.pins)
    here = {name: pin for name, pin in pins.items() if pin.here}
    environment = installed([given.folder] if given.folder else sys.path, None if given.folder else here)
    differing = [
        f"sbom: {name} {pin.version} is pinned, but not installed"
        for name, pin in here.items()
        if name not in environment or environment[name].version != pin.version
    ] + [f"sbom: {name} is installed, but not pinned" for name in environment.keys() - here.keys() - {OWN}]
    if differing or OWN not in environment:
        print(*differing, "sbom: run: make install", sep="\n", file=sys.stderr)
        return 1
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    whole = bill(
        environment, here, system(given.base) if given.base else (), given.wheel, int(epoch) if epoch else None
    )
    json.dump(whole, sys.stdout, indent=1, sort_keys=True, ensure_ascii=False)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())

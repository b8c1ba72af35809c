"""The kustomize folders as kubectl builds them, and parts of them put together as a user would."""

import os
import shutil
import subprocess
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_support import read
from yaml_support import read_yaml

ROOT = Path(__file__).resolve().parent.parent
KUSTOMIZE = ROOT / "deploy" / "kustomize"
BASE = KUSTOMIZE / "base"
OVERLAYS = sorted(path.parent for path in (KUSTOMIZE / "overlays").glob("*/kustomization.yaml"))
COMPONENTS = sorted(path.parent for path in (KUSTOMIZE / "components").glob("*/kustomization.yaml"))
FOLDERS = [BASE, *OVERLAYS]

Document = dict[str, Any]


@lru_cache(maxsize=64)
def text_of(folder: Path) -> str:
    """What a folder is when it is built."""
    if shutil.which("kubectl"):
        command = ["kubectl", "kustomize", str(folder)]
    elif shutil.which("kustomize"):
        command = ["kustomize", "build", str(folder)]
    else:
        pytest.skip("needs kubectl or kustomize on the PATH")
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "a warning, such as of a field that will go"
    return done.stdout


@lru_cache(maxsize=64)
def built(folder: Path) -> list[Document]:
    """Its documents, not to be changed."""
    return read(text_of(folder))


def overlay(name: str) -> list[Document]:
    """Documents of an overlay, or of the base."""
    return built(BASE if name == "base" else KUSTOMIZE / "overlays" / name)


def composed(folder: Path, components: Iterable[str], resource: Path = BASE, **more: object) -> list[Document]:
    """Documents of a user's own kustomization.

    Args:
        folder: Where it is written; empty.
        components: Names below ``components``.
        resource: What it is made of.
        more: Further keys of it.
    """
    folder.mkdir(exist_ok=True)
    whole = {
        "resources": [_relative(resource, folder)],
        "components": [_relative(KUSTOMIZE / "components" / name, folder) for name in components],
        **more,
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(whole), encoding="utf-8")
    return built(folder)


def _relative(path: Path, folder: Path) -> str:
    return os.path.relpath(path, folder.resolve())


def pod_spec(workload: Document) -> Document:
    """The spec of a workload's pods."""
    spec: Document = workload["spec"]["template"]["spec"]
    return spec


def options(container: Document) -> dict[str, object]:
    """Options that its environment sets, by their keys in a configuration file."""
    prefix = "GPU_COST_EXPORTER_"
    return {
        entry["name"].removeprefix(prefix).lower().replace("_", "-"): read_yaml(entry["value"])
        if entry["value"] in {"on", "off"}
        else entry["value"]
        for entry in container.get("env", [])
        if entry["name"].startswith(prefix) and entry["name"] != f"{prefix}CONFIG"
    }

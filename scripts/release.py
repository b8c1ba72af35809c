"""Builds the files of a release from the commit, twice under different conditions, and compares them."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
# A build must not depend on folder, time zone, umask, locale or hash seed.
CONDITIONS: tuple[tuple[int, Mapping[str, str]], ...] = (
    (0o022, {"TZ": "UTC", "LC_ALL": "C", "PYTHONHASHSEED": "1"}),
    (0o077, {"TZ": "Pacific/Kiritimati", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "2"}),
)


class BuildError(Exception):
    """A build failed, or two builds differ; the message names the file."""


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def export(commit: str, folder: Path, umask: int) -> None:
    """Write the files of a commit to a folder."""
    folder.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "--no-same-permissions"], cwd=folder, input=archive, check=True, umask=umask)


def build(source: Path, umask: int, environment: Mapping[str, str]) -> list[Path]:
    """Build the sdist of a folder, and the wheel from the sdist, like an installation.

    Raises:
        BuildError: The build failed.
    """
    out = source.parent / "out"
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    whole = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=whole, umask=umask)
    if done.returncode:
        raise BuildError(f"the build failed: {done.stdout[-1000:]}{done.stderr[-1000:]}")
    return sorted(out.iterdir())


def compare(first: Sequence[Path], second: Sequence[Path]) -> None:
    """Compare two builds.

    Raises:
        BuildError: A file is in one build only, or differs.
    """
    for name in sorted({path.name for path in (*first, *second)}):
        contents = [path.read_bytes() for path in (*first, *second) if path.name == name]
        if len(contents) != 2 or contents[0] != contents[1]:  # noqa: PLR2004 - one of each
            raise BuildError(f"{name}: two builds of the same commit differ")


def bill(wheel: Path, lists: Path, epoch: str) -> bytes:
    """Return the bill of materials of a wheel with the packages of a requirements file.

    Raises:
        BuildError: A pinned package is not installed.
    """
    command = [sys.executable, str(ROOT / "scripts" / "sbom.py"), "--pins", str(lists), "--wheel", str(wheel)]
    done = subprocess.run(command, capture_output=True, check=False, env={**os.environ, "SOURCE_DATE_EPOCH": epoch})
    if done.returncode:
        raise BuildError(done.stderr.decode())
    return done.stdout


def make(commit: str, out: Path) -> list[Path]:
    """Build a commit twice and write the files, their bill of materials and their digests to a folder.

    Raises:
        BuildError: A build failed, or the two builds differ.
    """
    epoch = _git("log", "-1", "--format=%ct", commit)
    with tempfile.TemporaryDirectory(prefix="dist") as folder:
        builds = []
        for number, (umask, environment) in enumerate(CONDITIONS):
            source = Path(folder) / ("a" * (number + 1)) / "tree"
            export(commit, source, umask)
            builds.append(build(source, umask, {**environment, "SOURCE_DATE_EPOCH": epoch}))
        compare(*builds)
        made = builds[0]
        (wheel,) = (path for path in made if path.suffix == ".whl")
        version = wheel.name.split("-")[1]
        listed = wheel.with_name(f"gpu-cost-exporter-{version}.cdx.json")
        listed.write_bytes(bill(wheel, source / "requirements" / "runtime.txt", epoch))
        made.append(listed)
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        files = [Path(shutil.copyfile(path, out / path.name)) for path in made]
    digests = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(files))
    (out / "SHA256SUMS").write_text(digests, encoding="utf-8")
    return [*sorted(files), out / "SHA256SUMS"]


def main() -> int:
    """Build the last commit in ``dist``."""
    commit = _git("rev-parse", "HEAD")
    try:
        files = make(commit, DIST)
    except BuildError as error:
        print(f"dist: {error}")
        return 1
    if _git("status", "--porcelain"):
        print("dist: uncommitted changes are not included; commit them and build again")
    print(f"dist: {commit}, two equal builds:")
    for path in files:
        print(f"  {path.relative_to(ROOT)}  {path.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())

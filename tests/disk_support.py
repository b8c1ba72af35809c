"""Small disks that fill up and turn read-only, for tests that may mount."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")


@contextmanager
def tmpfs(directory: Path, options: str) -> Iterator[Path]:
    """A file system of its own in memory; ``options`` as for mount."""
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)], check=False, capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"may not mount here: {mounted.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)

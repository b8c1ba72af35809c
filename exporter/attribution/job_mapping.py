"""Reads a job-mapping directory: files that a Slurm prolog writes, as dcgm-exporter reads them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

# A step behind the id ("1234.batch") is the job's; an array's ("1234_7") or a heterogeneous job's part is its own.
_JOB = re.compile(r"([0-9]{1,18}(?:[_+][0-9]{1,9})?)(?:\.[0-9A-Za-z_.-]{1,64})?", re.ASCII)
_FILE_NAME = re.compile(r"(?P<gpu>[0-9]{1,4})(?:\.(?P<instance>[0-9]{1,4}))?", re.ASCII)
_FILE_LIMIT_BYTES = 65_536
_JOBS_LIMIT = 256

Place = tuple[int, int | None]
"""Index of a GPU, and id of the GPU instance on it or ``None`` for the whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """What a directory says."""

    jobs: Mapping[Place, tuple[str, ...]] = field(default_factory=dict)
    """Job ids by place; a place without jobs is not listed."""
    doubtful: Mapping[Place, str] = field(default_factory=dict)
    """Places with a file that cannot be read or understood, and why."""


def read(directory: Path) -> Mapped:
    """Read every file whose name is a number (``0``) or two (``2.1``); each line of it is a job's id.

    Raises:
        OSError: The directory cannot be read.
    """
    jobs: dict[Place, tuple[str, ...]] = {}
    doubtful: dict[Place, str] = {}
    for path in sorted(directory.iterdir()):
        named = _FILE_NAME.fullmatch(path.name)
        if named is None:
            continue  # an editor's backup, a lock, a file that is being written and renamed
        place = int(named["gpu"]), int(named["instance"]) if named["instance"] else None
        try:
            found = _jobs(path)
        except FileNotFoundError:
            continue  # the job has ended meanwhile
        except OSError as error:
            doubtful[place] = f"{path}: {error.strerror}; let the agent read it"
            continue
        if found is None:
            doubtful[place] = f"{path}: not job ids, one per line; write SLURM_JOB_ID there and nothing else"
        elif found:
            jobs[place] = found
    return Mapped(jobs=jobs, doubtful=doubtful)


def _jobs(path: Path) -> tuple[str, ...] | None:
    """Return the ids, each once; ``None`` where a line is none."""
    with path.open("rb") as file:
        text = file.read(_FILE_LIMIT_BYTES + 1)
    lines = [line.strip() for line in text.decode("utf-8", "replace").splitlines()]
    matches = [_JOB.fullmatch(line) for line in lines if line]
    if len(text) > _FILE_LIMIT_BYTES or len(matches) > _JOBS_LIMIT:
        return None
    found = [match[1] for match in matches if match]
    return tuple(dict.fromkeys(found)) if len(found) == len(matches) else None

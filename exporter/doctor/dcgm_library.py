"""Checks DCGM's client library in a process of its own, since one that is broken takes its process along."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from exporter.model import Field

_DEADLINE_SECONDS = 10.0
_REINSTALL = "install DCGM's client library anew, of the host engine's major version (docs/dcgm.md)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """What there is of libdcgm; ``problem`` is empty when it works."""

    soname: str = ""
    version: str = ""
    """``4.6.0``; empty where it does not tell."""
    unknown: frozenset[Field] = frozenset()
    problem: str = ""


async def look(fields: Collection[Field], env: Mapping[str, str] | None) -> Library:
    """Which library the agent would load, and which of the fields it does not know."""
    ids = ",".join(str(int(field)) for field in sorted(fields))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "exporter.sources.libdcgm_check", "--fields", ids),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=None if env is None else {**os.environ, **env},
    )
    try:
        async with asyncio.timeout(_DEADLINE_SECONDS):
            out, _ = await process.communicate()
    except TimeoutError:
        return Library(problem=f"loading libdcgm did not end within {_DEADLINE_SECONDS:g} s; {_REINSTALL}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    code = process.returncode or 0
    if code:
        how = signal.strsignal(-code) if code < 0 else f"exit code {code}"
        return Library(problem=f"loading libdcgm ended its process with {how}; {_REINSTALL}")
    told = _told(out)
    if told is None:
        return Library(problem=f"loading libdcgm ended its process without a word; {_REINSTALL}")
    if "problem" in told:
        return Library(problem=told["problem"])
    unknown = frozenset(Field(one) for one in told["unknown"])
    return Library(soname=told["soname"], version=told["version"], unknown=unknown)


def _told(out: bytes) -> dict[str, Any] | None:
    """The object that the process has written; a library may write lines of its own before it and after."""
    for line in reversed(out.splitlines()):
        with contextlib.suppress(ValueError):
            told = json.loads(line)
            if isinstance(told, dict):
                return told
    return None

"""Which pages processes hold: each page once, as if no other process of the machine had the same files mapped."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = 4096
_PRESENT, _SHARED = 1 << 63, 1 << 61
_ENTRY_BYTES = 8
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) (\S+) (\d+) *(.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapping:
    """One line of ``/proc/<pid>/maps``; addresses and offset in pages."""

    first: int
    count: int
    offset: int
    device: str
    inode: int
    path: str

    @property
    def kind(self) -> str:
        """What the private pages of it are: ``heap``, ``stack``, ``data`` (of a library) or ``anonymous``."""
        if self.inode:
            return "data"
        if self.path == "[heap]":
            return "heap"
        return "stack" if self.path == "[stack]" else "anonymous"


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Resident pages of one process in bytes, those of files only where no process before it had them."""

    private: Counter[str]
    """Not shared with any process, by the kind of the mapping."""
    files: Counter[str]
    """Pages of files as they are on the disk, by path."""

    @property
    def size_bytes(self) -> int:
        """All of it."""
        return self.private.total() + self.files.total()


def alone(pids: Iterable[int]) -> tuple[Held, ...]:
    """Return what each process holds, were they the only ones on the machine; ``pids`` in the order of precedence.

    Linux tells an owner which of its pages are present and which of them are a file's (``/proc/<pid>/pagemap``). Memory
    that was shared by forking counts for each; ours are started by ``exec``.

    Raises:
        OSError: A process is gone or not ours.
    """
    seen: set[tuple[str, int, int]] = set()
    return tuple(_held(pid, seen) for pid in pids)


def _held(pid: int, seen: set[tuple[str, int, int]]) -> Held:
    private: Counter[str] = Counter()
    files: Counter[str] = Counter()
    with Path(f"/proc/{pid}/pagemap").open("rb", buffering=0) as pagemap:
        for mapping in _mappings(pid):
            pagemap.seek(mapping.first * _ENTRY_BYTES)
            entries = memoryview(pagemap.read(mapping.count * _ENTRY_BYTES)).cast("Q")
            for place, entry in enumerate(entries):
                if not entry & _PRESENT:
                    continue
                page = (mapping.device, mapping.inode, mapping.offset + place)
                if not (mapping.inode and entry & _SHARED):
                    private[mapping.kind] += PAGE_BYTES
                elif page not in seen:
                    seen.add(page)
                    files[mapping.path] += PAGE_BYTES
    return Held(private=private, files=files)


def _mappings(pid: int) -> Iterator[Mapping]:
    for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        match = _MAPPING.match(line)
        if match is None or match[6] in {"[vsyscall]", "[vvar]", "[vdso]"}:
            continue
        first, end, offset = (int(match[number], 16) // PAGE_BYTES for number in (1, 2, 3))
        yield Mapping(
            first=first,
            count=end - first,
            offset=offset,
            device=match[4],
            inode=int(match[5]),
            path=match[6],
        )

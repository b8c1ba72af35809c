"""Finds libdcgm, calls it by its signatures, and reads the records that it hands to a callback."""

import contextlib
import ctypes
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from exporter.errors import SourceError
from exporter.sources import _libdcgm
from exporter.sources._libdcgm import DOUBLE, STRING, STRING_BYTES, FieldMeta, FieldValueV1

SONAMES = ("libdcgm.so.4", "libdcgm.so.3")
"""Client and engine have to be of one major version; the newer library is tried first."""


class Library:
    """A loaded libdcgm.

    Args:
        functions: Has the C functions as attributes: a ``ctypes.CDLL``, or what the simulator puts in its place.
        soname: By which it was found; the digit at its end is its major version.
        knock: Stands for a first connection to an engine's address (``host:port``, ``unix:///path``) within so many
            seconds, and raises the OSError that a socket would; ``None``: a socket is what is tried.

    Raises:
        SourceError: a function that every supported DCGM has is missing; reason ``dcgm_library_incomplete``.
    """

    def __init__(
        self,
        functions: Any,  # noqa: ANN401 - a CDLL has any attribute
        soname: str,
        knock: Callable[[str, float], None] | None = None,
    ) -> None:
        self.soname = soname
        self.knock = knock
        self._functions: dict[str, Callable[..., Any]] = {}
        for name, arguments in {**_libdcgm.SIGNATURES, **_libdcgm.OPTIONAL_SIGNATURES}.items():
            self._declare(functions, name, ctypes.c_int, arguments)
        for name, (result, arguments) in _libdcgm.OTHER_SIGNATURES.items():
            self._declare(functions, name, result, arguments)
        missing = sorted((_libdcgm.SIGNATURES.keys() | _libdcgm.OTHER_SIGNATURES.keys()) - self._functions.keys())
        if missing:
            raise SourceError(
                "dcgm_library_incomplete",
                f"{soname} lacks {', '.join(missing)}: install DCGM 3.3 or later (package datacenter-gpu-manager)",
            )

    def _declare(self, functions: Any, name: str, result: object, arguments: tuple[object, ...]) -> None:  # noqa: ANN401 - as above
        function = getattr(functions, name, None)
        if function is not None:
            function.restype, function.argtypes = result, list(arguments)
            self._functions[name] = function

    @property
    def major(self) -> int:
        """Major version by its name: 3 or 4."""
        return int(self.soname.rpartition(".")[2])

    def has(self, name: str) -> bool:
        """Tell whether it has an optional function."""
        return name in self._functions

    def call(self, name: str, *arguments: object) -> int:
        """Call a function and return its dcgmReturn_t; ``ctypes`` converts by the signature."""
        return int(self._functions[name](*arguments))

    def describe(self, code: int) -> str:
        """Return the library's words for a return code."""
        text: bytes | None = self._functions["errorString"](code)
        return text.decode("utf-8", "replace") if text else f"error {code}"

    def field_meta(self, field_id: int) -> FieldMeta | None:
        """Return what the library knows of a field; ``None`` for a field that this version does not have."""
        found = self._functions["DcgmFieldGetById"](field_id)
        return found.contents if found else None


class _Loaded:
    """The library of this process: once mapped, it stays."""

    library: Library | None = None
    preferred = SONAMES[0]


def install(functions: object, soname: str = SONAMES[0], *, knock: Callable[[str, float], None] | None = None) -> None:
    """Put something in the place of the library, as if the process had just loaded it: the simulator's door."""
    _Loaded.library = Library(functions, soname, knock)


def uninstall() -> None:
    """Forget the library; the next ``load`` looks for one."""
    _Loaded.library = None


def prefer(soname: str) -> None:
    """Have ``load`` look for this one first."""
    _Loaded.preferred = soname


def beside(library: Library) -> str | None:
    """Return the name of a libdcgm of another major version that is installed, too; ``None``: there is none.

    It is loaded to see that, and a process must not use both: one that is told a name has to end.
    """
    # Beside a simulated one nothing real is touched.
    for soname in SONAMES if library.knock is None else ():
        if soname != library.soname:
            with contextlib.suppress(OSError):
                ctypes.CDLL(soname)
                return soname
    return None


def load() -> Library:
    """Load libdcgm where it is not loaded yet.

    Raises:
        SourceError: there is none (reason ``dcgm_library_not_found``), or one that is too old.
    """
    if _Loaded.library is None:
        _Loaded.library = _open()
    return _Loaded.library


def _open() -> Library:
    told = []
    for soname in sorted(SONAMES, key=lambda one: one != _Loaded.preferred):
        try:
            # Its modules are loaded by the library itself and take its symbols from the process.
            return Library(ctypes.CDLL(soname, mode=ctypes.RTLD_GLOBAL), soname)
        except OSError as error:
            told.append(str(error))
    raise SourceError(
        "dcgm_library_not_found",
        f"libdcgm was not found ({'; '.join(told)}): install DCGM's client library (package datacenter-gpu-manager,"
        " or datacenter-gpu-manager-4-core), of the host engine's major version",
    )


class Record(NamedTuple):
    """One field value as the library tells it, before anything is made of it."""

    field_id: int
    type: int
    status: int
    at_microseconds: int
    value: int | float | bytes
    """Bytes up to the first zero for strings; the raw number for every other type."""


_HEAD = struct.Struct("<IHHi4xq")
_INTEGER = struct.Struct("<q")
_DOUBLE = struct.Struct("<d")
_RECORD_BYTES = ctypes.sizeof(FieldValueV1)
_VALUE_OFFSET = FieldValueV1.value.offset


def records(address: int, count: int) -> Iterator[Record]:
    """Read the records that a callback was given, where they lie: nothing of their 4 KiB each is copied.

    Args:
        address: Of the first ``FieldValueV1``.
        count: How many there are.
    """
    memory = memoryview((ctypes.c_char * (_RECORD_BYTES * count)).from_address(address)).cast("B")
    for start in range(0, _RECORD_BYTES * count, _RECORD_BYTES):
        _, field_id, kind, status, at = _HEAD.unpack_from(memory, start)
        place = start + _VALUE_OFFSET
        value: int | float | bytes
        if kind == DOUBLE:
            (value,) = _DOUBLE.unpack_from(memory, place)
        elif kind == STRING:
            value = bytes(memory[place : place + STRING_BYTES]).partition(b"\0")[0]
        else:
            (value,) = _INTEGER.unpack_from(memory, place)
        yield Record(field_id, kind, status, at, value)

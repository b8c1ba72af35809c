"""Bodies of answers, each made and compressed once for all who ask."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from exporter.exposition.compression import compressed


@dataclass(slots=True, eq=False)
class Body:
    """What is answered, and its gzip form as soon as somebody has asked for it. Not for several threads."""

    plain: bytes
    content_type: str
    _packed: bytes | None = None

    def packed(self) -> bytes | None:
        """The body in gzip; ``None`` where that is not worth it. The same bytes object each time."""
        if self._packed is None:
            self._packed = compressed(self.plain)
        return self._packed


class Bodies:
    """The bodies that show one picture, the newest: those of the one before are dropped with it."""

    def __init__(self) -> None:
        self._shown: object = None
        self._made: dict[Hashable, Body] = {}

    def of(self, shown: object, what: Hashable, make: Callable[[], Body]) -> Body:
        """The body that shows something in one way, made when it is first asked for.

        Args:
            shown: Known by its identity.
            what: The way.
            make: Makes it.
        """
        if shown is not self._shown:
            self._made.clear()
            self._shown = shown
        body = self._made.get(what)
        if body is None:
            body = self._made[what] = make()
        return body

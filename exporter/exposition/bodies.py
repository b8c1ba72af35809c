"""Bodies of answers, each made and compressed once for all who ask."""

from collections.abc import Callable, Hashable, Sequence

from exporter.exposition.compression import compressed


class Body:
    """What is answered, and its gzip form as soon as somebody has asked for it. Not for several threads.

    Args:
        content: The body, or the parts of it: a long one is compressed part by part and put together only for who
            takes no gzip, which Prometheus does.
        content_type: With its charset.
    """

    __slots__ = ("_packed", "_parts", "content_type")

    def __init__(self, content: bytes | Sequence[bytes], content_type: str) -> None:
        self._parts = (content,) if isinstance(content, bytes) else content
        self._packed: bytes | None = None
        self.content_type = content_type

    @property
    def plain(self) -> bytes:
        """The body as it is; the same bytes object each time."""
        if len(self._parts) != 1:
            self._parts = (b"".join(self._parts),)
        return self._parts[0]

    def packed(self) -> bytes | None:
        """The body in gzip, the same bytes object each time; ``None`` where that is not worth it."""
        if self._packed is None:
            self._packed = compressed(self._parts)
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

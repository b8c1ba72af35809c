"""Text that others wrote, made fit for a label value: printable, bounded, and the same text each time."""

from hashlib import sha256

_HASH_DIGITS = 8


def label_text(text: str, limit: int) -> str:
    """Trim and bound a text.

    Args:
        text: Anything, lone surrogates and control characters too.
        limit: Most characters that come back, at least 10.

    Returns:
        Printable text: runs of white space are one space, what cannot be printed is left out. A longer text is cut and
        ends in ``-`` and eight digits of its hash, so that two long texts with one beginning stay two.
    """
    if not text.isprintable():
        text = "".join(character for character in text if character.isprintable() or character.isspace())
    text = " ".join(text.split())
    if len(text) <= limit:
        return text
    digest = sha256(text.encode()).hexdigest()[:_HASH_DIGITS]
    return f"{text[: limit - _HASH_DIGITS - 1]}-{digest}"

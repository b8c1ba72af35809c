"""The door to bcrypt: passwords are compared in a thread, and one that was right is known again without it."""

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Mapping
from typing import Literal

import bcrypt

MOST_REMEMBERED = 100
MOST_WAITING = 16
_MOST_BYTES = 72
"""Of a password: all that bcrypt looks at, and Go's toolkit as well."""
# Of a password that nobody knows; an unknown user's is compared with it, so that his answer takes as long.
_DECOY = "Ro0CUfOqk6cXEKf3dyaM7OhSCvnwM9s4wIX9JeLapKK5YdLCKxBlm"

Verdict = Literal["right", "wrong", "busy"]


class Passwords:
    """Users with their hashes, as ``$2y$10$...``.

    Args:
        users: Bcrypt hash by user; not empty.
    """

    def __init__(self, users: Mapping[str, bytes]) -> None:
        self._users = dict(users)
        self._cost = max(_cost(known) for known in users.values())
        self._decoy = _decoy(self._cost)
        self._key = secrets.token_bytes(32)
        self._right: dict[bytes, None] = {}
        self._waiting = 0
        self._one_at_a_time = asyncio.Semaphore(1)

    async def check(self, user: str, password: bytes) -> Verdict:
        """Whether the user has this password; busy while too many others wait for the same."""
        known = self._users.get(user, self._decoy)
        mark = self._mark(user, known, password)
        if mark in self._right:
            return "right"
        if self._waiting >= MOST_WAITING:
            return "busy"
        self._waiting += 1
        try:
            async with self._one_at_a_time:
                is_equal = await asyncio.to_thread(_is_equal, password, known, self._cost)
        finally:
            self._waiting -= 1
        if not (is_equal and user in self._users):
            return "wrong"
        if len(self._right) >= MOST_REMEMBERED:
            del self._right[next(iter(self._right))]
        self._right[mark] = None
        return "right"

    def _mark(self, user: str, known: bytes, password: bytes) -> bytes:
        """What is remembered: with a key of this process, so that its memory has no digest to guess from."""
        parts = (user.encode("utf-8", "surrogatepass"), known, password)
        message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hmac.digest(self._key, message, hashlib.sha256)


def _is_equal(password: bytes, known: bytes, most_cost: int) -> bool:
    """Whether the hash is of this password; the work is that of the dearest hash, whichever it is held against."""
    asked = password[:_MOST_BYTES]
    try:
        is_equal = bcrypt.checkpw(asked, known)
        # A cost is a power of two: 2^n + (2^n + 2^(n+1) + ... + 2^(most-1)) = 2^most.
        for cost in range(_cost(known), most_cost):
            bcrypt.checkpw(asked, _decoy(cost))
    except ValueError:
        return False
    return is_equal


def _cost(known: bytes) -> int:
    return int(known[4:6])


def _decoy(cost: int) -> bytes:
    return f"$2b${cost:02d}${_DECOY}".encode()

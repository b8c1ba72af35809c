"""An error in words as the API tells it: what is wrong, where, and how to mend it."""

import re
from collections.abc import Sequence
from typing import Any

_WHERE = re.compile(r"(?P<where>[^\s:;]+(?: \(from [^)]*\))?): (?P<rest>.+)", re.DOTALL)


def problem_document(problems: Sequence[str], status: int) -> dict[str, Any]:
    """The JSON of an error: keys ``error``, ``where`` and ``mend`` of the first problem, all of them in ``problems``.

    A message of ours is ``where: what; how to mend it``; what a message does not have is empty. ``code`` and
    ``message`` are what clients of OpenCost look for.
    """
    documents = [_parts(problem) for problem in problems]
    return {**documents[0], "problems": documents, "code": status, "message": "; ".join(problems)}


def _parts(problem: str) -> dict[str, str]:
    match = _WHERE.fullmatch(problem)
    where, rest = (match["where"], match["rest"]) if match else ("", problem)
    what, _, mend = rest.partition("; ")
    return {"error": what, "where": where, "mend": mend}

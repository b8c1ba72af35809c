"""How the files of a process in ``/proc`` are read."""

# Behind the last ")" of /proc/<pid>/stat comes field 3, so field 22 is the twentieth word there.
_START_TIME_WORD = 19


def content(path: str) -> str:
    """Read a file, with what is no UTF-8 replaced.

    Raises:
        OSError: It cannot be read; of a process that has ended it is gone.
    """
    # Asked for every process with every sample: a third of what pathlib takes.
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - as above
        return (file.read() or b"").decode("utf-8", "replace")


def name_and_start(directory: str) -> tuple[str, str | None]:
    """Read a process' own name and when it started, in clock ticks; it tells processes of one pid apart.

    Args:
        directory: ``/proc/<pid>``.

    Returns:
        An empty name and ``None`` where the process cannot be seen.
    """
    try:
        before, _, after = content(f"{directory}/stat").rpartition(")")
    except OSError:
        return "", None
    words = after.split()
    return before.partition("(")[2], words[_START_TIME_WORD] if len(words) > _START_TIME_WORD else None

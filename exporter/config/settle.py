"""Settles a table of options: flags, environment, other programs' environment, file, defaults, in this order."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from exporter.config import dcgm_settings, yaml_file
from exporter.config.kinds import Kind
from exporter.config.options import ENV_PREFIX, Option

CONFIG_ENV = ENV_PREFIX + "CONFIG"
Raw = str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Settled:
    """What options came to. ``values`` is by key, each made by its option's kind; ``None`` is unset or refused."""

    values: dict[str, Any]
    stated: set[str] = field(default_factory=set)
    """Keys that somebody wrote, rather than their defaults."""


def settle(
    options: Sequence[Option],
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    problems: list[str],
    foreign: Mapping[str, tuple[str, str]] | None = None,
) -> Settled:
    """Settle every option of the table.

    Args:
        options: The table.
        flags: Option key, with hyphens or underscores, to its text; ``None`` is not given. ``config`` is the file.
        environ: The process environment.
        problems: Mistakes are added here, one line each.
        foreign: By key: name and text of another program's flag or variable that means the same.
    """
    given = {key.replace("_", "-"): str(value) for key, value in flags.items() if value is not None}
    from_file, file_path = _read_file(
        given.get("config") or environ.get(CONFIG_ENV), [option.key for option in options], problems
    )
    settled = Settled({})
    for option in options:
        candidates: list[tuple[str, Raw]] = []
        if option.key in given:
            candidates.append((option.flag, given[option.key]))
        if environ.get(option.env):
            candidates.append((option.env, environ[option.env]))
        if foreign and option.key in foreign and not candidates:
            candidates.append(foreign[option.key])
        if option.key in from_file:
            entry = from_file[option.key]
            candidates.append((f"{file_path}:{entry.line}", entry.raw))
        settled.values[option.key] = _settle_one(option, candidates, problems)
        settled.stated.update(option.key for _ in candidates)
    return settled


def _read_file(
    name: str | None, keys: Collection[str], problems: list[str]
) -> tuple[dict[str, yaml_file.FileValue], str]:
    if not name:
        return {}, ""
    values, found = yaml_file.read(Path(name), keys)
    problems += found
    return values, name


def _settle_one(option: Option, candidates: list[tuple[str, Raw]], problems: list[str]) -> object:
    """The first candidate's value; every candidate is checked, so that a mistake cannot hide behind another layer."""
    settled: list[object] = []
    for origin, raw in candidates:
        try:
            settled.append(_parse(option.kind, raw))
        except ValueError as error:
            settled.append(None)
            problems.append(refusal(option, origin, str(error) if option.kind.is_list else raw))
    if settled:
        return settled[0]
    return None if option.default is None else _parse(option.kind, option.default)


def _parse(kind: Kind, raw: Raw) -> object:
    """The value; ValueError where it is not one, with the text of the item in a list that is not."""
    if kind.is_list:
        items = raw.split(",") if isinstance(raw, str) else raw
        return tuple(kind.parse(item) for item in items)
    if not isinstance(raw, str):
        raise ValueError(raw)  # noqa: TRY004 - a list where one value belongs is the user's mistake, not a type error
    return kind.parse(raw)


def refusal(option: Option, origin: str, raw: Raw) -> str:
    """Says that a text is no value of the option, where it stands, and what is allowed."""
    shown = raw if isinstance(raw, str) else "[" + ", ".join(raw) + "]"
    words = option.kind.allowed.split(", ") if option.kind.metavar.startswith("{") else []
    close = get_close_matches(shown.lower(), words, n=1)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    why = option.kind.why(shown)
    hint = f"; {why}" if why else hint
    return (
        f"{option.key} (from {origin}): value '{shown}' is not {option.kind.noun}; allowed: {option.kind.allowed}{hint}"
    )


def unknown_variables(options: Sequence[Option], environ: Mapping[str, str]) -> list[str]:
    """Warnings only: Kubernetes and other programs set variables that begin with our prefix, too."""
    known = {option.env for option in options} | {CONFIG_ENV}
    warnings: list[str] = []
    for name in sorted(environ):
        rest = name.removeprefix(ENV_PREFIX[:-1])
        if not name.startswith(ENV_PREFIX) or name in known or dcgm_settings.SERVICE_LINK.fullmatch(rest):
            continue
        close = get_close_matches(name, known, n=1, cutoff=0.8)
        hint = f"; did you mean {close[0]}?" if close else ""
        warnings.append(f"{name}: unknown variable, not used{hint}")
    return warnings

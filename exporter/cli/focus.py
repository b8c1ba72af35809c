"""`focus`: checks files in the FinOps Foundation's format for cost and usage."""

# Imports inside functions keep `--help` and `--version` fast: gRPC, aiohttp and the driver's binding take a second.
# ruff: noqa: PLC0415

import argparse
from pathlib import Path

from exporter.cli.base import EXIT_FAILED, Commands, Parser, command, refuse, stdout

_VERSIONS = ("1.2", "1.3", "1.4")


def add(commands: Commands) -> None:
    """Add the command and what it can do."""
    focus = command(commands, "focus", "Files of cost and usage in the FOCUS format: check them.")
    kinds = focus.add_subparsers(dest="about_focus", metavar="WHAT", required=True, parser_class=Parser)
    check = command(kinds, "check", "Say where a FOCUS file breaks the specification, and whether its splits add up.")
    check.epilog = "Exit code: 0 for a file without faults, 1 for one with faults or that cannot be read, 2 for a flag."
    check.add_argument("file", type=Path, metavar="FILE", help="CSV file, also with gzip (rules: docs/focus.md)")
    check.add_argument("--version", choices=_VERSIONS, help="version of FOCUS [default: told by the columns]")
    check.set_defaults(run=_check)
    columns = command(kinds, "columns", "The columns of a version: what they hold, and which must be there.")
    columns.add_argument("--version", choices=_VERSIONS, default=_VERSIONS[-1], help="version [default: %(default)s]")
    columns.set_defaults(run=_columns)


def _check(namespace: argparse.Namespace, problems: tuple[str, ...]) -> int:
    refuse(problems)
    from exporter.report.focus import check_focus
    from exporter.report.focus.opening import opened

    with opened(namespace.file) as file:
        found = check_focus(file, str(namespace.file), version=namespace.version)
    with stdout() as stream:
        for finding in found.findings:
            stream.write(f"{namespace.file}: {finding.words}\n")
        told: dict[tuple[str, str], int] = {}
        for finding in found.findings:
            kind = (finding.rule, finding.column)
            told[kind] = told.get(kind, 0) + 1
        for kind, count in sorted(found.counts.items()):
            if count > told.get(kind, 0):
                place = f" in {kind[1]}" if kind[1] else ""
                stream.write(f"{namespace.file}: {count - told[kind]:,} more of {kind[0]}{place}\n")
        splits = f"{found.split_rows:,} of them parts of {found.origins:,} split charges"
        verdict = f"{found.faults:,} faults" if found.faults else "ok"
        stream.write(f"{namespace.file}: FOCUS {found.version}, {found.rows:,} rows, {splits}: {verdict}\n")
    return EXIT_FAILED if found.faults else 0


def _columns(namespace: argparse.Namespace, problems: tuple[str, ...]) -> int:
    refuse(problems)
    from exporter.report.focus.columns import columns_of

    with stdout() as stream:
        for column in columns_of(namespace.version).values():
            null = "may be null" if column.nullable else "never null"
            allowed = f": {', '.join(column.allowed)}" if 0 < len(column.allowed) < 10 else ""  # noqa: PLR2004 - a line
            stream.write(f"{column.name:<38}{column.level:<13}{column.kind:<10}{null}{allowed}\n")
    return 0

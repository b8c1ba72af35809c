"""`report`: who used GPUs, how well, and what it cost."""

# Imports inside functions keep `--help` and `--version` fast: gRPC, aiohttp and the driver's binding take a second.
# ruff: noqa: PLC0415

import argparse

from exporter.cli.base import Commands, Parser, command, refuse, stdout


def add(commands: Commands) -> None:
    """Add the command."""
    report = command(commands, "report", "Who used GPUs, how well, and what it cost: a node's ledger.")
    _add_report(report)
    report.set_defaults(run=_report)


def _add_report(parser: Parser) -> None:
    parser.epilog = "Exit code: 0 for a report, 1 if the agent cannot be asked or has nothing yet, 2 for a wrong flag."
    parser.add_argument(
        "--agent",
        required=True,
        metavar="URL",
        help="address of the agent to ask, as http://node-a:9400; of a pod through kubectl port-forward",
    )
    parser.add_argument(
        "--format", choices=("table", "csv", "json"), default="table", help="form of the report [default: table]"
    )
    parser.add_argument(
        "--by",
        choices=("owner", "namespace", "team", "model"),
        default="owner",
        help="what lines are summed by; owner: a line per owner, model and mode [default: owner]",
    )


def _report(namespace: argparse.Namespace, problems: tuple[str, ...]) -> int:
    refuse(problems)
    from exporter import report

    base = report.base_address(namespace.agent)
    read = report.read(report.fetch(base), base)
    with stdout() as stream:
        report.write(read, namespace.format, stream, namespace.by)
    return 0

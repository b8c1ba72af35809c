"""`report`: use and cost of GPUs, of one node from its agent or of a fleet from Prometheus."""

import argparse
from pathlib import Path

from exporter.cli.common import Commands, Parser, add_output, add_timezone, check_output, command, output, refuse
from exporter.cli.focus import FOCUS_FLAGS, add_focus_options
from exporter.config.prometheus_options import PROMETHEUS_OPTIONS, add_prometheus_options

_FILES = {
    "agent_password_file": "file with that user's password [default: none]",
    "agent_ca_file": "PEM file of the authorities that may vouch for the agent [default: the system's]",
    "agent_cert_file": "PEM file of a client certificate [default: none]",
    "agent_key_file": "PEM file of its key, without a passphrase [default: in the certificate's file]",
}
_ALL = ("agent_username", *_FILES, "agent_skip_verify")


def add_agent_access(parser: Parser) -> None:
    """Add them to a command that has ``--agent``."""
    group = parser.add_argument_group("An agent with TLS and passwords (docs/security.md)")
    group.add_argument("--agent-username", metavar="NAME", help="user of basic authentication [default: none]")
    for key, about in _FILES.items():
        group.add_argument(f"--{key.replace('_', '-')}", type=Path, metavar="FILE", help=about)
    group.add_argument(
        "--agent-skip-verify",
        action="store_const",
        const=True,
        help="do not check the agent's certificate; who is in between can then read the password",
    )


def access_problems(namespace: argparse.Namespace) -> list[str]:
    """What is wrong with them, one line each."""
    problems = []
    if bool(namespace.agent_username) != bool(namespace.agent_password_file):
        problems.append("--agent-username: needs --agent-password-file, and the other way round; give both")
    if namespace.agent_username and ":" in namespace.agent_username:
        problems.append("--agent-username: no user's name has a colon; give the name alone")
    if namespace.agent_key_file and not namespace.agent_cert_file:
        problems.append("--agent-key-file: does nothing without --agent-cert-file; give both")
    for key in _FILES:
        path = getattr(namespace, key)
        if path is not None and not path.is_file():
            problems.append(f"--{key.replace('_', '-')}: {path} is no file; allowed: a readable file")
    given = [key for key in _ALL if getattr(namespace, key) is not None]
    if given and namespace.agent is None:
        problems.append(f"--{given[0].replace('_', '-')}: does nothing without --agent; give both")
    return problems


# Imports inside functions keep `--help` and `--version` fast: gRPC, aiohttp and the driver's binding take a second.
# ruff: noqa: PLC0415


_AGENT_FORMATS, _AGENT_BY = ("table", "csv", "json"), ("owner", "namespace", "team", "model")
_OF_A_FLEET = (
    "window",
    "timezone",
    "min_coverage",
    "filter",
    "share_idle",
    "share_unallocated",
    "price_book",
    "top",
    "store",
    *FOCUS_FLAGS,
    *(option.key.replace("-", "_") for option in PROMETHEUS_OPTIONS),
)
_EPILOG = (
    "Exit code: 0 for a whole report; 1 if nothing can be read, or there is nothing yet; 2 for a wrong flag; 3 for a"
    " report that is not whole, or whose coverage is below --min-coverage: its foot says what is missing. How money is"
    " shared and re-priced: docs/cost.md."
)


def add(commands: Commands) -> None:
    """Add the command."""
    report = command(commands, "report", "Who used GPUs, how well, and what it cost: of a fleet, or of one node.")
    report.usage = f"{report.prog} --agent URL | --prometheus URL | --store FILE [OPTION ...]"
    report.epilog = _EPILOG
    _add_source(report)
    add_agent_access(report)
    _add_contents(report)
    _add_form(report)
    add_focus_options(report)
    add_prometheus_options(report)
    report.set_defaults(run=_report)


def _add_source(parser: Parser) -> None:
    where = parser.add_argument_group(
        "Where it is read: one of these, --prometheus (below), or --store and --prometheus"
    )
    where.add_argument(
        "--agent",
        metavar="URL",
        help="one node: address of its agent, as http://node-a:9400; of a pod through kubectl port-forward",
    )
    where.add_argument("--store", type=Path, metavar="FILE", help="a fleet: closed days that serve or store keep")


def _add_contents(parser: Parser) -> None:
    what = parser.add_argument_group("What is told")
    what.add_argument(
        "--window",
        metavar="PERIOD",
        help="30d, 12h, today, lastmonth, 2026-10, 2026-Q3, 2026-10-01..2026-10-15, ... [default: 30d]",
    )
    add_timezone(what)
    what.add_argument(
        "--by",
        metavar="DIMENSION,...",
        help="what lines are told apart by: cluster, node, pool, namespace, kind, workload, team, model, mode,"
        " label:KEY of a cost label [default: namespace]; of one node: one of owner, namespace, team, model,"
        " label:KEY [default: owner]",
    )
    what.add_argument(
        "--filter",
        action="append",
        metavar="DIMENSION=VALUE,...",
        help="only lines that have one of the values; again for another dimension; team= is for none [default: all]",
    )
    what.add_argument(
        "--share-idle",
        choices=("none", "even", "weighted"),
        help="spread the money of GPUs that nobody held over owners: evenly, or by their own cost [default: none]",
    )
    what.add_argument(
        "--share-unallocated",
        action="store_const",
        const=True,
        help="with --share-idle: spread Unattributed, too, so that all that has no owner is",
    )
    what.add_argument(
        "--price-book", type=Path, metavar="FILE", help="work money out again at the prices of this book (docs/cost.md)"
    )


def _add_form(parser: Parser) -> None:
    form = parser.add_argument_group("How it is told")
    form.add_argument(
        "--format",
        choices=("table", "csv", "json", "html", "focus"),
        default="table",
        help="form of the report; of one node table, csv or json [default: table]",
    )
    form.add_argument(
        "--top", type=_count, metavar="N", help="show N owners and the rest as one line (table, html) [default: all]"
    )
    form.add_argument(
        "--min-coverage",
        type=_part,
        metavar="PART",
        help="exit code 3 if a smaller part of the period's hours was recorded, as 0.99 or 99%% [default: 0]",
    )
    add_output(form)


def _part(text: str) -> float:
    try:
        part = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        part = -1.0
    if not 0 <= part <= 1:
        raise argparse.ArgumentTypeError(f"value '{text}' is not a part; allowed: 0 to 1, or 0% to 100%")
    return part


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"value '{text}' is not a number; allowed: 1 or more")
    return int(text)


def _report(namespace: argparse.Namespace, problems: tuple[str, ...]) -> int:
    problems = (*problems, *access_problems(namespace))
    if namespace.agent is not None:
        refuse((*problems, *_not_of_a_node(namespace)))
        return _of_a_node(namespace)
    from exporter.cli.fleet import run

    return run(namespace, problems)


def _not_of_a_node(namespace: argparse.Namespace) -> list[str]:
    from exporter.cost.ledger import LABEL, label_problem

    problems = [
        f"--{key.replace('_', '-')}: is for a fleet, and --agent tells of one node; leave out one of them"
        for key in _OF_A_FLEET
        if getattr(namespace, key) is not None
    ]
    by = namespace.by
    if by not in {None, *_AGENT_BY} and (not by.startswith(LABEL) or label_problem(by)):
        problems.append(f"--by: value '{by}' is not for one node; allowed: {', '.join(_AGENT_BY)}, label:KEY")
    if namespace.format not in _AGENT_FORMATS:
        problems.append(
            f"--format: value '{namespace.format}' is not for one node; allowed: {', '.join(_AGENT_FORMATS)}"
        )
    return problems


def _of_a_node(namespace: argparse.Namespace) -> int:
    from exporter.cost.ledger import LABEL
    from exporter.cost.node_report import AgentAccess, base_address, fetch, label_keys
    from exporter.cost.node_report import read as read_node
    from exporter.cost.node_report_render import write
    from exporter.errors import ConfigError

    check_output(namespace.output)
    base = base_address(namespace.agent)
    access = AgentAccess(**{key.removeprefix("agent_"): getattr(namespace, key) for key in _ALL})
    read = read_node(fetch(base, access=access), base)
    by = namespace.by or "owner"
    known = label_keys(read)
    if by.startswith(LABEL) and by.removeprefix(LABEL) not in known:
        there = ", ".join(sorted(known)) or "none; name them by --cost-labels of the agent"
        raise ConfigError(f"--by: no owner has the {by.replace(':', ' ')}; labels of this node: {there}")
    with output(namespace.output) as stream:
        write(read, namespace.format, stream, by)
    return 0

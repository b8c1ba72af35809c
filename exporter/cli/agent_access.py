"""Options that say how to get in to an agent with TLS and passwords."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from exporter.cli.base import Parser

if TYPE_CHECKING:
    from exporter.report.agent_client import AgentAccess

_FILES = ("agent_password_file", "agent_ca_file", "agent_cert_file", "agent_key_file")
_ALL = ("agent_username", *_FILES, "agent_skip_verify")


def add_agent_access(parser: Parser) -> None:
    """Add them to a command that has ``--agent``."""
    group = parser.add_argument_group("An agent with TLS and passwords (docs/web-config.md)")
    group.add_argument("--agent-username", metavar="NAME", help="user of basic authentication [default: none]")
    group.add_argument(
        "--agent-password-file", type=Path, metavar="FILE", help="file with that user's password [default: none]"
    )
    group.add_argument(
        "--agent-ca-file",
        type=Path,
        metavar="FILE",
        help="PEM file of the authorities that may vouch for the agent [default: the system's]",
    )
    group.add_argument(
        "--agent-cert-file", type=Path, metavar="FILE", help="PEM file of a client certificate [default: none]"
    )
    group.add_argument(
        "--agent-key-file",
        type=Path,
        metavar="FILE",
        help="PEM file of its key, without a passphrase [default: in the certificate's file]",
    )
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


def agent_access(namespace: argparse.Namespace) -> "AgentAccess":
    """What they come to, where there is no problem."""
    from exporter.report.agent_client import AgentAccess  # noqa: PLC0415 - keeps `--help` fast

    return AgentAccess(
        username=namespace.agent_username or "",
        password_file=namespace.agent_password_file,
        ca_file=namespace.agent_ca_file,
        cert_file=namespace.agent_cert_file,
        key_file=namespace.agent_key_file,
        skip_verify=bool(namespace.agent_skip_verify),
    )

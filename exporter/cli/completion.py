"""Implements `completion`: scripts for bash, zsh and fish, generated from the parsers of all commands."""

import argparse
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from exporter.cli.common import Parser, alone
from exporter.cli.output import PROGRAM, put
from exporter.cost.dimensions import DIMENSIONS
from exporter.cost.window import PERIODS

_FILE = ("FILE", "PATH", "DIR")
"""Metavars of values that are paths."""
_END = re.compile(r"[.;:] | \[")


@dataclass(slots=True)
class _Place:
    """A command or subcommand, and the words that may follow it."""

    commands: dict[str, str] = field(default_factory=dict)
    """Purposes of subcommands, by name."""
    flags: dict[str, str] = field(default_factory=dict)
    """Help texts, by flag."""
    values: dict[str, tuple[str, ...] | None] = field(default_factory=dict)
    """Values by flag that takes one; ``None`` for a path, empty for any other text."""
    words: list[str] = field(default_factory=list)
    """Values of the positional arguments."""


def add_completion(parser: Parser) -> None:
    """Add the argument for the shell."""
    parser.epilog = (
        f"bash and zsh read it with: source <({PROGRAM} completion bash), in ~/.bashrc or ~/.zshrc for every terminal."
    )
    parser.add_argument("shell", choices=tuple(_SHELLS), metavar="SHELL", help="bash, zsh or fish")
    parser.set_defaults(run=alone(_completion))


def _completion(namespace: argparse.Namespace) -> int:
    from exporter.cli import whole_parser  # noqa: PLC0415 - it imports this module

    put(*_SHELLS[namespace.shell](dict(_places(whole_parser(), ""))))
    return 0


def _places(parser: argparse.ArgumentParser, path: str) -> Iterator[tuple[str, _Place]]:
    """Yield each command and its path: ``""``, ``simulate``, ``simulate check``."""
    place = _Place()
    for action in parser._actions:  # noqa: SLF001 - argparse has no public list of actions
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - as above
            place.commands = {one.dest: one.help or "" for one in action._choices_actions}  # noqa: SLF001 - as above
            for name, below in action.choices.items():
                yield from _places(below, f"{path} {name}".strip())
        elif not action.option_strings:
            place.words += _words(action) or ()
        elif (flag := action.option_strings[-1]).startswith("--"):
            place.flags[flag] = _about(action)
            if action.nargs != 0:
                place.values[flag] = _words(action)
    yield path, place


def _about(action: argparse.Action) -> str:
    """Return the first sentence of a flag's help."""
    if not action.help or action.help == argparse.SUPPRESS:
        return ""
    return _END.split(action.help % vars(action))[0]


def _words(action: argparse.Action) -> tuple[str, ...] | None:
    """Return the possible values; ``None`` for a path."""
    metavar = str(action.metavar or "")
    if action.choices is not None:
        return tuple(map(str, action.choices))
    if metavar == "NAME|FILE" or action.dest == "simulate":
        from gpu_simulator import scenario  # noqa: PLC0415 - keeps other commands fast

        return scenario.shipped()
    if metavar in _FILE:
        return None
    if metavar.startswith("{"):
        return tuple(metavar.strip("{}").split(","))
    return {"PERIOD": ("1d", "7d", "30d", *PERIODS), "DIMENSION,...": DIMENSIONS}.get(metavar, ())


def _bash(places: Mapping[str, _Place]) -> Iterator[str]:
    yield f"# Completion of {PROGRAM} for bash: source <({PROGRAM} completion bash)"
    yield "_gpu_cost_exporter() {"
    yield "  local word place= words= flag="
    yield '  local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}"'
    # bash splits --flag=value at the equals sign.
    yield '  [[ $current == "=" ]] && current='
    yield '  [[ $previous == "=" ]] && previous="${COMP_WORDS[COMP_CWORD-2]}"'
    yield '  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do'
    yield f'    case "$place $word" in {_any([path if " " in path else f" {path}" for path in places if path])})'
    yield '      place="${place:+$place }$word" ;;'
    yield "    esac"
    yield "  done"
    yield '  case "$place:$previous" in'
    alike: dict[tuple[str, ...], list[str]] = {}
    for path, place in places.items():
        for flag, words in place.values.items():
            alike.setdefault(words or (), []).append(f"{path}:{flag}")
    for words, flags in alike.items():
        # Without words, readline completes file names.
        reply = f'COMPREPLY=($(compgen -W {shlex.quote(" ".join(words))} -- "$current")); ' if words else ""
        yield f"    {_any(flags)}) {reply}return ;;"
    yield "  esac"
    yield '  case "$place" in'
    for path, place in places.items():
        yield f"    {shlex.quote(path)}) words={shlex.quote(' '.join((*place.commands, *place.words)))}"
        yield f"      flag={shlex.quote(' '.join(place.flags))} ;;"
    yield "  esac"
    yield "  [[ $current == -* ]] && words=$flag"
    yield '  COMPREPLY=($(compgen -W "$words" -- "$current"))'
    yield "}"
    yield f"complete -o bashdefault -o default -F _gpu_cost_exporter {PROGRAM}"


def _any(texts: Sequence[str]) -> str:
    return "|".join(map(shlex.quote, texts))


def _zsh(places: Mapping[str, _Place]) -> Iterator[str]:
    yield "autoload -U +X compinit && compinit -C"
    yield "autoload -U +X bashcompinit && bashcompinit"
    yield from _bash(places)


def _fish(places: Mapping[str, _Place]) -> Iterator[str]:
    yield f"# Completion of {PROGRAM} for fish: {PROGRAM} completion fish | source"
    for path, place in places.items():
        tests = [f"__fish_seen_subcommand_from {word}" for word in path.split()]
        tests += [f"not __fish_seen_subcommand_from {' '.join(place.commands)}"] if place.commands else []
        head = f"complete -c {PROGRAM} -n {shlex.quote('; and '.join(tests) or 'true')}"
        for name, about in place.commands.items():
            yield f"{head} -f -a {name} -d {shlex.quote(about)}"
        if place.words:
            yield f"{head} -f -a {shlex.quote(' '.join(place.words))}"
        for flag, about in place.flags.items():
            takes = _fish_value(place.values[flag]) if flag in place.values else ""
            yield f"{head} -l {flag.removeprefix('--')}{takes} -d {shlex.quote(about)}"


def _fish_value(words: tuple[str, ...] | None) -> str:
    if words is None:
        return " -rF"
    return f" -xa {shlex.quote(' '.join(words))}" if words else " -x"


_SHELLS: Mapping[str, Callable[[Mapping[str, _Place]], Iterator[str]]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}

"""The shipped alerting rules with shorter windows, so that a demonstration need not last an hour."""

from dataclasses import dataclass

from exporter.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Substitution:
    """One text of the rules file, what stands there in the demonstration, and what it is."""

    shipped: str
    demo: str
    what: str


def _window(shipped: str, demo: str) -> tuple[Substitution, ...]:
    """A window wherever it stands: as a range, as an offset, and as the word that an alert tells."""
    return tuple(
        Substitution(shipped=text.format(shipped), demo=text.format(demo), what=what)
        for text, what in (("[{}]", "window"), ("offset {}", "the window before"))
    )


SUBSTITUTIONS = (
    Substitution(shipped="* 30 / 86400", demo="* 2 / 240", what="values expected in a day"),
    Substitution(shipped=">= 86400", demo=">= 240", what="a day without work, seconds"),
    Substitution(shipped="interval: 30s", demo="interval: 2s", what="how often rules run"),
    Substitution(shipped="interval: 2m", demo="interval: 6s", what="how often the day's rules run"),
    Substitution(shipped="interval: 1h", demo="interval: 1m", what="how often the ledger's rules run"),
    Substitution(shipped="[24h]", demo="[4m]", what="long window of inference"),
    Substitution(shipped=") / 900", demo=") / 15", what="seconds of a window of 15m"),
    Substitution(shipped=") / 3600", demo=") / 60", what="seconds of a window of 1h"),
    Substitution(shipped="[59m59s]", demo="[59s]", what="the hour that the ledger's sums take"),
    *_window("6h", "2m"),
    *_window("1h", "1m"),
    *_window("15m", "15s"),
    Substitution(shipped='"30m", ""', demo='"30s", ""', what="window of batch, in words"),
    Substitution(shipped='"1h", ""', demo='"1m", ""', what="window, in words"),
    Substitution(shipped='"2h", ""', demo='"2m", ""', what="window of interactive, in words"),
    Substitution(shipped='"24h", ""', demo='"4m", ""', what="window of inference, in words"),
    Substitution(shipped="idle for 2h", demo="idle for 2m", what="words of GPUSharedIdle"),
    Substitution(shipped="nobody for 6h", demo="nobody for 2m", what="words of GPUUnallocated"),
    Substitution(
        shipped="keep_firing_for: 15m", demo="keep_firing_for: 15s", what="how long an alert outlives its cause"
    ),
    Substitution(shipped="for: 15m", demo="for: 15s", what="delay of the alerts of workloads"),
    Substitution(shipped="for: 10m", demo="for: 10s", what="delay of other alerts"),
    Substitution(shipped="for: 5m", demo="for: 20s", what="delay of the exporter's alerts"),
)
"""In this order: a longer text comes before one that it contains."""


def shorten(rules: str, source: str, substitutions: tuple[Substitution, ...] = SUBSTITUTIONS) -> str:
    """Put the demonstration's windows into a rules file.

    Args:
        rules: Text of ``rules/prometheus-rules.yaml``.
        source: Where the text comes from, for the error.
        substitutions: What to replace, in order.

    Returns:
        The same rules, with every shipped text replaced.

    Raises:
        ConfigError: A text to be replaced is not in the file, so the file and this table do not belong together.
    """
    missing = [item for item in substitutions if item.shipped not in rules]
    if missing:
        raise ConfigError(
            *(
                f"{source}: {item.shipped!r} ({item.what}) is not in it; take the rules file of this version"
                for item in missing
            )
        )
    for item in substitutions:
        rules = rules.replace(item.shipped, item.demo)
    return rules


def table(substitutions: tuple[Substitution, ...] = SUBSTITUTIONS) -> str:
    """Show the substitutions, one line each."""
    width = max(len(item.shipped) for item in substitutions)
    return "\n".join(f"  {item.shipped:<{width}}  ->  {item.demo:<31}  {item.what}" for item in substitutions)

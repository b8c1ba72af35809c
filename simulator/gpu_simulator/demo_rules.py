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
    Substitution(shipped="interval: 30s", demo="interval: 2s", what="how often rules run"),
    Substitution(shipped="interval: 2m", demo="interval: 6s", what="how often slow rules run"),
    Substitution(shipped="interval: 1h", demo="interval: 1m", what="how often evidence for recommend is recorded"),
    Substitution(shipped="[24h]", demo="[4m]", what="a day of idle money"),
    Substitution(shipped=") / 3600", demo=") / 60", what="seconds of a window of 1h"),
    Substitution(shipped="[2h] offset 6h", demo="[30s] offset 2m", what="since when a pool is there"),
    Substitution(shipped="[6h]", demo="[2m]", what="for how long GPUs are free"),
    *_window("1h", "1m"),
    Substitution(shipped="[15m]", demo="[15s]", what="window of amounts"),
    Substitution(shipped="[2m]", demo="[5s]", what="how long a missed scrape is bridged"),
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

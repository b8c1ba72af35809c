"""The shipped alerting rules with shorter windows, so that a demonstration need not last an hour."""

from dataclasses import dataclass

from exporter.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Substitution:
    """One text of the rules file, what stands there in the demonstration, and what it is."""

    shipped: str
    demo: str
    what: str


SUBSTITUTIONS = (
    Substitution(shipped="* 30 / 3600", demo="* 2 / 60", what="values expected in the long window"),
    Substitution(shipped="interval: 30s", demo="interval: 2s", what="how often rules run"),
    Substitution(shipped="[1h]", demo="[1m]", what="long window"),
    Substitution(shipped="[15m]", demo="[15s]", what="short window"),
    Substitution(shipped="> 3600", demo="> 60", what="age from which a pod is judged, seconds"),
    Substitution(
        shipped="keep_firing_for: 15m", demo="keep_firing_for: 30s", what="how long an alert outlives its cause"
    ),
    Substitution(shipped="for: 10m", demo="for: 10s", what="delay of the idle alert"),
    Substitution(shipped="for: 5m", demo="for: 20s", what="delay of the exporter's alerts"),
    Substitution(shipped="over the last hour", demo="over the last minute (shortened)", what="words of the alert"),
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

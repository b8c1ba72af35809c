"""The ``activity`` of a container in a scenario file: one number, or one of the forms with its parameters."""

from collections.abc import Callable

from gpu_simulator.profiles import IdleAfter, Ramp, Signal, Sine, Square, Steady, Steps, noise
from gpu_simulator.scenario_keys import Item, Section, close_match

_SHORTEST_SECONDS = 0.01


def read_signal(section: Section, seed: str) -> Signal:
    """The signal of ``activity``; ``seed`` makes noise differ between containers."""
    item = section.item("activity")
    if item is None or not isinstance(item.value, dict):
        return Steady(level=section.number("activity", low=0.0, high=1.0))
    part = section.section("activity")
    if part is None:
        return Steady(level=0.0)
    forms = [key for key in part.keys() if key in _FORMS]  # noqa: SIM118 - a section is no mapping
    unknown = [key for key in part.keys() if key not in _FORMS and key != "idle_after"]  # noqa: SIM118 - as above
    if len(forms) != 1 or unknown:
        hint = "".join(close_match(key, _FORMS) for key in unknown)
        found = ", ".join([*forms, *unknown]) or "no form"
        section.problem("activity", f"has {found}{hint}; allowed: exactly one of {', '.join(_FORMS)}, and idle_after")
        return Steady(level=0.0)
    signal = _FORMS[forms[0]](part, seed)
    after = part.optional_number("idle_after", low=0.0)
    return signal if after is None else IdleAfter(signal=signal, seconds=after)


def _level(section: Section, key: str, default: float | None = None) -> float:
    return section.number(key, default, low=0.0, high=1.0)


def _steady(part: Section, seed: str) -> Signal:  # noqa: ARG001 - all forms are read alike
    return Steady(level=_level(part, "steady"))


def _parameters(part: Section, form: str) -> Section:
    return part.section(form) or part.sub(Item({}, part.line), form)


def _square(part: Section, seed: str) -> Signal:  # noqa: ARG001 - all forms are read alike
    square = _parameters(part, "square")
    signal = Square(
        high=_level(square, "high"),
        low=_level(square, "low", 0.0),
        period_seconds=square.number("period", low=_SHORTEST_SECONDS) or 1.0,
        duty=_level(square, "duty", 0.5),
        phase_seconds=square.number("phase", 0.0, low=0.0),
    )
    square.finish()
    return signal


def _sine(part: Section, seed: str) -> Signal:  # noqa: ARG001 - all forms are read alike
    sine = _parameters(part, "sine")
    mean = _level(sine, "mean")
    signal = Sine(
        mean=mean,
        amplitude=sine.number("amplitude", low=0.0, high=min(mean, 1.0 - mean)),
        period_seconds=sine.number("period", low=_SHORTEST_SECONDS) or 1.0,
        phase_seconds=sine.number("phase", 0.0, low=0.0),
    )
    sine.finish()
    return signal


def _ramp(part: Section, seed: str) -> Signal:  # noqa: ARG001 - all forms are read alike
    ramp = _parameters(part, "ramp")
    signal = Ramp(
        first=_level(ramp, "first"),
        last=_level(ramp, "last"),
        seconds=ramp.number("seconds", low=_SHORTEST_SECONDS) or 1.0,
    )
    ramp.finish()
    return signal


def _noise(part: Section, seed: str) -> Signal:
    section = _parameters(part, "noise")
    low = _level(section, "low", 0.0)
    signal = noise(
        low=low,
        high=section.number("high", low=low, high=1.0),
        slot_seconds=section.number("slot", 5.0, low=_SHORTEST_SECONDS),
        seed=seed,
    )
    section.finish()
    return signal


def _steps(part: Section, seed: str) -> Signal:  # noqa: ARG001 - all forms are read alike
    points: list[tuple[float, float]] = []
    for step in part.sections("steps"):
        at = step.number("at", low=points[-1][0] if points else 0.0)
        points.append((at, _level(step, "level")))
        step.finish()
    if not points:
        part.problem("steps", "is empty; allowed: a list such as [{at: 0, level: 0.2}, {at: 60, level: 1}]")
    return Steps(points=tuple(points) or ((0.0, 0.0),))


_FORMS: dict[str, Callable[[Section, str], Signal]] = {
    "steady": _steady,
    "square": _square,
    "sine": _sine,
    "ramp": _ramp,
    "noise": _noise,
    "steps": _steps,
}

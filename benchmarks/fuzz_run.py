"""Fuzzes one target in this process until its time is over: by coverage with atheris, else by what is answered."""

import argparse
import hashlib
import json
import os
import random
import re
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from types import FrameType, TracebackType

HANG_SECONDS = 2.0
"""Of CPU time, on one input."""
MOST_MIB = 2048
_KEPT_PER_CAUSE = 5
_TELL_SECONDS = 1.0
_DIGITS = re.compile(r"[0-9]+")


class HangError(BaseException):
    """An input took too long; nothing of the product may catch this."""


class Findings:
    """Puts inputs to a target, counts, and keeps each that is a finding by its cause."""

    def __init__(self, path: str, crashes: Path, told: Path) -> None:
        import fuzz_targets  # noqa: PLC0415 - the caller instruments what this imports

        fuzz_targets.load(path.partition("/")[0])
        fuzz_targets.quiet()
        self.target = fuzz_targets.TARGETS[path]
        self._run = fuzz_targets.run
        self._crashes, self._told = crashes, told
        self.executions = 0
        self._told_at = time.monotonic()
        self.causes: Counter[str] = Counter()
        signal.signal(signal.SIGVTALRM, _stop)

    def put(self, data: bytes) -> str:
        """Put one input; what it was answered with in a few words, by which those that are alike are known."""
        self.executions += 1
        if time.monotonic() - self._told_at > _TELL_SECONDS:
            self.tell()
        signal.setitimer(signal.ITIMER_VIRTUAL, HANG_SECONDS)
        try:
            self._run(self.target, data)
        except (HangError, Exception) as error:  # noqa: BLE001 - each one is a finding
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            return self._found(error, data)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        return ""

    def tell(self) -> None:
        """Write how many there were; whoever started this process reads it, also where it was killed."""
        self._told_at = time.monotonic()
        self._told.write_text(json.dumps({"executions": self.executions, "causes": self.causes}))

    def _found(self, error: BaseException, data: bytes) -> str:
        cause = f"{type(error).__name__}-{_place(error.__traceback__)}"
        self.causes[cause] += 1
        if self.causes[cause] <= _KEPT_PER_CAUSE:
            self._crashes.mkdir(parents=True, exist_ok=True)
            name = f"{self.target.name}.{cause}.{hashlib.sha256(data).hexdigest()[:8]}"
            (self._crashes / name).write_bytes(data)
            words = "".join(traceback.format_exception(error))
            (self._crashes / f"{name}.txt").write_text(words, errors="backslashreplace")
            self.tell()
        return cause


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise HangError(f"more than {HANG_SECONDS:g} s of CPU time")


def _place(trace: TracebackType | None) -> str:
    """File and line of the innermost frame that is ours."""
    frames = [frame for frame in traceback.extract_tb(trace) if frame.name != "require"]
    ours = [frame for frame in frames if f"{os.sep}exporter{os.sep}" in frame.filename] or frames
    return f"{Path(ours[-1].filename).stem}-{ours[-1].lineno}" if ours else "nowhere"


def _guided(arguments: argparse.Namespace) -> None:
    import atheris  # noqa: PLC0415 - where it can be had

    atheris.enabled_hooks.add("str")
    with atheris.instrument_imports(include=["exporter", "yaml"]):
        findings = Findings(arguments.target, arguments.crashes, arguments.told)
    options = [
        f"-max_total_time={arguments.seconds}",
        f"-max_len={findings.target.most_bytes}",
        f"-rss_limit_mb={MOST_MIB}",
        f"-artifact_prefix={arguments.crashes}/{findings.target.name}.killed-",
        "-timeout=30",
        "-print_final_stats=1",
        "-reload=0",
        *([f"-dict={arguments.words}"] if arguments.words.stat().st_size else []),
    ]
    folders = [str(arguments.corpus), str(arguments.seeds)]
    atheris.Setup([sys.argv[0], *options, *folders], lambda data: findings.put(data) and None)
    try:
        atheris.Fuzz()
    finally:
        findings.tell()


def _unguided(arguments: argparse.Namespace) -> None:
    """Mutate what is there; keep what is answered in words that were not met before."""
    findings = Findings(arguments.target, arguments.crashes, arguments.told)
    words = [word.encode() for word in arguments.words.read_text().splitlines()]
    known = [path.read_bytes() for folder in (arguments.seeds, arguments.corpus) for path in folder.glob("*")] or [b""]
    dice = random.Random(time.time_ns())  # noqa: S311 - no secret
    seen: set[str] = set()
    until = time.monotonic() + arguments.seconds
    while time.monotonic() < until:
        data = mutated(dice.choice(known), known, words, dice)[: findings.target.most_bytes]
        answer = _DIGITS.sub("0", findings.put(data))
        if answer not in seen:
            seen.add(answer)
            known.append(data)
            (arguments.corpus / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    findings.tell()


def mutated(data: bytes, others: list[bytes], words: list[bytes], dice: random.Random) -> bytes:
    """The input with a few changes."""
    content = bytearray(data)
    for _ in range(dice.randint(1, 5)):
        at = dice.randint(0, len(content))
        end = min(len(content), at + dice.randint(0, 16))
        match dice.randint(0, 6):
            case 0:
                content[at:end] = b""
            case 1 if words:
                content[at:at] = dice.choice(words)
            case 2:
                content[at:end] = dice.randbytes(end - at)
            case 3:
                content[at:at] = content[at:end] * dice.randint(1, 50)
            case 4:
                other = dice.choice(others)
                start = dice.randint(0, len(other))
                content[at:end] = other[start : start + dice.randint(0, 64)]
            case 5 if at < len(content):
                content[at] ^= 1 << dice.randint(0, 7)
            case _:
                content[at:end] = str(dice.choice((0, -1, 2**31, 2**63, 10**400, "NaN", "1e999"))).encode()
    return bytes(content)


def main() -> None:
    """Read what to do from the command line; ``fuzz.py`` writes it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--seconds", type=int, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    for name in ("corpus", "seeds", "crashes", "told", "words", "site"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    arguments = parser.parse_args()
    sys.argv = sys.argv[:1]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if (arguments.site / "atheris").is_dir():
        sys.path.append(str(arguments.site))
        _guided(arguments)
    else:
        _unguided(arguments)


if __name__ == "__main__":
    main()

"""Fuzzes the parsers in which fuzzing has found faults: `make fuzz` runs it.

    make fuzz [FAMILY=wire,yaml/config] [SECONDS=120]

Guided by coverage with atheris (libFuzzer), which `make fuzz` installs into .cache/fuzz/site. Inputs that a target does
not answer as it promises are in .cache/fuzz/crashes/<family>/ with their tracebacks. .cache/fuzz/corpus/ keeps the
inputs that reach more; copy one that is worth it to tests/corpora/, which a test replays.
"""

import argparse
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fuzz_targets import Target

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "fuzz"
SITE = CACHE / "site"
HANG_SECONDS = 2.0
"""Of CPU time, on one input."""
MOST_MIB = 2048
GRACE_SECONDS = 900
"""A busy machine may leave a process without time."""
_KEPT_PER_CAUSE = 5
_TELL_SECONDS = 1.0


class HangError(BaseException):
    """An input took too long; nothing of the product may catch this."""


class Findings:
    """Puts inputs to a target, counts them, and keeps each finding by its cause."""

    def __init__(self, path: str) -> None:
        import fuzz_targets  # noqa: PLC0415 - the caller instruments what this imports

        fuzz_targets.quiet()
        self.target: Target = fuzz_targets.TARGETS[path]
        self._run = fuzz_targets.run
        self._executions = 0
        self._account, self._told_at = account_of(path), 0.0
        self.causes: Counter[str] = Counter()
        self.corpus, self._crashes = CACHE / "corpus" / path, CACHE / "crashes" / self.target.family
        for folder in (self.corpus, self._crashes):
            folder.mkdir(parents=True, exist_ok=True)
        signal.signal(signal.SIGVTALRM, _stop)

    def put(self, data: bytes) -> None:
        """Put one input."""
        self._executions += 1
        if time.monotonic() - self._told_at > _TELL_SECONDS:
            self.tell()
        signal.setitimer(signal.ITIMER_VIRTUAL, HANG_SECONDS)
        try:
            self._run(self.target, data)
        except (HangError, Exception) as error:  # noqa: BLE001 - each one is a finding
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            self._found(error, data)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    def _found(self, error: BaseException, data: bytes) -> None:
        cause = f"{type(error).__name__}-{_place(error.__traceback__)}"
        self.causes[cause] += 1
        if self.causes[cause] <= _KEPT_PER_CAUSE:
            place = self._crashes / f"{self.target.name}.{cause}.{_name_of(data)}"
            place.write_bytes(data)
            words = "".join(traceback.format_exception(error))
            place.with_name(f"{place.name}.txt").write_text(words, errors="backslashreplace")
            self.tell()

    def tell(self) -> None:
        """Write what came of all inputs so far: libFuzzer ends the process without another line of Python."""
        self._told_at = time.monotonic()
        self._account.write_text(json.dumps({"executions": self._executions, "causes": self.causes}))


def account_of(path: str) -> Path:
    """Return the file with what came of a target's inputs."""
    return CACHE / f"{path.replace('/', '-')}.json"


def _name_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise HangError(f"more than {HANG_SECONDS:g} s of CPU time")


def _place(trace: TracebackType | None) -> str:
    """File and line of the innermost frame that is ours."""
    frames = [frame for frame in traceback.extract_tb(trace) if frame.name != "require"]
    ours = [frame for frame in frames if f"{os.sep}exporter{os.sep}" in frame.filename] or frames
    return f"{Path(ours[-1].filename).stem}-{ours[-1].lineno}" if ours else "nowhere"


def fuzz(path: str, seconds: int) -> None:
    """Fuzz one target in this process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.path.append(str(SITE))
    import atheris  # noqa: PLC0415 - only a process that fuzzes has it

    atheris.enabled_hooks.add("str")
    with atheris.instrument_imports(include=["exporter", "yaml"]):
        findings = Findings(path)
    options = [
        f"-max_total_time={seconds}",
        f"-max_len={findings.target.most_bytes}",
        f"-rss_limit_mb={MOST_MIB}",
        f"-artifact_prefix={CACHE}/crashes/{path}.killed-",
        "-timeout=30",
        "-reload=0",
    ]
    folders = [str(findings.corpus), str(findings.target.seeds)]
    atheris.Setup([sys.argv[0], *options, *folders], findings.put)
    atheris.Fuzz()


def main() -> int:
    """Fuzz each wanted target in a process of its own; return 1 where there is a finding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="", help="families, or family/target, with commas [default: all]")
    parser.add_argument("--seconds", type=int, default=120, help="for each family [default: %(default)s]")
    parser.add_argument("--target", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.target:
        sys.argv = sys.argv[:1]
        fuzz(arguments.target, arguments.seconds)
        return 0
    import fuzz_targets  # noqa: PLC0415 - a process that fuzzes instruments what this imports

    names = [name.strip() for name in arguments.family.split(",") if name.strip()]
    every = fuzz_targets.TARGETS.values()
    families = Counter(one.family for one in every)
    unknown = [name for name in names if name not in families and name not in fuzz_targets.TARGETS]
    if unknown:
        parser.error(f"no family {', '.join(unknown)}; there are: {', '.join(families)}")
    if not (SITE / "atheris").is_dir():
        parser.error("atheris is not installed; make fuzz does it")
    wanted = [one for one in every if not names or one.family in names or one.path in names]
    found = [_fuzz_apart(target, max(5, arguments.seconds // families[target.family])) for target in wanted]
    return 1 if any(found) else 0


def _fuzz_apart(target: "Target", seconds: int) -> bool:
    """Fuzz a target in a process of its own and print what came of it; return whether something was found."""
    account = account_of(target.path)
    log = account.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    account.unlink(missing_ok=True)
    memory = Path("/dev/shm")  # noqa: S108 - a folder with a name of its own is made there
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=memory if memory.is_dir() else None) as folder:
        command = [sys.executable, __file__, f"--target={target.path}", f"--seconds={seconds}"]
        environment = {**os.environ, "TMPDIR": folder, "PYTHONHASHSEED": "0"}
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
            try:
                code: int | None = process.wait(seconds + GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                code = None
    told = json.loads(account.read_text()) if account.is_file() else {"executions": 0, "causes": {}}
    causes = [f"{count:,} times {cause}" for cause, count in told["causes"].items()]
    if code != 0:
        causes.append(f"ended with exit code {code}, see {log}")
    print(f"{target.path:<20}{told['executions']:>12,} executions; {'; '.join(causes) or 'no finding'}", flush=True)
    return bool(causes)


if __name__ == "__main__":
    sys.exit(main())

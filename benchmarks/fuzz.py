"""Fuzzes every parser, family by family, and keeps account of it: CPU time, executions, coverage, findings.

    make fuzz [FAMILY=kubelet,wire] [SECONDS=120]
    python benchmarks/fuzz.py [--family NAME,...] [--seconds N] [--rounds N] | --table | --settle | --keep

Guided by coverage with atheris (libFuzzer), which ``make fuzz`` puts into .cache/fuzz/site; where that cannot be had,
by a mutation loop that is guided by answers. Found inputs are in .cache/fuzz/crashes/<family>/, with their tracebacks;
what was grown is in .cache/fuzz/corpus/, and ``--keep`` chooses from it what tests/corpora/ has: the fewest inputs that
reach all that is reached. The account over all runs is .cache/fuzz/ledger.json.
"""

import argparse
import fcntl
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fuzz_targets
from fuzz_targets import Target

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "fuzz"
CORPORA = ROOT / "tests" / "corpora"
LEDGER = CACHE / "ledger.json"
_COVERAGE = re.compile(r"^#\d+\s.*\bcov: (\d+) ft: (\d+) corp: (\d+)", re.MULTILINE)
_WORD = re.compile(rb"[A-Za-z][A-Za-z0-9_./:-]{2,40}")
_MOST_WORDS = 400
_GRACE_SECONDS = 900


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """What a run of one target came to."""

    cpu_seconds: float
    executions: int
    coverage: int
    new_inputs: int
    causes: dict[str, int]
    died: str = ""
    """How, where the process did not end by itself."""


def fuzz(target: Target, seconds: int) -> Slice:
    """Fuzz one target for so many seconds, in a process of its own."""
    corpus = CACHE / "corpus" / target.family / target.name
    crashes = CACHE / "crashes" / target.family
    for folder in (corpus, crashes):
        folder.mkdir(parents=True, exist_ok=True)
    before = sum(1 for _ in corpus.iterdir())
    memory = Path("/dev/shm")  # noqa: S108 - a folder with a name of its own is made there
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=memory if memory.is_dir() else None) as folder:
        scratch = Path(folder)
        seeds = scratch / "seeds"
        seeds.mkdir()
        for path in kept(target):
            (seeds / path.name).write_bytes(path.read_bytes())
        words, told, log = scratch / "words", scratch / "told.json", scratch / "log"
        words.write_bytes(_words(seeds))
        paths = {"corpus": corpus, "seeds": seeds, "crashes": crashes, "told": told, "words": words}
        options = [f"--{name}={path}" for name, path in {**paths, "site": CACHE / "site", "scratch": scratch}.items()]
        command = [sys.executable, str(Path(__file__).with_name("fuzz_run.py")), target.path, f"--seconds={seconds}"]
        environment = {**os.environ, "TMPDIR": folder, "PYTHONHASHSEED": "0"}
        with log.open("wb") as stream:
            process = subprocess.Popen([*command, *options], stdout=stream, stderr=stream, env=environment)
            code, usage = _waited(process, seconds + _GRACE_SECONDS)
        text = log.read_text(errors="replace")
        account = json.loads(told.read_text()) if told.is_file() else {"executions": 0, "causes": {}}
        if code:
            crashes.mkdir(parents=True, exist_ok=True)
            (crashes / f"{target.name}.log").write_text(text[-20_000:])
    covered = _COVERAGE.findall(text)
    return Slice(
        cpu_seconds=usage,
        executions=account["executions"],
        coverage=int(covered[-1][0]) if covered else 0,
        new_inputs=sum(1 for _ in corpus.iterdir()) - before,
        causes=account["causes"],
        died=f"exit code {code}" if code else "",
    )


def _waited(process: "subprocess.Popen[bytes]", most_seconds: float) -> tuple[int | None, float]:
    """Exit code and CPU seconds of a process; ``None`` where it had to be killed, for others left it no time to run."""
    before = os.times()
    code: int | None
    try:
        code = process.wait(most_seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        code = None
    after = os.times()
    return code, after.children_user + after.children_system - before.children_user - before.children_system


def kept(target: Target) -> list[Path]:
    """Inputs of the repository for a target."""
    return sorted((CORPORA / target.family).glob(f"{target.name}.*"))


def _words(seeds: Path) -> bytes:
    """A dictionary for libFuzzer of the words that stand in the seeds."""
    found = {word for path in seeds.iterdir() for word in _WORD.findall(path.read_bytes())}
    return b"".join(b'"%s"\n' % word for word in sorted(found)[:_MOST_WORDS])


def entered(target: Target, found: Slice) -> None:
    """Add a run to the account; several may do that at once."""
    with _locked():
        ledger = account()
        line = ledger.setdefault(target.family, {}).setdefault(
            target.name, {"cpu_seconds": 0.0, "executions": 0, "coverage": 0, "findings": {}}
        )
        line["cpu_seconds"] += found.cpu_seconds
        line["executions"] += found.executions
        line["coverage"] = max(line["coverage"], found.coverage)
        for cause, count in found.causes.items():
            line["findings"][cause] = line["findings"].get(cause, 0) + count
        if found.died:
            line["findings"][found.died] = line["findings"].get(found.died, 0) + 1
        _write(ledger)


@contextmanager
def _locked() -> Iterator[None]:
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "ledger.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(ledger: dict[str, dict[str, dict[str, Any]]]) -> None:
    LEDGER.with_suffix(".new").write_text(json.dumps(ledger, indent=1, sort_keys=True))
    LEDGER.with_suffix(".new").replace(LEDGER)


def account() -> dict[str, dict[str, dict[str, Any]]]:
    """What all runs so far came to, by family and target."""
    return json.loads(LEDGER.read_text()) if LEDGER.is_file() else {}


def table(families: Sequence[str]) -> None:
    """Print the account of some families."""
    ledger = account()
    print(
        f"{'family':<12}{'targets':>8}{'CPU min':>9}{'executions':>13}{'per CPU s':>11}{'coverage':>10}{'findings':>10}"
    )
    for family in families:
        lines = list(ledger.get(family, {}).values())
        seconds, count = sum(line["cpu_seconds"] for line in lines), sum(line["executions"] for line in lines)
        covered, found = sum(line["coverage"] for line in lines), sum(len(line["findings"]) for line in lines)
        rate = count / seconds if seconds else 0.0
        print(f"{family:<12}{len(lines):>8}{seconds / 60:>9.1f}{count:>13,}{rate:>11.0f}{covered:>10,}{found:>10}")


def settle() -> None:
    """Put each found input to its target once more, and forget those that are answered as promised now."""
    fuzz_targets.quiet()
    left: dict[str, set[str]] = {}
    for path in sorted((CACHE / "crashes").glob("*/*.*.*")):
        if path.suffix == ".txt":
            continue
        name, cause, _ = path.name.split(".", 2)
        target = fuzz_targets.TARGETS[f"{path.parent.name}/{name}"]
        try:
            fuzz_targets.run(target, path.read_bytes())
        except Exception as error:  # noqa: BLE001 - any finding
            print(f"{target.path}: still {type(error).__name__}: {str(error)[:200]}")
            left.setdefault(target.path, set()).add(cause)
        else:
            path.unlink()
            path.with_name(f"{path.name}.txt").unlink(missing_ok=True)
    with _locked():
        ledger = account()
        for family, lines in ledger.items():
            for name, line in lines.items():
                done = [cause for cause in line["findings"] if cause not in left.get(f"{family}/{name}", set())]
                line["fixed"] = sorted({*line.get("fixed", ()), *done})
                line["findings"] = {cause: line["findings"][cause] for cause in line["findings"] if cause not in done}
        _write(ledger)


def main() -> None:
    """Fuzz what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="", help="families, or family/target, with commas [default: all]")
    parser.add_argument("--seconds", type=int, default=120, help="for each family in a round [default: %(default)s]")
    parser.add_argument("--rounds", type=int, default=1, help="[default: %(default)s]")
    parser.add_argument("--table", action="store_true", help="print the account and end")
    parser.add_argument("--keep", action="store_true", help="choose again what tests/corpora/ has")
    parser.add_argument("--settle", action="store_true", help="put every found input once more; drop those fixed")
    arguments = parser.parse_args()
    fuzz_targets.load()
    if arguments.table:
        table(fuzz_targets.families())
        return
    if arguments.settle:
        settle()
        table(fuzz_targets.families())
        return
    if arguments.keep:
        import fuzz_corpora  # noqa: PLC0415 - for this alone

        fuzz_corpora.keep(_wanted(arguments.family))
        return
    if not (CACHE / "site" / "atheris").is_dir():
        print("atheris is not there (make fuzz gets it): guided by answers alone, without coverage")
    wanted = _wanted(arguments.family)
    for _ in range(arguments.rounds):
        _round(wanted, arguments.seconds)
    table(list(dict.fromkeys(one.family for one in wanted)))


def _wanted(text: str) -> list[Target]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    every = list(fuzz_targets.TARGETS.values())
    unknown = [name for name in names if name not in fuzz_targets.families() and name not in fuzz_targets.TARGETS]
    if unknown:
        sys.exit(f"no family {', '.join(unknown)}; there are: {', '.join(fuzz_targets.families())}")
    return [one for one in every if not names or one.family in names or one.path in names]


def _round(wanted: list[Target], seconds: int) -> None:
    """Each family for so many seconds, divided among its targets."""
    for target in wanted:
        beside = sum(1 for one in wanted if one.family == target.family)
        found = fuzz(target, max(5, seconds // beside))
        entered(target, found)
        rate = found.executions / found.cpu_seconds if found.cpu_seconds else 0.0
        print(
            f"{target.path:<22}{found.cpu_seconds:>7.0f} s CPU {found.executions:>10,} executions {rate:>7.0f}/s"
            f"  coverage {found.coverage:>6,}  new inputs {found.new_inputs:>5,}  findings {len(found.causes)}"
            f"{f'  died: {found.died}' if found.died else ''}",
            flush=True,
        )
        for cause, count in found.causes.items():
            print(f"    {cause}: {count:,} times", flush=True)


if __name__ == "__main__":
    main()

"""Fuzzes the parsers in which fuzzing has found faults: `make fuzz` runs it.

    make fuzz [FAMILY=wire,yaml/config] [SECONDS=120]

Guided by coverage with atheris (libFuzzer), which `make fuzz` installs into .cache/fuzz/site. A target ends at its
first finding: .cache/fuzz/crashes/ has the input, and .cache/fuzz/<target>.log the traceback. .cache/fuzz/corpus/ keeps
the inputs with more coverage; copy useful ones to tests/corpora/, which a test replays.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "fuzz"
SITE = CACHE / "site"
HANG_SECONDS = 10
"""Longest time for one input."""
MOST_MIB = 2048
GRACE_SECONDS = 900
"""Extra time for a process without CPU time on a busy machine."""
_EXECUTIONS = re.compile(r"number_of_executed_units: (\d+)")


def fuzz(path: str, seconds: int) -> None:
    """Fuzz one target in this process, which libFuzzer ends."""
    sys.path.append(str(SITE))
    import atheris  # noqa: PLC0415 - only a process that fuzzes has it

    atheris.enabled_hooks.add("str")
    with atheris.instrument_imports(include=["exporter", "yaml"]):
        import fuzz_targets  # noqa: PLC0415 - instrumented
    fuzz_targets.quiet()
    target = fuzz_targets.TARGETS[path]
    corpus, crashes = CACHE / "corpus" / path, CACHE / "crashes" / path
    for folder in (corpus, crashes):
        folder.mkdir(parents=True, exist_ok=True)
    options = [f"-max_total_time={seconds}", f"-max_len={target.most_bytes}", f"-rss_limit_mb={MOST_MIB}"]
    options += [f"-timeout={HANG_SECONDS}", f"-artifact_prefix={crashes}/", "-reload=0", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *options, str(corpus), str(target.seeds)], lambda data: fuzz_targets.run(target, data))
    atheris.Fuzz()


def main() -> int:
    """Fuzz each wanted target in a separate process; return 1 for a finding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="", help="families, or family/target, with commas [default: all]")
    parser.add_argument("--seconds", type=int, default=120, help="for each family [default: %(default)s]")
    parser.add_argument("--target", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.target:
        fuzz(arguments.target, arguments.seconds)
    import fuzz_targets  # noqa: PLC0415 - a fuzzing process instruments these imports

    names = {name.strip() for name in arguments.family.split(",") if name.strip()}
    families = Counter(one.family for one in fuzz_targets.TARGETS.values())
    if unknown := names - families.keys() - fuzz_targets.TARGETS.keys():
        parser.error(f"no family {', '.join(unknown)}; there are: {', '.join(families)}")
    if not (SITE / "atheris").is_dir():
        parser.error("atheris is not installed; make fuzz does it")
    wanted = [one for one in fuzz_targets.TARGETS.values() if not names or {one.family, one.path} & names]
    found = [_has_finding(one.path, max(5, arguments.seconds // families[one.family])) for one in wanted]
    return 1 if any(found) else 0


def _has_finding(path: str, seconds: int) -> bool:
    """Fuzz a target in a separate process, print the result and return whether there is a finding."""
    log = CACHE / f"{path.replace('/', '-')}.log"
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder, log.open("wb") as output:
        command = [sys.executable, __file__, f"--target={path}", f"--seconds={seconds}"]
        environment = {**os.environ, "TMPDIR": folder, "PYTHONHASHSEED": "0"}
        code = subprocess.run(
            command, stdout=output, stderr=output, env=environment, timeout=seconds + GRACE_SECONDS, check=False
        ).returncode
    found = _EXECUTIONS.findall(log.read_text(errors="replace"))
    outcome = f"ended with exit code {code}, see {log}" if code else "no finding"
    print(f"{path:<20}{found[-1] if found else '?':>12} executions; {outcome}", flush=True)
    return code != 0


if __name__ == "__main__":
    sys.exit(main())

"""The child process of a simulated node: the sources' own child on a fake driver under the real NVML binding."""

import argparse
import sys
import time

from exporter.errors import ConfigError
from exporter.simulator import driver, scenario
from exporter.sources import child


def main(argv: list[str] | None = None) -> int:
    """Install the scenario's driver and sample it; exit code 2 for a scenario that cannot be loaded.

    Args:
        argv: ``--scenario NAME --epoch UNIX_SECONDS``, and whatever ``exporter.sources.child`` takes.
    """
    parser = argparse.ArgumentParser(prog="exporter.simulator.child", description=__doc__, allow_abbrev=False)
    parser.add_argument("--scenario", required=True, help="a shipped scenario or a file")
    parser.add_argument("--epoch", type=float, required=True, help="Unix time at which the scenario began")
    arguments, rest = parser.parse_known_args(argv)
    try:
        loaded = scenario.load(arguments.scenario)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    driver.install(lambda: loaded.at(time.time() - arguments.epoch), epoch_seconds=arguments.epoch)
    return child.main(rest)


if __name__ == "__main__":
    raise SystemExit(main())

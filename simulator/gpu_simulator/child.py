"""Runs the child process of a simulated node: the child of the sources with a fake driver or host engine."""

import argparse
import sys
import time

from exporter.errors import ConfigError
from exporter.gpu import child
from gpu_simulator import dcgm, driver, scenario


def main(argv: list[str] | None = None) -> int:
    """Install the scenario's driver or host engine and sample it; exit code 2 if the scenario cannot be loaded.

    Args:
        argv: ``--scenario NAME --epoch UNIX_SECONDS``, and the arguments of ``exporter.gpu.child``.
    """
    parser = argparse.ArgumentParser(prog="gpu_simulator.child", description=__doc__, allow_abbrev=False)
    parser.add_argument("--scenario", required=True, help="name of a shipped scenario, or a file")
    parser.add_argument("--epoch", type=float, required=True, help="Unix time of the scenario's start")
    arguments, rest = parser.parse_known_args(argv)
    try:
        loaded = scenario.load(arguments.scenario)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    install = dcgm.install if "--dcgm-address" in rest else driver.install
    install(lambda: loaded.at(time.time() - arguments.epoch), epoch_seconds=arguments.epoch)
    return child.main(rest)


if __name__ == "__main__":
    raise SystemExit(main())

"""Reports the libdcgm of this machine from a process of its own, which the library may crash."""

import argparse
import json
import sys

from exporter.errors import SourceError
from exporter.gpu.dcgm import library as _libdcgm
from exporter.gpu.dcgm import library as libdcgm
from exporter.gpu.dcgm.engine import library_version


def main(argv: list[str] | None = None) -> int:
    """Print one JSON object: ``soname``, ``version`` and ``unknown`` (field ids), or ``problem``, one line."""
    parser = argparse.ArgumentParser(prog="python -m exporter.gpu.dcgm.library_check", description=__doc__)
    parser.add_argument("--fields", default="", metavar="IDS", help="comma-separated field ids to look for")
    ids = [int(part) for part in parser.parse_args(argv).fields.split(",") if part]
    try:
        told = _look(libdcgm.load(), ids)
    except SourceError as error:
        told = {"problem": str(error)}
    sys.stdout.write(json.dumps(told) + "\n")
    return 0


def _look(library: libdcgm.Library, ids: list[int]) -> dict[str, object]:
    # It knows its fields only when it has been initialised; it does not connect to anything by that.
    code = library.call("dcgmInit")
    if code != _libdcgm.OK:
        return {"problem": f"{library.soname}: dcgmInit: {library.describe(code)}; install DCGM again"}
    version = library_version(library) or ""
    unknown = [one for one in ids if library.field_meta(one) is None]
    library.call("dcgmShutdown")
    return {"soname": library.soname, "version": version, "unknown": unknown}


if __name__ == "__main__":
    sys.exit(main())

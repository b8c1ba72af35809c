"""Writes docs/configuration.md from the table of options; ``--check`` compares."""

import sys
from collections.abc import Iterable, Iterator
from itertools import groupby

from generated import ROOT, markdown_table, write_or_check

from exporter.config.dcgm_flags import names_for
from exporter.config.options import OPTIONS, Option
from exporter.service.settings import OPTIONS as SERVE_OPTIONS

HEAD = """\
# Configuration

Made by `scripts/configuration_doc.py` from `exporter/config/options.py`; do not edit.

Every option of `gpu-cost-exporter agent` is a flag (`--sample-interval 500ms`), an environment variable
(`GPU_COST_EXPORTER_SAMPLE_INTERVAL=500ms`) and a key of a YAML file (`sample-interval: 500ms`). Flags override the
environment, which overrides dcgm-exporter's flags and variables; these override the file. `--config` or
`GPU_COST_EXPORTER_CONFIG` sets the file. `doctor` takes the same options.

One line per mistake has its place and the allowed values; the exit code is 2, and nothing is started. If another
process has the port, the exit code is 1, and systemd and Kubernetes retry. A duration needs its unit: `ms`, `s`, `m`
or `h`.
"""

EXAMPLE = """\
## Example file

Every key with its default, if it has one. Remove the `#` of the keys to change.
"""

FOREIGN = """\
## dcgm-exporter's flags and variables

The agent reads the flags and variables in the last column, with times in milliseconds. `NVIDIA_RESOURCE_NAMES` adds
names to `gpu-resources`. One line at the start lists the settings without effect. A collectors file of its image
(`/etc/dcgm-exporter/...`) selects the same set, which is built in. Full list: [migrating.md](migrating.md).
"""


SERVE = """\
## The cost service

Options of `gpu-cost-exporter serve`, in the same forms. Those of *Prometheus* are also flags of `report`, `recommend`
and `store`. [service.md](service.md) explains them.
"""


def document() -> str:
    """Return the page."""
    example_file = f"```yaml\n{example()}```\n"
    return "\n".join(
        [HEAD, *_tables(OPTIONS, "##"), EXAMPLE, example_file, FOREIGN, SERVE, *_tables(SERVE_OPTIONS, "###")]
    )


def _tables(options: Iterable[Option], level: str) -> list[str]:
    groups: dict[str, list[Option]] = {}
    for option in options:
        groups.setdefault(option.group, []).append(option)
    return [_table(f"{level} {title}", group) for title, group in groups.items()]


def example() -> str:
    """Return a configuration file with every key, commented out."""
    return "\n".join(_example_lines()).strip() + "\n"


def _example_lines() -> Iterator[str]:
    for title, options in groupby(OPTIONS, lambda option: option.group):
        yield from ("", f"# {title}")
        for option in options:
            yield f"# {option.key}: {_yaml(option)}"


def _yaml(option: Option) -> str:
    if option.default is None:
        return f" # unset: {option.default_note}"
    if option.kind.is_list:
        return "[" + ", ".join(f'"{item}"' for item in option.default.split(",")) + "]"
    return f'"{option.default}"' if option.default.startswith(":") else option.default


def _table(title: str, options: list[Option]) -> str:
    foreign = options[0] in OPTIONS
    rows = []
    for option in options:
        default = option.default_note or f"`{option.default}`"
        cells = [f"`{option.key}`", default, option.kind.allowed, option.help]
        if foreign:
            cells.append(", ".join(f"`{name}`" for name in names_for(option.key)))
        rows.append(cells)
    head = ["Key", "Default", "Allowed", "Meaning", *(["In dcgm-exporter"] if foreign else [])]
    return "\n".join([title, "", *markdown_table(head, rows), ""])


if __name__ == "__main__":
    sys.exit(write_or_check({ROOT / "docs" / "configuration.md": document()}))

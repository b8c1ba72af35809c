"""Where cells of on-call lead."""

from typing import Any

from panels import link


def node_link() -> dict[str, Any]:
    """On-call of the node in the cell's row."""
    return link(
        "This node",
        "/d/gpu-cost-oncall/gpu-on-call?var-datasource=${datasource}&var-node=${__data.fields.Node:percentencode}&${__url_time_range}",
    )

"""Fixtures that are dear to make and cheap to share."""

import os
from collections.abc import Iterator

# As the product does before it loads gRPC; tests may load gRPC first.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import pytest
from agent_support import AgentProcess, matching, running_agent
from fleet_support import fleet_prometheus, fleet_truth, fleet_victoria, small_fleet

__all__ = ["fleet_prometheus", "fleet_truth", "fleet_victoria", "small_fleet"]


@pytest.fixture(scope="session")
def demo_agent() -> Iterator[AgentProcess]:
    """The agent on the demo scenario, for tests that only look."""
    with running_agent("--simulate", "demo") as agent:
        agent.until(
            lambda page: all(
                matching(page, "gpu_pod_activity_ratio", pod_name=pod, source=source)
                for pod, source in (("protein-fold-5c8d7", "engine"), ("jupyter-lchen", "process_samples"))
            ),
            "activity of a MIG instance and of a sharer",
        )
        yield agent

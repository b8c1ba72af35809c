"""Fixtures that are expensive to make and cheap to share."""

import gc
import logging
import os
from collections.abc import Generator, Iterator

# The product sets these before it loads gRPC; tests may load gRPC first.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import pytest
from agent_support import AgentProcess, matching, running_agent
from fleet_support import fleet_blocks, fleet_prometheus, fleet_truth, fleet_victoria, small_fleet
from hypothesis import HealthCheck, settings

__all__ = ["fleet_blocks", "fleet_prometheus", "fleet_truth", "fleet_victoria", "small_fleet"]

# Tests have no time limit: a slow example only means that the machine is busy. Settings of a test override this
# profile, because it is loaded before the modules of tests. Every run draws other examples.
settings.register_profile("untimed", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# xdist gives files to a few processes one by one: a slow file at the end leaves one process alone for minutes. These
# take 10 s and more, the slowest first. A file that mostly waits (a demonstration, coming alerts, killed engines)
# runs together with files that compute. --no-loadscope-reorder keeps xdist from sorting them by the number of tests.
_SLOWEST_FIRST = (
    "test_rules_versions.py",
    "test_image.py",
    "test_service_browser.py",
    "test_stack_cost.py",
    "test_stack.py",
    "test_alerts_end_to_end.py",
    "test_dcgm_engine_kill.py",
    "test_rules.py",
    "test_missing_gpus.py",
    "test_abi.py",
    "test_agent_dcgm.py",
    "test_service_live.py",
    "test_rules_ledger.py",
    "test_load.py",
    "test_agent.py",
    "test_metering.py",
    "test_dcgm_bad_input.py",
    "test_switch_over.py",
    "test_kill.py",
    "test_abi_agent.py",
    "test_two_agents.py",
    "test_web_end_to_end.py",
    "test_idle_measured.py",
    "test_rbac.py",
    "test_dashboards_data.py",
    "test_corpus.py",
    "test_alertmanager.py",
    "test_doctor.py",
    "test_worker.py",
    "test_fleet_reading.py",
    "test_report_command.py",
    "test_chaos.py",
    "test_sharing.py",
    "test_doctor_engine.py",
    "test_digest.py",
    "test_supply.py",
    "test_complete_lookups.py",
    "test_chart.py",
    "test_doctor_dcgm.py",
    "test_owners_pipeline.py",
    "test_deploy.py",
    "test_service_pages.py",
    "test_report_scale.py",
)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without garbage collection, which takes a seventh of the time: all objects of a collection stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the slowest files first, the others in their order."""
    rank = {name: place for place, name in enumerate(_SLOWEST_FIRST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """Restore the logging configuration: a command run in this process replaces it permanently."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


# Not for the whole session: the agent would sample and be scraped for a quarter of an hour.
@pytest.fixture(scope="module")
def demo_agent() -> Iterator[AgentProcess]:
    """Run the agent on the demo scenario, for tests that only read."""
    with running_agent("--simulate", "demo") as agent:
        agent.until(
            lambda page: all(
                matching(page, "gpu_pod_activity_ratio", pod_name=pod, source=source)
                for pod, source in (("protein-fold-5c8d7", "engine"), ("jupyter-lchen", "process_samples"))
            ),
            "activity of a MIG instance and of a sharer",
        )
        yield agent

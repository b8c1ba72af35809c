"""All ways of a pod to its GPU: from API and kubelet to the page and the ledger, against the truth."""

from collections import defaultdict
from pathlib import Path

import pytest
from page_support import duplicate_series
from pipeline_support import Pipeline, pipeline

from exporter.metrics.collector import ExpositionOptions, families
from exporter.metrics.text_format import render
from exporter.model.attribution import UNALLOCATED, UNATTRIBUTED, Owner
from exporter.model.snapshot import Snapshot
from gpu_simulator import scenario

SECONDS = range(41)
Held = dict[tuple[str, str, str], float]


def true_shares(node: Pipeline) -> Held:
    shares: Held = defaultdict(float)
    for holder in node.truth.holders:
        shares[holder.namespace, holder.pod, holder.device_uuid] += holder.share_ratio
    return shares


def seen_shares(snapshot: Snapshot) -> Held:
    shares: Held = defaultdict(float)
    for view in snapshot.devices:
        for use in view.pods:
            shares[use.holder.namespace, use.holder.pod, use.holder.device_uuid] += use.holder.share_ratio
    return shares


@pytest.mark.parametrize("name", ["dra", "hami", "volcano-vgpu", "kai", "owners", "demo"])
async def test_holders_and_shares_match_the_scenario_on_page_and_ledger(name: str, tmp_path: Path) -> None:
    held: dict[tuple[str, str], list[float]] = defaultdict(list)
    async with pipeline(scenario.load(name), tmp_path, with_api=True) as node:
        for second in SECONDS:
            snapshot = await node.step(float(second))
            together: dict[tuple[str, str], float] = defaultdict(float)
            for (namespace, pod, _), share in true_shares(node).items():
                together[namespace, pod] += share
            for pod_name, share in together.items():
                held[pod_name].append(share)
        assert seen_shares(snapshot) == pytest.approx(true_shares(node))
        page_names_each_pod_once(node, snapshot)
    ledger = snapshot.metering.ledger
    assert ledger is not None
    metered = ledger.capacity_seconds / len([view for view in snapshot.devices if view.instance is None])
    assert metered == pytest.approx(len(SECONDS) - 1)
    pods: dict[tuple[str, str], float] = defaultdict(float)
    for account, totals in ledger.pods.items():
        pods[account.namespace, account.pod] += totals.seconds.total
    assert set(pods) == set(held)
    for pod_name, shares in held.items():
        if len(shares) == len(SECONDS) and len(set(shares)) == 1:
            assert pods[pod_name] == pytest.approx(shares[0] * metered, rel=1e-6)
        else:  # the kubelet is polled every five seconds
            assert pods[pod_name] == pytest.approx(sum(shares), abs=6 * max(shares))
    by_owner: dict[Owner, float] = defaultdict(float)
    for line, totals in ledger.accounts.items():
        by_owner[line.owner] += totals.seconds.total
    assert by_owner.get(UNATTRIBUTED, 0.0) == 0.0
    owned = sum(seconds for owner, seconds in by_owner.items() if owner != UNALLOCATED)
    assert owned == pytest.approx(sum(pods.values()), rel=1e-9)
    everybody = sum(totals.seconds.total for totals in ledger.accounts.values())
    assert everybody == pytest.approx(ledger.capacity_seconds, rel=1e-9)
    assert ledger.conservation_error_seconds == pytest.approx(0.0, abs=1e-6)
    costs = [money for totals in ledger.accounts.values() for money in totals.money.values()]
    prices = {uuid: price.per_hour for uuid, price in snapshot.metering.prices.items()}
    if prices and not snapshot.metering.unpriced_gpus:
        assert sum(money.total for money in costs) == pytest.approx(sum(prices.values()) * metered / 3600, rel=1e-9)


def page_names_each_pod_once(node: Pipeline, snapshot: Snapshot) -> None:
    """Check that the page has every pod with its workload, and no duplicate series."""
    workloads = {(holder.namespace, holder.pod) for holder in node.truth.holders}
    shown = families(snapshot, ExpositionOptions())
    assert duplicate_series(shown) == []
    page = render(shown, openmetrics=False).decode()
    infos = [line for line in page.splitlines() if line.startswith("gpu_pod_info{")]
    assert {(use.holder.namespace, use.holder.pod) for view in snapshot.devices for use in view.pods} == workloads
    assert infos
    assert all('workload_kind="' in line and 'pod_uid="' in line for line in infos)
    assert snapshot.metadata is not None
    assert snapshot.metadata.problem == ""

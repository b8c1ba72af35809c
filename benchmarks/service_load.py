"""How long the cost service's pages and reports take: at first, when they are kept, and for many people at once."""

import argparse
import asyncio
import http
import resource
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import fleet_support  # noqa: E402 - lies beside the tests, which the line above makes importable
import service_support  # noqa: E402 - as above

from gpu_simulator.fleet import Writing, write_fleet  # noqa: E402 - as above
from gpu_simulator.fleet_plan import FleetPlan  # noqa: E402 - as above

MONTH = "/api/v1/report?window=30d&by="
PATHS = {
    "overview page": "/",
    "page of workloads": "/by/workload",
    "30 days by namespace": f"{MONTH}namespace",
    "30 days by workload, team, model": f"{MONTH}workload,team,model",
    "30 days by team, day by day": f"{MONTH}team&series=true",
    "FOCUS of yesterday": "/api/v1/report?window=yesterday&format=focus",
    "/allocation, 7 days by namespace": "/allocation?window=7d&aggregate=namespace&step=1d",
}


def main() -> None:
    """Measure each size with and without a store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[13, 125, 1000], help="sizes of fleets, 8 GPUs each")
    parser.add_argument("--people", type=int, default=20, help="who ask at the same time")
    parser.add_argument("--requests", type=int, default=20, help="of each of them")
    arguments = parser.parse_args()
    print("| GPUs | store | what | first, s | kept, ms | p50, p99 of all at once, ms | KB |")
    print("|---:|---|---|---:|---:|---|---:|")
    for nodes in arguments.nodes:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            plan = FleetPlan(nodes=nodes, end_seconds=fleet_support.END_SECONDS, clusters=("alpha", "beta"))
            text = directory / "fleet.om"
            with text.open("w", encoding="utf-8") as output:
                write_fleet(plan, output, Writing(form="openmetrics", devices=False, processes=2))
            fleet_support.backfill(text, directory / "blocks")
            text.unlink()
            with fleet_support.prometheus(directory, directory / "blocks", plan) as server:
                for store in (None, directory / "days.sqlite"):
                    asyncio.run(measure(server.url, nodes, store, arguments))
    print(f"\npeak memory of the service with its clients: {peak_mib():.0f} MiB")


async def measure(url: str, nodes: int, store: Path | None, arguments: argparse.Namespace) -> None:
    """One service over one fleet."""
    options = {} if store is None else {"store": store}
    async with service_support.running(url, prometheus_timeout="300s", **options) as site:
        if store is not None:
            begin = time.monotonic()
            await site.keep()
            print(f"| {nodes * 8} | yes | closing 30 days | {time.monotonic() - begin:.1f} | | | |")
        await site.round()
        for what, path in PATHS.items():
            first, answer = await timed(site, path)
            if answer.status != http.HTTPStatus.OK:
                raise SystemExit(answer.text)
            kept, _ = await timed(site, path)
            p50, p99 = await crowd(site, path, arguments.people, arguments.requests)
            row = (nodes * 8, "yes" if store else "no", what, f"{first:.2f}", f"{kept * 1000:.0f}")
            print(
                f"| {' | '.join(map(str, row))} | {p50 * 1000:.0f}, {p99 * 1000:.0f} | {len(answer.body) / 1000:.0f} |"
            )


async def timed(site: service_support.Running, path: str) -> tuple[float, service_support.Answer]:
    """Seconds that an answer took, and the answer."""
    begin = time.monotonic()
    answer = await site.get(path)
    return time.monotonic() - begin, answer


async def crowd(site: service_support.Running, path: str, people: int, requests: int) -> tuple[float, float]:
    """Median and 99th percentile of the seconds that each answer took."""

    async def one() -> list[float]:
        return [(await timed(site, path))[0] for _ in range(requests)]

    took = sorted(second for many in await asyncio.gather(*(one() for _ in range(people))) for second in many)
    return took[len(took) // 2], took[int(len(took) * 0.99)]


def peak_mib() -> float:
    """Of this process, in which service and clients run."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()

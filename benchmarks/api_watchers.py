"""Many agents' watchers of one API server in one process: each with a connection and a random number of its own.

It starts them at ``go`` on standard input, answers ``report`` with one line of JSON, and ends with its input.
"""

import argparse
import asyncio
import functools
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import kube_objects

from exporter.kube.api_client import ApiClient
from exporter.kube.list_watch import ListWatch
from exporter.kube.metadata import parse_pod
from exporter.model import PodMetadata

SELECTOR = f"spec.nodeName={kube_objects.NODE},status.phase!=Succeeded,status.phase!=Failed"

Pods = ListWatch[PodMetadata]


def main() -> None:
    """Run the watchers until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--watchers", type=int, required=True)
    parser.add_argument("--jitter", type=float, required=True)
    parser.add_argument("--lifetime", type=float, nargs=2, required=True)
    parser.add_argument("--seed", type=int, required=True)
    asyncio.run(_serve(parser.parse_args()))


async def _serve(arguments: argparse.Namespace) -> None:
    watchers = [_watcher(arguments, number) for number in range(arguments.watchers)]
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    tasks: list[asyncio.Task[None]] = []
    print("ready", flush=True)
    while line := await reader.readline():
        if line.strip() == b"go":
            tasks = [asyncio.create_task(_run(client, pods, arguments.jitter)) for client, pods in watchers]
        else:
            print(json.dumps(_report([pods for _, pods in watchers])), flush=True)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.gather(*(client.close() for client, _ in watchers))


async def _run(client: ApiClient, pods: Pods, jitter_seconds: float) -> None:
    await asyncio.sleep(jitter_seconds * client.random())
    await pods.run()


def _watcher(arguments: argparse.Namespace, number: int) -> tuple[ApiClient, Pods]:
    # A fleet's draws need not be unguessable, and the same run should give the same figures.
    chance = random.Random(f"{arguments.seed}/{number}").random  # noqa: S311
    client = ApiClient(arguments.kubeconfig, random=chance)
    pods = Pods(
        client,
        path="/api/v1/pods",
        query={"fieldSelector": SELECTOR},
        metadata_only=True,
        parse=functools.partial(parse_pod, wanted=frozenset()),
        clock=time.time,
        lifetime_seconds=tuple(arguments.lifetime),
    )
    return client, pods


def _report(watchers: list[Pods]) -> dict[str, Any]:
    errors: Counter[str] = Counter()
    for pods in watchers:
        errors.update(pods.errors)
    return {
        "listed": sum(pods.known for pods in watchers),
        "well": sum(pods.known and not pods.problem for pods in watchers),
        "items": sum(len(pods.items) for pods in watchers),
        "errors": errors,
    }


if __name__ == "__main__":
    main()

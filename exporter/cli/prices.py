"""Implements `prices`: checks price books, shows their rows, and writes one for existing GPUs."""

import argparse
import asyncio
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from exporter.accounting.prices import PricedGpu
from exporter.cli.common import Parser, add_output, alone, command, or_problems, refuse
from exporter.cli.output import check_output, output, put, say
from exporter.config import price_book
from exporter.config.prometheus_options import ADDRESS, PrometheusSettings, add_prometheus_options, prometheus_settings
from exporter.cost import agent_client
from exporter.cost.prometheus import PrometheusClient
from exporter.errors import ExporterError
from exporter.model.attribution import NodeFacts
from exporter.model.formatting import plural

_FACTS = ("instance_type", "capacity_type", "region")
_NOT_LISTED = frozenset({"spot", "reserved"})
"""Capacity types without list prices, which are on-demand prices."""


def add_prices(parser: Parser) -> None:
    """Add the subcommands."""
    kinds = parser.add_subparsers(dest="about_prices", metavar="WHAT", required=True, parser_class=Parser)
    check = command(kinds, "check", "Check a price book: show the match of each row, or all mistakes.")
    check.add_argument("file", type=Path, metavar="FILE", help="YAML file (format: docs/cost.md)")
    check.set_defaults(run=alone(_check_prices))
    listing = command(kinds, "list", "The bundled list prices, which apply if no row of a price book matches.")
    listing.set_defaults(run=alone(_list_prices))
    init = command(kinds, "init", "Write a price book with a row for each kind of GPU that an agent or a fleet has.")
    init.usage = f"{init.prog} --agent URL | --prometheus URL [OPTION ...]"
    init.add_argument("--agent", metavar="URL", help="one node: address of its agent, as http://node-a:9400")
    add_output(init)
    agent_client.add_agent_access(init)
    add_prometheus_options(init)
    init.set_defaults(run=_init_prices)


def _check_prices(namespace: argparse.Namespace) -> int:
    book, mistakes = price_book.examine(price_book.read_book(namespace.file), str(namespace.file))
    if book.rows:
        put(*price_book.lines(book))
    for warning in book.warnings:
        say(f"warning: {warning}")
    refuse(mistakes)
    put(f"{namespace.file}: ok")
    return 0


def _list_prices(_namespace: argparse.Namespace) -> int:
    put(*price_book.lines(price_book.bundled()))
    return 0


def _init_prices(namespace: argparse.Namespace, problems: tuple[str, ...]) -> int:
    mistakes = [*problems, *agent_client.access_problems(namespace, of_an_agent=namespace.agent is not None)]
    settings = None
    if namespace.agent is not None and namespace.prometheus is not None:
        mistakes.append("--agent: is one node, and --prometheus a fleet; give one of them")
    elif namespace.agent is None and not (namespace.prometheus or os.environ.get(ADDRESS.env)):
        mistakes.append("no source given; give --agent URL for one node, --prometheus URL for a fleet")
    elif namespace.agent is None:
        settings = or_problems(lambda: prometheus_settings(namespace, os.environ), mistakes)
    refuse(tuple(mistakes))
    check_output(namespace.output)
    if settings is None:
        client = agent_client.client_of(namespace, namespace.agent)
        where = client.base
        pools = _pools_of(client.fetch(agent_client.DEVICES), where)
    else:
        where = settings.url
        pools = asyncio.run(_pools(settings))
    if not pools:
        raise ExporterError(f"{where}: knows no GPU; is an agent with a driver running there, or scraped?")
    with output(namespace.output) as stream:
        stream.writelines(f"{line}\n" for line in _draft(pools, where, datetime.now(UTC)))
    return 0


def _pools_of(document: Mapping[str, Any], where: str) -> Counter[tuple[str, NodeFacts]]:
    """Return the physical GPUs in an agent's document, by model and facts of the node."""
    with agent_client.understood(where, "a list of GPUs"):
        known = document["node_facts"]
        facts = NodeFacts(**{key: known[key] or "" for key in _FACTS})
        return Counter((model, facts) for _, model in {(one["gpu_uuid"], one["model"]) for one in document["devices"]})


async def _pools(settings: PrometheusSettings) -> Counter[tuple[str, NodeFacts]]:
    """Return the physical GPUs that Prometheus knows, by model and facts of their nodes."""
    place = (settings.cluster_label, "node")
    kept = ", ".join(place)
    async with PrometheusClient(settings) as client:
        nodes = await client.instant(f"max by ({kept}, {', '.join(_FACTS)}) (gpu_node_info)", None)
        found = await client.instant(f"max by ({kept}, model) (gpu_pool_gpus)", None)
    facts = {
        tuple(map(one.labels.get, place)): NodeFacts(**{key: one.labels.get(key, "") for key in _FACTS})
        for one in nodes
    }
    pools: Counter[tuple[str, NodeFacts]] = Counter()
    for one in found:
        of_node = facts.get(tuple(map(one.labels.get, place)), NodeFacts())
        pools[one.labels.get("model", ""), of_node] += round(one.value)
    return pools


def _draft(pools: Counter[tuple[str, NodeFacts]], where: str, now: datetime) -> Iterator[str]:
    """Yield the lines of a price book: a row per pool with a list price, and a commented row per other pool."""
    book = price_book.bundled()
    yield f"# Price book of the GPUs that {where} has on {now:%Y-%m-%d}. The prices are public lists: write yours."
    yield "# Then: gpu-cost-exporter prices check FILE. Format: docs/cost.md."
    yield f"currency: {book.currency}"
    yield "rows:"
    for (model, facts), count in sorted(pools.items(), key=lambda item: (item[0][0], repr(item[0][1]))):
        keys = {"model": model, **{key: getattr(facts, key) for key in _FACTS}}
        price = None
        if facts.capacity_type not in _NOT_LISTED:
            price = book.price(PricedGpu(model, facts=facts), now.timestamp())
        row = next((row for row in book.rows if row.price is price), None)
        fields = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in keys.items() if value]
        gpus = plural(count, "GPU")
        if row is None:
            yield f"  # {gpus} without a list price. Fill in the price and its source, and remove the #."
            fields += ["per_gpu_hour:", "source:", f"as_of: {now:%Y-%m-%d}"]
        else:
            yield f"  # {gpus}"
            fields += [f"per_gpu_hour: {row.price.per_hour:.10g}", f"source: {json.dumps(row.source)}"]
            fields += [f"as_of: {row.price.as_of}"]
        for number, text in enumerate(fields):
            yield f"  {'# ' if row is None else ''}{'  ' if number else '- '}{text}"

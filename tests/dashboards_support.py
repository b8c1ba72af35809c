"""Dashboards as JSON, their queries as from Grafana, and a Prometheus with five minutes of a node with faults.

The node is simulated in virtual time; its pages, one every two seconds, are backfilled. ``vmalert`` replays the shipped
rules, with the demonstration's windows, over them: every recorded series and alert exists without waiting.
"""

import asyncio
import json
import re
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from files_support import read_yaml
from fleet_support import READY_SECONDS, backfill, tool

from exporter.metrics.collector import ExpositionOptions, families
from exporter.metrics.text_format import render
from gpu_simulator import scenario, scenario_file, stack
from gpu_simulator.stack import free_port
from tests import pipeline_support

ROOT = Path(__file__).resolve().parent.parent
SCENARIO = ROOT / "tests" / "fixtures" / "dashboards.yaml"
RULES = ROOT / "rules" / "prometheus-rules.yaml"
NAMES = ("fleet", "oncall", "finops")
SECONDS = 300
STEP_SECONDS = 2
CLUSTER = "live"
_DAY, _HOUR = 86_400, 3600
_RECORDED_NAME = re.compile(r"\bALERTS\b|\b[a-z]+:[a-z0-9_:]+")
CONFIG = "global: {}\nstorage: {tsdb: {out_of_order_time_window: 30d}}\n"
ALL = ".*"
DEFAULTS = {**dict.fromkeys(("cluster", "node", "namespace", "team", "model", "uuid"), ALL), "job_gpus": "8"}

Board = dict[str, Any]
Panel = dict[str, Any]
Vector = list[tuple[dict[str, str], float]]
Matrix = list[tuple[dict[str, str], list[tuple[float, float]]]]


def load(name: str) -> Board:
    """Return a committed dashboard."""
    board: Board = json.loads((ROOT / "dashboards" / f"{name}.json").read_text(encoding="utf-8"))
    return board


def panels(board: Board) -> list[Panel]:
    """Return its panels, without the rows."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def expand(expression: str, range_seconds: int, **chosen: str) -> str:
    """Insert values for Grafana's variables; the default of a variable is All."""
    macros = {"__range_s": str(range_seconds), "__range": f"{range_seconds}s", "__rate_interval": "60s"}
    for name, value in {**macros, **DEFAULTS, **chosen}.items():
        expression = expression.replace("${" + name + "}", value)
        expression = re.sub(rf"\${name}\b", value, expression)
    assert "$" not in expression, expression
    return expression


def range_of(panel: Panel, board: Board, now: float) -> int:
    """Return the seconds that a panel looks back: its own time range, or that of the dashboard."""
    since = panel.get("timeFrom") or board["time"]["from"]
    day = int(now // _DAY) * _DAY
    month = int(datetime.fromtimestamp(now, UTC).replace(day=1, hour=0, minute=0, second=0).timestamp())
    starts = {"now/d": day, "now/M": month}
    if since in starts:
        return int(now) - starts[since]
    count, unit = re.fullmatch(r"now-(\d+)([hd])", since).groups()  # type: ignore[union-attr]
    return int(count) * {"h": _HOUR, "d": _DAY}[unit]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A Prometheus, and the present time of its viewers."""

    url: str
    now: float
    step: int
    back: int = 0
    """Seconds of a range query for a panel without an interval; 0: the panel's range."""

    def _ask(self, path: str, **form: str) -> list[dict[str, Any]]:
        body = urllib.parse.urlencode(form).encode()
        request = urllib.request.Request(f"{self.url}/api/v1/{path}", data=body)  # noqa: S310 - our own server
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - as above
                result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{form['query']}: {error.read().decode()}") from None
        return result

    def vector(self, expression: str) -> Vector:
        """Return labels and value of each series, now."""
        rows = self._ask("query", query=expression, time=str(self.now))
        return [(row["metric"], float(row["value"][1])) for row in rows]

    def matrix(self, expression: str, start: float, step: int) -> Matrix:
        """Return labels and values over time of each series, at multiples of the step, as in Grafana."""
        rows = self._ask(
            "query_range",
            query=expression,
            start=str(start // step * step),
            end=str(self.now // step * step),
            step=str(step),
        )
        return [(row["metric"], [(at, float(value)) for at, value in row["values"]]) for row in rows]

    def series(self, board: Board, panel: Panel, target: Mapping[str, Any], **chosen: str) -> list[Any]:
        """Return the series of a target."""
        length = range_of(panel, board, self.now)
        expression = expand(target["expr"], length if not self.back else self.back, **chosen)
        if target.get("instant"):
            return list(self.vector(expression))
        own = {"1d": _DAY, "1h": _HOUR}.get(panel.get("interval", ""))
        start = self.now - (self.back if self.back and not own else length)
        return list(self.matrix(expression, start, own or self.step))


def _lines(page: bytes, at: float, instance: str) -> Iterator[str]:
    """Yield a page's samples in OpenMetrics with the labels of Prometheus' job for annotated pods."""
    target = f'cluster="{CLUSTER}",instance="{instance}",job="kubernetes-pods"'
    for line in page.decode().splitlines():
        if line and not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            head, brace, labels = name.partition("{")
            yield f"{head}{{{target}{f',{labels[:-1]}' if brace else ''}}} {value} {at}\n"
    yield f"up{{{target}}} 1 {at}\n"


async def _pages(directory: Path, epoch: float) -> list[str]:
    node = scenario.build(scenario_file.parse(SCENARIO.read_text(encoding="utf-8"), SCENARIO.name))
    found: list[str] = []
    # An hour is a minute, in the rules and in the windows.
    agent = pipeline_support.AgentSettings(pace=60.0)
    async with pipeline_support.pipeline(node, directory, with_api=True, agent=agent) as pipeline:
        for second in range(0, SECONDS + 1, STEP_SECONDS):
            # Only a child process that hangs, or a full exporter, would count these.
            pipeline.direct.errors = {"timeout": second // 20}
            snapshot = await pipeline.step(float(second))
            page = render(families(snapshot, ExpositionOptions()), openmetrics=False)
            found += _lines(page, epoch + second, "sim:9400")
    return found


@contextmanager
def live_node(directory: Path, *extra: str) -> Iterator[Engine]:
    """Load the node's last five minutes into a real Prometheus, with the results of rules; ``extra``: more series."""
    epoch = float(int(time.time()) // 60 * 60 - SECONDS - 60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_support, "EPOCH_SECONDS", epoch)
        (directory / "node").mkdir()
        lines = asyncio.run(_pages(directory / "node", epoch))
    text = directory / "node.om"
    now = epoch + SECONDS
    more = [f"{line} {epoch + second}\n" for line in extra for second in range(0, SECONDS + 1, 10)]
    text.write_text("".join((*lines, *more, "# EOF\n")), encoding="utf-8")
    backfill(text, directory / "blocks")
    with _prometheus(directory) as url:
        _replay(directory, url, epoch, now)
        yield Engine(url=url, now=now, step=5, back=SECONDS)


@contextmanager
def _prometheus(directory: Path) -> Iterator[str]:
    config = directory / "prometheus.yml"
    config.write_text(CONFIG, encoding="utf-8")
    url = f"http://127.0.0.1:{free_port(0)}"
    command = [
        tool("prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={directory / 'blocks'}",
        f"--web.listen-address={url.removeprefix('http://')}",
        "--web.enable-remote-write-receiver",
        "--query.lookback-delta=15s",  # backfilled series have no staleness marker at their end
    ]
    with (directory / "prometheus.log").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        _until_ready(url, process, directory / "prometheus.log")
        yield url
    finally:
        process.terminate()
        process.wait(timeout=20)


def _until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while True:
        assert process.poll() is None, log.read_text(encoding="utf-8")[-2000:]
        assert time.monotonic() < deadline, log.read_text(encoding="utf-8")[-2000:]
        try:
            with urllib.request.urlopen(f"{url}/-/ready", timeout=5):  # noqa: S310 - our own server
                return
        except OSError:
            time.sleep(0.05)


def _replay(directory: Path, url: str, start: float, end: float) -> None:
    shipped = read_yaml(stack.shorten(RULES.read_text(encoding="utf-8"), str(RULES)))
    times = [datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") for at in (start, end)]
    for number, groups in enumerate(_steps(shipped["groups"])):
        rules = directory / f"rules-{number}.yaml"
        rules.write_text(yaml.safe_dump({"groups": groups}, sort_keys=False), encoding="utf-8")
        done = subprocess.run(
            [
                tool("vmalert-1.112"),
                f"-rule={rules}",
                f"-datasource.url={url}",
                f"-remoteWrite.url={url}",
                f"-replay.timeFrom={times[0]}",
                f"-replay.timeTo={times[1]}",
                "-replay.disableProgressBar",
                "-replay.rulesDelay=0",
                "-remoteWrite.flushInterval=10ms",
                "-rule.evalDelay=0s",
                "-disableAlertgroupLabel",
                f"-httpListenAddr=127.0.0.1:{free_port(0)}",
                "-loggerLevel=WARN",
            ],
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"{rules.name}: {done.stderr[-3000:]}"


def _steps(groups: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield parts of the groups, in order, such that no rule reads what another one of its part records.

    ``vmalert`` has sent all results when it ends, but not yet when it evaluates the next rule.
    """
    step: dict[str, dict[str, Any]] = {}
    recorded: set[str] = set()
    for group in groups:
        for rule in group["rules"]:
            if recorded & set(_RECORDED_NAME.findall(rule["expr"])):
                yield list(step.values())
                step, recorded = {}, set()
            # A replay does not need the queries of annotations.
            kept = {key: part for key, part in rule.items() if key != "annotations"}
            step.setdefault(group["name"], {**group, "rules": []})["rules"].append(kept)
            recorded.add(rule.get("record", "ALERTS"))
    yield list(step.values())

"""Small inputs that need unbounded time or memory, or that would execute code: files, answers, patterns."""

import gzip
import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web
from api_support import PODS, scripted
from test_prometheus_client import refused

import exporter
from exporter.config import price_book, resolve, web_config
from exporter.config.options import OPTIONS
from exporter.cost import agent_client
from exporter.cost import budgets as budget_file
from exporter.errors import ApiError, ConfigError, ExporterError
from exporter.kube import api_client
from exporter.kube.api_client import Request
from gpu_simulator import scenario

CPU_SECONDS, MEMORY_BYTES = 60, 2 << 30
"""Limits of a process that must stay below them: they only end it."""
LAUGHS = "\n".join(["a0: &a0 [ha, ha, ha]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12))])


def settled(path: Path) -> None:
    """Read a file of `--config`."""
    problems: list[str] = []
    resolve.settle(OPTIONS, {"config": str(path)}, {}, problems)
    if problems:
        raise ConfigError(*problems)


READERS: dict[str, Callable[[Path], object]] = {
    "configuration": settled,
    "web configuration": web_config.load,
    "price book": price_book.load,
    "budgets": budget_file.load,
    "scenario": lambda path: scenario.load(str(path)),
}
BOMBS = {
    "laughs": f"{LAUGHS}\nnode: *a11\nrows: *a11\nbudgets: *a11\nlisten: *a11\nbasic_auth_users: *a11\n",
    "a list of itself": "node: &a [*a, *a]\nlisten: *a\nrows: *a\nbudgets: *a\nbasic_auth_users: *a\n",
    "a mapping of itself": "tls_server_config: &a {cert_file: *a, listen: *a}\nnode: *a\n",
    "depth": "node: " + "[" * 1_000,
    "depth of mappings": "{a: " * 1_000,
    "merge of itself": "a: &a\n  <<: *a\n",
}


@pytest.mark.parametrize(
    ("reader", "bomb"),
    [
        *((reader, bomb) for reader in READERS for bomb in ("laughs", "depth")),
        *(("configuration", bomb) for bomb in BOMBS),
    ],
)
def test_yaml_aliases_and_nesting_are_refused_with_a_message(reader: str, bomb: str, tmp_path: Path) -> None:
    path = tmp_path / "bomb.yaml"
    path.write_text(BOMBS[bomb])
    with pytest.raises(ConfigError) as reported:
        READERS[reader](path)
    assert all(len(problem) < 2000 for problem in reported.value.problems)


@pytest.mark.parametrize("reader", [name for name in READERS if name != "scenario"])
def test_endless_file_is_read_up_to_its_limit(reader: str) -> None:
    with pytest.raises(ConfigError, match="larger than"):
        READERS[reader](Path("/dev/zero"))


@pytest.mark.parametrize("reader", READERS)
def test_yaml_tags_run_no_code(reader: str, tmp_path: Path) -> None:
    path, made = tmp_path / "tag.yaml", tmp_path / "made"
    path.write_text(f"node: !!python/object/apply:os.system ['touch {made}']\nrows: !!python/name:os.system\n")
    with pytest.raises(ConfigError):
        READERS[reader](path)
    assert not made.exists()


def test_source_has_no_unsafe_yaml_pickle_or_eval() -> None:
    sources = [path.read_text(encoding="utf-8") for path in Path(exporter.__file__).parent.rglob("*.py")]
    assert not [text for text in sources if re.search(r"yaml\.(unsafe_|full_)?load\b|yaml\.load_all|FullLoader", text)]
    assert not [text for text in sources if re.search(r"\bpickle\b|\bmarshal\b|\beval\(|\bexec\(|shell=True", text)]


async def test_prometheus_answers_are_bounded_in_depth() -> None:
    for body in (b"[" * 1_000_000, b'{"a":' * 200_000, b'{"status":"success","data":' + b"[" * 500_000):
        for status in (200, 500):
            error, _ = await refused(lambda _, b=body, s=status: web.Response(body=b, status=s), retries=0)  # type: ignore[misc]
            assert error.reason in {"garbage", "server_error", "not_prometheus"}
            assert len(str(error)) < 1000


async def test_api_answers_are_bounded_in_depth_and_unpacked_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_client, "ANSWER_LIMIT_BYTES", 1 << 20)
    bodies = {"too_large": gzip.compress(b" " * (4 << 20)), "garbage": gzip.compress(b'{"a":' * 100_000)}
    for reason, packed in bodies.items():

        async def answer(_: web.Request, packed: bytes = packed) -> web.StreamResponse:
            return web.Response(body=packed, headers={"Content-Encoding": "gzip", "Content-Type": "application/json"})

        async with scripted(answer, tmp_path) as (client, _):
            with pytest.raises(ApiError) as reported:
                await client.get(Request(PODS))
        assert reported.value.reason == reason


async def test_api_redirects_are_not_followed_and_the_token_is_masked(tmp_path: Path) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path != PODS:
            return web.json_response({"items": []})
        if "watch" in request.query:
            event = {"type": "ERROR", "object": {"code": 500, "message": f"had {request.headers['Authorization']}"}}
            return web.Response(body=json.dumps(event).encode() + b"\n")
        raise web.HTTPFound("http://127.0.0.1:9/elsewhere")

    async with scripted(answer, tmp_path) as (client, requests):
        with pytest.raises(ApiError, match="HTTP 302"):
            await client.get(Request(PODS))
        with pytest.raises(ApiError) as reported:
            async for _ in client.watch(Request(PODS), silence_seconds=5):
                pass
    assert "had Bearer ..." in str(reported.value)
    assert {request.path for request in requests} == {PODS}


def test_deeply_nested_agent_answer_is_refused() -> None:
    with pytest.raises(ExporterError, match="the server there is not an agent"):
        agent_client.document_of(b"[" * 1_000_000, "http://127.0.0.1:9")


def limited(code: str) -> subprocess.CompletedProcess[str]:
    """Run code with limits of time and memory."""

    def limits() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))

    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, preexec_fn=limits)


EVIL = """
import importlib, pkgutil, re, signal
import exporter
names = [one.name for one in pkgutil.walk_packages(exporter.__path__, "exporter.")]
modules = [importlib.import_module(name) for name in names if "__main__" not in name and "simulator" not in name]
patterns = {one for module in modules for one in vars(module).values() if isinstance(one, re.Pattern)}
parts = ["a", "1", "0", "-", ".", "_", " ", "/", ":", "x-", "a.", "1.", "pod", "kubepods/pod", "0123456789abcdef"]
parts += ["GPU-", "MIG-", "/job_1", "-1", "://a", "2026-01-01T00:00:00", "A1", "[a]", chr(92), chr(34), "a:b+"]
for pattern in patterns:
    for part in parts:
        for tail in ("", "!"):
            text = part * (800 // len(part)) + tail
            text = text.encode() if isinstance(pattern.pattern, bytes) else text
            signal.signal(signal.SIGVTALRM, lambda *_: exit(f"{pattern.pattern!r} on {part!r}"))
            signal.setitimer(signal.ITIMER_VIRTUAL, 5)
            pattern.fullmatch(text), pattern.search(text)
signal.setitimer(signal.ITIMER_VIRTUAL, 0)
print(len(patterns))
"""


def test_program_patterns_take_bounded_time() -> None:
    done = limited(EVIL)
    assert done.returncode == 0, done.stderr[-500:]
    assert int(done.stdout) > 60, "the program has patterns"


OF_A_BOOK = """
from exporter.accounting.prices import Match, PricedGpu
asked = PricedGpu("a" * 400, "n")
for part in ("*a", "*?a", "*a?", "?*a*"):
    assert not Match(model=part * 60 + "b").matches(asked)
assert Match(model="*" + "a*" * 60).matches(asked)
print("done")
"""


def test_price_book_patterns_take_bounded_time() -> None:
    done = limited(OF_A_BOOK)
    assert done.stdout == "done\n", done.stderr[-500:]


@pytest.mark.parametrize("text", ["1e999", "-1e999", "nan", "inf", "1" + "0" * 400, "0x10", "1_0", "٣", "1e-999999999"])
def test_price_outside_the_number_range_is_refused_or_zero(text: str) -> None:
    rows = f"currency: USD\nrows:\n  - {{model: A, per_gpu_hour: '{text}', source: s, as_of: 2026-01-01}}\n"
    book, problems = price_book.examine(rows, "book.yaml")
    assert problems or all(0 <= row.price.per_hour < 1e6 for row in book.rows), book

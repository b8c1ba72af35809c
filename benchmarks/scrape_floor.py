"""What no scrape can be quicker than: servers with a page's bytes in memory, asked as bench.py asks the agent."""

import argparse
import multiprocessing
import socket
import time

from aiohttp import web
from scrapes import many, percentile

HOST = "127.0.0.1"


def plain_socket(port: int, body: bytes) -> None:
    """Answer whatever is asked, one client after the other."""
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
    with socket.create_server((HOST, port)) as server:
        while True:
            client, _ = server.accept()
            with client:
                client.recv(65_536)
                client.sendall(head + body)


def aiohttp_alone(port: int, body: bytes) -> None:
    """The same with the library that the agent serves with, and nothing else."""

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(body=body, content_type="text/plain")

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    web.run_app(app, host=HOST, port=port, print=None, access_log=None)


def main() -> None:
    """Print a table of both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=185_000, help="of a page [default: 185000, 8 GPUs and 110 pods]")
    body = b"x" * parser.parse_args().bytes
    print("| server | p50, ms | p99, ms | after a second's pause, median, ms |\n|---|---:|---:|---:|")
    for serve in (plain_socket, aiohttp_alone):
        with socket.create_server((HOST, 0)) as free:
            port = free.getsockname()[1]
        server = multiprocessing.Process(target=serve, args=(port, body), daemon=True)
        server.start()
        time.sleep(1.0)
        often, seldom = many(port, count=200, pause_seconds=0.02), many(port, count=15, pause_seconds=1.05)
        figures = (percentile(often, 50), percentile(often, 99), percentile(seldom, 50))
        print(f"| {serve.__name__} |", " | ".join(f"{1000 * one:.2f}" for one in figures), "|", flush=True)
        server.terminate()


if __name__ == "__main__":
    main()

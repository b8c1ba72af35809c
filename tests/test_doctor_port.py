"""The doctor in a pod with an agent behind TLS or passwords: it accepts only the agent on the agent's port."""

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from service_support import Certificates, make_certificates

from exporter.doctor import machine
from exporter.doctor.findings import Level

OURS, THEIRS = 'Basic realm="gpu-cost-exporter", charset="UTF-8"', 'Basic realm="metrics"'


class Server(HTTPServer):
    """A server that does not print the errors of its clients."""

    def handle_error(self, *_: object) -> None:
        pass


@contextmanager
def answering(status: int, body: bytes = b"", *, realm: str = "", tls: ssl.SSLContext | None = None) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 5

        def do_GET(self) -> None:  # the name is the standard library's
            self.send_response(status)
            if realm:
                self.send_header("WWW-Authenticate", realm)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with Server(("127.0.0.1", 0), Handler) as server:
        if tls:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates") / "made")


def context(
    certificates: Certificates, *, demands: bool = False, version: ssl.TLSVersion | None = None
) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.load_cert_chain(certificates.path("server.pem"), certificates.path("server.key"))
    if demands:
        made.verify_mode = ssl.CERT_REQUIRED
        made.load_verify_locations(certificates.path("ca.pem"))
    if version:
        made.maximum_version = version
    return made


def test_agent_with_tls_is_recognised_for_any_certificate(certificates: Certificates) -> None:
    with answering(200, b"ok\n", tls=context(certificates)) as number:
        assert "already serving" in machine.port("127.0.0.1", number).cause


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_agent_that_requires_a_client_certificate_is_recognised(
    certificates: Certificates, version: ssl.TLSVersion
) -> None:
    with answering(200, b"ok\n", tls=context(certificates, demands=True, version=version)) as number:
        assert machine.port("127.0.0.1", number).level is Level.OK


def test_agent_that_requires_a_password_is_recognised_by_its_realm(
    certificates: Certificates,
) -> None:
    for tls in (None, context(certificates)):
        with answering(401, realm=OURS, tls=tls) as number:
            assert machine.port("127.0.0.1", number).level is Level.OK
        with answering(401, realm=THEIRS, tls=tls) as number:
            assert machine.port("127.0.0.1", number).level is Level.FAIL


def test_other_program_with_tls_occupies_the_port(certificates: Certificates) -> None:
    with answering(404, b"no such page\n", tls=context(certificates)) as number:
        finding = machine.port("127.0.0.1", number)
    assert (finding.level, "--listen" in finding.fix) == (Level.FAIL, True)


def test_program_that_closes_the_connection_is_not_the_agent() -> None:
    def hang_up() -> None:
        for _ in range(2):  # requested in plain text and over TLS
            listener.accept()[0].close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = Thread(target=hang_up)
        thread.start()
        assert machine.port("127.0.0.1", listener.getsockname()[1]).level is Level.FAIL
        thread.join()

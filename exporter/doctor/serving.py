"""Tells whether who listens on a port is an agent: by plain HTTP, or by TLS with whatever certificate."""

import http.client
import socket
import ssl

_SECONDS = 1.0
_PATIENCE_SECONDS = 0.5
_MOST_BYTES = 65536
_HANDSHAKE = b"\x16"
"""First byte of all that a server says that goes into a TLS handshake; one that does not sends an alert, or no TLS."""
_REALM = "gpu-cost-exporter"


def answers(host: str, number: int) -> bool:
    """Ask ``/healthz``; who asks for our password, or by TLS for a certificate of the client, counts as an agent."""
    address = host or "127.0.0.1"
    # The certificate is of the node's name, which is not this address; nothing secret is asked or told.
    context = ssl._create_unverified_context()  # noqa: S323, SLF001
    return (
        _is_ours(http.client.HTTPConnection(address, number, timeout=_SECONDS))
        or _is_ours(http.client.HTTPSConnection(address, number, timeout=_SECONDS, context=context))
        or _wants_certificate(address, number, context)
    )


def _is_ours(connection: http.client.HTTPConnection) -> bool:
    try:
        connection.request("GET", "/healthz")
        response = connection.getresponse()
        refused = response.status == http.client.UNAUTHORIZED
        return response.read(16) == b"ok\n" or (refused and _REALM in response.headers.get("WWW-Authenticate", ""))
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _wants_certificate(address: str, number: int, context: ssl.SSLContext) -> bool:
    """Shake hands and ask nothing: who wants a certificate hangs up then, often without the alert that says why."""
    heard, incoming, outgoing = b"", ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing)
    try:
        with socket.create_connection((address, number), timeout=_PATIENCE_SECONDS) as connection:
            while len(heard) < _MOST_BYTES:
                try:
                    tls.do_handshake()
                    tls.read(1)
                except ssl.SSLWantReadError:
                    connection.sendall(outgoing.read())
                received = connection.recv(4096)
                if not received:
                    break
                heard += received
                incoming.write(received)
    except TimeoutError:
        return False  # it waits for a request
    except OSError:
        pass  # an alert, or the kernel's word for an end
    return heard.startswith(_HANDSHAKE)

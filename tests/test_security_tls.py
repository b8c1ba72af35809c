"""TLS refusals, in handshakes of openssl's client with the agent's server."""

import asyncio
import re
import ssl
from pathlib import Path

import aiohttp
import pytest
from service_support import Certificates, make_certificates, openssl, web_file
from test_web_config import Served, served

REQUIRED = {"client_auth_type": "RequireAndVerifyClientCert", "client_ca_file": "ca.pem"}
WEAK = "aNULL:eNULL:kRSA:kPSK:kSRP:3DES:DES:RC4:RC2:IDEA:SEED:MD5:CAMELLIA:ARIA:AESCCM:SHA1@SECLEVEL=0"
"""Ciphers without forward secrecy, authentication or encryption, or broken ones."""


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return make_certificates(tmp_path)


async def handshake(one: Served, folder: Path, *options: str, said: str = "") -> str:
    """Return the output of openssl's client for a connection."""
    arguments = ("s_client", "-connect", f"127.0.0.1:{one.port}", "-CAfile", "ca.pem", *options)
    return await asyncio.to_thread(openssl, *arguments, folder=folder, said=said)


def refused(reported: str) -> bool:
    """Return whether the server closed the connection after the client's hello. (asyncio sends no alert.)"""
    said = re.search(r"has read 0 bytes and written (\d+) bytes", reported)
    return said is not None and int(said[1]) > 0 and "Cipher is (NONE)" in reported


@pytest.mark.parametrize("version", ["-tls1", "-tls1_1"])
async def test_tls_versions_before_1_2_are_refused(certificates: Certificates, version: str) -> None:
    async with served(web_file(certificates.folder, tls={})) as one:
        # Level 0, so that the client itself does not refuse.
        reported = await handshake(one, certificates.folder, version, "-cipher", "ALL@SECLEVEL=0")
        assert refused(reported), reported
        assert "Cipher is ECDHE" in await handshake(one, certificates.folder, "-tls1_2")
        assert "Cipher is TLS_" in await handshake(one, certificates.folder, "-tls1_3")


async def test_weak_ciphers_are_refused(certificates: Certificates) -> None:
    async with served(web_file(certificates.folder, tls={})) as one:
        reported = await handshake(one, certificates.folder, "-tls1_2", "-cipher", WEAK)
        assert refused(reported), reported


async def test_client_cannot_renegotiate_or_compress(certificates: Certificates) -> None:
    async with served(web_file(certificates.folder, tls={})) as one:
        reported = await handshake(one, certificates.folder, "-tls1_2", "-comp", said="R\n")
        assert "Compression: NONE" in reported
        assert "no renegotiation" in reported, reported


async def test_expired_client_certificate_is_refused(certificates: Certificates) -> None:
    folder = certificates.folder
    (folder / "index.txt").touch()
    (folder / "ca.conf").write_text(
        "[ca]\ndefault_ca=one\n[one]\ndatabase=index.txt\nserial=serial\nnew_certs_dir=.\ndefault_md=sha256\n"
        "policy=any\nrand_serial=yes\nunique_subject=no\n[any]\ncommonName=supplied\n"
    )
    signing = ("-config", "ca.conf", "-cert", "ca.pem", "-keyfile", "ca.key", "-extfile", "client.ext")
    for name, start, end in (("old", "2020", "2021"), ("new", "2020", "2099")):
        times = ("-startdate", f"{start}0101000000Z", "-enddate", f"{end}0101000000Z", "-out", f"{name}.pem")
        openssl("ca", "-batch", "-notext", *signing, "-in", "client.csr", *times, folder=folder)
    async with served(web_file(folder, tls=REQUIRED)) as one:
        fresh, expired = certificates.client(), certificates.client()
        fresh.load_cert_chain(folder / "new.pem", folder / "client.key")
        expired.load_cert_chain(folder / "old.pem", folder / "client.key")
        assert (await one.get(tls=fresh))[0] == 200
        with pytest.raises(aiohttp.ClientError):
            await one.get(tls=expired)


async def test_server_certificate_is_refused_as_client_certificate(certificates: Certificates) -> None:
    async with served(web_file(certificates.folder, tls=REQUIRED)) as one:
        context = certificates.client()
        context.load_cert_chain(certificates.path("server.pem"), certificates.path("server.key"))
        with pytest.raises(aiohttp.ClientError):
            await one.get(tls=context)


async def test_reloaded_client_authority_refuses_clients_of_the_former_one(
    certificates: Certificates, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = make_certificates(tmp_path_factory.mktemp("other"))
    async with served(web_file(certificates.folder, tls=REQUIRED)) as one:
        assert (await one.get(tls=certificates.client(shown=True)))[0] == 200
        certificates.path("clients.pem").write_bytes(other.path("ca.pem").read_bytes())
        web_file(certificates.folder, tls={**REQUIRED, "client_ca_file": "clients.pem"})
        newer = ssl.create_default_context(cafile=str(certificates.path("ca.pem")))
        newer.load_cert_chain(other.path("client.pem"), other.path("client.key"))
        await one.until(200, tls=newer)
        with pytest.raises(aiohttp.ClientError):
            await one.get(tls=certificates.client(shown=True))

# SPDX-License-Identifier: Apache-2.0
"""Over TLS: certificates are checked, a token travels, ends without farewell are seen, and plain http is never next."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils._blob import BlobError

from tests.hub import FakeHub
from tests.hub.jobs import PARTS, QUICK, Bench

TOKEN = "hf_0123456789abcdefghijklmnop"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for localhost that nobody vouches for, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    done = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", "key.pem", "-out", "cert.pem"],
        cwd=folder, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "cert.pem", folder / "key.pem"


class Terminator:
    """TLS in front of a plain server. CUT ends each connection without farewell after so many bytes of answers."""

    def __init__(self, pair: tuple[Path, Path], target: str, cut: int | None = None) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(*pair)
        self._target = target.partition("//")[2].split(":")
        self.cut = cut
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"https://localhost:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                peer, _address = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        try:
            with peer, self._context.wrap_socket(peer, server_side=True) as secure:
                behind = socket.create_connection((self._target[0], int(self._target[1])))
                with behind:
                    threading.Thread(target=self._upward, args=(secure, behind), daemon=True).start()
                    left = self.cut
                    while data := behind.recv(65536):
                        part = data if left is None else data[:left]
                        secure.sendall(part)
                        if left is not None:
                            left -= len(part)
                            if left <= 0:
                                secure.shutdown(socket.SHUT_RDWR)
                                return
        except OSError:
            return

    @staticmethod
    def _upward(secure: ssl.SSLSocket, behind: socket.socket) -> None:
        try:
            while data := secure.recv(65536):
                behind.sendall(data)
        except OSError:
            return

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def terminate(certificate: tuple[Path, Path]) -> Iterator[Callable[..., Terminator]]:
    made: list[Terminator] = []

    def make(target: str, cut: int | None = None) -> Terminator:
        made.append(Terminator(certificate, target, cut))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def secure(
    hub: FakeHub, terminate: Callable[..., Terminator], certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> Terminator:
    """The Hub and its content server behind TLS, whose certificate this process trusts. Returns the Hub's."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    hub.cdn_url = terminate(hub.cdn_url).url
    return terminate(hub.url)


def test_download_over_tls_with_a_token(bench: Bench, secure: Terminator) -> None:
    bench.hub.gated.add(bench.repo)
    bench.run(PARTS, endpoint=secure.url, token=TOKEN)
    assert bench.right()
    assert {r.header("Authorization") for r in bench.hub.requests("hub")} == {f"Bearer {TOKEN}"}
    assert {r.header("Authorization") for r in bench.hub.requests("cdn")} == {None}


def test_certificate_that_nobody_vouches_for(bench: Bench, terminate: Callable[..., Terminator]) -> None:
    with pytest.raises(BlobError, match="the certificate of localhost could not be verified") as error:
        bench.run(endpoint=terminate(bench.hub.url).url, token=TOKEN)
    assert error.value.reason == "certificate"
    assert bench.hub.requests() == []


def test_certificate_of_another_name(bench: Bench, secure: Terminator) -> None:
    with pytest.raises(BlobError, match=r"certificate of 127\.0\.0\.1") as error:
        bench.run(endpoint=secure.url.replace("localhost", "127.0.0.1"))
    assert error.value.reason == "certificate"


def test_plain_server_behind_an_https_address(bench: Bench) -> None:
    with pytest.raises(BlobError, match="interrupted"):
        bench.run(QUICK._replace(retries=1), endpoint=bench.hub.url.replace("http:", "https:"))


def test_end_without_farewell_is_noticed(
    bench: Bench, secure: Terminator, terminate: Callable[..., Terminator]
) -> None:
    plain = f"http://127.0.0.1:{bench.hub._cdn.server_address[1]}"
    bench.hub.cdn_url = terminate(plain, cut=200_000).url
    bench.run(endpoint=secure.url)
    assert bench.right()
    asked = [r.range for r in bench.hub.requests("cdn", "GET")]
    assert asked[0] is None
    assert all(r is not None for r in asked[1:])
    assert len(asked) == 4


def test_never_from_https_to_http(bench: Bench, secure: Terminator) -> None:
    bench.hub.cdn_url = f"http://127.0.0.1:{bench.hub._cdn.server_address[1]}"
    with pytest.raises(BlobError) as error:
        bench.run(endpoint=secure.url, token=TOKEN)
    assert error.value.reason == "insecure_redirect"
    assert "Signature" not in str(error.value)
    assert bench.hub.requests("cdn") == []

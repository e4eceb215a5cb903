# SPDX-License-Identifier: Apache-2.0
"""The script that answers as a registry while docker pulls: what it serves, and that nothing of it is left."""

from __future__ import annotations

import hashlib
import http.client
import importlib.util
import io
import json
import shlex
import subprocess
import tarfile
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "roles" / "model_archive" / "files" / "docker_import.py"
LAYER = bytes(range(256)) * 9000
MANIFEST = json.dumps({"schemaVersion": 2, "layers": [{"digest": "sha256:" + hashlib.sha256(LAYER).hexdigest()}]})


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docker_import", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "image.tar"
    with tarfile.open(path, "w") as tar:
        for data in (LAYER, MANIFEST.encode()):
            info = tarfile.TarInfo("./blobs/sha256/" + hashlib.sha256(data).hexdigest())
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def test_registry_serves_what_the_archive_holds(script: Any, archive: Path) -> None:
    script.Registry.archive = script.Archive(str(archive))
    server = ThreadingHTTPServer(("127.0.0.1", 0), script.Registry)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1])

    def ask(method: str, path: str) -> tuple[int, bytes, Any]:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer

    try:
        assert ask("GET", "/v2/")[:2] == (200, b"{}")
        assert ask("GET", f"/v2/a/b/blobs/{digest(LAYER)}")[:2] == (200, LAYER)
        status, body, answer = ask("HEAD", f"/v2/a/manifests/{digest(MANIFEST.encode())}")
        assert (status, body) == (200, b"")
        assert answer.getheader("Content-Type") == "application/vnd.oci.image.manifest.v1+json"
        assert answer.getheader("Content-Length") == str(len(MANIFEST))
        assert ask("GET", "/v2/a/manifests/latest")[0] == 404
        assert ask("GET", f"/v2/a/blobs/sha256:{'0' * 64}")[0] == 404
        assert ask("GET", "/etc/passwd")[0] == 404
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("reference", "rules"),
    [("ghcr.io/a/b", [("127.83.0.1", "443"), ("127.83.0.1", "80")]), ("reg.test:5000/a", [("127.83.0.1", "5000")]),
     ("10.1.2.3:5000/a", [("10.1.2.3", "5000")])],
)  # fmt: skip
@pytest.mark.parametrize("status", [0, 1])
def test_names_and_rules_are_there_for_the_pull_only(
    script: Any, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str, rules: Any, status: int
) -> None:
    hosts = tmp_path / "hosts"
    before = "127.0.0.1 localhost\n"
    hosts.write_text(before + "127.83.0.1 left.test # tensorless-archive\n")
    table = ["-A OUTPUT -d 9.9.9.9/32 -j ACCEPT"]
    seen: list[tuple[str, list[str]]] = []

    def run(argv: list[str], **_more: Any) -> subprocess.CompletedProcess[str]:
        words = [w for w in argv if w != "-w"]
        if argv[0] == "docker":
            seen.append((hosts.read_text(), list(table)))
        elif words[3] == "-S":
            return subprocess.CompletedProcess(argv, 0, "\n".join(table) + "\n", "")
        elif words[3] == "-I":
            table.insert(0, shlex.join(["-A", *words[4:]]))
        elif words[3] == "-D":
            table.remove(shlex.join(["-A", *words[4:]]))
        return subprocess.CompletedProcess(argv, status, "", "no")

    monkeypatch.setattr(script, "HOSTS", hosts)
    monkeypatch.setattr(script.subprocess, "run", run)
    monkeypatch.setattr(script.time, "sleep", lambda _seconds: None)
    monkeypatch.setattr(script.signal, "signal", lambda *_args: None)
    monkeypatch.setattr(script.sys, "argv", ["x", str(archive), f"{reference}@{digest(MANIFEST.encode())}"])
    assert script.main() == status
    name = reference.partition("/")[0].partition(":")[0]
    assert seen
    text, table_then = seen[0]
    assert (f"127.83.0.1 {name} #" in text) == (not name[0].isdigit())
    assert "left.test" not in text
    assert [all(word in rule for word in wanted) for wanted, rule in zip(reversed(rules), table_then)] == [True] * len(
        rules
    )
    assert hosts.read_text() == before
    assert table == ["-A OUTPUT -d 9.9.9.9/32 -j ACCEPT"]


def test_images_it_cannot_import_are_said(
    script: Any, archive: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for reference, words in [
        (f"engine@sha256:{'0' * 64}", "names no registry"),
        (f"docker.io/a/b@sha256:{'0' * 64}", "names no registry"),
        (f"ghcr.io/a/b@sha256:{'0' * 64}", "does not hold"),
    ]:
        monkeypatch.setattr(script.sys, "argv", ["x", str(archive), reference])
        assert script.main() == 1
        assert words in capsys.readouterr().out

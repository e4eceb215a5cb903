# SPDX-License-Identifier: Apache-2.0
"""hf_verified_blob through Ansible: results, check mode, secrets, progress, and real tools beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils._progress import line, progress_writer, summary

from tests.hub import FakeHub
from tests.hub.jobs import COMMIT, REPO, Bench, noise

ROOT = Path(__file__).parents[3]
PLAYBOOK = Path(sys.executable).with_name("ansible-playbook")
TOKEN = "hf_0123456789abcdefghijklmnop"


def play(bench: Bench, *argv: str, **options: Any) -> tuple[int, str]:
    """One task on this machine; returns status and everything that was printed."""
    given = {
        "repo": REPO,
        "revision": COMMIT,
        "file": bench.file,
        "sha256": bench.sha,
        "size_bytes": len(bench.data),
        "cache": str(bench.root / "hub"),
        "state_dir": str(bench.root / "state"),
        "endpoint": bench.hub.url,
        **options,
    }
    tasks = [{"tensorless.fleet.hf_verified_blob": given, "register": "out"}, {"ansible.builtin.debug": {"var": "out"}}]
    text = [{"hosts": "localhost", "connection": "local", "gather_facts": False, "tasks": tasks}]
    book = bench.root / "play.yml"
    book.write_text(json.dumps(text).replace(TOKEN, "{{ lookup('file', '" + str(bench.root / "token") + "') }}"))
    (bench.root / "token").write_text(TOKEN)
    environ = {**os.environ, "ANSIBLE_LOCAL_TEMP": str(bench.root / "tmp"), "ANSIBLE_NOCOLOR": "1",
               "ANSIBLE_REMOTE_TEMP": str(bench.root / "remote"), "ANSIBLE_INJECT_FACT_VARS": "false"}  # fmt: skip
    done = subprocess.run([str(PLAYBOOK), str(book), *argv], capture_output=True, text=True, env=environ, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_check_mode_lists_and_touches_nothing(bench: Bench) -> None:
    code, text = play(bench, "--check", "--diff")
    assert code == 0, text
    assert f"+download {REPO}/{bench.file}" in text
    assert "+make the link" in text
    assert "+write the marker" in text
    assert "changed=1" in text
    assert bench.hub.requests() == []
    assert not (bench.root / "hub").exists()
    assert not (bench.root / "state").exists()


def test_second_run_changes_nothing(bench: Bench) -> None:
    code, text = play(bench)
    assert code == 0, text
    assert "changed=1" in text
    assert bench.right()
    requests = len(bench.hub.requests())
    code, text = play(bench)
    assert code == 0
    assert "changed=0" in text
    assert len(bench.hub.requests()) == requests


def test_token_is_nowhere(bench: Bench) -> None:
    """Neither in output at -vvv, nor in files of the run, nor in process lists, nor at the content server."""
    bench.hub.gated.add(REPO)
    bench.hub.rate = 60_000.0
    seen: list[str] = []

    def look(request: Any) -> bool:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                for name in ("cmdline", "environ"):
                    try:
                        data = (entry / name).read_bytes()
                    except OSError:
                        continue
                    if TOKEN.encode() in data:
                        seen.append(f"{entry}/{name}")
        kept = [p for p in bench.root.rglob("*") if p.is_file() and p.name != "token"]
        seen.extend(str(p) for p in kept if TOKEN.encode() in p.read_bytes())
        return False

    bench.hub.fault(when=look)
    code, text = play(bench, "-vvv", token=TOKEN)
    assert code == 0, text
    assert bench.right()
    assert seen == []
    assert TOKEN not in text
    assert all(r.header("Authorization") == f"Bearer {TOKEN}" for r in bench.hub.requests("hub"))
    assert all(r.header("Authorization") is None for r in bench.hub.requests("cdn"))
    kept = [p for p in bench.root.rglob("*") if p.is_file() and p.name != "token"]
    assert not [p for p in kept if TOKEN.encode() in p.read_bytes()]


def test_failure_is_one_message(bench: Bench) -> None:
    bench.hub.gated.add(REPO)
    code, text = play(bench)
    assert code == 2
    assert "Accept its terms on the Hub" in text
    assert "Traceback" not in text
    code, text = play(bench, revision="main")
    assert code == 2
    assert "40 lower-case hexadecimal digits" in text
    assert "Traceback" not in text


def test_progress_is_shown_while_it_runs(bench: Bench) -> None:
    bench.hub.rate = 60_000.0
    events = bench.root / "events"
    code, text = play(bench, "-e", f"tensorless_progress_file={events}", connections=1)
    assert code == 0, text
    assert "tensorless: [localhost] downloading f.gguf" in text
    report = json.loads(events.read_text().splitlines()[0])
    assert report["host"] == "localhost"
    assert 0 < report["bytes"] < report["size"] == len(bench.data)
    assert report["rate"] > 0
    assert report["seconds_left"] > 0
    assert not list(Path("/tmp").glob(f".tensorless-*{bench.sha}*"))


def test_many_hosts_make_one_line() -> None:
    reports = [
        {"host": f"h{n}", "stage": "download", "file": "f", "bytes": 10**9 * n, "size": 10**10, "rate": 10**8}
        for n in range(1, 8)
    ]
    assert line({**reports[0], "seconds_left": 90}) == (
        "tensorless: [h1] downloading f 10 % (1.00 GB of 10.00 GB), 100.0 MB/s, 1 min 30 s left"
    )
    assert summary(reports) == (
        "tensorless: [7 hosts] 40 % (28.00 GB of 70.00 GB), 700.0 MB/s together; "
        "last is h1, downloading f 10 % (1.00 GB of 10.00 GB), 100.0 MB/s"
    )


def test_progress_file_is_never_anothers(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    link = tmp_path / "link"
    link.symlink_to(target)
    write, close = progress_writer(str(link))
    write({"stage": "download"})
    close()
    assert target.read_text() == "precious"
    assert link.is_symlink()


def test_download_stops_when_its_controller_is_gone(bench: Bench, tmp_path: Path) -> None:
    """The module ends by itself once nobody can read its result, and keeps what has come."""
    bench.hub.rate = 30_000.0
    options = {"repo": REPO, "revision": COMMIT, "file": bench.file, "sha256": bench.sha, "size_bytes": len(bench.data),
               "cache": str(bench.root / "hub"), "state_dir": str(bench.root / "state"), "endpoint": bench.hub.url,
               "min_rate": 0}  # fmt: skip
    script = (
        "import json, sys; from ansible.module_utils import basic; "
        "from ansible.module_utils.testing import patch_module_args\n"
        f"with patch_module_args(json.loads({json.dumps(options)!r})):\n"
        "    from ansible_collections.tensorless.fleet.plugins.modules.hf_verified_blob import main; main()"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None
    while bench.hub.bytes_sent("cdn") < 20_000 and process.poll() is None:
        time.sleep(0.05)
    process.stdout.close()
    process.wait(20)
    assert not bench.blob.exists()
    assert bench.sidecar.exists()
    assert not Path(str(bench.partial) + ".lock").exists()


# ----- real peers -----


@pytest.fixture
def hf(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Any:
    """huggingface_hub against the same Hub and cache."""
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    return pytest.importorskip("huggingface_hub")


def ask_hf(hf: Any, bench: Bench) -> str:
    return str(
        hf.hf_hub_download(
            REPO, bench.file, revision=COMMIT, cache_dir=str(bench.root / "hub"), endpoint=bench.hub.url, token=False
        )
    )


def test_file_of_hf_is_adopted_without_a_byte(bench: Bench, hf: Any) -> None:
    path = Path(ask_hf(hf, bench))
    assert path == bench.snapshot
    sent = bench.hub.bytes_sent()
    requests = len(bench.hub.requests())
    ran = bench.run()
    assert bench.right()
    assert bench.hub.bytes_sent() == sent
    assert len(bench.hub.requests()) == requests
    assert [step.do for step in ran.steps] == ["mark"]


def test_file_of_ours_is_used_by_hf_without_a_byte(bench: Bench, hf: Any) -> None:
    bench.run()
    sent = bench.hub.bytes_sent()
    assert Path(ask_hf(hf, bench)) == bench.snapshot
    assert bench.hub.bytes_sent() == sent
    assert hf.try_to_load_from_cache(REPO, bench.file, cache_dir=str(bench.root / "hub"), revision=COMMIT) == str(
        bench.snapshot
    )


@pytest.mark.parametrize("file", ["f.gguf", "deep/er/f.gguf"])
def test_cache_is_accepted_by_scan_and_verify(hub: FakeHub, tmp_path: Path, file: str) -> None:
    hf = pytest.importorskip("huggingface_hub")
    bench = Bench(hub, tmp_path, noise(300_000), file=file)
    bench.run()
    info = hf.scan_cache_dir(str(tmp_path / "hub"))
    assert info.warnings == []
    repo = next(iter(info.repos))
    assert (repo.repo_id, repo.size_on_disk) == (REPO, len(bench.data))
    client = Path(sys.executable).with_name("hf")
    environ = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HOME": str(tmp_path / "home")}
    command = [str(client), "cache", "verify", REPO, "--revision", COMMIT, "--cache-dir", str(tmp_path / "hub")]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1" in done.stdout + done.stderr

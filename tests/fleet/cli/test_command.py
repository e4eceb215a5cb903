# SPDX-License-Identifier: Apache-2.0
"""The command and Fleet on the test fleet: from stopped to healthy and back, a host that goes away, an interrupt."""

from __future__ import annotations

import pathlib
import re
import shutil
import signal
import subprocess
import time

import pytest

from tensorless_fleet import AsyncFleet, Fleet, HostsFailed, Interrupted, InventoryError, Result
from tests.fleet import fleet
from tests.fleet.cli.calls import command, rows
from tests.fleet.cli.screen import Screen, tensorless
from tests.fleet.hosts import Host
from tests.fleet.machine import ROOT, podman

pytestmark = pytest.mark.fleet
MODEL = fleet.MODEL


def served(found: list[tuple[str, str, str, str, bool | None]]) -> list[tuple[str, str, bool | None]]:
    return [(state, health, tuned) for _host, card, state, health, tuned in found if "P100" in card]


def left_over(marker: str) -> list[str]:
    """Processes of this machine with ``marker`` in their command line."""
    found = []
    for entry in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if marker in line and "pytest" not in line and "tmux" not in line:
            found.append(line)
    return found


def plays() -> list[str]:
    return [line for line in left_over("ansible playbook") if str(fleet.INVENTORY) in line]


def test_from_stopped_to_healthy_and_back_on_a_terminal(hosts, tmp_path):
    if shutil.which("tmux") is None:
        pytest.fail("tmux is not installed: apt install tmux")
    assert command("stop", "smol").returncode == 0
    assert set(served(rows())) == {("inactive", "none", True)}

    env = {"XDG_STATE_HOME": str(tmp_path), "TERM": "screen-256color"}
    argv = tensorless("-i", str(fleet.INVENTORY), "run", "smol", "--detach")
    with Screen(argv, str(ROOT), env) as screen:
        screen.wait("HOST", "STATE", "STEP", "DETAIL", *(host.name for host in fleet.HOSTS), seconds=60)
        status = screen.ended(280)
        text = screen.text()
        assert status == 0, text
        live = [shot for shot in screen.shots if "STEP" in shot]
        assert any(re.search(r"working\s+\S", shot) for shot in live), "a step is shown while it works"
        assert any("loading" in shot or "Bring the servers" in shot for shot in live)
    for host in fleet.HOSTS:
        assert re.search(rf"^{host.name} +changed +tensorless-\S+ started at http://127.0.0.1:80", text, re.M), text
    log = re.search(r"the log is in (\S+)", text)
    assert log and pathlib.Path(log.group(1)).exists()

    found = rows()
    assert set(served(found)) == {("active", "ok", True)} and len(served(found)) > len(fleet.HOSTS)
    assert all(state == "absent" for _host, card, state, _health, _tuned in found if "P100" not in card)
    shown = command("fleet")
    assert re.search(rf"^{fleet.HOSTS[0].name} +0 Tesla P100\S+ \S+ +{MODEL} +active +ok +tuned", shown.stdout, re.M)

    again = Fleet(fleet.INVENTORY).run("smol", hosts="gpu", wait=True)
    assert {host.state for host in again.hosts.values()} <= {"ok", "changed"} and again.ok
    servers = [server for host in again.hosts.values() for server in host.servers]
    assert len(servers) == len(served(found))
    assert all(s.state == "started" and s.endpoint and len(s.plan_hash or "") == 64 and not s.actions for s in servers)
    assert any("6.1" in str(item["reason"]) for host in again.hosts.values() for item in host.skipped)


def test_the_plan_of_a_fleet_says_once_what_is_the_same(hosts):
    done = command("run", "smol", "--dry-run", "--context", "2048")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\ndownload: ") == 1 and done.stdout.count("UNTUNED: --context 2048") == 1
    for host in fleet.HOSTS:
        assert re.search(rf"^# {host.name}: GPU \d \(GPU-", done.stdout, re.M)
    assert set(served(rows())) == {("active", "ok", True)}, "nothing was changed"


@pytest.fixture
def away():
    """Lets a host go away, without a word to its peers; brings it back."""
    paused: list[Host] = []

    def leave(host: Host) -> None:
        podman("pause", host.name)
        paused.append(host)

    yield leave
    for host in paused:
        podman("unpause", host.name)
        host.wait()


def test_a_host_that_goes_away_is_shown_within_15_s_and_the_others_finish(hosts, away):
    lost, others = fleet.HOSTS[1], [host.name for host in fleet.HOSTS if host is not fleet.HOSTS[1]]
    run = Fleet(fleet.INVENTORY).start("run", "smol")
    gone = shown = 0.0
    for event in run.events():
        if event.kind == "step" and event.host == lost.name and "server" in event.step and not gone:
            away(lost)
            gone = time.time()
        if event.kind == "unreachable" and event.host == lost.name:
            shown = event.time
    with pytest.raises(HostsFailed) as error:
        run.result()
    assert gone and 0 < shown - gone < 15, (gone, shown)
    result = error.value.result
    assert result.hosts[lost.name].state == "unreachable" and lost.name in error.value.reasons
    assert all(result.hosts[name].ok and result.hosts[name].servers for name in others)
    assert "Check that" in (result.hosts[lost.name].reason or "")


@pytest.mark.parametrize("way", ["C-c", "kill-session"])
def test_an_interrupt_and_a_closed_terminal_leave_nothing_at_work(hosts, tmp_path, way):
    env = {"XDG_STATE_HOME": str(tmp_path), "TERM": "screen-256color"}
    with Screen(tensorless("-i", str(fleet.INVENTORY), "bench", "smol", "--runs", "20"), str(ROOT), env) as screen:
        screen.wait("Measure", seconds=90)
        begin = time.monotonic()
        if way == "C-c":
            screen.keys("C-c")
            assert screen.ended(40) == 130
            assert "INTERRUPTED" in screen.text()
        else:
            screen._tmux("kill-session", "-t", screen.name)
        while plays() and time.monotonic() - begin < 30:
            time.sleep(0.5)
    assert plays() == [] and time.monotonic() - begin < 30
    for host in fleet.HOSTS:
        assert not host.sh("ls -d /home/ops/.ansible/tmp/ansible-tmp-* 2>/dev/null || true"), host.name
    until = time.monotonic() + 30
    for host in fleet.HOSTS:
        while "AnsiballZ" in (seen := host.sh("ps -eo args | grep '[A]nsiballZ' || true")):
            assert time.monotonic() < until, f"{host.name}: {seen}"
            time.sleep(0.5)


def inventory(tmp_path: pathlib.Path, host: Host, **values: str) -> str:
    path = tmp_path / "inventory.ini"
    merged = {
        "ansible_host": host.ip,
        "ansible_user": "ops",
        "ansible_python_interpreter": "/usr/bin/python3",
        **values,
    }
    line = " ".join(f"{key}='{value}'" for key, value in merged.items())
    path.write_text(f"[gpu]\n{host.name} {line}\n")
    return str(path)


def key() -> str:
    from tests.fleet import hosts as module

    return str(module.PRIVATE_KEY)


@pytest.mark.parametrize(
    ("case", "part"),
    [
        ("unknown key", "--host-keys accept-new"),
        ("changed key", "ssh-keygen -R"),
        ("no such file", "does not exist"),
        ("not allowed", "ssh-copy-id"),
        ("sudo", "--become-password-file"),
    ],
)
def test_what_keeps_a_controller_out_is_one_line_with_the_fix(hosts, tmp_path, case, part):
    host = fleet.HOSTS[0]
    known = tmp_path / "known_hosts"
    plain = f"-o IdentitiesOnly=yes -o UserKnownHostsFile={known}"
    values = {"ansible_ssh_private_key_file": key(), "ansible_ssh_common_args": plain}
    if case == "changed key":
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True)
        known.write_text(f"{host.ip} {(tmp_path / 'other.pub').read_text()}")
    elif case == "no such file":
        values["ansible_ssh_private_key_file"] = str(tmp_path / "nowhere")
        values["ansible_ssh_common_args"] = plain + " -o StrictHostKeyChecking=no"
    elif case == "not allowed":
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True)
        values["ansible_ssh_private_key_file"] = str(tmp_path / "other")
        values["ansible_ssh_common_args"] = plain + " -o StrictHostKeyChecking=no"
    elif case == "sudo":
        host.sh(
            "id plainuser >/dev/null 2>&1 || useradd -m -s /bin/bash -G sudo plainuser; "
            "echo plainuser:secret | chpasswd"
        )
        host.sh(
            "install -d -o plainuser -m 0700 /home/plainuser/.ssh; cp ~ops/.ssh/authorized_keys "
            "/home/plainuser/.ssh/; chown plainuser /home/plainuser/.ssh/authorized_keys"
        )
        values["ansible_user"] = "plainuser"
        values["ansible_ssh_common_args"] = plain + " -o StrictHostKeyChecking=no"
    with pytest.raises(HostsFailed) as error:
        Fleet(inventory(tmp_path, host, **values)).status()
    reason = error.value.reasons[host.name]
    assert part in reason and "\n" not in reason and len(reason) < 500, reason
    if case == "sudo":
        secret = tmp_path / "password"
        secret.write_text("secret\n")
        result = Fleet(inventory(tmp_path, host, **values), become_password_file=secret).status()
        assert result.ok and result.hosts[host.name].cards
    if case == "unknown key":
        assert Fleet(inventory(tmp_path, host, **values), host_keys="accept-new").status().ok


def test_a_token_leaves_no_trace(hosts, tmp_path):
    env = {"HF_TOKEN": "hf_FAKE123traceless", "XDG_STATE_HOME": str(tmp_path / "state")}
    done = command("pull", "smol", env=env)
    assert done.returncode == 0, done.stdout
    assert "hf_FAKE123traceless" not in done.stdout + done.stderr
    for folder in (tmp_path, pathlib.Path("/tmp/tensorless-0"), pathlib.Path.home() / ".ansible"):
        for path in folder.rglob("*") if folder.exists() else ():
            if path.is_file() and path.stat().st_size < 1 << 24:
                assert b"hf_FAKE123traceless" not in path.read_bytes(), path
    for host in fleet.HOSTS:
        assert not host.sh(
            "grep -rlF hf_FAKE123traceless /etc /home /root /tmp /var/lib/tensorless/state 2>/dev/null || true"
        )
        assert not host.sh("journalctl --no-pager | grep -F hf_FAKE123traceless || true")


def test_the_snippets_of_the_python_page_run(hosts, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inventory.yml").symlink_to(fleet.INVENTORY)
    page = (ROOT / "docs" / "how-to" / "python.md").read_text()
    names: dict[str, object] = {}
    snippets = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(snippets) == 5
    for snippet in snippets:
        exec(compile(snippet.replace('"bench", "smol"', '"pull", "smol"'), "python.md", "exec"), names)
    assert isinstance(names["result"], Result) and names["result"].ok
    assert f"{fleet.HOSTS[0].name} 0 Tesla P100" in capsys.readouterr().out


def test_cancelling_an_async_run(hosts):
    import asyncio

    async def main() -> None:
        remote = AsyncFleet(fleet.INVENTORY)
        task = asyncio.create_task(remote.status())
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(Interrupted):
            remote.fleet._last.result(40)  # type: ignore[union-attr]

    asyncio.run(main())
    assert plays() == []


def test_a_pattern_without_hosts_is_bad_usage(hosts):
    done = command("fleet", "--limit", "nosuch")
    assert done.returncode == 2 and 'matches "nosuch"' in done.stderr and "Traceback" not in done.stderr
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(InventoryError):
        Fleet(fleet.INVENTORY).status(hosts="nosuch")
    assert signal.getsignal(signal.SIGINT) is handler, "the caller's handler is not given back"

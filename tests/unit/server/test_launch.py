# SPDX-License-Identifier: Apache-2.0
"""The launcher that systemd runs, against a runtime that a table answers for."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils import _launch
from ansible_collections.tensorless.fleet.plugins.module_utils import _server_files as files

NAME = "tensorless-org-model"


class Calls:
    """Answers by the first words of a command; everything else succeeds with nothing to say."""

    def __init__(self, answers: dict[str, tuple[int, str, str]]) -> None:
        self.answers = answers
        self.made: list[str] = []

    def __call__(self, *argv: str) -> tuple[int, str, str]:
        line = " ".join(argv)
        self.made.append(line)
        return next((answer for words, answer in self.answers.items() if line.startswith(words)), (0, "", ""))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    made = Calls({})
    monkeypatch.setattr(_launch, "call", made)
    monkeypatch.setattr(_launch.time, "sleep", lambda _seconds: None)
    monkeypatch.setattr(_launch, "watch_beside", lambda _name: None)
    return made


def data(runtime: str = "podman") -> dict[str, Any]:
    return {"schema": 1, "runtime": runtime, "container_name": NAME, "exec": [runtime, "run", "--name", NAME, "image"]}


def record(running: bool, ours: bool) -> tuple[int, str, str]:
    labels = {_launch.LABEL: "1"} if ours else {}
    state = {"Running": running, "Pid": 0}
    return 0, json.dumps([{"Id": "abcdef0123456789", "State": state, "Config": {"Labels": labels}}]), ""


MISSING = (125, "[]", f"Error: no such container {NAME}")


def test_start_becomes_the_command(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(_launch.os, "execvp", lambda program, argv: ran.append((program, argv)))
    calls.answers["podman container"] = MISSING
    _launch.start(data())
    assert ran == [("podman", data()["exec"])]
    assert not any(" rm " in line for line in calls.made)


@pytest.mark.parametrize("running", [True, False])
def test_our_record_makes_room(calls: Calls, running: bool) -> None:
    calls.answers["podman container inspect"] = record(running, ours=True)
    _launch.make_room(data())
    assert f"podman rm -f {NAME}" in calls.made
    assert any(line.startswith("podman stop -t 90") for line in calls.made) is running


@pytest.mark.parametrize(("running", "state"), [(True, "running"), (False, "there, stopped")])
def test_a_stranger_is_refused_and_kept(
    calls: Calls, capsys: pytest.CaptureFixture[str], running: bool, state: str
) -> None:
    calls.answers["podman container inspect"] = record(running, ours=False)
    with pytest.raises(SystemExit) as left:
        _launch.make_room(data())
    assert left.value.code == 78
    assert f"did not make is {state} in podman (abcdef012345)" in capsys.readouterr().out
    assert not any(" rm " in line or " stop " in line for line in calls.made)


def test_half_a_record_of_ours_goes(calls: Calls) -> None:
    calls.answers["podman container inspect"] = (125, "[]", "Error: getting container from store: container not known")
    calls.answers["podman ps"] = (0, "abcdef", "")
    _launch.make_room(data())
    assert calls.made[-1] == f"podman rm -f {NAME}"


def test_storage_without_a_record_goes(calls: Calls) -> None:
    calls.answers["podman container inspect"] = MISSING
    calls.answers["podman container exists --external"] = (0, "", "")
    calls.answers["podman container exists"] = (1, "", "")
    _launch.make_room(data())
    assert calls.made[-1] == f"podman rm -f {NAME}"


def test_half_a_record_of_a_stranger_stays(calls: Calls) -> None:
    calls.answers["podman container inspect"] = (125, "[]", "Error: container not known")
    _launch.make_room(data())
    assert not any(" rm " in line for line in calls.made)


def test_a_starting_daemon_is_waited_for(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    down = (1, "[]", "Cannot connect to the Docker daemon")
    answers = iter([down, down, record(False, ours=True)])
    monkeypatch.setattr(_launch, "call", lambda *_argv: next(answers))
    assert _launch.container(data("docker"), float("inf")) is not None


@pytest.mark.parametrize(
    ("err", "gone"),
    [
        ("Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?", True),
        ("failed to connect to the docker API at unix:///var/run/docker.sock; check if the daemon is running", True),
        ("error during connect: Get http://%2Fvar%2Frun%2Fdocker.sock/v1.45/containers/x/json: EOF", True),
        ("Error: No such container: x", False),  # docker 20.10
        ("Error response from daemon: No such container: x", False),  # docker 26.1
        ("permission denied while trying to connect to the Docker daemon socket", False),
        ("Error: no such container x", False),
    ],
)
def test_a_daemon_that_answers_is_there(err: str, gone: bool) -> None:
    assert _launch.no_daemon(err) is gone


@pytest.mark.parametrize("file", ["libpod/bolt_state.db", "db.sql", "db.sql-wal"])
def test_podmans_database_of_either_kind_is_watched(tmp_path: pathlib.Path, file: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.touch()
    (tmp_path / "storage.lock").touch()
    os.utime(path, ns=(1, 10**9))
    assert _launch.changed(str(tmp_path)) == 10**9


def test_the_watch_ends_with_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Also where podman's database is somewhere else."""
    shown = [{"StaticDir": f"{tmp_path}/overlay-containers/x", "State": {"Running": True, "Pid": 2**22 + 1}}]
    monkeypatch.setattr(_launch, "call", lambda *_argv: (0, json.dumps(shown), ""))
    monkeypatch.setattr(_launch.time, "sleep", lambda _seconds: None)
    _launch.watch(NAME)


def test_settling_does_not_wait_for_ever(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(1000))
    monkeypatch.setattr(_launch.time, "monotonic", lambda: next(seconds))
    calls.answers["docker container"] = (1, "[]", "Cannot connect to the Docker daemon")
    assert _launch.container(data("docker"), 60) is None
    assert 60 <= len(calls.made) <= 62


def test_a_user_whom_docker_refuses_does_not_wait(calls: Calls) -> None:
    words = "permission denied while trying to connect to the Docker daemon socket"
    calls.answers["docker container"] = (1, "[]", words)
    assert _launch.container(data("docker"), float("inf")) is None
    assert len(calls.made) == 1


def ended(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, code: str, status: str) -> None:
    for key, value in (("EXIT_CODE", code), ("EXIT_STATUS", status), ("RUNTIME_DIRECTORY", str(tmp_path))):
        monkeypatch.setenv(key, value)


@pytest.mark.parametrize(
    ("code", "status", "asked", "result"),
    [
        ("exited", "0", False, 0),
        ("exited", "143", False, 0),
        ("exited", "137", True, 0),
        ("exited", "137", False, 1),
        ("exited", "127", True, 0),  # podman 4 lost how it ended
        ("exited", "127", False, 1),
        ("exited", "1", False, 0),  # a failure by itself: systemd has counted it
        ("killed", "KILL", False, 0),
    ],
)
@pytest.mark.parametrize("runtime", ["podman", "docker"])
def test_fc_10_a_kill_is_a_stop_only_when_it_was_asked_for(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, runtime: str, code: str, status: str,
    asked: bool, result: int,
) -> None:  # fmt: skip
    ended(monkeypatch, tmp_path, code, status)
    calls.answers["podman container"] = calls.answers["docker container"] = MISSING
    if asked:
        (tmp_path / "stop-was-asked").touch()
        calls.answers["docker events"] = (0, '{"status":"kill","Actor":{"Attributes":{"signal":"15"}}}', "")
    else:
        calls.answers["docker events"] = (0, '{"status":"kill","Actor":{"Attributes":{"signal":"9"}}}', "")
    with pytest.raises(SystemExit) as left:
        _launch.settle(data(runtime))
    assert left.value.code == result


UP = "LoadState=loaded\nActiveState=active\nInvocationID={}\n"


@pytest.mark.parametrize(
    ("shown", "result"),
    [
        (UP.format("one"), 0),
        (UP.format("two"), 1),
        ("LoadState=loaded\nActiveState=deactivating\nInvocationID=one\n", 1),
        ("LoadState=loaded\nActiveState=failed\nInvocationID=one\n", 1),
        ("LoadState=loaded\nActiveState=reloading\nInvocationID=one\n", 0),
        ("LoadState=loaded\nActiveState=activating\nInvocationID=one\n", 0),
        ("LoadState=loaded\nActiveState=activating\nInvocationID=two\n", 1),
    ],
)
@pytest.mark.parametrize("status", ["0", "143", "137"])
def test_a_daemon_that_went_took_the_server_along(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, shown: str, result: int, status: str
) -> None:
    """`systemctl restart docker` tells every container to stop, just as `docker stop` does."""
    ended(monkeypatch, tmp_path, "exited", status)
    monkeypatch.setattr(_launch.os, "execvp", lambda *_argv: None)
    calls.answers.update(
        {
            "docker container": MISSING,
            "docker events": (0, '{"status":"kill","Actor":{"Attributes":{"signal":"15"}}}', ""),
            "systemctl show": (0, UP.format("one"), ""),
        }
    )
    _launch.start(data("docker"))
    calls.answers["systemctl show"] = (0, shown, "")
    with pytest.raises(SystemExit) as left:
        _launch.settle(data("docker"))
    assert left.value.code == result


def test_a_daemon_under_another_name_is_no_reason(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    ended(monkeypatch, tmp_path, "exited", "0")
    monkeypatch.setattr(_launch.os, "execvp", lambda *_argv: None)
    calls.answers["docker container"] = MISSING
    calls.answers["systemctl show"] = (0, "LoadState=not-found\nActiveState=inactive\nInvocationID=\n", "")
    _launch.start(data("docker"))
    with pytest.raises(SystemExit) as left:
        _launch.settle(data("docker"))
    assert left.value.code == 0


def test_settle_leaves_no_container_of_ours(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    ended(monkeypatch, tmp_path, "killed", "KILL")
    calls.answers["podman container inspect"] = record(True, ours=True)
    with pytest.raises(SystemExit):
        _launch.settle(data())
    assert f"podman rm -f {NAME}" in calls.made


def test_stop_only_while_the_server_lives(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path))
    monkeypatch.delenv("MAINPID", raising=False)
    _launch.stop(data())
    assert calls.made == []
    assert not _launch.stop_was_asked(data())
    monkeypatch.setenv("MAINPID", "5")
    _launch.stop(data())
    assert calls.made == [f"podman stop -t 90 {NAME}"]
    assert _launch.stop_was_asked(data())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 2, "exec": ["x"]}', '{"schema": 1, "exec": []}'])
def test_a_broken_file_is_a_refusal(tmp_path: pathlib.Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(SystemExit) as left:
        _launch.read(str(path))
    assert left.value.code == 78
    assert "run the play again, it writes the file anew" in capsys.readouterr().out


def test_the_launcher_is_carried_whole() -> None:
    text = files.launcher_text()
    assert text.startswith("#!/usr/bin/python3 -I\n# SPDX-License-Identifier: Apache-2.0\n")
    assert text.split("\n", 1)[1] == pathlib.Path(_launch.__file__).read_text()


def test_stop_limits_fit_into_each_other() -> None:
    unit = files.places("system").unit_text()
    limit = int(unit.split("TimeoutStopSec=")[1].split()[0])
    assert limit > _launch.GRACE + 30


@pytest.mark.parametrize("scope", ["system", "user"])
def test_the_unit_text(scope: str) -> None:
    unit = files.places(scope, "/home/u", "u").unit_text()
    assert "{" not in unit
    assert "$" not in unit
    assert set(unit.split("%")[1:]) == {part for part in unit.split("%")[1:] if part.startswith("i")}

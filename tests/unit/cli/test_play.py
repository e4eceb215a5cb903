# SPDX-License-Identifier: Apache-2.0
"""What the orchestrator does around a play: environment, text, secrets, cancelling, cleaning, results."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tensorless_fleet import HostsFailed, Interrupted, InventoryError, PlayError
from tensorless_fleet._private import Private, vars_text


def processes_with(marker: str) -> list[str]:
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if marker in line:
                found.append(f"{entry.name} {line}")
    return found


def holders(secret: str) -> list[str]:
    """What `ps axeww` would show the secret in: the words and the environment of every process."""
    found = []
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            with contextlib.suppress(OSError):
                if secret.encode() in (entry / name).read_bytes():
                    found.append(f"{entry.name} {name}")
    return found


def wait_until(true, limit: float = 15.0) -> bool:
    until = time.monotonic() + limit
    while time.monotonic() < until:
        if true():
            return True
        time.sleep(0.1)
    return False


SAY = """
- name: Say
  ansible.builtin.debug:
    msg: "{{ given | default('-') }} {{ token | default('-') }}"
"""


def test_results_say_per_host_what_happened(play):
    run = play(
        """
- name: Change
  ansible.builtin.command: "true"
  changed_when: inventory_hostname == 'h2'
- name: Refuse
  ansible.builtin.fail:
    msg: no card fits
  when: inventory_hostname == 'h3'
""",
        hosts="h[1:3]",
    )
    with pytest.raises(HostsFailed) as error:
        run.result()
    result = error.value.result
    assert {name: host.state for name, host in result.hosts.items()} == {"h1": "ok", "h2": "changed", "h3": "failed"}
    assert error.value.reasons == {"h3": "no card fits"}
    assert result.hosts["h3"].step == "Refuse"
    assert "h3: no card fits" in str(error.value)
    assert result.log and pathlib.Path(result.log).stat().st_mode & 0o777 == 0o600


def test_a_failure_that_the_play_rescued_is_none(play):
    result = play(
        """
- name: Try
  block:
    - name: Fail
      ansible.builtin.fail: {msg: not yet}
  rescue:
    - name: Mend
      ansible.builtin.debug: {msg: mended}
"""
    ).result()
    assert result.ok and {host.reason for host in result.hosts.values()} == {None}


def test_check_false_returns_the_same_result_without_raising(play):
    result = play("- ansible.builtin.fail: {msg: broken}", check=False).result()
    assert not result.ok and {host.reason for host in result.failed} == {"broken"}


def test_text_is_never_a_template(play):
    nasty = "{{ 7*7 }} </script> \u2028 é {% raw %} \\ \" ' \x85 end"
    run = play(SAY, values={"given": nasty}, secrets={"token": "{{ 3*3 }}"})
    texts = [event.text for event in run.events() if event.kind == "ok"]
    run.result()
    assert texts and all(text.startswith("{{ 7*7 }} </script>") and text.endswith("{{ 3*3 }}") for text in texts), texts


def test_keys_and_nested_values_survive_the_variables_file():
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!unsafe", lambda loader, node: loader.construct_scalar(node))
    values = {"a b": [1, True, None, 1.5, "x: y\n# z", {"k": "\U0001f600"}], "empty": "", "list": []}
    assert yaml.load(vars_text(values, {"t": "{{ x }}"}), Loader) == {**values, "t": "{{ x }}"}
    with pytest.raises(ValueError, match="UTF-8"):
        vars_text({"x": "\udcff"}, {})


def test_the_child_sees_only_the_allowed_environment(play, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_FAKE123")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "aws_FAKE123")
    monkeypatch.setenv("ANSIBLE_HOST_KEY_CHECKING", "False")
    run = play(
        """
- name: Show
  ansible.builtin.debug:
    msg: "{{ lookup('ansible.builtin.pipe', 'env') }}"
"""
    )
    texts = " ".join(event.text for event in run.events() if event.kind == "ok")
    run.result()
    assert "FAKE123" not in texts
    assert "ANSIBLE_HOST_KEY_CHECKING=True" in texts
    assert "ANSIBLE_CACHE_PLUGIN=memory" in texts
    assert "ServerAliveInterval" in texts


def test_nothing_is_left_behind_and_no_secret_is_written(play, own_state, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_FAKE123")
    seen: list[int] = []
    run = play(SAY, secrets={"unused": "hf_FAKE123"})
    for _event in run.events():
        seen += [entry.stat().st_mode & 0o777 for entry in (own_state / "tensorless").glob("run-*")]
    run.result()
    assert set(seen) == {0o700}
    assert list((own_state / "tensorless").iterdir()) == []
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert b"hf_FAKE123" not in path.read_bytes(), path


def test_a_token_reaches_the_play_and_no_process_shows_it(play, own_state, tmp_path, monkeypatch):
    secret = f"FAKE123{os.getpid()}"
    token = f"hf_{secret} {{{{ 7 * 7 }}}}\n"
    monkeypatch.setenv("HF_TOKEN", token)
    go = tmp_path / "go"
    run = play(
        f"""
- name: Hold
  ansible.builtin.command: sh -c 'until [ -e {go} ]; do sleep 0.2; done'
- name: Compare
  ansible.builtin.assert:
    that: tensorless_hf_token | hash('sha256') == '{hashlib.sha256(token.encode()).hexdigest()}'
""",
        secrets={"tensorless_hf_token": token},
    )
    try:
        assert wait_until(lambda: processes_with(f"until [ -e {go} ]"), 60)
        assert holders(secret) == []
        files = [path for path in own_state.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
        assert [path.stat().st_mode & 0o777 for path in files] == [0o600]
    finally:
        go.touch()
    assert run.result().ok
    assert not any(secret in event.text for event in run.events())


def test_the_token_of_a_fleet_travels_apart_from_the_values(tmp_path, monkeypatch):
    from tensorless_fleet import Fleet, fleet

    jobs = []
    monkeypatch.setattr(fleet, "Run", lambda job, *_rest: jobs.append(job))
    (tmp_path / "hosts").write_text("[gpu]\nh1\n")
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_caller")
    made = Fleet(tmp_path / "hosts", hf_token="hf_FAKE123")
    made.start("pull", "pn3")
    Fleet(tmp_path / "hosts").start("pull", "pn3")
    assert [job.secrets for job in jobs] == [{"tensorless_hf_token": "hf_FAKE123"}, {}]
    assert "hf_FAKE123" not in repr(jobs[0]) + repr(made)


def test_host_names_with_odd_characters_do_no_harm(play):
    result = play("- ansible.builtin.set_fact: {x: 1, cacheable: true}", hosts="r/1 fd00::5").result()
    assert set(result.hosts) == {"r/1", "fd00::5"} and result.ok


def test_the_venv_need_not_be_on_path_nor_the_locale_utf8_nor_home_writable(play, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.setenv("HOME", "/proc/nowhere")
    assert play(SAY).result().ok


def test_cancel_ends_every_process_and_says_where_each_host_stands(play, own_state):
    marker = f"86{os.getpid()}"
    run = play(f"- name: Long\n  ansible.builtin.command: sleep {marker}")
    for event in run.events():
        if event.kind == "step":
            break
    assert wait_until(lambda: processes_with(f"sleep {marker}"))
    begin = time.monotonic()
    run.cancel()
    with pytest.raises(Interrupted) as error:
        run.result(timeout=30)
    assert time.monotonic() - begin < 25
    assert wait_until(lambda: not processes_with(f"sleep {marker}"), 3), processes_with(marker)
    assert {host.state for host in error.value.result.hosts.values()} == {"interrupted"}
    assert all("Long" in (host.reason or "") for host in error.value.result.hosts.values())
    assert list((own_state / "tensorless").iterdir()) == []


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from tensorless_fleet._play import Job
from tensorless_fleet.fleet import Run
run = Run(Job("run", {book!r}, [{inventory!r}]), True)
for event in run.events():
    print(event.kind, flush=True)
run.result()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_program_takes_its_play_with_it(play, own_state, tmp_path, number):
    marker = f"87{os.getpid()}{int(number)}"
    first = play(f"- name: Long\n  ansible.builtin.command: sleep {marker}", hosts="h1")
    first.cancel()
    with pytest.raises(Interrupted):
        first.result()
    text = SCRIPT.format(
        tests=str(tmp_path), book=str(tmp_path / "play.yml"), inventory=str(tmp_path / "inventory.ini")
    )
    child = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.DEVNULL)
    try:
        assert wait_until(lambda: processes_with(f"sleep {marker}"))
        child.send_signal(number)
        child.wait(20)
        assert wait_until(lambda: not processes_with(marker), 25), processes_with(marker)
        assert wait_until(lambda: list((own_state / "tensorless").iterdir()) == [], 20)
    finally:
        child.kill()
        child.wait()


def test_the_next_start_removes_what_a_killed_run_left(own_state):
    with Private() as first:
        path = pathlib.Path(first.path)
        assert path.stat().st_mode & 0o777 == 0o700
        with Private():
            assert path.exists(), "a living run's folder stays"
    stale = own_state / "tensorless" / "run-stale"
    stale.mkdir()
    (stale / "lock").write_text("")
    (stale / "secret-0").write_text("hf_FAKE123")
    with Private():
        assert not stale.exists()


def test_a_run_that_starts_meanwhile_never_takes_a_new_folder_for_a_left_one(own_state, monkeypatch):
    from tensorless_fleet import _private

    plain = _private.fcntl.flock

    def another_starts_first(descriptor, operation):
        monkeypatch.setattr(_private.fcntl, "flock", plain)
        _private._sweep(str(own_state / "tensorless"))
        plain(descriptor, operation)

    monkeypatch.setattr(_private.fcntl, "flock", another_starts_first)
    with Private() as private:
        assert pathlib.Path(private.path, "lock").exists()
        _private._sweep(str(own_state / "tensorless"))
        assert pathlib.Path(private.path, "lock").exists()


def test_logs_are_bounded_in_number_and_size(tmp_path, monkeypatch):
    from tensorless_fleet import _private

    folder = pathlib.Path(os.environ["XDG_STATE_HOME"]) / "tensorless" / "logs"
    folder.mkdir(parents=True)
    for number in range(40):
        (folder / f"20200101T0000{number:02d}-run-1.log").write_text("x")
    monkeypatch.setattr(_private, "LOG_BYTES", 100)
    log = _private.Log("run")
    for _number in range(100):
        log.write("0123456789")
    log.close()
    assert len(list(folder.iterdir())) == _private.LOG_FILES
    assert pathlib.Path(log.path).stat().st_size < 200


@pytest.mark.parametrize(
    ("job", "error", "part"),
    [
        ({"limit": "nosuch"}, InventoryError, 'matches "nosuch"'),
        ({"limit": "@/nowhere"}, InventoryError, "Unable to find limit file"),
        ({"limit": "~("}, InventoryError, "Invalid host list pattern"),
        ({"playbook": "/nowhere/play.yml"}, PlayError, "could not be found"),
        ({"inventory": ["localhost,"]}, InventoryError, "no host in the group gpu"),
    ],
)
def test_faults_of_the_controller_are_one_line_with_the_fix(play, tmp_path, job, error, part):
    from tensorless_fleet._play import Job
    from tensorless_fleet.fleet import Run

    run = play(SAY)
    run.result()
    values = {"playbook": str(tmp_path / "play.yml"), "inventory": [str(tmp_path / "inventory.ini")], **job}
    with pytest.raises(error) as raised:
        Run(Job("run", **values), True).result()
    assert part in str(raised.value) and "\n" not in str(raised.value)


def test_an_inventory_that_ansible_cannot_read(play, tmp_path):
    from tensorless_fleet._play import Job
    from tensorless_fleet.fleet import Run

    play(SAY).result()
    for name, text, cause in (
        ("broken.ini", "[gpu]\nh1 what is this\n", r".*what"),
        (
            "broken.yml",
            "gpu:\n  hosts:\n    h1:\n      a: 1\n     h2:\n",
            r"YAML parsing failed: .* \(line 5\)\. Correct it",
        ),
        ("list.yaml", "- h1\n", r"YAML inventory has invalid structure, it should be a dictionary\. Correct it"),
    ):
        broken = tmp_path / name
        broken.write_text(text)
        run = Run(Job("run", str(tmp_path / "play.yml"), [str(broken)]), True)
        with pytest.raises(InventoryError, match=r"cannot be read: " + cause) as raised:
            run.result()
        assert "ini" not in str(raised.value).replace(".ini", "") and "host pattern" not in str(raised.value)
        assert not [event.text for event in run.events() if event.kind == "line"], "one line says it"


def test_handlers_of_the_caller_stay_as_they_were(play):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    play(SAY).result()
    assert before == {number: signal.getsignal(number) for number in before}


def test_it_works_inside_a_running_event_loop(play):
    import asyncio

    async def both():
        first, second = await asyncio.gather(play(SAY), asyncio.sleep(0.01, "other work"))
        return first, second

    result, other = asyncio.run(both())
    assert result.ok and other == "other work"


def test_a_cancelled_task_cancels_the_run(play):
    import asyncio

    marker = f"88{os.getpid()}"

    async def main():
        run = play(f"- ansible.builtin.command: sleep {marker}")
        task = asyncio.ensure_future(run._wait())
        await asyncio.sleep(2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return run

    run = asyncio.run(main())
    with pytest.raises(Interrupted):
        run.result(30)
    assert not processes_with(f"sleep {marker}")


def test_events_are_data_for_programs(play):
    run = play(SAY)
    kinds = [event.kind for event in run.events()]
    result = run.result()
    assert kinds[0] == "begin" and kinds[-1] == "end" and kinds.count("step") == 2
    assert [event.kind for event in run.events()] == kinds, "a second reader gets the same"
    json.dumps(result.as_dict())


def test_figures_of_long_steps_become_progress_events(play):
    report = json.dumps({"host": "h1", "stage": "download", "file": "a.gguf", "bytes": 5e8, "size": 1e9, "rate": 1e8})
    run = play(
        f"""
- name: Fetch
  ansible.builtin.shell: |
    echo '{report}' >> {{{{ tensorless_progress_file }}}}; sleep 1.5
""",
        hosts="h1",
    )
    texts = [(event.host, event.step, event.text) for event in run.events() if event.kind == "progress"]
    run.result()
    assert texts == [("h1", "Fetch", "downloading a.gguf 50 % (500.00 MB of 1.00 GB), 100.0 MB/s")]

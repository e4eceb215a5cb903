# SPDX-License-Identifier: Apache-2.0
"""Runs one playbook of the collection through ansible-runner, on this package's terms.

By itself ansible-runner hands the caller's whole environment to the play and writes it to disk, passes extra variables
on as templates, switches host-key checks off, keeps a fact cache of one file per host name, and leaves workers alive
when it cancels. Here the environment is an allow-list, text travels in a file as unsafe data, the host-key policy is
explicit, no fact is cached, and ``_supervise`` owns every process of the run.
"""

from __future__ import annotations

import contextlib
import json
import locale
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tensorless_fleet import _collection
from tensorless_fleet._private import Log, Private, vars_text

# What a play may need from the caller's environment. Everything else stays out, secrets above all.
ALLOWED = frozenset(
    (
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "LANG",
        "TZ",
        "TMPDIR",
        "SSH_AUTH_SOCK",
        "SSH_AGENT_PID",
        "KRB5CCNAME",
        "VIRTUAL_ENV",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
        "http_proxy",
        "https_proxy",
        "no_proxy",
        "SSL_CERT_FILE",
        "REQUESTS_CA_BUNDLE",
        "XDG_CONFIG_HOME",
        "XDG_CACHE_HOME",
        "XDG_STATE_HOME",
        "XDG_DATA_HOME",
        "XDG_RUNTIME_DIR",
        "ANSIBLE_CONFIG",
        "ANSIBLE_HOME",
        "ANSIBLE_REMOTE_USER",
        "ANSIBLE_PRIVATE_KEY_FILE",
        "ANSIBLE_TIMEOUT",
        "ANSIBLE_PIPELINING",
        "ANSIBLE_SSH_ARGS",
        "ANSIBLE_SSH_COMMON_ARGS",
        "ANSIBLE_SSH_EXTRA_ARGS",
        "ANSIBLE_SSH_EXECUTABLE",
        "ANSIBLE_SSH_RETRIES",
        "ANSIBLE_SSH_TRANSFER_METHOD",
        "ANSIBLE_BECOME_METHOD",
        "ANSIBLE_VAULT_PASSWORD_FILE",
        "ANSIBLE_VAULT_IDENTITY_LIST",
        "ANSIBLE_INVENTORY_ENABLED",
        "ANSIBLE_INJECT_FACT_VARS",
        "ANSIBLE_REMOTE_TEMP",
        "ANSIBLE_FORKS",
        "ANSIBLE_TRANSPORT",
        "ANSIBLE_DEPRECATION_WARNINGS",
    )
)
# A host that goes away is noticed within 15 s, also in the middle of a silent, long task. First value wins in ssh, and
# these come after the user's own ANSIBLE_SSH_ARGS.
ALIVE = "-o ServerAliveInterval=2 -o ServerAliveCountMax=2 -o ConnectTimeout=4"
DEFAULT_SSH_ARGS = "-C -o ControlMaster=auto -o ControlPersist=60s"
CANCEL_LIMIT_S = 12.0
PROGRESS = "progress.jsonl"  # long steps append their figures here, one JSON object a line


@dataclass
class Job:
    """What one run of a playbook needs."""

    command: str
    playbook: str
    inventory: Sequence[str]
    limit: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    tags: Sequence[str] = ()
    check: bool = False
    forks: int | None = None
    host_keys: str = "strict"
    vault_password_file: str | None = None
    become_password_file: str | None = None


def environment(job: Job, private: Private, environ: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of the play."""
    env = {name: environ[name] for name in ALLOWED if environ.get(name)}
    for name, value in environ.items():
        if name.startswith("LC_"):
            env[name] = value
    env.setdefault("PATH", os.defpath)
    if "utf" not in (locale.getlocale()[1] or "").lower() or "utf" not in _charset(env):
        # Ansible refuses to start in a locale that is not UTF-8.
        env = {name: value for name, value in env.items() if not name.startswith("LC_")}
        env["LC_ALL"] = "C.UTF-8"
    own = _collection.own_root()
    others = [path for path in _collection.search_path(dict(environ)) if path != own]
    env["ANSIBLE_COLLECTIONS_PATH"] = os.pathsep.join([own, *others])
    home = env.get("HOME", "")
    if not home or not os.access(home, os.W_OK):
        env["ANSIBLE_HOME"] = private.folder("home")
    ssh = env.get("ANSIBLE_SSH_ARGS", DEFAULT_SSH_ARGS)
    if job.host_keys == "accept-new":
        ssh = f"-o StrictHostKeyChecking=accept-new {ssh}"
    env.update(
        {
            "ANSIBLE_HOST_KEY_CHECKING": "False" if job.host_keys == "off" else "True",
            "ANSIBLE_SSH_ARGS": f"{ssh} {ALIVE}",
            "ANSIBLE_SSH_CONTROL_PATH_DIR": private.folder("cp"),
            # One way of copying files; trying three in turn takes half a minute on a host that is gone.
            "ANSIBLE_SSH_TRANSFER_METHOD": env.get("ANSIBLE_SSH_TRANSFER_METHOD", "piped"),
            "ANSIBLE_LOCAL_TEMP": private.folder("tmp"),
            "ANSIBLE_RETRY_FILES_ENABLED": "False",
            "ANSIBLE_CACHE_PLUGIN": "memory",
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_NOCOWS": "1",
            "ANSIBLE_INVENTORY_UNPARSED_FAILED": "True",
            "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "True",
            "ANSIBLE_DISPLAY_SKIPPED_HOSTS": "True",
            "PYTHONUNBUFFERED": "1",
        }
    )
    return env


def _charset(env: Mapping[str, str]) -> str:
    return (env.get("LC_ALL") or env.get("LC_CTYPE") or env.get("LANG") or "C").lower()


def arguments(job: Job, variables: str) -> list[str]:
    """The words of ``ansible-playbook``. It is started as a module: the scripts of a venv need not be on PATH."""
    words = [sys.executable, "-m", "ansible", "playbook"]
    for entry in job.inventory:
        words += ["-i", entry if "," in entry else os.path.abspath(entry)]
    if job.limit:
        words += ["--limit", job.limit]
    if job.tags:
        words += ["--tags", ",".join(job.tags)]
    if job.forks:
        words += ["--forks", str(job.forks)]
    if job.vault_password_file:
        words += ["--vault-password-file", os.path.abspath(job.vault_password_file)]
    if job.become_password_file:
        words += ["--become-password-file", os.path.abspath(job.become_password_file)]
    if job.check:
        words.append("--check")
    return [*words, "-e", f"@{variables}", job.playbook]


def cleanup(job: Job) -> list[str]:
    """The words of the command that removes this run's temporary folders on the hosts, with a place for process ids."""
    words = [sys.executable, "-m", "ansible", "adhoc", job.limit or "gpu", "--forks", "50"]
    for entry in job.inventory:
        words += ["-i", entry if "," in entry else os.path.abspath(entry)]
    if job.vault_password_file:
        words += ["--vault-password-file", os.path.abspath(job.vault_password_file)]
    script = (
        "cd {{ ansible_remote_tmp | default('~/.ansible/tmp') }} 2>/dev/null || exit 0; for pid in @PIDS@; do "
        f"for each in ansible-tmp-*-$pid-*; do made=${{each#ansible-tmp-}}; made=${{made%%.*}}; "
        f'[ -d "$each" ] && [ "$made" -ge {int(time.time())} ] && rm -rf -- "$each"; done; done; true'
    )
    return [*words, "-e", "ansible_become=false", "-m", "ansible.builtin.raw", "-a", script]


def variables(job: Job, private: Private) -> str:
    """Writes the variables file and one file per secret; returns the path of the former."""
    values = {**job.values, "tensorless_progress_file": os.path.join(private.path, PROGRESS)}
    templates: dict[str, str] = {}
    for name, secret in job.secrets.items():
        path = private.write(f"secret-{len(templates)}", secret)
        templates[name] = "{{ lookup('ansible.builtin.file', " + json.dumps(path) + ", rstrip=false) }}"
    return private.write("vars.yml", vars_text(values, templates))


class Play:
    """One run. ``execute`` blocks; ``cancel`` may be called from any thread, twice for at once."""

    def __init__(
        self,
        job: Job,
        on_event: Callable[[dict[str, Any]], None],
        on_progress: Callable[[dict[str, Any]], None] = lambda _report: None,
    ) -> None:
        self.job = job
        self.on_event = on_event
        self.on_progress = on_progress
        self.lines: list[str] = []  # what Ansible said that belongs to no host
        self.log: str | None = None
        self.canceled = False
        self._pid_file: str | None = None
        self._lock = threading.Lock()

    def execute(self) -> int:
        """Runs the play and returns Ansible's exit code (130 when it was cancelled)."""
        from ansible_runner import Runner, RunnerConfig

        with Private() as private:
            log = Log(self.job.command)
            self.log = log.path
            try:
                config = RunnerConfig(
                    private_data_dir=private.path,
                    playbook=self.job.playbook,
                    project_dir=private.folder("project"),
                    ident="run",
                    quiet=True,
                    suppress_env_files=True,
                    fact_cache_type="none",
                    settings={"pexpect_timeout": 1, "suppress_output_file": True},
                )
                config.suppress_output_file = True
                config.prepare()
                child = environment(self.job, private, os.environ)
                callback = {key: config.env[key] for key in ("ANSIBLE_CALLBACK_PLUGINS", "AWX_ISOLATED_DATA_DIR")}
                config.env = {**child, **callback, "ANSIBLE_STDOUT_CALLBACK": "awx_display"}
                config.cwd = os.getcwd()
                supervisor = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_supervise.py")
                config.command = [
                    sys.executable,
                    supervisor,
                    private.path,
                    *arguments(self.job, variables(self.job, private)),
                ]
                private.write("cleanup.json", json.dumps(cleanup(self.job)))
                self._pid_file = os.path.join(private.path, "supervisor.pid")
                if self.canceled:
                    return 130
                runner = Runner(config=config, event_handler=lambda event: self._event(event, log))
                with _Tail(os.path.join(private.path, PROGRESS), self.on_progress):
                    _status, code = runner.run()
            finally:
                log.close()
        return 130 if self.canceled else int(code if code is not None else 1)

    def _event(self, event: dict[str, Any], log: Log) -> bool:
        text = str(event.get("stdout") or "")
        if text:
            log.write(clean_lines(text))
        if event.get("event") in ("verbose", "error", "warning", "system_warning", "deprecated"):
            self.lines.append(text)
            del self.lines[:-200]
        self.on_event(event)
        return False  # no event file on disk

    def cancel(self) -> None:
        """Ends the play: an interrupt first, then every process of it. Returns at once."""
        with self._lock:
            self.canceled = True
        threading.Thread(target=self._signal, name="tensorless-cancel", daemon=True).start()

    def _signal(self) -> None:
        until = time.monotonic() + CANCEL_LIMIT_S
        while self._pid_file is None and time.monotonic() < until:
            time.sleep(0.05)
        while time.monotonic() < until:
            with contextlib.suppress(OSError, ValueError):
                with open(self._pid_file or "", encoding="ascii") as file:
                    os.kill(int(file.read()), signal.SIGTERM)
                return
            time.sleep(0.05)


class _Tail(threading.Thread):
    """Reads a growing file of JSON lines and hands each object on, until the ``with`` block ends."""

    def __init__(self, path: str, each: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(name="tensorless-progress", daemon=True)
        self._path = path
        self._each = each
        self._over = threading.Event()
        self._offset = 0
        self._rest = b""

    def __enter__(self) -> _Tail:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        while not self._over.wait(1.0):
            self._read()
        self._read()

    def _read(self) -> None:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                fresh = file.read()
        except OSError:
            return
        self._offset += len(fresh)
        *lines, self._rest = (self._rest + fresh).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):
                value = json.loads(line)
                if isinstance(value, dict):
                    self._each(value)


ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?")


def clean(text: str) -> str:
    """``text`` as one line that is safe on a terminal: no escapes, no control characters."""
    return " ".join(clean_lines(text).split())


def clean_lines(text: str) -> str:
    """``text`` without escapes and control characters other than line breaks."""
    text = ESCAPES.sub("", text)
    return "".join(
        char if char == "\n" or (char.isprintable()) else " " if char in "\r\t" else "\ufffd" for char in text
    )

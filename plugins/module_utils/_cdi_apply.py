# SPDX-License-Identifier: Apache-2.0
"""Brings a host to the state in which containers get their cards: observes, plans changes, applies them, and proves it.

Private to the collection: may change at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils import _cdi, _cdi_probe
from ansible_collections.tensorless.fleet.plugins.module_utils._host import Files, Run
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

UNITS = "/etc/systemd/system"
REFRESH = ("nvidia-cdi-refresh.path", "nvidia-cdi-refresh.service")
REFRESH_ENV = "/etc/nvidia-container-toolkit/nvidia-cdi-refresh.env"
SERVICE, PATH, CHAR = "tensorless-cdi.service", "tensorless-cdi.path", "tensorless-dev-char.service"
MARKER = "/run/tensorless/card-access.json"
DAEMON = "/etc/docker/daemon.json"
HOOK = "nvidia-container-runtime-hook"
OUR_LABEL = "org.tensorless.plan"


def service_text(program: str, flags: Sequence[str]) -> str:
    more = "".join(f" --feature-flag={flag}" for flag in flags)
    return f"""# Written by tensorless.fleet
[Unit]
Description=CDI spec of the NVIDIA cards
After=systemd-modules-load.service nvidia-persistenced.service

[Service]
Type=oneshot
ExecStart={program} cdi generate --output={_cdi.OURS}{more}
Restart=on-failure
RestartSec=10

[Install]
WantedBy=multi-user.target
"""


def path_text(program: str) -> str:
    return f"""# Written by tensorless.fleet
[Unit]
Description=Renew the CDI spec when the driver or the toolkit changes

[Path]
PathChanged={program}
PathChanged=/lib/modules/%v/modules.dep
Unit={SERVICE}

[Install]
WantedBy=multi-user.target
"""


def char_text(program: str) -> str:
    return f"""# Written by tensorless.fleet
[Unit]
Description=/dev/char links of the NVIDIA cards, so that a reload of systemd takes no card from a container
After=systemd-modules-load.service nvidia-persistenced.service
Before=docker.service

[Service]
Type=oneshot
ExecStart=-{program} system create-dev-char-symlinks --create-all

[Install]
WantedBy=multi-user.target
"""


@dataclass(frozen=True)
class Change:
    """One step; `text` is what people see."""

    text: str
    apply: Callable[[], None] = field(repr=False, compare=False)


@dataclass
class Access:
    """What the steps need: commands, files, the toolkit's program, the runtime, and the live cards."""

    run: Run
    files: Files
    program: str
    runtime: str
    cards: Sequence[Mapping[str, Any]]
    driver: Optional[str]
    smi_rc: Optional[int]
    owner: str = "auto"
    docker_feature: str = "runtime"
    allow_restart: bool = False
    hook: Optional[str] = None
    toolkit: tuple[int, ...] = ()
    podman: tuple[int, ...] = ()
    chosen: str = ""
    why: str = ""

    # observing

    def observe(self) -> None:
        _rc, out, _err = self.run([self.program, "--version"])
        self.toolkit = _cdi.version_tuple(out)
        if self.runtime == "podman":
            _rc, out, _err = self.run(["podman", "--version"])
            self.podman = _cdi.version_tuple(out)

    def _refresh_states(self) -> dict[str, str]:
        _rc, out, _err = self.run(["systemctl", "list-unit-files", "--no-legend", "--no-pager", *REFRESH])
        return {line.split()[0]: line.split()[1] for line in out.splitlines() if len(line.split()) >= 2}

    @property
    def old_podman(self) -> bool:
        return self.runtime == "podman" and bool(self.podman) and self.podman < (5,)

    @property
    def flags(self) -> list[str]:
        """The switch that keeps a new toolkit's spec readable for an old podman."""
        return [_cdi.GIDS_FLAG] if self.old_podman and self.toolkit >= (1, 19, 1) else []

    def spec_problems(self) -> list[str]:
        return _cdi.problems(_cdi.view(self.files), self.cards, self.driver, self.files, self.old_podman)

    # planning: CDI

    def plan_cdi(self) -> list[Change]:
        states = self._refresh_states()
        self.chosen, self.why = _cdi.choose_owner(self.owner, self.toolkit, len(states) == 2, self.smi_rc)
        return self._plan_ours(states) if self.chosen == "tensorless" else self._plan_toolkit(states)

    def _strangers(self, keep: str) -> list[Change]:
        seen = _cdi.view(self.files)
        paths = [spec.path for spec in seen.specs if spec.path != keep] + seen.ignored
        paths = [path for path in paths if "nvidia" in os.path.basename(path) or path not in seen.ignored]
        return [Change(f"remove {path}, a second CDI spec", partial(os.unlink, path)) for path in paths]

    def _plan_ours(self, states: Mapping[str, str]) -> list[Change]:
        changes: list[Change] = []
        if any(state not in ("disabled", "masked") for state in states.values()):
            changes.append(
                Change(
                    f"disable {' and '.join(REFRESH)}: {self.why}",
                    lambda: self._must(["systemctl", "disable", "--now", *REFRESH]),
                )
            )
        changes += self._unit(SERVICE, service_text(self.program, self.flags))
        changes += self._unit(PATH, path_text(self.program), start=True)
        strangers = self._strangers(_cdi.OURS)
        changes += strangers
        problems = self._without(strangers)
        if problems:
            changes.append(Change(f"generate {_cdi.OURS}: {'; '.join(problems)}", self._generate))
        return changes

    def _plan_toolkit(self, states: Mapping[str, str]) -> list[Change]:
        changes: list[Change] = []
        for name in (PATH, SERVICE):
            if self.files.exists(f"{UNITS}/{name}"):
                changes.append(Change(f"remove {name}: {self.why}", partial(self._drop_unit, name)))
        line = f"NVIDIA_CTK_CDI_GENERATE_FEATURE_FLAGS={','.join(self.flags)}\n"
        text = self.files.read(REFRESH_ENV) or ""
        if self.flags and line not in text:
            changes.append(Change(f"set {line.strip()} in {REFRESH_ENV}", lambda: self._merge_env(text, line)))
        off = [name for name, state in states.items() if state != "enabled"]
        if off:
            changes.append(
                Change(f"enable {' and '.join(off)}", lambda: self._must(["systemctl", "enable", "--now", *off]))
            )
        strangers = self._strangers(_cdi.TOOLKIT)
        changes += strangers
        problems = self._without(strangers)
        if problems or (self.flags and line not in text):
            words = f"run the toolkit's refresh service: {'; '.join(problems) or 'its settings changed'}"
            changes.append(Change(words, lambda: self._must(["systemctl", "start", REFRESH[1]])))
        return changes

    def _without(self, strangers: Sequence[Change]) -> list[str]:
        """The problems that are left once the second specs are gone."""
        gone = {change.text.split()[1].rstrip(",") for change in strangers}
        outer = self.files

        class Rest(Files):
            def names(self, path: str) -> list[str]:
                return [name for name in outer.names(path) if f"{path}/{name}" not in gone]

            def read(self, path: str) -> Optional[str]:
                return outer.read(path)

            def exists(self, path: str) -> bool:
                return outer.exists(path)

        rest = Rest()
        return _cdi.problems(_cdi.view(rest), self.cards, self.driver, rest, self.old_podman)

    # planning: docker

    def plan_docker(self) -> list[Change]:
        if self.hook is None and self.docker_feature != "cdi":
            raise Refusal(
                f"{HOOK} is not installed, and docker gives no card to a container without it: "
                "install the package nvidia-container-toolkit"
            )
        changes = self._char_links()
        text = self.files.read(DAEMON)
        try:
            data = json.loads(text) if text and text.strip() else {}
        except ValueError as exc:
            raise Refusal(f"{DAEMON} is not valid JSON ({exc}): mend it, nothing was changed") from exc
        if not isinstance(data, dict):
            raise Refusal(f"{DAEMON} holds no JSON object: mend it, nothing was changed")
        merged = json.loads(json.dumps(data))
        if self.docker_feature == "runtime":
            merged.setdefault("runtimes", {}).setdefault("nvidia", {"args": [], "path": "nvidia-container-runtime"})
        elif self.docker_feature == "cdi":
            merged.setdefault("features", {})["cdi"] = True
        if merged != data:
            new = json.dumps(merged, indent=4) + "\n"
            changes.append(Change(f"merge the NVIDIA settings into {DAEMON}", lambda: self.write(DAEMON, new)))
        return changes

    def _char_links(self) -> list[Change]:
        changes = self._unit(CHAR, char_text(self.program))
        wanted: dict[str, str] = {}
        for name in self.files.names("/dev"):
            if re.match(r"^nvidia(\d+|ctl|-uvm|-uvm-tools|-modeset)$", name):
                status = os.stat(f"/dev/{name}")
                link = f"/dev/char/{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
                if not os.path.lexists(link):
                    wanted.setdefault(link, f"../{name}")
        if wanted:
            changes.append(Change(f"make {len(wanted)} /dev/char links", lambda: self._link(wanted)))
        return changes

    def _link(self, wanted: Mapping[str, str]) -> None:
        os.makedirs("/dev/char", mode=0o755, exist_ok=True)
        for link, target in wanted.items():
            if not os.path.lexists(link):
                os.symlink(target, link)

    # proving

    def key(self) -> str:
        """What a proof holds for: specs, cards, driver, and the running daemon."""
        parts = [self.runtime, str(self.driver), *sorted(str(card["uuid"]) for card in self.cards)]
        if self.runtime == "docker":
            _rc, out, _err = self.run(
                ["systemctl", "show", "-p", "MainPID", "-p", "ExecMainStartTimestampMonotonic", "docker"]
            )
            parts += [out, str(self.hook)]
        else:
            parts += [f"{spec.path}={self.files.read(spec.path)}" for spec in _cdi.view(self.files).specs]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def proved(self) -> bool:
        text = self.files.read(MARKER)
        try:
            data = json.loads(text) if text else {}
        except ValueError:
            return False
        return isinstance(data, dict) and data.get("key") == self.key()

    def prove(self) -> dict[str, Optional[str]]:
        result = _cdi_probe.probe(self.run, self.runtime, [str(card["uuid"]) for card in self.cards])
        if not any(result.values()):
            self.write(MARKER, json.dumps({"schema": 1, "key": self.key()}) + "\n")
        return result

    def restart_docker(self) -> None:
        """Restarts dockerd, unless that would take down containers of others."""
        _rc, out, _err = self.run(["docker", "ps", "--format", f'{{{{.Names}}}}\t{{{{.Label "{OUR_LABEL}"}}}}'])
        others = [line.split("\t")[0] for line in out.splitlines() if not line.partition("\t")[2].strip()]
        if others and not self.allow_restart:
            raise Refusal(
                "dockerd has to be restarted to find the NVIDIA hook, and containers of others run: "
                f"{', '.join(others[:5])}. Stop them, or set nvidia_cdi_allow_docker_restart to true"
            )
        self._must(["systemctl", "restart", "docker.service"])

    def lost_access(self) -> list[str]:
        """Our running docker containers that cannot reach their card any more: they have to be made anew."""
        _rc, out, _err = self.run(["docker", "ps", "--filter", f"label={OUR_LABEL}", "--format", "{{.Names}}"])
        lost = []
        for name in out.split():
            rc, text, err = self.run(["docker", "exec", name, "nvidia-smi", "-L"])
            if rc not in (0, 14) and "NVML" in text + err:
                lost.append(name)
        return lost

    # applying

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        folder = os.path.dirname(path)
        os.makedirs(folder, mode=0o755, exist_ok=True)
        temporary = f"{path}.tensorless-new"
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
        try:
            os.write(handle, text.encode())
            os.fchmod(handle, mode)
            os.fsync(handle)
        finally:
            os.close(handle)
        os.rename(temporary, path)

    def _must(self, argv: Sequence[str]) -> None:
        rc, out, err = self.run(argv)
        if rc != 0:
            words = (err.strip() or out.strip())[-600:]
            raise Refusal(f"`{' '.join(argv)}` failed with status {rc}: {words}")

    def _generate(self) -> None:
        os.makedirs(_cdi.LOW, mode=0o755, exist_ok=True)
        flags = [f"--feature-flag={flag}" for flag in self.flags]
        self._must([self.program, "cdi", "generate", f"--output={_cdi.OURS}", *flags])
        os.chmod(_cdi.OURS, 0o644)

    def _merge_env(self, text: str, line: str) -> None:
        kept = [old for old in text.splitlines(keepends=True) if not old.startswith(line.partition("=")[0] + "=")]
        self.write(REFRESH_ENV, "".join(kept) + line)

    def _unit(self, name: str, text: str, start: bool = False) -> list[Change]:
        """A unit of ours, enabled by its link: nothing here reloads systemd, which would take cards from containers."""
        path, link = f"{UNITS}/{name}", f"{UNITS}/multi-user.target.wants/{name}"
        old = self.files.read(path)
        if old == text and os.path.islink(link):
            return []

        def put() -> None:
            self.write(path, text)
            os.makedirs(os.path.dirname(link), mode=0o755, exist_ok=True)
            if not os.path.islink(link):
                os.symlink(path, link)
            if old is not None and old != text and self.runtime == "podman":
                self._must(["systemctl", "daemon-reload"])
            if start:
                self._must(["systemctl", "start", name])

        return [Change(f"write {path}", put)]

    def _drop_unit(self, name: str) -> None:
        self.run(["systemctl", "disable", "--now", name])
        for path in (f"{UNITS}/multi-user.target.wants/{name}", f"{UNITS}/{name}"):
            if os.path.lexists(path):
                os.unlink(path)


def converge(access: Access, check: bool) -> dict[str, Any]:
    """The whole of it. Returns the texts of the changes, who owns the spec, and what the proof said."""
    access.observe()
    changes = access.plan_cdi() if access.runtime == "podman" else access.plan_docker()
    done = [change.text for change in changes]
    result: dict[str, Any] = {"changes": done, "owner": access.chosen or None, "owner_reason": access.why or None}
    result["proof"] = "as before"
    if check:
        if changes or not access.proved():
            result["proof"] = "made after the changes"
        return result
    for change in changes:
        change.apply()
    if access.runtime == "podman":
        left = access.spec_problems()
        if left and access.chosen == "toolkit" and access.owner == "auto":
            access.owner = "tensorless"
            for change in access.plan_cdi():
                done.append(change.text)
                change.apply()
            left = access.spec_problems()
            result.update(owner=access.chosen, owner_reason="the toolkit's refresh service wrote no fitting spec")
        if left:
            raise Refusal(f"the CDI spec still does not serve: {'; '.join(left)}")
    if access.proved() and not changes:
        return result
    words = access.prove()
    failed = {uuid: text for uuid, text in words.items() if text}
    if (
        failed
        and access.runtime == "docker"
        and any("could not select device driver" in text for text in failed.values())
    ):
        access.restart_docker()
        done.append("restart dockerd, which looks for the NVIDIA hook once, at its start")
        failed = {uuid: text for uuid, text in access.prove().items() if text}
    if failed:
        uuid, text = next(iter(failed.items()))
        cause = _cdi_probe.explain(text, access.podman)
        more = (
            f"; CDI: {'; '.join(access.spec_problems()) or 'the spec looks right'}"
            if access.runtime == "podman"
            else ""
        )
        raise Refusal(
            f"a container did not get card {uuid} from {access.runtime}{': ' + cause if cause else ''}{more}. "
            f"{access.runtime} said: {text}"
        )
    result["proof"] = f"a container saw each of {len(words)} card(s)"
    if access.runtime == "docker" and changes:
        result["lost_access"] = access.lost_access()
    return result

# SPDX-License-Identifier: Apache-2.0
"""CDI specs and runtimes: each case of the collected ones, under its number."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils import _cdi, _cdi_apply, _cdi_probe
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

from tests.unit.gpu.fakes import UUID, FakeFiles

CARD = {"index": 0, "uuid": UUID}
LIBRARY = "/usr/lib/x86_64-linux-gnu/libcuda.so."


def spec(version: str = "580.159.04", uuid: str = UUID, extra: str = "") -> str:
    return f"""cdiVersion: 0.5.0
kind: nvidia.com/gpu
devices:
    - name: "0"
      containerEdits:
        deviceNodes:
            - path: /dev/nvidia0
    - name: {uuid}
      containerEdits:
        deviceNodes:
            - path: /dev/nvidia0
    - name: all
      containerEdits:
        deviceNodes:
            - path: /dev/nvidia0
containerEdits:
    env:
        - NVIDIA_VISIBLE_DEVICES=void
{extra}    hooks:
        - hookName: createContainer
          path: /usr/bin/nvidia-cdi-hook
          args:
            - nvidia-cdi-hook
            - enable-cuda-compat
            - --host-driver-version={version}
    mounts:
        - hostPath: {LIBRARY}{version}
          containerPath: {LIBRARY}{version}
          options: [ro, nosuid, nodev, rbind, rprivate]
"""


def host(content: dict[str, str], library: str = "580.159.04") -> FakeFiles:
    return FakeFiles({LIBRARY + library: "", **content})


def problems(
    content: dict[str, str], driver: str = "580.159.04", library: str = "580.159.04", **more: Any
) -> list[str]:
    files = host(content, library)
    return _cdi.problems(_cdi.view(files), more.pop("cards", [CARD]), driver, files, **more)


def test_c01_fresh() -> None:
    assert problems({_cdi.OURS: spec()}) == []


def test_c01_stale_after_upgrade() -> None:
    found = problems({_cdi.OURS: spec()}, driver="580.178.04", library="580.178.04")
    assert any("made for driver 580.159.04, but 580.178.04 is loaded" in text for text in found)
    assert any(f"{LIBRARY}580.159.04, which does not exist" in text for text in found)


def test_c01_error_of_crun_is_explained() -> None:
    words = "Error: unable to start container: crun: error stat'ing file /lib/libEGL_nvidia.so.535.161.07: No such file"
    assert "another driver version" in _cdi_probe.explain(words)


def test_c02_conflict_inside_one_folder() -> None:
    found = problems({_cdi.OURS: spec(), "/etc/cdi/nvidia-old.yaml": spec()})
    assert any("nvidia.com/gpu=all is in" in text for text in found)
    assert any("card 0 is missing as 0 and" in text for text in found)


def test_c02_a_stale_high_folder_hides_a_fresh_low_one() -> None:
    found = problems({_cdi.OURS: spec(), _cdi.TOOLKIT: spec("580.95.05")})
    assert any(f"{_cdi.TOOLKIT} was made for driver 580.95.05" in text for text in found)
    assert any(f"{_cdi.OURS} is hidden" in text for text in found)


def test_c02_names_only_in_the_low_folder_stay_resolvable() -> None:
    gone = "GPU-99999999-2222-3333-4444-555555555555"
    found = problems({_cdi.OURS: spec(uuid=gone), _cdi.TOOLKIT: spec()})
    assert any(f"cards that are not here: {gone}" in text for text in found)
    assert any("two files serve the cards" in text for text in found)


def test_c03_yml_is_not_read() -> None:
    found = problems({"/etc/cdi/nvidia.yml": spec()})
    assert any("the name has to end in .yaml or .json" in text for text in found)
    assert any("there is no CDI spec" in text for text in found)


def test_c03_names_by_index_only() -> None:
    """Toolkits before 1.15 name no UUIDs."""
    assert any(f"missing as {UUID}" in text for text in problems({_cdi.OURS: spec(uuid='"1"')}))


def test_c03_words() -> None:
    words = "Error: setting up CDI devices: unresolvable CDI devices nvidia.com/gpu=all"
    assert _cdi_probe.explain(words) == "no readable CDI spec names this card"
    assert "too old" in _cdi_probe.explain("Error: stat nvidia.com/gpu=0: no such file or directory", (3, 4, 4))


def test_c03_other_vendors_are_no_business_of_ours() -> None:
    other = "cdiVersion: 0.5.0\nkind: vendor.com/net\ndevices:\n    - name: all\n"
    assert problems({_cdi.OURS: spec(), "/etc/cdi/net.yaml": other}) == []


def test_c03_json_specs_are_read() -> None:
    data = {
        "cdiVersion": "0.5.0",
        "kind": "nvidia.com/gpu",
        "devices": [
            {"name": name, "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0"}]}} for name in ("0", UUID, "all")
        ],
        "containerEdits": {"mounts": [{"hostPath": f"{LIBRARY}580.159.04"}]},
    }
    assert problems({"/etc/cdi/nvidia.json": json.dumps(data)}) == []
    assert any("broken JSON" in text for text in problems({"/etc/cdi/nvidia.json": "{"}))


def test_c04_additional_gids_and_an_old_podman() -> None:
    text = spec(extra="    additionalGids:\n        - 44\n")
    assert problems({_cdi.OURS: text}) == []
    assert any("additionalGids" in words for words in problems({_cdi.OURS: text}, old_podman=True))


@pytest.mark.parametrize(
    ("podman", "toolkit", "flags"),
    [
        ((4, 9, 3), (1, 19, 1), [_cdi.GIDS_FLAG]),
        ((4, 3, 1), (1, 20, 0), [_cdi.GIDS_FLAG]),
        ((4, 9, 3), (1, 18, 2), []),
        ((5, 4, 2), (1, 19, 1), []),
    ],
)
def test_c04_flag_for_old_podman_and_new_toolkit(
    podman: tuple[int, ...], toolkit: tuple[int, ...], flags: list[str]
) -> None:
    assert access(podman=podman, toolkit=toolkit).flags == flags


@pytest.mark.parametrize(
    ("toolkit", "units", "rc", "owner"),
    [
        ((1, 17, 8), False, 0, "tensorless"),
        ((1, 18, 0), True, 0, "tensorless"),
        ((1, 18, 1), True, 0, "tensorless"),
        ((1, 18, 2), True, 0, "toolkit"),
        ((1, 19, 0), True, 0, "tensorless"),
        ((1, 19, 1), True, 0, "toolkit"),
        ((1, 19, 1), True, 14, "tensorless"),
        ((1, 20, 0), True, 0, "toolkit"),
    ],
)
def test_c05_owner(toolkit: tuple[int, ...], units: bool, rc: int, owner: str) -> None:
    """One owner, by what each toolkit's refresh service can do; from 1.19.1 on it needs `nvidia-smi -L` to end well."""
    assert _cdi.choose_owner("auto", toolkit, units, rc)[0] == owner


class Host:
    """Runs nothing: answers systemctl and writes down what would be run."""

    def __init__(self, files: FakeFiles, units: bool = False, enabled: str = "enabled") -> None:
        self.files, self.units, self.enabled = files, units, enabled
        self.ran: list[list[str]] = []

    def __call__(self, argv: Sequence[str]) -> tuple[int, str, str]:
        self.ran.append(list(argv))
        if argv[:2] == ["systemctl", "list-unit-files"]:
            return (
                0,
                "".join(f"{name} {self.enabled} enabled\n" for name in _cdi_apply.REFRESH) if self.units else "",
                "",
            )
        return 0, "", ""


def access(
    files: FakeFiles | None = None, units: bool = False, runtime: str = "podman", **more: Any
) -> _cdi_apply.Access:
    files = files or host({})
    values: dict[str, Any] = {"podman": (4, 3, 1), "toolkit": (1, 18, 2), "hook": "/usr/bin/hook"} | more
    return _cdi_apply.Access(
        run=Host(files, units),
        files=files,
        program="/usr/bin/nvidia-ctk",
        runtime=runtime,
        cards=[CARD],
        driver="580.159.04",
        smi_rc=0,
        **values,
    )


def texts(changes: Sequence[_cdi_apply.Change]) -> list[str]:
    return [change.text for change in changes]


def test_c05_ours_disables_both_units() -> None:
    """Disabling only the service leaves the path unit, which starts it again."""
    found = texts(access(units=True, toolkit=(1, 19, 0)).plan_cdi())
    assert any(text.startswith("disable nvidia-cdi-refresh.path and nvidia-cdi-refresh.service") for text in found)


def test_c05_ours_removes_the_other_spec() -> None:
    files = host({_cdi.OURS: spec(), _cdi.TOOLKIT: spec("580.95.05")})
    found = texts(access(files).plan_cdi())
    assert f"remove {_cdi.TOOLKIT}, a second CDI spec" in found
    assert not any(text.startswith("generate") for text in found), "the fresh one stays as it is"


def test_c05_toolkit_owns() -> None:
    files = host({_cdi.OURS: spec("580.95.05"), _cdi.TOOLKIT: spec()})
    found = texts(access(files, units=True).plan_cdi())
    assert found == [f"remove {_cdi.OURS}, a second CDI spec"]


def test_c05_second_run_has_nothing_to_do() -> None:
    assert access(host({_cdi.TOOLKIT: spec()}), units=True).plan_cdi() == []


def test_c05_refresh_service_that_never_ran() -> None:
    found = texts(access(units=True).plan_cdi())
    assert any(text.startswith("run the toolkit's refresh service") for text in found)


def test_c06_daemon_json_is_merged() -> None:
    foreign = '{"insecure-registries": ["10.0.0.1:5000"], "runtimes": {"kata": {"path": "kata"}}}'
    files = host({_cdi_apply.DAEMON: foreign})
    work = access(files, runtime="docker")
    written: dict[str, str] = {}
    work.write = lambda path, text, mode=0o644: written.__setitem__(path, text)  # type: ignore[method-assign]
    for change in work.plan_docker():
        if "daemon.json" in change.text:
            change.apply()
    data = json.loads(written[_cdi_apply.DAEMON])
    assert data["insecure-registries"] == ["10.0.0.1:5000"]
    assert sorted(data["runtimes"]) == ["kata", "nvidia"]


def test_c06_cdi_feature() -> None:
    work = access(
        host({_cdi_apply.DAEMON: '{"features": {"other": true}}'}), runtime="docker", docker_feature="cdi", hook=None
    )
    written: dict[str, str] = {}
    work.write = lambda path, text, mode=0o644: written.__setitem__(path, text)  # type: ignore[method-assign]
    next(change for change in work.plan_docker() if "daemon.json" in change.text).apply()
    assert json.loads(written[_cdi_apply.DAEMON])["features"] == {"other": True, "cdi": True}


@pytest.mark.parametrize("text", ["{", "[1]", "nonsense"])
def test_c06_broken_daemon_json_is_never_overwritten(text: str) -> None:
    with pytest.raises(Refusal, match=r"daemon\.json"):
        access(host({_cdi_apply.DAEMON: text}), runtime="docker").plan_docker()


def test_c06_words() -> None:
    assert "not enabled" in _cdi_probe.explain('could not select device driver "cdi" with capabilities: [].')
    assert "when it started" in _cdi_probe.explain('could not select device driver "" with capabilities: [[gpu]].')


def test_c06_no_restart_over_containers_of_others() -> None:
    work = access(runtime="docker")
    work.run = lambda argv: (0, "database\t\nours\tabc\n", "")
    with pytest.raises(Refusal, match="containers of others run: database"):
        work.restart_docker()
    ran: list[Sequence[str]] = []

    def run(argv: Sequence[str]) -> tuple[int, str, str]:
        ran.append(argv)
        return 0, "ours\tabc\n", ""

    work.run = run
    work.restart_docker()
    assert ["systemctl", "restart", "docker.service"] in ran


def test_c07_device_arguments() -> None:
    """podman ignores --gpus without a word, so it gets CDI names; docker gets the card by UUID."""
    assert _cdi_probe.device_arguments("podman", UUID) == ["--device", f"nvidia.com/gpu={UUID}"]
    assert _cdi_probe.device_arguments("docker", UUID) == ["--gpus", f"device={UUID}"]
    words = "Error: crun: executable file `nvidia-smi` not found: No such file or directory: OCI runtime attempted"
    assert "put no driver into the container" in _cdi_probe.explain(words)


def test_c07_the_container_has_to_see_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cdi_probe, "_image", lambda run, runtime: None)
    other = "GPU 0: Tesla P100-PCIE-16GB (UUID: GPU-99999999-2222-3333-4444-555555555555)\n"
    found = _cdi_probe.probe(lambda argv: (0, other, ""), "podman", [UUID])
    assert found[UUID] is not None
    assert _cdi_probe.probe(lambda argv: (0, f"GPU 0: Tesla (UUID: {UUID})\n", ""), "podman", [UUID]) == {UUID: None}


def test_c08_permissions() -> None:
    assert "SELinux" in _cdi_probe.explain("Failed to initialize NVML: Insufficient Permissions")


def test_c10_units_are_added_without_a_reload() -> None:
    """A reload of systemd takes the cards from running docker containers, so a new unit is linked by hand."""
    work = access(runtime="docker")
    for change in work.plan_docker():
        assert "reload" not in change.text
    assert not any("daemon-reload" in " ".join(argv) for argv in work.run.ran)  # type: ignore[attr-defined]
    assert "taken away" in _cdi_probe.explain("Failed to initialize NVML: Unknown Error")


def test_c10_lost_containers_are_named() -> None:
    work = access(runtime="docker")

    def run(argv: Sequence[str]) -> tuple[int, str, str]:
        if argv[:2] == ["docker", "ps"]:
            return 0, "one\ntwo\n", ""
        return (255, "Failed to initialize NVML: Unknown Error\n", "") if argv[2] == "two" else (0, "GPU 0", "")

    work.run = run
    assert work.lost_access() == ["two"]


def test_o02_a_uuid_needs_no_inner_quotes() -> None:
    """Only a list with a comma does; one card by UUID is one word."""
    assert "," not in _cdi_probe.device_arguments("docker", UUID)[1]


def test_o03_unknown_uuid() -> None:
    words = f"nvidia-container-cli: device error: {UUID}: unknown device: unknown"
    assert "not here" in _cdi_probe.explain(words)
    assert any("cards that are not here" in text for text in problems({_cdi.OURS: spec(uuid="GPU-99999999-0000")}))


def test_c05_refresh_regexes() -> None:
    """Why 1.18.0 and 1.18.1 are not trusted: their units miss modules that are there."""
    import re

    entries = [
        "updates/dkms/nvidia.ko:",
        "kernel/nvidia-580/nvidia.ko.zst:",
        "extra/nvidia.ko.xz:",
        "updates/dkms/nvidia-current.ko:",
        "updates/dkms/nvidia-current.ko.xz:",
    ]
    patterns = {
        "1.18.0": r"/nvidia.ko",
        "1.18.1": r"/(nvidia|nvidia-current)\.ko[:]",
        "1.18.2": r"/(nvidia|nvidia-current)\.ko",
    }
    truth = {name: [bool(re.search(pattern, entry)) for entry in entries] for name, pattern in patterns.items()}
    assert truth == {
        "1.18.0": [True, True, True, False, False],
        "1.18.1": [True, False, False, True, False],
        "1.18.2": [True] * 5,
    }
    assert all(_cdi.choose_owner("auto", (1, 18, patch), True, 0)[0] == "tensorless" for patch in (0, 1))

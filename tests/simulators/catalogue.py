# SPDX-License-Identifier: Apache-2.0
"""The packages of the local repositories: names, versions and dependencies as in the real ones."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

FILES = Path(__file__).parent / "files"
LIB = "usr/lib/x86_64-linux-gnu"
CUDA_VERSIONS = ("535.261.03", "570.195.03", "580.95.05", "580.105.08", "590.48.01")
UBUNTU_VERSIONS = {"535": "535.309.01", "570": "570.195.03", "580": "580.105.08", "590": "590.48.01"}
TOOLKIT_VERSIONS = ("1.17.8", "1.18.2", "1.19.1")


@dataclass
class Package:
    """One binary package. `files` maps a path to its text or bytes; a text that starts with `->` is a link."""

    name: str
    version: str
    depends: str = ""
    provides: str = ""
    conflicts: str = ""
    description: str = "stand-in for tests"
    files: dict[str, str | bytes] = field(default_factory=dict)
    executables: tuple[str, ...] = ()
    postinst: str = ""
    postrm: str = ""


def file(name: str) -> str:
    return (FILES / name).read_text(encoding="utf-8")


def smi(name: str, version: str, depends: str, **more: str) -> Package:
    return Package(
        name,
        version,
        depends,
        files={"usr/bin/nvidia-smi": file("nvidia-smi")},
        executables=("usr/bin/nvidia-smi",),
        **more,
    )


def library(package: str, soname: str, release: str, version: str, **more: str) -> Package:
    """A library as dpkg would leave it: the versioned file and the link that says which one is installed."""
    return Package(
        package,
        version,
        files={f"{LIB}/{soname}.so.{release}": "stand-in\n", f"{LIB}/{soname}.so.1": f"->{soname}.so.{release}"},
        **more,
    )


def kernel(name: str, release: str, version: str, flavour: str, depends: str = "", **more: str) -> Package:
    module = json.dumps({"version": release, "flavour": flavour, "package": name})
    return Package(name, version, depends, files={"usr/lib/nvidia-sim/module.json": module + "\n"}, **more)


def persistenced(version: str, depends: str) -> Package:
    unit = (
        "[Unit]\nDescription=NVIDIA Persistence Daemon (stand-in)\n\n[Service]\nType=oneshot\nRemainAfterExit=yes\n"
        "ExecStart=-/usr/bin/nvidia-smi -pm 1\n\n[Install]\nWantedBy=multi-user.target\n"
    )
    reload = "[ ! -d /run/systemd/system ] || systemctl daemon-reload || true\n"
    return Package(
        "nvidia-persistenced",
        version,
        depends,
        files={"usr/lib/systemd/system/nvidia-persistenced.service": unit},
        postinst=reload,
        postrm=reload,
    )


def cuda() -> list[Package]:
    """NVIDIA's own repository for Debian 12: unversioned component names, and metapackages with lower bounds only."""
    found: list[Package] = []
    for release in CUDA_VERSIONS:
        version, branch = f"{release}-1", release.split(".")[0]
        same = f"(= {version})"
        found += [
            library("libnvidia-ml1", "libnvidia-ml", release, version),
            library("libcuda1", "libcuda", release, version),
            library("libnvidia-ptxjitcompiler1", "libnvidia-ptxjitcompiler", release, version),
            Package("firmware-nvidia-gsp", version),
            Package("nvidia-modprobe", version),
            Package("nvidia-kernel-support", version, f"nvidia-modprobe {same}"),
            kernel(
                "nvidia-kernel-dkms",
                release,
                version,
                "proprietary",
                f"nvidia-kernel-support {same}, firmware-nvidia-gsp {same}",
                conflicts="nvidia-kernel-open-dkms",
                provides=f"nvidia-kernel-{release}",
            ),
            kernel(
                "nvidia-kernel-open-dkms",
                release,
                version,
                "open",
                f"nvidia-kernel-support {same}, firmware-nvidia-gsp {same}",
                conflicts="nvidia-kernel-dkms",
                provides=f"nvidia-kernel-{release}",
            ),
            persistenced(version, f"libnvidia-ml1 {same}"),
            smi(
                "nvidia-driver-cuda",
                version,
                f"libnvidia-ml1 {same}, libcuda1 {same}, libnvidia-ptxjitcompiler1 {same}, nvidia-persistenced {same}, "
                f"nvidia-kernel-dkms {same} | nvidia-kernel-open-dkms {same}",
            ),
            Package("nvidia-settings", version),
            Package("nvidia-xconfig", version),
            Package("xserver-xorg-video-nvidia", version),
            Package(
                "nvidia-driver",
                version,
                f"nvidia-driver-cuda {same}, nvidia-kernel-dkms {same} | "
                f"nvidia-kernel-open-dkms {same}, xserver-xorg-video-nvidia {same}",
            ),
            Package("nvidia-open", version, f"nvidia-driver {same}, nvidia-kernel-open-dkms {same}"),
            Package(
                "cuda-drivers",
                version,
                f"nvidia-driver (>= {release}), nvidia-driver-cuda (>= {release}), "
                f"nvidia-kernel-dkms (>= {release}), nvidia-settings (>= {release}), nvidia-xconfig (>= {release})",
                provides=f"cuda-drivers-{branch}",
            ),
        ]
    floors = {"535": "535.104.05", "570": "570.86.10", "580": "580.65.06", "590": "590.44.01"}
    for branch, floor in floors.items():
        release = [r for r in CUDA_VERSIONS if r.startswith(branch)][-1]
        parts = ("nvidia-driver", "nvidia-driver-cuda", "nvidia-kernel-dkms", "nvidia-settings", "nvidia-xconfig")
        # The trap of case D01: a versioned metapackage that only sets a floor.
        found.append(
            Package(f"cuda-drivers-{branch}", f"{release}-1", ", ".join(f"{part} (>= {floor})" for part in parts))
        )
    pin = (
        "Package: src:*nvidia*:any src:cuda-drivers:any src:cuda-compat:any *nvidia* cuda-drivers* libcuda1\n"
        "Pin: version 580.*\nPin-Priority: 1000\n"
    )
    found.append(
        Package(
            "nvidia-driver-pinning-580", "580.105.08-1", files={"etc/apt/preferences.d/nvidia-driver-pinning-580": pin}
        )
    )
    return found


def ubuntu() -> list[Package]:
    """The layout of Ubuntu's archive: the branch in each name, server and open variants, transitional packages."""
    found: list[Package] = [persistenced("580.105.08-0ubuntu1", "")]
    for branch, release in UBUNTU_VERSIONS.items():
        for server in ("", "-server"):
            version = f"{release}-0ubuntu0.24.04.1"
            same, tail = f"(= {version})", f"{branch}{server}"
            compute = library(
                f"libnvidia-compute-{tail}",
                "libnvidia-ml",
                release,
                version,
                provides="libnvidia-ml1, libcuda1",
                conflicts="libnvidia-compute",
            )
            compute.files[f"{LIB}/libcuda.so.{release}"] = "stand-in\n"
            compute.files[f"{LIB}/libcuda.so.1"] = f"->libcuda.so.{release}"
            compute.provides += ", libnvidia-compute"
            found += [
                compute,
                Package(
                    f"nvidia-kernel-common-{tail}",
                    version,
                    conflicts="nvidia-kernel-common",
                    provides="nvidia-kernel-common",
                ),
                smi(
                    f"nvidia-utils-{tail}",
                    version,
                    f"libnvidia-compute-{tail} {same}",
                    conflicts="nvidia-utils",
                    provides="nvidia-utils",
                ),
                kernel(
                    f"nvidia-dkms-{tail}",
                    release,
                    version,
                    "proprietary",
                    f"nvidia-kernel-common-{tail} {same}",
                    conflicts="nvidia-kernel-module",
                    provides="nvidia-kernel-module",
                ),
                kernel(
                    f"nvidia-dkms-{tail}-open",
                    release,
                    version,
                    "open",
                    f"nvidia-kernel-common-{tail} {same}",
                    conflicts="nvidia-kernel-module",
                    provides="nvidia-kernel-module",
                ),
                Package(
                    f"nvidia-headless-{tail}", version, f"nvidia-dkms-{tail} {same}, libnvidia-compute-{tail} {same}"
                ),
                Package(
                    f"nvidia-headless-{tail}-open",
                    version,
                    f"nvidia-dkms-{tail}-open {same}, libnvidia-compute-{tail} {same}",
                ),
                Package(f"nvidia-driver-{tail}", version, f"nvidia-headless-{tail} {same}, nvidia-utils-{tail} {same}"),
                Package(
                    f"nvidia-driver-{tail}-open",
                    version,
                    f"nvidia-headless-{tail}-open {same}, nvidia-utils-{tail} {same}",
                ),
            ]
    for name, target in [
        ("nvidia-headless-565-server", "nvidia-headless-580-server"),
        ("nvidia-driver-550-server", "nvidia-driver-580-server"),
        ("nvidia-driver-575-server", "nvidia-driver-590-server"),
    ]:
        branch = name.split("-")[2]
        found.append(
            Package(
                name,
                f"{branch}.57.01-0ubuntu0.24.04.4",
                target,
                description="NVIDIA metapackage (transitional package)",
            )
        )
    return found


def debian() -> list[Package]:
    """Debian's own archive: 535 for bookworm and 550 for trixie, nothing newer; tools from sources of their own."""
    found: list[Package] = [Package("nvidia-modprobe", "570.133.07-1"), Package("nvidia-cuda-dev", "11.8.89~11.8.0-5")]
    for release, suffix in (("535.261.03", "-1~deb12u1"), ("550.163.01", "-2")):
        version = release + suffix
        same = f"(= {version})"
        found += [
            library("libnvidia-ml1", "libnvidia-ml", release, version),
            library("libcuda1", "libcuda", release, version),
            smi("nvidia-smi", version, f"libnvidia-ml1 {same}"),
            persistenced(version, f"libnvidia-ml1 {same}"),
            Package("nvidia-kernel-support", version, "nvidia-modprobe (>= 535.54.03)"),
            kernel(
                "nvidia-kernel-dkms",
                release,
                version,
                "proprietary",
                f"nvidia-kernel-support {same}",
                conflicts="nvidia-open-kernel-dkms",
            ),
            kernel(
                "nvidia-open-kernel-dkms",
                release,
                version,
                "open",
                f"nvidia-kernel-support {same}",
                conflicts="nvidia-kernel-dkms",
            ),
            Package("nvidia-driver-bin", version),
            Package(
                "nvidia-driver",
                version,
                f"nvidia-kernel-dkms {same} | nvidia-open-kernel-dkms {same}, "
                f"nvidia-driver-bin {same}, nvidia-smi {same}, libcuda1 {same}, nvidia-persistenced {same}",
            ),
        ]
    return found


def toolkit() -> list[Package]:
    """NVIDIA's container toolkit: four packages that share one version, with the refresh units from 1.18 on."""
    found: list[Package] = []
    for release in TOOLKIT_VERSIONS:
        version = f"{release}-1"
        same = f"(= {version})"
        base = Package(
            "nvidia-container-toolkit-base",
            version,
            files={
                "usr/bin/nvidia-ctk": file("nvidia-ctk"),
                "usr/bin/nvidia-cdi-hook": "#!/bin/sh\ncat >/dev/null\n",
                "usr/bin/nvidia-container-runtime": '#!/bin/sh\nexec runc "$@"\n',
                "usr/lib/nvidia-sim/toolkit-version": release + "\n",
                "usr/lib/nvidia-sim/nvidia-smi-in-container": file("nvidia-smi-in-container"),
            },
            executables=(
                "usr/bin/nvidia-ctk",
                "usr/bin/nvidia-cdi-hook",
                "usr/bin/nvidia-container-runtime",
                "usr/lib/nvidia-sim/nvidia-smi-in-container",
            ),
        )
        if release >= "1.18":
            base.files["etc/systemd/system/nvidia-cdi-refresh.service"] = (
                "[Unit]\nDescription=Refresh NVIDIA CDI specification file\n\n[Service]\nType=oneshot\n"
                "EnvironmentFile=-/etc/nvidia-container-toolkit/nvidia-cdi-refresh.env\n"
                + ("ExecStartPre=/usr/bin/nvidia-smi -L\n" if release >= "1.19" else "")
                + "ExecStart=/usr/bin/nvidia-ctk cdi generate --output=/var/run/cdi/nvidia.yaml\n\n"
                "[Install]\nWantedBy=multi-user.target\n"
            )
            base.files["etc/systemd/system/nvidia-cdi-refresh.path"] = (
                "[Unit]\nDescription=Trigger CDI refresh on NVIDIA driver changes\n\n[Path]\n"
                "PathChanged=/usr/lib/nvidia-sim/module.json\nPathChanged=/usr/bin/nvidia-ctk\n\n"
                "[Install]\nWantedBy=multi-user.target\n"
            )
            units = "nvidia-cdi-refresh.path nvidia-cdi-refresh.service"
            base.postinst = (
                "if [ -d /run/systemd/system ]; then systemctl daemon-reload || true; "
                f"systemctl enable --now {units} || true; fi\n"
            )
        found += [
            Package("libnvidia-container1", version),
            Package("libnvidia-container-tools", version, f"libnvidia-container1 {same}"),
            base,
            Package(
                "nvidia-container-toolkit",
                version,
                f"nvidia-container-toolkit-base {same}, libnvidia-container-tools {same}",
                files={"usr/bin/nvidia-container-runtime-hook": file("nvidia-container-runtime-hook")},
                executables=("usr/bin/nvidia-container-runtime-hook",),
            ),
        ]
    return found


def hardware() -> list[Package]:
    """The card itself: what a host has before any driver. Not in a real repository, of course."""
    unit = "nvidia-sim-hardware.service"
    return [
        Package(
            "sim-hardware",
            "1",
            files={
                "usr/lib/nvidia-sim/nvidia-sim": file("nvidia-sim"),
                f"usr/lib/systemd/system/{unit}": file(unit),
                f"usr/lib/systemd/system/sysinit.target.wants/{unit}": f"->../{unit}",
            },
            executables=("usr/lib/nvidia-sim/nvidia-sim",),
        )
    ]


REPOSITORIES = {"cuda": cuda, "ubuntu": ubuntu, "debian": debian, "toolkit": toolkit, "hardware": hardware}

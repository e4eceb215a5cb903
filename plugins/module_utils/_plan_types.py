# SPDX-License-Identifier: Apache-2.0
"""What a plan is made from: the host as it was observed, and what the user chose.

Private to the collection: may change at any time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils._cards import Gpus
from ansible_collections.tensorless.fleet.plugins.module_utils._plan_paths import DEFAULT_ENDPOINT


@dataclass(frozen=True)
class HostFacts:
    """A host, observed. Mappings are by sha256 of the model file or by image name; what is missing is not known."""

    gpus: Gpus = field(default_factory=Gpus)
    cpu_count: int = 1
    runtimes: Optional[Sequence[str]] = None  # the installed ones; None: not looked
    cached: Mapping[str, str] = field(default_factory=dict)  # sha256 -> yes | partial | no
    pn: Mapping[str, str] = field(default_factory=dict)  # sha256 -> yes | no
    block_count: Mapping[str, int] = field(default_factory=dict)  # sha256 -> layers, from the GGUF header
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # image -> its labels, once it is pulled
    file_digests: Mapping[str, str] = field(default_factory=dict)  # path -> sha256 of files that exec mounts


@dataclass(frozen=True)
class Choice:
    """What a user asks for. The defaults are the documented ones."""

    cache: str
    command: str = "run"
    revision: Optional[str] = None  # after @
    card: Optional[str] = None
    gpu: Optional[str] = None  # index, UUID or each
    runtime: str = "auto"
    host: str = "127.0.0.1"
    port: int = 8080
    context: Optional[int] = None
    extra_args: Sequence[str] = ()
    allow_draft: bool = False
    endpoint: str = DEFAULT_ENDPOINT
    dry_run: bool = False
    assume_installed: bool = False  # a rehearsal on a bare host: what is only not installed yet is no refusal
    service: bool = False  # the fleet: run by systemd, where secrets in an argument list are refused
    api_key_file: Optional[str] = None  # on the host; exec mounts it
    hardening: Mapping[str, Any] = field(default_factory=dict)
    suffix: bool = False  # the host runs the model several times: names end in the card's UUID
    runs: int = 3
    tokens: int = 256

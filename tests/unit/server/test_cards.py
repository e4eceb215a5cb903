# SPDX-License-Identifier: Apache-2.0
"""Room on a card before a start, and the server's place on it afterwards."""

from __future__ import annotations

import pathlib
import struct
from typing import Any

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils import _server_cards as cards
from ansible_collections.tensorless.fleet.plugins.module_utils import _server_module as work
from ansible_collections.tensorless.fleet.plugins.module_utils._hardening import hardening_flags
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

from tests.unit.server.fakes import FakeHost, plan

A, B = "GPU-aaaaaaaa-0000-0000-0000-000000000000", "GPU-bbbbbbbb-0000-0000-0000-000000000000"


def facts(used: dict[str, int], *processes: dict[str, Any], total: int = 16384) -> dict[str, Any]:
    listed = [
        {"index": i, "uuid": u, "memory_mib": total, "memory_used_mib": m} for i, (u, m) in enumerate(used.items())
    ]
    return {"cards": listed, "processes": list(processes)}


PN3 = {
    "model": "iamMrDuncan/Qwen3.8-27B-PN3-GGUF",
    "image": "ghcr.io/x@sha256:35409ff97c2f518e468790c28bd19206ae777a945fcffe5775585e28fd9939a7",
    "context": 65536,
    "exec": [],
    "cards": [{"index": 0, "uuid": A}],
    "download": {"blob": "/nowhere", "sha256": "15ce2d4469673f1f1753c55de3780cfe04311dd6f05cb41633d73df128e91476"},
}


def test_a_known_pair_comes_from_the_table() -> None:
    assert cards.need(PN3) == cards.Need(14000, "measured")
    assert cards.need({**PN3, "context": 4096}) is None, "its file is not here, so nothing is told"


def _gguf(tmp: pathlib.Path) -> pathlib.Path:
    """2 layers, 4 heads of width 16, 2 of them for keys and values."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    pairs = [text("general.architecture") + struct.pack("<I", 8) + text("llama")]
    for key, number in (("embedding_length", 64), ("attention.head_count", 4), ("attention.head_count_kv", 2)):
        pairs.append(text(f"llama.{key}") + struct.pack("<II", 4, number))
    tensors = [text(f"blk.{i}.attn_k.weight") + struct.pack("<IQIQ", 1, 32, 0, 128 * i) for i in range(2)]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs + tensors)
    path = tmp / "m.gguf"
    path.write_bytes(head.ljust(-(-len(head) // 32) * 32, b"\0") + bytes(256))
    return path


@pytest.mark.parametrize(("kind", "width"), [("f16", 2.0), ("q4_0", 18 / 32), ("q8_0", 34 / 32)])
def test_an_unknown_one_is_estimated_from_its_header(tmp_path: pathlib.Path, kind: str, width: float) -> None:
    path = _gguf(tmp_path)
    header, size = cards._gguf.read_file(str(path))
    context = 1 << 20
    assert cards.cache_bytes(header, context, ["-ctk", kind, "-ctv", kind]) == 2 * 2 * 16 * 2 * width * context
    wanted = {
        **PN3,
        "download": {"blob": str(path), "sha256": "0"},
        "context": context,
        "exec": ["-ctk", kind, "-ctv", kind],
    }
    assert cards.need(wanted) == cards.Need(round((size + 128 * width * context) / (1 << 20)), "estimated")


def test_room() -> None:
    assert cards.too_full(PN3, facts({A: 0, B: 16000}), frozenset(), {}) is None
    holder = {"pid": 7, "name": "python", "uuid": A, "memory_mib": 4000}
    complaint = cards.too_full(PN3, facts({A: 4000}, holder), frozenset(), {})
    assert complaint is not None
    assert "needs about 14000 MiB (measured) on GPU 0" in complaint
    assert "12384 of 16384 MiB free; it is used by pid 7 python (4000 MiB)" in complaint


def test_what_is_stopped_first_makes_room() -> None:
    holder = {"pid": 7, "name": "llama-server", "uuid": A, "memory_mib": 14000}
    assert cards.too_full(PN3, facts({A: 14000}, holder), frozenset({7}), {}) is None


def test_two_in_one_run_do_not_both_count_on_the_same_room() -> None:
    promised: dict[str, int] = {}
    assert cards.too_full(PN3, facts({A: 0}), frozenset(), promised) is None
    assert cards.too_full(PN3, facts({A: 0}), frozenset(), promised) is not None


def test_what_cannot_be_read_refuses_nothing() -> None:
    unread = {"cards": [{"index": 0, "uuid": A, "memory_mib": None, "memory_used_mib": None}], "processes": []}
    assert cards.too_full(PN3, unread, frozenset(), {}) is None
    assert cards.misplaced([A], {}, unread, frozenset({1})) is None


def test_place() -> None:
    mine = frozenset({1, 2})
    assert cards.misplaced([A], {A: 0}, facts({A: 500}, {"pid": 2, "uuid": A}), mine) is None
    assert cards.misplaced([A], {A: 0}, facts({A: 500}), mine) is None, "the memory in use grew"
    elsewhere = cards.misplaced([A], {A: 0, B: 0}, facts({A: 0, B: 500}, {"pid": 2, "uuid": B}), mine)
    assert elsewhere == f"the server uses {B}, but was given {A}"
    nowhere = cards.misplaced([A], {A: 10}, facts({A: 10}), mine)
    assert nowhere is not None
    assert "it would run on the processor" in nowhere


def test_descendants() -> None:
    assert cards.descendants(5, {6: 5, 7: 6, 8: 1}) == {5, 6, 7}


def test_srv_07_a_server_that_left_its_card_fails(host: FakeHost) -> None:
    done = work.start([plan(host.tmp)], host.tools(cards=lambda: facts({A: 3})), host.installed)
    assert done.failure is not None
    assert "the server uses no memory of the card that it was given" in done.failure
    assert not host.boxes["podman"]


def test_a_full_card_refuses_before_anything_is_stopped(host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    work.start([plan(host.tmp)], host.tools(), host.installed)
    box = dict(host.boxes["podman"])
    monkeypatch.setattr(cards, "need", lambda _plan: cards.Need(99999, "estimated"))
    with pytest.raises(Refusal, match="needs about 99999 MiB"):
        work.start([plan(host.tmp, context=1)], host.tools(cards=lambda: facts({A: 3})), host.installed)
    assert host.boxes["podman"] == box


def test_hardening_flags() -> None:
    everything = {
        "no_new_privileges": True, "read_only": True, "drop_capabilities": True, "memory": "20g", "pids_limit": 512,
    }  # fmt: skip
    assert hardening_flags(everything, "podman") == [
        "--security-opt=no-new-privileges", "--read-only", "--cap-drop=all", "--memory=20g", "--pids-limit=512",
    ]  # fmt: skip
    assert "--tmpfs=/tmp" in hardening_flags(everything, "docker")
    assert hardening_flags({"read_only": False, "memory": None}, "docker") == []


@pytest.mark.parametrize("options", [{"root": True}, {"memory": "lots"}, {"pids_limit": 0}, {"pids_limit": "5"}])
def test_hardening_refuses_what_it_does_not_know(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="hardening"):
        hardening_flags(options, "podman")

# SPDX-License-Identifier: Apache-2.0
"""Failures that downloaders of the Hub met in the field, by the ids of the catalogue."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from pathlib import Path

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils._blob import BlobError
from ansible_collections.tensorless.fleet.plugins.module_utils._blob_state import Lock, this_host
from ansible_collections.tensorless.fleet.plugins.module_utils._hub import expiry, is_git_id, parse_etag
from ansible_collections.tensorless.fleet.plugins.module_utils._hub_http import Session, follow, origin

from tests.hub import FakeHub, Request
from tests.hub.jobs import COMMIT, PARTS, QUICK, REPO, Bench, noise

CASES = Path(__file__).parents[4] / "shared" / "research" / "hub-and-server-cases.md"
TOKEN = "hf_0123456789abcdefghijklmnop"


def test_every_case_has_a_test() -> None:
    if not CASES.exists():
        pytest.skip(f"the catalogue is not here: {CASES}")
    ids = set(re.findall(r"^id: (HUB-\d+)", CASES.read_text(encoding="utf-8"), re.M))
    tested = {f"HUB-{n}" for n in re.findall(r"^def test_hub_(\d+)", Path(__file__).read_text(encoding="utf-8"), re.M)}
    assert ids
    assert ids <= tested


def is_get(request: Request) -> bool:
    return request.method == "GET"


# ----- ranges and resume -----


def test_hub_01_range_ignored_on_resume(bench: Bench) -> None:
    bench.leave_partial(b"A" * 30)
    bench.hub.fault(ignore_range=True)
    ran = bench.run()
    assert bench.right()
    assert ran.job.outcome is not None
    assert ran.job.outcome.restarts == 1
    assert {r.header("Accept-Encoding") for r in bench.hub.requests()} == {"identity"}
    assert bench.hub.requests("cdn", "GET")[0].range == "bytes=30-"


def test_hub_01_range_ignored_by_a_part(bench: Bench) -> None:
    bench.hub.fault(ignore_range=True)
    ran = bench.run(PARTS)
    assert bench.right()
    # The refused answers were closed, not read to their end.
    whole = [r for r in bench.hub.requests("cdn", "GET") if r.sent == len(bench.data)]
    assert len(whole) >= 1
    assert ran.job.outcome is not None
    assert ran.job.outcome.fetched == len(bench.data)


def test_hub_04_no_content_range(bench: Bench) -> None:
    bench.hub.fault(headers={"Content-Range": None}, when=lambda r: r.range is not None)
    bench.leave_partial(bench.data[:1000])
    bench.run(PARTS)
    assert bench.right()
    assert [r for r in bench.hub.requests("cdn", "GET") if r.range is None and r.sent == len(bench.data)]


def test_hub_05_complete_partial_needs_no_request(bench: Bench) -> None:
    bench.leave_partial(bench.data)
    ran = bench.run()
    assert bench.right()
    assert bench.hub.requests() == []
    assert ran.changed


def test_hub_05_complete_but_wrong_partial_starts_over(bench: Bench) -> None:
    bench.leave_partial(bytes(len(bench.data)))
    ran = bench.run()
    assert bench.right()
    assert any("downloaded from the start" in note for note in ran.job.notes)


def test_hub_06_longer_partial(bench: Bench) -> None:
    bench.leave_partial(bench.data + b"more")
    bench.run()
    assert bench.right()


def test_hub_06_416_is_judged_before_other_errors(bench: Bench) -> None:
    bench.leave_partial(bench.data[:5000])
    bench.hub.fault(status=416, headers={"Content-Range": "bytes */2307"}, when=is_get)
    with pytest.raises(BlobError) as error:
        bench.run()
    assert error.value.reason == "size_differs"
    assert "2307" in str(error.value)
    assert str(len(bench.data)) in str(error.value)
    assert len(bench.hub.requests("cdn", "GET")) == 1


def test_hub_07_one_range_header(bench: Bench) -> None:
    bench.hub.fault(cut_after=50_000, times=3)
    bench.run()
    assert bench.right()
    asked = bench.hub.requests("cdn", "GET")
    assert len(asked) == 4
    assert all(len([k for k, _v in r.headers if k == "Range"]) <= 1 for r in asked)
    assert [r.range for r in asked] == [None, "bytes=50000-", "bytes=100000-", "bytes=150000-"]


def test_hub_10_lock_of_a_dead_owner_is_taken_over(bench: Bench) -> None:
    lock = Path(str(bench.partial) + ".lock")
    lock.parent.mkdir(parents=True)
    owner = {"token": "t", "pid": 2**22 + 1, "started": "1", "boot": this_host(), "host": "here", "since": 1}
    lock.write_text(json.dumps(owner))
    bench.run()
    assert bench.right()
    assert not lock.exists()


def test_hub_10_reused_pid_is_not_the_owner(bench: Bench) -> None:
    lock = Path(str(bench.partial) + ".lock")
    lock.parent.mkdir(parents=True)
    owner = {"token": "t", "pid": os.getpid(), "started": "0", "boot": this_host(), "host": "here", "since": 1}
    lock.write_text(json.dumps(owner))
    bench.run()
    assert bench.right()


def test_hub_10_lock_of_another_host_is_not_stolen(bench: Bench) -> None:
    lock = Path(str(bench.partial) + ".lock")
    lock.parent.mkdir(parents=True)
    owner = {"token": "t", "pid": 1, "started": "1", "boot": "other/pid:[1]", "host": "far", "since": 1}
    lock.write_text(json.dumps(owner))
    with pytest.raises(BlobError) as error:
        bench.run(lock_wait=0.2)
    assert error.value.reason == "locked"
    assert "process 1 on far" in str(error.value)
    assert str(lock) in str(error.value)
    assert lock.exists()
    assert bench.hub.requests() == []


def test_hub_10_release_that_fails_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = Lock(str(tmp_path / "x.lock"), 1.0)
    lock.acquire()

    def broken(_path: str) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "unlink", broken)
    note = lock.release()
    assert note is not None
    assert "Input/output error" in note


def test_hub_37_holes_without_a_sidecar(bench: Bench) -> None:
    data = bytearray(bench.data)
    data[100_000:200_000] = bytes(100_000)
    bench.leave_partial(bytes(data))
    ran = bench.run()
    assert bench.right()
    assert any("from the start" in note for note in ran.job.notes)


def test_hub_37_gaps_named_by_the_sidecar_are_fetched(bench: Bench) -> None:
    size = len(bench.data)
    data = bytearray(bench.data)
    data[100_000:200_000] = bytes(100_000)
    bench.leave_partial(bytes(data))
    done = [[0, 100_000], [200_000, size]]
    bench.sidecar.write_text(json.dumps({"version": 1, "sha256": bench.sha, "size": size, "done": done}))
    ran = bench.run()
    assert bench.right()
    assert [r.range for r in bench.hub.requests("cdn", "GET")] == ["bytes=100000-199999"]
    assert ran.job.resumed_from == size - 100_000


def test_hub_37_sidecar_of_another_file(bench: Bench) -> None:
    bench.leave_partial(bytes(1000))
    bench.sidecar.write_text(json.dumps({"version": 1, "sha256": "0" * 64, "size": 1000, "done": [[0, 1000]]}))
    ran = bench.run()
    assert bench.right()
    assert any("another file" in note for note in ran.job.notes)


# ----- metadata, redirects, mirrors -----


def test_hub_11_metadata_from_the_redirect_only(bench: Bench) -> None:
    bench.hub.fault(headers={"X-Linked-Etag": '"' + "e" * 64 + '"', "X-Repo-Commit": "f" * 40})
    bench.run()
    assert bench.right()
    assert all(r.header("If-Range") is None for r in bench.hub.requests())


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({"X-Linked-Etag": '"' + "e" * 64 + '"'}, "sha256_differs"),
        ({"X-Repo-Commit": "f" * 40}, "commit_differs"),
        ({"X-Linked-Size": "12"}, "size_differs"),
    ],
)
def test_hub_11_metadata_that_disagrees(bench: Bench, headers: dict[str, str | None], reason: str) -> None:
    bench.hub.fault(where="hub", headers=headers)
    with pytest.raises(BlobError) as error:
        bench.run()
    assert error.value.reason == reason
    assert bench.hub.requests("cdn") == []
    assert str(error.value.details["want"]) in str(error.value)
    assert str(error.value.details["got"]) in str(error.value)


def test_hub_12_etags() -> None:
    sha = "5" * 64
    assert [parse_etag(e) for e in (f'"{sha}"', f'W/"{sha}"', sha)] == [sha] * 3
    git = '"0123456789abcdef0123456789abcdef01234567"'
    assert [parse_etag(e) for e in (git, '"../../x"', "", None, f'"{sha.upper()}A"', f'WW/"{sha}"')] == [None] * 6
    assert is_git_id(git)
    assert not is_git_id(f'"{sha}"')


def test_hub_12_small_file_with_a_git_id(hub: FakeHub, tmp_path: Path) -> None:
    bench = Bench(hub, tmp_path, b"{}", file="config.json")
    hub.add(REPO, COMMIT, "config.json", bench.data, lfs=False)
    bench.run()
    assert bench.right()


def test_hub_14_head_without_length(bench: Bench) -> None:
    bench.hub.direct = True
    bare: dict[str, str | None] = {"Content-Length": None, "X-Linked-Size": None}
    bench.hub.fault(where="hub", headers=bare, when=lambda r: r.method == "HEAD")
    bench.hub.fault(where="hub", headers={"X-Linked-Size": None})
    bench.run(size=None)
    assert bench.right()
    assert bench.hub.requests("hub", "GET")[0].range == "bytes=0-0"


def test_hub_14_size_not_to_be_had(bench: Bench) -> None:
    bench.hub.direct = True
    bare: dict[str, str | None] = {"Content-Length": None, "X-Linked-Size": None, "Content-Range": None}
    bench.hub.fault(where="hub", headers=bare)
    with pytest.raises(BlobError) as error:
        bench.run(size=None)
    assert error.value.reason == "size_unknown"
    assert "Content-Length" in str(error.value)
    assert "127.0.0.1" in str(error.value)


def test_hub_15_renamed_repository(bench: Bench) -> None:
    bench.hub.renamed["old/name"] = REPO
    bench.repo = "old/name"
    ran = bench.run()
    assert bench.right()
    assert bench.hub.requests("hub")[1].query == "download=true"
    assert any("renamed" in note and REPO in note for note in ran.job.notes)


def test_hub_15_circle(bench: Bench) -> None:
    path = f"/{REPO}/resolve/{COMMIT}/f.gguf"
    bench.hub.fault(where="hub", status=307, headers={"Location": path + "?a=1"}, when=lambda r: r.query == "")
    bench.hub.fault(where="hub", status=307, headers={"Location": path})
    with pytest.raises(BlobError) as error:
        bench.run()
    assert error.value.reason == "redirect_loop"


def test_hub_15_too_many_hops(bench: Bench) -> None:
    for n in range(8):
        bench.hub.fault(where="hub", times=1, status=302, headers={"Location": f"/x/y/resolve/{COMMIT}/f{n}"})
    with pytest.raises(BlobError) as error:
        bench.run()
    assert error.value.reason == "redirect_loop"
    assert len(bench.hub.requests("hub")) == 6


def test_hub_17_token_goes_to_the_hub_only(bench: Bench) -> None:
    bench.hub.lifetime = 1.0  # several renewals
    bench.hub.rate = 150_000.0
    bench.run(PARTS, token=TOKEN)
    assert bench.right()
    asked = bench.hub.requests("hub")
    assert len(asked) > 1
    assert all(r.header("Authorization") == f"Bearer {TOKEN}" for r in asked)
    served = bench.hub.requests("cdn")
    assert len(served) > 4
    assert all(r.header("Authorization") is None and r.header("Cookie") is None for r in served)


def test_hub_17_token_is_nowhere_on_disk(bench: Bench) -> None:
    bench.hub.fault(cut_at=400_000)
    with pytest.raises(BlobError):
        bench.run(PARTS, token=TOKEN)
    kept = [p for p in bench.root.rglob("*") if p.is_file()]
    assert bench.partial in kept
    assert not [p for p in kept if TOKEN.encode() in p.read_bytes()]
    assert not [p for p in kept if b"Signature" in p.read_bytes()]


def test_hub_17_token_is_held_back_on_plain_http(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "ansible_collections.tensorless.fleet.plugins.module_utils._hub.token_may_travel"
    monkeypatch.setattr(module, lambda _url: False)
    bench.hub.gated.add(REPO)
    with pytest.raises(BlobError) as error:
        bench.run(token=TOKEN)
    assert error.value.reason == "gated"
    assert "not sent" in str(error.value)
    assert bench.hub.requests()[0].header("Authorization") is None


def test_hub_17_https_never_to_http() -> None:
    class Stub:
        """Answers an https address with a redirect to http."""

        def request(self, _method: str, url: str, _headers: object) -> object:
            class Answer:
                status = 302
                host = "hub.test"

                location = "http://cdn.test/x?Signature=s"

                @staticmethod
                def finish() -> None: ...

            return Answer()

    home = origin("https://hub.test/")
    with pytest.raises(BlobError) as error:
        follow(Stub(), "HEAD", "https://hub.test/a", {}, TOKEN, home, stay_home=False)  # type: ignore[arg-type]
    assert error.value.reason == "insecure_redirect"
    assert "Signature" not in str(error.value)


def test_hub_39_same_repository_in_other_case(bench: Bench) -> None:
    other = bench.root / "hub" / "models--Acme--Tiny-GGUF" / "blobs" / bench.sha
    other.parent.mkdir(parents=True)
    other.write_bytes(bench.data)
    ran = bench.run()
    assert bench.right()
    assert any("models--Acme--Tiny-GGUF" in note for note in ran.job.notes)
    assert other.exists()


BODIES = {
    "a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 29928734\n",
    "an HTML page": b"<!DOCTYPE html><html><head><title>Access blocked</title>",
    "an XML error": b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>AccessDenied</Code></Error>',
}


@pytest.mark.parametrize("looks", BODIES)
def test_hub_34_something_else_of_another_size(bench: Bench, looks: str) -> None:
    bench.hub.direct = True
    bench.hub.fault(where="hub", content=BODIES[looks], headers={"X-Linked-Size": None, "X-Linked-Etag": None})
    with pytest.raises(BlobError) as error:
        bench.run()
    assert error.value.reason == "size_differs"
    assert looks in str(error.value)
    assert bench.nothing_kept()


@pytest.mark.parametrize("looks", BODIES)
def test_hub_34_something_else_of_the_right_size(bench: Bench, looks: str) -> None:
    body = BODIES[looks].ljust(len(bench.data))
    bench.hub.fault(content=body, rate=200_000.0)
    with pytest.raises(BlobError) as error:
        bench.run()
    assert error.value.reason == "not_the_file"
    assert looks in str(error.value)
    assert bench.nothing_kept()
    assert bench.hub.bytes_sent("cdn") < len(body)


def test_hub_34_large_gguf_without_its_magic(hub: FakeHub, tmp_path: Path) -> None:
    bench = Bench(hub, tmp_path, b"XXXX" + noise(2_000_000)[4:])
    hub.rate = 500_000.0
    with pytest.raises(BlobError) as error:
        bench.run()
    assert error.value.reason == "not_the_file"
    assert bench.nothing_kept()


# ----- refusals -----


@pytest.mark.parametrize(
    ("status", "headers", "reason"),
    [
        (404, {"X-Error-Code": "RepoNotFound"}, "repo_not_found"),
        (404, {"X-Error-Code": "RevisionNotFound"}, "revision_not_found"),
        (404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, "entry_not_found"),
        (403, {"X-Error-Code": "GatedRepo"}, "gated"),
        (401, {"X-Error-Code": "GatedRepo"}, "gated"),
        (403, {"X-Error-Message": "Access to this resource is disabled."}, "disabled"),
        (401, {"X-Error-Message": "Invalid credentials in Authorization header"}, "bad_token"),
        (401, {}, "unauthorized"),
        (404, {}, "not_found"),
    ],
)
def test_hub_21_one_status_several_causes(
    bench: Bench, status: int, headers: dict[str, str | None], reason: str
) -> None:
    bench.leave_partial(bench.data[:1000])
    bench.hub.fault(where="hub", status=status, headers=headers)
    with pytest.raises(BlobError) as error:
        bench.run(token=TOKEN)
    assert error.value.reason == reason
    assert f"HTTP {status}" in str(error.value)
    assert len(bench.hub.requests()) == 1
    assert bench.partial.read_bytes() == bench.data[:1000]
    assert TOKEN not in str(error.value)


def test_hub_20_fresh_address_refused(bench: Bench) -> None:
    bench.hub.fault(status=403, body=b"Auth failed: SignatureError: invalid key pair id at https://x/y?Signature=abc")
    with pytest.raises(BlobError) as error:
        bench.run()
    assert error.value.reason == "cdn_forbidden"
    assert "invalid key pair id" in str(error.value)
    assert "HTTP 403 from 127.0.0.1" in str(error.value)
    assert "Signature=abc" not in str(error.value)
    assert len(bench.hub.requests("hub")) == 2


def test_hub_20_invalid_range_becomes_one_stream(bench: Bench) -> None:
    bench.hub.fault(status=403, body=b"403 Auth failed: invalid range", when=lambda r: not str(r.range).endswith("-"))
    bench.leave_partial(bench.data[:10])
    bench.run(PARTS)
    assert bench.right()
    assert bench.hub.requests("cdn", "GET")[-1].range is not None
    assert str(bench.hub.requests("cdn", "GET")[-1].range).endswith("-")


def test_hub_19_expired_address_is_renewed_once_for_all(bench: Bench) -> None:
    body = b"<Error><Code>AccessDenied</Code><Message>Access denied</Message></Error>"
    queries: list[str] = []

    def old_address(request: Request) -> bool:
        queries.append(request.query)
        return len(queries) > 3 and request.query == queries[0]

    bench.hub.fault(status=403, body=body, when=old_address)
    bench.run(PARTS, token=TOKEN)
    assert bench.right()
    assert len(bench.hub.requests("hub")) == 2
    assert all(r.header("Authorization") == f"Bearer {TOKEN}" for r in bench.hub.requests("hub"))
    assert sum(r.sent for r in bench.hub.requests("cdn")) == len(bench.data)


def test_hub_19_renewal_that_tells_of_another_file(bench: Bench) -> None:
    bench.hub.lifetime = 1.0
    bench.hub.rate = 100_000.0
    other: dict[str, str | None] = {"X-Linked-Etag": '"' + "e" * 64 + '"'}
    bench.hub.fault(where="hub", headers=other, when=lambda _r: len(bench.hub.requests("hub")) > 1)
    with pytest.raises(BlobError) as error:
        bench.run(PARTS)
    assert error.value.reason == "sha256_differs"
    assert bench.partial.exists()
    assert bench.sidecar.exists()


def test_hub_19_when_an_address_ends() -> None:
    signed = "https://cdn.test/x?X-Amz-Date=20250913T182215Z&X-Amz-Expires=3600"
    assert expiry(signed + "&Expires=1757791335") == 1757791335
    assert expiry(signed) == 1757791335
    assert expiry("https://cdn.test/x?a=b") is None


def test_hub_44_bad_request_is_final(bench: Bench) -> None:
    bench.hub.fault(status=400, body=b"object too large")
    with pytest.raises(BlobError) as error:
        bench.run()
    assert error.value.reason == "cdn_bad_request"
    assert "object too large" in str(error.value)
    assert "50 GB" in str(error.value)
    assert len(bench.hub.requests("cdn")) == 1


# ----- transport -----


def test_hub_26_early_end_is_noticed_and_continued(bench: Bench) -> None:
    size = len(bench.data)
    raw = f"HTTP/1.1 200 OK\r\nServer: truncator/0.0\r\nContent-Length: {size}\r\nConnection: close\r\n\r\n".encode()
    bench.hub.fault(raw=raw + bench.data[:600], times=1)
    bench.run()
    assert bench.right()
    assert [r.range for r in bench.hub.requests("cdn", "GET")] == [None, "bytes=600-"]


def test_hub_26_budget_refills_with_new_bytes(bench: Bench) -> None:
    bench.hub.fault(cut_after=40_000)
    bench.run(QUICK._replace(retries=1))
    assert bench.right()
    assert len(bench.hub.requests("cdn", "GET")) == 18


def test_hub_26_budget_ends_without_new_bytes(bench: Bench) -> None:
    bench.hub.fault(cut_at=5000)
    with pytest.raises(BlobError) as error:
        bench.run(QUICK._replace(retries=2))
    assert error.value.reason == "interrupted"
    assert f"stopped at 5000 of {len(bench.data)}" in str(error.value)
    assert bench.partial.stat().st_size == 5000


def test_hub_26_chunked_without_its_end(bench: Bench) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    bench.hub.fault(raw=head + b"400\r\n" + bench.data[:1024] + b"\r\n", times=1)
    bench.run()
    assert bench.right()


def test_hub_28_no_encoding_is_asked_for_or_undone(bench: Bench) -> None:
    bench.hub.fault(headers={"Content-Encoding": "gzip"}, times=2)
    bench.run()
    assert bench.right()
    assert all(r.header("Accept-Encoding") == "identity" for r in bench.hub.requests())


def test_hub_28_encoded_answers_never_become_the_file(bench: Bench) -> None:
    bench.hub.fault(headers={"Content-Encoding": "gzip"})
    with pytest.raises(BlobError) as error:
        bench.run(QUICK._replace(retries=1))
    assert "Content-Encoding gzip" in str(error.value)
    assert not bench.blob.exists()


def test_hub_29_dead_part_is_opened_anew(bench: Bench) -> None:
    bench.hub.fault(
        stall_after=1000, times=1, when=lambda r: r.range is not None and not r.range.startswith("bytes=0-")
    )
    ran = bench.run(PARTS._replace(part_silence=0.4))
    assert bench.right()
    assert ran.job.outcome is not None


def test_hub_29_silence_of_all_fails_and_keeps_what_came(bench: Bench) -> None:
    bench.hub.fault(stall_at=300_000)
    with pytest.raises(BlobError) as error:
        bench.run(QUICK._replace(silence=0.6, part_silence=0.2, retries=100))
    assert error.value.reason == "stalled"
    assert "stopped at 300000" in str(error.value)
    assert "127.0.0.1" in str(error.value)
    assert bench.partial.exists()
    assert bench.goes_on_from(300_000)


def test_hub_30_drip_on_one_connection(bench: Bench) -> None:
    bench.hub.fault(rate=6000.0, times=1)
    bench.run(PARTS._replace(window=0.5, floor=64 << 10))
    assert bench.right()


def test_hub_30_drip_on_all_is_a_stall(bench: Bench) -> None:
    bench.hub.fault(rate=6000.0)
    with pytest.raises(BlobError) as error:
        bench.run(QUICK._replace(window=0.6, floor=64 << 10))
    assert error.value.reason == "stalled"
    assert "kB/s over" in str(error.value)
    assert bench.partial.exists()


def test_hub_33_page_of_an_intermediary(bench: Bench) -> None:
    page: dict[str, str | None] = {"Content-Type": "text/html"}
    bench.hub.fault(where="hub", status=200, headers=page, body=b"<!DOCTYPE html>".ljust(5120))
    with pytest.raises(BlobError) as error:
        bench.run()
    assert error.value.reason == "html"
    assert "an intermediary answered" in str(error.value)
    assert bench.nothing_kept()


@pytest.mark.parametrize("status", [408, 500, 502, 503, 504])
@pytest.mark.parametrize("where", ["hub", "cdn"])
def test_hub_25_trouble_that_passes(bench: Bench, status: int, where: str) -> None:
    bench.hub.fault(where=where, status=status, times=2)
    bench.run()
    assert bench.right()


def test_hub_25_trouble_that_stays(bench: Bench) -> None:
    bench.hub.fault(status=504, body=b"Gateway Time-out")
    with pytest.raises(BlobError) as error:
        bench.run(QUICK._replace(retries=2))
    assert "HTTP 504 from 127.0.0.1" in str(error.value)
    assert len(bench.hub.requests("cdn")) == 3


def test_hub_25_retry_after_is_respected(bench: Bench) -> None:
    bench.hub.fault(status=503, headers={"Retry-After": "1"}, times=1)
    bench.run()
    assert bench.right()
    first, second = bench.hub.requests("cdn")[:2]
    assert second.time - first.time >= 1.0


def test_hub_25_waits_that_are_too_long_are_refused(bench: Bench) -> None:
    bench.hub.fault(where="hub", status=429, headers={"RateLimit": '"resolvers";r=0;t=4000'})
    with pytest.raises(BlobError) as error:
        bench.run()
    assert "HTTP 429" in str(error.value)
    assert len(bench.hub.requests()) == 1


# ----- disk and layout -----


def test_hub_38_corrupt_bytes(bench: Bench) -> None:
    bench.hub.fault(flip_at=5000)
    with pytest.raises(BlobError) as error:
        bench.run(PARTS)
    assert error.value.reason == "sha256_mismatch"
    details = error.value.details
    assert details["want"] == bench.sha
    assert details["got"] != bench.sha
    assert details["host"] == "127.0.0.1"
    assert {"bytes", "resumed", "parts"} <= set(details)
    assert bench.nothing_kept()
    # Parts came first; then once more from the start in one stream, and no third time.
    assert [r.range for r in bench.hub.requests("cdn", "GET")].count(None) == 1


def test_hub_38_parts_are_followed_by_one_full_stream(bench: Bench) -> None:
    bench.hub.fault(flip_at=5000, times=1, when=lambda r: r.range is not None and r.range.startswith("bytes=0-"))
    ran = bench.run(PARTS)
    assert bench.right()
    assert any("from the start over one connection" in note for note in ran.job.notes)


@pytest.mark.parametrize("file", ["f.gguf", "sub/dir/f.gguf"])
def test_hub_40_link_text(hub: FakeHub, tmp_path: Path, file: str) -> None:
    bench = Bench(hub, tmp_path, noise(2000), file=file)
    with contextlib.chdir(tmp_path):
        bench.run(cache="hub")
    assert os.readlink(bench.snapshot) == "../" * (2 + file.count("/")) + f"blobs/{bench.sha}"
    assert bench.right()


def test_hub_40_wrong_link_is_replaced_and_a_file_is_not(bench: Bench) -> None:
    bench.run()
    bench.snapshot.unlink()
    bench.snapshot.symlink_to("../../blobs/elsewhere")
    ran = bench.run()
    assert [step.do for step in ran.steps] == ["link"]
    assert bench.right()
    bench.snapshot.unlink()
    bench.snapshot.write_text("mine")
    with pytest.raises(BlobError) as error:
        bench.run()
    assert error.value.reason == "snapshot_is_file"
    assert bench.snapshot.read_text() == "mine"


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_hub_40_no_links(bench: Bench, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(_target: str, _name: str) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "symlink", refuse)
    with pytest.raises(BlobError) as error:
        bench.run()
    assert error.value.reason == "no_links"
    assert f"errno {number}" in str(error.value)


@pytest.mark.parametrize(
    "file", ["../x", "/etc/passwd", "a/../../b", "a\\..\\b", "", ".", "a//b", "snapshots/../x", "a\nb"]
)
def test_hub_42_file_names_that_leave_the_cache(bench: Bench, file: str) -> None:
    bench.file = file
    with pytest.raises(BlobError) as error:
        bench.job()
    assert error.value.reason == "bad_option"
    assert bench.hub.requests() == []


@pytest.mark.parametrize("revision", ["main", COMMIT + "\n", "ABCDEF", COMMIT.upper(), ""])
def test_hub_42_revisions(bench: Bench, revision: str) -> None:
    job = bench.job()
    with pytest.raises(BlobError, match="40 lower-case"):
        type(job)(job.wanted._replace(revision=revision), job.options, job.tools)


@pytest.mark.parametrize("repo", ["a--b/c", "a/b--c", "a", "a/b/c", "../b", "a/..", "", "a/", "a/.b"])
def test_hub_42_repositories(bench: Bench, repo: str) -> None:
    job = bench.job()
    with pytest.raises(BlobError, match="org/name"):
        type(job)(job.wanted._replace(repo=repo), job.options, job.tools)


def test_hub_46_names_of_other_tools_are_left_alone(bench: Bench) -> None:
    bench.blob.parent.mkdir(parents=True)
    foreign = [bench.blob.with_name(bench.sha + end) for end in (".downloadInProgress", ".0a1b2c3d.incomplete")]
    for path in foreign:
        path.write_bytes(b"theirs")
    ran = bench.run()
    assert bench.blob.read_bytes() == bench.data
    assert all(path.read_bytes() == b"theirs" for path in foreign)
    assert any(".downloadInProgress" in note for note in ran.job.notes)
    assert not (bench.blob.parents[1] / "refs").exists()


def test_hub_46_marker_dies_with_the_time(bench: Bench) -> None:
    bench.run()
    assert not bench.run().changed
    os.utime(bench.blob, ns=(1, 1))
    ran = bench.run()
    assert ran.job.hashed_bytes == len(bench.data)
    assert bench.hub.bytes_sent("cdn") == len(bench.data)


@pytest.mark.parametrize("token", ["hunter2\r", "hunter2\nX: y", "hunter2\u00e9"])
def test_a_token_that_no_header_may_hold_is_refused_without_showing_it(token: str) -> None:
    session = Session("test", 1, {})
    with pytest.raises(BlobError, match="the token holds a line break") as error:
        session.request("GET", "http://127.0.0.1:9/", {"Authorization": f"Bearer {token}"})
    assert error.value.reason == "bad_option"
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize("url", ["http://u:hunter2@hub:x/a", "http://hub:99999/?sig=hunter2", "http://u:hunter2@["])
def test_an_address_that_cannot_be_read_is_refused_without_its_secrets(url: str) -> None:
    with pytest.raises(BlobError, match="cannot be read") as error:
        origin(url)
    assert "hunter2" not in str(error.value)


def test_a_proxy_that_cannot_be_read_is_refused_without_its_password() -> None:
    session = Session("test", 1, {"http_proxy": "http://u:hunter2@proxy:x"})
    with pytest.raises(BlobError, match="http_proxy names a host or a port that cannot be read") as error:
        session.request("GET", "http://hub.example/", {})
    assert "hunter2" not in str(error.value)

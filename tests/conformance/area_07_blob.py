# SPDX-License-Identifier: Apache-2.0
"""Area 7: the cache, addresses, downloads, markers and the CACHED column, against a Hub for tests."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any

from ansible_collections.tensorless.fleet.plugins.module_utils import _plan_paths
from ansible_collections.tensorless.fleet.plugins.module_utils._blob import (
    blob_paths,
    cached_state,
    marker_path,
    state_dir,
)
from ansible_collections.tensorless.fleet.plugins.module_utils._blob_parts import Limits
from ansible_collections.tensorless.fleet.plugins.module_utils._hub import Wanted
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

from tests.conformance.frame import Env
from tests.hub import FakeHub, Fault, Request
from tests.hub.jobs import make_job

AREA = "blob_cache"
SCALE = 100.0  # the documented two minutes pass in 1.2 seconds
LIMITS = Limits(retries=3, backoff=0.01, backoff_max=0.02, silence=1.2, part_silence=5.0, sync_every=0.2, tick=0.02)


def run_case(case: dict[str, Any], env: Env) -> dict[str, Any]:
    given = case["given"]
    return {"paths": _paths, "url": _url, "status": _status, "download": _download, "verify": _verify}[
        given["operation"]
    ](given, env)


def _model(given: dict[str, Any], env: Env) -> dict[str, Any]:
    """The blob of a case with the names of a recipe's [model] table, and its bytes where the case has them."""
    if "blob" not in given:
        model: dict[str, Any] = env.recipe(given)["model"]
        return model
    blob = dict(given["blob"])
    blob["bytes"] = (str(blob["body"]["repeat"]) * int(blob["body"]["times"])).encode()
    return blob


def _environ(given: dict[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in (given.get("env") or {}).items()}


def _paths(given: dict[str, Any], env: Env) -> dict[str, Any]:
    model = _model(given, env)
    environ = _environ(given)
    try:
        cache = _plan_paths.hub_cache(given.get("cache"), environ, given["home"], given["cwd"])
    except Refusal as error:
        return {"failed": True, "exit_code": error.rc, "message": error.message}
    paths = blob_paths(cache, model["hf_repo"], model["revision"], model["file"], model["sha256"])
    return {
        "failed": False,
        "cache_dir": cache,
        "blob": paths.blob,
        "partial": paths.partial,
        "snapshot": paths.snapshot,
        "snapshot_link_target": paths.link_text,
        "marker": marker_path(state_dir(environ, given["home"]), model["sha256"]),
        "container_path": "/models/" + model["file"].rpartition("/")[2],
    }


def _url(given: dict[str, Any], env: Env) -> dict[str, Any]:
    model = _model(given, env)
    endpoint = _environ(given).get("HF_ENDPOINT", "")
    return {
        "failed": False,
        "url": _plan_paths.resolve_url(endpoint, model["hf_repo"], model["revision"], model["file"]),
    }


def _status(given: dict[str, Any], env: Env) -> dict[str, Any]:
    scene = _Scene(given, env)
    state = cached_state(scene.paths, scene.model["size_bytes"])
    return {"failed": False, "cached": state, "cached_not": state}


class Kept:
    """What the checks need and no user sees."""

    def __init__(self, scene: _Scene, log: list[Request]) -> None:
        self.scene = scene
        self.log = log

    def __str__(self) -> str:
        return ""


class _Scene:
    """The files of a case under the case's own directory, at the paths that it names."""

    def __init__(self, given: dict[str, Any], env: Env) -> None:
        self.given = given
        self.root = env.tmp
        self.model = _model(given, env)
        self.environ = _environ(given)
        self.cache = self.inside(given["cache"])
        self.state = str(env.tmp / "state")
        model = self.model
        self.paths = blob_paths(self.cache, model["hf_repo"], model["revision"], model["file"], model["sha256"])
        self.marker = marker_path(self.state, model["sha256"])
        self.body: bytes = model.get("bytes", b"")
        self._files()

    def inside(self, path: str) -> str:
        return str(self.root) + path

    def outside(self, value: Any) -> Any:
        """The same with the case's paths again."""
        if isinstance(value, dict):
            return {key: self.outside(item) for key, item in value.items()}
        return value.replace(str(self.root), "") if isinstance(value, str) else value

    def _write(self, path: str, data: bytes) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(data)

    def _files(self) -> None:
        given = self.given
        for other in given.get("other_blobs", []):
            self._write(self.inside(other), b"another file")
        file = given.get("file")
        if given.get("cached") == "valid":
            file = {"size": len(self.body), "content": "good"}
        if file:
            data = self.body[: file["size"]].ljust(file["size"], b"+")
            if file["content"] == "bad":
                data = bytes([data[0] ^ 1]) + data[1:]
            self._write(self.paths.blob, data)
            if "mtime_ns" in file:
                os.utime(self.paths.blob, ns=(file["mtime_ns"], file["mtime_ns"]))
        partial = given.get("partial_bytes")
        if partial is not None:
            data = (self.body * 2)[:partial]
            if given.get("partial_corrupt"):
                data = bytes(byte ^ 1 for byte in data)
            self._write(self.paths.partial, data)
        if given.get("snapshot_present"):
            Path(self.paths.snapshot).parent.mkdir(parents=True, exist_ok=True)
            os.symlink(self.paths.link_text, self.paths.snapshot)
        self._marker()

    def _marker(self) -> None:
        marker = self.given.get("marker")
        if self.given.get("marker_valid"):
            info = os.stat(self.paths.blob)
            marker = {
                "sha256": self.model["sha256"],
                "size": info.st_size,
                "mtime_ns": info.st_mtime_ns,
                "path": self.paths.blob,
            }
        elif isinstance(marker, dict) and "path" in marker:
            marker = {**marker, "path": self.inside(marker["path"])}
        if marker is not None:
            self._write(self.marker, (marker if isinstance(marker, str) else json.dumps(marker)).encode())


def _hub(scene: _Scene, env: Env) -> FakeHub:
    """The case's server. Like the launcher's tests it serves the bytes itself, without a redirect."""
    server = scene.given.get("server") or {}
    hub = FakeHub()
    hub.direct = True
    hub.start()
    env.on_close(hub.stop)
    if scene.body:
        model = scene.model
        hub.add(model["hf_repo"], model["revision"], model["file"], scene.body, sha256=model["sha256"])
    fault = Fault(where="hub")
    if "status" in server:
        fault.status = server["status"]
    if "body" in server:
        fault.content = str(server["body"]).encode()
    if "cut_after_bytes" in server:
        fault.cut_at = server["cut_after_bytes"]
    if "stall_after_bytes" in server:
        fault.stall_at = server["stall_after_bytes"]
        fault.stall_seconds = server.get("stall_seconds", 130) / SCALE
    if server.get("ranges") is False:
        fault.ignore_range = True
    if server.get("observe_during_download"):
        fault.rate = 20000.0
    hub.faults.append(fault)
    return hub


def _run(scene: _Scene, hub: FakeHub, **options: Any) -> dict[str, Any]:
    model = scene.model
    wanted = Wanted(model["hf_repo"], model["revision"], model["file"], model["sha256"], model["size_bytes"])
    free = scene.given.get("free_bytes")
    more = {} if free is None else {"free": lambda _path: int(free)}
    got: dict[str, Any] = {"failed": False, "message": ""}
    token = scene.environ.get("HF_TOKEN")
    reports: list[dict[str, Any]] = []
    job = make_job(
        scene.root,
        wanted,
        hub.url,
        LIMITS,
        cache=scene.cache,
        state=scene.state,
        token=token,
        report=reports.append,
        **more,
        **options,
    )
    try:
        seen = job.observe()
        done = job.apply(seen, job.plan(seen))
        got |= {"changed": bool(done), "actions": [step.text for step in done]}
    except Refusal as error:
        got |= {"failed": True, "exit_code": error.rc, "message": str(error), "details": getattr(error, "details", {})}
    marker = Path(scene.marker)
    before = scene.given.get("marker") is not None or scene.given.get("marker_valid")
    written = json.loads(marker.read_text()) if marker.exists() and (not before or job.hashed_bytes) else False
    link = os.readlink(scene.paths.snapshot) if os.path.islink(scene.paths.snapshot) else None
    got |= {
        "hashed": job.hashed_bytes > 0,
        "verified": job.verified,
        "marker_written": scene.outside(written),
        "requests": len(hub.requests()),
        "notes": job.notes,
        "link": link,
        "_reports": [{k: v for k, v in report.items() if k != "time"} for report in reports],
        "_kept": Kept(scene, hub.requests()),
    }
    return got


def _download(given: dict[str, Any], env: Env) -> dict[str, Any]:
    scene = _Scene(given, env)
    hub = _hub(scene, env)
    seen: set[str] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.005):
            for path in (scene.paths.blob, scene.paths.partial, scene.paths.snapshot):
                # The final names count only while bytes are still to come.
                if os.path.lexists(path) and hub.bytes_sent() < len(scene.body):
                    seen.add(str(scene.outside(path)))

    watcher = threading.Thread(target=look, daemon=True)
    if (given.get("server") or {}).get("observe_during_download"):
        watcher.start()
    try:
        return _run(scene, hub) | {"_seen": seen}
    finally:
        over.set()


def _verify(given: dict[str, Any], env: Env) -> dict[str, Any]:
    scene = _Scene(given, env)
    return _run(scene, _hub(scene, env), download=False)


# ----- what is compared in another way than by equality -----


def _there(paths: list[str], got: dict[str, Any], want: bool) -> str | None:
    wrong = [p for p in paths if os.path.lexists(got["_kept"].scene.inside(p)) is not want]
    return f"expected {'' if want else 'not '}to be there: {wrong}" if wrong else None


def _sizes(expected: dict[str, int], got: dict[str, Any], _case: dict[str, Any]) -> str | None:
    sizes = {}
    for path in expected:
        place = got["_kept"].scene.inside(path)
        sizes[path] = os.path.getsize(place) if os.path.exists(place) else None
    return None if sizes == expected else f"sizes: expected {expected}, got {sizes}"


def _headers(expected: dict[str, str], got: dict[str, Any], _case: dict[str, Any]) -> str | None:
    log: list[Request] = got["_kept"].log
    missing = {k: v for k, v in expected.items() if not any(r.header(k) == v for r in log)}
    return f"no request had {missing}: {[r.headers for r in log]}" if missing else None


def _no_headers(expected: list[str], got: dict[str, Any], _case: dict[str, Any]) -> str | None:
    found = [k for k in expected if any(r.header(k) is not None for r in got["_kept"].log)]
    return f"requests had {found}" if found else None


def _sha(expected: str, got: dict[str, Any], _case: dict[str, Any]) -> str | None:
    blob = Path(got["_kept"].scene.paths.blob)
    real = hashlib.sha256(blob.read_bytes()).hexdigest() if blob.exists() else None
    return None if real == expected else f"sha256 of the blob: expected {expected}, got {real}"


def _links(expected: Any, got: dict[str, Any], _case: dict[str, Any]) -> str | None:
    if isinstance(expected, dict):
        real = {
            p: os.readlink(got["_kept"].scene.inside(p))
            for p in expected
            if os.path.islink(got["_kept"].scene.inside(p))
        }
        return None if real == expected else f"links: expected {expected}, got {real}"
    return None if got["link"] == expected else f"link: expected {expected!r}, got {got['link']!r}"


CHECKS = {
    "exists": lambda want, got, _case: _there(want, got, True),
    "absent": lambda want, got, _case: _there(want, got, False),
    "sizes": _sizes,
    "link": _links,
    "request_headers": _headers,
    "request_headers_absent": _no_headers,
    "sha256_of_blob": _sha,
    "cached_not": lambda want, got, _case: None if got["cached"] != want else f"cached is {want}",
    "never_seen_during_download": lambda want, got, _case: (
        f"seen: {sorted(got['_seen'])}" if set(want) & got["_seen"] else None
    ),
    "seen_during_download": lambda want, got, _case: (
        None if set(want) <= got["_seen"] else f"expected {want}, seen {sorted(got['_seen'])}"
    ),
}

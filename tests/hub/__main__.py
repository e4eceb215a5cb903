# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.hub`: the Hub and its CDN as a process of their own, until SIGTERM."""

from __future__ import annotations

import argparse
import json
import signal
import threading
from pathlib import Path

from tests.hub.server import FakeHub


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hub", description=__doc__)
    parser.add_argument("--bind", default="127.0.0.1", help="address to listen on, also the one in redirects")
    parser.add_argument("--port", type=int, default=8090, help="port of the Hub")
    parser.add_argument("--cdn-port", type=int, default=8091, help="port of the CDN")
    parser.add_argument(
        "--files",
        type=Path,
        required=True,
        help="folder <org>/<repo>/<revision>/<file>, or a JSON list of {repo, revision, file, path, sha256?, gated?}",
    )
    parser.add_argument(
        "--token", action="append", default=[], help="a token that is accepted (any, when none is given)"
    )
    parser.add_argument("--gated", action="append", default=[], metavar="REPO", help="a repository that needs a token")
    parser.add_argument("--lifetime", type=float, default=3600.0, help="seconds that a signed address lives")
    parser.add_argument("--rate", type=float, help="bytes a second for one connection")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds before each answer")
    parser.add_argument("--cdn-base", help="address of another CDN to redirect to")
    parser.add_argument("--log", help="byte log, one JSON object a line")
    args = parser.parse_args()
    hub = FakeHub(
        bind=args.bind,
        port=args.port,
        cdn_port=args.cdn_port,
        tokens=args.token,
        lifetime=args.lifetime,
        rate=args.rate,
        delay=args.delay,
        cdn_base=args.cdn_base,
        log_path=args.log,
    )
    if args.files.is_dir():
        hub.add_tree(args.files)
    else:
        for item in json.loads(args.files.read_text(encoding="utf-8")):
            hub.add(
                item["repo"],
                item["revision"],
                item["file"],
                Path(item["path"]),
                sha256=item.get("sha256"),
                gated=bool(item.get("gated")),
            )
    hub.gated.update(repo.lower() for repo in args.gated)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    hub.start()
    print(f"hub {hub.url} cdn {hub.cdn_url} files {len(hub.files)}", flush=True)
    stop.wait()
    hub.stop()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

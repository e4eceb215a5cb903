# SPDX-License-Identifier: GPL-3.0-or-later
"""Writing the report's files on the controller. Private to the collection: it may change at any time."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils import (
    _report,
    _report_receipt,
    _report_share,
    _report_text,
)
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal
from ansible_collections.tensorless.fleet.plugins.plugin_utils import _report_html

FORMATS = ("json", "markdown", "html", "csv", "prometheus", "log", "receipt", "share")
USUAL = FORMATS[:-2]
NAMES = {
    "json": "report.json",
    "markdown": "report.md",
    "html": "report.html",
    "csv": "report.csv",
    "prometheus": "report.prom",
}


def previous(dest: str) -> Optional[dict[str, Any]]:
    """The report that is there now, if it is one of ours."""
    try:
        with open(os.path.join(dest, NAMES["json"]), encoding="utf-8") as handle:
            found = json.load(handle)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("schema") == _report.SCHEMA else None


def _without_time(document: Optional[Mapping[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in (document or {}).items() if key != "generated_at"}


def render(document: Mapping[str, Any], formats: Sequence[str], title: str) -> dict[str, str]:
    """File name -> text."""
    makers = {
        "json": lambda: json.dumps(document, indent=1, sort_keys=True) + "\n",
        "markdown": lambda: _report_text.to_markdown(document, title),
        "html": lambda: _report_html.render(document, title),
        "csv": lambda: _report_text.to_csv(document),
        "prometheus": lambda: _report_text.to_prometheus(document),
    }
    files = {NAMES[name]: makers[name]() for name in formats if name in makers}
    if "receipt" in formats:
        files.update(_report_receipt.receipts(document))
    if "share" in formats:
        files.update(_report_share.bundle(document))
    return files


def write(
    hosts: Sequence[Mapping[str, Any]],
    dest: str,
    formats: Sequence[str] = USUAL,
    title: str = "Fleet report",
    query: Optional[str] = None,
    share: bool = False,
    check_mode: bool = False,
    record: Sequence[Mapping[str, Any]] = (),
    now: Optional[str] = None,
) -> dict[str, Any]:
    """Build the document and bring the files to it. Nothing is rewritten when nothing but the time is new."""
    search = _query(query)
    before = previous(dest)
    stamp = now or time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    document = json.loads(json.dumps(_report.build(hosts, stamp, before, collection_version(), record)))
    if share:
        document = _report_share.redact(document)
    wrong = _report.problems(document)
    if wrong:
        raise Refusal("the report is not complete: " + "; ".join(wrong))
    if before is not None and _without_time(before) == _without_time(document):
        document["generated_at"] = before["generated_at"]
    files = render(document, formats, title)
    due = {name: text for name, text in files.items() if _read(os.path.join(dest, name)) != text}
    summary = _report_text.summary(document)
    if due and "log" in formats:
        due.update(_log_entry(dest, document, summary, title))
    if due and not check_mode:
        os.makedirs(dest, mode=0o755, exist_ok=True)
        for name, text in due.items():
            _replace(os.path.join(dest, name), text)
    answer: dict[str, Any] = {
        "changed": bool(due),
        "dest": os.path.abspath(dest),
        "files": sorted(os.path.join(os.path.abspath(dest), name) for name in files),
        "summary": summary,
        "diff": {
            "before_header": dest,
            "after_header": dest,
            "before": "\n".join(_report_text.summary(before)) + "\n" if before else "",
            "after": "\n".join(summary) + "\n",
        },
    }
    if search is not None:
        answer["query_result"] = search(document)
    return answer


def _query(query: Optional[str]) -> Any:
    """A JMESPath search, compiled before anything is written."""
    if not query:
        return None
    try:
        import jmespath
    except ImportError:
        raise Refusal("`query` needs the Python package jmespath on the controller: pip install jmespath") from None
    try:
        return jmespath.compile(query).search
    except jmespath.exceptions.JMESPathError as fault:
        raise Refusal(f"the query {query!r} is no JMESPath expression: {fault}") from None


def _log_entry(dest: str, document: Mapping[str, Any], summary: Sequence[str], title: str) -> dict[str, str]:
    """One dated file for this state of the fleet, and its line in the index."""
    at = str(document["generated_at"])
    name = at.replace(":", "") + ".md"
    line = f"* [{at}]({name}): {_report_text.markdown(summary[0])}\n"
    index = (
        _read(os.path.join(dest, "log", "index.md")) or f"# {_report_text.markdown(title)}: what was measured when\n\n"
    )
    return {
        os.path.join("log", name): _report_text.to_markdown(document, title),
        os.path.join("log", "index.md"): index if line in index else index + line,
    }


def _read(path: str) -> Optional[str]:
    try:
        with open(path, encoding="utf-8") as handle:
            return handle.read()
    except (OSError, UnicodeDecodeError):
        return None


def _replace(path: str, text: str) -> None:
    """A reader sees the old file or the new one, never half of one."""
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    handle, draft = tempfile.mkstemp(prefix=".report-", dir=os.path.dirname(path))
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
        os.chmod(draft, 0o644)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise


def collection_version() -> str:
    """The version of the collection that this file belongs to; empty in a checkout."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    try:
        with open(os.path.join(root, "MANIFEST.json"), encoding="utf-8") as handle:
            return str(json.load(handle)["collection_info"]["version"])
    except (OSError, ValueError, KeyError):
        return ""

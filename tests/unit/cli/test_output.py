# SPDX-License-Identifier: Apache-2.0
"""Output that is closed, full, or in a locale without the letters: one line at most, and no work that nobody sees."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

from tensorless_fleet import _remote, _usage, _view
from tensorless_fleet.errors import Interrupted
from tensorless_fleet.results import Event, Result


@pytest.mark.parametrize(
    ("words", "where", "status", "said"),
    [
        ("help", ">&-", 0, ""),
        ("nosuch", ">&- 2>&-", 2, ""),
        ("models --card p100", "> /dev/full", 1, "cannot write the output: No space left on device"),
        ("help", "| true", None, ""),
        ("info pn3\u00e9 --card p100", "", 1, 'no recipe for "pn3\\xe9"'),
    ],
)
def test_output_that_goes_nowhere(words, where, status, said):
    command = f"{shlex.join([sys.executable, '-m', 'tensorless_fleet'])} {words} {where}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=False, env={"PYTHONIOENCODING": "ascii"}
    )
    assert status in (None, done.returncode) and said in done.stderr, done
    assert "Traceback" not in done.stderr and "internal fault" not in done.stderr and len(done.stderr.splitlines()) < 3


class Gone(_view.View):
    def event(self, event: Event) -> None:
        raise BrokenPipeError


class Work:
    """A run that goes on until it is cancelled."""

    def __init__(self) -> None:
        self.cancelled = False

    def events(self):
        yield Event("begin", 0.0)

    def cancel(self) -> None:
        self.cancelled = True

    def result(self) -> Result:
        assert self.cancelled
        raise Interrupted("run was interrupted", Result("run", interrupted=True))


def test_a_run_whose_reader_went_away_is_ended(monkeypatch, capsys):
    monkeypatch.setattr(_view, "choose", lambda *_words: Gone())
    run = Work()
    with pytest.raises(BrokenPipeError):
        _remote.work(run, _usage.parse(["-i", "x", "run", "m"]))  # type: ignore[arg-type]
    assert run.cancelled and "so run is ended" in capsys.readouterr().err


def test_an_interrupt_before_any_host_was_asked_says_so(capsys):
    run = Work()
    run.cancel()
    assert _remote.work(run, _usage.parse(["-i", "x", "run", "m"])).interrupted  # type: ignore[arg-type]
    assert capsys.readouterr().err == "tensorless: interrupted; no host was touched\n"

# SPDX-License-Identifier: Apache-2.0
"""The completion scripts are read by the shells themselves, and bash's gives the right words."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tensorless_fleet import _help


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_accepts_the_script(shell, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed here")
    path = tmp_path / "completion"
    path.write_text(_help.completion(shell))
    done = subprocess.run([shell, "-n", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def complete(*words: str) -> list[str]:
    script = _help.completion("bash") + (
        f"COMP_WORDS=(tensorless {' '.join(words)} ''); COMP_CWORD={len(words) + 1}; "
        'COMP_WORDS[COMP_CWORD]="$CURRENT"; _tensorless; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, env={"CURRENT": "--d"})
    return done.stdout.split()


def test_bash_completes_the_flags_of_a_command():
    assert complete("run", "pn3") == ["--dry-run", "--detach"]
    assert complete("pull", "pn3") == ["--dry-run"]
    assert complete("-i", "x", "serve") == ["--dry-run", "--detach"]

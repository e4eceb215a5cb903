#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes .venv with exactly the pinned tools, and the project itself in editable form.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || echo none)
case "$version" in
  3.1[1-9]) ;;
  *) echo "setup: Python 3.11 or newer is needed, found: $version. Install python3 (Debian 12: apt-get install python3 python3-venv) or set PYTHON=/path/to/python3.11." >&2; exit 1 ;;
esac
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -q && apt-get install -y -q --no-install-recommends python3-venv
  else
    echo "setup: the Python module venv is missing. Run as root: apt-get install python3-venv" >&2; exit 1
  fi
fi
[ -x .venv/bin/python ] || "$python" -m venv .venv
.venv/bin/python -m pip install -q -q --disable-pip-version-check -r requirements/dev.txt
.venv/bin/python -m pip install -q -q --disable-pip-version-check --no-deps --no-build-isolation -e .

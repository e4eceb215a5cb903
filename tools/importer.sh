#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# galaxy-importer on the built tarball, in an environment of its own: it pins other versions of the linters.
set -eu
cd "$(dirname "$0")/.."
venv=.build/importer-venv
stamp=$venv/$(sha256sum requirements/importer.txt | cut -c1-16)
if [ ! -e "$stamp" ]; then
  rm -rf $venv
  "${PYTHON:-python3}" -m venv $venv
  $venv/bin/python -m pip install -q -q --disable-pip-version-check -r requirements/importer.txt
  touch "$stamp"
fi
cat >.build/galaxy-importer.cfg <<'CFG'
[galaxy-importer]
CHECK_REQUIRED_TAGS = True
REQUIRE_V1_OR_GREATER = False
RUN_ANSIBLE_DOC = True
RUN_ANSIBLE_LINT = False
RUN_ANSIBLE_TEST = False
CFG
log=.build/galaxy-importer.log
root=$PWD
tarball=$(ls -t "$root"/dist/tensorless-fleet-*.tar.gz | head -n 1)
# It leaves its result in the folder that it runs in.
(cd .build && GALAXY_IMPORTER_CONFIG=$root/.build/galaxy-importer.cfg PATH="$root/$venv/bin:$PATH" \
  "$root/$venv/bin/python" -m galaxy_importer.main "$tarball") >$log 2>&1 || { cat $log; exit 1; }
# It ends with status 0 although it logs errors; any of them fails the check.
if grep -E '^(ERROR|CRITICAL)' $log; then exit 1; fi
tail -n 3 $log

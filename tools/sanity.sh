#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# ansible-test sanity on the built collection. It must lie under ansible_collections/tensorless/fleet, so a copy does.
set -eu
cd "$(dirname "$0")/.."
copy=.build/sanity/ansible_collections/tensorless/fleet
rm -rf .build/sanity && mkdir -p "$copy"
tar -xzf "$(ls -t dist/tensorless-fleet-*.tar.gz | head -n 1)" -C "$copy"
mkdir -p "$copy/tests" && cp -r tests/sanity "$copy/tests/"
git init -q "$copy"  # or ansible-test asks the repository around it, which ignores this folder
python=$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')

# Its environments begin with a bootstrap script from a host of the Ansible project. Only where that cannot be had,
# our own takes its place.
version=24.2  # what ansible-core 2.19 wants
name=get_pip_$(echo $version | tr . _).py
cache=$HOME/.ansible/test/cache
if [ ! -e "$cache/$name" ]; then
  mkdir -p "$cache"
  url=https://ci-files.testing.ansible.com/ansible-test/get-pip-$version.py
  .venv/bin/python -c 'import sys, requests; r = requests.get(sys.argv[1], timeout=20); r.raise_for_status()
open(sys.argv[2], "wb").write(r.content)' "$url" "$cache/$name.part" 2>/dev/null ||
    { echo "sanity: $url cannot be had; using tools/get_pip.py" >&2; cp tools/get_pip.py "$cache/$name.part"; }
  mv "$cache/$name.part" "$cache/$name"
fi
cd "$copy"
exec "$OLDPWD/.venv/bin/ansible-test" sanity --color no --python "$python" --requirements "$@"

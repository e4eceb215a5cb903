#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs the Debian packages that the test fleet needs. Does nothing where they are there already.
set -eu
packages="podman crun netavark aardvark-dns iptables nftables uidmap catatonit mmdebstrap skopeo iproute2
          docker-registry openssh-client gnupg git"
[ "${1:-}" != tests ] || packages="$packages chromium tmux"
missing=""
for package in $packages; do
  state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
  [ "$state" = installed ] || missing="$missing $package"
done
[ -n "$missing" ] || exit 0
if ! command -v apt-get >/dev/null; then
  echo "prerequisites: Debian 12 or newer is needed (no apt-get here). Missing:$missing" >&2; exit 1
fi
root=""
if [ "$(id -u)" != 0 ]; then
  if ! sudo -n true 2>/dev/null; then
    echo "prerequisites: missing packages. Run as root: apt-get install --no-install-recommends$missing" >&2; exit 1
  fi
  root="sudo -n env DEBIAN_FRONTEND=noninteractive"
fi
echo "prerequisites: installing$missing" >&2
# Nothing of this is to run as a service of this machine: the fleet starts what it needs itself.
policy=/usr/sbin/policy-rc.d
made=""
if [ ! -e $policy ]; then
  made=yes
  printf '#!/bin/sh\nexit 101\n' | $root tee $policy >/dev/null
  $root chmod 755 $policy
fi
trap '[ -z "$made" ] || $root rm -f $policy' EXIT
export DEBIAN_FRONTEND=noninteractive
$root apt-get update -q
# shellcheck disable=SC2086
$root apt-get install -y -q --no-install-recommends $missing
case "$missing" in
  *docker-registry*) [ ! -d /run/systemd/system ] || $root systemctl disable -q docker-registry.service || true ;;
esac

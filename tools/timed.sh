#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs make targets one after the other, and says at the end how long each took.
set -eu
begin=$(date +%s)
table=""
for target in "$@"; do
  start=$(date +%s)
  echo "=== make $target"
  make --no-print-directory "$target" || { echo "=== make $target failed; it stopped make test after $(($(date +%s) - begin)) s" >&2; exit 1; }
  table="$table$(printf '%6d s  %s' $(($(date +%s) - start)) "$target")
"
done
printf '=== all passed\n%s%6d s  together\n' "$table" $(($(date +%s) - begin))

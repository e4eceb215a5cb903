#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs two commands side by side and shows what each said when it ends; fails when one of them did.
# Most of a fleet test is waiting, so two cores carry two of them.
set -u
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
sh -c "$1" >"$folder/1" 2>&1 & first=$!
sh -c "$2" >"$folder/2" 2>&1 & second=$!
status=0
wait $first || status=$?
cat "$folder/1"
wait $second || status=$?
cat "$folder/2"
exit $status

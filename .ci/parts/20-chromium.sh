#!/usr/bin/env bash
# the browser tests of the HTML report run in Debian's Chromium
set -euo pipefail
[ "$1" = up ] || exit 0
grep -rqs 'mark\.browser' tests/ || exit 0
command -v chromium >/dev/null && exit 0

sudo=""
[ "$(id -u)" = 0 ] || sudo=sudo
$sudo apt-get update -q
DEBIAN_FRONTEND=noninteractive $sudo apt-get install -q -y --no-install-recommends chromium

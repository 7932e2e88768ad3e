#!/usr/bin/env bash
# a container registry from Debian, which the tests of pinned base images start on the loopback
set -euo pipefail
[ "$1" = up ] || exit 0
command -v docker-registry >/dev/null && exit 0

sudo=""
[ "$(id -u)" = 0 ] || sudo=sudo
$sudo apt-get update -q
DEBIAN_FRONTEND=noninteractive $sudo apt-get install -q -y --no-install-recommends docker-registry openssl

#!/bin/sh
# A Debian base image for a machine without a container registry, made with debootstrap from apt's own mirror.
#   docker/offline-base.sh [--rebuild] [SUITE]     makes toto-compat-base:<suite> (default: this machine's suite)
# Python, its headers and a C++ compiler are in it, so that no build on top of it needs a network.
# The image is for this machine: Debian packages of today, never pushed anywhere.
set -eu

rebuild=no
if [ "${1:-}" = --rebuild ]; then
    rebuild=yes
    shift
fi
suite="${1:-$(. /etc/os-release && echo "${VERSION_CODENAME:-bookworm}")}"
tag="toto-compat-base:$suite"
packages="ca-certificates,python3,python3-dev,python3-venv,python3-pip,g++"

if [ "$rebuild" = no ] && docker image inspect "$tag" >/dev/null 2>&1; then
    echo "$tag is there already"
    exit 0
fi
[ "$(id -u)" = 0 ] || { echo "error: debootstrap needs root: sudo $0" >&2; exit 1; }
if ! command -v debootstrap >/dev/null 2>&1; then
    apt-get update -q
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends debootstrap
fi

# deb822 files say 'URIs: <mirror>', the old one-line files 'deb [options] <mirror> <suite> ...'.
mirror=$(
    {
        sed -n 's/^URIs: *//p' /etc/apt/sources.list.d/*.sources 2>/dev/null || true
        sed -n 's/^deb \(\[[^]]*\] \)\{0,1\}\([^ ]*\) .*/\2/p' /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null || true
    } | grep '/debian/\{0,1\}$' | head -n 1
)
[ -n "$mirror" ] || { echo "error: no Debian mirror in apt's sources; set one there first" >&2; exit 1; }

work=$(mktemp -d "${TMPDIR:-/var/tmp}/toto-compat-base.XXXXXX")
trap 'rm -rf "$work"' EXIT INT TERM

if ! debootstrap --variant=minbase --include="$packages" "$suite" "$work/rootfs" "$mirror" >"$work/log" 2>&1; then
    echo "error: debootstrap failed; its last lines:" >&2
    tail -n 15 "$work/log" >&2
    exit 1
fi
python=$(basename "$(readlink -f "$work/rootfs/usr/bin/python3")" | sed 's/^python//')
tar -C "$work/rootfs" -cf - \
    --exclude='./dev/*' --exclude='./proc/*' --exclude='./sys/*' \
    --exclude='./var/cache/apt/*' --exclude='./var/lib/apt/lists/*' \
    --exclude='./usr/share/doc/*' --exclude='./usr/share/man/*' --exclude='./usr/share/locale/*' \
    . | docker import -c 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8' \
    -c "LABEL toto-compat=base toto-compat.python=$python" -c 'CMD ["/bin/sh"]' - "$tag" >/dev/null
echo "made $tag with Python $python, $(docker image inspect --format '{{.Size}}' "$tag" | awk '{printf "%.0f MB", $1 / 1e6}')"

#!/bin/sh
# A Debian base image for a machine without a container registry, made with debootstrap from apt's own mirror.
#   docker/offline-base.sh [--rebuild] [SUITE]     makes toto-compat-base:<suite> (default: this machine's suite)
#   docker/offline-base.sh --python INTERPRETER    makes toto-compat-base:<suite>-python<version> on top of it: with a copy
#                                                  of this machine's INTERPRETER, for a Python that Debian does not have
# Python, its headers and a C++ compiler are in it, so that no build on top of it needs a network.
# The image is for this machine: Debian packages of today, never pushed anywhere.
set -eu

rebuild=no
interpreter=
while [ $# -gt 0 ]; do
    case "$1" in
    --rebuild) rebuild=yes ;;
    --python)
        interpreter="${2:-}"
        [ -n "$interpreter" ] || { echo "error: --python needs an interpreter, for example --python python3.12" >&2; exit 2; }
        shift
        ;;
    -*) echo "error: unknown option $1; see the first lines of $0" >&2; exit 2 ;;
    *) suite="$1" ;;
    esac
    shift
done
suite="${suite:-$(. /etc/os-release && echo "${VERSION_CODENAME:-bookworm}")}"
tag="toto-compat-base:$suite"
packages="ca-certificates,python3,python3-dev,python3-venv,python3-pip,g++"

is_there() { docker image inspect "$1" >/dev/null 2>&1; }
size_of() { docker image inspect --format '{{.Size}}' "$1" | awk '{printf "%.0f MB", $1 / 1e6}'; }


work=
container=
tidy() {
    [ -z "$work" ] || rm -rf "$work"
    [ -z "$container" ] || docker rm -f "$container" >/dev/null
}
trap tidy EXIT
trap 'exit 130' INT TERM

make_base() {
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
    echo "made $tag with Python $python, $(size_of "$tag")"
}

# The suite's base with the interpreter and its library in /usr/local. It runs there because what it links to besides
# (OpenSSL, SQLite, libffi and the like) is what the suite's own python3 links to, which the last step makes sure of.
add_python() {
    found=$("$interpreter" -c 'import sys; print(sys.base_prefix, "%d.%d" % sys.version_info[:2])' 2>&1) || {
        echo "error: $interpreter does not run: $(echo "$found" | tail -n 1)" >&2
        exit 1
    }
    python="${found##* }"
    prefix="${found% *}"
    with_python="$tag-python$python"
    if [ "$rebuild" = no ] && is_there "$with_python"; then
        echo "$with_python is there already"
        return
    fi
    if [ ! -f "$prefix/include/python$python/Python.h" ] || [ "$prefix" = /usr ]; then
        echo "error: $interpreter is not an installation of its own with headers (its prefix is $prefix):" \
            "take one from pyenv, uv or python.org's source" >&2
        exit 1
    fi
    container=$(docker create --network none "$tag" ldconfig)
    tar -C "$prefix" -cf - --owner=0 --group=0 --exclude=__pycache__ --exclude='*.a' \
        --exclude="lib/python$python/test" --exclude="lib/python$python/site-packages/*" \
        "bin/python$python" "include/python$python" "lib/python$python" \
        $(cd "$prefix" && ls lib/libpython*.so* 2>/dev/null) | docker cp - "$container:/usr/local"
    docker start -a "$container" >/dev/null
    docker commit -c "LABEL toto-compat=base toto-compat.python=$python" -c 'CMD ["/bin/sh"]' "$container" "$with_python" >/dev/null
    if ! docker run --rm --network none "$with_python" "python$python" -c \
        'import bz2, ctypes, ensurepip, hashlib, lzma, sqlite3, ssl, venv, zlib'; then
        docker rmi "$with_python" >/dev/null
        echo "error: $interpreter does not run on Debian $suite: it was built for another system" >&2
        exit 1
    fi
    echo "made $with_python with Python $python, $(size_of "$with_python")"
}

if [ "$rebuild" = no ] && is_there "$tag"; then
    [ -n "$interpreter" ] || echo "$tag is there already"
else
    make_base
fi
if [ -n "$interpreter" ]; then add_python; fi

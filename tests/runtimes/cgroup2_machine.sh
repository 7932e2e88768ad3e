#!/usr/bin/env bash
# The tests of control groups version 2 where this kernel has no memory controller of that version: in a small machine
# that has one, emulated in software. cgroup2_machine.sh [FOLDER] [PYTHON]; needs root and Debian's packages.
#
# Nothing is installed: the packages are unpacked into the folder. The machine sees this one's files, PYTHON among them
# (one with the project's test packages), and writes beside them into its own memory. By hand, a quarter of an hour.
set -euo pipefail
cd "$(dirname "$0")/../.."
base=$(realpath -m "${1:-${TMPDIR:-/tmp}/toto-compat-cgroup2}")
python=$(command -v "${2:-python3}")
root=$base/root
export LD_LIBRARY_PATH=$root/usr/lib/x86_64-linux-gnu:$root/lib/x86_64-linux-gnu
files=

finish() {
    [ -z "$files" ] || kill "$files" 2>/dev/null || true
    rm -rf "$base/initrd" "$base/initrd.gz" "$base/files.sock"
}
trap finish EXIT

if [ ! -e "$root/bin/busybox" ]; then
    mkdir -p "$base/debs/partial" "$root"
    apt-get -qq -y -o Debug::NoLocking=1 -o "Dir::Cache::archives=$base/debs" --no-install-recommends --download-only \
        install qemu-system-x86 linux-image-cloud-amd64 busybox-static
    for package in "$base"/debs/*.deb; do dpkg -x "$package" "$root"; done
fi

modules=(virtio virtio_ring virtio_pci_legacy_dev virtio_pci_modern_dev virtio_pci fuse virtiofs overlay)
mkdir -p "$base"/initrd/{bin,modules,files,memory,all,proc,sys,dev}
cp "$root/bin/busybox" "$base/initrd/bin/"
for module in "${modules[@]}"; do
    find "$root/lib/modules" -name "$module.ko" -exec cp {} "$base/initrd/modules/" \;
done
cat >"$base/initrd/init" <<END
#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
# twice: the first of them need the later ones
for module in ${modules[*]} ${modules[*]}; do insmod /modules/\$module.ko 2>/dev/null; done
mount -t virtiofs files /files
mount -t tmpfs -o size=900m memory /memory; mkdir /memory/upper /memory/work
mount -t overlay -o lowerdir=/files,upperdir=/memory/upper,workdir=/memory/work overlay /all
mount -t proc proc /all/proc; mount -t sysfs sys /all/sys; mount -t devtmpfs dev /all/dev
mkdir -p /all/dev/shm; mount -t tmpfs memory /all/dev/shm
mount -t cgroup2 cgroup /all/sys/fs/cgroup
echo +memory >/all/sys/fs/cgroup/cgroup.subtree_control
ip link set lo up
chroot /all /bin/bash "$base/tests.sh"
poweroff -f
END
chmod +x "$base/initrd/init"
(cd "$base/initrd" && find . | "$root/bin/busybox" cpio -o -H newc 2>/dev/null | gzip) >"$base/initrd.gz"
cat >"$base/tests.sh" <<END
export PATH=/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin HOME=/root PYTHONPATH=$PWD PYTHONDONTWRITEBYTECODE=1
cd "$PWD"
# emulated, everything takes its time
sed -i 's/^_LONGEST_SECONDS = .*/_LONGEST_SECONDS = 3000.0/' tests/runtimes/test_supervise.py
"$python" -m pytest --side=host -q -p no:cacheprovider -p no:xdist tests/runtimes/test_supervise.py -k "version and 2"
tests=\$?
"$python" -m tests.faults --only "the same in a control group" --moments 1
echo "ended with \$tests and \$?"
END

"$root/usr/lib/qemu/virtiofsd" --socket-path="$base/files.sock" -o source=/ -o sandbox=chroot >"$base/files.log" 2>&1 &
files=$!
until [ -e "$base/files.sock" ]; do sleep 0.1; done
"$root/usr/bin/qemu-system-x86_64" -L "$root/usr/share/qemu" -L "$root/usr/share/seabios" \
    -M pc,memory-backend=memory -accel tcg,thread=multi -cpu max -m 1800 -smp 2 -nographic -no-reboot -nic none \
    -object memory-backend-memfd,id=memory,size=1800M,share=on -chardev socket,id=files,path="$base/files.sock" \
    -device vhost-user-fs-pci,chardev=files,tag=files -kernel "$root"/boot/vmlinuz-* -initrd "$base/initrd.gz" \
    -append "console=ttyS0 quiet panic=1 no_timer_check" | tee "$base/said.log"
grep -q "ended with 0 and 0" "$base/said.log"

# shellcheck shell=bash
# A guest for tests of microVMs without KVM: QEMU with an emulated processor, Debian's kernel, and a vsock device.
# The kernel is only unpacked and not installed, so that this machine keeps its own.

readonly microvm_dir=$cache_dir/microvm
readonly vhost_device_vsock_version=0.3.0
# The kernel modules of the devices. modprobe adds their dependencies.
readonly microvm_modules='virtio_pci virtio_blk virtio_net vmw_vsock_virtio_transport virtio-rng'

has_microvm_guest() {
    [ -s "$microvm_dir/vmlinuz" ] && [ -s "$microvm_dir/modules.cpio" ] && [ -x "$microvm_dir/bin/vhost-device-vsock" ]
}

# unpack_kernel DIR: the newest kernel for cloud machines that apt knows.
unpack_kernel() {
    local package
    package=$(apt-cache depends linux-image-cloud-amd64 | awk '$1 == "Depends:" && $2 ~ /^linux-image/ { print $2; exit }')
    (cd "$1" && apt-get -q download "$package" && dpkg-deb -x "$package"_*.deb kernel)
}

# pack_modules DIR VERSION: makes an initramfs archive that loads the modules of the devices, and then runs /init.
pack_modules() {
    local module number=10 files
    mkdir -p "$1/archive/double/modules"
    cp "$(command -v busybox)" "$1/archive/double/busybox"
    depmod -b "$1/kernel" "$2"
    # shellcheck disable=SC2086  # several words
    files=$(for module in $microvm_modules; do modprobe -d "$1/kernel" -S "$2" --show-depends "$module"; done |
        awk '$1 == "insmod" && !seen[$2]++ { print $2 }')
    while read -r module; do
        cp "$module" "$1/archive/double/modules/$((number++))-${module##*/}"
    done <<<"$files"
    # shellcheck disable=SC2016  # the variable is the guest's
    printf '%s\n' '#!/double/busybox sh' \
        'for module in /double/modules/*; do /double/busybox insmod "$module"; done' 'exec /init' >"$1/archive/double/init"
    chmod 755 "$1/archive/double/init"
    (cd "$1/archive" && find . | busybox cpio -o -H newc 2>/dev/null) >"$1/modules.cpio"
}

make_microvm_guest() {
    local work version
    mkdir -p "$microvm_dir"
    work=$(mktemp -d "$microvm_dir/work.XXXXXX")
    # shellcheck disable=SC2064  # the path is known now
    trap "rm -rf '$work'" EXIT
    unpack_kernel "$work"
    version=$(basename "$work"/kernel/lib/modules/*)
    pack_modules "$work" "$version"
    mv "$work/kernel/boot/vmlinuz-$version" "$microvm_dir/vmlinuz"
    mv "$work/modules.cpio" "$microvm_dir/modules.cpio"
}

make_vhost_device_vsock() {
    cargo install --quiet --locked vhost-device-vsock --version "$vhost_device_vsock_version" --root "$microvm_dir" \
        --target-dir "$microvm_dir/target"
    rm -rf "$microvm_dir/target"
}

ensure_microvm_guest() {
    has_microvm_guest || step 'unpacking a kernel for microVMs' make_microvm_guest
    [ -x "$microvm_dir/bin/vhost-device-vsock" ] || step 'building vhost-device-vsock' make_vhost_device_vsock
}

# shellcheck shell=bash
# The missing packages for each goal. A package is missing if its command or file is missing, so that a tool from
# another source counts.

# "PACKAGE COMMAND" for building and running the server.
readonly run_commands='
gcc cc
git git
curl curl
jq jq
iptables iptables
iptables ip6tables
e2fsprogs mke2fs
mount losetup
util-linux unshare
'

# "PACKAGE COMMAND" for the tests.
readonly test_commands='
ripgrep rg
shellcheck shellcheck
util-linux runuser
util-linux setpriv
util-linux nsenter
iproute2 ip
openssl openssl
procps pgrep
e2fsprogs chattr
qemu-system-x86 qemu-system-x86_64
'

# "PACKAGE COMMAND" for making the guest for tests of microVMs.
readonly microvm_commands='
busybox-static busybox
kmod depmod
'

# missing_commands TABLE: the packages whose command is missing.
missing_commands() {
    local package command
    while read -r package command; do
        [ -z "$package" ] || have "$command" || echo "$package"
    done <<<"$1"
}

# The missing packages without a command.
missing_files() {
    [ -e /usr/include/stdio.h ] || echo libc6-dev
    [ -e /etc/ssl/certs/ca-certificates.crt ] || echo ca-certificates
}

# On a kernel with AppArmor the engine needs its parser.
missing_apparmor() {
    if [ "$(cat /sys/module/apparmor/parameters/enabled 2>/dev/null)" = Y ] && ! have apparmor_parser; then
        echo apparmor
    fi
}

has_postgresql() { have postgres || compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null; }

has_faketime() { compgen -G '/usr/lib/*/faketime/libfaketimeMT.so.1' >/dev/null; }

has_http_backend() { have git && [ -x "$(git --exec-path)/git-http-backend" ]; }

# pip of the system's Python, which has the same version as the Python of the workspace image.
has_pip() { /usr/bin/python3 -c 'import pip' 2>/dev/null; }

# missing_packages GOAL: the missing packages, sorted and without duplicates. Uses the engine's state (engine.sh).
missing_packages() {
    {
        missing_commands "$run_commands"
        missing_files
        if ! engine_answers; then
            have dockerd || echo docker.io
            missing_apparmor
        fi
        have docker || echo docker.io
        if engine_is_local && [ -z "$engine_runsc" ]; then have runsc || echo runsc; fi
        if ! workspace_image_is_current && ! workspace_image_is_cached; then have debootstrap || echo debootstrap; fi
        if [ "$1" = test ]; then
            missing_commands "$test_commands"
            has_postgresql || echo postgresql
            has_http_backend || echo git
            has_faketime || echo libfaketime
            have npm || { has_conformance && ! must_fetch_mcp_servers node; } || echo npm
            has_microvm_guest || missing_commands "$microvm_commands"
            has_pip || ! must_fetch_mcp_servers python || echo python3-pip
        fi
    } | sort -u
}

ensure_packages() {
    local packages
    mapfile -t packages < <(missing_packages "$1")
    [ ${#packages[@]} -gt 0 ] || return 0
    have apt-get || die "these Debian packages, or what your system calls them, are missing: ${packages[*]}" \
        'Install them and run this again.' \
        'docker.io: a Docker engine (https://docs.docker.com/engine/install/)' \
        'runsc: gVisor (https://gvisor.dev/docs/user_guide/install/)'
    need_root "Installing packages"
    step "installing ${packages[*]}" apt_install "${packages[@]}"
    hash -r
}

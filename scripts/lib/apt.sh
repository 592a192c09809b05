# shellcheck shell=bash
# Debian packages: one `apt-get install` for all missing packages, and `update` only when it is necessary.

# Our own sources file. A user may delete it at any time.
readonly backports_list=/etc/apt/sources.list.d/emergent-backports.list

apt_get() {
    as_root env DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1 apt-get -q -y \
        -o DPkg::Lock::Timeout=300 -o Dpkg::Options::=--force-confdef \
        -o Dpkg::Options::=--force-confold "$@"
}

# apt_sources: "URI RELEASE CODENAME COMPONENT" of each configured source.
# shellcheck disable=SC2016  # the variables are apt's
apt_sources() {
    apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(CODENAME) $(COMPONENT)' 'Created-By: Packages'
}

# apt_mirror CODENAME: the mirror from which this machine gets the release CODENAME.
apt_mirror() {
    apt_sources | awk -v codename="$1" '($2 == codename || $3 == codename) && $4 == "main" && !found++ { print $1 }'
}

apt_has_lists() { compgen -G '/var/lib/apt/lists/*Packages*' >/dev/null; }

# A package that is only mentioned by others has no version here.
apt_knows() { [ -n "$(apt-cache madison "$1")" ]; }

# Debian's backports have a newer gVisor. They are added from the configured mirror. If it has none, the
# version of the release is used.
apt_add_backports() {
    local codename mirror keyring=/usr/share/keyrings/debian-archive-keyring.gpg signed=''
    [ "$(os_release ID)" = debian ] || return 0
    codename=$(os_release VERSION_CODENAME)
    mirror=$(apt_mirror "$codename")
    [ -n "$mirror" ] || return 0
    if apt_sources | awk -v suite="$codename-backports" '$2 == suite { found = 1 } END { exit !found }'; then
        return 0
    fi
    [ ! -e "$keyring" ] || signed="[signed-by=$keyring] "
    echo "deb $signed$mirror $codename-backports main" | as_root tee "$backports_list"
    apt_get update -o Dir::Etc::sourcelist="$backports_list" -o Dir::Etc::sourceparts=- \
        -o APT::Get::List-Cleanup=0 || as_root rm -f "$backports_list"
}

# The gVisor package of the newest version. Fails if apt has none.
apt_runsc() {
    local suite versions
    suite=$(os_release VERSION_CODENAME)-backports
    versions=$(apt-cache madison runsc)
    case $versions in
    *" $suite/"*) echo "runsc/$suite" ;;
    ?*) echo runsc ;;
    *)
        echo 'apt knows no package runsc: install gVisor by hand (https://gvisor.dev/docs/user_guide/install/)' >&2
        return 1
        ;;
    esac
}

# The QEMU packages. They must be of the same release as QEMU's tools if those are installed, because newer packages conflict with
# older ones.
apt_qemu() {
    local suite
    suite=$(os_release VERSION_CODENAME)-backports
    case $(dpkg-query --show --showformat '${Version}' qemu-utils 2>/dev/null) in
    *~bpo*) printf "%s/$suite\n" qemu-system-x86 qemu-system-common qemu-system-data seabios ;;
    *) echo qemu-system-x86 ;;
    esac
}

# Without an init system the scripts of a package can't start its service properly, so they are disabled.
apt_hold_services() {
    local policy=/usr/sbin/policy-rc.d
    if init_is_running || [ -e "$policy" ]; then return 0; fi
    # shellcheck disable=SC2064  # the path is known now
    trap "as_root rm -f $policy" EXIT
    printf '#!/bin/sh\nexit 101\n' | as_root tee "$policy"
    as_root chmod 755 "$policy"
}

# Tests start their own clusters, so the package must not make and start one.
apt_no_default_cluster() {
    local dir=/etc/postgresql-common/createcluster.d
    as_root mkdir -p "$dir"
    echo 'create_main_cluster = false' | as_root tee "$dir/emergent.conf"
}

# apt_install PACKAGE…: installs packages. The names of `runsc`, `qemu-system-x86` and `docker.io` are mapped to the packages of this
# release.
apt_install() {
    local package packages=()
    apt_has_lists || apt_get update
    for package in "$@"; do
        case $package in
        runsc)
            apt_add_backports
            package=$(apt_runsc)
            ;;
        qemu-system-x86)
            mapfile -t -O ${#packages[@]} packages < <(apt_qemu)
            continue
            ;;
        docker.io) ! apt_knows docker-cli || packages+=(docker-cli) ;;
        postgresql) apt_no_default_cluster ;;
        esac
        packages+=("$package")
    done
    apt_hold_services
    apt_get install --no-install-recommends "${packages[@]}" && return
    apt_get update
    apt_get install --no-install-recommends "${packages[@]}"
}

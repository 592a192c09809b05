# shellcheck shell=bash
# Debian packages: one `apt-get install` for all that is missing, `update` only when it is needed.

# The sources file of our own; a user may delete it at any time.
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

# apt_mirror CODENAME: where this machine gets the release CODENAME from.
apt_mirror() {
    apt_sources | awk -v codename="$1" '($2 == codename || $3 == codename) && $4 == "main" && !found++ { print $1 }'
}

apt_has_lists() { compgen -G '/var/lib/apt/lists/*Packages*' >/dev/null; }

# A package that others only mention is not one.
apt_knows() { [ -n "$(apt-cache madison "$1")" ]; }

# Debian's backports have a newer gVisor. They are taken from the mirror already in use; where it
# has none, the plain version must do.
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

# The package to install for gVisor, newest first; fails where apt has none.
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

# The packages to install for QEMU: of the same release as its tools, where those are there, since newer ones refuse older
# ones beside them.
apt_qemu() {
    local suite
    suite=$(os_release VERSION_CODENAME)-backports
    case $(dpkg-query --show --showformat '${Version}' qemu-utils 2>/dev/null) in
    *~bpo*) printf "%s/$suite\n" qemu-system-x86 qemu-system-common qemu-system-data seabios ;;
    *) echo qemu-system-x86 ;;
    esac
}

# Without an init system a package's own scripts can't start its service properly: hold them back.
apt_hold_services() {
    local policy=/usr/sbin/policy-rc.d
    if init_is_running || [ -e "$policy" ]; then return 0; fi
    # shellcheck disable=SC2064  # the path is known now
    trap "as_root rm -f $policy" EXIT
    printf '#!/bin/sh\nexit 101\n' | as_root tee "$policy"
    as_root chmod 755 "$policy"
}

# Tests start clusters of their own: keep the package from making and starting one.
apt_no_default_cluster() {
    local dir=/etc/postgresql-common/createcluster.d
    as_root mkdir -p "$dir"
    echo 'create_main_cluster = false' | as_root tee "$dir/emergent.conf"
}

# apt_install PACKAGE…; `runsc` and `docker.io` stand for what this release has under that name.
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

# shellcheck shell=bash
# What images/mcp-node/build and images/mcp-python/build share: arguments, cache, the image itself.
#
# A package first becomes an archive in the cache: `files.tar`, the layer that goes upon a base image,
# and `changes`, the image's settings as `docker commit --change` takes them. The image is made of the
# two, without a network. Nothing of a package runs on this machine meanwhile: npm runs no install
# scripts, and pip takes wheels only.

readonly mcp_label=emergent.mcp-image.recipe
# How long a registry may take for one package.
readonly mcp_fetch_limit_seconds=600

action=build
image=''
package=''
bin=''
environment=()
constraints=()
debian_packages=()
default_arguments=()

mcp_usage() { sed -n '2,/^$/s/^# \{0,1\}//p' "$here/build"; }

# mcp_read_arguments ARGUMENT…: into the variables above.
mcp_read_arguments() {
    local words=()
    while [ $# -gt 0 ]; do
        case $1 in
        --is-current | --is-cached) action=${1#--} ;;
        --bin | --env | --constraint | --with-debian)
            [ $# -gt 1 ] || die "$1 needs a value" "$here/build --help"
            mcp_read_option "$1" "$2"
            shift
            ;;
        --help)
            mcp_usage
            exit
            ;;
        --)
            shift
            default_arguments=("$@")
            break
            ;;
        -*) die "unknown option $1" "$here/build --help" ;;
        *) words+=("$1") ;;
        esac
        shift
    done
    [ ${#words[@]} -eq 2 ] || die 'an image and a package are needed' "$here/build --help"
    image=${words[0]} package=${words[1]}
    case ${image##*/} in *:*) ;; *) image=$image:latest ;; esac
}

# mcp_read_option OPTION VALUE
mcp_read_option() {
    case $1 in
    --bin) bin=$2 ;;
    --env)
        [[ $2 =~ ^[A-Za-z_][A-Za-z0-9_]*=[^[:cntrl:]]*$ ]] || die "--env needs NAME=VALUE, got '$2'"
        environment+=("$2")
        ;;
    --constraint) constraints+=("$2") ;;
    --with-debian)
        [[ $2 =~ ^[a-z0-9][a-z0-9+.-]*$ ]] || die "'$2' is not the name of a Debian package"
        debian_packages+=("$2")
        ;;
    esac
}

# mcp_recipe_id WORD…: an image is made anew when this changes. What lies below it does not matter: an
# image keeps what it was made of.
mcp_recipe_id() {
    {
        cat "$here/build" "${BASH_SOURCE[0]}"
        os_release ID
        os_release VERSION_CODENAME
        uname -m
        printf '%s\0' "$@"
    } | sha256sum | cut -c1-16
}

# mcp_archive IMAGE RECIPE: where what the image is made of is kept.
mcp_archive() { echo "$cache_dir/images/mcp-${1//[^A-Za-z0-9._-]/_}-$2.tar.gz"; }

# mcp_is_current IMAGE RECIPE
mcp_is_current() {
    [ "$(bounded 15 docker image inspect --format "{{index .Config.Labels \"$mcp_label\"}}" "$1" 2>/dev/null)" = "$2" ]
}

# mcp_json_list WORD…: as ENTRYPOINT and CMD want it.
mcp_json_list() { jq --null-input --compact-output '$ARGS.positional' --args -- "$@"; }

# mcp_quote VALUE: for ENV and LABEL, which expand variables.
mcp_quote() { jq --null-input --raw-output '$value | tojson | gsub("[$]"; "\\$")' --arg value "$1"; }

# mcp_changes TITLE VERSION ENTRYPOINT_WORD…: the settings of a server's image.
mcp_changes() {
    local variable
    for variable in HOME=/home/mcp "${environment[@]}"; do
        echo "ENV ${variable%%=*}=$(mcp_quote "${variable#*=}")"
    done
    echo "LABEL org.opencontainers.image.title=$(mcp_quote "$1")"
    echo "LABEL org.opencontainers.image.version=$(mcp_quote "$2")"
    shift 2
    echo 'USER mcp'
    echo 'WORKDIR /home/mcp'
    echo "ENTRYPOINT $(mcp_json_list "$@")"
    echo "CMD $(mcp_json_list "${default_arguments[@]}")"
}

# mcp_fetch ARCHIVE COLLECT: COLLECT gets the directory $work to itself, fills $work/files and writes
# $work/changes. All will belong to root, but for the directories of mcp where COLLECT makes them. The
# archive appears when it is complete, in place of older ones of the same image.
mcp_fetch() {
    local work
    work=$(mktemp -d "${TMPDIR:-/var/tmp}/emergent-mcp.XXXXXX")
    # shellcheck disable=SC2064  # the paths are known now
    trap "rm -rf '$work' '$1.part'" EXIT
    umask 022
    mkdir -p "$work/files" "$(dirname "$1")"
    "$2"
    chmod -R a+rX "$work/files"
    cd "$work/files"
    tar --numeric-owner --owner=0 --group=0 --exclude=./home/mcp --exclude=./data --create --file ../files.tar .
    [ ! -d data ] || tar --numeric-owner --owner=1000 --group=1000 --append --file ../files.tar ./home/mcp ./data
    tar --directory .. --create changes files.tar | gzip -1 >"$1.part"
    rm -f "${1%-*}"-????????????????.tar.gz
    mv "$1.part" "$1"
}

# mcp_part ARCHIVE NAME
mcp_part() { tar --extract --gzip --to-stdout --file "$1" "$2"; }

# mcp_make IMAGE RECIPE ARCHIVE BASE [COMMAND…]: COMMAND runs in the new layer, as root, without a network.
# The base `scratch` is nothing.
mcp_make() {
    local name=$1 recipe=$2 archive=$3 below=$4 container change changes=()
    shift 4
    while read -r change; do
        changes+=(--change "$change")
    done < <(mcp_part "$archive" changes && echo "LABEL $mcp_label=$recipe")
    if [ "$below" = scratch ]; then
        mcp_part "$archive" files.tar | bounded 300 docker import "${changes[@]}" - "$name"
        return
    fi
    container=emergent-mcp-image-$$
    # shellcheck disable=SC2064  # the name is known now
    trap "bounded 60 docker rm --force $container" EXIT
    # A container needs some command, also one that is never started.
    bounded 60 docker create --network none --user 0:0 --name "$container" "$below" "${@:-none}"
    mcp_part "$archive" files.tar | bounded 300 docker cp - "$container:/"
    [ $# -eq 0 ] || bounded 300 docker start --attach "$container"
    bounded 300 docker commit "${changes[@]}" "$container" "$name"
}

# mcp_ensure WHAT COLLECT IMAGE RECIPE BASE [COMMAND…]: fetches WHAT where the cache has none, makes IMAGE.
mcp_ensure() {
    local what=$1 collect=$2 name=$3 recipe=$4 archive
    shift 4
    ! mcp_is_current "$name" "$recipe" || return 0
    archive=$(mcp_archive "$name" "$recipe")
    [ -e "$archive" ] || step "fetching $what" mcp_fetch "$archive" "$collect"
    step "making the image $name" mcp_make "$name" "$recipe" "$archive" "$@"
}

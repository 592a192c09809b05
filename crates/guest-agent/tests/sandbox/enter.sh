# Makes a root directory of its own around the host's programs, with an empty /workspace, and runs the arguments in it.
set -eu
root=$1
workspace_bytes=$2
shift 2
mount -t tmpfs -o mode=755 none "$root"
for entry in /*; do
    case $entry in
        /workspace | /proc | /sys) mkdir "$root$entry" ;;
        *)
            if [ -L "$entry" ]; then
                cp -P "$entry" "$root$entry"
            elif [ -d "$entry" ]; then
                mkdir "$root$entry"
                mount --rbind "$entry" "$root$entry"
            fi
            ;;
    esac
done
mkdir -p "$root/workspace" "$root/proc"
mount -t tmpfs -o "size=$workspace_bytes" none "$root/workspace"
mount -t proc none "$root/proc"
ip link set lo up
exec chroot "$root" "$@"

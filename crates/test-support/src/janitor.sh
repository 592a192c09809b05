# Removes everything that a test server made, after the test process has ended.
#
# Argument: the server's data directory. Standard input: a pipe that only the test process holds open, so that it ends also when
# that process is killed. Then the script kills the server, and removes everything with the label of its installation, and the
# directory.
set -u
dir=$1
trap '' INT TERM HUP
while read -r _; do :; done

for pid in $(pgrep -f -- "--data-dir $dir( |\$)"); do kill -KILL "$pid" 2>/dev/null; done
id=$(cat "$dir/installation-id" 2>/dev/null)
if [ -n "$id" ]; then
    # A test may have stopped the engine. The data directory has the only record of the label, so wait for the engine first.
    for _ in $(seq 60); do timeout 5 docker version >/dev/null 2>&1 && break; sleep 1; done
    label="label=emergent.installation=$id"
    containers=$(docker ps --all --quiet --filter "$label" 2>/dev/null)
    [ -z "$containers" ] || docker rm --force $containers
    volumes=$(docker volume ls --quiet --filter "$label" 2>/dev/null)
    [ -z "$volumes" ] || docker volume rm --force $volumes
    networks=$(docker network ls --quiet --filter "$label" 2>/dev/null)
    [ -z "$networks" ] || docker network rm $networks
    docker rmi --force "emergent-test:$id"
    short=$(printf %s "$id" | tr -d - | tail -c 10)
    for tables in iptables ip6tables; do
        for table in filter security mangle; do
            for parent in DOCKER-USER FORWARD; do $tables -w 5 -t $table -D $parent -i "em-$short" -j "em-$short-fwd"; done
            $tables -w 5 -t $table -D INPUT -i "em-$short" -j "em-$short-in"
            for chain in "em-$short-fwd" "em-$short-in"; do
                $tables -w 5 -t $table -F "$chain" && $tables -w 5 -t $table -X "$chain"
            done
        done
    done
fi

# remove_microvms DIR: removes everything that the Firecracker manager of this directory made.
remove_microvms() {
    local name id group tables table rule chain interface legacy=
    name=fc$(printf %06x "$(sed -n 's/.*"manager": *\([0-9]*\).*/\1/p' "$1/manager.json")")
    for id in $(ls "$1/machines" "$1/jails/firecracker" 2>/dev/null | grep -- - | sort -u); do
        pkill -KILL -f -- "$id"
    done
    for group in /sys/fs/cgroup/emergent-$name /sys/fs/cgroup/*/emergent-$name; do
        for _ in $(seq 50); do
            [ -d "$group" ] || break
            find "$group" -depth -type d -exec rmdir {} + && break
            sleep 0.1
        done
    done
    for interface in $(ls /sys/class/net | grep "^$name-"); do ip link delete "$interface"; done
    # The legacy programs create their tables when they list them, so they run only where tables exist.
    [ ! -s /proc/net/ip_tables_names ] || legacy='iptables-legacy ip6tables-legacy'
    for tables in iptables ip6tables $legacy; do
        for table in filter security mangle nat; do
            $tables -w 5 -t $table -S | grep -- "-j $name-" | grep -v -- "^-A $name-" | sed 's/^-A/-D/' |
                while read -r rule; do $tables -w 5 -t $table $rule; done
            for chain in $($tables -w 5 -t $table -S | sed -n "s/^-N \($name-.*\)/\1/p"); do $tables -w 5 -t $table -F "$chain"; done
            for chain in $($tables -w 5 -t $table -S | sed -n "s/^-N \($name-.*\)/\1/p"); do $tables -w 5 -t $table -X "$chain"; done
        done
    done
}
containers=$(docker ps --all --quiet --filter "label=emergent.test=$dir" 2>/dev/null)
[ -z "$containers" ] || docker rm --force $containers
for manager in "$dir" "$dir/firecracker"; do [ ! -e "$manager/manager.json" ] || remove_microvms "$manager"; done
for device in $(losetup --noheadings --output NAME,BACK-FILE | awk -v dir="$dir/" 'index($2, dir) == 1 { print $1 }'); do
    losetup --detach "$device"
done
# Tests of full disks mount small disks.
for mount in $(awk -v dir="$dir" '$2 == dir || index($2, dir "/") == 1 { print $2 }' /proc/mounts | sort -r); do umount --lazy "$mount"; done
rm -rf "$dir"

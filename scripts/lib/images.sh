# shellcheck shell=bash
# The images of workspaces and of the tests.

readonly workspace_image=emergent/workspace:latest
readonly test_empty_image=emergent/test-empty:latest

workspace_image_is_current() { engine_answers && "$repo_root/images/workspace/build" --is-current; }

workspace_image_is_cached() { "$repo_root/images/workspace/build" --is-cached; }

ensure_workspace_image() {
    workspace_image_is_current || setup_goal=$setup_goal "$repo_root/images/workspace/build"
}

has_test_empty_image() { engine_answers && bounded 15 docker image inspect "$test_empty_image" >/dev/null 2>&1; }

# An image without any file. Workspaces must work on it too.
make_test_empty_image() {
    tar --create --files-from /dev/null | bounded 60 docker import - "$test_empty_image"
}

ensure_test_empty_image() {
    has_test_empty_image || step "importing $test_empty_image" make_test_empty_image
}

# mcp_image KIND ARGUMENT…: runs the script of a line of the list of MCP servers.
mcp_image() { setup_goal=$setup_goal "$repo_root/images/mcp-$1/build" "${@:2}" </dev/null; }

# missing_mcp_servers [KIND]: the lines (of this kind) whose image the engine does not have.
missing_mcp_servers() {
    local line
    grep "^${1:-[a-z]}" "$repo_root/images/mcp-servers.list" | while read -ra line; do
        if engine_answers && mcp_image "${line[0]}" --is-current "${line[@]:1}"; then continue; fi
        echo "${line[*]}"
    done
}

# must_fetch_mcp_servers KIND: whether one must be downloaded from its registry.
must_fetch_mcp_servers() {
    local line
    while read -ra line; do
        mcp_image "${line[0]}" --is-cached "${line[@]:1}" || return 0
    done < <(missing_mcp_servers "$1")
    return 1
}

ensure_mcp_images() {
    local line
    while read -ra line; do
        mcp_image "${line[@]}"
    done < <(missing_mcp_servers)
}

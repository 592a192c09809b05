# shellcheck shell=bash
# The images: what workspaces start from, and what the tests use.

readonly workspace_image=emergent/workspace:latest
readonly test_empty_image=emergent/test-empty:latest

workspace_image_is_current() { engine_answers && "$repo_root/images/workspace/build" --is-current; }

workspace_image_is_cached() { "$repo_root/images/workspace/build" --is-cached; }

ensure_workspace_image() {
    workspace_image_is_current || setup_goal=$setup_goal "$repo_root/images/workspace/build"
}

has_test_empty_image() { engine_answers && bounded 15 docker image inspect "$test_empty_image" >/dev/null 2>&1; }

# An image without a shell, or anything else: a workspace must work on it all the same.
make_test_empty_image() {
    tar --create --files-from /dev/null | bounded 60 docker import - "$test_empty_image"
}

ensure_test_empty_image() {
    has_test_empty_image || step "importing $test_empty_image" make_test_empty_image
}

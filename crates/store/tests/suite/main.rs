//! The store's suite: written once, run on both engines.
//!
//! On SQLite each case is a test of its own. On PostgreSQL one test runs them all, each in a fresh database of one
//! cluster, as test runners that give each test a process would otherwise start a cluster for each.

// A test fails by panicking.
#![allow(clippy::unwrap_used)]

mod audit;
mod audit_retention;
mod damaged_rows;
mod durability;
mod expiry;
mod idempotency;
mod opening;
mod snapshots;
mod spares;
mod stored_credentials;
mod support;
mod tokens;
mod workspaces;

macro_rules! both_engines {
    ($($module:ident: $($case:ident),* $(,)?;)*) => {
        mod sqlite {
            $($(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $case() {
                    crate::$module::$case(crate::support::TestDb::sqlite().await).await;
                }
            )*)*
        }

        mod postgres {
            use emergent_test_support::postgres::TestPostgres;

            use crate::support::TestDb;

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn every_case() {
                let cluster = TestPostgres::start();
                let mut failed = Vec::new();
                $($(
                    let db = TestDb::postgres(&cluster).await;
                    if tokio::spawn(crate::$module::$case(db)).await.is_err() {
                        failed.push(concat!(stringify!($module), "::", stringify!($case)));
                    }
                )*)*
                assert!(failed.is_empty(), "failed on PostgreSQL: {failed:#?}");
            }
        }
    };
}

both_engines! {
    workspaces:
        a_row_comes_back_as_it_was_written,
        of_200_inserts_at_once_the_limit_lets_10_in,
        the_limit_counts_live_agent_workspaces_only,
        an_id_is_used_once_and_a_session_must_exist,
        pages_neither_repeat_nor_skip_rows_of_one_time,
        lists_are_filtered,
        one_of_many_transitions_wins,
        a_workspace_that_is_destroyed_never_comes_back,
        an_error_is_kept_until_ready,
        metadata_is_merged_without_losing_fields,
        one_of_many_attaches_wins_and_names_itself,
        recovery_sees_what_is_in_a_status,
        active_workspaces_are_counted_by_provider,
        an_environment_opens_with_its_row_and_key_only,
        text_with_nul_is_stored;
    expiry:
        use_extends_the_life_and_never_moves_back,
        a_use_beats_the_sweep,
        only_overdue_workspaces_without_a_change_in_progress_expire,
        mcp_servers_are_exempt_from_ttl,
        a_use_beats_the_idle_stop;
    tokens:
        a_token_is_shown_once_and_verified,
        expired_and_revoked_tokens_are_refused,
        a_name_is_used_once_at_a_time,
        a_workspaces_tokens_go_with_it,
        tokens_of_projects_and_sessions_go_with_them,
        last_use_is_written_once_a_minute,
        the_last_usable_admin_token_is_not_revoked,
        a_damaged_admin_token_is_not_a_usable_one,
        revoking_all_admin_tokens_at_once_leaves_one,
        a_token_is_replaced_by_one_with_its_name;
    audit:
        rows_appended_at_once_form_one_chain,
        odd_values_keep_their_hash,
        a_changed_row_is_found,
        a_removed_row_is_found,
        swapped_rows_are_found,
        a_cut_tail_is_found,
        a_lost_head_is_found,
        an_extra_row_is_found,
        pages_are_filtered;
    audit_retention:
        a_pruned_log_and_its_exports_form_one_chain,
        pruning_ends_at_the_first_row_that_is_kept,
        appends_continue_after_all_rows_were_pruned,
        tampering_with_a_pruned_log_is_found,
        pruning_that_meets_a_changed_row_reports_the_rows_it_removed,
        cuts_and_appends_at_once_keep_one_chain,
        a_kill_during_pruning_leaves_a_chain_that_verifies;
    opening:
        opening_again_changes_nothing,
        a_newer_database_is_refused,
        another_builds_database_is_refused,
        servers_that_start_at_once_take_turns,
        the_installation_id_is_made_once,
        the_sealing_key_is_checked,
        settings_come_back,
        a_closed_store_refuses_calls;
    idempotency:
        a_repeated_request_finds_the_first_one,
        a_key_names_one_request_of_one_token,
        of_begins_at_once_one_is_new,
        one_server_takes_over_an_interrupted_request,
        keys_end_after_a_day,
        a_token_has_a_limited_number_of_keys;
    damaged_rows:
        each_damaged_column_of_a_workspace_is_named,
        a_list_has_the_other_rows_and_names_the_damaged_one,
        a_row_whose_id_is_written_differently_is_damaged_and_named,
        a_page_that_ends_with_a_damaged_row_has_a_next_page,
        every_page_is_reached_past_rows_with_a_damaged_time_or_id,
        recovery_sees_a_workspace_with_an_unknown_status,
        an_mcp_server_without_a_configuration_or_name_is_damaged,
        a_damaged_row_is_not_changed,
        damaged_spares_snapshots_and_tokens_are_named,
        a_damaged_idempotency_key_setting_or_server_is_named,
        a_damaged_row_does_not_stop_others_from_being_counted_or_made;
    stored_credentials:
        the_migration_removes_credentials_from_stored_urls,
        rows_without_credentials_are_left_alone;
    durability:
        answered_writes_survive_a_kill,
        a_call_that_is_dropped_blocks_nobody;
    spares:
        spares_are_never_over_created,
        two_requests_never_get_one_spare,
        a_claim_over_the_limit_leaves_the_spare,
        a_spare_that_leaves_can_not_be_claimed,
        one_server_at_a_time_changes_a_workspace,
        servers_count_until_they_are_forgotten;
    snapshots:
        a_snapshot_is_made_used_and_removed,
        snapshots_come_in_pages_and_by_workspace,
        files_without_a_row_are_quarantined_restored_or_removed;
}

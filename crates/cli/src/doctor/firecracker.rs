//! Checks of Firecracker microVMs. Without them the server uses gVisor, which isolates less strongly.

use emergent_control_plane::{Settings, UnmetRequirement, check_microvm_requirements, manager_health};

use super::report::Check;

/// Checks the health of the configured manager. Without one, checks the requirements of a manager on this host.
pub(super) async fn checks(settings: &Settings) -> Vec<Check> {
    const CHECK_NAME: &str = "microVMs";
    let firecracker = &settings.firecracker;
    if firecracker.enabled == Some(false) {
        return vec![Check::skip(CHECK_NAME, "the provider is turned off (EMERGENT_FIRECRACKER)")];
    }
    if let Some(url) = firecracker.manager_url() {
        let fix = "run `emergent firecracker-manager` on the manager's host, and set FIRECRACKER_MANAGER_URL and \
                   FIRECRACKER_MANAGER_TOKEN to its URL and token";
        return vec![match manager_health(firecracker).await {
            Ok(health) if health.healthy => {
                let (active, most) = (health.active_vms, health.max_vms);
                Check::ok(
                    CHECK_NAME,
                    format!("the manager at {url} is healthy; {active} of {most} microVMs run"),
                )
            }
            Ok(health) => {
                let fix = "run `emergent doctor` on the manager's host";
                let errors = health.errors.join("; ");
                Check::warn(CHECK_NAME, format!("the manager at {url} is not healthy: {errors}"), fix)
            }
            Err(problem) => Check::warn(CHECK_NAME, problem, fix),
        }];
    }
    let requirements = check_microvm_requirements(&firecracker.manager).await.into_iter();
    requirements
        .map(|requirement| match requirement.status {
            Ok(found) => Check::ok(requirement.name, found),
            Err(UnmetRequirement { problem, fix }) => Check::warn(requirement.name, problem, fix),
        })
        .collect()
}

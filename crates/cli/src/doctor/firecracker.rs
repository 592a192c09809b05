//! Whether Firecracker microVMs can be made. The server works without them, on gVisor, with weaker isolation.

use emergent_control_plane::{Settings, UnmetRequirement, check_microvm_requirements, manager_health};

use super::report::Check;

/// What the manager that the settings name says, or what one on this host would find.
pub(super) async fn checks(settings: &Settings) -> Vec<Check> {
    const WHAT: &str = "microVMs";
    let firecracker = &settings.firecracker;
    if firecracker.enabled == Some(false) {
        return vec![Check::skip(WHAT, "they are turned off (EMERGENT_FIRECRACKER)")];
    }
    if let Some(url) = firecracker.manager_url() {
        let fix = "run `emergent firecracker-manager` there; FIRECRACKER_MANAGER_URL and FIRECRACKER_MANAGER_TOKEN say where \
                   it is and prove who asks";
        return vec![match manager_health(firecracker).await {
            Ok(health) if health.healthy => {
                let (active, most) = (health.active_vms, health.max_vms);
                Check::ok(WHAT, format!("the manager at {url} is healthy; {active} of {most} run"))
            }
            Ok(health) => {
                let fix = "on the manager's host: emergent doctor";
                Check::warn(WHAT, format!("the manager at {url} says: {}", health.errors.join("; ")), fix)
            }
            Err(problem) => Check::warn(WHAT, problem, fix),
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

//! Which provider a workspace goes to: a pure function of the request and what is known of the providers.
//!
//! An explicit provider is that one or an error. `auto` prefers microVMs for agents' workspaces and gVisor for MCP
//! servers, and admits only microVMs when the security level is high. Plain Docker is the last resort, and only
//! where the configuration allows it.

use emergent_wire::workspace::{
    ContainerType, DeploymentMode, IsolationLevel, Placement, ProviderChoice, ProviderName,
    RejectedCandidate, SecurityLevel,
};
use emergent_wire::{ErrorCode, ErrorDetail};

/// What a request asks for, as far as placement is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wish {
    pub(crate) container_type: ContainerType,
    pub(crate) provider: ProviderChoice,
    pub(crate) deployment: DeploymentMode,
    pub(crate) security: SecurityLevel,
}

/// What is known of a provider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Known {
    pub(crate) name: ProviderName,
    pub(crate) isolation: IsolationLevel,
    /// Why it can't be used now, if it can't.
    pub(crate) problem: Option<String>,
}

/// Where to try, in this order, and what was ruled out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) candidates: Vec<Candidate>,
    pub(crate) rejected: Vec<RejectedCandidate>,
}

/// A provider to try, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub(crate) provider: ProviderName,
    pub(crate) reason: String,
}

impl Candidate {
    /// What is written down when this one is tried.
    pub(crate) fn placement(&self, rejected: &[RejectedCandidate]) -> Placement {
        Placement {
            provider: self.provider,
            reason: self.reason.clone(),
            rejected: rejected.to_vec(),
            warm_hit: false,
        }
    }

    /// What is written down when it has failed.
    pub(crate) fn rejected(&self, error: &impl std::fmt::Display) -> RejectedCandidate {
        RejectedCandidate { provider: self.provider, reason: error.to_string() }
    }
}

/// Chooses.
pub(crate) fn plan(wish: Wish, known: &[Known]) -> Result<Plan, ErrorDetail> {
    let order = preference(wish);
    let mut plan = Plan { candidates: Vec::new(), rejected: Vec::new() };
    for name in &order {
        let found = known.iter().find(|provider| provider.name == *name);
        match refusal(wish, *name, found) {
            Some(reason) => plan.rejected.push(RejectedCandidate { provider: *name, reason }),
            None => {
                let reason = reason(wish, *name, &plan.rejected);
                plan.candidates.push(Candidate { provider: *name, reason });
            }
        }
    }
    if plan.candidates.is_empty() {
        return Err(nothing_fits(wish, &plan.rejected));
    }
    Ok(plan)
}

/// Whether two providers see each other's sandboxes: containers of both kinds are on one engine.
pub(crate) fn share_sandboxes(one: ProviderName, other: ProviderName) -> bool {
    let is_container = |name| matches!(name, ProviderName::Gvisor | ProviderName::Docker);
    one == other || is_container(one) && is_container(other)
}

/// All providers that come into question, best first.
fn preference(wish: Wish) -> Vec<ProviderName> {
    use ProviderName::{Docker, E2b, Firecracker, Gvisor};
    if let Some(name) = wish.provider.explicit() {
        return vec![name];
    }
    match (wish.container_type, wish.deployment) {
        (ContainerType::McpServer, _) => vec![Gvisor, Firecracker, Docker],
        (ContainerType::AgentWorkspace, DeploymentMode::Managed) => vec![E2b, Firecracker, Gvisor, Docker],
        (ContainerType::AgentWorkspace, DeploymentMode::SelfHosted) => vec![Firecracker, Gvisor, E2b, Docker],
    }
}

fn refusal(wish: Wish, name: ProviderName, known: Option<&Known>) -> Option<String> {
    let Some(known) = known else {
        return Some(
            match name {
                ProviderName::Firecracker => "not installed on this server",
                ProviderName::E2b => "E2B API key not configured",
                ProviderName::Gvisor => "turned off by the configuration",
                ProviderName::Docker => {
                    "plain Docker is not allowed by the configuration (providers.allow_docker)"
                }
            }
            .to_owned(),
        );
    };
    if wish.security == SecurityLevel::High && known.isolation != IsolationLevel::Microvm {
        return Some(format!("security_level high needs a microVM; this is {}", describe(known.isolation)));
    }
    known.problem.clone()
}

fn describe(isolation: IsolationLevel) -> &'static str {
    match isolation {
        IsolationLevel::Microvm => "a microVM",
        IsolationLevel::ApplicationKernel => "an application kernel",
        IsolationLevel::Container => "a plain container",
    }
}

fn reason(wish: Wish, name: ProviderName, rejected: &[RejectedCandidate]) -> String {
    if wish.provider.explicit().is_some() {
        return format!("{name} was asked for");
    }
    let better: Vec<String> = rejected
        .iter()
        .map(|candidate| format!("{} can't be used ({})", candidate.provider, candidate.reason))
        .collect();
    if better.is_empty() {
        return format!("{name} is the first choice for this kind of workspace");
    }
    format!("{name} is the best there is here: {}", better.join(", "))
}

fn nothing_fits(wish: Wish, rejected: &[RejectedCandidate]) -> ErrorDetail {
    let each: Vec<String> =
        rejected.iter().map(|candidate| format!("{}: {}", candidate.provider, candidate.reason)).collect();
    let isolation = rejected.iter().any(|candidate| candidate.reason.starts_with("security_level"));
    let code = if isolation || wish.provider == ProviderChoice::Docker {
        ErrorCode::Unacceptable
    } else {
        ErrorCode::Unavailable
    };
    let message = match (wish.provider.explicit(), each.as_slice()) {
        (Some(_), [only]) => format!("the provider that was asked for can't be used: {only}"),
        _ => format!("no provider can take this workspace: {}", each.join("; ")),
    };
    ErrorDetail::new(code, message).with_details(serde_json::json!({ "candidates": rejected }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::sample::select;

    use super::*;

    use ProviderName::{Docker, E2b, Firecracker, Gvisor};

    fn known(name: ProviderName, problem: Option<&str>) -> Known {
        let isolation = match name {
            ProviderName::Firecracker | ProviderName::E2b => IsolationLevel::Microvm,
            ProviderName::Gvisor => IsolationLevel::ApplicationKernel,
            ProviderName::Docker => IsolationLevel::Container,
        };
        Known { name, isolation, problem: problem.map(str::to_owned) }
    }

    const AUTO: Wish = Wish {
        container_type: ContainerType::AgentWorkspace,
        provider: ProviderChoice::Auto,
        deployment: DeploymentMode::SelfHosted,
        security: SecurityLevel::Standard,
    };
    const MANAGED: Wish = Wish { deployment: DeploymentMode::Managed, ..AUTO };
    const SERVER: Wish = Wish { container_type: ContainerType::McpServer, ..AUTO };

    /// The order in which providers are tried.
    fn order(wish: Wish, known: &[Known]) -> Vec<ProviderName> {
        plan(wish, known).unwrap().candidates.iter().map(|candidate| candidate.provider).collect()
    }

    #[test]
    fn self_hosted_deployment_with_kvm_available() {
        let all = [known(Firecracker, None), known(Gvisor, None)];
        assert_eq!(order(AUTO, &all), [Firecracker, Gvisor]);
        let reason = plan(AUTO, &all).unwrap().candidates.remove(0).reason;
        assert_eq!(reason, "firecracker is the first choice for this kind of workspace");
    }

    #[test]
    fn self_hosted_deployment_without_kvm() {
        let all = [known(Firecracker, Some("KVM not available")), known(Gvisor, None)];
        let plan = plan(AUTO, &all).unwrap();
        assert_eq!(plan.candidates.len(), 1);
        assert_eq!(plan.candidates[0].provider, Gvisor);
        assert!(plan.candidates[0].reason.contains("KVM not available"), "{plan:?}");
        assert_eq!(plan.rejected[0].provider, Firecracker);
    }

    #[test]
    fn managed_deployment_with_e2b_configured() {
        let all = [known(Firecracker, None), known(Gvisor, None), known(E2b, None)];
        assert_eq!(order(MANAGED, &all), [E2b, Firecracker, Gvisor]);
        // On one's own machines the cloud comes last.
        assert_eq!(order(AUTO, &all), [Firecracker, Gvisor, E2b]);
    }

    #[test]
    fn managed_deployment_without_e2b() {
        let all = [known(Firecracker, None), known(Gvisor, None)];
        assert_eq!(order(MANAGED, &all), [Firecracker, Gvisor]);
        assert_eq!(order(MANAGED, &all[1..]), [Gvisor]);
        let rejected = plan(MANAGED, &all).unwrap().rejected;
        assert!(rejected.iter().any(|one| one.provider == E2b && one.reason.contains("API key")));
    }

    #[test]
    fn agent_workspace_defaults_to_firecracker() {
        let all = [known(Gvisor, None), known(Docker, None), known(Firecracker, None)];
        assert_eq!(order(AUTO, &all), [Firecracker, Gvisor, Docker]);
    }

    #[test]
    fn mcp_server_defaults_to_gvisor() {
        let all = [known(Firecracker, None), known(Gvisor, None), known(E2b, None)];
        assert_eq!(order(SERVER, &all), [Gvisor, Firecracker]);
    }

    #[test]
    fn default_mcp_server_creation_uses_gvisor() {
        let all = [known(Firecracker, None), known(Gvisor, None)];
        assert_eq!(order(SERVER, &all)[0], Gvisor);
        assert_eq!(order(AUTO, &all)[0], Firecracker);
    }

    fn any_wish() -> impl Strategy<Value = Wish> {
        (
            select(ContainerType::ALL),
            select(ProviderChoice::ALL),
            select(DeploymentMode::ALL),
            select(SecurityLevel::ALL),
        )
            .prop_map(|(container_type, provider, deployment, security)| Wish {
                container_type,
                provider,
                deployment,
                security,
            })
    }

    fn any_known() -> impl Strategy<Value = Vec<Known>> {
        prop::collection::vec(prop::option::of(any::<bool>()), 4).prop_map(|states| {
            let states = ProviderName::ALL.iter().zip(states);
            states
                .filter_map(|(name, state)| {
                    state.map(|healthy| known(*name, (!healthy).then_some("is down")))
                })
                .collect()
        })
    }

    proptest! {
        #[test]
        fn an_explicit_provider_never_falls_back(wish in any_wish(), known in any_known()) {
            if let (Some(name), Ok(plan)) = (wish.provider.explicit(), plan(wish, &known)) {
                prop_assert_eq!(plan.candidates.len(), 1);
                prop_assert_eq!(plan.candidates[0].provider, name);
            }
        }

        #[test]
        fn an_unhealthy_provider_is_never_chosen(wish in any_wish(), known in any_known()) {
            if let Ok(plan) = plan(wish, &known) {
                for candidate in plan.candidates {
                    let provider = known.iter().find(|provider| provider.name == candidate.provider);
                    prop_assert!(provider.is_some_and(|provider| provider.problem.is_none()));
                }
            }
        }

        #[test]
        fn high_security_is_never_below_a_microvm(wish in any_wish(), known in any_known()) {
            if wish.security == SecurityLevel::High && let Ok(plan) = plan(wish, &known) {
                for candidate in plan.candidates {
                    prop_assert!(matches!(candidate.provider, ProviderName::Firecracker | ProviderName::E2b));
                }
            }
        }

        #[test]
        fn the_same_input_gives_the_same_plan_and_names_everybody(wish in any_wish(), known in any_known()) {
            let (first, second) = (plan(wish, &known), plan(wish, &known));
            prop_assert_eq!(&first, &second);
            if let Ok(plan) = first {
                let named = plan.candidates.len() + plan.rejected.len();
                prop_assert_eq!(named, preference(wish).len());
            }
        }
    }
}

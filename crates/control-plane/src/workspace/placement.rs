//! Which provider a workspace goes to: a pure function of the request and what is known of the providers.
//!
//! An explicit provider is that one or an error. `auto` prefers microVMs for agents' workspaces and gVisor for MCP
//! servers, and admits only microVMs when the security level is high. Plain Docker is the last resort, and only
//! where the configuration allows it.

use emergent_wire::workspace::{
    ContainerType, DeploymentMode, IsolationLevel, ProviderChoice, ProviderName, RejectedCandidate,
    SecurityLevel,
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
    let better: Vec<&str> = rejected.iter().map(|candidate| candidate.provider.as_str()).collect();
    if better.is_empty() {
        return format!("{name} is the first choice for this kind of workspace");
    }
    format!("{name} is the best that can be used; not {}", better.join(", "))
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

    fn known(name: ProviderName, problem: Option<&str>) -> Known {
        let isolation = match name {
            ProviderName::Firecracker | ProviderName::E2b => IsolationLevel::Microvm,
            ProviderName::Gvisor => IsolationLevel::ApplicationKernel,
            ProviderName::Docker => IsolationLevel::Container,
        };
        Known { name, isolation, problem: problem.map(str::to_owned) }
    }

    #[test]
    fn default_mcp_server_creation_uses_gvisor() {
        let all = [known(ProviderName::Firecracker, None), known(ProviderName::Gvisor, None)];
        let wish = |container_type| Wish {
            container_type,
            provider: ProviderChoice::Auto,
            deployment: DeploymentMode::SelfHosted,
            security: SecurityLevel::Standard,
        };
        let first = |container_type| plan(wish(container_type), &all).unwrap().candidates.remove(0);
        assert_eq!(first(ContainerType::McpServer).provider, ProviderName::Gvisor);
        assert_eq!(first(ContainerType::AgentWorkspace).provider, ProviderName::Firecracker);
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

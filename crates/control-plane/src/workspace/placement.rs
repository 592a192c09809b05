//! Placement: the choice of a provider for a workspace. A pure function of the request and of the providers' facts and state.
//!
//! A request that names a provider gets that provider or an error. Otherwise the providers are tried in the order of their ranks
//! ([`ProviderFacts::ranks`]). With security level `high` only microVMs are admitted.

use std::fmt;

use emergent_providers::{Absence, ProviderFacts};
use emergent_wire::workspace::{
    ContainerType, DeploymentMode, IsolationLevel, Placement, ProviderChoice, ProviderName,
    RejectedCandidate, SecurityLevel,
};

/// The part of a request that placement depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PlacementRequest {
    pub(crate) container_type: ContainerType,
    pub(crate) provider: ProviderChoice,
    pub(crate) deployment: DeploymentMode,
    pub(crate) security: SecurityLevel,
}

/// A provider of the table and its present state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ProviderState {
    pub(crate) facts: ProviderFacts,
    pub(crate) availability: Availability,
}

/// Whether a provider can be used now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Availability {
    Healthy,
    /// It is configured, but can't be used for this reason.
    Unhealthy(String),
    /// It is not configured.
    Absent,
}

/// The providers to try, best first, and the rejected providers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) candidates: Vec<Candidate>,
    pub(crate) rejected: Vec<RejectedCandidate>,
}

/// A provider to try, and the reason for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub(crate) provider: ProviderName,
    pub(crate) reason: String,
}

impl Candidate {
    /// The placement that is stored when this candidate is tried.
    pub(crate) fn placement(&self, rejected: &[RejectedCandidate]) -> Placement {
        Placement {
            provider: self.provider,
            reason: self.reason.clone(),
            rejected: rejected.to_vec(),
            warm_hit: false,
        }
    }

    /// The rejection that is stored when this candidate has failed.
    pub(crate) fn rejected(&self, error: &impl std::fmt::Display) -> RejectedCandidate {
        RejectedCandidate { provider: self.provider, reason: error.to_string() }
    }
}

/// No provider can take the workspace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NoProvider {
    pub(crate) rejected: Vec<RejectedCandidate>,
    /// Whether the request names the provider.
    is_explicit: bool,
    /// Whether the same request fails again until the request or the configuration changes.
    pub(crate) is_permanent: bool,
}

impl std::error::Error for NoProvider {}

impl fmt::Display for NoProvider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let each: Vec<String> = self
            .rejected
            .iter()
            .map(|candidate| format!("{}: {}", candidate.provider, candidate.reason))
            .collect();
        match each.as_slice() {
            [only] if self.is_explicit => write!(f, "the requested provider can't be used: {only}"),
            _ => write!(f, "no provider can take this workspace: {}", each.join("; ")),
        }
    }
}

/// The reason why a provider is no candidate.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Rejection {
    /// It is not configured.
    Absent(Absence),
    /// Its isolation is too weak for the security level.
    TooWeak(IsolationLevel),
    /// It can't be used now.
    Unhealthy(String),
}

impl Rejection {
    fn reason(&self) -> String {
        match self {
            Self::Absent(absence) => absence.reason().to_owned(),
            Self::TooWeak(isolation) => {
                format!("security_level high needs a microVM; this is {}", describe(*isolation))
            }
            Self::Unhealthy(problem) => problem.clone(),
        }
    }

    /// Whether the same request is rejected again until the request or the configuration changes.
    fn is_permanent(&self) -> bool {
        matches!(self, Self::TooWeak(_) | Self::Absent(Absence::NotAllowed(_)))
    }
}

/// Chooses the providers to try.
pub(crate) fn plan(request: PlacementRequest, providers: &[ProviderState]) -> Result<Plan, NoProvider> {
    let mut plan = Plan { candidates: Vec::new(), rejected: Vec::new() };
    let mut rejections = Vec::new();
    for provider in preference(request, providers) {
        let name = provider.facts.name;
        match rejection(request, provider) {
            Some(rejection) => {
                plan.rejected.push(RejectedCandidate { provider: name, reason: rejection.reason() });
                rejections.push(rejection);
            }
            None => {
                let reason = reason(request, name, &plan.rejected);
                plan.candidates.push(Candidate { provider: name, reason });
            }
        }
    }
    if plan.candidates.is_empty() {
        return Err(no_candidate(request, &rejections, plan.rejected));
    }
    Ok(plan)
}

/// The providers that the request admits, best first.
fn preference(request: PlacementRequest, providers: &[ProviderState]) -> Vec<&ProviderState> {
    if let Some(name) = request.provider.explicit() {
        return providers.iter().filter(|provider| provider.facts.name == name).collect();
    }
    let rank =
        |provider: &ProviderState| provider.facts.ranks.get(request.container_type, request.deployment);
    let mut ranked: Vec<&ProviderState> =
        providers.iter().filter(|provider| rank(provider).is_some()).collect();
    ranked.sort_by_key(|provider| (rank(provider), provider.facts.name));
    ranked
}

fn rejection(request: PlacementRequest, provider: &ProviderState) -> Option<Rejection> {
    let isolation = provider.facts.isolation;
    match &provider.availability {
        Availability::Absent => Some(Rejection::Absent(provider.facts.absence)),
        _ if request.security == SecurityLevel::High && isolation != IsolationLevel::Microvm => {
            Some(Rejection::TooWeak(isolation))
        }
        Availability::Unhealthy(problem) => Some(Rejection::Unhealthy(problem.clone())),
        Availability::Healthy => None,
    }
}

fn describe(isolation: IsolationLevel) -> &'static str {
    match isolation {
        IsolationLevel::Microvm => "a microVM",
        IsolationLevel::ApplicationKernel => "an application kernel",
        IsolationLevel::Container => "a plain container",
    }
}

fn reason(request: PlacementRequest, name: ProviderName, rejected: &[RejectedCandidate]) -> String {
    if request.provider.explicit().is_some() {
        return format!("{name} was asked for");
    }
    let preferred: Vec<String> = rejected
        .iter()
        .map(|candidate| format!("{} can't be used ({})", candidate.provider, candidate.reason))
        .collect();
    if preferred.is_empty() {
        return format!("{name} is the first choice for this kind of workspace");
    }
    format!("{name} is the best available provider: {}", preferred.join(", "))
}

fn no_candidate(
    request: PlacementRequest,
    rejections: &[Rejection],
    rejected: Vec<RejectedCandidate>,
) -> NoProvider {
    let is_explicit = request.provider.explicit().is_some();
    let is_too_weak = rejections.iter().any(|rejection| matches!(rejection, Rejection::TooWeak(_)));
    let is_refused = is_explicit && rejections.iter().all(Rejection::is_permanent);
    NoProvider { rejected, is_explicit, is_permanent: is_too_weak || is_refused }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::sample::select;

    use super::*;
    use emergent_providers::{ProviderTable, Ranks};

    use ProviderName::{Docker, E2b, Firecracker, Gvisor};

    /// The standard table, of which these providers are configured. Those with a problem are unhealthy.
    fn having(enabled: &[(ProviderName, Option<&str>)]) -> Vec<ProviderState> {
        let state = |facts: &ProviderFacts| {
            let found = enabled.iter().find(|(name, _)| *name == facts.name);
            let availability = match found {
                None => Availability::Absent,
                Some((_, None)) => Availability::Healthy,
                Some((_, Some(problem))) => Availability::Unhealthy((*problem).to_owned()),
            };
            ProviderState { facts: *facts, availability }
        };
        ProviderTable::standard().facts().map(state).collect()
    }

    const AUTO: PlacementRequest = PlacementRequest {
        container_type: ContainerType::AgentWorkspace,
        provider: ProviderChoice::Auto,
        deployment: DeploymentMode::SelfHosted,
        security: SecurityLevel::Standard,
    };
    const MANAGED: PlacementRequest = PlacementRequest { deployment: DeploymentMode::Managed, ..AUTO };
    const SERVER: PlacementRequest = PlacementRequest { container_type: ContainerType::McpServer, ..AUTO };

    /// The order in which providers are tried.
    fn order(request: PlacementRequest, providers: &[ProviderState]) -> Vec<ProviderName> {
        plan(request, providers).unwrap().candidates.iter().map(|candidate| candidate.provider).collect()
    }

    #[test]
    fn self_hosted_deployment_with_kvm_available() {
        let all = having(&[(Firecracker, None), (Gvisor, None)]);
        assert_eq!(order(AUTO, &all), [Firecracker, Gvisor]);
        let reason = plan(AUTO, &all).unwrap().candidates.remove(0).reason;
        assert_eq!(reason, "firecracker is the first choice for this kind of workspace");
    }

    #[test]
    fn self_hosted_deployment_without_kvm() {
        let all = having(&[(Firecracker, Some("KVM not available")), (Gvisor, None)]);
        let plan = plan(AUTO, &all).unwrap();
        assert_eq!(plan.candidates.len(), 1);
        assert_eq!(plan.candidates[0].provider, Gvisor);
        assert!(plan.candidates[0].reason.contains("KVM not available"), "{plan:?}");
        assert_eq!(plan.rejected[0].provider, Firecracker);
    }

    #[test]
    fn managed_deployment_with_e2b_configured() {
        let all = having(&[(Firecracker, None), (Gvisor, None), (E2b, None)]);
        assert_eq!(order(MANAGED, &all), [E2b, Firecracker, Gvisor]);
        // In a self-hosted deployment the cloud comes last.
        assert_eq!(order(AUTO, &all), [Firecracker, Gvisor, E2b]);
    }

    #[test]
    fn managed_deployment_without_e2b() {
        let all = having(&[(Firecracker, None), (Gvisor, None)]);
        assert_eq!(order(MANAGED, &all), [Firecracker, Gvisor]);
        assert_eq!(order(MANAGED, &having(&[(Gvisor, None)])), [Gvisor]);
        let rejected = plan(MANAGED, &all).unwrap().rejected;
        assert!(rejected.iter().any(|one| one.provider == E2b && one.reason.contains("API key")));
    }

    #[test]
    fn agent_workspace_defaults_to_firecracker() {
        let all = having(&[(Gvisor, None), (Docker, None), (Firecracker, None)]);
        assert_eq!(order(AUTO, &all), [Firecracker, Gvisor, Docker]);
    }

    #[test]
    fn mcp_server_defaults_to_gvisor() {
        let all = having(&[(Firecracker, None), (Gvisor, None), (E2b, None)]);
        assert_eq!(order(SERVER, &all), [Gvisor, Firecracker]);
    }

    #[test]
    fn default_mcp_server_creation_uses_gvisor() {
        let all = having(&[(Firecracker, None), (Gvisor, None)]);
        assert_eq!(order(SERVER, &all)[0], Gvisor);
        assert_eq!(order(AUTO, &all)[0], Firecracker);
    }

    fn any_request() -> impl Strategy<Value = PlacementRequest> {
        (
            select(ContainerType::ALL),
            select(ProviderChoice::ALL),
            select(DeploymentMode::ALL),
            select(SecurityLevel::ALL),
        )
            .prop_map(|(container_type, provider, deployment, security)| PlacementRequest {
                container_type,
                provider,
                deployment,
                security,
            })
    }

    /// Any table: each name with random facts, because placement must not depend on names.
    fn any_providers() -> impl Strategy<Value = Vec<ProviderState>> {
        let rank = || prop::option::of(any::<u8>());
        let facts = (select(IsolationLevel::ALL), rank(), rank(), rank(), any::<bool>());
        let availability = prop_oneof![
            Just(Availability::Healthy),
            Just(Availability::Unhealthy("is down".to_owned())),
            Just(Availability::Absent),
        ];
        prop::collection::vec((facts, availability), ProviderName::ALL.len()).prop_map(|states| {
            let state = |(name, (facts, availability)): (&ProviderName, ((_, _, _, _, bool), _))| {
                let (isolation, mcp_server, self_hosted, managed, is_forbidden) = facts;
                let absence = if is_forbidden { Absence::NotAllowed } else { Absence::NotConfigured };
                let facts = ProviderFacts {
                    name: *name,
                    isolation,
                    ranks: Ranks { mcp_server, self_hosted, managed },
                    requires: &[],
                    sandbox_scope: name.as_str(),
                    absence: absence("is absent"),
                };
                ProviderState { facts, availability }
            };
            ProviderName::ALL.iter().zip(states).map(state).collect()
        })
    }

    fn state_of(name: ProviderName, providers: &[ProviderState]) -> &ProviderState {
        providers.iter().find(|provider| provider.facts.name == name).unwrap()
    }

    proptest! {
        #[test]
        fn an_explicit_provider_never_falls_back(request in any_request(), providers in any_providers()) {
            if let (Some(name), Ok(plan)) = (request.provider.explicit(), plan(request, &providers)) {
                prop_assert_eq!(plan.candidates.len(), 1);
                prop_assert_eq!(plan.candidates[0].provider, name);
            }
        }

        #[test]
        fn only_healthy_providers_are_chosen(request in any_request(), providers in any_providers()) {
            if let Ok(plan) = plan(request, &providers) {
                for candidate in plan.candidates {
                    let state = state_of(candidate.provider, &providers);
                    prop_assert_eq!(&state.availability, &Availability::Healthy);
                }
            }
        }

        #[test]
        fn high_security_is_never_below_a_microvm(request in any_request(), providers in any_providers()) {
            if request.security == SecurityLevel::High && let Ok(plan) = plan(request, &providers) {
                for candidate in plan.candidates {
                    let facts = state_of(candidate.provider, &providers).facts;
                    prop_assert_eq!(facts.isolation, IsolationLevel::Microvm);
                }
            }
        }

        #[test]
        fn candidates_are_in_the_order_of_their_ranks(request in any_request(), providers in any_providers()) {
            if request.provider == ProviderChoice::Auto && let Ok(plan) = plan(request, &providers) {
                let rank = |candidate: &Candidate| {
                    let ranks = state_of(candidate.provider, &providers).facts.ranks;
                    ranks.get(request.container_type, request.deployment)
                };
                let ranks: Vec<Option<u8>> = plan.candidates.iter().map(rank).collect();
                prop_assert!(ranks.is_sorted() && ranks.iter().all(Option::is_some), "{:?}", ranks);
            }
        }

        #[test]
        fn the_same_input_gives_the_same_plan_and_names_every_admitted_provider(
            request in any_request(),
            providers in any_providers(),
        ) {
            let (first, second) = (plan(request, &providers), plan(request, &providers));
            prop_assert_eq!(&first, &second);
            if let Ok(plan) = first {
                let named = plan.candidates.len() + plan.rejected.len();
                prop_assert_eq!(named, preference(request, &providers).len());
            }
        }

        /// A retry can't help where the rejection is permanent.
        #[test]
        fn a_request_that_can_never_succeed_is_unacceptable(
            request in any_request(),
            providers in any_providers(),
        ) {
            let Some(name) = request.provider.explicit() else { return Ok(()) };
            let state = state_of(name, &providers);
            let is_forbidden = matches!(state.facts.absence, Absence::NotAllowed(_));
            let is_too_weak =
                request.security == SecurityLevel::High && state.facts.isolation != IsolationLevel::Microvm;
            let expected = match state.availability {
                Availability::Absent => is_forbidden,
                Availability::Healthy | Availability::Unhealthy(_) => is_too_weak,
            };
            if let Err(error) = plan(request, &providers) {
                prop_assert_eq!(error.is_permanent, expected, "{:?}", error);
            }
        }
    }
}

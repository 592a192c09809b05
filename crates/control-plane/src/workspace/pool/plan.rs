//! The steps from the present spares to the target: a pure function.

use emergent_store::{Shape, Spare};
use emergent_wire::WorkspaceId;
use emergent_wire::pool::SpareStatus;

/// A shape of the target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) shape: Shape,
    /// The present digest of the image.
    pub(super) digest: String,
    pub(super) size: u32,
}

/// The steps of one pass.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Steps {
    /// Spares to remove.
    pub(super) withdraw: Vec<Spare>,
    /// One entry for each spare to make.
    pub(super) fill: Vec<Wanted>,
}

/// Plans the steps. `is_abandoned` tells whether the server that was making or removing a spare has ended.
pub(super) fn plan(
    wanted: &[Wanted],
    spares: &[Spare],
    is_unusable: impl Fn(WorkspaceId) -> bool,
    is_abandoned: impl Fn(&Spare) -> bool,
) -> Steps {
    let mut steps = Steps::default();
    let mut kept = vec![0_u32; wanted.len()];
    for spare in spares {
        let place = wanted
            .iter()
            .position(|wanted| wanted.shape == spare.shape && wanted.digest == spare.image_digest);
        let is_wanted = match spare.status {
            SpareStatus::Ready => !is_unusable(spare.id),
            SpareStatus::Filling | SpareStatus::Leaving if is_abandoned(spare) => false,
            SpareStatus::Filling => true,
            SpareStatus::Leaving => continue,
        };
        match place {
            Some(place) if is_wanted && kept[place] < wanted[place].size => kept[place] += 1,
            // Another server is making it. When it is ready, a pass removes it.
            _ if spare.status == SpareStatus::Filling && !is_abandoned(spare) => {}
            _ => steps.withdraw.push(spare.clone()),
        }
    }
    for (wanted, kept) in wanted.iter().zip(kept) {
        for _ in kept..wanted.size {
            steps.fill.push(wanted.clone());
        }
    }
    steps
}

#[cfg(test)]
mod tests {
    use chrono::Utc;
    use emergent_wire::id::ServerId;
    use emergent_wire::workspace::{NetworkMode, ProviderName, ResourceLimits};
    use proptest::prelude::*;
    use proptest::sample::select;

    use super::*;

    fn shape(image: &str) -> Shape {
        Shape {
            provider: ProviderName::Gvisor,
            image: image.to_owned(),
            network: NetworkMode::Nat,
            limits: ResourceLimits::default(),
        }
    }

    fn any_spare() -> impl Strategy<Value = Spare> {
        (select(SpareStatus::ALL), select(&["a", "b", "c"][..]), select(&["1", "2"][..]), any::<bool>())
            .prop_map(|(status, image, digest, is_owned)| Spare {
                id: WorkspaceId::generate(),
                shape: shape(image),
                image_digest: digest.to_owned(),
                status,
                owner: is_owned.then(ServerId::generate),
                created_at: Utc::now(),
            })
    }

    proptest! {
        /// After the steps the pool matches the target, with the present images. Spares that another server is changing are left
        /// alone.
        #[test]
        fn the_steps_lead_to_the_target(
            spares in prop::collection::vec(any_spare(), 0..12),
            sizes in prop::collection::vec(0_u32..4, 2),
            dead in prop::collection::vec(any::<bool>(), 12),
        ) {
            let wanted: Vec<Wanted> = ["a", "b"].iter().zip(&sizes)
                .map(|(image, size)| Wanted { shape: shape(image), digest: "1".to_owned(), size: *size })
                .collect();
            let is_unusable = |id| spares.iter().zip(&dead).any(|(spare, dead)| spare.id == id && *dead);
            let is_abandoned = |spare: &Spare| spare.owner.is_none();
            let steps = plan(&wanted, &spares, is_unusable, is_abandoned);
            for spare in &steps.withdraw {
                prop_assert!(spare.status == SpareStatus::Ready || is_abandoned(spare));
            }
            for wanted in &wanted {
                let stays = spares.iter().filter(|spare| {
                    let is_coming = spare.status == SpareStatus::Ready
                        || (spare.status == SpareStatus::Filling && !is_abandoned(spare));
                    is_coming && spare.shape == wanted.shape && spare.image_digest == wanted.digest
                        && !steps.withdraw.contains(spare)
                });
                let stays: Vec<&Spare> = stays.collect();
                prop_assert!(stays.iter().all(|spare| spare.status != SpareStatus::Ready || !is_unusable(spare.id)));
                let filled = steps.fill.iter().filter(|fill| *fill == wanted).count();
                let others = stays.iter().filter(|spare| spare.status == SpareStatus::Filling).count();
                prop_assert!(stays.len() + filled >= wanted.size as usize);
                prop_assert!(stays.len() - others + filled <= wanted.size as usize);
            }
            for ready in spares.iter().filter(|spare| spare.status == SpareStatus::Ready) {
                let is_stale = ready.image_digest != "1" || ready.shape.image == "c";
                prop_assert!(!is_stale || steps.withdraw.contains(ready));
            }
        }
    }
}

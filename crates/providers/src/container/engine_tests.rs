//! Calls of the engine that succeed because the state is already the wanted one. Against the real engine.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use bollard::models::ContainerCreateBody;
use emergent_wire::id::InstallationId;
use emergent_wire::workspace::DEFAULT_IMAGE;

use super::engine::Engine;
use super::engine_error::EngineError;

/// A container that is removed also when the test fails.
struct TestContainer {
    engine: Engine,
    name: String,
}

impl TestContainer {
    async fn create() -> Self {
        let name = format!("emergent-test-engine-{}", InstallationId::generate());
        let container = Self { engine: Engine::open(None).unwrap(), name };
        container.engine.create(&container.name, sleeping(DEFAULT_IMAGE)).await.unwrap();
        container
    }
}

impl Drop for TestContainer {
    fn drop(&mut self) {
        let removed = std::process::Command::new("docker").args(["rm", "--force", &self.name]).output();
        assert!(removed.is_ok_and(|output| output.status.success()) || std::thread::panicking());
    }
}

fn sleeping(image: &str) -> ContainerCreateBody {
    ContainerCreateBody {
        image: Some(image.to_owned()),
        entrypoint: Some(vec!["sleep".to_owned(), "600".to_owned()]),
        ..ContainerCreateBody::default()
    }
}

#[tokio::test]
async fn repeated_calls_succeed_whatever_the_engine_answers() {
    let container = TestContainer::create().await;
    let (engine, name) = (&container.engine, container.name.as_str());
    engine.create(name, sleeping(DEFAULT_IMAGE)).await.unwrap();
    engine.unpause(name).await.unwrap();
    engine.start(name).await.unwrap();
    engine.unpause(name).await.unwrap();
    for _ in 0..2 {
        engine.pause(name).await.unwrap();
    }
    for _ in 0..2 {
        engine.unpause(name).await.unwrap();
    }
    let (first, second) = tokio::join!(engine.remove(name), engine.remove(name));
    assert_eq!((first, second), (Ok(()), Ok(())));
    engine.unpause(name).await.unwrap();
    engine.remove(name).await.unwrap();
}

#[tokio::test]
async fn a_stopped_container_can_not_be_paused() {
    let container = TestContainer::create().await;
    let refused = container.engine.pause(&container.name).await.unwrap_err();
    assert!(matches!(refused, EngineError::Conflict(_) | EngineError::Other(_)), "{refused:?}");
}

#[tokio::test]
async fn a_missing_image_and_a_missing_runtime_are_found_by_state() {
    let engine = Engine::open(None).unwrap();
    let missing = engine.create("emergent-test-no-image", sleeping("emergent/no-such-image:none")).await;
    assert_eq!(missing, Err(EngineError::NoImage("emergent/no-such-image:none".to_owned())));
    assert_eq!(engine.has_runtime("no-such-runtime").await, Ok(false));
    assert_eq!(engine.has_runtime("runc").await, Ok(true));
}

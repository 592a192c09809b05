//! One microVM in the manager's memory: its record, its lock, its console.
//!
//! Invariant: a record is changed only through a [`LockedMachine`], so there is one operation on a microVM at a time.

use std::fs::File;
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::Arc;

use emergent_wire::WorkspaceId;
use emergent_wire::manager::MachinePhase;
use parking_lot::Mutex;
use tokio::sync::OwnedMutexGuard;

use crate::console;
use crate::error::{HostError, on_host};
use crate::process::Process;
use crate::record::{Record, Records};

/// Why a microVM's state does not allow an operation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    /// It is being created or removed.
    #[error("the microVM is {0}: try again")]
    Busy(MachinePhase),
    /// It does not run.
    #[error("the microVM does not run: {0}")]
    NotRunning(String),
    /// It was to be started without a slot.
    #[error("the microVM has no slot")]
    NoSlot,
}

/// A microVM.
pub(crate) struct Machine {
    pub(crate) id: WorkspaceId,
    records: Records,
    record: Mutex<Record>,
    operation: Arc<tokio::sync::Mutex<()>>,
    /// One end of the console's pipe. It stays open, so that the output can be read after the process has ended.
    console: Mutex<Option<File>>,
}

impl Machine {
    pub(crate) fn new(record: Record, records: Records) -> Arc<Self> {
        let (operation, console) = (Arc::default(), Mutex::default());
        Arc::new(Self { id: record.id, records, record: Mutex::new(record), operation, console })
    }

    /// The current record.
    pub(crate) fn record(&self) -> Record {
        self.record.lock().clone()
    }

    pub(crate) fn phase(&self) -> MachinePhase {
        self.record.lock().phase
    }

    /// Its process, if that is alive.
    pub(crate) fn live_process(&self) -> Option<Process> {
        self.record().process.filter(|process| process.is_alive())
    }

    /// Waits for the operation before and takes the lock.
    pub(crate) async fn lock(self: &Arc<Self>) -> LockedMachine {
        let guard = Arc::clone(&self.operation).lock_owned().await;
        LockedMachine { machine: Arc::clone(self), _guard: guard }
    }

    /// Takes the lock, if there is no other operation.
    pub(crate) fn try_lock(self: &Arc<Self>) -> Option<LockedMachine> {
        let guard = Arc::clone(&self.operation).try_lock_owned().ok()?;
        Some(LockedMachine { machine: Arc::clone(self), _guard: guard })
    }

    pub(crate) fn console_path(&self) -> PathBuf {
        self.records.of(self.id).join("console")
    }

    /// The last lines of its console.
    pub(crate) fn console_tail(&self) -> Option<String> {
        console::tail(&self.console_path())
    }

    /// The reason that is recorded when its process has ended by itself.
    pub(crate) fn end_reason(&self) -> String {
        let tail = self.console_tail().map_or_else(String::new, |text| format!(": {text}"));
        format!("its process has ended{tail}")
    }
}

/// A microVM whose lock is held.
pub(crate) struct LockedMachine {
    machine: Arc<Machine>,
    _guard: OwnedMutexGuard<()>,
}

impl Deref for LockedMachine {
    type Target = Arc<Machine>;

    fn deref(&self) -> &Arc<Machine> {
        &self.machine
    }
}

impl LockedMachine {
    /// Changes the record, on the disk first. Returns the new one.
    pub(crate) async fn update(&self, change: impl FnOnce(&mut Record)) -> Result<Record, HostError> {
        let mut record = self.record();
        change(&mut record);
        let (records, saved) = (self.records.clone(), record.clone());
        on_host("saving the microVM's record", move || records.save(&saved)).await?;
        self.replace_record(record.clone());
        Ok(record)
    }

    /// Changes the record also if it can't be saved. For records of microVMs that are to end or to be removed: a disk that
    /// can't be written must not keep the microVMs that fill it.
    pub(crate) async fn update_even_unsaved(&self, change: impl Fn(&mut Record)) {
        if let Err(error) = self.update(&change).await {
            let mut record = self.record();
            change(&mut record);
            tracing::warn!(machine = %self.id, phase = %record.phase, %error, "the microVM's record could not be saved; the operation continues");
            self.replace_record(record);
        }
    }

    /// Replaces the record in memory only.
    pub(crate) fn replace_record(&self, record: Record) {
        *self.machine.record.lock() = record;
    }

    pub(crate) fn set_console(&self, console: Option<File>) {
        *self.console.lock() = console;
    }
}

//! The thread pool for calls. A few idle threads are kept, so that most calls need no new thread.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Idle threads that are kept.
const KEPT_THREADS: usize = 2;
/// The size of a stack. On gVisor all of a stack is resident once a byte of it is.
const STACK_BYTES: usize = 96 * 1024;
/// The time after which an idle thread ends, down to [`KEPT_THREADS`].
const IDLE_TIME: Duration = Duration::from_secs(10);

/// No thread could be started; holds the job's subject.
pub(crate) struct Refused<T>(pub(crate) T);

type Job = Box<dyn FnOnce() + Send>;

/// A pool that grows as needed. The connections limit the number of jobs.
#[derive(Default)]
pub(crate) struct Workers {
    state: Mutex<State>,
    work: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    idle: usize,
}

impl Workers {
    /// Runs `job` on `subject` on a thread of the pool. Gives the subject back when no thread can be started.
    pub(crate) fn run<T: Send + 'static>(
        self: &Arc<Self>,
        subject: T,
        job: impl FnOnce(T) + Send + 'static,
    ) -> Result<(), Refused<T>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.jobs.len() < state.idle {
            state.jobs.push_back(Box::new(move || job(subject)));
            drop(state);
            self.work.notify_one();
            return Ok(());
        }
        drop(state);
        // In a slot, because a thread that can't be started drops its closure.
        let slot = Arc::new(Mutex::new(Some(subject)));
        let (pool, filled) = (Arc::clone(self), Arc::clone(&slot));
        let started = spawn_thread("call", move || {
            if let Some(subject) = take(&filled) {
                job(subject);
            }
            pool.work_on();
        });
        match if started { None } else { take(&slot) } {
            Some(subject) => Err(Refused(subject)),
            None => Ok(()),
        }
    }

    fn work_on(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                job();
                state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            state.idle += 1;
            let (next, waited) =
                self.work.wait_timeout(state, IDLE_TIME).unwrap_or_else(PoisonError::into_inner);
            state = next;
            state.idle -= 1;
            if waited.timed_out() && state.jobs.is_empty() && state.idle >= KEPT_THREADS {
                return;
            }
        }
    }
}

fn take<T>(slot: &Mutex<Option<T>>) -> Option<T> {
    slot.lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// Starts a thread with a small stack. False when the sandbox has no room for one.
pub(crate) fn spawn_thread(name: &str, body: impl FnOnce() + Send + 'static) -> bool {
    std::thread::Builder::new().name(name.to_owned()).stack_size(STACK_BYTES).spawn(body).is_ok()
}

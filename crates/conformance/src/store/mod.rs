//! The suite for [`Store`].
//!
//! ```
//! use std::sync::Arc;
//! use phalanx_conformance::store;
//! use phalanx_store::HashStore;
//!
//! let report = store::run(&|| Arc::new(HashStore::new()));
//! assert!(report.skipped.is_empty());
//! ```
//!
//! A factory yields stores that share nothing with each other; every case gets one. Cases that
//! need two handles take a [`second_handle`](Store::second_handle). What a store answers with
//! [`StoreError::Unsupported`] is skipped and named in the [`Report`]; everything else is an
//! obligation.
//!
//! Threads that should block are given a moment to do so before they are woken. A slow machine
//! makes such a case weaker, never wrong.

mod barriers;
mod blocking;
mod counters;
mod processes;
mod queues;
mod timeouts;
mod values;

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::Duration;

use phalanx_store::{Store, StoreError};

pub use processes::run_rank;

/// Default timeout of the handles that cases use: long enough for any machine, short enough that
/// a lost wake-up is an error with a name and not a hang.
const PATIENCE: Duration = Duration::from_secs(30);
/// A case that is not through by then hangs.
const WATCHDOG: Duration = Duration::from_secs(120);
/// What a thread is given to reach the call in which it should block.
const MOMENT: Duration = Duration::from_millis(30);

/// Makes fresh stores.
pub type Factory<'a> = &'a dyn Fn() -> Arc<dyn Store>;

/// A case goes through, or meets an operation that the store does not have.
type Outcome = Result<(), Skip>;

/// Why a case could not be run: the text of [`StoreError::Unsupported`].
#[derive(Debug)]
struct Skip(String);

/// One obligation of a store.
#[derive(Clone, Copy)]
pub struct Case {
    name: &'static str,
    body: fn(Arc<dyn Store>) -> Outcome,
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// What became of the cases that did not fail.
#[derive(Debug, Default)]
pub struct Report {
    /// The names of those that passed.
    pub passed: Vec<&'static str>,
    /// Those that need an operation the store does not have, and what it said.
    pub skipped: Vec<(&'static str, String)>,
}

/// A case that failed.
#[derive(Debug)]
pub struct Failure {
    /// Which case.
    pub case: &'static str,
    /// The assertion, or that it hangs.
    pub message: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "store conformance case `{}`: {}",
            self.case, self.message
        )
    }
}

impl Case {
    /// The behaviour, as a name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Runs this case alone on a fresh store. `Ok(Some(_))` says why it was skipped.
    pub fn run(&self, make: Factory<'_>) -> Result<Option<String>, Failure> {
        let failure = |message| Failure {
            case: self.name,
            message,
        };
        let (store, body) = (make(), self.body);
        store.set_timeout(PATIENCE);
        let (sender, receiver) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name(self.name.into())
            .spawn(move || {
                let outcome = body(store);
                // Nobody listens any more if the case was given up as hanging.
                let _ = sender.send(outcome);
            })
            .map_err(|err| failure(format!("no thread for it: {err}")))?;
        match receiver.recv_timeout(WATCHDOG) {
            Ok(outcome) => {
                join(thread).map_err(failure)?;
                Ok(outcome.err().map(|skip| skip.0))
            }
            Err(RecvTimeoutError::Disconnected) => {
                let message = join(thread).err();
                Err(failure(message.unwrap_or_else(|| "ended early".into())))
            }
            Err(RecvTimeoutError::Timeout) => {
                Err(failure(format!("still running after {WATCHDOG:?}")))
            }
        }
    }
}

/// All cases, for a test that wants to list them or run them one by one.
pub fn cases() -> Vec<Case> {
    [
        values::CASES,
        counters::CASES,
        blocking::CASES,
        timeouts::CASES,
        queues::CASES,
        barriers::CASES,
    ]
    .concat()
}

/// Runs all cases.
///
/// # Panics
///
/// If any fails, with the names and messages of all that did.
pub fn run(make: Factory<'_>) -> Report {
    let mut report = Report::default();
    let mut failures = Vec::new();
    for case in cases() {
        match case.run(make) {
            Ok(None) => report.passed.push(case.name),
            Ok(Some(why)) => report.skipped.push((case.name, why)),
            Err(failure) => failures.push(failure.to_string()),
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    report
}

fn join<T>(thread: JoinHandle<T>) -> Result<T, String> {
    thread.join().map_err(|panic| panic_text(&*panic))
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("panicked")
        .to_owned()
}

/// A thread of a case; its panic is the case's.
struct Other<T>(JoinHandle<T>);

impl<T: Send + 'static> Other<T> {
    /// Runs `body` on a second handle of `store` and gives it a moment to block.
    fn start(
        store: &Arc<dyn Store>,
        body: impl FnOnce(Arc<dyn Store>) -> T + Send + 'static,
    ) -> Self {
        let handle = second(store);
        let other = Self(std::thread::spawn(move || body(handle)));
        std::thread::sleep(MOMENT);
        other
    }

    fn is_blocked(&self) -> bool {
        !self.0.is_finished()
    }

    fn result(self) -> T {
        join(self.0).unwrap_or_else(|message| panic!("in the other thread: {message}"))
    }
}

fn second(store: &Arc<dyn Store>) -> Arc<dyn Store> {
    store.second_handle().expect("second_handle")
}

/// Waits until `condition` holds; for effects of calls that are not acknowledged.
fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let start = std::time::Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "never became true: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Turns "this store has no such operation" into a skipped case and any other error into a panic.
trait OrSkip<T> {
    fn or_skip(self) -> Result<T, Skip>;
}

impl<T> OrSkip<T> for phalanx_store::Result<T> {
    #[track_caller]
    fn or_skip(self) -> Result<T, Skip> {
        match self {
            Ok(value) => Ok(value),
            Err(err @ StoreError::Unsupported { .. }) => Err(Skip(err.to_string())),
            Err(err) => panic!("{err}"),
        }
    }
}

/// Asserts a timeout of operation `op` that names `what`.
#[track_caller]
fn assert_timeout<T: fmt::Debug>(result: phalanx_store::Result<T>, op: &str, what: &str) {
    let err = result.expect_err("nothing was there, so this must time out");
    assert!(err.is_timeout(), "not a timeout: {err:?}");
    let text = err.to_string();
    assert!(text.contains(op), "{text:?} does not name {op}");
    assert!(text.contains(what), "{text:?} does not name {what}");
}

/// Lists the cases of a file under their functions' names.
macro_rules! case_list {
    ($($name:ident),* $(,)?) => {
        pub(super) const CASES: &[super::Case] = &[$(super::Case {
            name: stringify!($name),
            body: $name,
        }),*];
    };
}
use case_list;

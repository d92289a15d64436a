//! A rank's side of the harness.

use std::cell::Cell;
use std::ffi::OsString;
use std::io::Write as _;
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use phalanx_store::{JobToken, Store, TcpStore, TcpStoreOptions};
use rustix::process::{Signal, getpid, getppid, kill_process, set_parent_process_death_signal};

use crate::crew::call_back;
use crate::log::{EndMark, begin_mark, end_mark};
use crate::trace;

/// Which call of `run` this process is to live in; its presence makes a process a rank.
pub(crate) const CALL_VAR: &str = "PHALANX_TESTKIT_CALL";
/// The rank, if the harness itself started the process.
pub(crate) const RANK_VAR: &str = "PHALANX_TESTKIT_RANK";
pub(crate) const SIZE_VAR: &str = "PHALANX_TESTKIT_SIZE";
pub(crate) const DIR_VAR: &str = "PHALANX_TESTKIT_DIR";
/// The address of the store that the harness hosts, whatever the test does to `MASTER_ADDR`.
pub(crate) const STORE_VAR: &str = "PHALANX_TESTKIT_STORE";
/// The process id of the harness, if it started the process.
pub(crate) const PARENT_VAR: &str = "PHALANX_TESTKIT_PARENT";
/// Where to call back, if a launcher started the process.
pub(crate) const LINK_VAR: &str = "PHALANX_TESTKIT_LINK";

/// Where launchers put the rank; the first that is set counts.
const LAUNCHER_RANK_VARS: [&str; 4] = ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"];

/// The exit code of a Rust process that panicked.
const PANICKED: i32 = 101;

/// What the body of a test learns about the process it runs in.
#[derive(Debug)]
pub struct Rank {
    rank: usize,
    size: usize,
    dir: PathBuf,
    store: OnceLock<Arc<dyn Store>>,
}

impl Rank {
    /// This process's rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The store that the test's process hosts for this world: the one that `MASTER_ADDR` and
    /// `MASTER_PORT` name. All calls return the same handle.
    ///
    /// # Panics
    ///
    /// If it cannot be reached.
    pub fn store(&self) -> Arc<dyn Store> {
        Arc::clone(self.store.get_or_init(connect_store))
    }

    /// An empty directory that all ranks of this world share and that is removed after it.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// A variable given with [`World::env`](crate::World::env).
    ///
    /// # Panics
    ///
    /// If there is none.
    pub fn var(&self, name: &str) -> String {
        required(name)
    }

    /// Says what this rank does next, for the report if it never returns from it.
    ///
    /// Libraries do the same with an event of their own:
    /// `tracing::trace!(target: "phalanx::op", seq, "allreduce")`.
    pub fn op(&self, what: &str) {
        tracing::info!(target: trace::OP_TARGET, "{what}");
    }
}

/// The call this process is to live in, if it is a rank.
pub(crate) fn call() -> Option<&'static str> {
    static CALL: OnceLock<Option<String>> = OnceLock::new();
    CALL.get_or_init(|| std::env::var(CALL_VAR).ok()).as_deref()
}

/// Whether this process is a rank and not the test's own.
///
/// For what stands between two worlds of one test: ranks of the second world come by there too,
/// and for them the first world has not happened.
pub fn is_rank() -> bool {
    call().is_some()
}

/// Whether this thread is running the body. Other threads of the test may be on their way to other
/// worlds meanwhile.
pub(crate) fn in_body() -> bool {
    IN_BODY.get()
}

thread_local! {
    static IN_BODY: Cell<bool> = const { Cell::new(false) };
}

/// Runs the body and ends the process.
pub(crate) fn live(body: impl FnOnce(&Rank)) -> ! {
    let rank = match std::env::var(LINK_VAR) {
        Ok(name) => be_launched(&name),
        Err(_) => be_child(),
    };
    IN_BODY.set(true);
    write_raw(&begin_mark());
    trace::install();
    let ctx = Rank {
        rank,
        size: parsed(SIZE_VAR, &required(SIZE_VAR)),
        dir: required(DIR_VAR).into(),
        store: OnceLock::new(),
    };

    let panicked_at = note_panics_of_this_thread();
    let result = catch_unwind(AssertUnwindSafe(|| body(&ctx)));
    let panic = result.err().map(|payload| {
        let text = payload.downcast_ref::<&str>().map(|s| (*s).to_owned());
        text.or_else(|| payload.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "(a panic without a text)".into())
    });
    let code = if panic.is_some() { PANICKED } else { 0 };
    let at = match &panic {
        Some(_) => panicked_at.lock().unwrap_or_else(since_epoch),
        None => since_epoch(),
    };
    let _ = std::io::stdout().flush();
    write_raw(&end_mark(&EndMark { at, panic }));
    std::process::exit(code)
}

fn connect_store() -> Arc<dyn Store> {
    let addr: SocketAddr = parsed(STORE_VAR, &required(STORE_VAR));
    let token = JobToken::from_env();
    let options = TcpStoreOptions {
        token: token.unwrap_or_else(|err| panic!("{err}")),
        ..TcpStoreOptions::new(addr.ip().to_string(), addr.port())
    };
    let store = TcpStore::connect(&options);
    Arc::new(store.unwrap_or_else(|err| panic!("the store of the test: {err}")))
}

/// Ties this process to the one that started it.
fn be_child() -> usize {
    let parent: i32 = parsed(PARENT_VAR, &required(PARENT_VAR));
    set_parent_process_death_signal(Some(Signal::KILL)).expect("set the parent death signal");
    // It may have died before the line above; then nothing would ever come.
    if getppid().is_none_or(|pid| pid.as_raw_nonzero().get() != parent) {
        die();
    }
    parsed(RANK_VAR, &required(RANK_VAR))
}

/// Calls back to the harness, sends all output there and stays alive only as long as it does.
fn be_launched(name: &str) -> usize {
    let found = LAUNCHER_RANK_VARS
        .iter()
        .find_map(|var| Some((*var, std::env::var(var).ok()?)));
    let (var, value) = found.unwrap_or_else(|| {
        let vars = LAUNCHER_RANK_VARS.join(", ");
        panic!("the launcher gave this process no rank: none of {vars} is set")
    });
    let rank = parsed(var, &value);
    let link = call_back(name, rank)
        .unwrap_or_else(|err| panic!("rank {rank} cannot call back to the test: {err}"));
    let _ = std::io::stdout().flush();
    rustix::stdio::dup2_stdout(&link).expect("send standard output to the test");
    rustix::stdio::dup2_stderr(&link).expect("send standard error to the test");
    std::thread::Builder::new()
        .name("lifeline".into())
        .spawn(move || {
            // Nothing is ever sent this way, so whatever ends the call is the end.
            let _ = std::io::Read::read(&mut &link, &mut [0]);
            die();
        })
        .expect("start the lifeline");
    rank
}

/// Ends this process without running anything that could wait for other ranks.
fn die() -> ! {
    let _ = kill_process(getpid(), Signal::KILL);
    std::process::abort()
}

/// Remembers when this thread panicked: unwinding may take long, and its destructors may tell
/// other ranks, which then would seem to have failed first.
fn note_panics_of_this_thread() -> Arc<Mutex<Option<Duration>>> {
    let at = Arc::new(Mutex::new(None));
    let (seen, body_thread) = (Arc::clone(&at), std::thread::current().id());
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if std::thread::current().id() == body_thread {
            *seen.lock() = Some(since_epoch());
        }
        print(info);
    }));
    at
}

fn since_epoch() -> Duration {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.unwrap_or_default()
}

/// Writes past libtest's capturing, in one piece.
fn write_raw(text: &str) {
    let _ = std::io::stderr().write_all(text.as_bytes());
}

fn required(name: &str) -> String {
    let value: Option<OsString> = std::env::var_os(name);
    let value = value.unwrap_or_else(|| panic!("{name} is not set"));
    let text = value.into_string();
    text.unwrap_or_else(|value| panic!("{name} is not text: {value:?}"))
}

fn parsed<T: std::str::FromStr>(name: &str, value: &str) -> T {
    let parsed = value.parse().ok();
    parsed.unwrap_or_else(|| panic!("{name}={value:?} cannot be read"))
}

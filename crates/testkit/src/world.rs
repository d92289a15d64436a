//! A world of ranks, and what to do with it.

use std::ffi::{OsStr, OsString};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::panic::Location;
use std::process::Command;
use std::time::Duration;

use phalanx_store::token::TOKEN_VAR;
use phalanx_store::{JobToken, TcpStoreServer};
use tempfile::TempDir;

use crate::call::{identify, test_name_of};
use crate::child::{self, Rank};
use crate::crew::{Crew, Direct, Exchange, Launched};
use crate::outcome::Outcome;
use crate::supervise::{Patience, supervise};
use crate::trace::LEVEL_VAR;

/// Variables of launchers and of Phalanx itself that would mean something else inside a rank.
const FOREIGN: [&str; 6] = [
    "OMPI_",
    "PMI_",
    "PMIX_",
    "SLURM_",
    "TORCHELASTIC_",
    "PHALANX_",
];
const FOREIGN_EXACT: [&str; 7] = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
];

/// A number of ranks that run one test body, each in a process of its own.
///
/// Without a launcher each rank has the environment that `torchrun` would give it on one host:
/// `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`,
/// `TORCHELASTIC_USE_AGENT_STORE`, `TORCHELASTIC_RESTART_COUNT`, where the store is hosted by the
/// test's process. Other launchers' variables are removed.
#[derive(Debug)]
#[must_use = "a world does nothing until it is run"]
pub struct World {
    size: usize,
    deadline: Duration,
    env: Vec<(OsString, Option<OsString>)>,
    launcher: Option<Vec<String>>,
    test_name: Option<String>,
}

impl World {
    /// A world of `size` ranks with a deadline of a minute.
    pub fn new(size: usize) -> Self {
        assert!(size > 0, "a world needs at least one rank");
        Self {
            size,
            deadline: Duration::from_secs(60),
            env: Vec::new(),
            launcher: None,
            test_name: None,
        }
    }

    /// How long the ranks may take together before they count as hanging.
    pub fn deadline(mut self, limit: Duration) -> Self {
        self.deadline = limit;
        self
    }

    /// Gives every rank a variable: the way to hand over values made in the test's process.
    ///
    /// `PHALANX_TOKEN` is also what the store of this world then asks for.
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        let value = value.as_ref().to_owned();
        self.env.push((name.as_ref().to_owned(), Some(value)));
        self
    }

    /// Takes a variable away from every rank, also one that the harness sets.
    pub fn env_remove(mut self, name: impl AsRef<OsStr>) -> Self {
        self.env.push((name.as_ref().to_owned(), None));
        self
    }

    /// Lets another program start the ranks: its command line, to which the ranks' is appended.
    ///
    /// `{n}` stands for the world size, as in `["mpirun", "-n", "{n}"]`. The rank then is what the
    /// launcher says: `RANK`, `OMPI_COMM_WORLD_RANK` or `PMI_RANK`; the harness sets none of
    /// `torchrun`'s rank variables, and gives the address of the store only. The launcher must
    /// live as long as its ranks, on the same machine, and should end when they do: it is the one
    /// process that nothing kills if the test is killed.
    pub fn launcher<S: Into<String>>(mut self, command: impl IntoIterator<Item = S>) -> Self {
        let command: Vec<String> = command.into_iter().map(Into::into).collect();
        assert!(!command.is_empty(), "a launcher needs a program");
        self.launcher = Some(command);
        self
    }

    /// Names the test, as `cargo test -- --list` does, when the body does not stand in it.
    pub fn test_name(mut self, name: impl Into<String>) -> Self {
        self.test_name = Some(name.into());
        self
    }

    /// Runs the body in every rank.
    ///
    /// # Panics
    ///
    /// If a rank panics, ends without returning from the body, or is not done at the deadline;
    /// with every rank's log, the one that failed first before the others.
    #[track_caller]
    pub fn run<F: FnOnce(&Rank)>(self, body: F) {
        let place = Location::caller();
        if let Some((outcome, _dir)) = self.play(body, Patience::FailFast, place)
            && !outcome.succeeded()
        {
            panic!("{}", outcome.report());
        }
    }

    /// Runs the body in every rank and lets `inspect` judge how they ended: for tests in which
    /// ranks are meant to die.
    ///
    /// A failing rank ends nothing. `inspect` runs in the test's process only.
    ///
    /// # Panics
    ///
    /// If the ranks are not done at the deadline or one never reached the body: such an outcome
    /// proves nothing.
    #[track_caller]
    pub fn check<F: FnOnce(&Rank)>(self, body: F, inspect: impl FnOnce(&Outcome)) {
        let place = Location::caller();
        if let Some((outcome, _dir)) = self.play(body, Patience::WaitForAll, place) {
            if outcome.inconclusive() {
                panic!("{}", outcome.report());
            }
            inspect(&outcome);
        }
    }

    /// In the test's process, starts the ranks and follows them. In a rank, does not return if
    /// this call is the one it was started for, and does nothing otherwise.
    fn play<F: FnOnce(&Rank)>(
        self,
        body: F,
        patience: Patience,
        place: &Location<'_>,
    ) -> Option<(Outcome, TempDir)> {
        let named = self.test_name.clone();
        let test = named.unwrap_or_else(|| test_name_of(std::any::type_name::<F>()));
        let call = identify(&test, place);
        if let Some(mine) = child::call() {
            assert!(!child::in_body(), "a rank cannot start a world of its own");
            if mine == call {
                child::live(body);
            }
            return None;
        }
        let outcome = self.start(&test, &call, patience);
        Some(outcome.unwrap_or_else(|err| panic!("cannot run the ranks of {test}: {err}")))
    }

    fn start(&self, test: &str, call: &str, patience: Patience) -> io::Result<(Outcome, TempDir)> {
        let store = self.host_store()?;
        let dir = tempfile::Builder::new().prefix("phalanx-test-").tempdir()?;
        let exe = std::env::current_exe()?;
        // `--include-ignored`: whoever runs an ignored test has asked for it already.
        let args = [
            "--exact",
            "--include-ignored",
            "--nocapture",
            "--test-threads=1",
        ];
        let finish = |command: &mut Command| {
            command
                .env(child::CALL_VAR, call)
                .env(child::SIZE_VAR, self.size.to_string())
                .env(child::DIR_VAR, dir.path())
                .env(child::STORE_VAR, store.local_addr().to_string())
                .env("MASTER_ADDR", store.local_addr().ip().to_string())
                .env("MASTER_PORT", store.local_addr().port().to_string())
                .env("TORCHELASTIC_USE_AGENT_STORE", "True")
                .env("TORCHELASTIC_RESTART_COUNT", "0");
            self.apply_env(command);
        };
        let mut crew: Box<dyn Crew> = match &self.launcher {
            None => Box::new(Direct::start((0..self.size).map(|rank| {
                let mut command = Command::new(&exe);
                command.arg(test).args(args);
                remove_foreign(&mut command);
                self.set_rank(&mut command, rank);
                finish(&mut command);
                command
            }))?),
            Some(line) => {
                let exchange = Exchange::open()?;
                let mut words = line
                    .iter()
                    .map(|w| w.replace("{n}", &self.size.to_string()));
                let mut command = Command::new(words.next().unwrap_or_default());
                command.args(words).arg(&exe).arg(test).args(args);
                remove_foreign(&mut command);
                command.env(child::LINK_VAR, exchange.name());
                finish(&mut command);
                Box::new(Launched::start(command, exchange, self.size)?)
            }
        };
        let outcome = supervise(&mut *crew, self.deadline, patience, dir.path())?;
        Ok((outcome, dir))
    }

    /// On a port of its own, so that worlds do not meet.
    fn host_store(&self) -> io::Result<TcpStoreServer> {
        let given = self.env.iter().rfind(|(name, _)| name == TOKEN_VAR);
        let token = given.and_then(|(_, value)| value.as_ref()?.to_str());
        let token = token.filter(|text| !text.is_empty());
        let token = token.map(JobToken::new).transpose();
        let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let server = token.and_then(|token| TcpStoreServer::start(&[addr], token));
        server.map_err(io::Error::other)
    }

    fn set_rank(&self, command: &mut Command, rank: usize) {
        let (rank, size) = (rank.to_string(), self.size.to_string());
        command
            .env(child::RANK_VAR, &rank)
            .env(child::PARENT_VAR, std::process::id().to_string())
            .env("RANK", &rank)
            .env("WORLD_SIZE", &size)
            .env("LOCAL_RANK", &rank)
            .env("LOCAL_WORLD_SIZE", &size);
    }

    fn apply_env(&self, command: &mut Command) {
        for (name, value) in &self.env {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
    }
}

fn remove_foreign(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        let Some(text) = name.to_str() else { continue };
        let foreign = FOREIGN_EXACT.contains(&text) || FOREIGN.iter().any(|p| text.starts_with(p));
        if foreign && text != LEVEL_VAR {
            command.env_remove(&name);
        }
    }
}

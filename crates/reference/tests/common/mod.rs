//! Groups of both forms, one thread per rank, under a watchdog.
#![allow(dead_code, reason = "each test file uses a part")]

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use phalanx_pg::{Error, ErrorKind, ProcessGroup};
use phalanx_reference::{Options, ReferenceGroup};
use phalanx_store::HashStore;

pub(crate) type Group = Arc<dyn ProcessGroup>;

/// Longer than anything here takes, shorter than anybody's patience.
const LIMIT: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy)]
pub(crate) enum Form {
    Threads,
    Tcp,
}

pub(crate) const FORMS: [Form; 2] = [Form::Threads, Form::Tcp];

impl Form {
    pub(crate) fn groups(self, size: usize) -> Vec<Group> {
        self.groups_with(size, &Options::default())
    }

    pub(crate) fn groups_with(self, size: usize, options: &Options) -> Vec<Group> {
        match self {
            Form::Threads => ReferenceGroup::threads_with(size, options),
            Form::Tcp => {
                let store = Arc::new(HashStore::new());
                let connect = |rank| {
                    let (store, options) = (Arc::clone(&store), options.clone());
                    move || ReferenceGroup::connect(store, rank, size, &options).unwrap()
                };
                all(LIMIT, (0..size).map(connect))
            }
        }
    }

    /// Runs `f` on every rank of a new group and shuts it down; the results by rank.
    pub(crate) fn run<T: Send + 'static>(
        self,
        size: usize,
        f: impl Fn(&Group) -> T + Clone + Send + 'static,
    ) -> Vec<T> {
        on_each(self.groups(size), move |group| {
            let result = f(&group);
            group.shutdown().unwrap();
            result
        })
    }
}

pub(crate) fn options(timeout_ms: u64) -> Options {
    Options {
        timeout: Duration::from_millis(timeout_ms),
        ..Options::default()
    }
}

/// Runs `f` with every rank's group, in a thread each; the results by rank.
pub(crate) fn on_each<T: Send + 'static>(
    groups: Vec<Group>,
    f: impl Fn(Group) -> T + Clone + Send + 'static,
) -> Vec<T> {
    let job = |group: Group| {
        let f = f.clone();
        move || f(group)
    };
    all(LIMIT, groups.into_iter().map(job))
}

/// Runs all jobs at the same time; panics if one panics or does not end.
pub(crate) fn all<T: Send + 'static, F: FnOnce() -> T + Send + 'static>(
    limit: Duration,
    jobs: impl IntoIterator<Item = F>,
) -> Vec<T> {
    let (sender, receiver) = mpsc::channel();
    let threads: Vec<_> = jobs
        .into_iter()
        .enumerate()
        .map(|(rank, job)| {
            let sender = sender.clone();
            thread::spawn(move || {
                let result = job();
                // Nobody listens when another rank has failed the test.
                let _ = sender.send((rank, result));
            })
        })
        .collect();
    drop(sender);
    let mut results: Vec<Option<T>> = threads.iter().map(|_| None).collect();
    for _ in 0..threads.len() {
        match receiver.recv_timeout(limit) {
            Ok((rank, result)) => results[rank] = Some(result),
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                let missing: Vec<usize> = (0..results.len())
                    .filter(|&rank| results[rank].is_none())
                    .collect();
                panic!("ranks {missing:?} hang");
            }
        }
    }
    for thread in threads {
        thread.join().expect("a rank panicked");
    }
    results.into_iter().map(Option::unwrap).collect()
}

/// The kind of the error itself, or of what broke the group before.
pub(crate) fn first_kind(err: &Error) -> ErrorKind {
    err.cause().unwrap_or(err).kind()
}

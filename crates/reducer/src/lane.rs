//! The thread for what blocks: comm hooks and sparse gradients.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::Instant;

use phalanx_pg::{Buffer, ErrorKind, ProcessGroup, ProcessGroupExt, Sparse};

use crate::error::{Error, Result};
use crate::hook::{CommHook, GradBucket, HookResult};
use crate::params::ParamSpec;

/// Runs jobs one after the other on a group of its own.
///
/// The thread ends when the lane is dropped and its current job has ended; nobody waits for it.
#[derive(Debug)]
pub(crate) struct Lane {
    jobs: Sender<Job>,
}

pub(crate) struct Job {
    pub(crate) bucket: usize,
    pub(crate) cargo: Cargo,
    pub(crate) reply: Sender<Reply>,
}

pub(crate) enum Cargo {
    Dense(GradBucket),
    Sparse { param: ParamSpec, grad: Sparse },
}

pub(crate) struct Reply {
    pub(crate) bucket: usize,
    pub(crate) done: Instant,
    pub(crate) result: Result<Delivered>,
}

pub(crate) enum Delivered {
    Dense(Buffer),
    Sparse(Sparse),
}

/// A group that the reducer has for itself.
///
/// A group that is dropped is to its peers a rank that has died, and a peer may still be busy with
/// the last operation. So it is ended in order when it is dropped, by a thread that nobody waits
/// for.
#[derive(Debug)]
pub(crate) struct OwnGroup(Arc<dyn ProcessGroup>);

impl Drop for OwnGroup {
    fn drop(&mut self) {
        let group = Arc::clone(&self.0);
        let named = thread::Builder::new().name("phalanx-reducer-end".into());
        // Its failure is of no interest: the group is not needed any more.
        let _ = named.spawn(move || group.shutdown());
    }
}

impl std::ops::Deref for OwnGroup {
    type Target = dyn ProcessGroup;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

/// A group of all ranks of `group`, for calls that must not mix with others. Collective.
pub(crate) fn own_group(group: &dyn ProcessGroup, purpose: &str) -> Result<OwnGroup> {
    let all: Vec<usize> = (0..group.size()).collect();
    // The barrier takes a number, so that no two splits have the same name.
    let name = format!("reducer-{}-{purpose}", group.sequence());
    group.barrier()?;
    let split = group.split(&all, &name)?;
    let left_out = || Error::invalid("the backend left this rank out of a group of all ranks");
    split.map(OwnGroup).ok_or_else(left_out)
}

impl Lane {
    /// Collective: every rank opens its lane at the same point.
    pub(crate) fn open(group: &dyn ProcessGroup, hook: Option<Arc<dyn CommHook>>) -> Result<Self> {
        let own = own_group(group, "hook")?;
        let (jobs, queue) = mpsc::channel();
        let named = thread::Builder::new().name("phalanx-reducer".into());
        let spawned = named.spawn(move || serve(&queue, &*own, hook.as_deref()));
        match spawned {
            Ok(_) => Ok(Self { jobs }),
            Err(err) => Err(Error::Group(phalanx_pg::Error::new(
                ErrorKind::Backend,
                format!("starting the reducer's thread: {err}"),
            ))),
        }
    }

    pub(crate) fn send(&self, job: Job) -> Result<()> {
        let sent = self.jobs.send(job);
        sent.map_err(|_| Error::invalid("the reducer's thread has ended"))
    }
}

fn serve(queue: &Receiver<Job>, group: &dyn ProcessGroup, hook: Option<&dyn CommHook>) {
    while let Ok(job) = queue.recv() {
        let ran = catch_unwind(AssertUnwindSafe(|| run(job.cargo, group, hook)));
        let result = ran.unwrap_or_else(|panic| Err(panic_text(&*panic).into()));
        let result = result.map_err(|err| fail(job.bucket, err, group));
        // Nobody listens when the pass was dropped.
        let _ = job.reply.send(Reply {
            bucket: job.bucket,
            done: Instant::now(),
            result,
        });
    }
}

fn run(
    cargo: Cargo,
    group: &dyn ProcessGroup,
    hook: Option<&dyn CommHook>,
) -> HookResult<Delivered> {
    match (cargo, hook) {
        (Cargo::Dense(bucket), Some(hook)) => {
            let (dtype, len) = (bucket.buffer().dtype(), bucket.buffer().len());
            let result = hook.run(bucket, group)?;
            if result.dtype() != dtype || result.len() != len {
                let problem = format!(
                    "it returned {} x {}, the bucket is {len} x {dtype}",
                    result.len(),
                    result.dtype()
                );
                return Err(problem.into());
            }
            Ok(Delivered::Dense(result))
        }
        (Cargo::Dense(_), None) => Err("there is no hook for a dense bucket".into()),
        (Cargo::Sparse { param, grad }, Some(hook)) => {
            Ok(Delivered::Sparse(hook.run_sparse(&param, grad, group)?))
        }
        (Cargo::Sparse { grad, .. }, None) => Ok(Delivered::Sparse(group.allreduce_sparse(grad)?)),
    }
}

/// Lets no other rank wait for a bucket that will not come.
fn fail(
    bucket: usize,
    err: Box<dyn std::error::Error + Send + Sync>,
    group: &dyn ProcessGroup,
) -> Error {
    match err.downcast::<phalanx_pg::Error>() {
        Ok(err) => {
            if err.leaves_group_usable() {
                group.abort(&err.to_string());
            }
            Error::Group(*err)
        }
        Err(err) => {
            let err = Error::Hook {
                rank: group.rank(),
                bucket,
                problem: err.to_string().into(),
            };
            group.abort(&err.to_string());
            err
        }
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    format!("it panicked: {}", text.unwrap_or_default())
}

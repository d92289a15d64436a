//! Finds ranks that call different things, before anything is sent.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use phalanx_store::Deadline;

use crate::call::{Call, CallKind, CallOptions, explicit_counts};
use crate::delegate_description;
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Place, Result};
use crate::fingerprint::{Fingerprint, decode_numbers};
use crate::group::ProcessGroup;
use crate::work::RawWork;
use crate::{Buffer, ProcessGroupExt};

/// Tags on the side group.
const FINGERPRINT: u32 = 0;
const COUNTS: u32 = 1;

/// The check's own messages outlive its deadline by this much, so that running out of time is
/// found here, where it can be explained, and not by the backend.
const SLACK: Duration = Duration::from_secs(60);

/// A group that compares what all ranks are about to do before each collective.
///
/// For debugging: what PyTorch does under `TORCH_DISTRIBUTED_DEBUG=DETAIL`. Before each collective
/// every rank sends every other rank a fingerprint of its call, on a group of its own: the kind of
/// call, its sequence number, element type, device, the lengths that must be equal, the operator
/// (not the factor of a premultiplied sum), the root, the calls of a batch. A difference is
/// [`ErrorKind::Mismatch`] on *every* rank, shows both sides and names what differs. Nothing has
/// been sent on the group itself then, and it stays usable. The lengths of an all-to-all may
/// differ, but what one rank sends another must be what that one expects.
///
/// A rank that does not come within the call's timeout is named, with its last call; the group is
/// broken then, as after any timeout.
///
/// **Asynchronous calls become synchronous**: submitting blocks until every rank has submitted.
/// Each check costs a message to and from every other rank. Point-to-point calls are not checked.
///
/// # Threads
///
/// May be used from many threads. Checks and the submissions that follow them happen under one
/// lock, so their order is the same; [`abort`](ProcessGroup::abort) does not wait for it.
pub struct Checked {
    inner: Arc<dyn ProcessGroup>,
    side: Arc<dyn ProcessGroup>,
    history: Mutex<History>,
}

#[derive(Default)]
struct History {
    /// What each rank called last.
    last: Vec<Option<Fingerprint>>,
    /// Why no check is possible any more.
    broken: Option<Error>,
}

impl Checked {
    /// Checks the calls of `group`. A collective call: splits off the group for the checks.
    pub fn new(group: Arc<dyn ProcessGroup>) -> Result<Arc<Self>> {
        let all: Vec<usize> = (0..group.size()).collect();
        // A name that no program gives, and a new one for every wrapper.
        let name = format!("phalanx:checked:{}", group.sequence());
        let side = group.split(&all, &name)?;
        let side = side.ok_or_else(|| {
            Error::new(
                ErrorKind::Backend,
                "the backend left this rank out of a group of all",
            )
        })?;
        Self::with_side(group, side)
    }

    /// Checks the calls of `group` by messages on `side`, for backends without host memory.
    ///
    /// `side` has the same ranks in the same order and is used for nothing else.
    pub fn with_side(
        group: Arc<dyn ProcessGroup>,
        side: Arc<dyn ProcessGroup>,
    ) -> Result<Arc<Self>> {
        if (group.rank(), group.global_ranks()) != (side.rank(), side.global_ranks()) {
            return Err(Error::invalid("the group for checks has other ranks"));
        }
        if !side.capabilities().cpu {
            let what = format!("{} has no host memory to check with", side.backend());
            return Err(Error::unsupported(what));
        }
        let history = Mutex::new(History {
            last: vec![None; group.size()],
            broken: None,
        });
        Ok(Arc::new(Self {
            inner: group,
            side,
            history,
        }))
    }

    /// The lock that keeps checks and submissions in one order.
    fn turn(&self, deadline: Deadline) -> Result<MutexGuard<'_, History>> {
        self.history
            .try_lock_until(deadline.instant())
            .ok_or_else(|| {
                let what = "another call of this rank is still being checked or run";
                let err = Error::new(ErrorKind::Timeout, what);
                self.inner.abort(&err.to_string());
                err
            })
    }

    /// Whether all ranks are about to do the same. Any error but a mismatch breaks the group.
    fn check(&self, call: &Call, history: &mut History, deadline: Deadline) -> Result<()> {
        if let Some(cause) = &history.broken {
            return Err(self.place(Error::broken_by(cause), call.kind(), deadline));
        }
        let mine = Fingerprint::of(call, self.inner.sequence());
        let checked = self.compare(call, mine, history, deadline);
        checked.map_err(|err| {
            let err = self.place(err, call.kind(), deadline);
            let over = !err.leaves_group_usable() && err.kind() != ErrorKind::Closed;
            if over {
                history.broken = Some(err.clone());
            }
            // Who has left the side has left the group too, and it finds that out in its own order:
            // a slower rank may still need what was sent before. Only the group is aborted, for its
            // side still tells the others who is missing.
            if over && !matches!(err.kind(), ErrorKind::Aborted | ErrorKind::PeerLost) {
                self.inner.abort(&err.to_string());
            }
            err
        })
    }

    fn place(&self, err: Error, call: CallKind, deadline: Deadline) -> Error {
        err.at(Place {
            call: Some(call),
            seq: Some(self.inner.sequence()),
            elapsed: Some(deadline.elapsed()),
            ..Place::of_group(self.name(), self.rank())
        })
    }

    fn compare(
        &self,
        call: &Call,
        mine: Fingerprint,
        history: &mut History,
        deadline: Deadline,
    ) -> Result<()> {
        let explain = |absent: Absent| absent.explain(&mine, self.rank(), &history.last);
        let all = self.exchange(&mine.encode(), FINGERPRINT, deadline);
        let all = all.map_err(explain)?;
        let all: Vec<Fingerprint> = all
            .iter()
            .map(|bytes| Fingerprint::decode(bytes))
            .collect::<Result<_>>()?;
        history.last = all.iter().copied().map(Some).collect();
        if let Some(err) = Fingerprint::mismatch(&all, self.rank()) {
            return Err(err);
        }
        if mine.is_alltoall() {
            let explain = |absent: Absent| absent.explain(&mine, self.rank(), &history.last);
            let counts = encode_counts(call, self.size());
            let all = self.exchange(&counts, COUNTS, deadline).map_err(explain)?;
            return compare_counts(&all, &mine);
        }
        Ok(())
    }

    /// Every rank's bytes, which are equally many.
    ///
    /// By direct messages where the backend has them: they tell who did not come.
    fn exchange(&self, bytes: &[u8], tag: u32, deadline: Deadline) -> Result<Vec<Vec<u8>>, Absent> {
        let calls = self.side.capabilities().calls;
        if calls.contains(CallKind::Send) && calls.contains(CallKind::Recv) {
            return by_messages(&*self.side, bytes, tag, deadline);
        }
        let options = CallOptions::default().with_timeout(deadline.left());
        let all = self.side.with(options).allgather_slice(bytes)?;
        let parts = all.chunks(bytes.len().max(1));
        Ok(parts.map(<[u8]>::to_vec).collect())
    }
}

/// Why not every rank's bytes are there.
enum Absent {
    /// These ranks did not come in time.
    Late(Vec<usize>, Duration),
    Failed(Error),
}

impl From<Error> for Absent {
    fn from(err: Error) -> Self {
        Self::Failed(err)
    }
}

fn by_messages(
    side: &dyn ProcessGroup,
    bytes: &[u8],
    tag: u32,
    deadline: Deadline,
) -> Result<Vec<Vec<u8>>, Absent> {
    let options = CallOptions::default().with_timeout(deadline.left().saturating_add(SLACK));
    let side = side.with(options);
    let me = side.rank();
    let peers = || (0..side.size()).filter(|&peer| peer != me);
    let mut receives = Vec::new();
    for peer in peers() {
        let room = Buffer::zeroed(DType::U8, bytes.len());
        receives.push((peer, side.recv(room, peer, tag)?));
    }
    let data = Buffer::from_slice(bytes).freeze();
    let mut sends = Vec::new();
    for peer in peers() {
        sends.push(side.send(data.clone(), peer, tag)?);
    }
    let mut all = vec![bytes.to_vec(); side.size()];
    let mut late = Vec::new();
    for (peer, mut receive) in receives {
        match receive.wait_for(deadline.left())? {
            Some(theirs) => all[peer] = theirs.to_vec()?,
            None => late.push(peer),
        }
    }
    if !late.is_empty() {
        return Err(Absent::Late(late, deadline.elapsed()));
    }
    for mut send in sends {
        // Its receiver has posted the receive before it sent us anything.
        send.wait_for(deadline.left().max(Duration::from_secs(1)))?;
    }
    Ok(all)
}

impl Absent {
    fn explain(self, mine: &Fingerprint, me: usize, last: &[Option<Fingerprint>]) -> Error {
        let last_call = |rank: usize| match last.get(rank) {
            Some(Some(call)) => format!("rank {rank} (its last call: {call})"),
            _ => format!("rank {rank} (it has called nothing yet)"),
        };
        match self {
            Self::Late(ranks, waited) => {
                let names: Vec<String> = ranks.iter().copied().map(last_call).collect();
                let what = format!(
                    "{} did not come within {:.3} s; this rank ({me}) called {mine}",
                    names.join(", "),
                    waited.as_secs_f64()
                );
                Error::new(ErrorKind::Timeout, what).from_peer(ranks[0])
            }
            Self::Failed(err) => {
                let at_fault = err.peer();
                let who = at_fault.map_or(String::new(), |rank| format!(", {}", last_call(rank)));
                // Whether the side broke in this call or before it is a matter of timing only.
                let first = err.cause().unwrap_or(&err);
                let what = format!("checking {mine} failed: {}{who}", first.message());
                let explained = Error::new(first.kind(), what);
                match at_fault {
                    Some(rank) => explained.from_peer(rank),
                    None => explained,
                }
            }
        }
    }
}

/// For each all-to-all, what goes to each rank and what comes from each.
fn encode_counts(call: &Call, size: usize) -> Vec<u8> {
    let calls = match call {
        Call::Batch(calls) => calls.as_slice(),
        one => std::slice::from_ref(one),
    };
    let mut counts = Vec::new();
    for call in calls {
        if let Call::AllToAll {
            input,
            output,
            send_counts,
            recv_counts,
        } = call
        {
            counts.extend(explicit_counts(send_counts, input.len(), size));
            counts.extend(explicit_counts(recv_counts, output.len(), size));
        }
    }
    let bytes = counts.iter().map(|&count| (count as u64).to_le_bytes());
    bytes.flatten().collect()
}

fn compare_counts(all: &[Vec<u8>], mine: &Fingerprint) -> Result<()> {
    let size = all.len();
    let all: Vec<Vec<u64>> = all.iter().map(|bytes| decode_numbers(bytes)).collect();
    let calls = all[0].len() / (2 * size);
    for call in 0..calls {
        let at = |rank: usize, column: usize| all[rank][call * 2 * size + column];
        for from in 0..size {
            for to in 0..size {
                let (sent, expected) = (at(from, to), at(to, size + from));
                if sent != expected {
                    let what = format!(
                        "in {mine} rank {from} sends {sent} elements to rank {to}, which expects \
                         {expected}; they differ in: split counts"
                    );
                    return Err(Error::new(ErrorKind::Mismatch, what));
                }
            }
        }
    }
    Ok(())
}

impl fmt::Debug for Checked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Checked({:?})", self.inner)
    }
}

impl ProcessGroup for Checked {
    delegate_description!(inner, |mut known| {
        known.asynchronous = false;
        known
    });

    fn submit(&self, call: Call, options: &CallOptions) -> Result<RawWork> {
        if call.is_point_to_point() {
            return self.inner.submit(call, options);
        }
        let limit = options.timeout.unwrap_or_else(|| self.timeout());
        let deadline = Deadline::after(limit);
        let kind = call.kind();
        let mut history = self
            .turn(deadline)
            .map_err(|err| self.place(err, kind, deadline))?;
        self.check(&call, &mut history, deadline)?;
        self.inner.submit(call, options)
    }

    /// The new group is checked too.
    fn split(&self, ranks: &[usize], name: &str) -> Result<Option<Arc<dyn ProcessGroup>>> {
        let group = self.inner.split(ranks, name)?;
        let side = self.side.split(ranks, name)?;
        match (group, side) {
            (Some(group), Some(side)) => Ok(Some(Self::with_side(group, side)?)),
            _ => Ok(None),
        }
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
        self.side.abort(reason);
    }

    fn shutdown(&self) -> Result<()> {
        self.inner.shutdown()?;
        self.side.shutdown()
    }

    fn sequence(&self) -> u64 {
        self.inner.sequence()
    }

    fn p2p_sequence(&self) -> u64 {
        self.inner.p2p_sequence()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Backends differ in how they answer on a group that is broken already.
    #[test]
    fn a_side_that_was_broken_before_is_told_by_its_first_cause() {
        let left = Error::new(ErrorKind::Aborted, "rank 2 dropped the group").from_peer(2);
        let absent = Absent::Failed(Error::broken_by(&left));
        let mine = Fingerprint::of(&Call::Barrier, 1);
        let err = absent.explain(&mine, 0, &[None, None, None]);
        assert_eq!((err.kind(), err.peer()), (ErrorKind::Aborted, Some(2)));
        assert!(err.message().contains("rank 2 dropped the group"), "{err}");
    }
}

//! The barrier that names who is missing.

use std::time::Duration;

use phalanx_store::Deadline;

use crate::error::{Error, ErrorKind, Place, Result};
use crate::ext::{FIRST_RESERVED_TAG, buffer, nothing};
use crate::group::ProcessGroup;
use crate::typed_work::Work;
use crate::{Buffer, Call, CallOptions, DType, ProcessGroupExt};

const ARRIVE: u32 = FIRST_RESERVED_TAG;
const LEAVE: u32 = FIRST_RESERVED_TAG + 1;

pub(crate) fn barrier<G: ProcessGroup + ?Sized>(group: &G, limit: Duration) -> Result<()> {
    let deadline = Deadline::after(limit);
    let place = Place {
        action: Some("monitored_barrier"),
        // It is no collective itself, so this tells which ones it comes between.
        seq: Some(group.sequence()),
        ..Place::of_group(group.name(), group.rank())
    };
    let checked = match group.rank() {
        0 => lead(group, deadline),
        _ => follow(group, deadline),
    };
    checked.map_err(|err| {
        err.at(Place {
            elapsed: Some(deadline.elapsed()),
            ..place
        })
    })
}

fn lead<G: ProcessGroup + ?Sized>(group: &G, deadline: Deadline) -> Result<()> {
    let mut arrivals = Vec::new();
    for peer in 1..group.size() {
        arrivals.push((peer, receive(group, peer, ARRIVE, deadline)?));
    }
    let mut missing = Vec::new();
    let mut broken = None;
    for (peer, mut arrival) in arrivals {
        match arrival.wait_for(deadline.left()) {
            Ok(Some(_)) => {}
            Ok(None) => missing.push(peer),
            // All that have not arrived end with the group; those that have still count.
            Err(err) => {
                missing.push(peer);
                broken.get_or_insert(err);
            }
        }
    }
    if let Some(&first) = missing.first() {
        let list: Vec<String> = missing.iter().map(usize::to_string).collect();
        let when = match broken {
            None => "in time",
            Some(_) => "before the group broke",
        };
        let what = format!(
            "{} of {} ranks did not arrive {when}: {}",
            missing.len(),
            group.size(),
            list.join(", ")
        );
        return Err(match broken {
            None => Error::new(ErrorKind::Timeout, what).from_peer(first),
            Some(err) => {
                let peer = err.peer().unwrap_or(first);
                let reason = err.cause().unwrap_or(&err).message();
                Error::new(err.kind(), format!("{what} ({reason})")).from_peer(peer)
            }
        });
    }
    for peer in 1..group.size() {
        send(group, peer, LEAVE)?.wait()?;
    }
    Ok(())
}

fn follow<G: ProcessGroup + ?Sized>(group: &G, deadline: Deadline) -> Result<()> {
    let mut leave = receive(group, 0, LEAVE, deadline)?;
    send(group, 0, ARRIVE)?.wait()?;
    match leave.wait_for(deadline.left())? {
        Some(_) => Ok(()),
        None => {
            let what = "rank 0 did not let this rank go on in time; its error \
                        names the ranks that are missing";
            Err(Error::new(ErrorKind::Timeout, what).from_peer(0))
        }
    }
}

/// The receive outlasts the barrier, whose limit is the one that counts.
fn receive<G: ProcessGroup + ?Sized>(
    group: &G,
    peer: usize,
    tag: u32,
    deadline: Deadline,
) -> Result<Work<Buffer>> {
    let call = Call::Recv {
        buf: Buffer::zeroed(DType::U8, 1),
        peer: Some(peer),
        tag,
    };
    let limit = group.timeout().max(deadline.left().saturating_mul(2));
    let options = CallOptions::default().with_timeout(limit);
    Ok(Work::new(group.call(call, &options)?, buffer))
}

fn send<G: ProcessGroup + ?Sized>(group: &G, peer: usize, tag: u32) -> Result<Work<()>> {
    let data = Buffer::zeroed(DType::U8, 1).freeze();
    group.start(Call::Send { data, peer, tag }, nothing)
}

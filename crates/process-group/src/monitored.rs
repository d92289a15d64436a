//! The barrier that names who is missing.

use std::time::Duration;

use phalanx_store::Deadline;

use crate::error::{Error, ErrorKind, Place, Result};
use crate::ext::{FIRST_RESERVED_TAG, buffer, nothing};
use crate::group::ProcessGroup;
use crate::typed_work::Work;
use crate::{Buffer, Call, CallKind, DType, ProcessGroupExt};

const ARRIVE: u32 = FIRST_RESERVED_TAG;
const LEAVE: u32 = FIRST_RESERVED_TAG + 1;

pub(crate) fn barrier<G: ProcessGroup + ?Sized>(group: &G, limit: Duration) -> Result<()> {
    let deadline = Deadline::after(limit);
    let place = Place {
        call: Some(CallKind::Barrier),
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
        arrivals.push((peer, receive(group, peer, ARRIVE)?));
    }
    let mut missing = Vec::new();
    for (peer, mut arrival) in arrivals {
        if arrival.wait_for(deadline.left())?.is_none() {
            missing.push(peer);
        }
    }
    if let Some(&first) = missing.first() {
        let list: Vec<String> = missing.iter().map(usize::to_string).collect();
        let what = format!(
            "monitored barrier: {} of {} ranks did not arrive in time: {}",
            missing.len(),
            group.size(),
            list.join(", ")
        );
        return Err(Error::new(ErrorKind::Timeout, what).from_peer(first));
    }
    for peer in 1..group.size() {
        send(group, peer, LEAVE)?.wait()?;
    }
    Ok(())
}

fn follow<G: ProcessGroup + ?Sized>(group: &G, deadline: Deadline) -> Result<()> {
    let mut leave = receive(group, 0, LEAVE)?;
    send(group, 0, ARRIVE)?.wait()?;
    match leave.wait_for(deadline.left())? {
        Some(_) => Ok(()),
        None => {
            let what = "monitored barrier: rank 0 did not let this rank go on in time; its error \
                        names the ranks that are missing";
            Err(Error::new(ErrorKind::Timeout, what).from_peer(0))
        }
    }
}

fn receive<G: ProcessGroup + ?Sized>(group: &G, peer: usize, tag: u32) -> Result<Work<Buffer>> {
    let buf = Buffer::zeroed(DType::U8, 1);
    group.start(
        Call::Recv {
            buf,
            peer: Some(peer),
            tag,
        },
        buffer,
    )
}

fn send<G: ProcessGroup + ?Sized>(group: &G, peer: usize, tag: u32) -> Result<Work<()>> {
    let data = Buffer::zeroed(DType::U8, 1).freeze();
    group.start(Call::Send { data, peer, tag }, nothing)
}

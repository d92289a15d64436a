//! Ranks meet through a store and are connected by TCP.

use std::net::{IpAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use phalanx_pg::mesh::{self, Stream, Way};
use phalanx_pg::{Error, Result};
use phalanx_store::{JobToken, Store};

use crate::connect::{Meeting, Seat};
use crate::member::Member;
use crate::tcp::Mesh;

/// Meets through a store.
#[derive(Debug)]
pub(crate) struct Sockets {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) bind: Option<IpAddr>,
    pub(crate) token: Option<JobToken>,
    pub(crate) connect_timeout: Duration,
}

impl Meeting for Sockets {
    fn meet(&self, seat: &Seat<'_>) -> Result<Arc<Member>> {
        let hopeless = || {
            let (parent, ranks) = seat.parent?;
            parent.hopeless(ranks).map(|cause| Error::broken_by(&cause))
        };
        let meeting = mesh::Meeting {
            store: self.store.second_handle()?,
            prefix: format!("phalanx/reference{}", seat.identity),
            name: &seat.name,
            rank: seat.rank,
            size: seat.size(),
            bind: self.bind,
            token: self.token.as_ref(),
            limit: self.connect_timeout,
            give_up: &hopeless,
        };
        let streams = meeting.connect(&[], |_| Ok(vec![Way::Tcp; seat.size()]))?;
        let streams: Vec<Option<TcpStream>> = streams.into_iter().map(tcp).collect();
        let member = Member::new(seat, seat.rank);
        Mesh::start(&member, streams)?;
        Ok(member)
    }
}

fn tcp(stream: Option<Stream>) -> Option<TcpStream> {
    match stream {
        Some(Stream::Tcp(stream)) => Some(stream),
        _ => None,
    }
}

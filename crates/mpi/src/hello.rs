//! How the ranks of a group meet before each collective.
//!
//! A collective of MPI's cannot be left once it has been entered, and hangs if another rank calls
//! something else. So ranks first say hello: in each of log2(size) rounds every rank sends all that
//! it knows to one rank and hears from another, and at the end everybody knows that all have come
//! and whether they call the same. Short data travels with it, and then that is all.

use std::sync::Arc;

use phalanx_pg::{Error, Fingerprint, Result};

use crate::comm::Comm;
use crate::flight::{Flight, Source};

/// Most bytes of data, of all ranks together, that travel with a hello.
pub(crate) const MAX_INLINE: usize = 16 << 10;

/// Two ranks with their calls, and whether the second is there.
const HEAD_LEN: usize = 16 + 2 * Fingerprint::LEN;

/// A rank with what it calls.
#[derive(Debug, Clone, Copy)]
struct Caller {
    rank: usize,
    call: Fingerprint,
}

/// What a rank knows of the others' calls.
#[derive(Debug, Clone, Copy)]
struct Known {
    own: Caller,
    /// One who calls something else.
    other: Option<Caller>,
}

impl Known {
    fn encode(&self, out: &mut [u8]) {
        let number = |rank: usize| (rank as u32).to_le_bytes();
        out[..4].copy_from_slice(&number(self.own.rank));
        out[16..][..Fingerprint::LEN].copy_from_slice(&self.own.call.encode());
        let other = self.other.unwrap_or(self.own);
        out[4..8].copy_from_slice(&number(other.rank));
        out[8..12].copy_from_slice(&u32::from(self.other.is_some()).to_le_bytes());
        out[16 + Fingerprint::LEN..HEAD_LEN].copy_from_slice(&other.call.encode());
    }

    fn decode(bytes: &[u8]) -> Result<Self> {
        let number = |at: usize| {
            let bytes = bytes[at..at + 4].try_into().expect("four bytes");
            u32::from_le_bytes(bytes) as usize
        };
        let call = |at: usize| Fingerprint::decode(&bytes[at..at + Fingerprint::LEN]);
        let other = Caller {
            rank: number(4),
            call: call(16 + Fingerprint::LEN)?,
        };
        Ok(Self {
            own: Caller {
                rank: number(0),
                call: call(16)?,
            },
            other: (number(8) != 0).then_some(other),
        })
    }

    /// Takes in what another rank knows.
    fn learn(&mut self, theirs: &Self) {
        if self.other.is_none() {
            self.other = match theirs.own.call == self.own.call {
                true => theirs.other,
                false => Some(theirs.own),
            };
        }
    }
}

/// A hello in progress.
pub(crate) struct Hello {
    comm: Arc<Comm>,
    known: Known,
    /// Bytes of one rank's data.
    block: usize,
    /// The data of this rank, the next, and so on, as far as it has come.
    blocks: Vec<u8>,
    /// 2 to the power of the round.
    distance: usize,
    /// Also the tag of its messages.
    round: i32,
    flight: Option<Flight<(Vec<u8>, Vec<u8>)>>,
    /// Room for what is heard, when nothing is on its way.
    room: Vec<u8>,
}

impl Hello {
    /// Begins. `room` is what an earlier one has left.
    pub(crate) fn new(comm: &Arc<Comm>, call: Fingerprint, data: &[u8], mut room: Vec<u8>) -> Self {
        let (rank, size) = (comm.rank(), comm.size());
        room.resize(HEAD_LEN + MAX_INLINE, 0);
        let mut blocks = Vec::with_capacity(data.len() * size);
        blocks.extend(data);
        let own = Caller { rank, call };
        Self {
            comm: Arc::clone(comm),
            known: Known { own, other: None },
            block: data.len(),
            blocks,
            distance: 1,
            round: 0,
            flight: None,
            room,
        }
    }

    /// Goes as far as it can without waiting; whether it is over.
    pub(crate) fn advance(&mut self) -> Result<bool> {
        while self.distance < self.comm.size() {
            let mut flight = match self.flight.take() {
                Some(flight) => flight,
                None => self.start()?,
            };
            if !flight.test()? {
                self.flight = Some(flight);
                return Ok(false);
            }
            self.finish(flight)?;
        }
        Ok(true)
    }

    pub(crate) fn is_over(&self) -> bool {
        self.distance >= self.comm.size()
    }

    /// From whom this rank has not heard yet.
    pub(crate) fn awaited(&self) -> usize {
        (self.comm.rank() + self.distance) % self.comm.size()
    }

    /// Whether this rank has heard that another has come, from that one or by way of others.
    pub(crate) fn knows(&self, rank: usize) -> bool {
        let size = self.comm.size();
        (rank + size - self.comm.rank()) % size < self.distance
    }

    /// Everybody's data, by rank, or the error of ranks that call different things; and the room.
    ///
    /// # Panics
    ///
    /// If it is not over.
    pub(crate) fn end(mut self) -> (Result<Vec<u8>>, Vec<u8>) {
        let size = self.comm.size();
        assert!(self.distance >= size, "the hello is not over");
        if let Some(other) = self.known.other {
            let mut all = vec![self.known.own.call; size];
            all[other.rank] = other.call;
            let err = Fingerprint::mismatch(&all, self.comm.rank()).unwrap_or_else(mixed_up);
            return (Err(err), self.room);
        }
        self.blocks.rotate_right(self.comm.rank() * self.block);
        (Ok(self.blocks), self.room)
    }

    /// How many blocks travel in this round.
    fn count(&self) -> usize {
        self.distance.min(self.comm.size() - self.distance)
    }

    fn start(&mut self) -> Result<Flight<(Vec<u8>, Vec<u8>)>> {
        let size = self.comm.size();
        let mut said = vec![0; HEAD_LEN + self.count() * self.block];
        self.known.encode(&mut said);
        // Somebody whose data is of another length has sent less; then it does not matter.
        let blocks = said.len() - HEAD_LEN;
        let there = blocks.min(self.blocks.len());
        said[HEAD_LEN..][..there].copy_from_slice(&self.blocks[..there]);
        let heard = std::mem::take(&mut self.room);
        let tag = self.round;
        let mut flight = Flight::new((said, heard));
        let to = (self.comm.rank() + size - self.distance) % size;
        let from = self.awaited();
        let (from_said, into_heard) = flight.with_memory(|(said, heard)| {
            (
                (said.as_ptr(), said.len()),
                (heard.as_mut_ptr(), heard.len()),
            )
        });
        // SAFETY: both vectors are the flight's, and where they are on the heap they stay.
        unsafe {
            flight.recv(&self.comm, into_heard, Source::Rank(from), tag)?;
            flight.send(&self.comm, from_said, to, tag)?;
        }
        Ok(flight)
    }

    fn finish(&mut self, flight: Flight<(Vec<u8>, Vec<u8>)>) -> Result<()> {
        let len = flight.arrival(0)?.bytes;
        let (_, heard) = flight.land();
        if len < HEAD_LEN {
            return Err(mixed_up());
        }
        self.known.learn(&Known::decode(&heard)?);
        let data = &heard[HEAD_LEN..len];
        match data.len() == self.count() * self.block {
            true => self.blocks.extend(data),
            // Then the calls differ, which is known by now.
            false if self.known.other.is_none() => return Err(mixed_up()),
            false => {}
        }
        self.room = heard;
        self.distance *= 2;
        self.round += 1;
        Ok(())
    }
}

fn mixed_up() -> Error {
    let what = "a rank says hello in another way, do all run the same program?";
    Error::new(phalanx_pg::ErrorKind::Backend, what)
}

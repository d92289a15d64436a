//! Pieces over real connections, without groups around them.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use phalanx_pg::{Error, ErrorKind, Result};
use proptest::prelude::*;

use super::wire::{Outgoing, Script, Stamp, Watch, Wire};

const HEAD: usize = 24;

/// Connections between two, which do not block.
fn streams(count: usize) -> (Vec<TcpStream>, Vec<TcpStream>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let pair = |_| {
        let left = TcpStream::connect(address).unwrap();
        let (right, _) = listener.accept().unwrap();
        for stream in [&left, &right] {
            stream.set_nonblocking(true).unwrap();
            stream.set_nodelay(true).unwrap();
        }
        (left, right)
    };
    (0..count).map(pair).unzip()
}

/// Sends pieces of these lengths to the peer, and takes as many from it.
struct Swap {
    peer: usize,
    sends: Vec<Vec<u8>>,
    receives: Vec<Option<Vec<u8>>>,
    lens: Vec<usize>,
    arrived: Vec<u32>,
    next: usize,
}

/// What piece `id` of operation `op` from `rank` holds.
fn content(rank: usize, op: u32, id: usize, len: usize) -> Vec<u8> {
    let start = rank * 7 + op as usize * 13 + id * 31;
    (start..start + len).map(|at| at as u8).collect()
}

impl Swap {
    fn new(rank: usize, op: u32, sends: &[usize], receives: &[usize]) -> Self {
        let sends = sends.iter().enumerate();
        Self {
            peer: 1 - rank,
            sends: sends.map(|(id, &len)| content(rank, op, id, len)).collect(),
            receives: vec![None; receives.len()],
            lens: receives.to_vec(),
            arrived: Vec::new(),
            next: 0,
        }
    }
}

impl Script for Swap {
    fn expected(&self, from: usize) -> usize {
        if from == self.peer {
            self.lens.len()
        } else {
            0
        }
    }

    fn place(&mut self, _: usize, id: u32, len: usize, _: &mut Outgoing) -> Option<*mut u8> {
        let place = self.receives.get_mut(id as usize)?;
        let fits = place.is_none() && self.lens[id as usize] == len;
        fits.then(|| place.insert(vec![0; len]).as_mut_ptr())
    }

    fn arrived(&mut self, _: usize, id: u32, _: &mut Outgoing) {
        self.arrived.push(id);
    }

    fn work(&mut self, out: &mut Outgoing) -> bool {
        let Some(piece) = self.sends.get(self.next) else {
            return false;
        };
        out.push(self.peer, self.next as u32, piece.as_ptr(), piece.len());
        self.next += 1;
        true
    }
}

fn run(wire: &mut Wire, op: u32, script: &mut Swap) -> Result<()> {
    let late = |rank| Error::new(ErrorKind::Timeout, "too late").from_peer(rank);
    let watch = Watch {
        deadline: Instant::now() + Duration::from_secs(60),
        broken: &|_| None,
        late: &late,
    };
    wire.exchange(Stamp { op, digest: 5 }, script, &watch)
}

/// Several operations, of which each rank sends pieces of its own lengths.
fn check(count: usize, ops: &[[Vec<usize>; 2]]) {
    let (left, right) = streams(count);
    let mut wires = [
        Wire::new(vec![Vec::new(), left], 64),
        Wire::new(vec![right, Vec::new()], 64),
    ];
    std::thread::scope(|scope| {
        for (rank, wire) in wires.iter_mut().enumerate() {
            scope.spawn(move || {
                for (op, lens) in (0..).zip(ops) {
                    let mut swap = Swap::new(rank, op, &lens[rank], &lens[1 - rank]);
                    run(wire, op, &mut swap).unwrap();
                    for (id, got) in swap.receives.iter().enumerate() {
                        let expected = content(1 - rank, op, id, lens[1 - rank][id]);
                        assert_eq!(got.as_ref(), Some(&expected), "piece {id} of {op}");
                    }
                    assert_eq!(swap.arrived.len(), lens[1 - rank].len());
                }
            });
        }
    });
}

/// Of nothing, of what is read with its head, and of much more.
fn len() -> impl Strategy<Value = usize> {
    prop_oneof![0usize..40, 4000usize..4200, 0usize..300_000]
}

fn operation() -> impl Strategy<Value = [Vec<usize>; 2]> {
    let lens = || proptest::collection::vec(len(), 0..9);
    (lens(), lens()).prop_map(|(left, right)| [left, right])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// However many streams and pieces, each arrives where it belongs, in the operation that it
    /// belongs to.
    #[test]
    fn pieces_arrive_over_any_number_of_streams(
        count in 1usize..6,
        ops in proptest::collection::vec(operation(), 1..5),
    ) {
        check(count, &ops);
    }

    /// A peer that says anything at all is an error or a piece.
    #[test]
    fn anything_may_come(words in proptest::collection::vec(any::<u8>(), 1..200), good in any::<bool>()) {
        let (left, mut right) = streams(1);
        let mut bytes = if good { head(0, 0, 4).to_vec() } else { Vec::new() };
        bytes.extend(words);
        right[0].write_all(&bytes).unwrap();
        drop(right);
        let mut wire = Wire::new(vec![Vec::new(), left], 64);
        let mut swap = Swap::new(0, 0, &[], &[4, 4]);
        prop_assert!(run(&mut wire, 0, &mut swap).is_err());
    }
}

fn head(op: u32, id: u32, len: u64) -> [u8; HEAD] {
    let mut head = [0; HEAD];
    head[..4].copy_from_slice(&op.to_le_bytes());
    head[4..8].copy_from_slice(&id.to_le_bytes());
    head[8..16].copy_from_slice(&5u64.to_le_bytes());
    head[16..].copy_from_slice(&len.to_le_bytes());
    head
}

#[test]
fn pieces_take_turns_on_the_streams() {
    let (left, right) = streams(3);
    let mut wire = Wire::new(vec![Vec::new(), left], 64);
    let mut swap = Swap::new(0, 9, &[100; 7], &[]);
    run(&mut wire, 9, &mut swap).unwrap();
    for (stream, mut end) in right.into_iter().enumerate() {
        end.set_nonblocking(false).unwrap();
        for id in (stream..7).step_by(3) {
            let mut piece = [0; HEAD + 100];
            end.read_exact(&mut piece).unwrap();
            let mut expected = head(9, id as u32, 100).to_vec();
            expected.extend(content(0, 9, id, 100));
            assert_eq!(piece[..], expected[..], "piece {id} on stream {stream}");
        }
        // Nothing else.
        end.set_nonblocking(true).unwrap();
        let more = end.read(&mut [0]).map_err(|err| err.kind());
        assert_eq!(more, Err(std::io::ErrorKind::WouldBlock));
    }
}

#[test]
fn one_broken_stream_of_several_loses_the_peer() {
    let (left, mut right) = streams(3);
    let mut wire = Wire::new(vec![Vec::new(), left], 64);
    // Two pieces are whole, the third is not.
    for (id, end) in (0..).zip(&mut right) {
        end.write_all(&head(0, id, 4)).unwrap();
        end.write_all(if id < 2 { &[1; 4] } else { &[1; 3] })
            .unwrap();
    }
    right.pop();
    let mut swap = Swap::new(0, 0, &[], &[4; 3]);
    let err = run(&mut wire, 0, &mut swap).unwrap_err();
    assert_eq!(
        (err.kind(), err.peer()),
        (ErrorKind::PeerLost, Some(1)),
        "{err}"
    );
    assert_eq!(swap.arrived, [0, 1]);
}

#[test]
fn pieces_of_something_else_are_refused() {
    for (op, id, len) in [(1, 0, 4), (0, 2, 4), (0, 0, 5), (0, 0, u64::MAX)] {
        let (left, mut right) = streams(2);
        let mut wire = Wire::new(vec![Vec::new(), left], 64);
        right[0].write_all(&head(op, id, len)).unwrap();
        let mut swap = Swap::new(0, 0, &[], &[4; 2]);
        let err = run(&mut wire, 0, &mut swap).unwrap_err();
        assert!(err.to_string().contains("calls something else"), "{err}");
        assert_eq!(err.peer(), Some(1));
    }
}

//! Reductions in rank order, over ranks that are threads and exchange through memory.

use std::sync::{Barrier, Mutex};

use phalanx_pg::ordered::{self, Exchange};
use phalanx_pg::reduce::{Contribution, reduce};
use phalanx_pg::{Buffer, DType, Frozen, ReduceOp, Result};
use proptest::prelude::*;

/// Where threads leave pieces for each other.
struct Table {
    pieces: Mutex<Vec<Vec<Vec<u8>>>>,
    everybody: Barrier,
    size: usize,
}

struct Seat<'a> {
    table: &'a Table,
    rank: usize,
}

impl Seat<'_> {
    /// Gives each rank a piece, and gets one from each.
    fn swap(&self, mine: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
        self.table.pieces.lock().unwrap()[self.rank] = mine;
        self.table.everybody.wait();
        let all = self.table.pieces.lock().unwrap();
        let got = (0..self.table.size).map(|from| all[from][self.rank].clone());
        let got = got.collect();
        drop(all);
        self.table.everybody.wait();
        got
    }
}

impl Exchange for Seat<'_> {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.table.size
    }

    fn alltoall(
        &self,
        send: Frozen,
        send_lens: &[usize],
        mut recv: Buffer,
        recv_lens: &[usize],
    ) -> Result<Buffer> {
        let mut rest = send.as_bytes()?;
        let mut mine = Vec::new();
        for &len in send_lens {
            let (piece, others) = rest.split_at(len);
            mine.push(piece.to_vec());
            rest = others;
        }
        assert!(rest.is_empty(), "all is sent");
        let got = self.swap(mine);
        let lens: Vec<usize> = got.iter().map(Vec::len).collect();
        assert_eq!(lens, recv_lens, "what comes is what is expected");
        recv.as_bytes_mut()?.copy_from_slice(&got.concat());
        Ok(recv)
    }

    fn allgather(&self, mut pieces: Buffer, lens: &[usize]) -> Result<Buffer> {
        let start: usize = lens[..self.rank].iter().sum();
        let own = pieces.as_bytes()?[start..start + lens[self.rank]].to_vec();
        let got = self.swap(vec![own; self.table.size]);
        pieces.as_bytes_mut()?.copy_from_slice(&got.concat());
        Ok(pieces)
    }
}

/// Runs `body` as every rank; what each gives back.
fn ranks<T: Send>(size: usize, body: impl Fn(&Seat<'_>) -> T + Sync) -> Vec<T> {
    let table = Table {
        pieces: Mutex::new(vec![Vec::new(); size]),
        everybody: Barrier::new(size),
        size,
    };
    std::thread::scope(|scope| {
        let (table, body) = (&table, &body);
        let start = |rank| scope.spawn(move || body(&Seat { table, rank }));
        let threads: Vec<_> = (0..size).map(start).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    })
}

/// Any bytes but NaNs and other sizes of numbers: small exponents.
fn contribution(rank: usize, dtype: DType, len: usize) -> Buffer {
    let mut buffer = Buffer::zeroed(dtype, len);
    let byte = |at: usize| (at.wrapping_mul(2_654_435_761) >> 7) as u8 ^ (rank * 29) as u8;
    let bytes = buffer.as_bytes_mut().unwrap();
    for (at, slot) in bytes.iter_mut().enumerate() {
        *slot = match dtype {
            DType::Bool => byte(at) & 1,
            _ => byte(at) & 0x3f,
        };
    }
    buffer
}

/// The operator as a rank calls with it: factors differ.
fn called(op: ReduceOp, rank: usize) -> ReduceOp {
    match op {
        ReduceOp::PremulSum(_) => ReduceOp::PremulSum(0.5 + rank as f64),
        other => other,
    }
}

fn expected(op: ReduceOp, dtype: DType, len: usize, size: usize) -> Vec<u8> {
    let all: Vec<Buffer> = (0..size)
        .map(|rank| contribution(rank, dtype, len))
        .collect();
    let parts: Vec<Contribution<'_>> = all
        .iter()
        .enumerate()
        .map(|(rank, own)| Contribution::new(called(op, rank), own.as_bytes().unwrap()))
        .collect();
    let mut out = vec![0; len * dtype.size()];
    reduce(op, dtype, &parts, &mut out);
    out
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn the_bits_are_those_of_the_rule_book(
        op in prop::sample::select(&ReduceOp::ALL[..]),
        dtype in prop::sample::select(&DType::ALL[..]),
        size in 1usize..6,
        len in prop_oneof![0usize..40, 1000usize..1100, 8190usize..8200, 20_000usize..20_007],
    ) {
        prop_assume!(op.is_defined_for(dtype));
        let whole = expected(op, dtype, len, size);
        let root = len % size;
        let got = ranks(size, |seat| {
            let (op, rank) = (called(op, seat.rank), seat.rank);
            let own = || contribution(rank, dtype, len);
            let all = ordered::allreduce(seat, op, own()).unwrap();
            let one = ordered::reduce(seat, op, own(), root).unwrap();
            (all.as_bytes().unwrap().to_vec(), one.as_bytes().unwrap().to_vec())
        });
        for (rank, (all, one)) in got.iter().enumerate() {
            prop_assert_eq!(all, &whole);
            prop_assert!(rank != root || one == &whole);
        }
    }

    #[test]
    fn parts_of_a_reduction_are_those_of_the_whole(
        op in prop::sample::select(&ReduceOp::ALL[..]),
        dtype in prop::sample::select(&DType::ALL[..]),
        size in 1usize..5,
        len in 0usize..300,
    ) {
        prop_assume!(op.is_defined_for(dtype));
        let whole = expected(op, dtype, len * size, size);
        let got = ranks(size, |seat| {
            let input = contribution(seat.rank, dtype, len * size).freeze();
            let output = Buffer::zeroed(dtype, len);
            let op = called(op, seat.rank);
            let part = ordered::reduce_scatter(seat, op, input, output).unwrap();
            part.as_bytes().unwrap().to_vec()
        });
        prop_assert_eq!(got.concat(), whole);
    }
}

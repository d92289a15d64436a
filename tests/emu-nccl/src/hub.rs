//! A thread in the process that made the unique id: matches what ranks call.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;

use nccl_sys::*;
use parking_lot::Mutex;
use phalanx_pg::reduce::{Contribution, reduce};
use phalanx_pg::{DType, ReduceOp};

use crate::wire::{self, Collective, Failure, Hello, Kind, Op, Reply, Request, What};

/// Marks ids of the emulator's.
const MAGIC: [u8; 8] = *b"EMU-NCCL";

/// Where a hub listens, as it is written into a unique id.
pub(crate) struct Address {
    pub(crate) port: u16,
    pub(crate) nonce: u64,
}

impl Address {
    pub(crate) fn to_id(&self) -> ncclUniqueId {
        let mut bytes = [0; NCCL_UNIQUE_ID_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&self.port.to_le_bytes());
        bytes[10..18].copy_from_slice(&self.nonce.to_le_bytes());
        ncclUniqueId::from_bytes(bytes)
    }

    pub(crate) fn of_id(id: ncclUniqueId) -> Option<Self> {
        let bytes = id.to_bytes();
        let rest = bytes.strip_prefix(&MAGIC)?;
        let (port, rest) = rest.split_first_chunk()?;
        let (nonce, _) = rest.split_first_chunk()?;
        Some(Self {
            port: u16::from_le_bytes(*port),
            nonce: u64::from_le_bytes(*nonce),
        })
    }
}

/// Starts a hub for one communicator.
pub(crate) fn start() -> io::Result<Address> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = listener.local_addr()?.port();
    let nonce = fastrand::u64(..);
    let work = move || {
        // Ranks that cannot reach it find out by themselves.
        let _ = serve(&listener, nonce);
    };
    std::thread::Builder::new()
        .name("emu-nccl-hub".into())
        .spawn(work)?;
    Ok(Address { port, nonce })
}

/// The connections of all ranks, by rank.
fn meet(listener: &TcpListener, nonce: u64) -> io::Result<Vec<TcpStream>> {
    let mut here: BTreeMap<usize, TcpStream> = BTreeMap::new();
    loop {
        let (mut stream, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        let Ok(hello) = wire::read::<Hello>(&mut stream) else {
            continue;
        };
        if hello.nonce != nonce {
            continue;
        }
        here.insert(hello.rank, stream);
        if here.len() == hello.ranks {
            return Ok(here.into_values().collect());
        }
    }
}

fn serve(listener: &TcpListener, nonce: u64) -> io::Result<()> {
    let streams = meet(listener, nonce)?;
    let clones: io::Result<Vec<_>> = streams.iter().map(TcpStream::try_clone).collect();
    let hub = Arc::new(Mutex::new(Hub::new(clones?)));
    hub.lock().welcome();
    for (rank, mut stream) in streams.into_iter().enumerate() {
        let hub = Arc::clone(&hub);
        std::thread::Builder::new()
            .name("emu-nccl-hub".into())
            .spawn(move || {
                while let Ok(request) = wire::read(&mut stream) {
                    hub.lock().take(rank, request);
                }
                hub.lock().lost(rank);
            })?;
    }
    Ok(())
}

/// What ranks have called and what has not been answered.
struct Hub {
    out: Vec<TcpStream>,
    /// Number of collectives that each rank has called.
    called: Vec<usize>,
    /// By number, then by rank.
    open: BTreeMap<usize, BTreeMap<usize, Request>>,
    /// By sender and receiver.
    letters: BTreeMap<(usize, usize), (VecDeque<Request>, VecDeque<Request>)>,
    finalized: Vec<bool>,
}

impl Hub {
    fn new(out: Vec<TcpStream>) -> Self {
        Self {
            called: vec![0; out.len()],
            finalized: vec![false; out.len()],
            out,
            open: BTreeMap::new(),
            letters: BTreeMap::new(),
        }
    }

    fn ranks(&self) -> usize {
        self.out.len()
    }

    /// Everybody is there.
    fn welcome(&mut self) {
        for rank in 0..self.ranks() {
            self.reply(rank, None, Ok(Vec::new()));
        }
    }

    fn reply(&mut self, rank: usize, index: Option<usize>, result: Result<Vec<u8>, Failure>) {
        // A rank that is gone needs no answer.
        let _ = wire::write(&mut self.out[rank], &Reply { index, result });
    }

    fn take(&mut self, rank: usize, request: Request) {
        match request.what {
            What::Send { peer, .. } => self.post((rank, peer), request, true),
            What::Recv { peer, .. } => self.post((peer, rank), request, false),
            _ => {
                let number = self.called[rank];
                self.called[rank] += 1;
                let calls = self.open.entry(number).or_default();
                calls.insert(rank, request);
                if calls.len() == self.ranks() {
                    let calls = self.open.remove(&number).expect("just filled");
                    self.answer(number, calls);
                }
            }
        }
    }

    /// A send meets its receive.
    fn post(&mut self, pair: (usize, usize), request: Request, sends: bool) {
        let (sent, wanted) = self.letters.entry(pair).or_default();
        match sends {
            true => sent.push_back(request),
            false => wanted.push_back(request),
        }
        let mut matched = Vec::new();
        while !sent.is_empty() && !wanted.is_empty() {
            matched.extend(sent.pop_front().zip(wanted.pop_front()));
        }
        for (send, recv) in matched {
            let shape = |what: &What| match *what {
                What::Send { dtype, count, .. } | What::Recv { dtype, count, .. } => (dtype, count),
                _ => unreachable!("only sends and receives are posted"),
            };
            let (from, to) = pair;
            match shape(&send.what) == shape(&recv.what) {
                true => {
                    self.reply(from, Some(send.index), Ok(Vec::new()));
                    self.reply(to, Some(recv.index), Ok(send.data));
                }
                false => {
                    let why = format!(
                        "rank {from} sends {:?} to rank {to}, which receives {:?}",
                        send.what, recv.what
                    );
                    let failure = usage(why);
                    self.reply(from, Some(send.index), Err(failure.clone()));
                    self.reply(to, Some(recv.index), Err(failure));
                }
            }
        }
    }

    /// All ranks have called collective `number`.
    fn answer(&mut self, number: usize, calls: BTreeMap<usize, Request>) {
        let calls: Vec<Request> = calls.into_values().collect();
        let results = match &calls[0].what {
            What::Collective(first) => collective(number, first, &calls),
            What::Split { .. } => split(number, &calls),
            What::Connect => Ok(vec![Vec::new(); calls.len()]),
            _ => {
                self.finalized = vec![true; self.ranks()];
                Ok(vec![Vec::new(); calls.len()])
            }
        };
        match results {
            Ok(results) => {
                // Rank 0 last: the hub is in its process, and ends with it.
                for (rank, (call, data)) in calls.iter().zip(results).enumerate().rev() {
                    self.reply(rank, Some(call.index), Ok(data));
                }
            }
            Err(failure) => {
                eprintln!("[emu-nccl] {}", failure.why);
                for (rank, call) in calls.iter().enumerate() {
                    self.reply(rank, Some(call.index), Err(failure.clone()));
                }
            }
        }
    }

    fn lost(&mut self, rank: usize) {
        let tells = std::env::var("EMU_NCCL_PEER_DEATH").is_ok_and(|how| how == "remote_error");
        if !tells || self.finalized[rank] {
            return;
        }
        for other in (0..self.ranks()).filter(|&other| other != rank) {
            let failure = Failure {
                code: ncclRemoteError.0,
                why: format!("the connection to rank {rank} is closed"),
            };
            self.reply(other, None, Err(failure));
        }
    }
}

fn usage(why: String) -> Failure {
    Failure {
        code: ncclInvalidUsage.0,
        why,
    }
}

/// Each rank's result of a collective.
fn collective(
    number: usize,
    first: &Collective,
    calls: &[Request],
) -> Result<Vec<Vec<u8>>, Failure> {
    let alike = |call: &Request| matches!(&call.what, What::Collective(own) if own == first);
    if let Some(odd) = calls.iter().position(|call| !alike(call)) {
        let (a, b) = (&calls[0].what, &calls[odd].what);
        let why = format!("operation {number}: rank 0 calls {a:?}, rank {odd} calls {b:?}");
        return Err(usage(why));
    }
    let ranks = calls.len();
    let all = || calls.iter().flat_map(|call| call.data.clone()).collect();
    Ok(match first.kind {
        Kind::AllGather => vec![all(); ranks],
        Kind::Broadcast => vec![calls[first.root.unwrap_or(0)].data.clone(); ranks],
        Kind::AllReduce => vec![reduced(first, calls)?; ranks],
        Kind::Reduce => {
            let mut results = vec![Vec::new(); ranks];
            results[first.root.unwrap_or(0)] = reduced(first, calls)?;
            results
        }
        Kind::ReduceScatter => {
            let sum = reduced(first, calls)?;
            let part = sum.len() / ranks;
            (0..ranks)
                .map(|rank| sum[rank * part..][..part].to_vec())
                .collect()
        }
    })
}

fn reduced(first: &Collective, calls: &[Request]) -> Result<Vec<u8>, Failure> {
    let dtype = element(ncclDataType_t(first.dtype));
    let (dtype, op) = dtype
        .zip(first.op.and_then(operator))
        .ok_or_else(|| usage(format!("the emulator cannot compute {first:?}")))?;
    let factor = |call: &Request| match &call.what {
        What::Collective(Collective {
            op: Some(Op::PremulSum(factor)),
            ..
        }) => *factor,
        _ => 1.0,
    };
    let parts: Vec<Contribution<'_>> = calls
        .iter()
        .map(|call| Contribution {
            bytes: &call.data,
            factor: factor(call),
        })
        .collect();
    let mut out = vec![0; calls[0].data.len()];
    reduce(op, dtype, &parts, &mut out);
    Ok(out)
}

pub(crate) fn element(dtype: ncclDataType_t) -> Option<DType> {
    Some(match dtype {
        ncclInt8 => DType::I8,
        ncclUint8 => DType::U8,
        ncclInt32 => DType::I32,
        ncclInt64 => DType::I64,
        ncclFloat16 => DType::F16,
        ncclBfloat16 => DType::BF16,
        ncclFloat32 => DType::F32,
        ncclFloat64 => DType::F64,
        _ => return None,
    })
}

fn operator(op: Op) -> Option<ReduceOp> {
    Some(match op {
        Op::PremulSum(factor) => ReduceOp::PremulSum(factor),
        Op::Plain(code) => match ncclRedOp_t(code) {
            ncclSum => ReduceOp::Sum,
            ncclProd => ReduceOp::Product,
            ncclMax => ReduceOp::Max,
            ncclMin => ReduceOp::Min,
            ncclAvg => ReduceOp::Avg,
            _ => return None,
        },
    })
}

/// Each rank's place in its new communicator, as `number of ranks, rank, id`, in bytes: the id is
/// that of the first rank of its color.
fn split(number: usize, calls: &[Request]) -> Result<Vec<Vec<u8>>, Failure> {
    let mut colors: BTreeMap<i32, Vec<(i32, usize)>> = BTreeMap::new();
    for (rank, call) in calls.iter().enumerate() {
        let What::Split { color, key } = call.what else {
            let why = format!(
                "operation {number}: rank {rank} does not split but {:?}",
                call.what
            );
            return Err(usage(why));
        };
        colors.entry(color).or_default().push((key, rank));
    }
    let mut places = vec![Vec::new(); calls.len()];
    for members in colors.values_mut() {
        members.sort_unstable();
        let id = &calls[members[0].1].data;
        for (place, (_, rank)) in members.iter().enumerate() {
            let numbers = [members.len() as u32, place as u32];
            places[*rank] = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
            places[*rank].extend(id);
        }
    }
    Ok(places)
}

//! What a rank is about to do, in a few numbers that ranks can compare.

use std::fmt;

use crate::buffer::Buffer;
use crate::call::{Call, CallKind};
use crate::dtype::{DType, Device, ReduceOp};
use crate::error::{Error, ErrorKind, Result, name_ranks};
use crate::set::Member;

/// What a collective call must have in common on all ranks, in a form that they can exchange.
///
/// [`Checked`](crate::Checked) compares them before each collective. A backend that sends one with
/// its data notices ranks that call different things without asking anybody first.
///
/// ```
/// use phalanx_pg::{Buffer, Call, DType, Fingerprint, ReduceOp};
///
/// let sum = Call::AllReduce { buf: Buffer::zeroed(DType::F32, 4), op: ReduceOp::Sum };
/// let all = [Fingerprint::of(&sum, 3), Fingerprint::of(&Call::Barrier, 3)];
/// let err = Fingerprint::mismatch(&all, 0).unwrap();
/// assert!(err.to_string().contains("rank 1 called barrier #3"), "{err}");
/// ```
///
/// Zero means absent, for everything but the call and its number. Lengths are those that must be
/// equal: of a part for gathers and scatters, none for an all-to-all. A batch has its first
/// call's type, operator and root, the sum of the lengths, and a hash of all its calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fingerprint([u64; FIELDS]);

const FIELDS: usize = 9;
const KIND: usize = 0;
const SEQ: usize = 1;
const DTYPE: usize = 2;
const DEVICE: usize = 3;
const LEN: usize = 4;
const OP: usize = 5;
const ROOT: usize = 6;
const CALLS: usize = 7;
const PARTS: usize = 8;

/// What the numbers are, in the words of an error.
const ASPECTS: [&str; FIELDS] = [
    "call",
    "sequence number",
    "element type",
    "device",
    "length",
    "operator",
    "root",
    "number of calls in the batch",
    "calls of the batch",
];

impl Fingerprint {
    /// Bytes of the encoded form.
    pub const LEN: usize = FIELDS * 8;

    /// That of a call with this number in its group.
    pub fn of(call: &Call, seq: u64) -> Self {
        let Call::Batch(calls) = call else {
            return Self::of_one(call, seq);
        };
        let parts: Vec<Self> = calls.iter().map(|call| Self::of_one(call, seq)).collect();
        let mut batch = parts.first().copied().unwrap_or(Self([0; FIELDS]));
        batch.0[LEN] = parts.iter().fold(0, |sum, part| sum + part.0[LEN]);
        batch.0[CALLS] = parts.len() as u64;
        batch.0[PARTS] = hash(&parts);
        batch
    }

    fn of_one(call: &Call, seq: u64) -> Self {
        let mut fields = [0; FIELDS];
        fields[KIND] = u64::from(call.kind().position());
        fields[SEQ] = seq;
        fields[DTYPE] = present(call.dtype().map(Member::position));
        fields[DEVICE] = match call.device() {
            None => 0,
            Some(Device::Cpu) => 1,
            Some(Device::Cuda(_)) => 2,
        };
        fields[LEN] = equal_length(call) as u64;
        fields[OP] = present(call.op().map(Member::position));
        fields[ROOT] = present(call.root_or_peer().map(|root| root as u32));
        Self(fields)
    }

    pub(crate) fn is_alltoall(&self) -> bool {
        self.0[KIND] == u64::from(CallKind::AllToAll.position())
    }

    /// The form for the wire, [`LEN`](Fingerprint::LEN) bytes.
    pub fn encode(&self) -> Vec<u8> {
        self.0
            .iter()
            .flat_map(|field| field.to_le_bytes())
            .collect()
    }

    /// Reads the form for the wire.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let numbers = decode_numbers(bytes);
        numbers.try_into().map(Self).map_err(|_| {
            let what = "a rank's fingerprint cannot be read, do all run the same program?";
            Error::new(ErrorKind::Mismatch, what)
        })
    }

    /// The error of rank `me` that shows both sides, if not all ranks' calls are the same.
    pub fn mismatch(all: &[Self], me: usize) -> Option<Error> {
        let mine = all[me];
        let mut others: Vec<(Self, Vec<usize>)> = Vec::new();
        for (rank, &theirs) in all
            .iter()
            .enumerate()
            .filter(|(_, theirs)| **theirs != mine)
        {
            match others.iter_mut().find(|(call, _)| *call == theirs) {
                Some((_, ranks)) => ranks.push(rank),
                None => others.push((theirs, vec![rank])),
            }
        }
        let first = others.first()?.1[0];
        let mut aspects = Vec::new();
        let mut sides = Vec::new();
        for (theirs, ranks) in &others {
            mine.differences(theirs, &mut aspects);
            sides.push(format!("{} called {theirs}", name_ranks(ranks)));
        }
        let what = format!(
            "{}, this rank ({me}) called {mine}; they differ in: {}",
            sides.join(", "),
            aspects.join(", ")
        );
        Some(Error::new(ErrorKind::Mismatch, what).from_peer(first))
    }

    /// Adds the names of what differs between the two, each once.
    fn differences(&self, other: &Self, aspects: &mut Vec<&'static str>) {
        let mut differing: Vec<usize> = (0..FIELDS).filter(|&i| self.0[i] != other.0[i]).collect();
        // The hash differs whenever anything of a batch does: worth saying only if nothing else is.
        if differing.len() > 1 {
            differing.retain(|&i| i != PARTS);
        }
        for aspect in differing.into_iter().map(|i| ASPECTS[i]) {
            if !aspects.contains(&aspect) {
                aspects.push(aspect);
            }
        }
    }
}

fn present(value: Option<u32>) -> u64 {
    value.map_or(0, |value| u64::from(value) + 1)
}

/// The length that must be equal on all ranks; zero if there is none.
fn equal_length(call: &Call) -> usize {
    let buffer = match call.kind() {
        CallKind::AllGather | CallKind::Gather => call.input(),
        CallKind::AllToAll => None,
        _ => call.output(),
    };
    buffer.map_or(0, Buffer::len)
}

fn hash(parts: &[Fingerprint]) -> u64 {
    let fields = parts.iter().flat_map(|part| part.0);
    fnv1a(fields.flat_map(u64::to_le_bytes))
}

/// A hash that is the same on every machine; the standard library promises no such thing.
pub(crate) fn fnv1a(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

pub(crate) fn decode_numbers(bytes: &[u8]) -> Vec<u64> {
    let (numbers, _) = bytes.as_chunks::<8>();
    numbers
        .iter()
        .map(|number| u64::from_le_bytes(*number))
        .collect()
}

/// For example `allreduce #7 f32 x 100 sum`.
impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let field = |i: usize| usize::try_from(self.0[i]).unwrap_or(usize::MAX);
        if field(CALLS) > 0 {
            write!(f, "batch of {} ", field(CALLS))?;
        }
        match CallKind::ALL.get(field(KIND)) {
            Some(kind) => write!(f, "{kind}")?,
            None => write!(f, "unknown call {}", field(KIND))?,
        }
        write!(f, " #{}", self.0[SEQ])?;
        if let Some(index) = field(DTYPE).checked_sub(1) {
            match DType::ALL.get(index) {
                Some(dtype) => write!(f, " {dtype}")?,
                None => write!(f, " unknown type {index}")?,
            }
            if !self.is_alltoall() {
                write!(f, " x {}", self.0[LEN])?;
            }
        }
        if field(DEVICE) == 2 {
            f.write_str(" on cuda")?;
        }
        if let Some(index) = field(OP).checked_sub(1) {
            match ReduceOp::ALL.get(index) {
                Some(op) => write!(f, " {}", op.name())?,
                None => write!(f, " unknown operator {index}")?,
            }
        }
        match field(ROOT).checked_sub(1) {
            Some(root) => write!(f, " root {root}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Frozen;

    fn zeros(len: usize) -> Buffer {
        Buffer::zeroed(DType::F32, len)
    }

    fn allreduce(len: usize, op: ReduceOp) -> Call {
        Call::AllReduce {
            buf: zeros(len),
            op,
        }
    }

    #[test]
    fn reads_as_a_call() {
        let shown = |call: &Call| Fingerprint::of(call, 7).to_string();
        let sum = allreduce(100, ReduceOp::Sum);
        assert_eq!(shown(&sum), "allreduce #7 f32 x 100 sum");
        let data = zeros(100).into();
        let broadcast = Call::Broadcast { data, root: 0 };
        assert_eq!(shown(&broadcast), "broadcast #7 f32 x 100 root 0");
        assert_eq!(shown(&Call::Barrier), "barrier #7");
        let batch = Call::Batch(vec![sum, allreduce(20, ReduceOp::Sum)]);
        assert_eq!(shown(&batch), "batch of 2 allreduce #7 f32 x 120 sum");
    }

    #[test]
    fn survives_the_wire() {
        let print = Fingerprint::of(&allreduce(3, ReduceOp::Max), u64::MAX);
        let bytes = print.encode();
        assert_eq!(bytes.len(), FIELDS * 8);
        assert_eq!(Fingerprint::decode(&bytes).unwrap(), print);
        assert!(Fingerprint::decode(&bytes[8..]).is_err());
        let foreign = [0xff; FIELDS * 8];
        let shown = Fingerprint::decode(&foreign).unwrap().to_string();
        assert!(shown.contains("unknown call"), "{shown}");
    }

    #[test]
    fn factors_and_the_roots_extra_memory_do_not_count() {
        let premul = |factor| Fingerprint::of(&allreduce(1, ReduceOp::PremulSum(factor)), 0);
        assert_eq!(premul(0.5), premul(0.25));
        let gather = |output| {
            let input: Frozen = zeros(4).freeze();
            let root = 0;
            Fingerprint::of(
                &Call::Gather {
                    input,
                    output,
                    root,
                },
                0,
            )
        };
        assert_eq!(gather(Some(zeros(8))), gather(None));
        let scatter = |input| {
            let output = zeros(4);
            let root = 0;
            Fingerprint::of(
                &Call::Scatter {
                    input,
                    output,
                    root,
                },
                0,
            )
        };
        assert_eq!(scatter(Some(zeros(8).freeze())), scatter(None));
    }

    #[test]
    fn the_order_of_a_batch_counts_and_is_named_alone() {
        let batch = |lens: [usize; 2]| {
            let calls = lens.map(|len| allreduce(len, ReduceOp::Sum)).into();
            Fingerprint::of(&Call::Batch(calls), 0)
        };
        let mut aspects = Vec::new();
        batch([1, 2]).differences(&batch([2, 1]), &mut aspects);
        assert_eq!(aspects, ["calls of the batch"]);
        aspects.clear();
        batch([1, 2]).differences(&batch([1, 3]), &mut aspects);
        assert_eq!(aspects, ["length"]);
    }
}

//! What a rank says about its part in an operation.

use bytemuck::{Pod, Zeroable};
use phalanx_pg::{Call, CallKind, DType, Member, ReduceOp};

/// Where a rank's input is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Place {
    /// There is none.
    Nowhere,
    /// With the descriptor, or in the area beside it.
    Inline,
    /// In memory that peers can reach.
    Shared,
    /// In private memory: it comes through the staging ring.
    Staged,
}

/// A rank's part in an operation, as it is in shared memory.
///
/// Two ranks whose `call` words differ, or whose lengths do where they must not, have called
/// different things.
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Descriptor {
    /// Kind, operator, element type; in that order from the lowest byte.
    pub(crate) call: [u8; 3],
    place: u8,
    /// Of a call that has one; of joined calls a number made of their lengths.
    pub(crate) root: u32,
    /// In elements; what must be equal on all ranks, or the whole input of an all-to-all.
    pub(crate) len: u64,
    /// For [`Place::Shared`]; of joined calls how many they are.
    pub(crate) segment: u32,
    /// How many calls were made as one.
    pub(crate) batch: u32,
    /// For [`Place::Shared`].
    pub(crate) offset: u64,
    /// Of a premultiplied sum.
    pub(crate) factor: f64,
}

impl Descriptor {
    /// Describes `call`, one of `batch` made as one, whose input is at `place`; see
    /// [`Self::shared_at`] too.
    #[inline(always)]
    pub(crate) fn new(call: &Call, place: Place, batch: usize) -> Self {
        let op = call.op();
        Self {
            call: [
                call.kind() as u8,
                op.map_or(u8::MAX, |op| op.position() as u8),
                call.dtype().map_or(u8::MAX, |dtype| dtype as u8),
            ],
            place: place as u8,
            root: call.root_or_peer().map_or(u32::MAX, |root| root as u32),
            len: common_len(call) as u64,
            segment: 0,
            batch: batch as u32,
            offset: 0,
            factor: op.map_or(1.0, factor),
        }
    }

    /// Describes neighbouring calls of a batch that are one operation: their memory goes through the
    /// staging ring, wherever it is.
    pub(crate) fn joined(calls: &[Call], batch: usize) -> Self {
        let mut all = Self::new(&calls[0], Place::Staged, batch);
        let mut cuts = calls.len() as u64;
        all.len = 0;
        for call in calls {
            let len = common_len(call) as u64;
            all.len += len;
            cuts = (cuts.rotate_left(23) ^ len).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
        // Never what a single call has there.
        all.root = ((cuts >> 32) as u32).min(u32::MAX - 1);
        all.segment = calls.len() as u32;
        let factors = calls.iter().filter_map(Call::op).map(factor);
        let own = all.factor.to_bits();
        // Otherwise they are multiplied before they are staged.
        if !factors.map(f64::to_bits).all(|other| other == own) {
            all.factor = 1.0;
        }
        all
    }

    /// With where shared memory is.
    pub(crate) fn shared_at(self, segment: u32, offset: usize) -> Self {
        Self {
            segment,
            offset: offset as u64,
            ..self
        }
    }

    /// Where the input is; `None` if a peer wrote nonsense.
    pub(crate) fn place(&self) -> Option<Place> {
        // In the order of their numbers.
        let places = [Place::Nowhere, Place::Inline, Place::Shared, Place::Staged];
        places.get(usize::from(self.place)).copied()
    }

    /// A number that differs, most likely, between ranks that have called different things.
    pub(crate) fn digest(&self) -> u64 {
        let [kind, op, dtype] = self.call.map(u64::from);
        let uneven = self.call[0] == CallKind::AllToAll as u8;
        let len = if uneven { 0 } else { self.len };
        let call = kind | op << 8 | dtype << 16 | u64::from(self.batch) << 24;
        (call ^ u64::from(self.root) << 32)
            ^ len.rotate_left(48).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    /// Whether both ranks have called the same.
    pub(crate) fn agrees_with(&self, other: &Self) -> bool {
        let uneven = self.call[0] == CallKind::AllToAll as u8;
        let same = (self.call, self.root, self.batch) == (other.call, other.root, other.batch);
        same && (uneven || self.len == other.len)
    }
}

impl std::fmt::Display for Descriptor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [kind, op, dtype] = self.call;
        match CallKind::ALL.iter().find(|&&known| known as u8 == kind) {
            Some(kind) => write!(f, "{kind}")?,
            None => write!(f, "call {kind}")?,
        }
        if let Some(op) = ReduceOp::ALL
            .iter()
            .find(|&&known| known.position() == u32::from(op))
        {
            write!(f, " {}", op.name())?;
        }
        if let Some(dtype) = DType::ALL.iter().find(|&&known| known as u8 == dtype) {
            write!(f, " of {} x {dtype}", self.len)?;
        }
        let joined = kind == CallKind::AllReduce as u8 && self.root != u32::MAX;
        match self.root {
            u32::MAX => Ok(()),
            cuts if joined => write!(f, " in {} pieces, cut as {cuts:08x},", self.segment),
            root => write!(f, " with root {root}"),
        }?;
        match self.batch {
            1 => Ok(()),
            calls => write!(f, " in a batch of {calls}"),
        }
    }
}

/// What a rank's elements are multiplied by.
#[inline(always)]
pub(crate) fn factor(op: ReduceOp) -> f64 {
    match op {
        ReduceOp::PremulSum(factor) => factor,
        _ => 1.0,
    }
}

/// The length that the ranks of a call agree on; the input's for an all-to-all.
fn common_len(call: &Call) -> usize {
    match call {
        Call::Scatter { output, .. } | Call::ReduceScatter { output, .. } => output.len(),
        other => other.input().map_or(0, |input| input.len()),
    }
}

//! Calls of a batch that are one operation, since each by itself would be all waiting.

use phalanx_pg::{Buffer, Call, DType, Member, ReduceOp};

/// All-reduces of less than this many bytes are joined. Larger ones are better off alone: those in
/// shared memory need no staging then.
const JOINED_BELOW: usize = 128 << 10;

/// Cuts the calls of a batch into operations: neighbouring small all-reduces with the same operator,
/// of the same type, are one. Ranks that call the same come to the same, so it does not depend on
/// where their memory is nor on their factors.
pub(crate) fn operations(calls: &[Call]) -> impl Iterator<Item = &[Call]> {
    calls.chunk_by(|a, b| match (small(a), small(b)) {
        (Some((a, op_a)), Some((b, op_b))) => {
            (a.dtype(), op_a.position()) == (b.dtype(), op_b.position())
        }
        _ => false,
    })
}

/// An all-reduce that may be joined.
fn small(call: &Call) -> Option<(&Buffer, ReduceOp)> {
    match call {
        // Of a premultiplied sum of 16-bit floats every factor would have to be known: a product
        // that one rank makes is rounded.
        Call::AllReduce {
            buf,
            op: ReduceOp::PremulSum(_),
        } if !matches!(buf.dtype(), DType::F32 | DType::F64) => None,
        Call::AllReduce { buf, op } if buf.byte_len() < JOINED_BELOW => Some((buf, *op)),
        _ => None,
    }
}

/// The memory of an operation, one buffer after the other.
pub(crate) struct Row<'a> {
    buffers: &'a [Buffer],
    /// The element at which each begins, and the number of all.
    starts: Vec<usize>,
}

/// Elements of one buffer that lie in a range of the row.
pub(crate) struct Piece {
    /// Where in the row.
    pub(crate) start: usize,
    pub(crate) len: usize,
    pub(crate) ptr: *mut u8,
}

impl<'a> Row<'a> {
    /// At least one buffer, all of one type.
    pub(crate) fn new(buffers: &'a [Buffer]) -> Self {
        let mut starts = Vec::with_capacity(buffers.len() + 1);
        let mut all = 0;
        starts.push(0);
        starts.extend(buffers.iter().map(|buffer| {
            all += buffer.len();
            all
        }));
        Self { buffers, starts }
    }

    pub(crate) fn dtype(&self) -> DType {
        self.buffers[0].dtype()
    }

    pub(crate) fn len(&self) -> usize {
        self.starts[self.buffers.len()]
    }

    /// What the elements from `start` to `end` are in, in order.
    pub(crate) fn pieces(&self, start: usize, end: usize) -> impl Iterator<Item = Piece> {
        debug_assert!(start <= end && end <= self.len());
        let first = self.starts.partition_point(|&begin| begin <= start) - 1;
        let size = self.dtype().size();
        let buffers = self.buffers.iter().zip(&self.starts).skip(first);
        let inside = buffers.take_while(move |&(_, &begin)| begin < end);
        inside.filter_map(move |(buffer, &begin)| {
            let from = start.max(begin);
            let to = end.min(begin + buffer.len());
            let ptr = buffer.as_ptr().as_ptr();
            (from < to).then(|| Piece {
                start: from,
                len: to - from,
                ptr: ptr.wrapping_add((from - begin) * size),
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sum(dtype: DType, len: usize, op: ReduceOp) -> Call {
        let buf = Buffer::zeroed(dtype, len);
        Call::AllReduce { buf, op }
    }

    fn lens(calls: &[Call]) -> Vec<usize> {
        operations(calls).map(<[Call]>::len).collect()
    }

    #[test]
    fn neighbours_that_are_small_and_alike_are_one() {
        use DType::{BF16, F32, F64};
        use ReduceOp::{Max, PremulSum, Sum};
        let large = JOINED_BELOW / 4;
        let calls = [
            sum(F32, 3, Sum),
            sum(F32, 0, Sum),
            sum(F32, large - 1, Sum),
            sum(F32, large, Sum),
            sum(F32, 5, Sum),
            sum(F64, 5, Sum),
            sum(F64, 5, Max),
            sum(F64, 5, PremulSum(0.5)),
            sum(F64, 5, PremulSum(0.25)),
            sum(BF16, 5, PremulSum(0.5)),
            sum(BF16, 5, PremulSum(0.5)),
            sum(BF16, 5, Sum),
            sum(BF16, 5, Sum),
            Call::Barrier,
            Call::Barrier,
        ];
        assert_eq!(lens(&calls), [3, 1, 1, 1, 1, 2, 1, 1, 2, 1, 1]);
        assert_eq!(lens(&[]), [0; 0]);
    }

    proptest! {
        #[test]
        fn pieces_are_the_range(
            lens in prop::collection::vec(0usize..40, 1..12),
            cut in (0.0f64..1.0, 0.0f64..1.0),
        ) {
            let mut next = 0;
            let buffers: Vec<Buffer> = lens.iter().map(|&len| {
                next += len;
                Buffer::from_vec((next - len..next).map(|i| i as i32).collect())
            }).collect();
            let row = Row::new(&buffers);
            prop_assert_eq!(row.len(), next);
            let (a, b) = ((cut.0 * next as f64) as usize, (cut.1 * next as f64) as usize);
            let (start, end) = (a.min(b), a.max(b));
            let mut found = Vec::new();
            for piece in row.pieces(start, end) {
                prop_assert_eq!(piece.start, start + found.len());
                // SAFETY: the piece is inside a buffer of this test's.
                let values = unsafe { std::slice::from_raw_parts(piece.ptr.cast::<i32>(), piece.len) };
                found.extend_from_slice(values);
            }
            let expected: Vec<i32> = (start..end).map(|i| i as i32).collect();
            prop_assert_eq!(found, expected);
        }
    }
}

//! Which element types, operators, sizes, memory and modes a call is run with.

use phalanx_pg::{
    Buffer, Call, CallOptions, Capabilities, DType, ProcessGroupExt, RawWork, ReduceOp,
};

use super::inputs::{Memory, Pattern, fill, input, sizes};
use super::pairwise::{Spot, pairwise};
use super::{Bench, Level, Outcome, Skip};

/// Largest number of elements that the sample asks for: beyond the usual thresholds.
const SAMPLE_LIMIT: usize = 40_000;
const FULL_LIMIT: usize = 1 << 21;

/// Up to this many elements the full level runs every memory with every mode; beyond, where the
/// time goes, one choice of both per element type, operator and size, each in its turn.
const SMALL: usize = 5_000;

/// One combination of properties, as one rank sees it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Combination {
    pub(super) dtype: DType,
    pub(super) op: ReduceOp,
    pub(super) len: usize,
    pub(super) memory: Memory,
    pub(super) root: usize,
    pub(super) blocking: bool,
    /// Chooses inputs.
    pub(super) round: usize,
}

/// What a call does with its elements, which decides what there is to combine.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    /// Whether it has an operator.
    pub(super) reduces: bool,
    /// Whether its largest buffer has a part for every rank.
    pub(super) parts: bool,
}

/// The levels of each property that a run goes through.
struct Product {
    known: Capabilities,
    dtypes: Vec<DType>,
    ops: Vec<ReduceOp>,
    sizes: Vec<usize>,
}

/// All ranks with the same memory, or each with another.
const MEMORIES: usize = 2 * Memory::ALL.len();
/// All block, none does, or every other one.
const MODES: usize = 3;

/// The levels of a row: element type, operator, size, memory, mode.
type Row = [usize; 5];

/// Calls `each` with the combinations of the level that the backend knows; says what it does not.
pub(super) fn combinations(
    bench: &Bench,
    shape: Shape,
    mut each: impl FnMut(Combination),
) -> Outcome {
    let (product, unknown) = Product::of(bench, shape);
    let rows = match bench.level {
        Level::Sample => product.sample(shape),
        Level::Full => product.everything(shape),
    };
    for (round, row) in rows.into_iter().enumerate() {
        each(product.combination(row, round, bench.rank(), bench.size()));
    }
    match unknown.is_empty() {
        true => Ok(()),
        false => Err(Skip(format!("passed, but without {}", unknown.join(", ")))),
    }
}

impl Product {
    /// What the backend knows of all there is, and the names of the rest.
    fn of(bench: &Bench, shape: Shape) -> (Self, Vec<String>) {
        let known = bench.group.capabilities();
        let mut product = Self::all(bench.level, shape, bench.size());
        let mut unknown = Vec::new();
        for &dtype in &product.dtypes {
            let ops = product
                .ops
                .iter()
                .filter(|&&op| product.fits(shape, dtype, op));
            let missing = |op: &&ReduceOp| match shape.reduces {
                true => !known.reduces(dtype, **op),
                false => !known.dtypes.contains(dtype),
            };
            unknown.extend(
                ops.filter(missing)
                    .map(|op| format!("{dtype}/{}", op.name())),
            );
        }
        product.known = known;
        product.dtypes.retain(|&dtype| known.dtypes.contains(dtype));
        product
            .ops
            .retain(|&op| !shape.reduces || known.ops.contains(op));
        // What has nothing left to stand with cannot be asked for.
        let (dtypes, ops) = (product.dtypes.clone(), product.ops.clone());
        let mut left = dtypes.clone();
        left.retain(|&dtype| ops.iter().any(|&op| product.fits(shape, dtype, op)));
        product.dtypes = left;
        let mut left = ops.clone();
        left.retain(|&op| dtypes.iter().any(|&dtype| product.fits(shape, dtype, op)));
        product.ops = left;
        (product, unknown)
    }

    /// Whether there is such a reduction, here and in the backend.
    fn fits(&self, shape: Shape, dtype: DType, op: ReduceOp) -> bool {
        !shape.reduces || (op.is_defined_for(dtype) && self.known.reduces(dtype, op))
    }

    fn all(level: Level, shape: Shape, ranks: usize) -> Self {
        let limit = match level {
            Level::Full if shape.parts => FULL_LIMIT / ranks,
            Level::Full => FULL_LIMIT,
            Level::Sample => SAMPLE_LIMIT,
        };
        Self {
            known: Capabilities::all_on_host(),
            dtypes: DType::ALL.to_vec(),
            ops: match shape.reduces {
                true => ReduceOp::ALL.to_vec(),
                false => vec![ReduceOp::Sum],
            },
            sizes: sizes(limit),
        }
    }

    /// Every pair of two properties occurs.
    fn sample(&self, shape: Shape) -> Vec<Row> {
        let may = |a: Spot, b: Spot| match (a.0.min(b.0), a.0.max(b.0)) {
            (0, 1) => {
                let (dtype, op) = (a.min(b).1, a.max(b).1);
                self.fits(shape, self.dtypes[dtype], self.ops[op])
            }
            _ => true,
        };
        let (dtypes, ops, sizes) = (self.dtypes.len(), self.ops.len(), self.sizes.len());
        let rows = pairwise(&[dtypes, ops, sizes, MEMORIES, MODES], may);
        let row = |row: Vec<usize>| row.try_into().expect("a row has five levels");
        rows.into_iter().map(row).collect()
    }

    /// Every element type with every operator and every size; see [`SMALL`] for the rest.
    fn everything(&self, shape: Shape) -> Vec<Row> {
        let mut rows = Vec::new();
        let mut turn = 0;
        for dtype in 0..self.dtypes.len() {
            for op in 0..self.ops.len() {
                if !self.fits(shape, self.dtypes[dtype], self.ops[op]) {
                    continue;
                }
                for (size, &len) in self.sizes.iter().enumerate() {
                    let choices = MEMORIES * MODES;
                    let chosen = match len <= SMALL {
                        true => 0..choices,
                        false => (turn + size) % choices..(turn + size) % choices + 1,
                    };
                    rows.extend(chosen.map(|c| [dtype, op, size, c % MEMORIES, c / MEMORIES]));
                }
                // Coprime to the number of choices, so that all come round.
                turn += 5;
            }
        }
        rows
    }

    fn combination(&self, row: Row, round: usize, rank: usize, ranks: usize) -> Combination {
        let [dtype, op, size, memory, mode] = row;
        let kinds = Memory::ALL.len();
        Combination {
            dtype: self.dtypes[dtype],
            op: self.ops[op],
            len: self.sizes[size],
            memory: match memory < kinds {
                true => Memory::ALL[memory],
                false => Memory::ALL[(memory + rank) % kinds],
            },
            blocking: match mode {
                0 => true,
                1 => false,
                _ => (round + rank).is_multiple_of(2),
            },
            root: round % ranks,
            round,
        }
    }
}

/// A piece of what must come out: elements of a pattern, from a number on.
pub(super) struct Piece {
    pub(super) pattern: Pattern,
    pub(super) start: usize,
    pub(super) len: usize,
}

impl Combination {
    /// Rank `rank`'s contribution.
    pub(super) fn pattern(&self, rank: usize) -> Pattern {
        input(self.dtype, rank, self.round)
    }

    /// A buffer with `len` elements of this rank's contribution.
    pub(super) fn buffer(&self, bench: &Bench, len: usize) -> Buffer {
        let pattern = self.pattern(bench.rank());
        fill(&*bench.group, self.memory, (self.dtype, len), |bytes| {
            pattern.write(0, bytes);
        })
    }

    pub(super) fn input(&self, bench: &Bench, parts: usize) -> Buffer {
        self.buffer(bench, self.len * parts)
    }

    /// Memory for `len` elements. Not zero, so that what is not written shows.
    pub(super) fn room(&self, bench: &Bench, len: usize) -> Buffer {
        fill(&*bench.group, self.memory, (self.dtype, len), |bytes| {
            bytes.fill(1);
        })
    }

    pub(super) fn submit(&self, bench: &Bench, call: Call) -> RawWork {
        let kind = call.kind();
        let options = match self.blocking {
            true => CallOptions::blocking(),
            false => CallOptions::default(),
        };
        let work = bench.group.call(call, &options);
        work.unwrap_or_else(|err| panic!("{kind} {self:?}: {err}"))
    }

    pub(super) fn run(&self, bench: &Bench, call: Call) -> Option<Buffer> {
        let kind = call.kind();
        let done = self.submit(bench, call).wait();
        done.unwrap_or_else(|err| panic!("{kind} {self:?}: {err}"))
            .buffer
    }

    /// The first `len` elements of `pattern`.
    pub(super) fn expect(&self, bench: &Bench, got: Option<Buffer>, pattern: Pattern) {
        let (start, len) = (0, self.len);
        self.expect_pieces(
            bench,
            got,
            &[Piece {
                pattern,
                start,
                len,
            }],
        );
    }

    /// The pieces, one behind the other.
    pub(super) fn expect_pieces(&self, bench: &Bench, got: Option<Buffer>, pieces: &[Piece]) {
        let got = got.unwrap_or_else(|| panic!("{self:?}: no buffer came back"));
        let (rank, size) = (bench.rank(), bench.size());
        let total: usize = pieces.iter().map(|piece| piece.len).sum();
        assert_eq!(got.len(), total, "{self:?} on rank {rank} of {size}");
        let mut rest = got.as_bytes().expect("host memory");
        let width = self.dtype.size();
        let mut before = 0;
        for piece in pieces {
            let (own, after) = rest.split_at(piece.len * width);
            if let Some(at) = piece.pattern.differs(piece.start, own) {
                let at = at / width;
                panic!(
                    "{self:?} on rank {rank} of {size}: element {} is {:?}, not {:?}",
                    before + at,
                    &own[at * width..][..width],
                    piece.pattern.element(piece.start + at)
                );
            }
            (rest, before) = (after, before + piece.len);
        }
    }

    /// Every rank's contribution, in rank order.
    pub(super) fn all_inputs(&self, bench: &Bench) -> Vec<Piece> {
        let piece = |rank| Piece {
            pattern: self.pattern(rank),
            start: 0,
            len: self.len,
        };
        (0..bench.size()).map(piece).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    const SHAPES: [Shape; 2] = [
        Shape {
            reduces: true,
            parts: false,
        },
        Shape {
            reduces: false,
            parts: true,
        },
    ];

    /// How many different values `of` has.
    fn count<T: std::hash::Hash + Eq>(rows: &[Row], of: impl Fn(&Row) -> T) -> usize {
        rows.iter().map(of).collect::<HashSet<_>>().len()
    }

    #[test]
    fn the_full_level_is_the_product_of_type_operator_and_size() {
        for shape in SHAPES {
            let product = Product::all(Level::Full, shape, 4);
            let rows = product.everything(shape);
            let defined = |&dtype: &DType| {
                let ops = product.ops.iter();
                ops.filter(|&&op| product.fits(shape, dtype, op)).count()
            };
            let kinds: usize = product.dtypes.iter().map(defined).sum();
            let sizes = product.sizes.len();
            assert_eq!(kinds, if shape.reduces { 70 } else { 11 });
            assert_eq!(count(&rows, |r| (r[0], r[1], r[2])), kinds * sizes);
            // Each size with every choice of memory and mode.
            assert_eq!(count(&rows, |r| (r[2], r[3])), sizes * MEMORIES);
            assert_eq!(count(&rows, |r| (r[2], r[4])), sizes * MODES);
            let small = product.sizes.iter().filter(|&&len| len <= SMALL).count();
            let choices = MEMORIES * MODES;
            assert_eq!(rows.len(), kinds * (small * choices + sizes - small));
            assert_eq!(count(&rows, |r| *r), rows.len());
        }
    }

    #[test]
    fn the_sample_has_every_pair() {
        for shape in SHAPES {
            let product = Product::all(Level::Sample, shape, 4);
            let rows = product.sample(shape);
            let levels = [
                product.dtypes.len(),
                product.ops.len(),
                product.sizes.len(),
                MEMORIES,
                MODES,
            ];
            for i in 0..levels.len() {
                for j in i + 1..levels.len() {
                    let all = match (shape.reduces, i, j) {
                        (true, 0, 1) => 70,
                        _ => levels[i] * levels[j],
                    };
                    assert_eq!(count(&rows, |r| (r[i], r[j])), all, "{i} and {j}");
                }
            }
            assert!(rows.len() < 300, "{} rows", rows.len());
        }
    }

    #[test]
    fn sizes_reach_beyond_the_thresholds() {
        let largest = |level, parts| {
            let reduces = false;
            let all = Product::all(level, Shape { reduces, parts }, 8).sizes;
            *all.last().expect("there are sizes")
        };
        assert_eq!(largest(Level::Full, false), (1 << 21) + 1);
        assert_eq!(largest(Level::Full, true), (1 << 18) + 1);
        assert_eq!(largest(Level::Sample, false), (1 << 15) + 1);
    }
}

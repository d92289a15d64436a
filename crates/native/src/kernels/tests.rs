//! Every loop gives the bits of the rule book, `phalanx_pg::reduce`.

use half::bf16;
use phalanx_pg::reduce::{Contribution, reduce as rule_book};
use proptest::prelude::*;

use super::*;

/// The loops that this processor can run.
fn all_kernels() -> Vec<Kernels> {
    Kernels::available().collect()
}

fn defined() -> impl Iterator<Item = (DType, ReduceOp)> {
    let pairs = DType::ALL
        .into_iter()
        .flat_map(|dtype| ReduceOp::ALL.map(|op| (dtype, op)));
    pairs.filter(|(dtype, op)| op.is_defined_for(*dtype))
}

/// Memory that begins `offset` elements behind a boundary that suits every type.
#[derive(Clone)]
struct Memory {
    words: Vec<u64>,
    start: usize,
    bytes: usize,
}

impl Memory {
    fn new(offset: usize, size: usize, len: usize) -> Self {
        let (start, bytes) = (offset * size, size * len);
        // Bytes outside the range must keep this pattern.
        let words = vec![0xabab_abab_abab_abab; (start + bytes).div_ceil(8) + 8];
        Self {
            words,
            start,
            bytes,
        }
    }

    fn ptr(&mut self) -> *mut u8 {
        self.words
            .as_mut_ptr()
            .cast::<u8>()
            .wrapping_add(self.start)
    }

    fn get(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[self.start..][..self.bytes]
    }

    fn get_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[self.start..][..self.bytes]
    }

    fn assert_nothing_else_written(&self) {
        let all: &[u8] = bytemuck::cast_slice(&self.words);
        let after = &all[self.start + self.bytes..];
        assert!(
            all[..self.start]
                .iter()
                .chain(after)
                .all(|byte| *byte == 0xab)
        );
    }
}

/// Numbers that are cheap to make and reach everything: small integers, fractions, every bit
/// pattern, infinities, NaNs, zeros of both signs, subnormals.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn float(&mut self) -> f64 {
        let small = (self.next() % 2000) as f64 - 1000.0;
        match self.next() % 16 {
            0 => {
                [f64::INFINITY, f64::NEG_INFINITY, f64::NAN, -0.0, 0.0][(self.next() % 5) as usize]
            }
            1..=8 => small / 7.0,
            _ => small,
        }
    }

    fn fill(&mut self, dtype: DType, memory: &mut [u8]) {
        for element in memory.chunks_exact_mut(dtype.size()) {
            let bits = self.next().to_le_bytes();
            match dtype {
                _ if self.next().is_multiple_of(4) => {
                    element.copy_from_slice(&bits[..element.len()])
                }
                DType::F16 => element.copy_from_slice(&f16::from_f64(self.float()).to_le_bytes()),
                DType::BF16 => element.copy_from_slice(&bf16::from_f64(self.float()).to_le_bytes()),
                DType::F32 => element.copy_from_slice(&(self.float() as f32).to_le_bytes()),
                DType::F64 => element.copy_from_slice(&self.float().to_le_bytes()),
                DType::Complex64 => {
                    element[..4].copy_from_slice(&(self.float() as f32).to_le_bytes());
                    element[4..].copy_from_slice(&(self.float() as f32).to_le_bytes());
                }
                _ => element.copy_from_slice(&bits[..element.len()]),
            }
        }
    }
}

/// Equal bits. Which NaN a sum or a product gives is the one thing that the rules leave open.
fn assert_same(dtype: DType, op: ReduceOp, found: &[u8], wanted: &[u8], context: &str) {
    let chosen = matches!(op, ReduceOp::Min | ReduceOp::Max);
    let (size, is_nan): (usize, fn(&[u8]) -> bool) = match dtype {
        DType::F16 => (2, |x| f16::from_le_bytes([x[0], x[1]]).is_nan()),
        DType::BF16 => (2, |x| bf16::from_le_bytes([x[0], x[1]]).is_nan()),
        DType::F32 | DType::Complex64 => {
            (4, |x| f32::from_le_bytes(x.try_into().unwrap()).is_nan())
        }
        DType::F64 => (8, |x| f64::from_le_bytes(x.try_into().unwrap()).is_nan()),
        other => (other.size(), |_| false),
    };
    assert_eq!(found.len(), wanted.len());
    for (i, (found, wanted)) in found.chunks(size).zip(wanted.chunks(size)).enumerate() {
        let same = found == wanted || (!chosen && is_nan(found) && is_nan(wanted));
        assert!(
            same,
            "{op} of {dtype}, {context}: element {i} is {found:x?}, not {wanted:x?}"
        );
    }
}

/// One case of the property tests.
#[derive(Debug, Clone)]
struct Case {
    ranks: usize,
    len: usize,
    offsets: Vec<usize>,
    in_place: bool,
    seed: u64,
}

fn case() -> impl Strategy<Value = Case> {
    let offsets = prop::collection::vec(0..9usize, 10);
    // Some beyond what loops ask for ahead.
    let lens = prop_oneof![3 => 0..150usize, 1 => 750..1100usize];
    (1..=9usize, lens, offsets, any::<bool>(), any::<u64>()).prop_map(
        |(ranks, len, offsets, in_place, seed)| Case {
            ranks,
            len,
            offsets,
            in_place,
            seed,
        },
    )
}

impl Case {
    fn inputs(&self, dtype: DType) -> Vec<Memory> {
        let mut numbers = Numbers(self.seed);
        let mut inputs: Vec<_> = (0..self.ranks)
            .map(|i| Memory::new(self.offsets[i], dtype.size(), self.len))
            .collect();
        for input in &mut inputs {
            numbers.fill(dtype, input.get_mut());
        }
        inputs
    }

    fn factor(rank: usize) -> f64 {
        0.3 + rank as f64
    }

    fn wanted(&self, op: ReduceOp, dtype: DType, inputs: &[Memory]) -> Vec<u8> {
        let parts: Vec<_> = inputs
            .iter()
            .enumerate()
            .map(|(rank, input)| Contribution {
                bytes: input.get(),
                factor: Self::factor(rank),
            })
            .collect();
        let mut wanted = vec![0; self.len * dtype.size()];
        rule_book(op, dtype, &parts, &mut wanted);
        wanted
    }

    fn sources(inputs: &mut [Memory]) -> Vec<Source> {
        let pairs = inputs.iter_mut().enumerate();
        pairs
            .map(|(rank, input)| Source {
                ptr: input.ptr(),
                factor: Self::factor(rank),
                far: rank != 1,
            })
            .collect()
    }

    fn check_reduce(&self, kernels: Kernels, op: ReduceOp, dtype: DType) {
        let mut inputs = self.inputs(dtype);
        let before = inputs.clone();
        let wanted = self.wanted(op, dtype, &inputs);
        let sources = Self::sources(&mut inputs);
        let mut outside = vec![Memory::new(self.offsets[9], dtype.size(), self.len); 2];
        let outside_ptrs: Vec<_> = outside.iter_mut().map(Memory::ptr).collect();
        let dests = match self.in_place {
            true => Dests::Sources,
            false => Dests::At(&outside_ptrs),
        };
        // SAFETY: `sources` and `dests` point to `len` elements of memory that lives on below.
        unsafe { reduce(kernels, op, dtype, &sources, dests, self.len, self.ranks) };
        let written = if self.in_place { &inputs } else { &outside };
        for memory in written {
            assert_same(dtype, op, memory.get(), &wanted, &format!("{kernels:?}"));
            memory.assert_nothing_else_written();
        }
        if !self.in_place {
            let unchanged = inputs
                .iter()
                .zip(&before)
                .all(|(now, then)| now.words == then.words);
            assert!(unchanged, "sources were written to");
        }
    }

    fn check_partial(&self, kernels: Kernels, op: ReduceOp, dtype: DType) {
        let mut inputs = self.inputs(dtype);
        let wanted = self.wanted(op, dtype, &inputs);
        let mut wide = Memory::new(self.offsets[9], wide_size(dtype), self.len);
        let mut out = Memory::new(self.offsets[0], dtype.size(), self.len);
        let sources = Self::sources(&mut inputs);
        // SAFETY: all of it points to `len` elements of memory that lives on below.
        unsafe {
            partial(kernels, op, dtype, &sources, wide.ptr(), self.len);
            let partials = [wide.ptr().cast_const()];
            finish(
                kernels,
                op,
                dtype,
                &partials,
                &[out.ptr()],
                self.len,
                self.ranks,
            );
        }
        assert_same(
            dtype,
            op,
            out.get(),
            &wanted,
            &format!("{kernels:?}, in two steps"),
        );
        wide.assert_nothing_else_written();
        out.assert_nothing_else_written();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn reductions_are_those_of_the_rule_book(case in case()) {
        for kernels in all_kernels() {
            for (dtype, op) in defined() {
                case.check_reduce(kernels, op, dtype);
            }
        }
    }

    #[test]
    fn a_partial_result_of_one_host_finishes_as_the_reduction(case in case()) {
        for kernels in all_kernels() {
            for (dtype, op) in defined() {
                case.check_partial(kernels, op, dtype);
            }
        }
    }

    #[test]
    fn copies_copy(from_offset in 0..80usize, to_offset in 0..80usize, bytes in 0..1000usize) {
        let mut from = Memory::new(from_offset, 1, bytes);
        Numbers(bytes as u64).fill(DType::U8, from.get_mut());
        for (kernels, past_the_cache) in all_kernels().into_iter().zip([false, true]) {
            let mut to = Memory::new(to_offset, 1, bytes);
            // SAFETY: both are `bytes` long.
            unsafe { copy::copy_with(kernels, past_the_cache, from.ptr(), to.ptr(), bytes) };
            assert_eq!(from.get(), to.get());
            to.assert_nothing_else_written();
        }
    }
}

/// `f32` values, each as one host's partial result, narrowed.
fn narrowed(kernels: Kernels, dtype: DType, values: &[f32]) -> Vec<u16> {
    let mut out = vec![0u16; values.len()];
    let (from, to) = (values.as_ptr().cast(), out.as_mut_ptr().cast());
    // SAFETY: both have as many elements.
    unsafe {
        finish(
            kernels,
            ReduceOp::Sum,
            dtype,
            &[from],
            &[to],
            values.len(),
            1,
        )
    };
    out
}

#[test]
fn every_16_bit_value_widens_as_half_says() {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    for kernels in all_kernels() {
        for (dtype, widen) in [
            (
                DType::F16,
                (|x| f16::from_bits(x).to_f32()) as fn(u16) -> f32,
            ),
            (DType::BF16, |x| bf16::from_bits(x).to_f32()),
        ] {
            let mut wide = vec![0f32; all.len()];
            let source = Source {
                ptr: all.as_ptr().cast(),
                factor: 1.0,
                far: true,
            };
            let out = wide.as_mut_ptr().cast();
            // SAFETY: both have as many elements.
            unsafe { partial(kernels, ReduceOp::Sum, dtype, &[source], out, all.len()) };
            for (bits, wide) in all.iter().zip(wide) {
                let wanted = widen(*bits);
                // A signalling NaN may still be one: `narrow` makes it quiet.
                let same = (wanted.to_bits() | 0x0040_0000) == (wide.to_bits() | 0x0040_0000);
                let same = if wanted.is_nan() {
                    same
                } else {
                    wanted.to_bits() == wide.to_bits()
                };
                assert!(
                    same,
                    "{kernels:?} {dtype}: {bits:x} became {wide}, not {wanted}"
                );
            }
        }
    }
}

#[test]
fn values_around_every_rounding_boundary_narrow_as_half_says() {
    let lower = [
        0, 1, 0xfff, 0x1000, 0x1001, 0x1fff, 0x2000, 0x3000, 0x7fff, 0x8000, 0x8001, 0xffff,
    ];
    let values: Vec<f32> = (0..=u16::MAX)
        .flat_map(|upper| lower.map(|lower| f32::from_bits(u32::from(upper) << 16 | lower)))
        .collect();
    for kernels in all_kernels() {
        for (dtype, narrow) in [
            (
                DType::F16,
                (|x| f16::from_f32(x).to_bits()) as fn(f32) -> u16,
            ),
            (DType::BF16, |x| bf16::from_f32(x).to_bits()),
        ] {
            for (value, found) in values.iter().zip(narrowed(kernels, dtype, &values)) {
                let wanted = narrow(*value);
                let bits = value.to_bits();
                assert_eq!(found, wanted, "{kernels:?} {dtype}: {value} ({bits:x})");
            }
        }
    }
}

#[test]
fn a_lone_nan_keeps_its_bits() {
    for kernels in all_kernels() {
        for op in [
            ReduceOp::Sum,
            ReduceOp::Avg,
            ReduceOp::Product,
            ReduceOp::Min,
            ReduceOp::Max,
        ] {
            for nan_at in 0..3 {
                let mut parts = [[1.5f32; 37], [2.0; 37], [-3.25; 37]];
                parts[nan_at].fill(f32::from_bits(0xffc1_2345));
                let contributions = parts
                    .each_ref()
                    .map(|part| Contribution::new(op, bytemuck::cast_slice(part)));
                let mut wanted = [0; 37 * 4];
                rule_book(op, DType::F32, &contributions, &mut wanted);
                let sources = parts.each_ref().map(|part| Source {
                    ptr: part.as_ptr().cast(),
                    factor: 1.0,
                    far: false,
                });
                let mut out = [0u32; 37];
                // SAFETY: all have 37 elements.
                unsafe {
                    let dest = out.as_mut_ptr().cast();
                    reduce(kernels, op, DType::F32, &sources, Dests::At(&[dest]), 37, 3);
                }
                assert_eq!(
                    bytemuck::cast_slice::<_, u8>(&out),
                    wanted,
                    "{kernels:?} {op} {nan_at}"
                );
            }
        }
    }
}

#[test]
fn hosts_are_combined_in_order() {
    // In f32, (1e8 + 1) + -1e8 is 0 and (1e8 + -1e8) + 1 is 1; 16-bit results show the same only
    // if partial results were not rounded on the way.
    for kernels in all_kernels() {
        for (hosts, wanted) in [([1e8f32, 1.0, -1e8], 0.0), ([1e8, -1e8, 1.0], 1.0)] {
            assert_eq!(finished(kernels, DType::F32, hosts), wanted);
        }
        assert_eq!(finished(kernels, DType::BF16, [256.0, 1.0, 1.0]), 258.0);
        assert_eq!(finished(kernels, DType::F16, [2048.0, 1.0, 1.0]), 2050.0);
    }
}

/// Three hosts' partial sums of one element as the result of all.
fn finished(kernels: Kernels, dtype: DType, hosts: [f32; 3]) -> f32 {
    let partials = hosts.each_ref().map(|host| std::ptr::from_ref(host).cast());
    let mut out = 0u32;
    let dest = std::ptr::from_mut(&mut out).cast();
    // SAFETY: there is one element everywhere.
    unsafe { finish(kernels, ReduceOp::Sum, dtype, &partials, &[dest], 1, 3) };
    match dtype {
        DType::F16 => f16::from_bits(out as u16).to_f32(),
        DType::BF16 => bf16::from_bits(out as u16).to_f32(),
        _ => f32::from_bits(out),
    }
}

#[test]
fn large_copies_go_past_the_cache_and_arrive() {
    let bytes = (16 << 20) + 77;
    let mut from = Memory::new(3, 1, bytes);
    Numbers(1).fill(DType::U8, from.get_mut());
    for kernels in all_kernels() {
        let mut to = Memory::new(5, 1, bytes);
        // SAFETY: both are `bytes` long.
        unsafe { copy(kernels, from.ptr(), to.ptr(), bytes) };
        assert!(from.get() == to.get());
        to.assert_nothing_else_written();
    }
}

#[test]
fn the_variable_takes_one_value() {
    assert_eq!(Kernels::chosen(None), Ok(Kernels::best()));
    assert_eq!(
        Kernels::chosen(Some("portable".as_ref())),
        Ok(Kernels::Portable)
    );
    for other in ["", "Portable", "avx2"] {
        let error = Kernels::chosen(Some(other.as_ref())).unwrap_err();
        assert!(error.contains("PHALANX_KERNELS"), "{error}");
        assert!(error.contains("portable"), "{error}");
    }
}

//! A random mix of calls, the same on all ranks, each result checked.

use std::collections::VecDeque;
use std::sync::Arc;

use half::bf16;
use phalanx_pg::{
    Buffer, Call, CallOptions, DType, Device, Done, Error, Mode, Payload, ProcessGroup,
    ProcessGroupExt, RawWork, ReduceOp, Result,
};

use super::{Fault, Plan};

const DTYPES: [DType; 4] = [DType::F32, DType::I64, DType::BF16, DType::F64];

/// Elements: with the descriptor, in slots, staged or shared, several chunks, many blocks.
const SIZES: [usize; 6] = [1, 100, 1500, 5000, 40_000, 200_000];

/// Most operations of a group in flight.
const IN_FLIGHT: usize = 5;

/// Operations until the last group is replaced by a new one.
const SPLIT_EVERY: usize = 25;

/// One rank's way through the mix.
pub(super) struct Mix<'a> {
    plan: &'a Plan,
    world: &'a Arc<dyn ProcessGroup>,
    /// Some of the world, for some operations.
    part: Option<Arc<dyn ProcessGroup>>,
    /// The same on all ranks.
    shared: fastrand::Rng,
    /// This rank's own: memory and mode are nobody else's business.
    own: fastrand::Rng,
    step: usize,
    flying: VecDeque<(RawWork, Expected)>,
    with_parts: bool,
    /// How parts failed; the world may not have yet.
    pub(super) part_errors: Vec<Error>,
}

/// What an operation must end with.
struct Expected {
    what: String,
    dtype: DType,
    len: usize,
    value: Box<dyn Fn(usize) -> i64>,
    /// There is nothing to check.
    nothing: bool,
}

fn is_of_part(err: &Error) -> bool {
    let group = err.place().group.as_deref();
    group.is_some_and(|group| group.contains('/'))
}

/// The rank in `world` of a rank that an error of one of its groups names.
pub(super) fn world_rank(world: &Arc<dyn ProcessGroup>, err: &Error, peer: usize) -> usize {
    let group = err.place().group.as_deref().unwrap_or_default();
    match group.split_once('/') {
        // A part is named after its members.
        Some((_, name)) => {
            let members = name.rsplit_once(' ').map_or("", |(_, members)| members);
            let member = members.split('-').nth(peer);
            member
                .and_then(|member| member.parse().ok())
                .expect("a member")
        }
        None => world.global_ranks()[peer],
    }
}

impl<'a> Mix<'a> {
    pub(super) fn new(plan: &'a Plan, world: &'a Arc<dyn ProcessGroup>) -> Self {
        // Who has run out of time in a part comes too late to the others.
        Self::with_seed(plan, world, plan.seed, plan.fault == Fault::Kill)
    }

    pub(super) fn afterwards(plan: &'a Plan, world: &'a Arc<dyn ProcessGroup>) -> Self {
        Self::with_seed(plan, world, !plan.seed, false)
    }

    fn with_seed(
        plan: &'a Plan,
        world: &'a Arc<dyn ProcessGroup>,
        seed: u64,
        with_parts: bool,
    ) -> Self {
        Self {
            plan,
            world,
            part: None,
            shared: fastrand::Rng::with_seed(seed),
            own: fastrand::Rng::with_seed(seed.wrapping_add(world.rank() as u64 + 1)),
            step: 0,
            flying: VecDeque::new(),
            with_parts,
            part_errors: Vec::new(),
        }
    }

    /// One more operation is issued, and some are waited for.
    pub(super) fn step(&mut self) -> Result<()> {
        if self.with_parts && self.step.is_multiple_of(SPLIT_EVERY) {
            self.finish()?;
            if let Some(part) = self.part.take() {
                self.unless_of_part(part.shutdown())?;
            }
            let made = self.part();
            self.unless_of_part(made)?;
        }
        self.step += 1;
        let in_part = self.shared.u8(0..4) == 0;
        let group = match (&self.part, in_part) {
            (Some(part), true) => Arc::clone(part),
            (None, true) if self.with_parts => {
                // Not a member; the others' random numbers are drawn all the same.
                self.draw();
                return Ok(());
            }
            _ => Arc::clone(self.world),
        };
        let (choice, dtype, len) = self.draw();
        let issued = self.issue(&group, choice, dtype, len);
        self.unless_of_part(issued)?;
        while self.flying.len() > self.own.usize(0..=IN_FLIGHT) {
            self.land()?;
        }
        Ok(())
    }

    fn draw(&mut self) -> (usize, DType, usize) {
        let choice = self.shared.usize(0..12);
        let dtype = DTYPES[self.shared.usize(0..DTYPES.len())];
        let len = SIZES[self.shared.usize(0..SIZES.len())] + self.shared.usize(0..3);
        (choice, dtype, len)
    }

    /// Waits for everything.
    pub(super) fn finish(&mut self) -> Result<()> {
        while !self.flying.is_empty() {
            self.land()?;
        }
        Ok(())
    }

    fn land(&mut self) -> Result<()> {
        if let Some((work, expected)) = self.flying.pop_front() {
            let done = work.wait();
            let checked = done.map(|done| expected.check(self.plan, done));
            self.unless_of_part(checked)?;
        }
        Ok(())
    }

    /// A part that fails is left, and the world goes on: others may not be in it.
    fn unless_of_part(&mut self, result: Result<()>) -> Result<()> {
        match result {
            Err(err) if is_of_part(&err) => {
                self.part = None;
                self.part_errors.push(err);
                Ok(())
            }
            other => other,
        }
    }

    /// A new group of some of the ranks.
    fn part(&mut self) -> Result<()> {
        let size = self.world.size();
        let mut ranks: Vec<usize> = (0..size).collect();
        let count = self.shared.usize(1..=size);
        self.shared.shuffle(&mut ranks);
        ranks.truncate(count);
        ranks.sort_unstable();
        let members: Vec<String> = ranks.iter().map(usize::to_string).collect();
        let name = format!("{} {}", self.step, members.join("-"));
        self.part = self.world.split(&ranks, &name)?;
        Ok(())
    }

    /// Where this rank's memory comes from differs.
    fn buffer(&mut self, group: &dyn ProcessGroup, dtype: DType, len: usize) -> Result<Buffer> {
        match self.own.bool() {
            true => group.allocate(Device::Cpu, dtype, len),
            false => Ok(Buffer::zeroed(dtype, len)),
        }
    }

    fn input(
        &mut self,
        group: &dyn ProcessGroup,
        dtype: DType,
        len: usize,
        value: impl Fn(usize) -> i64,
    ) -> Result<Buffer> {
        let mut buffer = self.buffer(group, dtype, len)?;
        write(&mut buffer, value)?;
        Ok(buffer)
    }

    fn issue(
        &mut self,
        group: &Arc<dyn ProcessGroup>,
        choice: usize,
        dtype: DType,
        len: usize,
    ) -> Result<()> {
        let (rank, size, step) = (group.rank(), group.size(), self.step);
        let root = step % size;
        let mine = move |i: usize| value(rank, step, i);
        let sum = move |i: usize| (0..size).map(|rank| value(rank, step, i)).sum::<i64>();
        let most = move |i: usize| {
            (0..size)
                .map(|rank| value(rank, step, i))
                .max()
                .unwrap_or(0)
        };
        // Parts of a whole are short enough.
        let piece = len.div_ceil(size);
        let op = if step.is_multiple_of(3) {
            ReduceOp::Max
        } else {
            ReduceOp::Sum
        };
        let reduced: Box<dyn Fn(usize) -> i64> = match op {
            ReduceOp::Max => Box::new(most),
            _ => Box::new(sum),
        };
        let mut expected = Expected {
            what: String::new(),
            dtype,
            len,
            value: reduced,
            nothing: false,
        };
        let call = match choice {
            0..=2 => Call::AllReduce {
                buf: self.input(&**group, dtype, len, mine)?,
                op,
            },
            3 => {
                let mut calls = Vec::new();
                for len in [len, len / 3, 1, len / 2] {
                    let buf = self.input(&**group, dtype, len, mine)?;
                    calls.push(Call::AllReduce { buf, op });
                }
                Call::Batch(calls)
            }
            4 => {
                expected.nothing = rank != root;
                Call::Reduce {
                    buf: self.input(&**group, dtype, len, mine)?,
                    op,
                    root,
                }
            }
            5 => {
                expected.value = Box::new(move |i| value(root, step, i));
                let data = Payload::from(self.input(&**group, dtype, len, mine)?);
                Call::Broadcast { data, root }
            }
            6 | 7 => {
                expected.len = piece * size;
                expected.value = Box::new(move |i| value(i / piece, step, i % piece));
                let input = self.input(&**group, dtype, piece, mine)?.freeze();
                match choice {
                    6 => {
                        let output = self.buffer(&**group, dtype, piece * size)?;
                        Call::AllGather { input, output }
                    }
                    _ => {
                        expected.nothing = rank != root;
                        let output = match rank == root {
                            true => Some(self.buffer(&**group, dtype, piece * size)?),
                            false => None,
                        };
                        Call::Gather {
                            input,
                            output,
                            root,
                        }
                    }
                }
            }
            8 => {
                expected.len = piece;
                expected.value = Box::new(move |i| value(root, step, rank * piece + i));
                let input = match rank == root {
                    true => Some(self.input(&**group, dtype, piece * size, mine)?.freeze()),
                    false => None,
                };
                let output = self.buffer(&**group, dtype, piece)?;
                Call::Scatter {
                    input,
                    output,
                    root,
                }
            }
            9 => {
                expected.len = piece;
                let whole = expected.value;
                expected.value = Box::new(move |i| whole(rank * piece + i));
                let input = self.input(&**group, dtype, piece * size, mine)?.freeze();
                let output = self.buffer(&**group, dtype, piece)?;
                Call::ReduceScatter { input, output, op }
            }
            10 => {
                expected.len = piece * size;
                expected.value =
                    Box::new(move |i| value(i / piece, step, rank * piece + i % piece));
                let input = self.input(&**group, dtype, piece * size, mine)?.freeze();
                let output = self.buffer(&**group, dtype, piece * size)?;
                let (send_counts, recv_counts) = (Vec::new(), Vec::new());
                Call::AllToAll {
                    input,
                    output,
                    send_counts,
                    recv_counts,
                }
            }
            _ if size == 1 => Call::Barrier,
            _ => {
                let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
                expected.value = Box::new(move |i| value(before, step, i));
                let tag = step as u32;
                let data = self.input(&**group, dtype, len, mine)?.freeze();
                let buf = self.buffer(&**group, dtype, len)?;
                Call::Batch(vec![
                    Call::Recv {
                        buf,
                        peer: Some(before),
                        tag,
                    },
                    Call::Send {
                        data,
                        peer: next,
                        tag,
                    },
                ])
            }
        };
        expected.nothing |= matches!(call, Call::Barrier);
        expected.what = format!("{} #{step} of {len} x {dtype} on rank {rank}", call.kind());
        let mode = match self.own.bool() {
            true => Mode::Blocking,
            false => Mode::Async,
        };
        let mut options = CallOptions::default().with_timeout(self.plan.timeout);
        options.mode = mode;
        let work = group.call(call, &options)?;
        self.flying.push_back((work, expected));
        Ok(())
    }
}

impl Expected {
    fn check(&self, plan: &Plan, done: Done) {
        if self.nothing {
            return;
        }
        let Self {
            what, dtype, len, ..
        } = self;
        // All of a batch begin with the same values, and the first has the length.
        let parts = done.parts.into_iter().filter_map(|part| part.buffer);
        let buffers: Vec<Buffer> = done.buffer.into_iter().chain(parts).collect();
        let first = buffers.first().map(|buffer| (buffer.dtype(), buffer.len()));
        assert_eq!(first, Some((*dtype, *len)), "{what} in {plan}");
        for buffer in &buffers {
            for (at, got) in read(buffer).into_iter().enumerate() {
                let expected = (self.value)(at) as f64;
                assert!(
                    got == expected,
                    "WRONG: {what}: {got} at {at}, not {expected}, in {plan}"
                );
            }
        }
    }
}

/// What a rank contributes: small, so that all sums are exact.
fn value(rank: usize, step: usize, at: usize) -> i64 {
    ((rank * 5 + step * 3 + at + at / 7) % 23) as i64
}

fn write(buffer: &mut Buffer, value: impl Fn(usize) -> i64) -> Result<()> {
    match buffer.dtype() {
        DType::F32 => fill(buffer.as_mut_slice::<f32>()?, |i| value(i) as f32),
        DType::F64 => fill(buffer.as_mut_slice::<f64>()?, |i| value(i) as f64),
        DType::I64 => fill(buffer.as_mut_slice::<i64>()?, value),
        DType::BF16 => fill(buffer.as_mut_slice::<bf16>()?, |i| {
            bf16::from_f32(value(i) as f32)
        }),
        other => unreachable!("{other} is not in the mix"),
    }
    Ok(())
}

fn fill<T>(slice: &mut [T], value: impl Fn(usize) -> T) {
    slice
        .iter_mut()
        .enumerate()
        .for_each(|(i, slot)| *slot = value(i));
}

fn read(buffer: &Buffer) -> Vec<f64> {
    let read = || {
        Ok::<_, Error>(match buffer.dtype() {
            DType::F32 => buffer
                .as_slice::<f32>()?
                .iter()
                .map(|&v| v.into())
                .collect(),
            DType::F64 => buffer.to_vec::<f64>()?,
            DType::I64 => buffer
                .as_slice::<i64>()?
                .iter()
                .map(|&v| v as f64)
                .collect(),
            DType::BF16 => buffer
                .as_slice::<bf16>()?
                .iter()
                .map(|v| v.to_f64())
                .collect(),
            other => unreachable!("{other} is not in the mix"),
        })
    };
    read().expect("the type is known and the memory is here")
}

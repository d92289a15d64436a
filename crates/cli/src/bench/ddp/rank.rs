//! One rank of the measurement.

use std::sync::Arc;
use std::time::Instant;

use phalanx::pg::{Buffer, DType, Device, ProcessGroup, ProcessGroupExt, ReduceOp};
use phalanx_reducer::{
    GradRef, GradTarget, GradView, ParamSpec, Reducer, ReducerConfig, Slot, Sync, verify,
};

use super::{Args, Figures};
use crate::Failure;
use crate::bench::stats::median;

/// Passes before anything is measured: the rebuild is at the second.
const WARM_UP: usize = 3;

/// Measures, and returns the figures of this rank.
pub(super) fn run(args: &Args) -> Result<Figures, Failure> {
    let group = phalanx::init_with(&args.backend)?;
    let mut bench = Bench::new(args, Arc::clone(&group))?;
    for n in 0..WARM_UP {
        bench.with_sync(n)?;
    }
    let (mut local, mut ddp, mut floor) = (Vec::new(), Vec::new(), Vec::new());
    let mut early = resident_kib()?;
    for n in 0..args.rounds {
        // Not before everything has been used once.
        if n == (args.rounds / 10).max(1) {
            early = resident_kib()?;
        }
        let n = n + WARM_UP;
        local.push(bench.alone(n)?);
        ddp.push(bench.with_sync(n)?);
        floor.push(bench.floor(n)?);
    }
    let figures = Figures {
        local_ms: median(&local),
        ddp_ms: median(&ddp),
        floor_ms: median(&floor),
        verified: bench.wrong == 0,
        grown_kib: resident_kib()? - early,
    };
    group.shutdown()?;
    Ok(figures)
}

struct Bench {
    group: Arc<dyn ProcessGroup>,
    reducer: Reducer,
    lens: Vec<usize>,
    /// Whether averages of a backward are gone when the next one begins, as views of buckets have to
    /// be where buckets are written to again. Otherwise they live until it has ended.
    view: bool,
    /// Gradients of the last backward.
    kept: Vec<Kept>,
    /// Which gradients are averaged in their own memory, as the passes before have shown: those are
    /// given away, the others lent.
    alone: Vec<bool>,
    /// The floor's gradients. Kept, for freeing them gives pages back to the system that the next
    /// backward would have to ask for again: only that one, not the one it is compared with.
    bare_grads: Vec<Vec<f32>>,
    /// The floor's one bucket.
    bare: Option<Buffer>,
    /// Averages that were not what they should be.
    wrong: usize,
}

impl Bench {
    fn new(args: &Args, group: Arc<dyn ProcessGroup>) -> Result<Self, Failure> {
        let lens = args.params.lens();
        let spec = |(i, &len): (usize, &usize)| ParamSpec::new(format!("p{i}"), [len], DType::F32);
        let params: Vec<ParamSpec> = lens.iter().enumerate().map(spec).collect();
        verify(&*group, &params, &[])?;
        let reducer = Reducer::new(params, Arc::clone(&group), ReducerConfig::default())?;
        let bare = group.allocate(Device::Cpu, DType::F32, lens.iter().sum())?;
        let all = || lens.iter().map(|&len| vec![0.0; len]).collect();
        Ok(Self {
            group,
            reducer,
            view: args.view,
            kept: Vec::new(),
            alone: vec![false; lens.len()],
            bare_grads: all(),
            lens,
            bare: Some(bare),
            wrong: 0,
        })
    }

    /// A backward of no work: every gradient is new memory with values of this rank's.
    fn gradient(&self, slot: Slot, n: usize) -> Vec<f32> {
        vec![value(self.group.rank(), slot, n); self.lens[slot]]
    }

    /// What the backward before has left and the next one finds.
    fn before(&mut self) -> Vec<Kept> {
        let mut before = std::mem::take(&mut self.kept);
        if self.view {
            before.clear();
        }
        before
    }

    /// That backward alone. It keeps what the one with averages keeps: pages that are given back to
    /// the system cost the next one to ask for them.
    fn alone(&mut self, n: usize) -> Result<f64, Failure> {
        let _before = self.before();
        self.group.barrier()?;
        let start = Instant::now();
        for slot in (0..self.lens.len()).rev() {
            let gradient = std::hint::black_box(self.gradient(slot, n));
            if self.alone[slot] {
                self.kept.push(Kept::Own(gradient));
            }
        }
        Ok(ms(start))
    }

    fn with_sync(&mut self, n: usize) -> Result<f64, Failure> {
        let _before = self.before();
        let pass = self.reducer.begin(GradTarget::Model, Sync::Yes)?;
        self.group.barrier()?;
        let start = Instant::now();
        let sink = pass.sink();
        for slot in (0..self.lens.len()).rev() {
            let gradient = self.gradient(slot, n);
            match self.alone[slot] {
                true => sink.grad_ready(slot, Buffer::from_vec(gradient))?,
                false => sink.grad_ready(slot, GradView::dense(&gradient))?,
            }
        }
        let reduced = pass.finish()?;
        for slot in 0..self.lens.len() {
            let average = reduced.dense(slot).ok_or("a gradient is missing")?;
            self.alone[slot] = average.is_alone();
            self.kept.push(Kept::Average(average));
        }
        let took = ms(start);
        self.check(n)?;
        Ok(took)
    }

    /// What cannot be avoided: one scaled copy of all gradients and one all-reduce.
    fn floor(&mut self, n: usize) -> Result<f64, Failure> {
        let mut bare = self.bare.take().ok_or("the floor's memory is lost")?;
        let rank = self.group.rank();
        for (slot, grad) in self.bare_grads.iter_mut().enumerate() {
            grad.fill(value(rank, slot, n));
        }
        let share = 1.0 / self.group.size() as f32;
        self.group.barrier()?;
        let start = Instant::now();
        let mut to = bare.as_mut_slice::<f32>()?;
        for grad in &self.bare_grads {
            let (here, rest) = to.split_at_mut(grad.len());
            let pairs = here.iter_mut().zip(grad);
            pairs.for_each(|(to, value)| *to = value * share);
            to = rest;
        }
        let sum = self.group.allreduce(bare, ReduceOp::Sum)?.wait()?;
        let took = ms(start);
        self.bare = Some(sum);
        Ok(took)
    }

    /// Every element of the averages that are kept.
    fn check(&mut self, n: usize) -> Result<(), Failure> {
        let size = self.group.size();
        let share = (1.0 / size as f64) as f32;
        for (slot, kept) in self.kept.iter().enumerate() {
            let mut expected = value(0, slot, n) * share;
            (1..size).for_each(|rank| expected += value(rank, slot, n) * share);
            let Kept::Average(average) = kept else {
                return Err("a gradient is no average".into());
            };
            let all = average.as_slice::<f32>()?;
            let near = |value: &&f32| (**value - expected).abs() <= expected.abs() * 1e-6;
            self.wrong += all.len() - all.iter().filter(near).count();
        }
        Ok(())
    }
}

/// A gradient that outlives its backward.
enum Kept {
    /// Of a backward alone.
    Own(#[expect(dead_code, reason = "only kept")] Vec<f32>),
    /// In the memory of the gradient, or in a bucket's.
    Average(GradRef),
}

/// Different for each rank, parameter and pass.
fn value(rank: usize, slot: Slot, n: usize) -> f32 {
    1.0 + rank as f32 * 0.25 + (slot % 97) as f32 * 0.5 + (n % 13) as f32
}

fn ms(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e3
}

/// Memory in use by this process.
fn resident_kib() -> Result<i64, Failure> {
    let text = std::fs::read_to_string("/proc/self/status")?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
    Ok(kib.ok_or("the system does not tell VmRSS")?.parse()?)
}

//! The reducer between passes.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use phalanx_pg::{Device, ProcessGroup};
use tracing::debug;

use crate::accumulate::Accumulator;
use crate::bucket::Spare;
use crate::config::ReducerConfig;
use crate::copy;
use crate::error::{Error, Result};
use crate::hook::CommHook;
use crate::lane::Lane;
use crate::params::{ParamSpec, Slot};
use crate::pass::{Goal, Pass, Running, Start};
use crate::reduced::Grad;
use crate::state::{Core, Phase, State, first_layout, lay_out};
use crate::stats::ReducerStats;

/// Whose gradients a pass computes. Sums of different targets are kept apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum GradTarget {
    /// The model's own gradients.
    #[default]
    Model,
    /// Those of a distributed autograd context.
    Context(u64),
}

/// Whether a pass averages across ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sync {
    /// Buckets are reduced while backward runs; what was accumulated before is part of it.
    #[default]
    Yes,
    /// Gradients are added up here, nothing is sent: PyTorch's `no_sync`.
    No,
}

/// Averages gradients across ranks while backward runs.
///
/// One backward is one pass: [`begin`](Reducer::begin) before the forward,
/// [`grad_ready`](crate::Sink::grad_ready) for each gradient as it is computed,
/// [`finish`](Pass::finish) after backward.
///
/// ```
/// use std::sync::Arc;
/// use phalanx_pg::{DType, FakeGroup};
/// use phalanx_reducer::{GradTarget, GradView, ParamSpec, Reducer, ReducerConfig, Sync};
///
/// let params = vec![
///     ParamSpec::new("weight", [2, 2], DType::F32),
///     ParamSpec::new("bias", [2], DType::F32),
/// ];
/// let group = Arc::new(FakeGroup::new(0, 1)); // alone: the average is the gradient
/// let reducer = Reducer::new(params, group, ReducerConfig::default())?;
/// let pass = reducer.begin(GradTarget::Model, Sync::Yes)?;
/// let sink = pass.sink();
/// sink.grad_ready(1, GradView::dense(&[0.5f32, 0.5]))?; // backward comes to the bias first
/// sink.grad_ready(0, GradView::dense(&[1.0f32; 4]))?;
/// let reduced = pass.finish()?;
/// assert_eq!(reduced.dense(1).unwrap().as_slice::<f32>()?, [0.5, 0.5]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Order
///
/// All ranks construct, begin and finish in the same order, with the same parameters and options.
/// Buckets are reduced in the order of their indices whatever order gradients come in, so ranks
/// may compute them in different orders.
///
/// # After an error
///
/// When a pass fails, or is dropped after something was sent, other ranks may be elsewhere. Every
/// later [`begin`](Reducer::begin) then fails with [`Error::Stuck`] until the group is replaced.
/// The model is as it was: nothing is written to it here.
///
/// # Threads
///
/// `Send` and `Sync`; one pass at a time. Gradients may come from several threads.
pub struct Reducer {
    core: Arc<Core>,
}

impl Reducer {
    /// A reducer for these parameters, in this order, which is the same on all ranks.
    ///
    /// Collective if a parameter has sparse gradients or buckets may be skipped, since that takes
    /// a group of its own; does not check the other ranks' parameters, which
    /// [`verify`](crate::verify) does.
    pub fn new(
        params: Vec<ParamSpec>,
        group: Arc<dyn ProcessGroup>,
        config: ReducerConfig,
    ) -> Result<Self> {
        check_params(&params)?;
        let layout = first_layout(&params, &config, &*group, false)?;
        let mut stats = describe(&params, &config);
        stats.bucket_sizes = layout.sizes();
        debug!(target: "buckets", sizes = ?stats.bucket_sizes, "first layout");
        let mut state = State {
            group,
            control: None,
            lane: None,
            hook: None,
            spare: vec![Spare::new(); layout.buckets.len()],
            layout: Arc::new(layout),
            phase: Phase::Idle,
            passes: 0,
            rebuilt: false,
            recorded: None,
            learnt: None,
            accumulated: HashMap::new(),
            last_arrivals: None,
            last_used: None,
            handed_over: Vec::new(),
            stats,
        };
        state.open_groups(&params, &config)?;
        Ok(Self {
            core: Arc::new(Core {
                params: params.into(),
                config,
                state: Mutex::new(state),
            }),
        })
    }

    /// Begins a pass, before the forward whose backward it is.
    ///
    /// The first one after the ready order became known rebuilds the buckets, which is a
    /// collective call; otherwise nothing is sent.
    pub fn begin(&self, target: GradTarget, sync: Sync) -> Result<Pass> {
        self.begin_divided(target, sync, None)
    }

    /// As [`begin`](Reducer::begin), dividing by something else than the group's size: the number
    /// of ranks that still have inputs.
    pub fn begin_divided(
        &self,
        target: GradTarget,
        sync: Sync,
        divisor: Option<usize>,
    ) -> Result<Pass> {
        self.start(target, sync, divisor, false)
    }

    /// Takes part in the others' backward without gradients of its own: what a rank does that has
    /// no inputs left. Sends zeros, also for what was accumulated; waits for all.
    pub fn shadow(&self) -> Result<()> {
        self.start(GradTarget::Model, Sync::Yes, None, true)?
            .finish()
            .map(drop)
    }

    /// Rebuilds the buckets now if the next [`begin`](Reducer::begin) would: for ranks that stand
    /// by while others begin. Collective if it is due.
    pub fn rebuild(&self) -> Result<()> {
        self.core.ready_state().map(drop)
    }

    fn start(
        &self,
        target: GradTarget,
        sync: Sync,
        divisor: Option<usize>,
        shadow: bool,
    ) -> Result<Pass> {
        let core = &self.core;
        let mut state = core.ready_state()?;
        let goal = match sync {
            Sync::No => Goal::Accumulate,
            Sync::Yes if core.config.static_graph && state.learnt.is_none() => Goal::Learn,
            Sync::Yes => Goal::Reduce,
        };
        let slots = core.params.len();
        let none = || Arc::new(Accumulator::new(slots));
        let accumulated = match shadow {
            true => none(),
            false => Arc::clone(state.accumulated.entry(target).or_insert_with(none)),
        };
        // With a hook averaging is the hook's business.
        let divisor = divisor.unwrap_or(state.group.size()).max(1);
        let factor = match state.hook {
            Some(_) => 1.0,
            None => 1.0 / divisor as f64,
        };
        let spare = match goal {
            Goal::Accumulate => Vec::new(),
            _ => state.spare.iter_mut().map(std::mem::take).collect(),
        };
        let start = Start {
            layout: Arc::clone(&state.layout),
            group: Arc::clone(&state.group),
            control: state.control.clone(),
            lane: state.lane.clone(),
            hooked: state.hook.is_some(),
            learnt: state.learnt.clone().filter(|_| goal == Goal::Reduce),
            goal,
            target,
            factor,
            accumulated,
            spare,
            shadow,
        };
        state.phase = Phase::InPass;
        state.passes += 1;
        drop(state);
        Ok(Pass::new(Running::new(Arc::clone(core), start)))
    }

    /// Lets `hook` handle buckets from the next pass on. Once only; collective.
    pub fn register_comm_hook(&self, hook: Arc<dyn CommHook>) -> Result<()> {
        let mut state = self.core.state.lock();
        if let Some(first) = &state.hook {
            let what = format!(
                "there is a comm hook, {:?}, and there can be one only",
                first.name()
            );
            return Err(Error::invalid(what));
        }
        if matches!(state.phase, Phase::InPass) {
            return Err(Error::invalid(
                "a comm hook cannot be registered during a backward",
            ));
        }
        state.stats.comm_hook = Some(hook.name().to_owned());
        state.lane = Some(Arc::new(Lane::open(
            &*state.group,
            Some(Arc::clone(&hook)),
        )?));
        state.hook = Some(hook);
        let slots = state.layout.slots();
        let layout = lay_out(&self.core.params, slots, &*state.group, true);
        state.adopt(layout);
        Ok(())
    }

    /// Goes on with another group, also after a failure: from the first layout, as if newly made,
    /// but with accumulated gradients and the comm hook. Collective in the new group.
    pub fn replace_group(&self, group: Arc<dyn ProcessGroup>) -> Result<()> {
        let core = &self.core;
        let mut state = core.state.lock();
        if matches!(state.phase, Phase::InPass) {
            return Err(Error::invalid(
                "the group cannot be replaced during a backward",
            ));
        }
        let hooked = state.hook.is_some();
        let layout = first_layout(&core.params, &core.config, &*group, hooked)?;
        state.group = group;
        state.handed_over.clear();
        state.stats.bucket_sizes = layout.sizes();
        // What is in flight in the old group, and its memory, is no longer ours.
        state.adopt(layout);
        state.rebuilt = false;
        state.stats.forget_group();
        state.recorded = None;
        state.learnt = None;
        state.open_groups(&core.params, &core.config)?;
        state.phase = Phase::Idle;
        Ok(())
    }

    /// The parameters, by slot.
    pub fn params(&self) -> &[ParamSpec] {
        &self.core.params
    }

    /// The options.
    pub fn config(&self) -> &ReducerConfig {
        &self.core.config
    }

    /// The group.
    pub fn group(&self) -> Arc<dyn ProcessGroup> {
        Arc::clone(&self.core.state.lock().group)
    }

    /// The parameters of each bucket, in the order of their places.
    pub fn buckets(&self) -> Vec<Vec<Slot>> {
        self.core.state.lock().layout.slots()
    }

    /// Figures and times.
    pub fn stats(&self) -> ReducerStats {
        let state = self.core.state.lock();
        let order = state
            .last_arrivals
            .as_ref()
            .map(|arrivals| arrivals.order());
        ReducerStats {
            prev_iteration_grad_ready_order_indices: order.unwrap_or_default(),
            ..state.stats.clone()
        }
    }

    /// Shows a copy of the sum that passes without synchronisation have left for a slot: `None`
    /// if there is none.
    pub fn accumulated(&self, target: GradTarget, slot: Slot) -> Option<Grad> {
        let accumulated = self.core.state.lock().accumulated.get(&target).cloned()?;
        let param = self.core.params.get(slot)?;
        accumulated.with(slot, |sum| Some(sum?.to_grad(param)))
    }

    /// Forgets what was accumulated for a target: when gradients are reset, or a distributed
    /// autograd context has ended.
    pub fn forget(&self, target: GradTarget) {
        self.core.state.lock().accumulated.remove(&target);
    }
}

impl fmt::Debug for Reducer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.core.state.lock();
        let (params, buckets) = (self.core.params.len(), state.layout.buckets.len());
        write!(
            f,
            "Reducer({params} parameters, {buckets} buckets, {:?})",
            state.group
        )
    }
}

fn check_params(params: &[ParamSpec]) -> Result<()> {
    if params.is_empty() {
        let what = "there is no parameter that needs a gradient; nothing has to be reduced";
        return Err(Error::invalid(what));
    }
    for param in params {
        let problem = if !copy::is_gradient(param.dtype) {
            format!("is of type {}, which has no gradients", param.dtype)
        } else if param.sparse && param.device != Device::Cpu {
            format!(
                "is on {}; sparse gradients in host memory only",
                param.device
            )
        } else if param.sparse && param.shape.is_empty() {
            "has a sparse gradient but no dimension".into()
        } else {
            continue;
        };
        return Err(Error::invalid(format!(
            "parameter {} {problem}",
            param.name
        )));
    }
    Ok(())
}

fn describe(params: &[ParamSpec], config: &ReducerConfig) -> ReducerStats {
    let mut dtypes: Vec<String> = params.iter().map(|param| param.dtype.to_string()).collect();
    dtypes.sort();
    dtypes.dedup();
    ReducerStats {
        num_parameter_tensors: params.len(),
        total_parameter_size_bytes: params.iter().map(ParamSpec::byte_len).sum(),
        dtypes,
        bucket_cap_bytes: config.caps.largest(),
        find_unused_parameters: config.find_unused_parameters,
        static_graph: config.static_graph,
        can_set_static_graph: true,
        ..ReducerStats::default()
    }
}

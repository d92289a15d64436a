//! What lasts from pass to pass.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use phalanx_pg::{Frozen, ProcessGroup, WorkStatus};
use tracing::{debug, info};

use crate::accumulate::Accumulator;
use crate::arrivals::Arrivals;
use crate::bucket::{Piece, Spare};
use crate::config::ReducerConfig;
use crate::error::{Error, Result};
use crate::hook::CommHook;
use crate::lane::{Lane, OwnGroup, own_group};
use crate::layout::{Layout, is_alone};
use crate::params::{ParamSpec, Slot};
use crate::pass::{Goal, Running};
use crate::reduced::{Landed, Reduced};
use crate::reducer::GradTarget;
use crate::stats::ReducerStats;
use crate::{agree, plan};

/// What a reducer and its passes share.
pub(crate) struct Core {
    pub(crate) params: Arc<[ParamSpec]>,
    pub(crate) config: ReducerConfig,
    pub(crate) state: Mutex<State>,
}

/// What changes between passes.
pub(crate) struct State {
    pub(crate) group: Arc<dyn ProcessGroup>,
    /// For what must not mix with the buckets' calls: the used map when buckets are skipped.
    pub(crate) control: Option<Arc<OwnGroup>>,
    pub(crate) lane: Option<Arc<Lane>>,
    pub(crate) hook: Option<Arc<dyn CommHook>>,
    pub(crate) layout: Arc<Layout>,
    /// Memory of buckets that views may still look at, by bucket.
    pub(crate) spare: Vec<Spare>,
    pub(crate) phase: Phase,
    /// Counts passes.
    pub(crate) passes: u64,
    pub(crate) rebuilt: bool,
    /// The ready order to rebuild by.
    pub(crate) recorded: Option<Vec<Slot>>,
    /// What the first pass of a static graph has learnt.
    pub(crate) learnt: Option<Learnt>,
    pub(crate) accumulated: HashMap<GradTarget, Arc<Accumulator>>,
    /// The ready order of the last synchronised pass, sorted only when somebody asks for it.
    pub(crate) last_arrivals: Option<Arc<Arrivals>>,
    /// Who had gradients in the last pass, to see whether the graph is static.
    pub(crate) last_used: Option<Vec<bool>>,
    /// Reductions of the last pass that had not ended when it did: on a device they go on while the
    /// host does.
    pub(crate) handed_over: Vec<WorkStatus>,
    pub(crate) stats: ReducerStats,
}

#[derive(Clone)]
pub(crate) struct Learnt {
    /// How many gradients each slot has in a backward, on this rank.
    pub(crate) expected: Arc<[u32]>,
    /// Which slots any rank uses.
    pub(crate) used: Arc<[bool]>,
}

/// Where the reducer is.
pub(crate) enum Phase {
    /// A pass may begin.
    Idle,
    /// One has begun.
    InPass,
    /// One has failed after others may have counted on it.
    Stuck(Error),
}

impl Core {
    /// The state, ready for a pass: idle, and with buckets in ready order if that is known.
    pub(crate) fn ready_state(&self) -> Result<MutexGuard<'_, State>> {
        let mut state = self.state.lock();
        match &state.phase {
            Phase::Idle => state.check_handed_over()?,
            Phase::InPass => {
                let what = "a backward is in progress: finish its pass, or drop it, first";
                return Err(Error::invalid(what));
            }
            Phase::Stuck(cause) => return Err(Error::Stuck(Arc::new(cause.clone()))),
        }
        match state.rebuild(&self.params, &self.config) {
            Ok(()) => Ok(state),
            Err(err) => {
                state.fail(err.clone());
                Err(err)
            }
        }
    }
}

impl State {
    /// The groups and the thread that the parameters and options ask for. Collective.
    pub(crate) fn open_groups(
        &mut self,
        params: &[ParamSpec],
        config: &ReducerConfig,
    ) -> Result<()> {
        self.lane = None;
        self.control = None;
        if self.hook.is_some() || params.iter().any(|param| param.sparse) {
            self.lane = Some(Arc::new(Lane::open(&*self.group, self.hook.clone())?));
        }
        // Ranks ask what is unused while others, in a backward that is longer, start buckets.
        let can_ask = self.group.capabilities().asynchronous;
        if config.skip_all_reduce_unused_params && config.finds_unused() && can_ask {
            self.control = Some(Arc::new(own_group(&*self.group, "used")?));
        }
        Ok(())
    }

    /// Lays the buckets out anew if the ready order has become known: rank 0's, for all.
    fn rebuild(&mut self, params: &[ParamSpec], config: &ReducerConfig) -> Result<()> {
        let Some(order) = self.recorded.take() else {
            return Ok(());
        };
        let own = plan::rebuilt(params, &order, &config.caps)?;
        let agreed = agree::adopt(&*self.group, params, own)?;
        let slots = agreed.into_iter().map(|bucket| bucket.slots).collect();
        let layout = lay_out(params, slots, &*self.group, self.hook.is_some());
        self.rebuilt = true;
        self.stats.has_rebuilt_buckets = true;
        self.stats.rebuilt_bucket_sizes = layout.sizes();
        self.stats.rebuilt_per_bucket_param_indices = layout.slots();
        info!(target: "buckets", sizes = ?layout.sizes(), "rebuilt in ready order");
        debug!(target: "buckets", slots = ?layout.slots(), "parameters of the buckets");
        self.adopt(layout);
        Ok(())
    }

    /// Goes on with these buckets.
    pub(crate) fn adopt(&mut self, layout: Layout) {
        self.spare = vec![Spare::new(); layout.buckets.len()];
        self.layout = Arc::new(layout);
    }

    /// Whether what the last pass handed over is, as far as is known, what it seemed.
    fn check_handed_over(&mut self) -> Result<()> {
        let failed = self.handed_over.iter().find_map(|work| match work.state() {
            phalanx_pg::State::Failed(err) => Some(Error::from(err)),
            _ => None,
        });
        match failed {
            Some(err) => {
                self.fail(err.clone());
                Err(err)
            }
            None => Ok(()),
        }
    }

    pub(crate) fn fail(&mut self, err: Error) {
        if self.stats.error.is_none() {
            self.stats.error = Some(err.to_string());
            self.stats.error_iteration = Some(self.stats.iteration);
        }
        self.phase = Phase::Stuck(err);
    }

    /// Takes note of a pass that has finished well.
    pub(crate) fn finished(&mut self, config: &ReducerConfig, pass: &Running, reduced: &Reduced) {
        self.phase = Phase::Idle;
        if pass.goal == Goal::Accumulate {
            return;
        }
        self.handed_over = pass.handed_over();
        self.note_used(pass);
        pass.accumulated.clear();
        for (spare, landed) in self.spare.iter_mut().zip(&reduced.buckets) {
            if let Landed::Dense(pieces) = landed {
                let keep = |piece: &Piece<Frozen>| (!piece.given).then(|| piece.memory.clone());
                *spare = pieces.iter().map(keep).collect();
            }
        }
        if pass.goal == Goal::Reduce && !self.rebuilt && config.rebuilds() {
            let mut order = pass.arrivals.order();
            order.extend(pass.not_arrived());
            self.recorded = Some(order);
        }
        self.last_arrivals = Some(Arc::clone(&pass.arrivals));
        self.stats.iteration += 1;
        pass.describe(&mut self.stats);
        if pass.goal == Goal::Learn {
            let used = reduced.used.clone().expect("learnt from the used map");
            let expected = pass.learnt_counts(&used);
            self.learnt = Some(Learnt { expected, used });
        }
    }

    fn note_used(&mut self, pass: &Running) {
        let used = pass.locally_used();
        let last = self.last_used.take().unwrap_or_else(|| used.clone());
        let same = last == used;
        if !same {
            let names = |with: &[bool], without: &[bool]| -> Vec<&str> {
                let changed = (0..used.len()).filter(|&slot| with[slot] && !without[slot]);
                changed.map(|slot| &*pass.params()[slot].name).collect()
            };
            let (new, gone) = (names(&used, &last), names(&last, &used));
            debug!(target: "graph", ?new, ?gone, "other parameters have gradients than before");
        }
        self.stats.can_set_static_graph &= same;
        self.last_used = Some(used);
    }
}

/// The layout to begin with.
pub(crate) fn first_layout(
    params: &[ParamSpec],
    config: &ReducerConfig,
    group: &dyn ProcessGroup,
    hooked: bool,
) -> Result<Layout> {
    let plan = plan::initial(params, &config.caps, config.finds_unused())?;
    let slots = plan.into_iter().map(|bucket| bucket.slots).collect();
    Ok(lay_out(params, slots, group, hooked))
}

/// Where gradients go in buckets of these slots.
pub(crate) fn lay_out(
    params: &[ParamSpec],
    slots: Vec<Vec<Slot>>,
    group: &dyn ProcessGroup,
    hooked: bool,
) -> Layout {
    let group = group.capabilities();
    // A hook gets buckets in one piece.
    Layout::new(params, slots, |param| !hooked && is_alone(param, &group))
}

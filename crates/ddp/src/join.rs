//! Ranks with different numbers of inputs.
//!
//! A rank that has no inputs left would leave the others waiting in their collectives. With a
//! [`Join`] it stays and makes the same calls with nothing of its own until all are done. What the
//! calls are, each participant knows: it says so in a [`JoinHook`].

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use phalanx_pg::{ProcessGroup, ProcessGroupExt, ReduceOp};
use tracing::warn;

use crate::error::{Error, Result};

/// A rank that stands by for longer than this many iterations wastes much of its time.
const WARN_AFTER: usize = 1000;

/// What makes collective calls in each iteration and can take part in a [`Join`].
pub trait Joinable {
    /// The group of its calls. All participants of a join have the same.
    fn join_group(&self) -> Arc<dyn ProcessGroup>;

    /// Begins a join, or ends it with `None`. While one is going on, it calls
    /// [`JoinConfig::notify`] before the first collective of each iteration.
    fn set_join(&mut self, config: Option<JoinConfig>);

    /// What to do for the others when there are no inputs left.
    fn join_hook(&mut self) -> Box<dyn JoinHook + '_>;
}

/// What a participant does on a rank without inputs.
pub trait JoinHook {
    /// Makes the calls of one iteration, in the others' order.
    fn main_hook(&mut self) -> Result<()> {
        Ok(())
    }

    /// Runs once on all ranks after the last iteration.
    fn post_hook(&mut self, _is_last_joiner: bool) -> Result<()> {
        Ok(())
    }
}

/// How ranks with different numbers of inputs go on together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JoinOptions {
    /// Gradients are divided by the number of all ranks; otherwise by that of the ranks that still
    /// have inputs, which gives late examples more weight. With several participants the first one's
    /// forward is the first of an iteration.
    pub divide_by_initial_world_size: bool,
    /// Without it a join does nothing: for data known to be even.
    pub enable: bool,
    /// All ranks stop with [`Error::EarlyEnd`] as soon as one has no inputs left. That ends the join:
    /// training may go on without it.
    pub throw_on_early_termination: bool,
}

impl Default for JoinOptions {
    fn default() -> Self {
        Self {
            divide_by_initial_world_size: true,
            enable: true,
            throw_on_early_termination: false,
        }
    }
}

/// What a participant knows of the join it is in.
#[derive(Debug, Clone)]
pub struct JoinConfig {
    group: Arc<dyn ProcessGroup>,
    options: JoinOptions,
    /// One participant speaks for all.
    is_first: bool,
    news: Arc<News>,
}

/// What the first participant has found out for all.
#[derive(Debug, Default)]
struct News {
    /// How many ranks have inputs in this iteration.
    active: AtomicUsize,
    /// The join has ended early.
    is_over: AtomicBool,
}

impl JoinConfig {
    /// Tells ranks that stand by that this one has another iteration. Collective.
    ///
    /// Returns what to divide gradients by, if it is not the group's size.
    pub fn notify(&self) -> Result<Option<usize>> {
        if self.is_first {
            let active = count(&*self.group, 1)?;
            if self.options.throw_on_early_termination && count(&*self.group, 0)? > 0 {
                return Err(self.early_end());
            }
            self.news.active.store(active, Ordering::Release);
        }
        let active = self.news.active.load(Ordering::Acquire);
        let divides = !self.options.divide_by_initial_world_size && active > 0;
        Ok(divides.then_some(active))
    }

    /// Whether the join has ended early: a participant is not in it any more.
    pub fn is_over(&self) -> bool {
        self.news.is_over.load(Ordering::Acquire)
    }

    fn early_end(&self) -> Error {
        self.news.is_over.store(true, Ordering::Release);
        Error::EarlyEnd {
            rank: self.group.rank(),
        }
    }
}

fn count(group: &dyn ProcessGroup, own: i32) -> Result<usize> {
    let mut sum = [own];
    group.allreduce_in_place(&mut sum, ReduceOp::Sum)?;
    Ok(usize::try_from(sum[0]).unwrap_or(0))
}

/// A time in which ranks may run out of inputs.
///
/// ```
/// # use std::sync::Arc;
/// # use phalanx_ddp::builtin::{Matrix, Net, Sgd, cross_entropy};
/// # use phalanx_ddp::{Ddp, DdpConfig, Join, JoinOptions};
/// # let group = Arc::new(phalanx_pg::FakeGroup::new(0, 1));
/// # let mut ddp = Ddp::new(Net::new(1).linear("fc", 2, 2), group, DdpConfig::default())?;
/// # let mut sgd = Sgd::new(0.1);
/// # let batches = [(Matrix::new(1, 2, vec![1.0, 2.0]), [0])];
/// let join = Join::begin(&mut [&mut ddp], JoinOptions::default())?;
/// for (x, y) in batches {
///     let (_, grad) = ddp.forward(|net| cross_entropy(&net.forward(&x.into()), &y))?;
///     let grads = ddp.backward(|net| net.backward(&grad))?;
///     ddp.update(|net| sgd.step(net, &grads));
/// }
/// join.end(&mut [&mut ddp])?; // stands by for the others, then takes the last one's model
/// # Ok::<(), phalanx_ddp::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "a join has to be ended, or other ranks wait"]
pub struct Join {
    config: Option<JoinConfig>,
}

impl Join {
    /// Begins a join of these participants, on all ranks in the same order.
    pub fn begin(participants: &mut [&mut dyn Joinable], options: JoinOptions) -> Result<Self> {
        let Some(first) = participants.first() else {
            return Err(Error::invalid("a join needs a participant"));
        };
        let group = first.join_group();
        for participant in participants.iter() {
            let other = participant.join_group();
            if other.name() != group.name() || other.global_ranks() != group.global_ranks() {
                return Err(Error::invalid(format!(
                    "participants of a join have one group, not {:?} and {:?}",
                    group.name(),
                    other.name()
                )));
            }
        }
        if !options.enable {
            return Ok(Self { config: None });
        }
        let news = Arc::default();
        let config = |is_first| JoinConfig {
            group: Arc::clone(&group),
            options,
            is_first,
            news: Arc::clone(&news),
        };
        for (i, participant) in participants.iter_mut().enumerate() {
            participant.set_join(Some(config(i == 0)));
        }
        Ok(Self {
            config: Some(config(true)),
        })
    }

    /// Ends this rank's part: stands by until all ranks have no inputs left, then runs the
    /// participants' last calls. The participants are those of [`begin`](Join::begin). After
    /// [`Error::EarlyEnd`] there is nothing left to do, and calling this does no harm.
    pub fn end(self, participants: &mut [&mut dyn Joinable]) -> Result<()> {
        let Some(config) = self.config else {
            return Ok(());
        };
        let result = match config.is_over() {
            true => Ok(()),
            false => stand_by(&config, participants),
        };
        for participant in participants {
            participant.set_join(None);
        }
        result
    }
}

fn stand_by(config: &JoinConfig, participants: &mut [&mut dyn Joinable]) -> Result<()> {
    let group = &*config.group;
    let mut iterations = 0;
    while count(group, 0)? > 0 {
        if config.options.throw_on_early_termination {
            count(group, 1)?;
            return Err(config.early_end());
        }
        for participant in participants.iter_mut() {
            participant.join_hook().main_hook()?;
        }
        iterations += 1;
        if iterations == WARN_AFTER {
            warn!(
                rank = group.rank(),
                "this rank has stood by for {WARN_AFTER} iterations; divide the data more evenly"
            );
        }
    }
    for participant in participants {
        participant.join_hook().post_hook(iterations == 0)?;
    }
    Ok(())
}

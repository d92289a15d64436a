//! The wrapper around a model.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use phalanx_pg::{ProcessGroup, ProcessGroupExt};
use phalanx_reducer::{CommHook, GradTarget, ParamSpec, Pass, Reducer, Slot, Sync};
use tracing::warn;

use crate::buffers::{self, BufferHook, When};
use crate::config::DdpConfig;
use crate::construct;
use crate::error::{Error, Result};
use crate::join::JoinConfig;
use crate::log::{DdpLog, environment};
use crate::replica::{Averaged, GradSink, Replica, TensorSpec};

/// A model that is trained by many processes at once.
///
/// ```
/// use std::sync::Arc;
/// use phalanx_ddp::builtin::{Matrix, Net, Sgd, cross_entropy};
/// use phalanx_ddp::{Ddp, DdpConfig};
/// use phalanx_pg::FakeGroup;
///
/// let group = Arc::new(FakeGroup::new(0, 1)); // or what `phalanx::init` returns
/// let net = Net::new(1).linear("fc1", 4, 8).relu().linear("fc2", 8, 3);
/// let mut ddp = Ddp::new(net, group, DdpConfig::default())?;
/// let mut sgd = Sgd::new(0.1);
/// let (x, y) = (Matrix::new(2, 4, vec![0.5; 8]), [0, 2]);
/// for _ in 0..3 {
///     let (_loss, grad) = ddp.forward(|net| cross_entropy(&net.forward(&x.clone().into()), &y))?;
///     let grads = ddp.backward(|net| net.backward(&grad))?; // averaged over all ranks
///     ddp.update(|net| sgd.step(net, &grads));
/// }
/// # Ok::<(), phalanx_ddp::Error>(())
/// ```
///
/// All ranks construct it, run forward and backward the same number of times and in the same order;
/// where they cannot, there is [`Join`](crate::Join).
///
/// After an error of [`backward`](Ddp::backward) the model is as before it, and so is the
/// optimizer; [`replace_group`](Ddp::replace_group) goes on with the ranks that are left.
pub struct Ddp<M: Replica> {
    pub(crate) model: M,
    pub(crate) group: Arc<dyn ProcessGroup>,
    pub(crate) reducer: Reducer,
    pub(crate) config: DdpConfig,
    /// The reducer's slot of each parameter; none for those that are ignored.
    slots: Arc<[Option<Slot>]>,
    /// Begun by a forward, not finished by a backward.
    pass: Option<(Pass, Sync)>,
    sync: Sync,
    /// Whether the next forward synchronises buffers: not after one that did not synchronise.
    pub(crate) forward_sync: bool,
    buffer_hook: Option<(When, Box<dyn BufferHook>)>,
    pub(crate) join: Option<JoinConfig>,
    pub(crate) has_joined: bool,
    /// Whether the last backward averaged and no update has used it yet.
    fresh: bool,
    has_warned: bool,
}

impl<M: Replica> Ddp<M> {
    /// Verifies that all ranks have the same model and options, gives them rank 0's values, and
    /// plans the buckets. Collective.
    ///
    /// If ranks differ, or one finds a fault with its model, every rank gets an error.
    pub fn new(mut model: M, group: Arc<dyn ProcessGroup>, config: DdpConfig) -> Result<Self> {
        let all = model.parameters();
        let (slots, params) = select(&all, &config);
        let own = construct::check(&model, &params).and_then(|()| config.check());
        if config.init_sync {
            let state = construct::state(&model, &config);
            construct::verify_ranks(&*group, &params, &state, &config, own.as_ref().err())?;
            own?;
            construct::broadcast(&*group, &mut model, &state, 0)?;
        } else {
            own?;
        }
        let reducer = Reducer::new(params, Arc::clone(&group), config.reducer())?;
        if config.static_graph && config.find_unused_parameters {
            warn!("find_unused_parameters does nothing with static_graph, which knows them");
        }
        Ok(Self {
            model,
            group,
            reducer,
            config,
            slots,
            pass: None,
            sync: Sync::Yes,
            forward_sync: true,
            buffer_hook: None,
            join: None,
            has_joined: false,
            fresh: true,
            has_warned: false,
        })
    }

    /// Runs a forward whose gradients will be averaged.
    ///
    /// Synchronises buffers first, and rebuilds buckets if it is time. Several forwards may
    /// precede one [`backward`](Ddp::backward).
    pub fn forward<T>(&mut self, f: impl FnOnce(&mut M::Hooked) -> T) -> Result<T> {
        if self
            .pass
            .as_ref()
            .is_some_and(|(pass, _)| pass.has_gradients())
        {
            return Err(Error::invalid(
                "a backward ran without Ddp, so its gradients were not averaged and not handed out; \
                 call Ddp::backward with the loss in its place",
            ));
        }
        self.join.take_if(|join| join.is_over());
        let opening = self
            .pass
            .as_ref()
            .is_none_or(|(_, sync)| *sync != self.sync);
        if opening {
            self.open_pass()?;
        }
        // Ranks that have joined stand by for one synchronisation per pass.
        if opening || self.join.is_none() {
            self.synchronize_buffers(When::Before)?;
        }
        if opening && self.join.is_some() {
            self.tell_joined(self.sync == Sync::Yes)?;
        }
        let out = self.run(f)?;
        if opening || self.join.is_none() {
            self.synchronize_buffers(When::After)?;
        }
        self.forward_sync = self.sync == Sync::Yes;
        Ok(out)
    }

    /// Runs a forward without gradients: for evaluation. Buffers are synchronised as for
    /// [`forward`](Ddp::forward), so all ranks take part; with buffers not inside a
    /// [`Join`](crate::Join), whose ranks that stand by do not expect it.
    pub fn infer<T>(&mut self, f: impl FnOnce(&mut M::Hooked) -> T) -> Result<T> {
        self.join.take_if(|join| join.is_over());
        self.synchronize_buffers(When::Before)?;
        let out = self.run(f)?;
        self.synchronize_buffers(When::After)?;
        self.forward_sync = false;
        Ok(out)
    }

    fn run<T>(&mut self, f: impl FnOnce(&mut M::Hooked) -> T) -> Result<T> {
        self.model.before_forward()?;
        let out = f(self.model.hooked());
        self.model.after_forward()?;
        Ok(out)
    }

    fn open_pass(&mut self) -> Result<()> {
        // A forward of another kind that no backward followed.
        self.pass = None;
        let divisor = match &self.join {
            Some(join) => join.notify()?,
            None => None,
        };
        let pass = self
            .reducer
            .begin_divided(GradTarget::Model, self.sync, divisor)?;
        self.model.attach(GradSink {
            sink: pass.sink(),
            slots: Arc::clone(&self.slots),
        })?;
        self.pass = Some((pass, self.sync));
        Ok(())
    }

    /// Runs backward, which hands gradients over as they are computed, and returns the averages.
    ///
    /// Inside [`no_sync`](Ddp::no_sync) gradients are only added up, and what is returned is not
    /// meant for the optimizer.
    pub fn backward(&mut self, f: impl FnOnce(&mut M::Hooked) -> M::Raw) -> Result<M::Grads> {
        self.try_backward(|model| Ok(f(model)))
    }

    /// As [`backward`](Ddp::backward), for frameworks whose backward may fail.
    pub fn try_backward(
        &mut self,
        f: impl FnOnce(&mut M::Hooked) -> Result<M::Raw>,
    ) -> Result<M::Grads> {
        let Some((pass, _)) = self.pass.take() else {
            return Err(Error::invalid(
                "there was no forward: run it with Ddp::forward, so that its gradients are averaged",
            ));
        };
        pass.backward_starts();
        let raw = f(self.model.hooked());
        self.model.detach();
        let reduced = match raw {
            Ok(_) => pass.finish()?,
            Err(err) => return Err(err),
        };
        self.fresh = reduced.is_synchronized();
        let averaged = Averaged {
            reduced,
            slots: Arc::clone(&self.slots),
            as_views: self.config.gradient_as_bucket_view,
        };
        self.model.install(raw?, &averaged)
    }

    /// Changes the model: the optimizer's step. All ranks must do the same.
    pub fn update<T>(&mut self, f: impl FnOnce(&mut M) -> T) -> T {
        if !std::mem::take(&mut self.fresh) && !self.has_warned {
            self.has_warned = true;
            warn!(
                rank = self.group.rank(),
                "the model is changed without averaged gradients, so ranks may part: run forward \
                 and backward through Ddp, and the last backward of an accumulation outside no_sync"
            );
        }
        f(&mut self.model)
    }

    /// Adds gradients up without averaging, as long as the guard lives. The next backward
    /// outside averages the whole sum.
    ///
    /// ```no_run
    /// # use phalanx_ddp::{builtin::*, Ddp, Result};
    /// # fn accumulate(ddp: &mut Ddp<Net>, x: [Input; 2], grad: &Matrix) -> Result<()> {
    /// {
    ///     let mut ddp = ddp.no_sync();
    ///     ddp.forward(|net| net.forward(&x[0]))?;
    ///     ddp.backward(|net| net.backward(grad))?;
    /// }
    /// ddp.forward(|net| net.forward(&x[1]))?;
    /// let grads = ddp.backward(|net| net.backward(grad))?; // of both
    /// # Ok(())
    /// # }
    /// ```
    pub fn no_sync(&mut self) -> NoSync<'_, M> {
        let before = self.set_sync(Sync::No);
        NoSync { ddp: self, before }
    }

    /// Whether coming passes average, and what it was before: for front ends with a guard of their
    /// own in the place of [`no_sync`](Ddp::no_sync).
    pub fn set_sync(&mut self, sync: Sync) -> Sync {
        std::mem::replace(&mut self.sync, sync)
    }

    /// Replaces the all-reduce of buckets. Once only; collective.
    pub fn register_comm_hook(&mut self, hook: Arc<dyn CommHook>) -> Result<()> {
        Ok(self.reducer.register_comm_hook(hook)?)
    }

    /// Replaces the broadcast of buffers.
    pub fn register_buffer_hook(&mut self, when: When, hook: Box<dyn BufferHook>) {
        self.buffer_hook = Some((when, hook));
    }

    /// Goes on with another group: after a failure, or with other ranks. Collective in the new
    /// group. Replicas are not made equal again; [`broadcast_state`](Ddp::broadcast_state) does.
    pub fn replace_group(&mut self, group: Arc<dyn ProcessGroup>) -> Result<()> {
        self.pass = None;
        self.model.detach();
        self.reducer.replace_group(Arc::clone(&group))?;
        self.group = group;
        self.join = None;
        self.forward_sync = true;
        Ok(())
    }

    /// Gives all ranks the parameters and buffers of `source`. Collective.
    pub fn broadcast_state(&mut self, source: usize) -> Result<()> {
        let state = construct::state(&self.model, &self.config);
        construct::broadcast(&*self.group, &mut self.model, &state, source)
    }

    pub(crate) fn syncs_buffers(&self, when: When) -> bool {
        let hook_when = self
            .buffer_hook
            .as_ref()
            .map_or(When::Before, |(when, _)| *when);
        self.forward_sync && self.config.forward_sync_buffers && when == hook_when
    }

    fn synchronize_buffers(&mut self, when: When) -> Result<()> {
        if !self.syncs_buffers(when) || self.model.buffers().is_empty() {
            return Ok(());
        }
        let source = match &self.join {
            Some(_) => self.common_rank(true)?,
            None => 0,
        };
        self.synchronize_buffers_from(source)
    }

    pub(crate) fn synchronize_buffers_from(&mut self, source: usize) -> Result<()> {
        let hook = self
            .buffer_hook
            .as_mut()
            .map(|(_, hook)| &mut **hook as &mut dyn BufferHook);
        buffers::synchronize(&*self.group, &mut self.model, &self.config, hook, source)
    }

    /// The plain model.
    pub fn model(&self) -> &M {
        &self.model
    }

    /// The plain model, for good.
    pub fn into_inner(mut self) -> M {
        self.model.detach();
        self.model
    }

    /// The group.
    pub fn group(&self) -> &Arc<dyn ProcessGroup> {
        &self.group
    }

    /// The reducer, to look at buckets and accumulated gradients.
    pub fn reducer(&self) -> &Reducer {
        &self.reducer
    }

    /// The options.
    pub fn config(&self) -> &DdpConfig {
        &self.config
    }

    /// Logging data.
    pub fn log(&self) -> DdpLog {
        DdpLog {
            world_size: self.group.size(),
            rank: self.group.rank(),
            module_name: std::any::type_name::<M>().to_owned(),
            backend_name: self.group.backend().to_owned(),
            broadcast_buffers: self.config.forward_sync_buffers,
            gradient_as_bucket_view: self.config.gradient_as_bucket_view,
            init_sync: self.config.init_sync,
            rebuild_with_unused: self.config.rebuild_with_unused,
            skip_all_reduce_unused_params: self.config.skip_all_reduce_unused_params,
            join_uneven_inputs: self.has_joined,
            environment: environment(),
            reducer: self.reducer.stats(),
        }
    }

    /// Whether all ranks' parameters and buffers have the same bits: a check for tests and for
    /// the doubtful. Collective.
    pub fn replicas_agree(&self) -> Result<bool> {
        let state = construct::state(&self.model, &self.config);
        let bytes = |(_, spec): &(_, TensorSpec)| spec.byte_len();
        let mut all = vec![0; state.iter().map(bytes).sum()];
        construct::read_into(&self.model, &state.iter().collect::<Vec<_>>(), &mut all)?;
        let everybodys = self.group.allgather_slice(&all)?;
        let mut others = everybodys.chunks_exact(all.len().max(1));
        Ok(others.all(|other| other == all))
    }
}

/// Which parameters are averaged: their slots by parameter, and the specs by slot.
fn select(all: &[ParamSpec], config: &DdpConfig) -> (Arc<[Option<Slot>]>, Vec<ParamSpec>) {
    let mut params = Vec::with_capacity(all.len());
    let slots = all.iter().map(|param| {
        let ignored = config.ignore.contains(&param.name);
        (!ignored).then(|| {
            params.push(param.clone());
            params.len() - 1
        })
    });
    let slots = slots.collect();
    (slots, params)
}

impl<M: Replica> fmt::Debug for Ddp<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ddp({}, {:?})", std::any::type_name::<M>(), self.reducer)
    }
}

/// A [`Ddp`] that adds gradients up without averaging; see [`Ddp::no_sync`].
#[derive(Debug)]
pub struct NoSync<'a, M: Replica> {
    ddp: &'a mut Ddp<M>,
    before: Sync,
}

impl<M: Replica> Deref for NoSync<'_, M> {
    type Target = Ddp<M>;

    fn deref(&self) -> &Ddp<M> {
        self.ddp
    }
}

impl<M: Replica> DerefMut for NoSync<'_, M> {
    fn deref_mut(&mut self) -> &mut Ddp<M> {
        self.ddp
    }
}

impl<M: Replica> Drop for NoSync<'_, M> {
    fn drop(&mut self) {
        self.ddp.sync = self.before;
    }
}

//! What [`Ddp`] does on a rank that has no inputs left.

use std::sync::Arc;

use phalanx_pg::{ProcessGroup, ProcessGroupExt, ReduceOp};

use crate::buffers::When;
use crate::ddp::Ddp;
use crate::error::{Error, Result};
use crate::join::{JoinConfig, JoinHook, Joinable};
use crate::replica::Replica;

impl<M: Replica> Joinable for Ddp<M> {
    fn join_group(&self) -> Arc<dyn ProcessGroup> {
        Arc::clone(&self.group)
    }

    fn set_join(&mut self, config: Option<JoinConfig>) {
        self.has_joined |= config.is_some();
        self.join = config;
    }

    fn join_hook(&mut self) -> Box<dyn JoinHook + '_> {
        Box::new(Shadow(self))
    }
}

struct Shadow<'a, M: Replica>(&'a mut Ddp<M>);

impl<M: Replica> JoinHook for Shadow<'_, M> {
    /// The calls of [`Ddp::forward`] and [`Ddp::backward`], in their order.
    fn main_hook(&mut self) -> Result<()> {
        let ddp = &mut *self.0;
        ddp.reducer.rebuild()?;
        if ddp.syncs_buffers(When::Before) && !ddp.model.buffers().is_empty() {
            let source = ddp.common_rank(false)?;
            ddp.synchronize_buffers_from(source)?;
        }
        let others_sync = ddp.tell_joined(false)?;
        if ddp.syncs_buffers(When::After) && !ddp.model.buffers().is_empty() {
            let source = ddp.common_rank(false)?;
            ddp.synchronize_buffers_from(source)?;
        }
        ddp.forward_sync = others_sync;
        if others_sync {
            ddp.reducer.shadow()?;
        }
        Ok(())
    }

    /// All ranks end with the model of one that had inputs to the last.
    fn post_hook(&mut self, is_last_joiner: bool) -> Result<()> {
        let source = self.0.common_rank(is_last_joiner)?;
        self.0.broadcast_state(source)
    }
}

impl<M: Replica> Ddp<M> {
    /// The highest rank among those that say so. Collective.
    pub(crate) fn common_rank(&self, is_candidate: bool) -> Result<usize> {
        let own = if is_candidate {
            self.group.rank() as i64
        } else {
            -1
        };
        let mut highest = [own];
        self.group.allreduce_in_place(&mut highest, ReduceOp::Max)?;
        let none = |_| Error::invalid("no rank has a model to take over");
        usize::try_from(highest[0]).map_err(none)
    }

    /// Whether any rank averages in this pass: those that stand by have to know. Collective.
    pub(crate) fn tell_joined(&self, own: bool) -> Result<bool> {
        let mut any = [i32::from(own)];
        self.group.allreduce_in_place(&mut any, ReduceOp::Sum)?;
        Ok(any[0] > 0)
    }
}

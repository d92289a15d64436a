//! Gates: operations that hand gradients over during backward.

use std::fmt;
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::{
    BalancedCheckpointing, CheckpointStrategy, NoCheckpointing,
};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Flex};
use burn::tensor::{Bytes, Device, GradientCheckpointingStrategy, Tensor};
use parking_lot::Mutex;
use phalanx_ddp::GradSink;
use phalanx_pg::{Buffer, DType};
use phalanx_reducer::GradView;

use crate::values::dtype_of;

/// A tensor with its place in the graph; the same type for all ways of checkpointing.
type Node = FloatTensor<Autodiff<Flex>>;

/// Levels of depth from one anchor to the next.
const STRIDE: usize = 16;

/// Anchors at most. A graph that is deeper still has right gradients, some of them later.
const MOST: usize = 4096;

/// Where the gates of one pass hand gradients in.
pub(crate) struct Gates {
    sink: GradSink,
    anchors: Arc<Mutex<Anchors>>,
}

impl Gates {
    /// Gates for a pass that begins now.
    pub(crate) fn new(sink: GradSink, anchors: Arc<Mutex<Anchors>>) -> Arc<Self> {
        anchors.lock().restart();
        Arc::new(Self { sink, anchors })
    }

    /// Whether a parameter needs a gate.
    pub(crate) fn takes(&self, parameter: usize) -> bool {
        self.sink.takes(parameter)
    }

    /// A parameter's tensor behind a gate: to be made when forward first asks for it.
    pub(crate) fn pass<const D: usize>(
        self: &Arc<Self>,
        parameter: usize,
        leaf: Tensor<D>,
    ) -> Tensor<D> {
        match leaf.gradient_checkpointing_strategy() {
            Some(GradientCheckpointingStrategy::Balanced) => {
                let leaf = leaf.try_into_primitive::<Autodiff<Flex, BalancedCheckpointing>>();
                let gated = self.gate::<BalancedCheckpointing>(parameter, checked(leaf));
                Tensor::from_primitive::<Autodiff<Flex, BalancedCheckpointing>>(gated)
            }
            _ => {
                let leaf = leaf.try_into_primitive::<Autodiff<Flex>>();
                let gated = self.gate::<NoCheckpointing>(parameter, checked(leaf));
                Tensor::from_primitive::<Autodiff<Flex>>(gated)
            }
        }
    }

    fn gate<C: CheckpointStrategy>(self: &Arc<Self>, parameter: usize, leaf: Node) -> Node {
        let (tensor, guard) = leaf.into_parts();
        let anchor = self.anchors.lock().above_all();
        let state = GateState {
            parameter,
            gates: Arc::clone(self),
        };
        let prepared = Gate.prepare::<C>([guard, anchor]);
        match prepared.compute_bound().stateful() {
            OpsKind::Tracked(gate) => gate.finish(state, tensor),
            OpsKind::UnTracked(gate) => gate.finish(tensor),
        }
    }

    /// Gives a gradient away if nobody else has it. What is wrong with it comes out of the end of
    /// the pass.
    fn hand_over(&self, parameter: usize, grad: FlexTensor) {
        let Ok(dtype) = dtype_of(grad.dtype()) else {
            return;
        };
        let whole = match grad.is_contiguous() && grad.layout().start_offset() == 0 {
            true => grad,
            false => grad.to_contiguous(),
        };
        if !whole.is_unique() {
            self.lend(parameter, dtype, whole.bytes());
            return;
        }
        let (bytes, _, _) = whole.into_data().into_parts();
        match Buffer::from_owner(dtype, Memory(bytes)) {
            Ok(buffer) => drop(self.sink.grad_ready(parameter, buffer)),
            Err(Memory(bytes)) => self.lend(parameter, dtype, &bytes),
        }
    }

    fn lend(&self, parameter: usize, dtype: DType, bytes: &[u8]) {
        let view = GradView::Host { dtype, bytes };
        let _ = self.sink.grad_ready(parameter, view);
    }
}

/// A tensor's memory.
struct Memory(Bytes);

impl AsMut<[u8]> for Memory {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

/// Inventory has looked at every parameter's backend before any gate is made.
fn checked<E: fmt::Debug>(leaf: std::result::Result<Node, E>) -> Node {
    leaf.expect("parameters are on Flex with autodiff")
}

/// The operation: an identity of its first input, at least as deep as its second.
///
/// When its backward runs, everything deeper has run: all users of the tensor, so its gradient is
/// complete, however often and in however many forwards it was used. It registers no gradient for
/// the parameter; the average is installed when backward has ended.
#[derive(Debug)]
struct Gate;

#[derive(Clone)]
struct GateState {
    parameter: usize,
    gates: Arc<Gates>,
}

impl fmt::Debug for GateState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gate of parameter {}", self.parameter)
    }
}

impl Backward<Flex, 2> for Gate {
    type State = GateState;

    fn backward(self, ops: Ops<GateState, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<Flex>(&ops.node);
        ops.state.gates.hand_over(ops.state.parameter, grad);
    }
}

/// Tensors of chosen depth, not differentiated, made once and used in all passes.
///
/// burn runs backward from the deepest level to the leaves, where a result is one deeper than its
/// deepest input, differentiated or not. Every new node adds one level at most, and nodes are
/// numbered, so their count bounds how deep forward has got. A gate above that bound fires after
/// everything that forward records later and before everything that it has recorded earlier: as
/// soon as its gradient is complete.
#[derive(Default)]
pub(crate) struct Anchors {
    /// At index i one of depth `i * STRIDE`.
    anchors: Vec<Tensor<1>>,
    /// No node of this pass is deeper, of those up to `counted`.
    bound: usize,
    counted: u64,
}

impl Anchors {
    /// Begins a pass: only what was there before forward is recorded, a few operations on inputs.
    fn restart(&mut self) {
        self.bound = STRIDE;
        self.counted = NodeId::new().value;
    }

    /// An anchor at least as deep as everything that this pass has recorded.
    fn above_all(&mut self) -> NodeGuard {
        let now = NodeId::new().value;
        let recorded = usize::try_from(now - self.counted).unwrap_or(usize::MAX);
        let index = self
            .bound
            .saturating_add(recorded)
            .div_ceil(STRIDE)
            .min(MOST);
        while self.anchors.len() <= index {
            let next = match self.anchors.last() {
                Some(last) => (0..STRIDE).fold(last.clone(), |anchor, _| anchor.neg()),
                None => Tensor::zeros([1], &Device::flex().autodiff()),
            };
            self.anchors.push(next);
        }
        self.bound = index * STRIDE;
        self.counted = NodeId::new().value;
        let anchor = self.anchors[index].clone();
        checked(anchor.try_into_primitive::<Autodiff<Flex>>()).node()
    }
}

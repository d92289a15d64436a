//! A small model without a framework: layers with a backward written by hand.
//!
//! It exists to test and to show: it compiles in seconds, its backward hands gradients over layer
//! by layer as a framework's would, and its numbers are PyTorch's up to rounding. All is `f32`,
//! nothing is fast.

mod layer;
mod loss;
mod matrix;
mod net;
mod sgd;

pub use layer::{Bag, Input};
pub use loss::cross_entropy;
pub use matrix::Matrix;
pub use net::{Gradient, Gradients, Net};
pub use sgd::Sgd;

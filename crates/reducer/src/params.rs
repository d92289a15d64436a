//! What a reducer knows of a parameter.

use phalanx_pg::{DType, Device};
use serde::{Deserialize, Serialize};

/// A parameter's place in the agreed order: the same on all ranks.
pub type Slot = usize;

/// A trainable parameter, without its values.
///
/// The position in the list given to [`Reducer::new`](crate::Reducer::new) is its [`Slot`]. All
/// ranks give the same list; [`verify`](crate::verify) finds out whether they did.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ParamSpec {
    /// A name that is the same on all ranks, for errors: `fc1.weight`.
    pub name: String,
    /// Its dimensions.
    pub shape: Vec<usize>,
    /// Type of the parameter's and its gradient's elements: a floating-point type.
    pub dtype: DType,
    /// Where its gradient will be.
    pub device: Device,
    /// Whether its gradient is rows at indices: that of an embedding.
    pub sparse: bool,
}

impl ParamSpec {
    /// A parameter in host memory with a dense gradient.
    pub fn new(name: impl Into<String>, shape: impl Into<Vec<usize>>, dtype: DType) -> Self {
        Self {
            name: name.into(),
            shape: shape.into(),
            dtype,
            device: Device::Cpu,
            sparse: false,
        }
    }

    /// The same with a sparse gradient: rows of the first dimension.
    #[must_use]
    pub fn with_sparse_gradient(self) -> Self {
        Self {
            sparse: true,
            ..self
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of bytes.
    pub fn byte_len(&self) -> usize {
        self.len() * self.dtype.size()
    }

    /// Elements of one row of a sparse gradient.
    pub fn row_len(&self) -> usize {
        self.shape.iter().skip(1).product()
    }
}

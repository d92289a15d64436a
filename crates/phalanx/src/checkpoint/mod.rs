//! Checkpoints: the tensors that all ranks share, and each rank's own state, on disk.
//!
//! ```
//! use phalanx::checkpoint::{Checkpoints, TensorRef};
//! # fn main() -> phalanx::Result<()> {
//! # let dir = std::env::temp_dir().join(format!("phalanx-doc-{}", std::process::id()));
//! let group = phalanx::init()?;
//! let checkpoints = Checkpoints::new(&dir);
//! let mut weights = vec![0.0f32; 6];
//! let mut seen = 0u64; // where this rank is in its share of the data
//! let mut step = 0;
//! if let Some(last) = checkpoints.load::<u64>(&*group)? {
//!     weights = last.tensor("weights")?.to_vec()?;
//!     seen = *last.state(group.rank())?;
//!     step = last.step + 1;
//! }
//! // ... train ...
//! checkpoints.save(&*group, step, &[("weights", TensorRef::new(&[2, 3], &weights)?)], &seen)?;
//! # group.shutdown()?;
//! # std::fs::remove_dir_all(dir).unwrap();
//! # Ok(())
//! # }
//! ```
//!
//! Both calls are collective. Rank 0 alone touches the disk: it writes its tensors, which under data
//! parallel training are everybody's, together with the state that each rank gives; and it reads
//! them and sends them to the others, so that nodes need no common file system.
//!
//! A checkpoint is there as a whole or not at all, whenever the processes or the machine die; see
//! [`Checkpoints::save`]. A checkpoint that was damaged later is noticed by its digest, and the one
//! before it is taken.

mod files;

use std::path::{Path, PathBuf};

use phalanx_pg::{
    Buffer, CallOptions, DType, Element, Error, ErrorKind, ProcessGroup, ProcessGroupExt, Result,
};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// A directory of checkpoints.
#[derive(Debug, Clone)]
pub struct Checkpoints {
    dir: PathBuf,
    keep: usize,
}

/// A tensor to save: its shape, and its elements in row-major order.
#[derive(Debug, Clone)]
pub struct TensorRef<'a> {
    dtype: DType,
    shape: Vec<usize>,
    bytes: &'a [u8],
}

impl<'a> TensorRef<'a> {
    /// A tensor of this shape; the number of elements has to fit.
    pub fn new<T: Element>(shape: &[usize], elements: &'a [T]) -> Result<Self> {
        let expected: usize = shape.iter().product();
        if expected != elements.len() {
            let got = elements.len();
            let what = format!("a tensor of shape {shape:?} has {expected} elements, not {got}");
            return Err(Error::invalid(what));
        }
        Ok(Self {
            dtype: T::DTYPE,
            shape: shape.to_vec(),
            bytes: bytemuck::cast_slice(elements),
        })
    }
}

impl Checkpoints {
    /// The checkpoints in `dir`, which is created when the first one is saved.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self {
            dir: dir.into(),
            keep: 2,
        }
    }

    /// How many of the newest are kept, at least one; two if nothing is said.
    pub fn keep(self, keep: usize) -> Self {
        Self {
            keep: keep.max(1),
            ..self
        }
    }

    /// Where they are.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Saves rank 0's `tensors` and every rank's own `state`, such as the position of its sampler.
    ///
    /// Returns when the checkpoint is on disk, on all ranks. If it cannot be written, all ranks get
    /// the error, and the checkpoints before it are as they were: the tensors go to a new file,
    /// which is synced, and only then a small file that names it takes its place by a rename.
    pub fn save<S: Serialize>(
        &self,
        group: &dyn ProcessGroup,
        step: u64,
        tensors: &[(&str, TensorRef<'_>)],
        state: &S,
    ) -> Result<()> {
        // A rank that cannot write its state down must not leave the others waiting.
        let state = serde_json::to_string(state).map_err(|err| err.to_string());
        let states = group.gather_object(&state, 0)?;
        let outcome = states.map(|states| {
            let states = states.into_iter().enumerate().map(|(rank, state)| {
                state.map_err(|err| format!("the state of rank {rank} cannot be written: {err}"))
            });
            let states: Vec<String> = states.collect::<Result<_, _>>()?;
            let tensors = encode(tensors)?;
            files::write(&self.dir, step, &tensors, &states, self.keep)
        });
        let outcome: Result<(), String> = group.broadcast_object(outcome.as_ref(), 0)?;
        outcome.map_err(|why| self.failed(&format!("checkpoint {step} was not saved"), &why))
    }

    /// The newest checkpoint, the same on all ranks; `None` if there is none yet.
    ///
    /// If there are some and none is whole, that is an error: to start from the beginning in
    /// silence would be worse.
    pub fn load<S: DeserializeOwned>(&self, group: &dyn ProcessGroup) -> Result<Option<Loaded<S>>> {
        let found = (group.rank() == 0).then(|| files::newest(&self.dir));
        let header = found.as_ref().map(|found| match found {
            Ok(None) => Ok(None),
            Ok(Some(contents)) => Ok(Some(Header {
                step: contents.step,
                states: contents.states.clone(),
                len: contents.tensors.len(),
            })),
            Err(why) => Err(why.clone()),
        });
        let header: Result<Option<Header>, String> = group.broadcast_object(header.as_ref(), 0)?;
        let failed = |why: String| self.failed("no checkpoint can be loaded", &why);
        let Some(Header { step, states, len }) = header.map_err(failed)? else {
            return Ok(None);
        };
        let bytes = match found {
            Some(Ok(Some(contents))) => Buffer::from_vec(contents.tensors),
            _ => Buffer::zeroed(DType::U8, len),
        };
        let send = group.with(CallOptions::blocking());
        let bytes = send.broadcast(bytes, 0)?.wait()?.to_vec::<u8>()?;
        let states = states.iter().map(|state| serde_json::from_str(state));
        let states: Vec<S> = states
            .collect::<Result<_, _>>()
            .map_err(|err| failed(format!("its state is not what this program expects: {err}")))?;
        Ok(Some(Loaded {
            step,
            states,
            bytes,
        }))
    }

    fn failed(&self, what: &str, why: &str) -> Error {
        let dir = self.dir.display();
        Error::new(ErrorKind::Backend, format!("{what} in {dir}: {why}"))
    }
}

/// What rank 0 tells the others before the tensors.
#[derive(Serialize, Deserialize)]
struct Header {
    step: u64,
    states: Vec<String>,
    len: usize,
}

/// A checkpoint in memory.
#[derive(Debug)]
#[non_exhaustive]
pub struct Loaded<S> {
    /// The step that it was saved under.
    pub step: u64,
    /// The state that each rank gave, by rank.
    pub states: Vec<S>,
    bytes: Vec<u8>,
}

impl<S> Loaded<S> {
    /// What this rank gave to [`save`](Checkpoints::save).
    ///
    /// An error if the checkpoint was made by another number of ranks and has none for this one;
    /// [`states`](Self::states) has all there are, to divide them anew.
    pub fn state(&self, rank: usize) -> Result<&S> {
        self.states.get(rank).ok_or_else(|| {
            let saved = self.states.len();
            Error::invalid(format!(
                "checkpoint {} was saved by {saved} ranks and has no state for rank {rank}; start \
                 {saved} ranks, or divide the states among the ranks that there are",
                self.step
            ))
        })
    }

    /// The names of its tensors.
    pub fn names(&self) -> Result<Vec<String>> {
        let parsed = self.parsed()?;
        Ok(parsed.names().into_iter().map(str::to_owned).collect())
    }

    /// A tensor by its name.
    pub fn tensor(&self, name: &str) -> Result<Tensor<'_>> {
        let view = self.parsed()?.tensor(name);
        let view = view.map_err(|err| {
            let (step, names) = (self.step, self.names().unwrap_or_default().join(", "));
            Error::invalid(format!("checkpoint {step}: {err}; it has {names}"))
        })?;
        Ok(Tensor(view))
    }

    fn parsed(&self) -> Result<SafeTensors<'_>> {
        SafeTensors::deserialize(&self.bytes).map_err(|err| {
            let what = format!("the tensors of checkpoint {} are damaged: {err}", self.step);
            Error::new(ErrorKind::Backend, what)
        })
    }
}

/// A tensor of a [`Loaded`] checkpoint.
#[derive(Debug)]
pub struct Tensor<'a>(TensorView<'a>);

impl Tensor<'_> {
    /// Its extents.
    pub fn shape(&self) -> &[usize] {
        self.0.shape()
    }

    /// A copy of its elements, which have to be of this type.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        if self.0.dtype() != safetensors_dtype(T::DTYPE)? {
            let (saved, asked) = (self.0.dtype(), T::DTYPE);
            let what = format!("the tensor has elements of {saved:?}, not of {asked}");
            return Err(Error::invalid(what));
        }
        let elements = self.0.data().chunks_exact(size_of::<T>());
        Ok(elements.map(bytemuck::pod_read_unaligned).collect())
    }
}

fn encode(tensors: &[(&str, TensorRef<'_>)]) -> Result<Vec<u8>, String> {
    let views = tensors.iter().map(|(name, tensor)| {
        let dtype = safetensors_dtype(tensor.dtype).map_err(|err| err.to_string())?;
        let view = TensorView::new(dtype, tensor.shape.clone(), tensor.bytes);
        Ok((*name, view.map_err(|err| format!("{name}: {err}"))?))
    });
    let views: Vec<(&str, TensorView<'_>)> = views.collect::<Result<_, String>>()?;
    safetensors::serialize(views, None).map_err(|err| err.to_string())
}

fn safetensors_dtype(dtype: DType) -> Result<safetensors::Dtype> {
    use safetensors::Dtype;
    Ok(match dtype {
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::F32 => Dtype::F32,
        DType::F64 => Dtype::F64,
        DType::I8 => Dtype::I8,
        DType::U8 => Dtype::U8,
        DType::I16 => Dtype::I16,
        DType::I32 => Dtype::I32,
        DType::I64 => Dtype::I64,
        DType::Bool => Dtype::BOOL,
        DType::Complex64 => Dtype::C64,
        other => return Err(Error::unsupported(format!("no tensor file has {other}"))),
    })
}

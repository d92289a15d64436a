//! Process groups: ranks that communicate, whatever carries the bytes.
//!
//! Callers use [`ProcessGroupExt`] on an `Arc<dyn ProcessGroup>`; backends implement
//! [`ProcessGroup`], most of them with a [`Lane`] that queues, numbers and fails operations, and
//! are found by name in the [`registry`].
//!
//! Wrappers around any group:
//!
//! | wrapper | for |
//! |---|---|
//! | [`Checked`] | finding ranks that call different things |
//! | [`Recorded`] | the last operations, for when something went wrong |
//! | [`Faulty`] | tests: slow, lost and failing calls |
//! | [`ByDevice`] | one backend for host memory, another for devices |
//! | [`Configured`] | a timeout or a mode for some calls |
//!
//! # Threads
//!
//! Each type with a behaviour of its own says how threads may use it. All others are plain data:
//! `Send` and `Sync`, and changed only by who owns them.
#![deny(unsafe_code)]

#[expect(unsafe_code, reason = "memory that operations own")]
mod buffer;
mod by_device;
mod call;
mod checked;
mod configured;
mod delegate;
mod dtype;
mod error;
mod ext;
mod fake;
mod faulty;
mod fingerprint;
mod group;
mod lane;
#[expect(unsafe_code, reason = "stores that go past the cache")]
mod lines;
pub mod mesh;
mod monitored;
mod notice;
mod objects;
pub mod ordered;
mod point_to_point;
mod recorded;
mod recorder;
pub mod reduce;
pub mod registry;
mod set;
mod sigusr1;
mod sparse;
mod subgroup;
mod tally;
mod trace;
mod typed_work;
mod work;

pub use buffer::{Buffer, Frozen, RawStream};
pub use by_device::ByDevice;
pub use call::{Call, CallKind, CallOptions, Mode, Payload, explicit_counts};
pub use checked::Checked;
pub use configured::Configured;
pub use dtype::{DType, Device, Element, ReduceOp};
pub use error::{Error, ErrorKind, Place, Result};
pub use ext::ProcessGroupExt;
pub use fake::FakeGroup;
pub use faulty::{Fault, FaultPlan, Faulty};
pub use fingerprint::Fingerprint;
pub use group::{Capabilities, DEFAULT_TIMEOUT, PeerDeath, ProcessGroup, check_copy};
pub use lane::{Engine, Lane, MAX_OUTSTANDING, Turn};
pub use lines::{Stores, copy_lines, map_past_cache};
pub use notice::{Notice, Word};
pub use point_to_point::PointToPoint;
pub use recorded::Recorded;
pub use recorder::{Recorder, RecorderOptions};
pub use set::{Member, Set};
pub use sigusr1::{SignalDump, dump_on_sigusr1};
pub use sparse::Sparse;
pub use subgroup::{Splits, check_members, group_identity};
pub use tally::Part;
pub use trace::{Arrival, GroupConfig, GroupStatus, TRACE_VERSION, Trace, TraceEntry, TraceState};
pub use typed_work::Work;
pub use work::{Completer, Done, Pending, RawWork, State, Status, Times, WorkStatus, completion};

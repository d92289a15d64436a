//! The backends that features have brought in.

use std::sync::{Arc, Once, OnceLock};
use std::time::Duration;

use phalanx_pg::registry::Selection;
use phalanx_pg::{Error, ProcessGroup, Result, registry};

type Group = Arc<dyn ProcessGroup>;

/// The backend of [`init`](crate::init) if nothing else is said.
pub(crate) fn default_backend() -> Result<&'static str> {
    if cfg!(feature = "native") {
        Ok("native")
    } else if cfg!(feature = "gloo") {
        Ok("gloo")
    } else if cfg!(feature = "mpi") {
        Ok("mpi")
    } else if cfg!(feature = "reference") {
        Ok("reference")
    } else {
        Err(Error::unsupported(
            "no backend for host memory is built in; enable a feature of the crate phalanx (native, gloo, mpi, \
             reference), or name a registered one with init_with",
        ))
    }
}

/// The backends that are features of this crate, and whether they are built in.
const FEATURES: &[(&str, bool)] = &[
    ("native", cfg!(feature = "native")),
    ("gloo", cfg!(feature = "gloo")),
    ("mpi", cfg!(feature = "mpi")),
    ("nccl", cfg!(feature = "nccl")),
    ("reference", cfg!(feature = "reference")),
];

/// Refuses a selection that needs a feature which is not enabled; what nobody knows is for the
/// registry to refuse.
pub(crate) fn check_features(selection: &str) -> Result<()> {
    let wanted = match selection.parse()? {
        Selection::One(name) => vec![name],
        Selection::ByDevice { cpu, cuda } => vec![cpu, cuda],
    };
    let known = registry::names();
    let lacking =
        |name: &&String| !known.contains(name) && FEATURES.contains(&(name.as_str(), false));
    match wanted.iter().find(lacking) {
        Some(name) => Err(Error::unsupported(format!(
            "the backend {name:?} is not built in; enable the feature {name:?} of the crate phalanx"
        ))),
        None => Ok(()),
    }
}

/// The group of all processes, if the backend finds them without a rendezvous.
///
/// Whoever starts an MPI program tells MPI who the ranks are and where; a second meeting through a
/// store could only fail.
pub(crate) fn world_of(selection: &str, timeout: Duration) -> Option<Result<Group>> {
    let Ok(Selection::One(name)) = selection.parse() else {
        return None;
    };
    let world = WORLDS.get()?.iter().find(|(own, _)| *own == name)?;
    Some((world.1)(timeout))
}

/// Those of the built-in backends whose names are theirs.
static WORLDS: OnceLock<Vec<(&str, World)>> = OnceLock::new();

type World = fn(Duration) -> Result<Group>;

/// The names that [`init_with`](crate::init_with) knows: built in and registered.
pub fn backends() -> Vec<String> {
    register_built_in();
    registry::names()
}

/// Makes the built-in backends known. A program that took one of their names keeps it.
pub(crate) fn register_built_in() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        #[cfg(feature = "native")]
        register("native", phalanx_native::NativeGroup::connect);
        #[cfg(feature = "gloo")]
        register("gloo", phalanx_gloo::GlooGroup::connect);
        #[cfg(feature = "mpi")]
        if register("mpi", phalanx_mpi::MpiGroup::connect) {
            let _ = WORLDS.set(vec![("mpi", phalanx_mpi::MpiGroup::world)]);
        }
        #[cfg(feature = "nccl")]
        register("nccl", phalanx_nccl::NcclGroup::connect);
        #[cfg(feature = "reference")]
        register("reference", |init| {
            let options = phalanx_reference::Options {
                name: init.name.clone(),
                timeout: init.timeout,
                connect_timeout: init.store.timeout(),
                bind: init.bind,
                token: init.token.clone(),
            };
            let store = Arc::clone(&init.store);
            phalanx_reference::ReferenceGroup::connect(store, init.rank, init.world_size, &options)
        });
    });
}

#[cfg(any(
    feature = "native",
    feature = "gloo",
    feature = "mpi",
    feature = "nccl",
    feature = "reference"
))]
fn register<F>(name: &str, factory: F) -> bool
where
    F: Fn(&registry::GroupInit) -> Result<Group> + Send + Sync + 'static,
{
    let registered = registry::register(name, factory);
    if let Err(err) = &registered {
        tracing::warn!("the built-in backend {name} is not available: {err}");
    }
    registered.is_ok()
}

#[cfg(all(
    test,
    not(any(
        feature = "native",
        feature = "gloo",
        feature = "mpi",
        feature = "reference"
    ))
))]
mod tests {
    use super::*;

    #[test]
    fn without_a_backend_the_error_says_how_to_get_one() {
        let err = default_backend().unwrap_err().to_string();
        assert!(
            err.contains("feature") && err.contains("init_with"),
            "{err}"
        );
    }

    #[test]
    fn a_backend_that_is_a_feature_names_it() {
        for selection in ["reference", "Reference", "cpu:reference,cuda:other"] {
            let err = check_features(selection).unwrap_err().to_string();
            assert!(err.contains("feature \"reference\""), "{err}");
        }
        for name in ["native", "gloo", "mpi"] {
            let err = check_features(name).unwrap_err().to_string();
            assert!(err.contains(&format!("feature \"{name}\"")), "{err}");
        }
        check_features("mine").unwrap();
    }
}

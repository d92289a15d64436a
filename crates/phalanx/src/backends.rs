//! The backends that features have brought in.

use std::sync::Once;

use phalanx_pg::registry::Selection;
use phalanx_pg::{Error, Result, registry};

/// The backend of [`init`](crate::init) if nothing else is said.
pub(crate) fn default_backend() -> Result<&'static str> {
    if cfg!(feature = "native") {
        Ok("native")
    } else if cfg!(feature = "reference") {
        Ok("reference")
    } else {
        Err(Error::unsupported(
            "no backend for host memory is built in; enable a feature of the crate phalanx (native, \
             reference), or name a registered one with init_with",
        ))
    }
}

/// The backends that are features of this crate, and whether they are built in.
const FEATURES: &[(&str, bool)] = &[
    ("native", cfg!(feature = "native")),
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
            let store = std::sync::Arc::clone(&init.store);
            phalanx_reference::ReferenceGroup::connect(store, init.rank, init.world_size, &options)
        });
    });
}

#[cfg(any(feature = "native", feature = "nccl", feature = "reference"))]
fn register<F>(name: &str, factory: F)
where
    F: Fn(&registry::GroupInit) -> Result<std::sync::Arc<dyn phalanx_pg::ProcessGroup>>
        + Send
        + Sync
        + 'static,
{
    if let Err(err) = registry::register(name, factory) {
        tracing::warn!("the built-in backend {name} is not available: {err}");
    }
}

#[cfg(all(test, not(any(feature = "native", feature = "reference"))))]
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
        check_features("mine").unwrap();
    }
}

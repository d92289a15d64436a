//! The backends that features have brought in.

use std::sync::Once;

use phalanx_pg::{Error, Result, registry};

/// The backend of [`init`](crate::init) if nothing else is said.
pub(crate) fn default_backend() -> Result<&'static str> {
    match cfg!(feature = "reference") {
        true => Ok("reference"),
        false => Err(Error::unsupported(
            "no backend is built in; enable a feature of the crate phalanx (reference), or name a \
             registered one with init_with",
        )),
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

#[cfg(feature = "reference")]
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

#[cfg(all(test, not(feature = "reference")))]
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
}

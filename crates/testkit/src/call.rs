//! Which `run` of which test is meant: what parent and ranks must agree on.

use std::collections::HashMap;
use std::panic::Location;

use parking_lot::Mutex;

/// The name libtest knows a test by, from the type name of a closure written inside it.
///
/// `my_crate::module::test::{{closure}}` is `module::test`. A thread's name would not do: with
/// `--test-threads=1` tests run on the main thread.
pub(crate) fn test_name_of(closure: &str) -> String {
    let function = closure.split("::{{closure}}").next().unwrap_or(closure);
    match function.split_once("::") {
        Some((_crate_name, path)) => path.to_owned(),
        None => function.to_owned(),
    }
}

/// Identifies one call of `run`: its place in the source and the how-manieth time it is reached.
///
/// The place is part of it so that worlds started from several threads are told apart although
/// their order is not fixed; the number, so that a loop over world sizes works.
pub(crate) fn identify(test: &str, place: &Location<'_>) -> String {
    static REACHED: Mutex<Option<HashMap<String, usize>>> = Mutex::new(None);
    let place = format!(
        "{test}@{}:{}:{}",
        place.file(),
        place.line(),
        place.column()
    );
    let mut reached = REACHED.lock();
    let count = reached
        .get_or_insert_default()
        .entry(place.clone())
        .or_insert(0);
    *count += 1;
    format!("{place}#{count}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name_of_type<T>(_: &T) -> &'static str {
        std::any::type_name::<T>()
    }

    #[test]
    fn a_closure_names_the_test_that_it_stands_in() {
        let outer = || {
            let inner = || ();
            test_name_of(name_of_type(&inner))
        };
        let expected = "call::tests::a_closure_names_the_test_that_it_stands_in";
        assert_eq!(test_name_of(name_of_type(&outer)), expected);
        assert_eq!(outer(), expected);
    }

    #[test]
    fn the_same_line_reached_twice_is_two_calls() {
        let here = Location::caller();
        assert_ne!(identify("t", here), identify("t", here));
        assert_eq!(identify("u", here), identify("u", here).replace("#2", "#1"));
    }
}

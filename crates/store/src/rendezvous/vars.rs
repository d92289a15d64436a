//! Reading variables: empty counts as unset, and every problem is kept so that all are told at
//! once.

use std::cell::RefCell;
use std::ops::RangeInclusive;

use crate::error::{Result, StoreError};

/// How variables are looked up; tests pass a table, programs the environment.
pub(crate) type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The process environment. What is not UTF-8 is kept readable, so that an error can show it.
pub(crate) fn from_process(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// A set of variables, and what was found wrong with them so far.
pub(super) struct Vars<'a> {
    lookup: Lookup<'a>,
    problems: RefCell<Vec<String>>,
}

impl<'a> Vars<'a> {
    pub(super) fn new(lookup: Lookup<'a>) -> Self {
        Self {
            lookup,
            problems: RefCell::default(),
        }
    }

    /// The value without surrounding blanks; `None` if unset or empty.
    pub(super) fn text(&self, name: &str) -> Option<String> {
        let value = (self.lookup)(name)?;
        let value = value.trim();
        (!value.is_empty()).then(|| value.to_owned())
    }

    pub(super) fn is_set(&self, name: &str) -> bool {
        self.text(name).is_some()
    }

    /// The first of `names` that is set, or the first one for errors if none is.
    pub(super) fn first_set<'n>(&self, names: &[&'n str]) -> &'n str {
        let set = names.iter().find(|name| self.is_set(name));
        set.or(names.first()).copied().unwrap_or_default()
    }

    /// A number, if set; a value that is none or outside `range` is a problem.
    pub(super) fn number(
        &self,
        name: &str,
        range: RangeInclusive<usize>,
        hint: &str,
    ) -> Option<usize> {
        let text = self.text(name)?;
        let value = text.parse().ok().filter(|value| range.contains(value));
        if value.is_none() {
            let (low, high) = (range.start(), range.end());
            let value = shown(&text);
            self.problem(format!(
                "{name}={value} is not a number from {low} to {high}; {hint}"
            ));
        }
        value
    }

    /// Like [`number`](Self::number), and being unset is a problem too.
    pub(super) fn need_number(
        &self,
        name: &str,
        range: RangeInclusive<usize>,
        hint: &str,
    ) -> Option<usize> {
        if !self.is_set(name) {
            self.missing(name, hint);
        }
        self.number(name, range, hint)
    }

    pub(super) fn missing(&self, name: &str, hint: &str) {
        self.problem(format!("{name} is not set; {hint}"));
    }

    pub(super) fn problem(&self, text: String) {
        self.problems.borrow_mut().push(text);
    }

    /// `value` if nothing was wrong, else one error with all problems.
    pub(super) fn finish<T>(self, value: Option<T>) -> Result<T> {
        let problems = self.problems.into_inner();
        match (value, problems.as_slice()) {
            (Some(value), []) => Ok(value),
            (_, [one]) => Err(StoreError::Invalid(one.clone())),
            (_, many) => Err(StoreError::Invalid(format!(
                "{} problems with the launcher's variables:\n  {}",
                many.len(),
                many.join("\n  ")
            ))),
        }
    }
}

/// A value as an error shows it: quoted, and cut before it floods the terminal.
pub(super) fn shown(value: &str) -> String {
    const LONGEST: usize = 80;
    match value.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{:?}...", &value[..end]),
        None => format!("{value:?}"),
    }
}

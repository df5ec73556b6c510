//! Progress of a command, on a terminal.

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// The steps of a command. On a terminal, a line on stderr says which one is under way and for how long; it is gone
/// once the step is done.
pub struct Progress {
    visible: bool,
    steps: usize,
    done: usize,
}

impl Progress {
    /// A command of `steps` steps.
    pub fn new(steps: usize) -> Self {
        Progress {
            visible: std::io::stderr().is_terminal(),
            steps,
            done: 0,
        }
    }

    /// Does one of them.
    pub fn step<T>(&mut self, what: &'static str, work: impl FnOnce() -> T) -> T {
        self.done += 1;
        if !self.visible {
            return work();
        }
        let bar = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("{spinner} [{prefix}] {msg} ({elapsed})") {
            bar.set_style(style);
        }
        bar.set_prefix(format!("{}/{}", self.done, self.steps));
        bar.set_message(what);
        bar.enable_steady_tick(Duration::from_millis(100));
        let result = work();
        bar.finish_and_clear();
        result
    }
}

//! Output and exit status of the program.

use std::io::Write as _;
use std::process::ExitCode;

use serde_json::json;

use crate::failure::Failure;
use crate::report::{Report, pretty};

/// Prints a report; fails if it has objections.
pub fn conclude(report: &Report, as_json: bool) -> ExitCode {
    print(match as_json {
        true => &report.json,
        false => &report.text,
    });
    complain(&report.objections);
    match report.objections.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

/// Prints why a command failed; or help, which ends like a failure.
pub fn fail(failure: &Failure) -> ExitCode {
    let lines = match failure {
        Failure::Usage(error) => {
            // This prints help to stdout and errors to stderr, in colour on a terminal.
            let _ = error.print();
            if !error.use_stderr() {
                return ExitCode::SUCCESS;
            }
            let text = error.to_string();
            // Its first paragraph says what is wrong, over several lines where arguments are missing.
            let message = text.lines().map(str::trim).take_while(|l| !l.is_empty());
            let message = message.collect::<Vec<_>>().join(" ");
            vec![message.trim_start_matches("error: ").to_owned()]
        }
        _ => {
            let lines = failure.chain();
            complain(&lines);
            lines
        }
    };
    // The arguments may not have been understood, so that they are looked for here.
    if std::env::args_os().any(|a| a == "--json") {
        print(&pretty(&json!({"error": lines[0], "causes": lines[1..]})));
    }
    ExitCode::from(failure.status())
}

/// Writes to stdout. A reader that went away wants no more; a full disk must not look like success.
fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            complain(&["stdout cannot be written".to_owned(), error.to_string()]);
            std::process::exit(1);
        }
        _ => {}
    }
}

fn complain(lines: &[String]) {
    let mut err = std::io::stderr().lock();
    for (i, line) in lines.iter().enumerate() {
        let label = if i == 0 { "error" } else { "  because" };
        let _ = writeln!(err, "{label}: {line}");
    }
}

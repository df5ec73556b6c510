//! Repeated runs of one command: the fastest counts, and all have to give the same bits.

use crate::failure::Failure;

/// The fastest outcome of so many runs, at least one.
pub fn fastest<T>(
    runs: u32,
    mut run: impl FnMut() -> Result<T, Failure>,
    same_bits: impl Fn(&T, &T) -> bool,
    seconds: impl Fn(&T) -> f64,
) -> Result<T, Failure> {
    let mut best = run()?;
    for n in 2..=runs {
        let outcome = run()?;
        if !same_bits(&best, &outcome) {
            return Err(Failure::Unsteady { run: n });
        }
        if seconds(&outcome) < seconds(&best) {
            best = outcome;
        }
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fastest_of_equal_runs() {
        let of = |times: &[f64], bits: &[u8]| {
            let mut runs = times.iter().copied().zip(bits.iter().copied());
            let next = || Ok(runs.next().expect("no more runs than there are"));
            fastest(times.len() as u32, next, |a, b| a.1 == b.1, |run| run.0)
        };
        assert_eq!(of(&[3.0, 1.0, 2.0], &[7; 3]).unwrap(), (1.0, 7));
        let unsteady = of(&[1.0, 2.0, 3.0], &[7, 7, 8]);
        assert!(matches!(unsteady, Err(Failure::Unsteady { run: 3 })));
    }
}

//! How long launches take on a GPU: replays of graphs, between events of the device.

use std::time::{Duration, Instant};

use deltawave::runtime::{Context, Stream};
use serde::Serialize;

/// Bytes that are filled before each run. Larger than any last-level cache: MI300X has 256 MiB of it.
const FLUSHED: usize = 512 << 20;
/// Time until clocks are up.
const WARM_UP: Duration = Duration::from_millis(300);
/// Runs between two looks at the clock while warming up.
const BATCH: u32 = 8;

/// Times of the measured runs.
#[derive(Clone, Debug, Serialize)]
pub struct Times {
    /// Runs of each.
    pub runs: u32,
    /// Bytes that were filled before each run.
    pub flushed_bytes: usize,
    /// Measured parts: the whole operation, then its kernels.
    pub parts: Vec<Timed>,
}

/// Times of a part, in microseconds.
#[derive(Clone, Debug, Serialize)]
pub struct Timed {
    /// The part.
    pub what: &'static str,
    /// The median of the runs.
    pub median_us: f64,
    /// The fastest run.
    pub fastest_us: f64,
    /// The slowest run.
    pub slowest_us: f64,
}

/// The fastest outcome of `runs` runs, at least one. Fails with `unsteady` of the first run, counted from 1, that gives
/// other bits than the others before.
pub fn fastest<T, E>(
    runs: u32,
    mut run: impl FnMut() -> Result<T, E>,
    same_bits: impl Fn(&T, &T) -> bool,
    seconds: impl Fn(&T) -> f64,
    unsteady: impl Fn(u32) -> E,
) -> Result<T, E> {
    let mut best = run()?;
    for n in 2..=runs {
        let outcome = run()?;
        if !same_bits(&best, &outcome) {
            return Err(unsteady(n));
        }
        if seconds(&outcome) < seconds(&best) {
            best = outcome;
        }
    }
    Ok(best)
}

/// Measures `runs` replays of each part. `launch` enqueues a part.
pub fn measure<P: Copy>(
    context: &Context,
    runs: u32,
    parts: &[(&'static str, P)],
    launch: impl FnMut(&Stream, P) -> deltawave::Result<()>,
) -> deltawave::Result<Times> {
    replay(context, (runs, WARM_UP, FLUSHED), parts, launch)
}

fn replay<P: Copy>(
    context: &Context,
    (runs, warm_up, flushed_bytes): (u32, Duration, usize),
    parts: &[(&'static str, P)],
    mut launch: impl FnMut(&Stream, P) -> deltawave::Result<()>,
) -> deltawave::Result<Times> {
    let stream = context.stream()?;
    let mut flush = context.alloc::<u8>(flushed_bytes)?;
    let mut timed = Vec::new();
    // A part alone reads what the whole prefill left in the workspace; what it makes of that does not matter.
    for &(what, part) in parts {
        let graph = stream.capture(|stream| launch(stream, part))?;
        let mut replay = |measured: bool| -> deltawave::Result<_> {
            flush.fill_bytes(0, &stream)?;
            let start = measured.then(|| stream.record()).transpose()?;
            // SAFETY: tensors, workspace and plan outlive this function, which waits for every replay.
            unsafe { graph.launch(&stream)? };
            let end = measured.then(|| stream.record()).transpose()?;
            Ok(start.zip(end))
        };
        let begin = Instant::now();
        while begin.elapsed() < warm_up {
            for _ in 0..BATCH {
                replay(false)?;
            }
            stream.synchronize()?;
        }
        let events = (0..runs).map(|_| replay(true));
        let events: Vec<_> = events.collect::<deltawave::Result<_>>()?;
        stream.synchronize()?;
        let times = events.iter().flatten();
        let times = times.map(|(start, end)| Ok(f64::from(end.milliseconds_since(start)?) * 1e3));
        timed.push(Timed::new(what, times.collect::<deltawave::Result<_>>()?));
    }
    Ok(Times {
        runs,
        flushed_bytes,
        parts: timed,
    })
}

impl Timed {
    fn new(what: &'static str, mut times: Vec<f64>) -> Self {
        times.sort_by(f64::total_cmp);
        let middle = times.len() / 2;
        let median = match times.len() % 2 {
            0 => (times[middle - 1] + times[middle]) / 2.0,
            _ => times[middle],
        };
        Timed {
            what,
            median_us: median,
            fastest_us: times[0],
            slowest_us: times[times.len() - 1],
        }
    }
}

#[cfg(test)]
mod tests {
    use deltawave::runtime::Backend;

    use super::*;

    #[test]
    fn the_fastest_of_equal_runs() {
        let of = |times: &[f64], bits: &[u8]| {
            let mut runs = times.iter().copied().zip(bits.iter().copied());
            let next = || Ok(runs.next().expect("no more runs than there are"));
            let same = |a: &(f64, u8), b: &(f64, u8)| a.1 == b.1;
            fastest(times.len() as u32, next, same, |run| run.0, |run| run)
        };
        assert_eq!(of(&[3.0, 1.0, 2.0], &[7; 3]), Ok((1.0, 7)));
        assert_eq!(of(&[1.0, 2.0, 3.0], &[7, 7, 8]), Err(3));
    }

    #[test]
    fn parts_are_replayed() {
        let Ok(context) = Context::new(Backend::Simulator, 0) else {
            println!("skipped: this build has no kernels");
            return;
        };
        let mut memory = context.alloc::<u8>(64).expect("memory");
        let mut byte = 0;
        let parts = [
            ("prefill", ()),
            ("prefill_prepare", ()),
            ("prefill_scan", ()),
        ];
        let options = (3, Duration::from_millis(1), 1 << 10);
        let times = replay(&context, options, &parts, |stream, _| {
            byte += 1;
            memory.fill_bytes(byte, stream)
        });
        let times = times.expect("times");
        let stream = context.stream().expect("a stream");
        // Captured once for each part, and run.
        assert_eq!(memory.download(&stream).expect("a copy"), [3; 64]);
        let names: Vec<&str> = times.parts.iter().map(|t| t.what).collect();
        assert_eq!(names, ["prefill", "prefill_prepare", "prefill_scan"]);
        assert_eq!((times.runs, times.flushed_bytes), (3, 1 << 10));
        assert!(times.parts.iter().all(|t| t.fastest_us <= t.median_us));
    }

    #[test]
    fn medians() {
        let odd = Timed::new("whole", vec![5.0, 1.0, 3.0]);
        assert_eq!(
            (odd.median_us, odd.fastest_us, odd.slowest_us),
            (3.0, 1.0, 5.0)
        );
        assert_eq!(Timed::new("part", vec![4.0, 1.0, 2.0, 9.0]).median_us, 3.0);
    }
}

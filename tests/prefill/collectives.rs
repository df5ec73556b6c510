//! Communicators, with a library of collectives that a C compiler makes here: ranks are threads of this process.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use std::{env, process, thread};

use deltawave::Error;
use deltawave::error::Result;
use deltawave::parallel::{Collectives, Communicator, UniqueId};
use deltawave::prefill::{ParallelPrefill, RankLayout};
use deltawave::types::Dtype;
use deltawave_lab::inputs::Gates;
use hip_sys::CclError;

use crate::common::{context, simulated};
use crate::ranks::{Rank, Step, Where, case};

/// Compiles the library; nothing without a C compiler, or on a card, whose memory it cannot copy.
fn compiled(name: &str, option: &str) -> Option<PathBuf> {
    if !simulated(&context()) {
        println!("skipped: not on the simulator");
        return None;
    }
    let folder = env::temp_dir().join(format!("deltawave-collectives-{}", process::id()));
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    crate::fake_collectives::compile(root, &folder, name, option)
}

pub(super) fn library() -> Option<Collectives> {
    static LIBRARY: OnceLock<Option<Collectives>> = OnceLock::new();
    let make = || {
        let path = compiled("libfake.so", "-O1")?;
        Some(Collectives::load(&context(), Some(&path)).expect("a library"))
    };
    LIBRARY.get_or_init(make).clone()
}

pub(super) fn join(
    library: &Collectives,
    id: UniqueId,
    rank: usize,
    ranks: usize,
    ms: u64,
) -> Result<Communicator> {
    Communicator::new(
        &context(),
        library,
        id,
        rank,
        ranks,
        Duration::from_millis(ms),
    )
}

/// Three ranks, one call each: the bits of stages with copies between them.
#[test]
fn one_call_does_all_steps() {
    let Some(library) = library() else { return };
    let case = case(Dtype::Bf16, &[400, 70], Gates::Zero);
    let (case, data) = (&case, &case.data());
    let layout = &RankLayout::zigzag(&case.lengths, 64, 3).expect("a layout");
    let rank = |rank| Rank::new(&context(), case, data, layout, rank, Where::Separate);
    let stream = context().stream().expect("a stream");
    let mut gathered = Vec::new();
    let mut staged: Vec<_> = (0..3).map(rank).collect();
    for (i, rank) in staged.iter_mut().enumerate() {
        rank.launch(case, &stream, Where::Separate, i, Step::Summarise)
            .expect("a launch");
        gathered.extend(rank.summary(&stream));
    }
    let mut gathered = context().upload(&gathered).expect("memory");
    let id = library.unique_id().expect("an id");
    let run = |i| {
        let communicator = join(&library, id, i, 3, 60_000).expect("a communicator");
        let own = rank(i);
        communicator.agree(&own.plan).expect("equal plans");
        assert_eq!((communicator.rank(), communicator.ranks()), (i, 3));
        let stream = context().stream().expect("a stream");
        let mut rank = rank(i);
        let mut all = context()
            .upload(&vec![0xffu8; rank.plan.gathered_bytes()])
            .expect("memory");
        // Twice: the communicator stays usable.
        for _ in 0..2 {
            let step = Step::All(&communicator, &mut all);
            rank.launch(case, &stream, Where::Separate, i, step)
                .expect("a launch");
            communicator.synchronize(&stream).expect("the end");
        }
        rank.results(&stream)
    };
    let found: Vec<_> = thread::scope(|scope| {
        let ranks: Vec<_> = (0..3).map(|i| scope.spawn(move || run(i))).collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().expect("a rank"))
            .collect()
    });
    for (i, (rank, found)) in staged.iter_mut().zip(found).enumerate() {
        let step = Step::Finish(&mut gathered, None);
        rank.launch(case, &stream, Where::Separate, i, step)
            .expect("a launch");
        assert!(rank.results(&stream) == found, "rank {i}");
    }
    // A plan of another rank is refused before anything is sent.
    let alone =
        join(&library, library.unique_id().expect("an id"), 0, 1, 1000).expect("a communicator");
    let step = Step::All(&alone, &mut gathered);
    let error = staged[1]
        .launch(case, &stream, Where::Separate, 1, step)
        .expect_err("rank 1 of 3");
    assert!(error.to_string().contains("plan: rank 1 of 3"), "{error}");
}

/// Ranks that made different layouts learn of it before anything is sent, each of them, and the communicator stays usable.
#[test]
fn different_layouts_are_refused() {
    let Some(library) = library() else { return };
    let case = case(Dtype::Bf16, &[400, 70], Gates::Zero);
    let id = library.unique_id().expect("an id");
    let run = |rank| {
        let communicator = join(&library, id, rank, 3, 60_000).expect("a communicator");
        let plan = |layout: Result<RankLayout>| {
            let layout = layout.expect("a layout");
            ParallelPrefill::new(&context(), case.spec, &layout, rank, 470).expect("a plan")
        };
        let lengths = &case.lengths;
        let own = match rank {
            2 => plan(RankLayout::zigzag(lengths, 64, 3)),
            _ => plan(RankLayout::contiguous(lengths, 64, 3)),
        };
        let first = communicator.agree(&own).expect_err("rank 2 differs");
        let again = plan(RankLayout::packed(lengths, 64, 3));
        communicator.agree(&again).expect("equal plans");
        first
    };
    let errors: Vec<_> = thread::scope(|scope| {
        let run = &run;
        let ranks: Vec<_> = (0..3).map(|i| scope.spawn(move || run(i))).collect();
        let ended = ranks.into_iter().map(|rank| rank.join());
        ended.map(|error| error.expect("a rank")).collect()
    });
    for (own, error) in errors.into_iter().enumerate() {
        let Error::Ranks(found) = error else {
            panic!("{error}")
        };
        assert_eq!(found.what, "fragments of the ranks");
        assert_eq!((found.rank, found.own), (if own == 2 { 0 } else { 2 }, own));
    }
}

/// A rank that never comes, and one that never sends: errors in time, with the call's name, and no hang.
#[test]
fn ranks_that_do_not_come() {
    let Some(library) = library() else { return };
    let begin = Instant::now();
    let id = library.unique_id().expect("an id");
    let error = join(&library, id, 0, 2, 100).expect_err("rank 1 does not come");
    let Error::Collective(CclError::Timeout { call, milliseconds }) = error else {
        panic!("{error}")
    };
    assert_eq!((call, milliseconds), ("ncclCommInitRankConfig", 100));

    let case = case(Dtype::Bf16, &[200], Gates::Zero);
    let data = case.data();
    let layout = RankLayout::contiguous(&case.lengths, 64, 2).expect("a layout");
    let stream = context().stream().expect("a stream");
    let id = library.unique_id().expect("an id");
    let (first, second) = thread::scope(|scope| {
        let second = scope.spawn(|| join(&library, id, 1, 2, 10_000));
        (
            join(&library, id, 0, 2, 200),
            second.join().expect("a thread"),
        )
    });
    let (first, second) = (first.expect("rank 0"), second.expect("rank 1"));
    let mut rank = Rank::new(&context(), &case, &data, &layout, 0, Where::Separate);
    let mut all = context()
        .upload(&vec![0u8; rank.plan.gathered_bytes()])
        .expect("memory");
    let mut send = |rank: &mut Rank, communicator| {
        let step = Step::All(communicator, &mut all);
        rank.launch(&case, &stream, Where::Separate, 0, step)
            .expect_err("rank 1 sends nothing")
    };
    let error = send(&mut rank, &first);
    assert!(
        matches!(
            error,
            Error::Collective(CclError::Timeout {
                call: "ncclAllGather",
                ..
            })
        ),
        "{error}"
    );
    let error = send(&mut rank, &first);
    assert!(
        matches!(
            error,
            Error::Collective(CclError::Aborted {
                call: "ncclAllGather"
            })
        ),
        "{error}"
    );
    // The other rank learns of it at once.
    let mut other = Rank::new(&context(), &case, &data, &layout, 1, Where::Separate);
    let error = {
        let mut all = context()
            .upload(&vec![0u8; other.plan.gathered_bytes()])
            .expect("memory");
        let step = Step::All(&second, &mut all);
        other
            .launch(&case, &stream, Where::Separate, 1, step)
            .expect_err("rank 0 is gone")
    };
    let Error::Collective(CclError::Status {
        call, code, name, ..
    }) = &error
    else {
        panic!("{error}")
    };
    assert_eq!(
        (*call, *code, &name[..]),
        ("ncclAllGather", 6, "remote process exited")
    );
    assert!(begin.elapsed() < Duration::from_secs(60));
}

/// Libraries that are not there, or lack a function; ranks that do not exist.
#[test]
fn libraries_are_checked() {
    let error = Collectives::load(&context(), Some("/nowhere/librccl.so".as_ref()))
        .expect_err("no library");
    assert!(
        error.to_string().contains("/nowhere/librccl.so ("),
        "{error}"
    );
    let Some(path) = compiled("libwithout.so", "-DWITHOUT_GATHER") else {
        return;
    };
    let error = Collectives::load(&context(), Some(&path)).expect_err("no all-gather");
    let Error::Collective(CclError::MissingSymbol { symbol, .. }) = error else {
        panic!("{error}")
    };
    assert_eq!(symbol, "ncclAllGather");
    let Some(library) = library() else { return };
    assert!(library.name().ends_with("libfake.so"));
    let error = join(&library, UniqueId([0; 128]), 2, 2, 100).expect_err("rank 2 of 2");
    assert!(error.to_string().contains("rank: 2"), "{error}");
    let error = join(&library, UniqueId([0; 128]), 0, 2, 100).expect_err("no id");
    let Error::Collective(CclError::Status { call, code, .. }) = error else {
        panic!("{error}")
    };
    assert_eq!((call, code), ("ncclCommInitRankConfig", 4));
}

//! Runs kernels that clang compiles, end to end.

mod common;

use deltawave_sim::code_object::CodeObject;
use deltawave_sim::exec::MfmaMode;
use deltawave_sim::fault::FaultKind;
use deltawave_sim::launch::{Launch, LaunchError, Options, Stats, WaveOrder};
use deltawave_sim::memory::{Extent, Memory};

/// Kernel arguments laid out as C would.
#[derive(Default)]
struct Args(Vec<u8>);

impl Args {
    fn put(mut self, bytes: &[u8]) -> Self {
        let at = self.0.len().next_multiple_of(bytes.len());
        self.0.resize(at, 0);
        self.0.extend(bytes);
        self
    }
    fn buffer<T>(self, b: &mut [T]) -> Self {
        self.put(&(b.as_mut_ptr() as u64).to_le_bytes())
    }
    fn u32(self, v: u32) -> Self {
        self.put(&v.to_le_bytes())
    }
}

fn extent<T>(b: &mut [T]) -> Extent {
    let start = b.as_mut_ptr() as u64;
    Extent {
        start,
        end: start + size_of_val(b) as u64,
    }
}

struct Case<'a> {
    code: &'a CodeObject,
    name: &'a str,
    grid: [u32; 3],
    remainder: [u32; 3],
    block: [u32; 3],
    dynamic_lds: u32,
    options: Options,
}

impl<'a> Case<'a> {
    fn new(code: &'a CodeObject, name: &'a str, grid: [u32; 3], block: [u32; 3]) -> Self {
        Case {
            code,
            name,
            grid,
            remainder: [0; 3],
            block,
            dynamic_lds: 0,
            options: deltawave_sim::hip::options_from_environment(),
        }
    }

    fn run(&self, args: &Args, extents: Vec<Extent>) -> Result<Stats, LaunchError> {
        let memory = Memory::new(extents);
        let launch = Launch {
            code: self.code,
            kernel: self.code.kernel(self.name).expect("kernel"),
            grid: self.grid,
            remainder: self.remainder,
            block: self.block,
            dynamic_lds: self.dynamic_lds,
            kernarg: &args.0,
            memory: &memory,
        };
        // SAFETY: the extents are vectors that live until the end of the test.
        unsafe { launch.run(&self.options) }
    }
}

fn code() -> Option<CodeObject> {
    let bytes = common::compile("launch.hip", &[])?;
    Some(CodeObject::load(&bytes).expect("a code object of clang's"))
}

const ORDERS: [WaveOrder; 4] = [
    WaveOrder::RunAhead,
    WaveOrder::InStep,
    WaveOrder::Seeded(1),
    WaveOrder::Seeded(2),
];

#[test]
fn saxpy() {
    let Some(code) = code() else { return };
    let n = 1000usize;
    let mut x: Vec<f32> = (0..n).map(|i| i as f32).collect();
    let mut y: Vec<f32> = (0..n).map(|i| 0.5 * i as f32).collect();
    let args = Args::default().buffer(&mut y).buffer(&mut x);
    let args = args.put(&2f32.to_le_bytes()).u32(n as u32);
    let case = Case::new(&code, "saxpy", [4, 1, 1], [256, 1, 1]);
    let stats = case
        .run(&args, vec![extent(&mut x), extent(&mut y)])
        .unwrap();
    assert!((0..n).all(|i| y[i] == 2.5 * i as f32));
    assert_eq!((stats.workgroups, stats.waves), (4, 16));
    assert!(stats.wave_instructions > 16 * 10);
}

#[test]
fn variables_and_constants() {
    let Some(code) = code() else { return };
    let mut out = vec![0i32; 64];
    let args = Args::default().buffer(&mut out);
    let case = Case::new(&code, "globals", [1, 1, 1], [64, 1, 1]);
    case.run(&args, vec![extent(&mut out)]).unwrap();
    let digits = [3, 1, 4, 1, 5, 9, 2, 6];
    for (i, v) in out.iter().enumerate() {
        assert_eq!(*v, digits[i & 7] + 30 + 10 * (1 + i as i32 % 4));
    }
}

#[test]
fn three_dimensional_ids() {
    // Without this flag clang takes partial workgroups for impossible.
    let flags = ["-fno-offload-uniform-block"];
    let Some(bytes) = common::compile("launch.hip", &flags) else {
        return;
    };
    let code = CodeObject::load(&bytes).expect("a code object of clang's");
    for (grid, remainder, block) in [
        ([3, 2, 4], [0, 0, 0], [5, 7, 3]),
        ([2, 1, 2], [3, 2, 0], [8, 4, 2]),
        ([0, 1, 1], [9, 0, 0], [64, 1, 1]),
    ] {
        let n: [u32; 3] = std::array::from_fn(|d| grid[d] * block[d] + remainder[d]);
        let mut out = vec![u32::MAX; (n[0] * n[1] * n[2]) as usize];
        let args = Args::default().buffer(&mut out);
        let mut case = Case::new(&code, "ids", grid, block);
        case.remainder = remainder;
        case.run(&args, vec![extent(&mut out)]).unwrap();
        for (i, v) in out.iter().enumerate() {
            let i = i as u32;
            let (x, y, z) = (i % n[0], i / n[0] % n[1], i / n[0] / n[1]);
            assert_eq!(*v, x | y << 8 | z << 16, "{grid:?} {remainder:?} {block:?}");
        }
    }
}

#[test]
fn hidden_arguments_and_dispatch_packet() {
    let Some(code) = code() else { return };
    let mut out = vec![0u32; 16];
    let args = Args::default().buffer(&mut out);
    let mut case = Case::new(&code, "hidden", [5, 4, 3], [32, 2, 1]);
    case.remainder = [7, 0, 0];
    case.dynamic_lds = 96;
    case.run(&args, vec![extent(&mut out)]).unwrap();
    assert_eq!(
        out[..15],
        [5, 4, 3, 32, 2, 1, 7, 0, 0, 3, 32, 2, 167, 8, 96]
    );
}

#[test]
fn lds_and_barriers_in_every_order() {
    let Some(code) = code() else { return };
    // 1000 work-items: the last wave has 40.
    for block in [64u32, 192, 256, 1000, 1024] {
        let groups = 6;
        let mut input: Vec<f32> = (0..block * groups).map(|i| (i % 97) as f32).collect();
        for order in ORDERS {
            let mut out = vec![f32::NAN; groups as usize];
            let args = Args::default().buffer(&mut out).buffer(&mut input);
            let mut case = Case::new(&code, "reduce", [groups, 1, 1], [block, 1, 1]);
            case.options.order = order;
            case.run(&args, vec![extent(&mut out), extent(&mut input)])
                .unwrap();
            for (g, sum) in out.iter().enumerate() {
                let part = &input[g * block as usize..][..block as usize];
                assert_eq!(*sum, part.iter().sum::<f32>(), "{block} {order:?}");
            }
        }
    }
}

#[test]
fn dynamic_lds() {
    let Some(code) = code() else { return };
    let mut data: Vec<u32> = (0..300).collect();
    let args = Args::default().buffer(&mut data).u32(300);
    let mut case = Case::new(&code, "reverse", [1, 1, 1], [300, 1, 1]);
    case.dynamic_lds = 1200;
    case.run(&args, vec![extent(&mut data)]).unwrap();
    assert!(data.iter().enumerate().all(|(i, v)| *v == 299 - i as u32));

    case.dynamic_lds = 1196;
    let error = case.run(&args, vec![extent(&mut data)]).unwrap_err();
    let LaunchError::Fault(fault) = error else {
        panic!("{error}")
    };
    assert!(
        matches!(fault.kind, FaultKind::LdsOutOfBounds { limit: 1196, .. }),
        "{fault}"
    );
}

#[test]
fn function_calls_and_scratch() {
    let Some(code) = code() else { return };
    let expected = |i: u32| {
        let a: Vec<u32> = (0..16).map(|k| i * 16 + k).collect();
        let local: Vec<u32> = (0..16)
            .map(|k| a[((k * 5 + i) & 15) as usize] + k)
            .collect();
        (0..16).fold(0u32, |s, k| {
            let next = local[((s.wrapping_add(i).wrapping_add(k)) & 15) as usize];
            s.wrapping_mul(31).wrapping_add(next)
        })
    };
    for order in ORDERS {
        let mut out = vec![0u32; 64 * 9];
        let args = Args::default().buffer(&mut out);
        let mut case = Case::new(&code, "calls", [9, 1, 1], [64, 1, 1]);
        case.options.order = order;
        case.run(&args, vec![extent(&mut out)]).unwrap();
        for (i, v) in out.iter().enumerate() {
            assert_eq!(*v, expected(i as u32), "work-item {i}");
        }
    }
}

#[test]
fn preloaded_arguments() {
    let flags = ["-mllvm", "-amdgpu-kernarg-preload-count=8"];
    let (Some(plain), Some(bytes)) = (code(), common::compile("launch.hip", &flags)) else {
        return;
    };
    let preloaded = CodeObject::load(&bytes).unwrap();
    let mut counts = Vec::new();
    for code in [&plain, &preloaded] {
        let mut out = vec![0u32; 64];
        let args = Args::default().buffer(&mut out).u32(3).u32(100);
        let args = args.put(&(5u64 << 32 | 9).to_le_bytes());
        let case = Case::new(code, "preload", [1, 1, 1], [64, 1, 1]);
        let stats = case.run(&args, vec![extent(&mut out)]).unwrap();
        assert!(
            out.iter()
                .enumerate()
                .all(|(i, v)| *v == 3 * i as u32 + 105)
        );
        counts.push(stats.wave_instructions);
    }
    assert!(counts[1] < counts[0], "{counts:?}");
}

#[test]
fn atomics() {
    let Some(code) = code() else { return };
    for threads in [1, 4] {
        let mut counter = vec![0u32];
        let mut order = vec![0u32; 100];
        let args = Args::default().buffer(&mut counter).buffer(&mut order);
        let mut case = Case::new(&code, "tickets", [100, 1, 1], [64, 1, 1]);
        case.options.threads = Some(threads);
        case.run(&args, vec![extent(&mut counter), extent(&mut order)])
            .unwrap();
        assert!(order.iter().enumerate().all(|(i, v)| *v == i as u32));
        assert_eq!(counter[0], 100);

        let args = Args::default().buffer(&mut counter);
        let mut case = Case::new(&code, "count", [500, 1, 1], [128, 1, 1]);
        case.options.threads = Some(threads);
        case.run(&args, vec![extent(&mut counter)]).unwrap();
        assert_eq!(counter[0], 100 + 500 * 128 / 4 * 6);
    }
}

#[test]
fn traps_name_the_first_workgroup() {
    let Some(code) = code() else { return };
    for threads in [1, 4] {
        let mut out = vec![0u32; 64];
        let args = Args::default().buffer(&mut out);
        let mut case = Case::new(&code, "trap", [32, 1, 1], [64, 1, 1]);
        case.options.threads = Some(threads);
        let error = case.run(&args, vec![extent(&mut out)]).unwrap_err();
        let LaunchError::Fault(fault) = error else {
            panic!("{error}")
        };
        assert_eq!(fault.kind, FaultKind::Trap { id: 2 });
        assert_eq!((fault.workgroup, fault.wave), ([3, 0, 0], 0));
        assert!(fault.instruction.starts_with("s_trap"), "{fault}");
    }
}

#[test]
fn accesses_outside_name_everything() {
    let Some(code) = code() else { return };
    let mut out = vec![0u32; 100];
    let all = extent(&mut out);
    let args = Args::default().buffer(&mut out).u32(40);
    let case = Case::new(&code, "outside", [1, 1, 1], [64, 1, 1]);
    let error = case.run(&args, vec![all]).unwrap_err();
    let text = error.to_string();
    let LaunchError::Fault(fault) = error else {
        panic!("{text}")
    };
    let FaultKind::OutOfBounds { address, lane, .. } = fault.kind else {
        panic!("{fault}")
    };
    assert_eq!((address, lane), (all.end, 60));
    for part in [
        "kernel outside",
        "workgroup [0, 0, 0]",
        "global_store_dword",
        "lane 60",
        "past the end",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn spinning_ends() {
    let Some(code) = code() else { return };
    let mut flag = vec![0u32];
    let args = Args::default().buffer(&mut flag);
    let mut case = Case::new(&code, "spin", [2, 1, 1], [64, 1, 1]);
    case.options.instruction_limit = 1_000_000;
    let error = case.run(&args, vec![extent(&mut flag)]).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("exceeded 1000000 wave-instructions"),
        "{error}"
    );
}

#[test]
fn impossible_launches_are_refused() {
    let Some(code) = code() else { return };
    let mut out = vec![0u32; 64];
    let memory = vec![extent(&mut out)];
    let args = Args::default().buffer(&mut out);
    let refuse = |name: &str, grid, block, lds, args: &Args| {
        let mut case = Case::new(&code, name, grid, block);
        case.dynamic_lds = lds;
        case.run(args, memory.clone()).unwrap_err()
    };
    let one = [1, 1, 1];
    use LaunchError as E;
    assert!(matches!(
        refuse("big_lds", one, [64, 1, 1], 4097, &args),
        E::LdsTooLarge {
            fixed: 61440,
            dynamic: 4097,
            ..
        }
    ));
    assert!(matches!(
        refuse("big_lds", one, [64, 1, 1], u32::MAX, &args),
        E::LdsTooLarge { .. }
    ));
    assert!(matches!(
        refuse("small_block", one, [257, 1, 1], 0, &args),
        E::BlockTooLarge { limit: 256, .. }
    ));
    assert!(matches!(
        refuse("globals", one, [1 << 16, 1 << 16, 1], 0, &args),
        E::BlockTooLarge { limit: 1024, .. }
    ));
    assert!(matches!(
        refuse("globals", one, [64, 0, 1], 0, &args),
        E::ZeroDimension { .. }
    ));
    assert!(matches!(
        refuse("globals", [1, 0, 1], one, 0, &args),
        E::ZeroDimension { .. }
    ));
    assert!(matches!(
        refuse("globals", [1 << 31, 1, 1], [2, 1, 1], 0, &args),
        E::GridTooLarge { .. }
    ));
    assert!(matches!(
        refuse("globals", one, one, 0, &Args::default()),
        E::KernargSize {
            got: 0,
            expected: 8,
            ..
        }
    ));
    let long = Args(vec![0; 32]);
    assert!(matches!(
        refuse("globals", one, one, 0, &long),
        E::KernargSize { got: 32, .. }
    ));
}

#[test]
fn the_same_bits_whatever_the_threads() {
    let Some(code) = code() else { return };
    for mfma in [MfmaMode::Fast, MfmaMode::Exact] {
        let mut first: Option<(Vec<u32>, Stats)> = None;
        for (threads, order) in [1, 2, 5].into_iter().zip(ORDERS) {
            let mut out = vec![0u32; 256 * 12];
            let args = Args::default().buffer(&mut out).u32(40);
            let mut case = Case::new(&code, "mfma_loop", [12, 1, 1], [256, 1, 1]);
            case.options.threads = Some(threads);
            case.options.order = order;
            case.options.mfma = mfma;
            let stats = case.run(&args, vec![extent(&mut out)]).unwrap();
            let (bits, count) = first.get_or_insert((out.clone(), stats.clone()));
            assert!(*bits == out && *count == stats, "{threads} {order:?}");
        }
    }
}

/// Not a test of correctness: `cargo test --release -p deltawave-sim --test launch speed -- --ignored --nocapture`.
#[test]
#[ignore = "measures speed"]
fn speed() {
    let Some(code) = code() else { return };
    for (label, threads) in [("1 thread", Some(1)), ("all threads", None)] {
        let mut out = vec![0u32; 256 * 64];
        let args = Args::default().buffer(&mut out).u32(400);
        let mut case = Case::new(&code, "mfma_loop", [64, 1, 1], [256, 1, 1]);
        case.options.threads = threads;
        let start = std::time::Instant::now();
        let stats = case.run(&args, vec![extent(&mut out)]).unwrap();
        let rate = stats.wave_instructions as f64 / start.elapsed().as_secs_f64() / 1e6;
        println!("{label}: {rate:.1} million wave-instructions per second");
    }
}

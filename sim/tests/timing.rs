//! Tests the timing model on kernels whose time can be computed by hand.

mod common;

use deltawave_sim::code_object::CodeObject;
use deltawave_sim::gpu::{Gpu, MI300X, MI308X};
use deltawave_sim::launch::{Launch, Options, Record};
use deltawave_sim::memory::{Extent, Memory};
use deltawave_sim::timing::{Estimate, Fit, Model, SAMPLE, Shape, Stall, perfetto};

struct Kernels(CodeObject);

/// Device and records from which a launch is modelled.
#[derive(Clone, Copy)]
struct With {
    gpu: Gpu,
    fit: Fit,
    record: Record,
}

impl With {
    /// Without a fit, from neighbours in the middle.
    fn gpu(gpu: Gpu) -> Self {
        let (fit, record) = (Fit::NONE, Record::Only(SAMPLE));
        With { gpu, fit, record }
    }
}

impl Kernels {
    fn load() -> Option<Self> {
        let bytes = common::compile("timing.hip", &[])?;
        Some(Kernels(
            CodeObject::load(&bytes).expect("a code object of clang's"),
        ))
    }

    /// Models a launch of `workgroups` of `items`, with `arguments` that lie in `buffers`.
    fn model(
        &self,
        gpu: Gpu,
        name: &str,
        workgroups: u32,
        items: u32,
        arguments: &[u64],
        buffers: &mut [Vec<u8>],
    ) -> Estimate {
        self.model_with(With::gpu(gpu), name, workgroups, items, arguments, buffers)
    }

    fn model_with(
        &self,
        with: With,
        name: &str,
        workgroups: u32,
        items: u32,
        arguments: &[u64],
        buffers: &mut [Vec<u8>],
    ) -> Estimate {
        let kernel = self.0.kernel(name).expect("kernel");
        let extents = buffers.iter_mut().map(|b| {
            let start = b.as_mut_ptr() as u64;
            let end = start + b.len() as u64;
            Extent { start, end }
        });
        let memory = Memory::new(extents.collect());
        let mut kernarg: Vec<u8> = arguments.iter().flat_map(|a| a.to_le_bytes()).collect();
        kernarg.truncate(kernel.explicit_size() as usize);
        let launch = Launch {
            code: &self.0,
            kernel,
            grid: [workgroups, 1, 1],
            remainder: [0; 3],
            block: [items, 1, 1],
            dynamic_lds: 0,
            kernarg: &kernarg,
            memory: &memory,
        };
        let shape = Shape {
            code: &self.0,
            kernel,
            workgroups: workgroups.into(),
            waves: items.div_ceil(64),
            lds: kernel.descriptor.group_segment_fixed_size,
            footprint: buffers.iter().map(|b| b.len() as u64).sum(),
        };
        let model = Model::new(with.gpu).with(with.fit).keep(4000);
        let options = Options {
            record: with.record,
            xccs: with.gpu.xcds,
            ..Options::default()
        };
        // SAFETY: the buffers live until the end of the function, and nothing else uses them.
        let stats = unsafe { launch.run(&options) }.expect("a kernel without faults");
        model.estimate(&shape, &stats.recorded).expect("traces")
    }

    /// Models a launch of `items`, workgroup `i` with `counts[i]` of them.
    fn items(&self, counts: &[i32], waves: u32) -> Estimate {
        let mut buffers = [counts.iter().flat_map(|n| n.to_le_bytes()).collect()];
        let buffer: &Vec<u8> = &buffers[0];
        let arguments = [buffer.as_ptr() as u64];
        let with = With {
            record: Record::Some(SAMPLE),
            ..With::gpu(MI300X)
        };
        let workgroups = counts.len() as u32;
        self.model_with(
            with,
            "items",
            workgroups,
            64 * waves,
            &arguments,
            &mut buffers,
        )
    }

    fn clocks(&self, name: &str, items: u32, arguments: &[u64]) -> f64 {
        self.model(MI300X, name, 1, items, arguments, &mut [])
            .clocks
    }
}

/// `expected` clocks, and at most 64 more for the start and the end of the kernel.
fn takes(found: f64, expected: f64) {
    assert!(
        found >= expected && found <= expected + 64.0,
        "{found}, not {expected}"
    );
}

#[test]
fn products_that_accumulate_follow_each_other_without_a_gap() {
    let Some(kernels) = Kernels::load() else {
        return;
    };
    takes(kernels.clocks("accumulate", 64, &[]), 256.0 * 16.0);
    // Two waves on each SIMD share its matrix unit, four SIMDs do not.
    takes(kernels.clocks("accumulate", 256, &[]), 256.0 * 16.0);
    takes(kernels.clocks("accumulate", 512, &[]), 2.0 * 256.0 * 16.0);
}

#[test]
fn products_of_products_wait_for_passes_and_four_turns() {
    let Some(kernels) = Kernels::load() else {
        return;
    };
    takes(kernels.clocks("multiply", 64, &[]), 256.0 * (16.0 + 16.0));
    // A second wave fills the gaps.
    takes(kernels.clocks("multiply", 512, &[]), 256.0 * (16.0 + 16.0));
    let e = kernels.model(MI300X, "multiply", 1, 64, &[], &mut []);
    let sum = |s: Stall| {
        e.sites
            .iter()
            .map(|site| site.stalls[s as usize])
            .sum::<u64>()
    };
    assert!(sum(Stall::Dependency) > 250 * 28);
}

#[test]
fn vector_instructions_take_turns() {
    let Some(kernels) = Kernels::load() else {
        return;
    };
    takes(kernels.clocks("vector", 64, &[]), 256.0 * 4.0);
    takes(kernels.clocks("vector", 1024, &[]), 4.0 * 256.0 * 4.0);
    // The last one has begun when the wave ends.
    takes(
        kernels.clocks("transcendental", 64, &[]),
        255.0 * 16.0 + 4.0,
    );
}

#[test]
fn bank_conflicts_cost_clocks() {
    let Some(kernels) = Kernels::load() else {
        return;
    };
    let at = |stride: u64| kernels.clocks("local", 64, &[stride]);
    // 64 bytes a clock for one wave; without conflicts, with 8 lanes at a bank, and with 32.
    assert_eq!(at(8) - at(1), 64.0 * (16.0 - 4.0));
    assert_eq!(at(32) - at(1), 64.0 * (64.0 - 4.0));
    // Two SIMDs share a port of 64 bytes a clock; the next two have their own.
    assert_eq!(kernels.clocks("local", 128, &[1]), at(1) + 64.0 * 4.0);
    assert_eq!(kernels.clocks("local", 256, &[1]), at(1) + 64.0 * 4.0);
    // All four share the banks.
    let banks = kernels.clocks("local", 256, &[32]) - at(32);
    assert!(
        (3.0 * 63.0 * 64.0..=3.0 * 64.0 * 64.0).contains(&banks),
        "{banks}"
    );
}

#[test]
fn a_wait_waits_for_memory() {
    let Some(kernels) = Kernels::load() else {
        return;
    };
    for gpu in [MI300X, MI308X] {
        let mut buffers = [vec![0; 256], vec![0; 256]];
        let arguments = [buffers[0].as_ptr() as u64, buffers[1].as_ptr() as u64];
        let e = kernels.model(gpu, "wait", 1, 64, &arguments, &mut buffers);
        // The arguments, then the data, both from the Infinity Cache; then L2 takes the store.
        let far = 288.0 + 99.5 * gpu.ghz;
        let expected = 2.0 * far + 288.0;
        let found = e.clocks;
        assert!(
            (expected..expected + 100.0).contains(&found),
            "{found}, not {expected}"
        );
        let waited = |s: Stall| e.sites.iter().map(|site| site.stalls[s as usize]).max();
        assert!(waited(Stall::Vm).max(waited(Stall::Lgkm)) > Some(far as u64 - 100));
    }
}

#[test]
fn a_barrier_waits_for_the_last_wave() {
    let Some(kernels) = Kernels::load() else {
        return;
    };
    let e = kernels.model(MI300X, "meet", 1, 256, &[], &mut []);
    takes(e.clocks, 64.0 * 64.0);
    let waited: u64 = e
        .sites
        .iter()
        .map(|site| site.stalls[Stall::Barrier as usize])
        .sum();
    assert!((3 * 4050..3 * 4096 + 64).contains(&waited), "{waited}");
}

#[test]
fn a_copy_is_as_fast_as_the_memory() {
    let Some(kernels) = Kernels::load() else {
        return;
    };
    // More than the Infinity Cache holds, in pages of the system that only the recorded workgroups touch.
    let workgroups = 1 << 17;
    let bytes = u64::from(workgroups) * 4096;
    let mut buffers = [vec![0; bytes as usize + 128], vec![0; bytes as usize + 128]];
    let aligned = |b: &Vec<u8>| (b.as_ptr() as u64).next_multiple_of(128);
    let arguments = [aligned(&buffers[0]), aligned(&buffers[1])];
    let e = kernels.model(MI300X, "copy", workgroups, 256, &arguments, &mut buffers);
    let rate = 2.0 * bytes as f64 / (e.modelled_us * 1e-6);
    let most = 0.75 * MI300X.hbm;
    assert!(
        (0.9 * most..1.01 * most).contains(&rate),
        "{rate:e} bytes per second"
    );
    // And the line of the arguments, once.
    let extra = (e.l2_bytes - 8192.0, e.far_bytes - 8192.0);
    assert!(
        extra.0 >= 0.0 && extra.0 < 32.0 && extra.1 >= 0.0 && extra.1 < 32.0,
        "{extra:?}"
    );
}

#[test]
fn the_scale_leaves_the_bandwidth_of_memory_as_it_is() {
    let Some(kernels) = Kernels::load() else {
        return;
    };
    let scaled = With {
        fit: Fit {
            scale: 1.25,
            launch_us: 0.0,
        },
        ..With::gpu(MI300X)
    };
    let workgroups = 1 << 17;
    let mut buffers = [
        vec![0; (workgroups << 12) + 128],
        vec![0; (workgroups << 12) + 128],
    ];
    let aligned = |b: &Vec<u8>| (b.as_ptr() as u64).next_multiple_of(128);
    let arguments = [aligned(&buffers[0]), aligned(&buffers[1])];
    let mut copy = |with| {
        let n = workgroups as u32;
        let e = kernels.model_with(with, "copy", n, 256, &arguments, &mut buffers);
        e.modelled_us
    };
    let slower = copy(scaled) / copy(With::gpu(MI300X));
    assert!((0.99..1.01).contains(&slower), "a copy: {slower}");
    let products = |with| {
        kernels
            .model_with(with, "accumulate", 1, 64, &[], &mut [])
            .modelled_us
    };
    let slower = products(scaled) / products(With::gpu(MI300X));
    assert!((1.249..1.251).contains(&slower), "products: {slower}");
}

#[test]
fn empty_workgroups_in_the_middle_do_not_stand_for_the_others() {
    let Some(kernels) = Kernels::load() else {
        return;
    };
    let one = kernels.items(&[50], 1).clocks;
    assert!(one > 50.0 * 256.0);
    // Two or three long ones on each compute unit, on SIMDs of their own.
    let counts: Vec<i32> = (0..1024)
        .map(|i| if (300..700).contains(&i) { 0 } else { 50 })
        .collect();
    let found = kernels.items(&counts, 1).clocks;
    assert!(
        (0.97 * one..1.1 * one).contains(&found),
        "{found}, alone {one}"
    );
    // One slot in three is not used.
    let counts: Vec<i32> = (0..1024).map(|i| if i % 3 == 1 { 0 } else { 50 }).collect();
    let found = kernels.items(&counts, 1).clocks;
    assert!(
        (0.97 * one..1.1 * one).contains(&found),
        "{found}, alone {one}"
    );
}

#[test]
fn the_longest_workgroup_counts_wherever_it_is() {
    let Some(kernels) = Kernels::load() else {
        return;
    };
    let one = kernels.items(&[200], 1).clocks;
    for long in [0, 5, 1001, 2047] {
        let counts: Vec<i32> = (0..2048).map(|i| if i == long { 200 } else { 3 }).collect();
        let found = kernels.items(&counts, 1).clocks;
        assert!(
            (one..1.1 * one).contains(&found),
            "{found}, alone {one}, as number {long}"
        );
    }
}

#[test]
fn workgroups_of_two_lengths_share_a_compute_unit() {
    let Some(kernels) = Kernels::load() else {
        return;
    };
    // Four waves on each SIMD, whose vector unit is always busy; two workgroups at a time.
    let even = kernels.items(&[20; 608], 16);
    assert_eq!((even.share, even.resident), (2, 2));
    let longest_first: Vec<i32> = (0..608).map(|i| if i < 304 { 30 } else { 10 }).collect();
    let mixed = kernels.items(&longest_first, 16);
    let ratio = mixed.clocks / even.clocks;
    assert!((0.95..1.1).contains(&ratio), "{ratio}");
    // Many more than are modelled: the rest is extrapolated.
    let many: Vec<i32> = (0..304 * 40)
        .map(|i| if i % 5 == 4 { 0 } else { 5 })
        .collect();
    let mixed = kernels.items(&many, 16);
    assert!(mixed.modelled_workgroups < mixed.share);
    let least = 32.0 * 5.0 * 4.0 * 256.0;
    assert!(
        (least..1.3 * least).contains(&mixed.clocks),
        "{}, not {least}",
        mixed.clocks
    );
}

#[test]
fn waves_with_priority_issue_first() {
    let Some(kernels) = Kernels::load() else {
        return;
    };
    let last = |name: &str| {
        let e = kernels.model(MI300X, name, 1, 512, &[], &mut []);
        let of_wave = |n: u8| {
            let own = e.events.iter().filter(|e| e.wave == (0, n) && e.simd == 0);
            own.map(|e| e.issued).max().expect("a wave on SIMD 0")
        };
        (of_wave(0), of_wave(4))
    };
    let (old, young) = last("vector");
    assert!(old < young, "{old}, {young}");
    let (old, young) = last("hurry");
    assert!(young + 60 * 4 <= old, "{old}, {young}");
}

#[test]
fn events_are_json_in_the_order_of_their_waves() {
    let Some(kernels) = Kernels::load() else {
        return;
    };
    let e = kernels.model(MI300X, "meet", 1, 256, &[], &mut []);
    assert!(e.events.iter().all(|e| e.from <= e.issued));
    assert_eq!(e.events.iter().map(|e| e.simd).max(), Some(3));
    let json = perfetto(&e, kernels.0.program());
    let open = |c| json.matches(c).count();
    assert_eq!((open('{'), open('[')), (open('}'), open(']')));
    assert!(json.contains("\"name\":\"s_barrier\"") && json.contains("modelled"));
}

#[test]
fn recording_changes_nothing_else() {
    let Some(kernels) = Kernels::load() else {
        return;
    };
    let from: Vec<u32> = (0..1024 * 20).collect();
    let mut to = vec![0u32; from.len()];
    let extent = |v: &[u32]| Extent {
        start: v.as_ptr() as u64,
        end: v.as_ptr() as u64 + 4 * v.len() as u64,
    };
    let memory = Memory::new(vec![extent(&from), extent(&to)]);
    let kernarg: Vec<u8> = [to.as_mut_ptr() as u64, from.as_ptr() as u64]
        .iter()
        .flat_map(|a| a.to_le_bytes())
        .collect();
    let launch = Launch {
        code: &kernels.0,
        kernel: kernels.0.kernel("copy").expect("kernel"),
        grid: [20, 1, 1],
        remainder: [0; 3],
        block: [256, 1, 1],
        dynamic_lds: 0,
        kernarg: &kernarg,
        memory: &memory,
    };
    let options = Options {
        record: Record::Some(2),
        ..Options::default()
    };
    // SAFETY: both vectors live until the end, and are not used in between.
    let stats = unsafe { launch.run(&options) }.expect("a kernel without faults");
    assert_eq!(to, from);
    assert_eq!(stats.workgroups, 20);
    let recorded: Vec<u64> = stats.recorded.traces.iter().map(|t| t.workgroup).collect();
    assert_eq!(recorded, [0, 8]);
    let each = stats.wave_instructions / 20;
    assert!(
        stats
            .recorded
            .traces
            .iter()
            .all(|t| t.wave_instructions() == each)
    );
}

#[cfg(feature = "cli")]
#[test]
fn the_program_models_and_writes_a_trace() {
    let Some(bytes) = common::compile("timing.hip", &[]) else {
        return;
    };
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (code, trace) = (folder.join("timing.co"), folder.join("timing.json"));
    std::fs::write(&code, bytes).expect("a file");
    let run = |more: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_wavesim"));
        command.arg("model").arg(&code);
        command.args(["--kernel", "accumulate", "--grid", "80", "--block", "64"]);
        command.args(["--gpu", "mi308x", "--unfitted"]).args(more);
        let output = command.output().expect("wavesim");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    let trace_name = trace.to_str().expect("UTF-8");
    let json: serde_json::Value =
        serde_json::from_str(&run(&["--json", "--perfetto", trace_name])).expect("JSON");
    let us = json["modelled_us"].as_f64().expect("a time");
    takes(us * 1420.0, 256.0 * 16.0);
    let trace = std::fs::read_to_string(&trace).expect("the trace");
    let trace: serde_json::Value = serde_json::from_str(&trace).expect("JSON");
    assert!(
        trace["traceEvents"]
            .as_array()
            .is_some_and(|e| e.len() > 256)
    );
    assert!(run(&["--top", "1"]).contains("v_mfma_f32_16x16x16_bf16"));
}

/// The fit is what comes out of the published rows, and keeps to the bound on those that it was not fitted to.
#[cfg(feature = "cli")]
#[test]
fn the_fit_is_that_of_the_published_rows() {
    let data: serde_json::Value =
        serde_json::from_str(include_str!("../calibration/rows.json")).expect("JSON");
    let mut seen = std::collections::BTreeMap::new();
    // Modelled and published microseconds, launches; whether it is in the fit.
    let rows: Vec<(f64, f64, f64, bool)> = (data["rows"].as_array().expect("rows").iter())
        .map(|row| {
            let launches = row["launches"].as_array().expect("launches");
            let us = |l: &serde_json::Value| l["model"]["modelled_us"].as_f64().expect("a time");
            let n: &mut usize = seen.entry(row["kind"].to_string()).or_default();
            *n += 1;
            let published = row["published_us"].as_f64().expect("a time");
            let modelled = launches.iter().map(us).sum();
            (modelled, published, launches.len() as f64, *n % 2 == 1)
        })
        .collect();
    let inside = || rows.iter().filter(|r| r.3);
    let sum = |f: fn(f64, f64) -> f64| inside().map(|r| f(r.0 / r.1, r.2 / r.1)).sum::<f64>();
    let (a, b, c) = (sum(|x, _| x * x), sum(|x, y| x * y), sum(|_, y| y * y));
    let (p, q) = (sum(|x, _| x), sum(|_, y| y));
    let determinant = a * c - b * b;
    let (mut scale, mut launch) = ((p * c - q * b) / determinant, (a * q - b * p) / determinant);
    if launch < 0.0 {
        (scale, launch) = (p / a, 0.0);
    }
    let fit = Fit::CALIBRATED;
    assert!(
        (fit.scale - scale).abs() < 6e-4,
        "{} is not {scale}",
        fit.scale
    );
    assert!(
        (fit.launch_us - launch).abs() < 6e-3,
        "{} is not {launch}",
        fit.launch_us
    );
    let error =
        |r: &(f64, f64, f64, bool)| ((fit.scale * r.0 + fit.launch_us * r.2) / r.1 - 1.0).abs();
    let mut held_out: Vec<f64> = rows.iter().filter(|r| !r.3).map(error).collect();
    held_out.sort_by(f64::total_cmp);
    assert!(held_out.len() > 25 && held_out[held_out.len() / 2] < 0.35);
}

//! The program `deltawave`, as a user runs it.

#[path = "cli/conv.rs"]
mod conv;
#[path = "cli/decode.rs"]
mod decode;
#[path = "cli/layer.rs"]
mod layer;
#[path = "cli/states.rs"]
mod states;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use safetensors::SafeTensors;
use serde_json::Value;

/// Runs the program on the simulator, whatever the machine has.
fn deltawave(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_deltawave"))
        .args(arguments)
        .env("DELTAWAVE_BACKEND", "simulator")
        .output()
        .expect("the program starts")
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("UTF-8")
}

/// The one JSON object on stdout.
fn json(output: &Output) -> Value {
    serde_json::from_str(text(&output.stdout))
        .unwrap_or_else(|e| panic!("{e}\n{}\n{}", text(&output.stdout), text(&output.stderr)))
}

/// Whether this program has kernels to run; a build without a compiler has none.
fn kernels() -> bool {
    let built = deltawave::code_objects::for_arch("gfx942").next().is_some();
    if !built {
        assert_ne!(
            std::env::var("DELTAWAVE_REQUIRE_KERNELS").as_deref(),
            Ok("1"),
            "no kernels"
        );
        println!(
            "skipped: {}",
            deltawave::code_objects::why_missing("gfx942")
        );
    }
    built
}

/// A prefill that succeeds, as JSON.
fn prefill(arguments: &[&str]) -> Value {
    let all = [&["prefill", "--json"], arguments].concat();
    let output = deltawave(&all);
    assert!(
        output.status.success(),
        "{arguments:?}\n{}\n{}",
        text(&output.stdout),
        text(&output.stderr)
    );
    json(&output)
}

/// A run that fails with this status and these words on stderr, and says the same as JSON.
fn refused(arguments: &[&str], status: i32, words: &[&str]) {
    let output = deltawave(arguments);
    let stderr = text(&output.stderr);
    assert_eq!(
        output.status.code(),
        Some(status),
        "{arguments:?}\n{stderr}"
    );
    assert!(output.stdout.is_empty(), "{arguments:?}");
    assert!(stderr.starts_with("error: "), "{arguments:?}\n{stderr}");
    for word in words {
        assert!(stderr.contains(word), "{arguments:?}: no {word}\n{stderr}");
    }
    let output = deltawave(&[arguments, &["--json"]].concat());
    assert_eq!(output.status.code(), Some(status), "{arguments:?}");
    let error = json(&output)["error"].as_str().map(str::to_owned);
    assert!(
        error.is_some_and(|e| !e.is_empty() && !e.starts_with("error")),
        "{arguments:?}"
    );
}

/// A file of this test's own.
fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("cli-{name}.safetensors"))
}

#[test]
fn help_teaches() {
    let output = deltawave(&["prefill", "--help"]);
    assert!(output.status.success());
    let help = text(&output.stdout);
    for words in [
        "Examples:",
        "--model qwen3.5-35b-a3b",
        "olmo-hybrid-7b",
        "--seqlens",
        "Exit status:",
    ] {
        assert!(help.contains(words), "{words}\n{help}");
    }
    assert!(deltawave(&["--version"]).status.success());
}

#[test]
fn info_describes_device_and_kernels() {
    let output = deltawave(&["info"]);
    assert!(output.status.success());
    let shown = text(&output.stdout);
    assert!(shown.contains("runs on"), "{shown}");
    let output = deltawave(&["info", "--json"]);
    assert!(output.status.success());
    let info = json(&output);
    assert!(info["hip"]["error"].is_array());
    if !kernels() {
        assert!(!info["missing"].as_array().unwrap().is_empty());
        return;
    }
    assert_eq!(info["backend"], "simulator");
    assert_eq!(info["arch"], "gfx942");
    assert_eq!(info["mfma_mode"], "fast");
    assert_eq!(info["compute_units"], 304);
    // The simulator is the GPU that it is told to be.
    let output = Command::new(env!("CARGO_BIN_EXE_deltawave"))
        .args(["info", "--json"])
        .env("DELTAWAVE_BACKEND", "simulator")
        .env("DELTAWAVE_SIM_GPU", "mi308x")
        .output()
        .unwrap();
    let mi308x = json(&output);
    assert_eq!(mi308x["compute_units"], 80);
    assert_eq!(mi308x["device"], "gfx942 simulator (MI308X)");
    let objects = info["code_objects"].as_array().unwrap();
    let names: Vec<&str> = objects
        .iter()
        .filter(|o| o["arch"] == "gfx942")
        .flat_map(|o| {
            assert_eq!(o["verified"], true);
            o["kernels"].as_array().unwrap()
        })
        .map(|k| {
            assert_eq!((&k["spills"], &k["private_bytes"]), (&0.into(), &0.into()));
            assert!(k["vgprs"].as_u64() > Some(0) && k["kernarg_bytes"].as_u64() > Some(0));
            k["name"].as_str().unwrap()
        })
        .collect();
    for name in [
        "dw_gate",
        "dw_prefill_prepare_bf16",
        "dw_prefill_scan_f16_k256",
    ] {
        assert!(names.contains(&name), "{names:?}");
        assert!(shown.contains(name), "{shown}");
    }
}

#[test]
fn info_saves_the_kernels() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("saved_kernels");
    let path = folder.to_str().unwrap();
    assert!(
        deltawave(&["info", "--save-kernels", path])
            .status
            .success()
    );
    for code in deltawave::code_objects::for_arch("gfx942") {
        let file = folder.join("gfx942").join(format!("{}.co", code.name));
        assert_eq!(fs::read(&file).unwrap(), code.bytes, "{}", file.display());
    }
    if kernels() {
        let list = fs::read_to_string(folder.join("gfx942/kernels.txt")).unwrap();
        let wanted = "dw_prefill_scan_bf16_k128 prefill_scan.co ";
        assert!(list.lines().any(|l| l.starts_with(wanted)), "{list}");
        refused(
            &["info", "--save-kernels", "/dev/null/here"],
            1,
            &["--save-kernels /dev/null/here"],
        );
    }
}

#[test]
fn json_has_every_figure() {
    if !kernels() {
        return;
    }
    let base = ["--heads", "1,2", "--dims", "64,32", "--seqlens", "1,70"];
    let unchecked = prefill(&base);
    let checked = prefill(&[&base[..], &["--check", "--repeat", "2"]].concat());
    for (figures, has_errors) in [(&unchecked, false), (&checked, true)] {
        let object = figures.as_object().unwrap();
        for key in ["tokens", "sequences", "kernel_seconds", "wave_instructions"] {
            assert!(object[key].as_f64() > Some(0.0), "{key}");
        }
        for key in [
            "o_rms_ratio",
            "o_max_abs",
            "state_rms_ratio",
            "state_max_abs",
            "unfused_o_rms_ratio",
            "unfused_state_rms_ratio",
        ] {
            assert_eq!(object[key].is_f64(), has_errors, "{key}");
            assert_eq!(object[key].is_null(), !has_errors, "{key}");
        }
        assert_eq!(object["backend"], "simulator");
        assert_eq!(object["mfma_mode"], "fast");
        assert_eq!(object["dtype"], "bf16");
        assert!(object["device"].is_string());
        assert_eq!(
            (&object["tokens"], &object["sequences"]),
            (&71.into(), &2.into())
        );
        let kernels = object["kernels"].as_array().unwrap();
        assert_eq!(kernels.len(), 2);
        for kernel in kernels {
            assert_eq!(
                (&kernel["launches"], &kernel["spills"]),
                (&1.into(), &0.into())
            );
            for key in ["vgprs", "sgprs", "wave_instructions", "seconds"] {
                assert!(kernel[key].as_f64() > Some(0.0), "{key}");
            }
            for key in ["agprs", "lds_bytes"] {
                assert!(kernel[key].is_u64(), "{key}");
            }
        }
    }
    assert_eq!(checked["passed"], true);
    assert!(checked["o_worst"]["head"].is_u64());
}

#[test]
fn checks_pass_for_every_kind_of_prefill() {
    if !kernels() {
        return;
    }
    let small: &[&str] = &["--heads", "2,4", "--seqlens", "1,0,63,65,130", "--check"];
    for extra in [
        &["--dtype", "bf16"][..],
        &["--dtype", "fp16"],
        &["--dtype", "fp16", "--mfma", "exact", "--gates", "mixed"],
        &["--gates", "strong", "--keys", "silu", "--dims", "96,192"],
        &["--gates", "zero", "--l2norm", "--head-map", "tiled"],
        &["--raw-gates", "--neg-eigval", "--scale", "-0.5"],
        &[
            "--initial-state",
            "bf16",
            "--state-layout",
            "value-major",
            "--state-dtype",
            "bf16",
        ],
        &[
            "--initial-state",
            "f32",
            "--dims",
            "64,256",
            "--threads",
            "1",
        ],
    ] {
        let report = prefill(&[small, extra].concat());
        assert_eq!(report["passed"], true, "{extra:?}");
        let exact = extra.contains(&"exact");
        assert_eq!(report["mfma_mode"], if exact { "exact" } else { "fast" });
    }
    for dense in [
        &[
            "--model",
            "OLMo-Hybrid-7B",
            "--tp",
            "15",
            "--batch",
            "2",
            "--len",
            "66",
        ][..],
        &[
            "--model",
            "qwen3.6-27b",
            "--tp",
            "16",
            "--batch",
            "1",
            "--len",
            "100",
        ],
    ] {
        let report = prefill(&[dense, &["--check"]].concat());
        assert_eq!(
            (&report["passed"], &report["batch"]),
            (&true.into(), &"dense".into())
        );
    }
}

#[test]
fn segments_are_forced_and_switched_off() {
    if !kernels() {
        return;
    }
    let run = |extra: &[&str], variable: &str| {
        let shape = ["prefill", "--json", "--check", "--heads", "1,1"];
        Command::new(env!("CARGO_BIN_EXE_deltawave"))
            .args(shape)
            .args(["--dims", "32,16", "--seqlens", "400,64"])
            .args(extra)
            .env("DELTAWAVE_BACKEND", "simulator")
            .env("DELTAWAVE_SEGMENTS", variable)
            .output()
            .expect("the program starts")
    };
    for (extra, variable, count) in [
        (&[][..], "", 2),
        (&["--segments", "1"], "", 2),
        (&["--segments", "2"], "", 3),
        (&["--segments", "4"], "", 4),
        (&["--segments", "4"], "1", 2),
        (&[], "3", 4),
    ] {
        let report = json(&run(extra, variable));
        assert_eq!(report["passed"], true, "{extra:?} {variable}");
        let kernels = report["kernels"].as_array().expect("kernels");
        assert_eq!(kernels.len(), count, "{extra:?} {variable}");
    }
    for nonsense in ["0", "-1", "many", "1.5"] {
        let output = run(&[], nonsense);
        assert_eq!(output.status.code(), Some(1), "{nonsense}");
        let words = text(&output.stderr);
        assert!(words.contains("DELTAWAVE_SEGMENTS"), "{words}");
        assert!(words.contains(nonsense), "{words}");
    }
}

#[test]
fn tables_show_kernels_errors_and_where_the_time_was_spent() {
    if !kernels() {
        return;
    }
    let output = deltawave(&["prefill", "--heads", "1,1", "--seqlens", "64", "--check"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let shown = text(&output.stdout);
    for words in [
        "final_state",
        "[64, 1, 128]",
        "simulator",
        "dw_prefill_scan_bf16_k128",
        "unfused form",
        "not a GPU time",
    ] {
        assert!(shown.contains(words), "{words}\n{shown}");
    }
    // Progress is for terminals.
    assert!(output.stderr.is_empty(), "{}", text(&output.stderr));
}

#[test]
fn profile_counts_what_the_kernels_do() {
    if !kernels() {
        return;
    }
    let shape = ["--heads", "2,4", "--seqlens", "64,65,128"];
    let ran = prefill(&shape);
    let output = deltawave(&[&["profile", "--json"], &shape[..]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let profile = json(&output);
    let total = &profile["total"];
    let number = |v: &Value| v.as_f64().unwrap_or_else(|| panic!("no number: {v}"));
    assert_eq!(total["wave_instructions"], ran["wave_instructions"]);
    let kernels = profile["kernels"].as_array().expect("a list");
    for name in [
        "wave_instructions",
        "mfma_clk",
        "valu_clk",
        "trans_clk",
        "accvgpr_moves",
        "lds_clk",
        "lds_conflict_clk",
        "hbm_unique_bytes",
        "l2_fill_bytes",
        "modelled_us",
    ] {
        let sum: f64 = kernels.iter().map(|k| number(&k[name])).sum();
        assert!(
            (sum / number(&total[name]).max(1.0) - 1.0).abs() < 1e-12 || sum == 0.0,
            "{name}"
        );
    }
    for kernel in kernels {
        let waves = number(&kernel["waves_per_simd"]);
        assert!(waves > 0.0 && waves <= 8.0, "{waves}");
        assert!(number(&kernel["lds_conflict_clk"]) < number(&kernel["lds_clk"]).max(1.0));
        let least = kernel["busy_us"].as_object().expect("units").values();
        let least = least.map(number).fold(0.0, f64::max);
        assert!(number(&kernel["modelled_us"]) > least);
        assert!(number(&kernel["l2_fill_bytes"]) >= number(&kernel["hbm_unique_bytes"]));
    }
    // Chunks of 64; 64; 64, 1; 64, 64 tokens for 4 heads.
    assert_eq!(profile["chunk_heads"], 5 * 4);
    let share = &profile["per_chunk_head"];
    for name in ["wave_instructions", "mfma_clk", "valu_clk"] {
        assert_eq!(number(&share[name]) * 20.0, number(&total[name]), "{name}");
    }
    // q, k; v, o; g, beta; the final state.
    let tokens = 64 + 65 + 128;
    let bytes = tokens * (2 * 2 * 256 + 2 * 2 * 512 + 2 * 4 * 4) + 3 * 4 * 128 * 128 * 4;
    assert_eq!(number(&profile["minimal_bytes"]), f64::from(bytes));
    let flops = |n: f64| {
        let key = 4.0 * n * n * 128.0;
        2.0 * key + 4.0 * (n * n * n / 3.0 + key + 6.0 * n * 128.0 * 128.0)
    };
    let flops = 4.0 * flops(64.0) + flops(1.0);
    assert!((number(&profile["t_form_flops"]) / flops - 1.0).abs() < 1e-12);
    let roofline = f64::from(bytes) / 5.3e6;
    assert!((number(&profile["roofline_us"]) / roofline - 1.0).abs() < 1e-12);
    // The kernels do at least the products that the operation has.
    assert!(number(&total["mfma_flops"]) > flops);

    let diagram = file("roofline.svg");
    let path = diagram.to_str().expect("UTF-8");
    let few = ["profile", "--gpu", "mi308x", "--roofline", path];
    let output = deltawave(&[&few, &shape[..]].concat());
    for words in ["counted for mi308x", "L2 fill", "roofline", "20 chunks"] {
        assert!(text(&output.stdout).contains(words), "no {words}");
    }
    assert!(fs::read_to_string(&diagram).is_ok_and(|svg| svg.starts_with("<svg")));
    refused(
        &["profile", "--heads", "1,1", "--backend", "hip"],
        2,
        &["--backend"],
    );
    refused(
        &["profile", "--heads", "1,1", "--gpu", "h100"],
        2,
        &["mi308x"],
    );
}

#[test]
fn files_go_round() {
    if !kernels() {
        return;
    }
    for (name, kind) in [
        (
            "given",
            &["--initial-state", "f32", "--state-layout", "value-major"][..],
        ),
        ("raw", &["--raw-gates", "--dtype", "fp16"]),
    ] {
        let [inputs, first, second] =
            ["inputs", "first", "second"].map(|part| file(&format!("{name}-{part}")));
        let paths = [&inputs, &first, &second].map(|p| p.to_str().unwrap());
        let drawn = ["--heads", "1,2", "--dims", "32,48", "--seqlens", "65,3"];
        prefill(
            &[
                &drawn[..],
                kind,
                &["--save-input", paths[0], "--output", paths[1]],
            ]
            .concat(),
        );
        prefill(&["--input", paths[0], "--output", paths[2], "--check"]);
        let [first, second] = [paths[1], paths[2]].map(|p| fs::read(p).unwrap());
        assert!(first == second, "{name}");
        let results = SafeTensors::deserialize(&first).unwrap();
        assert_eq!(results.tensor("o").unwrap().shape(), [68, 2, 48]);
        assert_eq!(
            results.tensor("final_state").unwrap().shape(),
            [2, 2, 32, 48]
        );
        // Results are no inputs.
        refused(
            &["prefill", "--input", paths[1]],
            1,
            &["--input", "final_state", "because"],
        );
        // Cut off, a file is refused and named.
        let bytes = fs::read(&inputs).unwrap();
        fs::write(&inputs, &bytes[..bytes.len() - 1]).unwrap();
        refused(
            &["prefill", "--input", paths[0]],
            1,
            &["--input", "not a safetensors file"],
        );
    }
}

#[test]
fn wrong_usage_names_the_argument() {
    let base: &[&str] = &["prefill", "--seqlens", "5"];
    for (arguments, words) in [
        (
            &["--heads", "4,2"][..],
            &["--heads <HK,HV>", "multiple of HK"][..],
        ),
        (&["--heads", "2,5"], &["--heads <HK,HV>", "multiple of HK"]),
        (&["--heads", "0,4"], &["--heads <HK,HV>", "at least 1"]),
        (&["--heads", "4"], &["--heads <HK,HV>", "two numbers"]),
        (
            &["--heads", "1,1", "--segments", "0"],
            &["--segments <N>", "0"],
        ),
        (
            &["--heads", "1,1", "--dims", "100,128"],
            &["--dims <K,V>", "multiple of 16"],
        ),
        (
            &["--heads", "1,1", "--dims", "128,512"],
            &["--dims <K,V>", "V must be"],
        ),
        (
            &["--model", "qwen9-1b"],
            &["--model <NAME>", "qwen3.5-35b-a3b"],
        ),
        (
            &["--model", "qwen3.5-27b", "--tp", "3"],
            &["--tp <N>", "1, 2, 4, 8, 16"],
        ),
        (&["--model", "qwen3.5-27b", "--tp", "0"], &["--tp <N>"]),
        (
            &["--model", "qwen3.5-27b", "--heads", "1,1"],
            &["--model <NAME>", "--heads"],
        ),
        (&["--model", "qwen3.5-27b", "--dims", "64,64"], &["--heads"]),
        (&["--heads", "1,1", "--tp", "2"], &["--model"]),
        (&[], &["--model", "--heads", "--input"]),
        (&["--heads", "1,1", "--batch", "2"], &["--batch"]),
        (
            &["--heads", "1,1", "--dtype", "f32"],
            &["--dtype", "bf16, fp16"],
        ),
        (
            &["--heads", "1,1", "--gates", "odd"],
            &["--gates", "normal, mixed, zero, strong"],
        ),
        (
            &["--heads", "1,1", "--gates", "zero", "--raw-gates"],
            &["--gates", "--raw-gates"],
        ),
        (
            &["--heads", "1,1", "--scale", "inf"],
            &["--scale", "finite"],
        ),
        (
            &["--heads", "1,1", "--state-dtype", "fp16"],
            &["--state-dtype"],
        ),
        (&["--heads", "1,1", "--repeat", "0"], &["--repeat"]),
        (&["--heads", "1,1", "--threads", "0"], &["--threads"]),
        (&["--heads", "1,1", "--frobnicate"], &["--frobnicate"]),
        (&["--input", "x.safetensors"], &["--input", "--seqlens"]),
    ] {
        refused(&[base, arguments].concat(), 2, words);
    }
    for lengths in ["", "1,,2", "5,-1", "x", "2147483648"] {
        let arguments = ["prefill", "--heads", "1,1", "--seqlens", lengths];
        refused(&arguments, 2, &["--seqlens", "length"]);
    }
    let sum = "2147483647,2147483647";
    let arguments = ["prefill", "--heads", "1,1", "--seqlens", sum];
    refused(&arguments, 2, &["--seqlens", "2^31"]);
    refused(&["flash"], 2, &["flash"]);
}

#[test]
fn failures_say_why() {
    let none = ["prefill", "--input", "/nonexistent/x.safetensors"];
    refused(
        &none,
        1,
        &[
            "--input /nonexistent/x.safetensors",
            "because: ",
            "No such file",
        ],
    );
    let huge = ["prefill", "--heads", "1024,1024", "--seqlens", "2000000000"];
    refused(&huge, 1, &["host memory"]);
    if kernels() {
        let shape = [
            "prefill",
            "--heads",
            "1,1",
            "--dims",
            "16,16",
            "--seqlens",
            "1",
        ];
        let unwritable = ["--output", "/nonexistent/y.safetensors"];
        refused(
            &[&shape[..], &unwritable].concat(),
            1,
            &["--output", "because: "],
        );
        refused(
            &[&shape[..], &["--backend", "hip", "--device", "99"]].concat(),
            1,
            &["because: "],
        );
    }
}

/// A simulated time means nothing.
#[test]
fn only_gpus_are_measured() {
    if kernels() {
        let shape = ["prefill", "--heads", "1,1", "--seqlens", "5"];
        let words = ["--time", "the simulator"];
        refused(&[&shape[..], &["--time", "3"]].concat(), 2, &words);
        refused(&[&shape[..], &["--time", "0"]].concat(), 2, &["--time"]);
    }
}

/// The results must not replace the inputs.
#[test]
fn files_are_not_written_over_each_other() {
    let path = file("same");
    let name = path.to_str().expect("UTF-8");
    let drawn = ["prefill", "--heads", "1,1", "--dims", "16,16"];
    let both = [&drawn[..], &["--save-input", name, "--output", name]].concat();
    refused(&both, 2, &["--output", "would overwrite", "--save-input"]);
    let diagram = [
        "profile",
        "--heads",
        "1,1",
        "--dims",
        "16,16",
        "--save-input",
        name,
        "--roofline",
        name,
    ];
    refused(
        &diagram,
        2,
        &["--roofline", "would overwrite", "--save-input"],
    );
    fs::write(&path, "mine").expect("a file");
    refused(
        &["prefill", "--input", name, "--output", name],
        2,
        &["--output", "would overwrite", "--input"],
    );
    assert_eq!(fs::read(&path).expect("still there"), b"mine");
    fs::remove_file(&path).expect("removed");
}

/// The simulator has one device; another one that is asked for is not silently replaced by it.
#[test]
fn devices_that_do_not_exist() {
    if kernels() {
        refused(
            &["prefill", "--heads", "1,1", "--device", "7"],
            1,
            &["device 7 does not exist"],
        );
    }
}

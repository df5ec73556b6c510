//! Tests the program `wavesim`: command line, output, files.

mod common;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;

/// A folder with code objects and inputs, removed in the end.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Folder {
    /// A folder with `k.co`, compiled from a source.
    fn new(test: &str, source: &str) -> Option<Folder> {
        let code = common::compile(source, &[])?;
        let name = format!("wavesim-{test}-{}", std::process::id());
        let folder = Folder(Path::new(env!("CARGO_TARGET_TMPDIR")).join(name));
        std::fs::create_dir_all(&folder.0).expect("a folder");
        folder.write("k.co", &code);
        Some(folder)
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        std::fs::write(self.0.join(name), bytes).expect("a file");
    }

    fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.0.join(name)).expect("a file")
    }

    fn wavesim(&self, arguments: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_wavesim"))
            .current_dir(&self.0)
            .args(arguments)
            .output()
            .expect("wavesim starts")
    }

    /// Standard output of a run that works.
    fn works(&self, arguments: &[&str]) -> String {
        let output = self.wavesim(arguments);
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {err}");
        String::from_utf8(output.stdout).expect("text")
    }

    fn json(&self, arguments: &[&str]) -> Value {
        let arguments = [arguments, &["--json"]].concat();
        serde_json::from_str(&self.works(&arguments)).expect("one JSON object")
    }

    /// Standard error of a run that ends with a status.
    fn fails(&self, status: i32, arguments: &[&str]) -> String {
        let output = self.wavesim(arguments);
        let err = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(status), "{arguments:?}: {err}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
        err
    }
}

fn floats(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    values.into_iter().flat_map(f32::to_le_bytes).collect()
}

const SAXPY: [&str; 8] = [
    "run", "k.co", "--kernel", "saxpy", "--grid", "4", "--block", "256",
];

#[test]
fn runs_on_raw_files_and_tensors() {
    let Some(f) = Folder::new("raw", "launch.hip") else {
        return;
    };
    let n = 1000;
    let x = floats((0..n).map(|i| i as f32));
    f.write("y.bin", &floats((0..n).map(|i| 3.0 * i as f32)));
    let views = HashMap::from([
        ("x", TensorView::new(Dtype::F32, vec![10, 100], &x).unwrap()),
        (
            "other",
            TensorView::new(Dtype::U8, vec![4], &[0; 4]).unwrap(),
        ),
    ]);
    f.write(
        "data.safetensors",
        &safetensors::serialize(views, None).unwrap(),
    );
    let expected = floats((0..n).map(|i| 2.5 * i as f32 + 3.0 * i as f32));

    let rest = [
        "--arg",
        "in:data.safetensors#x",
        "--arg",
        "f32:2.5",
        "--arg",
        "i32:1000",
    ];
    let run = |first: &str| f.json(&[&SAXPY[..], &["--arg", first], &rest].concat());
    let report = run("inout:y.bin->new.bin");
    assert_eq!(f.read("new.bin"), expected);
    assert_eq!(f.read("y.bin").len(), expected.len(), "the input stays");
    assert_eq!(report["workgroups"], 4);
    assert_eq!(report["waves"], 16);
    assert!(report["wave_instructions"].as_u64().unwrap() > 16);
    assert_eq!(report["mfma_mode"], "fast");
    assert_eq!(report["outputs"][0]["file"], "new.bin");
    assert_eq!(report["outputs"][0]["argument"], 0);

    // From tensor to tensor: type and shape are kept. Two tensors share a file.
    let text = f.works(&[
        "run",
        "k.co",
        "--kernel",
        "saxpy",
        "--grid",
        "4",
        "--block",
        "256",
        "--order",
        "seeded:3",
        "--threads",
        "2",
        "--mfma",
        "exact",
        "--arg",
        "inout:data.safetensors#x->out.safetensors#y",
        "--arg",
        "zeros:f32[1000]->out.safetensors#x",
        "--arg",
        "f32:2",
        "--arg",
        "i32:1000",
    ]);
    assert!(text.contains("wave-instructions"), "{text}");
    let bytes = f.read("out.safetensors");
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let y = file.tensor("y").unwrap();
    assert_eq!((y.dtype(), y.shape()), (Dtype::F32, &[10, 100][..]));
    assert_eq!(y.data(), x);
    assert_eq!(file.tensor("x").unwrap().shape(), [1000]);
}

#[test]
fn passes_structs_and_numbers() {
    let Some(f) = Folder::new("struct", "wavesim.hip") else {
        return;
    };
    f.write("x.bin", &floats([1.0, 2.0, 3.0, 4.0]));
    let args = [
        "run", "k.co", "--kernel", "scale", "--grid", "1", "--block", "64",
    ];
    let rest = [
        "--arg",
        "out:f32[5]->-",
        "--arg",
        "struct(in:x.bin, u8:1, f32:0.5, u16:4)",
    ];
    let report = f.json(&[&args[..], &rest].concat());
    // Elements that the kernel does not write stay NaN.
    let expected = serde_json::json!([0.5, 1, 1.5, 2, "NaN"]);
    let values = report["outputs"][0]["values"].as_array().unwrap();
    for (value, expected) in values.iter().zip(expected.as_array().unwrap()) {
        assert_eq!(value.as_f64(), expected.as_f64());
    }
    assert_eq!(values.len(), 5);

    let text = f.works(&[
        "run",
        "k.co",
        "--kernel",
        "numbers",
        "--grid",
        "1",
        "--block",
        "64",
        "--arg",
        "zeros:f64[8]->-",
        "--arg",
        "i8:-3",
        "--arg",
        "u16:0xffff",
        "--arg",
        "i32:-70000",
        "--arg",
        "i64:-9000000000",
        "--arg",
        "f16:1.5",
        "--arg",
        "f32:-0.25",
        "--arg",
        "f64:1e100",
        "--arg",
        "null",
    ]);
    let line = text.lines().find(|l| l.starts_with("argument 0")).unwrap();
    let numbers: Vec<f64> = line
        .split_whitespace()
        .skip(2)
        .map(|n| n.parse().unwrap())
        .collect();
    assert_eq!(
        numbers,
        [-3.0, 65535.0, -70000.0, -9e9, 1.5, -0.25, 1e100, 1.0]
    );
}

#[test]
fn dynamic_lds_and_default_kernel() {
    let Some(f) = Folder::new("lds", "launch.hip") else {
        return;
    };
    let data: Vec<u8> = (0u32..256).flat_map(u32::to_le_bytes).collect();
    let reversed: Vec<u8> = (0u32..256).rev().flat_map(u32::to_le_bytes).collect();
    f.write("d", &data);
    let run = [
        "run",
        "k.co",
        "--kernel",
        "reverse",
        "--grid",
        "1,1,1",
        "--block",
        "256",
        "--arg",
        "inout:d->e",
        "--arg",
        "u32:256",
    ];
    f.works(&[&run[..], &["--lds", "1024"]].concat());
    assert_eq!(f.read("e"), reversed);
    let err = f.fails(2, &[&run[..], &["--lds", "65537"]].concat());
    assert!(err.contains("65537 dynamic bytes of LDS"), "{err}");
    // Too little is a fault of the kernel.
    let err = f.fails(1, &[&run[..], &["--lds", "512"]].concat());
    assert!(err.contains("outside the workgroup's 512 bytes"), "{err}");
    let err = f.fails(2, &["run", "k.co", "--grid", "1", "--block", "1"]);
    assert!(
        err.contains("--kernel is needed") && err.contains("saxpy"),
        "{err}"
    );
}

#[test]
fn faults_name_the_place_and_the_buffers() {
    let Some(f) = Folder::new("fault", "launch.hip") else {
        return;
    };
    let err = f.fails(
        1,
        &[
            "run",
            "k.co",
            "--kernel",
            "outside",
            "--grid",
            "1",
            "--block",
            "64",
            "--arg",
            "zeros:256->o",
            "--arg",
            "u32:1",
        ],
    );
    for part in [
        "error: the launch failed",
        "caused by: kernel outside, workgroup [0, 0, 0], wave 0, pc 0x",
        "lane 63",
        "0 bytes past the end",
        "argument 0, `zeros:256->o`: 0x",
    ] {
        assert!(err.contains(part), "{part:?} is not in {err}");
    }
    assert!(!f.0.join("o").exists(), "nothing is written after a fault");
    let err = f.fails(
        1,
        &[
            "run",
            "k.co",
            "--kernel",
            "spin",
            "--grid",
            "1",
            "--block",
            "64",
            "--arg",
            "zeros:4",
            "--instruction-limit",
            "100000",
        ],
    );
    assert!(err.contains("exceeded 100000 wave-instructions"), "{err}");
}

/// A finding of a check, for scripts: both sides of a race.
#[test]
fn findings_are_json() {
    let Some(f) = Folder::new("finding", "order.hip") else {
        return;
    };
    let run = |kernel: &str, more: &[&str]| {
        let launch = ["run", "k.co", "--grid", "2", "--block", "256", "--json"];
        let buffers = ["--arg", "zeros:2048->o", "--arg", "zeros:2048"];
        f.wavesim(&[&launch[..], &["--kernel", kernel], &buffers, more].concat())
    };
    // Checks are on unless they are switched off.
    for checks in [&[][..], &["--checks", "races"]] {
        let output = run("workgroups_race", checks);
        assert_eq!(output.status.code(), Some(1));
        let found: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
        assert_eq!(found["kernel"], "workgroups_race");
        assert_eq!(found["workgroup"], serde_json::json!([1, 0, 0]));
        let (race, other) = (&found["race"], &found["race"]["other"]);
        assert_eq!(other["workgroup"], serde_json::json!([0, 0, 0]));
        assert_eq!(race["action"], "store");
        assert_eq!(other["action"], "store");
        for side in [&found, other] {
            let text = side["instruction"].as_str().expect("a text");
            assert!(text.starts_with("global_store_dword "), "{text}");
            assert!(side["pc"].is_u64() && side["wave"].is_u64());
        }
        for (text, part) in [(&race["place"], "0x"), (&race["reason"], "workgroups")] {
            assert!(text.as_str().is_some_and(|t| t.contains(part)), "{text}");
        }
        let told = String::from_utf8_lossy(&output.stderr);
        let fault = found["fault"].as_str().expect("a text");
        assert!(told.contains(fault), "{fault} is not in {told}");
    }
    for (kernel, checks) in [
        ("workgroups_race", &["--checks", "none"][..]),
        ("workgroups_race", &["--checks", "barriers,waits"]),
        ("workgroups_clean", &[]),
    ] {
        let output = run(kernel, checks);
        assert!(output.status.success(), "{kernel} {checks:?}");
        let told: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
        assert!(told["race"].is_null());
    }
}

/// Requests that make no sense, and what the error must say.
#[test]
fn refuses_bad_requests() {
    let Some(f) = Folder::new("bad", "launch.hip") else {
        return;
    };
    f.write("x", &[0; 64]);
    f.write("cut.safetensors", &[9, 0, 0, 0, 0, 0, 0, 0, b'{']);
    let view = TensorView::new(Dtype::U8, vec![4], &[1, 2, 3, 4]).unwrap();
    f.write(
        "ok.safetensors",
        &safetensors::serialize([("a", view)], None).unwrap(),
    );
    let cases: &[(i32, &[&str], &str)] = &[
        (
            2,
            &["zeros:4", "in:x", "f32:1"],
            "takes 4 arguments, 3 were given",
        ),
        (
            2,
            &["zeros:4", "in:x", "f32:1"],
            "3: 4 bytes at offset 20, by_value",
        ),
        (
            2,
            &["zeros:4", "in:x", "f32:1", "i64:1"],
            "argument 3: `i64:1` is 8 bytes, the kernel takes 4",
        ),
        (
            2,
            &["u64:7", "in:x", "f32:1", "i32:1"],
            "argument 0: `u64:7` is u64, the kernel takes a pointer",
        ),
        (
            2,
            &["zeros:4", "in:x", "in:x", "i32:1"],
            "argument 2: `in:x` is 8 bytes, the kernel takes 4",
        ),
        (
            2,
            &["zeros:4", "in:x", "f32:one", "i32:1"],
            "`f32:one`: expected a number",
        ),
        (
            2,
            &["zeros:4", "in:x", "f32:1", "i32:0x1_0"],
            "expected an integer",
        ),
        (
            2,
            &["zeros:4", "in:x", "f32:1", "i32:2147483648"],
            "out of range: -2147483648 to 2147483647",
        ),
        (
            2,
            &["zeros:4", "in:x", "f32:1", "u32:-1"],
            "out of range: 0 to 4294967295",
        ),
        (
            2,
            &["zeros:4", "in:x", "f32:1", "int:1"],
            "`int` is none of i8",
        ),
        (2, &["zeros:4", "in:x", "f32:1", "7"], "expected KIND:VALUE"),
        (2, &["zeros:", "in:x", "f32:1", "i32:1"], "expected a size"),
        (
            2,
            &["zeros:f31[2]", "in:x", "f32:1", "i32:1"],
            "expected a size",
        ),
        (
            2,
            &["zeros:f32[2", "in:x", "f32:1", "i32:1"],
            "expected a size",
        ),
        (
            2,
            &["zeros:f64[4294967296,4294967296]", "in:x", "f32:1", "i32:1"],
            "the size overflows",
        ),
        (
            2,
            &["out:4", "in:x", "f32:1", "i32:1"],
            "expected out:SIZE->FILE",
        ),
        (
            2,
            &["inout:x", "in:x", "f32:1", "i32:1"],
            "expected inout:FILE->OUT",
        ),
        (
            2,
            &["zeros:4->", "in:x", "f32:1", "i32:1"],
            "a file name is missing",
        ),
        (
            2,
            &["zeros:4", "in:ok.safetensors", "f32:1", "i32:1"],
            "a tensor name is missing",
        ),
        (
            2,
            &["zeros:4", "in:ok.safetensors#", "f32:1", "i32:1"],
            "a tensor name must follow",
        ),
        (
            2,
            &["zeros:4->o", "out:4->o", "f32:1", "i32:1"],
            "two arguments are written to o",
        ),
        (
            2,
            &["struct(zeros:4", "in:x", "f32:1", "i32:1"],
            "not closed",
        ),
        (
            2,
            &["hex:123", "in:x", "f32:1", "i32:1"],
            "even number of hexadecimal digits",
        ),
        (
            1,
            &["zeros:4", "in:none", "f32:1", "i32:1"],
            "argument 1: `in:none`\n  caused by: none\n  caused by: No such file",
        ),
        (
            1,
            &["zeros:4", "in:cut.safetensors#a", "f32:1", "i32:1"],
            "not a safetensors file",
        ),
        (
            1,
            &["zeros:4", "in:ok.safetensors#b", "f32:1", "i32:1"],
            "there is no tensor `b`, only a",
        ),
        (
            1,
            &["zeros:9000000000000000000", "in:x", "f32:1", "i32:1"],
            "no memory for a buffer",
        ),
        (
            1,
            &["zeros:4->no/such/folder", "zeros:4", "f32:1", "i32:1"],
            "the results cannot be written",
        ),
    ];
    for (status, args, expected) in cases {
        let mut line = SAXPY.to_vec();
        line.extend(args.iter().flat_map(|a| ["--arg", *a]));
        let line: Vec<&str> = line
            .iter()
            .map(|a| match *a {
                "4" => "1",
                "256" => "1",
                a => a,
            })
            .collect();
        let err = f.fails(*status, &line);
        assert!(
            err.contains(expected),
            "{args:?}: {expected:?} is not in {err}"
        );
    }
    let lines: &[(i32, &[&str], &str)] = &[
        (
            2,
            &[
                "run", "k.co", "--kernel", "sax", "--grid", "1", "--block", "1",
            ],
            "no kernel `sax`: the code object has ",
        ),
        (
            2,
            &[
                "run", "k.co", "--kernel", "spin", "--grid", "0", "--block", "1", "--arg", "null",
            ],
            "dimension of zero",
        ),
        (
            2,
            &[
                "run", "k.co", "--kernel", "spin", "--grid", "1", "--block", "2048", "--arg",
                "null",
            ],
            "more than 1024 work-items",
        ),
        (
            2,
            &[
                "run", "k.co", "--kernel", "spin", "--grid", "1,2,3,4", "--block", "1",
            ],
            "at most three dimensions",
        ),
        (
            2,
            &[
                "run", "k.co", "--kernel", "spin", "--grid", "x", "--block", "1",
            ],
            "not a number of 32 bits",
        ),
        (
            2,
            &[
                "run", "k.co", "--grid", "1", "--block", "1", "--order", "seeded:x",
            ],
            "expected run-ahead",
        ),
        (
            2,
            &[
                "run",
                "k.co",
                "--grid",
                "1",
                "--block",
                "1",
                "--threads",
                "0",
            ],
            "--threads",
        ),
        (2, &["run", "k.co", "--block", "1"], "--grid"),
        (2, &["walk"], "walk"),
        (2, &["disasm", "k.co", "--kernel", "sax"], "no kernel `sax`"),
        (
            1,
            &["disasm", "none.co"],
            "error: none.co\n  caused by: No such file",
        ),
        (
            1,
            &["resources", "x"],
            "error: x cannot be loaded\n  caused by: not an ELF file",
        ),
    ];
    for (status, line, expected) in lines {
        let err = f.fails(*status, line);
        assert!(
            err.contains(expected),
            "{line:?}: {expected:?} is not in {err}"
        );
    }
}

#[test]
fn disassembles() {
    let Some(f) = Folder::new("disasm", "launch.hip") else {
        return;
    };
    let all = f.works(&["disasm", "k.co"]);
    assert!(
        all.contains("\nsaxpy:\n") && all.contains("\ncalls:\n"),
        "{all}"
    );
    let one = f.works(&["disasm", "k.co", "--kernel", "reduce"]);
    assert!(
        one.contains("\nreduce:\n") && !one.contains("\nsaxpy:\n"),
        "{one}"
    );
    assert!(
        one.contains("s_barrier") && one.contains("s_endpgm"),
        "{one}"
    );
    assert!(
        one.lines()
            .any(|l| l.contains("s_cbranch") && l.contains("; to 0x")),
        "{one}"
    );

    let json = f.json(&["disasm", "k.co"]);
    let functions = json["functions"].as_array().unwrap();
    let mut last = 0;
    for function in functions {
        assert!(!function["name"].as_str().unwrap().is_empty());
        for i in function["instructions"].as_array().unwrap() {
            let (pc, text) = (i["pc"].as_u64().unwrap(), i["text"].as_str().unwrap());
            assert!(pc >= last && !text.is_empty());
            last = pc;
            assert!(matches!(i["dwords"].as_array().unwrap().len(), 1 | 2));
        }
    }
    assert!(functions.iter().any(|f| f["name"] == "saxpy"));
}

#[test]
fn tells_resources() {
    let Some(f) = Folder::new("resources", "launch.hip") else {
        return;
    };
    let text = f.works(&["resources", "k.co"]);
    let row = text.lines().find(|l| l.starts_with("reduce ")).unwrap();
    assert!(row.contains("4096") && row.contains("0v 0s"), "{row}");
    assert!(
        text.contains("\nsaxpy:\n  0: 8 bytes at offset 0, global_buffer"),
        "{text}"
    );
    let json = f.json(&["resources", "k.co", "--kernel", "reduce"]);
    let kernel = &json["kernels"][0];
    assert_eq!(json["kernels"].as_array().unwrap().len(), 1);
    assert_eq!(kernel["lds_bytes"], 4096);
    assert_eq!(kernel["explicit_kernarg_bytes"], 16);
    assert!(kernel["vgprs"].as_u64().unwrap() > 0);
    assert!(
        json["variables"]
            .as_array()
            .unwrap()
            .iter()
            .any(|v| v["name"] == "table")
    );
}

#[test]
fn profiles() {
    let Some(folder) = Folder::new("profile", "count.s") else {
        return;
    };
    let run = |kernel: &'static str, more: &[&'static str]| {
        let arguments = ["profile", "k.co", "--kernel", kernel, "--block", "64"];
        let buffers = ["--arg", "zeros:u32[8192]", "--arg", "zeros:u32[8192]"];
        let numbers = ["--arg", "u32:16", "--arg", "u32:3"];
        [&arguments[..], &buffers, &numbers, more].concat()
    };
    let sharing = folder.json(&run("sharing", &["--grid", "16"]));
    for (name, value) in [
        ("wave_instructions", 16 * 12),
        ("waves", 16),
        ("hbm_unique_bytes", 1024 + 16 * 1024 + 128),
        ("l2_fill_bytes", 8 * (1024 + 128) + 16 * 1024),
        ("lines_128", 16 * 24),
        ("waves_per_simd", 8),
    ] {
        assert_eq!(sharing[name].as_f64(), Some(f64::from(value)), "{name}");
    }
    assert!(sharing["modelled_us"].as_f64() > Some(1.0));
    assert_eq!(sharing["classes"]["vmem_store"], 16);
    assert_eq!(sharing["opcodes"]["global_load_dwordx4"], 32);
    let instructions = sharing["instructions"].as_array().expect("a list");
    assert_eq!(instructions.len(), 12);
    let load = instructions.iter().find(|i| {
        let text = i["text"].as_str().expect("text");
        text.starts_with("global_load_dwordx4 v[2:5]")
    });
    let load = load.expect("the first load");
    assert_eq!(
        (&load["hits"], &load["lines_64"]),
        (&16.into(), &256.into())
    );
    // A GPU of four dies.
    let fewer = folder.json(&run("sharing", &["--grid", "16", "--gpu", "mi308x"]));
    assert_eq!(fewer["l2_fill_bytes"], 4 * (1024 + 128) + 16 * 1024);

    let text = folder.works(&run(
        "lds_fragments",
        &["--grid", "1", "--annotate", "--roofline", "r.svg"],
    ));
    for words in [
        "lds_fragments: 1 workgroups, 1 waves",
        "limited by LDS",
        "  bank conflicts                     54  73.0%",
        "at least 0.000 us on mi300x",
        "           1   32.0  75.0% ",
        "us on mi300x, modelled: 1 workgroups",
    ] {
        assert!(text.contains(words), "no {words} in\n{text}");
    }
    // Nothing of the padding behind the function.
    assert!(text.ends_with("s_endpgm\n"), "{text}");
    let svg = String::from_utf8(folder.read("r.svg")).expect("text");
    assert!(svg.contains("no matrix products: lds_fragments") && svg.ends_with("</svg>\n"));
    folder.works(&run("matrix", &["--grid", "1", "--roofline", "m.svg"]));
    let svg = String::from_utf8(folder.read("m.svg")).expect("text");
    assert!(
        svg.contains(">matrix ") && svg.contains(", modelled "),
        "{svg}"
    );
    folder.works(&run("matrix", &["--grid", "1", "--perfetto", "m.json"]));
    let trace: Value = serde_json::from_slice(&folder.read("m.json")).expect("JSON");
    let events = trace["traceEvents"].as_array().expect("a list");
    assert!(events.iter().any(|e| e["name"] == "v_mfma_f32_32x32x8_f16"));

    folder.fails(2, &run("matrix", &["--grid", "1", "--gpu", "mi250"]));
    folder.fails(
        1,
        &run("matrix", &["--grid", "1", "--roofline", "no/m.svg"]),
    );
}

#[test]
fn help_teaches() {
    let Some(f) = Folder::new("help", "launch.hip") else {
        return;
    };
    let help = f.works(&["--help"]);
    assert!(
        help.contains("Examples:") && help.contains("wavesim run"),
        "{help}"
    );
    let help = f.works(&["run", "--help"]);
    for part in [
        "inout:FILE->OUT",
        "--instruction-limit",
        "struct(",
        "Examples:",
    ] {
        assert!(help.contains(part), "{part}");
    }
}

//! `deltawave info`.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::{deltawave, json, kernels, refused, text};

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

/// A device that does not exist fails, and what there is is said all the same.
#[test]
fn info_of_a_device_that_does_not_exist() {
    if !kernels() {
        return;
    }
    for json in [&[][..], &["--json"]] {
        let output = deltawave(&[&["info", "--device", "7"], json].concat());
        assert_eq!(output.status.code(), Some(1));
        assert!(text(&output.stderr).starts_with("error: device 7 does not exist"));
        assert!(text(&output.stdout).contains("dw_prefill_scan_bf16_k128"));
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
        assert!(list.starts_with("format 2\n"), "{list}");
        refused(
            &["info", "--save-kernels", "/dev/null/here"],
            1,
            &["--save-kernels /dev/null/here"],
        );
    }
}

//! Tensors from files and to them.

use std::fs;

use safetensors::SafeTensors;

use super::{file, kernels, prefill, refused};

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

/// Links do not hide that a file would be overwritten.
#[cfg(unix)]
#[test]
fn files_are_not_written_over_each_other_through_links() {
    let [input, hard, soft, dangling, absent] =
        ["linked", "hard", "soft", "dangling", "absent"].map(file);
    for path in [&input, &hard, &soft, &dangling, &absent] {
        let _ = fs::remove_file(path);
    }
    fs::write(&input, "mine").expect("a file");
    fs::hard_link(&input, &hard).expect("a link");
    std::os::unix::fs::symlink(&hard, &soft).expect("a link");
    std::os::unix::fs::symlink(&absent, &dangling).expect("a link");
    let names = [&input, &hard, &soft, &dangling, &absent].map(|p| p.to_str().expect("UTF-8"));
    let [input_name, hard_name, soft_name, dangling_name, absent_name] = names;
    for (from, to) in [
        (input_name, hard_name),
        (hard_name, input_name),
        (input_name, soft_name),
        (soft_name, hard_name),
    ] {
        let arguments = ["prefill", "--input", from, "--output", to];
        refused(&arguments, 2, &["--output", "would overwrite", "--input"]);
    }
    let drawn = ["prefill", "--heads", "1,1", "--dims", "16,16"];
    let both = ["--save-input", absent_name, "--output", dangling_name];
    refused(
        &[&drawn[..], &both].concat(),
        2,
        &["--output", "would overwrite", "--save-input"],
    );
    assert_eq!(fs::read(&input).expect("still there"), b"mine");
}

/// Gradients and what they follow from, in any order of the states' dimensions.
#[test]
fn gradients_are_written() {
    if !kernels() {
        return;
    }
    let drawn = [
        "--backward",
        "--heads",
        "1,2",
        "--dims",
        "32,48",
        "--seqlens",
        "65,3",
        "--initial-state",
        "f32",
    ];
    let rows = [
        ("d_o", &[68, 2, 48][..]),
        ("d_final_state", &[2, 2, 32, 48]),
        ("d_q", &[68, 1, 32]),
        ("d_k", &[68, 1, 32]),
        ("d_v", &[68, 2, 48]),
        ("d_initial_state", &[2, 2, 32, 48]),
    ];
    let given = [("d_g", &[68, 2][..]), ("d_beta", &[68, 2])];
    let raw = [
        ("d_a", &[68, 2][..]),
        ("d_b", &[68, 2]),
        ("d_A_log", &[2]),
        ("d_dt_bias", &[2]),
    ];
    let cases = [(&[][..], &given[..]), (&["--raw-gates"], &raw)];
    for (flags, gates) in cases {
        let files = ["key-major", "value-major"].map(|layout| {
            let path = file(&format!("gradients-{layout}"));
            let name = path.to_str().expect("UTF-8");
            let more = ["--state-layout", layout, "--output", name];
            prefill(&[&drawn[..], flags, &more].concat());
            fs::read(&path).expect("a file")
        });
        let [one, other] = (files.each_ref()).map(|b| SafeTensors::deserialize(b).expect("a file"));
        assert_eq!(one.len(), rows.len() + gates.len());
        for (name, shape) in rows.iter().chain(gates) {
            let [one, other] = [&one, &other].map(|f| f.tensor(name).expect("a tensor"));
            assert_eq!(one.shape(), *shape, "{name}");
            assert!(one.data().iter().any(|b| *b != 0), "{name}");
            // The layout changes nothing.
            assert!(one.data() == other.data(), "{name}");
        }
    }
    refused(
        &[
            "prefill",
            "--heads",
            "1,1",
            "--backward",
            "--save-input",
            "x",
            "--output",
            "x",
        ],
        2,
        &["--output", "would overwrite", "--save-input"],
    );
}

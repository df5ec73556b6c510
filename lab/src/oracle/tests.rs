//! Compares the oracle with independent formulas, and the emulations with measurements on hardware.

use super::*;
use crate::inputs::{GateInputs, Gates, InputSpec, Inputs, Keys, random_state};
use crate::metrics::compare;
use deltawave::types::Dtype;

/// The recurrence as matrices, one head at a time: `S_t = exp(g) (I - beta k k^T) S + beta k v^T`. Uses none of the
/// oracle's helpers.
fn naive(p: &Problem<'_>, g: &[f64], beta: &[f64], unit: bool) -> Solution {
    let (hk, hv, kd, vd) = (p.key_heads, p.value_heads, p.key_dim, p.value_dim);
    let mut o = vec![0.0; p.tokens * hv * vd];
    let mut finals = Vec::new();
    for n in 0..p.cu_seqlens.len() - 1 {
        for h in 0..hv {
            let kh = match p.head_map {
                HeadMap::Grouped => h * hk / hv,
                HeadMap::Tiled => h - h / hk * hk,
            };
            let mut s = vec![vec![0.0f64; vd]; kd];
            if let Some(init) = p
                .initial_state
                .filter(|_| p.has_initial_state.is_none_or(|x| x[n]))
            {
                for i in 0..kd {
                    for j in 0..vd {
                        s[i][j] = f64::from(init[((n * hv + h) * kd + i) * vd + j]);
                    }
                }
            }
            for t in p.cu_seqlens[n] as usize..p.cu_seqlens[n + 1] as usize {
                let row = |x: &[f32]| -> Vec<f64> {
                    let r: Vec<f64> = (0..kd)
                        .map(|i| f64::from(x[(t * hk + kh) * kd + i]))
                        .collect();
                    let sum: f64 = r.iter().map(|x| x * x).sum();
                    r.iter()
                        .map(|x| if unit { x / (sum + 1e-6).sqrt() } else { *x })
                        .collect()
                };
                let (q, k) = (row(p.q), row(p.k));
                let (e, b) = (g[t * hv + h].exp(), beta[t * hv + h]);
                let mut next = vec![vec![0.0; vd]; kd];
                for i in 0..kd {
                    for j in 0..vd {
                        let mut x = b * k[i] * f64::from(p.v[(t * hv + h) * vd + j]);
                        for l in 0..kd {
                            x += e * (f64::from(u8::from(i == l)) - b * k[i] * k[l]) * s[l][j];
                        }
                        next[i][j] = x;
                    }
                }
                s = next;
                for j in 0..vd {
                    let dot: f64 = (0..kd).map(|i| q[i] * s[i][j]).sum();
                    o[(t * hv + h) * vd + j] = dot * p.scale.unwrap_or((kd as f64).powf(-0.5));
                }
            }
            finals.extend(s.concat());
        }
    }
    Solution {
        o,
        final_state: finals,
    }
}

fn assert_close(x: &Solution, y: &Solution, tolerance: f64) {
    for (name, x, y) in [("o", &x.o, &y.o), ("state", &x.final_state, &y.final_state)] {
        assert_eq!(x.len(), y.len());
        let c = compare(x, y);
        assert!(c.rms_ratio < tolerance, "{name}: {c:?}");
    }
}

/// 11 columns (odd), 3 value heads per key head, empty sequences at the start, in the middle and at the end, padding
/// rows.
const SPEC: InputSpec = InputSpec {
    dtype: Dtype::F16,
    tokens: 90,
    key_heads: 2,
    value_heads: 6,
    key_dim: 5,
    value_dim: 11,
    gates: Gates::Normal,
    keys: Keys::Normal,
    unit_rows: false,
    seed: 5,
};
const CU: [i32; 7] = [0, 0, 3, 3, 80, 86, 86];

#[test]
fn recurrence_matches_the_matrix_form() {
    let inputs = Inputs::new(SPEC);
    let raw = GateInputs::new(SPEC);
    let state = random_state(Dtype::F32, 6 * 6 * 5 * 11, 9).values;
    let has = [true, false, true, true, false, true];
    let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    let raw_g: Vec<f64> = (0..90 * 6)
        .map(|i| {
            let x = f64::from(raw.a.values[i]) + f64::from(raw.dt_bias[i % 6]);
            -f64::from(raw.a_log[i % 6]).exp() * x.exp().ln_1p()
        })
        .collect();
    let raw_beta: Vec<f64> = raw
        .b
        .values
        .iter()
        .map(|&b| 2.0 / (1.0 + f64::from(-b).exp()))
        .collect();

    for head_map in [HeadMap::Grouped, HeadMap::Tiled] {
        let mut p = inputs.problem(&CU);
        p.head_map = head_map;
        p.initial_state = Some(&state);
        assert_close(
            &prefill(&p).unwrap(),
            &naive(&p, &wide(&inputs.g), &wide(&inputs.beta), true),
            1e-13,
        );
        p.has_initial_state = Some(&has);
        p.scale = Some(0.3);
        p.gate = Gate::Raw {
            a: &raw.a.values,
            a_log: &raw.a_log,
            dt_bias: Some(&raw.dt_bias),
        };
        p.beta = Beta::Logits {
            b: &raw.b.values,
            allow_neg_eigval: true,
        };
        assert_close(
            &prefill(&p).unwrap(),
            &naive(&p, &raw_g, &raw_beta, true),
            1e-13,
        );
        p.l2_norm = false;
        p.initial_state = None;
        (p.gate, p.beta) = (Gate::None, Beta::Given(&inputs.beta));
        let y = naive(&p, &[0.0; 90 * 6], &wide(&inputs.beta), false);
        assert_close(&prefill(&p).unwrap(), &y, 1e-12);
    }
}

#[test]
fn empty_sequences_keep_their_state_and_padding_is_zero() {
    let inputs = Inputs::new(SPEC);
    let state = random_state(Dtype::F32, 6 * 6 * 5 * 11, 9).values;
    let has = [true, true, false, true, true, true];
    let mut p = inputs.problem(&CU);
    p.initial_state = Some(&state);
    p.has_initial_state = Some(&has);
    for s in [prefill(&p).unwrap(), unfused(&p, Dtype::F16).unwrap()] {
        let size = 6 * 5 * 11;
        for n in [0, 5] {
            let range = n * size..(n + 1) * size;
            assert!(
                s.final_state[range.clone()]
                    .iter()
                    .zip(&state[range])
                    .all(|(&x, &y)| x == f64::from(y))
            );
        }
        assert!(s.final_state[2 * size..3 * size].iter().all(|&x| x == 0.0));
        assert!(s.o[86 * 66..].iter().all(|&x| x == 0.0));
        assert!(s.o[..86 * 66].iter().all(|&x| x != 0.0));
    }
}

#[test]
fn sequences_do_not_meet() {
    let mut inputs = Inputs::new(SPEC);
    let clean = prefill(&inputs.problem(&CU)).unwrap();
    inputs.v.values[70 * 66] = f32::NAN;
    for s in [
        prefill(&inputs.problem(&CU)).unwrap(),
        unfused(&inputs.problem(&CU), Dtype::F32).unwrap(),
    ] {
        assert!(s.o[70 * 66].is_nan());
        assert!(
            s.o[80 * 66..]
                .iter()
                .chain(&s.o[..3 * 66])
                .all(|x| x.is_finite())
        );
    }
    // A batch is its sequences one by one.
    let spec = InputSpec { tokens: 80, ..SPEC };
    let one = Inputs::new(spec);
    assert_eq!(one.v.values[..], Inputs::new(SPEC).v.values[..80 * 66]);
    let alone = prefill(&one.problem(&[0, 3])).unwrap();
    assert_eq!(alone.o[..3 * 66], clean.o[..3 * 66]);
    assert_eq!(alone.final_state[..], clean.final_state[330..660]);
}

#[test]
fn chunk_forms_in_f64_equal_the_recurrence() {
    for (gates, tolerance) in [
        (Gates::Normal, 1e-12),
        (Gates::Mixed, 1e-12),
        (Gates::Zero, 1e-12),
        (Gates::Strong, 1e-12),
        (Gates::Model, 1e-12),
    ] {
        let spec = InputSpec {
            gates,
            keys: Keys::Silu,
            tokens: 300,
            key_dim: 32,
            value_dim: 48,
            ..SPEC
        };
        let inputs = Inputs::new(spec);
        let state = random_state(Dtype::F32, 4 * 6 * 32 * 48, 9).values;
        let mut p = inputs.problem(&[0, 65, 193, 193, 290]);
        p.initial_state = Some(&state);
        let reference = prefill(&p).unwrap();
        // `Dtype::F32` must leave the f64 values of the emulation unrounded.
        assert_close(
            &unfused::run::<f64>(&p, Dtype::F32, unfused::chunk).unwrap(),
            &reference,
            tolerance,
        );
        assert_close(
            &unfused::run::<f64>(&p, Dtype::F32, t_form::chunk).unwrap(),
            &reference,
            tolerance,
        );
    }
}

/// Errors of o and of the final state against the oracle.
fn errors(p: &Problem<'_>, reference: &Solution, x: &Solution) -> (f64, f64) {
    assert_eq!(p.tokens * p.value_heads * p.value_dim, x.o.len());
    let (o, s) = (
        compare(&x.o, &reference.o),
        compare(&x.final_state, &reference.final_state),
    );
    assert!(o.finite() && s.finite());
    (o.rms_ratio, s.rms_ratio)
}

#[test]
fn unfused_form_has_the_error_that_was_measured() {
    // flash-linear-attention on an H200, against an f64 recurrence.
    for (dtype, gates, o, state) in [
        (Dtype::Bf16, Gates::Normal, 3.3e-3, 2.5e-3),
        (Dtype::Bf16, Gates::Mixed, 4.4e-3, 3.7e-3),
        (Dtype::F16, Gates::Normal, 4.2e-4, 3.2e-4),
        (Dtype::F16, Gates::Mixed, 5.8e-4, 5.1e-4),
    ] {
        let inputs = Inputs::new(InputSpec {
            dtype,
            gates,
            ..Default::default()
        });
        let p = inputs.problem(&[0, 1024]);
        let e = errors(&p, &prefill(&p).unwrap(), &unfused(&p, dtype).unwrap());
        println!(
            "{dtype} {gates:?}: {:.2e} / {:.2e}, measured {o:.1e} / {state:.1e}",
            e.0, e.1
        );
        for (e, m) in [(e.0, o), (e.1, state)] {
            assert!(
                (e / m - 1.0).abs() < 0.15,
                "{dtype} {gates:?}: {e:.2e} is not {m:.1e}"
            );
        }
    }
}

#[test]
fn t_form_has_room_below_the_unfused_form() {
    println!(
        "{:5} {:7} {:7} {:>19} {:>19}",
        "dtype", "gates", "keys", "T-form o / state", "unfused o / state"
    );
    for dtype in [Dtype::Bf16, Dtype::F16] {
        for keys in [Keys::Normal, Keys::Silu] {
            for gates in [Gates::Normal, Gates::Mixed, Gates::Zero, Gates::Strong] {
                let inputs = Inputs::new(InputSpec {
                    dtype,
                    gates,
                    keys,
                    ..Default::default()
                });
                let p = inputs.problem(&[0, 1024]);
                let reference = prefill(&p).unwrap();
                let t = errors(
                    &p,
                    &reference,
                    &unfused::run::<f32>(&p, dtype, t_form::chunk).unwrap(),
                );
                let u = errors(&p, &reference, &unfused(&p, dtype).unwrap());
                println!(
                    "{dtype:5} {:7} {:7} {:9.2e} {:9.2e} {:9.2e} {:9.2e}",
                    format!("{gates:?}"),
                    format!("{keys:?}"),
                    t.0,
                    t.1,
                    u.0,
                    u.1
                );
                assert!(t.0 <= u.0 && t.1 <= u.1);
            }
        }
    }
}

#[test]
fn bad_problems_are_named() {
    let inputs = Inputs::new(SPEC);
    let state = [0.0f32; 12];
    let good = inputs.problem(&CU);
    let short = &inputs.g[1..];
    let cases: [(&str, Problem<'_>); 14] = [
        ("K is 0", Problem { key_dim: 0, ..good }),
        (
            "HK is 0",
            Problem {
                key_heads: 0,
                ..good
            },
        ),
        (
            "6 value heads are not a multiple of 4 key heads",
            Problem {
                key_heads: 4,
                ..good
            },
        ),
        (
            "q has 900 elements, its shape [T, HK, K] has 910",
            Problem { tokens: 91, ..good },
        ),
        (
            "k has",
            Problem {
                k: &inputs.k.values[1..],
                ..good
            },
        ),
        (
            "v has",
            Problem {
                value_dim: 12,
                ..good
            },
        ),
        (
            "g has 539 elements, its shape [T, HV] has 540",
            Problem {
                gate: Gate::Log(short),
                ..good
            },
        ),
        (
            "A_log has",
            Problem {
                gate: Gate::Raw {
                    a: &inputs.g,
                    a_log: &inputs.g,
                    dt_bias: None,
                },
                ..good
            },
        ),
        (
            "beta has",
            Problem {
                beta: Beta::Given(short),
                ..good
            },
        ),
        (
            "initial_state has 12 elements",
            Problem {
                initial_state: Some(&state),
                ..good
            },
        ),
        (
            "has_initial_state has",
            Problem {
                has_initial_state: Some(&[true]),
                ..good
            },
        ),
        (
            "cu_seqlens[0] is 1, it must be 0",
            Problem {
                cu_seqlens: &[1, 2],
                ..good
            },
        ),
        (
            "cu_seqlens[2] is 4, it must be at least",
            Problem {
                cu_seqlens: &[0, 5, 4],
                ..good
            },
        ),
        (
            "cu_seqlens[1] is 91, it must be at most the 90 tokens",
            Problem {
                cu_seqlens: &[0, 91],
                ..good
            },
        ),
    ];
    for (message, p) in cases {
        for error in [
            prefill(&p).unwrap_err(),
            unfused(&p, Dtype::Bf16).unwrap_err(),
        ] {
            assert!(error.to_string().starts_with(message), "{error}");
        }
    }
    assert!(matches!(
        validate_cu_seqlens(&[], 3),
        Err(ProblemError::NoCuSeqlens)
    ));
    assert!(validate_cu_seqlens(&[0], 0).is_ok());
    assert!(validate_cu_seqlens(&[0, -1], 3).is_err());
}

#[test]
#[ignore = "a timing: run it alone, optimised"]
fn time_of_a_large_prefill() {
    let spec = InputSpec {
        tokens: 2048,
        key_heads: 16,
        value_heads: 32,
        ..Default::default()
    };
    let time = std::time::Instant::now();
    let inputs = Inputs::new(spec);
    println!("inputs {:?}", time.elapsed());
    let p = inputs.problem(&[0, 2048]);
    let time = std::time::Instant::now();
    let reference = prefill(&p).unwrap();
    println!("oracle {:?}", time.elapsed());
    let time = std::time::Instant::now();
    let x = unfused(&p, Dtype::Bf16).unwrap();
    println!("unfused {:?}", time.elapsed());
    println!("{:?}", errors(&p, &reference, &x));
}

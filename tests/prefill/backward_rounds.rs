//! The backward in rounds, from states that the forward saved, against the f64 oracle.

use deltawave::prefill::{Prefill, PrefillBackward, PrefillSpec, Save};
use deltawave::types::{Dtype, StateLayout};
use deltawave_lab::inputs::Gates;

use crate::common::backward::{ALL, Given, LoadedBackward, NAMES, check_backward, run_backward};
use crate::common::{Case, Entry, GateKind, Layout, StateKind, bits, context, spec};

const F32_STATE: StateKind = StateKind {
    dtype: Dtype::F32,
    layout: StateLayout::KeyMajor,
    pad: 0,
};
const RAW: GateKind = GateKind::Raw {
    dtype: Dtype::Bf16,
    dt_bias: true,
    allow_neg_eigval: false,
};

fn every(spec: PrefillSpec, tokens: usize) -> PrefillSpec {
    PrefillSpec {
        save: Save::BoundariesEvery(tokens),
        ..spec
    }
}

/// Rounds within sequences and of whole ones, with states at both ends of every type, and rows past the last sequence.
#[test]
fn backward_in_rounds_of_every_kind_of_gates() {
    let kinds = [
        (Gates::Normal, Dtype::Bf16, 64),
        (Gates::Mixed, Dtype::F16, 128),
        (Gates::Zero, Dtype::Bf16, 192),
        (Gates::Strong, Dtype::F16, 64),
        (Gates::Model, Dtype::Bf16, 128),
    ];
    for (i, (gates, dtype, tokens)) in kinds.into_iter().enumerate() {
        let lengths = [0, 333, 64, 10, 20, 400, 0, 65];
        let mut case = Case::new(every(spec(dtype, 1, 2, 64, 32), tokens), &lengths);
        case.initial = Some(StateKind {
            dtype: [Dtype::F32, dtype][i % 2],
            layout: [StateLayout::ValueMajor, StateLayout::KeyMajor][i % 2],
            pad: 4 * i,
        });
        case.final_state = (i != 3).then_some(StateKind {
            layout: StateLayout::ValueMajor,
            ..F32_STATE
        });
        case.has_initial = (i == 1).then(|| vec![1, 0, 1, 1, 0, 1, 1, 0]);
        case.gates = gates;
        case.padding = 30;
        case.seed = 50 + i as u64;
        check_backward(&context(), &case, 1.2, 0.0);
        if i % 2 == 0 {
            case.gate_kind = RAW;
            check_backward(&context(), &case, 1.2, 2.5e-3);
        }
    }
}

/// Dense batches, and rows with strides of their own; a sequence that is cut into segments within its rounds.
#[test]
fn backward_in_rounds_of_other_layouts() {
    let mut case = Case::new(every(spec(Dtype::Bf16, 2, 4, 128, 64), 128), &[300, 300]);
    case.seed = 2; // dg of 600 tokens with mixed gates scatters by a factor of two from seed to seed, as that of one round
    case.entry = Entry::Dense;
    case.initial = Some(F32_STATE);
    case.gates = Gates::Mixed;
    check_backward(&context(), &case, 1.2, 0.0);
    case.entry = Entry::Packed;
    case.layout = Layout::Padded(16, 8, 24);
    case.spec.segments = Some(2);
    case.spec.qk_l2norm = true;
    check_backward(&context(), &case, 1.2, 2.5e-3);
}

/// Where no sequence is cut, gradients of rows and states have the bits of one round: with the default, and in rounds of
/// whole sequences. The workspace of rounds does not grow with the tokens.
#[test]
fn rounds_of_whole_sequences_have_the_same_bits() {
    let mut case = Case::new(spec(Dtype::Bf16, 1, 2, 64, 32), &[100, 64, 90, 128, 20]);
    case.initial = Some(F32_STATE);
    case.gates = Gates::Mixed;
    let (data, given) = (case.data(), Given::new(&case));
    let one = run_backward(&context(), &case, &data, &given, ALL);
    let plan = |save: Save, case: &Case, cu_seqlens: &[i32]| {
        let spec = PrefillSpec { save, ..case.spec };
        let tokens = cu_seqlens[cu_seqlens.len() - 1] as usize;
        Prefill::packed(&context(), spec, cu_seqlens, tokens).expect("a plan")
    };
    for (save, rounds) in [
        (Save::Boundaries, 1),
        (Save::BoundariesEvery(192), 3),
        (Save::BoundariesEvery(128), 5),
    ] {
        case.spec.save = save;
        let forward = plan(save, &case, &data.cu_seqlens);
        let backward = PrefillBackward::of(&forward).expect("a plan");
        assert_eq!((forward.context_bytes(), backward.rounds()), (0, rounds));
        let found = run_backward(&context(), &case, &data, &given, ALL);
        for ((a, b), name) in one.iter().zip(&found).zip(NAMES) {
            assert!(
                a.as_deref().map(bits) == b.as_deref().map(bits),
                "{save:?}: {name}"
            );
        }
    }
    let workspace = |save, tokens: i32| {
        let forward = plan(save, &case, &[0, tokens]);
        let backward = PrefillBackward::of(&forward).expect("a plan");
        (backward.workspace_bytes(), forward.context_bytes())
    };
    let state = 2 * 64 * 32 * 4;
    let (short, long) = (
        workspace(Save::BoundariesEvery(512), 2048),
        workspace(Save::BoundariesEvery(512), 1 << 20),
    );
    assert_eq!((short.1, long.1), (3 * state, 2047 * state));
    // Two sums of a chunk and value head are not of a round.
    let sums = 2 * 2 * 4 * ((1 << 14) + 2048);
    assert!(long.0 <= short.0 + sums, "{long:?} beside {short:?}");
    let most = |tokens| workspace(Save::Boundaries, tokens).0;
    assert!(
        most(1 << 23) < (1 << 30) + 16 * (1 << 18),
        "{}",
        most(1 << 23)
    );
    assert!(workspace(Save::Nothing, 1 << 23).0 > 4 << 30);
}

#[test]
fn rounds_refuse_what_they_cannot_do() {
    let context = context();
    let stream = context.stream().expect("a stream");
    let case = Case::new(every(spec(Dtype::Bf16, 1, 2, 64, 32), 64), &[150]);
    let (data, given) = (case.data(), Given::new(&case));
    let refused = |change: fn(&mut LoadedBackward)| {
        let mut loaded = LoadedBackward::new(&context, &case, &data, &given);
        change(&mut loaded);
        let found = loaded.launch(&case, ALL, &stream);
        found.expect_err("a refusal").to_string()
    };
    assert_eq!(
        refused(|x| x.saved = None),
        "context: absent; it must be given: the plan starts rounds from saved states"
    );
    let short = |x: &mut LoadedBackward| {
        let context = x.plan_context();
        x.saved = Some(context.alloc(1000).expect("memory"));
    };
    assert_eq!(
        refused(short),
        "context: 1000 bytes; at least 32768 bytes are needed"
    );
    for (tokens, was) in [(0, 0), (100, 100)] {
        let spec = every(case.spec, tokens);
        let found = Prefill::packed(&context, spec, &[0, 9], 9).expect_err("a refusal");
        let text = format!(
            "save: boundaries every {was} tokens; tokens must be a positive multiple of 64"
        );
        assert_eq!(found.to_string(), text);
    }
    let found = Prefill::device(&context, every(case.spec, 64), 150, 1).expect_err("a refusal");
    assert_eq!(
        found.to_string(),
        "save: boundaries; it must be nothing: only lengths on the host say where rounds begin"
    );
}

//! What a launch does on the host: it calls the runtime's launches and nothing else, and allocates nothing. How long it
//! takes is measured by `benches/host.rs`.

mod allocations;
mod fake_collectives;
mod null_runtime;

use std::path::Path;
use std::time::Duration;

use deltawave::conv::{
    Conv, ConvDrafts, ConvInput, ConvSpec, ConvState, ConvStateLayout, ConvTensors,
};
use deltawave::decode::{Decode, DecodeSpec, DecodeTensors, Drafts, OutputNorm};
use deltawave::gate::Gate;
use deltawave::gates::Gating;
use deltawave::layer::{LayerSpec, LayerStates, LayerTensors, LayerWeights};
use deltawave::norm::{GatedNorm, OutputGate};
use deltawave::parallel::{Collectives, Communicator};
use deltawave::prefill::{ParallelPrefill, Prefill, RankLayout};
use deltawave::runtime::{Context, Stream};
use deltawave::state::StatePool;
use deltawave::types::StateLayout;
use deltawave::workspace::Workspace;

use allocations::allocations;
use null_runtime::{Layer, Shape, assert_only_launches, take_calls};

const SHAPES: [Shape; 3] = [
    Shape {
        key_heads: 16,
        value_heads: 32,
        tokens: 8192,
        sequences: 1,
    },
    Shape {
        key_heads: 2,
        value_heads: 8,
        tokens: 32768,
        sequences: 1,
    },
    Shape {
        key_heads: 4,
        value_heads: 16,
        tokens: 40000,
        sequences: 256,
    },
];

/// None, and a line that says why, in a build without kernels.
fn context() -> Option<Context> {
    if deltawave::code_objects::for_arch("gfx942").next().is_some() {
        return Some(null_runtime::context().expect("a context"));
    }
    let why = deltawave::code_objects::why_missing("gfx942");
    let required = std::env::var("DELTAWAVE_REQUIRE_KERNELS").is_ok_and(|v| v == "1");
    assert!(!required, "{why}");
    println!("skipped: {why}");
    None
}

/// One test, since the runtime counts the calls of all threads.
#[test]
fn launches_allocate_nothing_and_call_nothing_else() -> deltawave::Result<()> {
    assert!(allocations(|| drop(std::hint::black_box(vec![1u8]))) > 0);
    let Some(context) = context() else {
        return Ok(());
    };
    let stream = context.stream()?;
    for shape in SHAPES {
        let Shape {
            value_heads,
            tokens,
            sequences,
            ..
        } = shape;
        let cu_seqlens = shape.cu_seqlens();
        let plan = Prefill::packed(&context, shape.spec(), &cu_seqlens, tokens)?;
        let mut layer = Layer::new(&context, shape, plan.workspace_bytes())?;
        for raw_gates in [false, true] {
            let (tensors, workspace) = layer.parts(raw_gates)?;
            let mut launch = || plan.launch(&stream, &tensors, Workspace::new(workspace));
            launch()?; // looks the runtime's functions up
            take_calls();
            let what = format!("{value_heads} heads, {tokens} tokens, {sequences} sequences");
            let count = allocations(|| launch().expect("a launch"));
            assert_eq!(count, 0, "{what}");
            assert_only_launches(5, &what);
        }

        let lengths = context.upload(&cu_seqlens)?;
        let plan = Prefill::device(&context, shape.spec(), tokens, sequences)?;
        let mut layer = Layer::new(&context, shape, plan.workspace_bytes())?;
        let (mut tensors, workspace) = layer.parts(false)?;
        tensors.cu_seqlens = Some((&lengths).into());
        take_calls();
        let count = allocations(|| {
            plan.launch(&stream, &tensors, Workspace::new(workspace))
                .expect("a launch");
        });
        assert_eq!(count, 0, "lengths on the device");
        assert_only_launches(5, "lengths on the device");
    }

    for shape in SHAPES {
        shared_by_ranks(&context, &stream, shape)?;
    }

    let mut buffers: [_; 3] = std::array::from_fn(|_| context.alloc::<f32>(64 * 8));
    let [a, g, beta] = buffers.each_mut().map(|b| b.as_mut().expect("memory"));
    let gate = Gate {
        a: a.tensor([64, 8])?.into(),
        b: a.tensor([64, 8])?.into(),
        a_log: a.tensor([8])?,
        dt_bias: None,
        allow_neg_eigval: false,
        g: g.tensor_mut([64, 8])?.into(),
        beta: beta.tensor_mut([64, 8])?.into(),
    };
    take_calls();
    let count = allocations(|| gate.launch(&context, &stream).expect("a launch"));
    assert_eq!(count, 0, "gate");
    assert_only_launches(1, "gate");

    let spec = ConvSpec::new(1, 2, 16, 16);
    let [tokens, channels] = [64, spec.total_channels()];
    let mut buffers: [_; 5] =
        std::array::from_fn(|_| context.alloc::<half::bf16>(tokens * channels));
    let [x, state, q, k, v] = buffers.each_mut().map(|b| b.as_mut().expect("memory"));
    let slots = context.alloc::<i32>(2)?;
    let tensors = ConvTensors {
        cu_seqlens: None,
        x: ConvInput::flat(&x.tensor([tokens, channels])?, &spec)?,
        weight: x.tensor([channels, 4])?,
        bias: Some(x.tensor([channels])?),
        state: Some(ConvState {
            tensor: state.tensor_mut([2, channels, 3])?,
            layout: ConvStateLayout::ChannelMajor,
            has_initial_state: None,
        }),
        slots: Some((&slots).into()),
        q: q.tensor_mut([tokens, 1, 16])?.into(),
        k: k.tensor_mut([tokens, 1, 16])?.into(),
        v: v.tensor_mut([tokens, 2, 16])?.into(),
        gates: None,
    };
    let plan = Conv::packed(&context, spec, &[0, 40, 64], tokens)?;
    take_calls();
    let count = allocations(|| plan.launch(&stream, &tensors).expect("a launch"));
    assert_eq!(count, 0, "conv");
    assert_only_launches(1, "conv");
    let drafts = ConvDrafts {
        null_slot: Some(0),
        ..Default::default()
    };
    take_calls();
    let count = allocations(|| {
        let outcome = plan.launch_drafts(&stream, &tensors, &drafts);
        outcome.expect("a launch");
    });
    assert_eq!(count, 0, "conv of drafts");
    assert_only_launches(1, "conv of drafts");

    let mut buffers: [_; 4] = std::array::from_fn(|_| context.alloc::<half::bf16>(3 * 2 * 32));
    let [q, k, v, o] = buffers.each_mut().map(|b| b.as_mut().expect("memory"));
    let mut pool = context.alloc::<f32>(5 * 2 * 16 * 32)?;
    let slots = context.alloc::<i32>(3)?;
    let mut tensors = DecodeTensors {
        q: q.tensor([3, 1, 16])?.into(),
        k: k.tensor([3, 1, 16])?.into(),
        v: v.tensor([3, 2, 32])?.into(),
        gating: Gating::Given {
            g: None,
            beta: None,
        },
        pool: StatePool {
            tensor: pool.tensor_mut([5, 2, 16, 32])?,
            layout: StateLayout::KeyMajor,
            slots: Some((&slots).into()),
            write_slots: None,
        },
        has_initial_state: None,
        states: None,
        o: o.tensor_mut([3, 2, 32])?.into(),
    };
    let plan = Decode::new(&context, DecodeSpec::new(1, 2, 16, 32), 3)?;
    take_calls();
    let count = allocations(|| plan.launch(&stream, &tensors).expect("a launch"));
    assert_eq!(count, 0, "decode");
    assert_only_launches(1, "decode");
    let lengths = context.upload(&[0i32, 1, 2, 3])?;
    tensors.pool.slots = None;
    let drafts = Drafts {
        draft_slots: Some((&slots).into()),
        read_slots: Some((&slots).into()),
        accepted: Some((&slots).into()),
        cu_seqlens: Some((&lengths).into()),
        null_slot: Some(0),
    };
    take_calls();
    let count = allocations(|| {
        let outcome = plan.launch_drafts(&stream, &tensors, &drafts);
        outcome.expect("a launch");
    });
    assert_eq!(count, 0, "decode of drafts");
    assert_only_launches(1, "decode of drafts");

    let mut buffers: [_; 2] = std::array::from_fn(|_| context.alloc::<half::bf16>(3 * 2 * 32));
    let [z, y] = buffers.each_mut().map(|b| b.as_mut().expect("memory"));
    let norm = OutputNorm {
        z: z.tensor([3, 2, 32])?,
        weight: None,
        eps: 1e-6,
        gate: OutputGate::Silu,
    };
    take_calls();
    let count = allocations(|| {
        let outcome = plan.launch_normed(&stream, &tensors, Some(&drafts), &norm);
        outcome.expect("a launch");
    });
    assert_eq!(count, 0, "decode of drafts with a norm");
    assert_only_launches(2, "decode of drafts with a norm");
    let norm = GatedNorm {
        x: None,
        z: z.tensor([3, 2, 32])?,
        weight: None,
        eps: 1e-6,
        gate: OutputGate::Silu,
        y: y.tensor_mut([3, 2, 32])?.into(),
    };
    take_calls();
    let count = allocations(|| norm.launch(&context, &stream).expect("a launch"));
    assert_eq!(count, 0, "norm");
    assert_only_launches(1, "norm");
    layers(&context, &stream)
}

/// Two decodes and two prefills, whose lengths the host has, and then the device alone.
fn layers(context: &Context, stream: &Stream) -> deltawave::Result<()> {
    let spec = LayerSpec::new(1, 2, 16, 128);
    let (conv, cu_seqlens) = (spec.conv(), [0, 1, 2, 40, 64]);
    let [tokens, slots, channels] = [64, 5, conv.total_channels()];
    let columns = channels + 2 * 128;
    let x = context.alloc::<half::bf16>(tokens * columns)?;
    let x2 = x.tensor([tokens, columns])?;
    let weights = context.alloc::<half::bf16>(channels * 4)?;
    let gates = context.alloc::<f32>(tokens * 2)?;
    let mut conv_pool = context.alloc::<half::bf16>(slots * channels * 3)?;
    let mut pool = context.alloc::<f32>(slots * 2 * 16 * 128)?;
    let slots_of = context.alloc::<i32>(4)?;
    let mut y = context.alloc::<half::bf16>(tokens * 2 * 128)?;
    let mut tensors = LayerTensors {
        cu_seqlens: None,
        x: ConvInput::flat(&x2, &conv)?,
        z: ConvInput::flat_z(&x2, &conv)?,
        a: gates.tensor([tokens, 2])?.into(),
        b: gates.tensor([tokens, 2])?.into(),
        weights: LayerWeights {
            conv: weights.tensor([channels, 4])?,
            conv_bias: None,
            a_log: gates.tensor([2])?,
            dt_bias: Some(gates.tensor([2])?),
            norm: Some(gates.tensor([128])?),
        },
        states: LayerStates {
            conv: conv_pool.tensor_mut([slots, channels, 3])?,
            conv_layout: ConvStateLayout::ChannelMajor,
            recurrent: pool.tensor_mut([slots, 2, 16, 128])?,
            recurrent_layout: StateLayout::KeyMajor,
            slots: Some((&slots_of).into()),
            has_initial_state: None,
        },
        y: y.tensor_mut([tokens, 2, 128])?.into(),
    };
    let plan = deltawave::layer::Layer::packed(context, spec, &cu_seqlens, tokens, 2)?;
    let mut workspace = context.alloc::<u8>(plan.workspace_bytes())?;
    take_calls();
    let count = allocations(|| {
        let workspace = Workspace::new(&mut workspace);
        plan.launch(stream, &tensors, workspace).expect("a launch");
    });
    assert_eq!(count, 0, "layer");
    assert_only_launches(5, "layer");

    let plan = deltawave::layer::Layer::device(context, spec, tokens, 4, 2)?;
    let lengths = context.upload(&cu_seqlens)?;
    tensors.cu_seqlens = Some((&lengths).into());
    let mut workspace = context.alloc::<u8>(plan.workspace_bytes())?;
    take_calls();
    let count = allocations(|| {
        let workspace = Workspace::new(&mut workspace);
        let outcome = plan.launch(stream, &tensors, workspace);
        outcome.expect("a launch");
    });
    assert_eq!(count, 0, "layer with lengths on the device");
    assert_only_launches(7, "layer with lengths on the device");
    Ok(())
}

/// Both stages of a prefill that ranks share, and the call that does all steps through a library of collectives.
fn shared_by_ranks(context: &Context, stream: &Stream, shape: Shape) -> deltawave::Result<()> {
    let cu_seqlens = shape.cu_seqlens();
    let lengths: Vec<usize> = (cu_seqlens.windows(2))
        .map(|w| (w[1] - w[0]) as usize)
        .collect();
    let block = RankLayout::default_block(&lengths, shape.value_heads);
    let layout = RankLayout::zigzag(&lengths, block, 1)?;
    let plan = ParallelPrefill::new(context, shape.spec(), &layout, 0, shape.tokens)?;
    assert_eq!(layout.fragments(0).len(), shape.sequences);
    let mut layer = Layer::new(context, shape, plan.workspace_bytes())?;
    let (tensors, workspace) = layer.parts(true)?;
    let mut summary = context.alloc::<u8>(plan.summary_bytes())?;
    let mut gathered = context.alloc::<u8>(plan.gathered_bytes())?;
    let order = context.upload(plan.order())?;
    take_calls();
    let count = allocations(|| {
        let (summary, workspace) = (Workspace::new(&mut summary), Workspace::new(workspace));
        let launched = plan.summarise_launch(stream, &tensors, summary, workspace);
        launched.expect("the first stage");
    });
    assert_eq!(count, 0, "the first stage over ranks");
    assert_only_launches(2, "the first stage over ranks");
    for given in [false, true] {
        let count = allocations(|| {
            let order = given.then(|| (&order).into());
            let (all, workspace) = (Workspace::new(&mut gathered), Workspace::new(workspace));
            let launched = plan.finish_launch(stream, &tensors, all, order, workspace);
            launched.expect("the second stage");
        });
        assert_eq!(count, 0, "the second stage over ranks");
        assert_only_launches(3, "the second stage over ranks");
    }

    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let library = fake_collectives::compile(root, folder, "libhost_cost.so", "-O1");
    let Some(library) = library else {
        return Ok(());
    };
    let library = Collectives::load(context, Some(&library))?;
    let id = library.unique_id()?;
    let joined = Communicator::new(context, &library, id, 0, 1, Duration::from_secs(60))?;
    // The library copies what no kernel wrote: memory of the host, aligned as a workspace must be.
    let bytes = plan.summary_bytes();
    let mut memory = vec![0u8; 2 * (bytes + 256)];
    let first = memory.as_mut_ptr();
    let first = first.wrapping_add(first.align_offset(256));
    take_calls();
    let count = allocations(|| {
        // SAFETY: both halves lie in `memory`, and nothing else uses them.
        let halves = [first, first.wrapping_add(bytes.next_multiple_of(256))]
            .map(|address| unsafe { Workspace::from_raw(address.cast(), bytes) });
        let workspace = Workspace::new(workspace);
        let launched = joined.prefill(&plan, stream, &tensors, halves, workspace);
        launched.expect("all steps");
    });
    assert_eq!(count, 0, "all steps over ranks");
    for (name, _) in take_calls() {
        let allowed = ["hipSetDevice", "hipModuleLaunchKernel"];
        assert!(allowed.contains(&name), "all steps over ranks: {name}");
    }
    Ok(())
}

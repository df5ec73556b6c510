//! Launches the kernels that the command line does not count: gate, commit and prefill_lengths.
//!
//! `scripts/compare-compilers` runs it with `DELTAWAVE_SIM_PROFILE`, which collects counters and modelled times.
//! `cargo bench --bench small_kernels` alone shows that the launches succeed.

use std::error::Error;

use deltawave::batch::CuSeqlens;
use deltawave::commit::{Commit, CommitTensors};
use deltawave::decode::DecodeSpec;
use deltawave::gate::Gate;
use deltawave::gates::Gating;
use deltawave::prefill::{Prefill, PrefillSpec, PrefillTensors};
use deltawave::runtime::{Context, Stream};
use deltawave::state::States;
use deltawave::types::StateLayout;
use deltawave::workspace::Workspace;
use half::bf16;

type Outcome = Result<(), Box<dyn Error>>;

fn main() -> Outcome {
    let context = Context::simulator()?;
    let stream = context.stream()?;
    gate(&context, &stream)?;
    commit(&context, &stream)?;
    lengths(&context, &stream)?;
    println!("gate, commit and prefill_lengths were launched");
    Ok(())
}

/// g and beta of 8,192 tokens and 32 heads.
fn gate(context: &Context, stream: &Stream) -> Outcome {
    let shape @ [tokens, heads] = [8192, 32];
    let a = context.upload(&vec![bf16::ONE; tokens * heads])?;
    let bias = context.upload(&vec![0.5f32; heads])?;
    let mut g = context.alloc::<f32>(tokens * heads)?;
    let mut beta = context.alloc::<f32>(tokens * heads)?;
    let gate = Gate {
        a: a.tensor(shape)?.into(),
        b: a.tensor(shape)?.into(),
        a_log: bias.tensor([heads])?,
        dt_bias: Some(bias.tensor([heads])?),
        allow_neg_eigval: false,
        g: g.tensor_mut(shape)?.into(),
        beta: beta.tensor_mut(shape)?.into(),
    };
    gate.launch(context, stream)?;
    Ok(stream.synchronize()?)
}

/// One of two tokens accepted in each of 16 sequences, 32 heads of 128 by 128.
fn commit(context: &Context, stream: &Stream) -> Outcome {
    let (batch, tokens, heads, dim) = (16, 2, 32, 128);
    let spec = DecodeSpec {
        tokens,
        ..DecodeSpec::new(heads / 2, heads, dim, dim)
    };
    let accepted = context.upload(&vec![1i32; batch])?;
    let states = context.alloc::<f32>(batch * tokens * heads * dim * dim)?;
    let mut pool = context.alloc::<f32>(batch * heads * dim * dim)?;
    let tensors = CommitTensors {
        accepted: (&accepted).into(),
        slots: None,
        states: states.tensor([batch, tokens, heads, dim, dim])?,
        pool: pool.tensor_mut([batch, heads, dim, dim])?,
        layout: StateLayout::KeyMajor,
        conv: None,
    };
    Commit::new(context, spec, batch)?.launch(stream, &tensors)?;
    Ok(stream.synchronize()?)
}

/// A prefill whose plan does not know the lengths: 1,024 sequences of 4 tokens.
fn lengths(context: &Context, stream: &Stream) -> Outcome {
    let (sequences, length, dim) = (1024, 4, 16);
    let tokens = sequences * length;
    let plan = Prefill::device(context, PrefillSpec::new(1, 1, dim, dim), tokens, sequences)?;
    let starts: Vec<i32> = (0..=sequences).map(|i| (i * length) as i32).collect();
    let starts = context.upload(&starts)?;
    let q = context.upload(&vec![bf16::ONE; tokens * dim])?;
    let mut o = context.alloc::<bf16>(tokens * dim)?;
    let mut workspace = context.alloc::<u8>(plan.workspace_bytes())?;
    let shape = [tokens, 1, dim];
    let tensors = PrefillTensors {
        cu_seqlens: Some(CuSeqlens::I32((&starts).into())),
        q: q.tensor(shape)?.into(),
        k: q.tensor(shape)?.into(),
        v: q.tensor(shape)?.into(),
        gating: Gating::Given {
            g: None,
            beta: None,
        },
        states: States::None,
        o: o.tensor_mut(shape)?.into(),
        snapshots: None,
    };
    plan.launch(stream, &tensors, Workspace::new(&mut workspace))?;
    Ok(stream.synchronize()?)
}

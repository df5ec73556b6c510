//! A launch in a graph, replayed with other inputs. `cargo run --release --example 05-graph`
//!
//! A launch allocates nothing, waits for nothing and reads nothing back, so it can be captured. What a plan checked stays
//! as it was; what lies in the tensors may change from replay to replay.

use std::error::Error;

use deltawave::conv::{Activation, Conv, ConvInput, ConvSpec, ConvTensors};
use deltawave::norm::{GatedNorm, OutputGate};
use deltawave::runtime::{Backend, Context};
use half::bf16;

/// Runs the example.
pub fn main() -> Result<(), Box<dyn Error>> {
    let context = Context::new(Backend::Auto, 0)?;
    let stream = context.stream()?;
    let (tokens, dim) = (3, 16);
    let spec = ConvSpec {
        activation: Activation::None,
        ..ConvSpec::new(1, 1, dim, dim)
    };
    let columns = 4 * dim; // q | k | v | z
    let weights = [0.0, 0.0, 0.0, 1.0].map(bf16::from_f32);
    let weight = context.upload(&weights.repeat(3 * dim))?; // each token as it is
    let mut x = context.alloc::<bf16>(tokens * columns)?;
    let mut q = context.alloc::<bf16>(tokens * dim)?;
    let mut k = context.alloc::<bf16>(tokens * dim)?;
    let mut v = context.alloc::<bf16>(tokens * dim)?;

    // The convolution, then the norm of its v: two kernels, recorded instead of run.
    let plan = Conv::packed(&context, spec, &[0, tokens as i64], tokens)?;
    let shape = [tokens, 1, dim];
    let graph = stream.capture(|stream| {
        let projections = x.tensor([tokens, columns])?;
        let tensors = ConvTensors {
            cu_seqlens: None,
            x: ConvInput::flat(&projections, &spec)?,
            weight: weight.tensor([3 * dim, 4])?,
            bias: None,
            state: None,
            slots: None,
            q: q.tensor_mut(shape)?.into(),
            k: k.tensor_mut(shape)?.into(),
            v: v.tensor_mut(shape)?.into(),
            gates: None,
        };
        plan.launch(stream, &tensors)?;
        let norm = GatedNorm {
            x: None,
            z: ConvInput::flat_z(&projections, &spec)?,
            weight: None,
            eps: 1e-6,
            gate: OutputGate::Sigmoid,
            y: v.tensor_mut(shape)?.into(),
        };
        norm.launch(&context, stream)
    })?;

    for z in [0.0, 40.0] {
        let rows: Vec<bf16> = (0..tokens * columns)
            .map(|i| bf16::from_f32(if i % columns < 3 * dim { 3.0 } else { z }))
            .collect();
        x.write(&rows)?;
        // SAFETY: the plan and all buffers that were captured are alive.
        unsafe { graph.launch(&stream)? };
        let v = v.download(&stream)?;
        println!("z = {z}: {}", v[0]);
        let wanted = bf16::from_f32(if z == 0.0 { 0.5 } else { 1.0 });
        assert!(v.iter().all(|x| *x == wanted));
    }
    Ok(())
}

//! The gated norm after prefill, in place, with z where the projections have it. `cargo run --release --example 04-norm`

use std::error::Error;

use deltawave::conv::{ConvInput, ConvSpec};
use deltawave::norm::{GatedNorm, OutputGate};
use deltawave::runtime::{Backend, Context};
use half::bf16;

/// Runs the example.
pub fn main() -> Result<(), Box<dyn Error>> {
    let context = Context::new(Backend::Auto, 0)?;
    let stream = context.stream()?;
    let (tokens, heads, dim) = (2, 2, 16);
    let spec = ConvSpec::new(heads, heads, dim, dim);

    // Rows `q | k | v | z` of the projections, of which only z is read. z is 0 for the first token, large for the second.
    let columns = spec.total_channels() + heads * dim;
    let z = |i: usize| bf16::from_f32(if i < columns { 0.0 } else { 40.0 });
    let projections: Vec<bf16> = (0..tokens * columns).map(z).collect();
    let projections = context.upload(&projections)?;
    let projections = projections.tensor([tokens, columns])?;

    // Outputs of prefill: any two numbers in turn.
    let outputs: Vec<bf16> = (0..tokens * heads * dim)
        .map(|i| bf16::from_f32([1.0, 7.0][i % 2]))
        .collect();
    let mut o = context.upload(&outputs)?;
    let weight = context.upload(&vec![1.0f32; dim])?;

    let norm = GatedNorm {
        x: None, // y, in place
        z: ConvInput::flat_z(&projections, &spec)?,
        weight: Some(weight.tensor([dim])?),
        eps: 1e-6,
        gate: OutputGate::Sigmoid,
        y: o.tensor_mut([tokens, heads, dim])?.into(),
    };
    norm.launch(&context, &stream)?;

    // The root of the mean of the squares is 5, and the sigmoid of z is 1/2, then 1.
    let o = o.download(&stream)?;
    let (half, whole) = (&o[..2], &o[heads * dim..heads * dim + 2]);
    println!("1 and 7 become {half:?} where z is 0, {whole:?} where it is large");
    assert_eq!(half, [0.1, 0.7].map(bf16::from_f32));
    assert_eq!(whole, [0.2, 1.4].map(bf16::from_f32));
    Ok(())
}

//! The convolution before prefill, and the pool of its states. `cargo run --release --example 03-conv`
//!
//! A projection gives rows `q | k | v | z`. The convolution runs over the tokens of each channel of q, k and v, and writes
//! the three apart. Here its weights make every output the token two before, so that one can see where it comes from: from
//! the sequence, or from the conv state that an earlier call left in a slot of the pool.

use std::error::Error;

use deltawave::conv::{
    Activation, Conv, ConvInput, ConvSpec, ConvState, ConvStateLayout, ConvTensors,
};
use deltawave::runtime::{Backend, Context};
use half::bf16;

/// Runs the example.
pub fn main() -> Result<(), Box<dyn Error>> {
    let context = Context::new(Backend::Auto, 0)?;
    let stream = context.stream()?;
    let (heads, dim) = (2, 4);
    let spec = ConvSpec {
        activation: Activation::None, // layers have SiLU
        ..ConvSpec::new(heads, heads, dim, dim)
    };
    let channels = spec.total_channels(); // q, k and v
    let columns = channels + heads * dim; // and z

    // Weights [channels, 4], the newest token's last: only the third newest counts.
    let weights = [0.0, 1.0, 0.0, 0.0].map(bf16::from_f32).repeat(channels);
    let weight = context.upload(&weights)?;

    // A pool of two slots, three tokens each: [slots, channels, 3]. Slot 1 is ours; what was in it is not to be used.
    let mut pool = context.upload(&vec![bf16::NAN; 2 * channels * 3])?;
    let slots = context.upload(&[1])?;

    // A prompt of five tokens, then one token after the other, as in decoding. Token t is all t + 1.
    let mut seen = Vec::new();
    let calls = [(0..5, false), (5..6, true), (6..7, true)];
    for (tokens, goes_on) in calls {
        let n = tokens.len();
        let rows: Vec<bf16> = (tokens.start * columns..tokens.end * columns)
            .map(|i| bf16::from_f32((i / columns + 1) as f32))
            .collect();
        let x = context.upload(&rows)?;
        let has_initial_state = context.upload(&[u8::from(goes_on)])?;
        let mut q = context.alloc::<bf16>(n * heads * dim)?;
        let mut k = context.alloc::<bf16>(n * heads * dim)?;
        let mut v = context.alloc::<bf16>(n * heads * dim)?;
        let shape = [n, heads, dim];
        let tensors = ConvTensors {
            cu_seqlens: None,
            x: ConvInput::flat(&x.tensor([n, columns])?, &spec)?,
            weight: weight.tensor([channels, 4])?,
            bias: None,
            state: Some(ConvState {
                tensor: pool.tensor_mut([2, channels, 3])?,
                layout: ConvStateLayout::ChannelMajor,
                has_initial_state: Some((&has_initial_state).into()),
            }),
            slots: Some((&slots).into()),
            q: q.tensor_mut(shape)?.into(),
            k: k.tensor_mut(shape)?.into(),
            v: v.tensor_mut(shape)?.into(),
            gates: None,
        };
        let plan = Conv::packed(&context, spec, &[0, n as i64], n)?;
        plan.launch(&stream, &tensors)?;
        let v = v.download(&stream)?;
        let v: Vec<f32> = v.iter().step_by(heads * dim).map(|x| x.to_f32()).collect();
        println!("tokens {tokens:?}: v = {v:?}");
        seen.extend(v);
    }
    assert_eq!(seen, [0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);

    let pool = pool.download(&stream)?;
    let state = &pool[channels * 3..channels * 3 + 3];
    println!("slot 1 holds the last three tokens: {state:?}");
    assert_eq!(state, [5.0, 6.0, 7.0].map(bf16::from_f32));
    assert!(pool[..channels * 3].iter().all(|x| x.is_nan()));
    println!("slot 0 is as it was");
    Ok(())
}

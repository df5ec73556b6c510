//! Decode: a token of each sequence at a time, in place on a pool. `cargo run --release --example 08-decode`
//!
//! Two sequences store numbers in their states, as in `01-prefill`, one launch after the other; a third row of the batch is
//! padding, as in a batch that is captured in a graph for three.

use std::error::Error;

use deltawave::decode::{Decode, DecodeSpec, DecodeTensors};
use deltawave::gates::Gating;
use deltawave::runtime::{Backend, Context};
use deltawave::state::StatePool;
use deltawave::types::StateLayout;
use half::bf16;

const DIM: usize = 16;
const BATCH: usize = 3;

/// Runs the example.
pub fn main() -> Result<(), Box<dyn Error>> {
    let context = Context::new(Backend::Auto, 0)?;
    let stream = context.stream()?;
    let spec = DecodeSpec {
        scale: Some(1.0),
        ..DecodeSpec::new(1, 1, DIM, DIM)
    };
    let plan = Decode::new(&context, spec, BATCH)?;

    // Slots 3 and 1 of a pool of four; a negative slot is none.
    let mut pool = context.upload(&[0f32; 4 * DIM * DIM])?;
    let slots = context.upload(&[3, 1, -1])?;
    let mut o = context.alloc::<bf16>(BATCH * DIM)?;

    // Of each step: the key, what sequence 0 and what sequence 1 store under it, and whether they do.
    let steps = [
        (0, [1.0, 10.0], 1.0f32),
        (5, [2.0, 20.0], 1.0),
        (0, [0.0, 0.0], 0.0),
    ];
    let mut read = Vec::new();
    for (key, values, strength) in steps {
        let row = (0..DIM).map(|i| bf16::from_f32(f32::from(u8::from(i == key))));
        let keys: Vec<bf16> = row.collect::<Vec<_>>().repeat(BATCH);
        let values = [values[0], values[1], f32::NAN].map(|v| [bf16::from_f32(v); DIM]);
        let k = context.upload(&keys)?;
        let v = context.upload(&values.concat())?;
        let beta = context.upload(&[strength; BATCH])?;
        let shape = [BATCH, 1, DIM]; // [tokens, heads, dim]
        let tensors = DecodeTensors {
            q: k.tensor(shape)?.into(),
            k: k.tensor(shape)?.into(),
            v: v.tensor(shape)?.into(),
            gating: Gating::Given {
                g: None, // no decay
                beta: Some(beta.tensor([BATCH, 1])?.into()),
            },
            pool: StatePool {
                tensor: pool.tensor_mut([4, 1, DIM, DIM])?,
                layout: StateLayout::KeyMajor,
                slots: Some((&slots).into()),
                write_slots: None, // where they were read
            },
            has_initial_state: None,
            states: None,
            o: o.tensor_mut(shape)?.into(),
        };
        plan.launch(&stream, &tensors)?;
        let o = o.download(&stream)?;
        let rows: Vec<f32> = o.iter().step_by(DIM).map(|x| x.to_f32()).collect();
        println!("key {key}: {rows:?}");
        read.push(rows);
    }
    assert_eq!(read, [[1.0, 10.0, 0.0], [2.0, 20.0, 0.0], [1.0, 10.0, 0.0]]);

    let pool = pool.download(&stream)?;
    let under = |slot: usize, key: usize| pool[(slot * DIM + key) * DIM];
    println!(
        "slot 3 holds {} and {}, slot 1 {} and {}",
        under(3, 0),
        under(3, 5),
        under(1, 0),
        under(1, 5)
    );
    assert_eq!(
        [under(3, 0), under(3, 5), under(1, 0), under(1, 5)],
        [1.0, 2.0, 10.0, 20.0]
    );
    assert!(pool[..DIM * DIM].iter().all(|x| *x == 0.0));
    Ok(())
}

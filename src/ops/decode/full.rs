//! Arguments of `decode_full` and `decode_few`: those of `decode` with offsets of 32 bits.

use crate::abi::{
    DWK_ALIGNED, dwk_decode_args, dwk_decode_full_args, dwk_state_steps, dwk_state_strides,
    dwk_token_steps, dwk_token_strides,
};

/// Elements that a tensor with offsets of 32 bits may span.
const MOST: i128 = 1 << 31;

/// The arguments, if all rows begin at multiples of 16 bytes and all tensors have offsets of 32 bits.
pub(super) fn arguments(x: &dwk_decode_args) -> Option<dwk_decode_full_args> {
    if x.flags & DWK_ALIGNED == 0 {
        return None;
    }
    let [key_heads, value_heads, key_dim, value_dim, batch, tokens] = [
        x.key_heads,
        x.value_heads,
        x.key_dim,
        x.value_dim,
        x.batch,
        x.tokens,
    ]
    .map(i128::from);
    let rows = batch * tokens;
    let token_steps = |strides: &dwk_token_strides, heads: i128, dim: i128| {
        let last = (batch - 1) * i128::from(strides.sequence)
            + (rows - 1) * i128::from(strides.token)
            + (heads - 1) * i128::from(strides.head);
        (last + dim <= MOST).then_some(dwk_token_steps {
            sequence: strides.sequence as u32,
            token: strides.token as u32,
            head: strides.head as u32,
        })
    };
    let state_steps = |strides: &dwk_state_strides| {
        // There are no more rows, and no more columns, than the greater of K and V.
        let dim = key_dim.max(value_dim);
        let last =
            (value_heads - 1) * i128::from(strides.head) + (dim - 1) * i128::from(strides.row);
        (last + dim <= MOST).then_some(dwk_state_steps {
            sequence: strides.sequence.try_into().ok()?,
            head: strides.head as u32,
            row: strides.row as u32,
        })
    };
    let of_heads =
        |stride: i64| ((value_heads - 1) * i128::from(stride) < MOST).then_some(stride as u32);
    Some(dwk_decode_full_args {
        by_slabs: x.by_slabs,
        by_value_heads: x.by_value_heads,
        by_key_heads: x.by_key_heads,
        slabs: x.slabs,
        value_heads: x.value_heads,
        key_heads: x.key_heads,
        tokens: x.tokens,
        flags: x.flags,
        slot_count: x.slot_count,
        slots: x.slots,
        write_slots: x.write_slots,
        has_initial_state: x.has_initial_state,
        g: x.g,
        beta: x.beta,
        g_type: x.g_type,
        beta_type: x.beta_type,
        a_log_type: x.a_log_type,
        dt_bias_type: x.dt_bias_type,
        state_type: x.state_type,
        scale: x.scale,
        g_strides: token_steps(&x.g_strides, value_heads, 1)?,
        beta_strides: token_steps(&x.beta_strides, value_heads, 1)?,
        a_log: x.a_log,
        dt_bias: x.dt_bias,
        a_log_stride: of_heads(x.a_log_stride)?,
        dt_bias_stride: of_heads(x.dt_bias_stride)?,
        q: x.q,
        k: x.k,
        v: x.v,
        state: x.state,
        q_strides: token_steps(&x.q_strides, key_heads, key_dim)?,
        k_strides: token_steps(&x.k_strides, key_heads, key_dim)?,
        v_strides: token_steps(&x.v_strides, value_heads, value_dim)?,
        state_strides: state_steps(&x.state_strides)?,
        o: x.o,
        states: x.states,
        o_strides: token_steps(&x.o_strides, value_heads, value_dim)?,
        states_strides: state_steps(&x.states_strides)?,
        states_token: x.states_token.try_into().ok()?,
        states_type: x.states_type,
        batch: x.batch,
        dies: x.dies,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(token: i64, sequence: i64) -> dwk_decode_args {
        let strides = dwk_token_strides {
            sequence,
            token,
            head: 128,
        };
        dwk_decode_args {
            batch: 3,
            tokens: 2,
            key_heads: 1,
            value_heads: 2,
            key_dim: 128,
            value_dim: 128,
            flags: DWK_ALIGNED,
            q_strides: strides,
            ..Default::default()
        }
    }

    #[test]
    fn tensors_of_2_31_elements_fit_and_larger_ones_do_not() {
        let fits = |token, sequence| arguments(&of(token, sequence)).is_some();
        // The last of six rows begins at five times the stride.
        let most = ((1 << 31) - 128) / 5;
        assert!(fits(most, 0) && !fits(most + 1, 0));
        // A batch stride below the tokens' is a negative stride of sequences.
        assert!(fits(1 << 29, -(2 << 29) + 128) && !fits(1 << 29, 128));
        let steps = arguments(&of(1 << 29, -(2 << 29) + 128)).unwrap().q_strides;
        let offset = |s: u32, row: u32| {
            let of_row = row.wrapping_mul(steps.token);
            s.wrapping_mul(steps.sequence).wrapping_add(of_row)
        };
        assert_eq!(offset(2, 5), 256 + (1 << 29));
    }

    #[test]
    fn states_of_a_slot_span_at_most_2_31_elements() {
        let with = |sequence, head| {
            let strides = dwk_state_strides {
                sequence,
                head,
                row: 128,
            };
            arguments(&dwk_decode_args {
                state_strides: strides,
                ..of(256, 0)
            })
            .is_some()
        };
        assert!(with((1 << 32) - 1, 1 << 20) && !with(1 << 32, 1 << 20));
        assert!(with(1 << 20, (1 << 31) - (128 << 7)) && !with(1 << 20, 1 << 31));
    }

    #[test]
    fn rows_without_alignment_have_no_such_arguments() {
        assert!(
            arguments(&dwk_decode_args {
                flags: 0,
                ..of(256, 0)
            })
            .is_none()
        );
    }
}

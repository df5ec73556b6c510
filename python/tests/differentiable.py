"""The gated delta rule in torch, token after token, in the type of its inputs: autograd differentiates it in double
precision."""

import torch


def unit(rows):
    """Rows divided by their norms, as the kernels do it."""
    return rows / (rows.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def gates(a, b, a_log, dt_bias=None, most=1.0):
    """g and beta of raw gates."""
    shifted = a if dt_bias is None else a + dt_bias
    return -a_log.exp() * torch.nn.functional.softplus(shifted), most * b.sigmoid()


def gated_delta_rule(q, k, v, g, beta, initial_state=None, cu_seqlens=None, scale=None, state_v_first=False):
    """o `[B, T, HV, V]` and final states `[N, HV, K, V]` of q, k `[B, T, H, K]`. With cu_seqlens B is 1."""
    group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, 2) for x in (q, k))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    rows = [q, k, v, g, beta]
    if cu_seqlens is None:
        count, parts = len(q), [rows]
    else:
        count, parts = len(cu_seqlens) - 1, [[x[:, i:j] for x in rows] for i, j in zip(cu_seqlens, cu_seqlens[1:])]
    if initial_state is None:
        initial_state = q.new_zeros(count, v.shape[2], q.shape[-1], v.shape[-1])
    elif state_v_first:
        initial_state = initial_state.transpose(2, 3)
    outputs, states = [], []
    for state, part in zip(initial_state.split(len(parts[0][0])), parts):
        for query, key, value, decay, rate in zip(*(x.unbind(1) for x in part)):
            state = decay.exp()[..., None, None] * state
            error = value - torch.einsum("bhkv,bhk->bhv", state, key)
            state = state + torch.einsum("bhk,bhv->bhkv", key, rate[..., None] * error)
            outputs.append(scale * torch.einsum("bhkv,bhk->bhv", state, query))
        states.append(state)
    final = torch.cat(states)
    return torch.stack(outputs, 1), final.transpose(2, 3) if state_v_first else final

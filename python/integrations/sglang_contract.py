"""deltawave's kernels in SGLang's own classes: the plugin's hook, the dispatcher, and extend, decode and target_verify through
it, against the recurrence in double precision. SGLang's engine does not start without its native kernels."""

import importlib.metadata
import types
from unittest import mock

import torch
import torch.nn.functional as F

import deltawave.sglang

HK, HV, K, V = 2, 4, 32, 32


def exact(q, k, v, g, beta, states, lengths):
    """o `[T, HV, V]` and states `[N, HV, V, K]`, in float64, of normed q and k."""
    heads = [h // (HV // HK) for h in range(HV)]
    q, k = (F.normalize(x.double(), dim=-1, eps=1e-6)[:, heads] for x in (q, k))
    o, states = torch.zeros(v.shape, dtype=torch.float64), states.double().clone()
    for n, (begin, end) in enumerate(zip(lengths, lengths[1:])):
        for t in range(begin, end):
            states[n] *= g[t].double().exp()[:, None, None]
            delta = beta[t].double()[:, None] * (v[t].double() - torch.einsum("hk,hvk->hv", k[t], states[n]))
            states[n] += delta[:, :, None] * k[t][:, None, :]
            o[t] = K ** -0.5 * torch.einsum("hk,hvk->hv", q[t], states[n])
    return o, states


def close(found, wanted, bar):
    error = ((found.double() - wanted).pow(2).mean() / wanted.pow(2).mean()).sqrt().item()
    assert error < bar, error
    return error


def dispatcher(verify):
    """SGLang's dispatcher, made as with --linear-attn-backend deltawave."""
    from sglang.srt.layers.attention.linear import gdn_backend
    from sglang.srt.layers.attention.linear.utils import LinearAttnKernelBackend
    from sglang.srt.plugins import load_plugins

    load_plugins()
    assert deltawave.sglang._registered, "SGLang did not find the entry point: pip install ./python"
    mamba = types.SimpleNamespace(linear_attn_backend="deltawave", linear_attn_decode_backend=None,
                                  linear_attn_prefill_backend=None, linear_attn_verify_backend=verify)
    chosen = LinearAttnKernelBackend("deltawave")
    assert chosen.is_custom()
    with mock.patch("sglang.srt.runtime_context.get_exec", lambda: types.SimpleNamespace(mamba=mamba)):
        return gdn_backend.GDNKernelDispatcher(chosen, chosen, LinearAttnKernelBackend(verify))


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    made = dispatcher("deltawave")
    names = [type(x).__name__ for x in (made.decode_kernel, made.extend_kernel, made.verify_kernel, made.tree_verify_kernel)]
    assert names == ["DeltawaveGDNKernel"] * 3 + ["TritonGDNKernel"], names
    assert made.supports_packed_decode and type(dispatcher("triton").verify_kernel).__name__ == "TritonGDNKernel"

    lengths = [0, 30, 100]
    q, k = (torch.randn(1, 100, HK, K).bfloat16() for _ in range(2))
    v, g, beta = torch.randn(1, 100, HV, V).bfloat16(), -torch.rand(1, 100, HV), torch.rand(1, 100, HV)
    pool = torch.randn(5, HV, V, K)
    before, slots = pool.clone(), torch.tensor([2, 4], dtype=torch.int32)
    track, chunks = torch.empty(2, HV, V, K), torch.tensor([-1, 1], dtype=torch.int32)
    o, _, _ = made.extend(q, k, v, g, beta, ssm_states=pool, cache_indices=slots,
                          query_start_loc=torch.tensor(lengths, dtype=torch.int32), track_state=track, track_chunk_idx=chunks)
    wanted, states = exact(q[0], k[0], v[0], g[0], beta[0], before[[2, 4]], lengths)
    errors = {"extend": close(o[0], wanted, 8e-3), "states": close(pool[[2, 4]], states, 8e-3)}
    rows = slice(30, 94)
    _, part = exact(q[0, rows], k[0, rows], v[0, rows], g[0, rows], beta[0, rows], before[[4]], [0, 64])
    errors["tracked state"] = close(track[1], part[0], 8e-3)
    assert torch.equal(track[0], before[2])

    a_log, bias = torch.rand(HV), torch.rand(HV)
    a, b = torch.randn(2, HV).bfloat16(), torch.randn(2, HV).bfloat16()
    raw = [-a_log.exp() * F.softplus(a.float() + bias), b.float().sigmoid()]
    before = pool.clone()
    given = {"A_log": a_log, "dt_bias": bias, "ssm_states": pool, "cache_indices": slots, "query_start_loc": None}
    o = made.decode(q[:, :2], k[:, :2], v[:, :2], a, b, **given)
    wanted, states = exact(q[0, :2], k[0, :2], v[0, :2], *raw, before[[2, 4]], [0, 1, 2])
    errors["decode"] = close(o[0], wanted, 8e-3)
    close(pool[[2, 4]], states, 1e-5)
    again = before.clone()
    mixed = torch.cat([x[0, :2].flatten(1) for x in (q, k, v)], 1)
    packed = made.packed_decode(mixed, a, b, **{**given, "ssm_states": again}, scale=K ** -0.5, num_v_heads=HV, head_v_dim=V)
    assert torch.equal(packed, o) and torch.equal(again, pool)

    a, b = torch.randn(6, HV).bfloat16(), torch.randn(6, HV).bfloat16()
    raw = [-a_log.exp() * F.softplus(a.float() + bias), b.float().sigmoid()]
    buffer, before = torch.zeros(8, 3, HV, V, K), pool.clone()
    o = made.target_verify(q=q[:, :6], k=k[:, :6], v=v[:, :6], a=a, b=b,
                           **{**given, "query_start_loc": torch.tensor([0, 3, 6], dtype=torch.int32)},
                           intermediate_states_buffer=buffer, intermediate_state_indices=torch.arange(8, dtype=torch.int32),
                           cache_steps=3, retrieve_parent_token=None, stable_rows=False)
    wanted, states = exact(q[0, :6], k[0, :6], v[0, :6], *raw, before[[2, 4]], [0, 3, 6])
    errors["verify"] = close(o[0], wanted, 8e-3)
    close(buffer[:2, 2], states, 1e-5)
    assert torch.equal(pool, before)
    # Rows of requests, as with stable rows, and sequences of different lengths.
    buffer = torch.zeros(8, 4, HV, V, K)
    ragged = made.target_verify(q=q[:, :5], k=k[:, :5], v=v[:, :5], a=a[:5], b=b[:5],
                                **{**given, "query_start_loc": torch.tensor([0, 3, 5], dtype=torch.int32)},
                                intermediate_states_buffer=buffer, cache_steps=3, retrieve_parent_token=None,
                                intermediate_state_indices=torch.tensor([6, 1], dtype=torch.int32), stable_rows=True)
    assert torch.equal(ragged[0], o[0, :5])
    _, states = exact(q[0, :5], k[0, :5], v[0, :5], raw[0][:5], raw[1][:5], before[[2, 4]], [0, 3, 5])
    errors["rows of requests"] = close(torch.stack([buffer[6, 2], buffer[1, 1]]), states, 1e-5)
    assert not buffer[:, 3].any() and not buffer[[0, 2, 3, 4, 5, 7]].any() and torch.equal(pool, before)
    release = importlib.metadata.version("sglang")
    print(f"sglang {release}: relative errors " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))


if __name__ == "__main__":
    main()

"""The operations in NumPy and double precision, token after token."""

from .common import np


def l2_normalised(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gates(a, b, a_log, dt_bias, allow_neg_eigval=False):
    """g and beta."""
    return -np.exp(a_log) * np.logaddexp(0, a + dt_bias), sigmoid(b) * (2 if allow_neg_eigval else 1)


def prefill(q, k, v, g, beta, cu_seqlens, states, scale, tiled=False):
    """o `[T, HV, V]` and the final states `[N, HV, K, V]`, of the initial ones."""
    key_heads, value_heads = k.shape[1], v.shape[1]
    heads = np.arange(value_heads)
    heads = heads % key_heads if tiled else heads // (value_heads // key_heads)
    o, states = np.zeros(v.shape), np.array(states, dtype=np.float64)
    for state, begin, end in zip(states, cu_seqlens, cu_seqlens[1:]):
        for t in range(begin, end):
            key, query = k[t, heads], q[t, heads]
            state *= np.exp(g[t])[:, None, None]
            delta = beta[t][:, None] * (v[t] - np.einsum("hk,hkv->hv", key, state))
            state += key[:, :, None] * delta[:, None, :]
            o[t] = scale * np.einsum("hk,hkv->hv", query, state)
    return o, states


def conv(x, weight, bias, cu_seqlens, states, silu=True):
    """y `[T, channels]` and the states `[N, channels, columns]` afterwards, of those before."""
    y, states = np.zeros(x.shape), np.array(states, dtype=np.float64)
    width, columns = weight.shape[1], states.shape[2]
    for n, (begin, end) in enumerate(zip(cu_seqlens, cu_seqlens[1:])):
        seen = np.concatenate([states[n].T, x[begin:end]])
        for t in range(end - begin):
            last = columns + t + 1
            y[begin + t] = bias + (weight.T * seen[last - width:last]).sum(0)
        states[n] = seen[len(seen) - columns:].T
    return (y * sigmoid(y) if silu else y), states


def layer(x, z, a, b, conv_weight, conv_bias, a_log, dt_bias, norm_weight, cu_seqlens, conv_states, states, eps=1e-6):
    """y `[T, HV, V]`, and both states afterwards, of a layer with l2 norms and SiLU."""
    value_heads, key_dim, value_dim = states.shape[1:]
    rows, conv_states = conv(x, conv_weight, conv_bias, cu_seqlens, conv_states)
    keys = (rows.shape[1] - value_heads * value_dim) // 2
    q, k = (l2_normalised(part.reshape(len(x), -1, key_dim)) for part in (rows[:, :keys], rows[:, keys:2 * keys]))
    v = rows[:, 2 * keys:].reshape(len(x), value_heads, value_dim)
    g, beta = gates(a, b, a_log, dt_bias)
    o, states = prefill(q, k, v, g, beta, cu_seqlens, states, key_dim ** -0.5)
    y = o / np.sqrt((o * o).mean(-1, keepdims=True) + eps) * norm_weight * z * sigmoid(z)
    return y, conv_states, states


def error(found, wanted):
    """rms of the difference over rms of what is wanted."""
    found, wanted = np.asarray(found, dtype=np.float64), np.asarray(wanted)
    return np.sqrt(((found - wanted) ** 2).sum() / (wanted ** 2).sum())
